"""Sum trees of all rings in one float64 array: a whole batch is drawn by one compiled call.

Each ring owns a region of `region` nodes: its leaves, then ever smaller levels, then its root. A node has 16 children, so the levels
above the leaves cost 1/15 of them, where a binary tree would double the memory. A parent is always *recomputed* from its
children, never adjusted by a difference: sums cannot drift, and a parent is 0 exactly when all its children are.
Leaves are >= 0, finite and at most MAX_PRIORITY: anything else is refused at the door, because one NaN poisons every sum above it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from gorila.errors import InvalidState, ShapeError
from gorila.messages import F64, I64
from pipelines.compiled import compiled

FAN_OUT = 16
SHIFT = 4
MASK = FAN_OUT - 1
MAX_PRIORITY = 1e200  # 2**31 of them still have a finite sum


@compiled
def _recompute(nodes: F64, base: int, starts: I64, slots: I64) -> None:
    """Recompute all ancestors of `slots`, level by level; neighbours share the work."""
    for level in range(1, len(starts)):
        below = base + starts[level - 1]
        here = base + starts[level]
        last = np.int64(-1)
        for i in range(len(slots)):
            parent = slots[i] >> (SHIFT * level)
            if parent == last:
                continue
            last = parent
            total = 0.0
            first = below + (parent << SHIFT)
            for child in range(first, first + FAN_OUT):
                total += nodes[child]
            nodes[here + parent] = total


@compiled
def set_leaves(nodes: F64, base: int, starts: I64, slots: I64, values: F64) -> None:
    """Set leaves and all their ancestors; where a slot comes twice the later value wins."""
    for i in range(len(slots)):
        nodes[base + slots[i]] = values[i]
    _recompute(nodes, base, starts, slots)


@compiled
def descend(nodes: F64, base: int, starts: I64, level: int, index: int, x: float) -> int:
    """The leaf below node `index` of `level` at cumulative mass x. Never a leaf of 0 (as long as the node itself is positive):
    where rounding carries x past the end, the last positive child is taken."""
    while level > 0:
        level -= 1
        here = base + starts[level]
        index <<= SHIFT
        chosen = index
        for child in range(index, index + FAN_OUT):
            value = nodes[here + child]
            if value > 0.0:
                chosen = child
                if x < value:
                    break
                x -= value
        index = chosen
    return index


@compiled
def find_leaf(nodes: F64, base: int, starts: I64, u: float) -> int:
    """The leaf at the share u in [0, 1) of a ring's mass. The mass must be positive."""
    top = len(starts) - 1
    return descend(nodes, base, starts, top, 0, u * nodes[base + starts[top]])


@compiled
def _span(nodes: F64, base: int, starts: I64, low: int, high: int, x: float) -> tuple[float, int, int, float]:
    """Walk the O(16 log rows) nodes that make up leaves [low, high), in one fixed order.

    Returns (mass, level, node, rest): the node in which the cumulative mass passes x and how far into it, or the last positive one,
    or level -1 where nothing is positive. The mass is a sum of parts, never a difference: nothing cancels.
    """
    total = 0.0
    level = 0
    found_level = -1
    found = 0
    rest = 0.0
    looking = True
    while low < high:
        here = base + starts[level]
        while low < high and ((low & MASK) or (high & MASK)):
            if low & MASK:
                node = low
                low += 1
            else:
                high -= 1
                node = high
            value = nodes[here + node]
            if value > 0.0:
                if looking:
                    found_level, found, rest = level, node, x - total
                    looking = rest >= value
                total += value
        low >>= SHIFT
        high >>= SHIFT
        level += 1
    return total, found_level, found, rest


@compiled
def arc_mass(nodes: F64, base: int, starts: I64, capacity: int, low: int, length: int) -> float:
    """Mass of `length` slots from `low` on, going round at `capacity`."""
    high = min(low + length, capacity)
    first = _span(nodes, base, starts, low, high, 0.0)[0]
    return first + _span(nodes, base, starts, 0, low + length - high, 0.0)[0]


