"""What `gorila weights` and a fork ask of a run's past, as data: consumers/parameter_server/time_travel.py answers, through the door by name that roles have.

A shard's past is its *window*: from its oldest checkpoint whose following gradients are all still there, to the end of its gradients. Any version in
it can be rebuilt, bit for bit (design section 6).
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from gorila.config import Config
from gorila.messages import CheckpointManifest, CheckpointPart, Weights

if TYPE_CHECKING:
    from gorila.service import Service

F32 = NDArray[np.float32]
Progress = Callable[[int, int, int, int], None]
"""(shard, gradients taken in, gradients in all, version), now and then."""


@dataclass(frozen=True, slots=True)
class Moment:
    """A point in a run's past, for every shard: exactly one of the three is set.

    Attributes:
        version: each shard as it was when its own count of updates came to this.
        offset: each shard after this offset of its own gradients partition.
        timestamp_ms: each shard after the gradients whose record's time is not later. Shards may be some versions apart.
    """

    version: int | None = None
    offset: int | None = None
    timestamp_ms: int | None = None

    def __post_init__(self) -> None:
        if sum(given is not None for given in (self.version, self.offset, self.timestamp_ms)) != 1:
            raise ValueError(f"exactly one of version, offset and timestamp: {self}")


@dataclass(frozen=True, slots=True)
class Line:
    """A checkpoint's manifest, a ledger entry or a published snapshot.

    Attributes:
        kind: checkpoint | ledger | key | delta | target.
        offset: in the shard's partition of `checkpoints`, or of `weights`.
        state_hash: of the whole state; -1 where the record names none.
        payload_hash: of published values; -1 for others.
        usable: of a checkpoint: whole, and what comes after it is still there. `why` says what is missing.
    """

    kind: str
    version: int
    offset: int
    gradient_offset: int
    time_ms: int
    state_hash: int = -1
    payload_hash: int = -1
    base_version: int = -1
    key_offset: int = -1
    usable: bool = True
    why: str = ""


@dataclass(frozen=True, slots=True)
class ShardWindow:
    """What is known of one shard without applying anything; all in the log's order.

    Attributes:
        gradients: (first offset in the log, next offset to be written).
    """

    shard: int
    gradients: tuple[int, int]
    checkpoints: tuple[Line, ...] = ()
    ledger: tuple[Line, ...] = ()
    published: tuple[Line, ...] = ()

    @property
    def oldest(self) -> Line | None:
        """Where the window begins; None: nothing can be rebuilt."""
        return min((line for line in self.checkpoints if line.usable), key=lambda line: line.version, default=None)

    @property
    def newest_version(self) -> int:
        """The highest version any record names; gradients after it may have made more."""
        return max((line.version for line in (*self.checkpoints, *self.ledger, *self.published)), default=-1)

    def describe(self) -> str:
        """One line, for errors and people."""
        if self.oldest is None:
            return f"shard {self.shard} has no checkpoint whose gradients are still there"
        return (
            f"shard {self.shard} can be rebuilt from version {self.oldest.version} (checkpoint at gradient offset {self.oldest.gradient_offset})"
            f" to the end of its gradients (offset {self.gradients[1]})"
        )


@dataclass(frozen=True, slots=True)
class RebuiltShard:
    """A shard as it was. `weights` is float32 (P,); `gradient_offset` the last one taken in."""

    shard: int
    version: int
    gradient_offset: int
    weights: F32
    state_hash: int


@dataclass(frozen=True, slots=True)
class FirstCheckpoint:
    """Where a new run's shard begins. The manifest's places in the log are filled in when they are known.

    Attributes:
        target: the target record its learners begin with; None: the server writes it (version 0).
    """

    parts: list[CheckpointPart]
    manifest: CheckpointManifest
    target: Weights | None = None


@dataclass(frozen=True, slots=True)
class Checked:
    """What `verify` compared on one shard.

    Attributes:
        compared: {kind of record: how many agreed}.
        skipped: {why: how many could not be compared}.
    """

    shard: int
    first_version: int
    last_version: int
    gradients: int
    compared: Mapping[str, int] = field(default_factory=dict)
    skipped: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class TracedUpdate:
    """One update of one shard, and what it was computed from.

    Attributes:
        version: that the update made.
        batch_offsets: of the records that are the batch, in partition `batch_partition` of `batches`; the last one is its identity.
        rows: {(partition, offset): rows} in `transitions`.
        rows_from: `batches`, or `priorities` where the batch itself is gone, or empty.
        cut: one line for each place where the trail ends or a record is gone.
    """

    shard: int
    version: int
    gradient_offset: int
    learner_id: str
    base_version: int
    codec: str
    num_samples: int
    loss: float
    gradient_norm: float
    batch_partition: int
    batch_offsets: tuple[int, ...]
    rows: Mapping[tuple[int, int], tuple[int, ...]]
    rows_from: str
    cut: tuple[str, ...] = ()


class History(Protocol):
    """A run's past. Every method may raise BrokerError; OffsetGone says what the window covers."""

    shards: range

    def window(self, shard: int) -> ShardWindow:
        """What is there, read once."""
        ...

    def rebuild(self, shard: int, moment: Moment) -> RebuiltShard:
        """A shard as it was, bit for bit. Raises OffsetGone."""
        ...

    def first_checkpoint(self, shard: int, moment: Moment, config: Config) -> FirstCheckpoint:
        """A shard as it was, as the beginning of a run with `config`. Raises as `rebuild`."""
        ...

    def verify(self, shard: int) -> Checked:
        """Everything recomputed and compared. Raises RunError naming the first mismatch; OffsetGone."""
        ...

    def trace(self, shard: int, version: int, updates: int) -> list[TracedUpdate]:
        """The newest updates up to a version, newest first. Raises OffsetGone."""
        ...


def no_progress(shard: int, done: int, total: int, version: int) -> None:
    """Nobody watches."""


def history(service: Service, progress: Progress = no_progress) -> History:
    """Looked up by name, as roles are: the parameter server's folder is no dependency of this package."""
    found: History = importlib.import_module("consumers.main").time_travel(service, progress)
    return found
