"""The run as Prometheus sees it: the monitor's records as gauges, counters and histograms. Pure: records and figures in, metrics out."""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from gorila.compression import codec
from gorila.config import Config
from gorila.messages import Episode, Evaluation, Message, Priorities, ReplayStats, Weights
from gorila.metrics import Metrics
from gorila.run_follower import Lag
from gorila.run_progress import RunProgress

RECENT = 100
MOST_EPSILONS = 32
"""Exploration rates with a series of their own; a ladder of more lanes shares the last ones."""
KEPT_SNAPSHOTS = 4
F32 = NDArray[np.float32]


class RunMetrics:
    """Feeds the `RUN` declarations of gorila/metric_catalogue.py."""

    def __init__(self, metrics: Metrics, config: Config) -> None:
        self._metrics, self._shards = metrics, config.parameter_server.shards
        self._returns: dict[str, deque[float]] = {}
        self._busy: dict[str, list[float]] = defaultdict(list)
        self._rejected: dict[str, int] = defaultdict(int)
        self._versions: dict[str, int] = {}
        self._staleness: dict[int, NDArray[np.int64]] = {}
        self._snapshots: dict[int, deque[tuple[int, F32]]] = {}
        if config.replay.target_new_share is not None:
            metrics.gauge("replay_new_share_target", config.replay.target_new_share)

    def take(self, message: Message, epsilon_tag: str = "") -> None:
        """One record. `epsilon_tag`: of an actor's episode, its exploration rate as charts name it."""
        if isinstance(message, Episode):
            if message.role == "actor":
                self._take_return(epsilon_tag, message.episode_return)
        elif isinstance(message, Evaluation):
            self._metrics.gauge("evaluation_return", message.return_mean, phase=message.phase)
        elif isinstance(message, Priorities):
            self._take_priorities(message)
        elif isinstance(message, ReplayStats):
            self._take_replay(message)
        elif isinstance(message, Weights) and message.kind == "key":
            self._take_weights(message)

    def _take_return(self, epsilon: str, episode_return: float) -> None:
        if epsilon not in self._returns and len(self._returns) >= MOST_EPSILONS:
            epsilon = "other"
        recent = self._returns.setdefault(epsilon, deque(maxlen=RECENT))
        recent.append(episode_return)
        self._metrics.gauge("return_by_epsilon", float(np.mean(recent)), epsilon=epsilon)

    def _take_priorities(self, priorities: Priorities) -> None:
        metrics, learner = self._metrics, priorities.learner_id
        metrics.gauge("loss", priorities.loss, learner=learner)
        metrics.gauge("gradient_norm", priorities.gradient_norm, learner=learner)
        self._busy[learner].append(priorities.busy_fraction)
        self._versions[learner] = priorities.version
        self._rejected[learner] += priorities.rejected
        metrics.total("rejected_batches_total", self._rejected[learner], learner=learner)
        if priorities.round_trip_ms >= 0:
            metrics.observe("round_trip_seconds", priorities.round_trip_ms / 1000, learner=learner)

    def _take_replay(self, stats: ReplayStats) -> None:
        metrics, split = self._metrics, stats.split
        metrics.gauge("replay_rows", float(stats.sampleable.sum()), split=split)
        metrics.gauge("replay_memory_bytes", stats.memory_bytes, split=split)
        if math.isfinite(stats.new_share):
            metrics.gauge("replay_new_share", stats.new_share, split=split)
        metrics.total("replay_stale_priorities_total", stats.stale_priorities, split=split)

    def _take_weights(self, weights: Weights) -> None:
        metrics, shard = self._metrics, str(weights.shard_id)
        metrics.total("gradients_applied_total", weights.applied, shard=shard)
        dropped = {
            "stale": weights.dropped_stale,
            "duplicate": weights.dropped_duplicate,
            "bad": weights.dropped_bad,
        }
        for why, count in dropped.items():
            metrics.total("gradients_dropped_total", count, shard=shard, why=why)
        metrics.gauge("learning_rate", weights.learning_rate, shard=shard)
        self._take_staleness(weights)
        self._keep(weights)

    def _take_staleness(self, weights: Weights) -> None:
        """The record counts gradients by staleness since its server began: what is new since the last look is observed."""
        now = weights.staleness.astype(np.int64)
        before = self._staleness.get(weights.shard_id, np.zeros(0, np.int64))
        width = max(len(now), len(before))
        new = np.pad(now, (0, width - len(now))) - np.pad(before, (0, width - len(before)))
        if (new < 0).any():  # the server began again
            new = now
        self._staleness[weights.shard_id] = now
        for staleness in np.flatnonzero(new):
            for _ in range(int(new[staleness])):
                self._metrics.observe("staleness_updates", float(staleness), shard=str(weights.shard_id))

    def _keep(self, weights: Weights) -> None:
        """Key frames only: the cosine is an indicator, not worth following deltas."""
        kept = self._snapshots.setdefault(weights.shard_id, deque(maxlen=KEPT_SNAPSHOTS))
        if not kept or weights.version > kept[-1][0]:
            kept.append((weights.version, codec(weights.codec).decode(weights.payload, weights.num_parameters)))

    def show(self, progress: RunProgress, lags: Iterable[Lag], dead_letters: int | None) -> None:
        """What only the passing of time shows; every two seconds."""
        metrics = self._metrics
        metrics.total("run_env_steps_total", progress.env_steps)
        metrics.total("run_updates_total", progress.updates)
        metrics.total("run_samples_total", progress.samples)
        metrics.total("run_batches_total", progress.batches)
        metrics.total("run_episodes_total", progress.episodes)
        if dead_letters is not None:
            metrics.total("run_dead_letters_total", dead_letters)
        for lag in lags:
            for partition, records in lag.partitions.items():
                metrics.gauge("lag_records", records, group=lag.group, topic=lag.topic, partition=str(partition))
        for learner, busy in self._busy.items():
            if busy:
                metrics.gauge("busy_fraction", float(np.mean(busy)), learner=learner)
                busy.clear()
        for learner, version in self._versions.items():
            cosine = self._cosine(version)
            if cosine is not None:
                metrics.gauge("weights_cosine", cosine, learner=learner)

    def _cosine(self, version: int) -> float | None:
        """Of the newest snapshots and those kept whose version is nearest, over all shards. 1 for a learner that keeps up."""
        if len(self._snapshots) < self._shards:
            return None
        dot = newest_square = held_square = 0.0
        for kept in self._snapshots.values():
            newest = kept[-1][1]
            held = min(reversed(kept), key=lambda snapshot: abs(snapshot[0] - version))[1]
            dot += float(np.dot(newest, held))
            newest_square += float(np.dot(newest, newest))
            held_square += float(np.dot(held, held))
        scale = math.sqrt(newest_square * held_square)
        return dot / scale if scale > 0 else None
