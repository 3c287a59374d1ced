"""`gorila schema-registry`: our schemas in Confluent's registry interface, read-only, so that any Confluent deserializer and any Kafka UI reads our topics.

Ids are those on the wire (gorila/codec.py derives them from the schemas), so nothing has to be registered. Subjects: `gorila-<schema>`, one a
record type; for a run also `<run>.<topic>-value`, as tools that go by topic look for. A schema that is known is "registered" by answering its id;
everything else that would write is refused with the interface's own error.
"""

from __future__ import annotations

import json
import re
import urllib.parse
from collections.abc import Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import schemas as wire
from gorila.codec import schema_id
from gorila.errors import LocalError
from gorila.topics import TOPOLOGY, full_name

MEDIA = "application/vnd.schemaregistry.v1+json"
LONGEST_BODY = 1024 * 1024
REQUEST_S = 30.0
NO_SUBJECT, NO_VERSION, NO_SCHEMA, BAD_SCHEMA, READ_ONLY, NO_PAGE = 40401, 40402, 40403, 42201, 42205, 404


class Refused(Exception):
    """An answer that is an error: HTTP status, the interface's code, a sentence."""

    def __init__(self, status: int, code: int, message: str) -> None:
        super().__init__(message)
        self.status, self.code = status, code


@dataclass
class Catalogue:
    """Subjects and their versions, oldest first; pure.

    Attributes:
        texts: schema by id.
        subjects: ids of a subject's versions, version 1 first.
    """

    texts: dict[int, str] = field(default_factory=dict)
    subjects: dict[str, list[int]] = field(default_factory=dict)

    def add(self, subject: str, text: str, number: int | None = None) -> None:
        """Another version of a subject, unless it has it."""
        number = schema_id(text) if number is None else number
        self.texts[number] = text
        versions = self.subjects.setdefault(subject, [])
        if number not in versions:
            versions.append(number)

    def answer(self, path: str) -> Any:
        """What GET of a path answers. Raises Refused."""
        parts = [urllib.parse.unquote(part) for part in path.strip("/").split("/") if part]
        match parts:
            case []:
                return {}
            case ["subjects"]:
                return sorted(self.subjects)
            case ["subjects", subject, "versions"]:
                return list(range(1, len(self._versions(subject)) + 1))
            case ["subjects", subject, "versions", version]:
                return self._version(subject, version)
            case ["subjects", subject, "versions", version, "schema"]:
                return json.loads(self._version(subject, version)["schema"])
            case ["subjects", subject, "versions", version, "referencedby"]:
                self._version(subject, version)
                return []
            case ["schemas", "types"]:
                return ["AVRO"]
            case ["schemas"]:
                return [
                    self._version(s, str(v + 1)) for s in sorted(self.subjects) for v in range(len(self.subjects[s]))
                ]
            case ["schemas", "ids", number]:
                return {"schema": self._text(number), "schemaType": "AVRO"}
            case ["schemas", "ids", number, "schema"]:
                return json.loads(self._text(number))
            case ["schemas", "ids", number, "subjects"]:
                return sorted({subject for subject, _ in self._uses(number)})
            case ["schemas", "ids", number, "versions"]:
                return [{"subject": subject, "version": version} for subject, version in self._uses(number)]
            case ["config"] | ["config", _]:
                return {"compatibilityLevel": "BACKWARD_TRANSITIVE"}
            case ["mode"] | ["mode", _]:
                return {"mode": "READONLY"}
            case ["contexts"]:
                return ["."]
        raise Refused(404, NO_PAGE, "HTTP 404 Not Found")

    def find(self, path: str, body: Mapping[str, Any]) -> Any:
        """What POST answers: a schema that is known is found; new ones are refused. Raises Refused."""
        parts = [urllib.parse.unquote(part) for part in path.strip("/").split("/") if part]
        if not (len(parts) in (2, 3) and parts[0] == "subjects" and parts[2:] in ([], ["versions"])):
            raise Refused(405, 405, "this registry is read-only")
        subject, text = parts[1], body.get("schema")
        try:
            number = schema_id(text) if isinstance(text, str) and body.get("schemaType", "AVRO") == "AVRO" else None
        except Exception:  # whatever Avro's parser finds wrong with a stranger's schema
            number = None
        if number is None:
            raise Refused(422, BAD_SCHEMA, "an Avro schema is expected")
        # The id of a schema is its content's, so it may be known under a number that a run's own registry gave.
        known = [i for i in self.subjects.get(subject, []) if i == number or schema_id(self.texts[i]) == number]
        if known:
            version = self.subjects[subject].index(known[0]) + 1
            return {"subject": subject, "version": version, "id": known[0], "schema": self.texts[known[0]]}
        if parts[2:]:
            raise Refused(422, READ_ONLY, f"Subject {subject} is in read-only mode")
        self._versions(subject)
        raise Refused(404, NO_SCHEMA, "Schema not found")

    def _versions(self, subject: str) -> list[int]:
        if subject not in self.subjects:
            raise Refused(404, NO_SUBJECT, f"Subject '{subject}' not found.")
        return self.subjects[subject]

    def _version(self, subject: str, version: str) -> dict[str, Any]:
        versions = self._versions(subject)
        number = (
            len(versions) if version in ("latest", "-1") else int(version) if re.fullmatch(r"\d{1,9}", version) else 0
        )
        if not 1 <= number <= len(versions):
            raise Refused(404, NO_VERSION, f"Version {version} not found.")
        found = versions[number - 1]
        return {"subject": subject, "version": number, "id": found, "schemaType": "AVRO", "schema": self.texts[found]}

    def _text(self, number: str) -> str:
        text = self.texts.get(int(number)) if re.fullmatch(r"\d{1,10}", number) else None
        if text is None:
            raise Refused(404, NO_SCHEMA, f"Schema {number} not found")
        return text

    def _uses(self, number: str) -> list[tuple[str, int]]:
        self._text(number)
        return [(s, ids.index(int(number)) + 1) for s, ids in sorted(self.subjects.items()) if int(number) in ids]


