"""Liveness of the wait graph (design §5: "the wait graph is a path"), case 20: with every reader alive everything goes on; with one dead everything
upstream waits, within its bound, and says for whom; with it back, everything goes on again."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from wait_graph_model import BATCH_ROWS, BLOCK_ROWS, FAST, SLOW, World

KINDS = ("actor", "replay", "learner", "server")
# Who stands still when a kind is dead, and the word by which it names whom it waits for.
WAITS = {
    "server": {"learner": "parameter-server", "replay": "learner", "actor": "replay"},
    "learner": {"replay": "learner", "actor": "replay"},
    "replay": {"actor": "replay"},
    "actor": {},
}


def seconds_for_a_batch(ratio: float, actors: int, rates: dict[str, float]) -> float:
    """Enough for several learner batches to be inserted for, drawn, learned and applied at these rates, whoever is slow."""
    blocks = BATCH_ROWS / ratio / BLOCK_ROWS
    slowest = (
        blocks / min(rates["actor"] * actors, rates["replay"])
        + 2 / rates["learner"]
        + 2 / rates["server"]
        + 2 / rates["replay"]
    )
    return 2.0 + 4 * slowest


def advanced(world: World, seconds: float) -> set[str]:
    """What went on meanwhile."""
    before = world.progress()
    world.run(seconds)
    return {what for what, count in world.progress().items() if count > before[what]}


EVERYTHING = {"transitions", "inserts", "batches", "gradients", "updates"}
SPEEDS = [dict(zip(KINDS, speeds, strict=True)) for speeds in itertools.product((FAST, SLOW), repeat=4)]


@pytest.mark.parametrize("ratio", [0.1, 1.0, 8.0])
@pytest.mark.parametrize("rates", SPEEDS, ids=lambda r: "-".join("fast" if v == FAST else "slow" for v in r.values()))
def test_with_every_reader_alive_everything_goes_on_for_ever(ratio: float, rates: dict[str, float]) -> None:
    """One actor, whose block is an eighth of a batch."""
    world = World(ratio, 1, 1, rates)
    long = seconds_for_a_batch(ratio, 1, rates)
    world.run(long)
    for _ in range(2):
        assert advanced(world, long) == EVERYTHING


@pytest.mark.parametrize("ratio", [0.1, 1.0, 8.0])
@pytest.mark.parametrize("dead", KINDS)
def test_with_one_dead_everything_upstream_waits_and_names_it_and_goes_on_when_it_is_back(
    dead: str, ratio: float
) -> None:
    rates = dict.fromkeys(KINDS, FAST)
    world = World(ratio, 2, 2, rates)
    long = seconds_for_a_batch(ratio, 2, rates)
    world.run(long)
    world.kill(dead)
    # Until every bound between the dead one and the actors is reached.
    world.run(30.0)
    assert advanced(world, long) == set(), "nobody runs ahead without bound, and nobody invents work"
    for kind, word in WAITS[dead].items():
        for role in world.roles[kind]:
            assert role.waiting_for().split(":")[0] == word, f"{kind} says {role.waiting_for()!r}"
    if dead == "actor":
        assert world.replay.waiting_for().split(":")[0] == "actors"
        assert {learner.waiting_for().split(":")[0] for learner in world.learners} == {"replay"}
    world.revive(dead)
    world.run(long)
    assert advanced(world, long) == EVERYTHING


@pytest.mark.parametrize("ratio", [0.1, 1.0, 8.0])
def test_one_dead_actor_of_two_and_one_dead_learner_of_two_stop_nobody(ratio: float) -> None:
    """Its ring is still memory, its partition is passed over: no quota an actor or learner could starve (rules.md 9)."""
    rates = dict.fromkeys(KINDS, FAST)
    world = World(ratio, 2, 2, rates)
    long = seconds_for_a_batch(ratio, 1, rates)
    world.run(long)
    world.actors[0].alive = world.learners[0].alive = False
    world.run(30.0)
    assert advanced(world, long) == EVERYTHING


@settings(deadline=None, max_examples=15)
@given(
    ratio=st.sampled_from([0.1, 1.0, 8.0]),
    actors=st.integers(1, 3),
    learners=st.integers(1, 3),
    speeds=st.tuples(*[st.sampled_from([FAST, SLOW])] * 4),
    deaths=st.lists(st.tuples(st.sampled_from(KINDS), st.floats(0.1, 4.0), st.floats(0.0, 2.0)), max_size=5),
)
def test_whatever_dies_and_comes_back_in_whatever_order_the_loop_goes_on(
    ratio: float, actors: int, learners: int, speeds: tuple[float, ...], deaths: list[tuple[str, float, float]]
) -> None:
    rates = dict(zip(KINDS, speeds, strict=True))
    world = World(ratio, actors, learners, rates)
    for kind, down_s, up_s in deaths:
        world.kill(kind)
        world.run(down_s)
        world.revive(kind)
        world.run(up_s)
    long = seconds_for_a_batch(ratio, actors, rates)
    world.run(long)
    assert advanced(world, long) == EVERYTHING


def test_samples_follow_inserts_by_the_ratio_when_everybody_is_fast() -> None:
    for ratio in (0.1, 1.0, 8.0):
        world = World(ratio, 2, 2, dict.fromkeys(KINDS, FAST))
        world.run(6.0)
        stats = world.replay.split.stats(0)
        assert 0 <= stats.inserts_total * ratio - stats.samples_total <= 2 * BATCH_ROWS + 8 * BLOCK_ROWS * ratio
