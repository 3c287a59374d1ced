"""Learner and parameter server processes on a real broker: the round trip, kill -9, a second shard, a stop."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gorila.codec import Schemas
from gorila.config import Config
from gorila.kafka import Cluster, Received
from gorila.local.broker import BrokerAddress
from gorila.messages import Gradient, Priorities, Weights
from gorila.network import initial_weights
from gorila.run_record import create_run, read_all
from gorila.settings import load_config
from tests.processors.learning_loop import CARTPOLE, make_batch

DEADLINE_S = 90.0


class Run:
    """A run without actors and replay: batches come from here, gradients and weights go between the processes."""

    def __init__(self, servers: str, folder: Path, sets: list[str]) -> None:
        self.name, self._servers, self._folder = "learner-" + uuid.uuid4().hex[:8], servers, folder
        self.config: Config = load_config(
            "cartpole", ["learner.batch_size=64", "replay.record_rows=32", "network.hidden=[16]", *sets], {}
        )
        self.schemas, self.cluster = Schemas(), Cluster(servers)
        self.initial = initial_weights(self.config, CARTPOLE)
        create_run(self.cluster, self.name, self.config, CARTPOLE, self.initial)
        self.producer = self.cluster.producer()
        self.processes: list[subprocess.Popen[bytes]] = []
        self.batches = 0

    def start(self, role: str, index: int = 0) -> subprocess.Popen[bytes]:
        """A role process as `gorila train` starts it."""
        command = [sys.executable, "-m", "gorila.cli", role, "--run", self.name, "--index", str(index)]
        command += ["--bootstrap-servers", self._servers, "--run-dir", str(self._folder)]
        with (self._folder / f"{role}-{len(self.processes)}.out").open("wb") as out:
            self.processes.append(subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT))
        return self.processes[-1]

    def feed(self, count: int) -> None:
        """Learner batches into partition 0."""
        for _ in range(count):
            for part in make_batch(self.batches, self.config):
                self.producer.send(f"{self.name}.batches", self.schemas.encode(part), partition=0)
            self.batches += 1
        self.producer.flush(10)

    def read(self, topic: str, partition: int = 0) -> list[Received]:
        return read_all(self.cluster, f"{self.name}.{topic}", partition)

    def log(self) -> str:
        return "".join(path.read_text() for path in sorted(self._folder.glob("*.out")))

    def until(self, condition: Callable[[], bool], what: str) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, f"{what}\n{self.log()}"

    def applied(self, shard: int = 0) -> tuple[int, int, int]:
        """(version, duplicates, stale) of the newest key frame."""
        frames = [self.schemas.expect(received.value, Weights) for received in self.read("weights", shard)[-4:]]
        keys = [frame for frame in frames if frame.kind == "key"]
        return (keys[-1].version, keys[-1].dropped_duplicate, keys[-1].dropped_stale) if keys else (-1, 0, 0)

    def committed(self) -> int:
        place = (f"{self.name}.batches", 0)
        return self.cluster.admin().group_offsets(f"{self.name}.learner", [place])[place] or 0

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        self.producer.close()


@pytest.fixture
def make_run(broker: BrokerAddress, tmp_path: Path) -> Iterator[Callable[..., Run]]:
    made: list[Run] = []

    def make(*sets: str) -> Run:
        made.append(Run(broker.bootstrap_servers, tmp_path, list(sets)))
        return made[-1]

    yield make
    for run in made:
        run.close()


def test_every_batch_becomes_one_update_of_every_shard_on_weights_that_include_the_one_before(
    make_run: Callable[..., Run],
) -> None:
    run = make_run("parameter_server.shards=2", "learner.codec=fp16", "parameter_server.target_period_versions=7")
    learner = run.start("learner")
    servers = [run.start("parameter-server", shard) for shard in (0, 1)]
    run.feed(40)
    for shard in (0, 1):
        run.until(lambda shard=shard: run.applied(shard) == (40, 0, 0), f"shard {shard} did not reach 40")
        sent = [run.schemas.expect(received.value, Gradient) for received in run.read("gradients", shard)]
        assert [gradient.base_version for gradient in sent] == list(range(40)), "staleness 0"
    told = [run.schemas.expect(received.value, Priorities) for received in run.read("priorities")]
    assert [record.batch_offset for record in told] == [2 * n + 1 for n in range(40)]
    assert all(0 < record.round_trip_ms < 5000 for record in told[1:])
    run.until(lambda: run.committed() == 80, "the last batch was not committed")
    learner.send_signal(signal.SIGTERM)
    assert learner.wait(DEADLINE_S) == 0
    for server in servers:
        server.send_signal(signal.SIGTERM)
        assert server.wait(DEADLINE_S) == 0


def test_a_learner_killed_again_and_again_learns_from_every_batch_once(make_run: Callable[..., Run]) -> None:
    run = make_run("learner.codec=fp16", "learner.max_in_flight=3")
    run.start("parameter-server")
    for kills in range(3):
        learner = run.start("learner")
        run.feed(25)
        wanted = 25 * kills + 12
        run.until(lambda wanted=wanted: run.applied()[0] >= wanted, f"version {wanted} was not reached")
        learner.kill()
        learner.wait()
    run.start("learner")
    run.feed(5)
    run.until(lambda: run.applied()[0] >= 80 and run.committed() == 160, "not every batch was learned from")
    version, duplicates, _ = run.applied()
    assert version == 80
    records = run.read("gradients")
    assert duplicates == len(records) - 80
    payloads: dict[int, set[bytes]] = {}
    for received in records:
        gradient = run.schemas.expect(received.value, Gradient)
        payloads.setdefault(gradient.batch_offset, set()).add(received.value or b"")
    assert sorted(payloads) == [2 * n + 1 for n in range(80)]
    assert all(len(distinct) == 1 for distinct in payloads.values()), "what was sent again was not the same bytes"
