"""Deltas on a real broker that compacts for real: late readers, and readers with gaps, hold exactly what was published."""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np
import pytest

from consumers.parameter_server.checkpoints import ShardState
from consumers.parameter_server.optimizers import make_optimizer
from consumers.parameter_server.shard import Shard
from gorila.compression import codec
from gorila.environment_facts import EnvironmentFacts
from gorila.kafka import Cluster, Producer
from gorila.local.broker import BrokerAddress
from gorila.local.kafka_tools import run_kafka_tool
from gorila.messages import Gradient, Weights
from gorila.processor import Incoming, Outgoing
from gorila.run_record import create_run, delete_run, read_all
from gorila.service import Service, open_service
from gorila.settings import load_config
from gorila.weights import payload_hash
from gorila.weights_follower import WeightsFollower

P, EVERY = 5000, 8


@pytest.fixture
def service(broker: BrokerAddress, run_name: str) -> Iterator[Service]:
    cluster = Cluster(broker.bootstrap_servers)
    facts = EnvironmentFacts("CartPole-v1", (4,), "float32", 2, 1, 500, {})
    settings = ["parameter_server.weights_codec=delta", f"parameter_server.key_frame_every={EVERY}", "parameter_server.weights_bytes_per_s=1e12", "learner.max_in_flight=0"]  # fmt: skip
    create_run(cluster, run_name, load_config("cartpole", settings, {}), facts, np.zeros(P, np.float32))
    yield open_service("learner", run_name, 0, broker.bootstrap_servers)
    delete_run(cluster, run_name)


class Server:
    """A shard whose records go to the broker, acknowledged one by one."""

    def __init__(self, service: Service) -> None:
        self._service, self._producer = service, service.cluster.producer()
        tensors = make_optimizer(service.config.parameter_server).tensors
        state = ShardState(0, np.zeros(P, np.float32), {name: np.zeros(P, np.float32) for name in tensors})
        self.shard, self.now_s, self.batch = Shard(service.config, state), 0.0, 0
        self.newest: Weights | None = None

    def _emit(self, records: object) -> None:
        for record in records:  # type: ignore[attr-defined]
            assert isinstance(record, Outgoing)
            if record.topic != "weights":
                continue
            if record.message.kind != "target":
                self.newest = record.message
            self._send(self._producer, record)

    def _send(self, producer: Producer, record: Outgoing) -> None:
        def acknowledged(partition: int, offset: int) -> None:
            if record.tag is not None:
                self.shard.delivered(record, partition, offset)

        value = self._service.schemas.encode(record.message)
        producer.send(self._service.topic("weights"), value, key=record.key, partition=0, on_delivery=acknowledged)
        assert producer.flush(10) == 0

    def update(self, count: int) -> None:
        for _ in range(count):
            values = np.random.default_rng(self.batch).standard_normal(P).astype(np.float32)
            message = Gradient(0, "learner-0", 0, self.batch, self.batch, 1, P, "fp32", codec("fp32").encode(values), 1.0, 1.0)  # fmt: skip
            self._emit(self.shard.process(Incoming("gradients", 0, self.batch, 0, b"0", message)))
            self.batch += 1
            for _ in range(3):
                self.now_s += 1.0
                self._emit(self.shard.tick(self.now_s))


def holds_the_newest(follower: WeightsFollower, server: Server) -> None:
    deadline_s = time.monotonic() + 20
    assert server.newest is not None
    while follower.view.version < server.newest.version and time.monotonic() < deadline_s:
        follower.poll(0.2)
    assert follower.view.version == server.newest.version
    assert payload_hash(follower.view.flat()) == server.newest.payload_hash and not follower.view.gaps


def test_a_late_reader_of_a_compacted_log_holds_the_newest_published_value(service: Service) -> None:
    topic = service.topic("weights")
    aggressive = "segment.ms=1000,min.cleanable.dirty.ratio=0.0001,min.compaction.lag.ms=0,delete.retention.ms=0"
    where = ["--bootstrap-server", service.cluster.bootstrap_servers]
    words = ["--alter", "--entity-type", "topics", "--entity-name", topic, "--add-config", aggressive]
    assert run_kafka_tool("configs", [*where, *words]) == 0
    server, reader = Server(service), WeightsFollower(service, targets=True)
    server.update(3 * EVERY)
    holds_the_newest(reader, server)
    before = len(read_all(service.cluster, topic))
    deadline_s = time.monotonic() + 60
    left = before
    while left >= before and time.monotonic() < deadline_s:
        server.update(1)  # the active segment is never cleaned: a record rolls it once it is old enough
        before += 1
        left = len(read_all(service.cluster, topic))
    assert left < before, "the broker did not compact"
    late = WeightsFollower(service, targets=True)
    for follower in (late, reader):
        holds_the_newest(follower, server)
    assert late.view.flat().tobytes() == reader.view.flat().tobytes()
    assert late.view.target_flat().tobytes() == reader.view.target_flat().tobytes()
    server.update(2)
    for follower in (late, reader):
        holds_the_newest(follower, server)
        follower.close()


def test_a_reader_to_whom_a_delta_comes_that_does_not_fit_goes_back_to_the_key_frame(service: Service) -> None:
    server, reader = Server(service), WeightsFollower(service, targets=False)
    server.update(3)
    holds_the_newest(reader, server)
    server.update(2)
    reader._consumer.assign(
        {(service.topic("weights"), 0): reader._consumer.watermarks(service.topic("weights"), 0)[1]}
    )
    server.update(1)  # the reader never sees the two before it
    holds_the_newest(reader, server)
    reader.close()


def test_a_reader_that_jumps_reads_every_delta_where_there_are_deltas(service: Service) -> None:
    server, reader = Server(service), WeightsFollower(service, targets=False, jump=True)
    for _ in range(2 * EVERY):
        server.update(1)
        holds_the_newest(reader, server)
    reader.close()
