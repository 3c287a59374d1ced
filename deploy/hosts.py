"""Network namespaces as "hosts": each has its own network, all are joined by a bridge. Needs root, Debian's iproute2, and the right to make namespaces.

    switch   a namespace with the bridge alone: nobody's traffic is seen by the machine's own network
    NAME     one a host: lo, and eth0 with 10.78.0.N; the switch's end of its cable is vN
Hosts know each other by name (/etc/netns/SPACE/hosts, which `ip netns exec` shows as /etc/hosts). A cable can be cut, and made slow both ways.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType

NETWORK = "10.78.0"
NAMES = Path("/etc/netns")


def _do(*words: str) -> None:
    done = subprocess.run(words, check=False, capture_output=True, text=True)
    if done.returncode:
        raise SystemExit(f"{' '.join(words)}: {done.stderr.strip() or done.returncode}")


def lan_listener(address: str, port: int, name: str = "") -> Callable[[int, int], dict[str, object]]:
    """Settings of an embedded broker that listens on the loopback and, for other hosts, on `address`, where it calls itself `name`."""

    def settings(loopback: int, controller: int) -> dict[str, object]:
        plain = f"PLAINTEXT://127.0.0.1:{loopback}"
        return {
            "listeners": f"{plain},LAN://{address}:{port},CONTROLLER://127.0.0.1:{controller}",
            "advertised.listeners": f"{plain},LAN://{name or address}:{port}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,LAN:PLAINTEXT,CONTROLLER:PLAINTEXT",
            "inter.broker.listener.name": "PLAINTEXT",
        }

    return settings


def missing() -> str:
    """What this machine lacks; empty when nothing."""
    if not hasattr(os, "geteuid") or os.geteuid() != 0:
        return "root (network namespaces)"
    for tool in ("ip", "tc"):
        if shutil.which(tool) is None:
            return f"{tool} (apt-get install iproute2)"
    probe = f"gorila-probe-{uuid.uuid4().hex[:6]}"
    made = subprocess.run(("ip", "netns", "add", probe), check=False, capture_output=True, text=True)
    subprocess.run(("ip", "netns", "delete", probe), check=False, capture_output=True)
    return "" if made.returncode == 0 else f"the right to make network namespaces ({made.stderr.strip()})"


class Hosts:
    """Hosts by name. As a context manager it makes them, and removes them whatever happened.

    Args:
        tag: of hosts that another process made and will remove; empty: new ones.
    """

    def __init__(self, names: Sequence[str], tag: str = "") -> None:
        self.tag = tag or uuid.uuid4().hex[:6]
        self._numbers = {name: number for number, name in enumerate(names, 1)}
        self._switch = f"gorila-{self.tag}-switch"

    def __enter__(self) -> Hosts:
        try:
            self._make()
        except BaseException:
            self._remove()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._remove()

    def _make(self) -> None:
        names = "".join(f"{self.address(name)} {name}\n" for name in self._numbers)
        _do("ip", "netns", "add", self._switch)
        self._in_switch("ip", "link", "add", "br0", "type", "bridge")
        self._in_switch("ip", "link", "set", "br0", "up")
        for name, number in self._numbers.items():
            space = self.space(name)
            folder = NAMES / space
            folder.mkdir(parents=True)
            (folder / "hosts").write_text(f"127.0.0.1 localhost\n{names}")
            _do("ip", "netns", "add", space)
            _do("ip", "link", "add", f"v{number}", "netns", self._switch, "type", "veth", "peer", "name", "eth0", "netns", space)  # fmt: skip
            self._in_switch("ip", "link", "set", f"v{number}", "master", "br0")
            self._in_switch("ip", "link", "set", f"v{number}", "up")
            for words in (
                ("link", "set", "lo", "up"),
                ("address", "add", f"{self.address(name)}/24", "dev", "eth0"),
                ("link", "set", "eth0", "up"),
            ):
                _do(*self.command_on(name, "ip", *words))

    def _remove(self) -> None:
        for space in (*map(self.space, self._numbers), self._switch):
            subprocess.run(("ip", "netns", "delete", space), check=False, capture_output=True)
            shutil.rmtree(NAMES / space, ignore_errors=True)

    def space(self, name: str) -> str:
        """The host's namespace, as `ip netns list` shows it."""
        return f"gorila-{self.tag}-{name}"

    def address(self, name: str) -> str:
        """IPv4 address of a host."""
        return f"{NETWORK}.{self._numbers[name]}"

    def command_on(self, name: str, *words: str) -> list[str]:
        """The command line that runs `words` on a host; the process it becomes keeps its pid."""
        return ["ip", "netns", "exec", self.space(name), *words]

    def _in_switch(self, *words: str) -> None:
        _do("ip", "netns", "exec", self._switch, *words)

    def cut(self, name: str) -> None:
        """Pull the host's cable at the switch."""
        self._in_switch("ip", "link", "set", f"v{self._numbers[name]}", "down")

    def join(self, name: str) -> None:
        """Plug it in again."""
        self._in_switch("ip", "link", "set", f"v{self._numbers[name]}", "up")

    def slow(self, name: str, kilobit_per_s: int) -> None:
        """Token buckets both ways; 0: as fast as it goes again."""
        for run, end in ((self._in_switch, f"v{self._numbers[name]}"), (self._on(name), "eth0")):
            if kilobit_per_s:
                run("tc", "qdisc", "replace", "dev", end, "root", "tbf", "rate", f"{kilobit_per_s}kbit", "burst", "16kb", "latency", "200ms")  # fmt: skip
            else:
                run("tc", "qdisc", "delete", "dev", end, "root")

    def _on(self, name: str) -> Callable[..., None]:
        return lambda *words: _do(*self.command_on(name, *words))
