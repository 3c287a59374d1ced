"""The embedded broker: a real Apache Kafka, one KRaft node, in a folder of the user's choosing."""

from __future__ import annotations

import base64
import os
import subprocess
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from gorila.errors import BrokerError, GorilaError, LocalError, UsageError
from gorila.local.broker_process import (
    TOKEN_OPTION,
    BrokerRecord,
    answers_kafka,
    becomes_free,
    free_port,
    is_alive,
    port_is_free,
    read_record,
    stop_process,
    uptime_s,
    write_record,
)
from gorila.local.classpath import JavaClassPath, java_class_path
from gorila.local.data_folder import DataFolder
from gorila.local.secured import Secured, write_private
from gorila.local.server_properties import JVM_OPTIONS, server_properties

DEFAULT_FOLDER = Path(".gorila/broker")
BOOTSTRAP_VARIABLE = "GORILA__KAFKA__BOOTSTRAP_SERVERS"
PROPERTIES_VARIABLE = "GORILA__KAFKA__CLIENT_PROPERTIES"
MIN_FREE_BYTES = 256 * 1024 * 1024
_POLL_S = 0.02


@dataclass(frozen=True)
class BrokerAddress:
    """A running embedded broker; `client_properties`: its administrator's, where it is a secured one."""

    bootstrap_servers: str
    pid: int
    folder: Path
    client_properties: Path | None = None


@dataclass(frozen=True)
class BrokerStatus:
    """A running embedded broker, as `gorila broker status` shows it."""

    bootstrap_servers: str
    pid: int
    folder: Path
    uptime_s: float
    cluster_id: str
    answering: bool
    client_properties: Path | None = None


