"""Rings: which rows may be sampled, against a slow reading of rules.md 1, and cases 4 and 11-13."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from lane_writer import LaneWriter, states

from gorila.errors import BadRecord, InvalidState
from gorila.messages import TransitionBlock
from pipelines.batch_assembly import BatchAssembly
from pipelines.replay_memory import ReplayMemory
from pipelines.ring import MemoryRules, Ring
from pipelines.sampling import DrawnRows


def memory(capacity: int = 512, stack: int = 4, n: int = 3, gamma: float = 0.9) -> ReplayMemory:
    return ReplayMemory(MemoryRules(capacity, stack, n, gamma, "none", 0.6, 1e-3))


def fill(held: ReplayMemory, ring: Ring, blocks: list[TransitionBlock]) -> None:
    for block in blocks:
        ring.next_offset += 1
        held.insert(ring, ring.next_offset - 1, ring.next_offset * 10, block)
        held.check_valid()


def sampleable(held: ReplayMemory, ring: Ring) -> set[tuple[int, int]]:
    """(offset, row) of every row that may be drawn."""
    capacity = held.rules.capacity_rows
    found = set()
    for offset, number in zip(ring.order.offsets.tolist(), ring.order.numbers.tolist(), strict=True):
        for row in range(held.blocks.count[number]):
            if held.ahead[ring.index * capacity + (held.blocks.start[number] + row) % capacity]:
                found.add((offset, row))
    assert len(found) == ring.sampleable
    return found


def every_row(held: ReplayMemory, ring: Ring) -> DrawnRows:
    """All sampleable rows as if drawn, once each."""
    capacity = held.rules.capacity_rows
    slots = np.flatnonzero(held.ahead[ring.index * capacity : (ring.index + 1) * capacity])
    ones = np.ones(len(slots))
    return DrawnRows(slots + ring.index * capacity, slots, ones, ones == 1.0, False)


def slow_sampleable(blocks: list[tuple[int, TransitionBlock]], stack: int, n: int) -> set[tuple[int, int]]:
    """Rules.md 1 over the live blocks of a ring, in order, one row at a time."""
    runs: dict[int, list[list]] = {}
    for offset, block in blocks:
        lane = runs.setdefault(block.lane, [])
        key = (block.actor_epoch, block.first_step)
        if not lane or lane[-1][0] != key:
            lane.append([key, []])
        lane[-1][1].extend((offset, row, block) for row in range(len(block.action)))
        lane[-1][0] = (key[0], key[1] + len(block.action))
    found = set()
    for run in (rows for lane in runs.values() for _, rows in lane):
        for t, (offset, row, block) in enumerate(run):
            if block.is_last[row]:
                continue
            end = t
            while end < len(run) and end - t < n and not run[end][2].is_last[run[end][1]]:
                end += 1
            if end >= len(run):
                continue
            back = 0
            while back < stack - 1 and t - back >= 0 and not run[t - back][2].is_first[run[t - back][1]]:
                back += 1
            if t - back >= 0:
                found.add((offset, row))
    return found


def check_contents(held: ReplayMemory, ring: Ring, blocks: dict[int, TransitionBlock]) -> None:
    """Case 11: every state decodes to consecutive steps of one episode of one lane; t and t + k, padded with the first frame."""
    if not ring.sampleable:
        return
    (batch,) = BatchAssembly(held, "replay-0", 4096).records(every_row(held, ring), 0, ring.sampleable)
    assert len(set(map(id, batch.blocks))) == len(batch.blocks)
    before, after = states(batch)
    for i in range(len(batch.action)):
        source, row = blocks[int(batch.offset[i])], int(batch.row[i])
        lane, episode, step = before[i, -1]
        assert lane == source.lane
        assert batch.action[i] == source.action[row]
        assert batch.behaviour_version[i] == source.weights_version
        end = after[i, -1, 2]
        assert 1 <= end - step <= held.rules.n_steps
        stack = held.rules.stack
        for state, newest in ((before[i], step), (after[i], end)):
            assert state.tolist() == [[lane, episode, max(0, newest - back)] for back in range(stack - 1, -1, -1)]
        assert batch.discount[i] in (0, pytest.approx(held.rules.discount ** (end - step)))


@settings(deadline=None, max_examples=60)
@given(data=st.data(), stack=st.integers(1, 6), n=st.integers(1, 5), capacity=st.integers(40, 150))
def test_rows_become_and_cease_to_be_sampleable_by_the_rule(
    data: st.DataObject, stack: int, n: int, capacity: int
) -> None:
    """Any cut into blocks, lanes interleaved, lost blocks, restarts, evictions round the ring's end: cases 11-13."""
    rng = np.random.default_rng(data.draw(st.integers(0, 10_000)))
    lanes = [LaneWriter(lane=lane, rng=rng) for lane in range(data.draw(st.integers(1, 3)))]
    held = memory(capacity, stack, n)
    ring = held.open(7, 0)
    seen: dict[int, TransitionBlock] = {}
    for offset in range(data.draw(st.integers(1, 60))):
        lane = lanes[rng.integers(len(lanes))]
        while len(lane.rows) < 20:
            lane.episode(int(rng.integers(1, 14)), "terminated" if rng.random() < 0.5 else "truncated")
        lane.version = offset
        block = lane.block(int(rng.integers(1, 20)))
        fate = rng.random()
        if fate < 0.05:  # the actor died before this one and came back under a new epoch, in the middle of nowhere
            lane.epoch += 1
            lane.rows.clear()
            lane.next_step = 0
            continue
        ring.next_offset = offset + 1
        if fate < 0.15:  # a poisoned block: a gap in its lane
            continue
        held.insert(ring, offset, offset * 10, block)
        seen[offset] = block
        live = [(o, seen[o]) for o in ring.order.offsets.tolist()]
        assert sum(len(block.action) for _, block in live) <= capacity
        assert sampleable(held, ring) == slow_sampleable(live, stack, n)
    held.check_valid()
    check_contents(held, ring, seen)


