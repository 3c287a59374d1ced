"""Tiny environments that write what they are into pixel (0, 0): used by the tests of lanes and actor through their import paths."""

from __future__ import annotations

from typing import Any

import gymnasium
import numpy as np


class Counting(gymnasium.Env[Any, Any]):
    """uint8 (6, 6). Pixel (0, 0) is the step t of the episode, (0, 1) the episode's number, (0, 2) the action that led here.

    An episode has `length` steps, or lengths taken in turn; it then terminates, or truncates. Reward of a step is t.
    """

    def __init__(self, length: int = 5, lengths: list[int] | None = None, ends_by: str = "terminated") -> None:
        self.observation_space = gymnasium.spaces.Box(0, 255, (6, 6), np.uint8)
        self.action_space = gymnasium.spaces.Discrete(4, start=10)
        self.lengths = lengths or [length]
        self.ends_by = ends_by
        self.t, self.episode, self.actions_seen = 0, -1, []

    def _observation(self, action: int) -> Any:
        pixels = np.zeros((6, 6), np.uint8)
        pixels[0, :3] = self.t, self.episode, action
        return pixels

    def reset(self, *, seed: int | None = None, options: Any = None) -> tuple[Any, dict[str, Any]]:
        super().reset(seed=seed)
        self.t = 0
        self.episode += 1
        return self._observation(255), {}

    def step(self, action: Any) -> tuple[Any, float, bool, bool, dict[str, Any]]:
        assert self.t < self.lengths[self.episode % len(self.lengths)], "stepped beyond its end"
        assert 10 <= action < 14
        self.t += 1
        over = self.t == self.lengths[self.episode % len(self.lengths)]
        return (
            self._observation(int(action) - 10),
            float(self.t),
            over and self.ends_by == "terminated",
            over and self.ends_by == "truncated",
            {},
        )


def make(**kwargs: Any) -> Counting:
    """`env.id = "counting_env:make"`."""
    return Counting(**kwargs)


class Brighter(gymnasium.ObservationWrapper[Any, Any, Any]):
    """Sets pixel (5, 5): shows that a wrapper was applied."""

    def observation(self, observation: Any) -> Any:
        observation[5, 5] = 200
        return observation


class Spaced(gymnasium.Env[Any, Any]):
    """Any spaces."""

    def __init__(self, observation: str = "box", action: str = "discrete") -> None:
        spaces = gymnasium.spaces
        box = spaces.Box(-1, 1, (3,), np.float64)
        self.observation_space = {
            "box": box,
            "dict": spaces.Dict(a=box),
            "tuple": spaces.Tuple([box]),
            "text": spaces.Text(4),
        }[observation]
        self.action_space = {
            "discrete": spaces.Discrete(2),
            "box": box,
            "multi": spaces.MultiDiscrete([2, 2]),
        }[action]


def spaced(**kwargs: Any) -> Spaced:
    """`env.id = "counting_env:spaced"`."""
    return Spaced(**kwargs)
