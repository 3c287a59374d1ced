"""Codecs on a slow network: one learner alone behind a link of 100 Mbit/s, with the Nature network.

    python -m benchmarks.network            # speed; needs root and iproute2
    python -m benchmarks.network --scores   # what each codec's preset scores on catch-pixels (30 minutes; benchmarks/network_scores.py)
    python -m benchmarks.network --quick

Broker and parameter server stand on one side of two network namespaces joined by a link shaped both ways (tc tbf), the learner on the other. It is the product's
learner process, reading recorded batches (32 rows of Pong-like frames) and weights over the link and writing gradients and priorities. One shard of 1,687,206
parameters, AdaGrad, no warm-up of k.

speedup: updates/s over those of fp32 in the same round; rounds interleave the codecs, the figures are medians. In these rows snapshots are whole (fp32) and take
at most 4 MB/s of the link's 12.5, and the window is wide, so that what is compared is the way up.
bytes_per_update: what went up the link, all headers, priorities and fetch requests included, over updates.
downlink_delta_speedup: top-k gradients under the Atari window of 8 and the default cadence, deltas (one-bit) over fp32 snapshots.
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
from pathlib import Path

import numpy as np

from benchmarks.learner import PONG, RECORDED, record
from benchmarks.shaped_link import NearBroker, ShapedLink, end, missing
from gorila.codec import Schemas
from gorila.errors import BrokerError
from gorila.kafka import Cluster
from gorila.run_record import create_run
from gorila.settings import load_config

MEGABIT_PER_S = 100
P = 1_687_206
CODECS = {"fp32": "fp32", "fp16": "fp16", "one_bit": "one-bit", "top_k": "top-k"}
SHARED = (
    "network.factory=nature", "network.hidden=[]", "env.stack=4", "learner.batch_size=32", "replay.record_rows=32",
    "parameter_server.optimizer=adagrad", "parameter_server.learning_rate=1e-5", "learner.outlier_sigma=0",
    "learner.top_k_warmup_versions=0", "parameter_server.target_period_versions=1000000",
    "parameter_server.checkpoint_versions=1000000", "learner.max_lag_records=100000",
)  # fmt: skip
UPLINK = ("learner.max_in_flight=64", "replay.max_lag_batches=128", "parameter_server.weights_bytes_per_s=4e6")
DOWNLINK = ("learner.codec=top-k", "learner.max_in_flight=8")


class Far:
    """Runs the learner beyond the link and counts what it does."""

    def __init__(self, link: ShapedLink, servers: str, warm_s: float, seconds: float) -> None:
        self._link, self._servers, self._warm_s, self._seconds = link, servers, warm_s, seconds
        self._schemas = Schemas()
        config = load_config("cartpole", SHARED, {})
        self._batches = [self._schemas.encode(record(config, PONG, number)[0]) for number in range(RECORDED)]
        self._weights = np.random.default_rng(0).standard_normal(P).astype(np.float32) * np.float32(0.01)

    def measure(self, *settings: str) -> dict[str, float]:
        """updates_per_s, bytes_per_update (up), down_bytes_per_update of a fresh run with these settings."""
        name, cluster = "net-" + uuid.uuid4().hex[:8], Cluster(self._servers)
        create_run(cluster, name, load_config("cartpole", (*SHARED, *settings), {}), PONG, self._weights)
        producer = cluster.producer(linger_ms=5)
        for number in range(int((self._warm_s + self._seconds) * 20) + 64):
            producer.send(f"{name}.batches", self._batches[number % RECORDED], partition=0)
        producer.flush(60)
        producer.close()
        role = [sys.executable, "-m", "gorila.cli"]
        tail = ["--run", name, "--bootstrap-servers", self._servers]
        with tempfile.TemporaryDirectory() as folder, open(Path(folder) / "learner.log", "wb") as log:
            server = subprocess.Popen([*role, "parameter-server", *tail], stderr=subprocess.DEVNULL)
            words = self._link.command_in(self._link.far, *role, "learner", *tail, "--run-dir", folder)
            learner = subprocess.Popen(words, stderr=log, stdout=log)
            try:
                return self._count(cluster, f"{name}.gradients", [server, learner], Path(folder) / "learner.log")
            finally:
                end([learner, server])

    def _count(
        self, cluster: Cluster, topic: str, processes: list[subprocess.Popen[bytes]], log: Path
    ) -> dict[str, float]:
        reader = cluster.consumer()
        deadline_s = time.monotonic() + 120

        def gradients() -> int:
            if any(process.poll() is not None for process in processes):
                raise SystemExit(f"a role ended: {log.read_text()[-2000:]}")
            try:
                return reader.watermarks(topic, 0)[1]
            except BrokerError:  # a topic made a moment ago is not known to every client yet
                return 0

        while gradients() < 3:
            if time.monotonic() > deadline_s:
                raise SystemExit(f"no gradients came: {log.read_text()[-2000:]}")
            time.sleep(0.05)
        time.sleep(self._warm_s)
        # From one gradient's arrival to another's: a slow codec makes few.
        first, began_s, (up, down) = self._next(gradients)
        last = first
        while time.monotonic() - began_s < self._seconds:
            last, ended_s, (up_end, down_end) = self._next(gradients)
        reader.close()
        updates = last - first
        return {
            "updates_per_s": updates / (ended_s - began_s),
            "bytes_per_update": (up_end - up) / updates,
            "down_bytes_per_update": (down_end - down) / updates,
        }

    def _next(self, gradients) -> tuple[int, float, tuple[int, int]]:  # type: ignore[no-untyped-def]
        before = gradients()
        while (now := gradients()) == before:
            time.sleep(0.01)
        return now, time.monotonic(), self._link.far_bytes()


def inner(near: str, far: str, far_end: str, quick: bool) -> dict[str, object]:
    """What runs in the near namespace."""
    link = ShapedLink(MEGABIT_PER_S)
    link.near, link.far, link._ends = near, far, ("", far_end)
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in CODECS}
    downlink: list[float] = []
    with tempfile.TemporaryDirectory() as folder, NearBroker(Path(folder) / "broker") as broker:
        side = Far(link, broker.bootstrap_servers, 2.0 if quick else 6.0, 6.0 if quick else 25.0)
        for number in range(1 if quick else 3):
            for name, codec in CODECS.items():
                rows[name].append(side.measure(*UPLINK, f"learner.codec={codec}"))
                print(f"round {number}: {name}: {_shown(rows[name][-1])}", flush=True)
            pair = [side.measure(*DOWNLINK, f"parameter_server.weights_codec={mode}") for mode in ("fp32", "delta")]
            downlink.append(pair[1]["updates_per_s"] / pair[0]["updates_per_s"])
            print(f"round {number}: window 8, fp32 snapshots: {_shown(pair[0])}; deltas: {_shown(pair[1])}", flush=True)
    figures: dict[str, object] = {}
    for name, rounds in rows.items():
        ratios = [
            one["updates_per_s"] / other["updates_per_s"] for one, other in zip(rounds, rows["fp32"], strict=True)
        ]
        figures[name] = {
            "updates_per_s": round(statistics.median(one["updates_per_s"] for one in rounds), 2),
            "bytes_per_update": round(statistics.median(one["bytes_per_update"] for one in rounds)),
            "speedup": round(statistics.median(ratios), 2),
            "score_ratio": None,
        }
    figures["downlink_delta_speedup"] = round(statistics.median(downlink), 2)
    return figures


def _shown(row: dict[str, float]) -> str:
    return (
        f"{row['updates_per_s']:.2f} updates/s, {row['bytes_per_update']:,.0f} bytes up and"
        f" {row['down_bytes_per_update']:,.0f} down an update"
    )


def main() -> None:
    """See the file's head."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    parser.add_argument("--scores", action="store_true", help="scores on catch-pixels instead of speed")
    parser.add_argument("--seeds", type=int, default=5, help="of --scores")
    parser.add_argument("--inner", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.inner:
        print(json.dumps(inner(*options.inner, options.quick)))
        return
    if options.scores:
        from benchmarks.network_scores import scores

        print(json.dumps(scores(1 if options.quick else options.seeds, 200 if options.quick else 4000)))
        return
    if lacking := missing():
        print(f"skipped: this benchmark needs {lacking}")
        print(json.dumps({**dict.fromkeys(CODECS), "downlink_delta_speedup": None}))
        return
    with ShapedLink(MEGABIT_PER_S) as link:
        words = [sys.executable, "-m", "benchmarks.network", "--inner", link.near, link.far, link._ends[1]]
        words += ["--quick"] if options.quick else []
        raise SystemExit(subprocess.run(link.command_in(link.near, *words), check=False).returncode)


if __name__ == "__main__":
    main()
