"""A reader of weights holds whole versions, takes only newer ones, and never what does not carry the server's hash."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorila import compression
from gorila.errors import BadRecord, InvalidState
from gorila.messages import Weights
from gorila.weights import TARGETS_KEPT, WeightsView, payload_hash

P, SHARDS = 7, 2
LENGTHS = (4, 3)


def record(shard: int, version: int, kind: str = "key", values: float | None = None, **changes: object) -> Weights:
    """Weights whose every value is the version (or `values`)."""
    flat = np.full(LENGTHS[shard], version if values is None else values, np.float32)
    made = Weights(
        shard, version, kind, LENGTHS[shard], -1, -1, -1, -1, version * 10, "fp32", flat.tobytes(), payload_hash(flat),
        -1, version, 0, 0, 0, np.empty(0, np.int32), 0.1,
    )  # fmt: skip
    return dataclasses.replace(made, **changes)


def view_at(*versions: int) -> WeightsView:
    view = WeightsView(P, SHARDS)
    for shard, version in enumerate(versions):
        assert view.take(record(shard, version))
    return view


def test_the_global_version_is_the_minimum_and_minus_one_before_every_shard_has_come():
    view = WeightsView(P, SHARDS)
    assert view.version == -1
    view.take(record(0, 5))
    assert view.version == -1
    with pytest.raises(InvalidState):
        view.flat()
    view.take(record(1, 3))
    assert view.version == 3
    assert view.shard_versions == [5, 3]
    assert view.gradient_offsets == [50, 30]
    assert view.flat().tolist() == [5, 5, 5, 5, 3, 3, 3]


def test_a_version_not_above_the_one_held_is_ignored():
    view = view_at(5, 5)
    assert not view.take(record(0, 5, values=9))
    assert not view.take(record(0, 4, values=9))
    assert view.flat().tolist() == [5] * P


def test_flat_weights_handed_out_are_never_changed_by_a_later_record():
    view = view_at(1, 1)
    before = view.flat()
    view.take(record(0, 2))
    assert before.tolist() == [1] * P
    assert view.flat().tolist() == [2, 2, 2, 2, 1, 1, 1]
    with pytest.raises(ValueError, match="read-only"):
        before[0] = 3


@pytest.mark.parametrize(
    "bad",
    [
        record(0, 6, payload_hash=1),
        record(0, 6, payload=b"\0" * 12),
        record(0, 6, num_parameters=3),
        record(0, 6, codec="zip"),
        record(0, 6, payload=np.full(4, np.nan, np.float32).tobytes()),
        dataclasses.replace(record(0, 6), shard_id=2),
    ],
    ids=["hash", "length", "parameters", "codec", "nan", "shard"],
)
def test_a_bad_record_is_refused_and_leaves_the_view_as_it_was(bad: Weights):
    view = view_at(5, 5)
    with pytest.raises(BadRecord):
        view.take(bad)
    assert view.shard_versions == [5, 5]
    assert view.flat().tolist() == [5] * P


def test_a_delta_adds_to_its_base_and_is_ignored_without_it():
    view = view_at(5, 5)
    step = np.full(4, 0.5, np.float32)
    delta = record(
        0, 6, "delta", payload=step.tobytes(), payload_hash=payload_hash(np.full(4, 5.5, np.float32)), base_version=5
    )
    assert not view.take(dataclasses.replace(delta, base_version=4, version=7))
    assert view.take(delta)
    assert view.flat()[0] == 5.5
    assert not WeightsView(P, SHARDS).take(delta)


def test_the_hash_is_of_the_values_a_reader_holds_after_decoding_whatever_the_codec():
    view = WeightsView(P, SHARDS)
    half = compression.codec("fp16")
    payload = half.encode(np.array([0.1, 0.2, 0.3, 0.4], np.float32))
    held = half.decode(payload, 4)
    assert view.take(record(0, 1, codec="fp16", payload=payload, payload_hash=payload_hash(held)))


def test_targets_are_of_one_version_that_every_shard_has():
    view = WeightsView(P, SHARDS)
    assert view.target_version == -1
    view.take(record(0, 50, "target"))
    assert view.target_version == -1
    view.take(record(1, 50, "target"))
    assert view.target_version == 50
    view.take(record(0, 100, "target"))
    assert view.target_version == 50
    assert view.target_flat().tolist() == [50] * P
    view.take(record(1, 100, "target"))
    assert view.target_flat().tolist() == [100] * P
    assert not view.take(record(1, 50, "target"))
    assert view.version == -1


def test_a_key_frame_names_the_newest_target_and_where_it_is():
    view = WeightsView(P, SHARDS)
    view.take(record(0, 51, target_version=50, target_offset=17))
    assert view.announced_targets == [(50, 17), (-1, -1)]
    assert view.target_versions == [-1, -1]


def test_old_targets_are_not_kept_for_ever():
    view = WeightsView(P, SHARDS)
    for version in range(0, 500, 50):
        view.take(record(0, version, "target"))
    assert sum(len(held) for held in view._targets) == TARGETS_KEPT


def test_a_reader_without_a_network_learns_the_lengths_from_the_records():
    view = WeightsView(None, SHARDS)
    assert view.num_parameters is None
    view.take(record(0, 1))
    view.take(record(1, 1, "target"))
    assert view.num_parameters == P
    with pytest.raises(BadRecord, match="parameters"):
        view.take(record(0, 2, num_parameters=3))


@given(st.lists(st.tuples(st.integers(0, 1), st.integers(0, 30))))
def test_in_whatever_order_records_come_each_shard_holds_its_newest_version_whole(arrivals: list[tuple[int, int]]):
    view = WeightsView(P, SHARDS)
    newest = [-1, -1]
    for shard, version in arrivals:
        assert view.take(record(shard, version)) == (version > newest[shard])
        newest[shard] = max(newest[shard], version)
        assert view.shard_versions == newest
        if view.version >= 0:
            assert view.flat().tolist() == [newest[0]] * 4 + [newest[1]] * 3
