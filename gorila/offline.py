"""Training from a recording: what is replayed, and what refuses it before anything is made (rules.md 20-21).

The replay of a recording is a function of (recording, configuration, seed, number of batches): nothing learned is fed back, no clock and no epoch
is in a batch. So a killed replay draws the same batches again and goes on behind those that the log has.
"""

from __future__ import annotations

import importlib
import json
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gorila.codec import Schemas
from gorila.config import Config
from gorila.environment_facts import EnvironmentFacts
from gorila.errors import ConfigError, UsageError
from gorila.kafka import Cluster
from gorila.recording import Recording, parse_source
from gorila.run_record import check_name, create_run, find_run
from gorila.settings import environment_values, parse_sets, validate

DEFAULT_UPDATES = 10_000
_REWARD = "reward_transform"


@dataclass(frozen=True, slots=True)
class OfflineReplay:
    """What `gorila replay --from` was asked for.

    Attributes:
        source: kafka:RUN[@START..END] or parquet:DIR.
        updates: learner batches to draw.
        recorded_priorities: whether the recorded learner's priority updates are applied; otherwise rows keep what the actors' (or the policy file's)
            Q values give them.
        reprioritise: policy file whose Q values replace the actors'; empty: none.
    """

    source: str
    updates: int
    recorded_priorities: bool = True
    reprioritise: str = ""

    @classmethod
    def asked(
        cls, source: str, updates: int, recorded_priorities: bool | None = None, reprioritise: str = ""
    ) -> OfflineReplay:
        """From a command's options; `recorded_priorities` None: yes, unless a policy file is to make them anew. Raises UsageError."""
        parse_source(source)
        if updates < 1:
            raise UsageError(f"--updates {updates} is not allowed: 1 or more, how many learner batches are drawn")
        if recorded_priorities and reprioritise:
            raise UsageError("--recorded-priorities and --reprioritise exclude each other: one would undo the other")
        if reprioritise and not os.path.isfile(reprioritise):
            raise UsageError(f"--reprioritise {reprioritise}: there is no such file")
        recorded = not reprioritise if recorded_priorities is None else recorded_priorities
        return cls(source, updates, recorded, reprioritise)

    def words(self) -> list[str]:
        """As options of `gorila replay`."""
        words = ["--from", self.source, "--updates", str(self.updates)]
        if self.reprioritise:
            return [*words, "--reprioritise", self.reprioritise]
        return [*words, "--recorded-priorities" if self.recorded_priorities else "--actor-priorities"]

    def open(self, cluster: Callable[[], Cluster]) -> Recording:
        """Raises what gorila.recording raises: one clear line each."""
        return parse_source(self.source).open(cluster)

    def examine(self, cluster: Cluster, config: Config, facts: EnvironmentFacts) -> list[str]:
        """Whether it can be read at all, and fits: before anything is made. Raises what `open` and `check` raise."""
        recording = self.open(lambda: cluster)
        try:
            return self.check(recording, config, facts)
        finally:
            recording.close()

    def check(self, recording: Recording, config: Config, facts: EnvironmentFacts) -> list[str]:
        """Whether a run may learn from a recording; returns warnings.

        Raises:
            RunError: the environments differ, naming the setting.
            ConfigError: rewards are transformed otherwise than when the recorded Q values were learned, and nothing makes them anew.
        """
        _without_reward(recording.facts).refuse_mismatch(_without_reward(facts))
        theirs, ours = recording.config.env.reward_transform, config.env.reward_transform
        if theirs != ours and not self.reprioritise:
            raise ConfigError(
                "env.reward_transform",
                ours,
                f"the recording's Q values, and so its priorities, are of {theirs!r}; --reprioritise WEIGHTS makes them anew",
            )
        return [*late_start(recording, config), *_holes(recording)]


def offline_training(
    config: Config, source: str, recorded_priorities: bool | None, reprioritise: str
) -> tuple[OfflineReplay, list[str]]:
    """(what is replayed, further --set strings) of `gorila train --offline`. Raises UsageError, ConfigError."""
    if config.run.synchronous:
        raise ConfigError("run.synchronous", True, "training from a recording has no actor to be in step with")
    if config.run.max_env_steps:
        raise ConfigError(
            "run.max_env_steps", config.run.max_env_steps, "0: there are no environment steps, give --updates"
        )
    updates = config.run.max_updates or DEFAULT_UPDATES
    offline = OfflineReplay.asked(source, updates, recorded_priorities, reprioritise)
    return offline, [f"run.max_updates={updates}"]


def late_start(recording: Recording, config: Config) -> list[str]:
    """A warning when the recording does not begin where the run began: a policy learned off such data alone diverges (rules.md 21)."""
    late = {p: span.first for p, span in recording.spans("transitions").items() if not span.empty and span.first > 0}
    if not late:
        return []
    partition, first = next(iter(late.items()))
    weight = config.learner.conservative_weight
    advice = (
        f"learner.conservative_weight is {weight:g}"
        if weight
        else "--set learner.conservative_weight=0.5 is recommended, it is 0"
    )
    return [
        f"the source starts late (partition {partition} at offset {first}): without the early exploration Q values may diverge; {advice}"
    ]


def _holes(recording: Recording) -> list[str]:
    holes = [hole for hole in recording.missing if hole.topic == "transitions"]
    if not holes:
        return []
    first = holes[0]
    return [
        f"the recording has {len(holes)} holes, the first at offsets {first.first} to {first.end - 1} of partition {first.partition}: {first.reason}"
    ]


def _without_reward(facts: EnvironmentFacts) -> EnvironmentFacts:
    return replace(facts, settings={key: value for key, value in facts.settings.items() if key != _REWARD})


def ensure_run(cluster: Cluster, name: str, offline: OfflineReplay, sets: Sequence[str]) -> bool:
    """Make the run that is to learn, configured as the recorded one with `sets` over it, unless it is there. Returns whether it was made.

    Everything that can be refused is refused before the first topic exists. Raises UsageError, ConfigError, RunError, BrokerError.
    """
    check_name(name)
    if find_run(cluster, name, Schemas()) is not None:
        return False
    recording = offline.open(lambda: cluster)
    try:
        config = offline_config(recording, offline, sets)
        facts: EnvironmentFacts = importlib.import_module("gorila.environments").describe(config)
        offline.check(recording, config, facts)
        weights = importlib.import_module("gorila.network").initial_weights(config, facts)
    finally:
        recording.close()
    return create_run(cluster, name, config, facts, weights)


def offline_config(recording: Recording, offline: OfflineReplay, sets: Sequence[str]) -> Config:
    """The recorded run's configuration as one of a run without actors. Raises UsageError, ConfigError."""
    tree: dict[str, Any] = json.loads(recording.config.model_dump_json())
    tree["run"] |= {"synchronous": False, "max_env_steps": 0, "max_updates": offline.updates}
    for layer in (environment_values(os.environ), parse_sets(sets)):
        for key, value in layer.items():
            section, _, field = key.partition(".")
            tree[section][field] = value
    return validate(tree)
