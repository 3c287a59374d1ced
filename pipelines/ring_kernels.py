"""Compiled loops over the rows of a ring. All columns are pooled over rings: row `base + slot`, slot modulo the ring's capacity.

Two bytes a row say all about its window: `back` (rows to the episode's first row, at most stack - 1) and `ahead` (k; OVER added
where the episode terminated, so that the discount is 0). `ahead` 0 means: not sampleable.
"""

from __future__ import annotations

import numpy as np

from gorila.messages import F32, F64, I32, I64
from gorila.observations import frame_indices
from pipelines.compiled import compiled
from pipelines.nstep import FIRST, U8

OVER = 0x80
STEPS = 0x7F
POSITIONS = 1 << 20  # blocks in one record at most, by far
_LARGEST_F32 = float(np.finfo(np.float32).max)

# The one stacking rule (gorila/observations.py), compiled: actor, learner and pipeline cannot disagree.
_frame_indices = compiled(frame_indices)


@compiled
def add_rows(
    block_column: I32,
    action_column: I32,
    back_column: U8,
    ahead_column: U8,
    base: int,
    capacity: int,
    start: int,
    number: int,
    stack: int,
    action: I32,
    flags: U8,
    since_first: int,
) -> int:
    """Write a block's rows from slot `start` on, none sampleable yet. Returns rows since the first row at its newest row."""
    for i in range(len(action)):
        since_first = 0 if flags[i] & FIRST else since_first + 1
        at = base + (start + i) % capacity
        block_column[at] = number
        action_column[at] = action[i]
        back_column[at] = min(since_first, stack - 1)
        ahead_column[at] = 0
    return since_first


@compiled
def finish_rows(
    return_column: F32,
    back_column: U8,
    ahead_column: U8,
    base: int,
    live_rows: int,
    slots: I64,
    steps: U8,
    n_step_return: F64,
    discount: F64,
    error: F64,
    out_slot: I64,
    out_error: F64,
) -> tuple[int, int]:
    """Make rows sampleable whose window is complete and whose stack is in the ring.

    `slots` are the newest rows of a chain, of which the newest `live_rows` are in the ring. Returns (rows finished, their slots and errors
    in the outputs; rows refused because their return or error is not finite).
    """
    rows = len(slots)
    finished = 0
    refused = 0
    for t in range(rows):
        before = live_rows - (rows - t)  # rows of the chain in the ring before row t; negative: it has left itself
        at = base + slots[t]
        if before < 0 or steps[t] == 0 or back_column[at] > before:
            continue
        if not (abs(n_step_return[t]) <= _LARGEST_F32 and np.isfinite(error[t])):
            refused += 1
            continue
        return_column[at] = n_step_return[t]
        ahead_column[at] = steps[t] if discount[t] != 0.0 else steps[t] | OVER
        out_slot[finished] = slots[t]
        out_error[finished] = error[t]
        finished += 1
    return finished, refused


@compiled
def drop_rows(
    back_column: U8,
    ahead_column: U8,
    base: int,
    capacity: int,
    stack: int,
    start: I32,
    count: I32,
    after: I32,
    number: int,
    out_slot: I64,
) -> int:
    """The oldest block of a chain leaves: its rows, and later rows whose stack reaches into it, are no longer sampleable.

    Returns how many were, their slots in `out_slot` (room for count + stack - 1).
    """
    dropped = 0
    for i in range(count[number]):
        slot = (start[number] + i) % capacity
        if ahead_column[base + slot]:
            ahead_column[base + slot] = 0
            out_slot[dropped] = slot
            dropped += 1
    distance = 0
    follower = after[number]
    while follower >= 0 and distance < stack - 1:
        for i in range(min(count[follower], stack - 1 - distance)):
            distance += 1
            slot = (start[follower] + i) % capacity
            if ahead_column[base + slot] and back_column[base + slot] >= distance:
                ahead_column[base + slot] = 0
                out_slot[dropped] = slot
                dropped += 1
        follower = after[follower]
    return dropped


@compiled
def _locate(
    number: int,
    row: int,
    count: I32,
    before: I32,
    after: I32,
    mark: I64,
    stamp: int,
    first_frame: I64,
    blocks: I32,
    found: int,
) -> tuple[int, int]:
    """(Index into the record's frames of the row `row` places after the first row of a block, blocks found so far)."""
    while row < 0:
        number = before[number]
        row += count[number]
    while row >= count[number]:
        row -= count[number]
        number = after[number]
    position = mark[number] - stamp * POSITIONS
    if not 0 <= position < POSITIONS:
        position = found
        mark[number] = stamp * POSITIONS + position
        blocks[position] = number
        first_frame[position + 1] = first_frame[position] + count[number]
        found += 1
    return first_frame[position] + row, found


@compiled
def lay_out_frames(
    numbers: I32,
    rows: I32,
    back: U8,
    ahead: U8,
    stack: int,
    count: I32,
    before: I32,
    after: I32,
    mark: I64,
    stamp: int,
    frames_tm1: I32,
    frames_t: I32,
    blocks: I32,
) -> int:
    """Which blocks a record's rows need, in the order first needed, and where each of their frames is when those are laid end to end.

    Args:
        numbers, rows: block number and row in it of each drawn row (R,).
        stamp: higher than that of any record before.
        frames_tm1, frames_t: outputs (R * stack,), oldest frame first.
        blocks: output, room for R * (2 * stack) numbers.

    Returns:
        How many blocks.
    """
    first_frame = np.zeros(len(blocks) + 1, np.int64)
    found = 0
    for i in range(len(numbers)):
        k = ahead[i] & STEPS
        at = i * stack
        for row in _frame_indices(rows[i], back[i], stack):
            frames_tm1[at], found = _locate(
                numbers[i], row, count, before, after, mark, stamp, first_frame, blocks, found
            )
            at += 1
        at = i * stack
        for row in _frame_indices(rows[i] + k, back[i] + k, stack):
            frames_t[at], found = _locate(
                numbers[i], row, count, before, after, mark, stamp, first_frame, blocks, found
            )
            at += 1
    return found
