"""The run as Kafka holds it: its topics, its first checkpoint and the `run` record that every role obeys.

A run exists when its `run` record does: it is written last, so a creation that was cut short is simply done again.
"""

from __future__ import annotations

import importlib.metadata
import re
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gorila import sharding
from gorila.codec import Schemas
from gorila.config import Config
from gorila.environment_facts import EnvironmentFacts
from gorila.errors import BadRecord, BrokerError, RunError, UsageError
from gorila.kafka import SLICE_S, Cluster, NewTopic, Received, TopicFacts
from gorila.messages import CheckpointManifest, CheckpointPart, Run
from gorila.settings import canonical_json
from gorila.topics import TOPOLOGY, full_name
from gorila.weights_history import FirstCheckpoint

RUN_TOPIC = "run"
PART_PARAMETERS = 1 << 20  # 4 MiB of float32: a part fits a record with room to spare
ACKNOWLEDGED_S = 30.0
NO_HASH = -1
_NAME = re.compile(r"[a-zA-Z0-9_-][a-zA-Z0-9._-]*")
_LONGEST_NAME = 249 - 1 - max(len(topic.name) for topic in TOPOLOGY)


@dataclass(frozen=True)
class RunDescription:
    """What a person wants to know of a run."""

    run: Run
    topics: dict[str, TopicFacts]


def check_name(name: str) -> None:
    """Raises UsageError for a name that cannot be a topic's prefix."""
    if not _NAME.fullmatch(name) or len(name) > _LONGEST_NAME:
        raise UsageError(
            f"run name {name!r} is not allowed: letters, digits, '.', '_' and '-', at most {_LONGEST_NAME}, not starting with '.'"
        )


def list_runs(cluster: Cluster) -> list[str]:
    """Names of the runs on a Kafka, sorted. Raises BrokerError."""
    suffix = f".{RUN_TOPIC}"
    return sorted(topic.removesuffix(suffix) for topic in cluster.admin().topics() if topic.endswith(suffix))


def read_all(cluster: Cluster, topic: str, partition: int = 0, timeout_s: float = 30.0) -> list[Received]:
    """Every record of a small partition up to its end as it is now. Raises BrokerError."""
    consumer = cluster.consumer(ends=True)
    try:
        low, high = consumer.watermarks(topic, partition)
        consumer.assign({(topic, partition): low})
        deadline = time.monotonic() + timeout_s
        found: list[Received] = []
        # The end event, not the last offset, says that all was read: compaction and control records leave gaps.
        while (consumer.end_reached(topic, partition) or 0) < high:
            found += consumer.poll_many(1000, SLICE_S)
            if time.monotonic() > deadline:
                raise BrokerError(f"reading topic {topic} took more than {timeout_s:g} s")
        return found
    finally:
        consumer.close()


def find_run(cluster: Cluster, name: str, schemas: Schemas) -> Run | None:
    """The newest `run` record, or None. Raises BrokerError; RunError when it cannot be read."""
    topic = full_name(name, RUN_TOPIC)
    if topic not in cluster.admin().topics():
        return None
    records = [r for r in read_all(cluster, topic) if r.key == name.encode() and r.value is not None]
    if not records:
        return None
    try:
        return schemas.expect(records[-1].value, Run)
    except BadRecord as error:
        raise RunError(f"run {name}: its record on topic {topic} cannot be read: {error}") from None


def read_run(cluster: Cluster, name: str, schemas: Schemas) -> Run:
    """The newest `run` record. Raises RunError naming the runs there are."""
    run = find_run(cluster, name, schemas)
    if run is None:
        there = list_runs(cluster)
        what = (
            f"there are {', '.join(there)}"
            if there
            else "there are none: `gorila topics create RUN` or `gorila train` makes one"
        )
        raise RunError(f"run {name!r} does not exist on Kafka at {cluster.bootstrap_servers}: {what}")
    return run


def new_topics(name: str, config: Config) -> list[NewTopic]:
    """All topics of a run as the topology has them."""
    replication = config.kafka.replication_factor
    return [
        NewTopic(full_name(name, t.name), t.partitions(config), replication, t.topic_config(config)) for t in TOPOLOGY
    ]


