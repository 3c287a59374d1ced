"""Threads on one slice without a lock: every update once, the ordered mode's bits, whole behind the barrier."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from consumers.parameter_server.apply import ApplyHogwild, ApplyNow, make_apply, striped
from consumers.parameter_server.checkpoints import ShardState
from consumers.parameter_server.optimizers import make_optimizer
from consumers.parameter_server.shard import Shard
from gorila.compression import codec
from gorila.config import Config
from gorila.errors import UsageError
from gorila.messages import CheckpointManifest, CheckpointPart, Gradient, Weights
from gorila.processor import Incoming, Outgoing
from gorila.settings import validate

F = np.float32
P = 200_003


def gradients(count: int, name: str = "fp32") -> list[Gradient]:
    rng = np.random.default_rng(1)
    direction = rng.standard_normal(P).astype(F)
    return [
        Gradient(0, "learner-0", 0, batch, 0, 32, P, name, codec(name).encode(direction + rng.standard_normal(P).astype(F)), 1.0, 1.0)
        for batch in range(count)
    ]  # fmt: skip


def run(mode: str, optimizer: str, messages: list[Gradient], **section: Any) -> tuple[Shard, list[Outgoing]]:
    config = Config.model_validate({"learner": {"max_in_flight": 0}, "parameter_server": {"optimizer": optimizer, "mode": mode, "learning_rate": 0.01, **section}})  # fmt: skip
    apply = make_apply(config.parameter_server)
    assert isinstance(apply, ApplyHogwild if mode == "hogwild" else ApplyNow)
    tensors = make_optimizer(config.parameter_server).tensors
    state = ShardState(0, np.zeros(P, F), {name: np.zeros(P, F) for name in tensors})
    shard = Shard(config, state, apply=apply)
    out = []
    for offset, message in enumerate(messages):
        out += list(shard.process(Incoming("gradients", 0, offset, 0, b"0", message)))
    shard.check_valid()
    apply.close()
    return shard, out


@pytest.mark.parametrize("threads", [1, 2, 3])
@pytest.mark.parametrize("optimizer", ["adam", "adagrad", "rmsprop", "sgd"])
def test_the_bits_are_the_ordered_modes(optimizer: str, threads: int) -> None:
    messages = gradients(20)
    ordered, hogwild = run("ordered", optimizer, messages)[0], run("hogwild", optimizer, messages, hogwild_threads=threads)[0]  # fmt: skip
    assert hogwild.state.version == ordered.state.version == 20
    assert hogwild.state_hash() == ordered.state_hash()
    assert hogwild.state.weights.tobytes() == ordered.state.weights.tobytes() != bytes(4 * P)


def test_dense_and_sparse_gradients_share_the_slice() -> None:
    messages = [pair for both in zip(gradients(20), gradients(20, "top-k"), strict=True) for pair in both]
    for number, message in enumerate(messages):
        message.batch_offset = number
    # AdaGrad's steps depend on the order of the updates.
    ordered, hogwild = (run(mode, "adagrad", messages)[0] for mode in ("ordered", "hogwild"))
    assert hogwild.state.version == ordered.state.version == 40
    assert hogwild.state_hash() == ordered.state_hash()


@given(size=st.integers(0, 5000), threads=st.integers(1, 9))
def test_stripes_are_the_slice_cut_where_cache_lines_are(size: int, threads: int) -> None:
    whole = np.arange(size, dtype=F)
    pieces = [striped((whole, F(1.0)), number, threads) for number in range(threads)]
    assert np.array_equal(np.concatenate([piece for piece, _ in pieces]), whole)
    assert all(len(piece) == 0 or piece[0] % 16 == 0 for piece, _ in pieces)
    assert {one for _, one in pieces} == {F(1.0)}


def test_targets_and_checkpoints_hold_exactly_the_updates_they_count() -> None:
    """SGD with gradients of one: a weight is minus the learning rate times the updates in it, whoever made them, unless one was lost or was under way."""
    ones = codec("fp32").encode(np.ones(P, F))
    messages = [Gradient(0, "learner-0", 0, batch, 0, 32, P, "fp32", ones, 1.0, 1.0) for batch in range(30)]
    settings = {"hogwild_threads": 2, "learning_rate": 1.0, "target_period_versions": 5, "checkpoint_versions": 10}
    shard, out = run("hogwild", "sgd", messages, **settings)
    targets = [o.message for o in out if isinstance(o.message, Weights)]
    assert [target.version for target in targets] == [0, 5, 10, 15, 20, 25, 30]
    for target in targets:
        assert set(np.frombuffer(target.payload, F).tolist()) == {-float(target.version)}
    parts = [o.message for o in out if isinstance(o.message, CheckpointPart)]
    assert [set(np.frombuffer(part.data, F).tolist()) for part in parts] == [{-10.0}, {-20.0}, {-30.0}]
    assert not [o for o in out if isinstance(o.message, CheckpointManifest)]
    assert shard.state.version == 30


def test_a_failure_in_a_thread_is_heard_at_the_barrier() -> None:
    apply = ApplyHogwild(2)

    def kernel() -> None:
        raise ZeroDivisionError

    apply.submit(kernel, ())
    with pytest.raises(ZeroDivisionError):
        apply.settle()
    apply.close()


def test_replicas_refuse_it() -> None:
    with pytest.raises(UsageError, match="hogwild"):
        validate({"parameter_server": {"mode": "hogwild", "replicas": 2}})
