"""The reference deployment's load on the replay pipeline: 100 actors, 16 learners, a real broker; lag, loss, and where the limit is.

    python -m benchmarks.cluster --preset cluster-100 [--minutes 10] [--replays 1] [--quick] [--bootstrap-servers HOST:PORT]

The preset's topics (100 partitions of transitions, 16 of batches) and its blocks, batches, lag bounds. `gorila replay` runs as a user runs it; synthetic
actors (benchmarks/load/actors.py: real Pong frames, blocks cut as an actor cuts them) write at the reference rate, 200 frames a second and actor with action
repeat 4, 5,000 transitions a second in all; synthetic learners (benchmarks/load/learners.py) read whole learner batches, write priorities back and commit.
The reference's learners take 8,000 samples a second (`--samples-per-insert` 1.6 instead of the preset's 8, which would be 40,000).
1. `--minutes` at that rate: rates; the largest lag, read once a second from the numbers the Kafka tools show.
2. a faster pace by a quarter every step, until the pipeline takes less than 97 % of it twice in a row: the limit is the highest rate it took.
3. everybody stops writing, the rest is drained, replay is ended by SIGTERM, and ids are audited: each actor's blocks as acknowledged by the broker are the
   partition's records, all committed by replay, and the transitions replay inserted are those in them (a ring takes each offset once and in order, so a
   missing one would be a missing count); each part of each learner batch that replay drew came to exactly one learner once.
"""

from __future__ import annotations

import argparse
import json
import math
import subprocess
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import psutil

from benchmarks.load.outside import Outside, Reading, audit, until
from benchmarks.load.sides import Side, replay_processes
from gorila.config import Config
from gorila.environment_facts import EnvironmentFacts
from gorila.kafka import Cluster
from gorila.local.broker import Broker
from gorila.run_record import create_run
from gorila.settings import load_config

ACTOR_PACE = 200 / 4  # transitions a second
MARGIN = 1.02  # offered above the reference, so that a floor is not decided by the moment a second begins
FASTER = 1.25
KEPT = 0.97
SETTLE_S = 3.0
BURST_S = 30.0


@dataclass(frozen=True)
class Rates:
    """Of some seconds: transitions inserted and rows read by learners a second, the largest lags."""

    transitions: float
    samples: float
    lag: int
    worst_lag: int
    batches_lag: int


def measure(outside: Outside, seconds: float, config: Config, show_s: float) -> Rates:
    """Read once a second."""
    readings = [outside.read()]
    shown_s = readings[0].time_s
    while readings[-1].time_s - readings[0].time_s < seconds:
        time.sleep(max(0.0, readings[0].time_s + len(readings) - time.monotonic()))
        readings.append(outside.read())
        newest = readings[-1]
        if newest.time_s - shown_s >= show_s:
            shown_s = newest.time_s
            rates = _rates(readings, config)
            print(
                f"  {newest.time_s - readings[0].time_s:4.0f} s: {rates.transitions:.0f} transitions/s, {rates.samples:.0f} samples/s, "
                f"lag {newest.transitions_lag} blocks (largest {rates.lag}), batches {newest.batches_lag} (largest {rates.batches_lag}) "
                f"{'; '.join(filter(None, newest.waiting))}",
                flush=True,
            )
    return _rates(readings, config)


def _rates(readings: list[Reading], config: Config) -> Rates:
    first, last = readings[0], readings[-1]
    seconds = last.time_s - first.time_s
    return Rates(
        (last.inserts - first.inserts) / seconds,
        (last.batches_read - first.batches_read) * config.replay.record_rows / seconds,
        max(r.transitions_lag for r in readings), max(r.worst_lag for r in readings), max(r.batches_lag for r in readings),
    )  # fmt: skip


def find_limit(outside: Outside, actors: Side, config: Config, pace: float, step_s: float, steps: int) -> float:
    """Transitions a second at most."""
    best, short = 0.0, 0
    for _ in range(steps):
        pace *= FASTER
        actors.pace(pace)
        time.sleep(SETTLE_S)
        rates = measure(outside, step_s, config, math.inf)
        best = max(best, rates.transitions)
        print(
            f"offered {pace:.0f}: {rates.transitions:.0f} transitions/s, {rates.samples:.0f} samples/s, largest lag {rates.lag} blocks",
            flush=True,
        )
        short = short + 1 if rates.transitions < KEPT * pace else 0
        if short == 2:  # one alone may be the machine's doing
            break
    return best


