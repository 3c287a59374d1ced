"""The replay split as a whole: the log's offsets, the rates, recovery, several splits, and what others are told."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from lane_writer import LaneWriter, config, states

from gorila.codec import Schemas
from gorila.environment_facts import EnvironmentFacts
from gorila.errors import BadRecord
from gorila.messages import Batch, Priorities, TransitionBlock
from pipelines.replay import Gap, ReplaySplit


def split(name: str = "replay-0", seed: int = 0, **settings: Any) -> ReplaySplit:
    settings.setdefault("learner__batch_size", 32)
    return ReplaySplit(config(**settings), name, np.random.default_rng(seed))


def lane_blocks(lane: int, blocks: int, rows: int = 8, ended: str = "terminated") -> list[TransitionBlock]:
    writer = LaneWriter(lane=lane, rng=np.random.default_rng(lane))
    while len(writer.rows) < blocks * rows:
        writer.episode(10 + lane, ended)
    return writer.blocks(*[rows] * blocks)


def feed(
    replay: ReplaySplit, partition: int, blocks: list[TransitionBlock], start: int | None = 0, new: bool = True
) -> None:
    if replay.next_offset(partition) is None:
        replay.open_ring(partition, start or 0)
    for block in blocks:
        offset = replay.next_offset(partition)
        assert offset is not None
        replay.insert(partition, offset, 1000 + offset, block, new=new)


def priorities_of(batches: list[Batch], td_error: np.ndarray, offset: int = 0) -> Priorities:
    return Priorities(
        "learner-0",
        0,
        offset,
        1,
        np.concatenate([batch.partition for batch in batches]),
        np.concatenate([batch.offset for batch in batches]),
        np.concatenate([batch.row for batch in batches]),
        td_error.astype(np.float32),
        0.0,
        0.0,
        False,
        0.0,
    )


# The log


def test_offsets_below_are_ignored_equal_appended_and_above_refused() -> None:
    replay = split()
    assert replay.next_offset(3) is None
    replay.open_ring(3, 10)
    blocks = lane_blocks(0, 4)
    replay.insert(3, 10, 0, blocks[0])
    before = replay.state_fingerprint()
    replay.insert(3, 10, 0, blocks[0])  # Beam's redelivery
    assert replay.state_fingerprint() == before
    with pytest.raises(Gap) as gap:
        replay.insert(3, 14, 0, blocks[1])
    assert (gap.value.partition, gap.value.have, gap.value.got) == (3, 11, 14)
    assert replay.state_fingerprint() == before
    replay.insert(3, 11, 0, blocks[1])
    replay.insert(3, 12, 0, None)  # a poisoned record: only the offset moves
    replay.skip_to(3, 14)  # a transaction's marker
    assert replay.next_offset(3) == 14
    replay.skip_to(3, 2)
    assert replay.next_offset(3) == 14


def test_a_block_that_cannot_be_used_moves_the_offset_on_and_changes_nothing_else() -> None:
    facts = EnvironmentFacts("catch", (3,), "int32", 4, 1, 0)
    replay = ReplaySplit(config(), "replay-0", np.random.default_rng(0), facts)
    replay.open_ring(0, 0)
    good, wrong_action, wrong_shape = lane_blocks(0, 3)
    replay.insert(0, 0, 0, good)
    before = replay.stats(0)
    wrong_action.action[0] = 4
    with pytest.raises(BadRecord, match="action 4, this run's environment has 4"):
        replay.insert(0, 1, 0, wrong_action)
    object.__setattr__(wrong_shape.observations, "shape", (1, 3))
    with pytest.raises(BadRecord, match=r"\(1, 3\)"):
        replay.insert(0, 2, 0, wrong_shape)
    assert replay.next_offset(0) == 3
    assert repr(replay.stats(0)) == repr(dataclasses.replace(before, next_offsets=np.array([3])))


def test_rows_the_log_no_longer_has_leave_the_ring_counted() -> None:
    replay = split()
    feed(replay, 0, lane_blocks(0, 10), start=100)
    replay.low_watermark(0, 104)
    replay.low_watermark(9, 104)
    assert replay.evicted_below_watermark == 4 * 8
    assert replay.oldest_timestamp_ms() == 1104
    replay.check_valid()


def test_inserts_count_transitions_once_and_not_what_fills_a_gap() -> None:
    replay = split()
    blocks = lane_blocks(0, 8)
    feed(replay, 0, blocks[:3], new=False)
    assert replay.stats(0).inserts_total == 0
    feed(replay, 0, blocks[3:])
    transitions = sum(int((~block.is_last).sum()) for block in blocks[3:])
    assert replay.stats(0).inserts_total == replay.stats(0).inserts.sum() == transitions
    assert replay.rates.error == transitions * 8.0


def test_rows_an_operator_has_read_again_are_no_new_inserts_and_those_after_them_are() -> None:
    """`--to-earliest`: samples per insert is about experience made, not about records read."""
    blocks = lane_blocks(0, 12)
    before = split()
    feed(before, 0, blocks[:8], start=100)
    drawn = len(before.draw(10_000))
    said = before.stats(1)
    again = split()
    again.restore_totals(said)
    feed(again, 0, blocks[:8], start=100)
    assert again.stats(2).inserts_total == said.inserts_total
    assert not again.draw(10_000), f"{drawn} batches were drawn of these rows before"
    feed(again, 0, blocks[8:])
    transitions = sum(int((~block.is_last).sum()) for block in blocks)
    assert again.stats(3).inserts_total == again.stats(3).inserts.sum() == transitions
    assert drawn + len(again.draw(10_000)) == transitions * 8 // 32


def test_rows_another_split_counted_are_not_counted_again_by_the_one_that_takes_the_actor_over() -> None:
    blocks = lane_blocks(0, 12)
    old, new = split("replay-0"), split("replay-1")
    feed(old, 0, blocks[:8])
    new.other_split(old.stats(1))
    feed(new, 0, blocks, start=0)
    assert new.stats(2).inserts_total == sum(int((~block.is_last).sum()) for block in blocks[8:])
    # Killed while it reads again, it says what was counted, not how far it has come.
    third = split("replay-0")
    third.other_split(new.stats(3))
    third.open_ring(0, 2)
    assert third.stats(4).counted_offsets.tolist() == [12]
    assert third.stats(4).next_offsets.tolist() == [2]


def test_stats_of_before_offsets_were_said_are_still_taken() -> None:
    replay = split()
    feed(replay, 0, lane_blocks(0, 4))
    old = dataclasses.replace(
        replay.stats(1), next_offsets=np.zeros(0, np.int64), counted_offsets=np.zeros(0, np.int64)
    )
    old.check()
    again = split()
    again.restore_totals(old)
    assert again.stats(2).inserts_total == old.inserts_total


def test_a_split_recovered_from_the_log_equals_the_one_that_was_lost() -> None:
    """Design section 5: equal after recovery: the live (offset, row) set, every leaf, N. Priorities came while rows came and left."""
    settings = {"capacity_rows": 200, "env__stack": 3}
    lost = split(**settings)
    logs = {0: lane_blocks(0, 90), 1: lane_blocks(1, 50, rows=5, ended="truncated")}
    learned: list[tuple[int, Priorities]] = []
    rng = np.random.default_rng(1)
    for step in range(90):
        for partition, log in logs.items():
            feed(lost, partition, log[step : step + 1])
        for batch in lost.draw(1):
            record = priorities_of(batch, rng.exponential(2.0, 32))
            lost.learned(record)
            learned.append((1000 + step, record))
    again = split(seed=99, **settings)
    for partition, log in logs.items():
        end = lost.next_offset(partition)
        assert end is not None
        oldest = int(np.frombuffer(lost.state_fingerprint()[partition][1], np.int64)[0])
        feed(again, partition, log[oldest - 2 : end], start=oldest - 2, new=False)  # a little before the oldest row
    oldest_ms = again.oldest_timestamp_ms()
    assert oldest_ms is not None
    for timestamp_ms, record in learned:
        if timestamp_ms >= oldest_ms:
            again.learned(record)
    assert again.state_fingerprint() == lost.state_fingerprint()
    assert len(again.state_fingerprint()) == 2
    again.check_valid()


def test_a_dropped_ring_is_forgotten_and_opened_again_empty() -> None:
    replay = split()
    feed(replay, 4, lane_blocks(0, 5))
    replay.drop_ring(4)
    replay.drop_ring(4)
    assert replay.next_offset(4) is None
    assert replay.stats(0).actors == []
    replay.open_ring(4, 77)
    assert replay.next_offset(4) == 77
    assert replay.draw(1) == []


# Sampling and rates


def test_whole_learner_batches_are_drawn_as_far_as_the_rates_and_the_lag_let_them() -> None:
    replay = split(samples_per_insert=1.0, record_rows=10)
    feed(replay, 0, lane_blocks(0, 20))
    inserts = replay.stats(0).inserts_total
    first = replay.draw(2)
    rest = replay.draw(1000)
    assert len(first) == 2
    assert len(first) + len(rest) == inserts // 32
    assert [[len(part.action) for part in batch] for batch in first] == [[10, 10, 10, 2]] * 2
    assert [part.batch_number for batch in first + rest for part in batch] == [
        i for i in range(inserts // 32) for _ in range(4)
    ]
    assert replay.draw(0) == []
    assert replay.waiting_for() == f"actors: {inserts % 32} rows may be drawn, a learner batch has 32"


def test_batches_pass_the_wire_as_they_are() -> None:
    schemas = Schemas()
    replay = split(env__stack=3)
    feed(replay, 0, lane_blocks(0, 20))
    for record in replay.draw(1)[0]:
        again = schemas.expect(schemas.encode(record), Batch)
        assert again.blocks == record.blocks
        np.testing.assert_array_equal(again.frames_t, record.frames_t)
        assert all(a.tolist() == b.tolist() for a, b in zip(states(again), states(record), strict=True))


def test_sampling_waits_for_the_minimum_size_and_says_for_whom() -> None:
    replay = split(min_size_rows=100)
    blocks = lane_blocks(0, 20)
    feed(replay, 0, blocks[:2])
    assert replay.draw(10) == []
    assert replay.wants_transitions()
    assert replay.waiting_for().startswith("actors: ")
    assert replay.waiting_for().endswith("sampling starts at 100")
    feed(replay, 0, blocks[2:])
    assert replay.draw(1)
    assert replay.waiting_for() == ""


def test_reading_waits_only_while_a_batch_could_be_formed_and_the_error_is_above_its_maximum() -> None:
    replay = split(max_error_rows=64.0, min_size_rows=50, samples_per_insert=8.0)
    blocks = lane_blocks(0, 30)
    feed(replay, 0, blocks[:5])
    assert replay.rates.error > 64.0
    assert replay.wants_transitions()  # below the minimum size
    feed(replay, 0, blocks[5:])
    assert not replay.wants_transitions()
    assert replay.waiting_for().startswith("learners: ")
    while replay.draw(1):
        pass
    assert replay.wants_transitions()


@pytest.mark.parametrize("ratio", [0.1, 1.0, 8.0])
def test_progress_at_any_ratio_with_fewer_actors_than_a_batch_needs(ratio: float) -> None:
    """Case 20."""
    replay = split(samples_per_insert=ratio, max_error_rows=64.0)
    blocks = iter(lane_blocks(0, 400))
    drawn = 0
    for _ in range(300):
        if replay.wants_transitions():
            feed(replay, 0, [next(blocks)])
        drawn += len(replay.draw(100))
    assert drawn * 32 == pytest.approx(replay.stats(0).inserts_total * ratio, abs=32)


def test_the_same_generator_and_log_give_the_same_batches() -> None:
    encode = Schemas().encode
    made = []
    for _ in range(2):
        replay = split(seed=7)
        feed(replay, 0, lane_blocks(0, 20))
        feed(replay, 1, lane_blocks(1, 20))
        made.append([encode(record) for batch in replay.draw(5) for record in batch])
    assert made[0] == made[1]


def test_a_target_new_share_is_kept_and_the_share_is_always_measured() -> None:
    """Rules.md 8, and case 8: the key has an observable effect."""
    for asked, low, high in ((0.8, 0.78, 0.82), (None, 0.03, 0.3)):
        replay = split(target_new_share=asked, new_window_fraction=0.1, samples_per_insert=100.0)
        feed(replay, 0, lane_blocks(0, 60))
        replay.draw(200)
        assert low < replay.stats(0).new_share < high
        assert replay.new_share_fallbacks == 0


def test_prioritised_is_not_uniform_and_alpha_zero_is() -> None:
    """Case 8: alpha has an observable effect."""
    for alpha, largest in ((1.0, 1.0), (0.0, 0.05)):
        replay = split(alpha=alpha, samples_per_insert=100.0)
        feed(replay, 0, lane_blocks(0, 40))
        everything = replay.draw(10)
        records = [record for batch in everything for record in batch]
        td_error = np.zeros(sum(len(record.action) for record in records))
        td_error[0] = 1e6
        first = (records[0].offset[0], records[0].row[0])
        same = [(o, r) == first for rec in records for o, r in zip(rec.offset, rec.row, strict=True)]
        td_error[same] = 1e6
        replay.learned(priorities_of(records, td_error))
        after = [
            (o, r) == first
            for batch in replay.draw(20)
            for rec in batch
            for o, r in zip(rec.offset, rec.row, strict=True)
        ]
        assert np.mean(after) == pytest.approx(largest, abs=0.06)


def test_stale_priorities_are_counted_and_other_splits_are_not_ours_to_count() -> None:
    replay = split(capacity_rows=100)
    blocks = lane_blocks(0, 40)
    feed(replay, 0, blocks[:12])
    (batch,) = replay.draw(1)
    feed(replay, 0, blocks[12:])
    record = priorities_of(batch, np.ones(32))
    record.partition[5:] = 3
    replay.learned(record)
    assert replay.stats(0).stale_priorities == 5


# Several splits


def test_totals_go_on_where_they_were_after_a_restart() -> None:
    before = split()
    feed(before, 0, lane_blocks(0, 10))
    before.draw(3)
    stats = before.stats(1)
    after = split()
    after.restore_totals(stats)
    feed(after, 0, lane_blocks(0, 10), new=False)
    assert repr(after.stats(1)) == repr(stats).replace(f"new_share={stats.new_share}", "new_share=0.0")
    assert after.rates.error == before.rates.error
    assert after.draw(1)[0][0].batch_number == 3


def test_two_splits_together_draw_each_row_as_often_as_they_record() -> None:
    """Actors of very different mass on two splits that exchange stats: chi-square of all draws against the recorded P."""
    scale = {0: 1.0, 1: 30.0, 2: 0.05, 3: 4.0, 4: 0.5}
    splits = {"replay-0": [0, 1], "replay-1": [2, 3, 4]}
    made = {}
    for name, partitions in splits.items():
        replay = made[name] = split(name, seed=len(partitions), samples_per_insert=1.0, max_error_rows=1e9)
        for partition in partitions:
            blocks = lane_blocks(partition, 3 + partition)
            for block in blocks:
                block.q_taken *= scale[partition] * 10
            feed(replay, partition, blocks, new=False)
    stats = {name: replay.stats(1) for name, replay in made.items()}
    for replay in made.values():
        for other in stats.values():
            replay.other_split(other)
    weights = {name: replay._share().weight for name, replay in made.items()}
    assert sum(weights.values()) == pytest.approx(1.0)
    counts: dict[tuple[int, int, int], int] = {}
    recorded: dict[tuple[int, int, int], float] = {}
    for name, replay in made.items():
        replay.rates.inserted(160_000, weights[name])
        while batches := replay.draw(100):
            for record in (record for batch in batches for record in batch):
                assert record.population == sum(int(s.sampleable.sum()) for s in stats.values())
                for *identity, p in zip(record.partition, record.offset, record.row, record.probability, strict=True):
                    key = tuple(map(int, identity))
                    counts[key] = counts.get(key, 0) + 1
                    assert recorded.setdefault(key, p) == p
    total = sum(counts.values())
    assert total == pytest.approx(160_000, abs=64)
    assert sum(recorded.values()) == pytest.approx(1.0, abs=1e-3)
    chi = sum((counts[key] - total * p) ** 2 / (total * p) for key, p in recorded.items() if total * p >= 5)
    assert 0.5 < chi / len(recorded) < 1.5


def test_inserts_anywhere_earn_every_split_its_share_of_the_ratio() -> None:
    first, second = split("replay-0"), split("replay-1")
    feed(first, 0, lane_blocks(0, 10))
    feed(second, 1, lane_blocks(1, 10))
    drawn = 0
    for turn in range(2, 8):
        stats = [first.stats(turn), second.stats(turn)]
        for replay in (first, second):
            for other in stats:
                replay.other_split(other)
            partition = 0 if replay is first else 1
            blocks = lane_blocks(partition, 10 * turn)[-10:]
            for block in blocks:
                block.actor_epoch = turn
            feed(replay, partition, blocks)
            drawn += len(replay.draw(10_000))
    inserts = first.stats(9).inserts_total + second.stats(9).inserts_total
    assert drawn * 32 == pytest.approx(8.0 * inserts, rel=0.15)


def test_totals_restored_as_if_alone_are_bounded_when_another_split_shows_up() -> None:
    """Alone or not is only known later: of two splits, one may have drawn for the other's inserts, and must not wait for ever to even out."""
    lost, other = split("replay-0"), split("replay-1")
    feed(lost, 0, lane_blocks(0, 4))
    feed(other, 1, lane_blocks(1, 4))
    stats = lost.stats(1)
    stats.samples_total = 10**6
    again = split("replay-0")
    again.restore_totals(stats)
    feed(again, 0, lane_blocks(0, 4), new=False)
    assert again.rates.error < 0
    again.other_split(other.stats(2))
    assert again.rates.error == 0.0


