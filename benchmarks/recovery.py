"""kill -9 of a replay process whose memory holds 100,000 transitions, start it again: how long until its first batch.

    python -m benchmarks.recovery [--kills 5] [--transitions 100000] [--actors 8] [--quick] [--bootstrap-servers HOST:PORT]

Real Pong frames in blocks of 16 rows (benchmarks/load/actors.py), batches of 512 rows read and answered with priorities by a synthetic learner,
all of it while the process is killed. The clock runs from the start of the new process, its imports included, to the broker's append time of its first batches
record. `gorila replay` runs as a user runs it. What must be equal afterwards is a test's business (tests/integration/test_replay_elastic.py).
"""

from __future__ import annotations

import argparse
import datetime
import json
import re
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.load.outside import Outside, until
from benchmarks.load.sides import Side, replay_processes
from gorila.codec import Schemas
from gorila.environment_facts import EnvironmentFacts
from gorila.kafka import Cluster, Consumer
from gorila.local.broker import Broker
from gorila.messages import Batch
from gorila.run_record import create_run
from gorila.settings import load_config
from gorila.topics import full_name

FILL_PACE, PACE = 6_000.0, 1_000.0
FLOOR_S = 5.0


def first_batch_ms(consumer: Consumer, schemas: Schemas, after_ms: int) -> float:
    """Append time of the first batches record whose append time is not before `after_ms`; waits for it."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        for record in consumer.poll_many(500, 0.1):
            if record.timestamp_ms >= after_ms:
                schemas.expect(record.value, Batch)
                return record.timestamp_ms
    raise SystemExit("no batch within 60 s of the start")


def steps(log: str, started_ms: int) -> str:
    """When the new process said what, in seconds after its start."""
    said = []
    for event, word in (
        ("service.start", "imported"),
        ("replay.assigned", "assigned"),
        ("replay.rings_opened", "rings full"),
    ):
        line = next((line for line in log.splitlines() if f" {event} " in f"{line} "), "")
        if line:
            moment = datetime.datetime.fromisoformat(line.split(" ", 1)[0].replace("Z", "+00:00"))
            said.append(f"{word} {moment.timestamp() - started_ms / 1000:.2f}")
    return ", ".join(said)


def measure(servers: str, kills: int, transitions: int, actors_count: int, folder: Path) -> dict[str, Any]:
    """Fill, then kill and start again, `kills` times."""
    sets = [
        f"actor.count={actors_count}", "actor.max_block_age_ms=10000", "actor.refresh_s=10", "learner.count=1", "learner.batch_size=512",
        f"replay.capacity_rows={transitions // actors_count}", "replay.min_size_rows=5000", "replay.samples_per_insert=1.6",
        "replay.max_error_rows=131072", "replay.max_lag_batches=16",
    ]  # fmt: skip
    config = load_config("pong", sets)
    kafka, run, schemas = Cluster(servers), f"recovery-{time.time_ns():x}", Schemas()
    facts = EnvironmentFacts("pong-like", (84, 84), "uint8", 6, config.env.stack, 0)
    create_run(kafka, run, config, facts, np.zeros(64, np.float32))
    outside = Outside(kafka, run, config)
    actors, learners = (
        Side("benchmarks.load.actors", run, servers, actors_count),
        Side("benchmarks.load.learners", run, servers, 1),
    )
    found: list[float] = []
    cpu_s: list[float] = []
    rows = 0
    [replay] = replay_processes(run, servers, 1, folder)
    try:
        actors.start()
        learners.start()
        actors.pace(FILL_PACE)
        until(
            lambda: sum(s.inserts_total for s in outside.newest_stats().values()) > transitions * 1.05,
            "the rings to be full",
            600,
        )
        actors.pace(PACE)
        for number in range(kills):
            time.sleep(2.0)
            replay.kill()
            replay.wait()
            consumer = kafka.consumer()
            # What the killed process had sent has been appended: the new one's records are those from its start on.
            ends = kafka.admin().end_offsets([(full_name(run, "batches"), 0)])
            consumer.assign(ends)
            started_ms = int(time.time() * 1000)
            [replay] = replay_processes(run, servers, 1, folder)
            seconds = (first_batch_ms(consumer, schemas, started_ms) - started_ms) / 1000
            used = psutil.Process(replay.pid).cpu_times()
            cpu_s.append(used.user + used.system)
            consumer.close()
            log = (folder / "replay-0.log").read_text()
            read = re.search(r"rows_read=(\d+)", log)
            rows = int(read.group(1)) if read else 0
            found.append(seconds)
            print(
                f"kill {number + 1}: first batch {seconds:.2f} s after the start ({steps(log, started_ms)}), {rows} rows read again, {cpu_s[-1]:.2f} s of CPU",
                flush=True,
            )
    finally:
        replay.kill()
        replay.wait()
        actors.kill()
        learners.kill()
    return {
        "transitions": transitions,
        "actors": actors_count,
        "kills": kills,
        "rows_read": rows,
        "first_batch_s_p50": round(statistics.median(found), 3),
        "first_batch_s_max": round(max(found), 3),
        "cpu_s_p50": round(statistics.median(cpu_s), 2),
        "floor_s": FLOOR_S,
    }


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=5)
    parser.add_argument("--actors", type=int, default=8, help="that these are of")
    parser.add_argument("--transitions", type=int, default=100_000, help="rows the memory holds")
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    parser.add_argument("--bootstrap-servers", default="", help="a Kafka to use; default: one of its own")
    given = parser.parse_args()
    kills, transitions = (1, 16_000) if given.quick else (given.kills, given.transitions)
    with tempfile.TemporaryDirectory() as folder:
        if given.bootstrap_servers:
            result = measure(given.bootstrap_servers, kills, transitions, given.actors, Path(folder))
        else:
            with Broker(Path(folder) / "broker") as broker:
                result = measure(broker.start().bootstrap_servers, kills, transitions, given.actors, Path(folder))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
