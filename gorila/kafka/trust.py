"""Why TLS with a broker failed. librdkafka says "could not be verified" for an ended certificate, a wrong name and a stranger's signature alike.

One handshake of Python's own ssl module with the same settings tells them apart. Only ever asked after librdkafka has failed.
"""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Mapping
from typing import Any

PROBE_S = 2.0
_REFUSED = "certificate verify failed"
_PLAIN = "connecting to a PLAINTEXT broker listener"
_STRANGER = "it is signed by an authority this client does not know: ssl.truststore.certificates or ssl.ca.location must hold it"


def why_not_trusted(text: str, servers: str, settings: Mapping[str, Any]) -> str:
    """What is wrong with the broker's certificate, in words; empty when it is something else that may pass.

    Args:
        text: librdkafka's error, which names the broker: `sasl_ssl://host:port/bootstrap: SSL handshake failed: …`.
        servers: host:port[,host:port] where it does not.
        settings: librdkafka's.
    """
    if _PLAIN in text:
        return "it speaks no TLS there: security.protocol, or the port, is another one's"
    if _REFUSED not in text:
        return ""
    named = re.search(r"ssl://([^/]+)/", text)
    host, port = _address(named[1] if named else servers)
    try:
        with (
            socket.create_connection((host, port), PROBE_S) as plain,
            _context(settings).wrap_socket(plain, server_hostname=host),
        ):
            return "its certificate could not be verified"
    except ssl.SSLCertVerificationError as error:
        return _words(error, host)
    except (OSError, ValueError):
        return "its certificate could not be verified"


def speaks_tls(servers: str) -> bool:
    """Whether a TLS server listens at the first address: asked when a client without TLS got no answer."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE  # nothing is sent: the question is only whether it is TLS
    try:
        host, port = _address(servers)
        with socket.create_connection((host, port), PROBE_S) as plain, context.wrap_socket(plain):
            return True
    except (OSError, ValueError):
        return False


def _words(error: ssl.SSLCertVerificationError, host: str) -> str:
    said = error.verify_message
    if "expired" in said:
        return "its certificate has expired"
    if "not yet valid" in said:
        return "its certificate is not valid yet: compare the clocks"
    if "mismatch" in said:
        return f"its certificate is not for the name {host}"
    if "self-signed" in said or "self signed" in said or "issuer" in said:
        return _STRANGER
    return f"its certificate could not be verified: {said}"


def _address(servers: str) -> tuple[str, int]:
    host, _, port = servers.split(",", maxsplit=1)[0].strip().rpartition(":")
    return host.strip("[]"), int(port)


def _context(settings: Mapping[str, Any]) -> ssl.SSLContext:
    file, text = settings.get("ssl.ca.location"), settings.get("ssl.ca.pem")
    context = ssl.create_default_context(cafile=file if file not in (None, "probe") else None, cadata=text)
    context.check_hostname = settings.get("ssl.endpoint.identification.algorithm", "https") != "none"
    return context