def test_an_actor_that_moved_is_counted_once() -> None:
    old, new, third = split("replay-0"), split("replay-1"), split("replay-2")
    feed(old, 0, lane_blocks(0, 10))
    feed(new, 0, lane_blocks(0, 10))
    feed(third, 2, lane_blocks(2, 10))
    third.other_split(old.stats(1))
    third.other_split(new.stats(2))
    new.other_split(old.stats(1))
    third.draw(1)
    assert new.draw(1)[0][0].population == int(new.stats(3).sampleable.sum())
    (batch,) = third.draw(1)
    assert batch[0].population == int(new.stats(3).sampleable.sum() + third.stats(3).sampleable.sum())


def test_a_splits_own_stats_and_old_ones_change_nothing() -> None:
    replay, other = split("replay-0"), split("replay-1")
    feed(replay, 0, lane_blocks(0, 10))
    replay.other_split(replay.stats(5))
    assert replay.draw(1)[0][0].population == int(replay.stats(5).sampleable.sum())
    feed(other, 1, lane_blocks(1, 4))
    early = other.stats(7)
    feed(other, 1, lane_blocks(1, 10)[4:])
    late = other.stats(6)  # its clock was set back meanwhile
    replay.other_split(late, 21)
    replay.other_split(early, 20)  # Beam's redelivery
    assert replay.draw(1)[0][0].population == int(replay.stats(8).sampleable.sum() + late.sampleable.sum())


