"""The archiver as a process on a real broker: killed, stopped, overtaken by retention, fed garbage; and the two recordings compared."""

from __future__ import annotations

import datetime
import random
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from gorila.codec import Schemas
from gorila.errors import OffsetGone, RunError, UsageError
from gorila.kafka import Cluster
from gorila.local.broker import BrokerAddress
from gorila.local.broker_process import free_port
from gorila.messages import Episode, Priorities
from gorila.recording import TOPICS, KafkaRecording, ParquetRecording, Range, Recording
from gorila.recording.columns import columns_of
from gorila.recording.files import files_of, joined, read_footer
from gorila.run_record import create_run, delete_run
from gorila.settings import load_config
from gorila.testing.experience import VECTOR_FACTS, Experience

DEADLINE_S = 60.0
SMALL = ["archive.file_bytes=60000", "archive.file_age_s=0.3"]


class Recorded:
    """A run, who writes to it, and its archiver."""

    def __init__(self, servers: str, name: str, folder: Path) -> None:
        self.servers, self.name, self.folder = servers, name, folder
        self.cluster, self.schemas = Cluster(servers, client_id="test"), Schemas()
        config = load_config("cartpole", ["actor.count=2"], {})
        create_run(self.cluster, name, config, VECTOR_FACTS, np.zeros(100, np.float32))
        self.actors = [Experience(VECTOR_FACTS, n, actor_id=f"actor-{n}") for n in range(2)]
        self.producer = self.cluster.producer()
        self.processes: list[subprocess.Popen[bytes]] = []
        self.random = random.Random(1)

    def topic(self, name: str) -> str:
        return f"{self.name}.{name}"

    def write(self, blocks: int) -> None:
        for number in range(blocks):
            partition = number % 2
            (block,) = self.actors[partition].blocks(1)
            self.producer.send(
                self.topic("transitions"), self.schemas.encode(block), key=block.actor_id.encode(), partition=partition
            )
            if number % 5 == 0:
                rows = np.arange(8, dtype=np.int32)
                errors = Priorities(
                    "learner-0",
                    0,
                    number,
                    1,
                    rows % 2,
                    rows.astype(np.int64),
                    rows,
                    rows / np.float32(3),
                    0.5,
                    1.0,
                    False,
                    0.1,
                )
                self.producer.send(self.topic("priorities"), self.schemas.encode(errors), partition=0)
            if number % 10 == 0:
                episode = Episode("actor", "actor-0", 0, 1.0, number, True, 0.5, 1, 1, 1)
                self.producer.send(self.topic("episodes"), self.schemas.encode(episode), partition=0)
        assert self.producer.flush(20) == 0

    def write_bytes(self, partition: int, *values: bytes | None) -> None:
        for value in values:
            self.producer.send(self.topic("transitions"), value, partition=partition)
        assert self.producer.flush(20) == 0

    def start(self, *sets: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "gorila.cli", "archiver", "--run", self.name, "--run-dir", str(self.folder)]
        for item in sets or SMALL:
            command += ["--set", item]
        with (self.folder / f"{len(self.processes)}.out").open("wb") as out:
            process = subprocess.Popen(
                [*command, "--bootstrap-servers", self.servers], stdout=out, stderr=subprocess.STDOUT
            )
        self.processes.append(process)
        return process

    @property
    def log(self) -> str:
        return "".join(path.read_text() for path in sorted(self.folder.glob("*.out")))

    @property
    def archive(self) -> Path:
        return self.folder / "archive"

    def ends(self) -> dict[tuple[str, int], int]:
        places = [(t, p) for t in TOPICS for p in range(2 if t == "transitions" else 1)]
        found = self.cluster.admin().end_offsets([(self.topic(t), p) for t, p in places])
        return {(t, p): found[self.topic(t), p] for t, p in places}

    def until_ready(self) -> None:
        """Only a process that is ready hears SIGTERM."""
        out = self.folder / f"{len(self.processes) - 1}.out"
        self.until(lambda: "INFO ready" in out.read_text(), "the process to be ready")

    def until_covered(self) -> None:
        self.until_ready()
        self.until(self.covered, "the log to be covered")

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, f"{what}\n{self.log[-3000:]}"
            assert self.processes[-1].poll() is None, self.log[-3000:]
            time.sleep(0.05)

    def covered(self) -> bool:
        """Whether files reach the end of every partition."""
        for (topic, partition), end in self.ends().items():
            files = files_of(self.archive, topic).get(partition, [])
            if end and (not files or files[-1].last + 1 < end):
                return False
        return True

    def committed(self) -> dict[tuple[str, int], int | None]:
        places = list(self.ends())
        admin = self.cluster.admin()
        found = admin.group_offsets(self.topic("archiver"), [(self.topic(t), p) for t, p in places])
        return {(t, p): found[self.topic(t), p] for t, p in places}

    def stop(self) -> int:
        process = self.processes[-1]
        process.send_signal(signal.SIGTERM)
        return process.wait(20)

    def kill(self) -> None:
        self.processes[-1].kill()
        self.processes[-1].wait()


