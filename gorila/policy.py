"""A trained policy as a file, and a policy from a file: `Policy.load("weights.safetensors").act(observations)`.

The file is safetensors (no pickle): the network's tensors by name, and as metadata the run's configuration and environment facts, so that it
explains itself. Used by the evaluator, `gorila evaluate`, and people.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.torch
import torch
from numpy.typing import NDArray

from gorila.batch_statistics import WARM_ROWS, ActedStatistics, Buffers, load_buffers
from gorila.config import Config
from gorila.environment_facts import EnvironmentFacts
from gorila.environments import Lanes, describe, make_lanes
from gorila.errors import GorilaError, LocalError, UsageError
from gorila.network import QNetwork, build_network, load_flat
from gorila.observations import RecentFrames
from gorila.scores import human_normalised
from gorila.seeds import generator, seed_number
from gorila.settings import canonical_json, validate

FORMAT = "gorila-weights-1"
WEIGHTS_FILE = "weights.safetensors"  # in a run's folder
LONGEST_VERSION = 19  # digits of an int64


def save_weights(
    path: Path,
    flat: NDArray[np.float32],
    version: int,
    config: Config,
    facts: EnvironmentFacts,
    notes: Mapping[str, str] | None = None,
    statistics: tuple[str, Buffers] | None = None,
) -> None:
    """Write a policy file whole or not at all: temporary name, fsync, rename. Raises LocalError: disk full, no permission.

    Args:
        notes: further metadata, such as what an evaluation of these weights came to; `notes_of` reads them.
        statistics: (whose, buffers) for a network with BatchNorm (gorila/batch_statistics.py).
    """
    network = build_network(config, facts)
    load_flat(network, flat)
    whose: dict[str, str] = {}
    if statistics is not None and statistics[1]:
        whose = {"statistics": statistics[0]}
        load_buffers(network, statistics[1])
    tensors = {name: tensor.detach().clone().contiguous() for name, tensor in network.body.state_dict().items()}
    metadata = {
        **(notes or {}),
        **whose,
        "format": FORMAT,
        "version": str(version),
        "config": canonical_json(config),
        "environment": facts.to_json(),
    }
    temporary = path.with_suffix(".tmp")
    try:
        safetensors.torch.save_file(tensors, temporary, metadata)
        with temporary.open("rb") as written:
            os.fsync(written.fileno())
        temporary.replace(path)
    except (OSError, safetensors.SafetensorError) as error:
        raise LocalError(f"cannot write {path}: {error}") from None


def version_of(path: Path) -> int:
    """Global version of the weights in a policy file. Raises UsageError."""
    return int(_metadata(path)["version"])


def notes_of(path: Path) -> dict[str, str]:
    """All metadata of a policy file. Raises UsageError."""
    return _metadata(path)


def _metadata(path: Path | str) -> dict[str, str]:
    try:
        with safetensors.safe_open(str(path), framework="pt") as opened:
            metadata: dict[str, str] = opened.metadata() or {}
    except (OSError, safetensors.SafetensorError) as error:
        raise UsageError(f"{path} is not a weights file: {error}") from None
    if metadata.get("format") != FORMAT or not {"version", "config", "environment"} <= set(metadata):
        raise UsageError(f"{path} is a safetensors file, but not one this product wrote")
    if not metadata["version"].removeprefix("-").isdecimal() or len(metadata["version"]) > LONGEST_VERSION:
        raise UsageError(
            f"{path} cannot be read: its version is {metadata['version'][:LONGEST_VERSION]!r}, not a number"
        )
    return metadata


class Policy:
    """Greedy (or epsilon-greedy) actions from a network and the frames it has seen.

    One Policy drives `lanes` environments; call `act` once a step with the newest observation of each.
    """

    def __init__(
        self, network: QNetwork, config: Config, facts: EnvironmentFacts, version: int = -1, lanes: int = 1
    ) -> None:
        self.network, self.config, self.facts, self.version = network.eval(), config, facts, version
        self._recent = RecentFrames(lanes, facts.observation_shape, np.dtype(facts.observation_dtype), facts.stack)
        self._lanes = lanes
        self._fresh = np.ones(lanes, dtype=np.bool_)
        self.statistics: ActedStatistics | None = None

    @classmethod
    def load(cls, path: str | Path, lanes: int = 1) -> Policy:
        """From a file. Raises UsageError for a path that is not a policy file.

        A network with BatchNorm whose file carries no statistics (weights rebuilt from Kafka alone) keeps those of the states it acts on.
        """
        metadata = _metadata(path)
        with safetensors.safe_open(str(path), framework="pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118 — not a dict
        try:
            config = validate(json.loads(metadata["config"]))
            facts = EnvironmentFacts.from_json(metadata["environment"])
            np.dtype(facts.observation_dtype)
            network = build_network(config, facts)
        except (ValueError, TypeError, RecursionError, RuntimeError) as error:  # torch: RuntimeError for sizes
            raise UsageError(f"{path} cannot be read: {str(error).splitlines()[0]}") from None
        own = network.body.state_dict()
        if {name: tensor.shape for name, tensor in own.items()} != {name: t.shape for name, t in tensors.items()}:
            raise UsageError(f"{path} holds other tensors than its own network has")
        with torch.no_grad():
            for name, tensor in own.items():
                tensor.copy_(tensors[name])
        policy = cls(network, config, facts, int(metadata["version"]), lanes)
        if "statistics" not in metadata and (acted := ActedStatistics(network)):
            policy.statistics = acted
        return policy

    def reset(self) -> None:
        """The next observations are the first of new episodes."""
        self._fresh[:] = True

    def values(self, observations: NDArray[Any], is_first: NDArray[np.bool_] | None = None) -> NDArray[np.float32]:
        """Q values (L, A) of the states that end in these observations (L, ...)."""
        first = self._fresh if is_first is None else self._fresh | is_first
        states = self._recent.push(observations, first)
        self._fresh = np.zeros(self._lanes, dtype=np.bool_)
        with torch.inference_mode():
            values: NDArray[np.float32] = self.network(torch.from_numpy(np.ascontiguousarray(states))).numpy()
        return values

    def act(self, observations: NDArray[Any], is_first: NDArray[np.bool_] | None = None) -> Any:
        """Greedy action: an int for one observation (...), int64 (L,) for observations (L, ...).

        Args:
            is_first: bool (L,), lanes whose episode begins here; after `reset()` all do.
        """
        observations = np.asarray(observations, dtype=self.facts.observation_dtype)
        if observations.shape == self.facts.observation_shape:
            return int(self.values(observations[None], is_first).argmax(axis=1)[0])
        return self.values(observations, is_first).argmax(axis=1)


@dataclass(frozen=True, slots=True)
class PlayedEpisode:
    """One finished evaluation episode."""

    lane: int
    episode_return: float
    steps: int
    terminated: bool


class EvaluationRound:
    """Exactly one episode per lane, from reset to end: no lane counts twice, so short episodes are not over-represented."""

    def __init__(self, policy: Policy, lanes: Lanes, epsilon: float, rng: np.random.Generator) -> None:
        self._policy, self._lanes, self._epsilon, self._rng = policy, lanes, epsilon, rng
        self._observations = lanes.reset()
        self._first = np.ones(lanes.lanes, dtype=np.bool_)
        self._open = np.ones(lanes.lanes, dtype=np.bool_)
        self._returns = np.zeros(lanes.lanes)
        self._steps = np.zeros(lanes.lanes, dtype=np.int64)
        policy.reset()

    def step(self) -> list[PlayedEpisode]:
        """One step of every lane; the episodes that ended with it."""
        actions = self._policy.values(self._observations, self._first).argmax(axis=1)
        if self._epsilon > 0:
            explore = self._rng.random(len(actions)) < self._epsilon
            actions = np.where(explore, self._rng.integers(0, self._lanes.actions, len(actions)), actions)
        taken = self._lanes.step(actions.astype(np.int64))
        self._observations, self._first = taken.observations, taken.is_first
        self._returns += np.where(self._open, taken.reward, 0.0)
        self._steps += self._open
        ended = self._open & (taken.terminated | taken.truncated)
        self._open &= ~ended
        return [
            PlayedEpisode(int(i), float(self._returns[i]), int(self._steps[i]), bool(taken.terminated[i]))
            for i in np.flatnonzero(ended)
        ]

    @property
    def observations(self) -> NDArray[Any]:
        """The newest, (L, ...); valid until the next step."""
        return self._observations

    @property
    def done(self) -> bool:
        """Every lane has finished its episode."""
        return not self._open.any()


def warm(playing: EvaluationRound, lanes: int) -> Iterator[None]:
    """Act until WARM_ROWS frames are in the network's statistics; yields after each step. Episodes go on for ever, and none counts."""
    for _ in range(-(-WARM_ROWS // lanes)):
        playing.step()
        yield


def evaluate_file(path: Path, episodes: int, epsilon: float | None, seed: int) -> dict[str, Any]:
    """Play `episodes` with a policy file; the numbers `gorila evaluate` prints.

    Raises:
        UsageError: the file cannot be read. RunError: the environment that its configuration makes here is not the one it was trained in.
    """
    probe = Policy.load(path)
    probe.facts.refuse_mismatch(describe(probe.config))
    lanes_count = min(episodes, probe.config.evaluator.lanes)
    played: list[PlayedEpisode] = []
    chosen = probe.config.evaluator.epsilon if epsilon is None else epsilon
    rng = generator(seed, "policy")
    if probe.statistics is not None:
        lanes = make_lanes(probe.config, [seed_number(seed, "evaluator", 0, lane) for lane in range(lanes_count)])
        policy = Policy(probe.network, probe.config, probe.facts, probe.version, lanes_count)
        for _ in warm(EvaluationRound(policy, lanes, chosen, generator(seed, "policy", 1)), lanes_count):
            pass
        lanes.close()
        probe.statistics.frozen = True
    round_number = 0
    while len(played) < episodes:
        count = min(lanes_count, episodes - len(played))
        seeds = [seed_number(seed, "evaluator", 1 + round_number, lane) for lane in range(count)]
        lanes = make_lanes(probe.config, seeds, probe.config.evaluator.max_episode_steps)
        playing = EvaluationRound(
            Policy(probe.network, probe.config, probe.facts, probe.version, count), lanes, chosen, rng
        )
        while not playing.done:
            played += playing.step()
        lanes.close()
        round_number += 1
    returns = np.array([episode.episode_return for episode in played])
    try:
        score = human_normalised(probe.config.env.id, float(returns.mean()))
    except GorilaError:
        score = None
    return {
        "weights_version": probe.version,
        "episodes": len(returns),
        "epsilon": chosen,
        "return_mean": round(float(returns.mean()), 3),
        "return_std": round(float(returns.std()), 3),
        "return_min": float(returns.min()),
        "return_max": float(returns.max()),
        "human_normalised_score": round(score.value, 4) if score else None,
        "human_normalised_table": score.table if score else None,
        "human_normalised_protocol": score.protocol if score else None,
    }
