"""Replay of a recording: a bounded Beam pipeline around the replay memory of the live one.

    Source -> Load -> Draw -> WriteBatches

Load fills the rings, Draw forms `updates` learner batches, WriteBatches hands them to the producer: fused into one stage, so a batch is with the
producer before the next is drawn, and Draw waits while a learner is behind. Batch k goes to partition k mod learners, whatever the learners do: so
the bytes of every partition follow from recording, configuration and seed, and a restart passes over what the log has.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions

from gorila.errors import BrokerError, RunError, UsageError
from gorila.offline import OfflineReplay
from gorila.recording import Recording
from gorila.service import Service
from pipelines.elements import Drawn
from pipelines.kafka_io import BatchWriter, LogReader
from pipelines.offline_split import OfflineSplit, Progress, Values
from pipelines.runner import local_runner
from pipelines.warm_up import warm_up

PAUSE_S = 0.001
LOG_EVERY_S = 10.0
ACKNOWLEDGED_S = 30.0
CLOSE_S = 1.0


class OfflineRoom:
    """Everything an offline replay holds in this process. Used by one thread.

    Attributes:
        failure: the first exception raised in one of the DoFns: the runner hands on its text only.
        values: {(partition, offset): (q_taken, q_max)} of a policy file, instead of the actors'.
    """

    def __init__(self, service: Service, offline: OfflineReplay, recording: Recording) -> None:
        self.service, self.offline, self.recording = service, offline, recording
        self.split = OfflineSplit(service.config, service.name, service.facts)
        self.failure: Exception | None = None
        self.values: dict[tuple[int, int], Values] = {}
        self._parts = service.config.record_parts
        self._learners = service.config.learner.count
        log = LogReader(service)
        try:
            self._have = {p: log.bounds("batches", p)[1] for p in range(self._learners)}
            self._refuse_used(log)
            # The newest record of each partition that a run before this one wrote: what is drawn again must be the same.
            self._newest = {
                p: record.value
                for p, end in self._have.items()
                for record in log.read("batches", p, max(0, end - 1), end)
            }
        finally:
            log.close()
        self.writer = BatchWriter(service)
        self.finished = False
        self._stats_due_s = 0.0
        self._logged_s = time.monotonic()
        self._progress = Progress("batches", offline.updates, time.monotonic())

    def _refuse_used(self, log: LogReader) -> None:
        run = self.service.run
        actors = range(self.service.config.actor.count)
        if any(log.bounds("transitions", p)[1] for p in actors):
            raise RunError(f"run {run} has actors' transitions of its own: replay a recording into a new run")
        if sum(self._have.values()) > self.offline.updates * self._parts:
            raise RunError(f"run {run} has more batches than --updates {self.offline.updates} already: use a new run")

    def load(self) -> None:
        """The recording into the rings, then its priorities. Raises RunError, BrokerError, ConfigError."""
        recording, log = self.recording, self.service.log
        spans = recording.spans("transitions")
        self.split.open(spans)
        self._progress = Progress("records loaded", sum(s.end - s.first for s in spans.values()), time.monotonic())
        for record in recording.records("transitions"):
            self.split.insert(record, self.values.get((record.partition, record.offset)))
            self._progress.done += 1
            if self._stopped():
                return
        if self.offline.recorded_priorities:
            for record in recording.records("priorities"):
                self.split.learned(record)
                if self._stopped():
                    return
        self.values.clear()
        self.split.ready()
        log.info(
            "offline.loaded",
            rows=self.split.rows,
            partitions=len(self.split.replay.memory.rings),
            bad_records=self.split.bad_records + recording.bad_records,
            priorities="recorded" if self.offline.recorded_priorities else self.offline.reprioritise or "actor",
        )

    def drawn(self) -> Iterator[Drawn]:
        """All batches that the log has not, in order, each as soon as its learner has caught up."""
        self._progress = Progress("batches", self.offline.updates, time.monotonic())
        for number in range(self.offline.updates):
            partition, first = number % self._learners, number // self._learners * self._parts
            values = [self.service.schemas.encode(record) for record in self.split.draw()]
            there = min(len(values), max(0, self._have[partition] - first))
            self._compare(partition, first, values[:there])
            if there < len(values):
                while not self.writer.take(partition, len(values) - there):
                    if self._stopped(PAUSE_S):
                        return
                yield Drawn("batches", partition, None, values[there:])
            self._progress.done += 1
            if self._stopped():
                return
        self.finished = True

    def _compare(self, partition: int, first: int, there: list[bytes]) -> None:
        newest = self._have[partition] - 1 - first
        if 0 <= newest < len(there) and self._newest.get(partition, there[newest]) != there[newest]:
            raise RunError(
                f"run {self.service.run} has other batches than {self.offline.source} gives with these settings: use a new run"
                " (the end of a recording that still grows must be given, as in kafka:RUN@..END)"
            )

    def _stopped(self, pause_s: float = 0.0) -> bool:
        """Serve delivery reports, say how far it is. Whether the process has to stop. Raises BrokerError."""
        now_s = time.monotonic()
        if pause_s or self._progress.done % 16 == 0:
            self.service.health.beat()
            self.writer.poll()
        if now_s >= self._stats_due_s:
            self._stats_due_s = now_s + self.service.config.replay.stats_interval_ms / 1000
            self.publish(now_s)
        if now_s - self._logged_s >= LOG_EVERY_S:
            self._logged_s = now_s
            self.service.log.info("offline.progress", at=self._progress.line(now_s))
        stop = self.service.stop
        return stop.wait(pause_s) if pause_s else stop.is_set()

    def publish(self, now_s: float) -> None:
        """Totals, and how far it is in the place where the live view looks for what replay does."""
        stats = self.split.replay.stats(int(time.time() * 1000))
        waits = self.writer.waiting_for()
        stats.waiting_for = "; ".join(filter(None, (waits, self._progress.line(now_s))))
        self.writer.write(Drawn("replay-stats", 0, self.service.name.encode(), [self.service.schemas.encode(stats)]))

    def close(self) -> None:
        """Everything is acknowledged, or BrokerError."""
        left = 0
        try:
            if self.failure is None:
                now_s = time.monotonic()
                self.publish(now_s)
                left = self.writer.drain(ACKNOWLEDGED_S if self.finished else CLOSE_S)
                self.service.log.info("offline.stopped", at=self._progress.line(now_s), unacknowledged=left)
                if left and self.finished:
                    raise BrokerError(f"Kafka did not acknowledge {left} records within {ACKNOWLEDGED_S:g} s")
        finally:
            self.writer.close(0.0 if left else CLOSE_S)


_rooms: dict[str, OfflineRoom] = {}


class Load(beam.DoFn):
    """The recording into the room's memory."""

    def process(self, run: str) -> Iterator[str]:
        """The run's name, once everything is loaded."""
        room = _rooms[run]
        try:
            room.load()
        except Exception as error:
            room.failure = room.failure or error
            raise
        if not room.service.stop.is_set():
            yield run


