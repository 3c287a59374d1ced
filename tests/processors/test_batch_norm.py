"""BatchNorm (rules.md 15): weights travel, statistics do not; each role has those of what it has seen itself."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from consumers import learner_checkpoint
from consumers.evaluator import EvaluatorCore
from consumers.evaluator_service import PolicyKeeper
from gorila.batch_statistics import NEAR_VERSIONS, WARM_ROWS, ActedStatistics, buffers_of, checkpointed
from gorila.config import Config
from gorila.environment_facts import EnvironmentFacts
from gorila.environments import describe, make_lanes
from gorila.errors import ConfigError, UsageError
from gorila.lanes import Lanes
from gorila.messages import Episode, Evaluation
from gorila.network import QNetwork, build_network, flat_from, initial_weights, load_flat
from gorila.policy import Policy, evaluate_file, notes_of, save_weights
from gorila.processor import Outgoing
from gorila.settings import load_config, validate
from producers.policy import EpsilonGreedy
from tests.processors.learning_loop import CARTPOLE, CATCH, LearningLoop, make_weights, small_config

NORMED = {"network": {"batch_norm": True, "hidden": [8]}}
SMALL_CONV = {"network": {"batch_norm": True, "factory": "small-conv", "hidden": [8], "dueling": True}}


def network(sections: dict[str, Any] = NORMED, facts: EnvironmentFacts = CARTPOLE) -> QNetwork:
    return build_network(validate(sections), facts)


# ---- the network


@pytest.mark.parametrize(
    ("facts", "sections", "layers"), [(CARTPOLE, NORMED, 1), (CATCH, SMALL_CONV, 4)], ids=["mlp", "small-conv-dueling"]
)
def test_weights_are_scale_and_shift_and_never_a_statistic(
    facts: EnvironmentFacts, sections: dict[str, Any], layers: int
) -> None:
    net, plain = network(sections, facts), network({"network": {**sections["network"], "batch_norm": False}}, facts)
    norms = [m for m in net.modules() if isinstance(m, torch.nn.BatchNorm1d | torch.nn.BatchNorm2d)]
    assert len(norms) == layers and len(list(net.buffers())) == 3 * layers
    widths = sum(norm.num_features for norm in norms)
    assert net.num_parameters == plain.num_parameters + 2 * widths - widths, "a bias before BatchNorm would do nothing"
    before = flat_from(net)
    states = torch.randint(0, 256, (6, *facts.state_shape)).to(getattr(torch, facts.observation_dtype))
    assert net.train()(states).shape == (6, facts.actions)
    assert all(int(norm.num_batches_tracked or 0) == 1 for norm in norms)
    assert np.array_equal(flat_from(net), before)


def test_a_batch_of_one_row_is_refused_by_key() -> None:
    with pytest.raises(UsageError, match=r"network\.batch_norm.*learner\.batch_size"):
        validate({"network": {"batch_norm": True}, "learner": {"batch_size": 1}})
    with pytest.raises(ConfigError, match=r"network\.batch_norm"):
        network({"network": {"factory": "tests.unit.user_networks:Linear", "batch_norm": True}})


# ---- the actor


def acting(net: QNetwork, states: np.ndarray, lanes: int) -> EpsilonGreedy:
    policy = EpsilonGreedy(net, 2, np.random.default_rng(0))
    for start in range(0, len(states), lanes):
        policy.act(states[start : start + lanes], np.zeros(lanes))
    return policy


@pytest.mark.parametrize("lanes", [1, 8])
def test_an_actor_has_mean_and_variance_of_what_the_layer_got_on_acted_states(lanes: int) -> None:
    states = (np.random.default_rng(0).standard_normal((32, 4)) * 5 + 3).astype(np.float32)
    net = network()
    acting(net, states, lanes)
    first = net.body[1]
    seen = first(torch.from_numpy(states)).detach().numpy().astype(np.float64)
    norm = net.body[2]
    assert norm.running_mean.numpy() == pytest.approx(seen.mean(0), rel=1e-5)
    assert norm.running_var.numpy() == pytest.approx(seen.var(0, ddof=1), rel=1e-4)


def test_an_actor_follows_what_it_sees_and_starts_from_it_at_once() -> None:
    net = network()
    calm = np.random.default_rng(0).standard_normal((64, 4)).astype(np.float32)
    acting(net, calm, 8)
    before = net.body[2].running_mean.clone()
    policy = EpsilonGreedy(net, 2, np.random.default_rng(0))
    for _ in range(200):  # a network has one set of hooks a policy: the last policy's count
        policy.act(calm[:8] + 100, np.zeros(8))
    moved = net.body[1](torch.from_numpy(calm[:8] + 100)).detach().mean(0)
    assert not torch.allclose(before, moved, rtol=0.1) and torch.allclose(net.body[2].running_mean, moved, rtol=0.05)


def test_two_actors_have_statistics_of_their_own_and_the_same_weights_leave_them_alone() -> None:
    one, other = network(), network()
    rng = np.random.default_rng(0)
    acting(one, rng.standard_normal((64, 4)).astype(np.float32), 8)
    acting(other, (rng.standard_normal((64, 4)) + 9).astype(np.float32), 8)
    mine = buffers_of(one)
    load_flat(one, flat_from(other))
    assert all(np.array_equal(mine[name], value) for name, value in buffers_of(one).items())
    assert not np.allclose(mine["body.2.running_mean"], buffers_of(other)["body.2.running_mean"])


def test_a_network_without_batch_norm_has_nothing_to_keep() -> None:
    assert not ActedStatistics(network({}))


# ---- the learner


def test_a_rejected_batch_leaves_no_trace_in_the_statistics() -> None:
    loop = LearningLoop(small_config(**NORMED))
    loop.serve()
    loop.feed(1)
    loop.serve()
    before = loop.learner.step.buffers()
    huge = np.full(len(loop.initial), 3e38, np.float32)
    loop.show(make_weights(huge, 9, gradient_offset=10))
    loop.feed(2)
    assert loop.priorities[-1].rejected and len(loop.gradients) == 1
    assert all(np.array_equal(before[name], value) for name, value in loop.learner.step.buffers().items())
    assert np.isfinite(before["body.2.running_mean"]).all()


def test_the_bootstrap_is_judged_by_the_statistics_before_the_batch() -> None:
    """A batch's own statistics in its target would let rows see one another."""
    loop = LearningLoop(small_config(**NORMED))
    step = loop.learner.step
    seen: list[bool] = []
    step.online.body[2].register_forward_pre_hook(lambda layer, _: seen.append(layer.training))
    step._target.body[2].register_forward_pre_hook(lambda layer, _: seen.append(layer.training))
    loop.serve()
    loop.feed(1)
    assert seen == [False, False, True] and len(loop.gradients) == 1


