"""What the runtime's way of waiting costs: produce → process against a bare consumer, and an idle role's share of a core.

    python -m benchmarks.runtime_wait [--quick]

Variants are measured in turn on one broker, each with a fresh topic; the round repeats. The last line is one JSON object, milliseconds and percent.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from pathlib import Path

import psutil

from gorila.codec import Schemas
from gorila.inputs import Input
from gorila.kafka import Cluster, NewTopic
from gorila.local.broker import Broker
from gorila.messages import Episode
from gorila.processor import Incoming, Outgoing
from gorila.runtime import Runtime
from gorila.testing.driver import MemoryService
from gorila.testing.relay import Relay, episode

WARM_UP = 100
SCHEMAS = Schemas()
ASSIGNED, GROUP, NEWEST = Input("batches", how="assigned"), Input("batches"), Input("weights", how="newest")
# name: inputs, topics written in turn, topics not wanted, answers tagged (an acknowledgement is awaited beside the input)
VARIANTS: dict[str, tuple[list[Input], list[str], set[str], bool]] = {
    "one_input": ([ASSIGNED], ["batches"], set(), False),
    "one_input_and_acknowledgements": ([ASSIGNED], ["batches"], set(), True),
    "two_inputs": ([NEWEST, GROUP], ["batches", "weights"], set(), False),
    "two_inputs_one_wanted": ([NEWEST, GROUP], ["weights"], {"batches"}, False),
}


class Timed(Relay):
    """Notes when each record came to hand."""

    def __init__(self, tagged: bool) -> None:
        super().__init__(tagged=tagged)
        self.seen: dict[int, float] = {}

    def process(self, record: Incoming) -> list[Outgoing]:
        assert isinstance(record.message, Episode)
        self.seen[record.message.lane] = time.perf_counter()
        return list(super().process(record))


def fresh(servers: str) -> tuple[str, Cluster]:
    run, cluster = f"wait-{uuid.uuid4().hex[:8]}", Cluster(servers)
    names = ("batches", "weights", "priorities")
    cluster.admin().create_topics([NewTopic(f"{run}.{name}", 1, 1, {}) for name in names])
    return run, cluster


def feed(cluster: Cluster, run: str, topics: list[str], records: int, seen: dict[int, float]) -> list[float]:
    """Milliseconds from produce to hand, one record every 5 to 9 ms."""
    producer, sent = cluster.producer(), {}
    for number in range(WARM_UP + records):
        value = SCHEMAS.encode(episode(number))
        sent[number] = time.perf_counter()
        producer.send(f"{run}.{topics[number % len(topics)]}", value, partition=0, key=str(number).encode())
        producer.flush(5.0)
        time.sleep(0.005 + number % 7 * 0.0006)
    time.sleep(0.2)
    producer.close()
    return [(seen[n] - sent[n]) * 1000 for n in range(WARM_UP, WARM_UP + records) if n in seen]


def bare(servers: str, records: int) -> list[float]:
    run, cluster = fresh(servers)
    consumer, seen, stop = cluster.consumer(), {}, threading.Event()
    consumer.assign({(f"{run}.batches", 0): 0})

    def read() -> None:
        while not stop.is_set():
            for record in consumer.poll_many(500, 0.1):
                message = SCHEMAS.decode(record.value)
                assert isinstance(message, Episode)
                seen[message.lane] = time.perf_counter()

    thread = threading.Thread(target=read)
    thread.start()
    latencies = feed(cluster, run, ["batches"], records, seen)
    stop.set()
    thread.join()
    consumer.close()
    return latencies


def variant(servers: str, name: str, records: int, idle_s: float) -> tuple[list[float], float]:
    inputs, topics, unwanted, tagged = VARIANTS[name]
    run, cluster = fresh(servers)
    service, role = MemoryService(cluster, run=run), Timed(tagged)
    role.unwanted = unwanted
    thread = threading.Thread(target=Runtime(service, role, inputs).run)
    thread.start()
    while len(role.moves) < len(inputs):
        time.sleep(0.01)
    latencies = feed(cluster, run, topics, records, role.seen)
    time.sleep(1.5)
    process = psutil.Process()
    before, began_s = process.cpu_times(), time.perf_counter()
    time.sleep(idle_s)
    after = process.cpu_times()
    idle = 100 * (after.user + after.system - before.user - before.system) / (time.perf_counter() - began_s)
    service.stop.set()
    thread.join()
    return latencies, idle


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="a smoke run")
    quick: bool = parser.parse_args().quick
    rounds, records, idle_s = (1, 50, 0.5) if quick else (3, 300, 3.0)
    latencies: dict[str, list[float]] = {"bare": [], **{name: [] for name in VARIANTS}}
    idle: dict[str, list[float]] = {name: [] for name in VARIANTS}
    p50: Callable[[list[float]], float] = statistics.median
    broker = Broker(Path(tempfile.mkdtemp()))
    servers = broker.start().bootstrap_servers
    try:
        for number in range(rounds):
            latencies["bare"] += bare(servers, records)
            for name in VARIANTS:
                measured, percent = variant(servers, name, records, idle_s)
                latencies[name] += measured
                idle[name].append(percent)
                print(f"round {number}: {name} p50 {p50(measured):.2f} ms, idle {percent:.1f} % of a core", flush=True)
    finally:
        broker.stop()
    result = {f"{name}_ms_p50": round(p50(values), 2) for name, values in latencies.items()}
    result |= {f"{name}_idle_percent": round(p50(values), 1) for name, values in idle.items()}
    print(json.dumps(result))


if __name__ == "__main__":
    main()
