"""Role processes on this machine: started, watched, restarted with back-off, stopped. A crash loop ends the run with the role's last lines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from gorila.config import LOCAL_SECTIONS, Config
from gorila.errors import RunError
from gorila.local.restart_budget import RestartBudget
from gorila.settings import CREDENTIALS, ENV_PREFIX

if TYPE_CHECKING:
    from gorila.offline import OfflineReplay

STOP_WITHIN_S = 4.0  # of the 5 that a stop may take: the summary needs the rest
CRASHES_ALLOWED = 5  # of a role, in a row
LIVED_S = 120.0
FIRST_BACKOFF_S = 0.1
LONGEST_BACKOFF_S = 5.0
SUPERVISOR_VARIABLE = "GORILA_SUPERVISOR_PID"
# Told by other means, or the file of one process.
OF_ONE_PROCESS = frozenset({"kafka.bootstrap_servers", "monitor.health_file"})
# Roles that look on or work ahead: on a machine with fewer cores than roles they must not hold up learner and server, who wait for each other.
GIVING_WAY = frozenset({"evaluator", "monitor", "archiver", "actor", "replay"})
GIVING_WAY_NICE = 10
REFUSED = 2  # exit code of a usage error: restarting would only repeat it


@dataclass
class RoleProcess:
    """One role of a run as a child process."""

    role: str
    index: int
    command: list[str]
    log: Path
    environ: dict[str, str]
    ends: bool = False  # exit code 0 is no accident: it has done what it was asked for
    ended: bool = False
    suffix: str = ""  # of a replica: -0, -1, …
    restarts: int = 0
    _process: subprocess.Popen[bytes] | None = None
    _not_before: float = 0.0
    _started_s: float = 0.0
    _budget: RestartBudget = field(default_factory=lambda: RestartBudget(CRASHES_ALLOWED, LIVED_S))

    @property
    def name(self) -> str:
        """`actor-0`."""
        return f"{self.role}-{self.index}{self.suffix}"

    @property
    def pid(self) -> int | None:
        """Of the running process."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self, now_s: float) -> None:
        """Start it in a session of its own: a terminal's Ctrl-C reaches the supervisor alone, which stops roles in order."""
        self._started_s = now_s
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as out:
            self._process = subprocess.Popen(
                self.command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=self.environ, start_new_session=True
            )
        if self.role in GIVING_WAY:
            _give_way(self._process.pid)

    def watch(self, now_s: float) -> str | None:
        """Restart it when it ended and its back-off is over; returns a line to log when something happened.

        Raises RunError on a crash loop, or when the role refused its configuration.
        """
        process = self._process
        if self.ended:
            return None
        if process is None:
            if now_s < self._not_before:
                return None
            self.restarts += 1
            self.start(now_s)
            return f"{self.name} restarted (restart {self.restarts})"
        code = process.poll()
        if code is None:
            return None
        self._process = None
        if code == 0 and self.ends:
            self.ended = True
            return f"{self.name} is done"
        if code == REFUSED:
            raise RunError(f"{self.name} refused to start: {self.last_lines(1)}")
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
        if not self._budget.spend(now_s - self._started_s):
            raise RunError(
                f"{self.name} keeps ending ({how}, {self.restarts} restarts); its last lines ({self.log}):\n{self.last_lines(8)}"
            )
        backoff = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2**self._budget.in_a_row)
        self._not_before = now_s + backoff
        return f"{self.name} ended ({how}); restarting in {backoff:.1f} s"

    def terminate(self) -> None:
        """Ask it to stop."""
        if self._process is not None and self._process.poll() is None:
            self._process.terminate()

    def wait(self, deadline_s: float) -> bool:
        """Wait until the deadline (time.monotonic()), then kill. True when it stopped by itself."""
        if self._process is None:
            return True
        try:
            self._process.wait(max(0.0, deadline_s - time.monotonic()))
            return True
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            return False

    def last_lines(self, count: int) -> str:
        """The end of its log."""
        try:
            with self.log.open("rb") as log:
                log.seek(max(0, self.log.stat().st_size - 16384))
                lines = log.read().decode(errors="replace").strip().splitlines()
        except OSError:
            return "(no log)"
        return "\n".join(lines[-count:])


