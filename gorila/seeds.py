"""Where every random number comes from (rules.md 6).

Each (role, actor, lane, epoch) has its own stream: neighbouring actors never overlap, evaluation never sees a training episode, and a
restarted actor, whose epoch is new, does not play its first episodes again. Under `--synchronous` the epoch is 0: two runs, one seed, one hash.
"""

from __future__ import annotations

from typing import Literal

import numpy as np

Role = Literal[
    "actor",
    "replay",
    "learner",
    "parameter-server",
    "evaluator",
    "monitor",
    "network",
    "environment",
    "policy",
    "offline",
]

# The number is part of every stream: never renumber, only append.
ROLE_NUMBERS: dict[str, int] = {
    "actor": 1,
    "replay": 2,
    "learner": 3,
    "parameter-server": 4,
    "evaluator": 5,
    "monitor": 6,
    "network": 7,
    "environment": 8,
    "policy": 9,
    "offline": 10,
}


def seed_sequence(run_seed: int, role: Role, actor: int = 0, lane: int = 0, epoch: int = 0) -> np.random.SeedSequence:
    """The stream of one use of randomness.

    Args:
        run_seed: `run.seed`.
        role: domain; evaluation has its own.
        actor: index of the process within its role (actor, learner, split).
        lane: environment of that process.
        epoch: `actor_epoch`, milliseconds; 0 under `--synchronous`.
    Raises:
        KeyError: a role that has no number.
        ValueError: a negative part.
    """
    parts = (run_seed, ROLE_NUMBERS[role], actor, lane, epoch)
    if min(parts) < 0:
        raise ValueError(f"seed parts must not be negative: {parts}")
    return np.random.SeedSequence(parts)


def generator(run_seed: int, role: Role, actor: int = 0, lane: int = 0, epoch: int = 0) -> np.random.Generator:
    """A PCG64 generator on `seed_sequence`'s stream."""
    return np.random.default_rng(seed_sequence(run_seed, role, actor, lane, epoch))


def seed_number(run_seed: int, role: Role, actor: int = 0, lane: int = 0, epoch: int = 0) -> int:
    """One non-negative int below 2**31 from the stream, for libraries that take a plain seed (Gymnasium, ALE, torch)."""
    return int(seed_sequence(run_seed, role, actor, lane, epoch).generate_state(1, np.uint32)[0] >> 1)
