"""Blocks held by a split's rings: one number a block, columns for what its rows have in common, its pixels as they came."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from gorila.messages import I32, I64
from gorila.observations import ObservationBlock
from pipelines.ring import Chain


@dataclass(slots=True, eq=False)
class BlockTable:
    """Columns by block number; numbers are reused.

    Columns:
        start: int32, slot of the first row; row r is in slot (start + r) modulo the ring's capacity.
        count: int32, rows.
        before, after: int32, neighbours in the lane; `before` may name a block that is gone (no sampleable row needs it then).
        partition, offset: identity in Kafka. version: behaviour weights. timestamp_ms: append time.
        mark: int64, where the block stands in the record being assembled (scratch); stamp: which record that is.
    """

    start: I32 = field(default_factory=lambda: np.zeros(0, np.int32))
    count: I32 = field(default_factory=lambda: np.zeros(0, np.int32))
    before: I32 = field(default_factory=lambda: np.zeros(0, np.int32))
    after: I32 = field(default_factory=lambda: np.zeros(0, np.int32))
    partition: I32 = field(default_factory=lambda: np.zeros(0, np.int32))
    offset: I64 = field(default_factory=lambda: np.zeros(0, np.int64))
    version: I64 = field(default_factory=lambda: np.zeros(0, np.int64))
    timestamp_ms: I64 = field(default_factory=lambda: np.zeros(0, np.int64))
    mark: I64 = field(default_factory=lambda: np.zeros(0, np.int64))
    stamp: int = 0
    observations: list[ObservationBlock | None] = field(default_factory=list)
    chains: list[Chain | None] = field(default_factory=list)
    free: list[int] = field(default_factory=list)

    def allocate(self) -> int:
        """A number for a new block."""
        if not self.free:
            self._grow()
        return self.free.pop()

    def release(self, number: int) -> None:
        """The block is gone."""
        self.observations[number] = None
        self.chains[number] = None
        self.free.append(number)

    def _grow(self) -> None:
        old = len(self.start)
        size = max(64, old + old // 4)
        for name in ("start", "count", "before", "after", "partition", "offset", "version", "timestamp_ms", "mark"):
            column = getattr(self, name)
            grown = np.zeros(size, column.dtype)
            grown[:old] = column
            setattr(self, name, grown)
        self.observations.extend([None] * (size - old))
        self.chains.extend([None] * (size - old))
        self.free.extend(range(size - 1, old - 1, -1))

    def nbytes(self) -> int:
        """Bytes of the columns and lists; not of the pixels."""
        columns = (self.start, self.count, self.before, self.after, self.partition, self.offset, self.version)
        return sum(c.nbytes for c in (*columns, self.timestamp_ms, self.mark)) + 16 * len(self.observations)
