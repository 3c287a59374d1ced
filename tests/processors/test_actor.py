"""The actor's core: environments in, blocks out. Cases 11 to 14 and 17 of cases.md, with a game that writes its step into pixel (0, 0)."""

from __future__ import annotations

import dataclasses
import itertools
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gorila.codec import Schemas
from gorila.config import ActorSection
from gorila.environments import describe, make_lanes
from gorila.lanes import GymnasiumLanes, Lanes
from gorila.messages import Episode, TransitionBlock
from gorila.network import build_network, flat_from
from gorila.observations import frame_indices, gather_stack, inflate
from gorila.processor import Outgoing
from gorila.seeds import generator, seed_number
from gorila.settings import load_config
from producers.actor import ActorCore
from producers.policy import Acted, EpsilonGreedy

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))
from counting_env import Counting


class Recording:
    """A policy that keeps what it saw and plays a fixed pattern. Q of action a in a state is newest pixel (0, 0) + a / 10."""

    def __init__(self) -> None:
        self.states: list[Any] = []
        self.loaded: list[float] = []

    def load(self, flat: Any) -> None:
        self.loaded.append(float(flat[0]))

    def act(self, states: Any, epsilon: Any) -> Acted:
        self.states.append(states.copy())
        newest = states[:, -1] if states.ndim == 4 else states
        t = newest[:, 0, 0].astype(np.float32)
        action = (np.arange(len(t)) + len(self.states)) % 4
        return Acted(action.astype(np.int64), t + action.astype(np.float32) / 10, t + np.float32(0.3))


def counting_lanes(lanes: int, limit: int = 0, **kwargs: Any) -> GymnasiumLanes:
    games = [Counting(**kwargs) for _ in range(lanes)]
    return GymnasiumLanes(games, list(range(lanes)), limit, (6, 6), np.dtype(np.uint8))


def core_of(lanes: Lanes, policy: Any = None, stack: int = 2, **actor: Any) -> ActorCore:
    section = ActorSection(lanes=lanes.lanes, **{"block_steps": 4, "max_block_age_ms": 1e6, **actor})
    return ActorCore(section, 3, "actor-3", 77, lanes, stack, policy or Recording(), wall_ms_at_zero=5000)


def play(core: ActorCore, steps: int) -> list[Outgoing]:
    out: list[Outgoing] = []
    for step in range(steps):
        out += core.step(step * 0.001)
    return out + core.cut()


class Rows:
    """The rows of one lane, blocks joined."""

    def __init__(self, out: list[Outgoing], lane: int) -> None:
        blocks = [o.message for o in out if isinstance(o.message, TransitionBlock) and o.message.lane == lane]
        for block, after in itertools.pairwise(blocks):
            assert after.first_step == block.first_step + block.observations.count, "a gap or an overlap"
        self.blocks = blocks
        self.frames = np.concatenate([inflate(block.observations) for block in blocks])
        for name in ("action", "reward", "is_first", "is_last", "terminated", "truncated", "q_taken", "q_max"):
            setattr(self, name, np.concatenate([getattr(block, name) for block in blocks]))

    @property
    def t(self) -> Any:
        return self.frames[:, 0, 0]

    @property
    def episode(self) -> Any:
        return self.frames[:, 0, 1]


@pytest.mark.parametrize("ends_by", ["terminated", "truncated"])
def test_an_episode_of_t_steps_has_t_plus_one_rows_and_one_last_row(ends_by: str) -> None:
    out = play(core_of(counting_lanes(2, lengths=[3, 1, 5], ends_by=ends_by)), 40)
    for lane in range(2):
        rows = Rows(out, lane)
        starts = np.flatnonzero(rows.is_first)
        for number, (start, stop) in enumerate(itertools.pairwise(starts)):
            length = [3, 1, 5][number % 3]
            assert stop - start == length + 1
            assert rows.t[start:stop].tolist() == list(range(length + 1))
            assert set(rows.episode[start:stop].tolist()) == {number}
            assert rows.is_last[start:stop].tolist() == [False] * length + [True]
            assert getattr(rows, ends_by)[start:stop].tolist() == [False] * (length - 1) + [True, False]
            assert rows.reward[start:stop].tolist() == [*range(1, length + 1), 0.0]
            assert rows.action[stop - 1] == -1 and (rows.action[start : stop - 1] >= 0).all()
        assert not (rows.terminated if ends_by == "truncated" else rows.truncated).any()


