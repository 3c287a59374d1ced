"""The replay pipeline on a real broker and FnApiRunner: rates, latency, memory.

    python -m benchmarks.pipeline [--quick] [--bootstrap-servers HOST:PORT]

`gorila replay` runs as a user runs it; beside it a process writes blocks as an actor does (84x84 grey, two paddles and a ball, 16-frame zstd
blocks, eight lanes) and one reads batches and writes priorities as a learner does, without a network. All share the machine with the broker.
1. paced, 5,000 transitions and 20,000 samples a second: latency, from a block's append time to the time of the first batch whose population
   includes it (both timestamps are in the log). Rows are sampleable once their n-step successors came: population >= rows - n * lanes.
2. as fast as it goes, until the ring is full: the rates. One rule couples them: samples = 4 * transitions.
3. paced again with a full ring: RSS of the replay process, slope of a line through one reading a second.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from collections import deque
from pathlib import Path

import numpy as np
import psutil

from benchmarks.load.learners import SyntheticLearner
from gorila.codec import Schemas
from gorila.config import Config
from gorila.environment_facts import EnvironmentFacts
from gorila.flow import LagGate
from gorila.kafka import Cluster
from gorila.local.broker import Broker
from gorila.messages import TransitionBlock
from gorila.observations import compress
from gorila.run_record import create_run
from gorila.settings import load_config
from gorila.topics import full_name, group_name

RATIO = 4
LANES = 8
ROWS = 16
PACE = 5_000
SETS = (
    f"replay.samples_per_insert={RATIO}",
    f"actor.lanes={LANES}",
    f"actor.block_steps={ROWS}",
    "replay.min_size_rows=1000",
    "learner.batch_size=128",
    # design §5: bounds of at least two commit intervals at this rate, and these are rates of a whole machine.
    "replay.max_lag_batches=64",
    "actor.max_lag_records=256",
)
POOL = 64


def frames(rng: np.random.Generator, count: int) -> np.ndarray:
    """uint8 (count, 84, 84): a board, two paddles, a ball."""
    board = np.full((count, 84, 84), 87, np.uint8)
    board[:, :4] = board[:, -4:] = 236
    x, y, up, down = rng.integers(8, 70, 4)
    for t in range(count):
        board[t, (up + t) % 70 : (up + t) % 70 + 8, 6:8] = 148
        board[t, (down + 2 * t) % 70 : (down + 2 * t) % 70 + 8, 76:78] = 92
        board[t, 4 + (y + 2 * t) % 74 : 6 + (y + 2 * t) % 74, (x + 3 * t) % 82 : (x + 3 * t) % 82 + 2] = 236
    return board


def write_blocks(cluster: Cluster, run: str, config: Config, pace: float, seconds: float) -> None:
    """The actor's side. One JSON line: rows written."""
    rng = np.random.default_rng(0)
    pool = [compress(frames(rng, ROWS), "zstd") for _ in range(POOL)]
    schemas, producer, topic = Schemas(), cluster.producer(), full_name(run, "transitions")
    written = cluster.admin().end_offsets([(topic, 0)])[(topic, 0)]
    gate = LagGate(cluster, group_name(run, "replay"), topic, [0], config.actor.max_lag_records, refresh_s=0.02)
    no = np.zeros(ROWS, np.bool_)
    first_block, start = written, time.monotonic()
    while (now := time.monotonic()) - start < seconds:
        lane, turn = written % LANES, written // LANES
        if (written - first_block) * ROWS > (now - start) * pace or not gate.may_write(0, written):
            producer.poll(0.001)
            continue
        q_taken, q_max = rng.normal(size=(2, ROWS)).astype(np.float32)
        block = TransitionBlock(
            "actor-0", 1, lane, turn * ROWS, 0, 0.1, pool[written % POOL], rng.integers(0, 6, ROWS).astype(np.int32),
            q_taken.round(), np.arange(ROWS) == (0 if turn == 0 else -1), no, no, no, q_taken, q_max,
        )  # fmt: skip
        producer.send(topic, schemas.encode(block), partition=0)
        written += 1
        producer.poll(0)
    producer.flush(10)
    print(json.dumps({"rows": (written - first_block) * ROWS}), flush=True)


def read_batches(cluster: Cluster, run: str, config: Config, seconds: float) -> None:
    """The learner's side. One JSON line: rows read, and (timestamp in ms, population) of each record."""
    producer = cluster.producer()
    seen: list[tuple[float, int]] = []
    learner = SyntheticLearner(
        cluster, run, config, 0, Schemas(), producer,
        lambda record, batch: seen.append((record.timestamp_ms, batch["population"])),
    )  # fmt: skip
    start = time.monotonic()
    while time.monotonic() - start < seconds:
        learner.turn(0.005)
        producer.poll(0)
    producer.flush(10)
    learner.close()
    print(json.dumps({"rows": learner.rows, "seen": seen}), flush=True)


def append_times_ms(cluster: Cluster, run: str, blocks: int) -> list[int]:
    """The broker's append time of the first blocks."""
    consumer = cluster.consumer()
    consumer.assign({(full_name(run, "transitions"), 0): 0})
    times: list[int] = []
    while len(times) < blocks:
        times += [record.timestamp_ms for record in consumer.poll_many(500, 0.5)]
    consumer.close()
    return times[:blocks]


def latencies_ms(times_ms: list[int], seen: list[tuple[float, int]], config: Config) -> np.ndarray:
    """Per block. Blocks before sampling started, and those still under way at the end, are left out."""
    ordered = deque(sorted((population, made_ms) for made_ms, population in seen))
    found = []
    for number, time_ms in enumerate(times_ms):
        needed = (number + 1) * ROWS - config.replay.n_steps * min(LANES, number + 1)
        while ordered and ordered[0][0] < needed:
            ordered.popleft()
        if ordered and needed > 2 * config.replay.min_size_rows:
            found.append(ordered[0][1] - time_ms)
    return np.array(found)


