"""A run as an orchestrator keeps it: a broker and roles that are started again whenever they end, each role on a host of its own where there are hosts.

`gorila train` gives up on what keeps dying; here dying is the point, so this supervisor only counts. What a role says and keeps lies in `state`, the broker's
log in `broker_folder`: two folders, so that either disk can be filled alone.
"""

from __future__ import annotations

import math
import os
import signal
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from deploy.hosts import Hosts, lan_listener
from gorila.config import Config
from gorila.errors import GorilaError
from gorila.kafka import Cluster
from gorila.local.broker import Broker
from gorila.local.broker_process import free_port, is_alive, read_record
from gorila.local.roles import RoleProcess, role_processes, stop_all
from gorila.local.train import describe_environment, first_weights
from gorila.messages import Episode, Message
from gorila.run_follower import RunFollower
from gorila.run_progress import RunProgress
from gorila.run_record import create_run
from gorila.run_state import readers
from gorila.service import open_service

BROKER_HOST = "broker"
AGAIN_AFTER_S = 0.3
FRESH_S = 2.5  # of a health file that is touched once a second
RSS_EVERY_S = 1.0
PROGRESS_VERSIONS = 3


def host_names(config: Config) -> list[str]:
    """The broker's host and one for every role of the run."""
    roles = role_processes("run", config, "", Path())
    return [BROKER_HOST, *(role.name for role in roles)]


@dataclass
class Mark:
    """What had been done at a moment; healthy again means more than this."""

    time_s: float
    updates: int
    env_steps: int
    ends: dict[tuple[str, int], int] = field(default_factory=dict)