def test_the_ignored_action_after_an_end_makes_no_transition() -> None:
    """Case 13: the action a row claims is the one its successor's frame shows to have been executed."""
    rows = Rows(play(core_of(counting_lanes(3, lengths=[2, 3])), 50), 1)
    executed = rows.frames[1:, 0, 2]
    for row in range(len(rows.t) - 1):
        if rows.is_last[row]:
            assert executed[row] == 255 and rows.is_first[row + 1]
        else:
            assert executed[row] == rows.action[row] and not rows.is_first[row + 1]


def test_the_last_row_carries_q_max_for_the_truncated_bootstrap_and_no_q_taken() -> None:
    rows = Rows(play(core_of(counting_lanes(1, length=3, ends_by="truncated")), 20), 0)
    np.testing.assert_allclose(rows.q_max, rows.t + 0.3)
    np.testing.assert_allclose(rows.q_taken[rows.is_last], 0.0)
    going = ~rows.is_last
    np.testing.assert_allclose(rows.q_taken[going], rows.t[going] + rows.action[going] / 10, rtol=1e-6)


@settings(max_examples=25, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 6), min_size=1, max_size=4),
    stack=st.integers(1, 4),
    block_steps=st.integers(1, 9),
    cuts=st.sets(st.integers(0, 39)),
)
def test_what_the_policy_saw_is_what_a_reader_stacks_from_the_blocks(
    lengths: list[int], stack: int, block_steps: int, cuts: set[int]
) -> None:
    """Cases 11 and 12: whatever the episode lengths and wherever blocks were cut, no state reaches over an episode's start."""
    policy = Recording()
    core = core_of(counting_lanes(2, lengths=lengths), policy, stack, block_steps=block_steps)
    out: list[Outgoing] = []
    for step in range(40):
        out += core.step(step * 0.001)
        if step in cuts:
            out += core.use_weights(np.full(3, step, np.float32), step)
    out += core.cut()
    for lane in range(2):
        rows = Rows(out, lane)
        since = 0
        for row in range(40):
            since = 0 if rows.is_first[row] else since + 1
            assert rows.t[row] == since
            state = gather_stack(rows.frames, np.array([frame_indices(row, since, stack)]))[0]
            np.testing.assert_array_equal(state, policy.states[row][lane])
    for block in (o.message for o in out if isinstance(o.message, TransitionBlock)):
        block.check()
        assert block.observations.count <= block_steps


def test_new_weights_cut_all_lanes_together_and_a_block_has_one_version_and_one_epsilon() -> None:
    policy = Recording()
    core = core_of(counting_lanes(3), policy, epsilon_versions=100, epsilon_end=0.0)
    out: list[Outgoing] = []
    versions = []
    for step in range(30):
        if step % 7 == 3:
            out += core.use_weights(np.full(1, step, np.float32), step)
        versions.append(core.version)
        out += core.step(step * 0.001)
    out += core.cut()
    for lane in range(3):
        blocks = Rows(out, lane).blocks
        assert [b.first_step for b in blocks] == [b.first_step for b in Rows(out, 0).blocks]
        for block in blocks:
            span = versions[block.first_step : block.first_step + block.observations.count]
            assert set(span) == {block.weights_version}
            assert block.epsilon == pytest.approx(1 - max(block.weights_version, 0) / 100)
    assert policy.loaded == [3, 10, 17, 24]


