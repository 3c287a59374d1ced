"""A reader of weights beside its own work: newest first, one record a key, targets found, nobody slowed by a long history."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from gorila import weights_follower
from gorila.environment_facts import EnvironmentFacts
from gorila.kafka import Cluster, Producer
from gorila.local.broker import BrokerAddress
from gorila.messages import Weights
from gorila.run_record import create_run, delete_run
from gorila.service import Service, open_service
from gorila.settings import load_config
from gorila.weights import payload_hash
from gorila.weights_follower import WeightsFollower

P, SHARDS = 1001, 2
LENGTHS = (501, 500)


class Server:
    """Writes what a parameter server's shards write."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._producer: Producer = service.cluster.producer()
        self.target = [(-1, -1)] * SHARDS

    def publish(self, shard: int, version: int, kind: str = "key", flush: bool = True, **changes: object) -> None:
        flat = np.full(LENGTHS[shard], version, np.float32)
        fields = {"payload_hash": payload_hash(flat), "payload": flat.tobytes(), **changes}
        record = Weights(
            shard_id=shard, version=version, kind=kind, num_parameters=LENGTHS[shard], base_version=-1, key_offset=-1,
            target_version=self.target[shard][0], target_offset=self.target[shard][1], gradient_offset=version, codec="fp32",
            state_hash=-1, applied=version, dropped_stale=0, dropped_duplicate=0, dropped_bad=0,
            staleness=np.empty(0, np.int32), learning_rate=0.1, **fields,  # type: ignore[arg-type]
        )  # fmt: skip

        def note(_: int, offset: int) -> None:
            if kind == "target":
                self.target[shard] = (version, offset)

        topic = self._service.topic("weights")
        value = self._service.schemas.encode(record)
        self._producer.send(topic, value, key=f"{shard}/{kind}".encode(), partition=shard, on_delivery=note)
        if flush:
            assert self._producer.flush(10) == 0


@pytest.fixture
def service(broker: BrokerAddress, run_name: str) -> Iterator[Service]:
    cluster = Cluster(broker.bootstrap_servers)
    facts = EnvironmentFacts("CartPole-v1", (4,), "float32", 2, 1, 500, {})
    config = load_config("cartpole", [f"parameter_server.shards={SHARDS}"], {})
    create_run(cluster, run_name, config, facts, np.zeros(P, np.float32))
    yield open_service("learner", run_name, 0, broker.bootstrap_servers)
    delete_run(cluster, run_name)


@pytest.fixture
def server(service: Service) -> Server:
    return Server(service)


def until(follower: WeightsFollower, version: int) -> WeightsFollower:
    while follower.view.version < version:
        follower.poll(0.5)
    return follower


def test_nothing_is_held_before_anything_is_published(service: Service):
    follower = WeightsFollower(service, targets=True)
    assert not follower.poll(0.0)
    assert not follower.poll(0.1)
    assert follower.view.version == -1
    follower.close()


def test_a_reader_follows_versions_of_every_shard_and_its_targets(service: Service, server: Server):
    follower = WeightsFollower(service, targets=True, num_parameters=P)
    for version in range(0, 100, 10):
        for shard in range(SHARDS):
            if version % 50 == 0:
                server.publish(shard, version, "target")
            server.publish(shard, version)
        until(follower, version)
        assert follower.view.flat().tolist() == [version] * P
        assert follower.view.target_flat().tolist() == [version // 50 * 50] * P
    follower.close()


def test_a_late_reader_finds_the_newest_key_frame_and_the_target_it_names_behind_a_long_history(
    service: Service, server: Server
):
    for shard in range(SHARDS):
        server.publish(shard, 50, "target")
        for version in range(51, 700):
            server.publish(shard, version, flush=False)
        server.publish(shard, 700)
    follower = WeightsFollower(service, targets=True)
    assert follower.poll(0.0)
    assert follower.view.version == 700
    assert follower.view.target_version == 50
    assert follower.view.num_parameters == P
    follower.close()


def test_a_key_frame_is_found_behind_records_of_other_keys(service: Service, server: Server):
    for shard in range(SHARDS):
        server.publish(shard, 7)
        for version in range(8, 40):
            server.publish(shard, version, "target")
    follower = WeightsFollower(service, targets=False)
    follower.poll(0.0)
    assert follower.view.version == 7
    assert follower.view.target_version == -1, "targets are for those who ask for them"
    follower.close()


def test_only_the_newest_record_of_a_key_is_decoded(service: Service, server: Server, monkeypatch: pytest.MonkeyPatch):
    follower = WeightsFollower(service, targets=False)
    for shard in range(SHARDS):
        server.publish(shard, 1)
    until(follower, 1)
    decoded: list[bytes | None] = []
    original = service.schemas.expect
    monkeypatch.setattr(service.schemas, "expect", lambda data, kind: decoded.append(data) or original(data, kind))
    for version in range(2, 202):
        for shard in range(SHARDS):
            server.publish(shard, version, flush=version == 201)
    until(follower, 201)
    assert len(decoded) < 100, "of 400 records that came while the reader was busy"
    follower.close()


def test_a_reader_that_was_away_jumps_to_the_end(service: Service, server: Server, monkeypatch: pytest.MonkeyPatch):
    follower = WeightsFollower(service, targets=True)
    for shard in range(SHARDS):
        server.publish(shard, 1)
    until(follower, 1)
    monkeypatch.setattr(weights_follower, "AWAY_S", -1.0)
    for shard in range(SHARDS):
        server.publish(shard, 2, "target")
        for version in range(3, 300):
            server.publish(shard, version, flush=version == 299)
    assert follower.poll(0.0)
    assert follower.view.version == 299
    assert follower.view.target_version == 2
    follower.close()


def test_a_bad_record_is_counted_and_the_view_stays_whole(service: Service, server: Server):
    follower = WeightsFollower(service, targets=False)
    for shard in range(SHARDS):
        server.publish(shard, 1)
    until(follower, 1)
    server.publish(0, 2, payload_hash=1)
    while not follower.bad_records:
        assert not follower.poll(0.5)
    assert follower.view.shard_versions == [1, 1]
    server.publish(0, 3)
    server.publish(1, 3)
    assert until(follower, 3).view.flat().tolist() == [3] * P
    follower.close()
