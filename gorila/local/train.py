"""`gorila train`: broker, topics, every role, a live view, an end, a summary.

Order, and what undoes it:
1. the run's folder                      (kept)
2. the broker, unless there is one       (stopped at the end if it was started here)
3. topics, version-0 weights, run record (kept: the log is the recording)
4. role processes                        (stopped within 5 s)
5. watch until solved, a limit, Ctrl-C, or a crash loop
6. weights.safetensors, curve.png, summary.json
"""

from __future__ import annotations

import importlib
import logging
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from gorila.config import Config
from gorila.environment_facts import EnvironmentFacts
from gorila.errors import GorilaError, LocalError, RunError
from gorila.kafka import Cluster
from gorila.local.broker import Broker
from gorila.local.live_view import LiveView
from gorila.local.roles import RoleProcess, role_processes, stop_all
from gorila.local.summary import Summary, summarise
from gorila.run_follower import RunFollower
from gorila.run_progress import RunProgress
from gorila.run_record import create_run
from gorila.service import open_service
from gorila.settings import canonical_json

log = logging.getLogger("gorila.train")

LAG_EVERY_S = 1.0
WEIGHTS_EVERY_S = 2.0
BROKER_FOLDER = Path(".gorila/broker")


def new_run_name(config: Config) -> str:
    """`cartpole-s0-20260102-030405`: sorts by time within a preset, and is a legal topic prefix."""
    return f"{config.run.preset}-s{config.run.seed}-{datetime.now(UTC):%Y%m%d-%H%M%S}"


def prepare_folder(root: Path, run: str, config: Config) -> Path:
    """`runs/<run>/` with the configuration in it. Raises LocalError when the disk refuses."""
    folder = root / run
    try:
        (folder / "logs").mkdir(parents=True)
        (folder / "config.json").write_text(canonical_json(config) + "\n")
    except OSError as error:
        raise LocalError(f"cannot write to {folder}: {error.strerror}") from None
    return folder


def describe_environment(config: Config) -> EnvironmentFacts:
    """Looked up by name: the environment's door is not a dependency of this package."""
    facts: EnvironmentFacts = importlib.import_module("gorila.environments").describe(config)
    return facts


def first_weights(config: Config, facts: EnvironmentFacts) -> Any:
    """float32 (P,), from the run's seed."""
    return importlib.import_module("gorila.network").initial_weights(config, facts)


@contextmanager
def _broker(config: Config) -> Iterator[str]:
    """Bootstrap servers: the configured ones, a local broker that already runs, or one started here and stopped at the end."""
    if config.kafka.bootstrap_servers:
        yield config.kafka.bootstrap_servers
        return
    broker = Broker(BROKER_FOLDER)
    running = broker.status()
    if running is not None:
        yield running.bootstrap_servers
        return
    address = broker.start()
    try:
        yield address.bootstrap_servers
    finally:
        broker.stop()


@contextmanager
def _stop_signal() -> Iterator[threading.Event]:
    """An event set by Ctrl-C or SIGTERM; a second one is not needed."""
    stop = threading.Event()

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        stop.set()

    if threading.current_thread() is not threading.main_thread():
        yield stop
        return
    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


