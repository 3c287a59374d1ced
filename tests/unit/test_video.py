"""An episode as a file that other programs open: as many frames as steps, each what the environment showed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gorila.cli import main
from gorila.environments import describe, make_lanes
from gorila.network import initial_weights
from gorila.policy import save_weights
from gorila.seeds import seed_number
from gorila.settings import load_config
from gorila.video import film

Image = pytest.importorskip("PIL.Image", reason="pillow is not installed: pip install 'gorila-stream[video]'")

FLAT = 'env.wrappers=["gymnasium.wrappers:FlattenObservation"]'


def saved(folder: Path, preset: str, *sets: str) -> Path:
    config = load_config(preset, list(sets), {})
    facts = describe(config)
    save_weights(folder / "w.safetensors", initial_weights(config, facts), 1, config, facts)
    return folder / "w.safetensors"


def shown(path: Path) -> list[tuple[int, np.ndarray]]:
    """(duration in ms, RGB pixels) of each frame a reader of the file sees."""
    found = []
    with Image.open(path) as opened:
        for number in range(opened.n_frames):
            opened.seek(number)
            opened.load()
            found.append((int(opened.info["duration"]), np.asarray(opened.convert("RGB"))))
    return found


@pytest.mark.parametrize("suffix", [".gif", ".webp", ".png"])
def test_every_step_has_its_frame_and_each_is_what_the_environment_rendered(tmp_path: Path, suffix: str) -> None:
    weights, path = saved(tmp_path, "catch-pixels"), tmp_path / f"play{suffix}"
    told = film(weights, path, None, 3)
    assert (told["steps"], told["frames"], told["frames_per_s"]) == (7, 8, 30.0) and told["return"] in (-1.0, 1.0)
    frames = shown(path)
    assert sum(duration for duration, _ in frames) == 8 * 30
    assert len(frames) == 8, "the ball falls: no two frames are equal"
    first = make_lanes(load_config("catch-pixels", [], {}), [seed_number(3, "evaluator", 0, 0)]).reset()[0]
    for _, pixels in frames:
        assert pixels.shape == (192, 192, 3)
        assert set(np.unique(pixels).tolist()) <= {0, 170, 255}
    assert np.array_equal(frames[0][1][::8, ::8, 0], first)
    rows = [int(np.flatnonzero((pixels[::24, ::24, 0] == 255).any(1))[0]) for _, pixels in frames]
    assert rows[:7] == [0, 1, 2, 3, 4, 5, 6], "the ball is one row lower in each"
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["w.safetensors", path.name])


def test_an_atari_game_is_filmed_as_the_network_sees_it(tmp_path: Path) -> None:
    pytest.importorskip("ale_py")
    weights = saved(tmp_path, "pong", "evaluator.max_episode_steps=30")
    told = film(weights, tmp_path / "play.gif", None, 0)
    assert (told["steps"], told["frames"], told["frames_per_s"]) == (30, 31, 15.0)
    frames = shown(tmp_path / "play.gif")
    assert sum(duration for duration, _ in frames) == 31 * 70
    assert {pixels.shape for _, pixels in frames} == {(252, 252, 3)} and len(frames) > 5


def test_the_command_plays_films_and_prints_json_and_nothing_else(tmp_path: Path) -> None:
    pytest.importorskip("pygame")
    weights = saved(tmp_path, "cartpole")
    words = ["evaluate", str(weights), "--episodes", "2", "--video", str(tmp_path / "play.webp")]
    done = subprocess.run(
        [sys.executable, "-m", "gorila.cli", *words], capture_output=True, text=True, timeout=170, check=True
    )
    told: dict[str, Any] = json.loads(done.stdout)
    assert told["episodes"] == 2 and told["video"]["frames"] == told["video"]["steps"] + 1
    frames = shown(tmp_path / "play.webp")
    assert sum(duration for duration, _ in frames) == 20 * told["video"]["frames"]
    assert frames[0][1].shape == (400, 600, 3) and len(frames) > 2
    assert done.stderr == ""


@pytest.mark.parametrize(
    ("preset", "sets", "name", "code", "says"),
    [
        ("catch-pixels", [], "play.mp4", 2, ".gif, .webp, .png"),
        ("cartpole", ["env.id=tests.unit.counting_env:make", FLAT], "play.gif", 2, "cannot be filmed"),
        ("catch-pixels", [], "no/play.gif", 1, "cannot write"),
    ],
    ids=["suffix", "no-picture", "no-folder"],
)
def test_what_cannot_be_filmed_is_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], preset: str, sets: list[str], name: str, code: int, says: str
) -> None:
    weights = saved(tmp_path, preset, *sets)
    with pytest.raises(SystemExit) as ended:
        main(["evaluate", str(weights), "--video", str(tmp_path / name)])
    said = capsys.readouterr()
    assert ended.value.code == code and said.out == ""
    assert says in said.err and said.err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["w.safetensors"]
