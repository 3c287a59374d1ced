"""The outlier guard of rules.md 13."""

from __future__ import annotations

import math

import numpy as np

from consumers.outlier_guard import MAX_IN_A_ROW, OutlierGuard


def warmed(losses: int = 200) -> OutlierGuard:
    guard = OutlierGuard(6.0, losses)
    rng = np.random.default_rng(0)
    assert not any(guard.rejects(float(loss), 1.0) for loss in rng.normal(1.0, 0.1, losses))
    return guard


def test_a_loss_far_above_the_mean_is_rejected_after_the_warm_up_only() -> None:
    assert not OutlierGuard(6.0, 200).rejects(1e9, 1.0)
    guard = warmed()
    assert guard.rejects(3.0, 1.0) and guard.rejected == 1
    assert not guard.rejects(1.2, 1.0)


def test_a_loss_far_below_the_mean_is_no_outlier() -> None:
    assert not warmed().rejects(0.0, 1.0)


def test_rejected_batches_feed_the_averages() -> None:
    guard = warmed()
    mean = guard.mean
    assert guard.rejects(50.0, 1.0) and guard.mean > mean


def test_after_ten_in_a_row_the_next_is_taken() -> None:
    guard = warmed()
    rejected = 0
    loss = 100.0
    while guard.rejects(loss, 1.0):
        rejected += 1
        loss *= 100.0  # always an outlier, whatever the averages have become
    assert rejected == MAX_IN_A_ROW and guard.accepted_after_row == 1


def test_what_is_not_finite_is_always_rejected_and_feeds_nothing() -> None:
    guard = OutlierGuard(0.0, 1)
    assert guard.rejects(math.nan, 1.0) and guard.rejects(1.0, math.inf) and guard.batches == 0
    assert not guard.rejects(1e30, 1.0), "sigma 0 switches outliers off"


def test_its_state_comes_back() -> None:
    guard, fresh = warmed(), OutlierGuard(6.0, 200)
    fresh.restore(guard.state())
    assert fresh.rejects(3.0, 1.0) and fresh.batches == 201
