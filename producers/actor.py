"""The actor: environments and a policy in, blocks of transitions out. No Kafka, clock, thread or torch.

Rules of this file (rules.md 1, 5):
1. Each step writes exactly one row in every lane: an observation and what was done there. The row that follows an episode's end is
   `is_last`: no action (-1), reward 0, its q_max the bootstrap of a truncated episode. An episode of T steps has T + 1 rows.
2. A row is complete when its step is: between calls nothing is half-written, so all lanes can be cut at any call.
3. One version and one epsilon a block: new weights cut all lanes together.
4. A frame is stored once, in the block of its row. Stacks exist only in RecentFrames, which the reader's `gather_stack` repeats exactly.
5. Nothing is remembered across a restart: a new process has a new epoch and begins new episodes.
"""

from __future__ import annotations

from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from gorila.config import ActorSection
from gorila.lanes import Lanes
from gorila.messages import Episode, TransitionBlock
from gorila.observations import RecentFrames, compress
from gorila.processor import Outgoing
from producers.exploration import Exploration

F32 = NDArray[np.float32]


class ActedLike(Protocol):
    """See producers.policy.Acted."""

    action: NDArray[np.int64]
    q_taken: F32
    q_max: F32


class Policy(Protocol):
    """See producers.policy.EpsilonGreedy."""

    def load(self, flat: F32) -> None: ...

    def act(self, states: NDArray[Any], epsilon: NDArray[np.float64]) -> ActedLike: ...


