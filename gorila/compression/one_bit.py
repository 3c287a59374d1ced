"""One bit a value with error compensation (Seide et al. 2014, "1-bit stochastic gradient descent").

A bit says whether a value is at least zero; a block of B values shares two scales, the mean of its values below zero and the mean of the others: of all
pairs those that lose least in the square. What is lost goes to the caller's residual, without which this diverges.

Layout: uint32 B; per block float32 (mean below zero, mean of the others); ceil(P / 8) bytes of bits, value i in bit i % 8 of byte i // 8. 1,687,206 values
are 210,901 bytes of bits and, with B = 1,024, 13,184 of scales.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from gorila.compression import one_bit_kernels as kernels
from gorila.compression.codec import F32, F32_MAX, Counted, checked, finite, shaped
from gorila.errors import BadRecord

if TYPE_CHECKING:
    from numpy.typing import NDArray

HEADER = struct.Struct("<I")
DEFAULT_BLOCK = 1024
MIN_BLOCK, MAX_BLOCK = 8, 65536


class OneBit(Counted):
    """See the file's head. `block`: values that share two scales; a multiple of 8. A reader takes whatever block a record names."""

    name: ClassVar[str] = "one-bit"
    lossy: ClassVar[bool] = True

    def __init__(self, block: int = DEFAULT_BLOCK) -> None:
        super().__init__()
        self._block = block

    def encode(self, values: F32, version: int | None = None) -> bytes:
        """See Codec. Where a block's sum is not finite, values are cut to what a sum can hold; infinite ones are counted."""
        flat = np.ascontiguousarray(shaped(values))
        scales = np.empty((-(-len(flat) // self._block), 2), np.float32)
        kernels.means(flat, self._block, scales)
        if not bool(np.isfinite(scales).all()):
            self.saturated += int(np.count_nonzero(np.isinf(checked(flat))))
            # A block's sum must stay finite too.
            flat = np.clip(flat, -F32_MAX / self._block, F32_MAX / self._block)
            kernels.means(flat, self._block, scales)
        bits = np.packbits(flat >= 0, bitorder="little")
        return HEADER.pack(self._block) + scales.astype("<f4", copy=False).tobytes() + bits.tobytes()

    def decode(self, data: bytes, num_parameters: int) -> F32:
        """See Codec."""
        values = np.empty(num_parameters, np.float32)
        block, scales, bits = self._parts(data, num_parameters)
        kernels.decode(block, scales, bits, values)
        return values

    def subtract(self, data: bytes, residual: F32) -> None:
        """See Codec."""
        block, scales, bits = self._parts(data, len(residual))
        kernels.subtract(block, scales, bits, residual)

    def _parts(self, data: bytes, size: int) -> tuple[int, F32, NDArray[np.uint8]]:
        """(block, scales, bits), judged. Raises BadRecord."""
        block = HEADER.unpack_from(data)[0] if len(data) >= HEADER.size else 0
        if not MIN_BLOCK <= block <= MAX_BLOCK or block % 8:
            raise BadRecord(f"one-bit block of {block} values: a multiple of 8 from {MIN_BLOCK} to {MAX_BLOCK}")
        blocks, bit_bytes = -(-size // block), -(-size // 8)
        if len(data) != HEADER.size + 8 * blocks + bit_bytes:
            raise BadRecord(f"one-bit payload of {len(data)} bytes for {size} parameters in blocks of {block}")
        scales = finite(np.frombuffer(data, "<f4", 2 * blocks, HEADER.size)).reshape(blocks, 2)
        if bool((scales[:, 0] > 0).any()) or bool((scales[:, 1] < 0).any()):
            raise BadRecord("one-bit scales of the wrong sign")
        bits = np.frombuffer(data, np.uint8, bit_bytes, HEADER.size + 8 * blocks)
        if size % 8 and bits[-1] >> (size % 8):
            raise BadRecord("one-bit payload with bits beyond its last value")
        return block, scales, bits
