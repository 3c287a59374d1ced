"""Two-level draws: exact probabilities, exact sizes (cases 3, 7, 9), and batches that say where their pixels are."""

from __future__ import annotations

import numpy as np
import pytest
from lane_writer import LaneWriter, states

from gorila.observations import frame_indices
from pipelines.batch_assembly import BatchAssembly
from pipelines.replay_memory import ReplayMemory
from pipelines.ring import MemoryRules
from pipelines.sampling import SplitShare, draw_rows, split_share

ALONE = SplitShare(1.0, 0.7)


def eight_actors(priorities: str = "spread", capacity: int = 64, alpha: float = 0.6) -> ReplayMemory:
    """Eight rings of 4 to 25 sampleable rows whose masses differ by a factor of thousands."""
    rng = np.random.default_rng(5)
    held = ReplayMemory(MemoryRules(capacity, 3, 2, 0.9, "none", alpha, 1e-3))
    for actor in range(8):
        ring = held.open(actor, 1)
        lane = LaneWriter(lane=actor).episode(4 + 3 * actor, "truncated").episode(2)
        for offset, block in enumerate(lane.all_blocks(5)):
            held.insert(ring, offset, 0, block)
            ring.next_offset = offset + 1
        slots = np.flatnonzero(held.forest.leaves(ring.index))
        scale = {"spread": 10.0 ** (actor - 4), "equal": 1.0, "zero": 0.0}[priorities]
        values = rng.uniform(0.2, 1.0, len(slots)) * scale
        held.forest.set(ring.index, slots, values)
    held.check_valid()
    return held


def probabilities(held: ReplayMemory, f: float, window: int, s: float | None) -> np.ndarray:
    """P of every row of the pooled columns by the definition: plain sums over plain arrays."""
    capacity = held.rules.capacity_rows
    rings = [ring for ring in held.rings.values() if ring.sampleable]
    p = {ring.partition: held.forest.leaves(ring.index) for ring in rings}
    new = {}
    for ring in rings:
        age = (ring.head - 1 - np.arange(capacity)) % capacity
        new[ring.partition] = age < window
    result = np.zeros(len(held.ahead))

    def mixed(weights: np.ndarray, fresh: np.ndarray) -> np.ndarray:
        if s is None:
            return weights / weights.sum()
        new_mass, old_mass = weights[fresh].sum(), weights[~fresh].sum()
        share = s if new_mass > 0 and old_mass > 0 else float(new_mass > 0)
        of_new = np.where(fresh, weights / new_mass, 0.0) if new_mass > 0 else 0.0
        of_old = np.where(fresh, 0.0, weights / old_mass) if old_mass > 0 else 0.0
        return share * of_new + (1 - share) * of_old

    everything = mixed(
        np.concatenate([p[r.partition] for r in rings]), np.concatenate([new[r.partition] for r in rings])
    )
    for i, ring in enumerate(rings):
        local = mixed(p[ring.partition], new[ring.partition])
        base = ring.index * capacity
        result[base : base + capacity] = (
            f / len(rings) * local + (1 - f) * everything[i * capacity : (i + 1) * capacity]
        )
    return result


def chi_square_per_degree(counts: np.ndarray, expected: np.ndarray) -> float:
    rows = expected > 0
    assert counts[~rows].sum() == 0
    expected = expected[rows] * counts.sum()
    return float((((counts[rows] - expected) ** 2) / expected).sum() / (rows.sum() - 1))


@pytest.mark.parametrize("s", [None, 0.8])
@pytest.mark.parametrize("f", [0.7, 0.0, 1.0])
def test_draws_follow_the_recorded_probability_and_it_follows_the_definition(f: float, s: float | None) -> None:
    """Eight actors of very different mass: chi-square of 400,000 rows, and each recorded P against plain sums."""
    held = eight_actors()
    rng = np.random.default_rng(0)
    expected = probabilities(held, f, 6, s)
    assert expected.sum() == pytest.approx(1.0)
    counts = np.zeros(len(expected))
    for _ in range(400):
        drawn = draw_rows(held, 1000, SplitShare(1.0, f), 6, s, rng)
        np.testing.assert_allclose(drawn.probability, expected[drawn.at], rtol=1e-9)
        counts += np.bincount(drawn.at, minlength=len(counts))
    big = expected * counts.sum() >= 5  # rarer rows together, or chi-square is not chi-square
    pooled = np.append(counts[big], counts[~big].sum()), np.append(expected[big], expected[~big].sum())
    assert 0.6 < chi_square_per_degree(*pooled) < 1.45


