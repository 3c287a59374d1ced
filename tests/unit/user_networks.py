"""Networks a user might bring by import path."""

from __future__ import annotations

import math

from torch import Tensor, nn


class Linear(nn.Module):
    def __init__(self, state_shape: tuple[int, ...], actions: int, bias: bool = True) -> None:
        super().__init__()
        self.layer = nn.Linear(math.prod(state_shape), actions, bias=bias)

    def forward(self, states: Tensor) -> Tensor:
        out: Tensor = self.layer(states.flatten(1))
        return out


class Normed(Linear):
    def __init__(self, state_shape: tuple[int, ...], actions: int) -> None:
        super().__init__(state_shape, actions)
        self.norm = nn.BatchNorm1d(math.prod(state_shape))

    def forward(self, states: Tensor) -> Tensor:
        return super().forward(self.norm(states.flatten(1)))


def not_a_module(state_shape: tuple[int, ...], actions: int) -> int:
    return 3
