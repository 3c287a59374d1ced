"""float32 to half and back, compiled by numba: numpy converts value by value (4 ms for 1.7 M), these loops use vectors (.8 and .3 ms).

Integer arithmetic on the bits, so that the results do not hang on a processor's conversion instructions: IEEE 754's round to nearest, ties to even.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

if TYPE_CHECKING:
    from numpy.typing import NDArray

    F32 = NDArray[np.float32]
    U16 = NDArray[np.uint16]
    U32 = NDArray[np.uint32]

_SIZE = np.uint32(0x7FFFFFFF)
_SIGN = np.uint32(0x80000000)
_SMALLEST_NORMAL = np.uint32(0x38800000)  # 2**-14: below it a half is a multiple of 2**-24
_REBIAS = np.uint32(0x38000000)  # (127 - 15) << 23
_ALMOST_HALF_A_STEP = np.uint32(0xFFF)
_HALF_SIZE = np.uint16(0x7FFF)
_HALF_NORMAL = np.uint32(0x400)
_HALF_INFINITE = np.uint32(0x7C00)
_SUBNORMAL_STEP = np.float32(2.0**-24)
_SUBNORMAL_STEPS = np.float32(2.0**24)


@njit(nogil=True, fastmath=False, error_model="numpy", cache=True)
def largest_size(bits: U32) -> int:
    """Bits of the largest |float32| of a (P,) array viewed as uint32: above 0x7F800000 there is a NaN, equal to it an infinity."""
    largest = np.uint32(0)
    for i in range(bits.shape[0]):
        largest = max(largest, bits[i] & _SIZE)
    return int(largest)


@njit(nogil=True, fastmath=False, error_model="numpy", cache=True)
def to_halves(values: F32, scale: np.float32, scratch: F32, halves: U16) -> None:
    """halves[i] = bits of the half nearest to values[i] * scale; all (P,), products at most 65504 in size. Two loops: vectors are made of each."""
    for i in range(values.shape[0]):
        scratch[i] = values[i] * scale
    bits = scratch.view(np.uint32)
    for i in range(values.shape[0]):
        size = bits[i] & _SIZE
        half = (size + _ALMOST_HALF_A_STEP + ((size >> np.uint32(13)) & np.uint32(1)) - _REBIAS) >> np.uint32(13)
        if size < _SMALLEST_NORMAL:
            half = np.uint32(np.rint(abs(scratch[i]) * _SUBNORMAL_STEPS))
        halves[i] = np.uint16(half | ((bits[i] & _SIGN) >> np.uint32(16)))


@njit(nogil=True, fastmath=False, error_model="numpy", cache=True)
def vanished(bits: U32, halves: U16) -> int:
    """How many non-zero float32 (as uint32, (P,)) have a half that is zero."""
    count = np.uint32(0)
    for i in range(bits.shape[0]):
        count += np.uint32((bits[i] & _SIZE) != 0) & np.uint32((halves[i] & _HALF_SIZE) == 0)
    return int(count)


@njit(nogil=True, fastmath=False, error_model="numpy", cache=True)
def from_halves(halves: U16, scale: np.float32, values: F32) -> bool:
    """values[i] = the half's value * scale, both (P,). False when a half is infinite or NaN."""
    unusable = np.uint32(0)
    bits = values.view(np.uint32)
    for i in range(halves.shape[0]):
        size = np.uint32(halves[i] & _HALF_SIZE)
        unusable += np.uint32(size >= _HALF_INFINITE)
        values[i] = np.float32(np.int32(size)) * _SUBNORMAL_STEP
        if size >= _HALF_NORMAL:
            bits[i] = (size << np.uint32(13)) + _REBIAS
    for i in range(halves.shape[0]):
        bits[i] |= np.uint32(halves[i] >> np.uint16(15)) << np.uint32(31)
        values[i] *= scale
    return bool(unusable == 0)
