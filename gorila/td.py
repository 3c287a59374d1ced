"""What a batch teaches: TD errors, losses and importance weights, as textbook functions of tensors.

Shape legend: B rows of a batch, A actions. Time suffixes: tm1 is where the action was chosen, t the bootstrap state k <= n steps later.
"""

from __future__ import annotations

import torch
from torch import Tensor

from gorila.errors import ShapeError


def _same_rows(**columns: Tensor) -> None:
    rows = {name: len(column) for name, column in columns.items()}
    if len(set(rows.values())) > 1:
        raise ShapeError(f"leading dimensions differ: {rows}")


def td_error(
    q_tm1_BA: Tensor,
    a_tm1_B: Tensor,
    r_t_B: Tensor,
    discount_t_B: Tensor,
    q_target_t_BA: Tensor,
    q_select_t_BA: Tensor,
) -> Tensor:
    """Double Q-learning n-step TD error.

    Args:
        q_tm1_BA: float32 (B, A), online network at s_tm1.
        a_tm1_B: int64 (B,), actions executed at s_tm1.
        r_t_B: float32 (B,), n-step return, each reward transformed before the sum.
        discount_t_B: float32 (B,), gamma**k over the k steps taken; 0 where s_t is terminal, kept where truncated.
        q_target_t_BA: float32 (B, A), target network at s_t: what the chosen action is worth.
        q_select_t_BA: float32 (B, A), network that chooses the action at s_t: the online one for double Q-learning, the target one without.
    Returns:
        float32 (B,), target minus prediction; no gradient flows through the target.
    Raises:
        ShapeError: leading dimensions differ, or the three Q tables do.
    Reference:
        van Hasselt et al. 2016, eq. 4; n-step form after Hessel et al. 2018, section 3.
    """
    _same_rows(
        q_tm1=q_tm1_BA,
        a_tm1=a_tm1_B,
        r_t=r_t_B,
        discount_t=discount_t_B,
        q_target_t=q_target_t_BA,
        q_select_t=q_select_t_BA,
    )
    if not q_tm1_BA.shape == q_target_t_BA.shape == q_select_t_BA.shape or q_tm1_BA.ndim != 2:
        raise ShapeError(
            f"Q values must be (B, A) alike: {[tuple(q.shape) for q in (q_tm1_BA, q_target_t_BA, q_select_t_BA)]}"
        )
    with torch.no_grad():
        best_t_B1 = q_select_t_BA.argmax(dim=1, keepdim=True)
        target_B = r_t_B + discount_t_B * q_target_t_BA.gather(1, best_t_B1).squeeze(1)
    return target_B - q_tm1_BA.gather(1, a_tm1_B.unsqueeze(1)).squeeze(1)


def huber(error_B: Tensor, delta: float = 1.0) -> Tensor:
    """Huber loss of each error: .5 e**2 where |e| <= delta, delta (|e| - .5 delta) beyond.

    Args:
        error_B: float32 (B,), TD errors.
        delta: where the parabola becomes a line; 1 makes the gradient DQN's clipped TD error.
    Returns:
        float32 (B,).
    Reference:
        Huber 1964; Mnih et al. 2015, Methods ("clipping the error term").
    """
    magnitude_B = error_B.abs()
    inner_B = magnitude_B.clamp(max=delta)
    return inner_B * (magnitude_B - 0.5 * inner_B)


def importance_weights(probability_B: Tensor, beta: float) -> Tensor:
    """Weights that undo the sampling's bias, scaled so that the batch's largest is 1.

    Args:
        probability_B: float64 (B,), P(i) of each row at the instant of drawing, of the whole two-level mixture.
        beta: how much of the bias is undone: 0 none, 1 all of it.
    Returns:
        float32 (B,), P(i)**-beta / max over the batch, in (0, 1]. The population N cancels (rules.md 7).
    Raises:
        ShapeError: not one-dimensional, or empty.
    Reference:
        Schaul et al. 2016, section 3.4: w = (N P)**-beta / max w.
    """
    if probability_B.ndim != 1 or len(probability_B) == 0:
        raise ShapeError(f"probabilities must be (B,), got {tuple(probability_B.shape)}")
    # (min P / P)**beta: the ratio first, so that no power of a tiny P can overflow.
    return ((probability_B.min() / probability_B) ** beta).to(torch.float32)


def conservative_penalty(q_tm1_BA: Tensor, a_tm1_B: Tensor) -> Tensor:
    """How far the network prefers actions the data does not show: log-sum-exp of Q minus Q of the action taken.

    Args:
        q_tm1_BA: float32 (B, A).
        a_tm1_B: int64 (B,).
    Returns:
        float32 (B,), not negative.
    Raises:
        ShapeError: leading dimensions differ.
    Reference:
        Kumar et al. 2020 (CQL), eq. 4 with the uniform prior.
    """
    _same_rows(q_tm1=q_tm1_BA, a_tm1=a_tm1_B)
    return torch.logsumexp(q_tm1_BA, dim=1) - q_tm1_BA.gather(1, a_tm1_B.unsqueeze(1)).squeeze(1)
