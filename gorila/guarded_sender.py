"""Records of a topic that only one process at a time may write: a transactional producer, in a thread of its own.

Rules of this file:
1. `raise_fence` makes a producer under an id that all candidates share: Kafka then refuses every earlier holder of it, and aborts what it left open. Making
   it takes a tenth of a second and committing 10-20 ms; neither is waited for here, so the caller's loop (and its heartbeats) goes on.
2. What is waiting when a transaction begins goes into it together; acknowledgements come after its commit, on the caller's thread.
3. A transaction that fails is over: its records, and all that wait, are acknowledged with offset DROPPED. Nothing is sent again: the caller knows what is still
   to be said when it may speak again.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from gorila.errors import BrokerError
from gorila.ports import ProducerPort

if TYPE_CHECKING:
    from gorila.event_log import EventLogger
    from gorila.kafka import Cluster, Producer

DROPPED = -1
MOST_BYTES = 32 * 1024 * 1024
FENCE_S = 0.12
"""Patience with a first try at the fence, doubled each time. When the predecessor died within a transaction, the try itself makes the broker abort it, which takes
milliseconds; librdkafka asks again only after 500 ms, another producer at once."""
LONGEST_FENCE_S = 30.0
COMMIT_S = 10.0
OnDelivery = Callable[[int, int], None]


@dataclass(slots=True)
class _Record:
    topic: str
    value: bytes
    key: bytes | None
    partition: int
    on_delivery: OnDelivery | None


class GuardedSender:
    """See the rules above. A gorila.ports.ProducerPort for records that name their partition."""

    def __init__(self, cluster: Cluster, transactional_id: str, log: EventLogger) -> None:
        self._cluster, self._id, self._log = cluster, transactional_id, log
        self._wake = threading.Condition()
        self._waiting: deque[_Record] = deque()
        self._done: deque[tuple[OnDelivery | None, int, int]] = deque()
        self._unanswered = 0
        self._asked = 0
        self._wanted = self._up = self._lost = self._closing = False
        self._thread = threading.Thread(target=self._work, name="guarded-sender", daemon=True)
        self._thread.start()

    # ---- the caller's side

    @property
    def is_up(self) -> bool:
        """Whether the fence stands and records are taken."""
        return self._up

    def raise_fence(self) -> None:
        """Begin to fence, anew if a fence stands: `is_up` says when it is done."""
        with self._wake:
            self._asked += 1
            self._wanted, self._up = True, False
            self._drop_waiting()
            self._wake.notify()

    def was_lost(self) -> bool:
        """Whether a transaction failed since this was asked last: somebody else fenced us, or Kafka was away for long."""
        lost, self._lost = self._lost, False
        return lost

    def drop(self) -> None:
        """Somebody else writes now: what waits is dropped."""
        with self._wake:
            self._wanted = self._up = False
            self._drop_waiting()
            self._wake.notify()

    def send(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        on_delivery: OnDelivery | None = None,
    ) -> None:
        """Take a record for the next transaction; without a fence it is dropped."""
        assert value is not None and partition is not None
        with self._wake:
            self._unanswered += 1
            self._waiting.append(_Record(topic, value, key, partition, on_delivery))
            if not self._up:
                self._drop_waiting()
            self._wake.notify()

    def poll(self, timeout_s: float = 0.0) -> None:
        """Serve acknowledgements."""
        while self._done:
            on_delivery, partition, offset = self._done.popleft()
            self._unanswered -= 1
            if on_delivery is not None:
                on_delivery(partition, offset)

    def flush(self, timeout_s: float) -> int:
        """Wait for what was taken; how many records are not acknowledged."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            self.poll()
            left_s = deadline_s - time.monotonic()
            if not self._unanswered or left_s <= 0:
                return self._unanswered
            with self._wake:
                if not self._done:
                    self._wake.wait(min(left_s, 0.05))

    def close(self, timeout_s: float = 3.0) -> None:
        """End the thread, after the transaction it is in."""
        with self._wake:
            self._closing = True
            self._wake.notify()
        self._thread.join(timeout_s)

    # ---- the thread's side

    def _work(self) -> None:
        producer: Producer | None = None
        made = 0
        while True:
            with self._wake:
                while not (self._closing or self._waiting or (self._wanted and made != self._asked)):
                    if not self._wanted and producer is not None:
                        break
                    self._wake.wait()
                if self._closing:
                    break
                asked, wanted = self._asked, self._wanted
                batch = self._batch() if self._up else []
            if producer is not None and (not wanted or made != asked):
                producer.close(0.0)
                producer = None
            if wanted and producer is None:
                producer, made = self._fence(asked), asked
            elif batch and producer is not None and not self._commit(producer, batch):
                producer.close(0.0)
                producer = None
        if producer is not None:
            producer.close(0.5)

    def _batch(self) -> list[_Record]:
        batch: list[_Record] = []
        size = 0
        while self._waiting and (not batch or size + len(self._waiting[0].value) <= MOST_BYTES):
            batch.append(self._waiting.popleft())
            size += len(batch[-1].value)
        return batch

    def _fence(self, asked: int) -> Producer | None:
        fence_s = FENCE_S
        while True:
            try:
                producer = self._cluster.producer(transactional_id=self._id, fence_s=fence_s)
            except BrokerError as error:
                if fence_s > 4 * FENCE_S:
                    self._log.warning("fence.failed", id=self._id, reason=str(error))
                fence_s = min(2 * fence_s, LONGEST_FENCE_S)
                with self._wake:
                    self._wake.wait(0.02 if fence_s < 1.0 else 1.0)
                    if self._closing or not self._wanted or self._asked != asked:
                        return None
                continue
            with self._wake:
                self._up = self._wanted and self._asked == asked
            return producer

    def _commit(self, producer: Producer, batch: list[_Record]) -> bool:
        offsets: list[int | None] = [None] * len(batch)

        def delivered(number: int) -> OnDelivery:
            def take(_partition: int, offset: int) -> None:
                offsets[number] = offset

            return take

        try:
            producer.begin()
            for number, record in enumerate(batch):
                producer.send(
                    record.topic,
                    record.value,
                    key=record.key,
                    partition=record.partition,
                    on_delivery=delivered(number),
                )
            producer.commit_transaction(COMMIT_S)
            producer.poll(0.0)
            failed = any(offset is None for offset in offsets)
        except BrokerError as error:
            self._log.warning("fence.lost", id=self._id, reason=str(error))
            failed = True
        with self._wake:
            for record, offset in zip(batch, offsets, strict=True):
                known = DROPPED if failed or offset is None else offset
                self._done.append((record.on_delivery, record.partition, known))
            if failed:
                self._up = self._wanted = False
                self._lost = True
                self._drop_waiting()
            self._wake.notify()
        return not failed

    def _drop_waiting(self) -> None:
        while self._waiting:
            record = self._waiting.popleft()
            self._done.append((record.on_delivery, record.partition, DROPPED))


class RoutedProducer:
    """Two producers as one: the guarded topics' records go through the guard, all others straight."""

    def __init__(self, plain: ProducerPort, guarded: GuardedSender, topics: frozenset[str]) -> None:
        self._plain, self._guarded, self._topics = plain, guarded, topics

    def send(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        on_delivery: OnDelivery | None = None,
    ) -> None:
        """See ProducerPort."""
        to: ProducerPort = self._guarded if topic in self._topics else self._plain
        to.send(topic, value, key=key, partition=partition, on_delivery=on_delivery)

    def poll(self, timeout_s: float = 0.0) -> None:
        """See ProducerPort."""
        self._guarded.poll()
        self._plain.poll(timeout_s)

    def flush(self, timeout_s: float) -> int:
        """See ProducerPort."""
        began_s = time.monotonic()
        left = self._plain.flush(timeout_s)
        return left + self._guarded.flush(max(0.0, timeout_s - (time.monotonic() - began_s)))

    def close(self, timeout_s: float = 3.0) -> None:
        """See ProducerPort."""
        self._guarded.close(timeout_s)
        self._plain.close(timeout_s)
