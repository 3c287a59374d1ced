"""Which k values of P are largest in size: exactly, in little more than one pass.

Guarantee: the result is *exact*. It is the k positions of largest |value|, in rising order; of equal sizes the lowest positions; positions of value zero are
left out, so there may be fewer than k. A sampled threshold only decides how many candidates are looked at closely, never who wins:
1. Every 67th value is looked at (a prime: layers are powers of two wide). The sample's r-th largest is a threshold that about 67 r values reach; r is
   chosen four deviations above k / 67.
2. One pass collects who reaches it. Fewer than k: the threshold was too high; r is doubled, the pass repeated.
3. The exact k of the candidates (about 2 k of them) are taken by numpy's introselect.
Sizes are compared as integers: the bits of |float32| are ordered as the numbers are, NaN on top (so NaN is always among the candidates, where the caller finds
it without a pass of its own).
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np
from numba import njit

if TYPE_CHECKING:
    from numpy.typing import NDArray

    U32 = NDArray[np.uint32]
    I32 = NDArray[np.int32]

STRIDE = 67
SMALL = 8192
_SIZE_BITS = np.uint32(0x7FFFFFFF)


@njit(nogil=True, fastmath=False, error_model="numpy", cache=True)
def _collect(bits: U32, threshold: np.uint32, positions: I32) -> int:
    """Positions whose size reaches the threshold, in rising order; how many. `positions` has room for all."""
    count = 0
    for i in range(bits.shape[0]):
        if (bits[i] & _SIZE_BITS) >= threshold:
            positions[count] = i
            count += 1
    return count


@njit(nogil=True, fastmath=False, error_model="numpy", cache=True)
def strictly_rising(indices: I32, stop: int) -> bool:
    """Whether 0 <= indices[0] < indices[1] < … < stop; int32 (n,), n may be 0."""
    wrong = 0
    for i in range(1, indices.shape[0]):
        wrong += indices[i] <= indices[i - 1]
    # Rising, so the first and the last bound them all.
    return wrong == 0 and (indices.shape[0] == 0 or (indices[0] >= 0 and indices[-1] < stop))


def largest(values: NDArray[np.float32], k: int) -> I32:
    """int32 (<= k,): see the file's head. `values` is float32 (P,), contiguous; NaN counts as largest."""
    bits = values.view(np.uint32)
    candidates = _candidates(bits, k)
    if len(candidates) <= k:
        return candidates
    sizes = bits[candidates] & _SIZE_BITS
    least = np.partition(sizes, len(sizes) - k)[len(sizes) - k]
    taken = sizes > least
    ties = np.flatnonzero(sizes == least)[: k - int(np.count_nonzero(taken))]
    taken[ties] = True
    chosen: I32 = candidates[taken]
    return chosen


def _candidates(bits: U32, k: int) -> I32:
    """At least the k largest non-zero positions, or all non-zero ones when there are fewer."""
    positions = np.empty(len(bits), np.int32)  # pages are touched only as far as they are filled
    sample = bits[::STRIDE] & _SIZE_BITS if len(bits) > SMALL else bits[:0]
    expected = k / STRIDE
    rank = math.ceil(expected + 4 * math.sqrt(expected)) + 2
    while rank < len(sample):
        threshold = np.uint32(max(1, int(np.partition(sample, len(sample) - rank)[len(sample) - rank])))
        count = _collect(bits, threshold, positions)
        if count >= k or threshold == 1:
            return positions[:count].copy()
        rank *= 2
    return positions[: _collect(bits, np.uint32(1), positions)].copy()
