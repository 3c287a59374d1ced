"""Cases 12 to 15 of cases.md as they reach the lanes, on real Atari where Atari is meant."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gorila.environment_facts import EnvironmentFacts
from gorila.environments import describe, make_lanes
from gorila.errors import ConfigError, LocalError, RunError
from gorila.lanes import Lanes
from gorila.seeds import seed_number, seed_sequence
from gorila.settings import load_config

sys.path.insert(0, str(Path(__file__).parent))


def _config(*sets: str) -> Any:
    return load_config("cartpole", sets, {})


def _counting(**kwargs: Any) -> Any:
    import json

    return _config("env.id=counting_env:make", f"env.kwargs={json.dumps(kwargs)}")


def _roll(lanes: Lanes, steps: int, action: int = 0) -> list[Any]:
    lanes.reset()
    taken = []
    for _ in range(steps):
        step = lanes.step(np.full(lanes.lanes, action, np.int64))
        step.observations = step.observations.copy()
        taken.append(step)
    return taken


# ---- Gymnasium lanes


@pytest.mark.parametrize("ends_by", ["terminated", "truncated"])
def test_the_final_observation_is_the_real_one_and_the_call_after_it_begins_the_next_episode(ends_by: str) -> None:
    steps = _roll(make_lanes(_counting(length=3, ends_by=ends_by), [1]), 8)
    assert [int(s.observations[0, 0, 0]) for s in steps] == [1, 2, 3, 0, 1, 2, 3, 0]
    assert [int(s.observations[0, 0, 1]) for s in steps] == [0, 0, 0, 1, 1, 1, 1, 2]
    assert [bool(getattr(s, ends_by)[0]) for s in steps] == [False, False, True, False, False, False, True, False]
    assert [bool(s.is_first[0]) for s in steps] == [False, False, False, True, False, False, False, True]
    assert [float(s.reward[0]) for s in steps] == [1, 2, 3, 0, 1, 2, 3, 0]
    other = "truncated" if ends_by == "terminated" else "terminated"
    assert not any(getattr(s, other).any() for s in steps)


def test_lanes_end_independently_of_each_other() -> None:
    lanes = make_lanes(_counting(lengths=[2, 4]), [1, 2])
    lanes.reset()
    lanes._envs[1].episode = 1  # lane 1 begins with the longer episode
    ended = [lanes.step(np.zeros(2, np.int64)).terminated.tolist() for _ in range(5)]
    assert ended == [[False, False], [True, False], [False, False], [False, True], [False, False]]


def test_our_own_limit_truncates_with_the_real_final_observation() -> None:
    steps = _roll(make_lanes(_counting(length=9), [1], max_episode_steps=4), 6)
    assert [bool(s.truncated[0]) for s in steps] == [False, False, False, True, False, False]
    assert not any(s.terminated.any() for s in steps)
    assert [int(s.observations[0, 0, 0]) for s in steps] == [1, 2, 3, 4, 0, 1]


def test_an_end_at_the_limit_is_terminated_not_truncated() -> None:
    steps = _roll(make_lanes(_counting(length=4), [1], max_episode_steps=4), 4)
    assert steps[-1].terminated.tolist() == [True] and steps[-1].truncated.tolist() == [False]


def test_actions_count_from_zero_whatever_the_space_starts_with() -> None:
    steps = _roll(make_lanes(_counting(), [1]), 2, action=3)
    assert int(steps[0].observations[0, 0, 2]) == 3


def test_wrappers_by_import_path_are_applied() -> None:
    lanes = make_lanes(_config("env.id=counting_env:make", 'env.wrappers=["counting_env:Brighter"]'), [1])
    assert int(lanes.reset()[0, 5, 5]) == 200


def test_a_users_module_in_the_working_directory_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "my_game_of_this_test.py").write_text("from counting_env import Counting as Mine\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [entry for entry in sys.path if entry])
    assert describe(_config("env.id=my_game_of_this_test:Mine")).actions == 4


def test_float64_observations_travel_as_float32() -> None:
    assert describe(_config("env.id=CartPole-v1")).observation_dtype == "float32"
    assert describe(_config("env.id=counting_env:spaced")).observation_dtype == "float32"


def test_two_runs_of_one_seed_agree_and_lanes_differ() -> None:
    first = make_lanes(_config(), [seed_number(0, "environment", 0, lane) for lane in range(3)]).reset().copy()
    again = make_lanes(_config(), [seed_number(0, "environment", 0, lane) for lane in range(3)]).reset().copy()
    np.testing.assert_array_equal(first, again)
    assert len({row.tobytes() for row in first}) == 3


# ---- seeds


def test_no_two_lanes_actors_roles_or_epochs_share_a_seed() -> None:
    states = {
        tuple(seed_sequence(0, role, actor, lane, epoch).generate_state(2).tolist())
        for role in ("environment", "evaluator", "policy")
        for actor in range(10)
        for lane in range(8)
        for epoch in (0, 1, 1_700_000_000_000)
    }
    assert len(states) == 3 * 10 * 8 * 3


# ---- refusals, each one line


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["env.id=counting_env:spaced", 'env.kwargs={"observation":"dict"}'], ["Dict", "Box"]),
        (["env.id=counting_env:spaced", 'env.kwargs={"observation":"tuple"}'], ["Tuple", "Box"]),
        (["env.id=counting_env:spaced", 'env.kwargs={"observation":"text"}'], ["Text", "Box"]),
        (["env.id=counting_env:spaced", 'env.kwargs={"action":"box"}'], ["Box", "Discrete"]),
        (["env.id=counting_env:spaced", 'env.kwargs={"action":"multi"}'], ["MultiDiscrete", "Discrete"]),
        (["env.id=Pendulum-v1"], ["Box", "Discrete"]),
        (["env.id=CartPol-v1"], ["CartPole-v1"]),
        (["env.id=CartPole-v1", 'env.kwargs={"grvity":1}'], ["grvity"]),
        (["env.id=no_such_module:make"], ["no module", "no_such_module"]),
        (["env.id=counting_env:mak"], ["make"]),
        (["env.id=builtins:dict"], ["dict"]),
        (["env.id=counting_env:make", 'env.wrappers=["counting_env:Brightest"]'], ["Brighter"]),
        (["env.id=ale:pog"], ["ale:pong"]),
        (["env.id=ale:MsPacman"], ["ale:ms_pacman"]),
        (["env.id=ale:pong", 'env.kwargs={"reward_clipping":true}'], ["reward_clipping", "False"]),
        (["env.id=ale:pong", 'env.kwargs={"no_such":1}'], ["no_such"]),
        (["env.id=ale:pong", 'env.wrappers=["counting_env:Brighter"]'], ["env.wrappers"]),
    ],
)
def test_what_cannot_be_taken_is_refused_in_one_line_that_says_what_is(sets: list[str], words: list[str]) -> None:
    with pytest.raises(ConfigError) as refused:
        describe(_config(*sets))
    text = str(refused.value)
    assert "\n" not in text and len(text) < 300
    for word in (*words, "env."):
        assert word in text


def test_atari_without_its_extra_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ale_py.roms", None)
    monkeypatch.setitem(sys.modules, "ale_py", None)
    for name in ("ale:pong", "ALE/Pong-v5"):
        with pytest.raises(LocalError, match="atari"):
            describe(_config(f"env.id={name}"))


# ---- facts


def test_facts_survive_their_text_and_a_mismatch_is_named() -> None:
    facts = describe(_config("env.id=ale:pong", "env.stack=4"))
    assert (facts.state_shape, facts.actions, facts.max_episode_steps) == ((4, 84, 84), 6, 27_000)
    assert EnvironmentFacts.from_json(facts.to_json()) == facts
    facts.refuse_mismatch(EnvironmentFacts.from_json(facts.to_json()))
    sticky = describe(_config("env.id=ale:pong", "env.stack=4", "env.repeat_action_probability=0.25"))
    with pytest.raises(RunError, match=r"repeat_action_probability is 0\.25"):
        facts.refuse_mismatch(sticky)
    with pytest.raises(RunError, match="actions is 2"):
        facts.refuse_mismatch(describe(_config()))
    with pytest.raises(RunError, match="cannot be read"):
        EnvironmentFacts.from_json("{}")


# ---- Atari


def _pong(*sets: str, seeds: tuple[int, ...] = (3, 900), limit: int = 0) -> Any:
    return make_lanes(_config("env.id=ale:pong", *sets), list(seeds), max_episode_steps=limit)


def test_atari_frames_have_no_stack_rewards_are_raw_floats_and_the_first_frame_is_not_black() -> None:
    for sets in ([], ["env.noop_max=0"], ["env.noop_max=0", "env.frame_skip=1"]):
        lanes = _pong(*sets)
        first = lanes.reset()
        assert first.shape == (2, 84, 84) and first.dtype == np.uint8
        assert (first.reshape(2, -1).max(axis=1) > 50).all()
        step = lanes.step(np.zeros(2, np.int64))
        assert step.observations.shape == (2, 84, 84) and step.reward.dtype == np.float32
        lanes.close()


def test_a_frame_skip_of_one_shows_no_ghost_of_the_frame_before() -> None:
    """Pooling one frame with the stale one before it would draw every moving thing twice. ale-py 0.12.1 does not, whatever `maxpool` says; others did."""
    ours = _pong("env.frame_skip=1", "env.noop_max=0")
    from ale_py.vector_env import AtariVectorEnv

    plain = AtariVectorEnv("pong", 2, stack_num=1, frameskip=1, maxpool=False, noop_max=0, reward_clipping=False)
    a, b = ours.reset(), plain.reset(seed=np.array([3, 900]))[0][:, 0]
    for step in range(120):
        np.testing.assert_array_equal(a, b)
        actions = np.full(2, step // 20 % 6, np.int64)
        a, b = ours.step(actions).observations, plain.step(actions)[0][:, 0]


def test_truncating_one_atari_lane_leaves_the_others_untouched() -> None:
    cut, free = _pong(limit=7), _pong()
    cut.reset(), free.reset()
    cut._episode_steps[1] = -10_000  # lane 1 has a long way to go
    actions = np.zeros(2, np.int64)
    truncated = []
    for call in range(20):
        a, b = cut.step(actions), free.step(actions)
        truncated.append(bool(a.truncated[0]))
        np.testing.assert_array_equal(a.observations[1], b.observations[1])
        if call < 7:
            np.testing.assert_array_equal(a.observations[0], b.observations[0])  # up to and with the final one
        assert bool(a.is_first[0]) == (call in (7, 15))
        assert not a.terminated.any() and not a.truncated[1] and not a.is_first[1]
    assert [i for i, t in enumerate(truncated) if t] == [6, 14]


def test_a_lane_that_the_ignored_step_would_have_ended_begins_one_episode_not_two() -> None:
    """Pong with idle players ends after about 760 steps: truncate one step before, so that the thrown-away step terminates."""
    free = _pong(seeds=(3,))
    free.reset()
    length = 1
    while not free.step(np.zeros(1, np.int64)).terminated[0]:
        length += 1
    lanes = _pong(seeds=(3,), limit=length - 1)
    steps = _roll(lanes, length + 3)
    assert steps[length - 2].truncated[0] and not any(s.terminated.any() for s in steps)
    assert [bool(s.is_first[0]) for s in steps[length - 1 :]] == [True, False, False, False]
    assert not np.array_equal(steps[length - 1].observations, steps[length - 2].observations)


def test_a_random_pong_game_returns_its_raw_score() -> None:
    """Case 15: clipped, per-life or per-point returns would all lie outside [-21, -15] for most random games."""
    lanes = _pong(seeds=(1, 2))
    lanes.reset()
    rng = np.random.default_rng(0)
    returns, done, ignored = np.zeros(2), [], 0.0
    running = np.ones(2, np.bool_)
    while running.any():
        step = lanes.step(rng.integers(0, 6, 2))
        returns += np.where(running, step.reward, 0)
        ignored += float(step.reward[step.is_first].sum())
        for lane in np.flatnonzero(running & step.terminated):
            done.append(returns[lane])
            running[lane] = False
    assert all(-21 <= value <= -12 for value in done) and np.mean(done) < -18
    assert ignored == 0.0


def test_a_game_of_three_lives_keeps_its_points_and_goes_on_over_a_lost_life() -> None:
    """Ms. Pac-Man's dots are worth 10 and a random game of three lives takes about 500 steps: clipping, or an episode a life, would show."""
    lanes = make_lanes(_config("env.id=ale:ms_pacman"), [5, 6])
    lanes.reset()
    rng = np.random.default_rng(1)
    episode_steps, lengths, largest = np.zeros(2, np.int64), [], 0.0
    for _ in range(600):
        step = lanes.step(rng.integers(0, 9, 2))
        episode_steps = np.where(step.is_first, 0, episode_steps + 1)
        largest = max(largest, float(step.reward.max()))
        lengths += episode_steps[step.terminated].tolist()
    assert largest >= 10.0
    assert len(lengths) == 2 and min(lengths) > 300
