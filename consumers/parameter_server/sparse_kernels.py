"""Optimiser arithmetic straight from a sparse gradient: O(k) of P, nothing is made dense. The rules of kernels.py hold here too.

What a coordinate does in the steps that do not name it: nothing. Its weight and its moments stay as they are; time passes only when it is sent.
- SGD without momentum, AdaGrad: a zero gradient changes nothing in the dense form either, so these give the *bits* of the dense form.
- SGD with momentum, centred RMSProp, Adam: the dense form lets moments decay at every step and (momentum, Adam) keeps moving the weight. Here moments decay by
  one step when the coordinate is sent ("lazy", as torch's SparseAdam): the same as the dense form run on that coordinate's own steps alone. With error feedback
  that is the right clock for momentum and RMSProp: what arrives is the sum of what was held back.
- Adam's bias correction counts the shard's updates, not the coordinate's: a coordinate first sent late gets an uncorrected first step of
  (1 - beta1) / sqrt(1 - beta2) = 3.2 learning rates. With top-k it does not learn, and the configuration refuses the pair (rules.md 14).

`indices`: int32 (k,), strictly rising, below P: checked by the codec. Arrays are changed in place; nothing is allocated.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from consumers.parameter_server.kernels import ZERO, kernel

if TYPE_CHECKING:
    from numpy.typing import NDArray

    F32 = NDArray[np.float32]
    I32 = NDArray[np.int32]
    Scalar = np.float32


@kernel
def adam(
    weights: F32,
    moment1: F32,
    moment2: F32,
    indices: I32,
    values: F32,
    step_size: Scalar,
    beta1_rest: Scalar,
    beta2: Scalar,
    beta2_rest: Scalar,
    root_scale: Scalar,
    epsilon: Scalar,
) -> None:
    """Lazy Adam; scalars as in kernels.adam."""
    for j in range(indices.shape[0]):
        i = indices[j]
        g = values[j]
        m = moment1[i] + beta1_rest * (g - moment1[i])
        v = beta2 * moment2[i] + beta2_rest * (g * g)
        moment1[i] = m
        moment2[i] = v
        weights[i] -= step_size * (m / (np.sqrt(v) * root_scale + epsilon))


@kernel
def adagrad(weights: F32, moment1: F32, indices: I32, values: F32, learning_rate: Scalar, epsilon: Scalar) -> None:
    """kernels.adagrad on the named coordinates."""
    for j in range(indices.shape[0]):
        i = indices[j]
        g = values[j]
        s = moment1[i] + g * g
        moment1[i] = s
        weights[i] -= learning_rate * (g / (np.sqrt(s) + epsilon))


@kernel
def centred_rmsprop(
    weights: F32,
    moment1: F32,
    moment2: F32,
    indices: I32,
    values: F32,
    learning_rate: Scalar,
    decay: Scalar,
    decay_rest: Scalar,
    epsilon: Scalar,
) -> None:
    """Lazy kernels.centred_rmsprop."""
    for j in range(indices.shape[0]):
        i = indices[j]
        g = values[j]
        a = decay * moment1[i] + decay_rest * g
        s = decay * moment2[i] + decay_rest * (g * g)
        moment1[i] = a
        moment2[i] = s
        weights[i] -= learning_rate * (g / np.sqrt(max(s - a * a, ZERO) + epsilon))


@kernel
def sgd(weights: F32, indices: I32, values: F32, learning_rate: Scalar) -> None:
    """kernels.sgd on the named coordinates."""
    for j in range(indices.shape[0]):
        weights[indices[j]] -= learning_rate * values[j]


@kernel
def sgd_momentum(
    weights: F32, moment1: F32, indices: I32, values: F32, learning_rate: Scalar, momentum: Scalar
) -> None:
    """Lazy kernels.sgd_momentum."""
    for j in range(indices.shape[0]):
        i = indices[j]
        b = momentum * moment1[i] + values[j]
        moment1[i] = b
        weights[i] -= learning_rate * b
