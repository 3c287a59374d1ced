"""The loop around every consumer role. It owns Kafka and the clock; the role (gorila/processor.py) owns neither.

One turn, in this order. What a process that dies after step n has to show for it stands behind the step; tests/recovery kills it at each one:
1. poll      Wait for the first record of any wanted input, or for the acknowledgement of a tagged record; take what is there. Nothing is remembered yet.
2. decode    Bytes to messages. What cannot be used goes to dead-letters, and its offset moves on.
3. process   The role takes one message. Dying here, the record is read again: nothing it caused is in the log.
4. produce   What the role emitted is sent, or held behind a gate. Dying here, the record is read again and its emissions repeated.
   (2-4 for each record, then one tick of the role)
5. flush     When a commit is due: mark the newest emission, the role's positions and its due checkpoint. Then wait *over turns, not in place*, until
             everything up to the mark is acknowledged: emissions of later turns do not delay it.
6. snapshot  The marked checkpoint is produced. It exists only when everything it builds on does.
7. commit    Once that is acknowledged too, the marked positions are committed, asynchronously. Dying between 4 and 7 repeats what came after
             the last commit, at most a commit interval of it; dying after 7 repeats nothing that was committed.

Waiting. One consumer an input (gorila/inputs.py). A single wanted input is waited for in one blocking poll, which returns when a record arrives. Several
sources (two inputs, or an input and acknowledgements a role waits for) are looked at in turn, SLICE_S each: librdkafka offers no common wait from Python.
Measured on a real broker, produce to process, p50: see docs/decisions/0010-one-consumer-an-input.md.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gorila.emission import Emission
from gorila.errors import BadRecord, BrokerError
from gorila.inputs import Input, InputReader
from gorila.metrics import Metrics
from gorila.ports import Gate, Partition, ProducerPort, ServicePort
from gorila.processor import Incoming, Outgoing, Processor
from gorila.skipped import SkippedOffsets
from gorila.waiting import WaitLog

if TYPE_CHECKING:
    from gorila.kafka import Received

__all__ = ["Input", "Runtime"]

SLICE_S = 0.001
IDLE_SLICE_S = 0.004
BUSY_S = 1.0
FLUSH_S = 1.0
STOP_FLUSH_S = 2.5


@dataclass(slots=True)
class _Mark:
    """A state that may be committed once emission `number` and all before it are acknowledged."""

    number: int
    positions: dict[Partition, int]
    checkpoint: list[Outgoing]


class Runtime:
    """Runs one processor until `service.stop`.

    Optional methods of a processor, called when it has them:
        assigned({(topic, partition): start offset}), revoked([(topic, partition)]): a rebalance, told before the first and after the last record.
        skipped(topic, partition, offset): a record went to dead-letters instead of `process`.
        jumped(topic, partition, offset): records are gone from the log, reading goes on at `offset`.
        next_due_s() -> float: on tick's clock, when a tick is wanted even if nothing arrives.

    Args:
        gates: by logical topic. While a record is held behind one, nothing is read and the role is not ticked.
        commit_interval_s: committed offsets are about this far behind at most.
        tick_interval_s: a tick comes at least this often when idle.
        clock: seconds, monotonic; tests move it by hand.
        producer: what sends; None: one is made. The runtime closes it.
    """

    def __init__(
        self,
        service: ServicePort,
        processor: Processor,
        inputs: Sequence[Input],
        *,
        gates: Mapping[str, Gate] | None = None,
        commit_interval_s: float = 0.2,
        tick_interval_s: float = 0.02,
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.monotonic,
        producer: ProducerPort | None = None,
    ) -> None:
        if sum(spec.how == "group" for spec in inputs) > 1:
            raise ValueError("one group input a role: static membership knows a process by one name")
        self.service, self.processor = service, processor
        self.metrics = metrics or service.metrics
        self._producer = producer
        self._inputs, self._gates, self._clock = tuple(inputs), dict(gates or {}), clock
        self._commit_interval_s, self._tick_interval_s = commit_interval_s, tick_interval_s
        self._readers: list[InputReader] = []
        self._skipped = SkippedOffsets()
        self._waits = WaitLog(service.log, self.metrics)
        self._mark: _Mark | None = None
        self._committed: dict[Partition, int] = {}
        self._emission: Emission
        self._closing = False

    def run(self) -> None:
        """Turns until `service.stop`; then flushes, commits and closes within 5 s.

        Raises:
            BrokerError, OffsetGone: as the inputs' policies say. RunError: too many bad records (gorila/dead_letters.py). InvalidState and the like: from the role. In every
            such case nothing more is committed: the next process repeats what this one may have done wrong.
        """
        try:
            self.open()
            while not self.service.stop.is_set():
                self.turn()
            self.drain()
        finally:
            self.close()

    def open(self) -> None:
        """Make the clients and find where to begin."""
        service, now_s = self.service, self._clock()
        self._emission = Emission(
            self._producer or service.cluster.producer(),
            service.schemas,
            service.topic,
            self._gates,
            self.processor.delivered,
            self.metrics,
        )
        self._commit_due_s, self._busy_until_s = now_s + self._commit_interval_s, now_s + BUSY_S
        for spec in self._inputs:
            service.health.beat()
            self._readers.append(InputReader(service, spec, self.metrics, self._assigned, self._revoked, self._jumped))
        service.health.ready()

    def turn(self, wait_s: float | None = None) -> int:
        """One turn of the loop, waiting at most `wait_s` for a first record (None: until the next tick is due); how many records were handed in."""
        self.service.health.beat()
        # 1. Poll.
        arrived = self._poll(self._until_tick_s() if wait_s is None else wait_s)
        began_s = self._clock()
        handed = 0
        for reader in self._readers:
            before = handed
            # `wants` is asked again before each record: what a role no longer wants stays in the backlog.
            while reader.backlog and self._wanted(reader) and not self.service.stop.is_set():
                received = reader.backlog.popleft()
                handed += 1
                # 2. Decode.
                incoming = self._decode(reader, received)
                if incoming is None:
                    continue
                # 3. Process.
                outgoing = self._process(incoming, received)
                # 4. Produce.
                if outgoing and self._emission.emit(outgoing):
                    self._emission.serve()
            if handed > before:
                self.metrics.count("records_read_total", handed - before, topic=reader.topic)
        if not self._emission.held:
            self._emission.emit(self.processor.tick(self._clock()))
        if arrived:
            self.metrics.observe("turn_seconds", self._clock() - began_s)
        # 5-7. Flush, snapshot, commit.
        self._emission.serve()
        self._checkpoint()
        return handed

    # ---- 1. poll

    def _wanted(self, reader: InputReader) -> bool:
        return not self._emission.held and self.processor.wants(reader.topic)

    def _until_tick_s(self) -> float:
        due: Callable[[], float] | None = getattr(self.processor, "next_due_s", None)
        if due is None:
            return self._tick_interval_s
        return min(self._tick_interval_s, max(0.0, due() - self._clock()))

    def _poll(self, wait_s: float) -> bool:
        """Fill backlogs. Returns when a record or an awaited acknowledgement is there, or after `wait_s` (counted in slices, so that a clock moved by hand
        does not matter)."""
        emission, now_s = self._emission, self._clock()
        acknowledged = emission.serve()
        emission.release()
        self._waits.now(emission.waiting_for() or self.processor.waiting_for(), now_s)
        wanted = [reader for reader in self._readers if self._wanted(reader)]
        for reader in self._readers:
            if reader not in wanted:
                reader.rest()
        if any(reader.backlog for reader in wanted):
            return True
        if len(wanted) > 1 or acknowledged:
            arrived = sum(reader.poll(0.0) for reader in wanted)
            if arrived or acknowledged:
                self._busy_until_s = now_s + BUSY_S
                return bool(arrived)
        slice_s = SLICE_S if now_s < self._busy_until_s else IDLE_SLICE_S
        waited_s = 0.0
        while True:
            listening = emission.tagged > 0 or emission.held > 0 or not wanted
            patience_s = wait_s - waited_s
            alone = (len(wanted) == 1 and not listening) or (not wanted and not emission.held)
            step_s = patience_s if alone else min(patience_s, slice_s)
            for reader in wanted:
                if reader.poll(step_s):
                    self._busy_until_s = now_s + BUSY_S
                    return True
                waited_s += step_s
            if listening and (emission.serve(0.0 if wanted else step_s) or self._opened()):
                return False
            waited_s += 0.0 if wanted else step_s
            if waited_s >= wait_s or self.service.stop.is_set():
                return False

    def _opened(self) -> bool:
        """Whether the last held record went out."""
        if not self._emission.held:
            return False
        self._emission.release()
        return not self._emission.held

    # ---- 2. decode, 3. process

    def _decode(self, reader: InputReader, received: Received) -> Incoming | None:
        try:
            message = self.service.schemas.decode(received.value)
        except BadRecord as error:
            self._bad(reader.topic, received, error, "VALUE_CONVERTER")
            return None
        return Incoming(reader.topic, received.partition, received.offset, received.timestamp_ms, received.key, message)

    def _process(self, incoming: Incoming, received: Received) -> Sequence[Outgoing]:
        try:
            outgoing = list(self.processor.process(incoming))
        except BadRecord as error:
            self._bad(incoming.topic, received, error, "TASK_PUT")
            return ()
        self._skipped.good(incoming.topic, incoming.partition, incoming.offset)
        return outgoing

    def _bad(self, topic: str, received: Received, reason: BadRecord, stage: str) -> None:
        self.service.dead_letter(received, reason, stage)
        self._skipped.bad(topic, received.partition, received.offset)
        hook = getattr(self.processor, "skipped", None)
        if hook is not None:
            hook(topic, received.partition, received.offset)

    def _jumped(self, topic: str, partition: int, offset: int) -> None:
        # Committed though no record came: who is gated by this group's lag would wait for offsets that nobody can read any more.
        if offset > 0:
            self._skipped.bad(topic, partition, offset - 1)
        hook = getattr(self.processor, "jumped", None)
        if hook is not None:
            hook(topic, partition, offset)

    # ---- 5. flush, 6. snapshot, 7. commit

    def _positions(self) -> dict[Partition, int]:
        return self._skipped.past(self.processor.positions())

    def _checkpoint(self) -> None:
        now_s, emission = self._clock(), self._emission
        if self._mark is None:
            if now_s < self._commit_due_s:
                return
            # 5. Mark at a moment when the role knows the offsets of all it asked to know (its checkpoint may name them). With a window of a few gradients
            # such a moment comes by itself at every round trip; a role that never pauses is made to, once an interval.
            if emission.tagged and now_s < self._commit_due_s + self._commit_interval_s:
                return
            if emission.tagged:
                self.metrics.count("forced_flushes_total")
                if not emission.flush(FLUSH_S):
                    self._commit_due_s = now_s + self._commit_interval_s
                    return
            self._mark = _Mark(emission.emitted, self._positions(), list(self.processor.snapshot()))
            self._commit_due_s = now_s + self._commit_interval_s
            emission.show()
        mark = self._mark
        if emission.acknowledged < mark.number:
            return
        # 6. Snapshot.
        if mark.checkpoint:
            emission.emit(mark.checkpoint)
            mark.number, mark.checkpoint = emission.emitted, []
            return
        # 7. Commit.
        self._mark = None
        self._commit(mark.positions)

    def _commit(self, positions: Mapping[Partition, int], *, wait: bool = False) -> None:
        for reader in self._readers:
            reader.count_refused()
            if reader.refused:
                # Refused for a while (a coordinator that moved) or for good (not ours any more, then it is not `owned`): say it again.
                reader.refused = False
                self._committed = {
                    place: offset for place, offset in self._committed.items() if place[0] != reader.topic
                }
        changed = {place: offset for place, offset in positions.items() if self._committed.get(place) != offset}
        for reader in self._readers:
            mine = {p: offset for (topic, p), offset in changed.items() if topic == reader.topic and p in reader.owned}
            if mine and reader.commits:
                reader.commit(mine, wait=wait)
        self._committed.update(changed)
        self._skipped.committed(positions)

    # ---- rebalances

    def _assigned(self, starts: dict[Partition, int]) -> None:
        for place in starts:
            self._committed.pop(place, None)
        hook = getattr(self.processor, "assigned", None)
        if hook is not None:
            hook(starts)

    def _revoked(self, reader: InputReader, partitions: list[Partition]) -> None:
        """Commit what is safe of what goes, then forget it. What is not acknowledged within FLUSH_S its next owner repeats."""
        if self._closing:
            return  # drained already, or failed: then nothing more may be committed
        if self._emission.flush(FLUSH_S):
            positions = self._positions()
            self._commit({place: positions[place] for place in partitions if place in positions}, wait=True)
        hook = getattr(self.processor, "revoked", None)
        if hook is not None:
            hook(partitions)
        self._skipped.forget(partitions)
        for place in partitions:
            self._committed.pop(place, None)
            if self._mark is not None:
                self._mark.positions.pop(place, None)

    # ---- the end

    def drain(self) -> None:
        """Step 5 to 7 for the last time: send what is held, wait for the broker, commit. At most 5 s in all."""
        self._emission.release(anyway=True)
        if self._mark is not None and self._mark.checkpoint:
            self._emission.emit(self._mark.checkpoint)
        self._mark = None
        if not self._emission.flush(STOP_FLUSH_S):
            self.service.log.warning(
                "stop.unacknowledged", records=self._emission.outstanding, then="the next process repeats them"
            )
            return
        positions, checkpoint = self._positions(), list(self.processor.snapshot())
        if self._emission.emit(checkpoint) and not self._emission.flush(FLUSH_S):
            return
        try:
            self._commit(positions, wait=True)
        except BrokerError as error:
            self.service.log.warning("stop.not_committed", reason=str(error))

    def close(self) -> None:
        """Give the clients back; what is not acknowledged by now is left to the next process."""
        self._closing = True
        for reader in self._readers:
            reader.close()
        self._readers = []
        if hasattr(self, "_emission"):
            self._emission.close(0.2)
