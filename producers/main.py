"""The actor as a service, driven by gorila/source_loop.py.

Newest weights are looked for at most every `actor.refresh_s` and never waited for. The actor does not step while a record of its own is held
back because replay is too far behind, faster than `actor.max_steps_per_s`, or once it has taken its share of `run.max_env_steps`. It commits
nothing and remembers nothing.
"""

from __future__ import annotations

import math
import time
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from gorila.config import Config
from gorila.errors import RunError
from gorila.metrics import Metrics
from gorila.processor import Outgoing
from gorila.rounds import Rounds
from gorila.seeds import generator, seed_number
from producers.actor import ActorCore

if TYPE_CHECKING:
    from gorila.environment_facts import EnvironmentFacts
    from gorila.lanes import Lanes
    from gorila.service import Service

UNKNOWN_S = 0.02  # between looks for the very first weights
PACE_DEBT_S = 0.1  # a pause is not made up for by a burst longer than this
SHOW_S = 1.0


class View(Protocol):
    """Of gorila.weights.WeightsView, what an actor needs."""

    @property
    def version(self) -> int: ...
    def flat(self) -> NDArray[np.float32]: ...


class Follower(Protocol):
    """Of gorila.weights_sampler.WeightsSampler, what an actor needs."""

    @property
    def view(self) -> View: ...
    def poll(self, timeout_s: float = ...) -> bool: ...


class ActorSource:
    """What gorila.source_loop.SourceLoop drives: an ActorCore with its weights, its pace and its limit.

    Args:
        config: the run's.
        core: see producers/actor.py.
        follower: the newest weights.
        metrics: of the process.
    """

    def __init__(self, config: Config, core: ActorCore, follower: Follower, metrics: Metrics) -> None:
        self.core, self._follower, self._metrics = core, follower, metrics
        self._steps_limit = math.ceil(config.run.max_env_steps / config.actor.count) or math.inf
        self._step_s = config.actor.lanes / config.actor.max_steps_per_s if config.actor.max_steps_per_s else 0.0
        self._refresh_s = config.actor.refresh_s
        self._rounds = Rounds.of(config) if config.run.synchronous else None
        self._block_steps, self._steps = config.actor.block_steps, 0
        self._refresh_due_s = self._step_due_s = self._show_due_s = -math.inf

    def pause_s(self, now_s: float) -> float:
        """Until the pace allows a step; inf once this actor's share of `run.max_env_steps` is taken."""
        if self.core.version < 0 or self._round_waits():
            return UNKNOWN_S
        rounds_over = self._rounds is not None and 0 < self._rounds.max_updates <= self.core.version
        if rounds_over or self.core.steps_taken >= self._steps_limit:
            return math.inf
        return max(0.0, self._step_due_s - now_s)

    def step(self, now_s: float) -> list[Outgoing]:
        """Newest weights when due, then one row in every lane."""
        out = [] if self._rounds else self._refresh(now_s)
        self._steps += 1
        self._step_due_s = max(self._step_due_s, now_s - PACE_DEBT_S) + self._step_s
        out += self.core.step(now_s)
        return out

    def tick(self, now_s: float) -> list[Outgoing]:
        """Not stepping: weights still come, old blocks still go; at the limit everything goes."""
        out = self._refresh(now_s)
        return out + (self.core.cut() if self.core.steps_taken >= self._steps_limit else self.core.tick(now_s))

    def finish(self) -> list[Outgoing]:
        """Blocks as they are."""
        return self.core.cut()

    def waiting_for(self) -> str:
        """Before the first weights, and between synchronous rounds: for the parameter servers."""
        if self.core.version < 0:
            return "parameter-server: no weights published yet"
        return f"learner: the round ends at version {self._round_version()}" if self._round_waits() else ""

    def _round_version(self) -> int:
        return self._rounds.updates_after(self._steps // self._block_steps) if self._rounds else 0

    def _round_waits(self) -> bool:
        """Between two synchronous rounds, until the weights include all of the rounds before (gorila/rounds.py)."""
        return self._steps % self._block_steps == 0 and self.core.version < self._round_version()

    def _refresh(self, now_s: float) -> list[Outgoing]:
        if now_s < self._refresh_due_s or (self._rounds and self._steps % self._block_steps):
            return []
        if now_s >= self._show_due_s:
            self._show_due_s = now_s + SHOW_S
            self._metrics.gauge("env_steps", self.core.steps_taken)
            self._metrics.gauge("behaviour_version", self.core.version)
            self._metrics.gauge("epsilon", self.core.epsilon_mean)
        changed = self._follower.poll(0.0)
        view = self._follower.view
        self._refresh_due_s = now_s + (self._refresh_s if view.version >= 0 and not self._rounds else 0.0)
        return self.core.use_weights(view.flat(), view.version) if changed and view.version > self.core.version else []


def refuse_other_environment(facts: EnvironmentFacts, lanes: Lanes) -> None:
    """Raises RunError when this machine's environment is not the one the run was made with."""
    here = {
        "observation shape": (lanes.observation_shape, facts.observation_shape),
        "observation dtype": (lanes.observation_dtype.name, facts.observation_dtype),
        "number of actions": (lanes.actions, facts.actions),
    }
    for what, (have, wanted) in here.items():
        if have != wanted:
            raise RunError(f"{facts.id} has {what} {have!r} on this machine, the run was made with {wanted!r}")


def make_core(service: Service, epoch: int, wall_ms_at_zero: int = 0) -> ActorCore:
    """The actor of `service.index` with real environments and network. Raises ConfigError, LocalError, RunError."""
    from gorila.environments import make_lanes
    from gorila.network import build_network
    from producers.policy import EpsilonGreedy

    config, facts, index = service.config, service.facts, service.index
    if index >= config.actor.count:
        raise RunError(f"actor {index} does not exist: the run has actor.count = {config.actor.count}")
    seed = config.run.seed
    lanes = make_lanes(
        config, [seed_number(seed, "environment", index, lane, epoch) for lane in range(config.actor.lanes)]
    )
    refuse_other_environment(facts, lanes)
    policy = EpsilonGreedy(build_network(config, facts), facts.actions, generator(seed, "policy", index, 0, epoch))
    by_time = not config.run.synchronous
    return ActorCore(config.actor, index, service.name, epoch, lanes, facts.stack, policy, wall_ms_at_zero, by_time)


def run_actor(service: Service) -> None:
    """Entry point of `gorila actor`. Raises what `make_core` and `SourceLoop.run` raise."""
    from gorila.flow import LagGate
    from gorila.source_loop import SourceLoop
    from gorila.topics import group_name
    from gorila.weights_sampler import WeightsSampler

    now_ms = time.time_ns() // 1_000_000
    epoch = 0 if service.config.run.synchronous else now_ms
    core = make_core(service, epoch, now_ms - int(time.monotonic() * 1000))
    gate = LagGate(
        service.cluster,
        group_name(service.run, "replay"),
        service.topic("transitions"),
        [service.index],
        service.config.actor.max_lag_records,
    )
    service.log.info("actor.start", epoch=epoch, lanes=service.config.actor.lanes, environment=service.facts.id)
    follower = WeightsSampler(service, 0.0 if service.config.run.synchronous else service.config.actor.refresh_s)
    try:
        source = ActorSource(service.config, core, follower, service.metrics)
        SourceLoop(service, source, gates={"transitions": gate}).run()
    finally:
        follower.close()
