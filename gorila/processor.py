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
        partition: always named where it is emitted: by a key, records would go to partitions that somebody added to the topic, where nobody reads.
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


class OffsetTracker:
    """Which records a role has handed in but not finished, as the offsets that may be committed. Pure, one a role.

    A role that finishes a record inside `process` calls `take` and `release` at once (or `done`); one that holds back (the learner, until a
    batch's gradient is out) releases later, in any order. A partition's position is its lowest unfinished offset, else one above the last taken.
    Call `take` only for records that are kept: after everything that may raise BadRecord.
    """

    def __init__(self) -> None:
        self._open: dict[tuple[str, int], set[int]] = {}
        self._next: dict[tuple[str, int], int] = {}

    def take(self, record: Incoming) -> None:
        """The record is being worked on."""
        key = (record.topic, record.partition)
        self._open.setdefault(key, set()).add(record.offset)
        self._next[key] = max(record.offset + 1, self._next.get(key, 0))

    def release(self, topic: str, partition: int, offset: int) -> None:
        """Everything that record causes has been emitted. Unknown offsets (of a partition taken away meanwhile) are ignored."""
        self._open.get((topic, partition), set()).discard(offset)

    def done(self, record: Incoming) -> None:
        """`take` and `release` in one."""
        self.take(record)
        self.release(record.topic, record.partition, record.offset)

    def positions(self) -> dict[tuple[str, int], int]:
        """Next offset to be read per (topic, partition) if the role died now."""
        return {key: min(self._open[key], default=position) for key, position in self._next.items()}

    def unfinished(self, topic: str) -> int:
        """Records of this input taken and not released."""
        return sum(len(offsets) for (name, _), offsets in self._open.items() if name == topic)

    def forget(self, partitions: Iterable[tuple[str, int]]) -> None:
        """These (topic, partition) belong to another member now."""
        for key in partitions:
            self._open.pop(key, None)
            self._next.pop(key, None)
