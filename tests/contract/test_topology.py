"""The topology table against the schemas, the roles, and what a broker really gets."""

from __future__ import annotations

import time

import confluent_kafka
import pytest

from gorila.codec import Schemas
from gorila.commands.roles import ROLES
from gorila.config import Config
from gorila.environment_facts import EnvironmentFacts
from gorila.kafka import Cluster
from gorila.local.broker import BrokerAddress
from gorila.network import initial_weights
from gorila.run_record import create_run, delete_run, describe_run
from gorila.settings import load_config, preset_names
from gorila.topics import BY_NAME, TOPOLOGY, Topic, full_name
from schemas import names as schema_names

OTHERS = {"topics", "train", "people", "archiver"}  # not commands of one instance each


@pytest.mark.parametrize("topic", TOPOLOGY, ids=lambda t: t.name)
def test_every_topic_has_a_writer_and_a_reader_that_exist(topic: Topic) -> None:
    assert topic.writers and topic.readers
    assert {*topic.writers, *topic.readers} <= set(ROLES) | OTHERS


def test_every_schema_travels_on_one_topic_and_every_topic_s_schemas_exist() -> None:
    used = [schema for topic in TOPOLOGY for schema in topic.schemas]
    assert sorted(used) == sorted(set(used))
    assert set(used) <= set(schema_names())


@pytest.mark.parametrize("preset", preset_names())
def test_partitions_are_counted_by_what_a_partition_stands_for(preset: str) -> None:
    config = load_config(preset, [], {})
    counts = {topic.name: topic.partitions(config) for topic in TOPOLOGY}
    assert counts["transitions"] == config.actor.count
    assert counts["batches"] == config.learner.count
    for name in ("gradients", "weights", "checkpoints", "replication"):
        assert counts[name] == config.parameter_server.shards
    assert all(counts[name] == 1 for name in ("priorities", "replay-stats", "episodes", "run", "dead-letters"))


@pytest.mark.parametrize("preset", preset_names())
def test_no_topic_may_outgrow_its_bound(preset: str) -> None:
    for sets in ([], ["kafka.max_topic_bytes=100000000"]):
        config = load_config(preset, sets, {})
        for topic in TOPOLOGY:
            settings = topic.topic_config(config)
            if "delete" in topic.cleanup:
                assert 0 < int(settings["retention.bytes"]) <= config.kafka.max_topic_bytes, topic.name


@pytest.mark.parametrize("years", [-30, 50])
def test_a_machine_whose_clock_is_years_off_may_write_to_every_topic_and_the_brokers_clock_is_kept(
    broker: BrokerAddress, run_name: str, years: int
) -> None:
    config = load_config("cartpole", [], {})
    facts = EnvironmentFacts("CartPole-v1", (4,), "float32", 2, 1, 500)
    cluster = Cluster(broker.bootstrap_servers)
    create_run(cluster, run_name, config, facts, initial_weights(config, facts))
    now_ms, told = int(time.time() * 1000), []
    producer = confluent_kafka.Producer({"bootstrap.servers": broker.bootstrap_servers})
    for topic in TOPOLOGY:
        producer.produce(
            full_name(run_name, topic.name), b"x", key=b"k", partition=0, timestamp=now_ms + years * 365 * 86_400_000,
            on_delivery=lambda error, message: told.append((error, message.timestamp()[1] if not error else 0)),
        )  # fmt: skip
    assert producer.flush(60) == 0
    assert [error for error, _ in told] == [None] * len(TOPOLOGY)
    assert all(abs(time_ms - now_ms) < 86_400_000 for _, time_ms in told)


def test_creating_a_run_makes_exactly_these_topics(broker: BrokerAddress, run_name: str) -> None:
    config = load_config("cartpole", ["actor.count=3", "parameter_server.shards=2"], {})
    facts = EnvironmentFacts("CartPole-v1", (4,), "float32", 2, 1, 500)
    cluster = Cluster(broker.bootstrap_servers)
    assert create_run(cluster, run_name, config, facts, initial_weights(config, facts))
    there = {name: count for name, count in cluster.admin().topics().items() if name.startswith(f"{run_name}.")}
    assert there == {full_name(run_name, topic.name): topic.partitions(config) for topic in TOPOLOGY}
    for name, found in describe_run(cluster, run_name).topics.items():
        wanted = BY_NAME[name.removeprefix(f"{run_name}.")].topic_config(config)
        assert wanted.items() <= found.settings.items(), name
    assert sorted(delete_run(cluster, run_name)) == sorted(there)


def test_a_run_s_record_alone_configures_a_role(broker: BrokerAddress, run_name: str) -> None:
    from gorila.run_record import read_run
    from gorila.settings import config_of_run

    config = load_config("catch-pixels", ["run.seed=9", "learner.batch_size=64"], {})
    facts = EnvironmentFacts("gorila.testing.catch:make", (24, 24), "uint8", 3, 2, 7)
    cluster = Cluster(broker.bootstrap_servers)
    create_run(cluster, run_name, config, facts, initial_weights(config, facts))
    record = read_run(cluster, run_name, Schemas())
    assert config_of_run(record.config, (), {}) == config
    assert EnvironmentFacts.from_json(record.environment) == facts
    delete_run(cluster, run_name)
    assert isinstance(config, Config)
