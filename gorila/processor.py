"""The shape of every role: records in, records out. No Kafka, clock, thread or socket behind this line.

Rules of this protocol:
1. `process` and `tick` may be called again with the same records after a crash: what they emit for a record must not depend on how often it came.
2. Whatever a role remembers is in `snapshot()`, or can be rebuilt from the log.
3. Time comes in as `now_s` (seconds, monotonic within a process); randomness comes in through the constructor.
4. A record that must not be used raises BadRecord: the runtime sends its bytes to dead-letters and moves on.
5. The offset after the last processed record is committed only when everything emitted for it was acknowledged.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

from gorila.messages import Message


@dataclass(frozen=True, slots=True)
class Incoming:
    """A decoded record. `topic` is the logical name (`gradients`), never the run's prefixed one."""

    topic: str
    partition: int
    offset: int
    timestamp_ms: int
    key: bytes | None
    message: Message


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A record to be produced.

    Attributes:
        topic: logical name.
        key: record key; None where the topology gives none.
        partition: explicit, or None where a key or round robin decides.
        tag: anything the role wants back in `delivered`; None for no callback.
    """

    topic: str
    message: Message
    key: bytes | None = None
    partition: int | None = None
    tag: object = field(default=None, compare=False)


@runtime_checkable
class Processor(Protocol):
    """A role. The runtime (gorila/runtime.py) and the test driver (gorila/testing) speak only this."""

    def process(self, record: Incoming) -> Iterable[Outgoing]:
        """Take one record. Must not keep `record.message` arrays it intends to change."""
        ...

    def tick(self, now_s: float) -> Iterable[Outgoing]:
        """Called after every poll, when all it brought was processed, and at least every `tick_interval_s` when idle."""
        ...

    def delivered(self, record: Outgoing, partition: int, offset: int) -> None:
        """An emitted record with a tag was acknowledged by the broker at this offset."""
        ...

    def wants(self, topic: str) -> bool:
        """Whether records of this input may be handed in now. A bounded role says no when it is full; the runtime then leaves them in Kafka."""
        ...

    def waiting_for(self) -> str:
        """Empty, or whom the role waits for and why: goes to log and metric."""
        ...

    def positions(self) -> dict[tuple[str, int], int]:
        """Next offset per (input topic, partition) that may be committed once all emitted records are acknowledged."""
        ...

    def snapshot(self) -> Iterable[Outgoing]:
        """Checkpoint records due now (empty for a stateless role). Called by the runtime after a flush."""
        ...

    def check_valid(self) -> None:
        """Raises InvalidState."""
        ...
