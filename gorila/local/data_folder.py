"""The broker's folder on disk: what lies where, one start at a time, and disk troubles as one line.

<folder>/broker.json        the process that was started here (broker_process.py)
<folder>/broker.log         what Kafka says; the previous start's is broker.log.1
<folder>/server.properties  written at every start, because the ports may have changed
<folder>/secure/ clients/   of a secured broker (secured.py)
<folder>/kafka/             Kafka's own data: topics and the metadata log survive restarts
"""

from __future__ import annotations

import errno
import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gorila.errors import LocalError

_LOG_TAIL_LINES = 12


class DataFolder:
    """Paths and guards of one broker folder."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path).expanduser().absolute()
        self.record_file = self.path / "broker.json"
        self.log_file = self.path / "broker.log"
        self.properties_file = self.path / "server.properties"

    def cluster_id(self) -> str | None:
        """The cluster id Kafka's data was formatted with, or None before the first start."""
        try:
            lines = (self.path / "kafka" / "meta.properties").read_text().splitlines()
        except OSError:
            return None
        return next((line.partition("=")[2] for line in lines if line.startswith("cluster.id=")), None)

    def keep_previous_log(self) -> None:
        """Move broker.log aside, so that a failure shows what this start said. Raises OSError."""
        if self.log_file.exists():
            os.replace(self.log_file, self.path / "broker.log.1")

    def log_tail(self) -> str:
        """The last lines of broker.log without Java's stack frames, which follow the cause and tell a user nothing."""
        try:
            text = self.log_file.read_text(errors="replace")
        except OSError:
            return ""
        said = [line.strip() for line in text.splitlines() if line.strip() and not line.startswith(("\tat ", "\t..."))]
        return "\n  ".join(said[-_LOG_TAIL_LINES:])

    @contextmanager
    def locked(self) -> Iterator[None]:
        """One start at a time: the second waits, then finds the first one's broker. Makes the folder. Raises OSError."""
        self.path.mkdir(parents=True, exist_ok=True)
        with open(self.path / "start.lock", "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield

    def check_free(self, min_free_bytes: int) -> None:
        """Raise LocalError on a nearly full disk: Kafka maps its index files and would die of a memory fault, unexplained."""
        free = shutil.disk_usage(self.path).free
        if free < min_free_bytes:
            raise self.disk_full(f"{free // 2**20} MiB free, the broker needs {min_free_bytes // 2**20} MiB")

    def disk_full(self, detail: str = "no space left") -> LocalError:
        return LocalError(f"disk full at {self.path}: {detail}; make room, or choose another --dir")

    @contextmanager
    def one_line_errors(self) -> Iterator[None]:
        """OSError from files in the folder as LocalError."""
        try:
            yield
        except OSError as error:
            if error.errno == errno.ENOSPC:
                raise self.disk_full() from None
            reason = error.strerror or str(error)
            raise LocalError(f"cannot keep the broker's data in {self.path}: {reason}; choose another --dir") from None
