"""Offsets a role never saw, so cannot report: records that went to dead-letters. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping

Partition = tuple[str, int]


class SkippedOffsets:
    """Moves a role's positions over bad records. A bad offset may be passed once every good record before it is finished."""

    def __init__(self) -> None:
        self._good: dict[Partition, int] = {}
        self._bad: dict[Partition, deque[tuple[int, int]]] = {}

    def good(self, topic: str, partition: int, offset: int) -> None:
        """The role took this record."""
        self._good[topic, partition] = offset

    def bad(self, topic: str, partition: int, offset: int) -> None:
        """This record went to dead-letters."""
        place = (topic, partition)
        self._bad.setdefault(place, deque()).append((offset, self._good.get(place, -1)))

    def past(self, positions: Mapping[Partition, int]) -> dict[Partition, int]:
        """`positions`, each moved over the bad records that follow it directly (a partition of which only bad records came gets one)."""
        moved = dict(positions)
        for place, skipped in self._bad.items():
            for offset, good_before in skipped:
                if moved.get(place, 0) > good_before:
                    moved[place] = max(offset + 1, moved.get(place, 0))
        return moved

    def committed(self, positions: Mapping[Partition, int]) -> None:
        """Forget what lies below committed positions."""
        for place, skipped in self._bad.items():
            while skipped and skipped[0][0] < positions.get(place, 0):
                skipped.popleft()

    def forget(self, partitions: Iterable[Partition]) -> None:
        """These belong to another member now."""
        for place in partitions:
            self._good.pop(place, None)
            self._bad.pop(place, None)
