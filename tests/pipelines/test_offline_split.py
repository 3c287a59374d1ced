"""The replay of a recording as a pure object: what is loaded, what is drawn, and that it is always the same."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest

from gorila.codec import Schemas
from gorila.environment_facts import EnvironmentFacts
from gorila.errors import ConfigError
from gorila.messages import Priorities
from gorila.observations import RecentFrames, inflate
from gorila.recording import Recorded, Span
from gorila.seeds import generator
from pipelines.offline_split import OfflineSplit, Progress
from tests.pipelines.lane_writer import LaneWriter, config

FACTS = EnvironmentFacts("own", (3,), "int32", 4, 1, 0)
SCHEMAS = Schemas()


def recording(partitions: int = 2, episodes: int = 12, first: int = 0) -> list[Recorded]:
    """Blocks of 8 rows; offset `first + 3` of each partition holds nothing."""
    found = []
    for partition in range(partitions):
        lane = LaneWriter(actor_id=f"actor-{partition}", rng=np.random.default_rng(partition))
        for _ in range(episodes):
            lane.episode(11)
        for number, block in enumerate(lane.all_blocks(8)):
            offset = first + number + (number >= 3)
            found.append(Recorded(partition, offset, 1000 + number, block))
    return found


def spans(records: list[Recorded]) -> dict[int, Span]:
    there: dict[int, list[int]] = {}
    for record in records:
        there.setdefault(record.partition, []).append(record.offset)
    return {p: Span(min(offsets), max(offsets) + 1) for p, offsets in there.items()} | {9: Span(0, 0)}


def loaded(records: list[Recorded], learned: list[Recorded] | None = None, **replay: Any) -> OfflineSplit:
    split = OfflineSplit(config(learner__batch_size=16, **replay), "replay-0", FACTS)
    split.open(spans(records))
    for record in records:
        split.insert(record)
    for record in learned or []:
        split.learned(record)
    split.ready()
    return split


def drawn_bytes(split: OfflineSplit, updates: int = 20) -> list[bytes]:
    return [SCHEMAS.encode(record) for _ in range(updates) for record in split.draw()]


def of_rows(partition: int, offset: int, error: float) -> Recorded:
    rows = np.arange(8, dtype=np.int32)
    return Recorded(
        0,
        0,
        0,
        Priorities(
            "learner-0",
            0,
            0,
            0,
            np.full(8, partition, np.int32),
            np.full(8, offset, np.int64),
            rows,
            np.full(8, error, np.float32),
            0.0,
            0.0,
            False,
            0.0,
        ),
    )


def test_two_replays_of_one_recording_are_equal_byte_for_byte_whenever_it_was_recorded() -> None:
    records = recording()
    later = [dataclasses.replace(record, timestamp_ms=record.timestamp_ms + 10**6) for record in records]
    learned = [of_rows(0, 2, 5.0), of_rows(1, 4, 0.5), of_rows(0, 2, 0.1)]
    assert drawn_bytes(loaded(records, learned)) == drawn_bytes(loaded(later, learned))


def test_statistics_for_eyes_do_not_change_what_is_drawn() -> None:
    quiet, watched = loaded(recording()), loaded(recording())
    seen = []
    for now_ms in range(20):
        watched.replay.stats(now_ms)
        seen += [SCHEMAS.encode(record) for record in watched.draw()]
    assert seen == drawn_bytes(quiet)


def test_draws_come_from_the_offline_stream_of_the_seed() -> None:
    other = loaded(recording(), run__seed=1)
    assert drawn_bytes(other) != drawn_bytes(loaded(recording()))
    same = loaded(recording(), run__seed=1)
    same.replay.rng = generator(1, "offline", 0)
    assert drawn_bytes(same) == drawn_bytes(loaded(recording(), run__seed=1))


def test_a_hole_in_the_offsets_is_passed_over_and_nothing_counts_as_an_environment_step() -> None:
    records = recording()
    split = loaded(records)
    assert split.bad_records == 0
    assert set(split.replay.state_fingerprint()) == {0, 1}
    stats = split.replay.stats(0)
    assert stats.inserts_total == 0
    assert int(stats.sampleable.sum()) == split.rows > 0
    split.draw()
    assert split.replay.stats(0).samples_total == 16


def test_a_source_larger_than_the_ring_leaves_its_newest_capacity() -> None:
    records = recording(partitions=1, episodes=40)
    split = loaded(records, capacity_rows=64)
    newest = {record.offset for record in records[-8:]}
    assert {int(o) for _ in range(20) for record in split.draw() for o in record.offset} <= newest


def test_recorded_priorities_decide_what_is_drawn_and_the_last_of_a_row_wins() -> None:
    records = recording(partitions=1)
    learned = [of_rows(0, 5, 1e-6), of_rows(0, 2, 1e9), of_rows(0, 2, 1e-6), of_rows(0, 5, 1e9)]

    def share(split: OfflineSplit) -> float:
        offsets = np.concatenate([record.offset for _ in range(20) for record in split.draw()])
        return float((offsets == 5).mean())

    assert share(loaded(records)) < 0.3
    assert share(loaded(records, learned)) > 0.95


def test_priorities_of_rows_that_are_not_in_the_memory_are_counted_and_change_nothing() -> None:
    plain, with_stale = loaded(recording()), loaded(recording(), [of_rows(0, 999, 7.0), of_rows(7, 0, 7.0)])
    assert drawn_bytes(plain) == drawn_bytes(with_stale)
    assert with_stale.replay.stats(0).stale_priorities == 8


def test_values_of_another_policy_replace_the_actors() -> None:
    records = recording(partitions=1)
    split = OfflineSplit(config(learner__batch_size=16), "replay-0", FACTS)
    split.open(spans(records))
    for record in records:
        rows = record.message.observations.count  # type: ignore[union-attr]
        split.insert(
            record, (np.full(rows, 1e6 if record.offset == 5 else 0.0, np.float32), np.zeros(rows, np.float32))
        )
    offsets = np.concatenate([part.offset for _ in range(20) for part in split.draw()])
    assert float((offsets == 5).mean()) > 0.9


def test_a_block_of_another_environment_is_counted_and_left_out() -> None:
    records = recording()
    strange = Recorded(0, records[-1].offset + 50, 0, LaneWriter().episode(9).block(10))
    other = OfflineSplit(config(), "replay-0", dataclasses.replace(FACTS, observation_shape=(4,)))
    other.open({0: Span(0, 100)})
    other.insert(strange)
    assert other.bad_records == 1
    with pytest.raises(ConfigError, match=r"replay\.min_size_rows = 1 is not allowed: the source gives 0 sampleable"):
        other.ready()


def test_a_source_too_small_to_begin_sampling_is_refused_naming_the_key() -> None:
    with pytest.raises(ConfigError, match=r"replay\.min_size_rows = 400"):
        loaded(recording(partitions=1), min_size_rows=400)


def test_progress_tells_the_time_left_at_the_mean_rate() -> None:
    progress = Progress("batches", 5000, 100.0)
    assert progress.line(100.0) == "offline: 0 of 5,000 batches"
    progress.done = 1250
    assert progress.eta_s(110.0) == 30.0
    assert progress.line(110.0) == "offline: 1,250 of 5,000 batches, 30 s left"
    progress.done = 5000
    assert progress.line(140.0) == "offline: 5,000 of 5,000 batches"


def test_states_of_a_recording_are_stacked_as_the_actor_stacked_them() -> None:
    from pipelines.offline import Stacker

    facts = dataclasses.replace(FACTS, stack=3)
    lane, recent = LaneWriter(), RecentFrames(1, (3,), np.int32, 3)
    lane.episode(5).episode(2)
    stacker = Stacker(facts)
    for block in lane.blocks(2, 4, 3):
        frames = inflate(block.observations)
        wanted = [recent.push(frames[r, None], block.is_first[r, None])[0].copy() for r in range(len(frames))]
        assert np.array_equal(stacker.states(0, block), np.stack(wanted))


def test_a_lane_that_does_not_go_on_begins_anew_and_never_mixes_frames_over_a_gap() -> None:
    from pipelines.offline import Stacker

    stacker = Stacker(dataclasses.replace(FACTS, stack=2))
    first, _, third = LaneWriter().episode(20).blocks(3, 3, 3)
    stacker.states(0, first)
    after_gap = stacker.states(0, third)
    frames = inflate(third.observations)
    assert np.array_equal(after_gap[0], frames[[0, 0]])
    assert np.array_equal(after_gap[1], frames[[0, 1]])