class Draw(beam.DoFn):
    """The batches."""

    def process(self, run: str) -> Iterator[tuple[str, Drawn]]:
        """One element a learner batch."""
        room = _rooms[run]
        try:
            for drawn in room.drawn():
                yield run, drawn
        except Exception as error:
            room.failure = room.failure or error
            raise


class WriteBatches(beam.DoFn):
    """Hands drawn records to the producer."""

    def process(self, element: tuple[str, Drawn]) -> None:
        """One learner batch."""
        run, drawn = element
        room = _rooms[run]
        try:
            room.writer.write(drawn)
        except Exception as error:
            room.failure = room.failure or error
            raise


def build(pipeline: beam.Pipeline, run: str) -> None:
    """The graph; DoFns carry nothing."""
    (
        pipeline
        | "Source" >> beam.Create([run], reshuffle=False).with_output_types(str)
        | "Load" >> beam.ParDo(Load()).with_output_types(str)
        | "Draw" >> beam.ParDo(Draw()).with_output_types(tuple[str, Drawn])
        | "WriteBatches" >> beam.ParDo(WriteBatches()).with_output_types(bytes)
    )


def bounded_options() -> PipelineOptions:
    """All of them: without an explicit list Beam would read this process's command line."""
    return PipelineOptions(["--direct_num_workers=1", "--direct_running_mode=in_memory", "--no_save_main_session"])


def run_offline(service: Service, offline: OfflineReplay) -> None:
    """Until all batches are in the log, or `service.stop`.

    Raises:
        UsageError, RunError, BrokerError: as they were raised inside the pipeline, not as Beam wraps them.
    """
    if service.index:
        raise UsageError(f"--index {service.index}: a recording is replayed by one process, 0")
    recording = offline.open(lambda: service.cluster)
    try:
        for warning in offline.check(recording, service.config, service.facts):
            service.log.warning("offline.warning", about=warning)
        warm_up()
        room = OfflineRoom(service, offline, recording)
        service.health.ready()
        _rooms[service.run] = room
        try:
            pipeline = beam.Pipeline(runner=local_runner(), options=bounded_options())
            build(pipeline, service.run)
            pipeline.run().wait_until_finish()
        except Exception as error:
            room.failure = room.failure or error
            raise room.failure from None
        finally:
            del _rooms[service.run]
            room.close()
    finally:
        recording.close()
