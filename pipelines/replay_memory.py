"""The replay memory of a split: a ring of rows for each actor (= transitions partition), filled from the log, pixels left compressed.

Rules of this file:
1. A transition is (partition, offset, row). A slot is an accident of storage and never leaves this package.
2. A ring takes offsets in order: below `next_offset` ignored, equal appended, above raises Gap so that the log fills it first.
3. Whole blocks leave, oldest first, when the next would exceed the capacity.
4. A row is sampleable once its stack and its window are in the ring; it stops being so when part of its stack leaves.
5. Windows and stacks stay within a Chain: never over a lane's gap, another epoch, or an episode's end.
6. What a ring holds is a function of the log alone, so a ring rebuilt from the log is the ring that was lost.
"""

from __future__ import annotations

import numpy as np

from gorila.errors import BadRecord, InvalidState
from gorila.messages import F32, F64, I32, I64, TransitionBlock
from gorila.observations import ObservationBlock
from pipelines.block_table import BlockTable
from pipelines.nstep import LAST, U8, n_step_columns, pack_flags, priorities_of, transform_rewards
from pipelines.ring import NONE, Chain, MemoryRules, Ring, Tail
from pipelines.ring_kernels import STEPS, add_rows, drop_rows, finish_rows
from pipelines.sum_tree import SumForest


