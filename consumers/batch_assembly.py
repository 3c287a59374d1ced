"""From records of the batches topic to one learner batch: parts put together, frames inflated once and stacked.

Rules of this file:
1. A learner batch is `parts` records of one split, in one partition, part 0 first. Records of several splits may alternate.
2. Never compute from half a batch: a middle part without its beginning (a restart, a bad record before it) is skipped and counted.
   So is a beginning whose end does not come: its split was killed between two parts and may be gone for good, and what is held is not committed.
3. A batch's identity is (partition, offset of its last record).
"""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gorila.errors import BadRecord
from gorila.messages import Batch
from gorila.observations import ObservationBlock, gather_stack, inflate
from gorila.processor import Incoming

F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class LearnerBatch:
    """What one update is computed from; B rows, K stack.

    Attributes:
        states_tm1, states_t: the environment's dtype, (B, K, ...) or (B, ...) for stack 1.
        action: int64 (B,).
        n_step_return, discount: float32 (B,).
        probability: float64 (B,), in (0, 1].
        partition, offset, row: identity of each row, int32, int64, int32 (B,).
    """

    states_tm1: NDArray[Any]
    states_t: NDArray[Any]
    action: NDArray[np.int64]
    n_step_return: F32
    discount: F32
    probability: NDArray[np.float64]
    partition: NDArray[np.int32]
    offset: NDArray[np.int64]
    row: NDArray[np.int32]


class PendingBatch(Protocol):
    """A batch being assembled."""

    def result(self) -> LearnerBatch:
        """Waits for it. Raises BadRecord when a block does not inflate."""
        ...


class Assembler(Protocol):
    """Who inflates and stacks: `AssembleNow` here, a thread in consumers/prefetch.py."""

    def submit(self, parts: list[Batch]) -> PendingBatch:
        """Start on a complete batch."""
        ...


class AssembleNow:
    """In the caller's own time; no thread."""

    def submit(self, parts: list[Batch]) -> PendingBatch:
        """See Assembler."""
        done: Future[LearnerBatch] = Future()
        try:
            done.set_result(assemble(parts))
        except BadRecord as error:
            done.set_exception(error)
        return done


def _frames(blocks: list[ObservationBlock]) -> NDArray[Any]:
    """(F, ...) of all blocks laid end to end."""
    first = blocks[0]
    if all(block.codec == "none" for block in blocks):  # small vectors: one copy instead of one array a block
        data = b"".join([block.data for block in blocks])
        return np.frombuffer(data, dtype=first.dtype).reshape((-1, *first.shape))
    return np.concatenate([inflate(block) for block in blocks])


def assemble(parts: list[Batch]) -> LearnerBatch:
    """One learner batch from its records, in order. Raises BadRecord when a block does not inflate to what it says."""
    frames = [_frames(part.blocks) for part in parts]
    stacks = [(-1, part.stack) for part in parts]

    def column(name: str) -> NDArray[Any]:
        columns = [getattr(part, name) for part in parts]
        return columns[0] if len(columns) == 1 else np.concatenate(columns)

    def states(name: str) -> NDArray[Any]:
        gathered = [
            gather_stack(frame, getattr(part, name).reshape(shape))
            for part, frame, shape in zip(parts, frames, stacks, strict=True)
        ]
        return gathered[0] if len(gathered) == 1 else np.concatenate(gathered)

    return LearnerBatch(
        states_tm1=states("frames_tm1"),
        states_t=states("frames_t"),
        action=column("action").astype(np.int64),
        n_step_return=column("n_step_return"),
        discount=column("discount"),
        probability=column("probability"),
        partition=column("partition"),
        offset=column("offset"),
        row=column("row"),
    )


class PartCollector:
    """Parts of batches that are not complete yet, by (partition, split).

    Args:
        patience_records: a beginning is given up when this many records of its partition have come since its newest part.
    """

    def __init__(self, patience_records: int) -> None:
        self._patience_records = patience_records
        self._parts: dict[tuple[int, str], list[Incoming]] = {}
        self.orphan_parts = 0  # records skipped because their batch's beginning or end is missing

    def add(self, record: Incoming, batch: Batch) -> tuple[list[Incoming] | None, list[Incoming]]:
        """(the records of a batch this one completes, or None; records that are of no use)."""
        key = (record.partition, batch.split)
        held = self._parts.pop(key, [])
        useless: list[Incoming] = []
        if held and not self._continues(held, batch):
            useless, held = held, []
        if not held and batch.part != 0:
            useless.append(record)
        else:
            held.append(record)
        useless += self._given_up(record)
        self.orphan_parts += len(useless)
        if held and batch.part == batch.parts - 1:
            return held, useless
        if held:
            self._parts[key] = held
        return None, useless

    def _given_up(self, record: Incoming) -> list[Incoming]:
        """Parts of other splits that have waited too long."""
        newest = record.offset - self._patience_records
        late = [key for key, held in self._parts.items() if key[0] == record.partition and held[-1].offset <= newest]
        return [part for key in late for part in self._parts.pop(key)]

    @staticmethod
    def _continues(held: list[Incoming], batch: Batch) -> bool:
        first = held[0].message
        assert isinstance(first, Batch)
        same = first.batch_number == batch.batch_number and first.parts == batch.parts and first.stack == batch.stack
        return same and batch.part == len(held)

    def forget(self, partition: int) -> None:
        """The partition belongs to another learner now."""
        for key in [key for key in self._parts if key[0] == partition]:
            del self._parts[key]
