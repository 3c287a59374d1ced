"""Parquet files of the archive: exact copies of the log, whole or not there, whatever happens in between."""

from __future__ import annotations

import dataclasses
import gc
import logging
import os
import resource
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import psutil
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from consumers import archive_folder
from consumers.archive_folder import ArchiveFolder
from consumers.archiver import Archiver
from consumers.archiver_service import inputs_of
from gorila.codec import Schemas
from gorila.config import ArchiveSection, Config
from gorila.environment_facts import EnvironmentFacts
from gorila.errors import LocalError, RunError, UsageError
from gorila.event_log import EventLogger
from gorila.messages import Episode, Evaluation, Message, Priorities, Run, TransitionBlock
from gorila.metrics import Metrics
from gorila.observations import inflate
from gorila.processor import Incoming
from gorila.recording.columns import columns_of, from_columns, to_columns
from gorila.recording.files import files_of, joined, read_footer
from gorila.recording.parquet_source import ParquetRecording
from gorila.recording.recorded import TOPICS, Recorded
from gorila.runtime import Runtime
from gorila.settings import canonical_json
from gorila.testing.driver import MemoryService
from gorila.testing.experience import IMAGE_FACTS, VECTOR_FACTS, Experience
from gorila.testing.memory_log import Killed, MemoryCluster
from gorila.topics import TOPOLOGY, full_name

SCHEMAS = Schemas()
CONFIG = Config()


def run_of(facts: EnvironmentFacts = VECTOR_FACTS, name: str = "test", time_ms: int = 7) -> Run:
    return Run(name, canonical_json(CONFIG), facts.to_json(), SCHEMAS.texts(), "0.1", time_ms)


def priorities(rows: int, seed: int = 0) -> Priorities:
    rng = np.random.default_rng(seed)
    return Priorities(
        "learner-0",
        0,
        seed,
        5,
        rng.integers(4, size=rows).astype(np.int32),
        rng.integers(1 << 40, size=rows),
        rng.integers(16, size=rows).astype(np.int32),
        rng.random(rows).astype(np.float32),
        float("nan") if seed % 3 == 0 else 0.5,
        2.5,
        seed % 2 == 0,
        0.25,
    )


def recorded(messages: Sequence[Message], first: int = 0, partition: int = 0) -> list[Recorded]:
    """As a reader sees them: through the wire."""
    return [
        Recorded(partition, first + n, 1_700_000_000_000 + n, SCHEMAS.decode(SCHEMAS.encode(message)))
        for n, message in enumerate(messages)
    ]


def same(left: Sequence[Recorded], right: Sequence[Recorded]) -> None:
    assert [(r.partition, r.offset, r.timestamp_ms) for r in left] == [
        (r.partition, r.offset, r.timestamp_ms) for r in right
    ]
    for one, other in zip(left, right, strict=True):
        assert SCHEMAS.encode(one.message) == SCHEMAS.encode(other.message)


EXAMPLES: dict[str, Callable[[], list[Message]]] = {
    "transitions": lambda: [*Experience(VECTOR_FACTS).blocks(40)],
    "priorities": lambda: [priorities(rows, rows) for rows in (32, 0, 1, 0, 64, 3)],
    "episodes": lambda: [
        Episode("actor", "actor-0", 1, -21.5, 900, True, 0.1, 4, 10_000, 1),
        Evaluation("evaluator-0", 5, "screen", 20, 1.1, 0.3, -2.0, 4.0, 0.05, False, 2),
        Episode("evaluator", "evaluator-0", 0, 3.25, 12, False, 0.0, 5, 12, 3),
    ],
    "run": lambda: [run_of(), run_of(time_ms=9)],
}


