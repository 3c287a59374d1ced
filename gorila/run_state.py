"""A running system as Kafka's administration tells it: lags against their bounds, members of groups, ages of newest records. Pure.

From these alone follow which roles are up and who waits for whom. What a role writes and which group it reads in are the topology's; a monitor
writes nothing to Kafka and joins no group, so it cannot be seen here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Literal

from gorila.config import Config
from gorila.kafka import GroupFacts
from gorila.run_progress import RunProgress

QUIET_S = 5.0
"""A role that writes all the time and wrote nothing for this long is not at work."""
EVALUATOR_QUIET_S = 120.0
STARVED = 0.85
"""Learner utilisation the reference asks for (reference.md, checklist)."""


@dataclass(frozen=True)
class PartitionLag:
    """One group on one partition.

    Attributes:
        group: without the run's name (`parameter-server-0-0`).
        topic: logical name.
        committed: next offset, None when nothing was committed.
        start, end: first offset in the log, next offset to be written.
        bound: records of lag above which the writer waits.
    """

    group: str
    topic: str
    partition: int
    committed: int | None
    start: int
    end: int
    bound: int

    @property
    def records(self) -> int:
        """As Kafka's tools count it; from the start of the log where nothing was committed."""
        return max(0, self.end - (self.start if self.committed is None else self.committed))


@dataclass(frozen=True)
class RunState:
    """One look.

    Attributes:
        time_ms: of this machine, when it was looked.
        newest_ms: {(logical topic, partition): time of its newest record, None where it holds none}.
        groups: by name without the run's.
    """

    run: str
    time_ms: int
    lags: tuple[PartitionLag, ...] = ()
    groups: Mapping[str, GroupFacts] = field(default_factory=dict)
    newest_ms: Mapping[tuple[str, int], int | None] = field(default_factory=dict)
    dead_letters: int = 0

    def age_s(self, topic: str, partition: int | None = None) -> float | None:
        """Since the newest record of a partition, or of a whole topic; None where there is none."""
        times = [t for (name, p), t in self.newest_ms.items() if name == topic and partition in (None, p) and t]
        return max(0.0, (self.time_ms - max(times)) / 1000) if times else None

    @property
    def quiet_s(self) -> float | None:
        """Since anything was written to the run at all."""
        ages = [age for topic, _ in self.newest_ms if (age := self.age_s(topic)) is not None]
        return min(ages, default=None)

    @property
    def running(self) -> bool:
        """Somebody writes, or reads in a group."""
        return (self.quiet_s is not None and self.quiet_s < QUIET_S) or any(g.members for g in self.groups.values())


def readers(config: Config) -> Iterator[tuple[str, str, list[int], int]]:
    """(group, topic it reads, partitions, bound in records) of every group that a writer waits for."""
    yield "replay", "transitions", list(range(config.actor.count)), config.actor.max_lag_records
    batches = config.replay.max_lag_batches * config.record_parts
    yield "learner", "batches", list(range(config.learner.count)), batches
    for shard in range(config.parameter_server.shards):
        for replica in range(config.parameter_server.replicas):
            yield f"parameter-server-{shard}-{replica}", "gradients", [shard], config.learner.max_lag_records


@dataclass(frozen=True)
class RoleState:
    """`up`: at work. `waits`: up, held up by another role. `idle`: nothing to do. `down`: should be there and is not."""

    name: str
    state: Literal["up", "waits", "idle", "down"]
    why: str = ""


def _ago(seconds: float | None) -> str:
    return "nothing written yet" if seconds is None else f"last wrote {duration(seconds)} ago"


