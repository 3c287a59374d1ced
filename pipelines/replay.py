"""One split of the replay pipeline as a pure object: blocks and priorities in, learner batches and stats out.

No Beam, Kafka, clock or thread: the edge (pipelines/replay_fns.py) hands in what Kafka brought and takes out what goes back.
A transitions partition is an actor. Everything a split holds follows from the log, except its run totals (`restore_totals`).

Several splits: each knows the others' `replay-stats`. Shares are computed from *published* figures, this split's own included, so that all splits
divide the batches by the same numbers and the recorded probabilities are those of the draws actually made.
"""

from __future__ import annotations

import numpy as np

from gorila.config import Config
from gorila.environment_facts import EnvironmentFacts
from gorila.errors import BadRecord, InvalidState
from gorila.messages import Batch, Priorities, ReplayStats, TransitionBlock
from pipelines.batch_assembly import BatchAssembly
from pipelines.other_splits import OtherSplits, Summary
from pipelines.rates import SamplesPerInsert
from pipelines.replay_memory import ReplayMemory
from pipelines.ring import Gap, MemoryRules, Ring
from pipelines.sampling import SplitShare, draw_rows, split_share

__all__ = ["Gap", "ReplaySplit"]

_NEW_SHARE_ROWS = 65_536  # the measured new share follows about this many drawn rows


