"""The values as they are."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from gorila.compression.codec import F32, F32_MAX, Counted, checked, finite
from gorila.errors import BadRecord


class Fp32(Counted):
    """4 bytes each, little-endian."""

    name: ClassVar[str] = "fp32"
    lossy: ClassVar[bool] = False

    def encode(self, values: F32, version: int | None = None) -> bytes:
        """See Codec. Infinite values are cut to the largest float32 and counted."""
        if not bool(np.isfinite(values).all()):
            values = checked(values)
            self.saturated += int(np.count_nonzero(np.isinf(values)))
            values = np.clip(values, -F32_MAX, F32_MAX)
        return checked(values).astype("<f4", copy=False).tobytes()

    def decode(self, data: bytes, num_parameters: int) -> F32:
        """See Codec. A read-only view."""
        if len(data) != 4 * num_parameters:
            raise BadRecord(f"fp32 payload of {len(data)} bytes for {num_parameters} parameters")
        return finite(np.frombuffer(data, dtype="<f4"))

    def subtract(self, data: bytes, residual: F32) -> None:
        """See Codec."""
        residual -= self.decode(data, len(residual))
