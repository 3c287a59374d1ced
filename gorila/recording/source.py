"""The source of everything that works offline: kafka:RUN[@START..END] or parquet:DIR."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from gorila.errors import UsageError
from gorila.kafka import Cluster
from gorila.moments import number_or_time
from gorila.recording.kafka_source import KafkaRecording, Range
from gorila.recording.parquet_source import ParquetRecording
from gorila.recording.recorded import Recording

FORMS = "kafka:RUN, kafka:RUN@OFFSET..OFFSET, kafka:RUN@TIME..TIME (either end may be left out; the end is not included) or parquet:DIR"


@dataclass(frozen=True, slots=True)
class Source:
    """Where a recording is. `place` is a run's name or a folder."""

    kind: str
    place: str
    range: Range = field(default_factory=Range)

    def open(self, cluster: Callable[[], Cluster]) -> Recording:
        """Raises what ParquetRecording and KafkaRecording raise.

        Args:
            cluster: asked only for a recording that is in Kafka.
        """
        if self.kind == "parquet":
            return ParquetRecording(Path(self.place))
        return KafkaRecording(cluster(), self.place, self.range)


def parse_source(text: str) -> Source:
    """Times are ISO 8601, UTC without a zone. Raises UsageError."""
    kind, colon, rest = text.partition(":")
    if not colon or kind not in ("kafka", "parquet") or not rest:
        raise UsageError(f"source {text!r} is not allowed: {FORMS}")
    if kind == "parquet":
        return Source(kind, rest)
    run, at, bounds = rest.partition("@")
    if not at:
        return Source(kind, run)
    start, dots, end = bounds.partition("..")
    if not run or not dots or not (start or end):
        raise UsageError(f"source {text!r} is not allowed: {FORMS}")
    first, last = _bound(text, start), _bound(text, end)
    if first is not None and last is not None:
        if isinstance(first, int) != isinstance(last, int):
            raise UsageError(f"source {text!r} is not allowed: both ends are offsets, or both are times")
        if first >= last:  # type: ignore[operator]
            raise UsageError(f"source {text!r} is an empty range: the end is not included, and must be after the start")
    return Source(kind, run, Range(first, last))


def _bound(text: str, bound: str) -> int | datetime.datetime | None:
    if not bound:
        return None
    try:
        return number_or_time(bound)
    except ValueError:
        raise UsageError(
            f"source {text[:80]!r} is not allowed: {bound[:40]!r} is neither an offset nor a time; {FORMS}"
        ) from None
