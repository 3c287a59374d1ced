"""Die at every numbered step of the runtime, start again, and say exactly what is handled twice.

The same story is played in memory (gorila.testing.memory_log: every step, at several times) and against a real broker (five of them). A death is a
BaseException out of the very call, through wrappers that fit both; nothing of the dead process runs afterwards.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest

from gorila.codec import Schemas
from gorila.inputs import Input
from gorila.kafka import Cluster, NewTopic, Received
from gorila.local.broker import BrokerAddress
from gorila.messages import CheckpointLedger, Episode, Message
from gorila.ports import ClusterPort
from gorila.processor import Incoming, Outgoing
from gorila.runtime import Runtime
from gorila.testing.driver import MemoryService
from gorila.testing.memory_log import Killed, MemoryCluster
from gorila.testing.relay import Relay, episode

RECORDS = 12
PARTITIONS = 2
# (step of the runtime, where exactly). "flush" is the time between the mark and the acknowledgement of everything before it.
DEATHS = (
    "1 before poll",
    "1 after poll",
    "2 before decode",
    "3 before process",
    "3 after process",
    "4 before produce",
    "4 after produce",
    "5 while flushing",
    "6 before snapshot",
    "6 after snapshot",
    "7 before commit",
    "7 after commit",
)


@dataclass
class Fate:
    """Dies at the given point, after having passed it `spared` times."""

    death: str
    spared: int
    passed: int = 0
    marked: bool = False
    dead: bool = False

    def at(self, point: str) -> None:
        if point == self.death and not self.dead:
            if self.passed == self.spared:
                self.dead = True
                raise Killed(point)
            self.passed += 1


class MortalClient:
    """A consumer or producer that may die in its calls."""

    def __init__(self, client: Any, fate: Fate) -> None:
        self._client, self._fate = client, fate

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def poll_many(self, max_records: int, timeout_s: float) -> list[Received]:
        self._fate.at("1 before poll")
        records: list[Received] = self._client.poll_many(max_records, timeout_s)
        if records:
            self._fate.at("1 after poll")
        return records

    def send(self, topic: str, value: bytes | None, **more: Any) -> None:
        what = "snapshot" if topic.endswith("checkpoints") else "produce"
        number = 6 if what == "snapshot" else 4
        self._fate.at(f"{number} before {what}")
        self._client.send(topic, value, **more)
        if self._fate.death == f"{number} after {what}":
            self._client.flush(10.0)  # sent means it will be in the log, whoever dies
        self._fate.at(f"{number} after {what}")

    def poll(self, timeout_s: float = 0.0) -> None:
        if self._fate.marked:
            self._fate.at("5 while flushing")
        self._client.poll(timeout_s)

    def commit(self, offsets: Any, metadata: str = "gorila", wait: bool = False) -> None:
        self._fate.marked = False
        self._fate.at("7 before commit")
        # An asynchronous commit may or may not survive its sender; "after" is about one that did.
        self._client.commit(offsets, metadata, wait or self._fate.death == "7 after commit")
        self._fate.at("7 after commit")


@dataclass
class MortalCluster:
    cluster: Any
    fate: Fate
    clients: list[Any] = field(default_factory=list)

    def producer(self) -> Any:
        self.clients.append(MortalClient(self.cluster.producer(), self.fate))
        return self.clients[-1]

    def consumer(self, *args: Any, **more: Any) -> Any:
        self.clients.append(MortalClient(self.cluster.consumer(*args, **more), self.fate))
        return self.clients[-1]


class MortalSchemas(Schemas):
    fate: Fate

    def decode(self, data: bytes | None) -> Message:
        self.fate.at("2 before decode")
        return super().decode(data)


class MortalRelay(Relay):
    def __init__(self, fate: Fate) -> None:
        super().__init__(checkpoints=True)
        self._fate = fate

    def process(self, record: Incoming) -> list[Outgoing]:
        self._fate.at("3 before process")
        out = list(super().process(record))
        self._fate.at("3 after process")
        return out

    def snapshot(self) -> list[Outgoing]:
        self._fate.marked = True
        return list(super().snapshot())


class Life:
    """One process: a relay in its runtime, with a clock moved by hand."""

    def __init__(self, cluster: ClusterPort, run: str, fate: Fate) -> None:
        self.fate, self.now_s = fate, 0.0
        schemas = MortalSchemas()
        schemas.fate = fate
        self.cluster = MortalCluster(cluster, fate)
        self.relay = MortalRelay(fate)
        service = MemoryService(self.cluster, run=run, schemas=schemas)
        self.runtime = Runtime(
            service, self.relay, [Input("episodes")], clock=lambda: self.now_s, commit_interval_s=0.2
        )

    def turns(self, wait_s: float, until: Callable[[], bool]) -> None:
        for _ in range(200):
            self.runtime.turn(wait_s)
            self.now_s += 0.07
            if until():
                return
        raise AssertionError("nothing came any more")

    @property
    def places(self) -> list[tuple[int, int]]:
        return [(record.partition, record.offset) for record in self.relay.taken]


class World:
    """A log and what the test wants to know of it: in memory, or on a real broker."""

    def __init__(self, cluster: Any, run: str) -> None:
        self.cluster, self.run, self.schemas = cluster, run, Schemas()
        self.wait_s = 0.0 if isinstance(cluster, MemoryCluster) else 0.3

    def write(self, number: int) -> None:
        value, partition = self.schemas.encode(episode(number)), number % PARTITIONS
        if isinstance(self.cluster, MemoryCluster):
            self.cluster.append(f"{self.run}.episodes", partition, value)
        else:
            producer = self.cluster.producer()
            producer.send(f"{self.run}.episodes", value, partition=partition)
            assert producer.flush(10.0) == 0
            producer.close()

    def read(self, topic: str) -> list[Message]:
        full = f"{self.run}.{topic}"
        if isinstance(self.cluster, MemoryCluster):
            return [self.schemas.decode(record.value) for record in self.cluster.read(full)]
        consumer = self.cluster.consumer()
        try:
            low, end = consumer.watermarks(full, 0)
            consumer.assign({(full, 0): low})
            found: list[Received] = []
            while len(found) < end - low:
                found += consumer.poll_many(100, 0.5)
            return [self.schemas.decode(record.value) for record in found]
        finally:
            consumer.close()

    def committed(self) -> dict[int, int]:
        consumer = self.cluster.consumer(f"{self.run}.learner")
        try:
            found = consumer.committed([(f"{self.run}.episodes", p) for p in range(PARTITIONS)])
            return {place[1]: offset or 0 for place, (offset, _) in found.items()}
        finally:
            consumer.close()

    def answers(self) -> Counter[tuple[int, int]]:
        episodes = [message for message in self.read("priorities") if isinstance(message, Episode)]
        return Counter((int(answer.actor_id), answer.lane_steps_total) for answer in episodes)


def live_until_killed(world: World, life: Life) -> None:
    life.runtime.open()
    for number in range(RECORDS):
        world.write(number)
        life.turns(world.wait_s, lambda wanted=number + 1: len(life.relay.taken) >= wanted)  # type: ignore[misc]
    life.turns(world.wait_s, lambda: False)


def die_and_resume(world: World, death: str, spared: int) -> None:
    everything = [(number % PARTITIONS, number // PARTITIONS) for number in range(RECORDS)]
    first = Life(world.cluster, world.run, Fate(death, spared))
    with pytest.raises(Killed):
        live_until_killed(world, first)
    if isinstance(world.cluster, MemoryCluster):
        world.cluster.kill_clients()
    written = sum(end for _, end in (_watermarks(world, p) for p in range(PARTITIONS)))
    for number in range(written, RECORDS):
        world.write(number)

    committed, before = world.committed(), world.answers()
    assert all(first.places.count(place) == 1 for place in first.places)
    # 7. Nothing is committed whose answer is not in the log.
    assert all((p, offset) in before for p, end in committed.items() for offset in range(end))

    second = Life(world.cluster, world.run, Fate("never", 0))
    second.runtime.open()
    left = [(p, offset) for p, offset in everything if offset >= committed[p]]
    second.turns(world.wait_s, lambda: len(second.relay.taken) >= len(left))
    second.runtime.drain()

    # Handled again is exactly what had not been committed, in order, and each of it once.
    for partition in range(PARTITIONS):
        assert [place for place in second.places if place[0] == partition] == [
            place for place in left if place[0] == partition
        ]
    # Nothing is lost; answered twice is exactly what was answered and not committed.
    after = world.answers()
    twice = {place for place, count in before.items() if place[1] >= committed[place[0]]}
    assert after == Counter({place: 2 if place in twice else 1 for place in everything})
    # A commit interval is three turns: what may be repeated is bounded by the records of two of them, and one in flight.
    assert len(twice) <= 7
    # A checkpoint that is in the log counts only records whose answers are there.
    checkpoints = [c.version for c in world.read("checkpoints") if isinstance(c, CheckpointLedger)]
    assert checkpoints
    assert world.committed() == dict.fromkeys(range(PARTITIONS), RECORDS // PARTITIONS)
    second.runtime.close()
    first.runtime.close()


def _watermarks(world: World, partition: int) -> tuple[int, int]:
    consumer = world.cluster.consumer()
    try:
        low, end = consumer.watermarks(f"{world.run}.episodes", partition)
        return low, end
    finally:
        consumer.close()


@pytest.mark.parametrize("spared", [0, 1, 2])
@pytest.mark.parametrize("death", DEATHS)
def test_after_a_death_at_any_step_exactly_the_uncommitted_records_are_handled_again_and_none_is_lost(
    death: str, spared: int
) -> None:
    die_and_resume(World(MemoryCluster({"test.episodes": PARTITIONS}), "test"), death, spared)


@pytest.mark.parametrize(
    "death", ["3 after process", "4 after produce", "6 before snapshot", "7 before commit", "7 after commit"]
)
def test_the_same_on_a_real_broker(broker: BrokerAddress, run_name: str, death: str) -> None:
    cluster = Cluster(broker.bootstrap_servers)
    names = {"episodes": PARTITIONS, "priorities": 1, "checkpoints": 1}
    cluster.admin().create_topics([NewTopic(f"{run_name}.{name}", count, 1, {}) for name, count in names.items()])
    die_and_resume(World(cluster, run_name), death, 1)
