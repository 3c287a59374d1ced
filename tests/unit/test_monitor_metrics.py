"""What the monitor exports of a run, from the records it reads."""

from __future__ import annotations

import zlib

import numpy as np
import pytest

from consumers.monitor_metrics import MOST_EPSILONS, RunMetrics
from gorila.messages import Episode, Priorities, Weights
from gorila.metrics import Metrics
from gorila.run_follower import Lag
from gorila.run_progress import RunProgress
from gorila.settings import load_config


class Room:
    """RunMetrics of a run with `shards` shards."""

    def __init__(self, *sets: str) -> None:
        self.metrics = Metrics("monitor", "r", "monitor-0")
        self.run = RunMetrics(self.metrics, load_config("cartpole", sets, {}))

    def weights(self, version: int, values: list[float], staleness: list[int] = [], shard: int = 0) -> None:  # noqa: B006
        payload = np.array(values, np.float32).tobytes()
        self.run.take(
            Weights(
                shard_id=shard,
                version=version,
                kind="key",
                num_parameters=len(values),
                base_version=-1,
                key_offset=-1,
                target_version=0,
                target_offset=0,
                gradient_offset=version,
                codec="fp32",
                payload=payload,
                payload_hash=zlib.crc32(payload),
                state_hash=0,
                applied=version,
                dropped_stale=2,
                dropped_duplicate=0,
                dropped_bad=0,
                staleness=np.array(staleness, np.int32),
                learning_rate=0.5,
            )
        )

    def learned(self, version: int, busy: float = 0.5, learner: str = "learner-0", rejected: bool = False) -> None:
        empty = np.zeros(0, np.int32)
        self.run.take(
            Priorities(
                learner_id=learner,
                batch_partition=0,
                batch_offset=version,
                version=version,
                partition=empty,
                offset=empty.astype(np.int64),
                row=empty,
                td_error=empty.astype(np.float32),
                loss=1.5,
                gradient_norm=2.5,
                rejected=rejected,
                busy_fraction=busy,
                round_trip_ms=4.0,
            )
        )

    def returned(self, value: float, epsilon: str) -> None:
        self.run.take(Episode("actor", "actor-0", 0, value, 10, True, 0.1, 1, 10, 0), epsilon)

    def show(self, *lags: Lag, dead_letters: int | None = 0) -> None:
        self.run.show(RunProgress(), lags, dead_letters)


def test_staleness_is_observed_once_for_each_gradient_also_when_the_server_begins_again() -> None:
    room = Room()
    room.weights(3, [1.0], [2, 1])
    room.weights(3, [1.0], [2, 1])
    room.weights(6, [1.0], [2, 3, 0, 1])
    assert room.metrics.value("staleness_updates", shard="0") == 6
    room.weights(8, [1.0], [1, 1])
    assert room.metrics.value("staleness_updates", shard="0") == 8
    assert room.metrics.value("gradients_applied_total", shard="0") == 8
    assert room.metrics.value("gradients_dropped_total", shard="0", why="stale") == 2


def test_a_learner_that_keeps_up_has_cosine_1_and_one_that_is_behind_less() -> None:
    room = Room("parameter_server.shards=2")
    room.learned(20, learner="quick")
    room.learned(10, learner="slow")
    room.weights(10, [1.0, 0.0])
    room.show()
    assert room.metrics.value("weights_cosine", learner="quick") == 0  # a shard is unknown: nothing is said
    room.weights(10, [0.0, 1.0], shard=1)
    room.weights(20, [0.0, 1.0])
    room.weights(20, [0.0, 1.0], shard=1)
    room.show()
    assert room.metrics.value("weights_cosine", learner="quick") == pytest.approx(1.0)
    assert room.metrics.value("weights_cosine", learner="slow") == pytest.approx(0.5)


def test_busy_is_the_mean_since_the_last_look_and_lag_is_shown_by_partition() -> None:
    room = Room()
    for busy in (0.2, 0.6):
        room.learned(1, busy)
    room.learned(2, 1.0, "learner-1", rejected=True)
    room.show(Lag("replay", 7, "transitions", {0: 3, 1: 4}), dead_letters=2)
    assert room.metrics.value("busy_fraction", learner="learner-0") == pytest.approx(0.4)
    room.learned(3, 0.9)
    room.show(dead_letters=None)
    assert room.metrics.value("busy_fraction", learner="learner-0") == pytest.approx(0.9)
    assert room.metrics.value("lag_records", group="replay", topic="transitions", partition="1") == 4
    assert room.metrics.value("run_dead_letters_total") == 2
    assert room.metrics.value("rejected_batches_total", learner="learner-1") == 1
    assert room.metrics.value("round_trip_seconds", learner="learner-0") == 3


def test_returns_are_means_by_exploration_rate_and_a_long_ladder_does_not_make_a_series_a_rung() -> None:
    room = Room()
    for value in (1.0, 3.0):
        room.returned(value, "0.1")
    assert room.metrics.value("return_by_epsilon", epsilon="0.1") == 2.0
    for rung in range(2 * MOST_EPSILONS):
        room.returned(float(rung), f"rung {rung}")
    page = room.metrics.page().decode()
    assert page.count("gorila_return_by_epsilon{") == MOST_EPSILONS + 1
    assert room.metrics.value("return_by_epsilon", epsilon="other") > 0


def test_the_target_of_new_rows_is_a_series_only_where_the_run_has_one() -> None:
    assert b"replay_new_share_target{" not in Room().metrics.page()
    assert b"replay_new_share_target{" in Room("replay.target_new_share=0.8").metrics.page()
