"""A Kafka in memory, as much of it as gorila/ports.py asks for: no thread, no wait, no retention, and a place to die at every call.

It is not a mock of the runtime's expectations: records get offsets, a commit is kept with its metadata, a consumer starts where its group committed,
partitions move between members, acknowledgements come only when asked for. What it does not have (time-outs, broker loss, compaction, retention by
size) is tested on the real broker in tests/integration.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gorila.errors import OffsetGone
from gorila.kafka import Received
from gorila.ports import OnAssign, OnRevoke, Partition


class Killed(BaseException):
    """The process died here. Nothing of the product catches it."""


@dataclass
class MemoryCluster:
    """Topics, committed offsets and members of one imagined cluster. Names are full names.

    Attributes:
        partitions: of each topic; one where not named.
        before: called with "poll", "produce", "flush", "commit" before each such call; raise Killed there to die.
        acknowledge_at_once: an acknowledgement is there at the producer's next call. Else only `flush` and `acknowledge` bring them.
        now_ms: append time of the next record.
    """

    partitions: dict[str, int] = field(default_factory=dict)
    before: Callable[[str], None] = lambda call: None
    acknowledge_at_once: bool = True
    now_ms: int = 0

    def __post_init__(self) -> None:
        self.log: dict[Partition, list[Received]] = defaultdict(list)
        self.low: dict[Partition, int] = {}
        self.offsets: dict[tuple[str, str, int], tuple[int, str]] = {}
        self.members: dict[str, list[MemoryConsumer]] = defaultdict(list)
        self.producers: list[MemoryProducer] = []

    def append(self, topic: str, partition: int, value: bytes | None, key: bytes | None = None) -> int:
        """Write a record as some other process would; its offset."""
        place = (topic, partition)
        offset = self.low.get(place, 0) + len(self.log[place])
        self.log[place].append(Received(topic, partition, offset, self.now_ms, key, value))
        return offset

    def read(self, topic: str, partition: int = 0) -> list[Received]:
        """Everything in a partition."""
        return list(self.log[topic, partition])

    def delete_below(self, topic: str, partition: int, offset: int) -> None:
        """Retention."""
        place = (topic, partition)
        del self.log[place][: offset - self.low.get(place, 0)]
        self.low[place] = offset

    def producer(self) -> MemoryProducer:
        """See Cluster."""
        self.producers.append(MemoryProducer(self))
        return self.producers[-1]

    def consumer(
        self,
        group: str | None = None,
        *,
        instance_id: str | None = None,
        on_assign: OnAssign | None = None,
        on_revoke: OnRevoke | None = None,
        watched: str = "",
    ) -> MemoryConsumer:
        """See Cluster."""
        return MemoryConsumer(self, group, on_assign, on_revoke)

    def kill_clients(self) -> None:
        """Every client is gone, as after kill -9: what was sent and not yet acknowledged stays in the log, nobody is told."""
        self.members.clear()
        self.producers.clear()

    def acknowledge(self) -> None:
        """Let acknowledgements of all records sent so far come in at the producers' next call."""
        for producer in self.producers:
            producer.ready += producer.waiting
            producer.waiting = []


class MemoryProducer:
    """Appends at once; tells of it when it is asked."""

    def __init__(self, cluster: MemoryCluster) -> None:
        self._cluster = cluster
        self._next_partition = 0
        self.waiting: list[Callable[[], None]] = []
        self.ready: list[Callable[[], None]] = []

    def send(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        on_delivery: Callable[[int, int], None] | None = None,
    ) -> None:
        """See Producer. Without a partition: round robin, so that nothing can rely on where it goes."""
        self._cluster.before("produce")
        if partition is None:
            partition = self._next_partition % self._cluster.partitions.get(topic, 1)
            self._next_partition += 1
        offset = self._cluster.append(topic, partition, value, key)
        then = on_delivery or (lambda partition, offset: None)
        where = self.ready if self._cluster.acknowledge_at_once else self.waiting
        where.append(lambda: then(partition, offset))

    def poll(self, timeout_s: float = 0.0) -> None:
        """Serve what is ready."""
        while self.ready:
            self.ready.pop(0)()

    def flush(self, timeout_s: float) -> int:
        """Everything is acknowledged."""
        self._cluster.before("flush")
        self.ready += self.waiting
        self.waiting = []
        self.poll()
        return 0

    def close(self, timeout_s: float = 0.0) -> None:
        """Nothing to give back."""


