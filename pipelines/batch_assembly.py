"""From drawn rows to batches records. Nothing here touches a pixel: a record names blocks, carries them as they came, and frames in them.

Small vectors that lie there uncompressed are the exception: only those that the rows need are copied, into one block a record. 64 blocks of
16 vectors cost the learner more to decode than its update (docs/decisions/0017-one-block-of-vectors.md).
"""

from __future__ import annotations

import numpy as np

from gorila.messages import F32, I32, Batch
from gorila.observations import ObservationBlock
from pipelines.nstep import U8
from pipelines.replay_memory import ReplayMemory
from pipelines.ring_kernels import OVER, STEPS, lay_out_frames
from pipelines.sampling import DrawnRows

VECTOR_BYTES = 1024  # of one observation; from here on blocks travel whole


class BatchAssembly:
    """Turns drawn rows into batches records.

    Args:
        memory: where the rows are.
        split: name of the split.
        record_rows: rows in one record; the last of a learner batch may have fewer.
    """

    def __init__(self, memory: ReplayMemory, split: str, record_rows: int) -> None:
        self._memory = memory
        self._split = split
        self._record_rows = record_rows
        steps = np.arange(STEPS + 1)
        self._discount: F32 = np.concatenate((memory.rules.discount**steps, np.zeros(STEPS + 1))).astype(np.float32)

    def records(self, drawn: DrawnRows, batch_number: int, population: int) -> list[Batch]:
        """The records of one learner batch, in order."""
        memory, blocks = self._memory, self._memory.blocks
        at = drawn.at
        number = memory.block[at]
        row = ((drawn.slot - blocks.start[number]) % memory.rules.capacity_rows).astype(np.int32)
        back, ahead = memory.back[at], memory.ahead[at]
        partition, offset, version = blocks.partition[number], blocks.offset[number], blocks.version[number]
        action, n_step_return, discount = memory.action[at], memory.n_step_return[at], self._discount[ahead]
        parts = -(-len(at) // self._record_rows)
        records = []
        for part in range(parts):
            rows = slice(part * self._record_rows, (part + 1) * self._record_rows)
            frames_tm1, frames_t, needed = self._frames(number[rows], row[rows], back[rows], ahead[rows])
            records.append(
                Batch(
                    split=self._split,
                    batch_number=batch_number,
                    part=part,
                    parts=parts,
                    population=population,
                    partition=partition[rows],
                    offset=offset[rows],
                    row=row[rows],
                    probability=drawn.probability[rows],
                    action=action[rows],
                    n_step_return=n_step_return[rows],
                    discount=discount[rows],
                    behaviour_version=version[rows],
                    stack=memory.rules.stack,
                    frames_tm1=frames_tm1,
                    frames_t=frames_t,
                    blocks=needed,
                )
            )
        return records

    def _frames(self, number: I32, row: I32, back: U8, ahead: U8) -> tuple[I32, I32, list[ObservationBlock]]:
        memory, blocks = self._memory, self._memory.blocks
        stack = memory.rules.stack
        frames_tm1: I32 = np.empty(len(number) * stack, np.int32)
        frames_t: I32 = np.empty(len(number) * stack, np.int32)
        needed: I32 = np.empty(len(number) * 2 * stack, np.int32)
        blocks.stamp += 1
        found = lay_out_frames(
            number,
            row,
            back,
            ahead,
            stack,
            blocks.count,
            blocks.before,
            blocks.after,
            blocks.mark,
            blocks.stamp,
            frames_tm1,
            frames_t,
            needed,
        )
        observations = blocks.observations
        carried: list[ObservationBlock] = [observations[i] for i in needed[:found].tolist()]  # type: ignore[misc]
        if all(block.codec == "none" for block in carried) and _frame_bytes(carried[0]) <= VECTOR_BYTES:
            return _only_needed(carried, frames_tm1, frames_t)
        return frames_tm1, frames_t, carried


def _frame_bytes(block: ObservationBlock) -> int:
    return len(block.data) // block.count


def _only_needed(
    blocks: list[ObservationBlock], frames_tm1: I32, frames_t: I32
) -> tuple[I32, I32, list[ObservationBlock]]:
    """The same states from one block that holds each needed vector once, in the order of the blocks."""
    first = blocks[0]
    raw = np.frombuffer(b"".join([block.data for block in blocks]), f"V{_frame_bytes(first)}")
    wanted, inverse = np.unique(np.concatenate((frames_tm1, frames_t)), return_inverse=True)
    place: I32 = inverse.astype(np.int32)
    merged = ObservationBlock(first.dtype, first.shape, len(wanted), "none", raw[wanted].tobytes())
    return place[: len(frames_tm1)], place[len(frames_tm1) :], [merged]


assert OVER == STEPS + 1, "the discount table is indexed by the `ahead` byte"
