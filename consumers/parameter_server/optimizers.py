"""Optimisers as the parameter server uses them: which tensors they keep, and one in-place update of a flat slice, dense or sparse.

An optimiser is (tensors, update): its tensors live in the shard's state, so a checkpoint and a replica hold all of it. What depends on the number of
updates (Adam's bias correction) is kept as a running product in float64 and formed again by the same products when a state is restored.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from consumers.parameter_server import kernels, sparse_kernels
from gorila import compression
from gorila.config import ParameterServerSection

F32 = NDArray[np.float32]
I32 = NDArray[np.int32]
Moments = Mapping[str, F32]
Call = tuple[Callable[..., None], tuple[Any, ...]]
"""A kernel and all it needs: whoever calls it makes the update."""
_f = np.float32


class Optimizer(Protocol):
    """Updates a flat slice in place.

    Attributes:
        tensors: names of the float32 (P,) tensors beside the weights.
    """

    tensors: tuple[str, ...]

    def restore(self, version: int) -> None:
        """Take the place of an optimiser that has applied `version` updates."""
        ...

    def call(self, weights: F32, moments: Moments, gradient: F32, learning_rate: float) -> Call:
        """The next update, not made yet: its place among the updates is settled here. `gradient` must be finite and as long as `weights`: checked by the
        caller, once."""
        ...

    def update(self, weights: F32, moments: Moments, gradient: F32, learning_rate: float) -> None:
        """Make the update of `call`."""
        ...

    def update_sparse(self, weights: F32, moments: Moments, indices: I32, values: F32, learning_rate: float) -> None:
        """One update of the named coordinates (sparse_kernels.py says what the others do). `indices` int32 (k,) strictly rising and in range, `values`
        float32 (k,) finite: checked by the caller, once."""
        ...


class _Updates:
    """`update` is `call`, called."""

    def call(self, weights: F32, moments: Moments, gradient: F32, learning_rate: float) -> Call:
        """See Optimizer."""
        raise NotImplementedError

    def update(self, weights: F32, moments: Moments, gradient: F32, learning_rate: float) -> None:
        """See Optimizer."""
        kernel, arguments = self.call(weights, moments, gradient, learning_rate)
        kernel(*arguments)


class Adam(_Updates):
    """Adam with bias correction; `adam_epsilon` outside the root, as torch does."""

    tensors: tuple[str, ...] = ("moment1", "moment2")

    def __init__(self, section: ParameterServerSection) -> None:
        self._beta1 = section.adam_beta1
        self._beta2 = section.adam_beta2
        self._constants = (_f(1.0 - self._beta1), _f(self._beta2), _f(1.0 - self._beta2))
        self._epsilon = _f(section.adam_epsilon)
        self._beta1_power = self._beta2_power = 1.0

    def restore(self, version: int) -> None:
        """See Optimizer."""
        self._beta1_power = float(kernels.power_by_steps(self._beta1, version))
        self._beta2_power = float(kernels.power_by_steps(self._beta2, version))

    def _next_step(self, learning_rate: float) -> tuple[np.float32, ...]:
        """The kernels' scalars of the next update."""
        self._beta1_power *= self._beta1
        self._beta2_power *= self._beta2
        step_size = _f(learning_rate / (1.0 - self._beta1_power))
        root_scale = _f(1.0 / np.sqrt(1.0 - self._beta2_power))
        return (step_size, *self._constants, root_scale, self._epsilon)

    def call(self, weights: F32, moments: Moments, gradient: F32, learning_rate: float) -> Call:
        """See Optimizer."""
        scalars = self._next_step(learning_rate)
        return kernels.adam, (weights, moments["moment1"], moments["moment2"], gradient, *scalars)

    def update_sparse(self, weights: F32, moments: Moments, indices: I32, values: F32, learning_rate: float) -> None:
        """See Optimizer."""
        scalars = self._next_step(learning_rate)
        sparse_kernels.adam(weights, moments["moment1"], moments["moment2"], indices, values, *scalars)


class AdaGrad(_Updates):
    """AdaGrad, Gorila's choice."""

    tensors: tuple[str, ...] = ("moment1",)

    def __init__(self, section: ParameterServerSection) -> None:
        self._epsilon = _f(section.adagrad_epsilon)

    def restore(self, version: int) -> None:
        """Nothing depends on the number of updates."""

    def call(self, weights: F32, moments: Moments, gradient: F32, learning_rate: float) -> Call:
        """See Optimizer."""
        return kernels.adagrad, (weights, moments["moment1"], gradient, _f(learning_rate), self._epsilon)

    def update_sparse(self, weights: F32, moments: Moments, indices: I32, values: F32, learning_rate: float) -> None:
        """See Optimizer."""
        sparse_kernels.adagrad(weights, moments["moment1"], indices, values, _f(learning_rate), self._epsilon)


