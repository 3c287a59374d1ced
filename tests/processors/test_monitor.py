"""The monitor's files are what TensorBoard and a picture viewer read."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from consumers.learning_curve import LearningCurve
from consumers.monitor import LEARNER_POINT_EVERY, Charts, MonitorCore, epsilon_tag
from gorila.run_follower import Lag
from gorila.run_progress import RunProgress
from tests.unit.test_run_progress import episode, evaluation, priorities, stats, weights


def charted(folder: Path) -> dict[str, list[tuple[int, float]]]:
    events = EventAccumulator(str(folder), size_guidance={"scalars": 0})
    events.Reload()
    return {tag: [(e.step, e.value) for e in events.Scalars(tag)] for tag in events.Tags()["scalars"]}


def test_tensorboard_reads_what_was_charted(tmp_path: Path) -> None:
    charts = Charts(tmp_path)
    core = MonitorCore(charts, LearningCurve("r", None))
    core.take(episode(21.0, epsilon=0.53), 1_000)
    core.take(episode(22.0, "evaluator"), 1_000)
    core.take(evaluation("screen", 300.0, 900), 2_000)
    core.take(evaluation("confirm", 480.0, 900), 3_000)
    core.take(stats("replay-0", 500, 4000), 4_000)
    for version in range(1, 2 * LEARNER_POINT_EVERY + 1):
        core.take(priorities(version), 5_000)
    progress = RunProgress()
    progress.take(weights(40, 0, [90, 9, 1]), 0)
    core.rates({"updates": 80.5}, [Lag("replay", 3)], progress, 6_000)
    charts.close()
    found = charted(tmp_path)
    assert found["return_by_epsilon/0.5"] == [(7, 21.0)], "the evaluator's episodes are not the actors'"
    assert found["evaluation/screen"] == [(900, 300.0)] and found["evaluation/confirm"] == [(900, 480.0)]
    assert found["replay/sampleable/replay-0"] == [(500, 5.0)]
    for tag, value in (("loss", 0.25), ("gradient_norm", 2.0)):
        assert found[f"{tag}/learner-0"] == [(LEARNER_POINT_EVERY, value), (2 * LEARNER_POINT_EVERY, value)]
    assert found["rate/updates_per_s"] == [(40, 80.5)] and found["lag/replay"] == [(40, 3.0)]
    assert (found["staleness/p50"], found["staleness/p99"]) == ([(40, 0.0)], [(40, 1.0)])


def test_a_value_that_is_not_finite_is_left_out_of_a_chart(tmp_path: Path) -> None:
    charts = Charts(tmp_path)
    for step, value in enumerate((1.0, math.nan, math.inf, 2.0)):
        charts.scalar("x", value, step, 0)
    charts.close()
    assert charted(tmp_path) == {"x": [(0, 1.0), (3, 2.0)]}


def test_a_disk_that_refuses_costs_points_and_is_told_of_once_and_charts_go_on_when_it_takes_again(
    tmp_path: Path,
) -> None:
    folder, told = tmp_path / "tensorboard", []
    folder.write_text("in the way")  # as a full disk does, it makes every write an OSError
    charts = Charts(folder, told.append)
    for step in range(3):
        charts.scalar("x", 1.0, step, 0)
        charts.flush()
    assert len(told) == 1 and isinstance(told[0], OSError)
    folder.unlink()
    charts.flush()
    charts.scalar("x", 2.0, 7, 0)
    charts.close()
    assert charted(folder) == {"x": [(7, 2.0)]}
    assert len(told) == 1


@pytest.mark.parametrize(("epsilon", "tag"), [(1.0, "1.0"), (0.53, "0.5"), (0.064, "0.064"), (0.00065536, "0.00066")])
def test_a_falling_epsilon_is_cut_in_tenths_and_a_ladder_keeps_its_rungs(epsilon: float, tag: str) -> None:
    assert epsilon_tag(epsilon) == tag


def test_the_picture_is_a_picture_with_and_without_anything_to_show(tmp_path: Path) -> None:
    from matplotlib.image import imread

    empty, full = LearningCurve("empty", None), LearningCurve("full", 475.0)
    for version in range(50):
        full.take(episode(float(version)))
        full.take(evaluation("screen", version * 10.0, version))
    full.take(evaluation("confirm", 480.0, 49))
    for curve in (empty, full):
        path = tmp_path / "curve.png"
        curve.draw(path)
        pixels = imread(path)
        assert pixels.shape[0] > 300 and pixels.shape[1] > 600
        assert list(tmp_path.iterdir()) == [path], "no half-written file is left"
    assert len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)) > 20


def test_the_picture_s_points_stay_bounded_however_long_the_run() -> None:
    curve = LearningCurve("r", None)
    for _ in range(30_000):
        curve.take(episode(1.0))
    assert 5_000 <= len(curve.exploring) <= 10_000
