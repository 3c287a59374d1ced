"""A policy as an ONNX graph: the same Q values without torch, raw states in, and who it is."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from gorila.batch_statistics import buffers_of
from gorila.cli import main
from gorila.environment_facts import EnvironmentFacts
from gorila.environments import describe
from gorila.errors import LocalError
from gorila.network import build_network, initial_weights
from gorila.onnx_export import export_onnx, random_states
from gorila.policy import Policy, save_weights
from gorila.settings import load_config

onnx = pytest.importorskip("onnx", reason="onnx is not installed: pip install 'gorila-stream[export]'")
PONG = EnvironmentFacts("ale:pong", (84, 84), "uint8", 6, 4, 27_000, {"frame_skip": 4})
CARTPOLE = EnvironmentFacts("CartPole-v1", (4,), "float32", 2, 1, 500)


def saved(folder: Path, preset: str, *sets: str, facts: EnvironmentFacts | None = None) -> Path:
    config = load_config(preset, list(sets), {})
    facts = facts or describe(config)
    statistics = None
    if config.network.batch_norm:
        network = build_network(config, facts).train()
        network(torch.from_numpy(np.random.default_rng(1).integers(0, 256, (16, *facts.state_shape), np.uint8)))
        statistics = ("learner-0 at version 42", buffers_of(network))
    notes = {"run": "demo", "return_mean": "9.5"}
    save_weights(folder / "w.safetensors", initial_weights(config, facts), 42, config, facts, notes, statistics)
    return folder / "w.safetensors"


def q_of(graph: Path, states: np.ndarray) -> np.ndarray:
    from onnx.reference import ReferenceEvaluator

    found: np.ndarray = ReferenceEvaluator(onnx.load(graph)).run(None, {"states": states})[0]
    return found


@pytest.mark.parametrize(
    ("preset", "sets", "facts"),
    [
        ("cartpole", ["network.dueling=true"], CARTPOLE),
        ("catch-pixels", ["network.batch_norm=true", "network.dueling=true"], None),
        ("catch-pixels", ["env.stack=1", "env.scale=none"], None),
        ("pong", [], PONG),
    ],
    ids=["vectors-dueling", "frames-batch-norm-dueling", "one-unscaled-frame", "nature"],
)
def test_the_graph_has_the_networks_q_values_for_any_number_of_raw_states(
    tmp_path: Path, preset: str, sets: list[str], facts: EnvironmentFacts | None
) -> None:
    weights = saved(tmp_path, preset, *sets, facts=facts)
    made = export_onnx(weights, tmp_path / "p.onnx")
    policy = Policy.load(weights)
    states = random_states(policy, 13)
    with torch.inference_mode():
        wanted = policy.network(torch.from_numpy(states)).numpy()
    assert np.ptp(wanted) > 0
    for rows in (1, 13):
        assert q_of(made.path, states[:rows]) == pytest.approx(wanted[:rows], abs=1e-5)
    graph = onnx.load(made.path).graph
    [given], [result] = graph.input, graph.output
    kind = onnx.TensorProto.UINT8 if policy.facts.observation_dtype == "uint8" else onnx.TensorProto.FLOAT
    assert (given.name, given.type.tensor_type.elem_type, result.name) == ("states", kind, "q")
    assert [side.dim_value for side in given.type.tensor_type.shape.dim][1:] == list(policy.facts.state_shape)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["p.onnx", "w.safetensors"], "one file, whole"


def test_the_graph_says_whose_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = saved(tmp_path, "catch-pixels", "network.batch_norm=true")
    with pytest.raises(SystemExit) as ended:
        main(["export", "onnx", str(weights), str(tmp_path / "p.onnx")])
    said = capsys.readouterr()
    assert ended.value.code == 0 and said.out.count("\n") == 1 and "version 42" in said.out and "uint8" in said.out
    props = {entry.key: entry.value for entry in onnx.load(tmp_path / "p.onnx").metadata_props}
    told = {name.removeprefix("gorila."): text for name, text in props.items() if name.startswith("gorila.")}
    assert (told["preset"], told["version"], told["run"], told["return_mean"]) == ("catch-pixels", "42", "demo", "9.5")
    assert told["statistics"] == "learner-0 at version 42"
    assert EnvironmentFacts.from_json(told["environment"]) == Policy.load(weights).facts
    assert json.loads(told["config"])["network"]["batch_norm"] is True


def refused(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[int, str]:
    with pytest.raises(SystemExit) as ended:
        main(["export", "onnx", *words])
    error = capsys.readouterr().err
    assert error.count("\n") == 1 and "Traceback" not in error
    return int(ended.value.code or 0), error


def test_what_cannot_be_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = saved(tmp_path, "cartpole", facts=CARTPOLE)
    assert refused(capsys, str(weights), str(tmp_path / "p.pt"))[0] == 2
    code, said = refused(capsys, str(tmp_path / "none"), str(tmp_path / "p.onnx"))
    assert code == 2 and "not a weights file" in said
    code, said = refused(capsys, str(weights), str(tmp_path / "no" / "p.onnx"))
    assert code == 1 and "cannot write" in said
    assert not list(tmp_path.glob("**/p.*"))


def test_a_graph_that_gives_other_values_is_not_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    weights = saved(tmp_path, "cartpole", facts=CARTPOLE)
    values: Any = torch.nn.Module.__call__
    monkeypatch.setattr(
        "gorila.network.QNetwork.__call__", lambda *given: values(*given) + (0 if torch.compiler.is_compiling() else 1)
    )
    with pytest.raises(LocalError, match="differ from the network's"):
        export_onnx(weights, tmp_path / "p.onnx")
    assert not (tmp_path / "p.onnx").exists()
