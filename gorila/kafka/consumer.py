"""Reading records, in a group or from explicit partitions."""

from __future__ import annotations

import os
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import confluent_kafka as ck
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from gorila.errors import BrokerError, OffsetGone
from gorila.kafka.connection import (
    LATER,
    NOT_ALLOWED,
    SLICE_S,
    check_process,
    library_log,
    log,
    patiently,
    refusal,
)
from gorila.topics import MAX_RECORD_BYTES, NO_GROUP

if TYPE_CHECKING:
    from gorila.kafka.cluster import Cluster

COMMIT_METADATA = "gorila"
EARLIEST: int = ck.OFFSET_BEGINNING
LATEST: int = ck.OFFSET_END
Partition = tuple[str, int]

SESSION_LOST = frozenset(
    {
        KafkaError.ILLEGAL_GENERATION,
        KafkaError.UNKNOWN_MEMBER_ID,
        KafkaError.REBALANCE_IN_PROGRESS,
        KafkaError.FENCED_INSTANCE_ID,
        KafkaError._NO_OFFSET,
        KafkaError._STATE,
        KafkaError._ASSIGNMENT_LOST,
    }
)

FENCED = KafkaError(KafkaError.FENCED_INSTANCE_ID).str()

# Who only looks takes what has come in this time with one fetch: answered record by record, onlookers cost the broker as much as the roles do.
UNHURRIED_BYTES, UNHURRIED_MS = 1024 * 1024, 200