def test_older_and_equal_versions_are_ignored() -> None:
    policy = Recording()
    core = core_of(counting_lanes(1), policy)
    core.use_weights(np.ones(1, np.float32), 5)
    core.step(0.0)
    assert core.use_weights(np.zeros(1, np.float32), 5) == core.use_weights(np.zeros(1, np.float32), 4) == []
    assert policy.loaded == [1.0] and core.version == 5


def test_a_partial_block_goes_after_its_age_whether_or_not_the_actor_may_step() -> None:
    core = core_of(counting_lanes(2), block_steps=100, max_block_age_ms=500.0)
    assert core.step(10.0) == core.step(10.2) == core.tick(10.4) == []
    assert [b.message.observations.count for b in core.tick(10.5)] == [2, 2]
    assert core.tick(99.0) == []
    assert core.step(100.0) == []
    assert [b.message.observations.count for b in core.step(100.5)] == [2, 2]


def test_without_time_no_block_is_cut_by_age() -> None:
    lanes = counting_lanes(1)
    core = ActorCore(ActorSection(lanes=1, block_steps=4), 0, "actor-0", 0, lanes, 1, Recording(), by_time=False)
    assert [len(core.step(step * 1000.0)) for step in range(4)] == [0, 0, 0, 1]


def test_episodes_carry_raw_returns_and_their_lane_and_count_only_real_steps() -> None:
    out = play(core_of(counting_lanes(2, length=3)), 12)
    episodes = [o.message for o in out if isinstance(o.message, Episode)]
    assert [(e.lane, e.episode_return, e.steps, e.lane_steps_total) for e in episodes] == [
        (0, 6.0, 3, 3), (1, 6.0, 3, 3), (0, 6.0, 3, 6), (1, 6.0, 3, 6), (0, 6.0, 3, 9), (1, 6.0, 3, 9),
    ]  # fmt: skip
    assert all(e.role == "actor" and e.actor_id == "actor-3" and e.terminated for e in episodes)
    assert episodes[0].time_ms == 5002
    core = core_of(counting_lanes(2, length=3))
    play(core, 12)
    assert core.steps_taken == 18 and core.rows_written == 24


def test_records_go_to_the_actors_own_partition_under_its_own_key_and_survive_the_wire() -> None:
    schemas = Schemas()
    out = play(core_of(counting_lanes(2)), 8)
    blocks = [o for o in out if o.topic == "transitions"]
    assert all(
        o.partition is not None for o in out
    )  # a key alone would send records to partitions added later, which nobody reads
    assert {(o.partition, o.key, o.message.actor_epoch) for o in blocks} == {(3, b"actor-3", 77)}
    for record in out:
        back = schemas.decode(schemas.encode(record.message))
        for field in dataclasses.fields(back):
            np.testing.assert_array_equal(getattr(back, field.name), getattr(record.message, field.name))


def test_emitted_blocks_do_not_change_when_the_actor_goes_on() -> None:
    core = core_of(counting_lanes(2))
    first = [o for step in range(4) for o in core.step(step * 0.001)]
    before = [
        (inflate(o.message.observations).copy(), o.message.action.copy(), o.message.is_last.copy()) for o in first
    ]
    play(core, 30)
    for record, (frames, action, is_last) in zip(first, before, strict=True):
        np.testing.assert_array_equal(inflate(record.message.observations), frames)
        np.testing.assert_array_equal(record.message.action, action)
        np.testing.assert_array_equal(record.message.is_last, is_last)


def _real_core(epoch: int, index: int = 0) -> ActorCore:
    config = load_config("cartpole", ["actor.lanes=2"], {})
    facts = describe(config)
    lanes = make_lanes(config, [seed_number(0, "environment", index, lane, epoch) for lane in range(2)])
    policy = EpsilonGreedy(build_network(config, facts), facts.actions, generator(0, "policy", index, 0, epoch))
    return ActorCore(config.actor, index, f"actor-{index}", epoch, lanes, facts.stack, policy)


