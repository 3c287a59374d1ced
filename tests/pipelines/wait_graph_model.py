"""The loop as who waits for whom, on a clock moved by hand: the rules are the product's own, only work is a rate.

transitions → batches → gradients → weights, priorities back. Actors and learners write through the product's LagGate, replay is the product's
ReplaySplit (samples per insert, draws, its words), learners keep the product's InFlight window. A role handles so many records a second,
commits every 50 ms, and may be dead for a while: then it does nothing at all, and what it read stays where it was.
"""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

import numpy as np
from lane_writer import LaneWriter, config

from consumers.in_flight import InFlight
from gorila.flow import LagGate
from gorila.messages import Priorities, TransitionBlock
from pipelines.replay import ReplaySplit

TICK_S = 0.01
COMMIT_S = 0.05
BLOCK_ROWS = 4
BATCH_ROWS = 32
ACTOR_BOUND, BATCHES_BOUND, GRADIENTS_BOUND = 6, 4, 6
WINDOW = 2
FAST, SLOW = 200.0, 4.0


class Log:
    """One topic and its reader group: ends and committed offsets by partition."""

    def __init__(self, world: World, group: str, topic: str, partitions: int) -> None:
        self._world, self.group, self.topic = world, group, topic
        self.records: list[list[Any]] = [[] for _ in range(partitions)]
        self.read = [0] * partitions
        self.committed = [0] * partitions

    def later(self, partitions: list[tuple[str, int]]) -> Future[dict[tuple[str, int], int | None]]:
        """As gorila.flow.OffsetsSource."""
        answer: Future[dict[tuple[str, int], int | None]] = Future()
        answer.set_result({(topic, p): self.committed[p] for topic, p in partitions})
        return answer

    def gate(self, partitions: list[int], bound: int) -> LagGate:
        """A writer's gate."""
        clock = lambda: self._world.now_s  # noqa: E731
        return LagGate(None, f"run.{self.group}", self.topic, partitions, bound, clock=clock, source=self)  # type: ignore[arg-type]

    def lag(self) -> int:
        """Of the worst partition."""
        return max(len(records) - done for records, done in zip(self.records, self.committed, strict=True))


class Role:
    """Does `rate` things a second while alive."""

    def __init__(self, world: World, rate: float) -> None:
        self.world, self.rate, self.alive, self.done = world, rate, True, 0
        self._budget = 0.0
        self._commit_due_s = 0.0

    def turn(self) -> None:
        """One tick."""
        if not self.alive:
            return
        self._budget = min(self._budget + self.rate * TICK_S, max(1.0, self.rate * TICK_S))
        while self._budget >= 1.0 and self.act():
            self._budget -= 1.0
            self.done += 1
        if self.world.now_s >= self._commit_due_s:
            self._commit_due_s = self.world.now_s + COMMIT_S
            self.commit()

    def act(self) -> bool:
        raise NotImplementedError

    def commit(self) -> None:
        """Nothing to commit."""

    def waiting_for(self) -> str:
        raise NotImplementedError


class Actor(Role):
    def __init__(self, world: World, rate: float, index: int) -> None:
        super().__init__(world, rate)
        self.index = index
        self._lane = LaneWriter(lane=0, actor_id=f"actor-{index}")
        self._gate = world.transitions.gate([index], ACTOR_BOUND)

    def act(self) -> bool:
        log = self.world.transitions.records[self.index]
        if not self._gate.may_write(self.index, len(log)):
            return False
        if len(self._lane.rows) < BLOCK_ROWS:
            self._lane.episode(50)
        log.append(self._lane.block(BLOCK_ROWS))
        return True

    def waiting_for(self) -> str:
        return self._gate.waiting_for()


class Replay(Role):
    def __init__(self, world: World, rate: float, ratio: float, actors: int) -> None:
        super().__init__(world, rate)
        made = config(
            capacity_rows=512, min_size_rows=16, samples_per_insert=ratio, max_error_rows=2.0 * BATCH_ROWS,
            learner__batch_size=BATCH_ROWS, actor__count=actors,
        )  # fmt: skip
        self.split = ReplaySplit(made, "replay-0", np.random.default_rng(0))
        for partition in range(actors):
            self.split.open_ring(partition, 0)
        self._partitions = len(world.batches.records)
        self._gate = world.batches.gate(list(range(self._partitions)), BATCHES_BOUND)
        self._turn = self._learned = 0
        self.stats: str = ""

    def act(self) -> bool:
        for priorities in self.world.priorities[self._learned :]:
            self.split.learned(priorities)
        self._learned = len(self.world.priorities)
        drew = self._draw()
        took = self.split.wants_transitions() and self._take()
        self.stats = self._gate.waiting_for() or self.split.waiting_for()  # as SplitRoom says it
        return drew or took

    def _take(self) -> bool:
        log = self.world.transitions
        for partition in sorted(range(len(log.records)), key=lambda p: log.read[p]):
            if log.read[partition] < len(log.records[partition]):
                block: TransitionBlock = log.records[partition][log.read[partition]]
                self.split.insert(partition, log.read[partition], 0, block)
                log.read[partition] += 1
                return True
        return False

    def _draw(self) -> bool:
        for _ in range(self._partitions):
            partition = self._turn
            self._turn = (partition + 1) % self._partitions
            log = self.world.batches.records[partition]
            if self._gate.may_write(partition, len(log)):
                batches = self.split.draw(1)
                log.extend(batches)
                return bool(batches)
        return False

    def commit(self) -> None:
        self.world.transitions.committed = list(self.world.transitions.read)

    def waiting_for(self) -> str:
        return self.stats


