"""`gorila train`: broker, topics, every role, a live view, an end, a summary.

Order, and what undoes it:
1. the run's folder                      (removed again when 2 or 3 fail: nothing ran)
2. the broker, unless there is one       (stopped at the end by the last `gorila train` that uses it)
3. topics, version-0 weights, run record (kept: the log is the recording)
4. role processes                        (stopped within 5 s)
5. watch until solved, a limit, Ctrl-C, a closed output, or a crash loop
6. weights.safetensors, curve.png, summary.json
"""

from __future__ import annotations

import importlib
import logging
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, TypeVar

from gorila.config import Config
from gorila.environment_facts import EnvironmentFacts
from gorila.errors import BrokerError, GorilaError, LocalError, RunError, while_away
from gorila.kafka import Cluster
from gorila.local.broker import Broker
from gorila.local.live_view import LiveView
from gorila.local.restart_budget import RestartBudget
from gorila.local.roles import RoleProcess, local_sets, role_processes, stop_all
from gorila.local.run_parts import Part, begin_part, earlier_s
from gorila.local.shared_broker import shared_broker
from gorila.local.summary import Summary, restarts_before, summarise
from gorila.run_follower import READ_S, Lag, RunFollower
from gorila.run_progress import RunProgress
from gorila.run_record import create_run
from gorila.service import Service, open_service
from gorila.settings import canonical_json
from gorila.weights_follower import WeightsFollower

if TYPE_CHECKING:
    from gorila.offline import OfflineReplay

log = logging.getLogger("gorila.train")
T = TypeVar("T")

LAG_EVERY_S = 1.0
WEIGHTS_EVERY_S = 2.0
BROKER_RESTARTS = 3  # in a row
BROKER_LIVED_S = 300.0
INTERRUPTED = "interrupted"


def new_run_name(config: Config) -> str:
    """`cartpole-s0-20260102-030405`: sorts by time within a preset, and is a legal topic prefix."""
    return f"{config.run.preset}-s{config.run.seed}-{datetime.now(UTC):%Y%m%d-%H%M%S}"


def prepare_folder(root: Path, run: str | None, config: Config) -> Path:
    """`runs/<run>/` with the configuration in it; its name is the run's. Raises LocalError when the disk refuses.

    Args:
        run: None: a new name; two that start in one second get different ones.
    """
    name, number = run or new_run_name(config), 1
    while True:
        folder = root / (name if number == 1 else f"{name}-{number}")
        try:
            folder.mkdir(parents=True)
            (folder / "logs").mkdir()
            (folder / "config.json").write_text(canonical_json(config) + "\n")
        except FileExistsError:
            if run is not None or not folder.is_dir():
                raise LocalError(f"cannot write to {folder}: it exists") from None
            number += 1
            continue
        except OSError as error:
            raise LocalError(f"cannot write to {folder}: {error.strerror}") from None
        return folder


def open_folder(root: Path, run: str, config: Config) -> Path:
    """`runs/<run>/` of a run that is there already, made where it is not; the configuration in it is the one that holds from now on. Raises LocalError."""
    folder = root / run
    try:
        (folder / "logs").mkdir(parents=True, exist_ok=True)
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
def kafka(config: Config) -> Iterator[tuple[str, Broker | None]]:
    """(bootstrap servers, the embedded broker if it is ours to look after)."""
    if config.kafka.bootstrap_servers or config.kafka.client_properties:
        yield config.kafka.bootstrap_servers, None
        return
    with shared_broker() as bootstrap_servers:
        yield bootstrap_servers, Broker()


class _Signals:
    """Ctrl-C and SIGTERM: an interruption while things are being set up, a wish to stop once roles run."""

    def __init__(self) -> None:
        self.stop = threading.Event()
        self.roles_run = False

    @contextmanager
    def caught(self) -> Iterator[None]:
        if threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self._on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _on_signal(self, _number: int, _frame: FrameType | None) -> None:
        self.stop.set()
        if not self.roles_run:
            raise KeyboardInterrupt


