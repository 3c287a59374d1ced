"""Whole episodes out of a recording's blocks. Pure.

A partition interleaves its actor's lanes, and a block may hold the end of one episode and the beginning of the next (rules.md 1). What is not whole,
because the recording begins or ends in it, the actor was killed, or a block is missing, is dropped and counted.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gorila.environment_facts import EnvironmentFacts
from gorila.errors import BadRecord
from gorila.messages import TransitionBlock
from gorila.observations import inflate

_COLUMNS = ("action", "reward", "terminated", "truncated")


@dataclass(frozen=True, slots=True)
class WholeEpisode:
    """T steps: observations (T + 1, ...), action int32, reward float32 (raw), terminated and truncated bool, all (T,)."""

    actor_id: str
    lane: int
    observations: NDArray[Any]
    action: NDArray[np.int32]
    reward: NDArray[np.float32]
    terminated: NDArray[np.bool_]
    truncated: NDArray[np.bool_]


@dataclass
class _Open:
    """An episode that began and has not ended; `step` is its next row's."""

    epoch: int
    step: int
    frames: list[NDArray[Any]] = field(default_factory=list)
    columns: dict[str, list[NDArray[Any]]] = field(default_factory=lambda: {name: [] for name in _COLUMNS})


class EpisodeJoiner:
    """Joins one partition's blocks, given in offset order. `dropped` counts episodes begun or ended that are not whole."""

    def __init__(self, facts: EnvironmentFacts) -> None:
        self._facts = facts
        self._open: dict[int, _Open] = {}
        self.dropped = 0

    def take(self, block: TransitionBlock) -> Iterator[WholeEpisode]:
        """Episodes that end in this block."""
        frames = self._frames(block)
        current = self._open.pop(block.lane, None)
        if current is not None and (
            frames is None or (current.epoch, current.step) != (block.actor_epoch, block.first_step)
        ):
            self.dropped += 1
            current = None
        if frames is None:
            return
        start, rows = 0, len(block.action)
        while start < rows:
            if block.is_first[start]:
                current = _Open(block.actor_epoch, block.first_step + start)
            ends = np.flatnonzero(block.is_last[start:])
            stop = start + int(ends[0]) + 1 if len(ends) else rows
            if current is not None:
                current.frames.append(frames[start:stop])
                for name in _COLUMNS:
                    current.columns[name].append(getattr(block, name)[start:stop])
                current.step += stop - start
            if len(ends):
                if current is None:
                    self.dropped += 1
                else:
                    yield from self._whole(block, current)
                current = None
            start = stop
        if current is not None:
            self._open[block.lane] = current

    def _frames(self, block: TransitionBlock) -> NDArray[Any] | None:
        observations = block.observations
        if (observations.dtype, observations.shape) != (self._facts.observation_dtype, self._facts.observation_shape):
            return None
        try:
            return inflate(observations)
        except BadRecord:
            return None

    def _whole(self, block: TransitionBlock, ended: _Open) -> Iterator[WholeEpisode]:
        frames = np.concatenate(ended.frames)
        columns = {name: np.concatenate(parts)[:-1] for name, parts in ended.columns.items()}
        if len(frames) > 1:  # an episode without a step has nothing to learn from
            yield WholeEpisode(block.actor_id, block.lane, frames, **columns)

    def end(self) -> None:
        """The partition ends here: what is open is not whole."""
        self.dropped += len(self._open)
        self._open.clear()