class CentredRMSProp(_Updates):
    """DQN's RMSProp: centred, epsilon inside the root."""

    tensors: tuple[str, ...] = ("moment1", "moment2")

    def __init__(self, section: ParameterServerSection) -> None:
        self._constants = (_f(section.rmsprop_decay), _f(1.0 - section.rmsprop_decay), _f(section.rmsprop_epsilon))

    def restore(self, version: int) -> None:
        """Nothing depends on the number of updates."""

    def call(self, weights: F32, moments: Moments, gradient: F32, learning_rate: float) -> Call:
        """See Optimizer."""
        scalars = (_f(learning_rate), *self._constants)
        return kernels.centred_rmsprop, (weights, moments["moment1"], moments["moment2"], gradient, *scalars)

    def update_sparse(self, weights: F32, moments: Moments, indices: I32, values: F32, learning_rate: float) -> None:
        """See Optimizer."""
        scalars = (_f(learning_rate), *self._constants)
        sparse_kernels.centred_rmsprop(weights, moments["moment1"], moments["moment2"], indices, values, *scalars)


class SGD(_Updates):
    """Plain gradient descent; a momentum buffer only when there is momentum."""

    def __init__(self, section: ParameterServerSection) -> None:
        self._momentum = _f(section.momentum)
        self.tensors: tuple[str, ...] = ("moment1",) if section.momentum else ()

    def restore(self, version: int) -> None:
        """Nothing depends on the number of updates."""

    def call(self, weights: F32, moments: Moments, gradient: F32, learning_rate: float) -> Call:
        """See Optimizer."""
        if self.tensors:
            return kernels.sgd_momentum, (weights, moments["moment1"], gradient, _f(learning_rate), self._momentum)
        return kernels.sgd, (weights, gradient, _f(learning_rate))

    def update_sparse(self, weights: F32, moments: Moments, indices: I32, values: F32, learning_rate: float) -> None:
        """See Optimizer."""
        if self.tensors:
            sparse_kernels.sgd_momentum(weights, moments["moment1"], indices, values, _f(learning_rate), self._momentum)
        else:
            sparse_kernels.sgd(weights, indices, values, _f(learning_rate))


_OPTIMIZERS: dict[str, type[Adam] | type[AdaGrad] | type[CentredRMSProp] | type[SGD]] = {
    "adam": Adam,
    "adagrad": AdaGrad,
    "rmsprop": CentredRMSProp,
    "sgd": SGD,
}
_SETTINGS: dict[str, tuple[str, ...]] = {
    "adam": ("adam_beta1", "adam_beta2", "adam_epsilon"),
    "adagrad": ("adagrad_epsilon",),
    "rmsprop": ("rmsprop_decay", "rmsprop_epsilon"),
    "sgd": ("momentum",),
}


def make_optimizer(section: ParameterServerSection) -> Optimizer:
    """The configured optimiser, at version 0."""
    return _OPTIMIZERS[section.optimizer](section)


def settings_json(section: ParameterServerSection) -> str:
    """The settings that decide an update, as canonical JSON: part of the state hash and of every manifest."""
    names = ("optimizer", "learning_rate", "warmup_versions", *_SETTINGS[section.optimizer])
    effective: dict[str, Any] = {name: getattr(section, name) for name in names}
    return json.dumps(effective, sort_keys=True, separators=(",", ":"))


def learning_rate_at(section: ParameterServerSection, version: int) -> float:
    """Rate of the update that makes `version + 1` out of `version`: linear warm-up over `warmup_versions`, then constant."""
    if version + 1 >= section.warmup_versions:
        return section.learning_rate
    return section.learning_rate * (version + 1) / section.warmup_versions


def warm_up_kernels(section: ParameterServerSection) -> None:
    """Compile (or load from numba's cache) what the configured optimiser needs, so that the first gradient does not wait for it."""
    optimizer = make_optimizer(section)
    arrays = {name: np.zeros(8, np.float32) for name in ("weights", "gradient", *optimizer.tensors)}
    optimizer.restore(1)
    optimizer.update(arrays["weights"], arrays, arrays["gradient"], 0.0)
    kernels.count_unusable(arrays["gradient"].view(np.uint32))
    # A decoded fp32 payload is a read-only view of the record's bytes: to numba another type, compiled apart. So are a sparse one's indices.
    received = np.frombuffer(arrays["gradient"].tobytes(), np.float32)
    optimizer.update(arrays["weights"], arrays, received, 0.0)
    kernels.count_unusable(received.view(np.uint32))
    indices = np.frombuffer(np.arange(8, dtype=np.int32).tobytes(), np.int32)
    optimizer.update_sparse(arrays["weights"], arrays, indices, arrays["gradient"], 0.0)
    compression.warm_up()
