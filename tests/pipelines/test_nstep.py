"""n-step columns: cases 10, 12 and 15 of shared/cases.md by hand, everything else against a slow and obvious loop."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lane_writer import LaneWriter

from pipelines.nstep import n_step_columns, pack_flags, priorities_of, transform_rewards


def columns(lane: LaneWriter, n: int, gamma: float, transform: str = "none", rows: int | None = None):
    block = lane.block(rows or len(lane.rows))
    flags = np.empty(len(block.action), np.uint8)
    assert pack_flags(block.is_first, block.is_last, block.terminated, block.truncated, flags)
    reward = transform_rewards(block.reward, transform)
    return block, n_step_columns(reward, block.q_taken, block.q_max, flags, n, gamma)


@pytest.mark.parametrize(
    ("ended", "discounts"),
    [("terminated", [0.729, 0.729, 0, 0, 0]), ("truncated", [0.729, 0.729, 0.729, 0.81, 0.9])],
)
def test_every_start_of_a_five_step_episode_has_its_own_window(ended: str, discounts: list[float]) -> None:
    """Case 10: o0...o5, r = 1, gamma .9, n 3. The last n - 1 starts are there; next are o3 o4 o5 o5 o5."""
    _, (steps, returns, discount, _) = columns(LaneWriter().episode(5, ended, reward=1.0), 3, 0.9)
    assert steps.tolist() == [3, 3, 3, 2, 1, 0]
    np.testing.assert_allclose(returns[:5], [2.71, 2.71, 2.71, 1.9, 1.0], rtol=1e-12)
    np.testing.assert_allclose(discount[:5], discounts, rtol=1e-12)


def test_a_truncated_episode_bootstraps_from_its_own_final_observation() -> None:
    """Case 12: the next episode's first row is never the bootstrap row, and truncation keeps the discount."""
    lane = LaneWriter().episode(2, "truncated", reward=1.0).episode(2, reward=1.0)
    lane.rows[2].q_max, lane.rows[3].q_max = 100.0, 1e6  # final observation; the next episode's first
    lane.rows[1].q_taken = 0.0
    _, (steps, _, discount, error) = columns(lane, 3, 0.5)
    assert steps.tolist() == [2, 1, 0, 2, 1, 0]
    assert discount[1] == 0.5
    assert error[1] == 1.0 + 0.5 * 100.0


def test_termination_wins_over_truncation_at_the_same_step() -> None:
    lane = LaneWriter().episode(3)
    lane.rows[2].truncated = True
    _, (_, _, discount, _) = columns(lane, 2, 0.9)
    assert discount[:3].tolist() == [pytest.approx(0.81), 0.0, 0.0]


def test_rewards_are_transformed_before_they_are_summed() -> None:
    """Case 15: clip(2) + clip(-7) is 0, not clip(-5)."""
    lane = LaneWriter().episode(2)
    lane.rows[0].reward, lane.rows[1].reward = 2.0, -7.0
    _, (_, returns, _, _) = columns(lane, 2, 1.0, "clip")
    assert returns[0] == 0.0


def test_each_reward_transform_does_what_it_is_called() -> None:
    raw = np.array([-3.0, -0.25, 0.0, 0.5, 9.0], np.float32)
    assert transform_rewards(raw, "none").tolist() == raw.tolist()
    assert transform_rewards(raw, "sign").tolist() == [-1, -1, 0, 1, 1]
    assert transform_rewards(raw, "clip").tolist() == [-1, -0.25, 0, 0.5, 1]
    assert transform_rewards(raw, "none").dtype == np.float64


def test_returns_are_summed_in_double_precision() -> None:
    lane = LaneWriter().episode(3)
    for row, reward in zip(lane.rows, (2.0**24, 1.0, 1.0), strict=False):
        row.reward = reward
    _, (_, returns, _, _) = columns(lane, 3, 1.0)
    assert returns[0] == 2.0**24 + 2  # float32 would stay at 2**24


@pytest.mark.parametrize(
    "change",
    [
        lambda rows: setattr(rows[1], "last", True),
        lambda rows: setattr(rows[3], "terminated", False),
        lambda rows: setattr(rows[2], "truncated", True),
        lambda rows: setattr(rows[5], "first", False),
        lambda rows: setattr(rows[4], "terminated", True),
    ],
)
def test_rows_that_do_not_make_whole_episodes_are_told_apart(change) -> None:
    """Case 13: an autoreset's extra row (after a final observation, not first) is a contradiction, not a transition."""
    lane = LaneWriter().episode(4).episode(4)
    change(lane.rows)
    rows = lane.rows
    flags = np.empty(len(rows), np.uint8)
    flag_columns = [np.array([getattr(row, n) for row in rows]) for n in ("first", "last", "terminated", "truncated")]
    assert not pack_flags(*flag_columns, flags)


def slow(lane: LaneWriter, n: int, gamma: float):
    """For each row (k, return, discount, error) or None, one step at a time."""
    for t, row in enumerate(lane.rows):
        total, k = 0.0, 0
        while k < n and not row.last and t + k < len(lane.rows) and not lane.rows[t + k].last:
            total += gamma**k * float(np.float32(lane.rows[t + k].reward))
            k += 1
        if row.last or t + k >= len(lane.rows):
            yield None
            continue
        discount = 0.0 if lane.rows[t + k - 1].terminated else gamma**k
        error = abs(total + discount * float(np.float32(lane.rows[t + k].q_max)) - float(np.float32(row.q_taken)))
        yield k, total, discount, error


@settings(deadline=None, max_examples=60)
@given(
    lengths=st.lists(
        st.tuples(st.integers(1, 9), st.sampled_from(["terminated", "truncated"])), min_size=1, max_size=6
    ),
    n=st.integers(1, 7),
    gamma=st.sampled_from([1.0, 0.99, 0.5, 0.0]),
    cut=st.integers(0, 5),
    seed=st.integers(0, 1000),
)
def test_columns_are_those_of_a_loop_over_single_steps(lengths, n: int, gamma: float, cut: int, seed: int) -> None:
    lane = LaneWriter(rng=np.random.default_rng(seed))
    for steps, ended in lengths:
        lane.episode(steps, ended)
    lane.rows = lane.rows[: max(1, len(lane.rows) - cut)]
    expected = list(slow(lane, n, gamma))
    _, (steps, returns, discounts, errors) = columns(lane, n, gamma)
    for t, wanted in enumerate(expected):
        if wanted is None:
            assert steps[t] == 0
        else:
            assert steps[t] == wanted[0]
            np.testing.assert_allclose((returns[t], discounts[t], errors[t]), wanted[1:], rtol=1e-9, atol=1e-12)


@settings(deadline=None)
@given(
    error=st.floats(-1e6, 1e6, width=32),
    floor=st.floats(1e-6, 1.0),
    alpha=st.floats(0.0, 1.0),
    more=st.floats(0.1, 100.0),
)
def test_there_is_one_priority_formula(error: float, floor: float, alpha: float, more: float) -> None:
    """Case 5: (|delta| + floor) ** alpha, even in delta, alpha applied once, monotone."""
    p = priorities_of(np.array([error, -error, abs(error) + more], np.float32), floor, alpha)
    assert p[0] == p[1] == pytest.approx((abs(error) + floor) ** alpha, rel=1e-12)
    assert p[2] >= p[0]
