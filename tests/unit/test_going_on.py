"""`gorila train --resume`: which options go together, what contradicts a run, when a run may go on, what a fork may change."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from gorila.config import Config
from gorila.errors import ConfigError, RunError, UsageError
from gorila.local import resume
from gorila.local.fork import forked_config
from gorila.local.going_on import GoingOn, Memory
from gorila.local.resume import refuse_finished, resumed_config, wait_until_left
from gorila.local.run_parts import read_parts
from gorila.local.summary import restarts_before
from gorila.messages import Evaluation
from gorila.run_progress import RunProgress
from gorila.run_state import RunState
from gorila.settings import load_config


@pytest.fixture(autouse=True)
def no_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GORILA__KAFKA__BOOTSTRAP_SERVERS", raising=False)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (GoingOn("", at=3), "go with --resume RUN"),
        (GoingOn("", new="x"), "go with --resume RUN"),
        (GoingOn("", memory=Memory.EMPTY), "go with --resume RUN"),
        (GoingOn("r", new="x"), "--at OFFSET or --at-version V"),
        (GoingOn("r", at=3, at_version=4, new="x"), "--at OFFSET or --at-version V"),
        (GoingOn("r", at=3), "--as NEW names it"),
        (GoingOn("r", memory=Memory.EMPTY), "--as NEW names it"),
    ],
)
def test_options_that_do_not_go_together_are_one_line(asked: GoingOn, says: str) -> None:
    with pytest.raises(UsageError, match=says):
        asked.check({})


def test_a_run_that_is_there_decides_its_preset_and_seed() -> None:
    with pytest.raises(UsageError, match="--seed does not go with --resume"):
        GoingOn("r").check({"PRESET": "", "--seed": True})
    assert GoingOn("r").check({"PRESET": "", "--seed": False})
    assert GoingOn("r", at_version=0, new="x").check({})
    assert not GoingOn("").check({"PRESET": "pong", "--seed": True})


def test_a_key_that_contradicts_the_run_is_named_and_limits_may_be_raised() -> None:
    run = load_config("cartpole", ["run.max_updates=10"], {})
    raised = resumed_config(run, ["kafka.bootstrap_servers=h:1", "learner.batch_size=128"], 500, 20)
    assert (raised.run.max_env_steps, raised.run.max_updates, raised.kafka.bootstrap_servers) == (500, 20, "h:1")
    assert resumed_config(run, [], 0, 0).run == run.run
    with pytest.raises(RunError, match=r"learner\.batch_size = 64 contradicts the run, which has 128"):
        resumed_config(run, ["learner.batch_size=64"], 0, 0)
    # A role started by hand may have a codec of its own; one that `train` starts reads the run's record.
    with pytest.raises(RunError, match=r"learner\.codec = 'fp16' contradicts the run"):
        resumed_config(run, ["learner.codec=fp16"], 0, 0)


def test_a_fork_may_change_what_the_rebuilt_state_is_not_made_for() -> None:
    source = SimpleNamespace(run="r", config=load_config("cartpole", [], {}))

    def forked(*sets: str, empty_memory: bool = False) -> Config:
        return forked_config(source, sets, 0, 700, empty_memory)  # type: ignore[arg-type]

    made = forked("parameter_server.learning_rate=0.001", "learner.codec=fp16")
    assert (made.parameter_server.learning_rate, made.learner.codec, made.run.max_updates) == (0.001, "fp16", 700)
    for key, value in (
        ("network.hidden", "[8]"),
        ("env.id", "Acrobot-v1"),
        ("parameter_server.shards", "2"),
        ("parameter_server.optimizer", "sgd"),
        ("run.synchronous", "true"),
        ("actor.count", "2"),
    ):
        with pytest.raises(RunError, match=key.replace(".", r"\.") + r" = .* contradicts run r"):
            forked(f"{key}={value}")
    assert forked("actor.count=2", empty_memory=True).actor.count == 2
    with pytest.raises(ConfigError, match=r"learner\.batch_size"):
        forked("learner.batch_size=0")
    source.config = load_config("cartpole", ["run.synchronous=true"], {})
    with pytest.raises(RunError, match="cannot be forked"):
        forked()


def test_a_run_is_not_gone_on_with_while_somebody_works_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "LEFT_WITHIN_S", 0.0)
    busy = RunState("r", 1_000, newest_ms={("transitions", 0): 900})
    with pytest.raises(RunError, match="run r is still running: something was written 0 s ago"):
        wait_until_left("r", lambda: busy, print)
    wait_until_left("r", lambda: RunState("r", 60_000, newest_ms={("transitions", 0): 900}), print)


def test_a_killed_run_is_waited_for_until_it_has_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resume, "LOOK_S", 0.0)
    looks = [RunState("r", now, newest_ms={("weights", 0): 900}) for now in (1_000, 2_000, 9_000)]
    said: list[str] = []
    wait_until_left("r", lambda: looks.pop(0), said.append)
    assert not looks and len(said) == 1 and said[0].startswith("waiting until nobody works for r any more")


def test_a_finished_run_says_what_would_let_it_go_on() -> None:
    config = load_config("cartpole", ["run.max_updates=10", "run.max_env_steps=100"], {})
    refuse_finished("r", config, RunProgress(env_steps=99, updates=9))
    with pytest.raises(RunError, match=r"10 updates of run\.max_updates = 10; --updates N above it"):
        refuse_finished("r", config, RunProgress(updates=10))
    with pytest.raises(RunError, match=r"100 steps of run\.max_env_steps = 100; --steps N above it"):
        refuse_finished("r", config, RunProgress(env_steps=100))
    solved = Evaluation("e", 77, "confirm", 100, 480.0, 1.0, 470.0, 500.0, 0.0, True, 5)
    with pytest.raises(RunError, match=r"version 77 solved it .* fork it"):
        refuse_finished("r", config, RunProgress(confirmed=solved, solved_at_ms=5))


def test_what_the_folder_does_not_know_of_earlier_parts_is_nothing(tmp_path: Path) -> None:
    assert (read_parts(tmp_path), restarts_before(tmp_path), restarts_before(None)) == ([], 0, 0)
    (tmp_path / "parts.json").write_text(json.dumps([{"started_ms": 5, "starts": [1, 2]}]))
    (tmp_path / "summary.json").write_text('{"restarts": 3}')
    assert (read_parts(tmp_path)[0].starts, restarts_before(tmp_path)) == ((1, 2), 3)
    for name in ("parts.json", "summary.json"):
        (tmp_path / name).write_text("[{")
    assert (read_parts(tmp_path), restarts_before(tmp_path)) == ([], 0)
