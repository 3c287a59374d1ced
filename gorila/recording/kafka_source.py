"""A recording that is still in Kafka: a run's topics up to where they ended when it was opened."""

from __future__ import annotations

import datetime
from collections.abc import Iterator
from dataclasses import dataclass

from gorila.codec import Schemas
from gorila.config import Config
from gorila.environment_facts import EnvironmentFacts
from gorila.errors import BadRecord, OffsetGone, UsageError
from gorila.kafka import Cluster
from gorila.log_ranges import read_range
from gorila.messages import Run
from gorila.recording.recorded import TOPICS, Missing, Recorded, Span, config_of
from gorila.run_record import read_run
from gorila.topics import full_name

Moment = datetime.datetime


@dataclass(frozen=True, slots=True)
class Range:
    """From `start` up to, and without, `end`; None: as far as the log goes.

    Offsets are those of every transitions partition, and the other topics are read whole. Times are Kafka's append times and hold for transitions,
    priorities and episodes alike.
    """

    start: int | Moment | None = None
    end: int | Moment | None = None


class KafkaRecording:
    """See gorila.recording.Recording.

    Raises:
        RunError: unknown run. BrokerError: Kafka is away.
        OffsetGone: the range begins before what the log still has.
        UsageError: the range is empty.
    """

    def __init__(self, cluster: Cluster, run: str, range_: Range | None = None, schemas: Schemas | None = None) -> None:
        self._cluster, self._schemas = cluster, schemas or Schemas()
        self.run: Run = read_run(cluster, run, self._schemas)
        for number, text in self.run.schemas.items():
            self._schemas.learn(int(number), text)
        self.config: Config = config_of(self.run)
        self.facts = EnvironmentFacts.from_json(self.run.environment)
        self.missing: tuple[Missing, ...] = ()
        self.bad_records = 0
        wanted = range_ or Range()
        there = cluster.admin().topics()
        self._spans: dict[str, dict[int, Span]] = {}
        for topic in TOPICS:
            name = full_name(run, topic)
            places = [(name, p) for p in range(there.get(name, 0))]
            bounds = wanted if topic == "transitions" or (_by_time(wanted) and topic != "run") else Range()
            self._spans[topic] = self._find_spans(topic, places, bounds)
        if all(span.empty for span in self._spans["transitions"].values()):
            raise UsageError(f"run {run}: the range holds no transitions: {self._what_there_is(run, there)}")

    def _what_there_is(self, run: str, there: dict[str, int]) -> str:
        name = full_name(run, "transitions")
        admin, places = self._cluster.admin(), [(name, p) for p in range(there.get(name, 0))]
        lows, highs = admin.offsets(places, "earliest"), admin.offsets(places, "latest")
        return (
            "; ".join(f"partition {p[1]} has offsets {lows[p]} up to {highs[p]}" for p in places) or "it has no topic"
        )

    def _find_spans(self, topic: str, places: list[tuple[str, int]], bounds: Range) -> dict[int, Span]:
        admin = self._cluster.admin()
        lows, highs = admin.offsets(places, "earliest"), admin.offsets(places, "latest")
        starts, ends = dict(lows), dict(highs)
        for moment, chosen in ((bounds.start, starts), (bounds.end, ends)):
            if isinstance(moment, Moment):
                found = admin.offsets(places, int(moment.timestamp() * 1000))
                chosen.update({p: highs[p] if offset < 0 else offset for p, offset in found.items()})
            elif moment is not None:
                chosen.update(dict.fromkeys(places, moment))
        for place in places:
            if starts[place] < lows[place]:
                raise OffsetGone(
                    f"{topic} partition {place[1]}: offset {starts[place]} was asked for, the log begins at {lows[place]}: the"
                    " records before it were deleted by retention. Begin later, or read the run's archive",
                    *place,
                )
        return {p: Span(starts[name, p], min(ends[name, p], highs[name, p])) for name, p in places}

    def spans(self, topic: str) -> dict[int, Span]:
        """See Recording."""
        return dict(self._spans[topic])

    def records(self, topic: str, partition: int | None = None) -> Iterator[Recorded]:
        """See Recording. Retention that overtakes the read is OffsetGone."""
        for one, span in self._spans[topic].items():
            if partition in (None, one) and not span.empty:
                yield from self._read(full_name(self.run.name, topic), one, span)

    def _read(self, name: str, partition: int, span: Span) -> Iterator[Recorded]:
        for received in read_range(self._cluster, name, partition, span.first, span.end):
            try:
                message = self._schemas.decode(received.value)
            except BadRecord:
                self.bad_records += 1
                continue
            yield Recorded(partition, received.offset, received.timestamp_ms, message)

    def close(self) -> None:
        """See Recording."""


def _by_time(wanted: Range) -> bool:
    return isinstance(wanted.start, Moment) or isinstance(wanted.end, Moment)
