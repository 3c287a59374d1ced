"""One replica of a shard as a processor: the shard, the chain's protocol, and between them what may be shown when. Pure; the fence is a port.

Rules of this file:
1. Every replica takes in every gradient and makes every target and ledger line; only a fenced tail makes snapshots and checkpoints. The tail, not the head: a
   checkpoint names the place of its target in `weights`, which only the one that wrote it knows, and the tail's writes are fenced.
2. What the tail makes is held until the chain allows its version: a snapshot is of one moment, and under load the token is always a little behind the newest.
   One snapshot is held at a time.
3. Targets and ledger lines above what any tail may have shown are kept by everybody, and the newest few below: a new tail writes them again. They are the same
   bytes as the old tail's, and readers ignore a target that is not above theirs.
4. A tail that loses its fence or its place drops what it holds; when it is the tail again it begins with a key frame (downlink.py rule 5).
5. A replica speaks on the replication log once it has read both logs to where they ended when it started.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from typing import Protocol

from consumers.parameter_server.chain import View
from consumers.parameter_server.replication import Replica
from consumers.parameter_server.shard import QUIET_S, Shard
from gorila.errors import BadRecord, InvalidState
from gorila.messages import CheckpointLedger, ReplicationEvent, Weights
from gorila.processor import Incoming, Outgoing

KEPT_BELOW = 2
MOST_KEPT = 64
FENCE_LOOK_S = 0.005


class Diverged(InvalidState):
    """This replica's state is not what the others' is: rebuild it from a checkpoint."""


class Guard(Protocol):
    """The fence on `weights` and `checkpoints` (gorila.guarded_sender.GuardedSender). Never blocks."""

    @property
    def is_up(self) -> bool: ...
    def raise_fence(self) -> None: ...
    def was_lost(self) -> bool: ...
    def drop(self) -> None: ...


class Showing:
    """The chain as the shard sees it: whether a snapshot or a checkpoint may be *made* now. When it goes out is ReplicatedShard's."""

    def __init__(self, replica: Replica) -> None:
        self.replica = replica
        self.holds_snapshot = False

    @property
    def view(self) -> View:
        """See Chain."""
        return self.replica.view

    @property
    def is_tail(self) -> bool:
        """See Chain."""
        return self.replica.is_tail and self.replica.is_fenced

    def applied(self, version: int) -> None:
        """See Chain."""
        self.replica.applied(version)

    def publishable(self, version: int) -> bool:
        """See Chain."""
        return self.is_tail and not self.holds_snapshot


