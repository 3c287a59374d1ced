"""`gorila train` as a user's shell runs it, seen from outside: its output, its processes, its topics."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil

from gorila.kafka import Cluster
from gorila.run_follower import RunFollower
from gorila.run_progress import RunProgress
from gorila.service import Service, open_service

DEADLINE_S = 240.0
ROLES = ("parameter-server", "learner", "replay", "actor", "evaluator", "monitor")


class Training:
    """A running `gorila train` in `folder`. Everything it started is gone after `close`."""

    def __init__(self, servers: str, folder: Path, *words: str, env: dict[str, str] | None = None) -> None:
        self.servers, self.folder = servers, folder
        command = [sys.executable, "-m", "gorila.cli", "train", *words, "--bootstrap-servers", servers]
        self.process = subprocess.Popen(
            command,
            cwd=folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, **(env or {})},
        )
        self.output, self.errors = "", ""
        self._readers = [threading.Thread(target=self._read_output), threading.Thread(target=self._read_errors)]
        for reader in self._readers:
            reader.start()
        self._seen: dict[int, psutil.Process] = {}
        self._follower: RunFollower | None = None
        self.progress = RunProgress()

    def _read_output(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self.output += line

    def _read_errors(self) -> None:
        assert self.process.stderr is not None
        for line in self.process.stderr:
            self.errors += line

    def until(self, what: str, happened: Callable[[], Any], *, while_running: bool = True) -> Any:
        """Wait for something to be true; its value."""
        deadline = time.monotonic() + DEADLINE_S
        while not (value := happened()):
            alive = not while_running or self.process.poll() is None
            assert alive and time.monotonic() < deadline, f"no {what}\n{self.output}\n{self.errors}\n{self.logs()}"
            time.sleep(0.05)
        return value

    @property
    def run_dir(self) -> Path:
        """Of the one run made in the folder."""
        [found] = (self.folder / "runs").iterdir()
        return found

    @property
    def run(self) -> str:
        return self.run_dir.name

    def logs(self) -> str:
        """The end of every role's output."""
        found = sorted(self.folder.glob("runs/*/logs/*.log"))
        return "\n".join(f"== {path.name}\n{path.read_text(errors='replace')[-1500:]}" for path in found)

    def role(self, name: str) -> psutil.Process | None:
        """The running process of a role (`learner`; index 0)."""
        try:
            children = psutil.Process(self.process.pid).children()
        except psutil.NoSuchProcess:
            return None
        for child in children:
            try:
                words = child.cmdline()
            except psutil.Error:
                continue
            if words[2:4] == ["gorila.cli", name]:
                self._seen[child.pid] = child
                return child
        return None

    def left_behind(self) -> list[str]:
        """Command lines of role processes seen that still run."""
        left = []
        for process in self._seen.values():
            with suppress(psutil.NoSuchProcess):  # it ends while it is asked
                if process.is_running() and process.status() != "zombie":
                    left.append(" ".join(process.cmdline()))
        return left

    def service(self) -> Service:
        """The run, as a reader of it has it."""
        return open_service("test", self.run, 0, self.servers, environ={})

    def updates(self) -> int:
        """Global version, as the run's small topics tell it."""
        if self._follower is None:
            self.until("run record", lambda: "logs in" in self.output)
            self._follower = RunFollower(self.service(), self.progress)
        self._follower.poll(0.05)
        return self.progress.updates

    def wait(self, deadline_s: float = DEADLINE_S) -> int:
        """Exit code, once it has ended by itself."""
        code = self.process.wait(deadline_s)
        for reader in self._readers:
            reader.join()
        return code

    def send(self, number: signal.Signals) -> int:
        """Exit code after a signal to the supervisor."""
        for role in ROLES:
            self.role(role)
        self.process.send_signal(number)
        return self.wait()

    def summary(self) -> dict[str, Any]:
        """summary.json."""
        found: dict[str, Any] = json.loads((self.run_dir / "summary.json").read_text())
        return found

    def cluster(self) -> Cluster:
        return Cluster(self.servers)

    def close(self) -> None:
        """End what still runs."""
        if self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(20)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        for reader in self._readers:
            reader.join()
        for process in self._seen.values():
            if process.is_running():
                process.kill()
        if self._follower is not None:
            self._follower.close()
