"""The actor as a service: the runtime's twin without a poll.

One turn: newest weights (at most every `actor.refresh_s`, never waited for) → held records released → one step → produce. Nothing is
committed: an actor reads no offsets and remembers nothing. It does not step while a record of its own is held back because replay is too
far behind, beyond `actor.max_steps_per_s`, or once it has taken its share of `run.max_env_steps`.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Protocol

import numpy as np
from numpy.typing import NDArray

from gorila.emission import Emission
from gorila.errors import RunError
from gorila.metrics import Metrics
from gorila.ports import Gate, ServicePort
from gorila.processor import Outgoing
from gorila.seeds import generator, seed_number
from gorila.waiting import WaitLog
from producers.actor import ActorCore

if TYPE_CHECKING:
    from gorila.environment_facts import EnvironmentFacts
    from gorila.lanes import Lanes
    from gorila.service import Service

IDLE_S = 0.02
PACE_DEBT_S = 0.1  # a pause is not made up for by a burst longer than this
SHOW_S = 1.0
STOP_FLUSH_S = 3.0


class View(Protocol):
    """Of gorila.weights.WeightsView, what an actor needs."""

    @property
    def version(self) -> int: ...
    def flat(self) -> NDArray[np.float32]: ...


class Follower(Protocol):
    """Of gorila.weights_follower.WeightsFollower, what an actor needs."""

    @property
    def view(self) -> View: ...
    def poll(self, timeout_s: float = ...) -> bool: ...
    def close(self) -> None: ...


class ActorLoop:
    """Runs one ActorCore until `service.stop`.

    Args:
        follower: the newest weights.
        gates: by logical topic; `transitions` waits for replay.
        clock: seconds, monotonic; tests move it by hand.
    """

    def __init__(
        self,
        service: ServicePort,
        core: ActorCore,
        follower: Follower,
        gates: Mapping[str, Gate],
        metrics: Metrics | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.service, self.core, self.follower, self._clock = service, core, follower, clock
        self.metrics = metrics or Metrics(service.role, service.run, service.name)
        self.emission = Emission(
            service.cluster.producer(), service.schemas, service.topic, gates, lambda *_: None, self.metrics
        )
        config = service.config
        self._waits = WaitLog(service.log, self.metrics)
        self._steps_limit = math.ceil(config.run.max_env_steps / config.actor.count) or math.inf
        self._step_s = config.actor.lanes / config.actor.max_steps_per_s if config.actor.max_steps_per_s else 0.0
        self._refresh_s = config.actor.refresh_s
        self._refresh_due_s = self._step_due_s = self._show_due_s = -math.inf
        self._finished = False

    def run(self) -> None:
        """Turns until `service.stop`; then flushes and closes within 5 s. Raises BrokerError, RecordTooLarge."""
        try:
            while not self.service.stop.is_set():
                self.turn()
            self.drain()
        finally:
            self.follower.close()
            self.emission.close(0.2)

    def turn(self) -> None:
        """At most one step. Waits up to IDLE_S when there is none to take."""
        now_s, emission, core = self._clock(), self.emission, self.core
        unknown = core.version < 0
        if unknown or now_s >= self._refresh_due_s:
            self._refresh_due_s = now_s + self._refresh_s
            if self.follower.poll(0.0):
                view = self.follower.view
                emission.emit(core.use_weights(view.flat(), view.version))
        emission.serve()
        emission.release()
        held, unknown = emission.held > 0, core.version < 0
        self._waits.now(
            emission.waiting_for() if held else "the parameter servers: no weights yet" if unknown else "", now_s
        )
        if now_s >= self._show_due_s:
            self._show_due_s = now_s + SHOW_S
            self._show()
        if core.steps_taken >= self._steps_limit:
            self._finish()
            emission.serve(IDLE_S)
        elif held or unknown:
            emission.serve(IDLE_S)
        elif now_s < self._step_due_s:
            emission.emit(core.tick(now_s))
            emission.serve(min(self._step_due_s - now_s, IDLE_S))
        else:
            self._step_due_s = max(self._step_due_s, now_s - PACE_DEBT_S) + self._step_s
            emission.emit(core.step(now_s))

    def _finish(self) -> None:
        if self._finished:
            return
        self._finished = True
        self.emission.emit(self.core.cut())
        self.service.log.info("actor.finished steps=%d limit=%d", self.core.steps_taken, self._steps_limit)

    def _show(self) -> None:
        self.emission.show()
        self.metrics.gauge("env_steps", self.core.steps_taken)
        self.metrics.gauge("behaviour_version", self.core.version)
        self.metrics.gauge("epsilon", self.core.epsilon_mean)

    def drain(self) -> None:
        """Send what there is, held or begun, and wait for the broker."""
        self.emission.release(anyway=True)
        last: list[Outgoing] = self.core.cut()
        self.emission.emit(last)
        self.emission.release(anyway=True)
        if not self.emission.flush(STOP_FLUSH_S):
            self.service.log.warning("stop.unacknowledged records=%d", self.emission.outstanding)


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
    """Entry point of `gorila actor`. Raises what `ActorLoop.run` and `make_core` raise."""
    from gorila.flow import LagGate
    from gorila.topics import group_name
    from gorila.weights_follower import WeightsFollower

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
    metrics = Metrics(service.role, service.run, service.name)
    if service.config.monitor.metrics_port:
        metrics.serve(service.config.monitor.metrics_host, service.config.monitor.metrics_port)
    service.log.info("actor.start", epoch=epoch, lanes=service.config.actor.lanes, environment=service.facts.id)
    ActorLoop(service, core, WeightsFollower(service, targets=False), {"transitions": gate}, metrics).run()
