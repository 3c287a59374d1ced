"""How to reach one Kafka: every client of a process is made here."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Mapping
from typing import Any

from gorila.errors import UsageError
from gorila.kafka.admin import Admin
from gorila.kafka.client_properties import read_client_properties
from gorila.kafka.connection import QUEUE_KIB, Link
from gorila.kafka.consumer import Consumer, Partition
from gorila.kafka.producer import Producer
from gorila.topics import MAX_RECORD_BYTES

STATISTICS_MS = 5000

METADATA_REFRESH_MS = 5_000


class Cluster:
    """How to reach one Kafka. Connects nothing by itself; every client of a process is made here.

    Args:
        bootstrap_servers: host:port[,host:port].
        client_properties: path of a Java-style properties file, or empty.
        client_id: shown by Kafka's tools and used by quotas.
        stop: set when the process must end: a `send` that waits for room then gives up after STOP_GRACE_S.

    Attributes:
        on_statistics: told (client label, librdkafka's statistics) every STATISTICS_MS from inside a watched client's poll; for clients made
            after it was set.
    """

    def __init__(
        self,
        bootstrap_servers: str,
        client_properties: str = "",
        client_id: str = "",
        stop: threading.Event | None = None,
    ) -> None:
        settings = read_client_properties(client_properties) if client_properties else {}
        if bootstrap_servers:
            settings["bootstrap.servers"] = bootstrap_servers
        if not settings.get("bootstrap.servers"):
            raise UsageError("kafka.bootstrap_servers is empty: give host:port, or start the embedded broker")
        self._settings = settings
        self.bootstrap_servers = settings["bootstrap.servers"]
        self.has_security = settings.get("security.protocol", "PLAINTEXT").upper() != "PLAINTEXT"
        self.client_id = client_id or settings.get("client.id", "gorila")
        self.stop = stop
        self.on_statistics: Callable[[str, Mapping[str, Any]], None] | None = None

    def client_settings(self, kind: str, extra: Mapping[str, Any]) -> tuple[dict[str, Any], Link]:
        """Settings of one client, and what it learns about the connection."""
        link = Link(self.bootstrap_servers, f"{self.client_id}-{kind}", self._settings)
        settings: dict[str, Any] = {
            "socket.nagle.disable": True,
            "reconnect.backoff.ms": 50,
            "reconnect.backoff.max.ms": 1000,
            "topic.metadata.refresh.fast.interval.ms": 50,
            # A broker that was held up is fenced, and its topics are "unknown" to clients that ask in that moment. librdkafka asks again at the next
            # regular refresh only: by default five minutes later, in which a reader of assigned partitions hears nothing.
            "topic.metadata.refresh.interval.ms": METADATA_REFRESH_MS,
            "message.max.bytes": MAX_RECORD_BYTES,
            **self._settings,
            **extra,
            "client.id": link.name,
            "error_cb": link.on_error,
        }
        return settings, link

    def statistics_settings(self, watched: str) -> dict[str, Any]:
        """Settings that make a client tell `on_statistics` about itself.

        Args:
            watched: its label there; empty: never. Only for a client that is polled all its life: librdkafka queues statistics until somebody polls.
        """
        tell = self.on_statistics
        if not watched or tell is None:
            return {}
        return {
            "statistics.interval.ms": STATISTICS_MS,
            "stats_cb": lambda text: tell(watched, json.loads(text)),
        }

    def producer(
        self,
        *,
        transactional_id: str | None = None,
        linger_ms: float = 0,
        watched: str = "producer",
        fence_s: float = 60.0,
    ) -> Producer:
        """An idempotent producer; with an id, a transactional one (which fences its predecessor: may take a second).

        Args:
            watched: see statistics_settings.
            fence_s: BrokerError when fencing takes longer.
        """
        return Producer(self, transactional_id, linger_ms, watched, fence_s)

    def consumer(
        self,
        group: str | None = None,
        *,
        instance_id: str | None = None,
        on_assign: Callable[[list[Partition]], Mapping[Partition, int] | None] | None = None,
        on_revoke: Callable[[list[Partition]], None] | None = None,
        ends: bool = False,
        queued_kib: int = QUEUE_KIB,
        watched: str = "",
        hurried: bool = True,
    ) -> Consumer:
        """A reader.

        Args:
            group: for `subscribe` and `commit`; None for a reader of explicit partitions.
            instance_id: static membership.
            on_assign: told the partitions that came; may return {partition: offset to start at}. The others start at their
                committed offset, or at the earliest one.
            on_revoke: told the partitions that go (commit what is theirs before returning).
            ends: whether `end_reached` is to be known (an event a time the reader reaches a partition's end).
            queued_kib: fetched and not yet polled, at most.
            watched: see statistics_settings.
            hurried: records are wanted as they come; else a fifth of a second later will do.
        """
        return Consumer(self, group, instance_id, on_assign, on_revoke, ends, queued_kib, watched, hurried)

    def admin(self) -> Admin:
        """Topics, offsets, groups."""
        return Admin(self)
