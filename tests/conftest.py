"""What every test may ask for: a real Kafka, started once a session, and a name that no other test uses."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator

import pytest

from gorila.local.broker import Broker, BrokerAddress


@pytest.fixture(scope="session")
def broker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[BrokerAddress]:
    """A real Kafka on free ports with an empty data folder; `.bootstrap_servers` says where."""
    embedded = Broker(tmp_path_factory.mktemp("broker"))
    address = embedded.start()
    try:
        yield address
    finally:
        embedded.stop()


@pytest.fixture
def run_name(request: pytest.FixtureRequest) -> str:
    """A run name that no other test uses, so that tests share the broker without sharing topics."""
    words = re.sub(r"[^a-z0-9]+", "-", request.node.name.lower()).strip("-")
    return f"{words[:24].strip('-')}-{uuid.uuid4().hex[:8]}"
