"""A run's outside, for tests of the replay role: what actors write, what learners read, what the group has committed."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from gorila.codec import Schemas
from gorila.config import Config
from gorila.environment_facts import EnvironmentFacts
from gorila.kafka import Cluster, Received
from gorila.messages import Batch, Message, Priorities, ReplayStats, TransitionBlock
from gorila.observations import compress
from gorila.run_record import create_run
from gorila.service import Service, open_service
from gorila.settings import load_config
from pipelines import split_registry
from pipelines.main import run_replay
from pipelines.split_registry import Address
from pipelines.split_room import SplitRoom

M = TypeVar("M", bound=Message)
PROCESS = Path(__file__).with_name("replay_process.py")
DEADLINE_S = 60.0
SMALL = [
    "replay.capacity_rows=256",
    "replay.min_size_rows=16",
    "replay.samples_per_insert=8",
    "replay.record_rows=16",
    "replay.max_lag_batches=4",
    "learner.batch_size=32",
    "actor.block_steps=16",
]


def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait for something another thread or process does; the deadline is for a hang, not a measure."""
    deadline = time.monotonic() + DEADLINE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {DEADLINE_S} s for {what}"
        threading.Event().wait(0.01)
    return found


def a_turn_of(room: SplitRoom) -> None:
    """Whatever was being handled when this was called has been handled: the second poll from now follows it."""
    reader = room.reader
    assert reader is not None
    polls = reader.polls
    until(lambda: reader.polls >= polls + 2, "two polls")


class Run:
    """A run's outside: writes transitions as actors do, reads batches as learners do."""

    def __init__(self, servers: str, *sets: str) -> None:
        self.name = "replay-" + uuid.uuid4().hex[:8]
        self.servers, self.schemas = servers, Schemas()
        self.config: Config = load_config("cartpole", [*SMALL, *sets], {})
        self.cluster = Cluster(servers)
        facts = EnvironmentFacts("CartPole-v1", (4,), "float32", 2, 1, 500)
        create_run(self.cluster, self.name, self.config, facts, np.zeros(8, np.float32))
        self.producer = self.cluster.producer()
        self.steps: dict[int, int] = {}
        self.rng = np.random.default_rng(0)

    def topic(self, name: str) -> str:
        return f"{self.name}.{name}"

    def send(self, topic: str, value: bytes | None, partition: int = 0) -> int:
        """The offset it got."""
        got: list[int] = []
        self.producer.send(
            self.topic(topic), value, partition=partition, on_delivery=lambda _, offset: got.append(offset)
        )
        assert self.producer.flush(10) == 0
        return got[0]

    def block(self, partition: int = 0) -> int:
        """One more block of an endless episode; its offset."""
        return self.send("transitions", self.schemas.encode(self.next_block(partition)), partition)

    def next_block(self, partition: int = 0, rows: int = 16) -> TransitionBlock:
        first = self.steps.get(partition, 0)
        self.steps[partition] = first + rows
        no = np.zeros(rows, np.bool_)
        return TransitionBlock(
            actor_id=f"actor-{partition}",
            actor_epoch=1,
            lane=0,
            first_step=first,
            weights_version=3,
            epsilon=0.5,
            observations=compress(np.full((rows, 4), first, np.float32), "zstd"),
            action=np.zeros(rows, np.int32),
            reward=self.rng.normal(size=rows).astype(np.float32),
            is_first=no if first else np.arange(rows) == 0,
            is_last=no,
            terminated=no,
            truncated=no,
            q_taken=self.rng.normal(size=rows).astype(np.float32),
            q_max=self.rng.normal(size=rows).astype(np.float32),
        )

    def learned(self, batch: Batch, offset: int, error: float) -> None:
        rows = len(batch.row)
        errors = np.full(rows, error, np.float32)
        self.send(
            "priorities",
            self.schemas.encode(
                Priorities(
                    "learner-0", 0, offset, 1, batch.partition, batch.offset, batch.row, errors, 0.1, 1.0, False, 0.5
                )
            ),
        )

    def read(self, topic: str, enough: Callable[[list[Received]], bool], partition: int = 0) -> list[Received]:
        """Records from the beginning until there are enough."""
        consumer = self.cluster.consumer()
        consumer.assign({(self.topic(topic), partition): 0})
        found: list[Received] = []
        deadline = time.monotonic() + DEADLINE_S
        while not enough(found):
            assert time.monotonic() < deadline, f"{len(found)} records on {topic} are not enough"
            found += consumer.poll_many(500, 0.1)
        consumer.close()
        return found

    def batches(self, count: int, partition: int = 0) -> list[Batch]:
        records = self.read("batches", lambda found: len(found) >= count, partition)
        return [self.expect(record, Batch) for record in records[:count]]

    def expect(self, record: Received, kind: type[M]) -> M:
        return self.schemas.expect(record.value, kind)

    def newest_stats(self) -> ReplayStats:
        end = self.end("replay-stats")
        found = self.read("replay-stats", lambda records: bool(records) and records[-1].offset >= end - 1)
        return self.expect(found[-1], ReplayStats)

    def committed(self, partition: int = 0, group: str = "replay", topic: str = "transitions") -> int | None:
        where = (self.topic(topic), partition)
        return self.cluster.admin().group_offsets(f"{self.name}.{group}", [where])[where]

    def end(self, topic: str, partition: int = 0) -> int:
        where = (self.topic(topic), partition)
        return self.cluster.admin().end_offsets([where])[where]

    def commit(self, group: str, topic: str, offset: int, metadata: str = "gorila") -> None:
        consumer = self.cluster.consumer(f"{self.name}.{group}")
        consumer.commit({(self.topic(topic), 0): offset}, metadata=metadata, wait=True)
        consumer.close()
        assert self.committed(0, group, topic) == offset, "refused: the group has members"

    def service(self, index: int = 0) -> Service:
        return open_service("replay", self.name, index, self.servers)

    @contextmanager
    def replay(self, index: int = 0) -> Iterator[SplitRoom]:
        """The role on a thread of this process; stopped and joined on the way out."""
        service = self.service(index)
        failures: list[BaseException] = []

        def target() -> None:
            try:
                run_replay(service)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=target)
        split_registry.adopt(service)
        room = split_registry.room(Address.of(service), service.name)
        thread.start()
        try:
            yield room
        finally:
            service.stop.set()
            thread.join(10)
            assert not thread.is_alive(), "replay did not stop"
            service.close()
            if failures:
                raise failures[0]

    def process(self, file: Path) -> subprocess.Popen[bytes]:
        return subprocess.Popen([sys.executable, "-W", "ignore", str(PROCESS), self.name, self.servers, str(file)])
