"""Roles that should be there, and lag against the bounds the system acts on."""

from __future__ import annotations

from collections.abc import Iterator

from gorila.doctor.evidence import Evidence
from gorila.doctor.finding import Finding
from gorila.run_state import PartitionLag, duration, role_states, waits

MANY = 4
_WRITERS = {"transitions": "actors", "batches": "replay", "gradients": "learners"}


def flow_findings(evidence: Evidence) -> Iterator[Finding]:
    """All of this file."""
    yield from _roles(evidence)
    yield from _lags(evidence)
    for sentence in waits(evidence.second, evidence.config, evidence.progress, {}):
        yield Finding("waiting", "note", sentence, "flow control at work: the reader named is the one to speed up")


def _done(evidence: Evidence) -> bool:
    limits = evidence.config.run
    return bool(limits.max_env_steps and evidence.progress.env_steps >= limits.max_env_steps)


def _roles(evidence: Evidence) -> Iterator[Finding]:
    state = evidence.second
    if not state.running:
        quiet = state.quiet_s
        since = f"newest record {duration(quiet)} ago" if quiet is not None else "nothing was ever written"
        yield Finding("roles", "note", f"the run does not run: {since}, no member in any group", "roles are not judged")
        return
    roles = role_states(state, evidence.config, evidence.progress, evidence.newest_evaluation_ms)
    down = [role for role in roles if role.state == "down" and not (role.name.startswith("actor-") and _done(evidence))]
    for role in down[:MANY]:
        kind, _, index = role.name.rpartition("-")
        yield Finding(
            "roles",
            "wrong",
            f"{role.name} is down: {role.why}",
            f"its log says why; start it: gorila {kind} --run {evidence.run} --index {index}",
        )
    if len(down) > MANY:
        yield Finding("roles", "wrong", f"{len(down) - MANY} more roles are down", f"gorila top --run {evidence.run}")
    if not down:
        yield Finding("roles", "fine", "up: " + ", ".join(f"{r.name}" for r in roles if r.state in ("up", "waits")))


def _lags(evidence: Evidence) -> Iterator[Finding]:
    before = {(lag.group, lag.topic, lag.partition): lag for lag in evidence.first.lags}
    troubled: list[tuple[PartitionLag, Finding]] = []
    for lag in evidence.second.lags:
        finding = _lag(evidence, lag, before.get((lag.group, lag.topic, lag.partition)))
        if finding is not None:
            troubled.append((lag, finding))
    troubled.sort(key=lambda pair: -pair[0].records)
    yield from (finding for _, finding in troubled[: 2 * MANY])
    if len(troubled) > 2 * MANY:
        yield Finding(
            "lag", "wrong", f"{len(troubled) - 2 * MANY} more partitions are behind", f"gorila top --run {evidence.run}"
        )
    if not troubled:
        worst: dict[str, PartitionLag] = {}
        for lag in evidence.second.lags:
            if lag.group not in worst or lag.records > worst[lag.group].records:
                worst[lag.group] = lag
        shown = ", ".join(f"{group} {lag.records} of {lag.bound}" for group, lag in worst.items())
        yield Finding("lag", "fine", f"worst partition of each group against its bound: {shown}")


def _lag(evidence: Evidence, lag: PartitionLag, before: PartitionLag | None) -> Finding | None:
    where = f"group {lag.group}, {lag.topic} partition {lag.partition}"
    if lag.committed is not None and lag.committed < lag.start:
        lost = lag.start - lag.committed
        server = lag.topic == "gradients"
        return Finding(
            "lag",
            "wrong" if server else "advice",
            f"{where}: committed {lag.committed}, but the log begins at {lag.start}",
            "the server stops rather than skip gradients: longer retention on gradients, or fork the run from a checkpoint"
            if server
            else f"{lost} records were deleted unread: longer retention on {lag.topic}, or a faster reader",
        )
    stuck = before is not None and before.committed == lag.committed and lag.records > 0 and before.records > 0
    if not stuck or lag.records < lag.bound // 2:
        return None
    if not evidence.second.running:
        return Finding(
            "lag",
            "note",
            f"{where}: {lag.records} records unread, bound {lag.bound}",
            "they are read when its role is started again",
        )
    return Finding(
        "lag",
        "wrong",
        f"{where}: {lag.records} records behind (bound {lag.bound}) and its committed offset stands still at {lag.committed}",
        f"the role that reads is down or stuck, {_WRITERS[lag.topic]} wait for it: see roles, its log, and /healthz",
    )
