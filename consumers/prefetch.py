"""Inflates and stacks batches ahead of the learner, in one thread. Edge code: the learner (consumers/learner.py) only sees an `Assembler`.

pyarrow's codecs and numpy's copies release the GIL, and so do torch's convolutions: while one batch is learned from, the next is made ready.
Bounded by the learner, which takes no more than BATCHES_AHEAD batches.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor

from consumers.batch_assembly import AssembleNow, LearnerBatch, PendingBatch, assemble
from gorila.messages import Batch
from gorila.observations import ObservationBlock

# Handing a batch to a thread and back costs about 0.1 ms: worth it for frames, not for CartPole's vectors.
WORTH_A_THREAD_BYTES = 256 * 1024


class Prefetch:
    """An Assembler with a thread of its own for batches that are large enough."""

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prefetch")
        self._now = AssembleNow()

    def submit(self, parts: list[Batch]) -> PendingBatch:
        """See Assembler."""
        if sum(_inflated_bytes(part.blocks) for part in parts) < WORTH_A_THREAD_BYTES:
            return self._now.submit(parts)
        future: Future[LearnerBatch] = self._pool.submit(assemble, parts)
        return future

    def close(self) -> None:
        """Drop what has not begun; wait for what has (milliseconds)."""
        self._pool.shutdown(wait=True, cancel_futures=True)


def _inflated_bytes(blocks: list[ObservationBlock]) -> int:
    # All blocks of a batch have one shape and dtype, so one of them tells a frame's size.
    return sum(block.count for block in blocks) * (blocks[0].inflated_bytes // blocks[0].count)
