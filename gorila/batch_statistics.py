"""BatchNorm's running statistics: of what this node has seen, never on a wire (rules.md 15). Who has which:

| role | statistics of |
|---|---|
| learner | the states it learned from; the bootstrap of the same batch is judged by those before it; kept in its local checkpoint |
| actor | the states it acted on; a restarted actor begins anew |
| evaluator | WARM_ROWS states acted on with the very version it is about to measure, then held fixed |
| a policy file | a learner checkpoint in the run's folder of nearly its version, else the evaluator's that measured it; it says which. Without any: of the states it acts on |

Statistics belong to a version: 90 updates later, catch-pixels caught 75 % instead of 97 % (docs/decisions/0035-learner-extras.md).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

Buffers = dict[str, NDArray[np.generic]]
WARM_ROWS = 1000
FOLDED_ROWS = 32
MOMENTUM = 0.1  # torch's own default
CHECKPOINT_FORMAT = "gorila-learner-1"
BUFFER = "buffer."
NEAR_VERSIONS = 10
"""Statistics are averages over about 1 / MOMENTUM updates: what is no further away than they themselves reach is of the same version."""


def buffers_of(network: nn.Module) -> Buffers:
    """Copies of a network's buffers by name; empty where it has none."""
    return {name: buffer.cpu().numpy().copy() for name, buffer in network.named_buffers()}


def load_buffers(network: nn.Module, buffers: Mapping[str, NDArray[np.generic]]) -> None:
    """From `buffers_of`; names this network does not have are ignored."""
    with torch.no_grad():
        for name, buffer in network.named_buffers():
            if name in buffers:
                buffer.copy_(torch.from_numpy(np.array(buffers[name])).reshape(buffer.shape))


def checkpointed(folder: Path | None, run: str, of_version: int) -> tuple[str, Buffers] | None:
    """(which learner at which version, its buffers) of the learner checkpoint in a folder that is nearest to a version of this run.

    None: there is none within NEAR_VERSIONS.
    """
    nearest: tuple[int, str, Buffers] | None = None
    for path in sorted(folder.glob("learner-*.safetensors")) if folder is not None else ():
        try:
            with safe_open(path, framework="numpy") as file:
                metadata = file.metadata() or {}
                version = int(metadata.get("version", "-1"))
                names = [name for name in file.keys() if name.startswith(BUFFER)]  # noqa: SIM118
                if metadata.get("format") != CHECKPOINT_FORMAT or metadata.get("run") != run or not names:
                    continue
                apart = abs(version - of_version)
                if version >= 0 and apart < (NEAR_VERSIONS + 1 if nearest is None else nearest[0]):
                    buffers = {name.removeprefix(BUFFER): file.get_tensor(name) for name in names}
                    nearest = apart, f"{path.stem} at version {version}", buffers
        except (OSError, SafetensorError, ValueError):
            continue  # being replaced, or not ours
    return None if nearest is None else nearest[1:]


class _Sums:
    """Mean and variance of one layer's inputs so far, by channel, float64; batches are joined as Chan et al. 1979 do."""

    def __init__(self, layer: _BatchNorm) -> None:
        self.layer = layer
        self.folds = 0
        self.clear()

    def clear(self) -> None:
        self.rows = self.count = 0
        self.mean = self.squares = torch.zeros(0)

    def add(self, values: Tensor) -> None:
        """values: (L, C) or (L, C, ...)."""
        axes = [0, *range(2, values.ndim)]
        variance, mean = torch.var_mean(values.detach().double(), dim=axes, correction=0)
        count = values.numel() // values.shape[1]
        if self.count == 0:
            self.mean, self.squares = mean, variance * count
        else:
            total, apart = self.count + count, mean - self.mean
            self.squares = self.squares + variance * count + apart * apart * (self.count * count / total)
            self.mean = self.mean + apart * (count / total)
        self.count += count
        self.rows += len(values)

    def fold(self) -> None:
        """Into the layer's running statistics. The first ones replace what the layer was made with, later ones count as torch's would."""
        self.folds += 1
        share = max(1.0 / self.folds, MOMENTUM)
        mean, variance = self.layer.running_mean, self.layer.running_var
        assert mean is not None and variance is not None
        mean.lerp_(self.mean.to(mean.dtype), share)
        variance.lerp_((self.squares / max(self.count - 1, 1)).to(variance.dtype), share)
        self.clear()


class ActedStatistics:
    """Keeps the running statistics of a network that acts, from the states it acts on.

    The network is in evaluation mode: a state is judged by what was seen before, and one lane alone, which has no variance, will do. Inputs of
    each BatchNorm layer are summed over FOLDED_ROWS rows and then folded in, as a training batch of that size would be.
    """

    def __init__(self, network: nn.Module) -> None:
        self._sums = [
            _Sums(layer)
            for layer in network.modules()
            if isinstance(layer, _BatchNorm) and layer.running_mean is not None
        ]
        self.frozen = False
        for sums in self._sums:
            sums.layer.register_forward_pre_hook(lambda _, inputs, sums=sums: self._see(sums, inputs))

    def __bool__(self) -> bool:
        """Whether there is anything to keep."""
        return bool(self._sums)

    def restart(self) -> None:
        """Forget all that was seen."""
        for sums in self._sums:
            sums.clear()
            sums.folds = 0
            sums.layer.reset_running_stats()

    def _see(self, sums: _Sums, inputs: tuple[Any, ...]) -> None:
        if self.frozen:
            return
        sums.add(inputs[0])
        if sums.rows >= FOLDED_ROWS:
            sums.fold()
