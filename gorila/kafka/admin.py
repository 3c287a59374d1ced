"""Topics, offsets and groups, as Kafka's own tools see them."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeout
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import confluent_kafka.admin as ck
from confluent_kafka import KafkaError, KafkaException, TopicPartition

from gorila.acls import Acl
from gorila.errors import BrokerError, UsageError
from gorila.kafka.acl_bindings import binding, binding_filter
from gorila.kafka.committed import CommittedOffsets
from gorila.kafka.connection import LATER, SLICE_S, library_log, patiently, refusal
from gorila.kafka.group_facts import GroupFacts, read_group
from gorila.kafka.trust import speaks_tls

if TYPE_CHECKING:
    from gorila.kafka.cluster import Cluster

ANSWER_S = 10.0


@dataclass(frozen=True)
class NewTopic:
    """A topic to be made."""

    name: str
    partitions: int
    replication_factor: int
    settings: Mapping[str, str]


@dataclass(frozen=True)
class TopicFacts:
    """A topic as it is: settings are those that differ from the broker's defaults; ends are next offsets by partition."""

    name: str
    partitions: int
    settings: dict[str, str]
    ends: dict[int, int]


class Admin:
    """One admin client; every method raises BrokerError when Kafka does not answer within `timeout_s`."""

    def __init__(self, cluster: Cluster) -> None:
        settings, self._link = cluster.client_settings("admin", {})
        settings.pop("message.max.bytes")
        self._servers, self._has_security = cluster.bootstrap_servers, cluster.has_security
        self._admin = ck.AdminClient(settings, logger=library_log)
        self._cluster = cluster
        self._committed: dict[str, CommittedOffsets] = {}

    def _answers(self, futures: Mapping[Any, Future[Any]], doing: str, timeout_s: float) -> dict[Any, Any]:
        """Results by key, with exceptions as values where Kafka said no."""
        deadline = time.monotonic() + timeout_s
        found: dict[Any, Any] = {}
        for key, future in futures.items():
            while key not in found:
                self._admin.poll(0)
                self._link.check()
                try:
                    found[key] = future.result(timeout=max(0.0, min(SLICE_S, deadline - time.monotonic())))
                except KafkaException as error:
                    found[key] = error.args[0]
                except FutureTimeout:
                    if time.monotonic() >= deadline:
                        raise BrokerError(
                            f"Kafka at {self._servers} does not answer ({doing}, {timeout_s:g} s)"
                        ) from None
        return found

    def _ask(self, question: Any, doing: str, timeout_s: float, allowed: Iterable[int] = ()) -> dict[Any, Any]:
        """`_answers`, asked again while Kafka says "later"; BrokerError for a refusal that is not allowed."""
        deadline = time.monotonic() + timeout_s
        while True:
            found = self._answers(question(), doing, max(0.1, deadline - time.monotonic()))
            refused = [(key, e) for key, e in found.items() if isinstance(e, KafkaError) and e.code() not in allowed]
            if not refused:
                return found
            key, error = refused[0]
            # A broker that was held up for longer than its session is fenced for a moment: a busy laptop, not a fault.
            later = error.code() in LATER or "brokers are currently fenced" in error.str()
            if not later or time.monotonic() >= deadline:
                name = key.topic if isinstance(key, TopicPartition) else getattr(key, "name", key)
                raise refusal(f"Kafka at {self._servers}: {doing} {name}", error)
            time.sleep(0.1)

    def ping(self, timeout_s: float = 5.0) -> None:
        """Raises BrokerError, one line, when Kafka does not answer."""
        self._metadata(timeout_s)

    def _metadata(self, timeout_s: float) -> Any:
        def ask(slice_s: float) -> Any:
            try:
                return self._admin.list_topics(timeout=slice_s)
            finally:
                self._admin.poll(0)  # what librdkafka has against user, password or certificate: waiting would not help
                self._link.check()

        try:
            found = patiently(ask, self._servers, "metadata", timeout_s)
        except BrokerError as error:
            if self._has_security or not speaks_tls(self._servers):
                raise
            raise BrokerError(f"{error}: it speaks TLS, and this client does not (kafka.client_properties)") from None
        self._link.answers()
        return found

    def topics(self, timeout_s: float = ANSWER_S) -> dict[str, int]:
        """{topic: partitions} of the whole cluster."""
        found = self._metadata(timeout_s)
        return {name: len(topic.partitions) for name, topic in found.topics.items() if topic.error is None}

    def partitions(self, topic: str, timeout_s: float = ANSWER_S) -> int:
        """Partitions of a topic. Raises BrokerError when it does not exist."""
        found = self.topics(timeout_s)
        if topic not in found:
            raise BrokerError(f"topic {topic} does not exist on Kafka at {self._servers}")
        return found[topic]

    def create_topics(self, topics: Sequence[NewTopic], timeout_s: float = 30.0) -> list[str]:
        """Create those that are not there, wait until clients see them; names of those created."""
        if not topics:
            return []
        wanted = [
            ck.NewTopic(
                t.name, num_partitions=t.partitions, replication_factor=t.replication_factor, config=dict(t.settings)
            )
            for t in topics
        ]
        exists = KafkaError.TOPIC_ALREADY_EXISTS
        try:
            found = self._ask(
                lambda: self._admin.create_topics(wanted, operation_timeout=timeout_s),
                "creating topic",
                timeout_s,
                {exists},
            )
        except ValueError as error:  # more partitions or replicas than any Kafka takes: refused before it is asked
            raise UsageError(f"Kafka at {self._servers}: creating topic: {error}") from None
        self._wait_for(lambda seen: all(seen.get(t.name) for t in topics), "new topics to be seen", timeout_s)
        return [name for name, answer in found.items() if not isinstance(answer, KafkaError)]

    def delete_topics(self, names: Sequence[str], timeout_s: float = 30.0) -> list[str]:
        """Delete those that are there, wait until they are gone; names of those deleted."""
        if not names:
            return []
        unknown = KafkaError.UNKNOWN_TOPIC_OR_PART
        found = self._ask(
            lambda: self._admin.delete_topics(list(names), operation_timeout=timeout_s),
            "deleting topic",
            timeout_s,
            {unknown},
        )
        self._wait_for(lambda seen: not any(name in seen for name in names), "topics to be gone", timeout_s)
        return [name for name, answer in found.items() if not isinstance(answer, KafkaError)]

    def _wait_for(self, condition: Any, what: str, timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not condition(self.topics(timeout_s)):
            if time.monotonic() >= deadline:
                raise BrokerError(f"Kafka at {self._servers}: waited {timeout_s:g} s for {what}")
            time.sleep(0.05)

    def describe(self, names: Sequence[str], timeout_s: float = ANSWER_S) -> dict[str, TopicFacts]:
        """Facts of those that exist."""
        there = {name: count for name, count in self.topics(timeout_s).items() if name in set(names)}
        if not there:
            return {}
        resources = {name: ck.ConfigResource(ck.ResourceType.TOPIC, name) for name in there}
        configs = self._ask(lambda: self._admin.describe_configs(list(resources.values())), "describing", timeout_s)
        ends = self.end_offsets([(name, p) for name, count in there.items() for p in range(count)], timeout_s)
        facts = {}
        for name, count in there.items():
            entries = configs[resources[name]]
            own = {k: e.value for k, e in entries.items() if e.source == ck.ConfigSource.DYNAMIC_TOPIC_CONFIG.value}
            facts[name] = TopicFacts(name, count, own, {p: ends[(name, p)] for p in range(count)})
        return facts

    def end_offsets(
        self, partitions: Sequence[tuple[str, int]], timeout_s: float = ANSWER_S
    ) -> dict[tuple[str, int], int]:
        """{partition: next offset to be written}."""
        return self.offsets(partitions, "latest", timeout_s)

    def offsets(
        self, partitions: Sequence[tuple[str, int]], at: str | int, timeout_s: float = ANSWER_S
    ) -> dict[tuple[str, int], int]:
        """{partition: offset} at "earliest", "latest", or the first one not older than a time in ms (-1: there is none)."""
        if not partitions:
            return {}
        spec = {"earliest": ck.OffsetSpec.earliest(), "latest": ck.OffsetSpec.latest()}.get(
            str(at)
        ) or ck.OffsetSpec.for_timestamp(int(at))
        wanted = {TopicPartition(*p): spec for p in partitions}
        found = self._ask(lambda: self._admin.list_offsets(wanted), f"{at} offsets of", timeout_s)
        return {(p.topic, p.partition): int(answer.offset) for p, answer in found.items()}

    def newest_times(
        self, partitions: Sequence[tuple[str, int]], timeout_s: float = ANSWER_S
    ) -> dict[tuple[str, int], int | None]:
        """{partition: time of its newest record in ms, or None when it holds none}. Reads no record."""
        if not partitions:
            return {}
        wanted = {TopicPartition(*p): ck.OffsetSpec.max_timestamp() for p in partitions}
        found = self._ask(lambda: self._admin.list_offsets(wanted), "newest record of", timeout_s)
        return {(p.topic, p.partition): a.timestamp if a.timestamp >= 0 else None for p, a in found.items()}

    def group_offsets(
        self, group: str, partitions: Sequence[tuple[str, int]], timeout_s: float = ANSWER_S
    ) -> dict[tuple[str, int], int | None]:
        """{partition: committed next offset, or None}. Not asked by the admin client itself: gorila/kafka/committed.py says why."""
        if not partitions:
            return {}
        if group not in self._committed:
            self._committed[group] = CommittedOffsets(self._cluster, group)
        return self._committed[group].now(partitions, timeout_s)

    def groups(self, timeout_s: float = ANSWER_S) -> list[str]:
        """Ids of all consumer groups."""
        found = self._answers({"": self._admin.list_consumer_groups()}, "listing groups", timeout_s)[""]
        if isinstance(found, KafkaError):
            raise BrokerError(f"Kafka at {self._servers}: listing groups: {found.str()}")
        return sorted(group.group_id for group in found.valid)

    def describe_groups(self, groups: Sequence[str], timeout_s: float = ANSWER_S) -> dict[str, GroupFacts]:
        """State and members by group; a group nobody ever joined has none."""
        if not groups:
            return {}
        unknown = {KafkaError.GROUP_ID_NOT_FOUND}
        found = self._ask(
            lambda: self._admin.describe_consumer_groups(list(groups)), "describing group", timeout_s, unknown
        )
        return {
            name: GroupFacts(name, "Dead", ()) if isinstance(answer, KafkaError) else read_group(answer)
            for name, answer in found.items()
        }

    def create_acls(self, wanted: Sequence[Acl], timeout_s: float = ANSWER_S) -> None:
        """Grant rights; those that are granted already stay. Raises BrokerError, NotAllowed."""
        if wanted:
            self._ask(lambda: self._admin.create_acls([binding(acl) for acl in wanted]), "granting", timeout_s)

    def delete_acls(self, unwanted: Sequence[Acl], timeout_s: float = ANSWER_S) -> int:
        """Take exactly these rights back; how many there were. Raises BrokerError, NotAllowed."""
        if not unwanted:
            return 0
        found = self._ask(
            lambda: self._admin.delete_acls([binding_filter(acl) for acl in unwanted]), "taking a right back", timeout_s
        )
        return sum(len(deleted) for deleted in found.values())

    def delete_groups(self, groups: Sequence[str], timeout_s: float = ANSWER_S) -> None:
        """Delete empty groups; those that are unknown are left."""
        if groups:
            unknown = {KafkaError.GROUP_ID_NOT_FOUND, KafkaError.NON_EMPTY_GROUP}
            self._ask(lambda: self._admin.delete_consumer_groups(list(groups)), "deleting group", timeout_s, unknown)
