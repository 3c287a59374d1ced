"""Sparse optimiser kernels against the dense ones: the same bits where a zero gradient changes nothing, the documented laziness elsewhere."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consumers.parameter_server.optimizers import Optimizer, learning_rate_at, make_optimizer
from gorila.compression.top_k import TopK
from gorila.config import ParameterServerSection

F = np.float32
SIZE = 997
ALL = [{"optimizer": "adam"}, {"optimizer": "adagrad"}, {"optimizer": "rmsprop"}, {"optimizer": "sgd"}, {"optimizer": "sgd", "momentum": 0.9}]  # fmt: skip
IDS = ["adam", "adagrad", "rmsprop", "sgd", "momentum"]
Steps = list[tuple[np.ndarray, np.ndarray]]


def sparse_steps(seed: int, count: int = 40, size: int = SIZE) -> Steps:
    rng = np.random.default_rng(seed)
    steps = []
    for _ in range(count):
        indices = np.sort(rng.choice(size, rng.integers(0, size // 5), replace=False)).astype(np.int32)
        steps.append((indices, rng.standard_normal(len(indices)).astype(F)))
    return steps


def fresh(section: ParameterServerSection, size: int = SIZE) -> tuple[Optimizer, np.ndarray, dict[str, np.ndarray]]:
    optimizer = make_optimizer(section)
    weights = np.random.default_rng(9).standard_normal(size).astype(F)
    return optimizer, weights, {name: np.zeros(size, F) for name in optimizer.tensors}


def run_sparse(section: ParameterServerSection, steps: Steps) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    optimizer, weights, moments = fresh(section)
    for version, (indices, values) in enumerate(steps):
        optimizer.update_sparse(weights, moments, indices, values, learning_rate_at(section, version))
    return weights, moments


def run_dense_with_zeros(section: ParameterServerSection, steps: Steps) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    optimizer, weights, moments = fresh(section)
    for version, (indices, values) in enumerate(steps):
        gradient = np.zeros(SIZE, F)
        gradient[indices] = values
        optimizer.update(weights, moments, gradient, learning_rate_at(section, version))
    return weights, moments


def run_dense_on_its_own_steps(
    section: ParameterServerSection, steps: Steps
) -> tuple[np.ndarray, dict[str, np.ndarray]]:
    """The reference for laziness: every coordinate is a network of its own, updated by the dense kernel in the steps that name it, and in no other; the
    step count (Adam's bias correction, the learning rate) is the shard's."""
    _, weights, moments = fresh(section)
    for i in range(SIZE):
        one = slice(i, i + 1)
        mine = {name: moments[name][one] for name in moments}
        for version, (indices, values) in enumerate(steps):
            found = np.flatnonzero(indices == i)
            if len(found):
                optimizer = make_optimizer(section)
                optimizer.restore(version)
                optimizer.update(weights[one], mine, values[found], learning_rate_at(section, version))
    return weights, moments


@pytest.mark.parametrize("section", [ALL[1], ALL[3]], ids=["adagrad", "sgd"])
@given(st.integers(0, 2**32 - 1))
@settings(max_examples=20, deadline=None)
def test_where_a_zero_gradient_changes_nothing_sparse_and_dense_give_the_same_bits(
    section: dict[str, Any], seed: int
) -> None:
    made = ParameterServerSection(**section, warmup_versions=10)
    steps = sparse_steps(seed)
    (sparse, kept), (dense, held) = run_sparse(made, steps), run_dense_with_zeros(made, steps)
    assert sparse.tobytes() == dense.tobytes()
    assert all(kept[name].tobytes() == held[name].tobytes() for name in held)


@pytest.mark.parametrize("section", ALL, ids=IDS)
def test_a_coordinate_passes_through_its_own_steps_alone(section: dict[str, Any]) -> None:
    """What sparse forms do with the steps they skip: nothing, neither to the weight nor to its moments."""
    made = ParameterServerSection(**section, warmup_versions=10)
    steps = sparse_steps(5, 12)
    (sparse, kept), (dense, held) = run_sparse(made, steps), run_dense_on_its_own_steps(made, steps)
    assert sparse.tobytes() == dense.tobytes()
    assert all(kept[name].tobytes() == held[name].tobytes() for name in held)


@pytest.mark.parametrize("section", [ALL[0], ALL[2], ALL[4]], ids=["adam", "rmsprop", "momentum"])
def test_skipped_steps_do_not_decay_as_the_dense_form_would(section: dict[str, Any]) -> None:
    made = ParameterServerSection(**section)
    steps = [(np.array([0], np.int32), np.ones(1, F)), (np.array([1], np.int32), np.ones(1, F))]
    (sparse, kept), (dense, held) = run_sparse(made, steps), run_dense_with_zeros(made, steps)
    assert kept["moment1"][0] > held["moment1"][0] > 0
    assert (sparse[0] != dense[0]) == (made.optimizer != "rmsprop")  # momentum would have gone on moving the weight
    assert sparse[2] == dense[2]


def test_a_late_coordinate_of_adam_steps_over_three_learning_rates() -> None:
    """Why adam is refused with top-k."""
    section = ParameterServerSection(optimizer="adam", learning_rate=1.0)
    optimizer, weights, moments = fresh(section)
    optimizer.restore(100_000)
    before = weights[0]
    optimizer.update_sparse(weights, moments, np.array([0], np.int32), np.ones(1, F), 1.0)
    np.testing.assert_allclose(before - weights[0], 0.1 / np.sqrt(0.001), rtol=1e-3)


@pytest.mark.parametrize("section", ALL, ids=IDS)
def test_a_decoded_payload_touches_only_what_it_names(section: dict[str, Any]) -> None:
    optimizer, weights, moments = fresh(ParameterServerSection(**section), 50_000)
    before = weights.copy()
    payload = TopK(0.01).encode(np.random.default_rng(1).standard_normal(50_000).astype(F))
    indices, values = TopK().decode_sparse(payload, 50_000)
    optimizer.update_sparse(weights, moments, indices, values, 0.1)
    changed = np.flatnonzero(weights != before)
    assert len(indices) == 500 and set(changed) <= set(indices.tolist()) and len(changed) > 490