class ReplaySplit:
    """The rings of a split's actors, its share of all batches, and the rule of samples per insert.

    Args:
        config: the run's.
        split: name of the split.
        rng: everything random in the draws; may be replaced between draws (`--synchronous` keys it by round).
        facts: of the run's environment; blocks of another shape, dtype or with an action outside its space are refused. None: the first
            block decides the shape.

    Attributes:
        evicted_below_watermark: rows that left because the log no longer has them.
        new_share_fallbacks: learner batches in which some level had only new or only old rows though `target_new_share` is set.
    """

    def __init__(
        self, config: Config, split: str, rng: np.random.Generator, facts: EnvironmentFacts | None = None
    ) -> None:
        replay = config.replay
        self.rng = rng
        self.memory = ReplayMemory(
            MemoryRules(
                capacity_rows=replay.capacity_rows,
                stack=config.env.stack,
                n_steps=replay.n_steps,
                discount=replay.discount,
                reward_transform=config.env.reward_transform,
                alpha=replay.alpha,
                priority_floor=replay.priority_floor,
            )
        )
        self.rates = SamplesPerInsert(replay.samples_per_insert, replay.min_size_rows, replay.max_error_rows)
        self.evicted_below_watermark = 0
        self.new_share_fallbacks = 0
        self._replay = replay
        self._split = split
        self._batch_rows = config.learner.batch_size
        self._new_window = int(round(replay.new_window_fraction * replay.capacity_rows))
        self._assembly = BatchAssembly(self.memory, split, replay.record_rows)
        self._others = OtherSplits(split)
        self._published: tuple[int, float] | None = None  # actors, mass of this split in its newest stats
        self._summary = Summary(0, 0.0, 0)
        self._weights: SplitShare | None = None
        self._form = (facts.observation_dtype, facts.observation_shape) if facts else None
        self._actions = facts.actions if facts else None
        self._inserts: dict[int, int] = {}
        self._counted: dict[
            int, int
        ] = {}  # partition → offset below which rows were counted as inserts, here or by another split
        self._inserts_total = self._samples_total = self._batches_total = self._stale = 0
        self._drawn_rows = self._drawn_new = 0.0

    # The log

    def next_offset(self, partition: int) -> int | None:
        """The offset the ring of a partition expects; None where it has no ring."""
        ring = self.memory.rings.get(partition)
        return ring.next_offset if ring else None

    def open_ring(self, partition: int, next_offset: int) -> None:
        """Start an empty ring which expects that offset."""
        self.memory.open(partition, next_offset)
        self._others_changed()

    def drop_ring(self, partition: int) -> None:
        """Ownership went elsewhere; its rows are forgotten. Nothing to do where there is no ring."""
        if partition in self.memory.rings:
            self.memory.drop(partition)
            self._others_changed()

    def insert(
        self, partition: int, offset: int, timestamp_ms: int, block: TransitionBlock | None, *, new: bool = True
    ) -> None:
        """Take the record at an offset: below the expected one ignored, equal appended, above refused.

        Args:
            timestamp_ms: the broker's append time.
            block: None for a poison or control record: only the expected offset moves.
            new: False for rows read to fill a gap or after a restart: they count for no samples. Nor do rows that were counted before,
                whoever has them read again: an operator's `--to-earliest`, a commit that was lost with its process.

        Raises:
            Gap: the log between must be handed in first (or skipped, where it has none).
            BadRecord: the block cannot be used; the offset has moved on.
            KeyError: the partition has no ring.
        """
        ring = self.memory.rings[partition]
        if offset < ring.next_offset:
            return
        if offset > ring.next_offset:
            raise Gap(partition, ring.next_offset, offset)
        ring.next_offset = offset + 1
        if block is None:
            return
        self._refuse_foreign(block)
        transitions = self.memory.insert(ring, offset, timestamp_ms, block)
        counted = self._counted.get(partition, 0)
        self._counted[partition] = max(counted, offset + 1)
        if new and offset >= counted:
            self._inserts[partition] = self._inserts.get(partition, 0) + transitions
            self._inserts_total += transitions
            self.rates.inserted(transitions, self._share().weight)

    def _refuse_foreign(self, block: TransitionBlock) -> None:
        seen = block.observations
        if self._form is None:
            self._form = (seen.dtype, seen.shape)
        if (seen.dtype, seen.shape) != self._form:
            raise BadRecord(
                f"observations are {seen.dtype} {seen.shape}, this run's are {self._form[0]} {self._form[1]}"
            )
        if self._actions is not None and int(block.action.max(initial=0)) >= self._actions:
            raise BadRecord(f"action {int(block.action.max())}, this run's environment has {self._actions}")

    def skip_to(self, partition: int, offset: int) -> None:
        """Offsets below do not exist in the log (control records, compaction, retention)."""
        ring = self.memory.rings[partition]
        ring.next_offset = max(ring.next_offset, offset)

    def low_watermark(self, partition: int, offset: int) -> None:
        """Rows whose offset is below leave the ring, counted: the log could not restore them."""
        ring = self.memory.rings.get(partition)
        while ring and len(ring.order) and int(ring.order.offsets[0]) < offset:
            self.evicted_below_watermark += self.memory.evict_oldest(ring)

    def learned(self, priorities: Priorities) -> None:
        """Apply a learner's TD errors to the rows that are still here; those of other splits' partitions are not ours to count."""
        for partition in np.unique(priorities.partition).tolist():
            ring = self.memory.rings.get(partition)
            if ring is not None:
                mine = priorities.partition == partition
                self._stale += self.memory.learned(
                    ring, priorities.offset[mine], priorities.row[mine], priorities.td_error[mine]
                )

    # Other splits

    def other_split(self, stats: ReplayStats, offset: int | None = None) -> None:
        """Take another split's newest stats (its own come back too: ignored); `offset` in replay-stats says which are newer (None: these)."""
        alone = not self._others
        self._know_counted(stats)
        inserted = self._others.take(stats, offset)
        self._others_changed()
        if alone and self._others:
            self.rates.clamp()
        if inserted:
            self.rates.inserted(inserted, self._share().weight)

    def restore_totals(self, stats: ReplayStats) -> None:
        """Run totals of this split's newest stats, before anything is inserted after a restart."""
        self._inserts = {int(name): int(rows) for name, rows in zip(stats.actors, stats.inserts, strict=True)}
        self._inserts_total = stats.inserts_total
        self._samples_total = stats.samples_total
        self._batches_total = stats.batches_total
        self._stale = stats.stale_priorities
        self._know_counted(stats)
        self.rates.restore(stats.inserts_total, stats.samples_total)

    def _know_counted(self, stats: ReplayStats) -> None:
        for name, offset in zip(stats.actors, stats.counted_offsets.tolist(), strict=False):  # none in old records
            self._counted[int(name)] = max(self._counted.get(int(name), 0), offset)

    def _others_changed(self) -> None:
        self._summary = self._others.summary({str(partition) for partition in self.memory.rings})
        self._weights = None

    def _share(self) -> SplitShare:
        if not self._others:
            return SplitShare(1.0, self._replay.local_fraction)
        if self._weights is None or self._published is None:
            actors, mass = self._published or self._own()
            others = self._summary
            self._weights = split_share(
                self._replay.local_fraction, actors, actors + others.actors, mass, mass + others.mass
            )
        return self._weights

    def _own(self) -> tuple[int, float]:
        rings = self.memory.active()
        return len(rings), float(sum(self.memory.forest.mass(ring.index) for ring in rings))

    def _own_rows(self) -> int:
        return sum(ring.sampleable for ring in self.memory.rings.values())

    def _population(self) -> int:
        return self._own_rows() + self._summary.rows

    # Sampling

    @property
    def batches_total(self) -> int:
        """Learner batches drawn, run total."""
        return self._batches_total

    def wants_transitions(self) -> bool:
        """Whether transitions may be read: not while a batch could be formed and too few samples were drawn (rates.py)."""
        return not self._own_rows() or self.rates.wants_inserts(self._population())

    def draw(self, batches_allowed: int, *, regardless: bool = False) -> list[list[Batch]]:
        """Whole learner batches, each the list of its records, as many as the rates and `batches_allowed` let be drawn.

        Args:
            regardless: of the rates; `--synchronous` counts in rounds instead (gorila/rounds.py).
        """
        batches: list[list[Batch]] = []
        if batches_allowed <= 0 or not self._own_rows():
            return batches
        population, share = self._population(), self._share()
        if share.weight <= 0.0:
            return batches
        while len(batches) < batches_allowed and (regardless or self.rates.may_sample(population, self._batch_rows)):
            drawn = draw_rows(
                self.memory, self._batch_rows, share, self._new_window, self._replay.target_new_share, self.rng
            )
            batches.append(self._assembly.records(drawn, self._batches_total, population))
            self.rates.sampled(self._batch_rows)
            self._samples_total += self._batch_rows
            self._batches_total += 1
            self.new_share_fallbacks += drawn.fell_back
            self._measure(int(np.count_nonzero(drawn.is_new)))
        return batches

    def _measure(self, new_rows: int) -> None:
        self._drawn_rows += self._batch_rows
        self._drawn_new += new_rows
        if self._drawn_rows > _NEW_SHARE_ROWS:
            self._drawn_rows /= 2
            self._drawn_new /= 2

    # For eyes and other splits

    def waiting_for(self) -> str:
        """Empty while a batch may be drawn; else whom the split waits for and why."""
        population = self._population()
        if not self._own_rows() or population < self._replay.min_size_rows:
            return f"actors: {population} sampleable rows, sampling starts at {max(1, self._replay.min_size_rows)}"
        if self.rates.error < self._batch_rows:
            return f"actors: {self.rates.error:.0f} rows may be drawn, a learner batch has {self._batch_rows}"
        if not self.wants_transitions():
            return f"learners: {self.rates.error:.0f} rows are still to be drawn, transitions wait above {self._replay.max_error_rows:.0f}"
        return ""

    def stats(self, now_ms: int) -> ReplayStats:
        """What this split holds. Its own share is computed from the newest of these, as the other splits compute theirs."""
        rings: list[Ring] = sorted(self.memory.rings.values(), key=lambda ring: ring.partition)
        self._published = self._own()
        self._weights = None
        return ReplayStats(
            split=self._split,
            time_ms=now_ms,
            actors=[str(ring.partition) for ring in rings],
            sampleable=np.array([ring.sampleable for ring in rings], np.int64),
            mass=np.array([self.memory.forest.mass(ring.index) for ring in rings], np.float64),
            inserts=np.array([self._inserts.get(ring.partition, 0) for ring in rings], np.int64),
            inserts_total=self._inserts_total,
            samples_total=self._samples_total,
            batches_total=self._batches_total,
            new_share=self._drawn_new / self._drawn_rows if self._drawn_rows else 0.0,
            stale_priorities=self._stale,
            waiting_for=self.waiting_for(),
            memory_bytes=self.memory.memory_bytes,
            next_offsets=np.array([ring.next_offset for ring in rings], np.int64),
            counted_offsets=np.array([self._counted.get(ring.partition, 0) for ring in rings], np.int64),
            wants_transitions=self.wants_transitions(),
        )

    def oldest_timestamp_ms(self) -> int | None:
        """Append time of the oldest block held; priorities from then on restore the learned leaves."""
        return self.memory.oldest_timestamp_ms()

    def state_fingerprint(self) -> dict[int, tuple[int, bytes, bytes]]:
        """Per partition (N, live (offset, rows) of each block, every leaf oldest row first): equal after recovery."""
        return {p: (ring.sampleable, *self.memory.live(ring)) for p, ring in sorted(self.memory.rings.items())}

    def check_valid(self) -> None:
        """Raises InvalidState."""
        self.memory.check_valid()
        if self._samples_total < 0 or self._inserts_total < 0:
            raise InvalidState("a run total is negative")
