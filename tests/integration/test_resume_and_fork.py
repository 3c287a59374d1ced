"""A run's past on a real broker: killed, verified, rebuilt, traced, gone on with and forked. One short run, shared by all tests in their order."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
from confluent_kafka import OFFSET_END, TopicPartition
from confluent_kafka.admin import AdminClient

from consumers.parameter_server.checkpoints import ShardState, newest_complete
from consumers.parameter_server.optimizers import make_optimizer, settings_json
from gorila.errors import OffsetGone
from gorila.local.broker import BrokerAddress
from gorila.messages import Batch, Episode, Gradient, Run, TransitionBlock, Weights
from gorila.policy import Policy
from gorila.run_observer import RunObserver
from gorila.run_record import new_topics, read_all
from gorila.service import Service, open_service
from gorila.weights_history import Moment, history
from tests.integration.training import Training

pytestmark = pytest.mark.timeout(600)
SETS = (
    *("--set", "parameter_server.checkpoint_versions=60", "--set", "parameter_server.ledger_versions=16"),
    *("--set", "evaluator.min_versions=1000000", "--set", "actor.max_steps_per_s=400"),
)
FIRST, MORE = 130, 40


@dataclass
class Trained:
    """A run whose parameter server was killed once, ended by Ctrl-C."""

    servers: str
    folder: Path
    run: str
    summary: dict[str, object]

    def gorila(self, *words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-m", "gorila.cli", *words, "--bootstrap-servers", self.servers]
        return subprocess.run(command, cwd=self.folder, capture_output=True, text=True, timeout=300, check=False)

    def service(self, run: str = "") -> Service:
        return open_service("test", run or self.run, 0, self.servers, terminal=False, environ={})

    def weights(self, run: str = "") -> list[tuple[int, Weights]]:
        service = self.service(run)
        return [
            (received.offset, service.schemas.expect(received.value, Weights))
            for received in read_all(service.cluster, service.topic("weights"))
        ]

    def train(self, folder: Path, *words: str) -> Training:
        return Training(self.servers, folder, *words)


def until_updates(training: Training, count: int) -> None:
    training.until(f"{count} updates", lambda: training.updates() >= count)


@pytest.fixture(scope="module")
def trained(broker: BrokerAddress, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trained]:
    folder = tmp_path_factory.mktemp("trained")
    training = Training(broker.bootstrap_servers, folder, "cartpole", *SETS)
    try:
        until_updates(training, FIRST - 50)
        victim = training.until("a server", lambda: training.role("parameter-server"))
        victim.kill()
        until_updates(training, FIRST)
        assert training.send(signal.SIGINT) == 0, training.errors
        yield Trained(broker.bootstrap_servers, folder, training.run, training.summary())
    finally:
        training.close()


def test_what_was_published_is_rebuilt_bit_for_bit(trained: Trained) -> None:
    past = history(trained.service())
    shown = {message.version: message for _, message in trained.weights()}
    assert max(shown) >= FIRST - 1
    for version in sorted(shown)[:: max(1, len(shown) // 6)]:
        rebuilt = past.rebuild(0, Moment(version=version))
        assert zlib.crc32(rebuilt.weights.data) == shown[version].payload_hash
    last = shown[max(shown)]
    assert past.rebuild(0, Moment(offset=last.gradient_offset)).version == last.version
    with pytest.raises(OffsetGone, match="is not there yet: shard 0 can be rebuilt from version 0 "):
        past.rebuild(0, Moment(version=10**6))
    with pytest.raises(OffsetGone, match="before what can be rebuilt"):
        past.rebuild(0, Moment(timestamp_ms=1))


def test_a_past_version_is_a_policy_file(trained: Trained) -> None:
    done = trained.gorila("weights", "get", trained.run, "--version", "100", "--out", "past.safetensors")
    assert done.returncode == 0, done.stderr
    assert "version 100" in done.stdout and "state hash" in done.stdout
    policy = Policy.load(trained.folder / "past.safetensors")
    assert policy.version == 100 and policy.act(np.zeros(4, np.float32)) in (0, 1)
    played = trained.gorila("weights", "list", trained.run)
    assert played.returncode == 0 and "checkpoint" in played.stdout and "ledger" in played.stdout


def test_a_run_whose_server_was_killed_is_verified(trained: Trained) -> None:
    done = trained.gorila("weights", "verify", trained.run)
    assert done.returncode == 0, done.stderr
    assert re.search(r"agree: [1-9]\d* ledger entries, [1-9]\d* checkpoints, [1-9]\d* targets, [1-9]", done.stdout), (
        done.stdout
    )


def test_a_copy_with_one_bit_of_one_gradient_changed_is_refused_by_name(trained: Trained) -> None:
    service, name = trained.service(), f"{trained.run}-forged"
    cluster = service.cluster
    cluster.admin().create_topics(new_topics(name, service.config))
    producer = cluster.producer()
    changed = 40
    for topic in ("checkpoints", "weights", "gradients", "run"):
        for received in read_all(cluster, service.topic(topic)):
            value, key = received.value, received.key
            message = service.schemas.decode(value)
            if isinstance(message, Gradient) and received.offset == changed:
                payload, largest = bytearray(message.payload), np.abs(np.frombuffer(message.payload, "<f4")).argmax()
                payload[4 * int(largest) + 3] ^= 0x80  # its sign
                value = service.schemas.encode(replace(message, payload=bytes(payload)))
            if isinstance(message, Run):
                key, value = name.encode(), service.schemas.encode(replace(message, name=name))
            producer.send(f"{name}.{topic}", value, key=key, partition=0)
    assert producer.flush(30.0) == 0
    producer.close()
    done = trained.gorila("weights", "verify", name)
    assert done.returncode == 1 and "Traceback" not in done.stderr
    found = re.search(r"^gorila: shard 0 version (\d+): .* says .*hash", done.stderr, re.MULTILINE)
    # The first record that can tell: a snapshot of the very next version, or, where compaction took those, the next ledger entry.
    assert found and changed + 1 <= int(found[1]) <= 48, done.stderr


def test_a_trace_names_transitions_that_are_there(trained: Trained) -> None:
    done = trained.gorila("weights", "trace", trained.run, "--version", "120", "--updates", "2", "--json")
    assert done.returncode == 0, done.stderr
    updates = json.loads(done.stdout)["updates"]
    assert [update["version"] for update in updates] == [120, 119]
    service = trained.service()
    batches = {r.offset: r for r in read_all(service.cluster, service.topic("batches"))}
    blocks = {r.offset: r for r in read_all(service.cluster, service.topic("transitions"))}
    for update in updates:
        assert update["rows_from"] == "batches" and update["cut"] == []
        batch = service.schemas.expect(batches[update["batch_offsets"][-1]].value, Batch)
        wanted = set(zip(batch.offset.tolist(), batch.row.tolist(), strict=True))
        assert {(found["offset"], row) for found in update["rows"] for row in found["rows"]} == wanted
        for found in update["rows"]:
            block = service.schemas.expect(blocks[found["offset"]].value, TransitionBlock)
            assert block.weights_version <= update["version"] and max(found["rows"]) < block.observations.count


def test_where_retention_cut_the_trail_is_said_and_priorities_go_on(trained: Trained) -> None:
    service = trained.service()
    known = history(service).trace(0, 100, 1)[0]
    admin = AdminClient({"bootstrap.servers": trained.servers})
    # All batches, as after ten minutes: those that were not learned too, so the resumed learner below has to jump.
    for topic, upto in (("batches", OFFSET_END), ("transitions", 1)):
        cut = TopicPartition(service.topic(topic), 0, upto)
        admin.delete_records([cut])[cut].result(timeout=30)
    found = history(service).trace(0, 100, 1)[0]
    assert found.rows_from == "priorities" and set(found.rows) == set(known.rows)
    assert any("batches" in line and "is gone" in line for line in found.cut)
    assert any("1 blocks of" in line for line in found.cut) == ((0, 0) in known.rows)


def test_what_cannot_go_on_is_one_line(trained: Trained) -> None:
    for words, says, code in (
        (("--resume", "nobody"), "there are", 1),
        (("--resume", trained.run, "--at-version", "9999999", "--as", f"{trained.run}-x"), "not there yet", 1),
        (
            ("--resume", trained.run, "--at", "5", "--as", f"{trained.run}-x", "--set", "network.hidden=[8]"),
            "network.hidden",
            1,
        ),
    ):
        done = trained.gorila("train", *words)
        assert done.returncode == code and says in done.stderr.splitlines()[-1], (words, done.stderr)
        assert "Traceback" not in done.stderr
    assert [path.name for path in (trained.folder / "runs").iterdir()] == [trained.run]


def test_a_resumed_run_goes_on_where_it_was(trained: Trained) -> None:
    known, before = trained.weights()[-1]
    steps = trained.summary["env_steps"]
    training = trained.train(trained.folder, "--resume", trained.run)
    try:
        training.until("the resumed run", lambda: "logs in" in training.output)
        until_updates(training, before.version + MORE)
        service = trained.service()
        training.until("an episode on weights of about then", lambda: max(_epsilons(service)) > before.version - 50)
        assert RunObserver(service).look().running
        assert training.send(signal.SIGINT) == 0, training.errors
    finally:
        training.close()
    logs = training.run_dir / "logs"
    # The server: the version goes on, and everything in both parts is what the gradients give (weights, moments, handled batches: the state hash).
    assert all(
        message.version >= before.version for at, message in trained.weights() if at > known and message.kind == "key"
    )
    assert trained.gorila("weights", "verify", trained.run).returncode == 0
    # The memory: filled again from the log.
    opened = [line for line in (logs / "replay-0.log").read_text().splitlines() if "replay.rings_opened" in line]
    rows = int(opened[-1].split("rows_read=")[1].split()[0])
    assert rows >= 0.9 * min(int(str(steps)), 20_000) - 8 * 16
    # The schedules: functions of the version, no fresh start.
    epsilon_at = _epsilons(service)
    newest = max(epsilon_at)
    assert epsilon_at[newest] <= 1.0 - 0.96 * newest / 1500 + 0.01
    summary = training.summary()
    assert summary["parts"] == 2 and summary["env_steps"] > steps and summary["updates"] >= before.version + MORE
    assert summary["restarts"] >= trained.summary["restarts"] >= 1
    assert summary["train_wall_s"] > trained.summary["train_wall_s"] * 0.5


def _episodes(service: Service) -> list[Episode]:
    decoded = (service.schemas.decode(r.value) for r in read_all(service.cluster, service.topic("episodes")))
    return [message for message in decoded if isinstance(message, Episode)]


def _epsilons(service: Service) -> dict[int, float]:
    """{version the actors' episodes were played on: epsilon}."""
    return {m.weights_version: m.epsilon for m in _episodes(service) if m.role == "actor"}


def _first_state(service: Service) -> ShardState:
    log = [(r.offset, service.schemas.decode(r.value)) for r in read_all(service.cluster, service.topic("checkpoints"))]
    section = service.config.parameter_server
    first = next(offset for offset, message in log if type(message).__name__ == "CheckpointManifest")
    state = newest_complete(
        lambda start, stop: log[start:stop],
        0,
        first + 1,
        shard_id=0,
        moments=make_optimizer(section).tensors,
        optimizer=settings_json(section),
    )
    assert state is not None
    return state


def test_a_fork_begins_with_the_state_and_the_memory_of_its_point(trained: Trained, tmp_path: Path) -> None:
    name, version = f"{trained.run}-fork", 75
    training = trained.train(tmp_path, "--resume", trained.run, "--at-version", str(version), "--as", name)
    try:
        training.until("the fork", lambda: "logs in" in training.output)
        until_updates(training, version + MORE)
        assert training.send(signal.SIGINT) == 0, training.errors
    finally:
        training.close()
    service, past = trained.service(name), history(trained.service())
    state, rebuilt = _first_state(service), past.rebuild(0, Moment(version=version))
    assert (state.version, state.gradient_offset, state.handled) == (version, -1, {})
    assert state.weights.tobytes() == rebuilt.weights.tobytes()
    assert all(np.abs(moment).max() > 0 for moment in state.moments.values())
    assert state.target_version == 50  # the newest multiple of the period
    target = past.rebuild(0, Moment(version=50)).weights
    hashes = {m.version: m.payload_hash for _, m in trained.weights(name) if m.kind == "target"}
    assert hashes.get(50, zlib.crc32(target.data)) == zlib.crc32(target.data)  # compaction may have taken it
    assert all(message.version >= version for _, message in trained.weights(name) if message.kind == "key")
    assert trained.gorila("weights", "verify", name).returncode == 0
    # The memory: nothing newer than the weights, and not new to the rate rule.
    said = json.loads((training.run_dir / "fork.json").read_text())
    assert said["run"] == trained.run and said["version"] == version and said["memory_rows"] > 0
    blocks = [
        service.schemas.expect(r.value, TransitionBlock)
        for r in read_all(service.cluster, service.topic("transitions"))
    ]
    count = said["memory_blocks"]
    assert all(block.weights_version <= version for block in blocks[:count])
    assert sum(int((~block.is_last).sum()) for block in blocks[:count]) == said["memory_rows"]
    opened = (training.run_dir / "logs" / "replay-0.log").read_text()
    assert f'starts="{{0: {count}}}"' in opened
    assert training.summary()["env_steps"] <= sum(int((~block.is_last).sum()) for block in blocks[count:])
    # RUN is as it was.
    assert trained.gorila("weights", "verify", trained.run).returncode == 0
    again = trained.gorila("train", "--resume", trained.run, "--at", "5", "--as", name)
    assert again.returncode == 2 and "has topics" in again.stderr
