"""Synthetic actors: many actors' writers in one process, playing recorded games at a given pace.

    python -m benchmarks.load.actors RUN SERVERS FIRST END     # actors FIRST .. END - 1; the pace comes on standard input

Blocks are cut where producers/actor.py cuts them: all lanes together, at `actor.block_steps` rows, at `actor.max_block_age_ms`, and when new weights are
looked for (every `actor.refresh_s`: in a run that learns there are always newer ones). Frames are compressed as they are cut, as an actor's are.
An actor waits for replay's committed lag as a real one does (gorila/flow.py).
"""

from __future__ import annotations

import heapq
import json
import math
import select
import sys
import time
from dataclasses import dataclass

import numpy as np

from benchmarks.replay import record
from gorila.codec import Schemas
from gorila.config import ActorSection, Config
from gorila.flow import LagGate
from gorila.kafka import Cluster
from gorila.messages import TransitionBlock
from gorila.observations import compress, inflate
from gorila.run_record import read_run
from gorila.settings import config_of_run
from gorila.topics import full_name, group_name

EPISODE_ROWS = 512  # a random game of Pong lasts longer: the recording is one episode, cut short
DEBT_S = 0.5  # what an actor may make up for after it has waited


@dataclass(frozen=True)
class Recording:
    """Games of `lanes` lanes side by side: frames (L, T, 84, 84), action and reward (L, T)."""

    frames: np.ndarray
    action: np.ndarray
    reward: np.ndarray

    @classmethod
    def pong(cls, lanes: int) -> Recording:
        """Random play of real Pong."""
        blocks = record("pong", EPISODE_ROWS * lanes)
        per_lane = [[block for block in blocks if block.lane == lane % 8] for lane in range(lanes)]
        columns = [
            (np.concatenate([inflate(b.observations) for b in lane]),
             np.concatenate([np.maximum(b.action, 0) for b in lane]),
             np.concatenate([b.reward for b in lane]))
            for lane in per_lane
        ]  # fmt: skip
        return cls(*(np.stack([lane[i][:EPISODE_ROWS] for lane in columns]) for i in range(3)))

    @property
    def rows(self) -> int:
        """Rows of the episode."""
        return self.frames.shape[1]


class SyntheticActor:
    """One actor: cuts the next blocks of all its lanes when they are due."""

    def __init__(self, actor: ActorSection, index: int, recording: Recording, epoch: int) -> None:
        self._actor, self.index, self._recording, self._epoch = actor, index, recording, epoch
        self._rng = np.random.default_rng(index)
        self._step = 0
        self._offset = int(self._rng.integers(recording.rows))  # neighbours play different moments
        self.began_s = 0.0
        self.blocks = self.transitions = 0

    def begin(self, now_s: float, pace: float) -> None:
        """Start to play at `pace` transitions a second, somewhere within the time of a block."""
        self.began_s = now_s - float(self._rng.random()) * self._actor.block_steps * self._actor.lanes / pace

    def due(self, pace: float) -> tuple[float, int]:
        """(when the blocks begun will be cut, their rows)."""
        step_s = self._actor.lanes / pace
        refresh_s = self._actor.refresh_s
        looks_s = (math.floor(self.began_s / refresh_s) + 1) * refresh_s if refresh_s else math.inf
        lasts_s = min(self._actor.max_block_age_ms / 1000, looks_s - self.began_s)
        rows = max(1, min(self._actor.block_steps, math.ceil(lasts_s / step_s)))
        return self.began_s + rows * step_s, rows

    def cut(self, rows: int, cut_s: float) -> list[TransitionBlock]:
        """The blocks, one a lane."""
        made = [self._block(lane, rows) for lane in range(self._actor.lanes)]
        self._step += rows
        self.began_s = cut_s
        self.blocks += len(made)
        self.transitions += sum(rows - int(block.is_last.sum()) for block in made)
        return made

    def _block(self, lane: int, rows: int) -> TransitionBlock:
        recording = self._recording
        length = recording.rows
        within = (self._step + np.arange(rows)) % length  # row of the episode
        played = (within + self._offset) % length
        first, last = within == 0, within == length - 1
        q_taken, q_max = self._rng.normal(size=(2, rows)).astype(np.float32)
        no = np.zeros(rows, np.bool_)
        return TransitionBlock(
            actor_id=f"actor-{self.index}", actor_epoch=self._epoch, lane=lane, first_step=self._step,
            weights_version=int(self.began_s), epsilon=0.1,
            observations=compress(recording.frames[lane, played], self._actor.compression),
            action=np.where(last, -1, recording.action[lane, played]).astype(np.int32),
            reward=np.where(last, 0, recording.reward[lane, played]).astype(np.float32),
            is_first=first, is_last=last, terminated=no, truncated=within == length - 2, q_taken=q_taken, q_max=q_max,
        )  # fmt: skip