def test_a_ring_read_again_from_the_log_is_the_ring_that_was_lost() -> None:
    rng = np.random.default_rng(0)
    lanes = [LaneWriter(lane=lane, rng=rng).episode(200).episode(90, "truncated") for lane in range(3)]
    blocks = [lane.block(int(rng.integers(1, 16))) for _ in range(18) for lane in lanes]
    held, again = memory(150), memory(150)
    lost, ring = held.open(0, 0), again.open(0, 0)
    fill(held, lost, blocks)
    ring.next_offset = int(lost.order.offsets[0])
    fill(again, ring, blocks[ring.next_offset :])
    assert again.live(ring) == held.live(lost)
    assert sampleable(again, ring) == sampleable(held, lost)


def test_a_row_waits_for_its_bootstrap_row() -> None:
    held = memory(n=3)
    ring = held.open(0, 0)
    lane = LaneWriter().episode(50)
    fill(held, ring, lane.blocks(5))
    assert sampleable(held, ring) == {(0, 0), (0, 1)}
    fill(held, ring, lane.blocks(2))
    assert sampleable(held, ring) == {(0, 0), (0, 1), (0, 2), (0, 3)}


def test_no_window_or_stack_reaches_over_a_lanes_gap_a_restart_or_another_lane() -> None:
    for change in ("gap", "epoch", "lane"):
        held = memory(stack=4, n=3)
        ring = held.open(0, 0)
        lane = LaneWriter().episode(100)
        first, lost, second = lane.blocks(10, 10, 10)
        if change == "epoch":
            second = lost
            second.actor_epoch = 2
        elif change == "lane":
            second = lost
            second.lane = 1
        fill(held, ring, [first, second])
        assert sampleable(held, ring) == {(0, row) for row in range(7)} | {(1, row) for row in range(3, 7)}