def cluster(servers: str, given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The whole benchmark."""
    minutes = 0.1 if given.quick else given.minutes
    sets = [
        f"replay.samples_per_insert={given.samples_per_insert}",
        *(["replay.min_size_rows=5000"] * given.quick),
        *given.sets,
    ]
    config = load_config(given.preset, sets)
    kafka, run = Cluster(servers), f"cluster-{time.time_ns():x}"
    facts = EnvironmentFacts("pong-like", (84, 84), "uint8", 6, config.env.stack, 0)
    create_run(kafka, run, config, facts, np.zeros(64, np.float32))
    outside, pace = Outside(kafka, run, config), config.actor.count * ACTOR_PACE
    actors = Side("benchmarks.load.actors", run, servers, config.actor.count)
    learners = Side("benchmarks.load.learners", run, servers, config.learner.count)
    replays = replay_processes(run, servers, given.replays, folder)
    try:
        actors.start()
        learners.start()
        until(lambda: owned(outside, replays, folder) == config.actor.count, "replay to own every actor")
        actors.pace(pace * MARGIN)
        until(lambda: sum(s.samples_total for s in outside.newest_stats().values()), "the first batch")
        # What the actors wrote before sampling began is drawn for as well: a burst, and then the steady state. A machine that cannot keep up has none.
        deadline = time.monotonic() + BURST_S
        while not _caught_up(outside, config) and time.monotonic() < deadline:
            time.sleep(0.2)
        print(
            f"{config.actor.count} actors, {config.learner.count} learners, {given.replays} replay process(es): {minutes:g} minutes at the reference rate",
            flush=True,
        )
        before = [_cpu_s(process.pid) for process in replays]
        rates = measure(outside, minutes * 60, config, 10.0)
        shares = [
            (_cpu_s(process.pid) - spent) / (minutes * 60) for process, spent in zip(replays, before, strict=True)
        ]
        print(
            f"sustained: {rates.transitions:.0f} transitions/s, {rates.samples:.0f} samples/s, replay used {sum(shares):.2f} cores",
            flush=True,
        )
        limit = find_limit(outside, actors, config, pace, *((3.0, 2) if given.quick else (15.0, 12)))
        actors.pace(0)
        written = {int(p): counts for found in actors.finish() for p, counts in found["written"].items()}
        drained(outside)
        for process in replays:
            process.terminate()
        for process in replays:
            process.wait(30)
        drained(outside)
        findings = audit(outside, written, learners.finish(), config)
    finally:
        for process in replays:
            process.kill()
            process.wait()
        actors.kill()
        learners.kill()
    blocks = sum(counts["blocks"] for counts in written.values())
    print(
        f"audit: {blocks} blocks, {sum(c['transitions'] for c in written.values())} transitions: {findings}", flush=True
    )
    return {
        "minutes": minutes,
        "transitions_per_s": round(rates.transitions, 1),
        "samples_per_s": round(rates.samples, 1),
        "lost": findings.lost,
        "max_lag_records": rates.lag,
        "limit_transitions_per_s": round(max(limit, rates.transitions), 1),
        "max_lag_of_a_partition": rates.worst_lag,
        "lag_bound_of_a_partition": config.actor.max_lag_records,
        "max_batches_lag_records": rates.batches_lag,
        "batches_lag_bound": config.replay.max_lag_batches * config.record_parts * config.learner.count,
        "doubled": findings.batch_parts_twice,
        "unknown_ids": findings.unknown_ids,
        "dead_letters": findings.dead_letters,
        "replay_cores": round(sum(shares), 3),
    }


def owned(outside: Outside, replays: list[subprocess.Popen[bytes]], folder: Path) -> int:
    """Actors that have an owner. Raises SystemExit when a replay process has ended."""
    for index, process in enumerate(replays):
        if process.poll() is not None:
            raise SystemExit((folder / f"replay-{index}.log").read_text()[-2000:] or "replay ended")
    return sum(len(stats.actors) for stats in outside.newest_stats().values())


def _caught_up(outside: Outside, config: Config) -> bool:
    """Learners have read what was drawn, and what inserts allow is drawn, but for a few learner batches."""
    if outside.read().batches_lag >= 2 * config.learner.count * config.record_parts:
        return False
    stats = outside.newest_stats().values()
    owed = sum(s.inserts_total for s in stats) * config.replay.samples_per_insert - sum(s.samples_total for s in stats)
    return owed < 8 * config.learner.batch_size * max(1, len(outside.stats))


def drained(outside: Outside) -> None:
    """Replay has taken everything, nothing more is drawn, and the learners have read it."""

    def still() -> bool:
        first = outside.read()
        time.sleep(0.5)
        second = outside.read()
        return (first.samples, first.batches_read) == (second.samples, second.batches_read) and not (
            second.transitions_lag or second.batches_lag
        )

    until(still, "everything to be drained")


def _cpu_s(pid: int) -> float:
    used = psutil.Process(pid).cpu_times()
    return float(used.user + used.system)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--preset", default="cluster-100")
    parser.add_argument("--minutes", type=float, default=10.0)
    parser.add_argument("--replays", type=int, default=1, help="pipeline processes")
    parser.add_argument("--samples-per-insert", type=float, default=1.6, help="rows drawn per row inserted")
    parser.add_argument("--set", action="append", default=[], dest="sets", help="section.key=value; may be repeated")
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    parser.add_argument("--bootstrap-servers", default="", help="a Kafka to use; default: one of its own")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if given.bootstrap_servers:
            result = cluster(given.bootstrap_servers, given, Path(folder))
        else:
            with Broker(Path(folder) / "broker") as broker:
                result = cluster(broker.start().bootstrap_servers, given, Path(folder))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
