"""One valid message of every kind, with no field left at zero where another value is possible."""

from __future__ import annotations

import numpy as np

from gorila.messages import (
    Batch,
    CheckpointLedger,
    CheckpointManifest,
    CheckpointPart,
    Episode,
    Evaluation,
    Gradient,
    Message,
    Priorities,
    ReplayStats,
    ReplicationEvent,
    Run,
    TransitionBlock,
    Weights,
)
from gorila.observations import compress


def example_messages() -> list[Message]:
    frames = np.arange(3 * 5 * 4, dtype=np.uint8).reshape(3, 5, 4)
    block = compress(frames, "none")
    i32, i64, f32, f64 = (lambda *v, t=t: np.array(v, t) for t in (np.int32, np.int64, np.float32, np.float64))
    flags = lambda *v: np.array(v, np.bool_)  # noqa: E731
    return [
        TransitionBlock(
            "actor-3",
            1_700_000_000_123,
            2,
            77,
            9,
            0.25,
            block,
            i32(1, 0, -1),
            f32(1.5, -2, 0),
            flags(1, 0, 0),
            flags(0, 0, 1),
            flags(0, 1, 0),
            flags(0, 0, 0),
            f32(0.1, 0.2, 0.3),
            f32(0.4, 0.5, 0.6),
        ),
        Batch(
            "replay-0",
            5,
            1,
            4,
            1000,
            i32(0, 1),
            i64(2**40, 7),
            i32(3, 4),
            f64(0.001, 0.25),
            i32(1, 0),
            f32(2.5, -1),
            f32(0.97, 0),
            i64(4, 5),
            2,
            i32(0, 1, 1, 2),
            i32(1, 2, 2, 2),
            [block],
        ),
        Priorities("learner-1", 2, 2**41, 12, i32(0, 5), i64(1, 2**42), i32(0, 9), f32(0, 3.5), 0.5, 1.25, True, 0.75),
        ReplayStats(
            "replay-0",
            1_700_000_000_123,
            ["actor-0", "actor-1"],
            i64(5, 6),
            f64(0.5, 2.25),
            i64(10, 11),
            21,
            42,
            2,
            0.125,
            3,
            "learner",
            999,
        ),
        Gradient(1, "learner-0", 2, 2**43, 11, 128, 3, "fp32", f32(1, 2, 3).tobytes(), 0.5, 0.25),
        Weights(
            1,
            13,
            "key",
            2,
            -1,
            -1,
            10,
            4,
            2**44,
            "fp32",
            f32(1, 2).tobytes(),
            2**32 - 1,
            -1,
            13,
            1,
            2,
            3,
            i32(0, 1, 2),
            0.0078125,
        ),
        CheckpointPart(1, 13, "moment1", 1, 3, f32(1, 2).tobytes()),
        CheckpointManifest(1, 13, 2**45, 2, 7, -1, i32(0, 1), i64(5, 6), 10, 4, 13, 1, 2, 3, "{}", 1_700_000_000_123),
        CheckpointLedger(1, 4096, 5000, 1_700_000_000_123, 2**33),
        ReplicationEvent(1, "ps-1-0", "view", 3, ["ps-1-0", "ps-1-1"], 13, 14, 15),
        Episode("actor", "actor-3", 2, 499.5, 500, True, 0.25, 9, 12_345, 1_700_000_000_123),
        Evaluation("evaluator-0", 9, "confirm", 100, 480.5, 20.25, 300.0, 500.0, 0.0625, True, 1_700_000_000_123),
        Run("demo", '{"run":{}}', "{}", {"17": "{}"}, "0.1.0", 1_700_000_000_123),
    ]
