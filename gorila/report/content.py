"""What a report is made of, whatever it was gathered from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from gorila.doctor import Finding

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Chart:
    """Lines over one axis.

    Attributes:
        lines: points by name, x ascending; drawn as lines.
        dots: the same, drawn as dots behind the lines.
        level: a horizontal mark, such as the return that counts as solved.
        level_name: what the mark is, for the legend.
    """

    title: str
    x: str
    y: str
    lines: Mapping[str, Points] = field(default_factory=dict)
    dots: Mapping[str, Points] = field(default_factory=dict)
    level: float | None = None
    level_name: str = ""

    @property
    def empty(self) -> bool:
        """Nothing to draw."""
        return not any([*self.lines.values(), *self.dots.values()])


@dataclass(frozen=True)
class Content:
    """Attributes:
    sources: what was read, and what could not be, in sentences.
    staleness: gradients applied by staleness 0, 1, 2, … updates.
    lags: (group, topic/partition, lag, bound) as they are now.
    """

    run: str
    sources: Sequence[str] = ()
    summary: Mapping[str, Any] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
    charts: Sequence[Chart] = ()
    staleness: Sequence[int] = ()
    lags: Sequence[tuple[str, str, int, int]] = ()
    checklist: Sequence[Finding] = ()
