"""Batches whose loss says that something is wrong are not learned from (Nair et al. 2015; rules.md 13).

On the weighted batch loss, never per sample: that would undo prioritised replay. The averages are fed by rejected batches too, so that a
real change of scale is accepted in time; after 10 rejections in a row the next is taken, with a warning.
"""

from __future__ import annotations

import math

DECAY = 0.99
MAX_IN_A_ROW = 10


class OutlierGuard:
    """Exponential mean and deviation of the batch loss."""

    def __init__(self, sigma: float, warmup_batches: int) -> None:
        """`sigma`: deviations above the mean that are still accepted; 0 accepts every finite loss."""
        self._sigma = sigma
        self._warmup = warmup_batches
        self.batches = 0
        self.mean = 0.0
        self.variance = 0.0
        self.in_a_row = 0
        self.rejected = 0
        self.accepted_after_row = 0

    def rejects(self, loss: float, gradient_norm: float) -> bool:
        """Whether this batch's gradient must not be used. A loss or norm that is not finite never is, and feeds no average."""
        if not (math.isfinite(loss) and math.isfinite(gradient_norm)):
            self.rejected += 1
            return True
        limit = self.mean + self._sigma * math.sqrt(self.variance)
        outlier = self._sigma > 0 and self.batches >= self._warmup and loss > limit
        if self.batches == 0:
            self.mean = loss
        difference = loss - self.mean
        self.mean += (1 - DECAY) * difference
        self.variance = DECAY * (self.variance + (1 - DECAY) * difference * difference)
        self.batches += 1
        if not outlier:
            self.in_a_row = 0
            return False
        if self.in_a_row >= MAX_IN_A_ROW:
            self.in_a_row = 0
            self.accepted_after_row += 1
            return False
        self.in_a_row += 1
        self.rejected += 1
        return True

    def state(self) -> dict[str, float]:
        """For the checkpoint."""
        return {"batches": self.batches, "mean": self.mean, "variance": self.variance}

    def restore(self, state: dict[str, float]) -> None:
        """From `state()`."""
        self.batches, self.mean, self.variance = int(state["batches"]), float(state["mean"]), float(state["variance"])
