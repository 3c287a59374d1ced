"""The topology as data: this table creates the topics, generates the table in the docs, and says who may touch what.

A test asserts that every topic has a writer and a reader. Names on the broker are `<run>.<topic>`; groups `<run>.<role>`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from gorila.config import Config

MAX_RECORD_BYTES = 8 * 1024 * 1024
_MIB = 1024 * 1024


def _one(_: Config) -> int:
    return 1


@dataclass(frozen=True)
class Topic:
    """One topic of a run."""

    name: str
    key: str
    writers: tuple[str, ...]
    readers: tuple[str, ...]
    schemas: tuple[str, ...]
    cleanup: str
    partitions: Callable[[Config], int] = _one
    settings: Callable[[Config], dict[str, str]] = field(default=lambda _: {})
    about: str = ""

    def topic_config(self, config: Config) -> dict[str, str]:
        """Kafka's per-topic settings.

        The broker's clock is the only one that times records: Kafka refuses records that are an hour ahead of it, and deletes at once what seems older than
        `retention.ms`, so a machine whose clock is off could not take part.
        """
        return {
            "cleanup.policy": self.cleanup,
            "max.message.bytes": str(MAX_RECORD_BYTES),
            "message.timestamp.type": "LogAppendTime",
            **self.settings(config),
        }


def _at_most(config: Config, size: int) -> str:
    return str(min(size, config.kafka.max_topic_bytes))


def _transitions_retention(config: Config) -> dict[str, str]:
    # Raw size: retention must hold the ring even when nothing compresses (design §2). Twice, so that a restart never races it.
    row_bytes = max(64, config.env.observation_bytes_bound)
    wanted = 2 * config.replay.capacity_rows * row_bytes
    return {
        "retention.ms": "-1",
        "retention.bytes": _at_most(config, max(256 * _MIB, wanted)),
    }


def _priorities(config: Config) -> dict[str, str]:
    return {"retention.ms": "-1", "retention.bytes": _at_most(config, 512 * _MIB)}


def _short(config: Config) -> dict[str, str]:
    return {
        "retention.ms": str(10 * 60 * 1000),
        "retention.bytes": _at_most(config, 512 * _MIB),
        "segment.bytes": str(64 * _MIB),
    }


def _gradients(config: Config) -> dict[str, str]:
    return {
        "retention.ms": "-1",
        "retention.bytes": _at_most(config, 4096 * _MIB),
        "segment.bytes": str(128 * _MIB),
    }


def _weights(config: Config) -> dict[str, str]:
    # Small segments and a low dirty ratio, or compaction never catches a topic that is rewritten every few milliseconds (rules.md 11).
    return {
        "min.cleanable.dirty.ratio": "0.1",
        "segment.bytes": str(32 * _MIB),
        "segment.ms": "60000",
        "min.compaction.lag.ms": "10000",
        "delete.retention.ms": "1000",
        "retention.ms": "-1",
        "retention.bytes": _at_most(config, 2048 * _MIB),
    }


def _long(config: Config) -> dict[str, str]:
    return {"retention.ms": "-1", "retention.bytes": _at_most(config, 512 * _MIB)}


TOPOLOGY: tuple[Topic, ...] = (
    Topic(
        "transitions",
        "actor_id",
        ("actor",),
        ("replay", "archiver"),
        ("transitions",),
        "delete",
        lambda c: c.actor.count,
        _transitions_retention,
        "one partition an actor",
    ),
    Topic(
        "priorities",
        "none",
        ("learner",),
        ("replay", "monitor", "archiver"),
        ("priorities",),
        "delete",
        settings=_priorities,
        about="one partition: a total order across learners",
    ),
    Topic(
        "replay-stats",
        "split",
        ("replay",),
        ("replay", "monitor"),
        ("replay-stats",),
        "compact",
        about="what each split holds",
    ),
    Topic(
        "batches", "round robin", ("replay",), ("learner",), ("batches",), "delete", lambda c: c.learner.count, _short
    ),
    Topic(
        "gradients",
        "shard_id",
        ("learner",),
        ("parameter-server",),
        ("gradients",),
        "delete",
        lambda c: c.parameter_server.shards,
        _gradients,
        "one partition a shard",
    ),
    Topic(
        "weights",
        "shard/kind",
        ("parameter-server",),
        ("actor", "learner", "evaluator", "monitor"),
        ("weights",),
        "compact,delete",
        lambda c: c.parameter_server.shards,
        _weights,
        "one partition a shard",
    ),
    Topic(
        "checkpoints",
        "shard/version/part",
        ("parameter-server", "topics"),
        ("parameter-server",),
        ("checkpoint-part", "checkpoint-manifest", "checkpoint-ledger"),
        "delete",
        lambda c: c.parameter_server.shards,
        _gradients,
        "one partition a shard",
    ),
    Topic(
        "replication",
        "shard_id",
        ("parameter-server",),
        ("parameter-server",),
        ("replication",),
        "delete",
        lambda c: c.parameter_server.shards,
        _short,
        "one partition a shard",
    ),
    Topic(
        "episodes",
        "actor_id",
        ("actor", "evaluator"),
        ("monitor", "train", "archiver"),
        ("episode", "evaluation"),
        "delete",
        settings=_long,
    ),
    Topic(
        "run",
        "name",
        ("topics",),
        ("actor", "replay", "learner", "parameter-server", "evaluator", "monitor", "archiver"),
        ("run",),
        "compact",
    ),
    Topic(
        "dead-letters",
        "source topic",
        ("actor", "replay", "learner", "parameter-server", "evaluator", "monitor", "archiver"),
        ("people",),
        (),
        "delete",
        settings=_long,
    ),
)
BY_NAME = {topic.name: topic for topic in TOPOLOGY}


NO_GROUP = "gorila-no-group"
"""Group id of readers that are in none and commit nothing: librdkafka wants one, and asks Kafka who coordinates it."""


def full_name(run: str, topic: str) -> str:
    """The topic's name on the broker."""
    return f"{run}.{topic}"


def group_name(run: str, role: str) -> str:
    """The consumer group of a role."""
    return f"{run}.{role}"


def markdown_table() -> str:
    """The table of topics for the docs (generated; a test keeps it fresh)."""
    rows = ["| topic `<run>.…` | key | written by | read by | schemas | clean-up |", "|---|---|---|---|---|---|"]
    for topic in TOPOLOGY:
        rows.append(
            f"| {topic.name} | {topic.key} | {', '.join(topic.writers)} | {', '.join(topic.readers)} "
            f"| {', '.join(topic.schemas) or 'original bytes'} | {topic.cleanup}{'; ' + topic.about if topic.about else ''} |"
        )
    return "\n".join(rows) + "\n"
