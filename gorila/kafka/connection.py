"""Whether Kafka answers, what its errors mean, and how long we wait. Shared by the clients of this folder only."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable
from typing import TypeVar

from confluent_kafka import KafkaError, KafkaException

from gorila.errors import BrokerError

SLICE_S = 0.5
QUEUE_KIB = 64 * 1024
T = TypeVar("T")

log = logging.getLogger("gorila.kafka")
AWAY = frozenset({KafkaError._ALL_BROKERS_DOWN, KafkaError._TRANSPORT, KafkaError._RESOLVE})
LATER = AWAY | {
    KafkaError._TIMED_OUT,
    KafkaError._WAIT_COORD,
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.REQUEST_TIMED_OUT,
    KafkaError.CONCURRENT_TRANSACTIONS,
}


class Link:
    """Whether Kafka answers, as far as one client knows. One log line a change."""

    def __init__(self, servers: str, name: str) -> None:
        self.servers, self.name = servers, name
        self.away = False
        self.fatal: BrokerError | None = None

    def on_error(self, error: KafkaError) -> None:
        if error.code() == KafkaError._AUTHENTICATION or error.fatal():
            self.fatal = BrokerError(f"Kafka at {self.servers} refuses {self.name}: {error.str()}")
        elif error.code() in AWAY and not self.away:
            self.away = True
            log.warning("kafka.away client=%s servers=%s reason=%r", self.name, self.servers, error.str())

    def answers(self) -> None:
        if self.away:
            self.away = False
            log.warning("kafka.back client=%s servers=%s", self.name, self.servers)

    def check(self) -> None:
        if self.fatal is not None:
            raise self.fatal


class _StateChangesOnly(logging.Filter):
    """librdkafka repeats itself at every retry; `Link` already says it once. What it says of sessions and fencing passes."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the line is shown."""
        return record.getMessage().split(" ", 1)[0] not in ("FAIL", "ERROR", "CONFWARN", "GETPID", "REQTMOUT")


library_log = logging.getLogger("gorila.librdkafka")
library_log.addFilter(_StateChangesOnly())


def patiently(ask: Callable[[float], T], servers: str, doing: str, timeout_s: float) -> T:
    """Repeat `ask(slice_s)` while Kafka says "later"; BrokerError at the deadline or for anything else."""
    deadline = time.monotonic() + timeout_s
    pause_s = 0.02
    while True:
        try:
            return ask(max(0.01, min(SLICE_S, deadline - time.monotonic())))
        except KafkaException as error:
            reason = error.args[0]
            if reason.code() not in LATER:
                raise BrokerError(f"Kafka at {servers}: {doing}: {reason.str()}") from None
            if time.monotonic() >= deadline:
                raise BrokerError(
                    f"Kafka at {servers} does not answer ({doing}, {timeout_s:g} s): {reason.str()}"
                ) from None
        time.sleep(min(pause_s, SLICE_S, max(0.0, deadline - time.monotonic())))
        pause_s *= 2


def check_process(pid: int) -> None:
    """Raises BrokerError when the client was made before a fork: it would hang for ever."""
    if pid != os.getpid():
        raise BrokerError("this Kafka client was made before a fork: make clients in the process that uses them")