@dataclass(frozen=True, slots=True)
class Received:
    """A record as it was in the log; `topic` is the full name on the broker."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    value: bytes | None
    headers: tuple[tuple[str, bytes], ...] = ()


class Consumer:
    """Reads records, in a group or from explicit partitions."""

    def __init__(
        self,
        cluster: Cluster,
        group: str | None,
        instance_id: str | None,
        on_assign: Callable[[list[Partition]], Mapping[Partition, int] | None] | None,
        on_revoke: Callable[[list[Partition]], None] | None,
        ends: bool,
        queued_kib: int,
        watched: str,
        hurried: bool,
    ) -> None:
        extra: dict[str, Any] = {
            "group.id": group or NO_GROUP,
            "enable.auto.commit": False,
            "enable.auto.offset.store": False,
            "auto.offset.reset": "error",
            "isolation.level": "read_committed",
            "partition.assignment.strategy": "cooperative-sticky",
            "session.timeout.ms": 10_000,
            "heartbeat.interval.ms": 1_000,
            "max.poll.interval.ms": 120_000,
            "fetch.min.bytes": 1 if hurried else UNHURRIED_BYTES,
            "fetch.wait.max.ms": 100 if hurried else UNHURRIED_MS,
            "fetch.error.backoff.ms": 50,
            "fetch.queue.backoff.ms": 10,
            "fetch.max.bytes": 2 * MAX_RECORD_BYTES,
            "max.partition.fetch.bytes": MAX_RECORD_BYTES,
            "receive.message.max.bytes": 4 * MAX_RECORD_BYTES,
            "queued.max.messages.kbytes": queued_kib,
            "enable.partition.eof": ends,
            "on_commit": self._committed,
            **cluster.statistics_settings(watched),
        }
        if instance_id:
            extra["group.instance.id"] = instance_id
        settings, self._link = cluster.client_settings("consumer", extra)
        self._servers, self._group, self._pid = cluster.bootstrap_servers, group, os.getpid()
        self._on_assign, self._on_revoke = on_assign, on_revoke
        self._ends: dict[Partition, int] = {}
        # Each partition's error comes once, and several may come with one poll: none may take another's place.
        self._pending: deque[BrokerError] = deque()
        self.refused_commits = 0
        self._closing = False
        self._subscribed: list[str] = []
        self._held: set[Partition] = set()
        self._settings = settings
        self._consumer = ck.Consumer(settings, logger=library_log)

    def _committed(self, error: KafkaError | None, partitions: list[TopicPartition]) -> None:
        bad = error or next((p.error for p in partitions if p.error), None)
        if bad is not None and bad.code() in NOT_ALLOWED:  # lag would grow for ever, and writers wait for it
            self._pending.append(refusal(f"Kafka at {self._servers}: committing for {self._group}", bad))
        elif bad is not None and bad.code() != KafkaError._NO_OFFSET:
            # A partition that went to another member in the meantime, or Kafka away: the next commit covers it.
            self.refused_commits += 1
            log.warning("kafka.commit_refused group=%s reason=%r", self._group, bad.str())

    def subscribe(self, topics: Sequence[str]) -> None:
        """Share the topics' partitions with the group."""
        if self._group is None:
            raise BrokerError("subscribe needs a consumer group")
        self._subscribed = list(topics)
        self._consumer.subscribe(list(topics), on_assign=self._assigned, on_revoke=self._revoked, on_lost=self._revoked)

    def _assigned(self, consumer: Any, came: list[TopicPartition]) -> None:
        partitions = [(p.topic, p.partition) for p in came]
        if (
            self._closing
        ):  # librdkafka hands out an assignment even inside close(): asking Kafka there would hold the stop up
            consumer.incremental_assign([TopicPartition(*p, ck.OFFSET_END) for p in partitions])
            return
        starts = dict((self._on_assign(partitions) if self._on_assign and partitions else None) or {})
        unsaid = [p for p in partitions if p not in starts]
        for partition, (offset, _) in self.committed(unsaid).items() if unsaid else ():
            starts[partition] = ck.OFFSET_BEGINNING if offset is None else offset
        consumer.incremental_assign([TopicPartition(*p, starts[p]) for p in partitions])
        self._held |= set(partitions)
        # A pause outlives the loss of a partition in librdkafka: one that was paused, lost and given back would never be read again.
        consumer.resume([TopicPartition(*p) for p in partitions])

    def _revoked(self, consumer: Any, went: list[TopicPartition]) -> None:
        if self._on_revoke and went:
            self._on_revoke([(p.topic, p.partition) for p in went])
        self._forget_gone({(p.topic, p.partition) for p in went})
        self._held -= {(p.topic, p.partition) for p in went}
        consumer.incremental_unassign(went)

    def _join_anew(self) -> None:
        """A static member was silent for its session; what it sent next went out under its name without a member's id (a heartbeat of librdkafka's, say), and Kafka
        took that for a second process of the name. For librdkafka such a consumer is dead, so another takes its place. Had there been a second process,
        it is told now, and started again it tells us, who have an id then."""
        log.warning("kafka.joins_anew group=%s", self._group)
        dead, self._consumer = self._consumer, ck.Consumer(self._settings, logger=library_log)
        dead.close()
        if self._held and self._on_revoke:
            self._on_revoke(sorted(self._held))
        self._held.clear()
        self._ends.clear()
        self._pending.clear()
        self.subscribe(self._subscribed)

    def assign(self, offsets: Mapping[Partition, int]) -> None:
        """Read exactly these partitions, from these offsets (EARLIEST and LATEST are taken too)."""
        self._ends.clear()
        self._forget_gone({(gone.topic, gone.partition) for gone in self._pending if isinstance(gone, OffsetGone)})
        self._consumer.assign([TopicPartition(topic, p, offset) for (topic, p), offset in offsets.items()])

    def poll_many(self, max_records: int, timeout_s: float) -> list[Received]:
        """Wait for the first record at most `timeout_s` (SLICE_S at the longest), then take what is there.

        Raises:
            OffsetGone: a partition's position is not in the log; `seek` it.
            BrokerError: Kafka refuses (being away is not an error: it gives an empty list).
        """
        check_process(self._pid)
        self._link.check()
        if self._pending:
            raise self._pending.popleft()
        first = self._consumer.poll(min(timeout_s, SLICE_S))
        if first is None:
            return []
        messages = [first, *self._consumer.consume(max_records - 1, 0)] if max_records > 1 else [first]
        records: list[Received] = []
        for message in messages:
            if message.error() is None:
                records.append(_received(message))
            else:
                self._take_error(message)
        if records:
            self._link.answers()
        elif self._pending:
            raise self._pending.popleft()
        return records

    def _forget_gone(self, partitions: set[Partition]) -> None:
        """They are another member's now, or read from elsewhere: where their log begins does not matter any more."""
        kept = (e for e in self._pending if not (isinstance(e, OffsetGone) and (e.topic, e.partition) in partitions))
        self._pending = deque(kept)

    def _take_error(self, message: Any) -> None:
        error, where = message.error(), (message.topic(), message.partition())
        if error.code() == KafkaError._PARTITION_EOF:
            self._ends[where] = message.offset()
        elif error.code() == KafkaError.GROUP_AUTHORIZATION_FAILED and self._group is None:
            pass  # nobody needs a right on NO_GROUP
        elif error.code() in (KafkaError._AUTO_OFFSET_RESET, KafkaError.OFFSET_OUT_OF_RANGE):
            self._pending.append(OffsetGone(f"topic {where[0]} partition {where[1]}: {error.str()}", *where))
        elif error.code() == KafkaError._FATAL and FENCED in error.str() and self._session_is_over():
            self._join_anew()
        elif (
            error.code() not in LATER
            and error.code() not in SESSION_LOST
            and error.code() != KafkaError._MAX_POLL_EXCEEDED
        ):
            self._pending.append(refusal(f"Kafka at {self._servers}: reading {where[0] or self._group}", error))
        else:
            log.warning("kafka.reading_disturbed group=%s reason=%r", self._group, error.str())

    def end_reached(self, topic: str, partition: int) -> int | None:
        """The partition's end (next offset) when it was last reached, past gaps that the log itself has. Needs `ends=True`."""
        return self._ends.get((topic, partition))

    def commit(self, offsets: Mapping[Partition, int], metadata: str = COMMIT_METADATA, wait: bool = False) -> None:
        """Commit next offsets for the group. A partition that went elsewhere is swallowed and counted in `refused_commits`.

        Raises:
            BrokerError: with `wait`, when Kafka does not answer.
        """
        if not offsets:
            return
        if self._session_is_over():
            self._committed(KafkaError(KafkaError._ASSIGNMENT_LOST), [])
            return
        marks = [TopicPartition(topic, p, offset, metadata) for (topic, p), offset in offsets.items()]
        try:
            self._consumer.commit(offsets=marks, asynchronous=not wait)
        except KafkaException as error:
            if error.args[0].code() not in SESSION_LOST and error.args[0].code() not in LATER:
                raise refusal(f"Kafka at {self._servers}: committing for {self._group}", error.args[0]) from None
            self._committed(error.args[0], [])

    def _session_is_over(self) -> bool:
        """Whether a static member was silent for longer than its session and has not joined again. What it commits then goes out under its name without a member's
        id; Kafka takes that for a second process of the name, and librdkafka takes Kafka's word for the end of this one."""
        return "group.instance.id" in self._settings and bool(self._subscribed) and not self._consumer.memberid()

    def committed(
        self, partitions: Sequence[Partition], timeout_s: float = 10.0
    ) -> dict[Partition, tuple[int | None, str]]:
        """{partition: (committed next offset or None, its metadata)}. Raises BrokerError."""
        marks = [TopicPartition(*p) for p in partitions]
        found = patiently(
            lambda s: self._consumer.committed(marks, timeout=s),
            self._servers,
            f"committed offsets of {self._group}",
            timeout_s,
        )
        return {(p.topic, p.partition): (p.offset if p.offset >= 0 else None, p.metadata or "") for p in found}

    def watermarks(self, topic: str, partition: int, timeout_s: float = 10.0) -> tuple[int, int]:
        """(first offset in the log, next offset to be written). Raises BrokerError."""
        mark = TopicPartition(topic, partition)

        def ask(slice_s: float) -> tuple[int, int]:
            found: tuple[int, int] | None = self._consumer.get_watermark_offsets(mark, timeout=slice_s)
            if found is None:
                raise KafkaException(KafkaError(KafkaError._TIMED_OUT))
            return found

        return patiently(ask, self._servers, f"watermarks of {topic} partition {partition}", timeout_s)

    def assignment(self) -> list[Partition]:
        """Partitions read now."""
        return sorted((p.topic, p.partition) for p in self._consumer.assignment())

    def pause(self, partitions: Iterable[Partition]) -> None:
        """Stop fetching; what was fetched ahead is thrown away and fetched again after `resume`."""
        self._consumer.pause([TopicPartition(*p) for p in partitions])

    def resume(self, partitions: Iterable[Partition]) -> None:
        """Fetch again."""
        self._consumer.resume([TopicPartition(*p) for p in partitions])

    def seek(self, topic: str, partition: int, offset: int) -> None:
        """Go on reading an assigned partition at `offset`. Raises BrokerError when it is not assigned."""
        self._ends.pop((topic, partition), None)
        mark = TopicPartition(topic, partition, offset)
        if (topic, partition) not in self.assignment():
            raise BrokerError(f"seek in {topic} partition {partition}, which is not assigned")
        try:
            # librdkafka's own seek is refused while a partition is not being fetched: just assigned, or just out of range.
            self._consumer.incremental_unassign([mark])
            self._consumer.incremental_assign([mark])
        except KafkaException as error:
            raise BrokerError(f"seek in {topic} partition {partition}: {error.args[0].str()}") from None

    def close(self) -> None:
        """Leave the group (a static member stays in it until its session times out)."""
        self._closing = True
        self._consumer.close()


def _received(message: Any) -> Received:
    headers = message.headers()
    return Received(
        message.topic(),
        message.partition(),
        message.offset(),
        message.timestamp()[1],
        message.key(),
        message.value(),
        tuple((name, value or b"") for name, value in headers) if headers else (),
    )