def test_a_split_alone_records_the_design_formula() -> None:
    held = eight_actors()
    drawn = draw_rows(held, 64, ALONE, 0, None, np.random.default_rng(1))
    capacity = held.rules.capacity_rows
    masses = {ring.index: held.forest.mass(ring.index) for ring in held.rings.values()}
    for at, slot, probability in zip(drawn.at, drawn.slot, drawn.probability, strict=True):
        p = held.forest.leaves(at // capacity)[slot]
        assert probability == pytest.approx(0.7 / 8 * p / masses[at // capacity] + 0.3 * p / sum(masses.values()))


@pytest.mark.parametrize("batch_rows", [1, 2, 3, 5, 10, 32, 33])
def test_a_batch_has_exactly_its_rows_and_the_right_local_share_on_average(batch_rows: int) -> None:
    """Case 9. Global rows never come from a ring of next to no mass, so its rows count the local ones: 1/2 of them."""
    held = ReplayMemory(MemoryRules(64, 1, 1, 0.9, "none", 0.6, 1e-3))
    for actor, priority in enumerate((1e-30, 1.0)):
        ring = held.open(actor, 0)
        held.insert(ring, 0, 0, LaneWriter().episode(20).block(21))
        held.forest.set(ring.index, np.arange(20), np.full(20, priority))
    rng = np.random.default_rng(batch_rows)
    rounds = 40_000 // batch_rows
    found = []
    for _ in range(rounds):
        drawn = draw_rows(held, batch_rows, ALONE, 0, None, rng)
        assert len(drawn.at) == len(drawn.probability) == batch_rows
        found.append(int((drawn.at < 64).sum() if held.rings[0].index == 0 else (drawn.at >= 64).sum()))
    local = 2 * np.array(found)
    assert local.mean() / batch_rows == pytest.approx(0.7, abs=0.02)


def test_local_rows_are_the_floor_or_the_ceiling_never_more_or_less() -> None:
    """One ring holds all the mass, ten hold none of it worth: with f = 1/3 of 10 rows, 3 or 4 are local; of 3 rows, exactly 1."""
    held = ReplayMemory(MemoryRules(64, 1, 1, 0.9, "none", 0.6, 1e-3))
    for actor in range(50):
        ring = held.open(actor, 0)
        held.insert(ring, 0, 0, LaneWriter().episode(3).block(4))
        held.forest.set(ring.index, np.arange(3), np.full(3, 1.0 if actor == 0 else 1e-30))
    heavy = held.rings[0].index
    rng = np.random.default_rng(0)
    from_light = [
        sum(at // 64 != heavy for at in draw_rows(held, 10, SplitShare(1.0, 1 / 3), 0, None, rng).at.tolist())
        for _ in range(3000)
    ]
    assert max(from_light) == 4
    assert np.mean(from_light) == pytest.approx(10 / 3 * 49 / 50, abs=0.05)


def test_importance_weights_by_brute_force_on_a_small_memory() -> None:
    """Case 7: w = P**-beta / max, with P of the mixture; in (0, 1], maximum 1; N cancels; alpha is not beta."""
    held = eight_actors()
    expected = probabilities(held, 0.7, 0, None)
    (record,) = _records(held, 256, 256)
    for beta in (0.4, 1.0):
        weights = record.probability**-beta
        weights /= weights.max()
        brute = (record.population * expected[_at(held, record)]) ** -beta
        np.testing.assert_allclose(weights, brute / brute.max(), rtol=1e-9)
        assert weights.max() == 1.0
        assert weights.min() > 0.0


def test_a_memory_of_priorities_zero_is_drawn_uniformly() -> None:
    """Sampleable rows whose priorities all underflowed: the batch still comes, and says so in its probabilities."""
    held = eight_actors("zero")
    rows = sum(ring.sampleable for ring in held.rings.values())
    rng = np.random.default_rng(3)
    counts = np.zeros(len(held.ahead))
    expected = np.zeros(len(held.ahead))
    for ring in held.rings.values():
        at = ring.index * 64 + np.flatnonzero(held.ahead[ring.index * 64 : ring.index * 64 + 64])
        expected[at] = 0.7 / 8 / ring.sampleable + 0.3 / rows
    for _ in range(100):
        drawn = draw_rows(held, 500, ALONE, 0, None, rng)
        np.testing.assert_allclose(drawn.probability, expected[drawn.at])
        counts += np.bincount(drawn.at, minlength=len(counts))
    assert 0.6 < chi_square_per_degree(counts, expected) < 1.45


def test_one_ring_of_zeros_among_others_gets_its_local_share_only() -> None:
    held = eight_actors()
    dead = held.rings[2]
    held.forest.set(dead.index, np.arange(64), np.zeros(64))
    rng = np.random.default_rng(4)
    share = np.mean([np.mean(draw_rows(held, 1000, ALONE, 0, None, rng).at // 64 == dead.index) for _ in range(50)])
    assert share == pytest.approx(0.7 / 8, abs=0.005)


@pytest.mark.parametrize("window", [0, 64])
def test_a_level_with_only_new_or_only_old_rows_falls_back_and_says_so(window: int) -> None:
    held = eight_actors()
    drawn = draw_rows(held, 200, ALONE, window, 0.8, np.random.default_rng(0))
    assert drawn.fell_back
    np.testing.assert_allclose(drawn.probability, probabilities(held, 0.7, window, None)[drawn.at], rtol=1e-9)
    assert bool(drawn.is_new.all()) == bool(window)


def test_the_share_of_new_rows_is_measured_even_when_none_is_asked_for() -> None:
    held = eight_actors("equal")
    drawn = draw_rows(held, 4000, ALONE, 6, None, np.random.default_rng(0))
    p = probabilities(held, 0.7, 6, None)
    fresh = sum(p[ring.index * 64 + (ring.head - 1 - age) % 64] for ring in held.rings.values() for age in range(6))
    assert drawn.is_new.mean() == pytest.approx(fresh, abs=0.03)
    assert not drawn.fell_back


def test_draws_are_a_function_of_the_generator_and_the_memory() -> None:
    first, second = (draw_rows(eight_actors(), 100, ALONE, 6, 0.5, np.random.default_rng(9)) for _ in range(2))
    assert first.at.tolist() == second.at.tolist()
    assert first.probability.tolist() == second.probability.tolist()


def test_shares_of_all_splits_add_up_and_make_the_one_probability() -> None:
    """Design section 5: w_j, f_j = f (A_j / A) / w_j; w_j P_j(i) is f/A p/M_a + (1 - f) M_j/M p/M_j."""
    actors, masses, f = [1, 3, 4], [0.5, 10.0, 2.0], 0.7
    shares = [split_share(f, a, 8, m, sum(masses)) for a, m in zip(actors, masses, strict=True)]
    assert sum(share.weight for share in shares) == pytest.approx(1.0)
    for a, m, share in zip(actors, masses, shares, strict=True):
        assert share.weight * share.local_fraction / a == pytest.approx(f / 8)
        assert share.weight * (1 - share.local_fraction) == pytest.approx((1 - f) * m / sum(masses))


def test_a_split_without_rows_draws_nothing_and_all_zero_mass_is_shared_by_actors() -> None:
    assert split_share(0.7, 0, 4, 0.0, 3.0).weight == 0.0
    assert split_share(0.7, 0, 0, 0.0, 0.0).weight == 0.0
    assert split_share(0.7, 1, 4, 0.0, 0.0).weight == pytest.approx(0.25)


def _records(held: ReplayMemory, batch_rows: int, record_rows: int):
    drawn = draw_rows(held, batch_rows, ALONE, 6, None, np.random.default_rng(11))
    return BatchAssembly(held, "replay-0", record_rows).records(drawn, 5, 123)


def _at(held: ReplayMemory, record) -> np.ndarray:
    """Rows of the pooled columns from the identities in a record."""
    found = []
    for partition, offset, row in zip(record.partition, record.offset, record.row, strict=True):
        ring = held.rings[int(partition)]
        number = int(ring.order.numbers[np.flatnonzero(ring.order.offsets == offset)[0]])
        found.append(ring.index * 64 + (int(held.blocks.start[number]) + int(row)) % 64)
    return np.array(found)


def test_a_learner_batch_is_consecutive_records_the_last_of_which_may_be_shorter() -> None:
    records = _records(eight_actors(), 33, 10)
    assert [len(record.action) for record in records] == [10, 10, 10, 3]
    assert [(record.part, record.parts, record.batch_number, record.population) for record in records] == [
        (part, 4, 5, 123) for part in range(4)
    ]
    for record in records:
        record.check()


def test_blocks_come_once_in_the_order_first_needed_and_untouched(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipelines.batch_assembly.VECTOR_BYTES", 0)  # these observations are as good as images then
    held = eight_actors()
    for record in _records(held, 64, 32):
        base = np.cumsum([0, *(block.count for block in record.blocks)])
        newest = np.stack([record.frames_tm1.reshape(32, 3), record.frames_t.reshape(32, 3)], axis=1).reshape(-1)
        block_of = np.searchsorted(base, newest, side="right") - 1
        _, first_use = np.unique(block_of, return_index=True)
        assert len(first_use) == len(record.blocks)  # every block is needed
        assert (np.diff(first_use) > 0).all()  # in the order first needed
        held_blocks = {id(block.data) for block in held.blocks.observations if block is not None}
        assert all(
            id(block.data) in held_blocks for block in record.blocks
        )  # the very bytes: nothing was inflated or copied


def test_of_small_vectors_only_the_needed_travel_once_each_in_one_block_and_the_states_are_the_same(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    held = eight_actors()
    few = _records(held, 64, 32)
    monkeypatch.setattr("pipelines.batch_assembly.VECTOR_BYTES", 0)
    for record, whole in zip(few, _records(held, 64, 32), strict=True):
        record.check()
        (block,) = record.blocks
        assert (
            block.count == len(np.unique([*record.frames_tm1, *record.frames_t])) < sum(b.count for b in whole.blocks)
        )
        for small, large in zip(states(record), states(whole), strict=True):
            np.testing.assert_array_equal(small, large)


def test_frames_are_stacked_by_the_one_rule() -> None:
    held = eight_actors()
    for record in _records(held, 64, 64):
        before, after = states(record)
        for i in range(64):
            lane, episode, step = before[i, -1].tolist()
            end = after[i, -1, 2]
            assert before[i].tolist() == [[lane, episode, t] for t in frame_indices(step, step, 3)]
            assert after[i].tolist() == [[lane, episode, t] for t in frame_indices(int(end), int(end), 3)]
