"""One rule for places in a log, whatever command takes them."""

from __future__ import annotations

import datetime

import pytest

from gorila.cat import parse_start
from gorila.commands.weights import _milliseconds
from gorila.errors import UsageError
from gorila.moments import milliseconds, number_or_time
from gorila.recording.source import parse_source

ABSURD = ["9" * 5000, "9" * 26, str(2**63), "0001-01-01T00:00:00", "1969-12-31", "yesterday", "1.5", "-1", ""]


def test_numbers_and_times():
    assert number_or_time("12") == 12 and number_or_time(str(2**63 - 1)) == 2**63 - 1
    noon = datetime.datetime(2026, 1, 31, 12, tzinfo=datetime.UTC)
    assert number_or_time("2026-01-31T12:00:00") == noon == number_or_time("2026-01-31T13:00:00+01:00")
    assert milliseconds("2026-01-31T12:00:00") == 1_769_860_800_000 and milliseconds("5") == 5


@pytest.mark.parametrize("text", ABSURD)
def test_what_no_kafka_has_is_one_line_in_every_command(text: str):
    with pytest.raises(ValueError):
        number_or_time(text)
    for parse in (parse_start, _milliseconds):
        with pytest.raises(UsageError) as told:
            parse(text)
        assert len(str(told.value)) < 200
    if text:
        with pytest.raises(UsageError) as told:
            parse_source(f"kafka:run@{text}..")
        assert len(str(told.value)) < 500
