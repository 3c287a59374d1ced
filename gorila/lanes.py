"""Environments that step together, behind one small interface.

Rules of this file:
1. A step answers for every lane. A lane whose episode ended on the last call begins its next one now: its action is ignored, its reward
   is 0, `is_first` is set. So the final observation of an episode, terminated or truncated, is always the real one, and every call gives
   each lane exactly one observation: T + 1 calls an episode (rules.md 1, cases.md 12 and 13).
2. Rewards are raw (case 15). Observations are uint8 or float32 arrays without a stack; `gorila.observations` makes the only stacks.
3. One seed a lane, used for its first episode; the later ones follow from the environment's own generator.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Flags = NDArray[np.bool_]


@dataclass(slots=True)
class LaneStep:
    """What one call of `Lanes.step` brought, one entry a lane.

    Attributes:
        observations: (L, ...), uint8 or float32; valid until the next call: copy what you keep.
        reward: float32 (L,), raw, of the action taken.
        terminated, truncated: bool (L,), never both.
        is_first: bool (L,), a new episode began here and the action was ignored.
    """

    observations: Array
    reward: NDArray[np.float32]
    terminated: Flags
    truncated: Flags
    is_first: Flags


class Lanes(Protocol):
    """L environments that step together."""

    lanes: int
    actions: int
    observation_shape: tuple[int, ...]
    observation_dtype: np.dtype[Any]

    def reset(self) -> Array:
        """First observations (L, ...) of every lane."""
        ...

    def step(self, actions: NDArray[np.int64]) -> LaneStep:
        """Actions (L,), each in 0 .. actions - 1; those of lanes whose episode has ended are ignored."""
        ...

    def close(self) -> None:
        """Free what the environments hold."""
        ...


class AtariLanes:
    """Atari through ale-py's C++ AtariVectorEnv 0.12.1, with its traps closed (rules.md 4)."""

    def __init__(self, vector_env: Any, seeds: Sequence[int], max_episode_steps: int) -> None:
        self._env = vector_env
        self.lanes = len(seeds)
        self._seeds = np.array(seeds, dtype=np.int64)
        self._limit = max_episode_steps
        self.actions = int(self._env.single_action_space.n)
        self.observation_shape = tuple(self._env.single_observation_space.shape[1:])
        self.observation_dtype = np.dtype(np.uint8)
        self._episode_steps = np.zeros(self.lanes, dtype=np.int64)
        self._ended = np.zeros(self.lanes, dtype=np.bool_)
        self._cut = np.zeros(self.lanes, dtype=np.bool_)

    def reset(self) -> Array:
        observations, _ = self._env.reset(seed=self._seeds)
        self._episode_steps[:] = 0
        self._ended[:] = False
        self._cut[:] = False
        frames: Array = observations[:, 0]
        return frames

    def step(self, actions: NDArray[np.int64]) -> LaneStep:
        is_first = self._ended.copy()
        observations, reward, terminated, _, _ = self._env.step(actions)
        frames = observations[:, 0]
        if self._cut.any():
            # The environment does not know that we truncated these lanes; the step it just took there is thrown away. The masked reset
            # leaves the other lanes alone, and also undoes the autoreset of a lane which that step ended.
            frames[self._cut] = self._env.reset(options={"reset_mask": self._cut})[0][self._cut, 0]
        terminated = terminated & ~is_first
        raw = reward.astype(np.float32)  # arrives as int32
        raw[is_first] = 0.0
        self._episode_steps += 1
        self._episode_steps[is_first] = 0
        truncated = self._episode_steps >= self._limit
        truncated &= ~terminated
        self._cut = truncated
        self._ended = terminated | truncated
        return LaneStep(frames, raw, terminated, truncated, is_first)

    def close(self) -> None:
        self._env.close()


class GymnasiumLanes:
    """Gymnasium environments stepped one after another: for a small environment faster than any pool of processes."""

    def __init__(
        self,
        environments: Sequence[Any],
        seeds: Sequence[int],
        max_episode_steps: int,
        shape: tuple[int, ...],
        dtype: np.dtype[Any],
    ) -> None:
        self._envs = list(environments)
        self.lanes = len(self._envs)
        self.observation_shape, self.observation_dtype = shape, dtype
        space = self._envs[0].action_space
        self.actions, self._first_action = int(space.n), int(space.start)  # 0 .. actions - 1 on the wire
        self._seeds = list(seeds)
        self._limit = max_episode_steps or math.inf
        self._episode_steps = [0] * self.lanes
        self._ended = np.zeros(self.lanes, dtype=np.bool_)
        self._observations = np.zeros((self.lanes, *self.observation_shape), dtype=self.observation_dtype)
        self.own_limit = int(
            getattr(getattr(self._envs[0], "spec", None), "max_episode_steps", None) or 0
        )  # steps; 0: none known

    @property
    def only(self) -> Any:
        """The first environment: of one lane, all there is."""
        return self._envs[0]

    def reset(self) -> Array:
        for lane, env in enumerate(self._envs):
            self._observations[lane] = env.reset(seed=self._seeds[lane])[0]
        self._episode_steps = [0] * self.lanes
        self._ended[:] = False
        return self._observations

    def step(self, actions: NDArray[np.int64]) -> LaneStep:
        rewards, terminations, truncations = [0.0] * self.lanes, [False] * self.lanes, [False] * self.lanes
        is_first, self._ended = self._ended, np.zeros(self.lanes, dtype=np.bool_)
        restarts = is_first.tolist()
        for lane, action in enumerate(actions.tolist()):
            if restarts[lane]:
                self._observations[lane] = self._envs[lane].reset()[0]
                self._episode_steps[lane] = 0
                continue
            observation, reward, terminated, truncated, _ = self._envs[lane].step(action + self._first_action)
            self._observations[lane] = observation
            rewards[lane] = reward
            self._episode_steps[lane] += 1
            if terminated:
                terminations[lane] = True
            elif truncated or self._episode_steps[lane] >= self._limit:
                truncations[lane] = True
        terminated_L, truncated_L = np.array(terminations), np.array(truncations)
        self._ended = terminated_L | truncated_L
        return LaneStep(self._observations, np.array(rewards, dtype=np.float32), terminated_L, truncated_L, is_first)

    def close(self) -> None:
        for env in self._envs:
            env.close()
