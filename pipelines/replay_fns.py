"""The replay pipeline as Beam sees it: three thin DoFns around a split's room, and the graph they make.

    Splits -> ReadReplayInputs (unbounded, one element a split) -> Replay (stateful, by split) -> WriteBatches

Rules of this file:
1. No GroupByKey, Combine, window, timer or side input: on FnApiRunner they never fire behind the source (../shared/runners.md).
   tests/pipelines/test_graph.py reads this off the pipeline's own graph.
2. DoFns carry strings. What lives (memory, clients) is in the split's room; a room lost with its worker is rebuilt from the log.
3. On FnApiRunner the steps are fused: when `yield` of the source returns, the chunk is in the memory, and what could be drawn is with the producer.
   A portable runner hands a Beam bundle's elements on when it ends, runs source and memory beside each other, and may keep them in two processes:
   Beam bundles are short there, and the offsets of one are committed when it is final (docs/decisions/0013-portable-runners.md).
"""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Iterator
from typing import Any

import apache_beam as beam
from apache_beam.coders import Coder, TupleCoder, VarIntCoder
from apache_beam.io.iobase import RestrictionProgress, RestrictionTracker
from apache_beam.transforms.core import RestrictionProvider
from apache_beam.transforms.userstate import ReadModifyWriteStateSpec
from apache_beam.utils.timestamp import Duration

from gorila.kafka import Received
from pipelines import split_registry
from pipelines.elements import AssignmentCoder, Chunk, Drawn
from pipelines.split_registry import Address
from pipelines.split_room import EACH_CHECKPOINT, EACH_POLL

ENDLESS = 2**62
QUIET_S = 1.0
QUIET_POLLS = 5
SHORT_BUNDLE_S = 0.05
Turns = tuple[int, int]


class TurnTracker(RestrictionTracker):
    """Claims polls, one after another. A Beam bundle may end after any of them; the rest goes on where it left."""

    def __init__(self, turns: Turns) -> None:
        self._start, self._stop = turns
        self._next = self._start

    def current_restriction(self) -> Turns:
        """Polls of this Beam bundle: [start, stop)."""
        return self._start, self._stop

    def try_claim(self, position: int) -> bool:
        """Whether the poll may be made."""
        if position >= self._stop:
            return False
        self._next = position + 1
        return True

    def try_split(self, fraction_of_remainder: float) -> tuple[Turns, Turns] | None:
        """Only "here and now" can be split off: nobody knows what half of what is to come would be."""
        if fraction_of_remainder != 0 or self._next >= self._stop:
            return None
        rest = (self._next, self._stop)
        self._stop = self._next
        return (self._start, self._stop), rest

    def current_progress(self) -> RestrictionProgress:
        """Always one to go."""
        return RestrictionProgress(completed=0, remaining=1)

    def check_done(self) -> bool:
        """A source that was stopped is done with whatever it had."""
        return True

    def is_bounded(self) -> bool:
        """Never."""
        return False


class Turning(RestrictionProvider):
    """Restrictions of a split: polls from 0 on."""

    def initial_restriction(self, element: str) -> Turns:
        """All of them."""
        return 0, ENDLESS

    def create_tracker(self, restriction: Turns) -> TurnTracker:
        """For one Beam bundle."""
        return TurnTracker(restriction)

    def restriction_size(self, element: str, restriction: Turns) -> int:
        """Splits are equal."""
        return 1

    def restriction_coder(self) -> Coder:
        """Explicit: Beam's default pickles."""
        return TupleCoder((VarIntCoder(), VarIntCoder()))

    def truncate(self, element: str, restriction: Turns) -> None:
        """A drain ends the source at once: what was not polled stays in Kafka."""
        return


class NameSplits(beam.DoFn):
    """One element a split."""

    def __init__(self, splits: list[str]) -> None:
        self._splits = splits

    def process(self, element: bytes) -> Iterator[str]:
        """The impulse → the names."""
        yield from self._splits