def catalogue(runs: Mapping[str, Mapping[str, str]] | None = None) -> Catalogue:
    """Ours, in every form ever released; and for each run the topics, with the ids its record carries.

    Args:
        runs: {run: {schema id: schema text}}.
    """
    made = Catalogue()
    for name in wire.names():
        for old in wire.released(name):
            made.add(f"gorila-{name}", json.dumps(old))
        made.add(f"gorila-{name}", wire.text(name))
    for run, texts in (runs or {}).items():
        by_name = {json.loads(text)["name"]: (int(number), text) for number, text in texts.items()}
        for topic in TOPOLOGY:
            for name in topic.schemas:
                number, text = by_name.get(wire.load(name)["name"], (schema_id(wire.text(name)), wire.text(name)))
                made.add(f"{full_name(run, topic.name)}-value", text, number)
    return made


class SchemaServer:
    """Serves a catalogue until `close`.

    Args:
        host, port: where; port 0 asks the system for a free one (`port` says which).

    Raises:
        LocalError: the address cannot be listened on.
    """

    def __init__(self, shown: Catalogue, host: str, port: int) -> None:
        try:
            self._server = _Server((host, port), type("Handler", (_Handler,), {"shown": shown}))
        except (OSError, OverflowError) as error:
            reason = getattr(error, "strerror", None) or error
            raise LocalError(f"--port {port}: cannot listen on {host}: {reason}") from None
        self.port = int(self._server.server_address[1])

    def serve(self) -> None:
        """Until `close` is called from another thread, or Ctrl-C."""
        self._server.serve_forever(poll_interval=0.2)

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    allow_reuse_address = True


class _Handler(BaseHTTPRequestHandler):
    shown: Catalogue
    timeout = REQUEST_S
    protocol_version = "HTTP/1.1"
    server_version = "gorila"
    sys_version = ""

    def do_GET(self) -> None:
        """Reading."""
        self._with(self.shown.answer)

    def do_POST(self) -> None:
        """Looking a schema up by its text."""

        def answer(path: str) -> Any:
            length = self.headers.get("Content-Length", "")
            if not length.isdigit() or int(length) > LONGEST_BODY:
                self.close_connection = True  # what follows on it is not read
                raise Refused(413, 413, f"a body of at most {LONGEST_BODY} bytes, with its length, is expected")
            try:
                body = json.loads(self.rfile.read(int(length)))
            except (ValueError, RecursionError):
                raise Refused(422, BAD_SCHEMA, "a JSON object is expected") from None
            return self.shown.find(path, body if isinstance(body, dict) else {})

        self._with(answer)

    def do_PUT(self) -> None:
        """Refused, as every change."""

        def answer(_: str) -> Any:
            self.close_connection = True
            raise Refused(405, 405, "this registry is read-only")

        self._with(answer)

    do_DELETE = do_PUT

    def _with(self, answer: Any) -> None:
        try:
            status, body = 200, answer(self.path.split("?", 1)[0])
        except Refused as refused:
            status, body = refused.status, {"error_code": refused.code, "message": str(refused)}
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", MEDIA)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, format: str, *arguments: Any) -> None:  # noqa: A002 — the base class's name
        """Nothing: tools ask often."""
