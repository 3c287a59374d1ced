"""What `gorila replay inspect` prints and draws."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import pytest
from matplotlib.image import imread
from typer.testing import CliRunner

from gorila.cli import app
from gorila.errors import LocalError, UsageError
from gorila.inspected import InspectedRow, Inspection
from gorila.local.inspection_view import COLUMNS, show, write_sheet


def row(number: int, shape: tuple[int, ...] = (84, 84), dtype: type = np.uint8) -> InspectedRow:
    state = np.zeros((4, *shape), dtype)
    state[:, number :: number + 2] = 255
    return InspectedRow(
        number, 7, 3, f"actor-{number}", 1, 115, 2, 0.5, 0.97, 3, 41, 9.0 - number, 0.25, state, state[:, ::-1]
    )


def inspection(*rows: InspectedRow) -> Inspection:
    return Inspection("run [demo]", 2, 12_345, 6.5, rows)


def test_lines_are_aligned_and_say_everything() -> None:
    out = io.StringIO()
    show(inspection(row(0), row(1)), False, out)
    title, header, first, second = out.getvalue().splitlines()
    assert title == "run [demo]: 12,345 sampleable rows of 2 actors, priorities sum to 6.5"
    assert header.split() == list(COLUMNS)
    assert first.split() == ["0", "7", "3", "actor-0", "1", "115", "2", "0.5", "3", "41", "9", "0.25"]
    assert len(first) == len(second) == len(header)


def test_json_is_one_object_a_row_and_nothing_else() -> None:
    out = io.StringIO()
    show(inspection(row(0), row(1)), True, out)
    objects = [json.loads(line) for line in out.getvalue().splitlines()]
    assert [found["actor"] for found in objects] == ["actor-0", "actor-1"]
    assert set(objects[0]) >= set(COLUMNS)
    assert "state" not in objects[0]


def test_a_sheet_shows_each_rows_own_frames(tmp_path: Path) -> None:
    sizes = []
    for rows in ((row(0),), (row(0), row(1)), (row(1), row(0))):
        path = tmp_path / f"{len(sizes)}.png"
        write_sheet(inspection(*rows), path)
        sizes.append(imread(path))
    one, two, other_way = sizes
    assert two.shape[0] > one.shape[0]
    assert two.shape[1] == one.shape[1]
    assert two.shape == other_way.shape
    assert not np.array_equal(two, other_way)
    assert [path.name for path in tmp_path.iterdir() if path.suffix == ".tmp"] == []


def test_what_cannot_be_drawn_is_refused_in_one_line(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"float32 \(4,\), not images"):
        write_sheet(inspection(row(0, (4,), np.float32)), tmp_path / "x.png")
    with pytest.raises(UsageError, match="no sampleable row"):
        write_sheet(inspection(), tmp_path / "x.png")
    with pytest.raises(UsageError, match="100 transitions at most"):
        write_sheet(inspection(*[row(0)] * 101), tmp_path / "x.png")
    with pytest.raises(LocalError, match="cannot write"):
        write_sheet(inspection(row(0)), tmp_path / "nowhere" / "x.png")
    assert list(tmp_path.iterdir()) == []


def test_the_two_words_are_one_command_and_the_first_alone_is_still_the_role() -> None:
    from gorila.cli import _add_groups

    if not app.registered_groups:
        _add_groups()
    inspect = CliRunner().invoke(app, ["replay", "inspect", "--help"])
    role = CliRunner().invoke(app, ["replay", "--help"])
    assert "highest priority" in " ".join(inspect.output.split())
    assert "highest priority" not in " ".join(role.output.split())
    assert "With --from" in " ".join(role.output.split())
