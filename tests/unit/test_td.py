"""TD errors, losses and importance weights against hand-computed numbers and brute force."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from gorila.errors import ShapeError
from gorila.td import conservative_penalty, huber, importance_weights, td_error


def tensors(**columns: object) -> dict[str, torch.Tensor]:
    return {name: torch.tensor(value) for name, value in columns.items()}


def test_the_online_network_chooses_and_the_target_network_judges() -> None:
    columns = tensors(
        q_tm1_BA=[[1.0, 2.0], [3.0, 4.0]],
        a_tm1_B=[1, 0],
        r_t_B=[0.5, -1.0],
        discount_t_B=[0.9, 0.0],
        q_target_t_BA=[[10.0, 20.0], [5.0, 6.0]],
        q_select_t_BA=[[1.0, 0.0], [0.0, 1.0]],
    )
    # Row 0: .5 + .9 * 10 (the online network prefers action 0) - 2. Row 1 is terminal: -1 - 3.
    assert td_error(**columns).tolist() == pytest.approx([7.5, -4.0])


def test_without_double_the_target_network_does_both() -> None:
    q_target = torch.tensor([[10.0, 20.0]])
    error = td_error(torch.zeros(1, 2), torch.tensor([0]), torch.zeros(1), torch.ones(1), q_target, q_target)
    assert error.item() == 20.0


def test_no_gradient_flows_through_the_target() -> None:
    q_tm1, q_target, q_select = (torch.randn(3, 2, requires_grad=True) for _ in range(3))
    td_error(q_tm1, torch.tensor([0, 1, 0]), torch.ones(3), torch.ones(3), q_target, q_select).sum().backward()
    assert q_tm1.grad is not None and q_tm1.grad.tolist() == [[-1, 0], [0, -1], [-1, 0]]
    assert q_target.grad is None and q_select.grad is None


def test_rows_or_tables_that_do_not_match_are_refused() -> None:
    two, three = torch.zeros(2, 2), torch.zeros(3, 2)
    with pytest.raises(ShapeError, match="leading dimensions"):
        td_error(two, torch.tensor([0, 0]), torch.zeros(2), torch.zeros(2), two, three)
    with pytest.raises(ShapeError, match="alike"):
        td_error(two, torch.tensor([0, 0]), torch.zeros(2), torch.zeros(2), two, torch.zeros(2, 3))


@given(st.floats(-50, 50), st.floats(0.1, 5))
def test_huber_is_torchs(error: float, delta: float) -> None:
    value = torch.tensor([error], requires_grad=True)
    ours = huber(value, delta)
    ours.sum().backward()
    reference = torch.nn.functional.huber_loss(value.detach(), torch.zeros(1), delta=delta)
    assert ours.item() == pytest.approx(reference.item(), rel=1e-5, abs=1e-6)
    assert value.grad is not None and value.grad.item() == pytest.approx(
        max(-delta, min(delta, error)), rel=1e-5, abs=1e-6
    )


@given(
    st.lists(st.floats(1e-3, 100), min_size=2, max_size=12),
    st.floats(0, 1),
    st.floats(0.1, 1),
    st.floats(0, 1),
)
@settings(max_examples=60)
def test_importance_weights_are_the_brute_force_of_the_mixture(
    td_errors: list[float], beta: float, alpha: float, local: float
) -> None:
    """Case 7: a memory of two actors, the whole two-level mixture as probability; N cancels, beta is not alpha."""
    priority = np.array(td_errors) ** alpha
    actor = np.arange(len(td_errors)) % 2
    mass = np.array([priority[actor == a].sum() for a in (0, 1)])
    probability = local * 0.5 * priority / mass[actor] + (1 - local) * priority / priority.sum()
    assert probability.sum() == pytest.approx(1.0)
    weights = importance_weights(torch.from_numpy(probability), beta).numpy()
    population = 977
    brute = (population * probability) ** -beta
    assert weights == pytest.approx(brute / brute.max(), rel=1e-5)
    assert weights.max() == 1.0 and (weights > 0).all()


def test_a_tiny_probability_does_not_overflow_the_weights() -> None:
    weights = importance_weights(torch.tensor([1e-300, 0.5], dtype=torch.float64), 1.0)
    assert weights[0].item() == 1.0 and bool(torch.isfinite(weights).all())


def test_no_probabilities_are_refused() -> None:
    with pytest.raises(ShapeError):
        importance_weights(torch.zeros(0, dtype=torch.float64), 0.5)


def test_the_conservative_penalty_falls_on_actions_that_were_not_taken() -> None:
    q = torch.tensor([[0.0, 0.0], [10.0, -10.0]])
    penalty = conservative_penalty(q, torch.tensor([0, 1]))
    assert penalty.tolist() == pytest.approx([np.log(2.0), 20.0], rel=1e-5)
