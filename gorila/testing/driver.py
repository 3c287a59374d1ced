"""ProcessorTestDriver: a role in its real runtime, without Kafka, with a clock moved by hand.

    driver = ProcessorTestDriver(lambda: Shard(config, restored_state()), Input("gradients"))
    driver.feed("gradients", gradient)             # goes through the real codec, as from the wire
    driver.advance(0.01)                           # ticks
    assert driver.messages("weights")[0].version == 1
    driver.crash()                                 # kill -9 and start again

The loop is gorila.runtime.Runtime itself, so what holds here of order, dead letters, gates and commits holds in production.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

from gorila.codec import Schemas
from gorila.config import Config
from gorila.errors import GorilaError
from gorila.event_log import EventLogger
from gorila.health import Health
from gorila.inputs import Input
from gorila.kafka import Received
from gorila.messages import Message
from gorila.metrics import Metrics
from gorila.ports import ClusterPort, Gate
from gorila.processor import Processor
from gorila.runtime import Runtime
from gorila.testing.memory_log import Killed, MemoryCluster
from gorila.topics import TOPOLOGY, full_name, group_name


@dataclass
class MemoryService:
    """What a role process is given, without a process. `bad` holds (record, reason) of dead letters."""

    cluster: ClusterPort
    role: str = "learner"
    run: str = "test"
    name: str = "learner-0"
    config: Config = field(default_factory=Config)
    schemas: Schemas = field(default_factory=Schemas)
    log: EventLogger = field(default_factory=lambda: EventLogger("gorila.test", logging.INFO))
    stop: threading.Event = field(default_factory=threading.Event)
    bad: list[tuple[Received, str]] = field(default_factory=list)
    health: Health = field(default_factory=Health)

    def __post_init__(self) -> None:
        self.metrics = Metrics(self.role, self.run, self.name)

    @property
    def group(self) -> str:
        """See Service."""
        return group_name(self.run, self.role)

    def topic(self, name: str) -> str:
        """See Service."""
        return full_name(self.run, name)

    def dead_letter(self, received: Received, reason: str | GorilaError, stage: str = "VALUE_CONVERTER") -> None:
        """See Service."""
        self.bad.append((received, str(reason)))
        self.metrics.count("dead_letters_total", topic=received.topic.removeprefix(full_name(self.run, "")))


class ProcessorTestDriver:
    """Feeds one processor.

    Args:
        build: makes the processor as its service would at a start, from `self.messages(...)` (its checkpoints in the log) or from nothing.
            Called again by `crash`. Positions committed before are obeyed as the inputs say.
        inputs: as given to Runtime.
        automatic: acknowledgements come in by themselves. False: only `acknowledge` brings them.
    """

    def __init__(
        self,
        build: Callable[[], Processor],
        *inputs: Input,
        config: Config | None = None,
        role: str = "learner",
        gates: Mapping[str, Gate] | None = None,
        commit_interval_s: float = 0.2,
        automatic: bool = True,
        start_s: float = 0.0,
    ) -> None:
        config = config or Config()
        counts = {full_name("test", topic.name): topic.partitions(config) for topic in TOPOLOGY}
        self.cluster = MemoryCluster(counts, acknowledge_at_once=automatic)
        self.service = MemoryService(self.cluster, role=role, name=f"{role}-0", config=config)
        self.now_s = start_s
        self._build, self._inputs, self._gates, self._interval_s = build, inputs, dict(gates or {}), commit_interval_s
        self.starts = 0
        self._start()

    def _start(self) -> None:
        self.starts += 1
        self.processor = self._build()
        self.runtime = Runtime(
            self.service,
            self.processor,
            self._inputs,
            gates=self._gates,
            commit_interval_s=self._interval_s,
            clock=lambda: self.now_s,
        )
        self.runtime.open()

    def feed(self, topic: str, *messages: Message, partition: int = 0, key: bytes | None = None) -> None:
        """Append messages to an input's log and let the role take what it wants."""
        self.feed_bytes(
            topic, *(self.service.schemas.encode(message) for message in messages), partition=partition, key=key
        )

    def feed_bytes(self, topic: str, *values: bytes | None, partition: int = 0, key: bytes | None = None) -> None:
        """`feed` for bytes that need not be a record."""
        self.cluster.now_ms = int(self.now_s * 1000)
        for value in values:
            self.cluster.append(self.service.topic(topic), partition, value, key)
        self.turn()

    def turn(self) -> int:
        """Turns until nothing more is taken; how many records were."""
        total = 0
        while handed := self.runtime.turn(0.0):
            total += handed
        return total

    def advance(self, seconds: float) -> None:
        """Move the clock, then turn (a tick, and a commit when one is due)."""
        self.now_s += seconds
        self.turn()

    def acknowledge(self) -> None:
        """Everything sent so far is acknowledged; then turn."""
        self.cluster.acknowledge()
        self.turn()

    def commit(self) -> None:
        """Let a commit interval pass, and turns until its steps are through."""
        self.advance(2 * self._interval_s)
        self.turn()
        self.turn()

    def stop(self) -> None:
        """SIGTERM."""
        self.runtime.drain()
        self.runtime.close()

    def crash(self) -> None:
        """kill -9, then a new process: the role is built again and reads from where it was committed."""
        self.cluster.before = _alive
        self.cluster.kill_clients()
        self._start()
        self.turn()

    def crash_at(self, call: str, act: Callable[[], object], *, after: int = 0) -> bool:
        """Run `act` and die before its next call of "poll", "produce", "flush" or "commit" (skipping `after` of them), then start again; whether it got there."""
        left = [after]

        def die(name: str) -> None:
            if name == call:
                if left[0] == 0:
                    raise Killed(call)
                left[0] -= 1

        self.cluster.before = die
        try:
            act()
        except Killed:
            died = True
        else:
            died = False
        self.crash()
        return died

    def messages(self, topic: str, partition: int | None = None) -> list[Message]:
        """What is in a topic, decoded, partition by partition."""
        full = self.service.topic(topic)
        places = range(self.cluster.partitions.get(full, 1)) if partition is None else [partition]
        return [
            self.service.schemas.decode(record.value) for place in places for record in self.cluster.read(full, place)
        ]

    def committed(self, topic: str, partition: int = 0) -> int | None:
        """The group's committed offset."""
        return self.cluster.offsets.get((self.service.group, self.service.topic(topic), partition), (None, ""))[0]

    def dead_letters(self) -> Iterable[str]:
        """Reasons, in order."""
        return [reason for _, reason in self.service.bad]


def _alive(call: str) -> None:
    return None