def create_run(
    cluster: Cluster,
    name: str,
    config: Config,
    facts: EnvironmentFacts,
    initial_weights: NDArray[np.float32],
    schemas: Schemas | None = None,
    *,
    firsts: Sequence[FirstCheckpoint] = (),
    before_record: Callable[[], None] = lambda: None,
) -> bool:
    """Make a run: topics, first checkpoint, `run` record. Does nothing where it exists with the same configuration.

    Args:
        initial_weights: float32 (P,).
        firsts: where each shard begins, instead of at version 0 with the initial weights: a fork.
        before_record: called when the topics are there, before the run exists for anybody.

    Returns:
        Whether it was made now.

    Raises:
        UsageError, ConfigError: bad name, or a shard too long; nothing was created.
        RunError: it exists with another configuration or environment, naming the first key that differs.
        BrokerError.
    """
    check_name(name)
    shards = sharding.bounds(len(initial_weights), config.parameter_server.shards)
    schemas = schemas or Schemas()
    existing = find_run(cluster, name, schemas)
    if existing is not None:
        _refuse_another(name, existing, config, facts)
        return False
    admin = cluster.admin()
    topics = new_topics(name, config)
    admin.create_topics(topics)
    there = admin.topics()
    for topic in topics:
        if there[topic.name] != topic.partitions:
            raise RunError(
                f"topic {topic.name} has {there[topic.name]} partitions, the configuration wants {topic.partitions}: delete it first"
            )
    producer = cluster.producer()
    checkpoints = full_name(name, "checkpoints")
    for shard, (start, stop) in enumerate(shards):
        first = firsts[shard] if firsts else None
        pieces = first.parts if first else version_zero_parts(shard, np.asarray(initial_weights[start:stop], "<f4"))
        version = pieces[0].version
        offsets: list[int] = []
        target_offsets: list[int] = []

        def note(_partition: int, offset: int, offsets: list[int] = offsets) -> None:
            offsets.append(offset)

        def note_target(_partition: int, offset: int, offsets: list[int] = target_offsets) -> None:
            offsets.append(offset)

        for number, piece in enumerate(pieces):
            key = f"{shard}/{version}/{number}".encode()
            producer.send(checkpoints, schemas.encode(piece), key=key, partition=shard, on_delivery=note)
        if first is not None and first.target is not None:
            weights, key = full_name(name, "weights"), f"{shard}/target".encode()
            producer.send(weights, schemas.encode(first.target), key=key, partition=shard, on_delivery=note_target)
        _acknowledged(producer.flush(ACKNOWLEDGED_S), cluster, checkpoints)
        manifest = first.manifest if first else version_zero_manifest(shard, len(pieces), -1, _now_ms())
        manifest.first_part_offset, manifest.target_offset = min(offsets), max(target_offsets, default=-1)
        key = f"{shard}/{version}/manifest".encode()
        producer.send(checkpoints, schemas.encode(manifest), key=key, partition=shard)
    _acknowledged(producer.flush(ACKNOWLEDGED_S), cluster, checkpoints)
    producer.close()
    before_record()
    write_record(cluster, name, config, facts.to_json(), schemas)
    return True


def write_record(cluster: Cluster, name: str, config: Config, environment: str, schemas: Schemas) -> None:
    """Write the `run` record: the run exists, or goes on, with this configuration. Raises BrokerError."""
    topic, producer = full_name(name, RUN_TOPIC), cluster.producer()
    record = Run(name, canonical_json(config), environment, schemas.texts(), _product_version(), _now_ms())
    producer.send(topic, schemas.encode(record), key=name.encode(), partition=0)
    _acknowledged(producer.flush(ACKNOWLEDGED_S), cluster, topic)
    producer.close()


def version_zero_parts(shard: int, weights: NDArray[np.float32]) -> list[CheckpointPart]:
    """A shard's initial weights (n,) as records; the moments of version 0 are zero and not written."""
    total = len(weights)
    return [
        CheckpointPart(shard, 0, "weights", start, total, weights[start : start + PART_PARAMETERS].tobytes())
        for start in range(0, total, PART_PARAMETERS)
    ]


def version_zero_manifest(shard: int, parts: int, first_part_offset: int, time_ms: int) -> CheckpointManifest:
    """Makes version 0 exist: no gradient handled, no target record yet, no hash (only the server knows how)."""
    return CheckpointManifest(
        shard_id=shard,
        version=0,
        gradient_offset=-1,
        parts=parts,
        first_part_offset=first_part_offset,
        state_hash=NO_HASH,
        handled_partition=np.empty(0, np.int32),
        handled_offset=np.empty(0, np.int64),
        target_version=0,
        target_offset=-1,
        applied=0,
        dropped_stale=0,
        dropped_duplicate=0,
        dropped_bad=0,
        optimizer="",
        time_ms=time_ms,
    )


def describe_run(cluster: Cluster, name: str, schemas: Schemas | None = None) -> RunDescription:
    """Raises RunError, BrokerError."""
    run = read_run(cluster, name, schemas or Schemas())
    return RunDescription(run, cluster.admin().describe([full_name(name, topic.name) for topic in TOPOLOGY]))


def delete_run(cluster: Cluster, name: str) -> list[str]:
    """Delete a run's topics and its (empty) consumer groups; the topics deleted. Raises RunError when there is nothing to delete."""
    admin = cluster.admin()
    there = admin.topics()
    topics = [full_name(name, t.name) for t in TOPOLOGY if full_name(name, t.name) in there]
    if not topics:
        raise RunError(
            f"run {name!r} does not exist on Kafka at {cluster.bootstrap_servers}: there are {', '.join(list_runs(cluster)) or 'none'}"
        )
    deleted = admin.delete_topics(topics)
    admin.delete_groups([group for group in admin.groups() if group.startswith(f"{name}.")])
    return deleted


def _refuse_another(name: str, run: Run, config: Config, facts: EnvironmentFacts) -> None:
    has, wanted = Config.model_validate_json(run.config).model_dump(), config.model_dump()
    for section, values in has.items():
        for key, value in values.items():
            if section not in ("kafka", "monitor") and wanted[section][key] != value:
                raise RunError(
                    f"run {name!r} exists with {section}.{key} = {value!r}, not {wanted[section][key]!r}: choose another name"
                )
    EnvironmentFacts.from_json(run.environment).refuse_mismatch(facts)


def _acknowledged(left: int, cluster: Cluster, topic: str) -> None:
    if left:
        raise BrokerError(
            f"Kafka at {cluster.bootstrap_servers} did not acknowledge {left} records for {topic} within {ACKNOWLEDGED_S:g} s"
        )


def _product_version() -> str:
    try:
        return importlib.metadata.version("gorila-stream")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def _now_ms() -> int:
    return time.time_ns() // 1_000_000
