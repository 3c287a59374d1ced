"""Watermark of acknowledgements, gates, skipped offsets, the offset tracker: the arithmetic behind "what may be committed"."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorila.codec import Schemas
from gorila.emission import Emission
from gorila.metrics import Metrics
from gorila.ports import Gate
from gorila.processor import Incoming, OffsetTracker, Outgoing
from gorila.skipped import SkippedOffsets
from gorila.testing.relay import episode

SCHEMAS = Schemas()


class Wire:
    """A producer whose acknowledgements come when and in the order the test says."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, Callable[[int, int], None]]] = []

    def send(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        on_delivery: Callable[[int, int], None] | None = None,
    ) -> None:
        assert on_delivery is not None
        self.sent.append((partition or 0, on_delivery))

    def poll(self, timeout_s: float = 0.0) -> None: ...

    def flush(self, timeout_s: float) -> int:
        return 0

    def close(self, timeout_s: float = 0.0) -> None: ...


class Shut:
    """Lets through what is below a limit of offsets per partition."""

    def __init__(self) -> None:
        self.limit = 0

    def may_write(self, partition: int, next_offset: int) -> bool:
        return next_offset < self.limit

    def waiting_for(self) -> str:
        return "replay: behind"


def emission(wire: Wire, gates: dict[str, Gate] | None = None, told: list[object] | None = None) -> Emission:
    def delivered(record: Outgoing, partition: int, offset: int) -> None:
        if told is not None:
            told.append((record.tag, partition, offset))

    return Emission(wire, SCHEMAS, lambda name: name, gates or {}, delivered, Metrics("test"))


@given(st.permutations(range(8)))
def test_the_watermark_is_the_last_emission_before_the_first_unacknowledged_one_whatever_the_order(
    order: list[int],
) -> None:
    wire = Wire()
    out = emission(wire)
    out.emit(Outgoing("priorities", episode(n), partition=0) for n in range(8))
    seen: set[int] = set()
    for index in order:
        wire.sent[index][1](0, index)
        seen.add(index)
        assert out.acknowledged == next((n for n in range(8) if n not in seen), 8)
        assert out.outstanding == 8 - len(seen)


def test_only_tagged_records_are_told_of() -> None:
    wire = Wire()
    told: list[object] = []
    out = emission(wire, told=told)
    out.emit(
        [Outgoing("priorities", episode(0), partition=0), Outgoing("priorities", episode(1), partition=0, tag="mine")]
    )
    assert out.tagged == 1
    for index, (_, acknowledge) in enumerate(wire.sent):
        acknowledge(0, 40 + index)
    assert told == [("mine", 0, 41)]
    assert out.tagged == 0


@given(st.lists(st.integers(0, 2), min_size=1, max_size=12), st.lists(st.integers(0, 12), max_size=12))
def test_held_records_go_out_in_order_of_each_partition_and_none_is_lost_or_doubled(
    partitions: list[int], limits: list[int]
) -> None:
    wire, gate = Wire(), Shut()
    out = emission(wire, {"transitions": gate})
    sent: list[int] = []
    ends = [0, 0, 0]

    def acknowledge_new() -> None:
        for partition, acknowledge in wire.sent[len(sent) :]:
            acknowledge(partition, ends[partition])
            ends[partition] += 1
            sent.append(partition)

    for partition in partitions:
        out.emit([Outgoing("transitions", episode(0), partition=partition)])
        acknowledge_new()
    for limit in sorted(limits):
        gate.limit = limit
        out.release()
        acknowledge_new()
        assert all(end <= max(limit, 1) for end in ends)
        assert out.held == len(partitions) - len(sent) == out.outstanding
    out.release(anyway=True)
    acknowledge_new()
    assert sorted(sent) == sorted(partitions)
    assert out.held == out.outstanding == 0


def test_a_record_must_name_its_partition_or_a_key_would_send_it_to_one_that_was_added_and_nobody_reads() -> None:
    for gates in ({"transitions": Shut()}, {}):
        with pytest.raises(ValueError, match="transitions"):
            emission(Wire(), gates).emit([Outgoing("transitions", episode(0), key=b"actor-0")])


@given(st.lists(st.booleans(), max_size=20), st.integers(0, 20))
def test_a_position_moves_over_the_bad_records_that_follow_the_finished_ones_and_over_no_others(
    bad: list[bool], finished: int
) -> None:
    skipped = SkippedOffsets()
    good = [offset for offset, is_bad in enumerate(bad) if not is_bad]
    for offset, is_bad in enumerate(bad):
        (skipped.bad if is_bad else skipped.good)("batches", 0, offset)
    done = good[:finished]
    positions = {("batches", 0): done[-1] + 1} if done else {}
    first_open = good[finished] if finished < len(good) else len(bad)
    moved = skipped.past(positions).get(("batches", 0), 0)
    assert moved == first_open
    skipped.committed({("batches", 0): moved})
    assert skipped.past({("batches", 0): moved}) == {("batches", 0): moved}


@given(st.permutations(range(7)), st.integers(0, 7))
def test_the_trackers_position_is_the_lowest_unfinished_offset_whatever_the_order_of_release(
    order: list[int], released: int
) -> None:
    tracker = OffsetTracker()
    for offset in range(7):
        tracker.take(Incoming("batches", 2, 10 + offset, 0, None, episode(offset)))
    for offset in order[:released]:
        tracker.release("batches", 2, 10 + offset)
    lowest = min(order[released:], default=7)
    assert tracker.positions() == {("batches", 2): 10 + lowest}
    assert tracker.unfinished("batches") == 7 - released
    tracker.forget([("batches", 2)])
    assert tracker.positions() == {}


def test_a_slow_first_acknowledgement_does_not_let_a_writer_past_the_bound() -> None:
    wire, gate = Wire(), Shut()
    gate.limit = 5
    out = emission(wire, {"priorities": gate})
    out.emit(Outgoing("priorities", episode(n), partition=0) for n in range(20))
    assert len(wire.sent) == 5 and out.held == 15
