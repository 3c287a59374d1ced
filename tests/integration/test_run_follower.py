"""What a run's summary is made of is waited for, however slowly it comes."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import gorila.run_follower
from gorila.kafka import Cluster
from gorila.local.broker import BrokerAddress
from gorila.network import initial_weights
from gorila.run_follower import RunFollower
from gorila.run_progress import RunProgress
from gorila.run_record import create_run
from gorila.service import Service, open_service
from gorila.settings import load_config
from gorila.testing.experience import VECTOR_FACTS, Experience
from gorila.testing.relay import episode
from tests.processors.learning_loop import CARTPOLE

QUIET_POLLS = 40


class SlowMachine:
    """A real consumer that has nothing yet for its first polls after an assignment, each of which took a second."""

    def __init__(self, consumer: Any, clock: Clock) -> None:
        self._consumer, self._clock, self._quiet = consumer, clock, QUIET_POLLS

    def __getattr__(self, name: str) -> Any:
        return getattr(self._consumer, name)

    def assign(self, offsets: Any) -> None:
        self._quiet = QUIET_POLLS
        self._consumer.assign(offsets)

    def poll_many(self, most: int, timeout_s: float) -> Any:
        self._quiet -= 1
        self._clock.now_s += 1.0 if self._quiet >= 0 else 0.0
        return self._consumer.poll_many(most, timeout_s) if self._quiet < 0 else []


class Clock:
    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def run(broker: BrokerAddress, run_name: str, tmp_path: Path) -> Iterator[Service]:
    config = load_config("cartpole", ["network.hidden=[8]"], {})
    cluster = Cluster(broker.bootstrap_servers)
    create_run(cluster, run_name, config, CARTPOLE, initial_weights(config, CARTPOLE))
    service = open_service("test", run_name, 0, broker.bootstrap_servers, (), tmp_path, terminal=False, environ={})
    yield service
    service.close()


def slow(service: Service, progress: RunProgress, monkeypatch: pytest.MonkeyPatch) -> RunFollower:
    clock = Clock()
    follower = RunFollower(service, progress)
    monkeypatch.setattr(gorila.run_follower, "time", clock)
    monkeypatch.setattr(follower, "_tail", SlowMachine(follower._tail, clock))
    monkeypatch.setattr(follower, "_consumer", SlowMachine(follower._consumer, clock))
    return follower


def test_the_first_step_is_found_although_nothing_comes_for_forty_seconds(
    run: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = run.cluster.producer()
    experience = Experience(VECTOR_FACTS)
    experience.epoch = 1_700_000_000_000
    for block in experience.blocks(3):
        producer.send(run.topic("transitions"), run.schemas.encode(block), key=b"actor-0", partition=0)
    producer.flush(30)
    follower = slow(run, RunProgress(), monkeypatch)
    try:
        assert follower.first_step_ms() == 1_700_000_000_000
        assert (follower.bytes_per_transition() or 0) > 0
        assert follower.first_batch_ms() is None, "an empty partition is not waited for"
    finally:
        follower.close()
        producer.close()


def test_catching_up_reads_to_the_ends_there_were_past_markers_and_pauses(
    run: Service, monkeypatch: pytest.MonkeyPatch
) -> None:
    producer = run.cluster.producer(transactional_id=f"{run.run}-t")
    producer.begin()
    for number in range(2500):  # more than one poll takes
        producer.send(run.topic("episodes"), run.schemas.encode(episode(number)), partition=0)
    producer.commit_transaction()
    progress = RunProgress()
    follower = slow(run, progress, monkeypatch)
    try:
        follower.catch_up()
        assert progress.episodes == 2500
    finally:
        follower.close()
        producer.close()
