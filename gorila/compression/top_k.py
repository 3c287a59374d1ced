"""The k largest values with error feedback (Aji & Heafield 2017), k rising to its final share (Lin et al. 2018, "Deep gradient compression").

Layout: int32 e; n int32 indices, strictly rising; n halfs; value = half * 2**-e (fp16.py). n follows from the length: 1,687 of 1,687,206 values are
10,122 bytes and the 4 of e. Values whose half is zero are not sent; they stay in the residual.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from gorila.compression.codec import F32, HALF_HEADER, Counted, SparseCodec, shaped
from gorila.compression.fp16 import Halves, from_halves
from gorila.compression.selection import largest, strictly_rising
from gorila.errors import BadRecord

if TYPE_CHECKING:
    from numpy.typing import NDArray

ENTRY_BYTES = 6
FEWEST = 64
DEFAULT_FRACTION = 0.001
WARMUP = (0.25, 0.0625, 0.015625, 0.004)
"""Shares of P sent in the four quarters of the warm-up (Lin et al. 2018, section 3.3: sparsity 75 % to 99.6 %, then the final share)."""


def fraction_at(version: int | None, warmup_versions: int, final: float) -> float:
    """Share of P sent for values computed on this global version; None: past the warm-up."""
    if version is None or version >= warmup_versions:
        return final
    return max(final, WARMUP[max(0, version) * len(WARMUP) // warmup_versions])


class TopK(Counted, SparseCodec):
    """See the file's head.

    Args:
        fraction: final k / P; at least FEWEST entries (or P) are sent.
        warmup_versions: global versions over which k falls to it; 0: none.
    """

    name: ClassVar[str] = "top-k"
    lossy: ClassVar[bool] = True

    def __init__(self, fraction: float = DEFAULT_FRACTION, warmup_versions: int = 0) -> None:
        super().__init__()
        self._fraction, self._warmup_versions = fraction, warmup_versions

    def entries(self, num_parameters: int, version: int | None = None) -> int:
        """k."""
        share = fraction_at(version, self._warmup_versions, self._fraction)
        return min(num_parameters, max(int(share * num_parameters), FEWEST))

    def encode(self, values: F32, version: int | None = None) -> bytes:
        """See Codec. Infinite values are cut to the largest of their record and counted."""
        flat = np.ascontiguousarray(shaped(values))
        indices = largest(flat, self.entries(len(flat), version))
        halves = Halves(flat[indices])  # finds NaN: it counts as largest, so none is left behind
        self.saturated += halves.saturated
        self.underflowed += halves.underflowed
        if halves.underflowed:
            sent = (halves.bits & 0x7FFF) != 0
            indices, halves.bits = indices[sent], halves.bits[sent]
        return HALF_HEADER.pack(halves.exponent) + indices.astype("<i4", copy=False).tobytes() + halves.tobytes()

    def decode_sparse(self, data: bytes, num_parameters: int) -> tuple[NDArray[np.int32], F32]:
        """See SparseCodec."""
        count, rest = divmod(len(data) - HALF_HEADER.size, ENTRY_BYTES)  # -1 for less than a header
        if count < 0 or rest or count > num_parameters:
            raise BadRecord(f"top-k payload of {len(data)} bytes for {num_parameters} parameters")
        indices = np.frombuffer(data, "<i4", count, HALF_HEADER.size)
        if not strictly_rising(indices, num_parameters):
            raise BadRecord(f"top-k indices are not strictly rising within {num_parameters} parameters")
        halves = np.frombuffer(data, "<u2", count, HALF_HEADER.size + 4 * count)
        return indices, from_halves(halves, HALF_HEADER.unpack_from(data)[0])

    def decode(self, data: bytes, num_parameters: int) -> F32:
        """See Codec."""
        indices, values = self.decode_sparse(data, num_parameters)
        dense = np.zeros(num_parameters, np.float32)
        dense[indices] = values
        return dense

    def subtract(self, data: bytes, residual: F32) -> None:
        """See Codec. Only the k entries are touched."""
        indices, values = self.decode_sparse(data, len(residual))
        residual[indices] -= values
