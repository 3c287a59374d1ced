from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorila.config import ActorSection
from producers.exploration import Exploration, ladder


def test_the_ladder_has_the_published_rungs() -> None:
    expected = [0.4, 0.16, 0.064, 0.0256, 0.01024, 0.004096, 0.0016384, 0.00065536]
    np.testing.assert_allclose(ladder(8, 0.4, 7.0), expected, rtol=1e-12)


def test_a_ladder_of_one_rung_is_its_base_and_divides_by_nothing() -> None:
    assert ladder(1, 0.4, 7.0).tolist() == [0.4]
    alone = Exploration(ActorSection(count=1, lanes=1, exploration="ladder"), 0)
    assert alone.epsilons(10**6).tolist() == [0.4]


def test_actors_share_one_ladder_without_meeting_on_a_rung() -> None:
    actor = ActorSection(count=4, lanes=2, exploration="ladder")
    rungs = np.concatenate([Exploration(actor, index).epsilons(-1) for index in range(4)])
    np.testing.assert_allclose(rungs, ladder(8, 0.4, 7.0))
    assert len(set(rungs.tolist())) == 8


@given(st.integers(-1, 10_000), st.integers(0, 7))
def test_the_schedule_is_the_same_for_every_actor_and_lane_at_one_version(version: int, index: int) -> None:
    actor = ActorSection(count=8, lanes=3, epsilon_versions=1500)
    epsilons = Exploration(actor, index).epsilons(version)
    assert epsilons.shape == (3,)
    assert set(epsilons.tolist()) == set(Exploration(actor, 0).epsilons(version).tolist())
    assert actor.epsilon_end <= epsilons[0] <= actor.epsilon_start


def test_the_schedule_starts_ends_and_halves_where_the_configuration_says() -> None:
    exploration = Exploration(ActorSection(epsilon_start=1.0, epsilon_end=0.1, epsilon_versions=1000), 0)
    assert [exploration.epsilons(v)[0] for v in (-1, 0)] == [1.0, 1.0]
    assert exploration.epsilons(500)[0] == pytest.approx(0.55)
    assert [exploration.epsilons(v)[0] for v in (1000, 10**7)] == pytest.approx([0.1, 0.1])
