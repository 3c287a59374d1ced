"""What one ring remembers besides its rows: which blocks, in what order, and where each lane stands."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from gorila.errors import GorilaError
from gorila.messages import F32, F64, I32, I64
from pipelines.nstep import U8

NONE = -1
UNKNOWN = 1 << 30  # rows since the episode's first row, where that row was never seen


@dataclass(slots=True)
class Tail:
    """The newest rows of a chain whose windows are still open: at most n, oldest first."""

    slot: I64
    reward: F64
    q_taken: F32
    q_max: F32
    flags: U8


@dataclass(slots=True, eq=False)
class Chain:
    """Rows of one lane without a gap, of one actor epoch: the only place where windows and stacks may reach.

    Attributes:
        epoch: the actor's.
        next_step: `first_step` of the block that continues the chain.
        live_rows: newest rows of the chain that are in the ring.
        since_first: rows between the episode's first row and the newest row; UNKNOWN or more where that first row was not seen.
        ended: the newest row carries terminated or truncated: a last row must follow.
        closed: the newest row is a last row: a first row must follow.
        last_block: number of the newest block.
        tail: rows whose windows are open.
    """

    epoch: int
    next_step: int
    live_rows: int = 0
    since_first: int = UNKNOWN
    ended: bool = False
    closed: bool = False
    last_block: int = NONE
    tail: Tail | None = None


class BlockOrder:
    """The blocks of one ring, oldest first: offsets ascending, so a row's block is found by bisection. A queue in two arrays."""

    def __init__(self) -> None:
        self._offset: I64 = np.zeros(16, np.int64)
        self._number: I32 = np.zeros(16, np.int32)
        self._head = 0
        self._tail = 0

    def __len__(self) -> int:
        return self._tail - self._head

    @property
    def offsets(self) -> I64:
        """Offsets, a view."""
        return self._offset[self._head : self._tail]

    @property
    def numbers(self) -> I32:
        """Block numbers, a view."""
        return self._number[self._head : self._tail]

    def append(self, offset: int, number: int) -> None:
        """The newest block."""
        if self._tail == len(self._offset):
            live = len(self)
            size = live + max(16, live // 4)
            offsets, numbers = np.zeros(size, np.int64), np.zeros(size, np.int32)
            offsets[:live], numbers[:live] = self.offsets, self.numbers
            self._offset, self._number, self._head, self._tail = offsets, numbers, 0, live
        self._offset[self._tail] = offset
        self._number[self._tail] = number
        self._tail += 1

    def oldest(self) -> int:
        """Number of the oldest block."""
        return int(self._number[self._head])

    def pop(self) -> int:
        """Take the oldest block out."""
        number = self.oldest()
        self._head += 1
        return number

    def nbytes(self) -> int:
        """Bytes of the two arrays."""
        return self._offset.nbytes + self._number.nbytes


class Gap(GorilaError):
    """A ring was handed an offset beyond the one it expects: the log between must be read first."""

    def __init__(self, partition: int, have: int, got: int) -> None:
        super().__init__(f"transitions partition {partition}: expected offset {have}, got {got}")
        self.partition, self.have, self.got = partition, have, got


@dataclass(frozen=True, slots=True)
class MemoryRules:
    """What decides which rows a ring holds and what they are worth (config sections replay and env)."""

    capacity_rows: int
    stack: int
    n_steps: int
    discount: float
    reward_transform: str
    alpha: float
    priority_floor: float


@dataclass(slots=True, eq=False)
class Ring:
    """One actor's rows. `head` is the number of rows ever appended; the newest row is in slot (head - 1) % capacity."""

    partition: int
    index: int
    next_offset: int
    head: int = 0
    live_rows: int = 0
    sampleable: int = 0
    order: BlockOrder = field(default_factory=BlockOrder)
    lanes: dict[int, Chain] = field(default_factory=dict)
