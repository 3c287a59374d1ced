"""The archive's folder as its one writer sees it. A file is made whole or not at all:

1. write     under a temporary name in the partition's folder, then fsync. Dying here leaves a file no reader looks at; the next start removes it.
2. rename    to the final name, which says the offsets. From here on the file exists.
3. fsync     of the folder, so that the name survives a power cut too. Only then may the offsets be committed (gorila/runtime.py step 7).
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any

import pyarrow as pa
import pyarrow.parquet as pq

from gorila.environment_facts import EnvironmentFacts
from gorila.errors import LocalError, RunError, UsageError
from gorila.messages import Run
from gorila.recording.columns import columns_of
from gorila.recording.files import (
    RUN_FILE,
    ArchiveFile,
    FileFacts,
    file_name,
    files_of,
    read_footer,
    read_run_file,
    run_metadata,
)
from gorila.recording.recorded import TOPICS

Place = tuple[str, int]
_TEMPORARY = ".writing"
REPLACED = "replaced"


def write_durably(path: Path, write: Callable[[IO[bytes]], None]) -> int:
    """Make a file whole or not at all; its size in bytes. Raises LocalError (disk full, no permission); then nothing is left of it."""
    temporary = path.with_name(f".{path.name}{_TEMPORARY}")
    try:
        _make_folder(path.parent)
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
            size = file.tell()
        os.replace(temporary, path)
        _sync(path.parent)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise LocalError(
            f"archive: {path} was not written: {error.strerror or error}; its offsets are not committed, so nothing is lost"
        ) from None
    return size


def _make_folder(folder: Path) -> None:
    if not folder.exists():
        _make_folder(folder.parent)
        folder.mkdir(exist_ok=True)
        _sync(folder.parent)


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class ArchiveFolder:
    """One run's archive, locked against a second writer until `close`.

    Raises:
        UsageError: it holds another run, or another archiver writes to it. LocalError: it cannot be written.
    """

    def __init__(self, folder: Path, run: Run) -> None:
        self.folder, self.run = folder, run
        self.facts = EnvironmentFacts.from_json(run.environment)
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = (folder / ".lock").open("wb")
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise UsageError(f"archive {folder}: another archiver writes to it") from None
        except OSError as error:
            raise LocalError(f"archive {folder}: {error.strerror or error}") from None
        if (folder / RUN_FILE).exists():
            held = read_run_file(folder)
            if (held.name, held.time_ms) != (run.name, run.time_ms):
                raise UsageError(
                    f"archive {folder}: it holds run {held.name} made at {held.time_ms} ms, not run {run.name} made at {run.time_ms} ms:"
                    " a run needs a folder of its own"
                )
        else:
            self._write_run()
        for left in folder.glob(f"*/*/.*{_TEMPORARY}"):
            left.unlink()

    def _write_run(self) -> None:
        run = self.run
        table = pa.table(
            {
                "name": [run.name],
                "config": [run.config],
                "environment": [run.environment],
                "schemas": pa.array([list(run.schemas.items())], pa.map_(pa.string(), pa.string())),
                "product_version": [run.product_version],
                "time_ms": [run.time_ms],
            }
        )
        marks = {f"gorila.{name}": value for name, value in run_metadata(run).items()}
        write_durably(self.folder / RUN_FILE, lambda file: _write_table(table, file, marks, compression="zstd"))

    def next_offsets(self, on_damaged: Callable[[ArchiveFile, str], None]) -> dict[Place, int]:
        """{(topic, partition): last + 1 of its newest complete file}. A newest file that does not read is set aside, and the one before it counts."""
        found: dict[Place, int] = {}
        for topic in TOPICS:
            columns = columns_of(topic, self.facts)
            for partition, files in files_of(self.folder, topic).items():
                while files:
                    try:
                        found[topic, partition] = read_footer(files[-1], columns).last + 1
                        break
                    except RunError as error:
                        on_damaged(files[-1], str(error))
                        self._set_aside(files.pop())
        return found

    def replace_from(self, place: Place, offset: int) -> tuple[list[Path], int]:
        """Set aside the files that begin at or above `offset`: (those files, next offset after the files that stay, or `offset`)."""
        topic, partition = place
        files = files_of(self.folder, topic).get(partition, [])
        went = [file for file in files if file.first >= offset]
        for file in went:
            self._set_aside(file)
        return [file.path for file in went], max([offset, *(file.last + 1 for file in files if file.first < offset)])

    def _set_aside(self, file: ArchiveFile) -> None:
        number = 0
        while True:
            target = self.folder / REPLACED / str(number) / file.path.relative_to(self.folder)
            if not target.exists():
                break
            number += 1
        try:
            _make_folder(target.parent)
            os.replace(file.path, target)
            _sync(file.path.parent)
            _sync(target.parent)
        except OSError as error:
            raise LocalError(f"archive: {file.path} cannot be set aside: {error.strerror or error}") from None

    def write(self, facts: FileFacts, batches: Sequence[pa.RecordBatch], codecs: set[str]) -> int:
        """One file of one row group; its size in bytes.

        Args:
            codecs: of the observation blocks in it: what an actor compressed is not compressed again.

        Raises:
            LocalError: not written; nothing is left of it.
        """
        schema = columns_of(facts.topic, self.facts)
        table = pa.Table.from_batches(batches, schema).combine_chunks()
        squeezed = bool(codecs) and "none" not in codecs
        compression = {
            name: "none" if squeezed and name == "observation_data" else "zstd" for name in _leaves(table.schema)
        }

        def write(file: IO[bytes]) -> None:
            _write_table(
                table,
                file,
                facts.to_metadata(),
                compression=compression,
                use_dictionary=["actor_id", "learner_id", "observation_dtype", "observation_codec", "kind", "role"],
            )

        return write_durably(self.folder / file_name(facts.topic, facts.partition, facts.first, facts.last), write)

    def close(self) -> None:
        """Give the lock back."""
        self._lock.close()


def _write_table(table: pa.Table, file: IO[bytes], metadata: Mapping[str, str], **options: Any) -> None:
    """One row group. Arrow's own copy of the schema is left out: it would repeat the metadata in base64, and no column of ours needs it."""
    with pq.ParquetWriter(file, table.schema, store_schema=False, write_page_checksum=True, **options) as writer:
        if table.num_rows:
            writer.write_table(table, row_group_size=table.num_rows)
        writer.add_key_value_metadata(dict(metadata))


def _leaves(schema: Any) -> list[str]:
    """Column paths as Parquet names them: compression is set by leaf."""
    paths = []
    for field in schema:
        if pa.types.is_list(field.type):
            paths.append(f"{field.name}.list.element")
        elif pa.types.is_map(field.type):
            paths += [f"{field.name}.key_value.key", f"{field.name}.key_value.value"]
        else:
            paths.append(field.name)
    return paths
