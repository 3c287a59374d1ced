"""What must hold whatever happened: followed in the log while it is written, compared at the end.

Transitions. Within one life of an actor (its epoch) and one lane, blocks follow each other by `first_step`: a hole is a block that was lost though a later one
was acknowledged, an overlap one that is there twice. At the end the replay process's rings must be those that a fresh replay makes of the log: as many
sampleable rows of every actor, and the same priority mass. The rings are larger than the run, so that is every transition ever acknowledged.
Gradients. A server that nothing happened to applies the same log from version 0: every snapshot and target that was ever published must be its bytes at that
version, every line of the ledger and every checkpoint its hash, and no batch's gradient may make two versions.
Records the faults wrote themselves carry the header INJECTED and are nobody's experience.
"""

from __future__ import annotations

import math
import time
import zlib
from dataclasses import dataclass, field

import numpy as np

from consumers.parameter_server.checkpoints import ShardState
from consumers.parameter_server.optimizers import make_optimizer, warm_up_kernels
from consumers.parameter_server.shard import Shard
from gorila.errors import BadRecord, OffsetGone
from gorila.kafka import Consumer, Received
from gorila.messages import CheckpointLedger, CheckpointManifest, CheckpointPart, Gradient, TransitionBlock, Weights
from gorila.processor import Incoming
from gorila.run_record import read_all
from gorila.service import Service
from pipelines.kafka_io import LogReader
from pipelines.replay import ReplaySplit
from pipelines.ring_recovery import RingRecovery

INJECTED = "gorila-chaos"
MASS_TOLERANCE = 1e-9
CATCH_UP_S = 120.0


def injected(record: Received) -> bool:
    """Whether a fault wrote it."""
    return any(name == INJECTED for name, _ in record.headers)


@dataclass
class Findings:
    """Rows or updates; each with a line that says where."""

    lost: int = 0
    doubled: int = 0
    lines: list[str] = field(default_factory=list)

    def add(self, line: str, lost: int = 0, doubled: int = 0) -> None:
        """Count."""
        self.lost, self.doubled = self.lost + lost, self.doubled + doubled
        self.lines.append(line)


class Lives:
    """Blocks of every (actor, epoch, lane), pure."""

    def __init__(self, findings: Findings) -> None:
        self._findings = findings
        self._next: dict[tuple[str, int, int], int] = {}
        self.rows = 0

    def take(self, block: TransitionBlock, where: str) -> None:
        """The next block of a partition's log."""
        life = (block.actor_id, block.actor_epoch, block.lane)
        expected, rows = self._next.get(life, 0), block.observations.count
        if block.first_step > expected:
            self._findings.add(
                f"{where}: {life} goes on at step {block.first_step}, not {expected}", lost=block.first_step - expected
            )
        elif block.first_step < expected:
            self._findings.add(
                f"{where}: {life} has steps from {block.first_step} again, below {expected}", doubled=rows
            )
        self._next[life] = max(expected, block.first_step + rows)
        self.rows += rows


class Undisturbed:
    """The server that nothing happens to, and what was published, pure."""

    def __init__(self, shard: Shard, ledger_versions: int, checkpoint_versions: int, findings: Findings) -> None:
        self._shard, self._findings = shard, findings
        self._periods = (ledger_versions, checkpoint_versions)
        self._right = {0: zlib.crc32(shard.state.weights.data)}
        self._states: dict[int, int] = {}
        self._applied: set[tuple[int, int]] = set()
        self._published: list[tuple[str, int, int]] = []
        self.shown = -1

    @property
    def version(self) -> int:
        """Updates the log holds so far."""
        return self._shard.state.version

    def gradient(self, record: Received, message: Gradient) -> None:
        """The next record of the gradients' log."""
        before = self.version
        try:
            incoming = Incoming("gradients", record.partition, record.offset, record.timestamp_ms, record.key, message)
            list(self._shard.process(incoming))
        except BadRecord:
            return
        if self.version == before:
            return
        identity = (message.batch_partition, message.batch_offset)
        if identity in self._applied:
            self._findings.add(f"batch {identity} made two versions, the second is {self.version}", doubled=1)
        self._applied.add(identity)
        self._right[self.version] = zlib.crc32(self._shard.state.weights.data)
        if any(self.version % period == 0 for period in self._periods):
            self._states[self.version] = self._shard.state_hash()

    def weights(self, message: Weights) -> None:
        """A snapshot or target that was published."""
        self._published.append((message.kind, message.version, zlib.crc32(message.payload)))
        if message.kind == "key":
            if message.version < self.shown:
                self._findings.add(f"version {message.version} was shown after {self.shown}", lost=1)
            self.shown = max(self.shown, message.version)

    def state(self, version: int, state_hash: int, what: str) -> None:
        """A ledger line or manifest."""
        if version and self._states.get(version) != state_hash:
            self._findings.add(f"{what} of version {version} has another hash than the undisturbed server", lost=1)

    def compare(self) -> int:
        """Published records against the right bytes; how many were compared. What was published of another version than the log makes is an update that
        was lost or doubled."""
        for kind, version, found in self._published:
            if self._right.get(version) != found:
                self._findings.add(
                    f"{kind} of version {version} has other bytes than the undisturbed server", doubled=1
                )
        missing = self.version - self.shown
        if missing:
            line = f"{self.shown} is the newest version shown, the log makes {self.version}"
            self._findings.add(line, lost=max(0, missing), doubled=max(0, -missing))
        return len(self._published)


