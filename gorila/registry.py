"""An external Confluent-compatible schema registry, when `kafka.schema_registry_url` is set: ids come from it, unknown ids are asked for.

Subjects are `gorila-<schema>` (one a record type, whatever the run). Plain HTTP(S) over urllib; user:password@ in the URL is basic authentication.
"""

from __future__ import annotations

import base64
import json
import logging
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

import schemas as wire
from gorila.codec import Schemas
from gorila.errors import BadRecord, BrokerError, ConfigError
from gorila.settings import CREDENTIALS

TIMEOUT_S = 5.0
LONGEST_ANSWER = 4 * 1024 * 1024
_MEDIA = "application/vnd.schemaregistry.v1+json"
_log = logging.getLogger("gorila.registry")


class Registry:
    """One registry. Raises BrokerError naming its address without credentials."""

    def __init__(self, url: str) -> None:
        shown = CREDENTIALS.sub("//***@", url)
        try:
            parts = urllib.parse.urlsplit(url)
            port = parts.port
        except ValueError as error:
            raise ConfigError("kafka.schema_registry_url", shown, f"an http:// or https:// address: {error}") from None
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError("kafka.schema_registry_url", shown, "an http:// or https:// address")
        host = (f"[{parts.hostname}]" if ":" in parts.hostname else parts.hostname) + (f":{port}" if port else "")
        self.address = f"{parts.scheme}://{host}{parts.path.rstrip('/')}"
        self._authorization = ""
        if parts.username:
            pair = f"{urllib.parse.unquote(parts.username)}:{urllib.parse.unquote(parts.password or '')}"
            self._authorization = "Basic " + base64.b64encode(pair.encode()).decode()

    def _ask(self, path: str, body: dict[str, Any] | None = None) -> Any:
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(
            self.address + path, data=data, headers={"Content-Type": _MEDIA, "Accept": _MEDIA}
        )
        if self._authorization:  # urllib would carry an ordinary header along to wherever a redirect points
            request.add_unredirected_header("Authorization", self._authorization)
        try:
            with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
                given = answer.read(LONGEST_ANSWER + 1)
            if len(given) > LONGEST_ANSWER:
                raise ValueError(f"an answer of more than {LONGEST_ANSWER} bytes")
            return json.loads(given)
        except urllib.error.HTTPError as error:
            if error.code == 404:
                return None
            raise BrokerError(
                f"schema registry at {self.address} refuses {path}: {error.code} {error.read(200)!r}"
            ) from None
        except (OSError, ValueError) as error:
            raise BrokerError(f"schema registry at {self.address} does not answer: {error}") from None

    def register(self, name: str) -> int:
        """The id of today's form of a schema; registered when it is new. Raises BrokerError."""
        answer = self._ask(f"/subjects/gorila-{name}/versions", {"schema": wire.text(name), "schemaType": "AVRO"})
        if not isinstance(answer, dict) or not isinstance(answer.get("id"), int):
            raise BrokerError(f"schema registry at {self.address} gave no id for {name}: {str(answer)[:100]}")
        return int(answer["id"])

    def lookup(self, number: int) -> str | None:
        """The schema of an id, or None. Raises BrokerError."""
        answer = self._ask(f"/schemas/ids/{number}")
        return answer["schema"] if isinstance(answer, dict) and isinstance(answer.get("schema"), str) else None


def attach(schemas: Schemas, url: str) -> Registry:
    """Write under the registry's ids and ask it for ids nobody here knows. Raises ConfigError, BrokerError."""
    registry = Registry(url)
    for name in wire.names():
        schemas.register(name, registry.register(name))

    def lookup(number: int) -> str | None:
        try:
            return registry.lookup(number)
        except BrokerError as error:
            # The record goes to dead-letters with this as its reason: it is not lost, and the service is not held up.
            _log.warning("registry.away reason=%r", str(error))
            raise BadRecord(f"unknown schema id {number}, and {error}") from None

    schemas.lookup = lookup
    return registry