@pytest.mark.parametrize("topic", TOPICS)
@pytest.mark.parametrize("batch_rows", [1, 7, 10_000])
def test_records_come_back_byte_for_byte_however_the_rows_are_cut(topic: str, batch_rows: int) -> None:
    records = recorded(EXAMPLES[topic](), 100, 3)
    table = pa.Table.from_batches([to_columns(topic, records, columns_of(topic, VECTOR_FACTS), VECTOR_FACTS)])
    same(list(from_columns(topic, iter(table.to_batches(batch_rows)), "test")), records)


@settings(max_examples=25, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(
    st.integers(0, 2**31),
    st.sampled_from(["none", "zstd", "lz4"]),
    st.integers(1, 40),
    st.sampled_from([VECTOR_FACTS, IMAGE_FACTS]),
)
def test_blocks_of_any_size_and_codec_come_back_byte_for_byte(
    seed: int, codec: str, rows: int, facts: EnvironmentFacts
) -> None:
    records = recorded([*Experience(facts, seed).blocks(9, rows, codec)])
    table = pa.Table.from_batches([to_columns("transitions", records, columns_of("transitions", facts), facts)])
    same(list(from_columns("transitions", iter(table.to_batches(max(1, rows // 2))), "test")), records)


def test_a_block_that_is_not_the_environments_is_kept_as_it_came() -> None:
    odd = [*Experience(IMAGE_FACTS).blocks(2)]
    table = pa.Table.from_batches(
        [to_columns("transitions", recorded(odd), columns_of("transitions", VECTOR_FACTS), VECTOR_FACTS)]
    )
    assert table["observation"].null_count == len(table)
    same(list(from_columns("transitions", iter(table.to_batches()), "test")), recorded(odd))


def test_rows_that_are_missing_are_said_with_their_offset() -> None:
    records = recorded(EXAMPLES["transitions"](), 100)
    table = pa.Table.from_batches(
        [to_columns("transitions", records, columns_of("transitions", VECTOR_FACTS), VECTOR_FACTS)]
    )
    without = pa.concat_tables([table.slice(0, 3), table.slice(4)])
    with pytest.raises(RunError, match="here: offset 100: rows are missing"):
        list(from_columns("transitions", iter(without.combine_chunks().to_batches()), "here"))


# ---- files


class World:
    """A log in memory and an archive on disk."""

    def __init__(self, folder: Path, facts: EnvironmentFacts = VECTOR_FACTS, **sets: object) -> None:
        section = ArchiveSection(**{"file_bytes": 20_000, "file_age_s": 1e9, **sets})
        self.config = Config(archive=section)
        self.folder, self.run = folder, run_of(facts)
        counts = {full_name("test", topic.name): topic.partitions(self.config) for topic in TOPOLOGY}
        self.cluster = MemoryCluster(counts)
        self.log: list[tuple[str, dict[str, object]]] = []
        self.now_s = 0.0
        self.archiver: Archiver | None = None

    def append(self, topic: str, *values: Message | bytes | None) -> None:
        for value in values:
            self.cluster.now_ms += 1
            data = value if value is None or isinstance(value, bytes) else SCHEMAS.encode(value)
            self.cluster.append(f"test.{topic}", 0, data)

    def start(self) -> None:
        self.archive = ArchiveFolder(self.folder, self.run)
        ends = self.archive.next_offsets(lambda file, reason: self.log.append(("damaged", {"path": file.path})))
        planned = {(t, 0): ends.get((t, 0), self.cluster.low.get((f"test.{t}", 0), 0)) for t in TOPICS}
        self.service = MemoryService(
            self.cluster, role="archiver", name="archiver-0", config=self.config, schemas=SCHEMAS
        )
        self.archiver = Archiver(
            self.archive, planned, self.config.archive, Metrics("archiver"), EventLogger("test", logging.CRITICAL)
        )
        self.runtime = Runtime(
            self.service, self.archiver, inputs_of(planned), commit_interval_s=0.0, clock=lambda: self.now_s
        )
        self.runtime.open()

    def turns(self, count: int = 30) -> None:
        for _ in range(count):
            self.now_s += 0.01
            self.runtime.turn(0.0)

    def stop(self) -> None:
        assert self.archiver is not None
        self.archiver.finish(60.0)
        self.runtime.drain()
        self.close()

    def close(self) -> None:
        self.runtime.close()
        self.archive.close()

    def kill(self) -> None:
        self.cluster.kill_clients()
        if hasattr(self, "archive"):
            self.archive.close()

    def good(self, topic: str) -> list[Recorded]:
        """What the log has that decodes."""
        found = []
        for r in self.cluster.read(f"test.{topic}"):
            if r.value and r.value[0] == 0 and len(r.value) > 20:
                found.append(Recorded(r.partition, r.offset, r.timestamp_ms, SCHEMAS.decode(r.value)))
        return found

    def committed(self, topic: str) -> int | None:
        return self.cluster.offsets.get(("test.archiver", f"test.{topic}", 0), (None, ""))[0]


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "archive")


def fill(world: World, blocks: int = 120) -> None:
    for topic, make in EXAMPLES.items():
        if topic != "transitions":
            world.append(topic, *make())
    world.append("transitions", *Experience(VECTOR_FACTS).blocks(blocks))


def test_what_is_archived_is_the_log_and_what_is_committed_is_on_disk(world: World) -> None:
    fill(world)
    world.append("transitions", b"\x00junk", None)
    world.start()
    world.turns()
    files = files_of(world.folder, "transitions")[0]
    assert world.committed("transitions") == files[-1].last + 1
    assert world.committed("episodes") is None, "not in a file, so not committed"
    world.stop()
    recording = ParquetRecording(world.folder)
    for topic in TOPICS:
        same(list(recording.records(topic)), world.good(topic))
        assert world.committed(topic) == len(world.cluster.read(f"test.{topic}"))
    assert recording.spans("transitions")[0].end == 122
    assert recording.bad_records == 2
    assert len(world.service.bad) == 2
    assert recording.run == world.run


def test_each_file_is_one_row_group_and_reads_with_plain_tools(world: World) -> None:
    fill(world)
    world.start()
    world.turns()
    world.stop()
    files = files_of(world.folder, "transitions")[0]
    assert len(files) > 3
    assert all(pq.ParquetFile(file.path).num_row_groups == 1 for file in files)
    table = (
        ds.dataset(world.folder / "transitions", format="parquet")
        .to_table()
        .sort_by([("offset", "ascending"), ("row", "ascending")])
    )
    blocks = [record.message for record in world.good("transitions")]
    for name in ("action", "reward", "q_max", "is_last"):
        expected = np.concatenate([getattr(block, name) for block in blocks])
        assert np.array_equal(table[name].to_numpy(), expected)
    vectors = np.concatenate([inflate(block.observations) for block in blocks if isinstance(block, TransitionBlock)])
    assert np.array_equal(np.stack(table["observation"].to_numpy()), vectors)
    assert table["observation_data"].null_count == len(table) - len(blocks)
    footer = pq.read_metadata(files[0].path).metadata
    assert footer[b"gorila.environment"].decode() == VECTOR_FACTS.to_json()
    pandas = pytest.importorskip("pandas", reason="pandas is not installed: read with pyarrow above")
    frame = pandas.concat([pandas.read_parquet(file.path) for file in files])
    assert list(frame["action"]) == table["action"].to_pylist()


class Places:
    """Dies at the n-th place at which something outside the process changes."""

    def __init__(self, at: int) -> None:
        self.at, self.passed = at, 0

    def __call__(self, *_: object) -> None:
        self.passed += 1
        if self.passed == self.at:
            raise Killed


def die_at(places: Places, world: World, patched: pytest.MonkeyPatch) -> None:
    replace, fsync, write = os.replace, os.fsync, archive_folder._write_table
    patched.setattr(archive_folder.os, "replace", lambda *a: (places(), replace(*a), places()))
    patched.setattr(archive_folder.os, "fsync", lambda *a: (places(), fsync(*a)))
    patched.setattr(archive_folder, "_write_table", lambda *a, **k: (places(), write(*a, **k)))
    world.cluster.before = lambda call: places() if call != "poll" else None


def test_killed_at_any_place_the_files_together_are_exactly_the_log(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    at, survived = 0, False
    while not survived:
        at += 1
        world = World(tmp_path / str(at), file_bytes=15_000)
        for topic, make in EXAMPLES.items():
            world.append(topic, *make()[:6])
        world.append("transitions", b"junk", *Experience(VECTOR_FACTS, 5).blocks(3))
        try:
            with monkeypatch.context() as patched:
                die_at(Places(at), world, patched)
                world.start()
                world.turns(3)
                world.stop()
                survived = True
        except Killed:
            world.kill()
        world.cluster.before = lambda call: None
        world.start()
        world.turns(3)
        world.stop()
        recording = ParquetRecording(world.folder)
        for topic in TOPICS:
            same(list(recording.records(topic)), world.good(topic))
            checked = [(f, read_footer(f, columns_of(topic, VECTOR_FACTS))) for f in files_of(world.folder, topic)[0]]
            assert joined(checked) == []
            assert (checked[0][0].first, checked[-1][0].last + 1) == (0, len(world.cluster.read(f"test.{topic}")))
        assert not list(world.folder.glob("**/.*.writing"))
    assert at > 30, "fewer places than a file alone has"


def test_a_full_disk_is_one_line_leaves_nothing_half_written_and_commits_nothing(world: World) -> None:
    fill(world)
    world.start()
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, hard))
    try:
        with pytest.raises(
            LocalError, match=r"archive: .*transitions-0-0-\d+\.parquet was not written: .*not committed"
        ):
            world.turns()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    world.close()
    assert not [path for path in world.folder.glob("*/*/*") if path.is_file()]
    assert world.committed("transitions") is None
    world.start()
    world.turns()
    world.stop()
    same(list(ParquetRecording(world.folder).records("transitions")), world.good("transitions"))


def test_age_is_this_processs_and_a_record_from_the_future_passes(tmp_path: Path) -> None:
    world = World(tmp_path, file_bytes=1 << 30, file_age_s=10.0)
    world.cluster.now_ms = 4_102_444_800_000_000
    world.append("transitions", *Experience(VECTOR_FACTS).blocks(3))
    world.start()
    world.turns(2)
    assert files_of(world.folder, "transitions") == {}
    world.now_s += 10.0
    world.turns(1)
    assert [file.last for file in files_of(world.folder, "transitions")[0]] == [2]
    world.append("transitions", *Experience(VECTOR_FACTS).blocks(2))
    world.turns(3)
    world.now_s += 9.0
    world.turns(1)
    assert len(files_of(world.folder, "transitions")[0]) == 1
    world.stop()
    same(list(ParquetRecording(world.folder).records("transitions")), world.good("transitions"))


def reset(world: World, topic: str, offset: int) -> None:
    """As kafka-consumer-groups --reset-offsets does: no metadata of ours."""
    world.cluster.offsets["test.archiver", f"test.{topic}", 0] = (offset, "")


def test_an_operators_reset_backwards_is_obeyed_and_what_it_replaces_is_kept_aside(world: World) -> None:
    fill(world)
    world.start()
    world.turns()
    world.stop()
    files = files_of(world.folder, "transitions")[0]
    reset(world, "transitions", files[2].first + 1)
    world.start()
    world.turns()
    world.stop()
    same(list(ParquetRecording(world.folder).records("transitions")), world.good("transitions"))
    aside = sorted(path.name for path in world.folder.glob("replaced/*/transitions/0/*.parquet"))
    assert aside == sorted(file.path.name for file in files[3:]), "the file the reset points into stays"


def test_an_operators_reset_forwards_is_a_hole_the_recording_declares(world: World) -> None:
    fill(world, 40)
    world.start()
    world.turns()
    world.stop()
    world.append("transitions", *Experience(VECTOR_FACTS, 3).blocks(20))
    reset(world, "transitions", 50)
    world.start()
    world.turns()
    world.stop()
    recording = ParquetRecording(world.folder)
    assert [(m.first, m.end) for m in recording.missing] == [(40, 50)]
    assert "operator" in recording.missing[0].reason
    same(list(recording.records("transitions")), [r for r in world.good("transitions") if not 40 <= r.offset < 50])


def test_records_deleted_before_they_were_archived_are_counted_and_declared(world: World) -> None:
    fill(world, 40)
    world.start()
    world.turns()
    world.stop()
    world.append("transitions", *Experience(VECTOR_FACTS, 3).blocks(20))
    world.cluster.delete_below("test.transitions", 0, 45)
    world.start()
    world.turns()
    assert world.service.metrics.value("offsets_gone_total", topic="transitions") == 1
    world.stop()
    recording = ParquetRecording(world.folder)
    assert [(m.first, m.end) for m in recording.missing] == [(40, 45)]
    assert [r.offset for r in recording.records("transitions")] == [*range(40), *range(45, 60)]


def test_a_log_that_ends_before_the_archive_does_is_refused(world: World) -> None:
    fill(world, 40)
    world.start()
    world.turns()
    world.stop()
    world.cluster.log["test.transitions", 0].clear()
    world.append("transitions", *Experience(VECTOR_FACTS, 3).blocks(5))
    world.start()
    with pytest.raises(RunError, match="the topic was made anew"):
        world.turns()
    world.close()


def test_a_folder_belongs_to_one_run_and_one_writer(world: World, tmp_path: Path) -> None:
    world.start()
    with pytest.raises(UsageError, match="another archiver writes to it"):
        ArchiveFolder(world.folder, world.run)
    world.close()
    for other in (run_of(name="other"), run_of(time_ms=8)):
        with pytest.raises(UsageError, match="it holds run test made at 7 ms"):
            ArchiveFolder(world.folder, other)
    ArchiveFolder(world.folder, world.run).close()


def test_a_newest_file_that_was_damaged_is_set_aside_and_read_again(world: World) -> None:
    fill(world)
    world.start()
    world.turns()
    world.stop()
    newest = files_of(world.folder, "transitions")[0][-1].path
    newest.write_bytes(newest.read_bytes()[:-100])
    world.start()
    world.turns()
    world.stop()
    assert world.log == [("damaged", {"path": newest})]
    same(list(ParquetRecording(world.folder).records("transitions")), world.good("transitions"))


def test_memory_is_bounded_over_all_partitions_and_does_not_grow_with_the_files(tmp_path: Path) -> None:
    section = ArchiveSection(file_bytes=1 << 20, file_age_s=1e9, memory_bytes=2 << 20)
    archive = ArchiveFolder(tmp_path, run_of(IMAGE_FACTS))
    planned = {("transitions", p): 0 for p in range(20)}
    archiver = Archiver(archive, planned, section, Metrics("archiver"), EventLogger("test", logging.CRITICAL))
    archiver.assigned(planned)
    blocks = [*Experience(IMAGE_FACTS).blocks(50, codec="none")]
    process = psutil.Process()

    def feed(first: int, count: int) -> int:
        most = 0
        for offset in range(first, first + count):
            for partition in range(20):
                block = dataclasses.replace(blocks[offset % 50])
                archiver.process(Incoming("transitions", partition, offset, 0, None, block))
                most = max(most, archiver.buffered_bytes)
        gc.collect()
        pa.default_memory_pool().release_unused()
        return most

    feed(0, 200)
    before = process.memory_info().rss
    most = feed(200, 400)
    assert most <= section.memory_bytes + 70 * 1024
    assert len(list(tmp_path.glob("transitions/*/*.parquet"))) > 30
    assert process.memory_info().rss - before < 24 << 20
    archive.close()