@compiled
def find_in_arc(nodes: F64, base: int, starts: I64, capacity: int, low: int, length: int, u: float) -> int:
    """The leaf at the share u in [0, 1) of the mass of `length` slots from `low` on; the mass must be positive.
    Never a leaf outside them, never one of 0."""
    high = min(low + length, capacity)
    first = _span(nodes, base, starts, low, high, 0.0)[0]
    second = _span(nodes, base, starts, 0, low + length - high, 0.0)[0]
    x = u * (first + second)
    if first > 0.0 and (x < first or second == 0.0):
        _, level, node, rest = _span(nodes, base, starts, low, high, x)
    else:
        _, level, node, rest = _span(nodes, base, starts, 0, low + length - high, max(0.0, x - first))
    return descend(nodes, base, starts, level, node, rest)


class SumForest:
    """The trees of all rings of a split; every ring has the same number of leaves.

    Args:
        capacity: leaves of one ring.
    """

    def __init__(self, capacity: int) -> None:
        sizes = [-(-capacity // FAN_OUT) * FAN_OUT]
        while sizes[-1] > 1:
            above = sizes[-1] // FAN_OUT
            sizes.append(1 if above == 1 else -(-above // FAN_OUT) * FAN_OUT)
        self.capacity = capacity
        self.starts: I64 = np.concatenate([[0], np.cumsum(sizes[:-1])]).astype(np.int64)
        self.region = sum(sizes)
        self.nodes: F64 = np.zeros(0, np.float64)

    def resize(self, rings: int) -> None:
        """Make room for `rings` rings; what is there stays."""
        grown: F64 = np.zeros(rings * self.region, np.float64)
        grown[: len(self.nodes)] = self.nodes
        self.nodes = grown

    def set(self, ring: int, slots: I64, values: NDArray[Any]) -> NDArray[np.bool_]:
        """Set leaves; returns which were accepted. NaN, infinite, negative and absurdly large values are refused and change nothing."""
        if len(slots) != len(values):
            raise ShapeError(f"{len(slots)} slots, {len(values)} values")
        accepted: NDArray[np.bool_] = (values >= 0.0) & (values <= MAX_PRIORITY)
        if not accepted.all():
            slots, values = slots[accepted], values[accepted]
        set_leaves(self.nodes, ring * self.region, self.starts, slots, values)
        return accepted

    def clear(self, ring: int) -> None:
        """All leaves of a ring to 0."""
        self.nodes[ring * self.region : (ring + 1) * self.region] = 0.0

    def mass(self, ring: int) -> float:
        """Sum of a ring's leaves."""
        return float(self.nodes[ring * self.region + self.starts[-1]])

    def masses(self, rings: I64) -> F64:
        """Sums of the leaves of rings (A,)."""
        found: F64 = self.nodes[rings * self.region + self.starts[-1]]
        return found

    def leaves(self, ring: int) -> F64:
        """The leaves of a ring, a view (capacity,). Writing to it breaks the sums: call `rebuild`."""
        return self.nodes[ring * self.region : ring * self.region + self.capacity]

    def find(self, ring: int, u: float) -> int:
        """The slot at the share u in [0, 1) of a ring's mass, which must be positive."""
        return find_leaf(self.nodes, ring * self.region, self.starts, u)

    def rebuild(self, ring: int) -> None:
        """Recompute every sum of a ring from its leaves."""
        _recompute(self.nodes, ring * self.region, self.starts, np.arange(self.capacity, dtype=np.int64))

    def check_valid(self, ring: int) -> None:
        """Raises InvalidState when a leaf is not allowed or a sum is off by more than 1e-9 of the whole."""
        leaves = self.leaves(ring)
        if not bool(((leaves >= 0.0) & (leaves <= MAX_PRIORITY)).all()):
            raise InvalidState(f"sum tree {ring}: a leaf is negative, NaN or infinite")
        total = float(leaves.sum())
        if abs(self.mass(ring) - total) > 1e-9 * total:
            raise InvalidState(f"sum tree {ring}: root {self.mass(ring)!r}, leaves {total!r}")
