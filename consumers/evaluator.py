"""Measures published weights: a screening over a few episodes, and for a version at or above the threshold a confirmation over fresh ones.

Rules of this file (rules.md 16):
1. Both measure one version's weights, held fixed; the confirming mean is what a run reports.
2. Returns are raw and of full games; exploration is the evaluator's own.
3. Seeds are the evaluator's domain, new for every round and every start: no episode is ever played twice, none is a training episode.
4. BatchNorm's statistics are of at least 1,000 frames acted on with the version that is measured, in rounds that do not count, then held fixed (rules.md 15).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gorila.batch_statistics import ActedStatistics, Buffers, buffers_of
from gorila.config import Config
from gorila.environment_facts import EnvironmentFacts
from gorila.environments import Lanes
from gorila.messages import Episode, Evaluation
from gorila.network import build_network, load_flat
from gorila.policy import EvaluationRound, Policy, warm
from gorila.processor import Outgoing
from gorila.seeds import generator, seed_number

MakeLanes = Callable[[list[int]], Lanes]


@dataclass(frozen=True)
class Verdict:
    """What evaluating one version came to."""

    screening: Evaluation
    confirmation: Evaluation | None

    @property
    def solved(self) -> bool:
        """Screened and confirmed."""
        return self.confirmation is not None and self.confirmation.solved


class EvaluatorCore:
    """The role without Kafka and clock: weights in, records out, one environment step at a time so that a stop is never waited for.

    Args:
        epoch: of the process, milliseconds; a restarted evaluator must not play its first episodes again (rules.md 6).
    """

    def __init__(
        self, config: Config, facts: EnvironmentFacts, evaluator_id: str, make_lanes: MakeLanes, epoch: int = 0
    ) -> None:
        self._config, self._facts, self._id, self._make_lanes = config, facts, evaluator_id, make_lanes
        self._network = build_network(config, facts).eval()
        self._statistics = ActedStatistics(self._network)
        self._round = 0
        self._epoch = epoch
        self._rng = generator(config.run.seed, "policy", 1_000_000, epoch=epoch)
        self.verdict: Verdict | None = None

    def evaluate(self, version: int, flat: NDArray[np.float32], now_ms: Callable[[], int]) -> Iterator[list[Outgoing]]:
        """Yields after every environment step; sets `verdict` at the end. Dropping the iterator abandons the evaluation."""
        load_flat(self._network, flat)
        settings = self._config.evaluator
        self.verdict = None
        returns: list[float] = []
        if self._statistics:
            yield from self._warm(version)
        yield from self._play(version, settings.episodes, returns, now_ms)
        screening = self._evaluation(version, "screen", returns, now_ms())
        yield [Outgoing("episodes", screening, key=self._id.encode(), partition=0)]
        confirmation = None
        if settings.threshold is not None and screening.return_mean >= settings.threshold:
            returns = []
            yield from self._play(version, settings.confirm_episodes, returns, now_ms)
            confirmation = self._evaluation(version, "confirm", returns, now_ms())
            yield [Outgoing("episodes", confirmation, key=self._id.encode(), partition=0)]
        self.verdict = Verdict(screening, confirmation)

    def buffers(self) -> Buffers:
        """The network's statistics as the last version was measured with; empty without BatchNorm."""
        return buffers_of(self._network)

    def _warm(self, version: int) -> Iterator[list[Outgoing]]:
        """Acts until WARM_ROWS frames are in the statistics; episodes go on for ever here, and none is told of."""
        self._statistics.restart()
        self._statistics.frozen = False
        policy, lanes = self._lanes_of(version, self._config.evaluator.lanes)
        playing = EvaluationRound(policy, lanes, self._config.evaluator.epsilon, self._rng)
        for _ in warm(playing, lanes.lanes):
            yield []
        lanes.close()
        self._statistics.frozen = True

    def _lanes_of(self, version: int, count: int) -> tuple[Policy, Lanes]:
        """A policy and environments whose seeds nobody has had."""
        self._round += 1
        seeds = [
            seed_number(self._config.run.seed, "evaluator", self._round, lane, self._epoch) for lane in range(count)
        ]
        return Policy(self._network, self._config, self._facts, version, count), self._make_lanes(seeds)

    def _play(
        self, version: int, episodes: int, returns: list[float], now_ms: Callable[[], int]
    ) -> Iterator[list[Outgoing]]:
        while len(returns) < episodes:
            policy, lanes = self._lanes_of(version, min(self._config.evaluator.lanes, episodes - len(returns)))
            playing = EvaluationRound(policy, lanes, self._config.evaluator.epsilon, self._rng)
            while not playing.done:
                ended = playing.step()
                returns += [episode.episode_return for episode in ended]
                yield [
                    Outgoing(
                        "episodes",
                        Episode(
                            "evaluator",
                            self._id,
                            episode.lane,
                            episode.episode_return,
                            episode.steps,
                            episode.terminated,
                            self._config.evaluator.epsilon,
                            version,
                            0,
                            now_ms(),
                        ),
                        key=self._id.encode(),
                        partition=0,
                    )
                    for episode in ended
                ]
            lanes.close()

    def _evaluation(self, version: int, phase: str, returns: list[float], time_ms: int) -> Evaluation:
        values = np.array(returns)
        threshold = self._config.evaluator.threshold
        mean = float(values.mean())
        return Evaluation(
            self._id,
            version,
            phase,
            len(returns),
            mean,
            float(values.std()),
            float(values.min()),
            float(values.max()),
            self._config.evaluator.epsilon,
            phase == "confirm" and threshold is not None and mean >= threshold,
            time_ms,
        )
