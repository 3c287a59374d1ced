"""What a split knows of the others: the newest stats of each. Stale figures change who draws how much, never whether a probability is right.

Newest by their place in the log, never by the time they say: a split whose clock once was years ahead would have the last word for years.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

from gorila.messages import ReplayStats


@dataclass(frozen=True, slots=True)
class Summary:
    """Actors with a sampleable row, their mass and their sampleable rows."""

    actors: int
    mass: float
    rows: int


class OtherSplits:
    """The newest stats by split.

    Args:
        own: this split's name; its own stats are ignored.
    """

    def __init__(self, own: str) -> None:
        self._own = own
        self._newest: dict[str, tuple[int, ReplayStats]] = {}  # split → (offset, stats)
        self._last = -1

    def __bool__(self) -> bool:
        return bool(self._newest)

    def take(self, stats: ReplayStats, offset: int | None = None) -> int:
        """Remember a split's stats if newer; returns the rows inserted there since the stats before (0 at first sight).

        Args:
            offset: of the record in replay-stats; None: after all that were taken.
        """
        if stats.split == self._own:
            return 0
        offset = self._last + 1 if offset is None else offset
        before, known = self._newest.get(stats.split, (-1, None))
        if offset < before:
            return 0
        self._last = max(self._last, offset)
        self._newest[stats.split] = (offset, stats)
        return max(0, stats.inserts_total - known.inserts_total) if known is not None else 0

    def summary(self, mine: Container[str]) -> Summary:
        """All other splits together. An actor that moved is counted once, by the newest stats that name it, and never when it is `mine`."""
        newest: dict[str, tuple[int, int, float]] = {}
        for offset, stats in self._newest.values():
            for actor, rows, mass in zip(stats.actors, stats.sampleable.tolist(), stats.mass.tolist(), strict=True):
                if actor not in mine and offset >= newest.get(actor, (-1, 0, 0.0))[0]:
                    newest[actor] = (offset, rows, mass)
        live = [(rows, mass) for _, rows, mass in newest.values() if rows > 0]
        return Summary(len(live), float(sum(mass for _, mass in live)), sum(rows for rows, _ in live))