class ReadReplayInputs(beam.DoFn):
    """Polls Kafka: for the first record, drains what is there, hands it over at once, goes on for about `bundle_s`, then defers.

    Commits do not wait for the Beam bundle's end: the promise is 200 ms, a Beam bundle lasts a second (each costs 15–20 ms of CPU and as long a
    pause), and by rule 3 what was yielded is in the memory. The finaliser commits too: it is the only place a runner promises.
    """

    def __init__(self, address: Address) -> None:
        self._where = dataclasses.astuple(address)

    @beam.DoFn.unbounded_per_element()
    def process(
        self,
        split: str,
        finalizer: Any = beam.DoFn.BundleFinalizerParam,
        tracker: Any = beam.DoFn.RestrictionParam(Turning()),
    ) -> Iterator[tuple[str, Chunk]]:
        """Chunks of this split until about a second is over, or the process has to stop."""
        room = split_registry.room(Address(*self._where), split)
        with room.remembering():
            reader = room.open_reader()
        stop = room.service.stop
        replay = room.service.config.replay
        fused = self._where[3] == EACH_POLL
        read: dict[int, int] = {}
        finalizer.register(functools.partial(room.commit_final, read))
        turn, _ = tracker.current_restriction()
        poll_s = replay.poll_ms / 1000
        now_s = time.monotonic()
        # Nothing has moved for a second: a record still wakes the poll at once, only ticks become rarer.
        quiet = now_s - room.moved_s > QUIET_S
        ends_s = now_s + (replay.bundle_s if fused else SHORT_BUNDLE_S * QUIET_POLLS if quiet else SHORT_BUNDLE_S)
        stats: list[Received] = []
        while now_s < ends_s and not stop.is_set():
            if not tracker.try_claim(turn):
                return
            turn += 1
            quiet = now_s - room.moved_s > QUIET_S
            with room.remembering():
                chunk = reader.poll(poll_s * QUIET_POLLS if quiet else poll_s, room.may_read(stats))
            now_s, stats = time.monotonic(), chunk.stats
            # Fused, a tick costs nothing; a runner between the steps carries one a Beam bundle.
            if fused or not chunk.is_tick or now_s >= ends_s:
                yield split, chunk
            read.update(reader.read)
            with room.remembering():
                room.commit_due()
            if not fused and chunk.transitions:
                room.moved_s = now_s
                ends_s = min(ends_s, now_s + SHORT_BUNDLE_S)
            now_s = time.monotonic()
        if not stop.is_set():
            tracker.defer_remainder(Duration.of(0))
        elif self._where[3] == EACH_CHECKPOINT:
            # A worker that ends is not the job's end: what Flink took for finished it would never ask for again.
            tracker.defer_remainder(Duration.of(1))


class Replay(beam.DoFn):
    """The split's memory: chunks in, drawn batches out. Its state is the newest assignment, so that a new worker knows its rings."""

    ASSIGNMENT = ReadModifyWriteStateSpec("assignment", AssignmentCoder())

    def __init__(self, address: Address) -> None:
        self._where = dataclasses.astuple(address)

    def process(
        self, element: tuple[str, Chunk], assignment: Any = beam.DoFn.StateParam(ASSIGNMENT)
    ) -> Iterator[tuple[str, Drawn]]:
        """One chunk of one split."""
        split, chunk = element
        room = split_registry.room(Address(*self._where), split)
        if chunk.assignment is not None:
            assignment.write(chunk.assignment)
        elif not room.assigned:
            chunk.assignment = assignment.read() or {}
        with room.remembering(), room.lock:
            for drawn in room.handle(chunk):
                yield split, drawn


class WriteBatches(beam.DoFn):
    """Hands drawn records to the split's producer."""

    def __init__(self, address: Address) -> None:
        self._where = dataclasses.astuple(address)

    def process(self, element: tuple[str, Drawn]) -> None:
        """One learner batch, or a split's stats."""
        split, drawn = element
        room = split_registry.room(Address(*self._where), split)
        with room.remembering(), room.lock:
            room.writer.write(drawn)


def build(pipeline: beam.Pipeline, address: Address, splits: list[str]) -> None:
    """The graph. Names are stable: a portable runner finds a step's state by them."""
    (
        pipeline
        | "Impulse" >> beam.Impulse()
        | "Splits" >> beam.ParDo(NameSplits(splits)).with_output_types(str)
        | "ReadReplayInputs" >> beam.ParDo(ReadReplayInputs(address)).with_output_types(tuple[str, Chunk])
        | "Replay" >> beam.ParDo(Replay(address)).with_output_types(tuple[str, Drawn])
        | "WriteBatches"
        >> beam.ParDo(WriteBatches(address)).with_output_types(
            bytes
        )  # none, but a type: Beam's coder for "any" pickles
    )
