"""The rounds of `--synchronous` (rules.md 17): who waits for what, in counts only.

Round r: every lane emits one block -> replay, once it has the round's blocks and all priorities of the rounds before, draws U batches -> the learner makes
each on the version that includes the one before -> the actor begins round r + 1 at the version that includes them all.
The first `warmup_rounds` rounds fill the memory and draw nothing. No clock, no coalescing, no flush by time; draws are keyed by (seed, role, round). So two
runs with one seed give the same bytes on every topic that matters, and the same state hashes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from gorila.config import Config


@dataclass(frozen=True)
class Rounds:
    """Counts of a synchronous run.

    Attributes:
        lanes: blocks of a round.
        updates_per_round: U, samples per insert as a whole number of batches a round; at least 1.
        warmup_rounds: rounds before the first draw: min_size_rows and one more.
        max_updates: no batch is drawn beyond; 0: no limit.
    """

    lanes: int
    updates_per_round: int
    warmup_rounds: int
    max_updates: int = 0

    @classmethod
    def of(cls, config: Config) -> Rounds:
        """As the run's configuration implies."""
        rows = config.actor.lanes * config.actor.block_steps
        return cls(
            config.actor.lanes,
            max(1, round(rows * config.replay.samples_per_insert / config.learner.batch_size)),
            math.ceil(config.replay.min_size_rows / rows) + 1,
            config.run.max_updates,
        )

    def updates_after(self, rounds: int) -> int:
        """Version of the weights once this many rounds are over."""
        updates = max(0, rounds - self.warmup_rounds) * self.updates_per_round
        return min(updates, self.max_updates) if self.max_updates else updates

    def next_draw(self, batches: int) -> int:
        """The round whose batches are drawn next, after this many in all."""
        return self.warmup_rounds + batches // self.updates_per_round

    def may_draw(self, batches: int, blocks: int, priorities: int) -> int:
        """Batches to be drawn now, 0 while something is missing.

        Args:
            batches: drawn so far, whole rounds of them.
            blocks: transitions records in the memory, from the run's first on.
            priorities: priorities records applied, from the run's first on.
        """
        draw_round = self.next_draw(batches)
        if blocks < (draw_round + 1) * self.lanes or priorities < batches:
            return 0
        return self.updates_after(draw_round + 1) - batches
