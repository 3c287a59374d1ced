"""What `gorila replay inspect` prints, and its contact sheet."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any, TextIO

import numpy as np
from rich.console import Console
from rich.table import Table

from gorila.errors import LocalError, UsageError
from gorila.inspected import InspectedRow, Inspection

COLUMNS = (
    "partition",
    "offset",
    "row",
    "actor",
    "lane",
    "step",
    "action",
    "n_step_return",
    "steps",
    "version",
    "priority",
    "probability",
)
MAX_SHEET = 100
_FORMS = {"n_step_return": "{:.4g}", "priority": "{:.4g}", "probability": "{:.3g}"}


def show(found: Inspection, as_json: bool, out: TextIO) -> None:
    """A table on a terminal, aligned lines elsewhere; with `as_json` one object a row and nothing else."""
    if as_json:
        for row in found.top:
            print(json.dumps(row.fields()), file=out)
        return
    console = Console(file=out, highlight=False, markup=False, soft_wrap=True)
    console.print(
        f"{found.what}: {found.population:,} sampleable rows of {found.actors} actors, priorities sum to {found.mass:.6g}"
    )
    cells = [[_cell(row, name) for name in COLUMNS] for row in found.top]
    if not console.is_terminal:
        lines = [list(COLUMNS), *cells]
        widths = [max(len(line[i]) for line in lines) for i in range(len(COLUMNS))]
        for line in lines:
            print("  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True)), file=out)
        return
    table = Table()
    for name in COLUMNS:
        table.add_column(name.replace("_", " "), justify="left" if name == "actor" else "right")
    for line in cells:
        table.add_row(*line)
    console.print(table)


def _cell(row: InspectedRow, name: str) -> str:
    return _FORMS.get(name, "{}").format(getattr(row, name))


def write_sheet(found: Inspection, path: Path) -> None:
    """A PNG: a row of pictures a transition, the state's frames (oldest first) and the newest frame its n-step return leads to.

    Raises:
        UsageError: the observations are no images, or too many were asked for. LocalError: the file cannot be written.
    """
    if not found.top:
        raise UsageError(f"--png: {found.what} has no sampleable row")
    if not found.shows_images:
        state = found.top[0].state
        raise UsageError(f"--png: observations of {found.what} are {state.dtype} {state[0].shape}, not images")
    if len(found.top) > MAX_SHEET:
        raise UsageError(f"--png: a sheet shows {MAX_SHEET} transitions at most, --top is {len(found.top)}")
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    pictures = len(found.top[0].state) + 1
    figure = Figure(figsize=(1.2 * pictures, 1.4 * len(found.top)), dpi=100, layout="constrained")
    FigureCanvasAgg(figure)
    grid = figure.subplots(len(found.top), pictures, squeeze=False)
    for axes, row in zip(grid, found.top, strict=True):
        for ax, frame in zip(axes, [*row.state, row.after[-1]], strict=True):
            ax.imshow(_picture(frame), cmap="gray", vmin=0, vmax=255)
            ax.set_axis_off()
        axes[0].set_title(
            f"{row.partition}/{row.offset}/{row.row} {row.actor} lane {row.lane} step {row.step}",
            fontsize=6,
            loc="left",
        )
        axes[-1].set_title(
            f"action {row.action}  R {row.n_step_return:.3g}\np {row.priority:.3g}  P {row.probability:.2g}",
            fontsize=6,
            loc="right",
        )
    temporary = path.with_name(path.name + ".tmp")
    try:
        figure.savefig(temporary, format="png")
        os.replace(temporary, path)
    except OSError as error:
        raise LocalError(f"cannot write {path}: {error.strerror}") from None


def _picture(frame: Any) -> Any:
    """(H, W) or (H, W, 3); other channels: their mean."""
    if frame.ndim == 2 or frame.shape[-1] == 3:
        return frame
    return np.asarray(frame.mean(axis=-1 if frame.shape[-1] <= 4 else 0))
