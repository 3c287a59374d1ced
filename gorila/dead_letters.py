"""Where records go that must not be used: their original bytes, with headers as Kafka Connect writes them, and a limit."""

from __future__ import annotations

from collections import deque

from gorila.errors import BrokerError, GorilaError, RunError
from gorila.kafka import Cluster, Producer, Received

MOST = 10_000
WINDOW = 1_000
ACKNOWLEDGED_S = 5.0
_PREFIX = "__connect.errors."


class DeadLetterLimit:
    """Says when bad records are no accident any more: MOST in a process, or more than half of the last WINDOW of a partition. Pure."""

    def __init__(self, most: int = MOST, window: int = WINDOW) -> None:
        self._most, self._window = most, window
        self._offsets: dict[tuple[str, int], deque[int]] = {}
        self.total = 0

    def count(self, topic: str, partition: int, offset: int) -> str:
        """Count a record; empty, or why the service must stop."""
        self.total += 1
        # More than half of the last WINDOW offsets are bad exactly when the last WINDOW / 2 + 1 bad ones span at most WINDOW.
        half = self._window // 2 + 1
        recent = self._offsets.setdefault((topic, partition), deque(maxlen=half))
        recent.append(offset)
        if self.total > self._most:
            return f"{self.total} records went to dead-letters"
        if len(recent) == half and recent[-1] - recent[0] < self._window:
            return f"more than half of the last {self._window} records of {topic} partition {partition} went to dead-letters"
        return ""


def headers_of(
    received: Received, reason: str, stage: str, class_name: str, role: str, index: int
) -> list[tuple[str, bytes]]:
    """The record's own headers, then Connect's error headers."""
    about = {
        "topic": received.topic,
        "partition": received.partition,
        "offset": received.offset,
        "connector.name": role,
        "task.id": index,
        "stage": stage,
        "class.name": "gorila",
        "exception.class.name": class_name,
        "exception.message": reason,
    }
    return [*received.headers, *((_PREFIX + name, str(value).encode()) for name, value in about.items())]


class DeadLetters:
    """Sends to one run's dead-letters topic. The producer is made at the first bad record."""

    def __init__(self, cluster: Cluster, topic: str, role: str, index: int) -> None:
        self._cluster, self._topic, self._role, self._index = cluster, topic, role, index
        self._limit = DeadLetterLimit()
        self._producer: Producer | None = None

    @property
    def total(self) -> int:
        """Records sent by this process."""
        return self._limit.total

    def send(self, received: Received, reason: str | GorilaError, stage: str) -> None:
        """Send the original bytes and wait for their acknowledgement (the caller's offset may move on then).

        Raises:
            RunError: above the limit; the record itself was sent.
            BrokerError: refused, or not acknowledged: nothing after it may be committed.
        """
        if self._producer is None:
            self._producer = self._cluster.producer(watched="")
        class_name = type(reason).__name__ if isinstance(reason, GorilaError) else "BadRecord"
        headers = headers_of(received, str(reason), stage, class_name, self._role, self._index)
        self._producer.send(self._topic, received.value, key=received.topic.encode(), partition=0, headers=headers)
        if self._producer.flush(ACKNOWLEDGED_S):
            # The offset must not move past a record whose only copy is in this process.
            raise BrokerError(f"a dead letter of {received.topic} was not acknowledged within {ACKNOWLEDGED_S:.0f} s")
        why = self._limit.count(received.topic, received.partition, received.offset)
        if why:
            raise RunError(
                f"{self._role} stops: {why}; the last one: {reason}. See the headers with `gorila cat {self._topic}`"
            )

    def close(self) -> None:
        """Flush and close."""
        if self._producer is not None:
            self._producer.close()
