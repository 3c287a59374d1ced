"""Replicas as processors, several of them on logs in memory: what the chain allows is shown, targets and ledger lines survive the tail, a diverged one leaves."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consumers.parameter_server.checkpoints import ShardState, newest_complete, to_manifest, to_parts
from consumers.parameter_server.optimizers import make_optimizer, settings_json
from consumers.parameter_server.replicated_shard import Diverged, ReplicatedShard, Showing
from consumers.parameter_server.replication import Replica
from consumers.parameter_server.rules import Pace, Rules
from consumers.parameter_server.shard import Shard
from gorila.compression import codec
from gorila.config import Config
from gorila.messages import CheckpointLedger, CheckpointManifest, Gradient, Message, Weights
from gorila.processor import Incoming, Outgoing, Processor

P = 7
F = np.float32
TICK_S = 0.02


class Logs:
    """The topics of a shard, and who may write to the guarded ones."""

    def __init__(self, **keys: Any) -> None:
        section = {
            "replicas": 3,
            "target_period_versions": 5,
            "checkpoint_versions": 8,
            "ledger_versions": 4,
            "weights_bytes_per_s": 1e9,
            **keys,
        }
        self.config = Config.model_validate({"learner": {"max_in_flight": 0}, "parameter_server": section})
        self.topics: dict[str, list[Message]] = {
            name: [] for name in ("gradients", "replication", "weights", "checkpoints")
        }
        self.owner = 0
        self.optimizer = settings_json(self.config.parameter_server)
        self.moments = make_optimizer(self.config.parameter_server).tensors
        parts = to_parts(ShardState(0, self.weights(), {}))
        manifest = to_manifest(ShardState(0, self.weights(), {}), len(parts), "", 0)
        manifest.first_part_offset, manifest.state_hash = 0, -1
        self.topics["checkpoints"] += [*parts, manifest]

    @staticmethod
    def weights() -> np.ndarray:
        return np.random.default_rng(0).standard_normal(P).astype(F)

    def learn(self, count: int = 1) -> None:
        for _ in range(count):
            batch = len(self.topics["gradients"])
            values = np.random.default_rng([1, batch]).standard_normal(P).astype(F)
            payload = codec("fp32").encode(values)
            self.topics["gradients"].append(Gradient(0, "learner-0", 0, batch, 0, 32, P, "fp32", payload, 1.0, 1.0))

    def restore(self) -> ShardState:
        log = self.topics["checkpoints"]
        state = newest_complete(
            lambda start, stop: list(enumerate(log))[start:stop],
            0,
            len(log),
            shard_id=0,
            moments=self.moments,
            optimizer=self.optimizer,
        )
        assert state is not None
        return state

    def undisturbed(self) -> dict[int, tuple[int, bytes]]:
        """version → (state hash, weights) of a sole server on the same gradients."""
        state = ShardState(0, self.weights(), {name: np.zeros(P, F) for name in self.moments})
        shard = Shard(self.config, state)
        made = {0: (shard.state_hash(), state.weights.tobytes())}
        for offset, message in enumerate(self.topics["gradients"]):
            list(shard.process(Incoming("gradients", 0, offset, 0, b"0", message)))
            made[state.version] = (shard.state_hash(), state.weights.tobytes())
        return made


class Guard:
    """The fence, which comes up when `rise` is called: a thread's business in production."""

    def __init__(self, logs: Logs) -> None:
        self.logs, self.mine, self.is_up, self.lost, self.wanted = logs, -1, False, False, False

    def raise_fence(self) -> None:
        self.is_up, self.wanted = False, True

    def rise(self) -> None:
        if self.wanted and not self.is_up:
            self.logs.owner += 1
            self.mine, self.is_up = self.logs.owner, True

    def was_lost(self) -> bool:
        lost, self.lost = self.lost, False
        return lost

    def drop(self) -> None:
        self.is_up = self.wanted = False

    def write(self, record: Outgoing) -> int:
        if not self.is_up or self.mine != self.logs.owner:
            self.lost |= self.is_up
            self.is_up = self.wanted = False
            return -1
        self.logs.topics[record.topic].append(record.message)
        return len(self.logs.topics[record.topic]) - 1


