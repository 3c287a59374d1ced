"""What a person sees: readable at 80 columns, and no harm when nobody looks any more."""

from __future__ import annotations

import os
from io import StringIO

import pytest
from rich.console import Console

from gorila.config import Config
from gorila.local.live_view import LiveView, Rates, eta, short, sparkline
from gorila.run_follower import Lag
from gorila.run_progress import RunProgress
from gorila.settings import load_config
from tests.unit.test_run_progress import episode, evaluation, stats, weights

LAGS = [Lag("replay", 64), Lag("learner", 17), Lag("parameter-server-0-0", 4), Lag("parameter-server-1-0", 0)]


def progress(steps: int = 1_234_567, updates: int = 987_654) -> RunProgress:
    made = RunProgress()
    made.take(stats("replay-0", steps, 8 * steps, "learner: 17 records behind on partition 0, bound 16"), 0)
    made.take(weights(updates, 0, [10]), 0)
    made.take(episode(-20.25), 0)
    made.take(evaluation("screen", -18.125), 0)
    return made


def config(*sets: str) -> Config:
    return load_config("pong", list(sets), {})


@pytest.mark.parametrize("sets", [[], ["run.max_env_steps=50000000"], ["run.max_updates=10000000"]], ids=str)
def test_plain_lines_are_no_wider_than_80_columns(sets: list[str]) -> None:
    view = LiveView("run", config(*sets), Console(file=StringIO()))
    rates = {"steps": 1234.5, "updates": 123.4, "samples": 9e5}
    for line in view.plain_lines(progress(), rates, LAGS, 98_765.0):
        assert len(line) <= 80, line


def test_a_terminal_of_80_columns_shows_the_whole_table() -> None:
    screen = StringIO()
    view = LiveView(
        "pong-s0-20260102-030405",
        config("run.max_updates=2000000"),
        Console(file=screen, width=80, force_terminal=True),
    )
    with view:
        view.event("screen of version 3: mean return -20.7 over 8 episodes")
        for now in (0.0, 10.0):
            view.show(now, progress(1000, 900_000 + 1000 * int(now)), LAGS, [], now)
    text = screen.getvalue()
    for part in (
        "environment steps",
        "46% of 2,000,000 updates",
        "18 min left",
        "server-1 0",
        "replay waits for learner",
        "mean return -20.7",
    ):
        assert part in text, part


def test_without_a_limit_the_goal_is_the_threshold() -> None:
    view = LiveView("run", load_config("cartpole", [], {}), Console(file=StringIO()))
    made = RunProgress()
    assert view.goal(made, {}) == (0.0, "evaluation – of 475")
    made.take(evaluation("screen", 237.5), 0)
    assert view.goal(made, {}) == (0.5, "evaluation 238 of 475")


def test_a_closed_pipe_is_remembered_and_does_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    reading, writing = os.pipe()
    with os.fdopen(writing, "w") as nobody_reads:
        monkeypatch.setattr("sys.stdout", nobody_reads)
        view = LiveView("run", config())
        view.event("one")
        assert not view.closed
        os.close(reading)
        for _ in range(3):
            view.event("two")
        assert view.closed
        with pytest.raises(BrokenPipeError):  # what it could not write is still in the file's buffer
            nobody_reads.flush()
        os.dup2(os.open(os.devnull, os.O_WRONLY), writing)


def test_rates_are_over_the_last_readings() -> None:
    rates = Rates()
    assert rates.take(10.0, {"steps": 5.0}) == {"steps": 0.0}
    assert rates.take(12.0, {"steps": 25.0}) == {"steps": 10.0}


@pytest.mark.parametrize(
    ("value", "text"),
    [(float("nan"), "–"), (0.12345, "0.123"), (21.0, "21"), (123.4, "123"), (12_345.0, "12k"), (-20.25, "-20.2")],
)
def test_numbers_are_short(value: float, text: str) -> None:
    assert short(value) == text


def test_time_left_is_in_words_a_person_uses() -> None:
    assert [eta(s) for s in (-1, 95, 720, 11_100)] == ["0 s", "95 s", "12 min", "3 h 5 min"]


def test_a_sparkline_spans_what_it_shows() -> None:
    assert sparkline([1.0, float("nan"), 2.0, 3.0]) == "▁▄█" and sparkline([]) == "" and sparkline([5.0, 5.0]) == "▁▁"
