"""Fail-over of a chain-replicated shard: kill -9 of head, middle and tail in turn, under load, and nothing lost or doubled.

    python -m benchmarks.failover            # 60 kills: 20 of each position
    python -m benchmarks.failover --quick    # 3 kills

What is timed: from kill -9 until a reader holds weights that cover a gradient sent *after* the kill; so what was on its way when the victim died does not count.
Each victim is started again at once, and the next kill waits until three are in the chain. The load is a learner's: a gradient of CartPole's network (17,410
parameters, 70 KB) whenever fewer than 16 are not yet covered by the weights read.
lost, doubled: every record of the weights topic, its bytes and its version, is compared with a server that applied the same log undisturbed.
verified: 1 where `gorila weights verify` agrees with the run afterwards.
One machine: the broker, three replicas, the learner and the reader share its cores.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
import uuid
import zlib
from collections.abc import Callable
from pathlib import Path

import numpy as np

from consumers.parameter_server.checkpoints import ShardState
from consumers.parameter_server.optimizers import make_optimizer, warm_up_kernels
from consumers.parameter_server.replication import Replica
from consumers.parameter_server.shard import Shard
from gorila.codec import Schemas
from gorila.environment_facts import EnvironmentFacts
from gorila.kafka import Cluster
from gorila.local.broker import Broker
from gorila.messages import CheckpointLedger, CheckpointManifest, Gradient, ReplicationEvent, Weights
from gorila.processor import Incoming
from gorila.run_record import create_run, read_all
from gorila.settings import load_config

PARAMETERS = 17_410
WINDOW = 16
REPLICAS = 3
POSITIONS = ("head", "middle", "tail")
PATIENCE_S = 120.0
SETS = [
    f"parameter_server.replicas={REPLICAS}",
    f"learner.max_in_flight={WINDOW}",
    f"replay.max_lag_batches={2 * WINDOW}",
    "parameter_server.target_period_versions=1000",
    "parameter_server.ledger_versions=512",
]


class Chain:
    """A run with one shard and its replicas, its learner, and its reader, in one loop."""

    def __init__(self, servers: str, folder: Path) -> None:
        self.servers, self.folder, self.name = servers, folder, "failover-" + uuid.uuid4().hex[:8]
        self.cluster, self.schemas = Cluster(servers), Schemas()
        self.config = load_config("cartpole", SETS, {})
        self.initial = np.random.default_rng(0).standard_normal(PARAMETERS).astype(np.float32)
        facts = EnvironmentFacts("CartPole-v1", (4,), "float32", 2, 1, 500)
        create_run(self.cluster, self.name, self.config, facts, self.initial)
        rng = np.random.default_rng(1)
        self.payloads = [rng.standard_normal(PARAMETERS).astype(np.float32).tobytes() for _ in range(8)]
        self.producer = self.cluster.producer()
        self.reader, self.log, self.replayed = (self.cluster.consumer() for _ in range(3))
        self.replayed.assign({(f"{self.name}.gradients", 0): 0})
        self.reader.assign({(f"{self.name}.weights", 0): 0})
        self.log.assign({(f"{self.name}.replication", 0): 0})
        self.observer = Replica("observer", 0, REPLICAS)
        self.processes: dict[int, subprocess.Popen[bytes]] = {}
        self.sent = 0
        self.covered, self.version = -1, -1
        # The undisturbed server follows the log (retention would take it before the end), and what it would have shown.
        tensors = make_optimizer(self.config.parameter_server).tensors
        moments = {name: np.zeros(PARAMETERS, np.float32) for name in tensors}
        self.undisturbed = Shard(self.config, ShardState(0, self.initial.copy(), moments))
        self.right = {0: zlib.crc32(self.initial)}
        self.right_states: dict[int, int] = {}
        self.shown: list[tuple[str, int, int]] = []

    def start(self, replica: int) -> None:
        """A replica process; its log goes on in one file."""
        command = [sys.executable, "-m", "gorila.cli", "parameter-server", "--run", self.name]
        command += ["--replica", str(replica), "--bootstrap-servers", self.servers]
        with (self.folder / f"{replica}.out").open("ab") as out:
            self.processes[replica] = subprocess.Popen(command, stdout=out, stderr=out)

    def send(self) -> int:
        """The next gradient; its offset: this learner is the only one."""
        batch, self.sent = self.sent, self.sent + 1
        message = Gradient(
            0, "learner-0", 0, batch, max(self.version, 0), 32, PARAMETERS, "fp32", self.payloads[batch % 8], 1.0, 1.0
        )
        self.producer.send(f"{self.name}.gradients", self.schemas.encode(message), key=b"0", partition=0)
        return batch

    def until(self, done: Callable[[], bool], *, load: bool = True) -> None:
        """Learn and read until `done`."""
        deadline_s = time.monotonic() + PATIENCE_S
        while not done():
            if time.monotonic() > deadline_s:
                raise SystemExit(
                    f"it hangs: view {self.observer.view}, covered {self.covered} of {self.sent}, logs in {self.folder}"
                )
            while load and self.sent - self.covered - 1 < WINDOW:
                self.send()
            self.producer.poll(0.0)
            for received in self.log.poll_many(1000, 0.0):
                self.observer.take(self.schemas.expect(received.value, ReplicationEvent))
            self._replay(50)
            for received in self.reader.poll_many(100, 0.002):
                shown = self.schemas.expect(received.value, Weights)
                self.shown.append((shown.kind, shown.version, zlib.crc32(shown.payload)))
                if shown.kind == "key":
                    self.covered, self.version = (
                        max(self.covered, shown.gradient_offset),
                        max(self.version, shown.version),
                    )

    def members(self) -> list[int]:
        """Replica numbers, head to tail."""
        return [int(member.split(".", maxsplit=1)[0].rsplit("-", 1)[1]) for member in self.observer.view.members]

    def kill(self, position: int) -> float:
        """Kill it, and how many ms passed until weights with something newer were read; then bring it back."""
        self.until(lambda: len(self.members()) == REPLICAS)
        goal = self.covered + 4 * WINDOW
        self.until(lambda: self.covered >= goal)
        victim = self.members()[position]
        process = self.processes[victim]
        process.kill()
        began_s = time.monotonic()
        process.wait()
        newer = self.send()
        self.until(lambda: self.covered >= newer)
        taken_ms = (time.monotonic() - began_s) * 1e3
        self.until(lambda: victim not in self.members())
        self.start(victim)
        return taken_ms

    def _replay(self, most: int) -> None:
        section, shard = self.config.parameter_server, self.undisturbed
        for received in self.replayed.poll_many(most, 0.0):
            message = self.schemas.expect(received.value, Gradient)
            list(shard.process(Incoming("gradients", 0, received.offset, received.timestamp_ms, b"0", message)))
            version = shard.state.version
            self.right[version] = zlib.crc32(shard.state.weights)
            # As the version was made: a gradient dropped later changes what was handled, and so the hash.
            kept = version % section.ledger_versions == 0 or version % section.checkpoint_versions == 0
            if kept and version not in self.right_states:
                self.right_states[version] = shard.state_hash()

    def compare(self) -> tuple[int, int, int]:
        """(updates lost, doubled, records that are not those of the undisturbed server)."""
        self.until(lambda: self.covered == self.sent - 1 == self.undisturbed.state.gradient_offset, load=False)
        wrong = sum(self.right[version] != payload for _, version, payload in self.shown)
        keys = [version for kind, version, _ in self.shown if kind == "key"]
        wrong += keys != sorted(keys)
        for received in read_all(self.cluster, f"{self.name}.checkpoints", 0):
            message = self.schemas.decode(received.value)
            if isinstance(message, CheckpointLedger | CheckpointManifest) and message.version:
                wrong += self.right_states[message.version] != message.state_hash
        difference = self.undisturbed.state.version - keys[-1]
        return max(0, difference), max(0, -difference), wrong

    def close(self) -> None:
        """End everything that was started here."""
        for process in self.processes.values():
            process.kill()
            process.wait()
        self.reader.close()
        self.log.close()
        self.replayed.close()
        self.producer.close()


def verified(servers: str, run: str) -> bool:
    """Whether `gorila weights verify` agrees with the run; prints what it says."""
    command = [sys.executable, "-m", "gorila.cli", "weights", "verify", run, "--bootstrap-servers", servers]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    print(done.stdout + (done.stderr if done.returncode else ""), end="")
    return done.returncode == 0


def measure(servers: str, folder: Path, kills: int) -> dict[str, float | None]:
    """The figures."""
    chain = Chain(servers, folder)
    taken: dict[str, list[float]] = {position: [] for position in POSITIONS}
    try:
        for replica in range(REPLICAS):
            chain.start(replica)
        for number in range(kills):
            position = (2, 1, 0)[number % 3]
            taken[POSITIONS[position]].append(chain.kill(position))
            print(
                f"kill {number + 1}: {POSITIONS[position]}, {taken[POSITIONS[position]][-1]:.0f} ms until newer weights were read"
            )
        chain.until(lambda: len(chain.members()) == REPLICAS)
        lost, doubled, wrong = chain.compare()
        print(
            f"{chain.sent} gradients, {len(chain.observer.view.members)} members in epoch {chain.observer.view.epoch}; records that differ: {wrong}"
        )
        agrees = verified(servers, chain.name)
    finally:
        chain.close()
    p50 = {position: round(statistics.median(times), 1) for position, times in taken.items()}
    tail = sorted(taken["tail"])
    return {
        "kills": kills,
        **{f"{position}_ms_p50": p50[position] for position in POSITIONS},
        "tail_ms_p95": round(tail[min(len(tail) - 1, int(0.95 * len(tail)))], 1),
        "lost": lost,
        "doubled": doubled,
        "differing_records": wrong,
        "verified": int(agrees),
        "gradients": chain.sent,
    }


def main() -> None:
    """See the file's head."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="3 kills")
    parser.add_argument("--kills", type=int, default=60, help="a multiple of 3")
    parser.add_argument("--bootstrap-servers", default="", help="a running Kafka; default: one of its own")
    options = parser.parse_args()
    kills = 3 if options.quick else max(3, options.kills)
    warm_up_kernels(load_config("cartpole", SETS, {}).parameter_server)
    with tempfile.TemporaryDirectory() as folder:
        if options.bootstrap_servers:
            figures = measure(options.bootstrap_servers, Path(folder), kills)
        else:
            with Broker(Path(folder) / "broker") as broker:
                figures = measure(broker.start().bootstrap_servers, Path(folder), kills)
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
