"""A run's past on Kafka: what can be rebuilt, a rebuilt state, the whole log recomputed. The edge around history.py and verification.py.

Joins no group, commits nothing; the run may go on meanwhile. Found by name, like a role (consumers/main.py): what it answers with is
gorila/weights_history.py.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

import numpy as np

from consumers.parameter_server.checkpoints import Incomplete, ShardState, restored, to_manifest, to_parts
from consumers.parameter_server.history import Catalogue, Replayed, replay_to, start_for
from consumers.parameter_server.optimizers import make_optimizer, settings_json, warm_up_kernels
from consumers.parameter_server.trace import Tracer
from consumers.parameter_server.verification import Verification
from gorila.config import Config
from gorila.errors import BadRecord, OffsetGone, RunError
from gorila.kafka import Received
from gorila.log_ranges import bounds, read_range
from gorila.messages import Message, Weights
from gorila.processor import Incoming
from gorila.service import Service
from gorila.weights_history import (
    Checked,
    FirstCheckpoint,
    Line,
    Moment,
    Progress,
    RebuiltShard,
    ShardWindow,
    TracedUpdate,
    no_progress,
)

TELL_EVERY_S = 1.0


class TimeTravel:
    """The past of every shard of a run. Methods raise BrokerError, and what they say."""

    def __init__(self, service: Service, progress: Progress = no_progress) -> None:
        self._service, self._progress = service, progress
        self._section = service.config.parameter_server
        self.shards = range(self._section.shards)
        self._catalogues: dict[int, tuple[Catalogue, ShardWindow]] = {}
        warm_up_kernels(self._section)

    # ---- what there is

    def window(self, shard: int) -> ShardWindow:
        """Checkpoints, ledger and published weights as they are now, read once."""
        return self._look(shard)[1]

    def _look(self, shard: int) -> tuple[Catalogue, ShardWindow]:
        if shard not in self._catalogues:
            catalogue = Catalogue.empty(shard)
            lows = {}
            for topic in ("checkpoints", "weights"):
                lows[topic], end = self._bounds(topic, shard)
                for received, message in self._read(topic, shard, lows[topic], end):
                    catalogue.take(received.offset, received.timestamp_ms, message)
            # After what tells of versions: the gradients that made them are all there.
            window = catalogue.window(lows["checkpoints"], self._bounds("gradients", shard))
            self._catalogues[shard] = catalogue, window
        return self._catalogues[shard]

    # ---- one moment

    def rebuild(self, shard: int, moment: Moment) -> RebuiltShard:
        """Raises OffsetGone: the moment is outside the window."""
        replayed = self._replay(shard, moment)
        state = replayed.state
        return RebuiltShard(shard, state.version, state.gradient_offset, state.weights, replayed.state_hash())

    def first_checkpoint(self, shard: int, moment: Moment, config: Config) -> FirstCheckpoint:
        """The rebuilt state as the beginning of another run's shard: version and moments go on, offsets begin anew.

        Args:
            config: of the other run: its optimiser settings go into the hash.

        Raises:
            OffsetGone: the moment, or the target of its version, is outside the window. RunError: as `rebuild`.
        """
        replayed = self._replay(shard, moment)
        state = replayed.state
        period = self._section.target_period_versions
        wanted = state.version - state.version % period
        target = replayed.target
        if target is None or target.version != wanted:
            target = self._target(shard, wanted)
        state.handled, state.gradient_offset = {}, -1
        state.dropped_bad = state.dropped_duplicate = state.dropped_stale = 0
        state.target_version, state.target_offset = target.version, -1
        target.gradient_offset, target.applied = -1, target.version
        target.dropped_bad = target.dropped_duplicate = target.dropped_stale = 0
        target.staleness = np.empty(0, np.int32)
        parts = to_parts(state)
        manifest = to_manifest(state, len(parts), settings_json(config.parameter_server), time.time_ns() // 1_000_000)
        return FirstCheckpoint(parts, manifest, target)

    def _target(self, shard: int, version: int) -> Weights:
        """The target record of a multiple of the target period: recomputed, else as it was published."""
        try:
            replayed = self._replay(shard, Moment(version=version))
            replayed.first_target()
            if replayed.target is not None and replayed.target.version == version:
                return replayed.target
        except OffsetGone:
            pass
        low, end = self._bounds("weights", shard)
        for _, message in self._read("weights", shard, low, end):
            if isinstance(message, Weights) and (message.kind, message.version) == ("target", version):
                return message
        period = self._section.target_period_versions
        raise OffsetGone(
            f"the target weights of version {version} are no longer there: {self.window(shard).describe()}; from version {version + period}"
            " on the target is in it",
            self._service.topic("weights"),
            shard,
        )

    def _replay(self, shard: int, moment: Moment) -> Replayed:
        moment = self._placed(shard, moment)
        catalogue, window = self._look(shard)
        topic = self._service.topic("gradients")
        if moment.offset is not None and moment.offset >= window.gradients[1]:
            raise OffsetGone(f"gradient offset {moment.offset} is not there yet: {window.describe()}", topic, shard)
        state = self._restored(catalogue, start_for(window, moment, topic))
        replayed = Replayed(self._service.config, state)
        end = window.gradients[1] if moment.offset is None else moment.offset + 1
        gradients = self._gradients(shard, state.gradient_offset + 1, end, replayed)
        if not replay_to(replayed, gradients, moment):
            raise OffsetGone(
                f"version {moment.version} is not there yet: {window.describe()}, where version {state.version} is",
                topic,
                shard,
            )
        return replayed

    def _placed(self, shard: int, moment: Moment) -> Moment:
        """A time as an offset: the last gradient whose record is not later."""
        if moment.timestamp_ms is None:
            return moment
        place = (self._service.topic("gradients"), shard)
        later = self._service.cluster.admin().offsets([place], moment.timestamp_ms + 1)[place]
        _, window = self._look(shard)
        before = later - 1 if later >= 0 else window.gradients[1] - 1
        oldest = window.oldest
        if oldest is None or before < oldest.gradient_offset or moment.timestamp_ms < oldest.time_ms:
            raise OffsetGone(f"that time is before what can be rebuilt: {window.describe()}", place[0], shard)
        return Moment(offset=before)

    def _restored(self, catalogue: Catalogue, lines: list[Line]) -> ShardState:
        shard, reasons = catalogue.shard, []
        topic = self._service.topic("checkpoints")
        for line in lines:
            low = self._bounds("checkpoints", shard)[0]
            try:
                return restored(
                    lambda start, stop: ((r.offset, m) for r, m in self._read("checkpoints", shard, start, stop)),
                    low,
                    line.offset,
                    catalogue.manifests[line.offset],
                    moments=make_optimizer(self._section).tensors,
                    optimizer=settings_json(self._section),
                )
            except Incomplete as reason:
                reasons.append(f"version {line.version} at offset {line.offset}: {reason}")
        raise OffsetGone(f"no checkpoint in {topic} is whole: {'; '.join(reasons)}", topic, shard)

    # ---- all of it

    def verify(self, shard: int) -> Checked:
        """Recompute everything from the oldest checkpoint and compare. Raises RunError: the first mismatch. OffsetGone: nothing is left."""
        catalogue, window = self._look(shard)
        usable = sorted((line for line in window.checkpoints if line.usable), key=lambda line: line.version)
        if not usable:
            raise OffsetGone(window.describe(), self._service.topic("checkpoints"), shard)
        state = self._restored(catalogue, usable)
        replayed = Replayed(self._service.config, state)
        names = {name: self._service.topic(name) for name in ("checkpoints", "weights", "gradients")}
        verification = Verification(self._service.config, replayed, window, names)
        verification.begin()
        for record in self._gradients(shard, state.gradient_offset + 1, window.gradients[1], replayed):
            verification.take(record)
        if self._service.stop.is_set():
            raise RunError("interrupted before the end of the log")
        return verification.finish()

    def trace(self, shard: int, version: int, updates: int) -> list[TracedUpdate]:
        """The newest `updates` updates up to a version, newest first. Raises OffsetGone: outside the window."""
        first = max(1, version - updates + 1)
        replayed = self._replay(shard, Moment(version=first - 1))
        tracer, made = Tracer(self._service), []
        _, window = self._look(shard)
        for record in self._gradients(shard, replayed.state.gradient_offset + 1, window.gradients[1], replayed):
            if replayed.take(record):
                made.append(tracer.update(record, replayed.state.version))
                if replayed.state.version == version:
                    return made[::-1]
        raise OffsetGone(
            f"version {version} is not there yet: {window.describe()}, where version {replayed.state.version} is",
            self._service.topic("gradients"),
            shard,
        )

    # ---- reading

    def _gradients(self, shard: int, start: int, stop: int, replayed: Replayed) -> Iterator[Incoming]:
        """What the server was handed: records nobody can decode never came to it."""
        tell_s = time.monotonic() + TELL_EVERY_S
        for received, message in self._read("gradients", shard, start, stop):
            yield Incoming("gradients", shard, received.offset, received.timestamp_ms, received.key, message)
            if time.monotonic() >= tell_s:
                tell_s = time.monotonic() + TELL_EVERY_S
                self._progress(shard, received.offset + 1 - start, stop - start, replayed.state.version)

    def _bounds(self, topic: str, shard: int) -> tuple[int, int]:
        return bounds(self._service.cluster, self._service.topic(topic), shard)

    def _read(self, topic: str, shard: int, start: int, stop: int) -> Iterator[tuple[Received, Message]]:
        service = self._service
        for received in read_range(service.cluster, service.topic(topic), shard, start, stop, service.stop):
            try:
                yield received, service.schemas.decode(received.value)
            except BadRecord:
                continue
