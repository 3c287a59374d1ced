"""Transitions as an actor writes them, from a random walk instead of an environment; the whole episodes are kept to compare with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gorila.environment_facts import EnvironmentFacts
from gorila.messages import TransitionBlock
from gorila.observations import compress

VECTOR_FACTS = EnvironmentFacts("CartPole-v1", (4,), "float32", 2, 1, 500, {"kwargs": {}, "interface": "gymnasium"})
IMAGE_FACTS = EnvironmentFacts("ale:Pong", (12, 10), "uint8", 6, 4, 100, {"kwargs": {}})


@dataclass
class WrittenEpisode:
    """observations (T + 1, ...), action and reward (T,)."""

    lane: int
    observations: NDArray[Any]
    action: list[int]
    reward: list[float]
    terminated: bool


@dataclass
class _Lane:
    number: int
    step: int = 0
    rows: list[tuple[Any, ...]] = field(default_factory=list)
    left: int = 0
    frames: list[NDArray[Any]] = field(default_factory=list)
    actions: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)


class Experience:
    """One actor's lanes. `blocks(count)` goes on where the last call ended; `whole` lists episodes of which every row was given out."""

    def __init__(self, facts: EnvironmentFacts, seed: int = 0, lanes: int = 2, actor_id: str = "actor-0") -> None:
        self.facts, self.actor_id, self.epoch = facts, actor_id, 1
        self.whole: list[WrittenEpisode] = []
        self._rng = np.random.default_rng(seed)
        self._lanes = [_Lane(number) for number in range(lanes)]

    def blocks(self, count: int, rows: int = 16, codec: str = "zstd") -> Iterator[TransitionBlock]:
        """The next blocks, lanes in turn; the last ones may be shorter, as an actor cuts them when weights change."""
        for number in range(count):
            lane = self._lanes[number % len(self._lanes)]
            yield self._block(lane, rows if self._rng.random() < 0.8 else int(self._rng.integers(1, rows + 1)), codec)

    def _observation(self) -> NDArray[Any]:
        facts, rng = self.facts, self._rng
        if np.dtype(facts.observation_dtype).kind == "f":
            return rng.normal(size=facts.observation_shape).astype(facts.observation_dtype)
        frame = np.zeros(facts.observation_shape, facts.observation_dtype)
        frame[rng.integers(facts.observation_shape[0])] = rng.integers(256)
        return frame

    def _block(self, lane: _Lane, rows: int, codec: str) -> TransitionBlock:
        rng = self._rng
        frames: list[NDArray[Any]] = []
        columns: list[tuple[int, float, bool, bool, bool, bool]] = []
        for _ in range(rows):
            frame = self._observation()
            first = not lane.frames
            if first:
                lane.left = int(rng.integers(1, 40))
            last = not first and lane.left == 0
            lane.frames.append(frame)
            frames.append(frame)
            if last:
                columns.append((-1, 0.0, first, last, False, False))
                self.whole.append(
                    WrittenEpisode(lane.number, np.stack(lane.frames), lane.actions, lane.rewards, lane.step % 2 == 0)
                )
                lane.frames, lane.actions, lane.rewards = [], [], []
            else:
                lane.left -= 1
                over, action, reward = lane.left == 0, int(rng.integers(self.facts.actions)), float(rng.integers(-3, 9))
                lane.actions.append(action)
                lane.rewards.append(reward)
                # The row after an episode's last action is its last: its number says which way the episode ends.
                terminated = (lane.step + 1) % 2 == 0
                columns.append((action, reward, first, last, over and terminated, over and not terminated))
            lane.step += 1
        actions, rewards, is_first, is_last, ended, cut = zip(*columns, strict=True)
        return TransitionBlock(
            actor_id=self.actor_id,
            actor_epoch=self.epoch,
            lane=lane.number,
            first_step=lane.step - rows,
            weights_version=int(rng.integers(1000)),
            epsilon=float(np.float32(rng.random())),
            observations=compress(np.stack(frames), codec),
            action=np.array(actions, np.int32),
            reward=np.array(rewards, np.float32),
            is_first=np.array(is_first),
            is_last=np.array(is_last),
            terminated=np.array(ended),
            truncated=np.array(cut),
            q_taken=rng.normal(size=rows).astype(np.float32),
            q_max=rng.normal(size=rows).astype(np.float32),
        )
