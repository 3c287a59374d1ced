"""The learner: batches and weights in, gradients and priorities out. No Kafka, clock, thread or file behind this line.

Rules of this file:
1. At most `max_in_flight` gradients are out that no snapshot read covers (rules.md 10): delivered offset against the snapshot's
   gradient_offset, on every shard. At the bound the learner waits, and says for whom. 1 means: every gradient on the newest weights.
2. The outbox has a batch's gradients before they are produced, and a slot is overwritten only when its own were acknowledged: at most one
   unacknowledged batch when the next is written.
3. θ⁻ is exactly the target record that the snapshot names; until it is here, nothing is computed.
4. One norm clip over all shards, then the residual is added, then each shard's slice is compressed: residual = what compression lost.
   A rejected batch sends its priorities and touches neither, nor BatchNorm's statistics.
5. Batches of a partition are handled in the order of their identity; what is not above the highest handled is skipped.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import numpy as np

from consumers.batch_assembly import AssembleNow, Assembler, LearnerBatch, PartCollector, PendingBatch
from consumers.gradient_step import Computed, GradientStep
from consumers.gradient_writer import GradientWriter, Identity
from consumers.in_flight import InFlight
from consumers.outbox import OutboxPort
from consumers.outlier_guard import OutlierGuard
from gorila.config import Config
from gorila.environment_facts import EnvironmentFacts
from gorila.errors import BadRecord, InvalidState
from gorila.messages import Batch, Gradient, Priorities, Weights
from gorila.processor import Incoming, OffsetTracker, Outgoing
from gorila.schedules import linear
from gorila.weights import WeightsView

BATCHES_AHEAD = 2


@dataclass(slots=True)
class _Waiting:
    """A complete batch that has not been learned from."""

    records: list[Incoming]
    pending: PendingBatch

    @property
    def identity(self) -> Identity:
        return self.records[-1].partition, self.records[-1].offset


@dataclass(slots=True)
class LearnerCounts:
    """Since the process began."""

    updates: int = 0
    rejected: int = 0
    skipped_batches: int = 0
    bad_batches: int = 0
    resent: int = 0


class Learner:
    """A Processor of `batches` and `weights` (gorila/processor.py).

    Args:
        learner_id: names this learner in its records.
        view: weights as far as they are known at the start; the learner feeds it.
        outbox: its complete slots are sent again by the first tick.
        assembler: who inflates and stacks.
        clock: seconds, monotonic; only for `busy_fraction`. None under `run.synchronous` or where nobody looks.
        on_bad_batch: told (records, reason) of a batch whose blocks do not inflate.
        look_again: asked, once a second at most, to put into `view` what went by unread: a target record that a snapshot
            names, or deltas after a key frame.
    """

    def __init__(
        self,
        config: Config,
        facts: EnvironmentFacts,
        learner_id: str,
        view: WeightsView,
        outbox: OutboxPort,
        *,
        assembler: Assembler | None = None,
        clock: Callable[[], float] | None = None,
        on_bad_batch: Callable[[list[Incoming], str], None] = lambda records, reason: None,
        look_again: Callable[[], object] = lambda: None,
    ) -> None:
        self._config, self._facts, self._id = config.learner, facts, learner_id
        self.view = view
        self._assembler = assembler or AssembleNow()
        self._clock = None if config.run.synchronous else clock
        self._on_bad_batch, self._look_again = on_bad_batch, look_again
        self._look_again_s = -math.inf
        self.step = GradientStep(config, facts)
        shards, learner = config.parameter_server.shards, config.learner
        mixed = self.step.precision.mixed
        self.writer = GradientWriter(learner_id, self.step.num_parameters, shards, learner, outbox, mixed)
        # In rounds every batch must become a version, or the actor waits for ever.
        sigma = 0.0 if config.run.synchronous else config.learner.outlier_sigma
        self.guard = OutlierGuard(sigma, config.learner.outlier_warmup_batches)
        self.counts = LearnerCounts()
        # Half of what replay may be ahead: given up later, a beginning would hold the committed offset back until replay waits for this learner for ever.
        self._collector = PartCollector(
            config.record_parts * max(1, config.replay.max_lag_batches // 2),
        )
        self._tracker = OffsetTracker()
        self._queue: deque[_Waiting] = deque()
        self.in_flight = InFlight(shards, 1 if config.run.synchronous else learner.max_in_flight)
        self._handled = dict(self.writer.handled)
        self._loaded: tuple[int, ...] | None = None
        self._loaded_target: tuple[int, ...] | None = None
        self._last_record_s = self._clock() if self._clock else 0.0
        self._round_trip_ms = -1.0

    @property
    def orphan_parts(self) -> int:
        """Records skipped because their batch's beginning or end is missing, since the process began."""
        return self._collector.orphan_parts

    # ---- Processor

    def process(self, record: Incoming) -> Iterable[Outgoing]:
        """Take a snapshot or a part of a batch; nothing is emitted before the tick. Raises BadRecord."""
        message = record.message
        if isinstance(message, Weights):
            self.view.take(message, record.offset)
            self._note_round_trips(self.in_flight.covered_by(self.view.gradient_offsets))
        elif isinstance(message, Batch):
            self._judge(message)
            self._tracker.take(record)
            complete, useless = self._collector.add(record, message)
            self._release(useless)
            if complete is not None:
                self._enqueue(complete)
        else:
            raise BadRecord(f"a learner has no use for a {message.schema} record")
        return ()

    def _judge(self, batch: Batch) -> None:
        facts, block = self._facts, batch.blocks[0]
        if block.shape != facts.observation_shape or block.dtype != facts.observation_dtype:
            raise BadRecord(
                f"observations {block.dtype} {block.shape} where the run has {facts.observation_dtype} {facts.observation_shape}"
            )
        if batch.stack != facts.stack:
            raise BadRecord(f"stack {batch.stack} where the run has {facts.stack}")
        if int(batch.action.min()) < 0 or int(batch.action.max()) >= facts.actions:
            raise BadRecord(f"an action outside 0 … {facts.actions - 1}")

    def _enqueue(self, records: list[Incoming]) -> None:
        partition, offset = records[-1].partition, records[-1].offset
        if offset <= self._handled.get(partition, -1):
            self.counts.skipped_batches += 1
            self._release(records)
            return
        parts = [record.message for record in records]
        self._queue.append(_Waiting(records, self._assembler.submit(parts)))  # type: ignore[arg-type]

    def tick(self, now_s: float) -> Iterable[Outgoing]:
        """One update, when a batch, weights and the window allow it."""
        if self.writer.unsent:
            return self._send_again()
        missing = bool(self.view.gaps) or (bool(self._queue) and not self._weights_are_here())
        if missing and now_s >= self._look_again_s:
            self._look_again_s = now_s + 1.0
            self._look_again()
            self._note_round_trips(self.in_flight.covered_by(self.view.gradient_offsets))
        while self._may_compute():
            waiting = self._queue.popleft()
            try:
                batch = waiting.pending.result()
            except BadRecord as error:
                self.counts.bad_batches += 1
                self._on_bad_batch(waiting.records, str(error))
                self._release(waiting.records)
                continue
            return self._learn(waiting, batch)
        return ()

    def delivered(self, record: Outgoing, partition: int, offset: int) -> None:
        """A shard's gradient is in the log."""
        if isinstance(record.message, Gradient):
            self.in_flight.acknowledged(record.tag, record.message.shard_id, offset)
            self._note_round_trips(self.in_flight.covered_by(self.view.gradient_offsets))

    def wants(self, topic: str) -> bool:
        """Always weights; batches while fewer than BATCHES_AHEAD wait."""
        return topic != "batches" or len(self._queue) < BATCHES_AHEAD

    def next_due_s(self) -> float:
        """At once when there is something to compute, else when a record comes."""
        return -math.inf if self.writer.unsent or self._may_compute() else math.inf

    def waiting_for(self) -> str:
        """See Processor."""
        if not self._queue:
            return "replay: no learner batch has come"
        if not self._weights_are_here():
            return "parameter-server: no weights with their target have come"
        if self.in_flight.full:
            return f"parameter-server: {len(self.in_flight)} gradients in flight, bound {self.in_flight.window}"
        if not self._slot_is_free():
            return "Kafka: a gradient is not acknowledged"
        return ""

    def positions(self) -> dict[tuple[str, int], int]:
        """After the last batch whose gradients and priorities were emitted."""
        return self._tracker.positions()

    def snapshot(self) -> Iterable[Outgoing]:
        """Nothing in Kafka: the outbox and a local checkpoint hold what a learner remembers."""
        return ()

    def check_valid(self) -> None:
        """Raises InvalidState."""
        self.writer.check_valid()
        # A restart sends up to two batches again, whatever the window.
        if self.in_flight.window and len(self.in_flight) > max(self.in_flight.window, 2):
            raise InvalidState(f"{len(self.in_flight)} gradients in flight, bound {self.in_flight.window}")
        if len(self._queue) > BATCHES_AHEAD:
            raise InvalidState(f"{len(self._queue)} batches ahead, bound {BATCHES_AHEAD}")

    def revoked(self, partitions: list[tuple[str, int]]) -> None:
        """Their batches belong to another learner now."""
        gone = {partition for topic, partition in partitions if topic == "batches"}
        self._queue = deque(waiting for waiting in self._queue if waiting.identity[0] not in gone)
        for partition in gone:
            self._collector.forget(partition)
        self._tracker.forget(("batches", partition) for partition in gone)

    def assigned(self, starts: Mapping[tuple[str, int], int]) -> None:
        """Nothing to do: a batch is recognised by its first part, wherever reading begins."""

    # ---- the window

    def _slot_is_free(self) -> bool:
        return self.in_flight.unacknowledged <= 1

    def _weights_are_here(self) -> bool:
        """Whether every shard has come, with the target record its snapshot names."""
        announced = min(version for version, _ in self.view.announced_targets)
        return self.view.version >= 0 and self.view.target_version >= max(announced, 0)

    def _may_compute(self) -> bool:
        return bool(self._queue) and self._weights_are_here() and not self.in_flight.full and self._slot_is_free()

    def _release(self, records: Iterable[Incoming]) -> None:
        for record in records:
            self._tracker.release(record.topic, record.partition, record.offset)

    # ---- one update

    def _send_again(self) -> list[Outgoing]:
        out = []
        for slot in self.writer.unsent:
            out += self._out((slot.batch_partition, slot.batch_offset), slot.gradients)
            self.counts.resent += 1
        self.writer.unsent = []
        return out

    def _out(self, identity: Identity, gradients: Iterable[Gradient]) -> list[Outgoing]:
        self.in_flight.add(identity, self._clock() if self._clock else None)
        return [
            Outgoing(
                "gradients", gradient, key=str(gradient.shard_id).encode(), partition=gradient.shard_id, tag=identity
            )
            for gradient in gradients
        ]

    def _load_weights(self) -> None:
        generations = tuple(self.view.generations)
        if generations != self._loaded:
            self.step.load(self.view.flat())
            self._loaded = generations
        targets = (self.view.target_version, *self.view.target_versions)
        if targets != self._loaded_target:
            self.step.load_target(self.view.target_flat())
            self._loaded_target = targets

    def _learn(self, waiting: _Waiting, batch: LearnerBatch) -> list[Outgoing]:
        began_s = self._clock() if self._clock else 0.0
        self._load_weights()
        version = self.view.version
        config = self._config
        computed = self.step.compute(batch, linear(version, config.beta_start, config.beta_end, config.beta_versions))
        out: list[Outgoing] = []
        rejected = self.guard.rejects(computed.loss, computed.gradient_norm)
        if rejected:
            self.counts.rejected += 1
            self.step.forget_batch()
        else:
            gradients = self.writer.write(waiting.identity, computed, len(batch.action), self.view.shard_versions)
            out += self._out(waiting.identity, gradients)
            self.counts.updates += 1
        self._handled[waiting.identity[0]] = waiting.identity[1]
        self._release(waiting.records)
        priorities = self._priorities(waiting.identity, batch, computed, version, rejected, began_s)
        out.append(Outgoing("priorities", priorities, partition=0))
        return out

    def _priorities(
        self, identity: Identity, batch: LearnerBatch, computed: Computed, version: int, rejected: bool, began_s: float
    ) -> Priorities:
        finite = np.isfinite(computed.td_error_abs)
        keep = slice(None) if bool(finite.all()) else finite  # a row without a finite error keeps the priority it has
        return Priorities(
            learner_id=self._id,
            batch_partition=identity[0],
            batch_offset=identity[1],
            version=version,
            partition=batch.partition[keep],
            offset=batch.offset[keep],
            row=batch.row[keep],
            td_error=computed.td_error_abs[keep],
            loss=computed.loss,
            gradient_norm=computed.gradient_norm,
            rejected=rejected,
            busy_fraction=self._busy_fraction(began_s),
            round_trip_ms=self._round_trip_ms,
        )

    def _note_round_trips(self, sent_s: list[float]) -> None:
        if sent_s and self._clock is not None:
            self._round_trip_ms = (self._clock() - max(sent_s)) * 1000

    def _busy_fraction(self, began_s: float) -> float:
        if self._clock is None:
            return 0.0
        now_s = self._clock()
        elapsed_s, self._last_record_s = now_s - self._last_record_s, now_s
        return min(1.0, (now_s - began_s) / elapsed_s) if elapsed_s > 0 else 0.0
