"""Several seeds of one preset: the table, and the mean with its interval."""

from __future__ import annotations

import math
import statistics

from rich.console import Console
from rich.table import Table

from gorila.local.summary import Summary

# Two-sided 95 % quantiles of Student's t by degrees of freedom 1..10; beyond that the normal's is near enough.
_T95 = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262, 2.228)


def mean_and_interval(values: list[float]) -> tuple[float, float]:
    """(mean, half width of the 95 % confidence interval); the half width is NaN for fewer than two values."""
    if len(values) < 2:
        return (values[0] if values else math.nan), math.nan
    freedom = len(values) - 1
    quantile = _T95[freedom - 1] if freedom <= len(_T95) else 1.96
    return statistics.mean(values), quantile * statistics.stdev(values) / math.sqrt(len(values))


def print_seeds(summaries: list[Summary]) -> None:
    """One row a seed, then mean ± interval."""
    table = Table(title=f"{summaries[0].preset}: {len(summaries)} seeds")
    for column in ("seed", "solved", "evaluation return", "updates", "environment steps", "wall s"):
        table.add_column(column, justify="right")
    for s in summaries:
        table.add_row(
            str(s.seed),
            "yes" if s.solved else "no",
            f"{s.eval_return_mean}",
            f"{s.updates:,}",
            f"{s.env_steps:,}",
            f"{s.train_wall_s}",
        )
    console = Console()
    console.print(table)
    for name in ("eval_return_mean", "updates", "train_wall_s"):
        mean, half = mean_and_interval([float(v) for s in summaries if (v := getattr(s, name)) is not None])
        console.print(f"{name}: {mean:.1f} ± {half:.1f} (95 % interval)")