class Member:
    """A replica process."""

    def __init__(self, logs: Logs, number: int, incarnation: int, rules: Rules | None = None) -> None:
        self.logs, self.guard, self.number = logs, Guard(logs), number
        state = logs.restore()
        core = Replica(
            f"r{number}", incarnation, logs.config.parameter_server.replicas, pace=Pace(heartbeat_s=0.1), rules=rules
        )
        showing = Showing(core)
        shard = Shard(logs.config, state, caught_up_at=len(logs.topics["gradients"]), chain=showing)
        end = len(logs.topics["replication"])
        self.processor = ReplicatedShard(shard, showing, self.guard, log_start=0, log_end=end)
        self.next = {"gradients": state.gradient_offset + 1, "replication": 0}
        self.core, self.state = core, state

    def read(self, topic: str, most: int) -> None:
        log = self.logs.topics[topic]
        for offset in range(self.next[topic], min(len(log), self.next[topic] + most)):
            self._emit(self.processor.process(Incoming(topic, 0, offset, 0, b"0", log[offset])))
            self.next[topic] = offset + 1

    def tick(self, now_s: float) -> None:
        self._emit(self.processor.tick(now_s))

    def _emit(self, records: Any) -> None:
        for record in list(records):
            if record.topic == "replication":
                self.logs.topics["replication"].append(record.message)
            else:
                offset = self.guard.write(record)
                if record.tag is not None:
                    self.processor.delivered(record, 0, offset)

    def turn(self, now_s: float, most: int = 1000) -> None:
        self.read("replication", most)
        self.read("gradients", most)
        self.guard.rise()
        self.tick(now_s)


class Chain:
    """Members that take turns."""

    def __init__(self, logs: Logs, replicas: int = 3, rules: Rules | None = None) -> None:
        self.logs, self.now_s, self.starts, self.rules = logs, 0.0, 0, rules
        self.members: dict[int, Member] = {}
        for number in range(replicas):
            self.start(number)

    def start(self, number: int) -> None:
        self.starts += 1
        self.members[number] = Member(self.logs, number, self.starts, self.rules)

    def turns(self, count: int = 1) -> None:
        for _ in range(count):
            self.now_s += TICK_S
            for member in list(self.members.values()):
                member.turn(self.now_s)

    def until(self, done: Callable[[], bool]) -> None:
        for _ in range(400):
            if done():
                return
            self.turns()
        raise AssertionError("it never came to that")

    @property
    def tail(self) -> Member:
        [tail] = [m for m in self.members.values() if m.core.is_tail and m.core.is_fenced]
        return tail

    def whole(self) -> bool:
        """All live members are in the one view that all of them hold."""
        views = {m.core.view for m in self.members.values()}
        return len(views) == 1 and set(views.pop().members) == {m.core.id for m in self.members.values()}

    def shown(self, kind: str = "key") -> list[Weights]:
        return [m for m in self.logs.topics["weights"] if isinstance(m, Weights) and m.kind == kind]


def check(chain: Chain, updates: int) -> None:
    logs, made = chain.logs, chain.logs.undisturbed()
    versions = [w.version for w in chain.shown()]
    assert versions == sorted(versions) and versions[-1] == updates
    assert all(w.payload == made[w.version][1] for w in chain.shown() + chain.shown("target"))
    for frame in chain.shown():
        target = logs.topics["weights"][frame.target_offset]
        assert isinstance(target, Weights)
        assert (target.kind, target.version) == ("target", frame.version - frame.version % 5)
    assert {w.version for w in chain.shown("target")} == set(range(0, updates + 1, 5))
    checkpoints = logs.topics["checkpoints"]
    assert {m.version for m in checkpoints if isinstance(m, CheckpointLedger)} == set(range(4, updates + 1, 4))
    states = [m for m in checkpoints if isinstance(m, CheckpointManifest | CheckpointLedger) and m.version]
    assert all(m.state_hash == made[m.version][0] for m in states)


def test_a_replica_is_a_processor() -> None:
    assert isinstance(Member(Logs(), 0, 1).processor, Processor)


def test_three_form_a_chain_and_only_the_tail_shows_and_checkpoints() -> None:
    chain = Chain(Logs())
    chain.until(chain.whole)
    for _ in range(21):
        chain.logs.learn()
        chain.turns(2)
    chain.turns(20)
    check(chain, 21)
    manifests = [m for m in chain.logs.topics["checkpoints"] if isinstance(m, CheckpointManifest)]
    assert [m.version for m in manifests] == [0, 8, 16]
    assert chain.tail.core.id == chain.tail.core.view.members[-1]


