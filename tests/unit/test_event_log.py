"""A log line is an event with keys; what stands in a value cannot make two lines or two keys of it."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from gorila.event_log import KeyValueFormatter, format_value, open_log


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    for handler in set(root.handlers) - set(handlers):
        root.removeHandler(handler)
        handler.close()
    root.setLevel(level)


def test_a_line_is_time_level_event_then_keys_and_goes_to_the_runs_folder(tmp_path: Path):
    log = open_log("learner-0", {"role": "learner", "run": "demo"}, tmp_path)
    log.warning("retention.low", partition=3, reason="two words", share=0.123456789)
    logging.getLogger("gorila.kafka").warning("kafka.away servers=%s", "a:1")
    logging.getLogger("somebody.else").info("not shown")
    log.debug("not shown")
    lines = (tmp_path / "logs" / "learner-0.log").read_text().splitlines()
    assert [line.split(" ", 1)[1] for line in lines] == [
        'WARNING retention.low role=learner run=demo partition=3 reason="two words" share=0.123457',
        "WARNING kafka.away servers=a:1 role=learner run=demo",
    ]


def test_opening_the_log_again_does_not_write_every_line_twice(tmp_path: Path):
    open_log("a-0", {}, tmp_path)
    open_log("a-0", {}, tmp_path).info("once")
    assert (tmp_path / "logs" / "a-0.log").read_text().count("once") == 1


def test_stdlib_arguments_and_extra_are_taken_too(tmp_path: Path):
    log = open_log("a-0", {}, tmp_path)
    log.info("took %d", 3, extra={"threshold": 475.0})
    assert (tmp_path / "logs" / "a-0.log").read_text().rstrip().endswith("took 3 threshold=475")


@pytest.mark.parametrize(
    ("value", "text"),
    [
        ("plain", "plain"),
        ("", '""'),
        ("a b", '"a b"'),
        ("a=b", '"a=b"'),
        ("x\ny", '"x\\ny"'),
        (2.5, "2.5"),
        (None, "None"),
        ({1: 2}, '"{1: 2}"'),
        ('{"a":1}', '{"a":1}'),
        ('"a"', '"\\"a\\""'),
    ],
)
def test_a_value_is_bare_where_that_is_unambiguous(value: object, text: str):
    assert format_value(value) == text


def test_an_exception_is_shown_below_its_line():
    record = logging.LogRecord("x", logging.ERROR, "f", 1, "failed", (), (ValueError, ValueError("why"), None))
    assert "ValueError: why" in KeyValueFormatter({}).format(record)


def test_what_beam_says_at_every_import_is_no_news(tmp_path: Path):
    open_log("replay-0", {}, tmp_path, terminal=False)
    logging.getLogger().warning("apitools not found, and so on")
    logging.getLogger().warning("something else")
    assert "apitools" not in (tmp_path / "logs" / "replay-0.log").read_text()
    assert "something else" in (tmp_path / "logs" / "replay-0.log").read_text()