class Troupe:
    """The actors of one process and their producer."""

    def __init__(self, cluster: Cluster, run: str, config: Config, indices: range, recording: Recording) -> None:
        self._schemas, self._producer = Schemas(), cluster.producer()
        self._topic = full_name(run, "transitions")
        self._gate = LagGate(cluster, group_name(run, "replay"), self._topic, indices, config.actor.max_lag_records)
        self._lanes = config.actor.lanes
        epoch = time.time_ns() // 1_000_000
        self.actors = [SyntheticActor(config.actor, index, recording, epoch) for index in indices]
        self._ends = dict.fromkeys(indices, 0)
        self._due: list[tuple[float, int]] = []
        self._pace = 0.0
        self.waited_s = 0.0

    def set_pace(self, pace: float, now_s: float) -> None:
        """Transitions a second of each actor; 0: stop."""
        self._pace = pace
        self._due = []
        for number, actor in enumerate(self.actors) if pace else ():
            actor.begin(now_s, pace)
            self._due.append((actor.due(pace)[0], number))
        heapq.heapify(self._due)

    def turn(self, now_s: float) -> None:
        """Whatever is due and may be written; the others a little later."""
        held = []
        while self._due and self._due[0][0] <= now_s:
            due_s, number = heapq.heappop(self._due)
            actor = self.actors[number]
            # All lanes' blocks go together or not at all.
            if not self._gate.may_write(actor.index, self._ends[actor.index] + self._lanes - 1):
                held.append((due_s, number))
                continue
            cut_s, rows = actor.due(self._pace)
            for block in actor.cut(rows, max(cut_s, now_s - DEBT_S)):
                self._producer.send(self._topic, self._schemas.encode(block), key=b"", partition=actor.index)
                self._ends[actor.index] += 1
            heapq.heappush(self._due, (actor.due(self._pace)[0], number))
        for waiting in held:
            heapq.heappush(self._due, waiting)
        wait_s = min(0.005, max(0.0, self._due[0][0] - now_s)) if self._due and not held else 0.005
        self._producer.poll(wait_s)
        if held:
            self.waited_s += time.monotonic() - now_s

    def finish(self) -> dict[str, dict[str, int]]:
        """{partition: {blocks, transitions}} as acknowledged by the broker."""
        assert self._producer.flush(30) == 0, "the broker took not everything"
        return {str(a.index): {"blocks": a.blocks, "transitions": a.transitions} for a in self.actors}


def play(run: str, servers: str, indices: range) -> None:
    """Standard input: `PACE\\n` (transitions a second of all these actors together), its end: finish. One JSON line at the end."""
    cluster = Cluster(servers)
    config = config_of_run(read_run(cluster, run, Schemas()).config, (), {})
    troupe = Troupe(cluster, run, config, indices, Recording.pong(config.actor.lanes))
    print("ready", flush=True)
    while True:
        if select.select([sys.stdin], [], [], 0)[0]:
            line = sys.stdin.readline()
            if not line:
                break
            troupe.set_pace(float(line) / len(indices), time.monotonic())
        troupe.turn(time.monotonic())
    print(json.dumps({"written": troupe.finish(), "waited_s": round(troupe.waited_s, 2)}), flush=True)


if __name__ == "__main__":
    play(sys.argv[1], sys.argv[2], range(int(sys.argv[3]), int(sys.argv[4])))
