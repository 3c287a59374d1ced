"""What benchmarks.chaos says at the end: the table, the state at rest, and what else must hold."""

from __future__ import annotations

import statistics
import time
from collections import defaultdict

import numpy as np

from benchmarks.chaos_injection import Injector
from benchmarks.fleet import Fleet
from gorila.messages import ReplayStats
from gorila.run_record import read_all

QUIET_S = 120.0
AT_REST_S = 12.0  # the replay looks at the log's beginning every 10 s
MEMORY_BOUND_MIB = 1024.0


class Table:
    """What happened, by kind."""

    def __init__(self) -> None:
        self.healthy_s: dict[str, list[float]] = defaultdict(list)
        self.lost: dict[str, int] = defaultdict(int)
        self.doubled: dict[str, int] = defaultdict(int)

    def row(self, kind: str, healthy_s: float, lost: int, doubled: int) -> None:
        """One more."""
        self.healthy_s[kind].append(healthy_s)
        self.lost[kind] += lost
        self.doubled[kind] += doubled

    def __str__(self) -> str:
        lines = [f"{'fault':16} {'times':>6} {'healthy p50':>12} {'max':>7} {'lost':>6} {'doubled':>8}"]
        for kind, times in sorted(self.healthy_s.items()):
            p50, most = (f"{statistics.median(times):.1f} s", f"{max(times):.1f} s") if times else ("-", "-")
            lines.append(f"{kind:16} {len(times):6} {p50:>12} {most:>7} {self.lost[kind]:6} {self.doubled[kind]:8}")
        return "\n".join(lines)


def at_rest(fleet: Fleet, quiet_s: float) -> tuple[dict[int, int], dict[int, float]]:
    """Stop the actors, wait until nothing moved for so long; (sampleable rows, priority mass) by partition as the replay process tells them."""
    killed = fleet.stop_roles(*(role.name for role in fleet.roles if role.role == "actor"))
    if killed:
        print(f"did not stop within 4 s: {', '.join(killed)}")
    last, since_s, until_s = None, time.monotonic(), time.monotonic() + QUIET_S
    while time.monotonic() - since_s < quiet_s:
        fleet.live(0.5)
        ends = [fleet.admin.end_offsets([(fleet.service.topic(t), 0)]) for t in ("batches", "priorities", "gradients")]
        now = (ends, fleet.progress.env_steps, sum(lag.records for lag in fleet.follower.lags()))
        if now != last:
            last, since_s = now, time.monotonic()
        if time.monotonic() > until_s:
            print("the run does not come to rest")
            break
    stats = None
    for record in read_all(fleet.cluster, fleet.service.topic("replay-stats")):
        if record.key == b"replay-0":
            stats = fleet.service.schemas.expect(record.value, ReplayStats)
    assert stats is not None
    actors = [int(actor) for actor in stats.actors]
    return dict(zip(actors, stats.sampleable.tolist(), strict=True)), dict(
        zip(actors, stats.mass.tolist(), strict=True)
    )


def verdicts(fleet: Fleet, injector: Injector) -> list[str]:
    """What else must hold; a line for each that does not."""
    wrong = [f"Kafka refused a record of a wrong clock: {line}" for line in injector.refused[:5]]
    largest: dict[str, float] = defaultdict(float)
    for name, readings in fleet.rss.items():
        process = name.split("/")[0]
        largest[process] = max(largest[process], *(mebibytes for _, mebibytes in readings))
    print("largest RSS, MiB: " + ", ".join(f"{name} {mebibytes:.0f}" for name, mebibytes in sorted(largest.items())))
    wrong += [f"{name} took {mebibytes:.0f} MiB" for name, mebibytes in largest.items() if mebibytes > MEMORY_BOUND_MIB]
    window = min(100, len(fleet.returns) // 3)
    if window < 10:
        wrong.append(f"only {len(fleet.returns)} episodes were played")
    else:
        means = np.convolve(fleet.returns, np.full(window, 1 / window), "valid")
        print(
            f"mean return of the first {window} episodes {means[0]:.1f}, of the best {means.max():.1f}, of the last {means[-1]:.1f}, of {len(fleet.returns)} in all"
        )
        # One that had learned may have forgotten: left alone beyond what solves it, the preset's rate does that without any fault too (results/faults_….md).
        if means[-1] <= means[0] and means.max() < 2 * means[0]:
            wrong.append(
                f"it does not learn: {means[0]:.1f} at first, {means.max():.1f} at best, {means[-1]:.1f} at the end"
            )
    print(
        f"dead letters {fleet.follower.dead_letters()} (garbage written: {injector.poisoned}), largest lag {fleet.max_lag} records"
    )
    return wrong
