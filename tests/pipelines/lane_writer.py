"""Blocks as an actor would write them, whose observations say where they come from: (episode, step within it)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from gorila.config import Config
from gorila.messages import Batch, TransitionBlock
from gorila.observations import compress, gather_stack, inflate


@dataclass
class Row:
    episode: int
    step: int
    action: int
    reward: float
    first: bool
    last: bool
    terminated: bool
    truncated: bool
    q_taken: float
    q_max: float


@dataclass
class LaneWriter:
    """One lane. `episode(steps, ended)` adds rows; `block(rows)` cuts the next block off."""

    lane: int = 0
    epoch: int = 1
    actor_id: str = "actor-0"
    version: int = 0
    next_step: int = 0
    episodes: int = 0
    rng: np.random.Generator = field(default_factory=lambda: np.random.default_rng(0))
    rows: list[Row] = field(default_factory=list)

    def episode(self, steps: int, ended: str = "terminated", reward: float | None = None) -> LaneWriter:
        for step in range(steps + 1):
            last, over = step == steps, step == steps - 1
            self.rows.append(
                Row(
                    self.episodes,
                    step,
                    -1 if last else int(self.rng.integers(4)),
                    0.0 if last else float(self.rng.normal()) if reward is None else reward,
                    step == 0,
                    last,
                    over and ended == "terminated",
                    over and ended == "truncated",
                    float(self.rng.normal()),
                    float(self.rng.normal()),
                )
            )
        self.episodes += 1
        return self

    def block(self, count: int) -> TransitionBlock:
        rows, self.rows = self.rows[:count], self.rows[count:]
        assert len(rows) == count
        frames = np.array([[self.lane, row.episode, row.step] for row in rows], np.int32)
        made = TransitionBlock(
            actor_id=self.actor_id,
            actor_epoch=self.epoch,
            lane=self.lane,
            first_step=self.next_step,
            weights_version=self.version,
            epsilon=0.1,
            observations=compress(frames, "zstd"),
            action=np.array([row.action for row in rows], np.int32),
            reward=np.array([row.reward for row in rows], np.float32),
            is_first=np.array([row.first for row in rows]),
            is_last=np.array([row.last for row in rows]),
            terminated=np.array([row.terminated for row in rows]),
            truncated=np.array([row.truncated for row in rows]),
            q_taken=np.array([row.q_taken for row in rows], np.float32),
            q_max=np.array([row.q_max for row in rows], np.float32),
        )
        self.next_step += count
        made.check()
        return made

    def blocks(self, *counts: int) -> list[TransitionBlock]:
        return [self.block(count) for count in counts]

    def all_blocks(self, count: int) -> list[TransitionBlock]:
        return [self.block(min(count, len(self.rows))) for _ in range(-(-len(self.rows) // count))]


def config(**replay: Any) -> Config:
    """A small configuration; keys of other sections as `section__key`."""
    sections: dict[str, dict[str, Any]] = {
        "replay": {"capacity_rows": 512, "min_size_rows": 1, "samples_per_insert": 8.0}
    }
    for name, value in replay.items():
        section, _, key = name.partition("__")
        if key:
            sections.setdefault(section, {})[key] = value
        else:
            sections["replay"][name] = value
    return Config.model_validate(sections)


def states(batch: Batch) -> tuple[np.ndarray, np.ndarray]:
    """(s_tm1, s_t), each (B, K, 3), as a learner makes them."""
    frames = np.concatenate([inflate(block) for block in batch.blocks])
    shape = (len(batch.action), batch.stack)
    made = [gather_stack(frames, indices.reshape(shape)) for indices in (batch.frames_tm1, batch.frames_t)]
    return tuple(state.reshape(*shape, 3) for state in made)  # type: ignore[return-value]
