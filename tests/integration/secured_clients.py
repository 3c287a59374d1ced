"""What a user of a secured Kafka may really do: everything is tried with librdkafka's own clients, nothing is asked about."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import confluent_kafka as ck
import confluent_kafka.admin as ck_admin

from gorila.kafka.client_properties import read_client_properties

TRY_S = 30.0
NO_RIGHT = {
    ck.KafkaError.TOPIC_AUTHORIZATION_FAILED,
    ck.KafkaError.GROUP_AUTHORIZATION_FAILED,
    ck.KafkaError.CLUSTER_AUTHORIZATION_FAILED,
}


def _allowed(error: ck.KafkaError | None) -> bool:
    """True, or False for want of a right; anything else is no answer."""
    assert error is None or error.code() in NO_RIGHT, error
    return error is None


class Tried:
    """One user's attempts."""

    def __init__(self, properties: Path) -> None:
        self._settings = {**read_client_properties(str(properties)), "log_level": 2}
        self._admin = ck_admin.AdminClient(self._settings)

    def writes(self, topics: Iterable[str]) -> set[str]:
        """Topics among these that took a record."""
        answers: dict[str, bool] = {}
        producer = ck.Producer({**self._settings, "message.timeout.ms": int(TRY_S * 1000)})
        for topic in topics:
            told = lambda error, _message, topic=topic: answers.__setitem__(topic, _allowed(error))  # noqa: E731
            producer.produce(topic, b"tried", b"key", partition=0, on_delivery=told)
        assert producer.flush(TRY_S) == 0
        assert answers.keys() == set(topics)
        return {topic for topic, allowed in answers.items() if allowed}

    def reads(self, topics: Iterable[str]) -> set[str]:
        """Topics among these that could be read to their end."""
        own = {"group.id": "gorila-no-group", "enable.partition.eof": True, "auto.offset.reset": "earliest"}
        consumer = ck.Consumer({**self._settings, **own})
        try:
            # librdkafka waits for ever, in silence, for a topic that it may not see.
            answers = {t: False for t in topics if not _allowed(consumer.list_topics(t, TRY_S).topics[t].error)}
            consumer.assign([ck.TopicPartition(t, 0, ck.OFFSET_BEGINNING) for t in topics if t not in answers])
            deadline = time.monotonic() + TRY_S
            while answers.keys() != set(topics):
                assert time.monotonic() < deadline, set(topics) - answers.keys()
                message = consumer.poll(0.5)
                if message is None or message.topic() is None:
                    continue
                error = message.error()
                ended = error is not None and error.code() == ck.KafkaError._PARTITION_EOF
                answers[message.topic()] = _allowed(None if ended else error)
        finally:
            consumer.close()
        return {topic for topic, allowed in answers.items() if allowed}

    def looks_at(self, groups: Iterable[str]) -> set[str]:
        """Groups among these whose committed offsets it may see."""
        return {group for group in groups if self._answer(self._admin.list_consumer_group_offsets, group)}

    def commits_to(self, groups: Iterable[str], topic: str) -> set[str]:
        """Groups among these it may commit offsets of a topic for."""
        at = [ck.TopicPartition(topic, 0, 0)]
        return {group for group in groups if self._answer(self._admin.alter_consumer_group_offsets, group, at)}

    def _answer(self, ask: object, group: str, at: list[ck.TopicPartition] | None = None) -> bool:
        assert callable(ask)
        [future] = ask([ck.ConsumerGroupTopicPartitions(group, at)]).values()
        try:
            answer = future.result(TRY_S)
        except ck.KafkaException as error:
            return _allowed(error.args[0])
        return all(_allowed(place.error) for place in answer.topic_partitions)

    def creates(self, topic: str) -> bool:
        """Whether it may make (and then delete) a topic."""
        [future] = self._admin.create_topics([ck_admin.NewTopic(topic, 1, 1)]).values()
        try:
            future.result(TRY_S)
        except ck.KafkaException as error:
            return _allowed(error.args[0])
        return True

    def deletes(self, topic: str) -> bool:
        """Whether it may delete a topic."""
        [future] = self._admin.delete_topics([topic]).values()
        try:
            future.result(TRY_S)
        except ck.KafkaException as error:
            return _allowed(error.args[0])
        return True

    def reconfigures(self, topic: str) -> bool:
        """Whether it may change a topic's settings."""
        entry = ck_admin.ConfigEntry("retention.ms", "1000", incremental_operation=ck_admin.AlterConfigOpType.SET)
        resource = ck_admin.ConfigResource(ck_admin.ResourceType.TOPIC, topic, incremental_configs=[entry])
        [future] = self._admin.incremental_alter_configs([resource]).values()
        try:
            future.result(TRY_S)
        except ck.KafkaException as error:
            return _allowed(error.args[0])
        return True
