"""An external registry over real HTTP: ids come from it, unknown ids are asked for, its absence is one line."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

import schemas as wire
from gorila.codec import HEADER, Schemas
from gorila.errors import BadRecord, BrokerError, ConfigError
from gorila.messages import Episode
from gorila.registry import Registry, attach

EPISODE = Episode("actor", "a", 0, 1.5, 9, True, 0.5, 1, 1, 1)


class Handler(BaseHTTPRequestHandler):
    """As much of Confluent's interface as there is to use: registering is idempotent, ids count up from 1,000."""

    def _answer(self, status: int, body: object) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        server: Fake = self.server  # type: ignore[assignment]
        server.requests.append((self.path, self.headers.get("Authorization")))
        if server.refuses:
            return self._answer(409, {"message": "incompatible"})
        if body["schema"] not in server.texts:
            server.texts.append(body["schema"])
        return self._answer(200, {"id": 1000 + server.texts.index(body["schema"])})

    def do_GET(self) -> None:
        server: Fake = self.server  # type: ignore[assignment]
        server.requests.append((self.path, self.headers.get("Authorization")))
        number = int(self.path.rsplit("/", 1)[1]) - 1000
        if 0 <= number < len(server.texts):
            return self._answer(200, {"schema": server.texts[number]})
        return self._answer(404, {"error_code": 40403})

    def log_message(self, *_: object) -> None:
        pass


class Fake(ThreadingHTTPServer):
    texts: list[str]
    requests: list[tuple[str, str | None]]
    refuses = False


@pytest.fixture
def server() -> Iterator[Fake]:
    made = Fake(("127.0.0.1", 0), Handler)
    made.texts, made.requests = [], []
    thread = threading.Thread(target=made.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield made
    made.shutdown()
    thread.join()
    made.server_close()


def url(server: Fake, user: str = "") -> str:
    return f"http://{user}127.0.0.1:{server.server_address[1]}"


def test_records_are_written_under_the_registrys_ids_and_registering_again_gives_the_same(server: Fake):
    first, second = Schemas(), Schemas()
    attach(first, url(server))
    attach(second, url(server))
    data = first.encode(EPISODE)
    assert HEADER.unpack_from(data)[1] >= 1000
    assert second.encode(EPISODE) == data
    assert second.decode(data) == EPISODE
    assert len(server.texts) == len(wire.names())
    assert {path for path, _ in server.requests} == {f"/subjects/gorila-{name}/versions" for name in wire.names()}


def test_an_id_nobody_here_knows_is_asked_for_once(server: Fake):
    schemas = Schemas()
    attach(schemas, url(server))
    server.texts.append(json.dumps({**wire.load("episode"), "doc": "another form"}))
    data = HEADER.pack(0, 1000 + len(server.texts) - 1) + Schemas().encode(EPISODE)[5:]
    before = len(server.requests)
    assert schemas.decode(data) == EPISODE
    assert schemas.decode(data) == EPISODE
    with pytest.raises(BadRecord, match="unknown schema id 99"):
        schemas.decode(HEADER.pack(0, 99) + data[5:])
    assert [path for path, _ in server.requests[before:]] == [
        f"/schemas/ids/{1000 + len(server.texts) - 1}",
        "/schemas/ids/99",
    ]


def test_credentials_in_the_address_are_sent_and_never_shown(server: Fake):
    registry = Registry(url(server, "ann:s3cret@"))
    registry.register("episode")
    assert server.requests[-1][1] == "Basic YW5uOnMzY3JldA=="
    server.refuses = True
    with pytest.raises(BrokerError, match="refuses") as caught:
        registry.register("episode")
    assert "s3cret" not in str(caught.value)


def test_a_registry_that_does_not_answer_or_is_no_address_is_one_line():
    with pytest.raises(BrokerError, match=r"schema registry at http://127\.0\.0\.1:1 does not answer"):
        attach(Schemas(), "http://127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"kafka\.schema_registry_url"):
        Registry("localhost:8081")
    with pytest.raises(ConfigError, match=r"//\*\*\*@host:port' is not allowed") as caught:
        Registry("http://ann:s3cret@host:port")
    assert "s3cret" not in str(caught.value)


def test_credentials_do_not_follow_a_redirect_to_another_address(server: Fake):
    class Elsewhere(Handler):
        def do_GET(self) -> None:
            self.send_response(302)
            self.send_header("Location", f"{url(server)}/schemas/ids/1000")
            self.send_header("Content-Length", "0")
            self.end_headers()

    first = ThreadingHTTPServer(("127.0.0.1", 0), Elsewhere)
    thread = threading.Thread(target=first.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    server.texts.append(wire.text("episode"))
    assert Registry(f"http://ann:s3cret@127.0.0.1:{first.server_address[1]}").lookup(1000) == wire.text("episode")
    assert server.requests[-1] == ("/schemas/ids/1000", None)
    first.shutdown()
    thread.join()
    first.server_close()


def test_a_registry_that_goes_away_later_makes_dead_letters_not_crashes(server: Fake):
    schemas = Schemas()
    registry = attach(schemas, url(server))
    registry.address = "http://127.0.0.1:1"
    with pytest.raises(BadRecord, match="does not answer"):
        schemas.decode(HEADER.pack(0, 99) + b"x")
