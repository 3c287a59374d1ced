"""Several learners in one group with static membership, scaled 1 -> 4 -> 2 under load (case 30): every batch is handled, what is repeated is dropped."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from itertools import chain, pairwise
from pathlib import Path

import pytest

from gorila.codec import Schemas
from gorila.environments import describe
from gorila.kafka import Cluster, Received
from gorila.local.broker import BrokerAddress
from gorila.local.broker_process import free_port
from gorila.messages import Batch, Gradient, Priorities, Weights
from gorila.network import initial_weights
from gorila.run_record import create_run, read_all
from gorila.settings import load_config

pytestmark = pytest.mark.timeout(900)  # a busy machine; each wait has its own deadline
DEADLINE_S = 240.0
PARTITIONS = 4
LAG_BOUND = 16
SETS = [
    f"learner.count={PARTITIONS}", f"replay.max_lag_batches={LAG_BOUND}", "network.hidden=[16]", "learner.batch_size=32",
    "replay.record_rows=32", "replay.samples_per_insert=8", "replay.min_size_rows=200", "actor.max_steps_per_s=160",
    "learner.commit_interval_ms=300", "learner.codec=fp16",
]  # fmt: skip


class Loop:
    """Actor, replay, parameter server and as many learners as are started, each a process."""

    def __init__(self, servers: str, name: str, folder: Path) -> None:
        self.name, self._servers, self._folder = name, servers, folder
        self.config = load_config("cartpole", SETS, {})
        self.cluster, self.schemas = Cluster(servers), Schemas()
        self.admin = self.cluster.admin()
        facts = describe(self.config)
        create_run(self.cluster, name, self.config, facts, initial_weights(self.config, facts))
        self.processes: dict[str, subprocess.Popen[bytes]] = {}

    def start(self, role: str, index: int = 0) -> None:
        name = f"{role}-{index}"
        command = [sys.executable, "-m", "gorila.cli", role, "--run", self.name, "--index", str(index)]
        command += ["--bootstrap-servers", self._servers, "--run-dir", str(self._folder)]
        command += ["--set", f"monitor.metrics_port={free_port()}"]
        with (self._folder / f"{name}.out").open("ab") as out:
            self.processes[name] = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT)

    def signal(self, name: str, number: signal.Signals) -> None:
        self.processes[name].send_signal(number)

    def stop(self, *names: str) -> None:
        for name in names:
            self.signal(name, signal.SIGTERM)
        for name in names:
            assert self.processes[name].wait(DEADLINE_S) == 0, f"{name}\n{self.log()}"

    def log(self) -> str:
        return "\n".join(
            f"== {path.name}\n{path.read_text(errors='replace')[-2500:]}" for path in sorted(self._folder.glob("*.out"))
        )

    def until(self, what: str, happened: Callable[[], bool]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not happened():
            assert time.monotonic() < deadline, f"no {what}\n{self.log()}"
            time.sleep(0.1)

    def records(self, topic: str, partition: int = 0) -> list[Received]:
        return read_all(self.cluster, f"{self.name}.{topic}", partition)

    def gradients(self) -> list[Gradient]:
        return [self.schemas.expect(received.value, Gradient) for received in self.records("gradients")]

    def members(self) -> dict[str, list[int]]:
        """{instance: partitions}; static members."""
        facts = self.admin.describe_groups([f"{self.name}.learner"])[f"{self.name}.learner"]
        return {member.instance_id: [p for _, p in member.partitions] for member in facts.members}

    def shared_out(self, learners: int) -> bool:
        held = self.members()
        return len(held) == learners and sorted(chain.from_iterable(held.values())) == list(range(PARTITIONS))

    def all_partitions_by(self, *learners: str) -> Callable[[], bool]:
        """Whether from now on exactly these write gradients, of every partition."""
        seen = len(self.records("gradients"))

        def happened() -> bool:
            new = self.gradients()[seen:]
            by = {gradient.learner_id for gradient in new}
            return set(learners) <= by and {gradient.batch_partition for gradient in new} == set(range(PARTITIONS))

        return happened

    def drained(self) -> bool:
        """Whether the group has committed all that is in batches, and the shard all that is in gradients."""
        places = [(f"{self.name}.batches", partition) for partition in range(PARTITIONS)]
        committed = self.admin.group_offsets(f"{self.name}.learner", places)
        if any(committed[place] != end for place, end in self.admin.end_offsets(places).items()):
            return False
        place = (f"{self.name}.gradients", 0)
        return self.newest_weights().gradient_offset + 1 >= self.admin.end_offsets([place])[place]

    def newest_weights(self) -> Weights:
        frames = [self.schemas.expect(received.value, Weights) for received in self.records("weights")]
        return [frame for frame in frames if frame.kind == "key"][-1]

    def close(self) -> None:
        for process in self.processes.values():
            if process.poll() is None:
                process.kill()  # also what is stopped
                process.wait()


@pytest.fixture
def loop(broker: BrokerAddress, run_name: str, tmp_path: Path) -> Iterator[Loop]:
    made = Loop(broker.bootstrap_servers, run_name, tmp_path)
    try:
        yield made
    finally:
        made.close()


def test_learners_scaled_from_one_to_four_to_two_handle_every_batch(loop: Loop) -> None:
    for role in ("parameter-server", "replay", "actor", "learner"):
        loop.start(role)
    loop.until("gradient of every partition by one learner", loop.all_partitions_by("learner-0"))
    assert loop.shared_out(1)

    for index in (1, 2, 3):
        loop.start("learner", index)
    loop.until("group of four", lambda: loop.shared_out(4))
    loop.until("one partition each", lambda: {len(held) for held in loop.members().values()} == {1})
    loop.until("gradient by each", loop.all_partitions_by(*(f"learner-{index}" for index in range(4))))

    # Down to two: one is stopped in order, one stands still for longer than its session, and comes back when its partition is another's. Whether a
    # commit of its is refused then is chance (test_kafka_door has that); that it lives, and that no batch is left out, is not.
    loop.signal("learner-2", signal.SIGSTOP)
    loop.stop("learner-3")
    loop.until("group of two", lambda: loop.shared_out(2))
    loop.until("gradient of every partition by two", loop.all_partitions_by("learner-0", "learner-1"))
    loop.signal("learner-2", signal.SIGCONT)
    loop.until("the third's return", lambda: loop.shared_out(3))
    assert loop.processes["learner-2"].poll() is None
    loop.stop("learner-2")
    loop.until("group of two again", lambda: loop.shared_out(2))
    loop.until("gradient of every partition by two", loop.all_partitions_by("learner-0", "learner-1"))

    loop.stop("actor-0")
    loop.stop("replay-0")
    loop.until("end of every partition", loop.drained)
    loop.stop("learner-0", "learner-1", "parameter-server-0")
    audit(loop)


def audit(loop: Loop) -> None:
    """What the log says of every batch that was ever drawn."""
    drawn = set()
    for partition in range(PARTITIONS):
        for received in loop.records("batches", partition):
            assert loop.schemas.expect(received.value, Batch).parts == 1
            drawn.add((partition, received.offset))
    told = [loop.schemas.expect(received.value, Priorities) for received in loop.records("priorities")]
    assert {(record.batch_partition, record.batch_offset) for record in told} == drawn, "a batch nobody answered"
    rejected = {(record.batch_partition, record.batch_offset) for record in told if record.rejected}
    gradients = loop.gradients()
    copies = Counter((gradient.batch_partition, gradient.batch_offset) for gradient in gradients)
    assert drawn - rejected <= set(copies) <= drawn and len(rejected) < 0.05 * len(drawn)

    by_partition: dict[int, list[str]] = defaultdict(list)
    seen: set[tuple[int, int]] = set()
    highest: dict[int, int] = defaultdict(lambda: -1)
    for gradient in gradients:
        partition, offset = gradient.batch_partition, gradient.batch_offset
        # The shard drops what is not above the highest it handled: a first copy below that would never be learned from.
        assert (partition, offset) in seen or offset > highest[partition], "overtaken before its first copy came"
        seen.add((partition, offset))
        highest[partition] = max(offset, highest[partition])
        by_partition[gradient.batch_partition].append(gradient.learner_id)
    handovers = sum(sum(before != after for before, after in pairwise(owners)) for owners in by_partition.values())
    repeated = sum(copies.values()) - len(copies)
    # Replay waits while a partition's committed lag is above its bound: no owner can leave more than that behind uncommitted.
    assert handovers >= 5 and repeated <= handovers * (LAG_BOUND + 2), f"{repeated} repeated in {handovers} handovers"

    weights = loop.newest_weights()
    assert weights.dropped_bad == 0 and weights.dropped_duplicate >= repeated - weights.dropped_stale
    assert weights.version == weights.applied == len(gradients) - weights.dropped_duplicate - weights.dropped_stale
    assert weights.dropped_duplicate <= repeated, "a gradient was dropped as a duplicate that had no other"