def test_a_split_whose_clock_was_years_ahead_does_not_have_the_last_word() -> None:
    years_ms = 5 * 365 * 24 * 3600 * 1000
    replay, other, heir = split("replay-0"), split("replay-1"), split("replay-2")
    feed(replay, 0, lane_blocks(0, 10))
    feed(other, 1, lane_blocks(1, 4))
    replay.other_split(other.stats(years_ms), 1)
    feed(other, 1, lane_blocks(1, 10)[4:])
    before = replay.rates.error
    replay.other_split(other.stats(1000), 2)  # restarted, its clock right
    assert replay.rates.error > before, "what came in there meanwhile earns samples here"
    assert replay.draw(1)[0][0].population == int(replay.stats(8).sampleable.sum() + other.stats(9).sampleable.sum())
    feed(heir, 1, lane_blocks(1, 20))
    replay.other_split(other.stats(years_ms), 3)  # and wrong again, when it loses the actor and dies
    replay.other_split(heir.stats(1001), 4)
    replay.stats(1002)
    assert replay.draw(1)[0][0].population == int(replay.stats(8).sampleable.sum() + heir.stats(9).sampleable.sum())


def test_stats_name_actors_by_partition_in_order() -> None:
    replay = split()
    for partition in (7, 2):
        feed(replay, partition, lane_blocks(partition, 4))
    stats = replay.stats(123)
    stats.check()
    assert (stats.time_ms, stats.actors) == (123, ["2", "7"])
    assert all(a < b for a, b in pairwise(map(int, stats.actors)))
    assert stats.mass.min() > 0.0
    assert stats.memory_bytes > 0
