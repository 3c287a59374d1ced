"""A recording's replay at work: records in, batches out, around the pure OfflineSplit; what a killed replay left in the log is not written twice."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from gorila.errors import BrokerError, RunError
from gorila.offline import OfflineReplay
from gorila.recording import Recording
from gorila.service import Service
from pipelines.elements import Drawn
from pipelines.kafka_io import BatchWriter, LogReader
from pipelines.offline_split import OfflineSplit, Progress, Values

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

    @contextmanager
    def remembering(self) -> Iterator[None]:
        """Keep the first failure as it was raised."""
        try:
            yield
        except Exception as error:
            self.failure = self.failure or error
            raise

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