class Audit:
    """Follows a run's log. Call `turn` often, `finish` once the run is quiet."""

    def __init__(self, service: Service) -> None:
        self.findings = Findings()
        self.forgotten = 0  # records of transitions that were deleted before they were followed
        self._service, config = service, service.config
        self._consumer: Consumer = service.cluster.consumer(ends=True)
        self._lives = Lives(self.findings)
        warm_up_kernels(config.parameter_server)
        section = config.parameter_server
        shard = Shard(config, self._version_zero())
        self.server = Undisturbed(shard, section.ledger_versions, section.checkpoint_versions, self.findings)
        places = [(service.topic("transitions"), p) for p in range(config.actor.count)]
        self._next = dict.fromkeys([*places, (service.topic("gradients"), 0), (service.topic("weights"), 0)], 0)
        self._consumer.assign(self._next)

    @property
    def rows(self) -> int:
        """Rows in the transitions' log."""
        return self._lives.rows

    def _version_zero(self) -> ShardState:
        parts = [
            message
            for record in read_all(self._service.cluster, self._service.topic("checkpoints"))
            if isinstance(message := self._service.schemas.decode(record.value), CheckpointPart)
            and message.version == 0
        ]
        parts.sort(key=lambda part: part.start)
        weights = np.concatenate([np.frombuffer(part.data, "<f4") for part in parts]).astype(np.float32)
        tensors = make_optimizer(self._service.config.parameter_server).tensors
        return ShardState(0, weights, {name: np.zeros_like(weights) for name in tensors})

    def turn(self, most: int = 1000) -> int:
        """Take in what came; how many records."""
        try:
            records = self._consumer.poll_many(most, 0.0)
        except OffsetGone as gone:
            self._gone(gone)
            return 1
        for record in records:
            self._next[(record.topic, record.partition)] = record.offset + 1
            if injected(record) and record.topic != self._service.topic("gradients"):
                continue
            try:
                message = self._service.schemas.decode(record.value)
            except BadRecord:
                continue
            if isinstance(message, TransitionBlock):
                self._lives.take(message, f"transitions/{record.partition} offset {record.offset}")
            elif isinstance(message, Gradient):
                self.server.gradient(record, message)
            elif isinstance(message, Weights):
                self.server.weights(message)
        return len(records)

    def _gone(self, gone: OffsetGone) -> None:
        place = (gone.topic, gone.partition)
        low, end = self._consumer.watermarks(*place, CATCH_UP_S)
        position = self._next[place]
        if position > end:
            self.findings.add(f"{place} ends at {end}, though {position} records were there", lost=position - end)
        elif gone.topic == self._service.topic("transitions"):
            self.forgotten += low - position
        self._next[place] = max(low, min(position, end))
        self._consumer.seek(gone.topic, gone.partition, self._next[place])

    def catch_up(self, topic: str, partition: int, offset: int) -> None:
        """Follow at least to `offset`: what lies before it is about to be deleted."""
        place = (self._service.topic(topic), partition)
        until_s = time.monotonic() + CATCH_UP_S
        while max(self._next[place], self._consumer.end_reached(*place) or 0) < offset:
            if not self.turn(5000):
                time.sleep(0.02)
            if time.monotonic() > until_s:
                raise SystemExit(f"{place} could not be followed to offset {offset} within {CATCH_UP_S:.0f} s")

    def finish(self, stats_sampleable: dict[int, int], stats_mass: dict[int, float]) -> None:
        """The run is quiet: compare. `stats`: what the replay process says it holds, by partition."""
        service = self._service
        ends = service.cluster.admin().end_offsets(list(self._next))
        for (topic, partition), end in ends.items():
            self.catch_up(topic.removeprefix(f"{service.run}."), partition, end)
        for record in read_all(service.cluster, service.topic("checkpoints")):
            if injected(record):
                continue
            message = service.schemas.decode(record.value)
            if isinstance(message, CheckpointLedger | CheckpointManifest):
                self.server.state(message.version, message.state_hash, type(message).__name__)
        print(f"{self.server.compare()} published weights compared, {self.server.version} updates, {self.rows} rows")
        self._compare_rings(stats_sampleable, stats_mass)

    def _compare_rings(self, sampleable: dict[int, int], mass: dict[int, float]) -> None:
        service = self._service
        fresh = ReplaySplit(service.config, "audit", np.random.default_rng(0), service.facts)
        log = LogReader(service)
        starts = {p: log.bounds("transitions", p)[1] for p in range(service.config.actor.count)}
        RingRecovery(service, fresh, log).open_rings(starts, log.bounds("priorities", 0)[1])
        log.close()
        stats = fresh.stats(0)
        for actor, rows, right in zip(stats.actors, stats.sampleable.tolist(), stats.mass.tolist(), strict=True):
            held, weight = sampleable.get(int(actor), 0), mass.get(int(actor), 0.0)
            if held != rows:
                line = f"replay holds {held} sampleable rows of actor {actor}, its log {rows}"
                self.findings.add(line, lost=max(0, rows - held), doubled=max(0, held - rows))
            elif not math.isclose(weight, right, rel_tol=MASS_TOLERANCE):
                self.findings.add(
                    f"replay's priorities of actor {actor} sum to {weight!r}, its log's to {right!r}", lost=1
                )

    def close(self) -> None:
        """Give the consumer back."""
        self._consumer.close()
