"""A lag bound must hold what is written between two commits of its reader, twice over (design section 5, rules.md 9), or the writer stands still
while the reader has long caught up.

    bound >= 2 x rate x commit interval

Actors have a configured rate where `actor.max_steps_per_s` sets one; without it the bound itself is their limit, and nothing is refused. Replay and
learners have none: what they write before anybody must have committed anything is a learner's window (rules.md 10), and the bound must hold two of
those. `--synchronous` counts in rounds and has no use for bounds.

Asked of new runs only: a recording of before must stay readable, whatever its bounds were.
"""

from __future__ import annotations

import math

from gorila.config import Config
from gorila.errors import ConfigError

CHECKPOINTS = "--checkpointing-interval-ms"


def refuse_narrow(config: Config) -> None:
    """Raises ConfigError for the first bound that is too small, naming it and the keys that ask for more."""
    if config.run.synchronous:
        return
    refuse_narrow_transitions(config, config.replay.commit_interval_ms, "replay.commit_interval_ms")
    learner = config.learner
    window = f"learner.max_in_flight ({learner.max_in_flight})"
    if config.replay.max_lag_batches < 2 * learner.max_in_flight:
        raise ConfigError(
            "replay.max_lag_batches",
            config.replay.max_lag_batches,
            f"{2 * learner.max_in_flight} or more: 2 * {window}, what a learner may take between two of its commits",
        )
    most = 2 * learner.count * learner.max_in_flight
    if learner.max_lag_records < most:
        raise ConfigError(
            "learner.max_lag_records",
            learner.max_lag_records,
            f"{most} or more: 2 * learner.count ({learner.count}) * {window}, what a shard may get between two of its commits",
        )


def refuse_narrow_transitions(config: Config, interval_ms: float, interval_key: str = CHECKPOINTS) -> None:
    """The actors' bound against the interval in which replay commits: on Flink, that of the checkpoints. Raises ConfigError."""
    actor = config.actor
    asked = 2 * actor.max_steps_per_s / actor.block_steps * interval_ms / 1000
    least = math.ceil(asked) if math.isfinite(asked) else asked
    if actor.max_lag_records < least:
        raise ConfigError(
            "actor.max_lag_records",
            actor.max_lag_records,
            f"{least} or more: 2 * actor.max_steps_per_s ({actor.max_steps_per_s:g}) / actor.block_steps ({actor.block_steps})"
            f" * {interval_key} ({interval_ms:g} ms), or actors stand still between two commits of replay",
        )
