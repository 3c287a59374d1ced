"""One split at work: chunks in, drawn batches out, around the pure ReplaySplit. The log is its write-ahead log.

One rule for restart, rescale, rebalance and Beam's redelivery: a ring has a next offset; a record below it is ignored, one at it is
appended, one above it waits until the gap is filled from Kafka (ring_recovery.py). So a position may be committed as soon as its record is
in a ring: everything else can be rebuilt.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TypeVar

from gorila.errors import BadRecord, BrokerError
from gorila.kafka import Received
from gorila.messages import Message, Priorities, ReplayStats, TransitionBlock
from gorila.rounds import Rounds
from gorila.seeds import generator
from gorila.service import Service
from gorila.waiting import WaitLog
from pipelines.elements import Chunk, Drawn
from pipelines.kafka_io import BatchWriter, LogReader, SplitReader, records_a_poll
from pipelines.replay import ReplaySplit
from pipelines.ring_recovery import RingRecovery

EACH_POLL = "each poll"
"""Commits: source, memory and sink are fused in one thread; what `yield` returned from is in the memory."""
EACH_BUNDLE = "each bundle"
"""Commits when a Beam bundle is final, and at the end: steps run beside each other."""
EACH_CHECKPOINT = "each checkpoint"
"""Commits when a Beam bundle is final, which on Flink is when a checkpoint is complete, and never else. The memory may be in another process."""
READ_AHEAD_POLLS = 4
DRAIN_S = 2.0
CLOSE_S = 1.0
LOW_WATERMARKS_MS = 10_000
LOW_WATERMARK_S = 0.5
M = TypeVar("M", bound=Message)


class SplitRoom:
    """Everything a split holds in this process. With EACH_POLL used by one thread; else the steps take `lock`, and the reader has its own.

    Attributes:
        lock: of the memory and the writer.
        failure: the first exception raised in one of the DoFns: the runner hands on its text only.
        moved_s: monotonic time of the newest record in or batch out.
    """

    def __init__(self, service: Service, split: str, commits: str = EACH_POLL) -> None:
        config = service.config
        self.lock = threading.RLock()
        self._commits = commits
        self._heard: ReplayStats | None = None  # this split's own stats, when its memory is elsewhere
        # Draws need not repeat after a restart; under --synchronous they are keyed by round instead.
        rng = generator(config.run.seed, "replay", service.index, epoch=int(time.time() * 1000))
        self.service, self.split = service, split
        self.replay = ReplaySplit(config, split, rng, service.facts)
        self.reader: SplitReader | None = None
        self.writer = BatchWriter(service)
        self.failure: Exception | None = None
        self.moved_s = time.monotonic()
        self._log = LogReader(service)
        self._recovery = RingRecovery(service, self.replay, self._log)
        self._owned: set[int] = set()
        self._priorities_next: int | None = None
        self._stats_due_ms = self._low_due_ms = 0
        self._waits = WaitLog(service.log, service.metrics)
        self._rounds = Rounds.of(config) if config.run.synchronous else None
        self._restore_totals()

    @contextmanager
    def remembering(self) -> Iterator[None]:
        """Keep the first failure as it was raised."""
        try:
            yield
        except Exception as error:
            self.failure = self.failure or error
            raise

    @property
    def assigned(self) -> bool:
        """Whether this room was ever told its partitions."""
        return self._priorities_next is not None

    def open_reader(self) -> SplitReader:
        """The reader of this split, opened by the source's first Beam bundle."""
        if self.reader is None:
            self.reader = SplitReader(self.service)
        return self.reader

    def positions(self) -> dict[int, int]:
        """Next offset by partition owned: what may be committed."""
        found = {p: self.replay.next_offset(p) for p in self._owned}
        return {p: offset for p, offset in found.items() if offset is not None}

    def commit_due(self) -> None:
        """After each poll: serve delivery reports, commit what is due, without waiting. Raises BrokerError."""
        self.service.health.beat()
        if self._commits == EACH_POLL:
            self.writer.poll()
            self.open_reader().handled(self.positions())

    def commit_final(self, read: Mapping[int, int]) -> None:
        """The Beam bundle is final: `read` is where the source stood at its end. What the memory has not taken yet is left to the next."""
        with self.lock:
            final = self.positions() if self.assigned else dict(read)
        if self._commits != EACH_POLL:
            final = {p: min(offset, read[p]) for p, offset in final.items() if p in read}
        self.open_reader().handled(final, now=True)

    def may_read(self, stats: list[Received]) -> bool:
        """The source's question: whether transitions may be read now.

        Fused, the memory knows. Else records are on their way between the two: no more than a few polls of them, or a long log would go into the
        runner's buffers. Where the memory is in another process, its stats say how far it is.

        Args:
            stats: records of replay-stats the source has read since it last asked.
        """
        with self.lock:
            if self._commits == EACH_POLL:
                return self.wants_transitions()
            if self.assigned:
                taken, wants = self.positions(), self.wants_transitions()
            else:
                for record in stats:
                    if record.key == self.split.encode():
                        self._heard = self._decoded(record, ReplayStats) or self._heard
                heard = self._heard
                names = heard.actors if heard else []
                offsets = heard.next_offsets.tolist() if heard else []
                taken = {int(name): offset for name, offset in zip(names, offsets, strict=False)}
                wants = heard is None or heard.wants_transitions
        ahead = self.open_reader().ahead_of(taken)
        return wants and ahead <= READ_AHEAD_POLLS * records_a_poll(self.service.config)

    def handle(self, chunk: Chunk) -> Iterator[Drawn]:
        """Take in what came, then draw as far as the rate rule and the learners' lag let it. Raises BrokerError, RunError."""
        if self._commits != EACH_POLL:
            self.service.health.beat()
            self.writer.poll()
        if chunk.assignment is not None:
            self._reassign(chunk.assignment, chunk.priorities_next)
        if chunk.priorities or chunk.transitions:
            self.moved_s = time.monotonic()
        for record in chunk.priorities:
            self._take_priorities(record)
        for record in chunk.transitions:
            self._take_transitions(record)
        self._recovery.catch_up()
        for record in chunk.stats:
            if record.key != self.split.encode():
                stats = self._decoded(record, ReplayStats)
                if stats is not None:
                    self.replay.other_split(stats, record.offset)
        yield from self._draw()
        if chunk.time_ms >= self._stats_due_ms:
            self._stats_due_ms = chunk.time_ms + int(self.service.config.replay.stats_interval_ms)
            yield self._stats(chunk.time_ms)
        if chunk.time_ms >= self._low_due_ms:
            self._low_due_ms = chunk.time_ms + LOW_WATERMARKS_MS
            self._forget_what_the_log_forgot()

    def _forget_what_the_log_forgot(self) -> None:
        try:
            firsts = self._log.firsts("transitions", self._owned, LOW_WATERMARK_S)
        except BrokerError:
            return  # Kafka is away, its door has said so: next time
        for partition, first in firsts.items():
            self.replay.low_watermark(partition, first)

    def wants_transitions(self) -> bool:
        """Whether transitions may be read now. In rounds the actor waits by itself."""
        return self._rounds is not None or self.replay.wants_transitions()

    def _draw_round(self, rounds: Rounds) -> Iterator[Drawn]:
        """A synchronous round's batches, all at once: a priority that came between two of them would be the clock's doing."""
        drawn = self.replay.batches_total
        blocks = self.replay.next_offset(0) or 0
        count = rounds.may_draw(drawn, blocks, self._priorities_next or 0)
        if count == 0:
            return
        self.replay.rng = generator(self.service.config.run.seed, "replay", 0, 0, rounds.next_draw(drawn))
        self.moved_s = time.monotonic()
        for batch in self.replay.draw(count, regardless=True):
            self.writer.reserve(0, len(batch))
            yield Drawn("batches", 0, None, [self.service.schemas.encode(record) for record in batch])

    def _draw(self) -> Iterator[Drawn]:
        if self._rounds is not None:
            yield from self._draw_round(self._rounds)
            return
        parts = self.service.config.record_parts
        encode = self.service.schemas.encode
        while (partition := self.writer.take_turn(parts)) is not None:
            batches = self.replay.draw(1)
            if not batches:
                self.writer.give_back(partition, parts)
                return
            self.moved_s = time.monotonic()
            yield Drawn("batches", partition, None, [encode(record) for record in batches[0]])

    def _stats(self, now_ms: int) -> Drawn:
        stats = self.replay.stats(now_ms)
        stats.waiting_for = self.writer.waiting_for() or stats.waiting_for
        self._waits.now(stats.waiting_for, time.monotonic())
        return Drawn("replay-stats", 0, self.split.encode(), [self.service.schemas.encode(stats)])

    def _decoded(self, record: Received, kind: type[M]) -> M | None:
        """The message; None when its bytes went to dead-letters."""
        try:
            return self.service.schemas.expect(record.value, kind)
        except BadRecord as error:
            self.service.dead_letter(record, error)
            return None

    def _take_transitions(self, record: Received) -> None:
        partition, offset = record.partition, record.offset
        have = self.replay.next_offset(partition)
        if have is None or offset < have:
            return
        if offset > have:
            self._recovery.fill_gap(partition, offset, self._priorities_next or 0)
        block = self._decoded(record, TransitionBlock)
        try:
            self.replay.insert(partition, offset, record.timestamp_ms, block)
        except BadRecord as error:
            self.service.dead_letter(record, error)

    def _take_priorities(self, record: Received) -> None:
        expected = self._priorities_next
        if expected is None or record.offset < expected:
            return
        if record.offset > expected:
            self._recovery.fill_priorities(expected, record.offset)
        self._priorities_next = record.offset + 1
        priorities = self._decoded(record, Priorities)
        if priorities is not None:
            self._recovery.learned(priorities)

    def _reassign(self, assignment: Mapping[int, int], priorities_next: int) -> None:
        for partition in self._owned - set(assignment):
            self._recovery.drop(partition)
        self._owned = set(assignment)
        self.service.health.ready()
        if self._priorities_next is None:
            self._priorities_next = priorities_next
        new = {p: start for p, start in assignment.items() if self.replay.next_offset(p) is None}
        if new:
            self._recovery.open_rings(new, self._priorities_next)

    def _restore_totals(self) -> None:
        """A restarted split's samples-per-insert error goes on where it was."""
        newest: dict[str, tuple[int, ReplayStats]] = {}
        for record in self._log.read("replay-stats", 0, 0, self._log.bounds("replay-stats", 0)[1]):
            try:
                stats = self.service.schemas.expect(record.value, ReplayStats)
            except BadRecord:
                continue
            newest[stats.split] = (record.offset, stats)
        for split, (offset, stats) in newest.items():
            if split == self.split:
                self.replay.restore_totals(stats)
            else:
                self.replay.other_split(stats, offset)

    def close(self) -> None:
        """Publish the totals, wait until everything is acknowledged, commit what was handled, leave: within 5 s, Kafka there or not.

        Raises:
            BrokerError: a record failed for good.
        """
        left = 0
        try:
            if self.failure is None and self.assigned:
                self.writer.write(self._stats(int(time.time() * 1000)))
            left = self.writer.drain(DRAIN_S)
            if self.reader is not None and self._commits != EACH_CHECKPOINT:
                self.reader.handled(self.positions(), now=True)
                if not left:
                    self.reader.commit_now()
            self.service.log.info("replay.stopped", unacknowledged=left, positions=self.positions())
        finally:
            self.writer.close(0.0 if left else CLOSE_S)
            # With Kafka away leaving the group would wait for it; a static member keeps its partitions either way.
            if self.reader is not None and not left:
                self.reader.close()
            self._log.close()
