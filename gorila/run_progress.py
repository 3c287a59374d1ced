"""What is known of a run from its topics alone: a pure fold over records, and the summary made of it."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gorila.messages import Episode, Evaluation, Message, Priorities, ReplayStats, Weights

RECENT = 100
ROUND_TRIPS = 20_000


@dataclass
class RunProgress:
    """Fold records in with `take`; times are milliseconds of the broker's clock."""

    env_steps: int = 0
    samples: int = 0
    batches: int = 0
    updates: int = 0
    loss: float = math.nan
    gradient_norm: float = math.nan
    busy_fraction: dict[str, float] = field(default_factory=dict)
    round_trips_ms: deque[float] = field(default_factory=lambda: deque(maxlen=ROUND_TRIPS))
    new_share: float = math.nan
    replay_waits_for: str = ""
    replay_bytes: int = 0
    episodes: int = 0
    recent_returns: list[float] = field(default_factory=list)
    epsilon: float = math.nan
    evaluation: Evaluation | None = None
    best: Evaluation | None = None
    confirmed: Evaluation | None = None
    solved_at_ms: int = 0
    staleness: dict[int, np.ndarray[Any, Any]] = field(default_factory=dict)
    _splits: dict[str, ReplayStats] = field(default_factory=dict)

    def take(self, message: Message, timestamp_ms: int) -> None:
        """Fold one record in."""
        if isinstance(message, ReplayStats):
            self._take_replay(message)
        elif isinstance(message, Priorities):
            self.updates = max(self.updates, message.version)
            self.loss, self.gradient_norm = message.loss, message.gradient_norm
            self.busy_fraction[message.learner_id] = message.busy_fraction
            if message.round_trip_ms >= 0:
                self.round_trips_ms.append(message.round_trip_ms)
        elif isinstance(message, Episode):
            self._take_episode(message)
        elif isinstance(message, Evaluation):
            self._take_evaluation(message, timestamp_ms)
        elif isinstance(message, Weights):
            self.updates = max(self.updates, message.version)
            self.staleness[message.shard_id] = message.staleness

    def _take_replay(self, stats: ReplayStats) -> None:
        self._splits[stats.split] = stats
        splits = self._splits.values()
        self.env_steps = sum(s.inserts_total for s in splits)
        self.samples = sum(s.samples_total for s in splits)
        self.batches = sum(s.batches_total for s in splits)
        self.replay_bytes = sum(s.memory_bytes for s in splits)
        self.new_share = stats.new_share
        self.replay_waits_for = stats.waiting_for

    def _take_episode(self, episode: Episode) -> None:
        if episode.role != "actor":
            return
        self.episodes += 1
        self.epsilon = episode.epsilon
        self.recent_returns = (self.recent_returns + [episode.episode_return])[-RECENT:]

    def _take_evaluation(self, evaluation: Evaluation, timestamp_ms: int) -> None:
        if evaluation.phase == "confirm":
            self.confirmed = evaluation
        else:
            self.evaluation = evaluation
        if self.best is None or evaluation.return_mean > self.best.return_mean:
            self.best = evaluation
        if evaluation.solved and not self.solved_at_ms:
            self.solved_at_ms = timestamp_ms

    @property
    def solved(self) -> bool:
        """A version was confirmed at or above the threshold."""
        return self.solved_at_ms > 0

    @property
    def episode_return_mean(self) -> float:
        """Mean of the actors' newest 100 episode returns (with exploration); NaN before the first."""
        return float(np.mean(self.recent_returns)) if self.recent_returns else math.nan

    def staleness_percentile(self, percent: float) -> float | None:
        """Updates; over all gradients applied. None before the first."""
        if not self.staleness:
            return None
        width = max(len(h) for h in self.staleness.values())
        total = np.zeros(width)
        for histogram in self.staleness.values():
            total[: len(histogram)] += histogram
        if total.sum() == 0:
            return None
        return float(np.searchsorted(np.cumsum(total), percent / 100 * total.sum()))

    @property
    def round_trip_ms_p50(self) -> float | None:
        """From a gradient's emission to the learner reading weights that include it; over the newest 20,000."""
        return float(np.median(self.round_trips_ms)) if self.round_trips_ms else None

    @property
    def result(self) -> Evaluation | None:
        """The evaluation that is reported: the confirming one, or the newest screening."""
        if self.confirmed is not None and self.confirmed.solved:
            return self.confirmed
        return self.evaluation