class Fleet:
    """Broker and roles of one run. `turn` looks after them; call it often.

    Attributes:
        returns: of the actors' episodes, in order.
        rss: {process: [(seconds, MiB)]} of each life of each process, `broker` included.
        ended: lines about roles that ended though nobody did anything to them.
        last_sick: what was missing last before the run was healthy again.
        held: names of what must not be started again now (a disk is full, a process is stopped).
    """

    def __init__(
        self,
        run: str,
        config: Config,
        state: Path,
        broker_folder: Path,
        hosts: Hosts | None,
        bootstrap_servers: str = "",
    ) -> None:
        self.run, self.config, self.state, self._hosts = run, config, state, hosts
        also, self._servers = None, bootstrap_servers
        if hosts is not None:
            port = free_port()
            also = lan_listener(hosts.address(BROKER_HOST), port)
            self._servers = f"{hosts.address(BROKER_HOST)}:{port}"
        self.broker = None if bootstrap_servers else Broker(broker_folder, also=also)
        self.progress, self.returns = RunProgress(), list[float]()
        self.rss: dict[str, list[tuple[float, float]]] = defaultdict(list)
        self.ended: list[str] = []
        self.held: set[str] = set()
        self.expected: set[str] = set()
        self.max_lag, self.last_sick = 0, ""
        self.on_turn: Callable[[], object] = lambda: None
        self.roles: list[RoleProcess] = []
        self._starting: threading.Thread | None = None
        self._down_s: dict[str, float] = {}
        self._rss_due_s = 0.0

    def open(self) -> None:
        """Broker, topics, first weights, roles. Raises GorilaError."""
        servers = self.broker.start().bootstrap_servers if self.broker else self._servers
        self.cluster = Cluster(servers, client_id="fleet")
        facts = describe_environment(self.config)
        create_run(self.cluster, self.run, self.config, facts, first_weights(self.config, facts))
        self.service = open_service("train", self.run, 0, servers, terminal=False, environ={})
        self.follower = RunFollower(self.service, self.progress, also=self._also)
        self.admin = self.cluster.admin()
        self.roles = role_processes(self.run, self.config, self._servers or servers, self.state)
        now_s = time.monotonic()
        for role in self.roles:
            role.command += ["--set", f"monitor.health_file={self.health_file(role.name)}"]
            if self._hosts is not None:
                role.command = self._hosts.command_on(role.name, *role.command)
            role.start(now_s)

    def health_file(self, name: str) -> Path:
        """Of a role. Not in `state`: a full disk there is a role's trouble, not the probe's."""
        return self.state.parent / f"{name}.health"

    def role(self, name: str) -> RoleProcess:
        """By name, `actor-0`."""
        return next(role for role in self.roles if role.name == name)

    def broker_pid(self) -> int | None:
        """Of the running broker."""
        record = read_record(self.broker.data.record_file) if self.broker else None
        return record.pid if record is not None and is_alive(record) else None

    def turn(self, wait_s: float = 0.1) -> None:
        """Read what is new, start again what ended, look at memory."""
        self.follower.poll(wait_s)
        now_s = time.monotonic()
        for role in self.roles:
            self._look_after(role, now_s)
        self._look_after_broker()
        if now_s >= self._rss_due_s:
            self._rss_due_s = now_s + RSS_EVERY_S
            self._read_memory(now_s)
        self.on_turn()

    def live(self, seconds: float) -> None:
        """`turn` for a while."""
        until_s = time.monotonic() + seconds
        while time.monotonic() < until_s:
            self.turn()

    def mark(self) -> Mark:
        """Now."""
        return Mark(time.monotonic(), self.progress.updates, self.progress.env_steps)

    def sickness(self, mark: Mark) -> str:
        """Empty when the whole loop works again and has done so since `mark`; else the first thing that is missing."""
        if self.broker is not None and ((status := self.broker.status()) is None or not status.answering):
            return "the broker does not answer"
        for role in self.roles:
            if not self._ready(role, mark):
                return f"{role.name} is not ready"
        if self.progress.updates < mark.updates + PROGRESS_VERSIONS:
            return f"no updates since version {mark.updates}"
        if self.progress.env_steps <= mark.env_steps:
            return f"no transitions are read since {mark.env_steps}"
        return self._sick_flow(mark)

    def _sick_flow(self, mark: Mark) -> str:
        """Asked last: Kafka's administration costs more than what is known already."""
        try:
            places = [(self.service.topic("transitions"), p) for p in range(self.config.actor.count)]
            ends = self.admin.end_offsets(places, 2.0)
            if not mark.ends:
                mark.ends = ends
                return "each actor has to write"
            for place, end in ends.items():
                if end <= mark.ends[place]:
                    return f"actor-{place[1]} writes nothing"
            bounds = {group: bound for group, _, _, bound in readers(self.config)}
            lags = self.follower.lags()
        except GorilaError as error:
            return str(error)
        if len(lags) < len(bounds):
            return "a group's offsets cannot be had"
        for lag in lags:
            self.max_lag = max(self.max_lag, *lag.partitions.values())
            if max(lag.partitions.values()) > bounds[lag.group] + 1:  # written while the lag is at the bound
                return f"{lag.group} is {max(lag.partitions.values())} records behind, bound {bounds[lag.group]}"
        return ""

    def until_healthy(self, mark: Mark, patience_s: float) -> tuple[float, str]:
        """(seconds from the mark, what is still missing when patience ended)."""
        while sick := self.sickness(mark):
            self.last_sick = sick
            if time.monotonic() - mark.time_s > patience_s:
                return time.monotonic() - mark.time_s, sick
            self.turn(0.05)
        return time.monotonic() - mark.time_s, ""

    def look_at_lags(self) -> None:
        """Remember the largest."""
        for lag in self.follower.lags():
            self.max_lag = max(self.max_lag, *lag.partitions.values())

    def _ready(self, role: RoleProcess, mark: Mark) -> bool:
        try:
            text, touched_s = self.health_file(role.name).read_text(), self.health_file(role.name).stat().st_mtime
        except OSError:
            return False
        started_s = time.time() - (time.monotonic() - mark.time_s)
        return role.pid is not None and text == "ready\n" and touched_s >= max(started_s, time.time() - FRESH_S)

    def _look_after(self, role: RoleProcess, now_s: float) -> None:
        if role.pid is not None or role.name in self.held:
            return
        if role.name not in self._down_s:
            self._down_s[role.name] = now_s
            if role.name in self.expected:
                self.expected.discard(role.name)
            else:
                code = role._process.poll() if role._process is not None else None
                self.ended.append(f"{role.name} ended by itself ({code}): {role.last_lines(1)[-400:]}")
        if now_s - self._down_s[role.name] >= AGAIN_AFTER_S:
            del self._down_s[role.name]
            self.health_file(role.name).unlink(missing_ok=True)
            try:
                role.start(now_s)
            except OSError as error:  # no room for its log: the disk is full
                self.ended.append(f"{role.name} cannot be started: {error.strerror}")
                self.expected.add(role.name)

    def _look_after_broker(self) -> None:
        if self.broker is None or BROKER_HOST in self.held or self.broker_pid() is not None:
            return
        if self._starting is not None and self._starting.is_alive():
            return
        self._starting = threading.Thread(target=self._start_broker, daemon=True)
        self._starting.start()

    def _start_broker(self) -> None:
        assert self.broker is not None
        try:
            self.broker.start()
        except GorilaError as error:
            self.ended.append(f"the broker does not start: {error}")
            time.sleep(1.0)

    def _read_memory(self, now_s: float) -> None:
        pids = {role.name: role.pid for role in self.roles} | {BROKER_HOST: self.broker_pid()}
        for name, pid in pids.items():
            if pid is None:
                continue
            try:
                mebibytes = psutil.Process(pid).memory_info().rss / 2**20
            except psutil.Error:
                continue
            self.rss[f"{name}/{pid}"].append((now_s, mebibytes))

    def recent_return(self) -> float:
        """Mean return of the actors' newest 20 episodes; NaN before the first."""
        newest = self.returns[-20:]
        return sum(newest) / len(newest) if newest else math.nan

    def _also(self, message: Message, _timestamp_ms: int) -> None:
        if isinstance(message, Episode) and message.role == "actor" and message.actor_id.startswith("actor-"):
            self.returns.append(message.episode_return)

    def stop_roles(self, *names: str) -> list[str]:
        """End these (all without a name) as an operator would; names of those that had to be killed."""
        going = [role for role in self.roles if not names or role.name in names]
        self.held |= {role.name for role in going}
        return stop_all(going)

    def close(self) -> None:
        """End everything that was started here."""
        for role in self.roles:
            if role.pid is not None:
                os.kill(role.pid, signal.SIGCONT)  # what is stopped does not hear that it should end
        self.held |= {role.name for role in self.roles} | {BROKER_HOST}
        stop_all(self.roles)
        if self._starting is not None:
            self._starting.join(60)
        if hasattr(self, "follower"):
            self.follower.close()
        if self.broker is not None:
            if (pid := self.broker_pid()) is not None:
                os.kill(pid, signal.SIGCONT)
            self.broker.stop()
