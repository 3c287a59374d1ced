"""The whole loop with lossy gradients up and deltas down, the learner and the parameter server killed on the way."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gorila.local.broker import BrokerAddress
from gorila.messages import Gradient, Weights
from gorila.run_record import read_all
from gorila.weights import WeightsView, payload_hash
from tests.integration.training import Training

pytestmark = pytest.mark.timeout(600)  # a busy machine; each wait has its own deadline


@pytest.mark.parametrize(
    ("codec", "settings"),
    [
        ("one-bit", ["parameter_server.weights_codec=delta", "parameter_server.key_frame_every=8"]),
        (
            "top-k",
            [
                "parameter_server.weights_codec=delta", "parameter_server.delta_codec=top-k",
                "parameter_server.optimizer=adagrad", "parameter_server.learning_rate=0.01",
            ],
        ),
    ],
)  # fmt: skip
def test_a_run_goes_on_and_readers_hold_what_was_published(
    codec: str, settings: list[str], broker: BrokerAddress, tmp_path: Path
) -> None:
    words = [word for item in (f"learner.codec={codec}", *settings) for word in ("--set", item)]
    training = Training(
        broker.bootstrap_servers, tmp_path, "cartpole", *words, "--set", "evaluator.min_versions=1000000", "--set", "run.max_updates=260"
    )  # fmt: skip
    try:
        for role, at in (("learner", 50), ("parameter-server", 150)):
            training.until("updates", lambda at=at: training.updates() >= at)
            victim = training.until(f"running {role}", lambda role=role: training.role(role))
            victim.kill()
        assert training.wait() == 0, training.output + training.logs()
        service, cluster = training.service(), training.cluster()
        gradients = [service.schemas.expect(r.value, Gradient) for r in read_all(cluster, service.topic("gradients"))]
        assert {gradient.codec for gradient in gradients} == {codec} and len(gradients) >= 260
        view, shown = WeightsView(None, 1), []
        for received in read_all(cluster, service.topic("weights")):
            message = service.schemas.expect(received.value, Weights)
            taken = view.take(message, received.offset)
            if view.version < 0:
                continue  # where compaction has been here, deltas may lie before the first key frame it left
            assert taken or message.kind != "delta" or message.version <= view.version
            if message.kind != "target":
                shown.append(message)
                assert not view.gaps and payload_hash(view.flat()) == message.payload_hash
        assert {message.kind for message in shown} == {"key", "delta"}
        newest = shown[-1]
        assert newest.version >= 260 and newest.applied == newest.version and newest.dropped_bad == 0
        assert np.isfinite(view.flat()).all() and training.summary()["dead_letters"] == 0
        assert any("outbox" in path.name for path in training.run_dir.rglob("*"))
    finally:
        training.close()
