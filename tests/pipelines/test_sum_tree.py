"""Sum trees: cases 1-3, and everything against plain arrays."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gorila.errors import InvalidState, ShapeError
from pipelines.sum_tree import SumForest, arc_mass, find_in_arc

ALMOST_ONE = float(np.nextafter(1.0, 0.0))
LEAF = st.one_of(st.just(0.0), st.floats(1e-12, 1e6), st.floats(1e-300, 1e-200))


def forest(leaves: list[float], ring: int = 0, rings: int = 1) -> SumForest:
    made = SumForest(len(leaves))
    made.resize(rings)
    made.set(ring, np.arange(len(leaves)), np.array(leaves))
    return made


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -1.0, -1e-300, 1e300])
def test_what_would_poison_the_sums_is_refused_and_the_rest_is_taken(bad: float) -> None:
    """Case 1."""
    tree = forest([1.0] * 40)
    accepted = tree.set(0, np.array([3, 4, 5]), np.array([2.0, bad, 3.0]))
    assert accepted.tolist() == [True, False, True]
    assert tree.mass(0) == 1.0 * 38 + 5.0
    tree.check_valid(0)


def test_a_million_updates_do_not_drift() -> None:
    """Case 2: sums are recomputed, so the root is the sum of the leaves whatever came before; empty slots are never drawn."""
    rng = np.random.default_rng(0)
    tree = SumForest(1000)
    tree.resize(1)
    for _ in range(1000):
        slots = rng.integers(0, 700, 1000)
        tree.set(0, slots, 10.0 ** rng.uniform(-8, 8, 1000))
    total = tree.leaves(0).sum()
    assert abs(tree.mass(0) - total) / total < 1e-9
    assert max(tree.find(0, u) for u in [*rng.random(5000), 0.0, ALMOST_ONE]) < 700
    tree.set(0, np.arange(1000), np.zeros(1000))
    assert tree.mass(0) == 0.0  # differences would leave dust behind


@pytest.mark.parametrize("first", [0, 1])
@pytest.mark.parametrize("size", [2, 16, 17, 255, 257, 5000])
def test_a_draw_on_a_boundary_never_returns_a_leaf_of_zero(size: int, first: int) -> None:
    """Case 3: 0 and positive leaves alternate; u at 0, towards 1, and on every boundary between leaves."""
    leaves = np.zeros(size)
    leaves[first::2] = np.random.default_rng(1).uniform(1e-9, 1.0, len(leaves[first::2]))
    tree = forest(leaves.tolist())
    edges = np.concatenate([[0.0], np.cumsum(leaves) / leaves.sum()])
    for u in np.unique(np.clip(np.concatenate([edges, np.nextafter(edges, 0), np.nextafter(edges, 1)]), 0, ALMOST_ONE)):
        assert leaves[tree.find(0, u)] > 0.0


@settings(deadline=None, max_examples=80)
@given(leaves=st.lists(LEAF, min_size=1, max_size=300), u=st.floats(0, ALMOST_ONE), data=st.data())
def test_a_forest_is_its_leaves(leaves: list[float], u: float, data: st.DataObject) -> None:
    tree = forest(leaves, ring=1, rings=3)
    size = len(leaves)
    changes = data.draw(st.lists(st.tuples(st.integers(0, size - 1), LEAF), max_size=30))
    for slot, value in changes:
        leaves[slot] = value
    tree.set(1, np.array([slot for slot, _ in changes], np.int64), np.array([value for _, value in changes]))
    tree.check_valid(1)
    assert tree.leaves(1).tolist() == leaves
    assert tree.mass(0) == tree.mass(2) == 0.0
    assert tree.masses(np.array([0, 1, 2]))[1] == pytest.approx(sum(leaves), rel=1e-12)
    if sum(leaves) > 0.0:
        slot = tree.find(1, u)
        assert leaves[slot] > 0.0
        x, slack = u * sum(leaves), 1e-9 * sum(leaves)
        assert sum(leaves[:slot]) <= x + slack
        assert x <= sum(leaves[: slot + 1]) + slack


@settings(deadline=None, max_examples=80)
@given(leaves=st.lists(LEAF, min_size=1, max_size=300), u=st.floats(0, ALMOST_ONE), data=st.data())
def test_an_arc_of_a_ring_is_its_slots(leaves: list[float], u: float, data: st.DataObject) -> None:
    size = len(leaves)
    low = data.draw(st.integers(0, size - 1))
    length = data.draw(st.integers(0, size))
    tree = forest(leaves)
    inside = [(low + i) % size for i in range(length)]
    mass = arc_mass(tree.nodes, 0, tree.starts, size, low, length)
    assert mass == pytest.approx(sum(leaves[slot] for slot in inside), rel=1e-12)
    if mass > 0.0:
        slot = find_in_arc(tree.nodes, 0, tree.starts, size, low, length, u)
        assert slot in inside
        assert leaves[slot] > 0.0


def test_draws_from_an_arc_follow_its_leaves() -> None:
    rng = np.random.default_rng(2)
    leaves = rng.uniform(0, 1, 200)
    tree = forest(leaves.tolist())
    inside = (150 + np.arange(120)) % 200
    draws = np.array(
        [find_in_arc(tree.nodes, 0, tree.starts, 200, 150, 120, u) for u in (np.arange(120_000) + 0.5) / 120_000]
    )
    found = np.bincount(draws, minlength=200)[inside] / len(draws)
    np.testing.assert_allclose(found, leaves[inside] / leaves[inside].sum(), atol=2e-5)  # evenly spread u: no noise


def test_a_forest_keeps_its_trees_when_it_grows_and_forgets_one_alone() -> None:
    tree = forest([1.0, 2.0, 3.0])
    tree.resize(4)
    tree.set(3, np.array([0]), np.array([7.0]))
    assert (tree.mass(0), tree.mass(3)) == (6.0, 7.0)
    tree.clear(0)
    assert (tree.mass(0), tree.mass(3)) == (0.0, 7.0)


def test_a_sum_that_is_off_is_found_and_mended() -> None:
    tree = forest([1.0] * 50)
    tree.leaves(0)[7] = 2.0
    with pytest.raises(InvalidState, match="root"):
        tree.check_valid(0)
    tree.rebuild(0)
    tree.check_valid(0)
    tree.leaves(0)[7] = np.nan
    with pytest.raises(InvalidState, match="NaN"):
        tree.check_valid(0)


def test_slots_and_values_must_match() -> None:
    with pytest.raises(ShapeError):
        forest([1.0]).set(0, np.array([0]), np.array([1.0, 2.0]))
