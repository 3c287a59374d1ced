"""What each codec's preset scores on catch-pixels: `python -m benchmarks.network --scores [--seeds N]`.

Each codec trains by its own preset (which names server optimiser and rate), to the same number of updates, never stopped early; seeds in turn, codecs interleaved.
score_ratio: catch rate of the *last* weights over 500 fresh greedy episodes, mean over seeds, over that of fp32.
curve_mean: mean over the evaluations during the run (the area under the learning curve), reported beside.
"""

from __future__ import annotations

import statistics
import tempfile
from pathlib import Path

from gorila.kafka import Cluster
from gorila.local.broker import Broker
from gorila.local.train import describe_environment, train
from gorila.messages import Evaluation
from gorila.policy import evaluate_file, save_weights
from gorila.run_record import delete_run, read_all
from gorila.service import open_service
from gorila.settings import load_config
from gorila.weights_follower import WeightsFollower

PRESETS = {
    "fp32": "catch-pixels",
    "fp16": "catch-pixels-fp16",
    "one_bit": "catch-pixels-one-bit",
    "top_k": "catch-pixels-top-k",
}
EPISODES = 500


def catch_rate(return_mean: float) -> float:
    """+1 caught, -1 missed."""
    return (1 + return_mean) / 2


def score(preset: str, seed: int, updates: int, servers: str, folder: Path) -> tuple[float, float]:
    """(final catch rate, mean of the curve) of one run."""
    run = f"{preset}-{seed}"
    settings = (f"run.seed={seed}", f"run.max_updates={updates}", "evaluator.threshold=none", f"kafka.bootstrap_servers={servers}", "evaluator.min_versions=0")  # fmt: skip
    config = load_config(preset, settings, {})
    summary = train(config, run=run, root=folder)
    if summary.dead_letters or summary.restarts:
        raise SystemExit(f"{run}: {summary.dead_letters} dead letters, {summary.restarts} restarts")
    service = open_service("bench", run, 0, servers, environ={})
    follower = WeightsFollower(service, targets=False)
    while follower.view.version < 0:
        follower.poll(0.5)
    path = folder / f"{run}.safetensors"
    save_weights(path, follower.view.flat(), follower.view.version, config, describe_environment(config))
    follower.close()
    cluster = Cluster(servers)
    records = [service.schemas.decode(record.value) for record in read_all(cluster, service.topic("episodes"))]
    curve = [catch_rate(message.return_mean) for message in records if isinstance(message, Evaluation)]
    delete_run(cluster, run)
    final = catch_rate(evaluate_file(path, EPISODES, 0.0, 10_000 + seed)["return_mean"])
    return final, statistics.mean(curve) if curve else 0.0


def scores(seeds: int, updates: int) -> dict[str, object]:
    """Figures by codec."""
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in PRESETS}
    with tempfile.TemporaryDirectory() as folder, Broker(Path(folder) / "broker") as broker:
        servers = broker.start().bootstrap_servers
        for seed in range(seeds):
            for name, preset in PRESETS.items():
                taken[name].append(score(preset, seed, updates, servers, Path(folder)))
                final, curve = taken[name][-1]
                print(f"seed {seed}: {name}: caught {final:.3f} at the end, {curve:.3f} over the curve", flush=True)
    reference = statistics.mean(final for final, _ in taken["fp32"])
    return {
        name: {
            "score": round(statistics.mean(final for final, _ in pairs), 4),
            "score_ratio": round(statistics.mean(final for final, _ in pairs) / reference, 4),
            "score_min": round(min(final for final, _ in pairs), 4),
            "curve_mean": round(statistics.mean(curve for _, curve in pairs), 4),
            "updates": updates,
            "seeds": seeds,
        }
        for name, pairs in taken.items()
    }
