"""One batch and two sets of weights in, one flat gradient out. Torch lives here.

Between two batches nothing is remembered but BatchNorm's statistics of the states learned from, and the scale of the loss (consumers/precision.py).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from consumers.batch_assembly import LearnerBatch
from consumers.precision import Precision
from gorila.batch_statistics import Buffers, buffers_of, load_buffers
from gorila.config import Config
from gorila.environment_facts import EnvironmentFacts
from gorila.network import QNetwork, build_network, load_flat
from gorila.td import conservative_penalty, huber, importance_weights, td_error

F32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Computed:
    """What a batch taught.

    Attributes:
        gradient: float32 (P,), unscaled, clipped; a view that the next `compute` overwrites.
        gradient_norm: before clipping, over all parameters.
        loss: weighted batch loss.
        td_error_abs: float32 (B,), before the loss clips it; may hold NaN.
    """

    gradient: F32
    gradient_norm: float
    loss: float
    td_error_abs: F32


class GradientStep:
    """Double DQN with n-step returns, Huber loss, importance weights and one norm clip over all shards (cases.md 26)."""

    def __init__(self, config: Config, facts: EnvironmentFacts) -> None:
        self._config = config.learner
        self.online = build_network(config, facts)
        self._target = build_network(config, facts)
        self.precision = Precision(config.learner, self.online)
        self._target.move_to(self.precision.device)
        self._has_buffers = any(True for _ in self.online.buffers())
        self._before: Buffers = {}
        self._target.eval()
        for parameter in self._target.parameters():
            parameter.requires_grad_(False)

    @property
    def num_parameters(self) -> int:
        """P."""
        return self.online.num_parameters

    def load(self, flat: F32) -> None:
        """Online weights, float32 (P,). Raises ShapeError."""
        load_flat(self.online, flat)

    def load_target(self, flat: F32) -> None:
        """Target weights θ⁻, float32 (P,): exactly those of the target record. Raises ShapeError."""
        load_flat(self._target, flat)

    def compute(self, batch: LearnerBatch, beta: float) -> Computed:
        """The gradient of mean(w · huber(δ)) at the loaded weights; w = P**-beta / max (rules.md 7)."""
        tensor = self.precision.tensor
        if self._has_buffers:
            self._before = self.buffers()
        q_target_t_BA, q_select_t_BA = self._bootstrap(tensor(batch.states_t))
        q_tm1_BA = self.precision.q(self.online, tensor(batch.states_tm1))
        action_B = tensor(batch.action)
        error_B = td_error(
            q_tm1_BA,
            action_B,
            tensor(batch.n_step_return),
            tensor(batch.discount),
            q_target_t_BA,
            q_select_t_BA,
        )
        loss_B = huber(error_B, self._config.huber_delta)
        if self._config.conservative_weight:
            loss_B = loss_B + self._config.conservative_weight * conservative_penalty(q_tm1_BA, action_B)
        weight_B = importance_weights(torch.from_numpy(batch.probability), beta).to(loss_B.device)
        loss = (weight_B * loss_B).mean()
        self.precision.backward(loss)
        gradient = self.precision.gradient()
        norm = clip_to_norm(gradient, self._config.clip_norm)
        return Computed(gradient, norm, loss.item(), error_B.detach().abs().cpu().numpy())

    def forget_batch(self) -> None:
        """The last batch was rejected: its states leave no trace in BatchNorm's statistics."""
        if self._has_buffers:
            self.load_buffers(self._before)

    @torch.no_grad()
    def _bootstrap(self, states_t: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """(Q of the target network, Q of the network that selects) at s_t, both (B, A)."""
        if self._has_buffers:  # BatchNorm: both judge s_t by the statistics this node has seen
            self._share_buffers(self.online, self._target)
            self.online.eval()
        q_target_t_BA = self.precision.q(self._target, states_t)
        q_select_t_BA = self.precision.q(self.online, states_t) if self._config.double else q_target_t_BA
        if self._has_buffers:
            self.online.train()
        return q_target_t_BA, q_select_t_BA

    @staticmethod
    def _share_buffers(source: QNetwork, sink: QNetwork) -> None:
        for given, taken in zip(source.buffers(), sink.buffers(), strict=True):
            taken.copy_(given)

    def buffers(self) -> Buffers:
        """Local statistics by name, copied: they never leave the node but in its own checkpoint."""
        return buffers_of(self.online)

    def load_buffers(self, buffers: Buffers) -> None:
        """From `buffers()`; names this network does not have are ignored."""
        load_buffers(self.online, buffers)


def clip_to_norm(gradient: F32, limit: float) -> float:
    """Scale float32 (P,) in place so that its L2 norm is at most `limit` (0: leave it). Returns the norm before; may be inf or NaN."""
    norm = math.sqrt(max(0.0, squared)) if math.isfinite(squared := float(gradient @ gradient)) else squared
    if math.isinf(norm):  # the square overflowed float32, perhaps not the norm
        norm = float(np.linalg.norm(gradient.astype(np.float64)))
    if 0 < limit < norm < math.inf:
        gradient *= np.float32(limit / norm)
    return norm