def test_nothing_is_shown_that_a_member_which_does_not_read_lacks() -> None:
    chain = Chain(Logs())
    chain.until(lambda: chain.whole() and chain.shown() != [])
    slow = chain.members[int(chain.tail.core.view.members[0][1])]
    chain.logs.learn(3)
    for _ in range(20):
        chain.now_s += TICK_S
        for member in chain.members.values():
            member.read("replication", 1000)
            member.read("gradients", 0 if member is slow else 1000)
            member.tick(chain.now_s)
    assert chain.shown()[-1].version == 0
    chain.turns(20)
    assert chain.shown()[-1].version == 3


def test_under_a_load_that_never_pauses_the_tail_goes_on_showing() -> None:
    chain = Chain(Logs(target_period_versions=10_000))
    chain.until(lambda: chain.whole() and chain.shown() != [])
    before = len(chain.shown())
    for _ in range(60):
        chain.logs.learn(3)
        chain.turns()
    assert len(chain.shown()) - before > 10, (
        "a snapshot is of one moment and waits for its token while the state goes on"
    )


@pytest.mark.parametrize("position", [0, 1, 2])
def test_whoever_dies_the_others_go_on_and_it_joins_behind_the_tail(position: int) -> None:
    chain = Chain(Logs())
    chain.until(chain.whole)
    chain.logs.learn(13)
    chain.turns(10)
    victim = int(chain.tail.core.view.members[position][1])
    del chain.members[victim]
    chain.logs.learn(10)
    chain.until(lambda: chain.whole() and chain.shown()[-1].version == 23)
    chain.start(victim)
    chain.until(chain.whole)
    assert chain.tail.number == victim
    chain.logs.learn(4)
    chain.turns(20)
    check(chain, 27)


def test_one_whose_state_diverged_is_removed_by_its_hash_and_rebuilt() -> None:
    chain = Chain(Logs())
    chain.until(chain.whole)
    chain.logs.learn(9)
    chain.turns(10)
    victim = chain.members[int(chain.tail.core.view.members[0][1])]
    victim.state.weights[3] += F(1)
    chain.logs.learn(5)
    with pytest.raises(Diverged):
        chain.turns(20)
    del chain.members[victim.number]
    chain.until(chain.whole)
    chain.start(victim.number)
    chain.until(chain.whole)
    chain.logs.learn(6)
    chain.turns(20)
    check(chain, 20)
    assert chain.members[victim.number].state.weights.tobytes() == chain.logs.undisturbed()[20][1]


def test_without_the_rule_about_hashes_a_diverged_member_stays_and_shows_what_is_not_the_logs() -> None:
    """The mutation of rule 13; the others are test_replication_exhaustive.py's."""
    chain = Chain(Logs(), rules=Rules(diverged_are_removed=False))
    chain.until(chain.whole)
    chain.logs.learn(9)
    chain.turns(10)
    chain.tail.state.weights[3] += F(1)
    chain.logs.learn(20)
    chain.turns(20)
    made = chain.logs.undisturbed()
    assert chain.shown()[-1].payload != made[29][1]


@given(st.integers(0, 10**9))
@settings(max_examples=25, deadline=None)
def test_in_any_order_of_turns_with_deaths_and_restarts_everything_is_shown_once_and_in_order(seed: int) -> None:
    rng = random.Random(seed)
    chain = Chain(Logs())
    for _ in range(150):
        chain.now_s += rng.choice((0.001, TICK_S, 0.1))
        if rng.random() < 0.3:
            chain.logs.learn(rng.randint(1, 4))
        for member in list(chain.members.values()):
            if rng.random() < 0.6:
                member.read("replication", rng.randint(0, 6))
            if rng.random() < 0.6:
                member.read("gradients", rng.randint(0, 4))
            if rng.random() < 0.3:
                member.guard.rise()
            if rng.random() < 0.7:
                member.tick(chain.now_s)
        if rng.random() < 0.03:
            chain.start(rng.randrange(3))  # killed, and there again
    updates = len(chain.logs.topics["gradients"])
    chain.until(lambda: chain.whole() and bool(chain.shown()) and chain.shown()[-1].version == updates)
    chain.turns(3)
    versions = [w.version for w in chain.shown()]
    made = chain.logs.undisturbed()
    assert versions == sorted(versions) and versions[-1] == updates
    assert all(w.payload == made[w.version][1] for w in chain.shown() + chain.shown("target"))
    newest = chain.shown()[-1]
    target = chain.logs.topics["weights"][newest.target_offset]
    assert isinstance(target, Weights) and target.version == newest.version - newest.version % 5
