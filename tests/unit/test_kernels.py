"""Optimiser kernels: against torch where torch's form is the same, against arrays worked out by hand, and for bit-identity."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from consumers.parameter_server import kernels
from consumers.parameter_server.optimizers import learning_rate_at, make_optimizer, settings_json, warm_up_kernels
from gorila.config import ParameterServerSection

F = np.float32
STEPS = 60
SIZE = 1037  # no multiple of a vector width


def run_ours(section: ParameterServerSection, gradients: np.ndarray, start: np.ndarray) -> np.ndarray:
    optimizer = make_optimizer(section)
    weights = start.copy()
    moments = {name: np.zeros_like(weights) for name in optimizer.tensors}
    for version, gradient in enumerate(gradients):
        optimizer.update(weights, moments, gradient, learning_rate_at(section, version))
    return weights


def run_torch(kind: Any, gradients: np.ndarray, start: np.ndarray, **arguments: Any) -> np.ndarray:
    parameter = torch.nn.Parameter(torch.from_numpy(start.copy()))
    optimizer = kind([parameter], **arguments)
    for gradient in gradients:
        parameter.grad = torch.from_numpy(gradient.copy())
        optimizer.step()
    return parameter.detach().numpy()


@pytest.fixture(scope="module")
def gradients() -> np.ndarray:
    rng = np.random.default_rng(3)
    return (rng.standard_normal((STEPS, SIZE)) * 10 ** rng.uniform(-4, 1, (STEPS, 1))).astype(F)


@pytest.fixture(scope="module")
def start() -> np.ndarray:
    return np.random.default_rng(4).standard_normal(SIZE).astype(F)


@pytest.mark.parametrize(
    ("section", "kind", "arguments"),
    [
        (
            {"optimizer": "adam", "learning_rate": 2e-3, "adam_epsilon": 1e-4},
            torch.optim.Adam,
            {"lr": 2e-3, "eps": 1e-4},
        ),
        (
            {"optimizer": "adam", "learning_rate": 0.1, "adam_beta1": 0.5, "adam_beta2": 0.9},
            torch.optim.Adam,
            {"lr": 0.1, "betas": (0.5, 0.9)},
        ),
        ({"optimizer": "adagrad", "learning_rate": 0.05}, torch.optim.Adagrad, {"lr": 0.05}),
        ({"optimizer": "sgd", "learning_rate": 0.01}, torch.optim.SGD, {"lr": 0.01}),
        (
            {"optimizer": "sgd", "learning_rate": 0.01, "momentum": 0.9},
            torch.optim.SGD,
            {"lr": 0.01, "momentum": 0.9},
        ),
    ],
)
def test_optimizers_agree_with_torch(
    section: dict[str, Any], kind: Any, arguments: dict[str, Any], gradients: np.ndarray, start: np.ndarray
) -> None:
    ours = run_ours(ParameterServerSection(**section), gradients, start)
    theirs = run_torch(kind, gradients, start, **arguments)
    # Both walk the same path in float32 with differently ordered roundings; a wrong constant or form is off by orders more.
    np.testing.assert_allclose(ours, theirs, rtol=2e-5, atol=2e-6)
    assert np.abs(ours - start).max() > 1e-2


def test_adam_takes_the_two_steps_worked_out_by_hand() -> None:
    # lr .1, b1 .9, b2 .999, eps 0: m = .1 g, v = .001 g^2, so step one is lr * sign(g) whatever g is.
    # Step two with g = -1 after g = 1: m = .9*.1 - .1 = -.01, /(1 - .81) = -.0526316; v = .001999/.001999 = 1: w = -.1 + .00526316.
    section = ParameterServerSection(optimizer="adam", learning_rate=0.1, adam_epsilon=1e-30)
    optimizer = make_optimizer(section)
    weights, moments = np.zeros(1, F), {name: np.zeros(1, F) for name in optimizer.tensors}
    optimizer.update(weights, moments, np.ones(1, F), 0.1)
    np.testing.assert_allclose(weights, [-0.1], rtol=1e-5)
    optimizer.update(weights, moments, -np.ones(1, F), 0.1)
    np.testing.assert_allclose(weights, [-0.1 + 0.1 * 0.01 / 0.19], rtol=1e-5)


def test_adagrad_takes_the_two_steps_worked_out_by_hand() -> None:
    # s = 9, then 9 + 16 = 25: w = -3/3, then -4/5 more.
    weights = run_ours(
        ParameterServerSection(optimizer="adagrad", learning_rate=1.0), np.array([[3.0], [4.0]], F), np.zeros(1, F)
    )
    np.testing.assert_allclose(weights, [-1.8], rtol=1e-6)


def test_centred_rmsprop_has_epsilon_inside_the_root() -> None:
    # decay .5, eps .25: g = 2: a = 1, s = 2, s - a^2 + eps = 1.25; g = 0: a = .5, s = 1, no step.  g = 4: a = 2.25, s = 8.5, 8.5 - 5.0625 + .25.
    section = ParameterServerSection(optimizer="rmsprop", learning_rate=1.0, rmsprop_decay=0.5, rmsprop_epsilon=0.25)
    weights = run_ours(section, np.array([[2.0], [0.0], [4.0]], F), np.zeros(1, F))
    np.testing.assert_allclose(weights, [-2 / np.sqrt(1.25) - 4 / np.sqrt(3.6875)], rtol=1e-6)
    outside = -2 / (np.sqrt(1.0) + 0.25) - 4 / (np.sqrt(3.4375) + 0.25)
    assert abs(float(weights[0]) - outside) > 0.05


def test_centred_rmsprop_survives_a_large_constant_gradient() -> None:
    # s - a^2 rounds to about -.06 here, far beyond epsilon: without the guard the root is NaN.
    section = ParameterServerSection(optimizer="rmsprop")
    weights = run_ours(section, np.full((2000, 7), 1000.3, F), np.zeros(7, F))
    assert np.isfinite(weights).all()


def test_sgd_takes_the_steps_worked_out_by_hand() -> None:
    momentum = ParameterServerSection(optimizer="sgd", learning_rate=0.5, momentum=0.5)
    weights = run_ours(momentum, np.array([[1.0], [1.0]], F), np.zeros(1, F))
    np.testing.assert_allclose(weights, [-0.5 - 0.75], rtol=1e-6)
    plain = run_ours(
        ParameterServerSection(optimizer="sgd", learning_rate=0.5), np.array([[1.0], [1.0]], F), np.zeros(1, F)
    )
    np.testing.assert_allclose(plain, [-1.0], rtol=1e-6)


@pytest.mark.parametrize("name", ["adam", "adagrad", "rmsprop", "sgd"])
def test_an_update_of_a_slice_has_the_bits_of_the_same_slice_of_the_whole(
    name: str, gradients: np.ndarray, start: np.ndarray
) -> None:
    """Shard bounds and vector widths must not change a bit: neither elements nor their remainder loop differ."""
    section = ParameterServerSection(optimizer=name, momentum=0.5)  # type: ignore[arg-type]
    whole = run_ours(section, gradients, start)
    for low, high in ((0, 1), (1, 38), (38, SIZE)):
        part = run_ours(section, np.ascontiguousarray(gradients[:, low:high]), start[low:high])
        assert part.tobytes() == whole[low:high].tobytes()


@pytest.mark.parametrize("name", ["adam", "adagrad", "rmsprop", "sgd"])
def test_an_optimizer_restored_from_its_tensors_goes_on_with_the_same_bits(
    name: str, gradients: np.ndarray, start: np.ndarray
) -> None:
    section = ParameterServerSection(optimizer=name, momentum=0.5, warmup_versions=40)  # type: ignore[arg-type]
    weights, optimizer = start.copy(), make_optimizer(section)
    moments = {tensor: np.zeros_like(weights) for tensor in optimizer.tensors}
    for version, gradient in enumerate(gradients):
        optimizer = make_optimizer(section)  # a crash before every update
        optimizer.restore(version)
        optimizer.update(weights, moments, gradient, learning_rate_at(section, version))
    assert weights.tobytes() == run_ours(section, gradients, start).tobytes()


def test_a_read_only_payload_gives_the_same_bits(gradients: np.ndarray, start: np.ndarray) -> None:
    section = ParameterServerSection()
    read_only = np.frombuffer(gradients.tobytes(), F).reshape(gradients.shape)
    assert run_ours(section, read_only, start).tobytes() == run_ours(section, gradients, start).tobytes()


@pytest.mark.parametrize("bad", [np.nan, -np.nan, np.inf, -np.inf, 1.1e18, -1.1e18])
def test_unusable_values_are_found_wherever_they_are(bad: float) -> None:
    for position in (0, 17, 1036):
        values = np.ones(SIZE, F)
        values[position] = bad
        assert kernels.count_unusable(values.view(np.uint32)) == 1


@given(st.lists(st.floats(width=32), max_size=40))
@settings(max_examples=100, deadline=None)
def test_unusable_is_not_finite_or_above_the_limit(values: list[float]) -> None:
    array = np.array(values, F)
    expected = np.count_nonzero(~(np.abs(array) <= kernels.LARGEST_GRADIENT))
    assert kernels.count_unusable(array.view(np.uint32)) == expected


def test_warm_up_rises_linearly_and_ends_at_the_rate() -> None:
    section = ParameterServerSection(learning_rate=0.4, warmup_versions=4)
    rates = [learning_rate_at(section, version) for version in range(6)]
    np.testing.assert_allclose(rates, [0.1, 0.2, 0.3, 0.4, 0.4, 0.4])
    assert learning_rate_at(ParameterServerSection(learning_rate=0.4), 0) == 0.4


def test_settings_that_decide_an_update_are_in_the_settings_text() -> None:
    """Every key an optimiser reads changes its text; keys of other optimisers do not."""
    changed = {
        "adam": {"learning_rate": 0.5, "warmup_versions": 9, "adam_beta1": 0.1, "adam_beta2": 0.1, "adam_epsilon": 1.0},
        "adagrad": {"adagrad_epsilon": 1.0},
        "rmsprop": {"rmsprop_decay": 0.1, "rmsprop_epsilon": 1.0},
        "sgd": {"momentum": 0.3},
    }
    for name, keys in changed.items():
        plain = settings_json(ParameterServerSection(optimizer=name))  # type: ignore[arg-type]
        for key, value in keys.items():
            assert settings_json(ParameterServerSection(optimizer=name, **{key: value})) != plain  # type: ignore[arg-type]
    assert settings_json(ParameterServerSection(momentum=0.3)) == settings_json(ParameterServerSection())


@pytest.mark.parametrize("name", ["adam", "adagrad", "rmsprop", "sgd"])
def test_warming_up_compiles_all_that_the_first_gradient_needs(name: str) -> None:
    section = ParameterServerSection(optimizer=name)  # type: ignore[arg-type]
    warm_up_kernels(section)
    used = {"adam": kernels.adam, "adagrad": kernels.adagrad, "rmsprop": kernels.centred_rmsprop, "sgd": kernels.sgd}
    compiled = [len(kernel.signatures) for kernel in (used[name], kernels.count_unusable)]  # type: ignore[attr-defined]
    run_ours(section, np.ones((1, 5), F), np.zeros(5, F))
    run_ours(section, np.frombuffer(np.ones(5, F).tobytes(), F).reshape(1, 5), np.zeros(5, F))
    assert [len(kernel.signatures) for kernel in (used[name], kernels.count_unusable)] == compiled  # type: ignore[attr-defined]


def test_the_parameter_server_never_imports_torch() -> None:
    code = "import sys, consumers.parameter_server.service, consumers.main; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout.strip()) == (0, "False"), done.stderr
