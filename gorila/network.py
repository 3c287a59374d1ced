"""Q-networks, and their parameters as one flat vector.

Rules of this file:
1. A network takes states exactly as `gather_stack` makes them, (B, stack, ...) or (B, ...) for stack 1, in the environment's own dtype,
   and returns float32 (B, A).
2. uint8 frames are scaled to [-1, 1] here and nowhere else. A float state where frames are expected is refused: someone scaled already.
3. Parameters and gradients are views into two contiguous float32 (P,) tensors, in the order of `Module.parameters()`: loading weights is
   one copy, a gradient is one vector, no loop over parameters anywhere. Buffers (BatchNorm) are not in them: they never leave the node
   (gorila/batch_statistics.py).
4. Initial weights depend on the run's seed only.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from gorila.config import Config
from gorila.environment_facts import EnvironmentFacts
from gorila.errors import ConfigError, ShapeError
from gorila.import_path import WANTED, import_from_path, is_import_path
from gorila.seeds import seed_number

F32 = NDArray[np.float32]
BUILT_IN_HIDDEN = {"mlp": (128, 128), "nature": (512,), "small-conv": (128,)}


def _hidden(features: int, width: int, norm: bool) -> list[nn.Module]:
    """One hidden layer; with BatchNorm (Ioffe & Szegedy 2015), whose shift takes the place of the bias."""
    normed: list[nn.Module] = [nn.BatchNorm1d(width)] if norm else []
    return [nn.Linear(features, width, bias=not norm), *normed, nn.ReLU()]


class DuelingHead(nn.Module):
    """Q = V + A - mean A (Wang et al. 2016, eq. 9); features (B, F) to (B, A), one hidden layer a stream."""

    def __init__(self, features: int, hidden: int, actions: int, norm: bool = False) -> None:
        super().__init__()
        self.value = nn.Sequential(*_hidden(features, hidden, norm), nn.Linear(hidden, 1))
        self.advantage = nn.Sequential(*_hidden(features, hidden, norm), nn.Linear(hidden, actions))

    def forward(self, features_BF: Tensor) -> Tensor:
        """float32 (B, A)."""
        advantage_BA: Tensor = self.advantage(features_BF)
        centred: Tensor = self.value(features_BF) + advantage_BA - advantage_BA.mean(dim=1, keepdim=True)
        return centred


def _heads(features: int, hidden: tuple[int, ...], actions: int, dueling: bool, norm: bool) -> list[nn.Module]:
    layers: list[nn.Module] = []
    for width in hidden[:-1] if dueling else hidden:
        layers += _hidden(features, width, norm)
        features = width
    return [*layers, DuelingHead(features, hidden[-1], actions, norm) if dueling else nn.Linear(features, actions)]


def mlp(
    state_shape: tuple[int, ...], actions: int, hidden: tuple[int, ...], dueling: bool, norm: bool = False
) -> nn.Module:
    """Flattened state, ReLU layers. CartPole with (128, 128): 17,410 parameters."""
    return nn.Sequential(nn.Flatten(), *_heads(math.prod(state_shape), hidden, actions, dueling, norm))


def _convolutional(
    state_shape: tuple[int, ...],
    actions: int,
    hidden: tuple[int, ...],
    dueling: bool,
    norm: bool,
    layers: list[tuple[int, int, int]],
    name: str,
) -> nn.Module:
    convolutions: list[nn.Module] = []
    if len(state_shape) == 2:  # one grey frame a state: it has no channel axis
        convolutions.append(nn.Unflatten(1, (1, state_shape[0])))
        state_shape = (1, *state_shape)
    if len(state_shape) != 3:
        raise ConfigError(
            "network.factory",
            name,
            f"states (stack, height, width) of grey frames; this environment's are {state_shape}: try mlp",
        )
    channels, height, width = state_shape
    for out, kernel, stride in layers:
        normed: list[nn.Module] = [nn.BatchNorm2d(out)] if norm else []
        convolutions += [nn.Conv2d(channels, out, kernel, stride, bias=not norm), *normed, nn.ReLU()]
        channels, height, width = out, (height - kernel) // stride + 1, (width - kernel) // stride + 1
        if min(height, width) < 1:
            raise ConfigError(
                "network.factory",
                name,
                f"frames large enough for its convolutions; this environment's are {state_shape[1:]}",
            )
    heads = _heads(channels * height * width, hidden, actions, dueling, norm)
    return nn.Sequential(*convolutions, nn.Flatten(), *heads)


def nature(
    state_shape: tuple[int, ...], actions: int, hidden: tuple[int, ...], dueling: bool, norm: bool = False
) -> nn.Module:
    """Mnih et al. 2015, Methods: 32@8/4, 64@4/2, 64@3/1, 512. On (4, 84, 84) with 6 actions: 1,687,206 parameters."""
    return _convolutional(state_shape, actions, hidden, dueling, norm, [(32, 8, 4), (64, 4, 2), (64, 3, 1)], "nature")


def small_conv(
    state_shape: tuple[int, ...], actions: int, hidden: tuple[int, ...], dueling: bool, norm: bool = False
) -> nn.Module:
    """For catch's 24x24 frames: 16@4/2, 32@3/2, 128 (rules.md, catch-pixels)."""
    return _convolutional(state_shape, actions, hidden, dueling, norm, [(16, 4, 2), (32, 3, 2)], "small-conv")


BUILT_IN: dict[str, Callable[[tuple[int, ...], int, tuple[int, ...], bool, bool], nn.Module]] = {
    "mlp": mlp,
    "nature": nature,
    "small-conv": small_conv,
}


