"""Half precision with one power-of-two scale a record (rules.md 14).

One scale puts the largest value just under 2**15: gradients are small numbers, which underflow in half precision long before they overflow. A power
of two costs no bits.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar

import numpy as np

from gorila.compression import half_kernels as kernels
from gorila.compression.codec import F32, HALF_HEADER, Counted, shaped
from gorila.errors import BadRecord, InvalidState

if TYPE_CHECKING:
    from numpy.typing import NDArray

# The scale 2**e must be a normal float32, and 65504 * 2**-e finite: e in [-111, 126].
MIN_EXPONENT, MAX_EXPONENT = -111, 126
HALF_MAX = np.float32(65504.0)
INFINITY_BITS = 0x7F800000


class Halves:
    """Float32 (n,) as halves with their scale.

    Attributes:
        exponent: e; value = half * 2**-e.
        bits: uint16 (n,), little-endian where it matters: `tobytes` of it goes on the wire.
        saturated, underflowed: values cut, and non-zero values that became zero.

    Raises InvalidState for NaN.
    """

    def __init__(self, values: F32) -> None:
        size = kernels.largest_size(values.view(np.uint32))
        if size > INFINITY_BITS:
            raise InvalidState("a gradient with NaN reached the codec")
        self.saturated = 0
        largest = float(np.uint32(size).view(np.float32))
        if size == INFINITY_BITS:
            largest = float(np.abs(values).max(initial=0.0, where=np.isfinite(values)))
        # frexp: largest = m * 2**k with m in [.5, 1), so largest * 2**(15 - k) lies in [2**14, 2**15).
        exponent = min(max(15 - int(np.frexp(largest)[1]), MIN_EXPONENT), MAX_EXPONENT) if largest > 0 else 0
        scale = np.float32(2.0**exponent)
        if size == INFINITY_BITS or largest * float(scale) > HALF_MAX:
            limit = HALF_MAX / scale
            self.saturated = int(np.count_nonzero(np.abs(values) > limit))
            values = np.clip(values, -limit, limit)
        self.exponent = exponent
        self.bits = np.empty(len(values), np.uint16)
        kernels.to_halves(values, scale, np.empty(len(values), np.float32), self.bits)
        self.underflowed = kernels.vanished(values.view(np.uint32), self.bits)

    def tobytes(self) -> bytes:
        """The halves, little-endian."""
        return self.bits.astype("<u2", copy=False).tobytes()


def scale_of(exponent: int) -> np.float32:
    """2**-e. Raises BadRecord for an e no encoder writes."""
    if not MIN_EXPONENT <= exponent <= MAX_EXPONENT:
        raise BadRecord(f"fp16 scale exponent {exponent} is outside {MIN_EXPONENT} … {MAX_EXPONENT}")
    return np.float32(2.0**-exponent)


def from_halves(bits: NDArray[np.uint16], exponent: int) -> F32:
    """float32 (n,). Raises BadRecord: an exponent out of range, a value that is not finite."""
    scale = scale_of(exponent)
    values = np.empty(len(bits), np.float32)
    if not kernels.from_halves(bits, scale, values):
        raise BadRecord("the payload holds a value that is not finite")
    return values


class Fp16(Counted):
    """int32 e, then P halfs h; value = h * 2**-e."""

    name: ClassVar[str] = "fp16"
    lossy: ClassVar[bool] = True

    def encode(self, values: F32, version: int | None = None) -> bytes:
        """See Codec. Infinite values are cut to the largest the record's scale has room for, and counted."""
        halves = Halves(np.ascontiguousarray(shaped(values)))
        self.saturated += halves.saturated
        self.underflowed += halves.underflowed
        return HALF_HEADER.pack(halves.exponent) + halves.tobytes()

    def decode(self, data: bytes, num_parameters: int) -> F32:
        """See Codec."""
        if len(data) != HALF_HEADER.size + 2 * num_parameters:
            raise BadRecord(f"fp16 payload of {len(data)} bytes for {num_parameters} parameters")
        return from_halves(np.frombuffer(data, "<u2", offset=HALF_HEADER.size), HALF_HEADER.unpack_from(data)[0])

    def subtract(self, data: bytes, residual: F32) -> None:
        """See Codec."""
        residual -= self.decode(data, len(residual))
