"""Which versions of a shard may be shown to readers: the seam for chain replication (van Renesse & Schneider 2004; design section 6).

The promise is: what anyone has read, every member of the shard's chain has. A shard asks `publishable(version)` before each snapshot and tells
`applied(version)` after each update; it knows nothing else of the chain. With one member every applied version is publishable.

With more of them replication.py decides, and replicated_shard.py holds back what is not everywhere yet.
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

    @property
    def view(self) -> View: ...

    @property
    def is_tail(self) -> bool:
        """Whether this member is the one that publishes and writes checkpoints."""
        ...

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
        self.is_tail = True

    def applied(self, version: int) -> None:
        """See Chain."""
        self._applied = version

    def publishable(self, version: int) -> bool:
        """All members are this one."""
        return version <= self._applied
