"""Two-level prioritised sampling: which rows make the next learner batch, and with what probability.

A learner batch of B rows has floor or ceil of local_fraction * B local rows, right on average; the rest are global.
    local row:  an actor uniformly among those with a sampleable row, then a row in its ring in proportion to p.
    global row: an actor in proportion to its mass M_a, then a row in its ring in proportion to p.
    P(i) = f * (1/A) * p_i / M_a + (1 - f) * p_i / M, at the instant of drawing (design section 5; prioritised replay: Schaul et al. 2016).
With `target_new_share` s each level draws a new row (among its actor's newest window) with probability s and an old one with 1 - s, in
proportion to p among them, and P is that mixture; a level without one of the two draws from the other. A ring whose priorities are all 0 is
drawn from uniformly.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from gorila.messages import F64, I64, Flags
from pipelines.compiled import compiled
from pipelines.replay_memory import ReplayMemory
from pipelines.ring import Ring
from pipelines.sum_tree import arc_mass, find_in_arc, find_leaf

NO_NEW_SHARE = -1.0


@dataclass(frozen=True, slots=True)
class SplitShare:
    """What a split draws of all batches (design section 5).

    Attributes:
        weight: w_j, share of all batches that this split draws.
        local_fraction: share of local rows in this split's batches.
    """

    weight: float
    local_fraction: float


def split_share(local_fraction: float, actors: int, all_actors: int, mass: float, all_mass: float) -> SplitShare:
    """w_j = f * A_j / A + (1 - f) * M_j / M, and local rows make f * (A_j / A) / w_j of this split's batches."""
    by_actors = local_fraction * actors / all_actors if all_actors else 0.0
    by_mass = (1.0 - local_fraction) * (
        mass / all_mass if all_mass > 0.0 else actors / all_actors if all_actors else 0.0
    )
    weight = by_actors + by_mass
    return SplitShare(weight, by_actors / weight if weight > 0.0 else local_fraction)


@dataclass(frozen=True, slots=True)
class DrawnRows:
    """A learner batch before its blocks are gathered: columns (B,).

    Attributes:
        at: int64, row in the pooled columns.
        slot: int64, slot in its ring.
        probability: float64, P(i).
        is_new: whether the row is among its actor's newest window.
        fell_back: whether some level had only new or only old rows while a new share was asked for.
    """

    at: I64
    slot: I64
    probability: F64
    is_new: Flags
    fell_back: bool


@compiled
def _pick(weights: F64, x: float) -> int:
    """Index at cumulative weight x; never one of weight 0 unless all are."""
    chosen = 0
    for i in range(len(weights)):
        if weights[i] > 0.0:
            chosen = i
            if x < weights[i]:
                break
            x -= weights[i]
    return chosen


@compiled
def _effective(share: float, new_mass: float, old_mass: float) -> float:
    """The new share a level can have: what is asked for, or 1 or 0 where one side is empty."""
    if new_mass <= 0.0:
        return 0.0
    return share if old_mass > 0.0 else 1.0


@compiled
def _draw(
    nodes: F64,
    region: int,
    starts: I64,
    capacity: int,
    index: I64,
    window_start: I64,
    window: int,
    counts: F64,
    new_share: float,
    local_rows: int,
    uniforms: F64,
    out_actor: I64,
    out_slot: I64,
    out_local: F64,
    out_global: F64,
    out_new: Flags,
) -> bool:
    """Draw rows: the first `local_rows` local, the rest global.

    Args:
        index: region of each of A active rings. window_start: slot where its newest `window` rows begin. counts: sampleable rows.
        uniforms: (3, B) in [0, 1): actor, row, new or old.
        out_actor, out_slot: what was drawn; slot -1 where the ring's priorities are all 0: the caller draws it uniformly.
        out_local: probability of the row given its actor. out_global: probability of the row on the global level.
    """
    actors = len(index)
    mass = np.empty(actors)
    new = np.zeros(actors)
    old = np.zeros(actors)
    mixed = new_share >= 0.0
    for a in range(actors):
        base = index[a] * region
        mass[a] = nodes[base + starts[-1]]
        if mixed:
            new[a] = arc_mass(nodes, base, starts, capacity, window_start[a], window)
            after = (window_start[a] + window) % capacity
            old[a] = arc_mass(nodes, base, starts, capacity, after, capacity - window)
    total, rows, total_new, total_old = mass.sum(), counts.sum(), new.sum(), old.sum()
    fell_back = False
    for b in range(uniforms.shape[1]):
        if b < local_rows:
            a = min(int(uniforms[0, b] * actors), actors - 1)
            share = _effective(new_share, new[a], old[a])
            take_new = uniforms[2, b] < share
        else:
            share = _effective(new_share, total_new, total_old)
            take_new = uniforms[2, b] < share
            if total <= 0.0:
                a = _pick(counts, uniforms[0, b] * rows)
            elif not mixed:
                a = _pick(mass, uniforms[0, b] * total)
            elif take_new:
                a = _pick(new, uniforms[0, b] * total_new)
            else:
                a = _pick(old, uniforms[0, b] * total_old)
        base = index[a] * region
        out_actor[b] = a
        if mass[a] <= 0.0:
            out_slot[b] = -1
            out_local[b] = 1.0 / counts[a]
            out_global[b] = 0.0 if total > 0.0 else 1.0 / rows
            continue
        if not mixed:
            slot = find_leaf(nodes, base, starts, uniforms[1, b])
        elif take_new:
            slot = find_in_arc(nodes, base, starts, capacity, window_start[a], window, uniforms[1, b])
        else:
            after = (window_start[a] + window) % capacity
            slot = find_in_arc(nodes, base, starts, capacity, after, capacity - window, uniforms[1, b])
        p = nodes[base + slot]
        is_new = (slot - window_start[a]) % capacity < window
        out_slot[b] = slot
        out_new[b] = is_new
        if not mixed:
            out_local[b] = p / mass[a]
            out_global[b] = p / total
            continue
        fell_back = fell_back or share != new_share
        of_actor = _effective(new_share, new[a], old[a])
        of_all = _effective(new_share, total_new, total_old)
        out_local[b] = of_actor * p / new[a] if is_new else (1.0 - of_actor) * p / old[a]
        out_global[b] = of_all * p / total_new if is_new else (1.0 - of_all) * p / total_old
    return fell_back


