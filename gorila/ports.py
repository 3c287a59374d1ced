"""What the runtime needs of the world, as narrow as it is: gorila.kafka and gorila.testing.memory_log both fit, tests swap one for the other.

The contracts are those of gorila/kafka; only what a loop must *not* assume is repeated here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Protocol

from gorila.codec import Schemas
from gorila.config import Config
from gorila.errors import GorilaError
from gorila.event_log import EventLogger
from gorila.health import Health
from gorila.metrics import Metrics

if TYPE_CHECKING:
    from gorila.kafka import Received

Partition = tuple[str, int]
OnAssign = Callable[[list[Partition]], Mapping[Partition, int] | None]
OnRevoke = Callable[[list[Partition]], None]


class ConsumerPort(Protocol):
    """Reads. Callbacks of a rebalance run inside `poll_many`, never on another thread."""

    refused_commits: int

    def subscribe(self, topics: Sequence[str]) -> None: ...
    def assign(self, offsets: Mapping[Partition, int]) -> None: ...
    def poll_many(self, max_records: int, timeout_s: float) -> list[Received]: ...
    def commit(self, offsets: Mapping[Partition, int], metadata: str = ..., wait: bool = ...) -> None: ...
    def committed(self, partitions: Sequence[Partition]) -> dict[Partition, tuple[int | None, str]]: ...
    def watermarks(self, topic: str, partition: int) -> tuple[int, int]: ...
    def assignment(self) -> list[Partition]: ...
    def pause(self, partitions: Sequence[Partition]) -> None: ...
    def resume(self, partitions: Sequence[Partition]) -> None: ...
    def seek(self, topic: str, partition: int, offset: int) -> None: ...
    def close(self) -> None: ...


class ProducerPort(Protocol):
    """Writes. `on_delivery` is called from a later `send`, `poll` or `flush`, in no promised order across partitions."""

    def send(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = ...,
        partition: int | None = ...,
        on_delivery: Callable[[int, int], None] | None = ...,
    ) -> None: ...
    def poll(self, timeout_s: float = ...) -> None: ...
    def flush(self, timeout_s: float) -> int: ...
    def close(self, timeout_s: float = ...) -> None: ...


class ClusterPort(Protocol):
    """Makes clients."""

    def producer(self) -> ProducerPort: ...
    def consumer(
        self,
        group: str | None = ...,
        *,
        instance_id: str | None = ...,
        on_assign: OnAssign | None = ...,
        on_revoke: OnRevoke | None = ...,
        watched: str = ...,
    ) -> ConsumerPort: ...


class Gate(Protocol):
    """Says whether a topic's reader keeps up. Never blocks."""

    def may_write(self, partition: int, next_offset: int) -> bool: ...
    def waiting_for(self) -> str: ...


class ServicePort(Protocol):
    """What a role process is given (gorila.service.Service), as far as the runtime cares."""

    @property
    def role(self) -> str: ...
    @property
    def run(self) -> str: ...
    @property
    def name(self) -> str: ...
    @property
    def group(self) -> str: ...
    @property
    def config(self) -> Config: ...
    @property
    def cluster(self) -> ClusterPort: ...
    @property
    def schemas(self) -> Schemas: ...
    @property
    def log(self) -> EventLogger: ...
    @property
    def stop(self) -> threading.Event: ...
    @property
    def metrics(self) -> Metrics: ...
    @property
    def health(self) -> Health: ...
    def topic(self, name: str) -> str: ...
    def dead_letter(self, received: Received, reason: str | GorilaError, stage: str = ...) -> None:
        """Acknowledged on return."""
