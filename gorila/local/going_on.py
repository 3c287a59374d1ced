"""The options of `gorila train --resume`: whether a run is to go on or to be forked, and what contradicts that."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING

from gorila.errors import UsageError

if TYPE_CHECKING:
    from gorila.local.summary import Summary


class Memory(StrEnum):
    """What a fork's replay memory begins with: RUN's transitions up to the point, or nothing."""

    COPY = "copy"
    EMPTY = "empty"


@dataclass(frozen=True, slots=True)
class GoingOn:
    """What was asked for. `run` is empty where nothing was."""

    run: str
    at: int | None = None
    at_version: int | None = None
    new: str = ""
    memory: Memory = Memory.COPY

    def check(self, other: Mapping[str, object]) -> bool:
        """Whether a run is to go on at all.

        Args:
            other: option → what was given, of those that a run which is there decides itself.

        Raises:
            UsageError: options that do not go together.
        """
        points = (self.at is not None) + (self.at_version is not None)
        if not self.run:
            if self.new or points or self.memory is Memory.EMPTY:
                raise UsageError("--at, --at-version, --as and --memory go with --resume RUN")
            return False
        for name, value in other.items():
            if value:
                raise UsageError(f"{name} does not go with --resume: the run has its own")
        if self.new and points != 1:
            raise UsageError("--as NEW forks RUN: --at OFFSET or --at-version V says where")
        if not self.new and (points or self.memory is Memory.EMPTY):
            raise UsageError("going back is a fork, a run of its own: --as NEW names it")
        return True

    def train(self, sets: Sequence[str], steps: int, updates: int, root: Path) -> Summary:
        """Raises what resume.py and fork.py raise."""
        if not self.new:
            from gorila.local.resume import resume

            return resume(self.run, sets=sets, steps=steps, updates=updates, root=root)
        from gorila.local.fork import fork
        from gorila.weights_history import Moment

        moment, empty = Moment(self.at_version, self.at), self.memory is Memory.EMPTY
        return fork(self.run, self.new, moment, sets=sets, steps=steps, updates=updates, empty_memory=empty, root=root)
