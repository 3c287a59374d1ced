"""One embedded broker for every `gorila train` of a folder."""

from __future__ import annotations

from pathlib import Path

import pytest

from gorila.errors import LocalError
from gorila.local.broker import Broker
from gorila.local.shared_broker import keep_running, shared_broker


def test_the_first_starts_it_the_last_one_out_stops_it_and_a_person_s_is_left_alone(tmp_path: Path) -> None:
    broker = Broker(tmp_path)
    first = shared_broker(tmp_path)
    servers = first.__enter__()
    try:
        with shared_broker(tmp_path) as again:
            assert again == servers
            first.__exit__(None, None, None)
            assert broker.status() is not None, "the first to come left, another still trains"
        assert broker.status() is None, "the last one out stops it"
        with shared_broker(tmp_path):
            keep_running(tmp_path)  # what `gorila broker start` does
        assert broker.status() is not None
        with shared_broker(tmp_path):
            pass
        assert broker.status() is not None
    finally:
        broker.stop()


def test_a_failed_training_stops_what_it_started(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt), shared_broker(tmp_path):
        raise KeyboardInterrupt
    assert Broker(tmp_path).status() is None


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with (
        pytest.raises(LocalError, match="cannot keep the broker's data in") as refused,
        shared_broker(tmp_path / "file"),
    ):
        pass
    assert "\n" not in str(refused.value)