def draw_rows(
    memory: ReplayMemory,
    batch_rows: int,
    share: SplitShare,
    new_window_rows: int,
    new_share: float | None,
    rng: np.random.Generator,
) -> DrawnRows:
    """Draw a learner batch. There must be a sampleable row.

    Args:
        share: of this split; SplitShare(1, local_fraction) where it is alone.
        new_window_rows: an actor's newest rows counted as new.
        new_share: rules.md 8; None: off.
    """
    rings = memory.active()
    capacity = memory.rules.capacity_rows
    window = min(max(new_window_rows, 0), capacity)
    wanted = batch_rows * share.local_fraction
    local_rows = int(wanted) + int(rng.random() < wanted - int(wanted))  # unbiased rounding
    uniforms = rng.random((3, batch_rows))
    index: I64 = np.array([ring.index for ring in rings], np.int64)
    actor: I64 = np.empty(batch_rows, np.int64)
    slot: I64 = np.empty(batch_rows, np.int64)
    of_actor: F64 = np.empty(batch_rows)
    of_all: F64 = np.empty(batch_rows)
    is_new: Flags = np.zeros(batch_rows, np.bool_)
    window_start: I64 = np.array([(ring.head - window) % capacity for ring in rings], np.int64)
    fell_back = _draw(
        memory.forest.nodes,
        memory.forest.region,
        memory.forest.starts,
        capacity,
        index,
        window_start,
        window,
        np.array([ring.sampleable for ring in rings], np.float64),
        NO_NEW_SHARE if new_share is None else new_share,
        local_rows,
        uniforms,
        actor,
        slot,
        of_actor,
        of_all,
        is_new,
    )
    for b in np.flatnonzero(slot < 0).tolist():
        base = int(index[actor[b]]) * capacity
        rows = np.flatnonzero(memory.ahead[base : base + capacity])
        slot[b] = rows[int(uniforms[1, b] * len(rows))]
        is_new[b] = (slot[b] - window_start[actor[b]]) % capacity < window
    probability = share.weight * (share.local_fraction / len(rings) * of_actor + (1.0 - share.local_fraction) * of_all)
    return DrawnRows(index[actor] * capacity + slot, slot, probability, is_new, fell_back)


def row_probabilities(
    memory: ReplayMemory,
    ring: Ring,
    slots: I64,
    local_fraction: float,
    new_window_rows: int,
    new_share: float | None,
) -> F64:
    """P(i) that one draw of a split that holds all actors gives each of these sampleable rows: what `draw_rows` records, for rows nobody drew.

    Args:
        slots: of sampleable rows of `ring`.
        new_window_rows, new_share: as for `draw_rows`.
    """
    rings = memory.active()
    forest, capacity = memory.forest, memory.rules.capacity_rows
    window = min(max(new_window_rows, 0), capacity)
    p = forest.leaves(ring.index)[slots]
    masses: F64 = np.array([forest.mass(r.index) for r in rings])
    own, total = forest.mass(ring.index), float(masses.sum())
    counts = float(sum(r.sampleable for r in rings))
    if own <= 0.0:
        of_actor = np.full(len(slots), 1.0 / ring.sampleable)
        of_all = np.full(len(slots), 0.0 if total > 0.0 else 1.0 / counts)
    elif new_share is None:
        of_actor, of_all = p / own, p / total
    else:
        is_new = (slots - (ring.head - window)) % capacity < window
        new, old = _new_and_old(memory, ring, window)
        all_new, all_old = np.sum([_new_and_old(memory, r, window) for r in rings], axis=0)
        of_actor = _mixed(p, is_new, _effective(new_share, new, old), new, old)
        of_all = _mixed(p, is_new, _effective(new_share, all_new, all_old), all_new, all_old)
    found: F64 = local_fraction / len(rings) * of_actor + (1.0 - local_fraction) * of_all
    return found


def _new_and_old(memory: ReplayMemory, ring: Ring, window: int) -> tuple[float, float]:
    forest, capacity = memory.forest, memory.rules.capacity_rows
    base, first = ring.index * forest.region, (ring.head - window) % capacity
    new = arc_mass(forest.nodes, base, forest.starts, capacity, first, window)
    old = arc_mass(forest.nodes, base, forest.starts, capacity, (first + window) % capacity, capacity - window)
    return new, old


def _mixed(p: F64, is_new: Flags, share: float, new: float, old: float) -> F64:
    in_new = share * p / new if new > 0.0 else np.zeros(len(p))
    in_old = (1.0 - share) * p / old if old > 0.0 else np.zeros(len(p))
    found: F64 = np.where(is_new, in_new, in_old)
    return found
