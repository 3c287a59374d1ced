"""The one rate rule: who waits, and that somebody never does."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipelines.rates import SamplesPerInsert


def test_the_error_is_inserts_times_ratio_less_samples() -> None:
    rates = SamplesPerInsert(8.0, 10, 1000.0)
    rates.inserted(20)
    rates.sampled(32)
    assert rates.error == 20 * 8 - 32


def test_a_batch_is_drawn_only_if_the_error_stays_at_or_above_zero() -> None:
    rates = SamplesPerInsert(1.0, 1, 1000.0)
    rates.inserted(31)
    assert not rates.may_sample(31, 32)
    rates.inserted(1)
    assert rates.may_sample(32, 32)
    rates.sampled(32)
    assert rates.error == 0.0


def test_below_the_minimum_size_only_sampling_waits() -> None:
    rates = SamplesPerInsert(100.0, 50, 64.0)
    rates.inserted(49)
    assert rates.error > rates.max_error_rows
    assert not rates.may_sample(49, 32)
    assert rates.wants_inserts(49)
    assert rates.may_sample(50, 32)
    assert not rates.wants_inserts(50)


def test_an_empty_memory_is_never_sampled_and_always_wants_rows() -> None:
    rates = SamplesPerInsert(8.0, 0, 1.0)
    rates.inserted(100)
    assert not rates.may_sample(0, 1)
    assert rates.wants_inserts(0)


@settings(deadline=None)
@given(
    ratio=st.sampled_from([0.1, 1.0, 8.0, 32.0]),
    batch=st.integers(1, 512),
    block=st.integers(1, 256),
    extra=st.floats(0, 1e4),
)
def test_reading_and_drawing_never_wait_for_each_other(ratio: float, batch: int, block: int, extra: float) -> None:
    """Case 20: whatever the ratio and sizes, one of the two may go on, and the samples drawn approach inserts times ratio."""
    rates = SamplesPerInsert(ratio, 10, 2 * batch + extra)
    inserts = samples = 0
    for _ in range(400):
        if rates.may_sample(inserts, batch):
            rates.sampled(batch)
            samples += batch
        else:
            assert rates.wants_inserts(inserts)
            rates.inserted(block)
            inserts += block
    assert 0 <= inserts * ratio - samples <= max(batch, block * ratio, 10 * ratio) + batch


def test_totals_survive_a_restart_exactly() -> None:
    before, after = SamplesPerInsert(4.0, 1, 64.0), SamplesPerInsert(4.0, 1, 64.0)
    before.inserted(1000)
    before.sampled(3968)
    after.restore(1000, 3968)
    assert after.error == before.error == 32.0


def test_shares_of_an_insert_add_up() -> None:
    splits = [SamplesPerInsert(8.0, 1, 64.0) for _ in range(3)]
    for split, share in zip(splits, (0.5, 0.3, 0.2), strict=True):
        split.inserted(100, share)
    assert sum(split.error for split in splits) == pytest.approx(800.0)


@pytest.mark.parametrize(("samples", "kept"), [(0, 64.0), (3990, 10.0), (9000, 0.0)])
def test_totals_restored_as_if_alone_are_bounded_once_others_appear(samples: int, kept: float) -> None:
    rates = SamplesPerInsert(4.0, 1, 64.0)
    rates.restore(1000, samples)
    rates.clamp()
    assert rates.error == kept
