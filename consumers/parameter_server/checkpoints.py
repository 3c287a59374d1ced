"""A shard's state, and how it is written to and found again in the `checkpoints` topic.

Rules of this file:
1. A checkpoint is its parts (a tensor each, in pieces of at most PART_VALUES) and then a manifest. It exists only with its manifest, which is written after
   every part was acknowledged and after the newest target record of that version was.
2. Whoever restores takes the newest manifest whose parts are all there and give the manifest's state hash; others are ignored, with the reason.
3. Two writers of one version (a zombie, a replica) write the same bytes, so it does not matter whose parts are read.
4. What a checkpoint does not hold can be had by applying the gradients after its `gradient_offset`, bit for bit.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from gorila.errors import InvalidState, RunError
from gorila.messages import CheckpointLedger, CheckpointManifest, CheckpointPart, Message

F32 = NDArray[np.float32]

PART_VALUES = 1 << 20
"""Values in a part at most: 4 MiB, half of what a record may be."""
SCAN_RECORDS = 64
"""Records first looked at from the end of the topic; doubled until a whole checkpoint is found."""
NO_HASH = -1

Log = Callable[[int, int], Iterable[tuple[int, Message]]]
"""(start, stop) -> (offset, message) of every readable record with start <= offset < stop, in order."""


@dataclass(slots=True)
class ShardState:
    """Everything a shard is. Arrays are float32 (P,), owned by whoever holds the state and changed in place.

    Attributes:
        version: updates applied.
        gradient_offset: highest offset of the gradients partition taken in, dropped ones included; -1 for none.
        handled: per batches partition the highest batch offset handled.
        target_version, target_offset: of the newest target record acknowledged; offset -1 before the first.
    """

    shard_id: int
    weights: F32
    moments: dict[str, F32]
    version: int = 0
    gradient_offset: int = -1
    handled: dict[int, int] = field(default_factory=dict)
    target_version: int = 0
    target_offset: int = -1
    applied: int = 0
    dropped_stale: int = 0
    dropped_duplicate: int = 0
    dropped_bad: int = 0

    @property
    def num_parameters(self) -> int:
        """P."""
        return len(self.weights)

    def state_hash(self, optimizer: str) -> int:
        """crc32 over weights, moments, version, handled offsets and optimiser settings: equal for equal futures.

        Args:
            optimizer: `optimizers.settings_json`.
        """
        header = json.dumps(
            [self.shard_id, self.version, sorted(self.handled.items()), optimizer], separators=(",", ":")
        )
        value = zlib.crc32(header.encode())
        for _, tensor in self.tensors():
            value = zlib.crc32(tensor.data, value)
        return value

    def tensors(self) -> list[tuple[str, F32]]:
        """(name, tensor), weights first, moments by name."""
        return [("weights", self.weights), *sorted(self.moments.items())]

    def check_valid(self) -> None:
        """Raises InvalidState."""
        for name, tensor in self.tensors():
            if tensor.dtype != np.float32 or tensor.shape != self.weights.shape:
                raise InvalidState(
                    f"shard {self.shard_id}: {name} is {tensor.dtype} {tensor.shape}, weights are {self.weights.shape}"
                )
            if not bool(np.isfinite(tensor).all()):
                raise InvalidState(
                    f"shard {self.shard_id} at version {self.version}: {name} holds a value that is not finite"
                )
        if self.version != self.applied:
            raise InvalidState(f"shard {self.shard_id}: version {self.version} but {self.applied} gradients applied")
        if self.target_version > self.version:
            raise InvalidState(
                f"shard {self.shard_id}: target {self.target_version} is ahead of version {self.version}"
            )


def to_parts(state: ShardState) -> list[CheckpointPart]:
    """Copies of every tensor in pieces of at most 4 MiB."""
    parts = []
    for name, tensor in state.tensors():
        for start in range(0, len(tensor), PART_VALUES):
            data = tensor[start : start + PART_VALUES].astype("<f4", copy=False).tobytes()
            parts.append(CheckpointPart(state.shard_id, state.version, name, start, len(tensor), data))
    return parts


def to_manifest(state: ShardState, parts: int, optimizer: str, time_ms: int) -> CheckpointManifest:
    """The manifest of the state as it is now; `first_part_offset` and the target's place are filled in when the broker has told them."""
    partitions = sorted(state.handled)
    return CheckpointManifest(
        shard_id=state.shard_id,
        version=state.version,
        gradient_offset=state.gradient_offset,
        parts=parts,
        first_part_offset=-1,
        state_hash=state.state_hash(optimizer),
        handled_partition=np.array(partitions, np.int32),
        handled_offset=np.array([state.handled[partition] for partition in partitions], np.int64),
        target_version=state.target_version,
        target_offset=state.target_offset,
        applied=state.applied,
        dropped_stale=state.dropped_stale,
        dropped_duplicate=state.dropped_duplicate,
        dropped_bad=state.dropped_bad,
        optimizer=optimizer,
        time_ms=time_ms,
    )


