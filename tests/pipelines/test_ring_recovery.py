"""Rings from the log, several partitions at a time: whatever the blocks' sizes and the log's gaps, the memory is the one nobody disturbed."""

from __future__ import annotations

import threading
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from lane_writer import LaneWriter, config

from gorila.codec import Schemas
from gorila.kafka import Received
from pipelines import ring_recovery
from pipelines.kafka_io import LogReader
from pipelines.replay import ReplaySplit
from pipelines.ring_recovery import RingRecovery

CONFIG = config(capacity_rows=64, actor__block_steps=16, actor__lanes=1)
SCHEMAS = Schemas()
POLL = 5


class FakeKafka:
    """Admin and consumer of a log in memory: partitions take turns, a paused one is never read again, whatever is assigned; offsets that are missing are gaps."""

    def __init__(self, logs: dict[int, dict[int, bytes]], lows: dict[int, int], ends: dict[int, int]) -> None:
        self._logs, self._lows, self._ends = logs, lows, ends
        self._at: dict[int, int] = {}
        self._paused: set[int] = set()
        self._reached: dict[int, int] = {}
        self.assignments = 0

    def admin(self) -> FakeKafka:
        return self

    def consumer(self, **_: Any) -> FakeKafka:
        return self

    def offsets(self, places: list[tuple[str, int]], at: Any) -> dict[tuple[str, int], int]:
        found = (
            {"earliest": self._lows, "latest": self._ends}[at] if isinstance(at, str) else dict.fromkeys(self._ends, 0)
        )
        return {place: found[place[1]] for place in places}

    def watermarks(self, topic: str, partition: int, timeout_s: float) -> tuple[int, int]:
        return (0, 0) if topic.endswith("priorities") else (self._lows[partition], self._ends[partition])

    def assign(self, starts: dict[tuple[str, int], int]) -> None:
        self.assignments += 1
        self._at = {p: offset for (_, p), offset in starts.items()}
        self._reached = {}

    def pause(self, places: list[tuple[str, int]]) -> None:
        self._paused |= {p for _, p in places}

    def poll_many(self, most: int, timeout_s: float) -> list[Received]:
        found = []
        for _ in range(POLL):
            for p, at in self._at.items():
                if p in self._paused:
                    continue
                there = [offset for offset in self._logs[p] if offset >= at]
                if not there:
                    self._reached[p] = self._ends[p]
                    continue
                found.append(Received("run.transitions", p, min(there), min(there), None, self._logs[p][min(there)]))
                self._at[p] = min(there) + 1
        return found[:most]

    def end_reached(self, topic: str, partition: int) -> int | None:
        return self._reached.get(partition)

    def close(self) -> None:
        """Nothing to give back."""


def logs(sizes: list[int], gap: int | None) -> tuple[dict[int, dict[int, bytes]], dict[int, list[Any]]]:
    """Three partitions of endless episodes in blocks of these sizes; `gap`: an offset the log has not."""
    wire, blocks = {}, {}
    for partition in range(3):
        lane = LaneWriter(actor_id=f"actor-{partition}", rng=np.random.default_rng(partition)).episode(400)
        made = [lane.block(rows) for rows in sizes]
        offsets = [number + (gap is not None and number >= gap) for number in range(len(made))]
        blocks[partition] = list(zip(offsets, made, strict=True))
        wire[partition] = {offset: SCHEMAS.encode(block) for offset, block in blocks[partition]}
    return wire, blocks


def service(kafka: FakeKafka) -> Any:
    return SimpleNamespace(
        config=CONFIG, schemas=SCHEMAS, cluster=kafka, stop=threading.Event(),
        topic=lambda name: f"run.{name}", log=SimpleNamespace(info=lambda *_, **__: None),
    )  # fmt: skip


@pytest.mark.parametrize("gap", [None, 3, 20])
@pytest.mark.parametrize("rows", [1, 3, 16])
@pytest.mark.parametrize("together", [1, 10**6])
def test_rings_opened_together_are_the_rings_nobody_disturbed(
    rows: int, gap: int | None, together: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Blocks of one row are read backwards in several steps; `together` = 1 row: one partition after another."""
    monkeypatch.setattr(ring_recovery, "ROWS_TOGETHER", together)
    wire, blocks = logs([rows] * (120 // rows if rows > 1 else 130), gap)
    kafka = FakeKafka(wire, dict.fromkeys(wire, 0), {p: max(log) + 1 for p, log in wire.items()})
    starts = {0: max(wire[0]) + 1, 1: max(wire[1]) + 1, 2: 2}  # the third has most of its log still to come
    split, undisturbed = (ReplaySplit(CONFIG, "replay-0", np.random.default_rng(0)) for _ in range(2))
    log = LogReader(service(kafka))
    RingRecovery(service(kafka), split, log).open_rings(starts, 0)
    for partition, start in starts.items():
        undisturbed.open_ring(partition, 0)
        for offset, block in blocks[partition]:
            if offset < start:
                undisturbed.skip_to(partition, offset)
                undisturbed.insert(partition, offset, offset, block)
        assert split.next_offset(partition) == start
    assert split.state_fingerprint() == undisturbed.state_fingerprint()
    assert split.stats(0).inserts_total == 0, "rows read again are no new inserts"


def test_partitions_are_read_by_one_assignment_each_in_order_and_no_record_outside_its_range() -> None:
    wire, _ = logs([2] * 40, 7)
    kafka = FakeKafka(wire, {0: 0, 1: 5, 2: 0}, dict.fromkeys(wire, 41))
    ranges = {0: (3, 12), 1: (0, 9), 2: (38, 60)}
    found: dict[int, list[int]] = {0: [], 1: [], 2: []}
    for record in LogReader(service(kafka)).read_all("transitions", ranges):
        found[record.partition].append(record.offset)
    assert kafka.assignments == 1
    assert found == {0: [3, 4, 5, 6, 8, 9, 10, 11], 1: [5, 6, 8], 2: [38, 39, 40]}


def test_an_empty_range_reads_nothing_and_a_range_of_gaps_ends() -> None:
    wire, _ = logs([2] * 10, 9)
    kafka = FakeKafka(wire, dict.fromkeys(wire, 0), dict.fromkeys(wire, 12))
    log = LogReader(service(kafka))
    assert list(log.read("transitions", 0, 5, 5)) == []
    assert kafka.assignments == 0
    assert list(log.read("transitions", 0, 11, 12)) == []
