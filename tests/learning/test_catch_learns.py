"""The whole loop learns: catch in pixels, from a random player to one that catches most balls, through a real broker."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from gorila.local.broker import BrokerAddress
from gorila.messages import Episode
from gorila.run_record import read_all
from tests.integration.training import Training

pytestmark = [pytest.mark.learning, pytest.mark.timeout(600)]


def test_catch_in_pixels_is_learned_through_every_topic(broker: BrokerAddress, tmp_path: Path) -> None:
    sets = (
        "run.max_updates=2500",
        "evaluator.min_versions=2400",
        "actor.epsilon_versions=500",
        "actor.epsilon_end=0.02",
    )
    training = Training(
        broker.bootstrap_servers, tmp_path, "catch-pixels", *(word for item in sets for word in ("--set", item))
    )
    try:
        assert training.wait() == 0, training.errors
        service = training.service()
        played = [
            service.schemas.expect(received.value, Episode)
            for received in read_all(training.cluster(), service.topic("episodes"))
            if b"actor" in (received.key or b"")
        ]
        returns = np.array([episode.episode_return for episode in played])
        assert len(returns) > 300
        first, last = returns[:100].mean(), returns[-100:].mean()
        assert first < -0.3, "a random player catches one ball in five"
        assert last > 0.3 and last - first > 0.8, (first, last)
        service.close()
    finally:
        training.close()
