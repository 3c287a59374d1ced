"""A recording in the rings of the replay memory, and learner batches drawn from it: a pure function of recording, configuration, seed and count.

The same ReplaySplit as online, with three differences (rules.md 20): everything is loaded before anything is drawn, nothing learned comes back, and
`updates` says how many batches there are, not samples per insert. Rows count as no new inserts: the run makes no environment steps.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from gorila.config import Config
from gorila.environment_facts import EnvironmentFacts
from gorila.errors import BadRecord, ConfigError
from gorila.messages import F32, Batch, Priorities, TransitionBlock
from gorila.recording import Recorded, Span
from gorila.seeds import generator
from pipelines.replay import ReplaySplit

Values = tuple[F32, F32]


class OfflineSplit:
    """Load, `ready`, then `draw`.

    Attributes:
        bad_records: blocks that could not be used: of another shape, or of another type.
    """

    def __init__(self, config: Config, split: str, facts: EnvironmentFacts) -> None:
        self.replay = ReplaySplit(config, split, generator(config.run.seed, "offline", 0), facts)
        self.bad_records = 0
        self._min_size_rows = config.replay.min_size_rows

    def open(self, spans: Mapping[int, Span]) -> None:
        """A ring for each partition that has records, in their order."""
        for partition, span in sorted(spans.items()):
            if not span.empty:
                self.replay.open_ring(partition, span.first)

    def insert(self, record: Recorded, values: Values | None = None) -> None:
        """The next transitions record of a partition; offsets before it that hold nothing are passed over.

        Args:
            values: (q_taken, q_max), each float32 (rows,), instead of the actor's own.
        """
        block = record.message
        self.replay.skip_to(record.partition, record.offset)
        if not isinstance(block, TransitionBlock):
            self.bad_records += 1
            return
        if values is not None:
            block = dataclasses.replace(block, q_taken=values[0], q_max=values[1])
        try:
            self.replay.insert(record.partition, record.offset, record.timestamp_ms, block, new=False)
        except BadRecord:
            self.bad_records += 1

    def learned(self, record: Recorded) -> None:
        """The next recorded priority update; the last of a row wins, as it did online. Rows that are not in the memory are counted as stale."""
        if isinstance(record.message, Priorities):
            self.replay.learned(record.message)

    @property
    def rows(self) -> int:
        """Sampleable."""
        return sum(ring.sampleable for ring in self.replay.memory.rings.values())

    def ready(self) -> None:
        """Everything is loaded. Raises ConfigError when a run of this configuration would not begin to sample."""
        if self.rows < max(1, self._min_size_rows):
            raise ConfigError(
                "replay.min_size_rows", self._min_size_rows, f"the source gives {self.rows} sampleable rows"
            )

    def draw(self) -> list[Batch]:
        """The next learner batch, as the list of its records."""
        [batch] = self.replay.draw(1, regardless=True)
        return batch


class Progress:
    """How far something of known size is, and when it will be over. Times are handed in, in seconds."""

    def __init__(self, what: str, total: int, now_s: float) -> None:
        self._what, self._total, self._began_s = what, total, now_s
        self.done = 0

    def eta_s(self, now_s: float) -> float | None:
        """Seconds left at the mean rate so far; None before the first."""
        return (now_s - self._began_s) / self.done * (self._total - self.done) if self.done else None

    def line(self, now_s: float) -> str:
        """As in "offline: 1,200 of 5,000 batches, 12 s left"."""
        eta_s = self.eta_s(now_s)
        left = "" if eta_s is None or self.done >= self._total else f", {eta_s:.0f} s left"
        return f"offline: {self.done:,} of {self._total:,} {self._what}{left}"
