"""Sending records. What was accepted is delivered, or a later call raises."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import confluent_kafka as ck
from confluent_kafka import KafkaError, KafkaException

from gorila.errors import BrokerError, RecordTooLarge
from gorila.kafka.connection import QUEUE_KIB, SLICE_S, check_process, library_log, patiently, refusal
from gorila.topics import MAX_RECORD_BYTES

if TYPE_CHECKING:
    from gorila.kafka.cluster import Cluster

STOP_GRACE_S = 3.0
Headers = Sequence[tuple[str, bytes]]


class Producer:
    """Sends records; see rule 1."""

    def __init__(
        self, cluster: Cluster, transactional_id: str | None, linger_ms: float, watched: str, fence_s: float
    ) -> None:
        extra: dict[str, Any] = {
            "enable.idempotence": True,
            "acks": "all",
            "linger.ms": linger_ms,
            "partitioner": "murmur2_random",
            "queue.buffering.max.kbytes": QUEUE_KIB,
            "queue.buffering.max.messages": 100_000,
            # Kafka may be away for long: what was accepted stays in the bounded queue until it is back.
            "message.timeout.ms": 0,
            # A topic that does not exist is an error this soon; those of a run were seen by all before it began.
            "topic.metadata.propagation.max.ms": 5_000,
            **cluster.statistics_settings(watched),
        }
        if transactional_id:
            extra |= {
                "transactional.id": transactional_id,
                "transaction.timeout.ms": 60_000,
                "message.timeout.ms": 60_000,
            }
        settings, self._link = cluster.client_settings("producer", extra)
        self._cluster = cluster
        self._pid = os.getpid()
        self._failed: BrokerError | None = None
        self._producer = ck.Producer(settings, logger=library_log)
        if transactional_id:
            patiently(
                self._producer.init_transactions, cluster.bootstrap_servers, f"fencing {transactional_id}", fence_s
            )

    @property
    def outstanding(self) -> int:
        """Records (and events) not yet acknowledged."""
        return len(self._producer)

    def _check(self) -> None:
        check_process(self._pid)
        self._link.check()
        if self._failed is not None:
            raise self._failed

    def _delivered(self, then: Callable[[int, int], None] | None, error: KafkaError | None, message: Any) -> None:
        if error is None:
            self._link.answers()
            if then is not None:
                then(message.partition(), message.offset())
        elif error.code() in (
            KafkaError.MSG_SIZE_TOO_LARGE,
            KafkaError.INVALID_MSG_SIZE,
            KafkaError.RECORD_LIST_TOO_LARGE,
        ):
            self._failed = self._failed or too_large(
                message.topic(), len(message.value() or b""), "the topic's max.message.bytes"
            )
        elif error.code() not in (KafkaError._PURGE_QUEUE, KafkaError._PURGE_INFLIGHT):  # purged: aborted, or closing
            where = f"{message.topic()} partition {message.partition()}"
            self._failed = self._failed or refusal(
                f"Kafka at {self._cluster.bootstrap_servers}: a record for {where} failed", error
            )

    def send(
        self,
        topic: str,
        value: bytes | None,
        *,
        key: bytes | None = None,
        partition: int | None = None,
        headers: Headers = (),
        on_delivery: Callable[[int, int], None] | None = None,
    ) -> None:
        """Queue a record; waits while the queue is full.

        Args:
            on_delivery: called as (partition, offset) from a later `send`, `poll` or `flush` once acknowledged.

        Raises:
            RecordTooLarge, BrokerError: also for an earlier record that failed for good.
        """
        self._check()
        extra: dict[str, Any] = {} if partition is None else {"partition": partition}
        if headers:
            extra["headers"] = list(headers)
        give_up: float | None = None
        while True:
            try:
                self._producer.produce(
                    topic, value, key=key, on_delivery=partial(self._delivered, on_delivery), **extra
                )
                return
            except BufferError:
                self._producer.poll(0.05)
                self._check()
                if self._cluster.stop is not None and self._cluster.stop.is_set():
                    give_up = give_up or time.monotonic() + STOP_GRACE_S
                    if time.monotonic() > give_up:
                        raise BrokerError(
                            f"Kafka at {self._cluster.bootstrap_servers} took nothing while stopping: {topic}"
                        ) from None
            except KafkaException as error:
                if error.args[0].code() == KafkaError.MSG_SIZE_TOO_LARGE:
                    raise too_large(
                        topic, len(value or b""), "gorila.topics.MAX_RECORD_BYTES and the topic's max.message.bytes"
                    ) from None
                raise BrokerError(
                    f"Kafka at {self._cluster.bootstrap_servers}: {topic}: {error.args[0].str()}"
                ) from None

    def poll(self, timeout_s: float = 0.0) -> None:
        """Serve delivery callbacks. Raises BrokerError for a record that failed for good."""
        self._producer.poll(min(timeout_s, SLICE_S))
        self._check()

    def flush(self, timeout_s: float) -> int:
        """Wait until all is acknowledged; how many records are not. Raises BrokerError."""
        deadline = time.monotonic() + timeout_s
        left = len(self._producer)
        while left:
            left = self._flush(max(0.0, min(SLICE_S, deadline - time.monotonic())))
            self._check()
            if time.monotonic() >= deadline:
                break
        return left

    def _flush(self, timeout_s: float) -> int:
        try:
            left: int = self._producer.flush(timeout_s)
            return left
        except KafkaException as error:  # fatal: nothing more will be sent
            self._link.fatal = BrokerError(
                f"Kafka at {self._cluster.bootstrap_servers} refuses {self._link.name}: {error.args[0].str()}"
            )
            return len(self._producer)

    def begin(self) -> None:
        """Start a transaction (transactional producers only)."""
        self._producer.begin_transaction()

    def commit_transaction(self, timeout_s: float = 30.0) -> None:
        """Make the records since `begin` visible at once. Raises BrokerError."""
        patiently(
            self._producer.commit_transaction, self._cluster.bootstrap_servers, "committing a transaction", timeout_s
        )

    def abort_transaction(self, timeout_s: float = 30.0) -> None:
        """Drop the records since `begin`, those that failed too. Raises BrokerError."""
        self._failed = None
        patiently(
            self._producer.abort_transaction, self._cluster.bootstrap_servers, "aborting a transaction", timeout_s
        )

    def close(self, timeout_s: float = 3.0) -> None:
        """Flush what can be flushed; never raises for what cannot (it was not acknowledged, and its sender knows)."""
        self._flush(min(timeout_s, SLICE_S) if self._failed else timeout_s)
        self._producer.purge()
        self._producer.poll(0)


def too_large(topic: str, size: int, key: str) -> RecordTooLarge:
    return RecordTooLarge(
        f"a record of {size} bytes for topic {topic} is too large: at most {MAX_RECORD_BYTES} are taken; the limit is {key}"
    )
