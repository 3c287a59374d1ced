"""A run as Kafka holds it: made whole or done again, obeyed by every role, shown by `gorila cat`, deleted without a trace."""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from gorila import run_record, sharding
from gorila.cat import cat
from gorila.codec import HEADER, MAGIC, Schemas
from gorila.config import Config
from gorila.environment_facts import EnvironmentFacts
from gorila.errors import ConfigError, RunError, UsageError
from gorila.kafka import Cluster, Received
from gorila.local.broker import BrokerAddress
from gorila.messages import CheckpointManifest, CheckpointPart, Episode, Run
from gorila.run_record import create_run, delete_run, describe_run, list_runs, new_topics, read_all, read_run
from gorila.service import Service, open_service
from gorila.settings import canonical_json, load_config
from gorila.topics import TOPOLOGY, full_name

FACTS = EnvironmentFacts("CartPole-v1", (4,), "float32", 2, 1, 500, {"kwargs": {}})
WEIGHTS = np.arange(1001, dtype=np.float32)


@pytest.fixture
def cluster(broker: BrokerAddress) -> Cluster:
    return Cluster(broker.bootstrap_servers, client_id="test")


def configured(*sets: str) -> Config:
    return load_config("cartpole", sets, {})


@pytest.fixture
def run(cluster: Cluster, run_name: str) -> Iterator[str]:
    create_run(cluster, run_name, configured("parameter_server.shards=2", "actor.count=3"), FACTS, WEIGHTS)
    yield run_name
    if run_name in list_runs(cluster):
        delete_run(cluster, run_name)


@pytest.fixture
def service(cluster: Cluster, run: str, tmp_path: Path) -> Iterator[Service]:
    opened = open_service("learner", run, 0, cluster.bootstrap_servers, (), tmp_path)
    yield opened
    opened.close()


def test_every_topic_of_the_topology_is_there_as_the_configuration_wants_it(cluster: Cluster, run: str):
    found = describe_run(cluster, run)
    assert set(found.topics) == {full_name(run, topic.name) for topic in TOPOLOGY}
    for topic in new_topics(run, configured("parameter_server.shards=2", "actor.count=3")):
        facts = found.topics[topic.name]
        assert facts.partitions == topic.partitions
        assert {key: facts.settings[key] for key in topic.settings} == dict(topic.settings)
    assert found.topics[full_name(run, "transitions")].partitions == 3
    assert found.topics[full_name(run, "weights")].partitions == 2


def test_version_zero_is_the_initial_weights_shard_by_shard(cluster: Cluster, run: str):
    schemas = Schemas()
    for shard, (start, stop) in enumerate(sharding.bounds(len(WEIGHTS), 2)):
        part, manifest = read_all(cluster, full_name(run, "checkpoints"), shard)
        piece = schemas.expect(part.value, CheckpointPart)
        assert (piece.shard_id, piece.version, piece.tensor, piece.start, piece.total) == (
            shard,
            0,
            "weights",
            0,
            stop - start,
        )
        assert np.array_equal(np.frombuffer(piece.data, "<f4"), WEIGHTS[start:stop])
        made = schemas.expect(manifest.value, CheckpointManifest)
        assert (made.version, made.parts, made.first_part_offset, made.gradient_offset) == (0, 1, part.offset, -1)
        assert (made.target_version, made.target_offset, made.state_hash) == (0, -1, -1)


def test_making_the_same_run_again_does_nothing(cluster: Cluster, run: str):
    config = configured("parameter_server.shards=2", "actor.count=3")
    assert not create_run(cluster, run, config, FACTS, WEIGHTS)
    assert len(read_all(cluster, full_name(run, "run"))) == 1
    assert len(read_all(cluster, full_name(run, "checkpoints"))) == 2


def test_another_configuration_or_environment_under_the_same_name_is_refused_naming_what_differs(
    cluster: Cluster, run: str
):
    with pytest.raises(RunError, match=r"actor\.count = 3, not 1"):
        create_run(cluster, run, configured("parameter_server.shards=2"), FACTS, WEIGHTS)
    config = configured("parameter_server.shards=2", "actor.count=3")
    with pytest.raises(RunError, match="actions"):
        create_run(cluster, run, config, dataclasses.replace(FACTS, actions=3), WEIGHTS)


