"""summary.json, and the table over several seeds."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path

import pytest

from gorila.config import Config
from gorila.local.seeds_table import mean_and_interval, print_seeds
from gorila.local.summary import Summary, summarise
from gorila.run_progress import RunProgress
from tests.unit.test_run_progress import evaluation, stats, weights

KEYS = """
    run preset seed solved eval_return_mean eval_episodes env_steps updates train_wall_s startup_s samples_per_insert staleness_p50 staleness_p99
    bytes_per_transition dead_letters restarts human_normalised_score
"""  # of the issue; there may be more, none of these may go


def made(progress: RunProgress, config: Config | None = None, first_step_ms: int | None = 3_000) -> Summary:
    return summarise(
        "r",
        config or Config(),
        progress,
        first_step_ms=first_step_ms,
        started_ms=1_000,
        ended_ms=63_000,
        bytes_per_transition=41.26,
        dead_letters=0,
        restarts=2,
        weights_version=8,
        ended_because="solved",
    )


def test_the_wall_time_of_a_solved_run_ends_with_its_confirmation() -> None:
    progress = RunProgress()
    for message, time_ms in (
        (stats("a", 100, 3150), 0),
        (weights(9, 0, [8, 1]), 0),
        (evaluation("confirm", 495.5, 8, solved=True), 33_500),
    ):
        progress.take(message, time_ms)
    summary = made(progress)
    assert (summary.startup_s, summary.train_wall_s) == (2.0, 30.5)
    assert (summary.solved, summary.eval_return_mean, summary.eval_weights_version) == (True, 495.5, 8)
    assert (summary.env_steps, summary.updates, summary.samples_per_insert) == (100, 9, 31.5)
    assert (summary.staleness_p50, summary.staleness_p99, summary.bytes_per_transition) == (0.0, 1.0, 41.3)


def test_a_run_that_never_began_has_nulls_and_no_invented_numbers(tmp_path: Path) -> None:
    path = made(RunProgress(), first_step_ms=None).write(tmp_path)
    found = json.loads(path.read_text())
    assert set(KEYS.split()) <= set(found)
    for key in ("train_wall_s", "startup_s", "eval_return_mean", "samples_per_insert", "staleness_p50"):
        assert found[key] is None
    assert (found["solved"], found["env_steps"], found["restarts"]) == (False, 0, 2)


def test_an_atari_score_names_its_table_and_protocol() -> None:
    progress = RunProgress()
    progress.take(evaluation("screen", 20.25), 0)
    summary = made(progress, Config.model_validate({"env": {"id": "ale:pong"}}))
    assert summary.human_normalised_score == pytest.approx(1.16, abs=0.005)
    assert summary.human_normalised_table and summary.human_normalised_protocol == "no-op starts"


def test_an_interval_is_student_s_and_one_run_has_none() -> None:
    mean, half = mean_and_interval([1.0, 2.0, 3.0])
    assert (mean, half) == (2.0, pytest.approx(4.303 / math.sqrt(3), rel=1e-4))
    mean, half = mean_and_interval([5.0])
    assert mean == 5.0 and math.isnan(half)
    assert math.isnan(mean_and_interval([])[0])


def test_the_table_of_seeds_has_a_row_a_seed_and_the_mean(capsys: pytest.CaptureFixture[str]) -> None:
    rows = []
    for seed, mean in ((3, 480.0), (4, 500.0)):
        progress = RunProgress()
        progress.take(evaluation("screen", mean), 0)
        rows.append(Summary(**{**asdict(made(progress)), "seed": seed}))
    print_seeds(rows)
    shown = capsys.readouterr().out
    assert "480.0" in shown and "500.0" in shown
    assert "eval_return_mean: 490.0 ± 127.1" in shown
    assert max(map(len, shown.splitlines())) <= 80
