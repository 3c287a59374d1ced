"""Loops of the one-bit codec, compiled by numba. Blocks are multiples of 8, so a byte of bits never spans two.

Sums are taken in sixteen lanes of float32, always the same sixteen: the compiler makes vectors of them, and no order of addition is left to it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

if TYPE_CHECKING:
    from numpy.typing import NDArray

    F32 = NDArray[np.float32]
    U8 = NDArray[np.uint8]

_ZERO = np.float32(0.0)
_ONE = np.float32(1.0)
_LANES = 16


@njit(nogil=True, fastmath=False, error_model="numpy", cache=True)
def means(values: F32, block: int, scales: F32) -> None:
    """Fill scales (blocks, 2) from values (P,): mean of those below zero, mean of the others. NaN or infinity shows in a scale of its block."""
    size = values.shape[0]
    low = np.empty(_LANES, np.float32)
    high = np.empty(_LANES, np.float32)
    counts = np.empty(_LANES, np.float32)
    for number in range(scales.shape[0]):
        start = number * block
        stop = min(start + block, size)
        whole = start + (stop - start) // _LANES * _LANES
        low[:] = _ZERO
        high[:] = _ZERO
        counts[:] = _ZERO
        for at in range(start, whole, _LANES):
            for lane in range(_LANES):
                value = values[at + lane]
                below = value < _ZERO
                low[lane] += value if below else _ZERO
                high[lane] += _ZERO if below else value
                counts[lane] += _ONE if below else _ZERO
        for at in range(whole, stop):
            value = values[at]
            below = value < _ZERO
            low[0] += value if below else _ZERO
            high[0] += _ZERO if below else value
            counts[0] += _ONE if below else _ZERO
        below_zero = counts.sum()
        others = np.float32(stop - start) - below_zero
        scales[number, 0] = low.sum() / below_zero if below_zero > _ZERO else _ZERO
        scales[number, 1] = high.sum() / others if others > _ZERO else _ZERO


@njit(nogil=True, fastmath=False, error_model="numpy", cache=True)
def decode(block: int, scales: F32, bits: U8, values: F32) -> None:
    """values[i] = the scale its bit names. Lengths were checked."""
    for number in range(scales.shape[0]):
        low, high = scales[number, 0], scales[number, 1]
        start, stop = number * block, min((number + 1) * block, values.shape[0])
        for at in range(start >> 3, stop >> 3):
            byte = np.int32(bits[at])
            for lane in range(8):
                values[8 * at + lane] = high if byte & (1 << lane) else low
        for i in range(stop & ~7, stop):
            values[i] = high if (bits[i >> 3] >> (i & 7)) & 1 else low


@njit(nogil=True, fastmath=False, error_model="numpy", cache=True)
def subtract(block: int, scales: F32, bits: U8, values: F32) -> None:
    """values[i] -= the scale its bit names. Lengths were checked."""
    for number in range(scales.shape[0]):
        low, high = scales[number, 0], scales[number, 1]
        start, stop = number * block, min((number + 1) * block, values.shape[0])
        for at in range(start >> 3, stop >> 3):
            byte = np.int32(bits[at])
            for lane in range(8):
                values[8 * at + lane] -= high if byte & (1 << lane) else low
        for i in range(stop & ~7, stop):
            values[i] -= high if (bits[i >> 3] >> (i & 7)) & 1 else low
