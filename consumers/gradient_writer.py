"""From one flat gradient to a record a shard, with what compression lost kept for the next (error feedback, Seide et al. 2014).

Σ sent + residual = Σ gradient, over kill and restart: the outbox has (records, residual after) before anything is produced (cases.md 24).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from consumers.gradient_step import Computed
from consumers.outbox import OutboxPort, Slot
from gorila.compression import gradient_codec
from gorila.config import LearnerSection
from gorila.errors import InvalidState
from gorila.messages import Gradient
from gorila.sharding import bounds

F32 = NDArray[np.float32]
Identity = tuple[int, int]


class GradientWriter:
    """Cuts, compresses, remembers.

    Attributes:
        residual: float32 (P,), what was computed and not yet sent; None where nothing is ever left over.
        unsent: slots that a restart must send again, oldest first.
        handled: {batches partition: highest batch offset in the outbox}.
        residual_lost: the codec keeps a residual and the outbox had none: a first start, or a lost disk.
        written, payload_bytes: gradients (one a batch, all its shards) and their payloads, since the process began.
    """

    def __init__(
        self,
        learner_id: str,
        num_parameters: int,
        shards: int,
        section: LearnerSection,
        outbox: OutboxPort,
        mixed: bool = False,
    ) -> None:
        self._id, self._outbox = learner_id, outbox
        self._codec = gradient_codec(section, mixed)
        self.bounds = bounds(num_parameters, shards)
        slots = outbox.complete_slots()
        left_over = slots[-1].residual if slots else None
        # What a lossy codec left over is sent even when its learner comes back with one that loses nothing.
        keeps = self._codec.lossy or left_over is not None
        self.residual: F32 | None = np.zeros(num_parameters, np.float32) if keeps else None
        self.residual_lost = keeps and not slots
        if left_over is not None and self.residual is not None:
            self.residual[:] = left_over
        self.written = self.payload_bytes = 0
        self.handled: dict[int, int] = {}
        for slot in slots:
            self.handled[slot.batch_partition] = max(slot.batch_offset, self.handled.get(slot.batch_partition, -1))
        sizes = [stop - start for start, stop in self.bounds]
        self.unsent = [slot for slot in slots if [gradient.num_parameters for gradient in slot.gradients] == sizes]

    @property
    def codec(self) -> str:
        """Its name on the wire."""
        return self._codec.name

    @property
    def saturated(self) -> int:
        """Values the codec cut to the largest it can hold, since the process began."""
        return self._codec.saturated

    @property
    def underflowed(self) -> int:
        """Non-zero values that became zero (and went to the residual), since the process began."""
        return self._codec.underflowed

    @property
    def residual_norm(self) -> float:
        """L2 norm of what was computed and not yet sent; 0 where the codec loses nothing."""
        return 0.0 if self.residual is None else float(np.linalg.norm(self.residual))

    def write(self, identity: Identity, computed: Computed, samples: int, shard_versions: list[int]) -> list[Gradient]:
        """The batch's gradients, in the outbox when this returns."""
        values = computed.gradient
        if self.residual is not None:
            self.residual += values
            values = self.residual
        version, gradients = min(shard_versions), []
        for shard, (start, stop) in enumerate(self.bounds):
            payload = self._codec.encode(values[start:stop], version)
            if self.residual is not None:
                self._codec.subtract(payload, self.residual[start:stop])
            gradients.append(
                Gradient(
                    shard_id=shard,
                    learner_id=self._id,
                    batch_partition=identity[0],
                    batch_offset=identity[1],
                    base_version=shard_versions[shard],
                    num_samples=samples,
                    num_parameters=stop - start,
                    codec=self._codec.name,
                    payload=payload,
                    gradient_norm=computed.gradient_norm,
                    loss=computed.loss,
                )
            )
        self._outbox.write(Slot(*identity, self.residual, tuple(gradients)))
        self.written += 1
        self.payload_bytes += sum(len(gradient.payload) for gradient in gradients)
        return gradients

    def check_valid(self) -> None:
        """Raises InvalidState."""
        if self.residual is not None and not bool(np.isfinite(self.residual).all()):
            raise InvalidState("the residual holds a value that is not finite")
