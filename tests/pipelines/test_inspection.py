"""`gorila replay inspect`: the highest rows of a memory are the right ones, with the ids, numbers and pictures a learner would get."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from lane_writer import LaneWriter, config
from test_sampling import ALONE, eight_actors, probabilities

from gorila.environment_facts import EnvironmentFacts
from gorila.messages import Priorities
from pipelines.inspection import NamedReplay, inspect_split
from pipelines.sampling import SplitShare, draw_rows, row_probabilities

FACTS = EnvironmentFacts("lanes", (3,), "int32", 4, 2, 0)
CONFIG = config(capacity_rows=64, n_steps=3, env__stack=2, new_window_fraction=0.25)


@pytest.mark.parametrize("s", [None, 0.8])
@pytest.mark.parametrize("priorities", ["spread", "equal", "zero"])
def test_a_rows_probability_is_what_a_draw_records_and_what_the_definition_says(
    priorities: str, s: float | None
) -> None:
    held = eight_actors(priorities)
    window, capacity = 7, held.rules.capacity_rows
    given: dict[int, float] = {}
    for ring in held.active():
        slots = np.flatnonzero(held.ahead[ring.index * capacity : (ring.index + 1) * capacity])
        found = row_probabilities(held, ring, slots, ALONE.local_fraction, window, s)
        given.update(zip((ring.index * capacity + slots).tolist(), found.tolist(), strict=True))
    assert sum(given.values()) == pytest.approx(1.0)
    if priorities != "zero":
        defined = probabilities(held, ALONE.local_fraction, window, s)
        assert [given[at] for at in sorted(given)] == pytest.approx(defined[sorted(given)].tolist())
    drawn = draw_rows(held, 4000, SplitShare(1.0, ALONE.local_fraction), window, s, np.random.default_rng(3))
    assert [given[at] for at in drawn.at.tolist()] == pytest.approx(drawn.probability.tolist())


def filled(actors: int = 2) -> tuple[NamedReplay, dict[tuple[int, int], LaneWriter]]:
    """Each actor two lanes, blocks of five rows, more than a ring holds; priorities as the actors' Q values give them."""
    split = NamedReplay(CONFIG, FACTS)
    lanes = {}
    for partition in range(actors):
        split.open_ring(partition, 0)
        writers = [LaneWriter(lane=lane, actor_id=f"actor-{partition}", version=partition) for lane in (0, 1)]
        for lane in writers:
            lanes[partition, lane.lane] = lane.episode(30).episode(20, "truncated")
        offset = 0
        for _ in range(10):
            for lane in writers:
                split.insert(partition, offset, offset, lane.block(5))
                offset += 1
    return split, lanes


def test_the_highest_rows_come_with_their_ids_actor_lane_and_step_and_the_states_of_that_step() -> None:
    split, _ = filled()
    found = inspect_split(split, CONFIG, "here", 7)
    memory = split.memory
    leaves = np.sort(np.concatenate([memory.forest.leaves(ring.index) for ring in memory.active()]))[::-1]
    assert [row.priority for row in found.top] == leaves[:7].tolist()
    assert (found.actors, found.population) == (2, sum(ring.sampleable for ring in memory.active()))
    assert found.mass == pytest.approx(leaves.sum())
    for row in found.top:
        assert row.actor == f"actor-{row.partition}"
        assert row.version == row.partition
        lane, episode, step = row.state[-1].tolist()
        assert lane == row.lane == row.offset % 2
        assert episode * 31 + step == row.step == row.offset // 2 * 5 + row.row
        reached = row.after[-1].tolist()
        assert reached == [lane, episode, step + row.steps]
        assert row.state.shape == (2, 3)
        assert row.discount in (0.0, pytest.approx(0.99**row.steps))


def test_a_learned_priority_puts_a_row_on_top_and_more_than_there_are_is_all() -> None:
    split, _ = filled(1)
    lowest = inspect_split(split, CONFIG, "here", 1000).top
    assert len(lowest) == sum(ring.sampleable for ring in split.memory.active())
    assert [row.priority for row in lowest] == sorted((row.priority for row in lowest), reverse=True)
    last = lowest[-1]
    one = np.array([last.row], np.int32)
    where = np.array([last.partition], np.int32), np.array([last.offset], np.int64), one
    split.learned(Priorities("learner-0", 0, 0, 0, *where, np.array([99.0], np.float32), 0.0, 0.0, False, 0.0))
    top = inspect_split(split, CONFIG, "here", 1).top[0]
    same = ("partition", "offset", "row", "actor", "lane", "step", "action", "n_step_return")
    assert [getattr(top, name) for name in same] == [getattr(last, name) for name in same]
    assert top.priority == pytest.approx((99.0 + CONFIG.replay.priority_floor) ** CONFIG.replay.alpha)
    assert top.probability > last.probability


def test_an_empty_memory_shows_nothing() -> None:
    split = NamedReplay(CONFIG, FACTS)
    split.open_ring(0, 0)
    found = inspect_split(split, CONFIG, "here", 5)
    assert dataclasses.astuple(found) == ("here", 0, 0, 0.0, ())
