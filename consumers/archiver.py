"""The archiver: a run's records as Parquet files, each the exact copy of a range of offsets.

Rows wait in memory, as Arrow columns, until their file is big or old enough; then it is written in one go, as one row group, and made durable before
`positions` moves. A writer is never open between two files, so memory is what is buffered, whatever a run's length (cases.md 39).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import pyarrow as pa

from consumers.archive_folder import ArchiveFolder, Place
from gorila.config import ArchiveSection
from gorila.errors import InvalidState, RunError
from gorila.event_log import EventLogger
from gorila.messages import Message, Priorities, TransitionBlock
from gorila.metrics import Metrics
from gorila.processor import Incoming, Outgoing
from gorila.recording.columns import columns_of, to_columns
from gorila.recording.files import FileFacts
from gorila.recording.recorded import Recorded

PENDING_RECORDS = 64  # kept as messages; more become columns, which weigh a tenth
_RECORD_BYTES = 4096  # what a decoded message weighs beside its payload
_ROW_BYTES = 128


def _weight(message: Message) -> int:
    if isinstance(message, TransitionBlock):
        return _RECORD_BYTES + len(message.observations.data) + _ROW_BYTES * len(message.action)
    if isinstance(message, Priorities):
        return _RECORD_BYTES + _ROW_BYTES * len(message.row)
    return _RECORD_BYTES


@dataclass
class _OpenFile:
    """A file that is not yet written: offsets `first` to `next` - 1."""

    first: int
    next: int
    missing_from: int | None = None
    missing_because: str = ""
    opened_s: float | None = None
    pending: list[Recorded] = field(default_factory=list)
    pending_bytes: int = 0
    batches: list[pa.RecordBatch] = field(default_factory=list)
    batches_bytes: int = 0
    records: int = 0
    bad_records: int = 0
    codecs: set[str] = field(default_factory=set)

    @property
    def bytes(self) -> int:
        return self.pending_bytes + self.batches_bytes


class Archiver:
    """A role of gorila/processor.py; what it "emits" are files.

    Args:
        planned: {(topic, partition): where reading is to begin}: last + 1 of the newest file, or the log's beginning.
    """

    def __init__(
        self,
        folder: ArchiveFolder,
        planned: Mapping[Place, int],
        config: ArchiveSection,
        metrics: Metrics,
        log: EventLogger,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._folder, self._planned, self._config = folder, dict(planned), config
        self._metrics, self._log, self._clock = metrics, log, clock
        self._files: dict[Place, _OpenFile] = {}
        self._durable: dict[Place, int] = {}

    # ---- where reading begins

    def assigned(self, starts: Mapping[Place, int]) -> None:
        """Begin each partition where the runtime will read it: as planned, unless an operator's reset says otherwise."""
        for place, start in starts.items():
            planned = self._planned[place]
            self._files[place] = _OpenFile(start, start)
            if start < planned:
                went, after = self._folder.replace_from(place, start)
                self._files[place] = _OpenFile(after, after)
                self._log.warning(
                    "archive.replaced", topic=place[0], partition=place[1], files=len(went), begins_at=after
                )
            elif start > planned:
                self._files[place] = _OpenFile(start, start, planned, "passed over by an operator's reset")

    def jumped(self, topic: str, partition: int, offset: int) -> None:
        """Records are gone from the log; reading goes on at `offset`. Raises RunError when the log ends before what is archived."""
        place = (topic, partition)
        open_file = self._files[place]
        if offset < open_file.next:
            raise RunError(
                f"archive {self._folder.folder}: holds {topic} partition {partition} up to offset {open_file.next - 1}, the log ends before"
                " that: the topic was made anew, give it a folder of its own"
            )
        if offset == open_file.next:
            return
        self._write(place)
        empty = self._files[place]
        missing = empty.next if empty.missing_from is None else empty.missing_from
        self._files[place] = _OpenFile(offset, offset, missing, "deleted from the log before they were archived")

    # ---- records

    def process(self, record: Incoming) -> Iterable[Outgoing]:
        """Buffer one record; write a file when it is full, or the largest when memory is."""
        place = (record.topic, record.partition)
        open_file = self._files[place]
        if record.offset < open_file.next:
            return ()  # an operator's reset into the middle of a file that stays
        message = record.message
        open_file.pending.append(Recorded(record.partition, record.offset, record.timestamp_ms, message))
        open_file.pending_bytes += _weight(message)
        open_file.next = record.offset + 1
        if isinstance(message, TransitionBlock):
            open_file.codecs.add(message.observations.codec)
        if len(open_file.pending) >= PENDING_RECORDS:
            self._pack(record.topic, open_file)
        if open_file.bytes >= self._config.file_bytes:
            self._write(place)
        elif self.buffered_bytes > self._config.memory_bytes:
            self._write(max(self._files, key=lambda one: self._files[one].bytes))
        return ()

    def skipped(self, topic: str, partition: int, offset: int) -> None:
        """A record that is in dead-letters: the file covers its offset and counts it."""
        open_file = self._files[topic, partition]
        if offset >= open_file.next:
            open_file.bad_records += 1
            open_file.next = offset + 1

    def tick(self, now_s: float) -> Iterable[Outgoing]:
        """Close files that are old enough: by this process's clock, never by a record's."""
        for place, open_file in list(self._files.items()):
            if open_file.next == open_file.first:
                continue
            if open_file.opened_s is None:
                open_file.opened_s = now_s
            elif now_s - open_file.opened_s >= self._config.file_age_s:
                self._write(place)
        self._metrics.gauge("archive_buffered_bytes", self.buffered_bytes)
        return ()

    @property
    def buffered_bytes(self) -> int:
        """Read and not yet in a file."""
        return sum(open_file.bytes for open_file in self._files.values())

    def _pack(self, topic: str, open_file: _OpenFile) -> None:
        schema = columns_of(topic, self._folder.facts)
        batch = to_columns(topic, open_file.pending, schema, self._folder.facts)
        open_file.batches.append(batch)
        open_file.batches_bytes += batch.nbytes
        open_file.records += len(open_file.pending)
        open_file.pending, open_file.pending_bytes = [], 0

    def _write(self, place: Place) -> None:
        topic, partition = place
        open_file = self._files[place]
        if open_file.next == open_file.first:
            return
        if open_file.pending:
            self._pack(topic, open_file)
        facts = FileFacts(
            self._folder.run,
            topic,
            partition,
            open_file.first,
            open_file.next - 1,
            open_file.records,
            open_file.bad_records,
            open_file.missing_from,
            open_file.missing_because,
        )
        size = self._folder.write(facts, open_file.batches, open_file.codecs)
        self._durable[place] = open_file.next
        self._files[place] = _OpenFile(open_file.next, open_file.next)
        self._metrics.count("archive_files_total", topic=topic)
        self._metrics.count("archive_records_total", facts.records, topic=topic)
        self._metrics.count("archive_bytes_total", size, topic=topic)
        self._log.info(
            "archive.file", topic=topic, partition=partition, first=facts.first, last=facts.last, size_bytes=size
        )

    def finish(self, within_s: float) -> None:
        """Write what is buffered, the largest last. What is not written in time is left to the next process, uncommitted."""
        deadline_s = self._clock() + within_s
        for place in sorted(self._files, key=lambda one: self._files[one].bytes):
            if self._clock() < deadline_s:
                self._write(place)

    # ---- the rest of the protocol

    def positions(self) -> dict[tuple[str, int], int]:
        """What is in durable files; nothing else is ever committed."""
        return dict(self._durable)

    def delivered(self, record: Outgoing, partition: int, offset: int) -> None:
        """Nothing is produced."""

    def wants(self, topic: str) -> bool:
        """Memory is bounded by writing, not by waiting."""
        return True

    def waiting_for(self) -> str:
        """Nobody."""
        return ""

    def snapshot(self) -> Iterable[Outgoing]:
        """The files are the state."""
        return ()

    def check_valid(self) -> None:
        """Raises InvalidState."""
        for place, open_file in self._files.items():
            if self._durable.get(place, open_file.first) > open_file.first:
                raise InvalidState(f"{place}: the open file begins before what is durable")
