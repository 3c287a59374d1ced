"""What is known of a run from its small topics."""

from __future__ import annotations

import math

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from gorila.messages import Episode, Evaluation, Priorities, ReplayStats, Weights
from gorila.run_progress import RunProgress

I32, I64, F32, F64 = (lambda *v, t=t: np.array(v, t) for t in (np.int32, np.int64, np.float32, np.float64))


def stats(split: str, inserts: int, samples: int, waiting_for: str = "") -> ReplayStats:
    return ReplayStats(
        split, 0, ["actor-0"], I64(5), F64(1.0), I64(inserts), inserts, samples, 3, 0.1, 0, waiting_for, 9
    )


def episode(value: float, role: str = "actor", epsilon: float = 0.5) -> Episode:
    return Episode(role, f"{role}-0", 0, value, 10, True, epsilon, 7, 0, 0)


def evaluation(phase: str, mean: float, version: int = 1, solved: bool = False) -> Evaluation:
    return Evaluation("evaluator-0", version, phase, 20, mean, 1.0, mean, mean, 0.0, solved, 0)


def priorities(version: int, round_trip_ms: float = -1.0) -> Priorities:
    return Priorities(
        "learner-0", 0, 0, version, I32(0), I64(0), I32(0), F32(1.0), 0.25, 2.0, False, 0.9, round_trip_ms
    )


def weights(version: int, shard: int = 0, staleness: list[int] | None = None) -> Weights:
    counts = I32(*(staleness or []))
    return Weights(shard, version, "key", 1, -1, -1, 0, 0, 0, "fp32", b"0000", 0, 0, version, 0, 0, 0, counts, 1e-3)


def test_totals_are_over_the_newest_word_of_each_split() -> None:
    progress = RunProgress()
    for message in (stats("a", 10, 80), stats("b", 5, 40), stats("a", 20, 160, "learner: 17 records behind")):
        progress.take(message, 0)
    assert (progress.env_steps, progress.samples, progress.batches, progress.replay_bytes) == (25, 200, 6, 18)
    assert progress.replay_waits_for == "learner: 17 records behind"


def test_updates_never_go_back_when_topics_are_read_out_of_order() -> None:
    progress = RunProgress()
    for message in (priorities(9), weights(12), priorities(10)):
        progress.take(message, 0)
    assert progress.updates == 12
    assert (progress.loss, progress.gradient_norm, progress.busy_fraction) == (0.25, 2.0, {"learner-0": 0.9})


def test_exploring_returns_are_the_actors_newest_hundred() -> None:
    progress = RunProgress()
    assert math.isnan(progress.episode_return_mean)
    progress.take(episode(1e9, "evaluator"), 0)
    for value in range(150):
        progress.take(episode(value), 0)
    assert (progress.episodes, progress.episode_return_mean) == (150, np.mean(range(50, 150)))


@given(st.lists(st.integers(0, 9), min_size=1, max_size=60), st.integers(1, 100))
def test_staleness_percentiles_are_those_of_all_gradients_of_all_shards(values: list[int], percent: int) -> None:
    progress = RunProgress()
    for shard in (0, 1):
        of_shard = values[shard::2]
        progress.take(weights(1, shard, np.bincount(of_shard).tolist() if of_shard else None), 0)
    assert progress.staleness_percentile(percent) == np.percentile(values, percent, method="inverted_cdf")


def test_staleness_before_the_first_gradient_is_none() -> None:
    progress = RunProgress()
    assert progress.staleness_percentile(50) is None
    progress.take(weights(0), 0)
    assert progress.staleness_percentile(50) is None


def test_the_result_is_the_newest_screening_until_a_version_is_confirmed() -> None:
    progress = RunProgress()
    assert progress.result is None
    low, high, failed = evaluation("screen", 100), evaluation("screen", 480, 2), evaluation("confirm", 470, 2)
    for message in (low, high, failed):
        progress.take(message, 1000)
    assert not progress.solved and progress.result is high
    confirmed = evaluation("confirm", 490, 3, solved=True)
    progress.take(confirmed, 2000)
    progress.take(evaluation("screen", 20, 4), 3000)
    assert progress.solved and progress.solved_at_ms == 2000 and progress.result is confirmed


def test_the_round_trip_is_the_median_of_what_was_measured() -> None:
    progress = RunProgress()
    assert progress.round_trip_ms_p50 is None
    for value in (-1.0, 3.0, 5.0, 100.0):
        progress.take(priorities(1, value), 0)
    assert progress.round_trip_ms_p50 == 5.0