def test_a_creation_cut_short_anywhere_is_completed_by_the_next(
    cluster: Cluster, run_name: str, monkeypatch: pytest.MonkeyPatch
):
    def cut(*_: object) -> None:
        raise KeyboardInterrupt

    for function in ("version_zero_parts", "version_zero_manifest", "_product_version"):
        with monkeypatch.context() as patched:
            patched.setattr(run_record, function, cut)
            with pytest.raises(KeyboardInterrupt):
                create_run(cluster, run_name, configured(), FACTS, WEIGHTS)
        with pytest.raises(RunError, match="does not exist"):
            read_run(cluster, run_name, Schemas())
    assert create_run(cluster, run_name, configured(), FACTS, WEIGHTS)
    schemas = Schemas()
    records = read_all(cluster, full_name(run_name, "checkpoints"))
    manifest = schemas.expect(records[-1].value, CheckpointManifest)
    part = next(r for r in records if r.offset == manifest.first_part_offset)
    assert schemas.expect(part.value, CheckpointPart).total == len(WEIGHTS)
    delete_run(cluster, run_name)


@pytest.mark.parametrize("name", ["", "a b", ".a", "a/b", "x" * 240])
def test_a_name_that_cannot_be_a_topic_is_refused(cluster: Cluster, name: str):
    with pytest.raises(UsageError, match="run name"):
        create_run(cluster, name, configured(), FACTS, WEIGHTS)


def test_a_shard_longer_than_a_record_takes_is_refused_before_anything_is_made(cluster: Cluster, run_name: str):
    with pytest.raises(ConfigError, match=r"parameter_server\.shards"):
        create_run(cluster, run_name, configured(), FACTS, np.zeros(2_000_001, np.float32))
    assert not [topic for topic in cluster.admin().topics() if topic.startswith(run_name)]


def test_a_role_obeys_the_runs_configuration_and_keeps_its_own_place(cluster: Cluster, run: str):
    service = open_service("actor", run, 2, cluster.bootstrap_servers, ["monitor.metrics_port=9100", "actor.count=3"])
    assert canonical_json(service.config) == read_run(cluster, run, Schemas()).config
    assert service.config.monitor.metrics_port == 9100
    assert service.facts == FACTS
    assert (service.name, service.topic("weights"), service.group) == ("actor-2", f"{run}.weights", f"{run}.actor")
    with pytest.raises(RunError, match=r"learner\.batch_size = 7 contradicts"):
        open_service("learner", run, 0, cluster.bootstrap_servers, ["learner.batch_size=7"])


def test_an_unknown_run_names_those_there_are(cluster: Cluster, run: str):
    with pytest.raises(RunError, match=f"run 'nope' does not exist.*{run}"):
        open_service("actor", "nope", 0, cluster.bootstrap_servers)


def test_the_log_says_the_whole_configuration_once_and_no_secret(cluster: Cluster, run: str, tmp_path: Path):
    secrets = tmp_path / "client.properties"
    secrets.write_text("client.rack=hush-rack\n")
    open_service("actor", run, 0, cluster.bootstrap_servers, [f"kafka.client_properties={secrets}"], tmp_path)
    text = (tmp_path / "logs" / "actor-0.log").read_text()
    assert text.count("service.start") == 1
    assert "batch_size" in text
    assert "hush" not in text


def poison(service: Service) -> list[bytes | None]:
    good = service.schemas.encode(Episode("actor", "actor-0", 0, float("inf"), 1, True, 0.5, 1, 1, 1))
    return [b"\x99random", good[:-3], HEADER.pack(MAGIC, 12345) + good[5:], None, good]


def test_what_cannot_be_used_is_in_dead_letters_byte_for_byte_with_where_it_came_from(service: Service):
    bad = poison(service)
    for offset, value in enumerate(bad):
        service.dead_letter(
            Received(service.topic("episodes"), 0, offset, 1, b"k", value, (("own", b"1"),)), f"reason {offset}"
        )
    assert service.dead_letters == len(bad)
    letters = read_all(service.cluster, service.topic("dead-letters"))
    assert [letter.value for letter in letters] == bad
    for offset, letter in enumerate(letters):
        headers = dict(letter.headers)
        assert letter.key == service.topic("episodes").encode()
        assert headers["own"] == b"1"
        assert headers["__connect.errors.offset"] == b"%d" % offset
        assert headers["__connect.errors.exception.message"] == f"reason {offset}".encode()
    shown = [json.loads(line) for line in cat(service.cluster, service.topic("dead-letters"))]
    assert [("error" in line, "schema" in line) for line in shown] == [(True, False)] * 3 + [
        (False, False),
        (False, True),
    ]
    assert shown[4]["value"]["episode_return"] == "inf"