class ReplayMemory:
    """All rings of a split. Counters: `refused` (rows with a return or priority that is not finite), `evicted` (rows), `memory_bytes` (pixels)."""

    def __init__(self, rules: MemoryRules) -> None:
        self.rules = rules
        self.rings: dict[int, Ring] = {}
        self.forest = SumForest(rules.capacity_rows)
        self.blocks = BlockTable()
        self.block: I32 = np.zeros(0, np.int32)
        self.action: I32 = np.zeros(0, np.int32)
        self.n_step_return: F32 = np.zeros(0, np.float32)
        self.back: U8 = np.zeros(0, np.uint8)
        self.ahead: U8 = np.zeros(0, np.uint8)
        self.refused = 0
        self.evicted = 0
        self.memory_bytes = 0
        self._free_regions: list[int] = []
        self._forms: dict[tuple[str, tuple[int, ...], str], tuple[str, tuple[int, ...], str]] = {}

    # Rings

    def open(self, partition: int, next_offset: int) -> Ring:
        """An empty ring which expects `next_offset`; one that was there is dropped."""
        if partition in self.rings:
            self.drop(partition)
        if not self._free_regions:
            self._grow()
        ring = Ring(partition, self._free_regions.pop(), next_offset)
        self.rings[partition] = ring
        return ring

    def drop(self, partition: int) -> None:
        """Forget a ring and its rows."""
        ring = self.rings.pop(partition)
        for number in ring.order.numbers.tolist():
            self._release(number)
        self.forest.clear(ring.index)
        base = ring.index * self.rules.capacity_rows
        self.ahead[base : base + self.rules.capacity_rows] = 0
        self._free_regions.append(ring.index)

    def _grow(self) -> None:
        capacity = self.rules.capacity_rows
        old = len(self.block) // capacity
        # Rows never written cost no memory: the pages are not touched.
        regions = max(1, 2 * old)
        for name in ("block", "action", "n_step_return", "back", "ahead"):
            column = getattr(self, name)
            grown = np.zeros(regions * capacity, column.dtype)
            grown[: len(column)] = column
            setattr(self, name, grown)
        self.forest.resize(regions)
        self._free_regions.extend(range(regions - 1, old - 1, -1))

    # Rows

    def insert(self, ring: Ring, offset: int, timestamp_ms: int, block: TransitionBlock) -> int:
        """Append a block; returns its transitions (rows with an action).

        Raises:
            BadRecord: more rows than the ring holds, or rows that do not make whole episodes. Nothing was changed.
        """
        rules = self.rules
        rows = block.observations.count
        if rows > rules.capacity_rows:
            raise BadRecord(f"a block of {rows} rows, the ring holds {rules.capacity_rows}")
        flags: U8 = np.empty(rows, np.uint8)
        if not pack_flags(block.is_first, block.is_last, block.terminated, block.truncated, flags):
            raise BadRecord(
                "rows do not make whole episodes: is_first, is_last, terminated and truncated contradict each other"
            )
        while ring.live_rows + rows > rules.capacity_rows:
            self.evict_oldest(ring)
        chain = self._chain(ring, block, bool(flags[0] & LAST))
        number = self._append(ring, chain, offset, timestamp_ms, block)
        chain.since_first = add_rows(
            self.block,
            self.action,
            self.back,
            self.ahead,
            ring.index * rules.capacity_rows,
            rules.capacity_rows,
            int(self.blocks.start[number]),
            number,
            rules.stack,
            block.action,
            flags,
            chain.since_first,
        )
        self._finish(ring, chain, self._window(chain, number, block, flags))
        chain.ended = bool(block.terminated[-1] or block.truncated[-1])
        chain.closed = bool(block.is_last[-1])
        return rows - int(np.count_nonzero(block.is_last))

    def _chain(self, ring: Ring, block: TransitionBlock, starts_with_last: bool) -> Chain:
        """The chain this block continues, or a new one where it cannot (rule 5)."""
        chain = ring.lanes.get(block.lane)
        if (
            chain is None
            or chain.epoch != block.actor_epoch
            or chain.next_step != block.first_step
            or chain.ended != starts_with_last
            or chain.closed != bool(block.is_first[0])
        ):
            chain = Chain(block.actor_epoch, block.first_step)
            ring.lanes[block.lane] = chain
        return chain

    def _append(self, ring: Ring, chain: Chain, offset: int, timestamp_ms: int, block: TransitionBlock) -> int:
        rows = block.observations.count
        blocks = self.blocks
        number = blocks.allocate()
        blocks.start[number] = ring.head % self.rules.capacity_rows
        blocks.count[number] = rows
        blocks.after[number] = NONE
        blocks.before[number] = NONE
        if chain.live_rows:
            blocks.before[number] = chain.last_block
            blocks.after[chain.last_block] = number
        blocks.partition[number] = ring.partition
        blocks.offset[number] = offset
        blocks.version[number] = block.weights_version
        blocks.timestamp_ms[number] = timestamp_ms
        seen = block.observations
        form = (seen.dtype, seen.shape, seen.codec)
        dtype, shape, codec = self._forms.setdefault(form, form)  # one copy of the words for all blocks
        blocks.observations[number] = ObservationBlock(dtype, shape, seen.count, codec, seen.data)
        blocks.chains[number] = chain
        ring.order.append(offset, number)
        ring.head += rows
        ring.live_rows += rows
        chain.live_rows += rows
        chain.next_step += rows
        chain.last_block = number
        self.memory_bytes += len(seen.data)
        return number

    def _window(self, chain: Chain, number: int, block: TransitionBlock, flags: U8) -> Tail:
        """The chain's open rows followed by the block's."""
        rows = len(flags)
        slots = (int(self.blocks.start[number]) + np.arange(rows)) % self.rules.capacity_rows
        rewards = transform_rewards(block.reward, self.rules.reward_transform)
        tail = chain.tail
        if tail is None:
            return Tail(slots, rewards, block.q_taken, block.q_max, flags)
        return Tail(
            np.concatenate((tail.slot, slots)),
            np.concatenate((tail.reward, rewards)),
            np.concatenate((tail.q_taken, block.q_taken)),
            np.concatenate((tail.q_max, block.q_max)),
            np.concatenate((tail.flags, flags)),
        )

    def _finish(self, ring: Ring, chain: Chain, window: Tail) -> None:
        rules = self.rules
        steps, returns, discounts, errors = n_step_columns(
            window.reward, window.q_taken, window.q_max, window.flags, rules.n_steps, rules.discount
        )
        rows = len(steps)
        base = ring.index * rules.capacity_rows
        slots: I64 = np.empty(rows, np.int64)
        finite: F64 = np.empty(rows, np.float64)
        finished, refused = finish_rows(
            self.n_step_return,
            self.back,
            self.ahead,
            base,
            chain.live_rows,
            window.slot,
            steps,
            returns,
            discounts,
            errors,
            slots,
            finite,
        )
        slots = slots[:finished]
        accepted = self.forest.set(
            ring.index, slots, priorities_of(finite[:finished], rules.priority_floor, rules.alpha)
        )
        good = int(np.count_nonzero(accepted))
        if good < finished:
            self.ahead[base + slots[~accepted]] = 0
        ring.sampleable += good
        self.refused += refused + finished - good
        chain.tail = self._open_rows(window, rules.n_steps)

    @staticmethod
    def _open_rows(window: Tail, n_steps: int) -> Tail | None:
        """The newest rows, at most n, after the newest last row: windows that later rows may complete."""
        first = max(0, len(window.flags) - n_steps)
        last_rows = np.flatnonzero(window.flags[first:] & LAST)
        if len(last_rows):
            first += int(last_rows[-1]) + 1
        if first == len(window.flags):
            return None
        return Tail(
            window.slot[first:].copy(),
            window.reward[first:].copy(),
            window.q_taken[first:].copy(),
            window.q_max[first:].copy(),
            window.flags[first:].copy(),
        )

    # Leaving

    def evict_oldest(self, ring: Ring) -> int:
        """The oldest block leaves; returns its rows."""
        rules = self.rules
        number = ring.order.pop()
        rows = int(self.blocks.count[number])
        slots: I64 = np.empty(rows + rules.stack, np.int64)
        dropped = drop_rows(
            self.back,
            self.ahead,
            ring.index * rules.capacity_rows,
            rules.capacity_rows,
            rules.stack,
            self.blocks.start,
            self.blocks.count,
            self.blocks.after,
            number,
            slots,
        )
        self.forest.set(ring.index, slots[:dropped], np.zeros(dropped))
        ring.sampleable -= dropped
        ring.live_rows -= rows
        self.evicted += rows
        chain = self.blocks.chains[number]
        if chain is not None:
            chain.live_rows -= rows
        self._release(number)
        return rows

    def _release(self, number: int) -> None:
        observations = self.blocks.observations[number]
        if observations is not None:
            self.memory_bytes -= len(observations.data)
        self.blocks.release(number)

    # Priorities

    def learned(self, ring: Ring, offset: I64, row: I32, td_error: F32) -> int:
        """Apply a learner's |TD errors| to rows of one ring, the last of equal rows winning; returns how many rows are no longer sampleable."""
        if not len(ring.order):
            return len(row)
        offsets = ring.order.offsets
        place = np.minimum(np.searchsorted(offsets, offset), len(offsets) - 1)
        numbers = ring.order.numbers[place]
        known = (offsets[place] == offset) & (row >= 0) & (row < self.blocks.count[numbers])
        slots = (self.blocks.start[numbers].astype(np.int64) + row) % self.rules.capacity_rows
        known &= self.ahead[ring.index * self.rules.capacity_rows + slots] != 0
        values = priorities_of(td_error[known], self.rules.priority_floor, self.rules.alpha)
        accepted = self.forest.set(ring.index, slots[known], values)
        self.refused += int(len(accepted) - np.count_nonzero(accepted))
        return int(len(row) - np.count_nonzero(known))

    # Looking

    def active(self) -> list[Ring]:
        """Rings with a sampleable row, in a fixed order."""
        return [ring for ring in self.rings.values() if ring.sampleable]

    def oldest_timestamp_ms(self) -> int | None:
        """Append time of the oldest block held, over all rings."""
        times = [int(self.blocks.timestamp_ms[ring.order.oldest()]) for ring in self.rings.values() if len(ring.order)]
        return min(times, default=None)

    def nbytes(self) -> int:
        """Bytes of columns, trees and tables; not of the pixels and their Python objects."""
        columns = (self.block, self.action, self.n_step_return, self.back, self.ahead, self.forest.nodes)
        return (
            sum(c.nbytes for c in columns) + self.blocks.nbytes() + sum(r.order.nbytes() for r in self.rings.values())
        )

    def live(self, ring: Ring) -> tuple[bytes, bytes]:
        """What recovery must restore, independent of slots: the (offset, rows) of each block, and every leaf, oldest row first."""
        numbers = ring.order.numbers
        slots = (ring.head - ring.live_rows + np.arange(ring.live_rows)) % self.rules.capacity_rows
        identity = np.stack((ring.order.offsets, self.blocks.count[numbers].astype(np.int64)))
        return identity.tobytes(), self.forest.leaves(ring.index)[slots].tobytes()

    def check_valid(self) -> None:
        """Raises InvalidState."""
        capacity = self.rules.capacity_rows
        for ring in self.rings.values():
            name = f"ring {ring.partition}"
            ahead = self.ahead[ring.index * capacity : (ring.index + 1) * capacity]
            sampleable = ahead & STEPS != 0
            numbers = ring.order.numbers
            self.forest.check_valid(ring.index)
            if int(np.count_nonzero(sampleable)) != ring.sampleable:
                raise InvalidState(
                    f"{name}: {ring.sampleable} sampleable rows counted, {np.count_nonzero(sampleable)} found"
                )
            if bool((self.forest.leaves(ring.index)[~sampleable] != 0.0).any()):
                raise InvalidState(f"{name}: a row that is not sampleable has a priority")
            if int(self.blocks.count[numbers].sum()) != ring.live_rows or ring.live_rows > capacity:
                raise InvalidState(f"{name}: {ring.live_rows} rows, its blocks have {self.blocks.count[numbers].sum()}")
            if bool((np.diff(ring.order.offsets) <= 0).any()) or (
                len(ring.order) and ring.order.offsets[-1] >= ring.next_offset
            ):
                raise InvalidState(f"{name}: offsets are not in order below {ring.next_offset}")
