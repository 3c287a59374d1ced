"""Options of the state, the batch and the network, each through one real update: an actor's blocks, the pipeline's batches, a learner, a shard."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gorila.codec import Schemas
from gorila.config import Config
from gorila.environment_facts import EnvironmentFacts
from gorila.environments import describe, make_lanes
from gorila.errors import ConfigError
from gorila.messages import Batch, TransitionBlock
from gorila.network import build_network, load_flat
from gorila.observations import inflate
from gorila.settings import load_config
from pipelines.replay import ReplaySplit
from producers.actor import ActorCore
from producers.policy import EpsilonGreedy
from tests.processors.learning_loop import LearningLoop

SETS = [
    "network.hidden=[32]",
    "learner.outlier_sigma=0",
    "parameter_server.weights_bytes_per_s=1e12",
    "replay.n_steps=3",
]
SCHEMAS = Schemas()


def drawn(config: Config, facts: EnvironmentFacts) -> list[Batch]:
    """One learner batch of the real pipeline, over the wire, from a random actor's experience."""
    lanes = make_lanes(config, list(range(8)))
    policy = EpsilonGreedy(build_network(config, facts), facts.actions, np.random.default_rng(0))
    actor = ActorCore(config.actor, 0, "actor-0", 1, lanes, facts.stack, policy)
    replay = ReplaySplit(config, "replay-0", np.random.default_rng(0), facts)
    replay.open_ring(0, 0)
    offset = 0
    for step in range(400):
        for outgoing in actor.step(step * 0.01):
            if isinstance(outgoing.message, TransitionBlock):
                replay.insert(0, offset, 0, outgoing.message)
                offset += 1
    [parts] = replay.draw(1, regardless=True)
    return [SCHEMAS.expect(SCHEMAS.encode(part), Batch) for part in parts]


def states_of(part: Batch, indices: np.ndarray) -> np.ndarray:
    """(rows, stack, 24, 24), frame by frame."""
    frames = np.concatenate([inflate(block) for block in part.blocks])
    return np.stack([np.stack([frames[i] for i in row]) for row in indices.reshape(-1, part.stack)])


@pytest.mark.parametrize(
    ("sets", "records"),
    [
        (["env.stack=4"], 1),
        (["env.stack=8"], 1),
        (["learner.batch_size=128"], 4),
        (["learner.batch_size=2048"], 64),
        (["network.dueling=true"], 1),
        (["env.stack=8", "learner.batch_size=512", "network.dueling=true", "network.batch_norm=true"], 16),
        (["env.stack=4", "learner.mixed_precision=on", "parameter_server.shards=2"], 1),
    ],
    ids=lambda value: "+".join(value) if isinstance(value, list) else f"{value}-records",
)
def test_the_option_goes_through_one_update(sets: list[str], records: int) -> None:
    config = load_config("catch-pixels", [*SETS, *sets], {})
    facts = describe(config)
    parts = drawn(config, facts)
    assert len(parts) == records and {len(part.action) for part in parts} == {32}
    assert {part.stack for part in parts} == {config.env.stack}
    loop = LearningLoop(config, facts)
    loop.serve()
    loop.driver.feed("batches", *parts)
    loop.serve()
    (priorities,) = loop.priorities
    shards = config.parameter_server.shards
    assert [gradient.batch_offset for gradient in loop.gradients] == [records - 1] * shards
    assert {gradient.num_samples for gradient in loop.gradients} == {config.learner.batch_size}
    assert [shard.state.version for shard in loop.shards] == [1] * shards
    learned = np.concatenate([shard.state.weights for shard in loop.shards])
    assert np.isfinite(learned).all() and np.count_nonzero(learned != loop.initial) > 0.3 * len(learned)
    assert priorities.row.tolist() == np.concatenate([part.row for part in parts]).tolist()
    assert priorities.td_error == pytest.approx(
        td_errors(config, facts, loop.initial, parts), rel=tolerance(config), abs=tolerance(config)
    )


def tolerance(config: Config) -> float:
    return 0.05 if config.learner.mixed_precision == "on" else 1e-3


def td_errors(config: Config, facts: EnvironmentFacts, weights: np.ndarray, parts: list[Batch]) -> np.ndarray:
    """|n-step return + discount * max Q(s_t) - Q(s_tm1, a)|, frames put together one by one; target and online weights are the same here."""
    net = build_network(config, facts)
    load_flat(net, weights)
    tm1 = torch.from_numpy(np.concatenate([states_of(part, part.frames_tm1) for part in parts]))
    t = torch.from_numpy(np.concatenate([states_of(part, part.frames_t) for part in parts]))
    assert tm1.shape == (config.learner.batch_size, config.env.stack, 24, 24)
    with torch.no_grad():
        best = net.eval()(t).max(1).values.numpy()
        q = net.train()(tm1).numpy()

    def column(name: str) -> np.ndarray:
        return np.concatenate([getattr(part, name) for part in parts])

    found: np.ndarray = np.abs(
        column("n_step_return") + column("discount") * best - q[np.arange(len(q)), column("action")]
    )
    return found


def test_batches_of_one_record_up_to_the_largest_are_taken_and_a_larger_one_is_refused_by_key() -> None:
    for size, records in ((32, 1), (64, 2), (2048, 64)):
        assert load_config("catch-pixels", [f"learner.batch_size={size}"], {}).record_parts == records
    with pytest.raises(ConfigError, match=r"learner\.batch_size"):
        load_config("catch-pixels", ["learner.batch_size=20000"], {})