class MemoryConsumer:
    """One reader. In a group, members share a topic's partitions by rotation; who comes or goes moves them at everybody's next poll."""

    def __init__(
        self, cluster: MemoryCluster, group: str | None, on_assign: OnAssign | None, on_revoke: OnRevoke | None
    ) -> None:
        self._cluster, self._group, self._on_assign, self._on_revoke = cluster, group, on_assign, on_revoke
        self._topics: list[str] = []
        self._at: dict[Partition, int] = {}
        self._paused: set[Partition] = set()
        self._revoking = False
        self.refused_commits = 0

    def subscribe(self, topics: Sequence[str]) -> None:
        """Partitions come with the next poll."""
        self._topics = list(topics)
        self._cluster.members[self._group or ""].append(self)

    def assign(self, offsets: Mapping[Partition, int]) -> None:
        """See Consumer."""
        self._at = dict(offsets)

    def _share(self) -> set[Partition]:
        shares = set()
        for topic in self._topics:
            members = [member for member in self._cluster.members[self._group or ""] if topic in member._topics]
            shares |= {
                (topic, p) for p in range(self._cluster.partitions.get(topic, 1)) if members[p % len(members)] is self
            }
        return shares

    def _rebalance(self) -> None:
        if self not in self._cluster.members[self._group or ""]:
            return
        share = self._share()
        went, came = sorted(self._at.keys() - share), sorted(share - self._at.keys())
        if went:
            if self._on_revoke:
                self._revoking = True
                self._on_revoke(went)
                self._revoking = False
            for place in went:
                del self._at[place]
        if came:
            starts = dict((self._on_assign(came) if self._on_assign else None) or {})
            for place in came:
                committed = self.committed([place])[place][0]
                self._at[place] = starts.get(place, self._cluster.low.get(place, 0) if committed is None else committed)

    def poll_many(self, max_records: int, timeout_s: float) -> list[Received]:
        """Never waits."""
        self._cluster.before("poll")
        self._rebalance()
        taken: list[Received] = []
        for place, offset in self._at.items():
            low, records = self._cluster.low.get(place, 0), self._cluster.log[place]
            if not low <= offset <= low + len(records):
                raise OffsetGone(f"topic {place[0]} partition {place[1]}: offset {offset} is out of range", *place)
            if place not in self._paused:
                more = records[offset - low :][: max_records - len(taken)]
                taken += more
                self._at[place] = offset + len(more)
        return taken

    def commit(self, offsets: Mapping[Partition, int], metadata: str = "gorila", wait: bool = False) -> None:
        """Refused, and counted, for partitions of a subscription that are another member's (not yet those that are being revoked)."""
        self._cluster.before("commit")
        share = self._at.keys() & (self._at.keys() if self._revoking or not self._topics else self._share())
        for (topic, partition), offset in offsets.items():
            if (topic, partition) in share:
                self._cluster.offsets[self._group or "", topic, partition] = (offset, metadata)
            else:
                self.refused_commits += 1

    def committed(self, partitions: Sequence[Partition]) -> dict[Partition, tuple[int | None, str]]:
        """See Consumer."""
        nothing: tuple[int | None, str] = (None, "")
        return {place: self._cluster.offsets.get((self._group or "", *place), nothing) for place in partitions}

    def watermarks(self, topic: str, partition: int) -> tuple[int, int]:
        """See Consumer."""
        low = self._cluster.low.get((topic, partition), 0)
        return low, low + len(self._cluster.log[topic, partition])

    def assignment(self) -> list[Partition]:
        """See Consumer."""
        return sorted(self._at)

    def pause(self, partitions: Sequence[Partition]) -> None:
        """See Consumer."""
        self._paused |= set(partitions)

    def resume(self, partitions: Sequence[Partition]) -> None:
        """See Consumer."""
        self._paused -= set(partitions)

    def seek(self, topic: str, partition: int, offset: int) -> None:
        """See Consumer."""
        self._at[topic, partition] = offset

    def close(self) -> None:
        """Leave the group."""
        members = self._cluster.members[self._group or ""]
        if self in members:
            members.remove(self)
