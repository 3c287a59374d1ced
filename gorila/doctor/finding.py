"""What a check says."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

Level = Literal["fine", "note", "advice", "wrong"]


@dataclass(frozen=True)
class Finding:
    """One line of the table.

    Attributes:
        level: `wrong` makes the exit code 1; `advice` could be better; `note` is not judged (not running, not set, not measurable from here).
        found: what was seen, in numbers.
        do: what to do about it; empty where there is nothing to do.
    """

    check: str
    level: Level
    found: str
    do: str = ""


def worst_first(findings: Iterable[Finding]) -> list[Finding]:
    """What is wrong, then what could be better; then the rest as it was looked at."""
    order = {"wrong": 0, "advice": 1, "fine": 2, "note": 3}
    return sorted(findings, key=lambda finding: order[finding.level])
