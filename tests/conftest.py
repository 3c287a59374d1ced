"""What every test may ask for: a real Kafka, started once a session, and a name that no other test uses."""

from __future__ import annotations

import re
import uuid
from collections.abc import Iterator

import pytest

from gorila.local.broker import Broker, BrokerAddress

# The longest first, most of a minute and more each: two workers that take files from one queue are then done at the same time.
LONGEST = (
    "test_resume_and_fork", "test_replay_elastic", "test_learner_group", "test_portable_replay", "test_train", "test_replication_exhaustive",
    "test_replay_pipeline", "test_abort_and_resume", "test_documented_commands", "test_security", "test_broker",
)  # fmt: skip
# Then whatever runs processes; what computes only fills up the rest.
FOLDERS = ("integration", "recovery", "learning", "pipelines", "processors", "contract", "unit")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Files in the order in which they are best begun; tests within a file stay as they are."""

    def place(item: pytest.Item) -> tuple[int, int]:
        file, folder = item.path.stem, item.path.parent.name
        longest = LONGEST.index(file) if file in LONGEST else len(LONGEST)
        return longest, FOLDERS.index(folder) if folder in FOLDERS else len(FOLDERS)

    items.sort(key=place)


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
