"""Processes around a broker: those of a synthetic load, told what to do on their standard input, and replay as a user starts it."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

PROCESSES = 2  # of actors, and of learners


@dataclass
class Side:
    """Processes of one kind of load, told what to do on their standard input."""

    module: str
    run: str
    servers: str
    count: int
    processes: list[subprocess.Popen[str]] = field(default_factory=list)

    def start(self) -> None:
        """All of them; returns when each is ready."""
        bounds = np.linspace(0, self.count, min(PROCESSES, self.count) + 1).astype(int).tolist()
        for first, end in itertools.pairwise(bounds):
            command = [sys.executable, "-m", self.module, self.run, self.servers, str(first), str(end)]
            self.processes.append(subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True))
        for process in self.processes:
            assert process.stdout is not None
            if process.stdout.readline().strip() != "ready":
                raise SystemExit(f"{self.module} did not start")

    def pace(self, total: float) -> None:
        """A line to each: its share."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.write(f"{total / len(self.processes)}\n")
            process.stdin.flush()

    def finish(self) -> list[dict[str, Any]]:
        """End their input; what each printed last."""
        for process in self.processes:
            assert process.stdin is not None
            process.stdin.close()
            process.stdin = None
        return [json.loads(process.communicate()[0].strip().splitlines()[-1]) for process in self.processes]

    def kill(self) -> None:
        """Whatever still lives."""
        for process in self.processes:
            process.kill()
            process.wait()


def replay_processes(run: str, servers: str, count: int, folder: Path) -> list[subprocess.Popen[bytes]]:
    """As a user starts them; their logs in `folder`."""
    command = [sys.executable, "-m", "gorila.cli", "replay", "--run", run, "--bootstrap-servers", servers]
    found = []
    for index in range(count):
        with (folder / f"replay-{index}.log").open("wb") as log:
            found.append(subprocess.Popen([*command, "--index", str(index)], stdout=log, stderr=log))
    return found
