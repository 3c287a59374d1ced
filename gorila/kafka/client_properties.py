"""A Java `client.properties` as librdkafka understands it: the file an operator already has works for every client of ours.

TLS and SASL keys are translated; a key that has no counterpart is a UsageError that says what to do instead, never silence. Pure: no I/O
but reading the file in `read_client_properties`.
"""

from __future__ import annotations

import re
from pathlib import Path

from gorila.errors import UsageError

SAME = frozenset(
    [
        "bootstrap.servers",
        "security.protocol",
        "sasl.mechanism",
        "sasl.mechanisms",
        "sasl.username",
        "sasl.password",
        "sasl.kerberos.service.name",
        "ssl.ca.location",
        "ssl.ca.pem",
        "ssl.certificate.location",
        "ssl.certificate.pem",
        "ssl.key.location",
        "ssl.key.pem",
        "ssl.key.password",
        "ssl.crl.location",
        "ssl.cipher.suites",
        "ssl.curves.list",
        "ssl.sigalgs.list",
        "ssl.keystore.password",
        "enable.ssl.certificate.verification",
        "client.id",
        "client.rack",
        "client.dns.lookup",
        "connections.max.idle.ms",
        "reconnect.backoff.ms",
        "reconnect.backoff.max.ms",
        "retry.backoff.ms",
        "retry.backoff.max.ms",
        "socket.timeout.ms",
        "socket.keepalive.enable",
        "broker.address.family",
    ]
)
RENAMED = {
    "request.timeout.ms": "socket.timeout.ms",
    "metadata.max.age.ms": "topic.metadata.refresh.interval.ms",
    "ssl.truststore.certificates": "ssl.ca.pem",
    "ssl.keystore.certificate.chain": "ssl.certificate.pem",
    "ssl.keystore.key": "ssl.key.pem",
}
WITHOUT_MEANING = frozenset(
    {"ssl.truststore.password", "ssl.truststore.type", "ssl.keystore.type", "ssl.protocol", "ssl.enabled.protocols"}
)
SECRET = re.compile(r"password|secret|\.pem$|jaas|\.key$", re.IGNORECASE)
_ESCAPES = {"n": "\n", "t": "\t", "r": "\r", "f": "\f"}
_ESCAPED = re.compile(r"\\(?:u([0-9a-fA-F]{4})|(.))")
_JAAS = re.compile(r'(\w+)\s*=\s*"((?:[^"\\]|\\.)*)"')


def _unescaped(match: re.Match[str]) -> str:
    return chr(int(match[1], 16)) if match[1] else _ESCAPES.get(match[2], match[2])


def parse_properties(text: str) -> dict[str, str]:
    """Java's properties format: comments, `=`, `:` or blank between key and value, continuation lines, escapes."""
    joined = re.sub(r"(?<!\\)((?:\\\\)*)\\\r?\n[ \t\f]*", r"\1", text)
    found = {}
    for line in map(str.strip, joined.splitlines()):
        if not line or line[0] in "#!":
            continue
        match = re.match(r"((?:[^\\=:\s]|\\.)+)\s*[=:\s]?\s*(.*)", line)
        if match:
            key, value = (_ESCAPED.sub(_unescaped, part) for part in match.groups())
            found[key] = value
    return found


def translate(properties: dict[str, str], source: str) -> dict[str, str]:
    """librdkafka settings for Java client properties.

    Args:
        properties: as `parse_properties` gives them.
        source: named in errors.

    Raises:
        UsageError: a key has no counterpart here; the line names it and what to use.
    """
    settings: dict[str, str] = {}

    def refuse(key: str, why: str) -> None:
        raise UsageError(f"{source}: {key}: {why}")

    trust_type = properties.get("ssl.truststore.type", "JKS").upper()
    key_type = properties.get("ssl.keystore.type", "JKS").upper()
    for key, value in properties.items():
        if key in SAME:
            settings[key] = value
        elif key in RENAMED:
            settings[RENAMED[key]] = value
        elif key in WITHOUT_MEANING:
            continue
        elif key == "ssl.truststore.location":
            if trust_type != "PEM":
                refuse(
                    key, f"a {trust_type} trust store cannot be read: export it as PEM and set ssl.truststore.type=PEM"
                )
            settings["ssl.ca.location"] = value
        elif key == "ssl.keystore.location":
            if key_type == "PEM":
                settings["ssl.certificate.location"] = settings["ssl.key.location"] = value
            elif key_type == "PKCS12":
                settings["ssl.keystore.location"] = value
            else:
                refuse(
                    key, f"a {key_type} key store cannot be read: convert it to PKCS12 or PEM and set ssl.keystore.type"
                )
        elif key == "ssl.endpoint.identification.algorithm":
            settings[key] = value or "none"
        elif key == "sasl.jaas.config":
            fields = dict(_JAAS.findall(value))
            if (
                not re.search(r"(PlainLoginModule|ScramLoginModule)\b", value)
                or not {"username", "password"} <= fields.keys()
            ):
                refuse(key, "only PlainLoginModule and ScramLoginModule with username and password are taken")
            settings["sasl.username"], settings["sasl.password"] = fields["username"], fields["password"]
        else:
            refuse(key, "has no counterpart in librdkafka or is set by gorila itself; remove it from the file")
    return settings


def read_client_properties(path: str) -> dict[str, str]:
    """`translate` of a file. Raises UsageError: unreadable, or a key without a counterpart."""
    try:
        text = Path(path).read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"kafka.client_properties {path}: {getattr(error, 'strerror', None) or error}") from None
    return translate(parse_properties(text), path)
