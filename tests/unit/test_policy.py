"""A policy as a file: what is saved is what acts, and other files are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch

from gorila.config import Config
from gorila.environment_facts import EnvironmentFacts
from gorila.environments import describe
from gorila.errors import ConfigError, GorilaError, RunError, UsageError
from gorila.network import initial_weights
from gorila.policy import FORMAT, Policy, evaluate_file, save_weights, version_of
from gorila.settings import load_config

CATCH = load_config("catch-pixels", [], {})


def saved(path: Path, config: Config = CATCH, version: int = 42) -> tuple[Path, EnvironmentFacts, np.ndarray]:
    facts = describe(config)
    flat = initial_weights(config, facts)
    save_weights(path / "w.safetensors", flat, version, config, facts)
    return path / "w.safetensors", facts, flat


def frames(count: int) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 256, (count, 24, 24), dtype=np.uint8)


def test_a_loaded_policy_has_the_saved_weights_and_knows_its_run(tmp_path: Path) -> None:
    path, facts, flat = saved(tmp_path)
    policy = Policy.load(path)
    assert policy.network.flat_weights.numpy().tobytes() == flat.tobytes()
    assert (policy.version, version_of(path), policy.config.env.id) == (42, 42, CATCH.env.id)
    assert policy.facts == facts
    assert list(tmp_path.iterdir()) == [path]


def test_one_observation_at_a_time_is_the_network_on_the_stack_of_the_episode(tmp_path: Path) -> None:
    path, _, _ = saved(tmp_path)
    policy = Policy.load(path)
    first, second, third = frames(3)
    actions = [policy.act(first), policy.act(second), policy.act(third)]
    stacks = np.stack([[first, first], [first, second], [second, third]])
    with torch.inference_mode():
        assert actions == policy.network(torch.from_numpy(stacks)).argmax(1).tolist()
    policy.reset()
    assert policy.values(third[None]).tobytes() == Policy.load(path).values(third[None]).tobytes()


def test_lanes_are_independent_of_each_other(tmp_path: Path) -> None:
    path, _, _ = saved(tmp_path)
    together, alone = Policy.load(path, lanes=2), Policy.load(path)
    rows = frames(6).reshape(3, 2, 24, 24)
    for row in rows:
        both, one = together.act(row), alone.act(row[1])
        assert both.shape == (2,) and both[1] == one


def write(path: Path, tensors: dict[str, torch.Tensor], metadata: dict[str, str] | None) -> Path:
    safetensors.torch.save_file(tensors, path, metadata)
    return path


def test_files_that_are_not_policies_are_refused_in_one_line(tmp_path: Path) -> None:
    path, _, _ = saved(tmp_path)
    opened: dict[str, Any] = safetensors.torch.load_file(path)
    with safetensors.safe_open(str(path), framework="pt") as file:
        metadata = file.metadata()
    text = tmp_path / "text"
    text.write_text("hello")
    fewer = dict(list(opened.items())[1:])
    narrow = {name: tensor[..., :1].contiguous() for name, tensor in opened.items()}
    for bad in (
        tmp_path / "missing",
        tmp_path,
        text,
        write(tmp_path / "foreign", opened, None),
        write(tmp_path / "other", opened, {**metadata, "format": "other-1"}),
        write(tmp_path / "fewer", fewer, metadata),
        write(tmp_path / "narrow", narrow, metadata),
        write(tmp_path / "bare", opened, {"format": FORMAT}),
        write(tmp_path / "broken", opened, {**metadata, "config": json.dumps({"run": {"sed": 1}})}),
    ):
        with pytest.raises(UsageError) as refused:
            Policy.load(bad)
        assert "\n" not in str(refused.value), bad


def test_evaluating_a_file_plays_exactly_the_episodes_asked_for_and_is_reproducible(tmp_path: Path) -> None:
    path, _, _ = saved(tmp_path)
    result = evaluate_file(path, 23, None, 0)
    assert (result["episodes"], result["weights_version"], result["epsilon"]) == (23, 42, 0.0)
    assert -1 <= result["return_min"] <= result["return_mean"] <= result["return_max"] <= 1
    assert evaluate_file(path, 23, None, 0) == result
    assert result["human_normalised_score"] is None


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("version", "x"),
        ("version", "9" * 5000),
        ("config", "{"),
        ("config", "[]"),
        ("environment", "{"),
        ("environment", '{"observation_shape": [-1]}'),
        ("environment", '{"observation_dtype": "zzz"}'),
    ],
)
def test_metadata_that_cannot_be_read_are_one_line_that_names_the_file(key: str, text: str, tmp_path: Path) -> None:
    path, facts, _ = saved(tmp_path)
    with safetensors.safe_open(str(path), framework="pt") as opened:
        metadata = opened.metadata()
    if key == "environment" and text != "{":
        text = json.dumps({**json.loads(facts.to_json()), **json.loads(text)})
    safetensors.torch.save_file(safetensors.torch.load_file(path), path, {**metadata, key: text})
    with pytest.raises(GorilaError) as error:
        Policy.load(path)
    assert "\n" not in str(error.value)


def test_a_network_that_no_memory_holds_is_refused_by_its_key() -> None:
    huge = load_config("cartpole", ["network.hidden=[1000000000000000]"], {})
    with pytest.raises(ConfigError, match=r"network\.hidden"):
        initial_weights(huge, describe(huge))


def test_an_environment_that_is_not_the_files_own_is_refused_before_it_is_played(tmp_path: Path) -> None:
    config = load_config("cartpole", [], {})
    other = load_config("cartpole", ["env.id=Acrobot-v1"], {})
    flat = initial_weights(config, describe(config))
    save_weights(tmp_path / "w.safetensors", flat, 3, other, describe(config))
    with pytest.raises(RunError, match="actions is 3, the recording was made with 2"):
        evaluate_file(tmp_path / "w.safetensors", 1, None, 0)
