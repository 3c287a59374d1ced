"""The pipeline's only hands on Kafka: reading a split's three inputs, reading ranges of the log again, writing batches.

Rules of this file:
1. Transitions come as a member of the group `<run>.replay` (static: the process's name), so Kafka shares the actors out over the pipeline
   processes. Priorities and replay-stats are assigned, all of them to every split, and never wait for anything.
2. A committed offset decides where reading goes on; one without our metadata was written by an operator, and is obeyed, in the log.
3. What is not in the log any more is read from the earliest record on, and counted.
4. A learner batch's records go to one partition, one after another; partitions take turns, and one whose learner is behind is passed over.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable, Iterator, Mapping

from gorila.config import Config
from gorila.errors import OffsetGone
from gorila.flow import LagGate
from gorila.kafka import CommittedOffsets, Consumer, Partition, Received
from gorila.service import Service
from gorila.topics import group_name
from pipelines.elements import Chunk, Drawn

OWN_METADATA = "gorila"
LEARNED_RECORDS = 256
PAUSE_AFTER_S = 1.0
REFRESH_S = 0.01


def records_a_poll(config: Config) -> int:
    """Blocks one poll may bring: half of what the rate rule lets in at once, so that no poll overshoots it by more than that."""
    rows = config.replay.max_error_rows / config.replay.samples_per_insert
    return max(1, min(256, int(rows / config.actor.block_steps / 2)))


class SplitReader:
    """Reads what one split needs, as chunks. A Beam bundle may be final while the next one polls: one thing at a time.

    Attributes:
        read: transitions partition -> offset after the newest record handed on; where it starts, before there is one.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._lock = threading.RLock()
        self.read: dict[int, int] = {}
        self._topic = service.topic("transitions")
        self._records = records_a_poll(service.config)
        self._owned: dict[int, int] = {}
        self._changed = True
        self._handled: dict[int, int] = {}
        self._committed: dict[int, int] = {}
        self._committed_at_s = 0.0
        self._unwanted_since_s: float | None = None
        self._paused = self._closing = False
        self.polls = 0
        self.offsets_gone = 0
        self._learned = service.topic("priorities")
        self._tail: Consumer = service.cluster.consumer()
        ends = {
            (topic, 0): self._tail.watermarks(topic, 0)[1] for topic in (self._learned, service.topic("replay-stats"))
        }
        self._priorities_next = ends[(self._learned, 0)]
        self._tail.assign(ends)
        self._transitions: Consumer = service.cluster.consumer(
            group_name(service.run, "replay"),
            instance_id=service.name,
            on_assign=self._came,
            on_revoke=self._went,
            watched="transitions",
        )
        self._transitions.subscribe([self._topic])

    def _came(self, partitions: list[Partition]) -> Mapping[Partition, int]:
        """Rule 2. Where each partition starts."""
        if self._closing:
            # The group's answer came while leaving: nothing will be read, and a consumer that closes gets no answers any more (10 s of waiting).
            return dict.fromkeys(partitions, 0)
        starts: dict[Partition, int] = {}
        for where, (offset, metadata) in self._transitions.committed(partitions).items():
            low, high = self._transitions.watermarks(*where)
            start = low if offset is None else offset
            if offset is not None and metadata != OWN_METADATA:
                self._service.log.warning("replay.operator_reset_obeyed", partition=where[1], offset=offset)
            if not low <= start <= high:
                self.offsets_gone += 1
                self._service.log.warning(
                    "replay.offset_gone", topic=where[0], partition=where[1], offset=start, earliest=low
                )
                start = low
            starts[where] = start
            self._owned[where[1]] = self.read[where[1]] = start
        self._changed, self._paused, self._unwanted_since_s = True, False, None
        self._service.log.info("replay.assigned", starts={p: start for (_, p), start in sorted(starts.items())})
        return starts

    def _went(self, partitions: list[Partition]) -> None:
        """Commit what was handled of them: their next owner starts there."""
        gone = {p for _, p in partitions}
        self._commit({p: offset for p, offset in self._handled.items() if p in gone}, wait=True)
        for partition in gone:
            self._owned.pop(partition, None)
            self._committed.pop(partition, None)
            self.read.pop(partition, None)
        self._changed = True
        self._service.log.info("replay.revoked", partitions=sorted(gone))

    def poll(self, timeout_s: float, want_transitions: bool) -> Chunk:
        """Wait for a first record at most `timeout_s`, take what is there."""
        with self._lock:
            return self._poll_inputs(timeout_s, want_transitions)

    def _poll_inputs(self, timeout_s: float, want_transitions: bool) -> Chunk:
        self.polls += 1
        transitions = self._poll_transitions(timeout_s, want_transitions)
        waits = not want_transitions and not self._paused
        start, learned, stats = self._priorities_next, [], []
        for record in self._poll(self._tail, LEARNED_RECORDS, timeout_s if waits else 0.0):
            if record.topic == self._learned:
                learned.append(record)
                self._priorities_next = record.offset + 1
            else:
                stats.append(record)
        chunk = Chunk(int(time.time() * 1000), start, None, transitions, learned, stats)
        if self._changed:
            chunk.assignment, self._changed = dict(self._owned), False
        return chunk

    def _poll_transitions(self, timeout_s: float, wanted: bool) -> list[Received]:
        """Not wanted, they are left alone; for long, they are paused instead and polled, or the group would think us dead.

        `pause` throws away what was fetched ahead, so it is no tool for the milliseconds the rate rule usually takes.
        """
        if wanted:
            self._unwanted_since_s = None
            if self._paused:
                self._transitions.resume(self._transitions.assignment())
                self._paused = False
        else:
            now_s = time.monotonic()
            self._unwanted_since_s = self._unwanted_since_s or now_s
            if not self._paused and now_s - self._unwanted_since_s < PAUSE_AFTER_S:
                return []
            if not self._paused:
                self._transitions.pause(self._transitions.assignment())
                self._paused = True
        records = self._poll(self._transitions, self._records, timeout_s)
        if records:
            self._service.metrics.count("records_read_total", len(records), topic="transitions")
        # A record of a partition that went away while it lay in the queue is another split's now.
        records = [record for record in records if record.partition in self._owned]
        for record in records:
            self.read[record.partition] = record.offset + 1
        return records

    def ahead_of(self, taken: Mapping[int, int]) -> int:
        """Records read that a memory which stands at `taken` does not have; a partition it does not name it has from the start on."""
        with self._lock:
            return sum(
                max(0, at - max(taken.get(p, 0), self._owned[p])) for p, at in self.read.items() if p in self._owned
            )

    def _poll(self, consumer: Consumer, records: int, timeout_s: float) -> list[Received]:
        try:
            return consumer.poll_many(records, timeout_s)
        except OffsetGone as gone:
            earliest = consumer.watermarks(gone.topic, gone.partition)[0]
            self.offsets_gone += 1
            self._service.log.warning(
                "replay.offset_gone", topic=gone.topic, partition=gone.partition, earliest=earliest
            )
            consumer.seek(gone.topic, gone.partition, earliest)
            return []

    def handled(self, positions: Mapping[int, int], now: bool = False) -> None:
        """What may be committed: next offset by partition. Commits what is due (`now`: whatever is new), without waiting."""
        with self._lock:
            # Beam bundles may become final in another order than they ended in.
            self._handled = {
                p: max(offset, self._committed.get(p, offset)) for p, offset in positions.items() if p in self._owned
            }
            # A quarter of the promise: the readers of this number (actors) have their own delay in seeing it.
            if now or time.monotonic() - self._committed_at_s >= self._service.config.replay.commit_interval_ms / 4000:
                self._commit(self._handled)

    def commit_now(self) -> None:
        """Commit everything handled and wait for it. Raises BrokerError."""
        with self._lock:
            self._commit(self._handled, wait=True)

    def _commit(self, positions: Mapping[int, int], wait: bool = False) -> None:
        news = {p: offset for p, offset in positions.items() if self._committed.get(p) != offset}
        if news:
            self._transitions.commit({(self._topic, p): offset for p, offset in news.items()}, OWN_METADATA, wait)
            self._committed.update(news)
            self._committed_at_s = time.monotonic()

    def close(self) -> None:
        """Leave; nothing is committed here."""
        with self._lock:
            self._handled, self._closing = {}, True
            self._transitions.close()
            self._tail.close()


