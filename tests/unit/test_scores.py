"""Human-normalised scores against published numbers."""

from __future__ import annotations

import pytest

from gorila.scores import HUMAN_STARTS, game_of, human_normalised


@pytest.mark.parametrize(
    ("env_id", "score", "normalised"),
    [("ale:pong", 20.25, 1.160), ("ALE/Breakout-v5", 366.9, 12.68), ("PongNoFrameskip-v4", -20.7, 0.0)],
)
def test_scores_are_those_of_the_papers_no_op_starts(env_id: str, score: float, normalised: float) -> None:
    found = human_normalised(env_id, score)
    assert found is not None
    assert found.value == pytest.approx(normalised, abs=0.005)
    assert (found.table, found.protocol) == ("atari57_noop_starts", "no-op starts")


def test_another_table_is_another_score_and_says_so() -> None:
    noop, human = human_normalised("ale:alien", 1000.0), human_normalised("ale:alien", 1000.0, HUMAN_STARTS)
    assert noop is not None and human is not None
    assert human.value == pytest.approx((1000 - 128.3) / (6371.3 - 128.3))
    assert human.value != noop.value and human.protocol == "human starts"


@pytest.mark.parametrize("env_id", ["CartPole-v1", "gorila.testing.catch:make", "ale:no_such_game"])
def test_what_no_table_has_is_none(env_id: str) -> None:
    assert human_normalised(env_id, 1.0) is None


def test_a_game_has_one_name_whatever_it_is_called() -> None:
    for name in ("ale:space_invaders", "ALE/SpaceInvaders-v5", "SpaceInvadersNoFrameskip-v4"):
        assert game_of(name) == "space_invaders"