def instances(config: Config) -> Iterator[tuple[str, int]]:
    """(role, index) of every process of a run, in the order they are best started; a shard comes once a replica."""
    for shard in range(config.parameter_server.shards):
        for _ in range(config.parameter_server.replicas):
            yield "parameter-server", shard
    for learner in range(config.learner.count):
        yield "learner", learner
    yield "replay", 0
    for actor in range(config.actor.count):
        yield "actor", actor
    yield "evaluator", 0
    yield "monitor", 0
    if config.archive.dir:
        yield "archiver", 0


def local_sets(config: Config, process: int = 0) -> tuple[str, ...]:
    """`--set` strings of what the run's record does not carry: the sections that say where a process runs.

    Args:
        process: the how manyth on this machine; each serves its metrics on a port of its own, counted from `monitor.metrics_port`.
    """
    plain, sets = Config(), []
    for section in sorted(LOCAL_SECTIONS):
        for key, value in getattr(config, section).model_dump().items():
            if value != getattr(getattr(plain, section), key) and f"{section}.{key}" not in OF_ONE_PROCESS:
                moved = value + process if key == "metrics_port" else value
                sets.append(f"{section}.{key}={moved}")
    return tuple(sets)


def role_processes(
    run: str, config: Config, bootstrap_servers: str, run_dir: Path, offline: OfflineReplay | None = None
) -> list[RoleProcess]:
    """Every role of the run, not yet started. From a recording: no actor, nothing to archive, and a replay that ends."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1")
    environ = {name: value for name, value in os.environ.items() if not name.startswith(ENV_PREFIX)}
    environ |= {**threads, "PYTHONUNBUFFERED": "1", SUPERVISOR_VARIABLE: str(os.getpid())}
    processes: list[RoleProcess] = []
    for number, (role, index) in enumerate(instances(config)):
        if offline is not None and role in ("actor", "archiver"):
            continue
        replays = offline is not None and role == "replay"
        command = [sys.executable, "-m", "gorila.cli", role, "--run", run, "--index", str(index)]
        command += ["--bootstrap-servers", bootstrap_servers, "--run-dir", str(run_dir)]
        for item in local_sets(config, number):
            key, _, value = item.partition("=")
            if CREDENTIALS.search(value):  # a command line is everybody's to read
                environ[ENV_PREFIX + key.replace(".", "__", 1).upper()] = value
            else:
                command += ["--set", item]
        command += offline.words() if offline is not None and replays else []
        suffix = ""
        if role == "parameter-server" and config.parameter_server.replicas > 1:
            replica = sum((process.role, process.index) == (role, index) for process in processes)
            command, suffix = [*command, "--replica", str(replica)], f"-{replica}"
        log = run_dir / "logs" / f"{role}-{index}{suffix}.log"
        processes.append(RoleProcess(role, index, command, log, environ, replays, suffix=suffix))
    return processes


def _give_way(pid: int) -> None:
    """Lower a process's priority, and that of its session where Linux schedules by session; where the system refuses, it stays as it is."""
    try:
        os.setpriority(os.PRIO_PROCESS, pid, GIVING_WAY_NICE)
        Path(f"/proc/{pid}/autogroup").write_text(str(GIVING_WAY_NICE))
    except OSError:
        return


def supervised() -> bool:
    """In a role: whether a supervisor keeps what this process says in the role's log file."""
    return os.environ.get(SUPERVISOR_VARIABLE) == str(os.getppid())


def stop_with_supervisor(stop: threading.Event) -> None:
    """In a role: set `stop` when the supervisor that started this process is gone, so that killing it leaves nothing behind."""
    supervisor = os.environ.get(SUPERVISOR_VARIABLE, "")
    if not supervisor.isdigit():
        return

    def look() -> None:
        while os.getppid() == int(supervisor):
            if stop.wait(1.0):
                return
        stop.set()

    threading.Thread(target=look, name="supervisor-watch", daemon=True).start()


def stop_all(processes: list[RoleProcess]) -> list[str]:
    """Stop every role within STOP_WITHIN_S, all at once; names of those that had to be killed."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + STOP_WITHIN_S
    return [process.name for process in processes if not process.wait(deadline)]
