"""Steps a second of the actor on real Pong, against the bare environment and network loop.

    python -m benchmarks.actor [--quick] [--seconds S] [--bootstrap-servers HOST:PORT]

The actor's side is the product's own: lanes, stacking, epsilon-greedy on the Nature network with q_taken and q_max, rows, zstd blocks, Avro, and
the producer's send and acknowledgements on a real broker (the one named, or an embedded one started for this). The bare side: AtariVectorEnv with
its own C++ stack, the same network, argmax and nothing else. 8 lanes each, one torch thread, one emulator thread, interleaved in short
rounds. The ratio is the median over pairs of neighbouring rounds, so that a machine busy with other work moves both sides of a pair alike; `cpu_ratio` is the same of processor time over all threads, the producer's included.
Bytes are value, key, and record and batch headers as if every record travelled alone, over the environment steps taken.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from gorila.codec import Schemas
from gorila.config import Config
from gorila.environments import describe, make_lanes
from gorila.errors import GorilaError
from gorila.kafka import Cluster
from gorila.metrics import Metrics
from gorila.network import build_network, flat_from
from gorila.run_record import delete_run, new_topics
from gorila.settings import load_config
from gorila.source_loop import SourceLoop
from gorila.testing.driver import MemoryService
from gorila.testing.memory_log import MemoryCluster
from producers.actor import ActorCore
from producers.main import ActorSource
from producers.policy import EpsilonGreedy

ROUND_CALLS = 64  # 512 steps, about a quarter of a second: 4 blocks a lane
RECORD_BYTES, BATCH_BYTES, KEY_BYTES = 21, 61, len(b"actor-0")


class Fixed:
    """A follower whose weights never change."""

    def __init__(self, flat: NDArray[np.float32]) -> None:
        self._flat, self.version, self._news = flat, 0, True
        self.view = self

    def flat(self) -> NDArray[np.float32]:
        return self._flat

    def poll(self, timeout_s: float = 0.0) -> bool:
        news, self._news = self._news, False
        return news


def bare(config: Config, actions: int) -> Callable[[], None]:
    """The loop anyone would write: one call is ROUND_CALLS vector steps."""
    from ale_py.vector_env import AtariVectorEnv

    env = AtariVectorEnv("pong", config.actor.lanes, num_threads=1, reward_clipping=False)
    network = build_network(config, describe(config)).eval()
    rng = np.random.default_rng(0)
    state = [env.reset(seed=1)[0]]

    def play() -> None:
        for _ in range(ROUND_CALLS):
            with torch.inference_mode():
                greedy = network(torch.from_numpy(state[0])).argmax(dim=1).numpy()
            explore = rng.random(len(greedy)) < 0.1
            action = np.where(explore, rng.integers(0, actions, len(greedy)), greedy)
            state[0] = env.step(action)[0]

    return play


@contextmanager
def broker(servers: str) -> Iterator[tuple[Any, str]]:
    """(cluster, what it is): the named one, an embedded one, or none where Kafka cannot be had."""
    if servers:
        yield Cluster(servers), servers
        return
    try:
        from gorila.local.broker import Broker

        with tempfile.TemporaryDirectory() as folder, Broker(folder, port=0) as started:
            status = started.status()
            assert status is not None
            yield Cluster(status.bootstrap_servers), "embedded"
    except (GorilaError, ImportError) as error:
        print(f"no broker ({error}): records go to memory, so the producer's cost is not in the figure")
        yield MemoryCluster(), "none"


def measure(seconds: float, servers: str) -> dict[str, Any]:
    """Interleaved rounds for about `seconds`."""
    config = load_config("pong", ["actor.epsilon_start=0.1", "actor.epsilon_end=0.1"], {})
    facts = describe(config)
    network = build_network(config, facts)
    lanes = make_lanes(config, list(range(1, config.actor.lanes + 1)))
    policy = EpsilonGreedy(network, facts.actions, np.random.default_rng(0))
    core = ActorCore(config.actor, 0, "actor-0", 1, lanes, facts.stack, policy)
    with broker(servers) as (cluster, kind):
        run = f"bench-actor-{os.getpid()}"
        if isinstance(cluster, Cluster):
            cluster.admin().create_topics(
                [t for t in new_topics(run, config) if t.name.endswith((".transitions", ".episodes"))]
            )
        service = MemoryService(cluster, role="actor", run=run, name="actor-0", config=config, schemas=Schemas())
        metrics = Metrics("actor", run, "actor-0")
        loop = SourceLoop(service, ActorSource(config, core, Fixed(flat_from(network)), metrics), metrics=metrics)
        loop.open()
        try:
            play_bare = bare(config, facts.actions)
            ratios: list[float] = []
            cpu_ratios: list[float] = []
            ours_s: list[float] = []
            bare_s: list[float] = []
            while core.version < 0:
                loop.turn()

            def play_ours() -> None:
                stepped = 0
                while stepped < ROUND_CALLS:
                    stepped += loop.turn()

            play_ours()
            play_bare()
            deadline = time.perf_counter() + seconds
            while len(ratios) < 3 or time.perf_counter() < deadline:
                pair, cpu = {}, {}
                order = (play_ours, play_bare) if len(ratios) % 2 else (play_bare, play_ours)
                for play in order:
                    began, began_cpu = time.perf_counter(), time.process_time()
                    play()
                    pair[play], cpu[play] = time.perf_counter() - began, time.process_time() - began_cpu
                ratios.append(pair[play_bare] / pair[play_ours])
                cpu_ratios.append(cpu[play_bare] / cpu[play_ours])
                ours_s.append(pair[play_ours])
                bare_s.append(pair[play_bare])
            loop.drain()
            written = {t: metrics.value("records_written_total", topic=t) for t in ("transitions", "episodes")}
            values = sum(metrics.value("bytes_written_total", topic=t) for t in written)
        finally:
            loop.close()
            lanes.close()
        if isinstance(cluster, Cluster) and kind != "embedded":
            delete_run(cluster, run)
    wire_bytes = values + sum(written.values()) * (RECORD_BYTES + BATCH_BYTES + KEY_BYTES)
    steps = ROUND_CALLS * config.actor.lanes
    return {
        "steps_per_s": round(steps / statistics.median(ours_s), 1),
        "bare_steps_per_s": round(steps / statistics.median(bare_s), 1),
        "ratio": round(statistics.median(ratios), 4),
        "bytes_per_transition": round(wire_bytes / core.steps_taken, 1),
        "cpu_ratio": round(statistics.median(cpu_ratios), 4),
        "rounds": len(ratios),
        "broker": kind,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="a smoke run of a few seconds")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--bootstrap-servers", default="")
    arguments = parser.parse_args()
    logging.basicConfig(level=logging.WARNING)
    torch.set_num_threads(1)
    print("Pong, 8 lanes, Nature network, one thread each; ours and bare in turn")
    print(json.dumps(measure(4.0 if arguments.quick else arguments.seconds, arguments.bootstrap_servers)))


if __name__ == "__main__":
    main()
