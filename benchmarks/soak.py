"""A run left alone for long: does anything grow?

    python -m benchmarks.soak [--minutes 30] [--preset catch-pixels] [--quick]

The preset as it ships, never solved, with the embedded broker; every role a process of its own on this machine. One reading of every process's resident memory a
second, of all lags every two. rss_slope_mb_per_min_max is the steepest of the lines through the readings after the warm-up (a fifth of the time, one to six
minutes: rings fill, kernels are compiled, the JVM takes its heap); max_lag_records the largest lag of any partition after it. A role that ends is an error.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from pathlib import Path

import numpy as np

from benchmarks.fleet import Fleet
from gorila.errors import GorilaError
from gorila.settings import load_config

LAGS_EVERY_S = 2.0
PATIENCE_S = 240.0
READINGS = 10


def slope_mb_per_min(readings: list[tuple[float, float]]) -> float:
    """Of the least-squares line through (seconds, MiB)."""
    times, mebibytes = np.array(readings).T
    return float(np.polyfit(times - times[0], mebibytes, 1)[0]) * 60


def warm_up_s(minutes: float) -> float:
    """Seconds that do not count."""
    return min(360.0, max(60.0 if minutes > 2 else 10.0, minutes * 60 / 5))


def soak(fleet: Fleet, minutes: float) -> dict[str, float | int | None]:
    """The figures."""
    fleet.open()
    _, sick = fleet.until_healthy(fleet.mark(), PATIENCE_S)
    if sick:
        raise SystemExit(f"the run does not begin: {sick}")
    began_s = time.monotonic()
    counts_from_s, lags = began_s + warm_up_s(minutes), []
    while (now_s := time.monotonic()) < began_s + minutes * 60:
        fleet.live(LAGS_EVERY_S)
        if fleet.ended:
            raise SystemExit("\n".join(fleet.ended))
        if now_s < counts_from_s:
            fleet.max_lag = 0
            continue
        fleet.look_at_lags()
        lags.append(fleet.max_lag)
    slopes: dict[str, float] = {}
    print(f"{'process':20} {'MiB, first':>11} {'last':>7} {'MB/min':>8}")
    for name, readings in sorted(fleet.rss.items()):
        counted = [reading for reading in readings if reading[0] >= counts_from_s]
        if len(counted) >= READINGS:
            slopes[name] = slope_mb_per_min(counted)
            print(f"{name:20} {counted[0][1]:11.1f} {counted[-1][1]:7.1f} {slopes[name]:8.3f}")
    print(f"{fleet.progress.updates} updates, {fleet.progress.env_steps} environment steps")
    return {
        "minutes": minutes,
        "rss_slope_mb_per_min_max": round(max(slopes.values()), 3),
        "max_lag_records": max(lags, default=0),
        "dead_letters": fleet.follower.dead_letters(),
        "updates": fleet.progress.updates,
    }


def main() -> None:
    """See the file's head."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0)
    parser.add_argument("--preset", default="catch-pixels")
    parser.add_argument("--quick", action="store_true", help="half a minute: says little about growth")
    options = parser.parse_args()
    minutes = 0.5 if options.quick else options.minutes
    config = load_config(options.preset, ("evaluator.threshold=none", "run.max_updates=0"), {})
    with tempfile.TemporaryDirectory() as folder:
        fleet = Fleet("soak", config, Path(folder) / "state", Path(folder) / "broker", None)
        try:
            figures = soak(fleet, minutes)
        except GorilaError as error:
            raise SystemExit(str(error)) from None
        finally:
            fleet.close()
    print(json.dumps(figures))


if __name__ == "__main__":
    main()