class ReplicatedShard:
    """Implements gorila.processor.Processor; inputs `gradients` and `replication`, partition = shard.

    Args:
        shard: made with `chain=showing`.
        log_end: end of the replication partition when the process started.
        on_view: told every view that is adopted.
    """

    def __init__(
        self,
        shard: Shard,
        showing: Showing,
        guard: Guard,
        *,
        log_start: int,
        log_end: int,
        on_view: Callable[[View], None] = lambda _: None,
    ) -> None:
        self.shard, self.replica = shard, showing.replica
        self._showing, self._guard, self._on_view = showing, guard, on_view
        self._log_next, self._log_end = log_start, log_end
        self._quiet_since_s: float | None = None
        self._kept: deque[Outgoing] = deque()
        self._held: deque[Outgoing] = deque()
        self._live = False
        self._view = self.replica.view
        self._now_s = 0.0
        # A fence was asked for in this tailship; the guard has been asked and not dropped since; what is made is held for publishing.
        self._asked = self._guarded = self._publishing = False

    @property
    def is_live(self) -> bool:
        """Rule 5."""
        return self._live

    # ---- records in

    def process(self, record: Incoming) -> Iterable[Outgoing]:
        """A gradient or a replication record. Raises BadRecord."""
        if record.topic != "replication":
            return self._sort_out(self.shard.process(record))
        self._log_next, self._quiet_since_s = record.offset + 1, None
        event = record.message
        if not isinstance(event, ReplicationEvent) or event.shard_id != self.shard.state.shard_id:
            raise BadRecord(f"not a replication record of shard {self.shard.state.shard_id}")
        self.replica.take(event)
        if not self.replica.is_tail:
            self._asked = False  # even if it is the tail again by the next tick: somebody else was it in between
        if self.replica.view != self._view:
            self._view = self.replica.view
            self._on_view(self._view)
        return []

    def tick(self, now_s: float) -> Iterable[Outgoing]:
        """What the shard and the protocol have to say, and what the chain now allows. Raises Diverged."""
        replica, self._now_s = self.replica, now_s
        if replica.must_rebuild:
            raise Diverged(
                f"shard {self.shard.state.shard_id}: the state at version {self.shard.state.version} is not the others'"
            )
        self._mind_the_fence()
        outgoing = self._sort_out(self.shard.tick(now_s))
        if not self._live and self._has_read_all(now_s):
            self._live = True
            replica.live()
        for event in replica.tick(now_s):
            event.shard_id, event.gradient_offset = self.shard.state.shard_id, self.shard.state.gradient_offset
            outgoing.append(Outgoing("replication", event, str(event.shard_id).encode(), event.shard_id))
        while self._held and replica.publishable(_version(self._held[0])):
            record = self._held.popleft()
            self._showing.holds_snapshot &= _is_kept(record)
            outgoing.append(record)
        return outgoing

    def _has_read_all(self, now_s: float) -> bool:
        if not self.shard.caught_up:
            return False
        if self._log_next >= self._log_end:
            return True
        # What is left of the log may be records nobody can decode, which never get here.
        self._quiet_since_s = now_s if self._quiet_since_s is None else self._quiet_since_s
        return now_s - self._quiet_since_s >= QUIET_S

    # ---- records out

    def _sort_out(self, records: Iterable[Outgoing]) -> list[Outgoing]:
        """Rules 1 to 3: what goes out at once."""
        at_once: list[Outgoing] = []
        for record in records:
            if isinstance(record.message, CheckpointLedger):
                self.replica.hashed(record.message.version, record.message.state_hash)
            kept = _is_kept(record)
            if kept:
                self._keep(record)
            elif isinstance(record.message, Weights):
                self._showing.holds_snapshot = True
            else:
                at_once.append(record)
                continue
            if self._showing.is_tail:
                self._held.append(record)
        return at_once

    def _keep(self, record: Outgoing) -> None:
        kept = self._kept
        kept.append(record)
        below = [r for r in kept if _version(r) <= self.replica.ceiling and r.topic == record.topic]
        for old in below[:-KEPT_BELOW]:
            kept.remove(old)
        while len(kept) > MOST_KEPT:
            kept.popleft()

    def _mind_the_fence(self) -> None:
        replica, guard = self.replica, self._guard
        if guard.was_lost():
            replica.fence_lost()
            self._asked = False
        if replica.is_tail and replica.is_fenced:
            return
        if self._publishing:
            self._publishing = self._showing.holds_snapshot = False
            self._held.clear()
            self.shard.stop_publishing()
        if not replica.is_tail:
            if self._guarded:
                self._guarded = self._asked = False
                guard.drop()
        elif not self._asked:
            self._guarded = self._asked = True
            guard.raise_fence()
        elif guard.is_up:
            replica.fenced()
            self._publishing = True
            self.shard.start_publishing()
            self._held.extend(self._kept)

    # ---- the rest of a processor

    def next_due_s(self) -> float:
        """See Runtime."""
        if not self._live:
            return float("inf")
        if self.replica.needs_fence:
            return self._now_s + FENCE_LOOK_S
        due_s = self.replica.next_due_s()
        return min(due_s, self.shard.next_due_s()) if self._showing.publishable(self.shard.state.version) else due_s

    def delivered(self, record: Outgoing, partition: int, offset: int) -> None:
        """See Processor. What the guard dropped was not delivered."""
        if offset >= 0:
            self.shard.delivered(record, partition, offset)

    def wants(self, topic: str) -> bool:
        """See Processor."""
        return topic != "gradients" or self.shard.wants(topic)

    def waiting_for(self) -> str:
        """See Processor."""
        if self._held and self._showing.is_tail:
            return f"the chain: version {_version(self._held[0])} is not everywhere yet"
        return ""

    def positions(self) -> dict[tuple[str, int], int]:
        """See Processor."""
        return {**self.shard.positions(), ("replication", self.shard.state.shard_id): self._log_next}

    def snapshot(self) -> Iterable[Outgoing]:
        """See Processor."""
        return self.shard.snapshot()

    def check_valid(self) -> None:
        """Raises InvalidState."""
        self.shard.check_valid()


def _is_kept(record: Outgoing) -> bool:
    message = record.message
    return isinstance(message, CheckpointLedger) or (isinstance(message, Weights) and message.kind == "target")


def _version(record: Outgoing) -> int:
    assert isinstance(record.message, Weights | CheckpointLedger)
    return record.message.version
