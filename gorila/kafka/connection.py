"""Whether Kafka answers, what its errors mean, and how long we wait. Shared by the clients of this folder only."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from confluent_kafka import KafkaError, KafkaException

from gorila.errors import BrokerError, NotAllowed
from gorila.kafka.trust import why_not_trusted

SLICE_S = 0.5
QUEUE_KIB = 64 * 1024
T = TypeVar("T")
OURS = "Local: "
"""In an error that librdkafka made itself: a handshake that timed out is called an authentication error too."""

log = logging.getLogger("gorila.kafka")
AWAY = frozenset({KafkaError._ALL_BROKERS_DOWN, KafkaError._TRANSPORT, KafkaError._RESOLVE})
LATER = AWAY | {
    KafkaError._TIMED_OUT,
    KafkaError._TIMED_OUT_QUEUE,  # asked before the connection stood: TLS and SCRAM on a busy machine take their time
    KafkaError._WAIT_COORD,
    KafkaError.NOT_COORDINATOR,
    KafkaError.COORDINATOR_NOT_AVAILABLE,
    KafkaError.COORDINATOR_LOAD_IN_PROGRESS,
    KafkaError.LEADER_NOT_AVAILABLE,
    KafkaError.NOT_LEADER_FOR_PARTITION,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.FENCED_LEADER_EPOCH,
    KafkaError.UNKNOWN_LEADER_EPOCH,
    KafkaError.REQUEST_TIMED_OUT,
    KafkaError.CONCURRENT_TRANSACTIONS,
}
NOT_ALLOWED = {
    KafkaError.TOPIC_AUTHORIZATION_FAILED: "Topic authorization failed",
    KafkaError.GROUP_AUTHORIZATION_FAILED: "Group authorization failed",
    KafkaError.CLUSTER_AUTHORIZATION_FAILED: "Cluster authorization failed",
    KafkaError.TRANSACTIONAL_ID_AUTHORIZATION_FAILED: "Transactional id authorization failed",
}
"""In our words: a controller's own answer contains its whole request."""
NOT_THERE = frozenset({KafkaError._UNKNOWN_PARTITION, KafkaError._UNKNOWN_TOPIC, KafkaError.UNKNOWN_TOPIC_OR_PART})


def refusal(where: str, error: KafkaError) -> BrokerError:
    """The error to raise; NotAllowed, with where the rights are listed, when a right is missing."""
    if error.code() in NOT_ALLOWED:
        return NotAllowed(f"{where}: {NOT_ALLOWED[error.code()]}; what each role needs: gorila topics acls --run RUN")
    hidden = "; it does not exist, or this user may not see it" if error.code() in NOT_THERE else ""
    return BrokerError(f"{where}: {error.str()}{hidden}")


def right_missing(where: str, error: BaseException) -> BrokerError | None:
    """NotAllowed when a future's error is about a right that is missing."""
    if isinstance(error, NotAllowed):
        return error
    if isinstance(error, KafkaException) and error.args[0].code() in NOT_ALLOWED:
        return refusal(where, error.args[0])
    return None


class Link:
    """Whether Kafka answers, as far as one client knows. One log line a change.

    Args:
        settings: the client's, to find out why a certificate was refused.
    """

    def __init__(self, servers: str, name: str, settings: Mapping[str, Any] | None = None) -> None:
        self.servers, self.name = servers, name
        self.away = self.answered = False
        self.fatal: BrokerError | None = None
        self._settings = settings or {}

    def on_error(self, error: KafkaError) -> None:
        if self.fatal is not None:
            return
        if error.code() == KafkaError._AUTHENTICATION and OURS not in error.str():
            self.fatal = BrokerError(f"Kafka at {self.servers} refuses user or password of {self.name}: {error.str()}")
        elif error.fatal():
            self.fatal = BrokerError(f"Kafka at {self.servers} refuses {self.name}: {error.str()}")
        elif error.code() in (
            *AWAY,
            KafkaError._SSL,
            KafkaError._AUTHENTICATION,
        ):  # librdkafka uses either for a bad certificate
            self._lost(error.str())

    def _lost(self, text: str) -> None:
        """A certificate that is not trusted ends a client at its start: the user has to mend something. Later it is a broker that went away."""
        if self.away and self.answered:
            return
        why = why_not_trusted(text, self.servers, self._settings)
        if why and not self.answered:
            self.fatal = BrokerError(f"Kafka at {self.servers} is not trusted by {self.name}: {why}")
        elif not self.away:
            self.away = True
            log.warning("kafka.away client=%s servers=%s reason=%r", self.name, self.servers, why or text)

    def answers(self) -> None:
        self.answered = True
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
                raise refusal(f"Kafka at {servers}: {doing}", reason) from None
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
