"""How much an actor explores: a function of the global version (synchronised), or Ape-X's ladder."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from gorila.config import ActorSection
from gorila.schedules import linear

F64 = NDArray[np.float64]


def ladder(lanes: int, base: float, exponent: float) -> F64:
    """float64 (N,): base ** (1 + exponent * i / (N - 1)), Horgan et al. 2018, section 4.1; N = 1 gives base (case 17)."""
    return np.power(base, 1.0 + exponent * np.arange(lanes) / max(lanes - 1, 1))


class Exploration:
    """The epsilons of one actor's lanes.

    All actors at the same global version use the same epsilon, unless `actor.exploration = "ladder"`: then each lane of each actor keeps
    its own for ever, its place being actor * lanes + lane of all actor.count * lanes.
    """

    def __init__(self, actor: ActorSection, index: int) -> None:
        self._actor = actor
        self._rungs: F64 | None = None
        if actor.exploration == "ladder":
            rungs = ladder(max(actor.count, index + 1) * actor.lanes, actor.ladder_base, actor.ladder_exponent)
            self._rungs = rungs[index * actor.lanes : (index + 1) * actor.lanes]

    def epsilons(self, version: int) -> F64:
        """float64 (L,) at a global version (-1 before any is known)."""
        if self._rungs is not None:
            return self._rungs
        actor = self._actor
        epsilon = linear(version, actor.epsilon_start, actor.epsilon_end, actor.epsilon_versions)
        return np.full(actor.lanes, epsilon)
