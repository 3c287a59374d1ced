"""n-step returns, bootstrap discounts and the actor's own TD errors, for consecutive rows of one lane.

Rules (rules.md 1 and 3, cases.md 10-13):
1. Rewards are transformed per step, by the run's one transform, before they are summed; the sum is float64.
2. A row's window ends after n steps or at its episode's last row, whichever is first; what is stored is the actual k.
3. The discount is gamma**k: 0 where the episode terminated at the bootstrap row, kept where it was truncated. There is no "done".
4. A row is finished only when its bootstrap row t + k is among the rows given; a last row never starts a window.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gorila.messages import F32, F64, Flags
from pipelines.compiled import compiled

FIRST, LAST, TERMINATED, TRUNCATED = 1, 2, 4, 8

U8 = NDArray[np.uint8]


def transform_rewards(reward: F32, transform: str) -> F64:
    """Raw rewards (rows,) as float64, transformed per step: "none", "sign" or "clip" (to [-1, 1])."""
    exact: F64 = reward.astype(np.float64)
    if transform == "sign":
        return np.sign(exact)
    if transform == "clip":
        return np.minimum(np.maximum(exact, -1.0), 1.0)
    return exact


@compiled
def pack_flags(is_first: Flags, is_last: Flags, terminated: Flags, truncated: Flags, out: U8) -> bool:
    """Write the four flag columns as bits into `out`. Returns whether the rows make whole episodes:
    a last row follows exactly the row of the action that ended the episode, and a first row exactly a last row."""
    whole = True
    for i in range(len(is_first)):
        bits = 0
        if is_first[i]:
            bits |= FIRST
        if is_last[i]:
            bits |= LAST
        if terminated[i]:
            bits |= TERMINATED
        if truncated[i]:
            bits |= TRUNCATED
        out[i] = bits
        if i > 0:
            ended = terminated[i - 1] or truncated[i - 1]
            whole = whole and ended == is_last[i] and is_last[i - 1] == is_first[i]
        if is_last[i] and (is_first[i] or terminated[i] or truncated[i]):
            whole = False
    return whole


@compiled
def n_step_columns(reward: F64, q_taken: F32, q_max: F32, flags: U8, n: int, gamma: float) -> tuple[U8, F64, F64, F64]:
    """n-step columns of consecutive rows of one lane.

    Args:
        reward: float64 (rows,), transformed; the reward of row t's own action.
        q_taken, q_max: float32 (rows,), the behaviour weights' Q of the executed action and max over actions.
        flags: uint8 (rows,), from `pack_flags`.
        n: longest window, steps.
        gamma: discount of one step.

    Returns:
        steps: uint8 (rows,), k; 0 where the row is a last row or its bootstrap row is not among these rows.
        n_step_return: float64 (rows,), sum of gamma**j * reward[t + j] for j < k.
        discount: float64 (rows,), gamma**k, 0 where row t + k is the end of a terminated episode.
        error: float64 (rows,), |n_step_return + discount * q_max[t + k] - q_taken[t]|.

    Reference:
        n-step target: Hessel et al. 2018, section 3; actor-side priorities: Horgan et al. 2018 (Ape-X), section 3.
    """
    rows = len(reward)
    steps = np.zeros(rows, np.uint8)
    returns = np.zeros(rows, np.float64)
    discounts = np.zeros(rows, np.float64)
    errors = np.zeros(rows, np.float64)
    for t in range(rows):
        if flags[t] & LAST:
            continue
        total = 0.0
        factor = 1.0
        for k in range(1, n + 1):
            end = t + k
            if end >= rows or flags[end] & FIRST:
                break  # the bootstrap row is still to come, or never will
            total += factor * reward[end - 1]
            factor *= gamma
            if k == n or flags[end] & LAST:
                discount = 0.0 if flags[end - 1] & TERMINATED else factor
                steps[t] = k
                returns[t] = total
                discounts[t] = discount
                errors[t] = abs(total + discount * q_max[end] - q_taken[t])
                break
    return steps, returns, discounts, errors


def priorities_of(td_error: NDArray[Any], floor: float, alpha: float) -> F64:
    """p = (|TD error| + floor) ** alpha, the one formula for the actor's errors and the learner's (Schaul et al. 2016, eq. 1)."""
    result: F64 = (np.abs(td_error.astype(np.float64)) + floor) ** alpha
    return result