@pytest.fixture
def recorded(broker: BrokerAddress, run_name: str, tmp_path: Path) -> Iterator[Recorded]:
    made = Recorded(broker.bootstrap_servers, run_name, tmp_path)
    yield made
    for process in made.processes:
        if process.poll() is None:
            process.kill()
            process.wait()
    made.producer.close()
    delete_run(made.cluster, run_name)


def everything(recording: Recording, topic: str, schemas: Schemas) -> list[tuple[int, int, int, bytes]]:
    return [(r.partition, r.offset, r.timestamp_ms, schemas.encode(r.message)) for r in recording.records(topic)]


def equal(recorded: Recorded) -> None:
    """The archive is the log: same places, same times, same bytes; no file overlaps another, none is missing."""
    kafka, parquet = KafkaRecording(recorded.cluster, recorded.name), ParquetRecording(recorded.archive)
    assert (parquet.run.name, parquet.run.time_ms) == (kafka.run.name, kafka.run.time_ms)
    for topic in TOPICS:
        found = everything(parquet, topic, recorded.schemas)
        assert found == everything(kafka, topic, recorded.schemas)
        assert len({place[:2] for place in found}) == len(found)
        for partition, files in files_of(recorded.archive, topic).items():
            checked = [(file, read_footer(file, columns_of(topic, VECTOR_FACTS))) for file in files]
            assert joined(checked) == []
            assert (files[0].first, files[-1].last + 1) == (0, recorded.ends()[topic, partition])


def test_killed_again_and_again_the_files_together_are_exactly_the_log(recorded: Recorded) -> None:
    recorded.write(60)
    for _ in range(5):
        recorded.start()
        before = len(list(recorded.archive.glob("*/*/*.parquet")))
        recorded.until(lambda before=before: len(list(recorded.archive.glob("*/*/*.parquet"))) > before, "a new file")
        for _ in range(4):
            recorded.write(40)
            if recorded.random.random() < 0.3:
                break
        recorded.kill()
    recorded.start()
    recorded.until_covered()
    assert recorded.stop() == 0
    equal(recorded)
    assert not list(recorded.archive.glob("**/.*.writing"))


def records_read(port: int) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        lines = page.read().decode().splitlines()
    return sum(float(line.split()[-1]) for line in lines if line.startswith("gorila_records_read_total{"))


def test_a_stop_writes_what_is_buffered_and_commits_it_and_a_start_repeats_nothing(recorded: Recorded) -> None:
    recorded.write(30)
    port = free_port()
    recorded.start("archive.file_age_s=3600", f"monitor.metrics_port={port}")
    recorded.until_ready()
    recorded.write(30)
    everything_read = sum(recorded.ends().values())
    recorded.until(lambda: records_read(port) == everything_read, "all to be read")
    assert not list(recorded.archive.glob("*/*/*.parquet"))
    assert recorded.stop() == 0
    assert recorded.covered()
    ends = recorded.ends()
    assert recorded.committed() == ends
    names = sorted(path.name for path in recorded.archive.glob("*/*/*.parquet"))
    recorded.start("archive.file_age_s=3600")
    recorded.until_ready()
    assert recorded.stop() == 0
    assert sorted(path.name for path in recorded.archive.glob("*/*/*.parquet")) == names
    equal(recorded)


def test_bad_records_are_in_dead_letters_and_the_archive_goes_on_behind_them(recorded: Recorded) -> None:
    recorded.write(10)
    good = recorded.schemas.encode(next(iter(Experience(VECTOR_FACTS, 9).blocks(1))))
    recorded.write_bytes(0, b"\x99junk", good[:-3], b"\x00\x00\x00\x30\x39" + good[5:], None)
    recorded.write(10)
    recorded.write_bytes(1, None, b"")
    recorded.start()
    recorded.until_covered()
    assert recorded.stop() == 0
    equal(recorded)
    parquet = ParquetRecording(recorded.archive)
    list(parquet.records("transitions"))
    assert parquet.bad_records == 6
    (end,) = recorded.cluster.admin().end_offsets([(recorded.topic("dead-letters"), 0)]).values()
    assert end == 6


