"""Role processes on this machine: started, watched, restarted with back-off, stopped. A crash loop ends the run with the role's last lines."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gorila.config import Config
from gorila.errors import RunError

STOP_WITHIN_S = 5.0
CRASHES_THAT_END_A_RUN = 5
CRASH_WINDOW_S = 60.0
FIRST_BACKOFF_S = 0.1
LONGEST_BACKOFF_S = 5.0
REFUSED = 2  # exit code of a usage error: restarting would only repeat it


@dataclass
class RoleProcess:
    """One role of a run as a child process."""

    role: str
    index: int
    command: list[str]
    log: Path
    environ: dict[str, str]
    restarts: int = 0
    _process: subprocess.Popen[bytes] | None = None
    _not_before: float = 0.0
    _crashes: deque[float] = field(default_factory=deque)

    @property
    def name(self) -> str:
        """`actor-0`."""
        return f"{self.role}-{self.index}"

    @property
    def pid(self) -> int | None:
        """Of the running process."""
        return self._process.pid if self._process is not None and self._process.poll() is None else None

    def start(self) -> None:
        """Start it in a session of its own: a terminal's Ctrl-C reaches the supervisor alone, which stops roles in order."""
        self.log.parent.mkdir(parents=True, exist_ok=True)
        with self.log.open("ab") as out:
            self._process = subprocess.Popen(
                self.command, stdout=out, stderr=out, stdin=subprocess.DEVNULL, env=self.environ, start_new_session=True
            )

    def watch(self, now_s: float) -> str | None:
        """Restart it when it ended and its back-off is over; returns a line to log when something happened.

        Raises RunError on a crash loop, or when the role refused its configuration.
        """
        process = self._process
        if process is None:
            if now_s < self._not_before:
                return None
            self.restarts += 1
            self.start()
            return f"{self.name} restarted (restart {self.restarts})"
        code = process.poll()
        if code is None:
            return None
        self._process = None
        if code == REFUSED:
            raise RunError(f"{self.name} refused to start: {self.last_lines(1)}")
        self._crashes.append(now_s)
        while self._crashes and now_s - self._crashes[0] > CRASH_WINDOW_S:
            self._crashes.popleft()
        if len(self._crashes) > CRASHES_THAT_END_A_RUN:
            raise RunError(
                f"{self.name} ended {len(self._crashes)} times in {CRASH_WINDOW_S:.0f} s; its last lines ({self.log}):\n{self.last_lines(8)}"
            )
        backoff = min(LONGEST_BACKOFF_S, FIRST_BACKOFF_S * 2 ** (len(self._crashes) - 1))
        self._not_before = now_s + backoff
        how = signal.Signals(-code).name if code < 0 else f"exit code {code}"
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
    """(role, index) of every process of a run, in the order they are best started."""
    for shard in range(config.parameter_server.shards):
        yield "parameter-server", shard
    for learner in range(config.learner.count):
        yield "learner", learner
    yield "replay", 0
    for actor in range(config.actor.count):
        yield "actor", actor
    yield "evaluator", 0
    yield "monitor", 0


def role_processes(run: str, config: Config, bootstrap_servers: str, run_dir: Path) -> list[RoleProcess]:
    """Every role of the run, not yet started."""
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "NUMEXPR_NUM_THREADS"), "1")
    environ = {**os.environ, **threads, "PYTHONUNBUFFERED": "1"}
    processes = []
    for role, index in instances(config):
        command = [sys.executable, "-m", "gorila.cli", role, "--run", run, "--index", str(index)]
        command += ["--bootstrap-servers", bootstrap_servers, "--run-dir", str(run_dir)]
        if config.kafka.client_properties:
            command += ["--set", f"kafka.client_properties={config.kafka.client_properties}"]
        processes.append(RoleProcess(role, index, command, run_dir / "logs" / f"{role}-{index}.out", environ))
    return processes


def stop_all(processes: list[RoleProcess]) -> list[str]:
    """Stop every role within 5 s, all at once; names of those that had to be killed."""
    for process in processes:
        process.terminate()
    deadline = time.monotonic() + STOP_WITHIN_S
    return [process.name for process in processes if not process.wait(deadline)]
