"""The reference's checklist (shared/reference.md): PS CPU < 60 %, learner utilisation > 85 %, new:old as set, cosine > .99; and staleness (rules.md 18)."""

from __future__ import annotations

import math
from collections.abc import Iterator

from gorila.doctor.evidence import Evidence
from gorila.doctor.finding import Finding

MOST_SERVER_CPU = 0.60
LEAST_BUSY = 0.85
LEAST_COSINE = 0.99
NEW_SHARE_OFF = 0.05
DROPPED_SHARE = 0.01


def reference_findings(evidence: Evidence) -> Iterator[Finding]:
    """All of this file."""
    yield _server_cpu(evidence)
    yield _utilisation(evidence)
    yield _new_share(evidence)
    yield _cosine(evidence)
    yield _staleness(evidence)


def _server_cpu(evidence: Evidence) -> Finding:
    check = "PS CPU < 60 %"
    if not evidence.server_cpu:
        return Finding(
            check,
            "note",
            "not measurable from here",
            "no parameter server of the run on this machine: see gorila_cpu_seconds_total",
        )
    shown = ", ".join(f"{name} {share:.0%}" for name, share in evidence.server_cpu.items())
    if max(evidence.server_cpu.values()) > MOST_SERVER_CPU:
        return Finding(check, "advice", f"of one core: {shown}", "more parameter_server.shards, or a faster codec")
    return Finding(check, "fine", f"of one core: {shown}")


def _utilisation(evidence: Evidence) -> Finding:
    check = "learner utilisation > 85 %"
    if not evidence.busy:
        return Finding(check, "note", "no learner has reported")
    shown = ", ".join(f"{name} {share:.0%}" for name, share in list(evidence.busy.items())[:8])
    if min(evidence.busy.values()) > LEAST_BUSY:
        return Finding(check, "fine", shown)
    empty = not any(lag.records for lag in evidence.second.lags if lag.topic == "batches")
    window = evidence.config.learner.max_in_flight
    do = (
        "no batch waits for them: more actors, a higher replay.samples_per_insert, or fewer learners"
        if empty
        else f"batches wait, so they wait for weights: a larger learner.max_in_flight (now {window}) costs staleness"
    )
    return Finding(check, "advice", shown, do)


def _new_share(evidence: Evidence) -> Finding:
    check, target, share = "new:old as set", evidence.config.replay.target_new_share, evidence.progress.new_share
    shown = f"{share:.2f} of drawn rows are new" if math.isfinite(share) else "not measured yet"
    if target is None:
        return Finding(check, "note", f"{shown}; no target set", "replay.target_new_share = 0.8 is the reference's 4:1")
    if not math.isfinite(share):
        return Finding(check, "note", shown)
    if abs(share - target) > NEW_SHARE_OFF:
        return Finding(
            check,
            "advice",
            f"{shown}, target {target:.2f}",
            "too few rows are new or old yet, or replay has just restarted",
        )
    return Finding(check, "fine", f"{shown}, target {target:.2f}")


def _cosine(evidence: Evidence) -> Finding:
    check = "cosine similarity > .99"
    if not evidence.cosine:
        return Finding(check, "note", "not measurable: no whole fp32 snapshots, or no learner has reported")
    shown = ", ".join(f"{name} {value:.4f}" for name, value in list(evidence.cosine.items())[:8])
    if min(evidence.cosine.values()) < LEAST_COSINE:
        return Finding(
            check, "advice", shown, "learners hold old weights: a smaller learner.max_in_flight, a lower learning rate"
        )
    return Finding(check, "fine", f"each learner's weights and the newest: {shown}")


def _staleness(evidence: Evidence) -> Finding:
    check = "staleness"
    p50, p99 = evidence.progress.staleness_percentile(50), evidence.progress.staleness_percentile(99)
    if p50 is None or p99 is None:
        return Finding(check, "note", "no gradient applied yet")
    config = evidence.config
    bound = config.parameter_server.staleness_bound(config.learner.count, config.learner.max_in_flight)
    share = evidence.dropped_stale / max(1, evidence.applied + evidence.dropped_stale)
    shown = f"p50 {p50:g}, p99 {p99:g} updates, bound {bound or 'none'}; {evidence.dropped_stale} gradients dropped ({share:.1%})"
    if share > DROPPED_SHARE or (bound and p99 > bound / 2):
        # The article advises more learners; staleness is about learners times window, so that is backwards (rules.md 18).
        return Finding(
            check, "advice", shown, "fewer learners (learner.count), or a smaller window (learner.max_in_flight)"
        )
    return Finding(check, "fine", shown)
