"""Our schemas as a Confluent registry: judged by confluent_kafka's own client, and by a topic of ours that its deserializer reads."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator

import pytest
from confluent_kafka import Consumer
from confluent_kafka.schema_registry import Schema, SchemaRegistryClient, SchemaRegistryError
from confluent_kafka.schema_registry.avro import AvroDeserializer
from confluent_kafka.serialization import MessageField, SerializationContext

import schemas as wire
from gorila.codec import Schemas, schema_id
from gorila.kafka import Cluster, NewTopic
from gorila.local.broker import BrokerAddress
from gorila.messages import Episode, Evaluation
from gorila.registry import attach
from gorila.schema_server import SchemaServer, catalogue

EPISODE = Episode("actor", "a", 0, 1.5, 9, True, 0.5, 1, 1, 1)
EVALUATION = Evaluation("evaluator-0", 7, "screen", 20, 10.5, 1.0, 9.0, 12.0, 0.0, False, 3)


@pytest.fixture(scope="module")
def server() -> Iterator[SchemaServer]:
    made = SchemaServer(catalogue({"demo": {}}), "127.0.0.1", 0)
    thread = threading.Thread(target=made.serve)
    thread.start()
    yield made
    made.close()
    thread.join()


def address(server: SchemaServer) -> str:
    return f"http://127.0.0.1:{server.port}"


@pytest.fixture
def client(server: SchemaServer) -> SchemaRegistryClient:
    return SchemaRegistryClient({"url": address(server)})


def ask(server: SchemaServer, path: str, method: str = "GET", body: bytes | None = None) -> tuple[int, object]:
    request = urllib.request.Request(address(server) + path, data=body, method=method)
    try:
        with urllib.request.urlopen(request, timeout=5) as answer:
            return answer.status, json.load(answer)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_confluents_own_deserializer_reads_a_topic_of_ours(
    server: SchemaServer, client: SchemaRegistryClient, broker: BrokerAddress, run_name: str
):
    cluster, ours = Cluster(broker.bootstrap_servers), Schemas()
    topic = f"{run_name}.episodes"
    cluster.admin().create_topics([NewTopic(topic, 1, 1, {})])
    producer = cluster.producer()
    for message in (EPISODE, EVALUATION):
        producer.send(topic, ours.encode(message), key=b"a")
    assert producer.flush(10) == 0
    producer.close()
    consumer = Consumer(
        {"bootstrap.servers": broker.bootstrap_servers, "group.id": run_name, "auto.offset.reset": "earliest"}
    )
    deserialize = AvroDeserializer(client)
    consumer.subscribe([topic])
    found = []
    while len(found) < 2:
        record = consumer.poll(10)
        assert record is not None and record.error() is None
        found.append(deserialize(record.value(), SerializationContext(topic, MessageField.VALUE)))
    consumer.close()
    assert found[0]["episode_return"] == 1.5 and found[0]["actor_id"] == "a"
    assert found[1]["return_mean"] == 10.5 and found[1]["phase"] == "screen"


def test_subjects_versions_and_ids_are_those_on_the_wire(client: SchemaRegistryClient):
    subjects = client.get_subjects()
    assert {f"gorila-{name}" for name in wire.names()} <= set(subjects)
    assert "demo.transitions-value" in subjects
    for name in wire.names():
        latest = client.get_latest_version(f"gorila-{name}")
        assert latest.schema_id == schema_id(wire.text(name))
        assert json.loads(latest.schema.schema_str) == wire.load(name)
        versions = client.get_versions(f"gorila-{name}")
        assert versions == list(range(1, len(versions) + 1)) and latest.version == versions[-1]
        assert json.loads(client.get_schema(latest.schema_id).schema_str) == wire.load(name)


def test_a_known_schema_is_found_and_a_new_one_is_refused(client: SchemaRegistryClient):
    known = Schema(wire.text("episode"), "AVRO")
    assert client.register_schema("gorila-episode", known) == schema_id(wire.text("episode"))
    assert client.lookup_schema("gorila-episode", known).version >= 1
    new = Schema(json.dumps({"type": "record", "name": "New", "fields": []}), "AVRO")
    with pytest.raises(SchemaRegistryError, match="read-only mode"):
        client.register_schema("gorila-episode", new)
    with pytest.raises(SchemaRegistryError, match="Schema not found"):
        client.lookup_schema("gorila-episode", new)


def test_our_own_roles_can_be_pointed_at_it(server: SchemaServer):
    ours = Schemas()
    attach(ours, address(server))
    assert ours.encode(EPISODE) == Schemas().encode(EPISODE)


@pytest.mark.parametrize(
    ("path", "code"),
    [
        ("/subjects/nobody/versions", 40401),
        ("/subjects/gorila-run/versions/99", 40402),
        ("/subjects/gorila-run/versions/x", 40402),
        ("/schemas/ids/5", 40403),
        ("/schemas/ids/-1", 40403),
        ("/schemas/ids/99999999999999999999", 40403),
        ("/../../etc/passwd", 404),
        ("/schemas/guids/x", 404),
    ],
)
def test_what_is_not_there_is_answered_as_the_interface_says(server: SchemaServer, path: str, code: int):
    status, body = ask(server, path)
    assert status == 404 and isinstance(body, dict) and body["error_code"] == code


@pytest.mark.parametrize(
    ("body", "status"),
    [
        (b"", 422),
        (b"[]", 422),
        (b"[" * 100_000, 422),
        (b'{"schema": "{"}', 422),
        (b'{"schema": 5}', 422),
        (b'{"schema": "{}", "schemaType": "JSON"}', 422),
        (b"x" * (1024 * 1024 + 1), 413),
    ],
)
def test_bad_bodies_are_refused_and_the_next_request_is_answered(server: SchemaServer, body: bytes, status: int):
    try:
        assert ask(server, "/subjects/gorila-run", "POST", body)[0] == status
    except urllib.error.URLError:  # it hung up before taking a megabyte it does not want
        assert status == 413
    assert ask(server, "/mode") == (200, {"mode": "READONLY"})


@pytest.mark.parametrize("method", ["PUT", "DELETE"])
def test_nothing_can_be_changed(server: SchemaServer, method: str):
    before = ask(server, "/subjects")
    assert ask(server, "/subjects/gorila-run", method)[0] == 405
    assert ask(server, "/subjects") == before


def test_the_command_listens_on_loopback_and_ends_in_order_at_sigterm():
    command = [sys.executable, "-m", "gorila.cli", "schema-registry", "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            found = re.search(r"http://127\.0\.0\.1:(\d+): \d+ subjects", line)
            assert found, line
            with urllib.request.urlopen(f"http://127.0.0.1:{found[1]}/subjects", timeout=5) as answer:
                assert "gorila-run" in json.load(answer)
            process.send_signal(signal.SIGTERM)
            _, errors = process.communicate(timeout=20)
        finally:
            process.kill()
    assert (process.returncode, errors) == (0, "")
