"""A lag bound below 2 * rate * commit interval is refused before anything is made (design section 5)."""

from __future__ import annotations

import json

import pytest

from gorila.errors import ConfigError
from gorila.settings import canonical_json, config_of_run, load_config, preset_names


def refused(*sets: str) -> str:
    with pytest.raises(ConfigError) as error:
        load_config("cartpole", sets, {})
    return str(error.value)


def test_an_actors_bound_must_hold_two_commit_intervals_of_blocks() -> None:
    rates = ("actor.max_steps_per_s=3200", "actor.block_steps=16", "replay.commit_interval_ms=200")
    load_config("cartpole", (*rates, "actor.max_lag_records=80"), {})  # 2 * 200 blocks/s * 0.2 s
    said = refused(*rates, "actor.max_lag_records=79")
    assert said.startswith("actor.max_lag_records = 79 is not allowed: 80 or more")
    for key in ("actor.max_steps_per_s (3200)", "actor.block_steps (16)", "replay.commit_interval_ms (200 ms)"):
        assert key in said


def test_each_side_of_the_actors_rule_can_be_given_way() -> None:
    narrow = "actor.max_lag_records=10"
    assert "actor.max_lag_records = 10" in refused(narrow)
    for way_out in ("actor.max_steps_per_s=800", "replay.commit_interval_ms=20", "actor.block_steps=80"):
        load_config("cartpole", (narrow, way_out), {})
    load_config("cartpole", (narrow, "actor.max_steps_per_s=0"), {})  # no rate is configured: the bound is the limit


def test_replays_bound_must_hold_two_windows_of_a_learner() -> None:
    load_config("cartpole", ("learner.max_in_flight=5", "replay.max_lag_batches=10"), {})
    said = refused("learner.max_in_flight=5", "replay.max_lag_batches=9")
    assert "replay.max_lag_batches = 9 is not allowed: 10 or more: 2 * learner.max_in_flight (5)" in said
    load_config(
        "cartpole", ("learner.max_in_flight=0", "replay.max_lag_batches=1"), {}
    )  # without bound, without a rate


def test_a_learners_bound_must_hold_two_windows_of_all_learners() -> None:
    sets = ("learner.count=3", "learner.max_in_flight=4")
    load_config("cartpole", (*sets, "learner.max_lag_records=24"), {})
    said = refused(*sets, "learner.max_lag_records=23")
    assert "learner.max_lag_records = 23 is not allowed: 24 or more" in said
    assert "learner.count (3) * learner.max_in_flight (4)" in said


def test_rounds_have_no_use_for_bounds() -> None:
    load_config("cartpole", ("run.synchronous=true", "actor.max_lag_records=1", "learner.max_lag_records=1"), {})


@pytest.mark.parametrize("preset", preset_names())
def test_every_preset_keeps_to_it(preset: str) -> None:
    load_config(preset, (), {})


def test_a_run_of_before_is_still_read() -> None:
    """A recording explains itself; that its actors stood still at times is no reason to lose it."""
    tree = json.loads(canonical_json(load_config("cartpole", (), {})))
    tree["actor"]["max_lag_records"] = 1
    assert config_of_run(json.dumps(tree), (), {}).actor.max_lag_records == 1


def test_an_interval_beyond_all_numbers_is_refused_too() -> None:
    assert refused("replay.commit_interval_ms=1e308").startswith(
        "actor.max_lag_records = 64 is not allowed: inf or more"
    )
