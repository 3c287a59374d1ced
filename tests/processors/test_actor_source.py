"""The actor in its loop: first weights, pace, limit, gate and stop; on the in-memory log, with a clock moved by hand."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from gorila.config import Config
from gorila.environments import describe, make_lanes
from gorila.errors import RunError
from gorila.messages import TransitionBlock
from gorila.metrics import Metrics
from gorila.network import build_network, flat_from
from gorila.settings import load_config
from gorila.source_loop import SourceLoop
from gorila.testing.driver import MemoryService
from gorila.testing.memory_log import MemoryCluster
from producers.actor import ActorCore
from producers.main import ActorSource, refuse_other_environment
from producers.policy import EpsilonGreedy


class Published:
    """The newest weights, as a follower gives them."""

    def __init__(self, flat: Any) -> None:
        self._flat, self._news, self.version, self.polls = flat, False, -1, 0
        self.view = self

    def publish(self, version: int) -> None:
        self.version, self._news = version, True

    def flat(self) -> Any:
        return self._flat

    def poll(self, timeout_s: float = 0.0) -> bool:
        self.polls += 1
        news, self._news = self._news, False
        return news


class ClosedAbove:
    """A gate whose reader has committed up to an offset."""

    def __init__(self, bound: int) -> None:
        self.bound, self.committed = bound, 0

    def may_write(self, partition: int, next_offset: int) -> bool:
        return next_offset - self.committed <= self.bound

    def waiting_for(self) -> str:
        return f"replay: behind on partition 0, bound {self.bound}"


class Stage:
    """An actor of CartPole in its loop."""

    def __init__(self, *sets: str, gate: ClosedAbove | None = None) -> None:
        self.config: Config = load_config("cartpole", ["actor.lanes=2", "actor.refresh_s=0.1", *sets], {})
        facts = describe(self.config)
        network = build_network(self.config, facts)
        self.published = Published(flat_from(network))
        lanes = make_lanes(self.config, [1, 2])
        policy = EpsilonGreedy(network, facts.actions, np.random.default_rng(0))
        self.core = ActorCore(self.config.actor, 0, "actor-0", 1, lanes, facts.stack, policy)
        self.cluster = MemoryCluster()
        self.service = MemoryService(self.cluster, role="actor", name="actor-0", config=self.config)
        self.now_s = 100.0
        self.metrics = Metrics("actor", "test", "actor-0")
        self.source = ActorSource(self.config, self.core, self.published, self.metrics)
        gates = {"transitions": gate} if gate else {}
        self.loop = SourceLoop(self.service, self.source, gates=gates, metrics=self.metrics, clock=lambda: self.now_s)
        self.loop.open()

    def turns(self, count: int, seconds: float = 0.001) -> int:
        """How many of them stepped."""
        stepped = 0
        for _ in range(count):
            self.now_s += seconds
            stepped += self.loop.turn()
        return stepped

    def blocks(self) -> list[TransitionBlock]:
        read = self.cluster.read(self.service.topic("transitions"))
        return [self.service.schemas.expect(record.value, TransitionBlock) for record in read]


def test_nothing_is_played_before_the_first_weights_and_the_actor_says_for_whom_it_waits() -> None:
    stage = Stage()
    assert stage.turns(5) == 0
    assert stage.source.waiting_for().startswith("parameter-server")
    stage.published.publish(0)
    assert stage.turns(6) >= 4
    assert stage.source.waiting_for() == "" and stage.core.version == 0


def test_weights_are_looked_for_at_most_once_a_refresh_and_used_from_the_next_block_on() -> None:
    stage = Stage("actor.max_steps_per_s=0")
    stage.published.publish(0)
    stage.turns(2)
    polls = stage.published.polls
    stage.turns(99)
    assert stage.published.polls - polls <= 1
    stage.published.publish(7)
    stage.turns(120)
    stage.loop.drain()
    versions = [block.weights_version for block in stage.blocks() if block.lane == 0]
    assert sorted(set(versions)) == [0, 7] and versions == sorted(versions)


def test_the_pace_holds_on_average_and_a_pause_is_not_made_up_for_by_a_burst() -> None:
    stage = Stage("actor.max_steps_per_s=400")
    stage.published.publish(0)
    stage.turns(2000, seconds=0.001)
    assert stage.core.rows_written == pytest.approx(800, rel=0.15)
    stage.now_s += 60.0
    before = stage.core.rows_written
    stage.turns(200, seconds=0.0)
    assert 40 <= stage.core.rows_written - before <= 44


def test_the_actor_stops_at_its_share_of_the_steps_with_everything_sent() -> None:
    stage = Stage("run.max_env_steps=101", "actor.count=2", "actor.max_steps_per_s=0")
    stage.published.publish(0)
    stage.turns(200)
    assert 51 <= stage.core.steps_taken <= 52
    assert stage.source.pause_s(stage.now_s) == math.inf
    assert sum(block.observations.count for block in stage.blocks()) == stage.core.rows_written


def test_a_closed_gate_holds_the_actor_and_an_open_one_lets_it_go_on_without_a_gap() -> None:
    gate = ClosedAbove(bound=6)
    stage = Stage("actor.max_steps_per_s=0", "actor.block_steps=4", "actor.max_block_age_ms=1000000", gate=gate)
    stage.published.publish(0)
    assert stage.turns(60) < 30
    assert len(stage.blocks()) == 7
    gate.committed = 1000
    assert stage.turns(10) == 10
    stage.loop.drain()
    for lane in range(2):
        mine = [block for block in stage.blocks() if block.lane == lane]
        assert [b.first_step for b in mine] == [sum(a.observations.count for a in mine[:i]) for i in range(len(mine))]


def test_a_stop_sends_what_was_begun() -> None:
    stage = Stage("actor.max_steps_per_s=0")
    stage.published.publish(0)
    stage.turns(8)
    assert stage.blocks() == []
    stage.loop.drain()
    assert sum(block.observations.count for block in stage.blocks()) == stage.core.rows_written > 0


def test_an_environment_other_than_the_runs_is_refused_by_name() -> None:
    config = load_config("cartpole", ["env.id=Acrobot-v1"], {})
    lanes = make_lanes(config, [1])
    refuse_other_environment(describe(config), lanes)
    with pytest.raises(RunError, match="observation shape"):
        refuse_other_environment(describe(load_config("cartpole", [], {})), lanes)
