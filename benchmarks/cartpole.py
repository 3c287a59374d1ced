"""CartPole-v1 solved by the whole loop, side by side with Stable-Baselines3's DQN under its zoo settings.

    python -m benchmarks.cartpole --seeds 5             # floor: 5 of 5, at most 120 s each, round trip at most 5 ms
    python -m benchmarks.cartpole --seeds 5 --no-peer   # without SB3
    python -m benchmarks.cartpole --quick               # one seed, 300 updates, no peer: does it run

"Solved" is the same for both: a greedy mean >= 475 over 20 episodes, then over 100 fresh ones with the same weights. SB3 is evaluated every
2,000 steps; its evaluation time counts, as ours does. Seeds are run in turn, ours then theirs, so that a drifting machine hits both.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

from gorila.local.train import INTERRUPTED, train
from gorila.settings import load_config

THRESHOLD = 475.0


def ours(seed: int, quick: bool, root: Path) -> dict[str, float | bool | None]:
    """One run of the preset as `gorila train` does it."""
    sets = [f"run.seed={seed}"] + (["run.max_updates=300"] if quick else [])
    summary = train(load_config("cartpole", sets), root=root)
    if summary.ended_because == INTERRUPTED:
        raise SystemExit(130)
    return {
        "solved": summary.solved,
        "wall_s": summary.train_wall_s,
        "eval_return_mean": summary.eval_return_mean,
        "round_trip_ms_p50": summary.round_trip_ms_p50,
        "updates": summary.updates,
        "env_steps": summary.env_steps,
    }


def sb3_wall_s(seed: int, step_limit: int = 200_000) -> float | None:
    """Seconds until solved; None when it was not within the limit, or SB3 is not installed."""
    try:
        import gymnasium
        from stable_baselines3 import DQN
        from stable_baselines3.common.callbacks import BaseCallback
        from stable_baselines3.common.evaluation import evaluate_policy
        from stable_baselines3.common.monitor import Monitor
    except ImportError:
        return None
    judge = Monitor(gymnasium.make("CartPole-v1"))

    class StopWhenSolved(BaseCallback):
        solved = False

        def _on_step(self) -> bool:
            if self.num_timesteps % 2_000:
                return True
            mean, _ = evaluate_policy(self.model, judge, n_eval_episodes=20, deterministic=True)
            if mean >= THRESHOLD:
                confirmed, _ = evaluate_policy(self.model, judge, n_eval_episodes=100, deterministic=True)
                self.solved = bool(confirmed >= THRESHOLD)
            return not self.solved

    # rl-baselines3-zoo, hyperparams/dqn.yml, CartPole-v1. Its exploration falls over 16 % of 50,000 steps: the same number of steps here.
    model = DQN(
        "MlpPolicy",
        gymnasium.make("CartPole-v1"),
        learning_rate=2.3e-3,
        batch_size=64,
        buffer_size=100_000,
        learning_starts=1000,
        gamma=0.99,
        target_update_interval=10,
        train_freq=256,
        gradient_steps=128,
        exploration_fraction=0.16 * 50_000 / step_limit,
        exploration_final_eps=0.04,
        policy_kwargs={"net_arch": [256, 256]},
        seed=seed,
        device="cpu",
    )
    watcher = StopWhenSolved()
    started = time.monotonic()
    model.learn(step_limit, callback=watcher)
    return time.monotonic() - started if watcher.solved else None


def main() -> None:
    """Print what happens, then one JSON object."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--first-seed", type=int, default=0)
    parser.add_argument("--no-peer", action="store_true")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--runs-dir", type=Path, default=None)
    arguments = parser.parse_args()
    seeds = range(arguments.first_seed, arguments.first_seed + (1 if arguments.quick else arguments.seeds))
    results, peers = [], []
    with tempfile.TemporaryDirectory() as scratch:
        for seed in seeds:
            result = ours(seed, arguments.quick, arguments.runs_dir or Path(scratch))
            print(f"seed {seed}: {result}", flush=True)
            results.append(result)
            if not arguments.no_peer and not arguments.quick:
                peer = sb3_wall_s(seed)
                print(f"seed {seed}: SB3 {peer and round(peer, 1)} s", flush=True)
                peers.append(peer)
    walls = [r["wall_s"] for r in results if r["solved"] and r["wall_s"] is not None]
    means = [r["eval_return_mean"] for r in results if r["eval_return_mean"] is not None]
    trips = [r["round_trip_ms_p50"] for r in results if r["round_trip_ms_p50"] is not None]
    theirs = [p for p in peers if p is not None]
    print(
        json.dumps(
            {
                "seeds": len(results),
                "solved_seeds": sum(bool(r["solved"]) for r in results),
                "train_wall_s_median": statistics.median(walls) if walls else None,
                "train_wall_s_max": max(walls) if walls else None,
                "eval_return_mean_min": min(means) if means else None,
                "sb3_solved_seeds": len(theirs) if peers else None,
                "sb3_wall_s_median": statistics.median(theirs) if theirs else None,
                "speedup_vs_sb3": statistics.median(theirs) / statistics.median(walls) if theirs and walls else None,
                "round_trip_ms_p50": statistics.median(trips) if trips else None,
            }
        )
    )


if __name__ == "__main__":
    main()