def delete_below(recorded: Recorded, partition: int, offset: int) -> None:
    admin = AdminClient({"bootstrap.servers": recorded.servers})
    mark = TopicPartition(recorded.topic("transitions"), partition, offset)
    for future in admin.delete_records([mark]).values():
        future.result(20)


def test_retention_that_overtakes_the_archiver_is_counted_and_declared_and_a_reader_is_told(recorded: Recorded) -> None:
    recorded.write(40)
    recorded.start()
    recorded.until_covered()
    recorded.kill()
    recorded.write(40)
    delete_below(recorded, 1, 30)
    recorded.start()
    recorded.until_covered()
    assert recorded.stop() == 0
    assert "offset.gone" in recorded.log
    parquet = ParquetRecording(recorded.archive)
    assert [(m.topic, m.partition, m.first, m.end) for m in parquet.missing] == [("transitions", 1, 20, 30)]
    assert [r.offset for r in parquet.records("transitions", 1)] == [*range(20), *range(30, 40)]
    assert [r.offset for r in parquet.records("transitions", 0)] == list(range(40))
    with pytest.raises(OffsetGone, match="partition 1: offset 5 was asked for, the log begins at 30"):
        KafkaRecording(recorded.cluster, recorded.name, Range(5, None))
    late = KafkaRecording(recorded.cluster, recorded.name)
    assert (late.spans("transitions")[1].first, late.spans("transitions")[0].first) == (30, 0)


def test_an_operators_reset_is_obeyed_in_the_log(recorded: Recorded) -> None:
    recorded.write(40)
    recorded.start()
    recorded.until_covered()
    assert recorded.stop() == 0
    operator = recorded.cluster.consumer(recorded.topic("archiver"))
    operator.commit({(recorded.topic("transitions"), 0): 0}, metadata="", wait=True)
    operator.close()
    recorded.start()
    recorded.until_covered()
    assert recorded.stop() == 0
    assert "operator.reset_obeyed" in recorded.log and "archive.replaced" in recorded.log
    assert list(recorded.archive.glob("replaced/*/transitions/0/*.parquet"))
    equal(recorded)


def test_a_range_of_offsets_or_of_times_is_what_it_says(recorded: Recorded) -> None:
    recorded.write(40)
    first = KafkaRecording(recorded.cluster, recorded.name)
    whole = list(first.records("transitions"))
    newest_ms = max(r.timestamp_ms for topic in ("transitions", "priorities") for r in first.records(topic))
    some = KafkaRecording(recorded.cluster, recorded.name, Range(5, 12))
    assert [(r.partition, r.offset) for r in some.records("transitions")] == [
        (p, o) for p in (0, 1) for o in range(5, 12)
    ]
    assert [r.offset for r in some.records("priorities")] == list(range(8)), "priorities are read whole"
    time.sleep(0.01)
    recorded.write(20)
    between = newest_ms + 1
    moment = datetime.datetime.fromtimestamp(between / 1000, datetime.UTC)
    later = KafkaRecording(recorded.cluster, recorded.name, Range(moment, None))
    assert all(r.timestamp_ms >= between for r in later.records("transitions"))
    assert len(list(later.records("transitions"))) == 20
    assert len(list(later.records("priorities"))) == 4
    before = KafkaRecording(recorded.cluster, recorded.name, Range(None, moment))
    assert [(r.partition, r.offset) for r in before.records("transitions")] == [(r.partition, r.offset) for r in whole]
    with pytest.raises(UsageError, match=r"holds no transitions: partition 0 has offsets 0 up to 30; partition 1"):
        KafkaRecording(recorded.cluster, recorded.name, Range(1000, None))
    with pytest.raises(RunError, match="run 'nobody' does not exist"):
        KafkaRecording(recorded.cluster, "nobody")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "archive.dir = '' is not allowed: a folder (the archive is DIR/RUN), or give --run-dir DIR"),
        (("--set", "archive.dir=/proc/nowhere"), "archive /proc/nowhere/"),
        (("--set", "archive.file_bytes=0"), "archive.file_bytes"),
    ],
)
def test_a_folder_that_cannot_be_is_one_line(recorded: Recorded, arguments: tuple[str, ...], words: str) -> None:
    command = [
        sys.executable,
        "-m",
        "gorila.cli",
        "archiver",
        "--run",
        recorded.name,
        "--bootstrap-servers",
        recorded.servers,
    ]
    done = subprocess.run([*command, *arguments], check=False, capture_output=True, text=True, timeout=DEADLINE_S)
    assert done.returncode in (1, 2)
    line = done.stderr.strip().splitlines()[-1]
    assert line.startswith("gorila: ") and words in line
    assert "Traceback" not in done.stderr
