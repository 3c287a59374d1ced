"""The words on the wire, as the pure core holds them. One class a schema; field names are the schema's (schemas/*.avsc say what each means).

Columns are numpy arrays here and Avro arrays on the wire; codec.py converts. `check()` raises BadRecord for what no role may use:
wrong lengths, non-finite values, indices out of range. It runs before anything is allocated from a record's claims.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray

from gorila.errors import BadRecord
from gorila.observations import CODECS, MAX_FRAMES, MAX_INFLATED_BYTES, ObservationBlock

MAX_ROWS = 1024
MAX_BATCH_BYTES = (
    256 * 1024 * 1024
)  # inflated, of one record: 512 rows of Nature frames from two blocks each are 116 MB
MAX_PARAMETERS = 2_000_000
"""Of a shard: 8,000,000 bytes in fp32, which a record of 8 MiB still carries. Advice: 1 M (design §6)."""

I32 = NDArray[np.int32]
I64 = NDArray[np.int64]
F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
Flags = NDArray[np.bool_]


def _require(condition: bool, reason: str) -> None:
    if not condition:
        raise BadRecord(reason)


def _same_length(rows: int, **columns: NDArray[Any]) -> None:
    for name, column in columns.items():
        _require(len(column) == rows, f"column {name} has {len(column)} rows, expected {rows}")


def _finite(**columns: NDArray[Any]) -> None:
    for name, column in columns.items():
        _require(bool(np.isfinite(column).all()), f"column {name} has a NaN or infinite value")


@dataclass(slots=True)
class TransitionBlock:
    """Consecutive rows of one lane (rules.md 1)."""

    schema: ClassVar[str] = "transitions"
    actor_id: str
    actor_epoch: int
    lane: int
    first_step: int
    weights_version: int
    epsilon: float
    observations: ObservationBlock
    action: I32
    reward: F32
    is_first: Flags
    is_last: Flags
    terminated: Flags
    truncated: Flags
    q_taken: F32
    q_max: F32

    def check(self) -> None:
        """Raises BadRecord."""
        rows = self.observations.count
        self.observations.check()
        _same_length(
            rows,
            action=self.action,
            reward=self.reward,
            is_first=self.is_first,
            is_last=self.is_last,
            terminated=self.terminated,
            truncated=self.truncated,
            q_taken=self.q_taken,
            q_max=self.q_max,
        )
        _finite(reward=self.reward, q_taken=self.q_taken, q_max=self.q_max)
        _require(self.lane >= 0 and self.first_step >= 0, "lane and first_step must not be negative")
        _require(bool((self.action[~self.is_last] >= 0).all()), "an action is negative")
        _require(not bool((self.is_first[1:] & ~self.is_last[:-1]).any()), "a first row does not follow a last row")


@dataclass(slots=True)
class Batch:
    """One part of a learner batch (rules.md 2)."""

    schema: ClassVar[str] = "batches"
    split: str
    batch_number: int
    part: int
    parts: int
    population: int
    partition: I32
    offset: I64
    row: I32
    probability: F64
    action: I32
    n_step_return: F32
    discount: F32
    behaviour_version: I64
    stack: int
    frames_tm1: I32
    frames_t: I32
    blocks: list[ObservationBlock]

    def check(self) -> None:
        """Raises BadRecord."""
        rows = len(self.action)
        _require(0 < rows <= MAX_ROWS, f"a batch of {rows} rows")
        _require(0 <= self.part < self.parts <= MAX_ROWS, f"part {self.part} of {self.parts}")
        _require(1 <= self.stack <= 64, f"stack {self.stack}")
        _same_length(
            rows,
            partition=self.partition,
            offset=self.offset,
            row=self.row,
            probability=self.probability,
            n_step_return=self.n_step_return,
            discount=self.discount,
            behaviour_version=self.behaviour_version,
        )
        _same_length(rows * self.stack, frames_tm1=self.frames_tm1, frames_t=self.frames_t)
        _finite(probability=self.probability, n_step_return=self.n_step_return, discount=self.discount)
        _require(
            bool((self.probability > 0).all()) and bool((self.probability <= 1 + 1e-9).all()),
            "probability outside (0, 1]",
        )
        _require(0 < len(self.blocks) <= rows * (2 * self.stack + 2), f"{len(self.blocks)} blocks for {rows} rows")
        first = self.blocks[0]
        first.check()
        frame_bytes = first.inflated_bytes // first.count
        frames = 0
        for block in self.blocks:
            if block.shape != first.shape or block.dtype != first.dtype:
                raise BadRecord("blocks of different shape or dtype")
            # A hundred blocks a batch: what has passed for the first is not asked again, `check` is for those that fail.
            count, size, codec = block.count, block.count * frame_bytes, block.codec
            sound = 0 < count <= MAX_FRAMES and size <= MAX_INFLATED_BYTES and codec in CODECS
            if not sound or (codec == "none" and len(block.data) != size):
                block.check()
            frames += count
        _require(frames <= MAX_FRAMES * MAX_ROWS, f"{frames} frames")
        _require(
            frames * frame_bytes <= MAX_BATCH_BYTES,
            f"blocks that inflate to {frames * frame_bytes} bytes, at most {MAX_BATCH_BYTES} are taken",
        )
        for name, indices in (("frames_tm1", self.frames_tm1), ("frames_t", self.frames_t)):
            _require(int(indices.min()) >= 0 and int(indices.max()) < frames, f"{name} points outside the blocks")


@dataclass(slots=True)
class Priorities:
    """Absolute TD errors of one learner batch."""

    schema: ClassVar[str] = "priorities"
    learner_id: str
    batch_partition: int
    batch_offset: int
    version: int
    partition: I32
    offset: I64
    row: I32
    td_error: F32
    loss: float
    gradient_norm: float
    rejected: bool
    busy_fraction: float
    round_trip_ms: float = -1.0

    def check(self) -> None:
        """Raises BadRecord."""
        _same_length(len(self.row), partition=self.partition, offset=self.offset, td_error=self.td_error)
        _finite(td_error=self.td_error)
        _require(bool((self.td_error >= 0).all()), "a TD error is negative")


@dataclass(slots=True)
class ReplayStats:
    """What one split holds."""

    schema: ClassVar[str] = "replay-stats"
    split: str
    time_ms: int
    actors: list[str]
    sampleable: I64
    mass: F64
    inserts: I64
    inserts_total: int
    samples_total: int
    batches_total: int
    new_share: float
    stale_priorities: int
    waiting_for: str
    memory_bytes: int
    next_offsets: I64 = field(default_factory=lambda: np.zeros(0, np.int64))
    counted_offsets: I64 = field(default_factory=lambda: np.zeros(0, np.int64))
    wants_transitions: bool = True

    def check(self) -> None:
        """Raises BadRecord."""
        _same_length(len(self.actors), sampleable=self.sampleable, mass=self.mass, inserts=self.inserts)
        if len(self.next_offsets) or len(self.counted_offsets):  # records of before have neither
            _same_length(len(self.actors), next_offsets=self.next_offsets, counted_offsets=self.counted_offsets)
        _finite(mass=self.mass)
        _require(bool((self.mass >= 0).all()), "a mass is negative")


@dataclass(slots=True)
class Gradient:
    """One shard's slice of a learner batch's gradient."""

    schema: ClassVar[str] = "gradients"
    shard_id: int
    learner_id: str
    batch_partition: int
    batch_offset: int
    base_version: int
    num_samples: int
    num_parameters: int
    codec: str
    payload: bytes
    gradient_norm: float
    loss: float

    def check(self) -> None:
        """Raises BadRecord. The payload itself is checked by the compression that decodes it."""
        _require(0 < self.num_parameters <= MAX_PARAMETERS, f"{self.num_parameters} parameters")
        _require(self.shard_id >= 0 and self.batch_partition >= 0 and self.batch_offset >= 0, "a negative id")


@dataclass(slots=True)
class Weights:
    """A published snapshot of one shard."""

    schema: ClassVar[str] = "weights"
    shard_id: int
    version: int
    kind: str
    num_parameters: int
    base_version: int
    key_offset: int
    target_version: int
    target_offset: int
    gradient_offset: int
    codec: str
    payload: bytes
    payload_hash: int
    state_hash: int
    applied: int
    dropped_stale: int
    dropped_duplicate: int
    dropped_bad: int
    staleness: I32
    learning_rate: float

    def check(self) -> None:
        """Raises BadRecord."""
        _require(self.kind in ("key", "delta", "target"), f"weights kind {self.kind[:20]!r}")
        _require(0 < self.num_parameters <= MAX_PARAMETERS, f"{self.num_parameters} parameters")


@dataclass(slots=True)
class CheckpointPart:
    """A piece of one tensor."""

    schema: ClassVar[str] = "checkpoint-part"
    shard_id: int
    version: int
    tensor: str
    start: int
    total: int
    data: bytes

    def check(self) -> None:
        """Raises BadRecord."""
        _require(0 < self.total <= MAX_PARAMETERS and len(self.data) % 4 == 0, "tensor size")
        _require(self.start >= 0 and self.start + len(self.data) // 4 <= self.total, "piece outside its tensor")


@dataclass(slots=True)
class CheckpointManifest:
    """Makes a checkpoint exist."""

    schema: ClassVar[str] = "checkpoint-manifest"
    shard_id: int
    version: int
    gradient_offset: int
    parts: int
    first_part_offset: int
    state_hash: int
    handled_partition: I32
    handled_offset: I64
    target_version: int
    target_offset: int
    applied: int
    dropped_stale: int
    dropped_duplicate: int
    dropped_bad: int
    optimizer: str
    time_ms: int

    def check(self) -> None:
        """Raises BadRecord."""
        _same_length(len(self.handled_partition), handled_offset=self.handled_offset)


@dataclass(slots=True)
class CheckpointLedger:
    """What the state was at a version."""

    schema: ClassVar[str] = "checkpoint-ledger"
    shard_id: int
    version: int
    gradient_offset: int
    time_ms: int
    state_hash: int

    def check(self) -> None:
        """Nothing in it can be wrong by itself."""


@dataclass(slots=True)
class ReplicationEvent:
    """What replicas of a shard tell each other."""

    schema: ClassVar[str] = "replication"
    shard_id: int
    replica_id: str
    kind: str
    epoch: int
    members: list[str]
    version: int
    gradient_offset: int
    state_hash: int

    def check(self) -> None:
        """Raises BadRecord."""
        _require(self.kind in ("heartbeat", "token", "view", "join", "hash"), f"replication kind {self.kind[:20]!r}")


@dataclass(slots=True)
class Episode:
    """One finished episode; raw, unclipped return."""

    schema: ClassVar[str] = "episode"
    role: str
    actor_id: str
    lane: int
    episode_return: float
    steps: int
    terminated: bool
    epsilon: float
    weights_version: int
    lane_steps_total: int
    time_ms: int

    def check(self) -> None:
        """Raises BadRecord."""
        _require(bool(np.isfinite(self.episode_return)), "the return is not finite")


@dataclass(slots=True)
class Evaluation:
    """The mean over a set of evaluation episodes of one version."""

    schema: ClassVar[str] = "evaluation"
    evaluator_id: str
    weights_version: int
    phase: str
    episodes: int
    return_mean: float
    return_std: float
    return_min: float
    return_max: float
    epsilon: float
    solved: bool
    time_ms: int

    def check(self) -> None:
        """Raises BadRecord."""
        _require(bool(np.isfinite(self.return_mean)), "the mean return is not finite")


@dataclass(slots=True)
class Run:
    """What every role obeys."""

    schema: ClassVar[str] = "run"
    name: str
    config: str
    environment: str
    schemas: dict[str, str] = field(default_factory=dict)
    product_version: str = ""
    time_ms: int = 0

    def check(self) -> None:
        """Raises BadRecord."""
        _require(bool(self.name), "a run without a name")


Message = (
    TransitionBlock
    | Batch
    | Priorities
    | ReplayStats
    | Gradient
    | Weights
    | CheckpointPart
    | CheckpointManifest
    | CheckpointLedger
    | ReplicationEvent
    | Episode
    | Evaluation
    | Run
)
MESSAGES: dict[str, type[Message]] = {
    kind.schema: kind
    for kind in (
        TransitionBlock,
        Batch,
        Priorities,
        ReplayStats,
        Gradient,
        Weights,
        CheckpointPart,
        CheckpointManifest,
        CheckpointLedger,
        ReplicationEvent,
        Episode,
        Evaluation,
        Run,
    )
}
