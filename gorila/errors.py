"""The error tree. Everything the product raises on purpose is a GorilaError.

GorilaError
├── UsageError              the user asked for something that cannot be: exit code 2, nothing created
│   └── ConfigError         names the key, the value and what is allowed
├── BrokerError             Kafka unreachable, lost, or refusing; names the address or topic
│   ├── RecordTooLarge      names topic, size and the key to change
│   ├── OffsetGone          the wanted offset is no longer in the log
│   └── NotAllowed          the user lacks a right (an ACL)
├── LocalError              something on this machine: disk, port, missing extra
├── RunError                the run itself: unknown, contradicting configuration, crash loop
├── BadRecord               a record that must go to dead-letters; carries the reason only, the caller has the bytes
├── InvalidState            check_valid() found a broken invariant: a bug, never silenced
└── ShapeError              arrays of the wrong shape or dtype handed to a pure function

Third-party errors are mapped to these at one door each: Kafka's in gorila/kafka/, Avro's in gorila/codec.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager


class GorilaError(Exception):
    """Anything the product raises on purpose. `str()` is one line a person can act on."""

    exit_code = 1


class UsageError(GorilaError):
    """The command cannot be carried out as asked; nothing was created."""

    exit_code = 2


class ConfigError(UsageError):
    """A configuration key has a value that is not allowed."""

    def __init__(self, key: str, value: object, allowed: str) -> None:
        super().__init__(f"{key} = {value!r} is not allowed: {allowed}")
        self.key = key


class BrokerError(GorilaError):
    """Kafka cannot be reached or refuses."""


class RecordTooLarge(BrokerError):
    """A record exceeds what its topic takes."""


class OffsetGone(BrokerError):
    """The wanted offset is no longer in the log, or not yet."""

    def __init__(self, message: str, topic: str = "", partition: int = -1) -> None:
        super().__init__(message)
        self.topic, self.partition = topic, partition


class NotAllowed(BrokerError):
    """Kafka refuses for want of a right: no retry will help."""


class LocalError(GorilaError):
    """Disk, port or a missing extra on this machine."""


class RunError(GorilaError):
    """The run is unknown, contradicts its configuration, or cannot go on."""


class BadRecord(GorilaError):
    """A record from Kafka that must not be used. The caller sends its original bytes to dead-letters."""


class InvalidState(GorilaError):
    """An invariant does not hold: a bug in the product, raised by `check_valid()`."""


class ShapeError(GorilaError):
    """An array of the wrong shape or dtype."""


@contextmanager
def while_away() -> Iterator[None]:
    """For onlookers: Kafka away for a moment is nothing to die of. A right that lacks is: what they show would stay empty for ever."""
    try:
        yield
    except NotAllowed:
        raise
    except BrokerError:
        return
