"""Who is to leave a chain: members that are silent, and members whose state is not what the others' is. Pure; see rules.py for what is done about it.

Both verdicts are drawn from the replication log alone, in its order. Nobody's clock says that somebody else is late: what counts is how often *my own*
heartbeats have come back through the log with nothing of the other's between them. When the broker stalls, mine do not come back either.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

HASHES_KEPT = 2
"""Versions whose hashes are remembered: a diverged state stays diverged, so what one round misses the next one finds."""


class Suspicion:
    """Counts my heartbeats that came back since each of the others was heard.

    Args:
        after: how many make a suspect.
        one_at_a_time: at most one heartbeat of mine is on its way. Those that piled up during a stall would come back in one row and accuse everybody.
    """

    __slots__ = ("_after", "_silent", "in_flight", "one_at_a_time")

    def __init__(self, after: int, *, one_at_a_time: bool = True) -> None:
        self._after = after
        self.one_at_a_time = one_at_a_time
        self._silent: dict[str, int] = {}
        self.in_flight = 0

    @property
    def may_beat(self) -> bool:
        """Whether a heartbeat may be sent now."""
        return not (self.in_flight and self.one_at_a_time)

    def beat(self) -> None:
        """A heartbeat of mine was sent."""
        self.in_flight += 1

    def came_back(self) -> None:
        """A heartbeat of mine came back through the log."""
        self.in_flight -= 1
        for member, count in self._silent.items():
            self._silent[member] = min(count + 1, self._after)

    def heard(self, member: str) -> None:
        """Anything of this member came through the log."""
        if member in self._silent:
            self._silent[member] = 0

    def watch(self, members: Iterable[str]) -> None:
        """These from now on; who is new among them begins as just heard."""
        self._silent = {member: self._silent.get(member, 0) for member in members}

    def renew(self) -> None:
        """I go by a new name: what is on its way under the old one will not count."""
        self.in_flight = 0

    def suspects(self, member: str) -> bool:
        """Whether this member is taken for dead."""
        return self._silent.get(member, 0) >= self._after


class Agreement:
    """State hashes that members reported at the same exact versions, and who is out of line."""

    __slots__ = ("_reports",)

    def __init__(self) -> None:
        self._reports: dict[int, dict[str, int]] = {}

    def report(self, member: str, version: int, state_hash: int) -> None:
        """A member's state had this hash at this version."""
        self._reports.setdefault(version, {})[member] = state_hash
        while len(self._reports) > HASHES_KEPT:
            del self._reports[min(self._reports)]

    def diverged(self, members: tuple[str, ...]) -> frozenset[str]:
        """Members that contradict most of the others at a version all have reported; between two, the one nearer the head is believed."""
        wrong: set[str] = set()
        for reports in self._reports.values():
            hashes = [reports[member] for member in members if member in reports]
            if len(hashes) == len(members) and len(set(hashes)) > 1:
                # most_common keeps the order of first appearance among equals: head to tail.
                believed = Counter(hashes).most_common(1)[0][0]
                wrong |= {member for member in members if reports[member] != believed}
        return frozenset(wrong)