class Broker:
    """Kafka in `folder`, listening on the loopback `port` (None: the last one used there if free, else any free one).

    As a context manager it stops on the way out what it started itself; a broker that was already running in the
    folder is used and left alone. `secure`: with TLS, users and ACLs (secured.py); a folder once made secure stays so.
    `also`: (port, controller port) → settings that replace or join a plain broker's.
    """

    def __init__(
        self,
        folder: Path | str = DEFAULT_FOLDER,
        port: int | None = None,
        *,
        secure: bool = False,
        min_free_bytes: int = MIN_FREE_BYTES,
        also: Callable[[int, int], Mapping[str, object]] | None = None,
    ) -> None:
        if port is not None and not 0 <= port <= 65535:
            raise UsageError(f"port {port} is not allowed: 1 to 65535, or 0 for a free one")
        self.data = DataFolder(folder)
        self.port = port or None
        self.secure = secure
        self.min_free_bytes = min_free_bytes
        self._also = also or (lambda port, controller_port: {})
        self.started_here = False
        self._child: subprocess.Popen[bytes] | None = None

    @property
    def folder(self) -> Path:
        return self.data.path

    def start(self, timeout_s: float = 60.0) -> BrokerAddress:
        """Start Kafka and return once it answers; if one already runs in the folder, return that one.

        Raises LocalError (port in use, folder not writable, disk full, no jars) and BrokerError with the last lines
        of Kafka's log when it does not come up within `timeout_s`.
        """
        with self.data.one_line_errors(), self.data.locked():
            running = self._running()
            if self.secure and Secured.of(self.folder) is None and (running or self.data.cluster_id()):
                raise LocalError(f"{self.folder} holds a broker without security, which stays so: choose another --dir")
            if running is not None:
                if self.port not in (None, running.port):
                    raise LocalError(
                        f"a broker already runs in {self.folder} on port {running.port}, not {self.port}: "
                        "stop it, or choose another --dir"
                    )
                try:
                    self._await_ready(running, time.monotonic() + timeout_s)
                    return self._address(running)
                except _Ended:
                    pass  # it was on its way out, stopped or killed a moment ago
            class_path = java_class_path()
            self.data.check_free(self.min_free_bytes)
            last = read_record(self.data.record_file)
            for _ in range(3):  # a free port may be gone again before Kafka listens on it
                try:
                    record = self._launch(class_path, last, time.monotonic() + timeout_s)
                except _PortLost:
                    last = None
                    continue
                self.started_here = True
                return self._address(record)
        raise LocalError("three times in a row a free port was taken by another program while Kafka started: try again")

    def stop(self, timeout_s: float = 30.0) -> bool:
        """Stop the broker that was started in the folder, by anyone. Returns whether one was running.

        The record stays: the next start takes the same port. Raises BrokerError if the process cannot be ended.
        """
        record = read_record(self.data.record_file)
        stopped = record is not None and stop_process(record, timeout_s)
        if self._child is not None:
            self._child.wait()
            self._child = None
        self.started_here = False
        return stopped

    def status(self) -> BrokerStatus | None:
        """The broker running in the folder, or None."""
        record = self._running()
        if record is None:
            return None
        return BrokerStatus(
            record.bootstrap_servers,
            record.pid,
            self.folder,
            uptime_s(record),
            self.data.cluster_id() or "",
            answers_kafka(record.port, self._ca_file()),
            self._client_properties(),
        )

    def __enter__(self) -> Broker:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.started_here:
            self.stop()

    def _running(self) -> BrokerRecord | None:
        record = read_record(self.data.record_file)
        return record if record is not None and is_alive(record) else None

    def _address(self, record: BrokerRecord) -> BrokerAddress:
        return BrokerAddress(record.bootstrap_servers, record.pid, self.folder, self._client_properties())

    def _ca_file(self) -> Path | None:
        secured = Secured.of(self.folder)
        return secured.ca_file if secured else None

    def _client_properties(self) -> Path | None:
        secured = Secured.of(self.folder)
        return secured.client_properties() if secured else None

    def _launch(self, class_path: JavaClassPath, last: BrokerRecord | None, deadline: float) -> BrokerRecord:
        port = self.port
        if port is not None and not port_is_free(port):
            raise LocalError(f"port {port} is in use: choose another with --port, or leave it out for a free one")
        if port is None:
            port = last.port if last is not None and becomes_free(last.port) else free_port()
        token, controller_port = uuid.uuid4().hex, free_port(other_than=port)
        secured = Secured.of(self.folder) or (Secured.create(self.folder) if self.secure else None)
        if secured is not None:
            secured.renew(port)
        also = (secured.server_properties if secured else self._also)(port, controller_port)
        write_private(self.data.properties_file, server_properties(port, controller_port, also))
        self.data.keep_previous_log()
        with open(self.data.log_file, "wb") as log:
            if self.data.cluster_id() is None:
                self._format(class_path, log.fileno(), secured)
            child = self._java(class_path, log.fileno(), TOKEN_OPTION + token, "kafka.Kafka", "server.properties")
        self._child = child
        try:
            record = BrokerRecord(child.pid, token, port, controller_port)
            write_record(self.data.record_file, record)
            self._await_ready(record, deadline)
            return record
        except BaseException:
            _end(child)
            self._child = None
            raise

    def _format(self, class_path: JavaClassPath, log: int, secured: Secured | None) -> None:
        """Prepare an empty data folder under a new cluster id, with its users."""
        cluster_id = "-"
        while cluster_id.startswith("-"):  # it would be read as an option
            cluster_id = base64.urlsafe_b64encode(uuid.uuid4().bytes).decode().rstrip("=")
        arguments = ["format", "--cluster-id", cluster_id, "--config", "server.properties", "--ignore-formatted"]
        users = secured.format_arguments() if secured else None
        if users:
            arguments.append(f"@{users.relative_to(self.folder)}")
        # It prints the users' SCRAM keys to its standard output: failures are on the other one.
        out = subprocess.DEVNULL if users else log
        child = self._java(class_path, log, "-Dgorila.step=format", "kafka.tools.StorageTool", *arguments, out=out)
        try:
            code = child.wait()
        except BaseException:
            _end(child)
            raise
        finally:
            if users:
                users.unlink()
        if code != 0:
            raise self._start_failure(f"Kafka could not prepare {self.folder}")

    def _java(
        self, class_path: JavaClassPath, log: int, option: str, main_class: str, *args: str, out: int | None = None
    ) -> subprocess.Popen[bytes]:
        """Run a class with the data folder as its working folder, so that no path of the user's needs quoting.

        In its own session: Ctrl-C in the terminal it was started from must not reach it.
        """
        return subprocess.Popen(
            class_path.command(main_class, *args, options=(*JVM_OPTIONS, option)),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            stdout=log if out is None else out,
            stderr=log,
            start_new_session=True,
            env=os.environ | {"LC_ALL": "C.UTF-8"},  # else Java garbles folder names beyond ASCII
        )

    def _await_ready(self, record: BrokerRecord, deadline: float) -> None:
        """Return once the broker answers. Kafka opens its port only when it is ready to serve."""
        child = self._child if self._child is not None and self._child.pid == record.pid else None
        ca_file = self._ca_file()
        while not answers_kafka(record.port, ca_file):
            ended = child.poll() is not None if child is not None else not is_alive(record)
            if ended:
                raise self._start_failure("Kafka ended while starting", _Ended)
            if time.monotonic() > deadline:
                raise self._start_failure("Kafka does not answer")
            time.sleep(_POLL_S)

    def _start_failure(self, what: str, kind: type[BrokerError] = BrokerError) -> GorilaError:
        tail = self.data.log_tail()
        if "Address already in use" in tail:
            return _PortLost(what)
        if "No space left on device" in tail:
            return self.data.disk_full()
        return kind(f"{what}; the log {self.data.log_file} ends with\n  {tail or '(nothing)'}")


class _Ended(BrokerError):
    """The process is gone before it answered."""


class _PortLost(BrokerError):
    """A port that was free when it was chosen was taken before Kafka listened on it."""


def _end(child: subprocess.Popen[bytes]) -> None:
    if child.poll() is None:
        child.kill()
    child.wait()
