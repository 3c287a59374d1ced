"""Compile the replay core before the first record comes: seconds the first time on a machine, milliseconds afterwards (kept on disk)."""

from __future__ import annotations

import numpy as np

from gorila.config import Config
from gorila.messages import Priorities, TransitionBlock
from gorila.observations import compress
from pipelines.replay import ReplaySplit

_ROWS = 8


def warm_up() -> None:
    """Take a few invented rows through every compiled loop: insert, evict, draw both ways, lay out, learn."""
    for new_share in (None, 0.5):
        config = Config.model_validate(
            {
                "replay": {"capacity_rows": 16, "min_size_rows": 1, "target_new_share": new_share},
                "learner": {"batch_size": 2},
            }
        )
        split = ReplaySplit(config, "warm-up", np.random.default_rng(0))
        split.open_ring(0, 0)
        for offset in range(4):
            split.insert(0, offset, 0, _block(offset))
        for record in split.draw(1)[0]:
            td_error = np.ones(len(record.row), np.float32)
            split.learned(
                Priorities("", 0, 0, 0, record.partition, record.offset, record.row, td_error, 0.0, 0.0, False, 0.0)
            )
        split.drop_ring(0)


def _block(number: int) -> TransitionBlock:
    first_row = np.zeros(_ROWS, np.bool_)
    first_row[0] = number == 0
    no, zeros = np.zeros(_ROWS, np.bool_), np.zeros(_ROWS, np.float32)
    frames = np.zeros((_ROWS, 1), np.float32)
    action = np.zeros(_ROWS, np.int32)
    return TransitionBlock(
        "", 0, 0, number * _ROWS, 0, 0.0, compress(frames, "none"), action, zeros, first_row, no, no, no, zeros, zeros
    )
