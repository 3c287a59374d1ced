"""How a learner computes: on which device, in float32 throughout or with halves where they lose little (Micikevicius et al. 2018).

Mixed precision: layers run in float16 on a GPU and in bfloat16 on a CPU, weights and gradients stay float32. The loss is scaled by a power of two, so that
small gradients do not vanish in halves, and the gradient is unscaled before anybody looks at it: the clip, the outlier guard and the codec see the true one
(rules.md 14). A scale that was too large makes infinities: the backward pass is repeated with half of it, and no batch is lost.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from gorila.config import LearnerSection
from gorila.errors import ConfigError
from gorila.network import QNetwork

INITIAL_SCALE = 65536.0
MOST_HALVINGS = 24


def device_of(section: LearnerSection) -> torch.device:
    """Where the learner computes. Raises ConfigError: a GPU is wanted and there is none."""
    if section.device == "cpu":
        return torch.device("cpu")
    if torch.cuda.is_available():
        return torch.device("cuda")
    if section.device == "cuda":
        raise ConfigError("learner.device", "cuda", "cpu or auto on this machine: torch finds no CUDA device")
    return torch.device("cpu")


class Precision:
    """Forward and backward passes of one learner.

    Attributes:
        device: of both networks.
        mixed: whether halves are used.
        overflows: backward passes repeated with a smaller scale, since the process began.
    """

    def __init__(self, section: LearnerSection, network: QNetwork, initial_scale: float = INITIAL_SCALE) -> None:
        self.device = device_of(section)
        self.mixed = section.mixed_precision == "on" or (
            section.mixed_precision == "auto" and self.device.type == "cuda"
        )
        self.overflows = 0
        network.move_to(self.device)
        self._half = torch.float16 if self.device.type == "cuda" else torch.bfloat16
        self._scaler = torch.amp.GradScaler(self.device.type, init_scale=initial_scale, enabled=self.mixed)
        # GradScaler unscales what an optimizer holds; ours are the parameter servers'. This one holds the flat gradient and never steps.
        flat = torch.nn.Parameter(network.flat_weights)
        flat.grad = network.flat_gradients
        self._holder = torch.optim.SGD([flat], lr=0.0)
        self._network = network

    @property
    def half(self) -> str:
        """`float32` where nothing is mixed, else what layers compute in."""
        return str(self._half if self.mixed else torch.float32).removeprefix("torch.")

    @property
    def scale(self) -> float:
        """Of the loss; 1 where nothing is mixed."""
        return float(self._scaler.get_scale())

    def tensor(self, values: NDArray[Any]) -> Tensor:
        """A tensor of `values` where the networks are."""
        return torch.from_numpy(values).to(self.device)

    def q(self, network: QNetwork, states: Tensor) -> Tensor:
        """float32 (B, A)."""
        if not self.mixed:
            whole: Tensor = network(states)
            return whole
        # A context a pass: weights cast in a pass without gradients must not be found again by one that needs them.
        with torch.autocast(self.device.type, self._half):
            values: Tensor = network(states)
        return values.float()

    def backward(self, loss: Tensor) -> None:
        """The gradient of `loss`, unscaled, into the network's flat gradients; inf or NaN in it only where no scale helps."""
        gradients = self._network.flat_gradients
        if not self.mixed:
            gradients.zero_()
            loss.backward()  # type: ignore[no-untyped-call]
            return
        before, hopeless = self.scale, not math.isfinite(loss.item())
        for _ in range(MOST_HALVINGS):
            gradients.zero_()
            self._scaler.scale(loss).backward(retain_graph=True)  # type: ignore[no-untyped-call]
            self._scaler.unscale_(self._holder)
            self._scaler.update()
            if bool(torch.isfinite(gradients).all()):
                return
            if hopeless:
                break
            self.overflows += 1
        self._scaler.update(before)  # the scale was not to blame

    def gradient(self) -> NDArray[np.float32]:
        """The flat gradient, float32 (P,), on the CPU: a view of it where it is there already."""
        found: NDArray[np.float32] = self._network.flat_gradients.cpu().numpy()
        return found