def _imported(config: Config, facts: EnvironmentFacts) -> nn.Module:
    path = config.network.factory
    if not is_import_path(path):
        raise ConfigError("network.factory", path, f"{', '.join(BUILT_IN)}, or {WANTED}")
    for name in ("hidden", "dueling", "batch_norm"):
        if getattr(config.network, name):
            allowed = f"only for {', '.join(BUILT_IN)}; give {path} its own in network.kwargs"
            raise ConfigError(f"network.{name}", getattr(config.network, name), allowed)
    factory = import_from_path("network.factory", path)
    try:
        made = factory(facts.state_shape, facts.actions, **config.network.kwargs)
    except TypeError as error:
        allowed = f"something called with (state_shape, actions, **network.kwargs): {error}"
        raise ConfigError("network.factory", path, allowed) from None
    if not isinstance(made, nn.Module):
        raise ConfigError("network.factory", path, f"something that makes a torch.nn.Module, not {type(made).__name__}")
    return made


class QNetwork(nn.Module):
    """A body with scaled input and flat parameters.

    Attributes:
        flat_weights: float32 (P,); every parameter is a view into it.
        flat_gradients: float32 (P,); every parameter's `.grad` is a view into it. Zero it before a backward pass, never set grads to None.
    """

    def __init__(self, body: nn.Module, state_shape: tuple[int, ...], scaled: bool) -> None:
        super().__init__()
        self.body = body
        self.state_shape = state_shape
        self.scaled = scaled
        self.flat_weights, self.flat_gradients = self._flatten()

    def _flatten(self) -> tuple[Tensor, Tensor]:
        parameters = list(self.parameters())
        weights = (
            torch.cat([p.detach().to(torch.float32).reshape(-1) for p in parameters]) if parameters else torch.empty(0)
        )
        gradients = torch.zeros_like(weights)
        start = 0
        for parameter in parameters:
            stop = start + parameter.numel()
            parameter.data = weights[start:stop].view(parameter.shape)
            parameter.grad = gradients[start:stop].view(parameter.shape)
            start = stop
        return weights, gradients

    def move_to(self, device: torch.device) -> None:
        """To another device; `flat_weights` and `flat_gradients` are other tensors afterwards, on it."""
        self.body.to(device)
        self.flat_weights, self.flat_gradients = self._flatten()

    @property
    def num_parameters(self) -> int:
        """P."""
        return len(self.flat_weights)

    def input_from(self, states: Tensor) -> Tensor:
        """float32 states as the body gets them; uint8 frames become [-1, 1].

        Raises:
            ShapeError: not (B, *state_shape), or floats where uint8 frames are expected (scaled twice, cases.md 16).
        """
        if tuple(states.shape[1:]) != self.state_shape:
            raise ShapeError(f"states must be (B, {', '.join(map(str, self.state_shape))}), got {tuple(states.shape)}")
        if not self.scaled:
            return states.to(torch.float32)
        if states.dtype != torch.uint8:
            raise ShapeError(f"frames must be uint8: they are scaled to [-1, 1] here, once; got {states.dtype}")
        return states.to(torch.float32).mul_(2.0 / 255.0).sub_(1.0)

    def forward(self, states: Tensor) -> Tensor:
        """Q values float32 (B, A) of states (B, *state_shape)."""
        q: Tensor = self.body(self.input_from(states))
        return q


def build_network(config: Config, facts: EnvironmentFacts) -> QNetwork:
    """The run's Q-network with the run's initial weights.

    Raises:
        ConfigError: a factory that is not there or does not fit the environment; `env.scale = "symmetric"` for other than uint8.
    """
    is_frames = facts.observation_dtype == "uint8"
    if config.env.scale == "symmetric" and not is_frames:
        raise ConfigError(
            "env.scale", "symmetric", f"only for uint8 observations; {facts.id} has {facts.observation_dtype}"
        )
    factory = BUILT_IN.get(config.network.factory)
    if factory is not None and config.network.kwargs:
        raise ConfigError("network.kwargs", config.network.kwargs, "only for an imported network.factory")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed_number(config.run.seed, "network"))
        if factory is None:
            body = _imported(config, facts)
        else:
            hidden = config.network.hidden or BUILT_IN_HIDDEN[config.network.factory]
            try:
                body = factory(
                    facts.state_shape, facts.actions, hidden, config.network.dueling, config.network.batch_norm
                )
            except RuntimeError as error:  # torch: no memory for it, or no such shape
                raise ConfigError("network.hidden", hidden, str(error).splitlines()[0]) from None
    return QNetwork(body, facts.state_shape, is_frames and config.env.scale != "none")


def flat_from(net: QNetwork) -> F32:
    """A copy of the parameters, float32 (P,)."""
    flat: F32 = net.flat_weights.cpu().numpy().copy()
    return flat


def load_flat(net: QNetwork, flat: F32) -> None:
    """Set all parameters from float32 (P,), in one copy. Raises ShapeError."""
    if flat.shape != (net.num_parameters,) or flat.dtype != np.float32:
        raise ShapeError(f"weights must be float32 ({net.num_parameters},), got {flat.dtype} {flat.shape}")
    if net.flat_weights.device.type == "cpu":
        np.copyto(net.flat_weights.numpy(), flat)
    else:
        net.flat_weights.copy_(torch.tensor(flat))


def initial_weights(config: Config, facts: EnvironmentFacts) -> F32:
    """Version 0 of the run, float32 (P,): a function of `run.seed`, the network and the environment's shapes."""
    return flat_from(build_network(config, facts))