# ---- the evaluator


class Bench:
    """An evaluator of catch-pixels with BatchNorm, whose environments are counted."""

    def __init__(self, *sets: str) -> None:
        words = ["network.batch_norm=true", "network.hidden=[8]", "evaluator.lanes=7", "evaluator.episodes=5", *sets]
        self.config: Config = load_config("catch-pixels", words, {})
        self.facts = describe(self.config)
        self.flat = initial_weights(self.config, self.facts)
        self.seeds: list[int] = []
        self.core = EvaluatorCore(self.config, self.facts, "evaluator-0", self._make)

    def _make(self, seeds: list[int]) -> Lanes:
        self.seeds += seeds
        return make_lanes(self.config, seeds)

    def evaluate(self, version: int = 7) -> tuple[list[list[Any]], list[dict[str, Any]]]:
        """(messages, statistics) after each step."""
        steps, statistics = [], []
        for records in self.core.evaluate(version, self.flat, lambda: 5):
            steps.append([record.message for record in records])
            statistics.append(self.core.buffers())
        return steps, statistics


def test_the_evaluator_acts_on_a_thousand_frames_before_the_first_episode_that_counts_and_then_holds_still() -> None:
    bench = Bench()
    steps, statistics = bench.evaluate()
    quiet = -(-WARM_ROWS // 7)
    first = next(number for number, messages in enumerate(steps) if messages)
    assert first >= quiet, "episodes of the warming are told to nobody"
    messages = [message for step in steps for message in step]
    [screening] = [message for message in messages if isinstance(message, Evaluation)]
    assert sum(isinstance(message, Episode) for message in messages) == screening.episodes == 5
    assert len(bench.seeds) == len(set(bench.seeds)) == 7 + 5
    name = "body.1.running_mean"
    assert not np.array_equal(statistics[0][name], statistics[quiet - 1][name])
    for later in statistics[quiet:]:
        assert all(np.array_equal(later[name], value) for name, value in statistics[quiet - 1].items())


def test_a_version_is_measured_with_its_own_statistics_whatever_was_measured_before() -> None:
    bench, fresh = Bench(), Bench()
    good, strange = bench.flat, bench.flat * 3
    bench.flat = strange
    bench.evaluate(6)
    bench.flat, bench.core._round = good, 0
    bench.core._rng = np.random.default_rng(0)
    fresh.core._rng = np.random.default_rng(0)
    _, after = bench.evaluate()
    _, alone = fresh.evaluate()
    assert all(np.array_equal(after[-1][name], value) for name, value in alone[-1].items())


# ---- the file


def test_a_file_carries_the_statistics_of_the_learner_that_checkpointed_its_version_and_says_whose(
    tmp_path: Path,
) -> None:
    config = small_config(**NORMED)
    loops = [LearningLoop(config), LearningLoop(config)]
    for number, loop in enumerate(loops):
        loop.serve()
        for batch in range(1 + number):
            loop.feed(10 * number + batch)
            loop.serve()
        learner_checkpoint.save(tmp_path / f"learner-{number}.safetensors", "r", loop.learner)
    (tmp_path / "learner-9.safetensors").write_text("scribble")
    for version, name in (
        (0, "learner-0 at version 1"),
        (2, "learner-1 at version 2"),
        (2 + NEAR_VERSIONS, "learner-1 at version 2"),
    ):
        found = checkpointed(tmp_path, "r", version)
        assert found is not None and found[0] == name
    assert checkpointed(tmp_path, "r", 3 + NEAR_VERSIONS) is None, "of another version they would do harm"
    assert checkpointed(tmp_path, "another", 2) is None and checkpointed(None, "r", 2) is None
    keeper = PolicyKeeper(SimpleNamespace(run="r", run_dir=tmp_path, config=config, facts=CARTPOLE))  # type: ignore[arg-type]
    own = {name: value + 1 for name, value in buffers_of(network()).items()}
    screened = [Outgoing("episodes", Evaluation("evaluator-0", 2, "screen", 6, 9.0, 0, 9.0, 9.0, 0.0, False, 0))]
    keeper.look(screened, loops[1].initial, lambda: own)
    path = tmp_path / "weights.safetensors"
    assert notes_of(path)["statistics"] == "learner-1 at version 2"
    loaded = buffers_of(Policy.load(path).network)
    learned = loops[1].learner.step.buffers()
    assert all(np.array_equal(loaded[name], value) for name, value in learned.items())
    assert not np.array_equal(loaded["body.2.running_mean"], np.zeros(8))

    for checkpoint in tmp_path.glob("learner-*"):
        checkpoint.unlink()
    path.unlink()
    PolicyKeeper(SimpleNamespace(run="r", run_dir=tmp_path, config=config, facts=CARTPOLE)).look(  # type: ignore[arg-type]
        screened, loops[1].initial, lambda: own
    )
    assert notes_of(path)["statistics"] == "evaluator-0 of 1000 frames"
    assert all(np.array_equal(buffers_of(Policy.load(path).network)[name], value) for name, value in own.items())


def test_a_loaded_policy_judges_one_state_by_the_files_statistics(tmp_path: Path) -> None:
    bench = Bench()
    bench.evaluate()
    path = tmp_path / "w.safetensors"
    save_weights(path, bench.flat, 7, bench.config, bench.facts, statistics=("evaluator", bench.core.buffers()))
    policy = Policy.load(path)
    frame = np.random.default_rng(0).integers(0, 256, (1, 24, 24), np.uint8)
    alone = policy.values(frame)
    again = Policy.load(path, lanes=3).values(np.repeat(frame, 3, 0))
    assert again == pytest.approx(np.repeat(alone, 3, 0), abs=1e-5), "one lane or three: a state has one value"
    assert evaluate_file(path, 4, None, 0)["episodes"] == 4


def test_a_file_without_statistics_gets_those_of_what_it_acts_on(tmp_path: Path) -> None:
    bench = Bench()
    path = tmp_path / "w.safetensors"
    save_weights(path, bench.flat, 7, bench.config, bench.facts)
    policy = Policy.load(path, lanes=8)
    assert policy.statistics is not None
    before = buffers_of(policy.network)
    for number in range(5):
        policy.values(np.random.default_rng(number).integers(0, 256, (8, 24, 24), np.uint8))
    assert not np.array_equal(before["body.1.running_mean"], buffers_of(policy.network)["body.1.running_mean"])
    first = evaluate_file(path, 30, None, 0)
    assert first["episodes"] == 30 and evaluate_file(path, 30, None, 0) == first
    save_weights(path, bench.flat, 7, bench.config, bench.facts, statistics=("me", before))
    assert Policy.load(path).statistics is None