def test_a_restarted_actor_plays_other_episodes_and_one_epoch_plays_the_same() -> None:
    first, restarted, neighbour, again = (
        Rows(play(core, 60), 0) for core in (_real_core(1), _real_core(2), _real_core(1, index=1), _real_core(1))
    )
    assert not np.array_equal(first.frames[0], restarted.frames[0])
    assert not np.array_equal(first.action, restarted.action)
    assert not np.array_equal(first.frames[0], neighbour.frames[0])
    np.testing.assert_array_equal(first.frames, again.frames)
    np.testing.assert_array_equal(first.action, again.action)


def test_q_taken_is_of_the_action_executed_and_q_max_of_the_best_one() -> None:
    config = load_config("cartpole", [], {})
    facts = describe(config)
    network = build_network(config, facts)
    policy = EpsilonGreedy(network, facts.actions, np.random.default_rng(0))
    states = np.random.default_rng(1).standard_normal((500, 4)).astype(np.float32)
    import torch

    with torch.inference_mode():
        q = network(torch.from_numpy(states)).numpy()
    exploring = policy.act(states, np.full(500, 1.0))
    greedy = policy.act(states, np.zeros(500))
    lanes = np.arange(500)
    np.testing.assert_array_equal(greedy.action, q.argmax(axis=1))
    np.testing.assert_array_equal(greedy.q_taken, q.max(axis=1))
    np.testing.assert_array_equal(exploring.q_taken, q[lanes, exploring.action])
    np.testing.assert_array_equal(exploring.q_max, q.max(axis=1))
    assert 200 < (exploring.action == 0).sum() < 300
    assert (exploring.q_taken < exploring.q_max).any()


def test_epsilon_is_each_lanes_own() -> None:
    config = load_config("cartpole", [], {})
    facts = describe(config)
    policy = EpsilonGreedy(build_network(config, facts), facts.actions, np.random.default_rng(0))
    states = np.random.default_rng(1).standard_normal((2, 4)).astype(np.float32)
    taken = np.stack([policy.act(states, np.array([0.0, 1.0])).action for _ in range(200)])
    assert len(set(taken[:, 0].tolist())) == 1 and 60 < taken[:, 1].sum() < 140


def test_loading_weights_changes_what_the_policy_does_and_torch_has_one_thread() -> None:
    import torch

    config = load_config("cartpole", [], {})
    facts = describe(config)
    network = build_network(config, facts)
    policy = EpsilonGreedy(network, facts.actions, np.random.default_rng(0))
    assert torch.get_num_threads() == 1
    states = np.ones((1, 4), np.float32)
    before = policy.act(states, np.zeros(1)).q_max
    policy.load(flat_from(network) * np.float32(2))
    assert policy.act(states, np.zeros(1)).q_max != before


def test_real_pong_flows_through_the_actor_and_every_sample_is_what_the_policy_saw() -> None:
    config = load_config("pong", ["actor.lanes=2"], {})
    facts = describe(config)
    lanes = make_lanes(config, [1, 2], max_episode_steps=20)
    policy = EpsilonGreedy(build_network(config, facts), facts.actions, np.random.default_rng(0))
    seen: list[Any] = []
    act = policy.act
    policy.act = lambda states, epsilon: (seen.append(states.copy()), act(states, epsilon))[1]  # type: ignore[method-assign]
    out = play(ActorCore(config.actor, 0, "actor-0", 0, lanes, facts.stack, policy), 48)
    sizes = [len(Schemas().encode(o.message)) for o in out if o.topic == "transitions"]
    for lane in range(2):
        rows = Rows(out, lane)
        assert np.flatnonzero(rows.is_first).tolist() == [0, 21, 42]
        assert np.flatnonzero(rows.is_last).tolist() == [20, 41] == (np.flatnonzero(rows.truncated) + 1).tolist()
        assert (rows.frames.reshape(48, -1).max(axis=1) > 50).all()
        since = 0
        for row in range(48):
            since = 0 if rows.is_first[row] else since + 1
            state = gather_stack(rows.frames, np.array([frame_indices(row, since, 4)]))[0]
            np.testing.assert_array_equal(state, seen[row][lane])
    assert sum(sizes) / 96 < 250
