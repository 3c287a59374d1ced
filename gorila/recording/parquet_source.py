"""A recording that `gorila archiver` wrote. The only reader of its files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from gorila.config import Config
from gorila.environment_facts import EnvironmentFacts
from gorila.errors import RunError, UsageError
from gorila.recording.columns import columns_of, from_columns
from gorila.recording.files import ArchiveFile, FileFacts, files_of, joined, read_footer, read_run_file
from gorila.recording.recorded import TOPICS, Missing, Recorded, Span, config_of
from gorila.topics import BY_NAME

BATCH_ROWS = 4096  # 256 blocks of raw Atari frames are 29 MB


class ParquetRecording:
    """See gorila.recording.Recording. Everything that footers can tell is checked here, before a row is read.

    Raises:
        UsageError: no archive there, or nothing recorded in it.
        RunError: a file is damaged, missing, overlapping, of another run, without a column, or of a newer format.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.run = read_run_file(folder)
        self.config: Config = config_of(self.run)
        self.facts = EnvironmentFacts.from_json(self.run.environment)
        self.bad_records = 0
        self._files: dict[str, dict[int, list[tuple[ArchiveFile, FileFacts]]]] = {}
        missing: list[Missing] = []
        for topic in TOPICS:
            columns = columns_of(topic, self.facts)
            self._files[topic] = {}
            for partition, files in files_of(folder, topic).items():
                checked = [(file, read_footer(file, columns)) for file in files]
                for file, facts in checked:
                    if (facts.run.name, facts.run.environment) != (self.run.name, self.run.environment):
                        raise RunError(f"{file.path}: belongs to run {facts.run.name}, or another environment of it")
                missing += joined(checked)
                self._files[topic][partition] = checked
        self.missing = tuple(missing)
        if not any(facts.records for files in self._files["transitions"].values() for _, facts in files):
            raise UsageError(f"archive {folder}: no transitions were recorded in it")

    def spans(self, topic: str) -> dict[int, Span]:
        """See Recording."""
        found = {p: Span(0, 0) for p in range(BY_NAME[topic].partitions(self.config))}
        found |= {p: Span(files[0][0].first, files[-1][0].last + 1) for p, files in self._files[topic].items()}
        return dict(sorted(found.items()))

    def records(self, topic: str, partition: int | None = None) -> Iterator[Recorded]:
        """See Recording."""
        wanted = sorted(self._files[topic]) if partition is None else [partition]
        for one in wanted:
            for file, facts in self._files[topic].get(one, []):
                self.bad_records += facts.bad_records
                yield from self._read(file, facts)

    def _read(self, file: ArchiveFile, facts: FileFacts) -> Iterator[Recorded]:
        names = columns_of(file.topic, self.facts).names
        where, count = str(file.path), 0
        try:
            with pq.ParquetFile(file.path, page_checksum_verification=True) as parquet:
                batches = parquet.iter_batches(BATCH_ROWS, columns=[n for n in names if n != "observation"])
                for record in from_columns(file.topic, batches, where):
                    if record.partition != file.partition or not file.first <= record.offset <= file.last:
                        raise RunError(f"{where}: has offset {record.offset} of partition {record.partition}")
                    count += 1
                    yield record
        except (pa.ArrowException, OSError) as error:
            raise RunError(f"{where}: damaged: {str(error).splitlines()[0]}") from None
        if count != facts.records:
            raise RunError(f"{where}: has {count} records, its footer says {facts.records}")

    def close(self) -> None:
        """See Recording."""
