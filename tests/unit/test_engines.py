"""Which Beam runner replay runs on: every spelling, and what is refused before anything starts."""

from __future__ import annotations

import subprocess
import sys

import pytest

from gorila.engines import FLINK, FN_API, PORTABLE, PRISM, Engine, runner_named
from gorila.errors import ConfigError, UsageError
from gorila.lag_bounds import refuse_narrow_transitions
from gorila.settings import load_config


@pytest.mark.parametrize(
    ("word", "runner"),
    [
        ("", FN_API),
        ("fn-api", FN_API),
        ("FnApiRunner", FN_API),
        ("prism", PRISM),
        ("PrismRunner", PRISM),
        ("portable", PORTABLE),
        ("PortableRunner", PORTABLE),
        ("flink", FLINK),
        ("FlinkRunner", FLINK),
    ],
)
def test_a_runner_is_known_by_beams_name_and_by_ours(word: str, runner: str) -> None:
    assert runner_named(word) == runner


def test_direct_runner_is_refused_and_says_why() -> None:
    with pytest.raises(UsageError, match="DirectRunner is not allowed: it would choose another one silently: fn-api"):
        Engine.asked("DirectRunner")
    with pytest.raises(UsageError, match="--runner spark is not allowed: fn-api, prism, portable, flink"):
        Engine.asked("spark")


def test_flink_has_a_pool_beside_each_task_manager_and_a_split_a_slot() -> None:
    engine = Engine.asked("flink", flink_master="jobmanager:8081", parallelism=4)
    assert engine.worker_pool == "localhost:50000"
    assert engine.splits(0) == ["replay-0", "replay-1", "replay-2", "replay-3"]
    assert engine.checkpointing_interval_ms > 0
    assert engine.max_bundle_time_ms > 0
    assert engine.state_cache_mb > 0
    assert Engine.asked("prism").splits(3) == ["replay-3"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"runner": "flink"}, "--runner=flink needs --flink-master"),
        ({"runner": "portable"}, "--runner=portable needs --job-endpoint"),
        ({"runner": "flink", "flink_master": "jobmanager"}, "--flink-master jobmanager is not allowed: HOST:PORT"),
        ({"runner": "flink", "job_endpoint": "host:0"}, "--job-endpoint host:0 is not allowed: HOST:PORT"),
        (
            {"runner": "prism", "job_endpoint": "host:1"},
            "--job-endpoint goes with --runner=portable|flink, not with prism",
        ),
        (
            {"runner": "portable", "flink_master": "h:1", "job_endpoint": "h:1"},
            "--flink-master goes with --runner=flink",
        ),
        ({"parallelism": 2}, r"--parallelism goes with --runner=prism\|portable\|flink, not with fn-api"),
        ({"runner": "prism", "parallelism": 0}, "--parallelism 0 is not allowed: 1 to 4096"),
        ({"runner": "prism", "state_cache_mb": 0}, "--state-cache-mb 0 is not allowed: 1 to"),
        ({"runner": "flink", "flink_master": "h:1", "max_bundle_time_ms": 0}, "--max-bundle-time-ms 0 is not allowed"),
    ],
)
def test_what_could_not_work_is_refused_naming_the_option(options: dict[str, object], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        Engine.asked(**options)  # type: ignore[arg-type]


@pytest.mark.parametrize("interval_ms", [0, -1])
def test_flink_without_checkpoints_is_refused(interval_ms: int) -> None:
    with pytest.raises(UsageError, match=f"--checkpointing-interval-ms {interval_ms} is not allowed: above 0"):
        Engine.asked("flink", flink_master="h:1", checkpointing_interval_ms=interval_ms)


def test_an_actors_bound_too_small_for_the_checkpointing_interval_is_refused() -> None:
    config = load_config("cartpole", ["actor.max_steps_per_s=1600", "actor.max_lag_records=200"], {})
    refuse_narrow_transitions(config, 1000)  # 2 * 100 blocks/s * 1 s
    with pytest.raises(
        ConfigError, match=r"actor.max_lag_records = 200 is not allowed: 202 or more.*checkpointing-interval-ms"
    ):
        refuse_narrow_transitions(config, 1010)
    refuse_narrow_transitions(load_config("pong", [], {}), 60_000)  # no rate is set: the bound is the limit


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--runner=flink"], "--runner=flink needs --flink-master"),
        (["--runner=prism", "--from", "kafka:x", "--updates", "1"], "--from goes with --runner=fn-api"),
        (["worker-pool", "--listen", "nowhere"], "--listen nowhere is not allowed: HOST:PORT"),
        (["worker-pool", "--run", "x"], "takes no --run"),
        (["something"], "worker-pool, the only word"),
        ([], "--run is needed"),
    ],
)
def test_the_command_says_so_in_one_line_and_exits_with_2(words: list[str], said: str) -> None:
    run = [] if not words or words[0] in ("worker-pool", "something") else ["--run", "r"]
    done = subprocess.run(
        [sys.executable, "-m", "gorila.cli", "replay", *words, *run, "--bootstrap-servers", "localhost:9"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2, done.stderr
    assert said in done.stderr
    assert len(done.stderr.splitlines()) == 1