class LogReader:
    """Reads ranges of the log again, for recovery. One `read` at a time."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._consumer: Consumer | None = None

    def _open(self) -> Consumer:
        if self._consumer is None:
            self._consumer = self._service.cluster.consumer(ends=True)
        return self._consumer

    def bounds(self, topic: str, partition: int, timeout_s: float = 10.0) -> tuple[int, int]:
        """(first offset there is, next offset to be written) of a logical topic. Raises BrokerError."""
        return self._open().watermarks(self._service.topic(topic), partition, timeout_s)

    def all_bounds(self, topic: str, partitions: Iterable[int]) -> dict[int, tuple[int, int]]:
        """As `bounds`, by partition: two requests however many there are. Raises BrokerError."""
        name, admin = self._service.topic(topic), self._service.cluster.admin()
        places = [(name, p) for p in partitions]
        lows, ends = admin.offsets(places, "earliest"), admin.offsets(places, "latest")
        return {place[1]: (lows[place], ends[place]) for place in places}

    def firsts(self, topic: str, partitions: Iterable[int], timeout_s: float) -> dict[int, int]:
        """{partition: first offset there is}, by one request however many there are. Raises BrokerError."""
        name = self._service.topic(topic)
        found = self._service.cluster.admin().offsets([(name, p) for p in partitions], "earliest", timeout_s)
        return {partition: offset for (_, partition), offset in found.items()}

    def offset_at(self, topic: str, partition: int, timestamp_ms: int) -> int:
        """First offset whose append time is not before `timestamp_ms`; the end where there is none. Raises BrokerError."""
        where = (self._service.topic(topic), partition)
        found = self._service.cluster.admin().offsets([where], timestamp_ms)[where]
        return found if found >= 0 else self.bounds(topic, partition)[1]

    def read(self, topic: str, partition: int, start: int, stop: int) -> Iterator[Received]:
        """Records of [start, stop) that the log still has, in order. Ends early when the process has to stop."""
        return self.read_all(topic, {partition: (start, stop)})

    def read_all(self, topic: str, ranges: Mapping[int, tuple[int, int]]) -> Iterator[Received]:
        """As `read`, of several partitions at once, each in order: read one after another, each would wait for the last, empty fetch of the one before
        (`fetch.wait.max.ms`: ten seconds for a hundred actors)."""
        name, bounds = self._service.topic(topic), self.all_bounds(topic, ranges)
        wanted = {p: (max(start, bounds[p][0]), min(stop, bounds[p][1])) for p, (start, stop) in ranges.items()}
        left = {p: stop for p, (start, stop) in wanted.items() if start < stop}
        if not left:
            return
        consumer = self._open()
        consumer.assign({(name, p): wanted[p][0] for p in left})
        while left and not self._service.stop.is_set():
            for record in consumer.poll_many(512, 0.1):
                # What follows a range is passed over, not paused: with a pause the next range was never read (docs/decisions/0016).
                stop = left.get(record.partition, 0)
                if record.offset < stop:
                    yield record
                if record.offset + 1 >= stop:
                    left.pop(record.partition, None)
            # Transaction markers and compaction leave gaps: the end may be reached without its last record.
            for partition, stop in list(left.items()):
                if (consumer.end_reached(name, partition) or 0) >= stop:
                    del left[partition]

    def close(self) -> None:
        """Give the connections back; the next range opens them again."""
        if self._consumer is not None:
            self._consumer.close()
            self._consumer = None


class BatchWriter:
    """Writes what was drawn; knows whether a learner is behind. Used by one thread."""

    def __init__(self, service: Service) -> None:
        config = service.config
        self._service = service
        self._topic = service.topic("batches")
        self._partitions = config.learner.count
        group = group_name(service.run, "learner")
        bound = config.replay.max_lag_batches * config.record_parts
        self._offsets = CommittedOffsets(service.cluster, group)
        self._gate = LagGate(
            service.cluster,
            group,
            self._topic,
            range(self._partitions),
            bound,
            source=self._offsets,
            refresh_s=REFRESH_S,
        )
        self._producer = service.cluster.producer()
        ends = service.cluster.admin().end_offsets([(self._topic, p) for p in range(self._partitions)])
        self._next = {p: ends[(self._topic, p)] for p in range(self._partitions)}
        self._pending = dict.fromkeys(range(self._partitions), 0)
        self._turn = 0

    def take_turn(self, parts: int) -> int | None:
        """The partition for the next learner batch, its `parts` records reserved there; None while every learner is behind."""
        for _ in range(self._partitions):
            partition = self._turn
            self._turn = (partition + 1) % self._partitions
            if self.take(partition, parts):
                return partition
        return None

    def take(self, partition: int, parts: int) -> bool:
        """Reserve the next `parts` offsets of one partition, unless its learner is behind."""
        if not self._gate.may_write(partition, self._next[partition]):
            return False
        self.reserve(partition, parts)
        return True

    def reserve(self, partition: int, parts: int) -> None:
        """Take the next `parts` offsets of a partition, whoever is behind."""
        self._next[partition] += parts
        self._pending[partition] += parts

    def give_back(self, partition: int, parts: int) -> None:
        """Nothing was drawn for the turn after all."""
        self._next[partition] -= parts
        self._pending[partition] -= parts
        self._turn = partition

    def write(self, drawn: Drawn) -> None:
        """Queue the records, in order. Raises BrokerError, RecordTooLarge."""
        topic = self._service.topic(drawn.topic)
        then = self._acknowledged if drawn.topic == "batches" else self._stats_acknowledged
        for value in drawn.values:
            self._producer.send(topic, value, key=drawn.key, partition=drawn.partition, on_delivery=then)
        self._service.metrics.count("bytes_written_total", sum(map(len, drawn.values)), topic=drawn.topic)

    def _stats_acknowledged(self, _partition: int, _offset: int) -> None:
        self._service.metrics.count("records_written_total", topic="replay-stats")

    def _acknowledged(self, partition: int, offset: int) -> None:
        self._pending[partition] -= 1
        self._service.metrics.count("records_written_total", topic="batches")
        # Other splits write here too: what the broker says is ahead of what was counted.
        self._next[partition] = max(self._next[partition], offset + 1 + self._pending[partition])

    def poll(self) -> None:
        """Serve delivery reports. Raises BrokerError."""
        self._producer.poll(0.0)

    def waiting_for(self) -> str:
        """Whom, or empty."""
        return self._gate.waiting_for()

    def drain(self, timeout_s: float) -> int:
        """Wait until everything is acknowledged; how many records are not. Raises BrokerError."""
        return self._producer.flush(timeout_s)

    def close(self, timeout_s: float) -> None:
        """After `drain`. With no time to wait, what would wait for Kafka is left to the process's end."""
        self._producer.close(timeout_s)
        if timeout_s:
            self._offsets.close()
