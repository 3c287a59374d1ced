"""Optimiser arithmetic on a flat slice, compiled by numba. Every weight of every run goes through these loops.

Rules of this file:
1. `fastmath=False`, and no reduction and no pow inside an apply: the same inputs give the same bits on every machine and at every vector width,
   which recovery and replication rest on.
2. `error_model="numpy"`: Python's default tests every division for zero and runs 4x slower (shared/runners.md).
3. Scalars come in as float32, so that nothing is widened to float64 on the way.
4. Arguments are in the order (weights, moments..., gradient, scalars...). Sparse forms take (weights, moments..., indices, values, scalars...)
   and must be handed indices that were checked: an index out of range would write outside the array.

Every kernel changes its arrays in place and allocates nothing.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np
from numba import njit

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    F32 = NDArray[np.float32]
    Scalar = np.float32

_F = TypeVar("_F", bound="Callable[..., Any]")
ZERO = np.float32(0.0)
# |g| above this is refused with NaN and inf: its square would overflow float32 and freeze the parameter for ever.
LARGEST_GRADIENT = np.float32(1e18)
_LARGEST = LARGEST_GRADIENT.view(np.uint32)
_SIGN_OFF = np.uint32(0x7FFFFFFF)


def kernel(function: _F) -> _F:
    """Compile lazily, cached on disk: the second process starts in milliseconds."""
    compiled: _F = njit(nogil=True, fastmath=False, error_model="numpy", cache=True)(function)
    return compiled


@kernel
def count_unusable(gradient_bits: NDArray[np.uint32]) -> int:
    """How many values are NaN, infinite or above LARGEST_GRADIENT in size.

    Args:
        gradient_bits: float32 (P,) viewed as uint32. Compared as integers (the order of the bits is the order of the sizes, NaN on top), because an
            integer count vectorises under strict floating-point rules and a floating-point one does not.
    """
    unusable = 0
    for i in range(gradient_bits.shape[0]):
        if (gradient_bits[i] & _SIGN_OFF) > _LARGEST:
            unusable += 1
    return unusable


@kernel
def adam(
    weights: F32,
    moment1: F32,
    moment2: F32,
    gradient: F32,
    step_size: Scalar,
    beta1_rest: Scalar,
    beta2: Scalar,
    beta2_rest: Scalar,
    root_scale: Scalar,
    epsilon: Scalar,
) -> None:
    """Adam (Kingma & Ba 2015, algorithm 1), in torch's form: epsilon outside the root.

    m += (1 - beta1) (g - m);  v = beta2 v + (1 - beta2) g^2;  w -= step_size m / (sqrt(v) root_scale + epsilon)

    Args:
        weights, moment1, moment2, gradient: float32 (P,).
        step_size: learning rate / (1 - beta1^t).
        root_scale: 1 / sqrt(1 - beta2^t). Both corrections are computed outside, from state.
        beta1_rest, beta2_rest: 1 - beta1, 1 - beta2.
    """
    for i in range(weights.shape[0]):
        g = gradient[i]
        m = moment1[i] + beta1_rest * (g - moment1[i])
        v = beta2 * moment2[i] + beta2_rest * (g * g)
        moment1[i] = m
        moment2[i] = v
        weights[i] -= step_size * (m / (np.sqrt(v) * root_scale + epsilon))


@kernel
def adagrad(weights: F32, moment1: F32, gradient: F32, learning_rate: Scalar, epsilon: Scalar) -> None:
    """AdaGrad (Duchi et al. 2011), in torch's form: s += g^2;  w -= lr g / (sqrt(s) + epsilon). All arrays float32 (P,)."""
    for i in range(weights.shape[0]):
        g = gradient[i]
        s = moment1[i] + g * g
        moment1[i] = s
        weights[i] -= learning_rate * (g / (np.sqrt(s) + epsilon))


@kernel
def centred_rmsprop(
    weights: F32,
    moment1: F32,
    moment2: F32,
    gradient: F32,
    learning_rate: Scalar,
    decay: Scalar,
    decay_rest: Scalar,
    epsilon: Scalar,
) -> None:
    """Centred RMSProp as DQN has it (Graves 2013, eq. 38-41; Mnih et al. 2015): epsilon *inside* the root, where torch adds it outside.

    a = decay a + (1 - decay) g;  s = decay s + (1 - decay) g^2;  w -= lr g / sqrt(s - a^2 + epsilon)

    Args:
        weights, moment1 (a), moment2 (s), gradient: float32 (P,).
    """
    for i in range(weights.shape[0]):
        g = gradient[i]
        a = decay * moment1[i] + decay_rest * g
        s = decay * moment2[i] + decay_rest * (g * g)
        moment1[i] = a
        moment2[i] = s
        # s - a^2 is a variance; rounding takes it below zero when a large gradient stays constant, and epsilon alone would not save the root.
        weights[i] -= learning_rate * (g / np.sqrt(max(s - a * a, ZERO) + epsilon))


@kernel
def sgd(weights: F32, gradient: F32, learning_rate: Scalar) -> None:
    """w -= lr g. All arrays float32 (P,)."""
    for i in range(weights.shape[0]):
        weights[i] -= learning_rate * gradient[i]


@kernel
def sgd_momentum(weights: F32, moment1: F32, gradient: F32, learning_rate: Scalar, momentum: Scalar) -> None:
    """Heavy ball in torch's form: b = momentum b + g;  w -= lr b. All arrays float32 (P,)."""
    for i in range(weights.shape[0]):
        b = momentum * moment1[i] + gradient[i]
        moment1[i] = b
        weights[i] -= learning_rate * b


@kernel
def power_by_steps(factor: float, steps: int) -> float:
    """factor^steps as the running product an uninterrupted server forms, so that a restored one holds the same bits."""
    product = 1.0
    for _ in range(steps):
        product *= factor
    return product
