"""CartPole learned from recordings of an online run, as `gorila train --offline` does it.

    python -m benchmarks.offline [--seeds 1] [--updates 8000] [--quick]

For each seed: an online run to the end; then, from its topics and without actors,
1. everything, from offset 0, with the preset as it is;
2. its last 10,000 transitions, with a conservative weight (CQL) of 0.5: there the early exploration is missing (rules.md 21).
What is compared is the run's weights.safetensors (the evaluator's best) over 100 fresh episodes. Floor: the first reaches 90 % of the online run's.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from gorila.codec import Schemas
from gorila.kafka import Cluster
from gorila.local.broker import Broker
from gorila.local.train import train
from gorila.messages import TransitionBlock
from gorila.offline import OfflineReplay
from gorila.policy import WEIGHTS_FILE, evaluate_file
from gorila.recording import KafkaRecording, Range
from gorila.settings import load_config

FRESH_SEED = 1_000_003
LAST_ROWS = 10_000
CONSERVATIVE_WEIGHT = 0.5


def mean_return(root: Path, run: str, episodes: int) -> float:
    """Of the run's best weights, greedy, over episodes it never played."""
    return float(evaluate_file(root / run / WEIGHTS_FILE, episodes, None, FRESH_SEED)["return_mean"])


def last_rows(cluster: Cluster, run: str, rows: int) -> str:
    """The source that begins about `rows` transitions before the end of a run with one actor."""
    recording = KafkaRecording(cluster, run, Range(), Schemas())
    counts: list[tuple[int, int]] = []
    for recorded in recording.records("transitions"):
        if isinstance(recorded.message, TransitionBlock):
            counts.append((recorded.offset, len(recorded.message.action)))
    recording.close()
    held = 0
    for offset, count in reversed(counts):
        held += count
        if held >= rows:
            return f"kafka:{run}@{offset}.."
    return f"kafka:{run}"


def one_seed(
    seed: int, online_updates: int, updates: int, episodes: int, cluster: Cluster, root: Path
) -> dict[str, float]:
    """Mean returns of the three runs. `online_updates`: 0: until solved."""
    sets = [f"run.seed={seed}", f"kafka.bootstrap_servers={cluster.bootstrap_servers}"]
    online = train(
        load_config("cartpole", [*sets, f"run.max_updates={online_updates}"]), run=f"online-{seed}", root=root
    )
    result = {"online": mean_return(root, online.run, episodes)}
    late = last_rows(cluster, online.run, LAST_ROWS)
    cases = {
        "offline": (f"kafka:{online.run}", []),
        "offline_late_conservative": (late, [f"learner.conservative_weight={CONSERVATIVE_WEIGHT}"]),
    }
    for name, (source, more) in cases.items():
        config = load_config("cartpole", [*sets, *more, f"run.max_updates={updates}"])
        run = f"{name.replace('_', '-')}-{seed}"
        train(config, run=run, root=root, offline=OfflineReplay.asked(source, updates))
        result[name] = mean_return(root, run, episodes)
    print(f"seed {seed}: {result}", flush=True)
    return result


def main() -> None:
    """Print what happens, then one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--updates", type=int, default=8_000)
    parser.add_argument("--quick", action="store_true", help="a smoke run: it is not waited until anything is learned")
    given = parser.parse_args()
    online_updates, updates, episodes = (300, 200, 5) if given.quick else (0, given.updates, 100)
    results: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as folder, Broker(Path(folder) / "broker") as broker:
        cluster = Cluster(broker.start().bootstrap_servers)
        for seed in range(1 if given.quick else given.seeds):
            results.append(one_seed(seed, online_updates, updates, episodes, cluster, Path(folder) / "runs"))
    ratios = [result["offline"] / result["online"] for result in results]
    late = [result["offline_late_conservative"] / result["online"] for result in results]
    print(
        json.dumps(
            {
                "seeds": len(results),
                "online_return": statistics.mean(result["online"] for result in results),
                "offline_ratio_min": min(ratios),
                "offline_ratio_median": statistics.median(ratios),
                "late_conservative_ratio_min": min(late),
                "late_conservative_ratio_median": statistics.median(late),
            }
        )
    )


if __name__ == "__main__":
    main()
