"""Rings from the log: opened where a committed offset says, filled from before it, gaps closed.

Recovery of a ring, in this order:
1. transitions before its start, back to as many rows as the ring holds; they are no new inserts;
2. learned priorities from the append time of the oldest of those, in order: the last writer wins;
3. while rows between the start and the log's end at that moment are still to come, what was learned about the actor waits for them: it may be
   about them, or about rows that cannot be sampled before their n-step successors are back.
Equal afterwards: the live (offset, row) set, every leaf, N.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
from numpy.typing import NDArray

from gorila.errors import BadRecord
from gorila.kafka import Received
from gorila.messages import Priorities, TransitionBlock
from gorila.service import Service
from pipelines.kafka_io import LogReader
from pipelines.replay import ReplaySplit

HELD_RECORDS = 10_000
ROWS_TOGETHER = 1_000_000
Dated = tuple[Received, TransitionBlock | None]


class RingRecovery:
    """Opens and mends the rings of one split, and passes learned priorities on at the right moment."""

    def __init__(self, service: Service, replay: ReplaySplit, log: LogReader) -> None:
        self._service, self._replay, self._log = service, replay, log
        self._behind: dict[int, int] = {}  # partition → end of the log when its ring was opened
        self._held: list[Priorities] = []

    def open_rings(self, starts: Mapping[int, int], priorities_next: int) -> None:
        """Open the rings of partitions whose next record is at `starts`; learned priorities below `priorities_next` are read again.

        Raises:
            BrokerError.
        """
        oldest_ms: int | None = None
        rows = 0
        bounds = self._log.all_bounds("transitions", starts)
        self._behind |= {p: bounds[p][1] for p, start in starts.items() if start < bounds[p][1]}
        partitions, together = sorted(starts), max(1, ROWS_TOGETHER // self._wanted_rows)
        for at in range(0, len(partitions), together):
            some = {p: starts[p] for p in partitions[at : at + together]}
            for partition, before in self._newest_before(some, {p: bounds[p][0] for p in some}).items():
                start = starts[partition]
                self._replay.open_ring(partition, before[0][0].offset if before else start)
                for record, block in before:
                    self._insert_again(partition, record, block)
                self._replay.skip_to(partition, start)
                if before:
                    rows += sum(block.observations.count for _, block in before if block is not None)
                    oldest_ms = min(before[0][0].timestamp_ms, oldest_ms or before[0][0].timestamp_ms)
        learned = self._learn_again(starts, oldest_ms, priorities_next) if oldest_ms is not None else 0
        self._log.close()
        self._service.log.info("replay.rings_opened", starts=dict(starts), rows_read=rows, priorities_read=learned)

    @property
    def _wanted_rows(self) -> int:
        """What fills a ring. The blocks at the far edge give the oldest rows their predecessors."""
        config = self._service.config
        return config.replay.capacity_rows + 2 * config.actor.block_steps * config.actor.lanes

    def _newest_before(self, stops: Mapping[int, int], lows: Mapping[int, int]) -> dict[int, list[Dated]]:
        """By partition, the records before its stop that fill a ring, oldest first: read backwards in steps, since a record may hold one row or many."""
        wanted = self._wanted_rows
        step = wanted // self._service.config.actor.block_steps + 1
        at, rows = dict(stops), dict.fromkeys(stops, 0)
        found: dict[int, list[Dated]] = {p: [] for p in stops}
        while not self._service.stop.is_set():
            ranges = {p: (max(lows[p], at[p] - step), at[p]) for p in at if rows[p] < wanted and at[p] > lows[p]}
            if not ranges:
                break
            pieces: dict[int, list[Dated]] = {p: [] for p in ranges}
            for record in self._log.read_all("transitions", ranges):
                block = self._block(record)
                pieces[record.partition].append((record, block))
                rows[record.partition] += block.observations.count if block is not None else 0
            for partition, piece in pieces.items():
                found[partition] = piece + found[partition]
                at[partition] = ranges[partition][0]
        return found

    def _block(self, record: Received) -> TransitionBlock | None:
        """A record read again; a bad one went to dead-letters when it came first."""
        try:
            return self._service.schemas.expect(record.value, TransitionBlock)
        except BadRecord:
            return None

    def _insert_again(self, partition: int, record: Received, block: TransitionBlock | None) -> None:
        self._replay.skip_to(partition, record.offset)
        try:
            self._replay.insert(partition, record.offset, record.timestamp_ms, block, new=False)
        except BadRecord:
            return  # counted and sent away when it came first; the ring has moved on

    def _learn_again(self, starts: Mapping[int, int], oldest_ms: int, stop: int) -> int:
        read = 0
        start = self._log.offset_at("priorities", 0, oldest_ms)
        for record in self._log.read("priorities", 0, start, stop):
            try:
                priorities = self._service.schemas.expect(record.value, Priorities)
            except BadRecord:
                continue
            read += 1
            # The other rings have them already, and perhaps newer ones.
            mine = np.isin(priorities.partition, list(starts))
            if mine.any():
                self.learned(_rows(priorities, mine))
        return read

    def fill_gap(self, partition: int, offset: int, priorities_next: int) -> None:
        """Bring the ring up to `offset` from the log; what the log itself does not have is skipped. Raises BrokerError."""
        have = self._replay.next_offset(partition)
        assert have is not None
        self._service.log.info("replay.gap", partition=partition, have=have, got=offset)
        if offset - have > self._service.config.replay.capacity_rows:
            self._replay.drop_ring(partition)
            self.open_rings({partition: offset}, priorities_next)
            return
        for record in self._log.read("transitions", partition, have, offset):
            self._insert_again(partition, record, self._block(record))
        self._replay.skip_to(partition, offset)

    def fill_priorities(self, start: int, stop: int) -> None:
        """Learned priorities of [start, stop) that were not handed in. Raises BrokerError."""
        for record in self._log.read("priorities", 0, start, stop):
            try:
                self.learned(self._service.schemas.expect(record.value, Priorities))
            except BadRecord:
                continue

    def drop(self, partition: int) -> None:
        """The partition went to another split."""
        self._replay.drop_ring(partition)
        self._behind.pop(partition, None)

    def learned(self, priorities: Priorities) -> None:
        """Apply, or hold (3)."""
        if self._behind:
            early = np.isin(priorities.partition, list(self._behind))
            if early.any():
                self._held.append(_rows(priorities, early))
                priorities = _rows(priorities, ~early)
        if len(priorities.row):
            self._replay.learned(priorities)

    def catch_up(self) -> None:
        """After transitions: once the rings have come to where the log ended, what was held applies, in order."""
        if not self._behind:
            return
        behind = any((self._replay.next_offset(p) or 0) < end for p, end in self._behind.items())
        if behind and len(self._held) < HELD_RECORDS:
            return
        self._behind.clear()
        for priorities in self._held:
            self._replay.learned(priorities)
        self._held.clear()


def _rows(priorities: Priorities, mask: NDArray[np.bool_]) -> Priorities:
    return dataclasses.replace(
        priorities,
        partition=priorities.partition[mask],
        offset=priorities.offset[mask],
        row=priorities.row[mask],
        td_error=priorities.td_error[mask],
    )
