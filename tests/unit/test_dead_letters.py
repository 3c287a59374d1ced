"""Bad records are counted by partition: a few are an accident, more than half are not."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gorila.dead_letters import DeadLetterLimit, headers_of
from gorila.kafka import Received


def test_a_few_bad_records_far_apart_never_stop_a_service():
    limit = DeadLetterLimit(most=10_000, window=1000)
    assert not any(limit.count("t", 0, offset) for offset in range(0, 20_000, 2))
    assert limit.total == 10_000


def test_more_than_half_of_the_last_window_stops_it_and_names_the_partition():
    limit = DeadLetterLimit(window=1000)
    why = [limit.count("run.gradients", 3, offset) for offset in range(501)]
    assert not any(why[:500])
    assert "run.gradients partition 3" in why[500]


def test_partitions_are_judged_one_by_one():
    limit = DeadLetterLimit(window=1000)
    assert not any(limit.count("t", partition, offset) for offset in range(300) for partition in range(4))


def test_too_many_in_all_stops_it():
    limit = DeadLetterLimit(most=20, window=1000)
    why = [limit.count("t", 0, offset * 100) for offset in range(21)]
    assert not any(why[:20])
    assert "21 records" in why[20]


@given(st.lists(st.booleans(), max_size=120))
def test_the_window_says_what_counting_says(bad: list[bool]):
    limit = DeadLetterLimit(most=10**6, window=10)
    for offset, is_bad in enumerate(bad):
        if is_bad:
            in_window = sum(bad[max(0, offset - 9) : offset + 1])
            assert bool(limit.count("t", 0, offset)) == (in_window > 5)


def test_headers_are_connects_and_keep_the_records_own():
    received = Received("run.gradients", 2, 17, 1, b"k", b"v", (("trace", b"1"),))
    headers = dict(headers_of(received, "NaN", "VALUE_CONVERTER", "BadRecord", "parameter-server", 1))
    assert headers["trace"] == b"1"
    assert headers["__connect.errors.topic"] == b"run.gradients"
    assert headers["__connect.errors.partition"] == b"2"
    assert headers["__connect.errors.offset"] == b"17"
    assert headers["__connect.errors.exception.message"] == b"NaN"
    assert headers["__connect.errors.exception.class.name"] == b"BadRecord"
