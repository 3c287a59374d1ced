"""Prism, Beam's local portable runner: found, started for one command, and ended with it.

python -m pipelines.prism BINARY ARGUMENT…      is that binary, which ends when the process that started it does (Linux)
"""

from __future__ import annotations

import ctypes
import logging
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gorila.errors import LocalError

BUILT = Path(__file__).parent.parent / ".prism" / "prism"
START_S = 30.0
_PR_SET_PDEATHSIG = 1


def prism_binary() -> Path | None:
    """What `make prism` built in this checkout, else `prism` on PATH; None where there is none."""
    if os.access(BUILT, os.X_OK):
        return BUILT
    found = shutil.which("prism")
    return Path(found) if found else None


@contextmanager
def prism(log: logging.Logger, port: int) -> Iterator[str]:
    """Prism's job server on loopback until the block is left; yields HOST:PORT. Raises LocalError: not built, or it does not start."""
    binary = prism_binary()
    if binary is None:
        raise LocalError("Prism is not here: `make prism` builds it where Go is installed, or put `prism` on PATH")
    command = [sys.executable, "-m", "pipelines.prism", str(binary), f"--job_port={port}", "--serve_http=false"]
    process = subprocess.Popen([*command, "--log_level=warn", "--log_kind=text"], stdin=subprocess.DEVNULL)
    try:
        deadline = time.monotonic() + START_S
        while not _listens(port):
            if process.poll() is not None or time.monotonic() > deadline:
                raise LocalError(f"Prism ({binary}) did not start: exit code {process.poll()}")
            time.sleep(0.02)
        log.info(f"prism.start binary={binary} port={port}")
        yield f"127.0.0.1:{port}"
    finally:
        process.terminate()
        try:
            process.wait(2.0)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _listens(port: int) -> bool:
    with socket.socket() as probe:
        return probe.connect_ex(("127.0.0.1", port)) == 0


def _become(binary: str, arguments: list[str]) -> None:
    """Ask the kernel for a SIGTERM when the parent dies, then be the binary."""
    parent = os.getppid()
    prctl = getattr(ctypes.CDLL(None), "prctl", None)
    if prctl is not None:
        prctl(_PR_SET_PDEATHSIG, int(signal.SIGTERM), 0, 0, 0)
    if os.getppid() != parent:
        sys.exit(0)
    os.execv(binary, [binary, *arguments])


if __name__ == "__main__":
    _become(sys.argv[1], sys.argv[2:])
