"""`runs/<run>/summary.json`: what a run came to, in numbers a script can read."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path

from gorila.config import Config
from gorila.run_progress import RunProgress
from gorila.scores import human_normalised


@dataclass(frozen=True)
class Summary:
    """Keys and units as documented in docs/metrics.md; None where a thing was not measured."""

    run: str
    preset: str
    seed: int
    solved: bool
    eval_return_mean: float | None
    eval_episodes: int
    env_steps: int
    updates: int
    train_wall_s: float | None
    startup_s: float | None
    samples_per_insert: float | None
    staleness_p50: float | None
    staleness_p99: float | None
    round_trip_ms_p50: float | None
    bytes_per_transition: float | None
    dead_letters: int
    restarts: int
    human_normalised_score: float | None
    human_normalised_table: str | None
    human_normalised_protocol: str | None
    eval_weights_version: int | None
    weights_version: int | None
    ended_because: str
    parts: int

    def write(self, folder: Path) -> Path:
        """As JSON; returns the path."""
        path = folder / "summary.json"
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")
        return path


def _rounded(value: float | None, digits: int) -> float | None:
    return None if value is None else round(value, digits)


def summarise(
    run: str,
    config: Config,
    progress: RunProgress,
    *,
    first_step_ms: int | None,
    started_ms: int,
    ended_ms: int,
    bytes_per_transition: float | None,
    dead_letters: int,
    restarts: int,
    weights_version: int | None,
    ended_because: str,
    parts: int = 1,
    earlier_s: float = 0.0,
) -> Summary:
    """train_wall_s runs from the first environment step (without actors: the first batch) to the end of confirmation (or of the run, when not solved).

    Of a resumed run `first_step_ms` and `started_ms` are of the newest of its `parts`; `earlier_s` is what the parts before took.
    """
    result = progress.result
    score = human_normalised(config.env.id, result.return_mean) if result else None
    end_ms = progress.solved_at_ms or ended_ms
    return Summary(
        run=run,
        preset=config.run.preset,
        seed=config.run.seed,
        solved=progress.solved,
        eval_return_mean=_rounded(result.return_mean, 3) if result else None,
        eval_episodes=result.episodes if result else 0,
        env_steps=progress.env_steps,
        updates=progress.updates,
        train_wall_s=_rounded(earlier_s + (end_ms - first_step_ms) / 1000, 2) if first_step_ms else None,
        startup_s=_rounded((first_step_ms - started_ms) / 1000, 2) if first_step_ms else None,
        samples_per_insert=_rounded(progress.samples / progress.env_steps, 3) if progress.env_steps else None,
        staleness_p50=progress.staleness_percentile(50),
        staleness_p99=progress.staleness_percentile(99),
        round_trip_ms_p50=_rounded(progress.round_trip_ms_p50, 2),
        bytes_per_transition=_rounded(bytes_per_transition, 1),
        dead_letters=dead_letters,
        restarts=restarts,
        human_normalised_score=_rounded(score.value, 4) if score else None,
        human_normalised_table=score.table if score else None,
        human_normalised_protocol=score.protocol if score else None,
        eval_weights_version=result.weights_version if result else None,
        weights_version=weights_version,
        ended_because=ended_because,
        parts=parts,
    )


def restarts_before(folder: Path | None) -> int:
    """Restarts in the parts before, as the summary they left says; 0 where they left none."""
    try:
        return int(json.loads((folder / "summary.json").read_text())["restarts"]) if folder is not None else 0
    except (OSError, ValueError, KeyError, TypeError):
        return 0
