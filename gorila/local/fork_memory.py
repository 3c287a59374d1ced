"""A fork's replay memory: what the forked run had experienced by a version, copied into the new run's topics.

The matching point is one consistent cut, and no clock decides it: of each actor the blocks acted with weights up to that version, in the log's order up
to the first one beyond; and the priorities computed on weights up to it. Nothing in the memory is newer than the weights (cases.md 23).
Only what the ring holds is copied. The new replay's committed offset is set behind it: the ring is filled from before it, as after any restart, and the
rows count for no samples per insert.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

import numpy as np

from gorila.config import Config
from gorila.errors import BadRecord, BrokerError, RunError
from gorila.kafka import Received
from gorila.log_ranges import bounds, read_range
from gorila.messages import Priorities, TransitionBlock
from gorila.service import Service
from gorila.topics import full_name, group_name

ACKNOWLEDGED_S = 60.0
OF_NO_BATCH = -1
"""Batch offset of a copied priorities record: its batch is another run's."""


@dataclass(frozen=True, slots=True)
class Copied:
    """How much. `rows`: transitions that can be sampled, final observations not among them."""

    rows: int
    blocks: int
    priorities: int


def copy_memory(source: Service, new: str, config: Config, version: int) -> Copied:
    """Copy the memory of `version` into the topics of `new`, which are there and empty.

    Raises:
        RunError: RUN has no transitions of that version or before.
        OffsetGone, BrokerError.
    """
    cluster = source.cluster
    producer = cluster.producer()
    moved: dict[tuple[int, int], int] = {}
    oldest_ms: int | None = None
    rows = blocks = priorities = 0
    ends: dict[tuple[str, int], int] = {}
    try:
        for partition in range(config.actor.count):
            found = _memory_of(source, config, partition, version)
            for received, count in found:
                producer.send(
                    full_name(new, "transitions"),
                    received.value,
                    key=received.key,
                    partition=partition,
                    on_delivery=partial(_note, moved, received.offset),
                )
                rows += count
            if found:
                oldest_ms = min(found[0][0].timestamp_ms, oldest_ms or found[0][0].timestamp_ms)
            blocks += len(found)
            _flush(producer.flush(ACKNOWLEDGED_S), new)
            ends[full_name(new, "transitions"), partition] = len(found)
        if not blocks or oldest_ms is None:
            raise RunError(
                f"run {source.run} has no transitions of version {version} or before any more: --memory empty begins without"
            )
        for record in _learned(source, moved, oldest_ms, version):
            producer.send(full_name(new, "priorities"), source.schemas.encode(record), partition=0)
            priorities += 1
        _flush(producer.flush(ACKNOWLEDGED_S), new)
    finally:
        producer.close()
    consumer = cluster.consumer(group_name(new, "replay"))
    try:
        consumer.commit(ends, wait=True)
    finally:
        consumer.close()
    return Copied(rows, blocks, priorities)


def _note(moved: dict[tuple[int, int], int], old: int, partition: int, offset: int) -> None:
    moved[partition, old] = offset


def _flush(left: int, new: str) -> None:
    if left:
        raise BrokerError(f"Kafka did not acknowledge {left} records for {new} within {ACKNOWLEDGED_S:g} s")


def _memory_of(source: Service, config: Config, partition: int, version: int) -> list[tuple[Received, int]]:
    """(record, transitions in it) of what fills one ring, oldest first."""
    # As pipelines/ring_recovery.py: the blocks at the far edge give the oldest rows their predecessors.
    wanted = config.replay.capacity_rows + 2 * config.actor.block_steps * config.actor.lanes
    name = source.topic("transitions")
    low, end = bounds(source.cluster, name, partition)
    held: deque[tuple[Received, int, int]] = deque()
    rows = 0
    for received in read_range(source.cluster, name, partition, low, end):
        try:
            block = source.schemas.expect(received.value, TransitionBlock)
        except BadRecord:
            continue
        if block.weights_version > version:
            break
        held.append((received, int((~block.is_last).sum()), block.observations.count))
        rows += block.observations.count
        while rows - held[0][2] >= wanted:
            rows -= held.popleft()[2]
    return [(received, transitions) for received, transitions, _ in held]


def _learned(source: Service, moved: dict[tuple[int, int], int], oldest_ms: int, version: int) -> Iterator[Priorities]:
    """Priorities of the copied rows, with the places the rows have now."""
    name = source.topic("priorities")
    low, end = bounds(source.cluster, name, 0)
    start = source.cluster.admin().offsets([(name, 0)], oldest_ms)[name, 0]
    for received in read_range(source.cluster, name, 0, max(low, start) if start >= 0 else end, end):
        try:
            record = source.schemas.expect(received.value, Priorities)
        except BadRecord:
            continue
        if record.version > version:
            continue
        places = zip(record.partition.tolist(), record.offset.tolist(), strict=True)
        offsets = np.array([moved.get(place, -1) for place in places], np.int64)
        mine = offsets >= 0
        if mine.any():
            yield replace(
                record, batch_offset=OF_NO_BATCH, partition=record.partition[mine], offset=offsets[mine],
                row=record.row[mine], td_error=record.td_error[mine],
            )  # fmt: skip