@pytest.mark.parametrize(("first_block", "missing"), [(6, "is_first"), (5, "is_last")])
def test_blocks_that_contradict_each_other_are_not_joined(first_block: int, missing: str) -> None:
    """An actor that loses a flag between blocks: no stack over the final observation, no window over the termination."""
    held = memory(stack=3, n=2)
    ring = held.open(0, 0)
    lane = LaneWriter().episode(5).episode(20)
    if missing == "is_last":
        del lane.rows[5]  # the final observation
        lane.rows[5].first = False
    else:
        lane.rows[6].first = False
    fill(held, ring, lane.blocks(first_block, 10))
    assert sampleable(held, ring) == {(0, row) for row in range(5 if missing == "is_first" else 3)} | {
        (1, row) for row in range(2, 8)
    }


def test_evicting_a_block_takes_only_the_rows_whose_stack_reaches_into_it() -> None:
    held = memory(capacity=20, stack=4, n=1)
    ring = held.open(0, 0)
    lane = LaneWriter().episode(12).episode(50)
    fill(held, ring, lane.blocks(10, 10))
    assert (1, 0) in sampleable(held, ring)
    fill(
        held, ring, lane.blocks(4)
    )  # block 0 leaves: rows 10, 11 of the first episode lose their stack; row 13 starts another
    assert sampleable(held, ring) == {(1, row) for row in range(3, 10)} | {(2, row) for row in range(3)}
    assert held.evicted == 10


def test_a_last_row_is_never_sampled_and_one_step_episodes_are_whole() -> None:
    held = memory(n=3)
    ring = held.open(0, 0)
    lane = LaneWriter()
    for _ in range(5):
        lane.episode(1)
    fill(held, ring, lane.blocks(10))
    assert sampleable(held, ring) == {(0, row) for row in (0, 2, 4, 6, 8)}


def test_an_autoresets_false_row_is_refused_whole_and_changes_nothing() -> None:
    """Case 13."""
    held = memory()
    ring = held.open(0, 0)
    lane = LaneWriter().episode(4).episode(9)
    block = lane.block(9)
    block.is_first[5] = False  # the row after a final observation, as a next-step autoreset would record it
    with pytest.raises(BadRecord, match="whole episodes"):
        held.insert(ring, 0, 0, block)
    assert (ring.live_rows, len(ring.order), held.memory_bytes) == (0, 0, 0)


def test_records_per_episode_equal_its_length() -> None:
    """Case 13: T steps give T sampleable rows, none starting at the final observation."""
    held = memory(n=3)
    ring = held.open(0, 0)
    lengths = [7, 1, 12, 3]
    lane = LaneWriter()
    for length in lengths:
        lane.episode(length, "truncated")
    fill(held, ring, lane.all_blocks(6))
    (batch,) = BatchAssembly(held, "s", 4096).records(every_row(held, ring), 0, 1)
    assert np.bincount(states(batch)[0][:, -1, 1]).tolist() == lengths


def test_a_priority_for_rows_overwritten_meanwhile_changes_nothing_and_is_counted() -> None:
    """Case 4: capacity 100, sample, insert 100, update."""
    held = memory(capacity=100, n=1)
    ring = held.open(0, 0)
    lane = LaneWriter().episode(300)
    fill(held, ring, lane.blocks(*[10] * 10))
    old = np.array(sorted(sampleable(held, ring)))
    fill(held, ring, lane.blocks(*[10] * 10))
    leaves = held.forest.leaves(0).copy()
    stale = held.learned(ring, old[:, 0], old[:, 1].astype(np.int32), np.full(len(old), 99.0, np.float32))
    assert stale == len(old)
    assert held.forest.leaves(0).tolist() == leaves.tolist()


