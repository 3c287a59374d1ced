"""A place in a log as people write it, for every command that takes one: a whole number, or a time."""

from __future__ import annotations

import datetime

LARGEST = 2**63 - 1  # Kafka's offsets and milliseconds are int64
EPOCH = datetime.datetime(1970, 1, 1, tzinfo=datetime.UTC)


def number_or_time(text: str) -> int | datetime.datetime:
    """`123` or ISO 8601 (without a zone it is UTC), from 1970 on. Raises ValueError for anything else, and for a number that Kafka does not have."""
    if text.isdecimal():
        # Length first: Python itself refuses to read thousands of digits.
        if len(text) > len(str(LARGEST)) or int(text) > LARGEST:
            raise ValueError(f"a number above {LARGEST}")
        return int(text)
    moment = datetime.datetime.fromisoformat(text)
    moment = moment if moment.tzinfo else moment.replace(tzinfo=datetime.UTC)
    if moment < EPOCH:
        raise ValueError("a time before 1970")
    return moment


def milliseconds(text: str) -> int:
    """Milliseconds since 1970 of `number_or_time`, whose numbers are milliseconds already. Raises ValueError."""
    moment = number_or_time(text)
    return moment if isinstance(moment, int) else int(moment.timestamp() * 1000)
