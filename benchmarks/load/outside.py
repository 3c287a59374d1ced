"""A run's replay seen from outside: what the log and Kafka's tools say of it, once a second, and what an audit of ids finds at the end."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

from gorila.codec import Schemas
from gorila.config import Config
from gorila.kafka import Cluster, CommittedOffsets
from gorila.messages import ReplayStats
from gorila.topics import full_name, group_name

DRAIN_S = 300.0


@dataclass
class Reading:
    """What the log and the tools say at one moment: sums over partitions, and the worst partition's lag."""

    time_s: float
    written: int
    transitions_lag: int
    worst_lag: int
    batches_read: int
    batches_lag: int
    inserts: int
    samples: int
    waiting: list[str]


class Outside:
    """A run seen from outside."""

    def __init__(self, cluster: Cluster, run: str, config: Config) -> None:
        self._cluster, self._run, self._schemas = cluster, run, Schemas()
        self._transitions = [(full_name(run, "transitions"), p) for p in range(config.actor.count)]
        self._batches = [(full_name(run, "batches"), p) for p in range(config.learner.count)]
        self._replay = CommittedOffsets(cluster, group_name(run, "replay"))
        self._learner = CommittedOffsets(cluster, group_name(run, "learner"))
        self._tail = cluster.consumer()
        self._tail.assign({(full_name(run, "replay-stats"), 0): 0})
        self.stats: dict[str, ReplayStats] = {}

    def ends(self) -> dict[int, int]:
        """{partition: next offset} of transitions."""
        return {p: end for (_, p), end in self._cluster.admin().end_offsets(self._transitions).items()}

    def committed(self) -> dict[int, int]:
        """{partition: next offset} of transitions, as replay committed."""
        return {p: offset or 0 for (_, p), offset in self._replay.now(self._transitions).items()}

    def newest_stats(self, wait_s: float = 0.0) -> dict[str, ReplayStats]:
        """By split."""
        while records := self._tail.poll_many(100, wait_s):
            for record in records:
                stats = self._schemas.expect(record.value, ReplayStats)
                self.stats[stats.split] = stats
        return self.stats

    def read(self) -> Reading:
        """Committed offsets before ends: lag is never too small."""
        now_s = time.monotonic()
        committed, learned = self.committed(), self._learner.now(self._batches)
        ends, batch_ends = self.ends(), self._cluster.admin().end_offsets(self._batches)
        lag = [ends[p] - committed[p] for p in ends]
        read = sum(offset or 0 for offset in learned.values())
        stats = list(self.newest_stats().values())
        return Reading(
            now_s, sum(ends.values()), sum(lag), max(lag), read, sum(batch_ends.values()) - read,
            sum(s.inserts_total for s in stats), sum(s.samples_total for s in stats), [s.waiting_for for s in stats],
        )  # fmt: skip

    def dead_letters(self) -> int:
        """Records sent there."""
        where = (full_name(self._run, "dead-letters"), 0)
        return self._cluster.admin().end_offsets([where])[where]


def until(condition: Any, what: str, seconds: float = DRAIN_S) -> None:
    """Poll. Raises SystemExit."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            raise SystemExit(f"waited {seconds:.0f} s for {what}")
        time.sleep(0.2)


@dataclass(frozen=True)
class Findings:
    """What the audit found missing or too much; all 0 where nothing was lost."""

    blocks_missing: int
    blocks_not_committed: int
    transitions_not_inserted: int
    batch_parts_missing: int
    batch_parts_twice: int
    unknown_ids: int
    dead_letters: int

    @property
    def lost(self) -> int:
        """Blocks, transitions and batch parts that somebody was promised and nobody got."""
        return (
            self.blocks_missing + self.blocks_not_committed + self.transitions_not_inserted + self.batch_parts_missing
        )


def audit(
    outside: Outside, written: dict[int, dict[str, int]], learned: list[dict[str, Any]], config: Config
) -> Findings:
    """Point 3 of benchmarks/cluster.py."""
    ends, committed = outside.ends(), outside.committed()
    stats = outside.newest_stats(0.5)
    inserts = sum(s.inserts_total for s in stats.values())
    parts = sum(s.batches_total for s in stats.values()) * config.record_parts
    distinct = sum(found["distinct"] for found in learned)
    unknown = sum(offset >= ends[int(p)] for found in learned for p, offset in found["highest"].items())
    by_actor: dict[str, int] = {}
    for one in stats.values():
        for actor, count in zip(one.actors, one.inserts.tolist(), strict=True):
            by_actor[actor] = by_actor.get(actor, 0) + count
    wanted = {str(p): counts["transitions"] for p, counts in written.items()}
    off = [actor for actor in wanted if by_actor.get(actor, 0) != wanted[actor]]
    if off:
        print(f"  actors whose transitions replay did not count once each: {off[:10]}", flush=True)
    return Findings(
        sum(abs(counts["blocks"] - ends[p]) for p, counts in written.items()),
        sum(ends[p] - committed[p] for p in ends),
        max(abs(sum(wanted.values()) - inserts), sum(abs(by_actor.get(a, 0) - wanted[a]) for a in wanted)),
        parts - distinct,
        sum(found["records"] for found in learned) - distinct,
        unknown,
        outside.dead_letters(),
    )  # fmt: skip