class ActorCore:
    """One actor.

    Args:
        actor: its section of the configuration.
        index: its number among the actors, and its partition of `transitions`.
        actor_id: its name, the record key.
        epoch: milliseconds at its start; 0 under `--synchronous`.
        lanes: `actor.lanes` environments, not yet reset.
        stack: observations a state is made of.
        policy: chooses actions; holds the behaviour weights.
        wall_ms_at_zero: milliseconds since 1970 when `now_s` is 0; only for `Episode.time_ms`.
        by_time: False under `--synchronous`: no block is cut by age.
    """

    def __init__(
        self,
        actor: ActorSection,
        index: int,
        actor_id: str,
        epoch: int,
        lanes: Lanes,
        stack: int,
        policy: Policy,
        wall_ms_at_zero: int = 0,
        by_time: bool = True,
    ) -> None:
        self._actor, self._index, self._actor_id, self._epoch = actor, index, actor_id, epoch
        self._key = actor_id.encode()
        self._env, self._policy = lanes, policy
        self._exploration = Exploration(actor, index)
        self._recent = RecentFrames(lanes.lanes, lanes.observation_shape, lanes.observation_dtype, stack)
        self._wall_ms_at_zero = wall_ms_at_zero
        self._max_age_s = actor.max_block_age_ms / 1000.0 if by_time else float("inf")
        self.version = -1
        self._epsilon = self._exploration.epsilons(self.version)

        count, rows = lanes.lanes, actor.block_steps
        self._frames = np.zeros((count, rows, *lanes.observation_shape), lanes.observation_dtype)
        self._action = np.zeros((count, rows), np.int32)
        self._reward = np.zeros((count, rows), np.float32)
        self._q_taken = np.zeros((count, rows), np.float32)
        self._q_max = np.zeros((count, rows), np.float32)
        # is_first, is_last, terminated, truncated: one array, so that a cut copies once.
        self._flags = np.zeros((4, count, rows), np.bool_)
        self._filled = 0
        self._first_step = 0
        self._block_began_s = 0.0

        self._observations = lanes.reset()
        self._is_first = np.ones(count, np.bool_)
        self._is_last = np.zeros(count, np.bool_)
        self._returns = np.zeros(count, np.float64)
        self._steps = np.zeros(count, np.int64)
        self._steps_total = np.zeros(count, np.int64)
        self.steps_taken = 0
        self.rows_written = 0

    @property
    def epsilon_mean(self) -> float:
        """Over lanes, for people."""
        return float(self._epsilon.mean())

    def use_weights(self, flat: F32, version: int) -> list[Outgoing]:
        """Act with these weights, float32 (P,), from now on; returns the blocks cut short. Older or equal versions are ignored."""
        if version <= self.version:
            return []
        out = self.cut()
        self._policy.load(flat)
        self.version = version
        self._epsilon = self._exploration.epsilons(version)
        return out

    def step(self, now_s: float) -> list[Outgoing]:
        """One row in every lane; returns finished blocks and episodes.

        Args:
            now_s: seconds, monotonic within the process.
        """
        row = self._filled
        if row == 0:
            self._block_began_s = now_s
        states = self._recent.push(self._observations, self._is_first)
        acted = self._policy.act(states, self._epsilon)
        is_last = self._is_last
        self._frames[:, row] = self._observations
        self._q_taken[:, row] = acted.q_taken
        self._q_max[:, row] = acted.q_max
        self._action[:, row] = acted.action
        self._flags[0, :, row] = self._is_first
        self._flags[1, :, row] = is_last

        took = self._env.step(acted.action)

        self._reward[:, row] = took.reward
        self._flags[2, :, row] = took.terminated
        self._flags[3, :, row] = took.truncated
        ended = took.terminated | took.truncated
        out: list[Outgoing] = []
        if is_last.any():
            # The environment ignored these actions and began a new episode: the row says so (case 13).
            self._action[is_last, row] = -1
            self._q_taken[is_last, row] = 0.0
            self._reward[is_last, row] = 0.0
            self._steps_total += ~is_last
            self._steps += ~is_last
            self.steps_taken += len(is_last) - int(is_last.sum())
        else:
            self._steps_total += 1
            self._steps += 1
            self.steps_taken += len(is_last)
        self._returns += took.reward
        self.rows_written += len(is_last)
        if ended.any():
            out += self._episodes(ended, took.terminated, now_s)
        self._observations, self._is_first, self._is_last = took.observations, took.is_first, ended
        self._filled = row + 1
        if self._filled == self._actor.block_steps or now_s - self._block_began_s >= self._max_age_s:
            out += self.cut()
        return out

    def tick(self, now_s: float) -> list[Outgoing]:
        """Blocks that grew old while the actor may not step."""
        return self.cut() if self._filled and now_s - self._block_began_s >= self._max_age_s else []

    def cut(self) -> list[Outgoing]:
        """All lanes' blocks as they are; nothing when they are empty."""
        rows = self._filled
        if rows == 0:
            return []
        action, reward = self._action[:, :rows].copy(), self._reward[:, :rows].copy()
        q_taken, q_max = self._q_taken[:, :rows].copy(), self._q_max[:, :rows].copy()
        flags = self._flags[:, :, :rows].copy()
        out = [
            Outgoing(
                "transitions",
                TransitionBlock(
                    actor_id=self._actor_id,
                    actor_epoch=self._epoch,
                    lane=lane,
                    first_step=self._first_step,
                    weights_version=self.version,
                    epsilon=float(self._epsilon[lane]),
                    observations=compress(self._frames[lane, :rows], self._actor.compression),
                    action=action[lane],
                    reward=reward[lane],
                    is_first=flags[0, lane],
                    is_last=flags[1, lane],
                    terminated=flags[2, lane],
                    truncated=flags[3, lane],
                    q_taken=q_taken[lane],
                    q_max=q_max[lane],
                ),
                key=self._key,
                partition=self._index,
            )
            for lane in range(self._env.lanes)
        ]
        self._first_step += rows
        self._filled = 0
        return out

    def _episodes(self, ended: NDArray[np.bool_], terminated: NDArray[np.bool_], now_s: float) -> list[Outgoing]:
        out = []
        for lane in np.flatnonzero(ended).tolist():
            episode = Episode(
                role="actor",
                actor_id=self._actor_id,
                lane=lane,
                episode_return=float(self._returns[lane]),
                steps=int(self._steps[lane]),
                terminated=bool(terminated[lane]),
                epsilon=float(self._epsilon[lane]),
                weights_version=self.version,
                lane_steps_total=int(self._steps_total[lane]),
                time_ms=self._wall_ms_at_zero + int(now_s * 1000),
            )
            self._returns[lane] = 0.0
            self._steps[lane] = 0
            out.append(Outgoing("episodes", episode, key=self._key, partition=0))
        return out
