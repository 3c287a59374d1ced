"""The learner's local state as safetensors, every few minutes: for a lost disk or a moved process (design §6).

The outbox is what survives a killed process to the last gradient. This file holds what the outbox does not (BatchNorm statistics, the outlier
guard's averages) and an older residual: restored without its outbox, a learner has lost what the residual gained since, and says so.
"""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from consumers.learner import Learner
from gorila.batch_statistics import BUFFER
from gorila.batch_statistics import CHECKPOINT_FORMAT as FORMAT
from gorila.errors import LocalError

RESIDUAL = "residual"


def save(path: Path, run: str, learner: Learner) -> None:
    """Write the state, whole or not at all. Raises LocalError: disk full, no permission."""
    tensors = {BUFFER + name: np.ascontiguousarray(value) for name, value in learner.step.buffers().items()}
    tensors[RESIDUAL] = np.zeros(0, np.float32) if learner.writer.residual is None else learner.writer.residual.copy()
    guard, version = json.dumps(learner.guard.state()), str(learner.view.version)
    metadata = {"format": FORMAT, "run": run, "guard": guard, "version": version}
    unfinished = path.with_name(path.name + ".new")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        save_file(tensors, unfinished, metadata)
        with unfinished.open("rb+") as file:
            os.fsync(file.fileno())
        unfinished.replace(path)
    except (OSError, SafetensorError) as error:
        raise LocalError(f"learner checkpoint {path}: {error}") from None


def restore(path: Path, run: str, learner: Learner, *, residual_too: bool) -> bool:
    """Take the state of an earlier process of this run; whether there was one. A file that cannot be read, or of another run, is ignored.

    Args:
        residual_too: the outbox is gone, so that this residual is the newest there is.
    """
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != FORMAT or metadata.get("run") != run:
                return False
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        guard = json.loads(metadata["guard"])
        residual = tensors.pop(RESIDUAL)
        learner.guard.restore(guard)
    except (OSError, SafetensorError, KeyError, ValueError):
        return False
    learner.step.load_buffers({name.removeprefix(BUFFER): value for name, value in tensors.items()})
    if residual_too and learner.writer.residual is not None and residual.shape == learner.writer.residual.shape:
        learner.writer.residual[:] = residual
    return True
