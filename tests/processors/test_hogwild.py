"""Threads on one slice without a lock: every update once, close to the ordered result, whole behind the barrier."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from consumers.parameter_server.apply import ApplyHogwild, ApplyNow, make_apply
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


@pytest.mark.parametrize("optimizer", ["adam", "adagrad", "rmsprop", "sgd"])
def test_the_result_points_where_the_ordered_one_does(optimizer: str) -> None:
    messages = gradients(40)
    ordered, hogwild = (run(mode, optimizer, messages)[0].state for mode in ("ordered", "hogwild"))
    assert hogwild.version == ordered.version == 40
    a, b = ordered.weights.astype(np.float64), hogwild.weights.astype(np.float64)
    assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > 0.99
    assert 0.9 < np.linalg.norm(b) / np.linalg.norm(a) < 1.1


def test_dense_and_sparse_gradients_share_the_slice() -> None:
    messages = [pair for both in zip(gradients(20), gradients(20, "top-k"), strict=True) for pair in both]
    for number, message in enumerate(messages):
        message.batch_offset = number
    # SGD: its result does not depend on the order, which a busy machine's threads choose (AdaGrad's first step does).
    ordered, hogwild = (run(mode, "sgd", messages)[0].state for mode in ("ordered", "hogwild"))
    assert hogwild.version == ordered.version == 40
    a, b = ordered.weights.astype(np.float64), hogwild.weights.astype(np.float64)
    assert a @ b / np.linalg.norm(a) / np.linalg.norm(b) > 0.99


def test_one_thread_gives_the_bits_of_the_ordered_mode() -> None:
    messages = gradients(20)
    ordered, hogwild = run("ordered", "adam", messages)[0], run("hogwild", "adam", messages, hogwild_threads=1)[0]
    assert hogwild.state.weights.tobytes() == ordered.state.weights.tobytes()


def test_targets_and_checkpoints_hold_exactly_the_updates_they_count() -> None:
    """SGD with gradients of one: a weight is minus the learning rate times the updates in it, whoever made them, unless one was lost or was under way."""
    ones = codec("fp32").encode(np.ones(P, F))
    messages = [Gradient(0, "learner-0", 0, batch, 0, 32, P, "fp32", ones, 1.0, 1.0) for batch in range(30)]
    one_thread = {"hogwild_threads": 1, "learning_rate": 1.0, "target_period_versions": 5, "checkpoint_versions": 10}
    shard, out = run("hogwild", "sgd", messages, **one_thread)
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


def test_modes_that_promise_the_same_bits_refuse_it() -> None:
    for tree in ({"run": {"synchronous": True}}, {"parameter_server": {"replicas": 2}}):
        with pytest.raises(UsageError, match="hogwild"):
            validate({**tree, "parameter_server": {**tree.get("parameter_server", {}), "mode": "hogwild"}})
