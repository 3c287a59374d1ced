"""A policy file as an ONNX graph, for programs without torch. The only door to onnx (extra `export`).

In: `states`, (batch, stack, height, width) uint8 or (batch, ...) float32, frames as the environment gave them, oldest first: the scaling to [-1, 1] is in the graph, and
so are BatchNorm's statistics. Out: `q`, (batch, actions) float32; the greedy action is its argmax. Metadata: preset, version, configuration and environment of the run.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gorila.errors import LocalError, UsageError
from gorila.policy import Policy, notes_of

OPSET = 18
ROWS_COMPARED = 8
TOLERANCE = 1e-4


@dataclass(frozen=True, slots=True)
class ExportedGraph:
    """What was written. `difference`: of Q values by onnx's reference evaluator from torch's, the largest, relative to the largest Q value."""

    path: Path
    bytes: int
    version: int
    inputs: str
    difference: float


def export_onnx(weights: Path, out: Path) -> ExportedGraph:
    """Write the graph whole or not at all, after comparing it with the network on random states.

    Raises:
        UsageError: not a policy file. LocalError: a network that ONNX cannot say, one whose graph gives other values, a disk that refuses.
    """
    import onnx
    from onnx.reference import ReferenceEvaluator

    policy = Policy.load(weights)
    states = random_states(policy, ROWS_COMPARED)
    with _quiet():
        try:
            program: Any = torch.onnx.export(
                policy.network,
                (torch.from_numpy(states[:2]),),
                dynamo=True,
                opset_version=OPSET,
                input_names=["states"],
                output_names=["q"],
                dynamic_shapes={"states": {0: torch.export.Dim("batch")}},
                verbose=False,
            )
        except torch.onnx.OnnxExporterError as error:
            reason = " ".join(str(error.__cause__ or error).split())[:300]
            raise LocalError(f"{weights}: this network cannot be said in ONNX: {reason}") from None
    model = program.model_proto
    onnx.helper.set_model_props(model, _metadata(weights, policy))
    onnx.checker.check_model(model)
    with torch.inference_mode():
        wanted = policy.network(torch.from_numpy(states)).numpy()
    got = ReferenceEvaluator(model).run(None, {"states": states})[0]
    difference = float(np.abs(got - wanted).max() / max(1.0, float(np.abs(wanted).max())))
    if not difference <= TOLERANCE:
        raise LocalError(f"{weights}: the graph's Q values differ from the network's by {difference:.2g}: not written")
    content: bytes = model.SerializeToString()
    temporary = out.with_name(out.name + ".new")
    try:
        temporary.write_bytes(content)
        with temporary.open("rb+") as written:
            os.fsync(written.fileno())
        temporary.replace(out)
    except OSError as error:
        raise LocalError(f"cannot write {out}: {error.strerror}") from None
    shape = ", ".join(str(side) for side in policy.facts.state_shape)
    return ExportedGraph(out, len(content), policy.version, f"{states.dtype} (batch, {shape})", difference)


def random_states(policy: Policy, rows: int) -> NDArray[Any]:
    """(rows, *state_shape) in the environment's dtype: any frame, or values of ordinary size."""
    rng, shape = np.random.default_rng(0), (rows, *policy.facts.state_shape)
    if policy.facts.observation_dtype == "uint8":
        return rng.integers(0, 256, shape, np.uint8)
    return rng.standard_normal(shape).astype(np.float32)


def _metadata(weights: Path, policy: Policy) -> dict[str, str]:
    notes = notes_of(weights)
    found = {"preset": policy.config.run.preset, "version": str(policy.version), "environment": policy.facts.to_json()}
    return {f"gorila.{name}": text for name, text in {**found, **{k: notes[k] for k in _CARRIED if k in notes}}.items()}


_CARRIED = ("run", "return_mean", "episodes", "solved", "statistics", "config")


@contextmanager
def _quiet() -> Iterator[None]:
    """The exporter says at length which packages it could have used."""
    log = logging.getLogger("torch.onnx")
    before = log.level
    log.setLevel(logging.ERROR)
    try:
        yield
    finally:
        log.setLevel(before)


def refuse_suffix(out: Path) -> None:
    """Raises UsageError for a name other programs would not take as a graph."""
    if out.suffix != ".onnx":
        raise UsageError(f"{out}: the name of an ONNX graph ends in .onnx")
