"""The broker's process: which one it is, whether it lives, and how it is stopped.

A pid alone proves nothing (it may have been given to another process since), so each start puts a random token on the
broker's command line and into `broker.json`. Only a process that carries the token is ever signalled.
"""

from __future__ import annotations

import json
import os
import secrets
import signal
import socket
import ssl
import struct
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil

from gorila.errors import BrokerError, LocalError

TOKEN_OPTION = "-Dgorila.broker.token="
_POLL_S = 0.02


@dataclass(frozen=True)
class BrokerRecord:
    """What `broker.json` in the data folder says about the broker that was started there."""

    pid: int
    token: str
    port: int
    controller_port: int

    @property
    def bootstrap_servers(self) -> str:
        return f"127.0.0.1:{self.port}"


def read_record(record_file: Path) -> BrokerRecord | None:
    """The record, or None when there is none or it is damaged (a broker is then unknown, and never touched)."""
    try:
        record = BrokerRecord(**json.loads(record_file.read_text()))
    except (OSError, ValueError, TypeError):
        return None
    numbers = (record.pid, record.port, record.controller_port)
    return record if all(isinstance(n, int) and n > 0 for n in numbers) and record.token else None


def write_record(record_file: Path, record: BrokerRecord) -> None:
    """Replace the record atomically. Raises OSError."""
    partial = record_file.with_suffix(".partial")
    partial.write_text(json.dumps(asdict(record)))
    os.replace(partial, record_file)


def is_alive(record: BrokerRecord) -> bool:
    """True if the recorded pid is running and is the very process that was started with this token."""
    try:
        process = psutil.Process(record.pid)
        return process.status() != psutil.STATUS_ZOMBIE and TOKEN_OPTION + record.token in process.cmdline()
    except psutil.Error:
        return False


def uptime_s(record: BrokerRecord) -> float:
    """Seconds since the process started; 0 when it is gone."""
    try:
        return max(0.0, time.time() - float(psutil.Process(record.pid).create_time()))
    except psutil.Error:
        return 0.0


def stop_process(record: BrokerRecord, timeout_s: float) -> bool:
    """SIGTERM, wait, SIGKILL after `timeout_s`. Returns whether there was anything to stop.

    Raises BrokerError if the process belongs to another user or outlives SIGKILL.
    """
    if not is_alive(record):
        return False
    for number, wait_s in ((signal.SIGTERM, timeout_s), (signal.SIGKILL, 10.0)):
        try:
            os.kill(record.pid, number)
        except ProcessLookupError:
            return True
        except PermissionError:
            raise BrokerError(f"broker with pid {record.pid} belongs to another user and cannot be stopped") from None
        deadline = time.monotonic() + wait_s
        while time.monotonic() < deadline:
            if not is_alive(record):
                return True
            time.sleep(_POLL_S)
    raise BrokerError(f"broker with pid {record.pid} does not end, even after SIGKILL")


def answers_kafka(port: int, ca_file: Path | None = None) -> bool:
    """True if a Kafka on the loopback port answers an ApiVersions request (version 0, KIP-35), which needs no user.

    Args:
        ca_file: of a broker that speaks TLS: the authority that signed its certificate.
    """
    request = struct.pack(">hhih", 18, 0, 1, -1)
    timeout_s = 1.0 if ca_file is None else 5.0  # a cold JVM's first handshake, on a busy machine
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=timeout_s) as plain:
            connection = plain
            if ca_file is not None:
                connection = ssl.create_default_context(cafile=ca_file).wrap_socket(plain, server_hostname="127.0.0.1")
            with connection:
                connection.sendall(struct.pack(">i", len(request)) + request)
                head = b""
                while len(head) < 10 and (more := connection.recv(10 - len(head))):
                    head += more
    except OSError:
        return False
    if len(head) < 10:
        return False
    _, correlation_id, error_code = struct.unpack(">iih", head)
    return bool(correlation_id == 1 and error_code == 0)


def port_is_free(port: int) -> bool:
    """True if a server may listen on the loopback port now."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as Java does: TIME_WAIT is no obstacle
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def becomes_free(port: int, within_s: float = 3.0) -> bool:
    """`port_is_free`, with patience: a process that was killed a moment ago may still be giving its port back."""
    deadline = time.monotonic() + within_s
    while not port_is_free(port):
        if time.monotonic() >= deadline:
            return False
        time.sleep(0.05)
    return True


# Below what kernels hand to outgoing connections (from 32,768 on Linux): a stopped broker's port must still be free when it starts again.
FREE_PORTS = range(20_000, 32_000)


def free_port(*, other_than: int = 0) -> int:
    """A port nobody listens on, which no outgoing connection will take either. Raises LocalError where there is none."""
    for _ in range(1_000):
        port = secrets.choice(FREE_PORTS)
        if port != other_than and port_is_free(port):
            return port
    raise LocalError(f"no free port on 127.0.0.1 between {FREE_PORTS.start} and {FREE_PORTS.stop}")
