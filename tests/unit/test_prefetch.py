"""The prefetch thread gives what the learner would have made itself."""

from __future__ import annotations

import numpy as np
import pytest

from consumers.batch_assembly import AssembleNow, LearnerBatch
from consumers.prefetch import WORTH_A_THREAD_BYTES, Prefetch
from gorila.environment_facts import EnvironmentFacts
from gorila.errors import BadRecord
from gorila.observations import ObservationBlock, inflate
from gorila.settings import validate
from tests.processors.learning_loop import CARTPOLE, make_batch

PONG = EnvironmentFacts("ale:pong", (84, 84), "uint8", 6, 4, 27_000)
CONFIG = validate({"learner": {"batch_size": 16}, "replay": {"record_rows": 8}})


def columns(batch: LearnerBatch) -> dict[str, list[float]]:
    return {name: getattr(batch, name).tolist() for name in LearnerBatch.__slots__}


@pytest.mark.parametrize("facts", [CARTPOLE, PONG], ids=["vectors", "frames"])
def test_a_batch_is_the_same_from_the_thread_and_without(facts: EnvironmentFacts) -> None:
    prefetch = Prefetch()
    parts = make_batch(1, CONFIG, facts)
    try:
        pending = [prefetch.submit(parts) for _ in range(3)]
        wanted = columns(AssembleNow().submit(parts).result())
        assert all(columns(batch.result()) == wanted for batch in pending)
    finally:
        prefetch.close()


def test_states_are_the_frames_that_the_indices_name() -> None:
    parts = make_batch(5, CONFIG, PONG)
    batch = AssembleNow().submit(parts).result()
    assert batch.states_tm1.shape == (16, 4, 84, 84) and batch.states_tm1.dtype == np.uint8
    frames = [np.concatenate([inflate(block) for block in part.blocks]) for part in parts]
    for row in (0, 7, 8, 15):
        part = parts[row // 8]
        for name, states in (("frames_tm1", batch.states_tm1), ("frames_t", batch.states_t)):
            indices = getattr(part, name).reshape(8, 4)[row % 8]
            assert np.array_equal(states[row], frames[row // 8][indices])


def test_a_block_that_does_not_inflate_is_a_bad_record_when_the_batch_is_asked_for() -> None:
    parts = make_batch(1, CONFIG, PONG)
    block = parts[1].blocks[2]
    parts[1].blocks[2] = ObservationBlock(block.dtype, block.shape, block.count, "zstd", b"\0\1\2")
    assert sum(block.inflated_bytes for part in parts for block in part.blocks) > WORTH_A_THREAD_BYTES
    prefetch = Prefetch()
    try:
        with pytest.raises(BadRecord, match="inflate"):
            prefetch.submit(parts).result()
    finally:
        prefetch.close()