def test_a_service_that_gets_little_but_bad_records_stops_with_the_reason(service: Service):
    received = [Received(service.topic("episodes"), 0, offset, 1, None, b"junk") for offset in range(501)]
    for one in received[:500]:
        service._dead_letters._limit.count(one.topic, one.partition, one.offset)
    with pytest.raises(RunError, match=r"learner stops: more than half .* `gorila cat"):
        service.dead_letter(received[500], "not Avro")


def episodes(service: Service, count: int) -> None:
    producer = service.cluster.producer()
    for number in range(count):
        episode = Episode("actor", "actor-0", 0, float(number), number, True, 0.5, 1, 1, 1)
        producer.send(service.topic("episodes"), service.schemas.encode(episode), key=b"actor-0", partition=0)
    producer.flush(10)
    producer.close()


def test_cat_shows_from_where_it_is_told_and_ends_at_the_end(service: Service):
    episodes(service, 20)
    topic = service.topic("episodes")

    def steps(start: str, most: int = 0) -> list[int]:
        return [json.loads(line)["value"]["steps"] for line in cat(service.cluster, topic, start=start, most=most)]

    assert steps("earliest") == list(range(20))
    assert steps("earliest", 3) == [0, 1, 2]
    assert steps("latest", 3) == [17, 18, 19]
    assert steps("15") == [15, 16, 17, 18, 19]
    assert steps("1000") == []
    assert steps("2020-01-01") == list(range(20))
    assert steps("2040-01-01T00:00:00") == []
    with pytest.raises(UsageError, match="--from 'soon'"):
        steps("soon")
    with pytest.raises(UsageError, match=rf"does not exist .*{topic}"):
        next(cat(service.cluster, topic + "s"))


def test_cat_summarises_payloads_and_reads_schemas_that_only_the_run_knows(cluster: Cluster, run: str):
    lines = [json.loads(line) for line in cat(cluster, full_name(run, "checkpoints"))]
    assert {line["schema"] for line in lines} == {"checkpoint-part", "checkpoint-manifest"}
    assert any(line["value"].get("data", "").startswith("<2004 bytes, crc32 ") for line in lines)
    record = json.loads(next(cat(cluster, full_name(run, "run"))))
    assert record["value"]["schemas"] == Schemas().texts()
    schemas = Schemas()
    text = schemas.texts()[
        str(struct.unpack(">bI", schemas.encode(Episode("a", "a", 0, 0, 0, True, 0, 0, 0, 0))[:5])[1])
    ]
    foreign = Run(run, record["value"]["config"], FACTS.to_json(), {"4711": text}, "0", 1)
    producer = cluster.producer()
    producer.send(full_name(run, "run"), schemas.encode(foreign), key=run.encode(), partition=0)
    body = schemas.encode(Episode("actor", "a", 0, 1.0, 9, True, 0, 0, 0, 0))[5:]
    producer.send(full_name(run, "episodes"), struct.pack(">bI", 0, 4711) + body, partition=0)
    producer.flush(10)
    assert json.loads(next(cat(cluster, full_name(run, "episodes"))))["value"]["steps"] == 9


def test_a_deleted_run_leaves_neither_topic_nor_group(cluster: Cluster, run: str):
    group = cluster.consumer(f"{run}.learner")
    group.commit({(f"{run}.batches", 0): 5}, wait=True)
    group.close()
    assert f"{run}.learner" in cluster.admin().groups()
    assert len(delete_run(cluster, run)) == len(TOPOLOGY)
    assert run not in list_runs(cluster)
    assert not [topic for topic in cluster.admin().topics() if topic.startswith(f"{run}.")]
    assert f"{run}.learner" not in cluster.admin().groups()
    with pytest.raises(RunError, match="does not exist"):
        delete_run(cluster, run)
