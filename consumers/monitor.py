"""The monitor: a run's topics as TensorBoard charts and a picture of the learning curve. Reads, commits nothing, slows nobody."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from consumers.learning_curve import LearningCurve
from consumers.monitor_metrics import RunMetrics
from gorila.errors import BrokerError, while_away
from gorila.messages import Episode, Evaluation, Message, Priorities, ReplayStats
from gorila.run_follower import Lag, RunFollower
from gorila.run_progress import RunProgress
from gorila.service import Service

FLUSH_EVERY_S = 2.0
CURVE_EVERY_S = 30.0
LAST_LOOK_S = 2.0  # a stop takes 5 s at most, and a run that goes on never stops having more
FIRST_CURVE_S = 5.0  # a run that is stopped early has a picture too, and a stop need not wait for an import
LEARNER_POINT_EVERY = 10  # batches: a chart of 5,000 updates needs no more


class Charts:
    """TensorBoard event file, written without torch or TensorFlow.

    A disk that refuses costs points, not the process: `troubled` is told once, and `flush` tries again with a new file.
    """

    def __init__(self, folder: Path, troubled: Callable[[OSError], None] = lambda _: None) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary

        self._event: Any = Event
        self._summary: Any = Summary
        self._folder, self._troubled = folder, troubled
        self._writer: Any = None
        self._told = False
        self.flush()

    def scalar(self, tag: str, value: float, step: int, time_ms: int) -> None:
        """One point; values that are not finite are left out."""
        if math.isfinite(value) and self._writer is not None:
            summary = self._summary(value=[self._summary.Value(tag=tag, simple_value=value)])
            event = self._event(wall_time=time_ms / 1000, step=step, summary=summary)
            self._on_disk(lambda: self._writer.add_event(event))

    def flush(self) -> None:
        """To disk."""
        if self._on_disk(self._flush):
            self._told = False

    def _flush(self) -> None:
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if self._writer is None:
            self._writer = EventFileWriter(str(self._folder))
        self._writer.flush()

    def _on_disk(self, write: Callable[[], None]) -> bool:
        try:
            write()
        except OSError as error:
            self._writer = None  # its thread is gone with the first error
            if not self._told:
                self._told = True
                self._troubled(error)
            return False
        return True

    def close(self) -> None:
        """Flush and close."""
        if self._writer is not None:
            self._on_disk(self._writer.close)


def epsilon_tag(epsilon: float) -> str:
    """Ladder rungs keep their own chart; a falling schedule is cut into tenths."""
    return f"{epsilon:.1f}" if epsilon >= 0.1 else f"{epsilon:.2g}"


class MonitorCore:
    """Records in, chart points out."""

    def __init__(self, charts: Charts | None, curve: LearningCurve, metrics: RunMetrics | None = None) -> None:
        self._charts, self._curve, self._metrics = charts, curve, metrics
        self._version = 0
        self._seen: dict[str, int] = {}

    def take(self, message: Message, time_ms: int) -> None:
        """Chart one record."""
        self._curve.take(message)
        if self._metrics is not None:
            self._metrics.take(message, epsilon_tag(message.epsilon) if isinstance(message, Episode) else "")
        if self._charts is None:
            return
        point = self._charts.scalar
        if isinstance(message, Episode) and message.role == "actor":
            self._version = max(self._version, message.weights_version)
            point(
                f"return_by_epsilon/{epsilon_tag(message.epsilon)}",
                message.episode_return,
                message.weights_version,
                time_ms,
            )
            point("episode/steps", message.steps, message.weights_version, time_ms)
        elif isinstance(message, Evaluation):
            point(f"evaluation/{message.phase}", message.return_mean, message.weights_version, time_ms)
        elif isinstance(message, Priorities):
            count = self._seen[message.learner_id] = self._seen.get(message.learner_id, 0) + 1
            if count % LEARNER_POINT_EVERY == 0:
                # One chart for all learners (reference.md: look at the norms node by node): the tag's last part is the line's name.
                point(f"loss/{message.learner_id}", message.loss, message.version, time_ms)
                point(f"gradient_norm/{message.learner_id}", message.gradient_norm, message.version, time_ms)
                point(f"busy_fraction/{message.learner_id}", message.busy_fraction, message.version, time_ms)
        elif isinstance(message, ReplayStats):
            point(f"replay/sampleable/{message.split}", float(message.sampleable.sum()), message.inserts_total, time_ms)
            point(f"replay/new_share/{message.split}", message.new_share, message.inserts_total, time_ms)
            point(f"replay/memory_bytes/{message.split}", message.memory_bytes, message.inserts_total, time_ms)

    def rates(self, rates: dict[str, float], lags: list[Lag], progress: RunProgress, time_ms: int) -> None:
        """Chart what only the passing of time shows."""
        if self._charts is None:
            return
        for name, value in rates.items():
            self._charts.scalar(f"rate/{name}_per_s", value, progress.updates, time_ms)
        for lag in lags:
            self._charts.scalar(f"lag/{lag.group}", lag.records, progress.updates, time_ms)
        for percent in (50, 99):
            staleness = progress.staleness_percentile(percent)
            if staleness is not None:
                self._charts.scalar(f"staleness/p{percent}", staleness, progress.updates, time_ms)


def _dead_letters(follower: RunFollower) -> int | None:
    try:
        return follower.dead_letters()
    except BrokerError:
        return None  # away: next time


def run_monitor_service(service: Service) -> None:
    """Until stopped. Without a run folder there is nothing to write to, and it says so."""
    if service.run_dir is None:
        service.log.warning("no --run-dir: neither charts nor curve are written")
    folder = service.run_dir

    def troubled(error: OSError) -> None:
        service.log.warning(
            "disk.refuses", folder=str(folder), reason=error.strerror, then="charts have gaps; tried again"
        )

    wants_charts = folder is not None and service.config.monitor.tensorboard
    charts = Charts(folder / "tensorboard", troubled) if folder is not None and wants_charts else None
    curve = LearningCurve(service.run, service.config.evaluator.threshold)
    metrics = RunMetrics(service.metrics, service.config) if service.config.monitor.metrics_port else None
    core = MonitorCore(charts, curve, metrics)
    progress = RunProgress()
    follower = RunFollower(service, progress, core.take)
    service.log.info("ready")
    service.health.ready()
    next_flush = time.monotonic() + FLUSH_EVERY_S
    next_curve = time.monotonic() + FIRST_CURVE_S
    before: tuple[float, dict[str, float]] | None = None
    while not service.stop.is_set():
        service.health.beat()
        follower.poll(0.5)
        now = time.monotonic()
        if now >= next_flush:
            next_flush = now + FLUSH_EVERY_S
            with while_away():
                follower.look_at_weights()
            counters = {
                "env_steps": float(progress.env_steps),
                "updates": float(progress.updates),
                "samples": float(progress.samples),
            }
            lags = follower.lags()
            if metrics is not None:
                metrics.show(progress, lags, _dead_letters(follower))
            if before is not None:
                gone = now - before[0]
                rates = {name: (value - before[1][name]) / gone for name, value in counters.items()}
                core.rates(rates, lags, progress, int(time.time() * 1000))
            before = (now, counters)
            if charts is not None:
                charts.flush()
        if folder is not None and now >= next_curve:
            next_curve = now + CURVE_EVERY_S
            with suppress(OSError):  # the charts have told of the disk
                curve.draw(folder / "curve.png")
    last_look_s = time.monotonic() + LAST_LOOK_S
    while follower.poll(0.5) and time.monotonic() < last_look_s:
        pass
    if folder is not None:
        try:
            curve.draw(folder / "curve.png")
        except OSError as error:
            troubled(error)
    if charts is not None:
        charts.close()
    follower.close()