def test_learned_priorities_replace_the_actors_and_the_last_of_equal_rows_wins() -> None:
    held = memory(n=1)
    ring = held.open(0, 0)
    fill(held, ring, LaneWriter().episode(30).blocks(10, 10))
    offset, row = np.array([1, 0, 1, 0, 5, 1]), np.array([3, 2, 3, 77, 0, 9], np.int32)
    stale = held.learned(ring, offset, row, np.array([1, 2, 3, 4, 5, 6], np.float32))
    assert (
        stale == 3
    )  # a row the block does not have, an offset that is not here, a row that still waits for its successor
    assert held.forest.leaves(ring.index)[13] == (3.0 + 1e-3) ** 0.6
    assert held.forest.leaves(ring.index)[2] == (2.0 + 1e-3) ** 0.6
    held.check_valid()


def test_the_actors_own_td_error_is_the_first_priority() -> None:
    """Case 6: neither 1 nor a maximum: |sum gamma**j r + gamma**k q_max - q_taken| at once."""
    held = memory(n=2, gamma=0.5)
    ring = held.open(0, 0)
    lane = LaneWriter().episode(9)
    rows = lane.rows
    rows[0].reward, rows[1].reward, rows[2].q_max, rows[0].q_taken = 1.0, 4.0, 8.0, 2.0
    fill(held, ring, lane.blocks(5))
    assert held.forest.leaves(ring.index)[0] == (1.0 + 0.5 * 4.0 + 0.25 * 8.0 - 2.0 + 1e-3) ** 0.6


def test_values_that_are_not_finite_are_refused_counted_and_poison_nothing() -> None:
    """Case 1, behind the door: a reward whose sum leaves float32, a TD error that is not a number."""
    held = memory(n=3)
    ring = held.open(0, 0)
    lane = LaneWriter().episode(30)
    for row in lane.rows[4:7]:
        row.reward = 3e38
    fill(held, ring, lane.blocks(12))
    refused = held.refused
    assert refused > 0
    assert len(sampleable(held, ring)) == 9 - refused
    bad = np.array([np.nan, np.inf], np.float32)
    held.learned(ring, np.array([0, 0]), np.array([0, 1], np.int32), bad)
    assert held.refused == refused + 2
    assert np.isfinite(held.forest.mass(ring.index))
    held.check_valid()


def test_a_block_larger_than_the_ring_is_refused() -> None:
    held = memory(capacity=8)
    with pytest.raises(BadRecord, match="the ring holds 8"):
        held.insert(held.open(0, 0), 0, 0, LaneWriter().episode(20).block(9))


def test_rings_are_dropped_and_their_room_used_again() -> None:
    held = memory(capacity=64)
    for round_ in range(20):
        for partition in range(3):
            ring = held.open(partition, 0)
            fill(held, ring, LaneWriter(lane=round_).episode(80).blocks(*[8] * 10))
        held.drop(1)
        held.check_valid()
    assert held.forest.nodes.size == 4 * held.forest.region
    assert len(held.blocks.start) <= 64
    for partition in (0, 2):
        held.drop(partition)
    assert held.memory_bytes == 0
    assert not held.ahead.any()
    assert not held.forest.nodes.any()


def test_a_long_run_holds_no_more_than_the_ring() -> None:
    """Case 21: ten times round, the tables stay as they were after the second."""
    held = memory(capacity=200)
    ring = held.open(0, 0)
    lane = LaneWriter().episode(4000)
    fill(held, ring, lane.blocks(*[8] * 50))
    size = held.nbytes()
    fill(held, ring, lane.blocks(*[8] * 200))
    assert held.nbytes() == size
    assert sum(block is not None for block in held.blocks.observations) == 25


@pytest.mark.parametrize("harm", ["leaf", "count", "ghost"])
def test_a_broken_ring_is_found(harm: str) -> None:
    held = memory()
    ring = held.open(0, 0)
    fill(held, ring, LaneWriter().episode(30).blocks(20))
    if harm == "leaf":
        held.forest.leaves(0)[2] += 1.0
    elif harm == "count":
        ring.sampleable -= 1
    else:
        held.forest.set(ring.index, np.array([100]), np.array([1.0]))
    with pytest.raises(InvalidState):
        held.check_valid()