class Supervision:
    """Steps 4 and 5: the roles of one run until something ends it."""

    def __init__(
        self,
        config: Config,
        roles: list[RoleProcess],
        follower: RunFollower,
        progress: RunProgress,
        view: LiveView,
        broker: Broker | None = None,
    ) -> None:
        self._config, self._roles, self._broker = config, roles, broker
        self._broker_budget = RestartBudget(BROKER_RESTARTS, BROKER_LIVED_S)
        self._broker_started_s = time.monotonic()
        self._follower, self._progress, self._view = follower, progress, view
        self._shown_evaluation: object = None
        self._idle_looks = 0

    def watch(self, stop: threading.Event, on_tick: Callable[[list[RoleProcess]], None] | None = None) -> str:
        """Returns why it ended. Raises RunError on a crash loop, BrokerError when the broker is beyond help."""
        started = time.monotonic()
        next_lag = next_weights = started
        lags: list[Any] = []
        for role in self._roles:
            role.start(started)
        while True:
            self._follower.poll(0.25)
            now = time.monotonic()
            for role in self._roles:
                line = role.watch(now)
                if line:
                    self._view.event(line)
            if now >= next_weights:
                next_weights = now + WEIGHTS_EVERY_S
                with while_away():  # the roles wait too
                    self._follower.look_at_weights()
            if now >= next_lag:
                next_lag = now + LAG_EVERY_S
                self._look_after_broker()
                lags = self._follower.lags()
                self._look_for_the_last_batch(lags)
            self._announce_evaluation()
            self._view.show(now, self._progress, lags, self._roles, now - started)
            if on_tick is not None:
                on_tick(self._roles)
            reason = self._ended(stop)
            if reason:
                return reason

    def _look_after_broker(self) -> None:
        """A local Kafka that died is started again where it was: its log and its port are kept, roles find it by themselves."""
        if self._broker is None or self._broker.status() is not None:
            return
        if not self._broker_budget.spend(time.monotonic() - self._broker_started_s):
            raise BrokerError(f"Kafka keeps ending; its log: {self._broker.data.log_file}")
        self._view.event("Kafka ended; starting it again")
        self._broker.start()
        self._broker_started_s = time.monotonic()

    def _look_for_the_last_batch(self, lags: list[Lag]) -> None:
        """A recording's replay is over before the learners are: they are done when twice in a row nobody is behind."""
        over = any(role.ended for role in self._roles) and any(lag.group == "learner" for lag in lags)
        self._idle_looks = self._idle_looks + 1 if over and not any(lag.records for lag in lags) else 0

    def _announce_evaluation(self) -> None:
        newest = self._progress.confirmed if self._progress.solved else self._progress.evaluation
        if newest is not None and newest is not self._shown_evaluation:
            self._shown_evaluation = newest
            self._view.event(
                f"{newest.phase} of version {newest.weights_version}: mean return {newest.return_mean:.4g} over {newest.episodes} episodes"
            )

    def _ended(self, stop: threading.Event) -> str:
        progress, run = self._progress, self._config.run
        if stop.is_set():
            return INTERRUPTED
        if self._view.closed:
            return "nobody reads its output any more"
        if progress.solved:
            return "solved"
        if run.max_updates and progress.updates >= run.max_updates:
            return f"{run.max_updates} updates done"
        if self._idle_looks > 1:  # some batches may have been rejected: fewer updates than batches
            return f"all {progress.batches} batches learned"
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
    offline: OfflineReplay | None = None,
    there: bool = False,
) -> Summary:
    """One run from nothing to its summary; with `offline`, from a recording and without actors. Raises GorilaError with one clear line.

    Args:
        there: `run` is on Kafka already, with this configuration: resumed, or forked a moment ago. Its folder is kept whatever happens.
    """
    started_ms = int(time.time() * 1000)
    folder = open_folder(root, run, config) if there and run else prepare_folder(root, run, config)
    view = view or LiveView(folder.name, config)
    signals = _Signals()
    try:
        with signals.caught(), ThreadPoolExecutor(1) as background:
            weights_ready = None
            if not there:
                weights_ready = background.submit(
                    lambda: (facts := describe_environment(config), first_weights(config, facts))
                )
            view.event(f"{'going on with' if there else 'starting'} {folder.name}: Kafka, environment, first weights")
            with kafka(config) as (bootstrap_servers, broker):
                cluster = Cluster(
                    bootstrap_servers,
                    config.kafka.client_properties,
                    client_id=f"{folder.name}-train",
                    stop=signals.stop,
                )
                cluster.admin().ping()
                if weights_ready is not None:
                    facts, weights = weights_ready.result()
                    for warning in offline.examine(cluster, config, facts) if offline else ():
                        view.event(f"warning: {warning}")
                    if not create_run(cluster, folder.name, config, facts, weights):
                        raise RunError(f"run {folder.name} exists on Kafka at {cluster.bootstrap_servers}: try again")
                service = open_service(
                    "train", folder.name, 0, bootstrap_servers, local_sets(config), folder, terminal=False, environ={}
                )
                view.event(f"Kafka at {cluster.bootstrap_servers}, logs in {folder / 'logs'}")
                signals.roles_run = True
                return _supervised(service, config, broker, view, signals.stop, started_ms, on_tick, offline)
    finally:
        if not signals.roles_run and not there:
            shutil.rmtree(folder, ignore_errors=True)


