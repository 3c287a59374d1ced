"""Where a role's records come from and where reading begins. One consumer an input: an input nobody wants is simply not polled, while
`pause()` on a shared consumer would throw its prefetched data away at every turn.

Whose offset wins (design section 7): every commit of ours carries the metadata "gorila"; a committed offset without it was written by an
operator (`kafka-consumer-groups --reset-offsets`). `obey_operator` inputs start there, the others say in the log why not.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from gorila.errors import OffsetGone
from gorila.metrics import Metrics
from gorila.ports import ConsumerPort, Partition, ServicePort
from gorila.topics import BY_NAME

if TYPE_CHECKING:
    from gorila.kafka import Received

OWN_COMMIT = "gorila"
# A member that is not polled for max.poll.interval.ms (minutes) is thrown out of its group; an unwanted input is polled, paused, this often.
REST_S = 2.0


@dataclass(frozen=True, slots=True)
class Input:
    """One topic a role reads.

    Attributes:
        topic: logical name.
        how: `group` shares the partitions with the role's other processes, as a static member named after the service; `assigned` reads
            `partitions` from `start` and commits for the group's eyes only; `newest` starts at the end, hands in the newest record of each key
            of a chunk and commits nothing.
        partitions: of `assigned` and `newest`; None: all the topology gives the topic.
        start: {partition: offset} or a policy. `group` uses it only for a partition nobody has committed; `assigned` prefers it to the committed offset when
            it names the partition.
        gone: what to do when an offset is no longer in the log.
        obey_operator: whether a reset by Kafka's tools is followed.
        chunk: records taken by one poll at most; the role is ticked after each chunk.
        group: consumer group to commit for; empty: the role's (a parameter server has one a replica).
    """

    topic: str
    how: Literal["group", "assigned", "newest"] = "group"
    partitions: tuple[int, ...] | None = None
    start: Mapping[int, int] | Literal["earliest", "latest"] = "earliest"
    gone: Literal["fail", "earliest", "latest"] = "fail"
    obey_operator: bool = True
    chunk: int = 500
    group: str = ""


class InputReader:
    """One input, open. `backlog` is what was polled and not yet handed in; `owned` the partitions it may commit; `refused` whether a commit was refused
    since somebody last looked (and set it back).

    Args:
        on_assigned, on_revoked: told {(logical topic, partition): start offset} and [(logical topic, partition)]; run inside `poll`.
        on_jumped: told logical topic, partition and offset where reading goes on after records that are gone.
    """

    def __init__(
        self,
        service: ServicePort,
        spec: Input,
        metrics: Metrics,
        on_assigned: Callable[[dict[Partition, int]], None],
        on_revoked: Callable[[InputReader, list[Partition]], None],
        on_jumped: Callable[[str, int, int], None] = lambda topic, partition, offset: None,
    ) -> None:
        self.spec, self.topic = spec, spec.topic
        self.backlog: deque[Received] = deque()
        self.commits = spec.how != "newest"
        self._service, self._metrics = service, metrics
        self._on_assigned, self._on_revoked, self._on_jumped = on_assigned, on_revoked, on_jumped
        self._full = service.topic(spec.topic)
        self._paused: list[Partition] = []
        self._polled_s = time.monotonic()
        self._refused = 0
        self.refused = False
        self.owned: set[int] = set()
        group = (spec.group or service.group) if self.commits else None
        if spec.how == "group":
            self._consumer: ConsumerPort = service.cluster.consumer(
                group, instance_id=service.name, on_assign=self._assigned, on_revoke=self._revoked, watched=self.topic
            )
            self._consumer.subscribe([self._full])
        else:
            self._consumer = service.cluster.consumer(group, watched=self.topic)
            starts = self._explicit_starts()
            self._consumer.assign(starts)
            self._tell_assigned(starts)

    def _explicit_starts(self) -> dict[Partition, int]:
        count = BY_NAME[self.topic].partitions(self._service.config)
        wanted = [(self._full, p) for p in (self.spec.partitions if self.spec.partitions is not None else range(count))]
        if not self.commits:
            return {place: max(self._consumer.watermarks(*place)[1] - 1, 0) for place in wanted}
        return self._starts(wanted)

    def _starts(self, partitions: list[Partition]) -> dict[Partition, int]:
        """Where reading begins: an operator's reset, else what the input says, else what was committed, else the policy."""
        explicit: Mapping[int, int] = (
            self.spec.start if isinstance(self.spec.start, Mapping) and self.spec.how == "assigned" else {}
        )
        starts = {}
        for place, (offset, metadata) in self._consumer.committed(partitions).items():
            own = explicit.get(place[1])
            by_operator = offset is not None and metadata != OWN_COMMIT
            if by_operator:
                self._judge_reset(place, offset, own)
            if offset is not None and (own is None or (by_operator and self.spec.obey_operator)):
                starts[place] = offset
            elif own is not None:
                starts[place] = own
            else:
                starts[place] = self._consumer.watermarks(*place)[1 if self.spec.start == "latest" else 0]
        return starts

    def _judge_reset(self, place: Partition, offset: int | None, own: int | None) -> None:
        obeyed = self.spec.obey_operator or own is None
        self._metrics.count("operator_resets_total", obeyed="yes" if obeyed else "no")
        if obeyed:
            self._service.log.warning("operator.reset_obeyed", topic=self.topic, partition=place[1], offset=offset)
        else:
            self._service.log.warning(
                "operator.reset_refused",
                topic=self.topic,
                partition=place[1],
                offset=offset,
                starts_at=own,
                reason="this role's state belongs to the offset of its checkpoint: fork the run instead",
            )

    def _tell_assigned(self, starts: Mapping[Partition, int]) -> None:
        self.owned |= {partition for _, partition in starts}
        self._on_assigned({(self.topic, partition): offset for (_, partition), offset in starts.items()})

    def _assigned(self, partitions: list[Partition]) -> Mapping[Partition, int]:
        self._metrics.count("rebalances_total", event="assigned")
        starts = self._starts(partitions)
        self._service.log.info(
            "group.assigned", topic=self.topic, starts={p: o for (_, p), o in sorted(starts.items())}
        )
        self._tell_assigned(starts)
        return starts

    def _revoked(self, partitions: list[Partition]) -> None:
        self._metrics.count("rebalances_total", event="revoked")
        went = {partition for _, partition in partitions}
        self._service.log.info("group.revoked", topic=self.topic, partitions=sorted(went))
        self.backlog = deque(record for record in self.backlog if record.partition not in went)
        self._paused = [place for place in self._paused if place[1] not in went]
        self._on_revoked(self, [(self.topic, partition) for partition in sorted(went)])
        self.owned -= went
        self.count_refused()

    def poll(self, timeout_s: float) -> int:
        """Add what is there to the backlog, waiting at most `timeout_s` for a first record; how many came. Raises OffsetGone, BrokerError."""
        if self._paused:
            self._consumer.resume(self._paused)
            self._paused = []
        return self._poll(self.spec.chunk, timeout_s)

    def _poll(self, most: int, timeout_s: float) -> int:
        self._polled_s = time.monotonic()
        try:
            records = self._consumer.poll_many(most, timeout_s)
        except OffsetGone as error:
            self._gone(error)
            return 0
        self.backlog.extend(records)
        if not self.commits and len(self.backlog) > 1:
            # Only the newest of a key is worth decoding; the order of those that stay is the log's.
            newest = {(record.partition, record.key): record for record in self.backlog}
            self.backlog = deque(record for record in self.backlog if newest[record.partition, record.key] is record)
        return len(records)

    def _gone(self, error: OffsetGone) -> None:
        policy = self.spec.gone if self.commits else "latest"
        if policy == "fail" or error.partition < 0:
            raise error
        low, end = self._consumer.watermarks(error.topic, error.partition)
        offset = low if policy == "earliest" else end
        self._metrics.count("offsets_gone_total", topic=self.topic)
        self._service.log.warning(
            "offset.gone",
            topic=self.topic,
            partition=error.partition,
            policy=policy,
            goes_on_at=offset,
            reason=str(error),
        )
        self._consumer.seek(error.topic, error.partition, offset)
        self._on_jumped(self.topic, error.partition, offset)

    def rest(self) -> None:
        """Called while nobody wants this input: stay a member of the group without reading."""
        if self.spec.how != "group" or time.monotonic() - self._polled_s < REST_S:
            return
        assignment = self._consumer.assignment()
        fresh = [place for place in assignment if place not in self._paused]
        if fresh:
            self._consumer.pause(fresh)
            self._paused = list(assignment)
        self._poll(1, 0.0)

    def commit(self, offsets: Mapping[int, int], *, wait: bool = False) -> None:
        """Commit {partition: next offset} for the group; refusals are counted, not raised."""
        self._consumer.commit(
            {(self._full, partition): offset for partition, offset in offsets.items()}, OWN_COMMIT, wait
        )
        self._metrics.count("commits_total")
        self.count_refused()

    def count_refused(self) -> None:
        """Look for answers to asynchronous commits."""
        refused = self._consumer.refused_commits
        if refused > self._refused:
            self._metrics.count("commit_errors_total", refused - self._refused)
            self._refused = refused
            self.refused = True

    def close(self) -> None:
        """Give the consumer back; answers to asynchronous commits are counted first."""
        self.count_refused()
        self._consumer.close()