def to_ledger(state: ShardState, optimizer: str, time_ms: int) -> CheckpointLedger:
    """A line of the ledger for the state as it is now."""
    return CheckpointLedger(state.shard_id, state.version, state.gradient_offset, time_ms, state.state_hash(optimizer))


class Incomplete(Exception):
    """A manifest's parts are not all there, or do not give its hash. Raised by `restored` alone."""


def _assemble(
    manifest: CheckpointManifest, parts: Sequence[CheckpointPart], moments: tuple[str, ...], optimizer: str
) -> ShardState:
    if manifest.version > 0 and manifest.target_offset < 0:
        raise Incomplete("its target has no place in the log")
    distinct = {(part.tensor, part.start): part for part in parts}
    if len(distinct) != manifest.parts:
        raise Incomplete(f"{len(distinct)} of {manifest.parts} parts")
    tensors: dict[str, F32] = {}
    filled: dict[str, int] = {}
    for (name, start), part in sorted(distinct.items()):
        values = np.frombuffer(part.data, "<f4")
        tensor = tensors.setdefault(name, np.empty(part.total, np.float32))
        if part.total != len(tensor) or start != filled.get(name, 0) or start + len(values) > len(tensor):
            raise Incomplete(f"the parts of {name} do not make one tensor")
        tensor[start : start + len(values)] = values
        filled[name] = start + len(values)
    if any(filled[name] != len(tensor) for name, tensor in tensors.items()) or "weights" not in tensors:
        raise Incomplete("a tensor is not whole")
    weights = tensors.pop("weights")
    if manifest.version == 0:
        # Version 0 is the run's initial weights alone (gorila/run_record.py): moments start at zero.
        tensors = {name: np.zeros_like(weights) for name in moments} | tensors
    if set(tensors) != set(moments):
        raise Incomplete(f"tensors {sorted(tensors)} where {sorted(moments)} are needed")
    state = ShardState(
        shard_id=manifest.shard_id,
        weights=weights,
        moments=tensors,
        version=manifest.version,
        gradient_offset=manifest.gradient_offset,
        handled=dict(zip(manifest.handled_partition.tolist(), manifest.handled_offset.tolist(), strict=True)),
        target_version=manifest.target_version,
        target_offset=manifest.target_offset,
        applied=manifest.applied,
        dropped_stale=manifest.dropped_stale,
        dropped_duplicate=manifest.dropped_duplicate,
        dropped_bad=manifest.dropped_bad,
    )
    if manifest.state_hash not in (NO_HASH, state.state_hash(manifest.optimizer)):
        raise Incomplete("the parts do not give the manifest's state hash")
    if manifest.version > 0 and manifest.optimizer != optimizer:
        raise RunError(
            f"the checkpoint of shard {manifest.shard_id} at version {manifest.version} was made by {manifest.optimizer}; this run is configured for {optimizer}"
        )
    return state


def restored(
    log: Log, low: int, offset: int, manifest: CheckpointManifest, *, moments: tuple[str, ...], optimizer: str
) -> ShardState:
    """The state of a manifest at `offset` of the `checkpoints` partition that begins at `low`.

    Raises:
        Incomplete: its parts are not all there, or do not give its hash.
        RunError: it was made with other optimiser settings.
    """
    parts = [
        message
        for _, message in log(max(low, manifest.first_part_offset), offset)
        if isinstance(message, CheckpointPart)
        and (message.shard_id, message.version) == (manifest.shard_id, manifest.version)
    ]
    return _assemble(manifest, parts, moments, optimizer)


def newest_complete(
    log: Log,
    low: int,
    end: int,
    *,
    shard_id: int,
    moments: tuple[str, ...],
    optimizer: str,
    ignored: Callable[[str], None] = lambda _: None,
) -> ShardState | None:
    """The newest state that can be restored from a `checkpoints` partition, or None.

    Args:
        log: reads a range of offsets of the partition.
        low, end: its watermarks.
        moments: tensors the configured optimiser keeps.
        optimizer: `optimizers.settings_json` of the run.
        ignored: told, in one line, why a manifest was passed over.

    Raises:
        RunError: the newest whole checkpoint was made with other optimiser settings.
    """
    stop, window = end, SCAN_RECORDS
    while stop > low:
        start = max(low, stop - window)
        found = [(offset, message) for offset, message in log(start, stop) if isinstance(message, CheckpointManifest)]
        for offset, manifest in reversed(found):
            if manifest.shard_id != shard_id:
                continue
            try:
                return restored(log, low, offset, manifest, moments=moments, optimizer=optimizer)
            except Incomplete as reason:
                ignored(
                    f"checkpoint of version {manifest.version} at offset {offset} is not whole ({reason}); using the one before"
                )
        stop, window = start, window * 2
    return None
