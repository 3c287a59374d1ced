"""Two network namespaces joined by a link of a given rate both ways, and a Kafka broker in one of them. Needs root and Debian's iproute2."""

from __future__ import annotations

import os
import shutil
import subprocess
import time
import uuid
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType

from gorila.local.broker_process import answers_kafka, free_port
from gorila.local.classpath import java_class_path
from gorila.local.server_properties import JVM_OPTIONS, server_properties

NEAR, FAR = "10.77.0.1", "10.77.0.2"


def _do(*words: str) -> str:
    return subprocess.run(words, check=True, capture_output=True, text=True).stdout


def missing() -> str:
    """What this machine lacks; empty when nothing."""
    if os.geteuid() != 0:
        return "root (network namespaces)"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"{tool} (apt-get install iproute2)"
    return ""


class ShapedLink:
    """`near` and `far`, joined by a veth pair; token buckets on both ends. As a context manager it removes what it made."""

    def __init__(self, megabit_per_s: int) -> None:
        tag = uuid.uuid4().hex[:6]
        self.near, self.far = f"near-{tag}", f"far-{tag}"
        self._ends = (f"vn{tag}", f"vf{tag}")
        self._rate = f"{megabit_per_s}mbit"

    def __enter__(self) -> ShapedLink:
        for space in (self.near, self.far):
            _do("ip", "netns", "add", space)
            self.run_in(space, "ip", "link", "set", "lo", "up")
        near_end, far_end = self._ends
        _do("ip", "link", "add", near_end, "netns", self.near, "type", "veth", "peer", "name", far_end, "netns", self.far)  # fmt: skip
        for space, end, address in ((self.near, near_end, NEAR), (self.far, far_end, FAR)):
            self.run_in(space, "ip", "address", "add", f"{address}/24", "dev", end)
            self.run_in(space, "ip", "link", "set", end, "up")
            self.run_in(space, "tc", "qdisc", "add", "dev", end, "root", "tbf", "rate", self._rate, "burst", "256kb", "latency", "50ms")  # fmt: skip
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for space in (self.near, self.far):
            subprocess.run(("ip", "netns", "delete", space), check=False)

    def run_in(self, space: str, *words: str) -> str:
        """Run to the end; its output."""
        return _do(*self.command_in(space, *words))

    def command_in(self, space: str, *words: str) -> list[str]:
        """The command line that runs `words` in a namespace."""
        return ["ip", "netns", "exec", space, *words]

    def far_bytes(self) -> tuple[int, int]:
        """Bytes that went (up from far, down to far) over the link so far, headers included."""
        folder = f"/sys/class/net/{self._ends[1]}/statistics"
        up, down = self.run_in(self.far, "cat", f"{folder}/tx_bytes", f"{folder}/rx_bytes").split()
        return int(up), int(down)


class NearBroker:
    """Kafka in this process's namespace, listening on NEAR. (The product's embedded broker listens on the loopback alone.)"""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.port, controller = free_port(), free_port()
        also = {
            "listeners": f"PLAINTEXT://{NEAR}:{self.port},PROBE://127.0.0.1:{self.port + 1},CONTROLLER://127.0.0.1:{controller}",
            "advertised.listeners": f"PLAINTEXT://{NEAR}:{self.port},PROBE://127.0.0.1:{self.port + 1}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,PROBE:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "inter.broker.listener.name": "PLAINTEXT",
        }
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "server.properties").write_text(server_properties(self.port, controller, also))
        self.bootstrap_servers = f"{NEAR}:{self.port}"

    def __enter__(self) -> NearBroker:
        paths = java_class_path()
        with (self._folder / "broker.log").open("wb") as log:

            def java(main: str, *words: str) -> subprocess.Popen[bytes]:
                command = paths.command(main, *words, options=JVM_OPTIONS)
                return subprocess.Popen(command, cwd=self._folder, stdout=log, stderr=log, start_new_session=True)

            cluster = uuid.uuid4().hex[:22]
            java("kafka.tools.StorageTool", "format", "--cluster-id", cluster, "--config", "server.properties").wait()
            self._child = java("kafka.Kafka", "server.properties")
        deadline_s = time.monotonic() + 120
        while not answers_kafka(self.port + 1):
            if self._child.poll() is not None or time.monotonic() > deadline_s:
                raise SystemExit(f"the broker did not start: {(self._folder / 'broker.log').read_text()[-800:]}")
            time.sleep(0.2)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        end([self._child])


def end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """SIGTERM, and SIGKILL for what does not listen."""
    for process in processes:
        process.terminate()
    for process in processes:
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
