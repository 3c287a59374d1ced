"""The replay role as a process of its own, for tests that kill it: SIGTERM as the CLI has it, SIGUSR1 writes down the memory.

python replay_process.py RUN SERVERS FILE [INDEX]
"""

from __future__ import annotations

import hashlib
import os
import signal
import sys
from pathlib import Path
from typing import Any

from gorila.service import open_service
from pipelines import split_registry
from pipelines.main import run_replay
from pipelines.replay import ReplaySplit
from pipelines.split_registry import Address


def fingerprint(replay: ReplaySplit) -> str:
    """One line for the live (offset, row) sets, every leaf and N."""
    return hashlib.sha256(repr(replay.state_fingerprint()).encode()).hexdigest()


def main(run: str, servers: str, file: str, index: str = "0") -> None:
    service = open_service("replay", run, int(index), servers)

    def write_down(*_: Any) -> None:
        replay = split_registry.room(Address.of(service), service.name).replay
        Path(file + ".new").write_text(fingerprint(replay))
        os.replace(file + ".new", file)

    signal.signal(signal.SIGTERM, lambda *_: service.stop.set())
    signal.signal(signal.SIGUSR1, write_down)
    run_replay(service)


if __name__ == "__main__":
    main(*sys.argv[1:])