def _supervised(
    service: Service,
    config: Config,
    broker: Broker | None,
    view: LiveView,
    stop: threading.Event,
    started_ms: int,
    on_tick: Callable[[list[RoleProcess]], None] | None,
    offline: OfflineReplay | None,
) -> Summary:
    """Steps 4 to 6."""
    assert service.run_dir is not None
    parts = begin_part(service, started_ms)
    progress = RunProgress()
    follower = RunFollower(service, progress)
    roles = role_processes(service.run, config, service.cluster.bootstrap_servers, service.run_dir, offline)
    failure: GorilaError | None = None
    try:
        with view:
            reason = Supervision(config, roles, follower, progress, view, broker).watch(stop, on_tick)
    except (RunError, BrokerError) as error:
        failure, reason = error, "a role kept failing" if isinstance(error, RunError) else "Kafka failed"
    finally:
        ended_ms = int(time.time() * 1000)
        killed = stop_all(roles)
        if killed:
            view.event(f"did not stop in time and were killed: {', '.join(killed)}")
    summary = _finish(service, follower, progress, roles, parts, ended_ms, reason)
    follower.close()
    summary.write(service.run_dir)
    if failure is not None:
        raise failure
    return summary


def _finish(
    service: Service,
    follower: RunFollower,
    progress: RunProgress,
    roles: list[RoleProcess],
    parts: list[Part],
    ended_ms: int,
    reason: str,
) -> Summary:
    def measured(measure: Callable[[], T], otherwise: T) -> T:
        try:
            return measure()
        except GorilaError as error:  # Kafka is gone: what is known already is still worth a summary
            log.warning("summary.not_measured reason=%r", str(error))
            return otherwise

    measured(follower.catch_up, None)
    measured(lambda: follower.look_at_weights(READ_S), None)
    return summarise(
        service.run,
        service.config,
        progress,
        first_step_ms=measured(lambda: follower.first_step_ms(parts[-1].starts), None)
        or measured(follower.first_batch_ms, None)
        # A resumed run may learn from what was left before its actors have taken a step.
        or (parts[-1].started_ms if len(parts) > 1 else None),
        started_ms=parts[-1].started_ms,
        ended_ms=ended_ms,
        bytes_per_transition=measured(follower.bytes_per_transition, None),
        dead_letters=measured(follower.dead_letters, 0),
        restarts=sum(role.restarts for role in roles) + restarts_before(service.run_dir),
        weights_version=measured(lambda: _weights_file(service), None),
        ended_because=reason,
        parts=len(parts),
        earlier_s=measured(lambda: earlier_s(service, follower, parts), 0.0),
    )


def _weights_file(service: Service) -> int | None:
    """Version in the run's weights.safetensors: the evaluator's best, or the newest weights where it evaluated none."""
    policy = importlib.import_module("gorila.policy")
    assert service.run_dir is not None
    path = service.run_dir / policy.WEIGHTS_FILE
    if not path.exists():
        newest = WeightsFollower(service, targets=False)
        try:
            newest.poll(1.0)
            if newest.view.version < 0:
                return None
            flat, found = newest.view.flat(), newest.view.version
            statistics = importlib.import_module("gorila.batch_statistics").checkpointed(
                service.run_dir, service.run, found
            )
            policy.save_weights(path, flat, found, service.config, service.facts, statistics=statistics)
        finally:
            newest.close()
    version: int = policy.version_of(path)
    return version
