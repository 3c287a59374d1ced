"""The actor as a service on a real Kafka: first weights, new weights, back-pressure by the replay group's commits, restart, stop."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import pytest

from gorila.environments import describe
from gorila.kafka import Cluster, Consumer
from gorila.local.broker import BrokerAddress
from gorila.messages import Episode, TransitionBlock, Weights
from gorila.network import initial_weights
from gorila.run_record import create_run, delete_run
from gorila.service import Service, open_service
from gorila.settings import load_config
from gorila.weights import payload_hash
from producers.main import run_actor

SETS = [
    "actor.lanes=2",
    "actor.block_steps=8",
    "actor.max_lag_records=16",
    "actor.refresh_s=0.01",
    "replay.commit_interval_ms=16",
]


class Stage:
    """A run with the parts of replay and the parameter server that an actor sees: commits and weights."""

    def __init__(self, servers: str, run: str) -> None:
        self.servers, self.run = servers, run
        self.cluster = Cluster(servers)
        self.config = load_config("cartpole", SETS, {})
        facts = describe(self.config)
        self.weights = initial_weights(self.config, facts)
        create_run(self.cluster, run, self.config, facts, self.weights)
        self.service = self.open()
        self.producer = self.cluster.producer()
        self.replay: Consumer = self.cluster.consumer(f"{run}.replay")
        self.replay.assign({(self.service.topic("transitions"), 0): 0})
        self.episodes: Consumer = self.cluster.consumer()
        self.episodes.assign({(self.service.topic("episodes"), 0): 0})

    def open(self) -> Service:
        return open_service("actor", self.run, 0, self.servers)

    def publish(self, version: int) -> None:
        record = Weights(
            shard_id=0, version=version, kind="key", num_parameters=len(self.weights), base_version=-1, key_offset=-1,
            target_version=-1, target_offset=-1, gradient_offset=version, codec="fp32", payload=self.weights.tobytes(),
            payload_hash=payload_hash(self.weights), state_hash=-1, applied=version, dropped_stale=0, dropped_duplicate=0,
            dropped_bad=0, staleness=np.empty(0, np.int32), learning_rate=0.1,
        )  # fmt: skip
        self.producer.send(
            self.service.topic("weights"), self.service.schemas.encode(record), key=b"0/key", partition=0
        )
        assert self.producer.flush(10) == 0

    def read(self, wanted: int, commit: bool = True) -> list[TransitionBlock]:
        """At least `wanted` blocks, committed as replay would."""
        blocks: list[TransitionBlock] = []
        deadline = time.monotonic() + 60
        while len(blocks) < wanted:
            assert time.monotonic() < deadline, f"{len(blocks)} of {wanted} blocks came"
            for record in self.replay.poll_many(100, 0.2):
                assert record.key == b"actor-0"
                blocks.append(self.service.schemas.expect(record.value, TransitionBlock))
                if commit:
                    self.replay.commit({(record.topic, record.partition): record.offset + 1}, wait=True)
        return blocks

    def end(self) -> int:
        return self.replay.watermarks(self.service.topic("transitions"), 0)[1]

    @contextmanager
    def acting(self) -> Iterator[Service]:
        service = self.open()
        thread = threading.Thread(target=run_actor, args=(service,))
        thread.start()
        try:
            yield service
        finally:
            service.stop.set()
            thread.join(10)
            assert not thread.is_alive()
            service.close()


@pytest.fixture
def stage(broker: BrokerAddress, run_name: str) -> Iterator[Stage]:
    made = Stage(broker.bootstrap_servers, run_name)
    yield made
    made.replay.close()
    made.episodes.close()
    delete_run(made.cluster, run_name)


def _whole(blocks: list[TransitionBlock], lane: int) -> None:
    mine = [block for block in blocks if block.lane == lane]
    place = mine[0].first_step
    for block in mine:
        assert block.first_step == place
        place += block.observations.count


def test_an_actor_plays_with_the_newest_weights_and_its_stop_leaves_no_gap(stage: Stage) -> None:
    stage.publish(0)
    with stage.acting():
        blocks = stage.read(20)
        assert {block.weights_version for block in blocks} == {0}
        stage.publish(7)
        while blocks[-1].weights_version != 7:
            blocks += stage.read(1)
    left = stage.end() - len(blocks)
    blocks += stage.read(left) if left else []
    for lane in range(2):
        _whole(blocks, lane)
    assert {block.weights_version for block in blocks} == {0, 7}
    assert blocks[-1].epsilon < blocks[0].epsilon == 1.0
    rows = sum(int((~b.is_last).sum()) for b in blocks)
    episodes = [stage.service.schemas.expect(r.value, Episode) for r in stage.episodes.poll_many(1000, 5.0)]
    ends = sum(int((b.terminated | b.truncated).sum()) for b in blocks)
    assert len(episodes) == ends > 0
    assert sum(e.steps for e in episodes) <= rows


def test_a_killed_actors_successor_plays_other_episodes_under_a_later_epoch(stage: Stage) -> None:
    stage.publish(0)
    with stage.acting():
        first = stage.read(10)
    stage.read(stage.end() - len(first)) if stage.end() > len(first) else None
    with stage.acting():
        second = stage.read(10)
    assert second[0].actor_epoch > first[0].actor_epoch
    assert second[0].first_step == 0 and bool(second[0].is_first[0])
    assert second[0].observations.data != first[0].observations.data


def test_an_actor_waits_for_replay_and_goes_on_when_replay_commits(stage: Stage) -> None:
    stage.publish(0)
    with stage.acting():
        stage.read(1, commit=False)
        bound = stage.config.actor.max_lag_records
        before = -1
        while before != stage.end():  # until the end of the log stands still
            before = stage.end()
            time.sleep(0.5)
        assert bound <= before <= bound + 2
        blocks = stage.read(before + 20)
    assert len(blocks) >= before + 20 - 1
