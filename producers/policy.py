"""Acting: states in, epsilon-greedy actions out, with the Q values a transition carries. Torch is imported here, never in actor.py."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gorila.batch_statistics import ActedStatistics
from gorila.network import QNetwork, load_flat

Array = NDArray[Any]


@dataclass(slots=True)
class Acted:
    """What was chosen in each lane.

    Attributes:
        action: int64 (L,), the one executed.
        q_taken: float32 (L,), Q of the action executed, greedy or not.
        q_max: float32 (L,), max over actions.
    """

    action: NDArray[np.int64]
    q_taken: NDArray[np.float32]
    q_max: NDArray[np.float32]


class EpsilonGreedy:
    """A Q-network on the CPU and its random numbers. One torch thread: roles on one machine must not fight for cores.

    Every call draws 2 L numbers, whatever epsilon is: the stream does not depend on the schedule.
    """

    def __init__(self, network: QNetwork, actions: int, rng: np.random.Generator) -> None:
        torch.set_num_threads(1)
        self._network = network.eval()
        self._statistics = ActedStatistics(network)  # of the states acted on, where the network has BatchNorm
        self._actions = actions
        self._rng = rng

    def load(self, flat: NDArray[np.float32]) -> None:
        """Use these weights, float32 (P,), copied. Raises ShapeError."""
        load_flat(self._network, flat)

    def act(self, states: Array, epsilon: NDArray[np.float64]) -> Acted:
        """Choose in states (L, K, ...) or (L, ...) with epsilon (L,). `states` is only read, and may change afterwards."""
        with torch.inference_mode():
            q_LA: NDArray[np.float32] = self._network(torch.from_numpy(states)).numpy()
        lanes = np.arange(len(q_LA))
        greedy = q_LA.argmax(axis=1)
        uniform, other = self._rng.random((2, len(q_LA)))
        action = np.where(uniform < epsilon, (other * self._actions).astype(np.int64), greedy)
        return Acted(action, q_LA[lanes, action], q_LA[lanes, greedy])