class Learner(Role):
    def __init__(self, world: World, rate: float, index: int) -> None:
        super().__init__(world, rate)
        self.index = index
        self.in_flight = InFlight(1, WINDOW)
        self._gate = world.gradients.gate([0], GRADIENTS_BOUND)
        self._why = ""

    def act(self) -> bool:
        self.in_flight.covered_by([self.world.published])
        log, gradients = self.world.batches, self.world.gradients.records[0]
        at = log.read[self.index]
        if at == len(log.records[self.index]):
            self._why = "replay: no learner batch has come"
        elif self.in_flight.full:
            self._why = f"parameter-server: {len(self.in_flight)} gradients in flight, bound {WINDOW}"
        elif not self._gate.may_write(0, len(gradients)):
            self._why = self._gate.waiting_for()
        else:
            self._why = ""
            self.in_flight.add((self.index, at))
            gradients.append((self.index, at))
            self.in_flight.acknowledged((self.index, at), 0, len(gradients) - 1)
            for part in log.records[self.index][at]:
                errors = np.ones(len(part.row), np.float32)
                self.world.priorities.append(
                    Priorities("", 0, at, 0, part.partition, part.offset, part.row, errors, 0.0, 0.0, False, 0.0)
                )
            log.read[self.index] = at + 1
            return True
        return False

    def commit(self) -> None:
        self.world.batches.committed[self.index] = self.world.batches.read[self.index]

    def waiting_for(self) -> str:
        return self._why


class Server(Role):
    """Applies, publishes what it has applied, commits."""

    def act(self) -> bool:
        log = self.world.gradients
        if log.read[0] == len(log.records[0]):
            return False
        log.read[0] += 1
        self.world.published = log.read[0] - 1
        return True

    def commit(self) -> None:
        self.world.gradients.committed[0] = self.world.gradients.read[0]

    def waiting_for(self) -> str:
        return (
            "learner: no gradient has come"
            if self.world.gradients.read[0] == len(self.world.gradients.records[0])
            else ""
        )


class World:
    """The whole loop."""

    def __init__(self, ratio: float, actors: int, learners: int, rates: dict[str, float]) -> None:
        self.now_s = 0.0
        self.transitions = Log(self, "replay", "run.transitions", actors)
        self.batches = Log(self, "learner", "run.batches", learners)
        self.gradients = Log(self, "parameter-server", "run.gradients", 1)
        self.priorities: list[Priorities] = []
        self.published = -1
        self.actors = [Actor(self, rates["actor"], i) for i in range(actors)]
        self.replay = Replay(self, rates["replay"], ratio, actors)
        self.learners = [Learner(self, rates["learner"], i) for i in range(learners)]
        self.server = Server(self, rates["server"])
        self.roles: dict[str, list[Role]] = {
            "actor": list(self.actors), "replay": [self.replay], "learner": list(self.learners), "server": [self.server],
        }  # fmt: skip

    def run(self, seconds: float) -> None:
        """Move the clock; the order of turns changes with every tick."""
        everybody = [role for roles in self.roles.values() for role in roles]
        for tick in range(round(seconds / TICK_S)):
            self.now_s += TICK_S
            first = tick % len(everybody)
            for role in everybody[first:] + everybody[:first]:
                role.turn()
            self.check_bounds()

    def check_bounds(self) -> None:
        """Whatever happens, every log's committed lag stays within its writers' bounds, and the error within its own."""
        assert self.transitions.lag() <= ACTOR_BOUND + 1
        assert self.batches.lag() <= BATCHES_BOUND + 1
        assert self.gradients.lag() <= GRADIENTS_BOUND + len(self.learners)

    def progress(self) -> dict[str, int]:
        """Things done so far, by kind of role."""
        return {
            "transitions": sum(actor.done for actor in self.actors),
            "inserts": sum(self.transitions.read),
            "batches": sum(len(records) for records in self.batches.records),
            "gradients": len(self.gradients.records[0]),
            "updates": self.gradients.read[0],
        }

    def kill(self, kind: str) -> None:
        """All of a kind."""
        for role in self.roles[kind]:
            role.alive = False

    def revive(self, kind: str) -> None:
        """They go on where they stood."""
        for role in self.roles[kind]:
            role.alive = True
