"""A parameter server process on a real broker: killed, stopped, reset by an operator, fed garbage."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
from confluent_kafka import TopicPartition
from confluent_kafka.admin import AdminClient

from consumers.parameter_server.checkpoints import ShardState
from consumers.parameter_server.optimizers import make_optimizer
from consumers.parameter_server.shard import Shard
from consumers.parameter_server.start import restore
from gorila.codec import Schemas
from gorila.compression import codec
from gorila.config import Config
from gorila.environment_facts import EnvironmentFacts
from gorila.errors import BadRecord, ConfigError, OffsetGone, RunError
from gorila.kafka import Cluster, Received
from gorila.local.broker import BrokerAddress
from gorila.messages import CheckpointLedger, CheckpointManifest, Gradient, Message, Weights
from gorila.processor import Incoming
from gorila.run_record import create_run, read_all
from gorila.service import open_service
from gorila.settings import load_config

DEADLINE_S = 60.0
P = 4099
F = np.float32
SETS = [
    "parameter_server.checkpoint_versions=40",
    "parameter_server.ledger_versions=16",
    "parameter_server.target_period_versions=7",
    "parameter_server.warmup_versions=100",
    "learner.max_in_flight=2",
]


def initial(size: int = P) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(size).astype(F)


def gradient(shard: int, size: int, batch: int, base: int) -> Gradient:
    values = np.random.default_rng([shard, batch]).standard_normal(size).astype(F)
    name = ("fp32", "fp16")[batch % 2]
    return Gradient(shard, "learner-0", 0, batch, base, 32, size, name, codec(name).encode(values), 1.0, 1.0)


@dataclass
class Run:
    """A run seen from outside: writes gradients as a learner does, reads what the server shows."""

    servers: str
    folder: Path
    sets: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.name = "ps-" + uuid.uuid4().hex[:8]
        self.schemas, self.cluster = Schemas(), Cluster(self.servers)
        self.config: Config = load_config("cartpole", [*SETS, *self.sets], {})
        facts = EnvironmentFacts("CartPole-v1", (4,), "float32", 2, 1, 500)
        create_run(self.cluster, self.name, self.config, facts, initial())
        self.producer, self.reader = self.cluster.producer(), self.cluster.consumer()
        shards = self.config.parameter_server.shards
        self.reader.assign({(self.topic("weights"), shard): 0 for shard in range(shards)})
        self.shown: list[Weights] = []
        self.processes: list[subprocess.Popen[bytes]] = []

    def topic(self, name: str) -> str:
        return f"{self.name}.{name}"

    @property
    def log(self) -> str:
        return "".join(path.read_text() for path in sorted((self.folder / self.name).glob("*.out")))

    def start(self, shard: int = 0) -> subprocess.Popen[bytes]:
        folder = self.folder / self.name
        folder.mkdir(exist_ok=True)
        command = [sys.executable, "-m", "gorila.cli", "parameter-server", "--run", self.name, "--index", str(shard)]
        with (folder / f"{len(self.processes)}.out").open("wb") as out:
            process = subprocess.Popen(
                [*command, "--bootstrap-servers", self.servers], stdout=out, stderr=subprocess.STDOUT
            )
        self.processes.append(process)
        return process

    def send(self, message: Message | bytes, shard: int = 0, topic: str = "gradients") -> int:
        """The offset it got."""
        got: list[int] = []
        value = message if isinstance(message, bytes) else self.schemas.encode(message)
        self.producer.send(
            self.topic(topic), value, key=b"%d" % shard, partition=shard, on_delivery=lambda _, o: got.append(o)
        )
        self.producer.flush(10)
        return got[0]

    def until_covered(self, offset: int, shard: int = 0, above: int = -1) -> Weights:
        """The first key frame shown from `above` (index in `shown`) on that covers a gradient."""
        deadline = time.monotonic() + DEADLINE_S
        looked_at = above + 1
        while True:
            for message in self.shown[looked_at:]:
                looked_at += 1
                if (message.shard_id, message.kind) == (shard, "key") and message.gradient_offset >= offset:
                    return message
            alive = any(process.poll() is None for process in self.processes)
            assert alive and time.monotonic() < deadline, f"offset {offset} is not covered\n{self.log}"
            for received in self.reader.poll_many(100, 0.2):
                self.shown.append(self.schemas.expect(received.value, Weights))

    def learn(self, batches: range, window: int = 2) -> Weights:
        """As a learner: at most `window` gradients ahead of what it read."""
        frame = self.until_covered(-1) if not self.shown else [w for w in self.shown if w.kind == "key"][-1]
        sent: list[int] = []
        for batch in batches:
            sent.append(self.send(gradient(0, P, batch, frame.version)))
            if len(sent) >= window:
                frame = self.until_covered(sent[-window])
        return self.until_covered(sent[-1])

    def read(self, topic: str, partition: int = 0) -> list[tuple[Received, Message | None]]:
        found: list[tuple[Received, Message | None]] = []
        for received in read_all(self.cluster, self.topic(topic), partition):
            try:
                found.append((received, self.schemas.decode(received.value)))
            except BadRecord:
                found.append((received, None))
        return found

    def undisturbed(self) -> dict[int, tuple[int, bytes]]:
        """version → (state hash, weights) of a server that was never killed, from the gradients as they are in the log."""
        weights = initial()
        moments = {name: np.zeros(P, F) for name in make_optimizer(self.config.parameter_server).tensors}
        shard = Shard(self.config, ShardState(0, weights, moments))
        made = {0: (shard.state_hash(), weights.tobytes())}
        # As each version was made: a gradient that is dropped leaves the version and yet changes what was handled, and so the hash.
        for received, message in self.read("gradients"):
            if message is None:
                continue
            try:
                list(shard.process(Incoming("gradients", 0, received.offset, received.timestamp_ms, b"0", message)))
            except BadRecord:
                continue
            made.setdefault(shard.state.version, (shard.state_hash(), weights.tobytes()))
        return made

    def stop(self, process: subprocess.Popen[bytes]) -> int:
        process.send_signal(signal.SIGTERM)
        return process.wait(DEADLINE_S)

    def close(self) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.kill()
                process.wait()
        self.reader.close()
        self.producer.close()


@pytest.fixture
def run(broker: BrokerAddress, tmp_path: Path) -> Iterator[Run]:
    made = Run(broker.bootstrap_servers, tmp_path)
    yield made
    made.close()


def test_killed_at_random_moments_it_equals_the_undisturbed_server_at_every_version(run: Run) -> None:
    rng = np.random.default_rng()
    first = 0
    for kills in range(4):
        process = run.start()
        last = first + int(rng.integers(15, 70))
        if kills < 3:
            run.learn(range(first, last))
            # These are read, applied, checkpointed or not: the kill falls where it falls.
            for batch in range(last, last + 9):
                run.send(gradient(0, P, batch, last - 2))
            process.kill()
            process.wait()
            first = last + 9
        else:
            frame = run.learn(range(first, last))
            assert run.stop(process) == 0
    made = run.undisturbed()
    assert frame.version == max(made), f"{frame.version} of {max(made)}: something was lost or applied twice"
    keys = [w for w in run.shown if w.kind == "key"]
    assert all(w.payload == made[w.version][1] for w in run.shown)
    assert [w.version for w in keys] == sorted(w.version for w in keys), "a reader saw the shard go back"
    targets = {w.version for w in run.shown if w.kind == "target"}
    assert targets >= set(range(0, frame.version + 1, 7))
    states = [m for _, m in run.read("checkpoints") if isinstance(m, CheckpointManifest | CheckpointLedger)]
    assert len(states) > 4
    assert all(m.state_hash == made[m.version][0] for m in states if m.version > 0)
    records = run.read("weights")
    for _, message in records:
        assert isinstance(message, Weights)
        if message.kind == "key":
            target = records[message.target_offset][1]
            assert isinstance(target, Weights)
            assert (target.kind, target.version) == ("target", message.version - message.version % 7)


def test_a_stopped_server_has_committed_all_it_read_under_its_own_group(run: Run) -> None:
    process = run.start()
    run.learn(range(25))
    assert run.stop(process) == 0
    place = (run.topic("gradients"), 0)
    consumer = run.cluster.consumer(f"{run.name}.parameter-server-0-0")
    assert consumer.committed([place]) == {place: (25, "gorila")}
    consumer.close()


def test_an_operators_reset_is_refused_with_the_reason_and_nothing_is_applied_twice(run: Run) -> None:
    process = run.start()
    run.learn(range(10))
    assert run.stop(process) == 0
    consumer = run.cluster.consumer(f"{run.name}.parameter-server-0-0")
    consumer.commit({(run.topic("gradients"), 0): 3}, metadata="", wait=True)
    consumer.close()
    run.start()
    frame = run.learn(range(10, 20))
    assert frame.version == 20
    assert "reset_refused" in run.log and "checkpoint" in run.log


def test_garbage_goes_to_dead_letters_and_a_restart_over_it_still_shows_weights(run: Run) -> None:
    process = run.start()
    run.learn(range(5))
    bad = gradient(0, P, 5, 5)
    bad.payload = np.full(P, np.nan, F).tobytes()
    bad.codec = "fp32"
    offset = run.send(bad)
    frame = run.until_covered(offset)
    assert (frame.version, frame.dropped_bad) == (5, 1)
    run.send(b"\xffnot ours")
    run.send(b"")
    process.kill()
    process.wait()
    run.start()
    seen = len(run.shown) - 1
    again = run.until_covered(offset, above=seen)
    assert again.payload == frame.payload
    assert run.learn(range(6, 9)).version == 8
    bodies = [received.value for received, _ in run.read("dead-letters")]
    assert b"\xffnot ours" in bodies and run.schemas.encode(bad) in bodies


def test_two_shards_are_two_processes_which_share_nothing(broker: BrokerAddress, tmp_path: Path) -> None:
    run = Run(broker.bootstrap_servers, tmp_path, ["parameter_server.shards=2"])
    try:
        run.start(0)
        run.start(1)
        sizes = [2050, 2049]
        for shard in (0, 1):
            run.until_covered(-1, shard)
        offset = run.send(gradient(1, sizes[1], 0, 0), shard=1)
        frame = run.until_covered(offset, shard=1)
        assert (frame.version, frame.num_parameters) == (1, sizes[1])
        zero = [w for w in run.shown if (w.shard_id, w.kind) == (0, "key")][-1]
        assert (zero.version, zero.payload) == (0, initial()[: sizes[0]].tobytes())
    finally:
        run.close()


def test_a_shard_the_run_does_not_have_is_refused_in_one_line(run: Run) -> None:
    process = run.start(shard=3)
    assert process.wait(DEADLINE_S) == ConfigError.exit_code
    assert "0 to 0" in run.log and "Traceback" not in run.log


def test_gradients_that_retention_took_are_a_stop_with_the_reason(run: Run) -> None:
    process = run.start()
    run.learn(range(50))
    assert run.stop(process) == 0
    service = open_service("parameter-server", run.name, 0, run.servers)
    state, end = restore(service, 0)
    assert (state.version, end) == (40, 50)
    admin = AdminClient({"bootstrap.servers": run.servers})
    for done in admin.delete_records([TopicPartition(run.topic("gradients"), 0, 45)]).values():
        done.result(DEADLINE_S)
    with pytest.raises(OffsetGone, match="needs gradients from offset 40"):
        restore(service, 0)
    service.close()


def test_a_gradients_topic_made_anew_is_a_stop_with_the_reason(run: Run) -> None:
    process = run.start()
    run.learn(range(50))
    assert run.stop(process) == 0
    service = open_service("parameter-server", run.name, 0, run.servers)
    manifest = [m for _, m in run.read("checkpoints") if isinstance(m, CheckpointManifest)][-1]
    manifest.gradient_offset = 1000
    run.send(manifest, topic="checkpoints")
    with pytest.raises(RunError, match="ends at 50"):
        restore(service, 0)
    service.close()
