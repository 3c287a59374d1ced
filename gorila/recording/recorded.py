"""What a recording gives, wherever it lies: the log's records in the log's order, and the run they belong to."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from gorila.config import Config
from gorila.environment_facts import EnvironmentFacts
from gorila.errors import RunError, UsageError
from gorila.messages import Message, Run
from gorila.settings import config_of_run

TOPICS = ("transitions", "priorities", "episodes", "run")


@dataclass(frozen=True, slots=True)
class Recorded:
    """One record. (partition, offset) is what it was, or is, in Kafka."""

    partition: int
    offset: int
    timestamp_ms: int
    message: Message


@dataclass(frozen=True, slots=True)
class Span:
    """Offsets first .. end - 1 of one partition. Some of them may hold nothing: bad records, control records."""

    first: int
    end: int

    @property
    def empty(self) -> bool:
        """Nothing in it."""
        return self.end <= self.first


@dataclass(frozen=True, slots=True)
class Missing:
    """Offsets first .. end - 1 that the recording is known not to have, and why."""

    topic: str
    partition: int
    first: int
    end: int
    reason: str


def config_of(run: Run) -> Config:
    """A recorded run's configuration. Raises RunError when this version does not understand it."""
    try:
        return config_of_run(run.config, (), {})
    except (UsageError, ValueError) as error:
        raise RunError(
            f"run {run.name}: its configuration (of gorila {run.product_version or 'unknown'}) is not understood here: {error}"
        ) from None


class Recording(Protocol):
    """A bounded recording of one run. Reading it twice gives the same records.

    Attributes:
        run: the run's record: configuration, environment and schemas as they were.
        config, facts: of the run, parsed.
        missing: holes that the recording itself declares; a hole that it does not is a RunError when it is opened.
        bad_records: undecodable records met by the reads so far; they are in the run's dead-letters.
    """

    run: Run
    config: Config
    facts: EnvironmentFacts
    missing: tuple[Missing, ...]
    bad_records: int

    def spans(self, topic: str) -> dict[int, Span]:
        """{partition: what the recording covers}, by partition; partitions with nothing are there too, empty."""
        ...

    def records(self, topic: str, partition: int | None = None) -> Iterator[Recorded]:
        """Records in offset order; without a partition: partition after partition. Raises RunError, BrokerError, OffsetGone while reading."""
        ...

    def close(self) -> None:
        """Give back what it holds."""
        ...
