"""Ports for what a test starts: never among those that kernels hand to outgoing connections, or one of these takes it in between."""

from __future__ import annotations

import socket

from gorila.local.broker_process import FREE_PORTS, free_port


def free_ports(count: int) -> int:
    """The first of `count` ports in a row that nobody listens on; at random, since test processes choose at the same time."""
    for _ in range(1_000):
        first = free_port()
        sockets = [socket.socket() for _ in range(count)]
        try:
            for number, taken in enumerate(sockets):
                taken.bind(("127.0.0.1", first + number))
        except OSError:
            continue
        finally:
            for taken in sockets:
                taken.close()
        return first
    raise AssertionError(f"no {count} free ports in a row from {FREE_PORTS.start} on")
