"""Observation blocks: frames compressed once by the actor, inflated once by the learner, and the one way they are stacked.

Everything is bounded before it is allocated: a short record that claims gigabytes is a BadRecord.
Shape legend: B rows, K stack, F frames laid end to end, ... one observation's shape.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gorila.errors import BadRecord, ShapeError

MAX_INFLATED_BYTES = 8 * 1024 * 1024  # no block of ours comes near: 16 Nature frames are 113 KB
MAX_FRAMES = 4096
MAX_RANK = 4
DTYPES = frozenset({"uint8", "int8", "int16", "uint16", "int32", "int64", "float16", "float32", "float64", "bool"})
CODECS = frozenset({"none", "zstd", "lz4"})

Array = NDArray[Any]


@cache
def _codec(name: str) -> pa.Codec:
    return pa.Codec("zstd", 1) if name == "zstd" else pa.Codec(name)


@dataclass(frozen=True, slots=True)
class ObservationBlock:
    """`count` consecutive observations of `shape`, `codec`-compressed in C order."""

    dtype: str
    shape: tuple[int, ...]
    count: int
    codec: str
    data: bytes

    @property
    def inflated_bytes(self) -> int:
        """Bytes once inflated. Only meaningful after `check()`."""
        return self.count * math.prod(self.shape) * np.dtype(self.dtype).itemsize

    def check(self) -> None:
        """Raises BadRecord for anything that must not be allocated or inflated. Costs a microsecond, touches no payload."""
        if self.dtype not in DTYPES:
            raise BadRecord(f"observation dtype {self.dtype[:40]!r} is not one of ours")
        if self.codec not in CODECS:
            raise BadRecord(f"observation codec {self.codec[:40]!r} is not one of ours")
        if len(self.shape) > MAX_RANK or any(d < 1 or d > MAX_INFLATED_BYTES for d in self.shape):
            raise BadRecord(f"observation shape {self.shape[:8]} is out of bounds")
        if not 0 < self.count <= MAX_FRAMES:
            raise BadRecord(f"observation count {self.count} is out of bounds")
        if self.inflated_bytes > MAX_INFLATED_BYTES:
            raise BadRecord(
                f"observation block claims {self.inflated_bytes} bytes, at most {MAX_INFLATED_BYTES} are taken"
            )
        if self.codec == "none" and len(self.data) != self.inflated_bytes:
            raise BadRecord(f"observation block has {len(self.data)} bytes, its shape says {self.inflated_bytes}")


def compress(frames: Array, codec: str) -> ObservationBlock:
    """Pack frames (F, ...) into a block; falls back to codec "none" where compression does not pay (small vectors)."""
    raw = np.ascontiguousarray(frames)
    data = raw.tobytes()
    dtype, shape, count = raw.dtype.name, tuple(raw.shape[1:]), raw.shape[0]
    if codec != "none" and len(data) > 512:
        packed = _codec(codec).compress(data, asbytes=True)
        if len(packed) < len(data):
            return ObservationBlock(dtype, shape, count, codec, packed)
    return ObservationBlock(dtype, shape, count, "none", data)


def inflate(block: ObservationBlock) -> Array:
    """Frames (F, ...) of a block, read-only. Raises BadRecord when the bytes are not what the block says."""
    block.check()
    size = block.inflated_bytes
    if block.codec == "none":
        data: Any = block.data
    else:
        try:
            data = _codec(block.codec).decompress(block.data, decompressed_size=size)
        except (OSError, ValueError, pa.ArrowException) as error:
            raise BadRecord(f"observation block does not inflate: {error}") from None
        if len(data) != size:
            raise BadRecord(f"observation block inflates to {len(data)} bytes, its shape says {size}")
    return np.frombuffer(data, dtype=block.dtype).reshape((block.count, *block.shape))


def frame_indices(row: int, rows_since_first: int, stack: int) -> list[int]:
    """Indices of the `stack` observations that make the state at `row`, oldest first.

    Args:
        row: index of the newest observation.
        rows_since_first: rows between the episode's first row and `row`; fewer than stack - 1 means the episode's first
            observation is repeated (never a zero frame, never one of the episode before).
    """
    return [row - min(back, rows_since_first) for back in range(stack - 1, -1, -1)]


def gather_stack(frames: Array, indices_BK: Array) -> Array:
    """States (B, K, ...) from frames (F, ...) for images; for stack 1 the stack axis is dropped: (B, ...).

    The one stacking rule of actor, learner and evaluator: oldest first, on a new axis before the observation's own.
    """
    if indices_BK.ndim != 2:
        raise ShapeError(f"indices must be (B, K), got {indices_BK.shape}")
    gathered: Array = frames[indices_BK]
    return gathered[:, 0] if indices_BK.shape[1] == 1 else gathered


class RecentFrames:
    """The newest K observations of each of L lanes, ready as states: what `gather_stack` gives, kept by rolling.

    push(observations (L, ...), is_first (L,)) → states (L, K, ...), or (L, ...) when K is 1.
    """

    def __init__(self, lanes: int, shape: tuple[int, ...], dtype: Any, stack: int) -> None:
        self._stack = stack
        self._states: Array = np.zeros((lanes, stack, *shape), dtype=dtype)

    def push(self, observations: Array, is_first: NDArray[np.bool_]) -> Array:
        """Add one observation a lane; a first one fills its lane's whole stack. Returns a view: copy what you keep."""
        states = self._states
        if self._stack == 1:
            states[:, 0] = observations
            return states[:, 0]
        states[:, :-1] = states[:, 1:].copy()
        states[:, -1] = observations
        for lane in np.flatnonzero(is_first):
            states[lane, :] = observations[lane]
        return states