def duration(seconds: float) -> str:
    """Short, for people."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 5400 else f"{seconds / 3600:.1f} h"


def role_states(state: RunState, config: Config, progress: RunProgress, newest_evaluation_ms: int) -> list[RoleState]:
    """Every role of the run that leaves a trace in Kafka."""
    found = list(_servers(state, config))
    found += _members(state, "learner", [f"learner-{i}" for i in range(config.learner.count)])
    replay = state.groups.get("replay")
    splits = sorted(m.instance_id for m in replay.members) if replay else []
    quiet = state.age_s("replay-stats")
    for split in splits or ["replay-0"]:
        up = bool(splits) and quiet is not None and quiet < QUIET_S
        waits = progress.replay_waits_for
        why = (f"waits for {waits}" if waits else "") if up else "not in its group" if not splits else _ago(quiet)
        found.append(RoleState(split, ("waits" if waits else "up") if up else "down", why))
    found += _actors(state, config)
    age_s = (state.time_ms - newest_evaluation_ms) / 1000 if newest_evaluation_ms else None
    if age_s is None:
        found.append(RoleState("evaluator-0", "idle", "no evaluation yet"))
    else:
        up = age_s < EVALUATOR_QUIET_S and state.running
        found.append(RoleState("evaluator-0", "up" if up else "idle", "" if up else _ago(age_s)))
    if "archiver" in state.groups:
        found += _members(state, "archiver", ["archiver-0"])
    return found


def _members(state: RunState, role: str, expected: list[str]) -> Iterator[RoleState]:
    group = state.groups.get(role)
    there = {m.instance_id for m in group.members} if group else set()
    for name in expected:
        yield RoleState(name, "up") if name in there else RoleState(name, "down", "not in its group")


def _servers(state: RunState, config: Config) -> Iterator[RoleState]:
    for shard in range(config.parameter_server.shards):
        behind = max(
            (lag.records for lag in state.lags if lag.topic == "gradients" and lag.partition == shard), default=0
        )
        age_s, name = state.age_s("weights", shard), f"parameter-server-{shard}"
        if age_s is not None and age_s < QUIET_S:
            yield RoleState(name, "up")
        elif behind:
            yield RoleState(name, "down", f"{behind} gradients to apply; {_ago(age_s)}")
        else:
            yield RoleState(name, "idle" if state.running else "down", f"no gradient to apply; {_ago(age_s)}")


def _actors(state: RunState, config: Config) -> Iterator[RoleState]:
    lags = {lag.partition: lag for lag in state.lags if lag.topic == "transitions"}
    for index in range(config.actor.count):
        age_s, lag = state.age_s("transitions", index), lags.get(index)
        if lag is not None and lag.records >= lag.bound:
            yield RoleState(
                f"actor-{index}", "waits", f"waits for replay: {lag.records} records behind, bound {lag.bound}"
            )
        elif age_s is not None and age_s < QUIET_S:
            yield RoleState(f"actor-{index}", "up")
        else:
            yield RoleState(f"actor-{index}", "down", _ago(age_s))


def waits(state: RunState, config: Config, progress: RunProgress, busy: Mapping[str, float]) -> list[str]:
    """Who waits for whom, one sentence each, writers of a topic together.

    Args:
        busy: mean utilisation 0 to 1 of each learner.
    """
    found = []
    for writer, topic, reader in (
        ("actors", "transitions", "replay"),
        ("replay", "batches", "the learners"),
        ("learners", "gradients", "the parameter servers"),
    ):
        full = [lag for lag in state.lags if lag.topic == topic and lag.records >= lag.bound]
        told = writer == "replay" and progress.replay_waits_for
        if full and not told:
            worst = max(full, key=lambda lag: lag.records)
            found.append(
                f"{writer} {'waits' if writer == 'replay' else 'wait'} for {reader}: {worst.records} records behind on partition {worst.partition}, bound {worst.bound}"
                + (f" (and {len(full) - 1} more partitions)" if len(full) > 1 else "")
            )
    if progress.replay_waits_for:
        found.append(f"replay waits for {progress.replay_waits_for}")
    empty = not any(lag.records for lag in state.lags if lag.topic == "batches")
    starved = sorted(name for name, share in busy.items() if share < STARVED)
    if starved and state.running:
        lowest = min(busy[name] for name in starved)
        whom = (
            "replay: no batch is there"
            if empty
            else f"weights that cover their gradients (window {config.learner.max_in_flight})"
        )
        found.append(f"{_named(starved)} {'waits' if len(starved) == 1 else 'wait'} for {whom}; busy {lowest:.0%}")
    return found


def _named(names: Iterable[str], most: int = 3) -> str:
    every = list(names)
    return ", ".join(every[:most]) + (f" and {len(every) - most} more" if len(every) > most else "")
