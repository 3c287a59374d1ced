"""Which end is wrong when Kafka does not answer: the name, the network, the port, or what listens there."""

from __future__ import annotations

import socket

CONNECT_S = 3.0


def why_unreachable(bootstrap_servers: str) -> str:
    """One line on the first server that can be judged; never raises."""
    reasons = [_why(server.strip()) for server in bootstrap_servers.split(",") if server.strip()]
    return "; ".join(dict.fromkeys(reasons)) or "no server was given"


def _why(server: str) -> str:
    host, _, port = server.rpartition(":")
    if not host or not port.isdigit():
        return f"{server!r} is not host:port"
    host = host.strip("[]")
    try:
        addresses = socket.getaddrinfo(host, int(port), type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return f"the name {host} does not resolve here ({getattr(error, 'strerror', None) or error}): this machine's DNS, or a typing error"
    refused = ""
    for family, kind, protocol, _, address in addresses:
        try:
            with socket.socket(family, kind, protocol) as link:
                link.settimeout(CONNECT_S)
                link.connect(address)
        except ConnectionRefusedError:
            refused = f"{host} is reached, but nothing listens on port {port}: the broker is down or has another port"
        except TimeoutError:
            refused = (
                refused or f"{host}:{port} does not answer within {CONNECT_S:g} s: a firewall, or the machine is down"
            )
        except OSError as error:
            refused = refused or f"{host}:{port}: {error.strerror or error}: the network between here and there"
        else:
            return (
                f"{host}:{port} accepts connections but does not speak Kafka as asked: security.protocol (TLS or not) or credentials in "
                "kafka.client_properties, another service on the port, or advertised.listeners that lead nowhere from here"
            )
    return refused
