"""Samples per insert: one number decides who waits (Reverb's rule; Cassirer et al. 2021, section 3.3).

error = inserts * ratio - samples, in rows, over the whole run.
1. A learner batch may be drawn while enough rows are sampleable and the error is at least the batch: after it the error is >= 0.
2. Transitions are left in Kafka only while a batch could be formed and the error is above its maximum.
3. Below `min_size_rows` only sampling waits: whatever the error, inserts go on.
With several splits each earns its share of every insert anywhere (sampling.py), so the shares add up to the ratio.
"""

from __future__ import annotations


class SamplesPerInsert:
    """The error and its two gates.

    Args:
        ratio: rows drawn per row inserted.
        min_size_rows: sampling waits below this many sampleable rows.
        max_error_rows: reading transitions waits above this error, while a batch could be formed.
    """

    def __init__(self, ratio: float, min_size_rows: int, max_error_rows: float) -> None:
        self.ratio = ratio
        self.min_size_rows = min_size_rows
        self.max_error_rows = max_error_rows
        self._earned_rows = 0.0
        self._samples = 0

    @property
    def error(self) -> float:
        """Rows that may still be drawn."""
        return self._earned_rows - self._samples

    def inserted(self, rows: int, share: float = 1.0) -> None:
        """Rows became known somewhere; this split draws `share` of what they allow."""
        self._earned_rows += rows * self.ratio * share

    def sampled(self, rows: int) -> None:
        """Rows were drawn."""
        self._samples += rows

    def may_sample(self, population: int, batch_rows: int) -> bool:
        """Rule 1."""
        return population > 0 and population >= self.min_size_rows and self.error >= batch_rows

    def wants_inserts(self, population: int) -> bool:
        """Rule 2 and 3."""
        can_form = population > 0 and population >= self.min_size_rows
        return not (can_form and self.error > self.max_error_rows)

    def restore(self, inserts: int, samples: int) -> None:
        """Run totals from before a restart."""
        self._earned_rows = inserts * self.ratio
        self._samples = samples

    def clamp(self) -> None:
        """Forget what is outside [0, max_error_rows]: totals restored as if alone, when there turn out to be other splits."""
        self._earned_rows = self._samples + min(max(self.error, 0.0), self.max_error_rows)
