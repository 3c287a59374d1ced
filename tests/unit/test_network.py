"""Networks: sizes of the papers, scaling once, one flat vector, the user's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from gorila.config import Config
from gorila.environment_facts import EnvironmentFacts
from gorila.errors import ConfigError, ShapeError
from gorila.network import build_network, flat_from, initial_weights, load_flat
from gorila.settings import validate

CARTPOLE = EnvironmentFacts("CartPole-v1", (4,), "float32", 2, 1, 500)
CATCH = EnvironmentFacts("catch", (24, 24), "uint8", 3, 2, 7)


def pong(actions: int) -> EnvironmentFacts:
    return EnvironmentFacts("ale:pong", (84, 84), "uint8", actions, 4, 27_000)


def config(factory: str, **network: Any) -> Config:
    return validate({"network": {"factory": factory, **network}})


@pytest.mark.parametrize(("actions", "parameters"), [(4, 1_686_180), (6, 1_687_206), (18, 1_693_362)])
def test_the_nature_network_has_the_papers_parameters(actions: int, parameters: int) -> None:
    assert build_network(config("nature"), pong(actions)).num_parameters == parameters


def test_the_cartpole_network_is_small() -> None:
    assert build_network(Config(), CARTPOLE).num_parameters == 4 * 128 + 128 + 128 * 128 + 128 + 128 * 2 + 2


@pytest.mark.parametrize(
    ("made", "facts"),
    [
        (config("mlp"), CARTPOLE),
        (config("mlp", dueling=True), CARTPOLE),
        (config("small-conv"), CATCH),
        (config("small-conv", dueling=True, hidden=[32, 16]), CATCH),
        (config("nature"), pong(6)),
        (config("mlp"), CATCH),
    ],
)
def test_every_network_gives_a_q_value_an_action(made: Config, facts: EnvironmentFacts) -> None:
    states = torch.zeros((5, *facts.state_shape), dtype=getattr(torch, facts.observation_dtype))
    assert build_network(made, facts)(states).shape == (5, facts.actions)


def test_one_grey_frame_a_state_needs_no_channel_axis() -> None:
    facts = EnvironmentFacts("catch", (24, 24), "uint8", 3, 1, 7)
    assert build_network(config("small-conv"), facts)(torch.zeros((2, 24, 24), dtype=torch.uint8)).shape == (2, 3)


def test_frames_are_scaled_to_minus_one_and_one_at_the_input() -> None:
    """Case 16: not missing, not twice, no wrap-around."""
    net = build_network(config("small-conv"), CATCH)
    frames = torch.arange(256, dtype=torch.uint8).repeat(5)[: 2 * 24 * 24].reshape(1, 2, 24, 24)
    scaled = net.input_from(frames)
    assert scaled.dtype == torch.float32
    assert scaled.min().item() == -1.0 and scaled.max().item() == pytest.approx(1.0, abs=1e-6)
    assert scaled.flatten()[:256].diff().min().item() == pytest.approx(2 / 255, rel=1e-3)
    assert frames.dtype == torch.uint8 and int(frames.max()) == 255


def test_frames_that_somebody_scaled_before_are_refused() -> None:
    net = build_network(config("small-conv"), CATCH)
    with pytest.raises(ShapeError, match="scaled to \\[-1, 1\\] here, once"):
        net(torch.rand(1, 2, 24, 24))


def test_vectors_are_left_as_they_are() -> None:
    states = torch.tensor([[300.0, -7.0, 0.5, 0.0]])
    assert torch.equal(build_network(Config(), CARTPOLE).input_from(states), states)


def test_scale_none_leaves_frames_unscaled() -> None:
    made = validate({"network": {"factory": "small-conv"}, "env": {"scale": "none"}})
    scaled = build_network(made, CATCH).input_from(torch.full((1, 2, 24, 24), 255, dtype=torch.uint8))
    assert scaled.max().item() == 255.0


def test_scaling_what_is_not_frames_is_refused_by_key() -> None:
    with pytest.raises(ConfigError, match=r"env\.scale"):
        build_network(validate({"env": {"scale": "symmetric"}}), CARTPOLE)


def test_states_of_another_shape_are_refused() -> None:
    with pytest.raises(ShapeError, match="states must be"):
        build_network(Config(), CARTPOLE)(torch.zeros(3, 5))


def test_parameters_and_gradients_are_views_of_one_vector() -> None:
    net = build_network(Config(), CARTPOLE)
    load_flat(net, np.arange(net.num_parameters, dtype=np.float32))
    assert torch.equal(torch.cat([p.detach().reshape(-1) for p in net.parameters()]), net.flat_weights)
    load_flat(net, flat_from(build_network(Config(), CARTPOLE)))
    net.flat_gradients.zero_()
    net(torch.randn(6, 4)).square().sum().backward()
    by_hand = torch.cat([p.grad.reshape(-1) for p in net.parameters() if p.grad is not None])
    assert torch.equal(by_hand, net.flat_gradients) and net.flat_gradients.abs().max() > 0


def test_flat_weights_make_two_networks_equal() -> None:
    one, two = build_network(Config(), CARTPOLE), build_network(validate({"run": {"seed": 9}}), CARTPOLE)
    states = torch.randn(4, 4)
    assert not torch.equal(one(states), two(states))
    load_flat(two, flat_from(one))
    assert torch.equal(one(states), two(states))
    with pytest.raises(ShapeError):
        load_flat(two, np.zeros(7, np.float32))


def test_initial_weights_depend_on_the_runs_seed_alone() -> None:
    first = initial_weights(Config(), CARTPOLE)
    torch.manual_seed(5)
    state = torch.random.get_rng_state()
    assert np.array_equal(first, initial_weights(Config(), CARTPOLE))
    assert torch.equal(state, torch.random.get_rng_state()), "building a network must not disturb others' randomness"
    assert not np.array_equal(first, initial_weights(validate({"run": {"seed": 1}}), CARTPOLE))


def test_dueling_centres_its_advantages() -> None:
    net = build_network(config("mlp", dueling=True), CARTPOLE)
    head = net.body[-1]
    features = torch.randn(3, 128)
    assert torch.allclose(head(features).mean(dim=1), head.value(features).squeeze(1), atol=1e-5)


def test_a_users_network_comes_by_import_path() -> None:
    net = build_network(config("tests.unit.user_networks:Linear", kwargs={"bias": False}), CARTPOLE)
    assert net.num_parameters == 8 and net(torch.zeros(1, 4)).shape == (1, 2)


def test_buffers_are_not_weights() -> None:
    net = build_network(config("tests.unit.user_networks:Normed"), CARTPOLE)
    assert net.num_parameters == (4 * 2 + 2) + 2 * 4 and len(list(net.buffers())) == 3


@pytest.mark.parametrize(
    ("made", "names"),
    [
        (config("resnet"), "network.factory = 'resnet' .* mlp, nature, small-conv"),
        (config("no_such_module:Net"), "no_such_module"),
        (config("tests.unit.user_networks:Lienar"), "Linear"),
        (config("tests.unit.user_networks:not_a_module"), "torch.nn.Module"),
        (config("tests.unit.user_networks:Linear", kwargs={"depth": 3}), "depth"),
        (config("tests.unit.user_networks:Linear", hidden=[3]), r"network\.hidden"),
        (config("tests.unit.user_networks:Linear", dueling=True), r"network\.dueling"),
        (config("mlp", kwargs={"bias": False}), r"network\.kwargs"),
        (config("nature"), "mlp"),
    ],
)
def test_what_cannot_be_is_one_line_that_names_the_key(made: Config, names: str) -> None:
    with pytest.raises(ConfigError, match=names):
        build_network(made, CARTPOLE)


def test_frames_too_small_for_the_convolutions_are_refused() -> None:
    with pytest.raises(ConfigError, match="large enough"):
        build_network(config("nature"), CATCH)
