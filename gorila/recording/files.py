"""Names and footers of an archive's files. DIR/run.parquet makes a folder an archive; DIR/TOPIC/PARTITION/TOPIC-PARTITION-FIRST-LAST.parquet
covers exactly the offsets FIRST to LAST (both included) of one partition: every record in them that could be decoded is in it.

A file has its final name only when it is complete and on disk, so one that does not read was damaged afterwards.
"""

from __future__ import annotations

import itertools
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from gorila.errors import RunError, UsageError
from gorila.messages import Run
from gorila.recording.recorded import Missing

FORMAT = 1
RUN_FILE = "run.parquet"
_PREFIX = "gorila."
_NAME = re.compile(r"([a-z-]+)-(\d+)-(\d+)-(\d+)\.parquet")


@dataclass(frozen=True, slots=True)
class ArchiveFile:
    """One file, by its name."""

    path: Path
    topic: str
    partition: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class FileFacts:
    """What a file says of itself in its footer.

    Attributes:
        records: in it; `bad_records` more were in its offsets and are in the run's dead-letters.
        missing_from: offsets from here to `first` - 1 were gone or passed over when the file was begun, `missing_because` says why; else None.
    """

    run: Run
    topic: str
    partition: int
    first: int
    last: int
    records: int
    bad_records: int
    missing_from: int | None = None
    missing_because: str = ""

    def to_metadata(self) -> dict[str, str]:
        """As the footer has it."""
        own = {
            "topic": self.topic,
            "partition": str(self.partition),
            "first_offset": str(self.first),
            "last_offset": str(self.last),
            "records": str(self.records),
            "bad_records": str(self.bad_records),
            **run_metadata(self.run),
        }
        if self.missing_from is not None:
            own |= {"missing_from": str(self.missing_from), "missing_because": self.missing_because}
        return {_PREFIX + name: value for name, value in own.items()}


def run_metadata(run: Run) -> dict[str, str]:
    """A run's record as text, without prefix."""
    return {
        "format": str(FORMAT),
        "run": run.name,
        "config": run.config,
        "environment": run.environment,
        "schemas": json.dumps(run.schemas, sort_keys=True),
        "product_version": run.product_version,
        "run_time_ms": str(run.time_ms),
    }


def file_name(topic: str, partition: int, first: int, last: int) -> str:
    """Below the archive's folder."""
    return f"{topic}/{partition}/{topic}-{partition}-{first}-{last}.parquet"


def files_of(folder: Path, topic: str) -> dict[int, list[ArchiveFile]]:
    """{partition: complete files in offset order}. Other names are left alone."""
    found: dict[int, list[ArchiveFile]] = {}
    for path in (folder / topic).glob("*/*.parquet"):
        match = _NAME.fullmatch(path.name)
        if match is None or match[1] != topic or path.parent.name != match[2]:
            continue
        one = ArchiveFile(path, topic, int(match[2]), int(match[3]), int(match[4]))
        found.setdefault(one.partition, []).append(one)
    return {p: sorted(files, key=lambda one: (one.first, one.last)) for p, files in sorted(found.items())}


def _metadata(path: Path) -> tuple[pa.Schema, dict[str, str], int]:
    try:
        footer = pq.read_metadata(path)
        schema = footer.schema.to_arrow_schema()
    except (pa.ArrowException, OSError, ValueError) as error:
        raise RunError(f"{path}: not a complete Parquet file: {str(error).splitlines()[0]}") from None
    ours = {
        name.decode().removeprefix(_PREFIX): value.decode()
        for name, value in (footer.metadata or {}).items()
        if name.startswith(_PREFIX.encode())
    }
    version = ours.get("format", "")
    if not version.isdecimal():
        raise RunError(f"{path}: not a file of a gorila archive: its footer says no gorila.format")
    if int(version) > FORMAT:
        raise RunError(
            f"{path}: written by a newer gorila (archive format {version}, {ours.get('product_version') or 'unknown version'}):"
            f" this one reads up to format {FORMAT}"
        )
    return schema, ours, footer.num_rows


def _run_of(path: Path, ours: dict[str, str]) -> Run:
    try:
        schemas: Any = json.loads(ours["schemas"])
        return Run(
            ours["run"],
            ours["config"],
            ours["environment"],
            {str(number): str(text) for number, text in schemas.items()},
            ours["product_version"],
            int(ours["run_time_ms"]),
        )
    except (KeyError, ValueError, AttributeError) as error:
        raise RunError(f"{path}: its footer does not say which run it belongs to: {error}") from None


def read_footer(file: ArchiveFile, columns: pa.Schema) -> FileFacts:
    """What a file says of itself.

    Args:
        columns: those that must be there, with these types; more may be.

    Raises:
        RunError: damaged, not ours, written by a newer version, of another place than its name says, or without a column.
    """
    schema, ours, _ = _metadata(file.path)
    for field in columns:
        if field.name not in schema.names:
            raise RunError(f"{file.path}: column {field.name!r} is missing")
        if schema.field(field.name).type != field.type:
            raise RunError(f"{file.path}: column {field.name!r} is {schema.field(field.name).type}, not {field.type}")
    try:
        facts = FileFacts(
            _run_of(file.path, ours),
            ours["topic"],
            int(ours["partition"]),
            int(ours["first_offset"]),
            int(ours["last_offset"]),
            int(ours["records"]),
            int(ours["bad_records"]),
            int(ours["missing_from"]) if "missing_from" in ours else None,
            ours.get("missing_because", ""),
        )
    except (KeyError, ValueError) as error:
        raise RunError(f"{file.path}: its footer cannot be read: {error}") from None
    if (facts.topic, facts.partition, facts.first, facts.last) != (file.topic, file.partition, file.first, file.last):
        raise RunError(
            f"{file.path}: its footer says {file_name(facts.topic, facts.partition, facts.first, facts.last)}"
        )
    return facts


def read_run_file(folder: Path) -> Run:
    """The run an archive holds. Raises UsageError where there is no archive, RunError for one that cannot be read."""
    if not folder.is_dir():
        raise UsageError(f"archive {folder}: there is no such folder")
    path = folder / RUN_FILE
    if not path.exists():
        raise UsageError(f"archive {folder}: no {RUN_FILE} in it, so it is not an archive of `gorila archiver`")
    return _run_of(path, _metadata(path)[1])


def joined(files: list[tuple[ArchiveFile, FileFacts]]) -> list[Missing]:
    """Check that a partition's files (in offset order) follow each other; the holes they declare.

    Raises:
        RunError: two files overlap, or one is missing between two.
    """
    holes = []
    for (before, _), (file, facts) in itertools.pairwise(files):
        if file.first <= before.last:
            raise RunError(f"{file.path}: overlaps {before.path.name}: both hold offset {file.first}")
        if file.first > before.last + 1:
            if facts.missing_from is None or facts.missing_from > before.last + 1:
                raise RunError(
                    f"{file.path}: offsets {before.last + 1} to {file.first - 1} are missing before it: a file was taken away"
                )
            holes.append(Missing(file.topic, file.partition, before.last + 1, file.first, facts.missing_because))
    return holes
