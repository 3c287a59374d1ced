"""Which versions of a shard may be shown to readers: the seam for chain replication (van Renesse & Schneider 2004; design section 6).

The promise is: what anyone has read, every member of the shard's chain has. A shard asks `publishable(version)` before each snapshot and tells
`applied(version)` after each update; it knows nothing else of the chain. With one member every applied version is publishable.

What comes next fits behind the same two calls: members hand tokens down the `replication` topic (token_i = min(applied_i, token_{i-1})), membership
is a view (epoch, ordered members) in that log, the tail answers `publishable(version)` with `version <= token`, and every other member with False.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class View:
    """Who holds a shard: replica ids from head to tail, under an epoch that only grows."""

    epoch: int
    members: tuple[str, ...]


class Chain(Protocol):
    """What a shard needs to know about its replicas."""

    view: View

    def applied(self, version: int) -> None:
        """This member's state is now at `version`."""
        ...

    def publishable(self, version: int) -> bool:
        """Whether this member is the one that publishes, and every member has `version`."""
        ...


class SoleMember:
    """A chain of one: head and tail at once."""

    def __init__(self, replica_id: str) -> None:
        self.view = View(epoch=0, members=(replica_id,))
        self._applied = 0

    def applied(self, version: int) -> None:
        """See Chain."""
        self._applied = version

    def publishable(self, version: int) -> bool:
        """All members are this one."""
        return version <= self._applied
