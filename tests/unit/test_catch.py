from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorila.environments import describe, make_lanes
from gorila.settings import load_config
from gorila.testing.catch import BALL, CELL_PIXELS, PADDLE, SIDE, STEPS, CatchPixels


def _column(frame: np.ndarray, value: int) -> tuple[int, int]:
    """(row, column) in cells of the 3 x 3 square of this value."""
    rows, columns = np.nonzero(frame == value)
    assert rows.min() % CELL_PIXELS == 0 and columns.min() % CELL_PIXELS == 0
    return int(rows.min()) // CELL_PIXELS, int(columns.min()) // CELL_PIXELS


def _play(env: CatchPixels, seed: int, perfect: bool) -> float:
    """Return of one episode, played by looking at the ball (and knowing its last move), or by standing still."""
    frame, _ = env.reset(seed=seed)
    last = None
    for step in range(1, STEPS + 1):
        (row, ball), (_, paddle) = _column(frame, BALL), _column(frame, PADDLE)
        assert row == step - 1
        expected = ball if last is None else 7 - abs(7 - abs(2 * ball - last))  # walls reflect
        action = 1 + int(np.sign(expected - paddle)) if perfect else 1
        last = ball
        frame, reward, terminated, truncated, _ = env.step(action)
        assert terminated == (step == STEPS) and not truncated
        assert reward == 0.0 or terminated
    return reward


@given(st.integers(0, 2**31 - 1))
def test_a_player_who_sees_the_drift_catches_every_ball_in_seven_steps(seed: int) -> None:
    assert _play(CatchPixels(), seed, perfect=True) == 1.0


def test_a_player_who_stands_still_misses_most_balls_and_a_miss_costs_one() -> None:
    returns = [_play(CatchPixels(), seed, perfect=False) for seed in range(300)]
    assert set(returns) == {1.0, -1.0}
    assert 0.03 < np.mean(np.array(returns) > 0) < 0.3


def test_frames_are_24_by_24_bytes_with_a_ball_and_a_paddle_of_three_pixels() -> None:
    env = CatchPixels()
    frame, _ = env.reset(seed=1)
    assert frame.shape == (SIDE, SIDE) == (24, 24) and frame.dtype == np.uint8
    assert (frame == BALL).sum() == (frame == PADDLE).sum() == CELL_PIXELS**2
    assert env.observation_space.contains(frame)


def test_one_frame_does_not_show_the_drift_so_a_stack_of_two_is_needed() -> None:
    firsts: dict[bytes, set[int]] = {}
    for seed in range(400):
        env = CatchPixels()
        frame, _ = env.reset(seed=seed)
        second, *_ = env.step(1)
        firsts.setdefault(frame.tobytes(), set()).add(_column(second, BALL)[1])
    assert max(len(following) for following in firsts.values()) >= 2


def test_an_action_outside_the_three_is_refused() -> None:
    env = CatchPixels()
    env.reset(seed=0)
    with pytest.raises(ValueError, match="not 0"):
        env.step(3)


def test_the_preset_makes_it_by_import_path() -> None:
    config = load_config("catch-pixels", environ={})
    facts = describe(config)
    assert (facts.state_shape, facts.observation_dtype, facts.actions) == ((2, 24, 24), "uint8", 3)
    lanes = make_lanes(config, [1, 2, 3])
    first = lanes.reset().copy()
    assert len({frame.tobytes() for frame in first}) > 1, "lanes have their own seeds"
    lanes.close()