class Phase:
    """Both sides for a while, as processes."""

    def __init__(self, run: str, servers: str, pace: float, seconds: float) -> None:
        self.started_s = time.monotonic()
        self._sides = [
            subprocess.Popen(
                [sys.executable, "-m", "benchmarks.pipeline", "--side", side, "--run", run, "--bootstrap-servers", servers, "--pace", str(pace), "--seconds", str(seconds)],
                stdout=subprocess.PIPE,
            )
            for side in ("actor", "learner")
        ]  # fmt: skip

    def result(self) -> list[dict]:
        """What each side printed last."""
        return [json.loads(side.communicate()[0].decode().strip().splitlines()[-1]) for side in self._sides]


def measure(servers: str, quick: bool, folder: Path) -> dict[str, float]:
    """All three phases."""
    latency_s, flat_out_s, memory_s = (6.0, 6.0, 6.0) if quick else (15.0, 30.0, 300.0)
    # Small enough to be full after the second phase, large enough that nothing is evicted during the first.
    capacity = int(PACE * latency_s * 1.2)
    config = load_config("pong", [*SETS, f"replay.capacity_rows={capacity}"])
    cluster, run = Cluster(servers), f"bench-{time.time_ns():x}"
    create_run(cluster, run, config, EnvironmentFacts("pong-like", (84, 84), "uint8", 6, 4, 0), np.zeros(8, np.float32))
    log = (folder / "replay.log").open("wb")
    command = [sys.executable, "-m", "gorila.cli", "replay", "--run", run, "--bootstrap-servers", servers]
    replay = subprocess.Popen(command, stdout=log, stderr=log)
    try:
        process = psutil.Process(replay.pid)
        until_owned(cluster, run, folder)
        actor, learner = Phase(run, servers, PACE, latency_s).result()
        latency = latencies_ms(append_times_ms(cluster, run, actor["rows"] // ROWS), learner["seen"], config)
        print(
            f"paced: {actor['rows'] / latency_s:.0f} transitions/s, {learner['rows'] / latency_s:.0f} samples/s",
            flush=True,
        )
        print(
            f"paced: {len(latency)} blocks, latency p50 {np.percentile(latency, 50):.1f} ms, p99 {np.percentile(latency, 99):.1f} ms",
            flush=True,
        )
        cpu = process.cpu_times()
        actor, learner = Phase(run, servers, 1e9, flat_out_s).result()
        used = process.cpu_times()
        share = (used.user + used.system - cpu.user - cpu.system) / flat_out_s
        print(
            f"flat out: {actor['rows'] / flat_out_s:.0f} transitions/s, {learner['rows'] / flat_out_s:.0f} samples/s, replay used {share:.2f} cores",
            flush=True,
        )
        rates = actor["rows"] / flat_out_s, learner["rows"] / flat_out_s
        phase = Phase(run, servers, PACE, memory_s)
        readings = []
        cpu = process.cpu_times()
        while time.monotonic() - phase.started_s < memory_s:
            readings.append((time.monotonic() - phase.started_s, process.memory_info().rss / 2**20))
            time.sleep(1.0)
        used = process.cpu_times()
        phase.result()
        settled = np.array(readings[len(readings) // 4 :])
        slope = float(np.polyfit(settled[:, 0], settled[:, 1], 1)[0]) * 60
        share = (used.user + used.system - cpu.user - cpu.system) / memory_s
        print(
            f"paced, ring full: RSS {settled[-1, 1]:.0f} MB, slope {slope:.2f} MB/min, replay used {share:.2f} cores",
            flush=True,
        )
    finally:
        replay.terminate()
        replay.wait()
        log.close()
    return {
        "transitions_per_s": round(rates[0], 1),
        "samples_per_s": round(rates[1], 1),
        "latency_ms_p50": round(float(np.percentile(latency, 50)), 2),
        "latency_ms_p99": round(float(np.percentile(latency, 99)), 2),
        "rss_slope_mb_per_min": round(slope, 3),
    }


def until_owned(cluster: Cluster, run: str, folder: Path) -> None:
    """The replay process has its partition: it publishes stats naming the actor."""
    consumer, schemas = cluster.consumer(), Schemas()
    consumer.assign({(full_name(run, "replay-stats"), 0): 0})
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for record in consumer.poll_many(100, 0.5):
            if schemas.decode_plain(record.value or b"")[0]["actors"]:
                consumer.close()
                return
    raise SystemExit((folder / "replay.log").read_text()[-2000:] or "replay did not start")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    parser.add_argument("--bootstrap-servers", default="", help="a Kafka to use; default: one of its own")
    for hidden in ("--side", "--run", "--pace", "--seconds"):
        parser.add_argument(hidden, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        cluster = Cluster(given.bootstrap_servers)
        capacity = ["replay.capacity_rows=100000"]
        config = load_config("pong", [*SETS, *capacity])
        if given.side == "actor":
            write_blocks(cluster, given.run, config, float(given.pace), float(given.seconds))
        else:
            read_batches(cluster, given.run, config, float(given.seconds))
        return
    with tempfile.TemporaryDirectory() as folder:
        if given.bootstrap_servers:
            result = measure(given.bootstrap_servers, given.quick, Path(folder))
        else:
            with Broker(Path(folder) / "broker") as broker:
                result = measure(broker.start().bootstrap_servers, given.quick, Path(folder))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
