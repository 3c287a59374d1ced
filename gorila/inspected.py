"""What `gorila replay inspect` shows of a replay memory: rows of highest priority, as data between the pipeline's code and the screen."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, slots=True)
class InspectedRow:
    """One transition.

    Attributes:
        partition, offset, row: its identity: where its block is in `transitions`, and which row of it.
        actor, lane, step: who wrote it, and the lane's step it was.
        action, n_step_return, discount: as a batch carries them; discount is 0 where the episode terminated.
        steps: k, rows from the state to the bootstrap's.
        version: of the weights that acted.
        priority: p = (|TD error| + floor) ** alpha, the learner's where it has learned the row.
        probability: P(i) of a draw from all rings.
        state, after: (K, ...) observations, as a learner stacks them.
    """

    partition: int
    offset: int
    row: int
    actor: str
    lane: int
    step: int
    action: int
    n_step_return: float
    discount: float
    steps: int
    version: int
    priority: float
    probability: float
    state: NDArray[Any] = field(repr=False)
    after: NDArray[Any] = field(repr=False)

    def fields(self) -> dict[str, object]:
        """Everything but the observations, plain."""
        return {name: getattr(self, name) for name in self.__slots__ if name not in ("state", "after")}


@dataclass(frozen=True, slots=True)
class Inspection:
    """Of one memory.

    Attributes:
        what: where it was read from.
        actors: with a sampleable row. population: sampleable rows. mass: sum of all priorities.
        top: the rows asked for, highest priority first; equal ones by partition, offset, row.
    """

    what: str
    actors: int
    population: int
    mass: float
    top: tuple[InspectedRow, ...]

    @property
    def shows_images(self) -> bool:
        """Whether the observations can be drawn: uint8, two or three dimensions."""
        return bool(self.top) and self.top[0].state.dtype == np.uint8 and self.top[0].state[0].ndim in (2, 3)