class Supervision:
    """Steps 4 and 5: the roles of one run until something ends it."""

    def __init__(
        self, config: Config, roles: list[RoleProcess], follower: RunFollower, progress: RunProgress, view: LiveView
    ) -> None:
        self._config, self._roles = config, roles
        self._follower, self._progress, self._view = follower, progress, view
        self._shown_evaluation: object = None

    def watch(self, stop: threading.Event, on_tick: Callable[[list[RoleProcess]], None] | None = None) -> str:
        """Returns why it ended. Raises RunError on a crash loop."""
        started = time.monotonic()
        next_lag = next_weights = started
        lags: list[Any] = []
        for role in self._roles:
            role.start()
        while True:
            self._follower.poll(0.25)
            now = time.monotonic()
            for role in self._roles:
                line = role.watch(now)
                if line:
                    self._view.event(line)
            if now >= next_weights:
                next_weights = now + WEIGHTS_EVERY_S
                self._follower.look_at_weights()
            if now >= next_lag:
                next_lag = now + LAG_EVERY_S
                lags = self._follower.lags()
            self._announce_evaluation()
            self._view.show(now, self._progress, lags, self._roles, now - started)
            if on_tick is not None:
                on_tick(self._roles)
            reason = self._ended(stop)
            if reason:
                return reason

    def _announce_evaluation(self) -> None:
        newest = self._progress.confirmed if self._progress.solved else self._progress.evaluation
        if newest is not None and newest is not self._shown_evaluation:
            self._shown_evaluation = newest
            self._view.event(
                f"{newest.phase} of version {newest.weights_version}: mean return {newest.return_mean:.1f} over {newest.episodes} episodes"
            )

    def _ended(self, stop: threading.Event) -> str:
        progress, run = self._progress, self._config.run
        if stop.is_set():
            return "interrupted"
        if progress.solved:
            return "solved"
        if run.max_updates and progress.updates >= run.max_updates:
            return f"{run.max_updates} updates done"
        if run.max_env_steps and progress.env_steps >= run.max_env_steps:
            return f"{run.max_env_steps} environment steps done"
        return ""


def train(
    config: Config,
    *,
    run: str | None = None,
    root: Path = Path("runs"),
    view: LiveView | None = None,
    on_tick: Callable[[list[RoleProcess]], None] | None = None,
) -> Summary:
    """One run from nothing to its summary. Raises GorilaError with one clear line."""
    started_ms = int(time.time() * 1000)
    run = run or new_run_name(config)
    folder = prepare_folder(root, run, config)
    view = view or LiveView(run, config)
    with _stop_signal() as stop, ThreadPoolExecutor(1) as background:
        weights_ready = background.submit(lambda: (facts := describe_environment(config), first_weights(config, facts)))
        with _broker(config) as bootstrap_servers:
            facts, weights = weights_ready.result()
            cluster = Cluster(bootstrap_servers, config.kafka.client_properties, client_id=f"{run}-train")
            create_run(cluster, run, config, facts, weights)
            service = open_service("train", run, 0, bootstrap_servers, _local_sets(config), None)
            progress = RunProgress()
            follower = RunFollower(service, progress)
            roles = role_processes(run, config, bootstrap_servers, folder)
            view.event(f"run {run}: Kafka at {bootstrap_servers}, logs in {folder / 'logs'}")
            failure: GorilaError | None = None
            try:
                with view:
                    reason = Supervision(config, roles, follower, progress, view).watch(stop, on_tick)
            except RunError as error:
                failure, reason = error, "a role kept failing"
            finally:
                ended_ms = int(time.time() * 1000)
                killed = stop_all(roles)
                if killed:
                    view.event(f"did not stop within 5 s and were killed: {', '.join(killed)}")
            summary = _finish(follower, run, config, progress, roles, started_ms, ended_ms, reason)
            follower.close()
            summary.write(folder)
            if failure is not None:
                raise failure
            return summary


def _local_sets(config: Config) -> tuple[str, ...]:
    return (f"kafka.client_properties={config.kafka.client_properties}",) if config.kafka.client_properties else ()


def _finish(
    follower: RunFollower,
    run: str,
    config: Config,
    progress: RunProgress,
    roles: list[RoleProcess],
    started_ms: int,
    ended_ms: int,
    reason: str,
) -> Summary:
    follower.poll(0.2)
    follower.look_at_weights()
    return summarise(
        run,
        config,
        progress,
        first_step_ms=follower.first_step_ms(),
        started_ms=started_ms,
        ended_ms=ended_ms,
        bytes_per_transition=follower.bytes_per_transition(),
        dead_letters=follower.dead_letters(),
        restarts=sum(role.restarts for role in roles),
        ended_because=reason,
    )
