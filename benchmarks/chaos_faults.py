"""The faults of benchmarks.chaos: what is done, to whom, for how long. A fault is over when `strike` returns; health is measured from there.

| kind | what |
|---|---|
| kill | kill -9 of a role |
| pause | SIGSTOP of a role, 2 to 14 s (a group's session is 10 s), SIGCONT |
| terminate | SIGTERM of a role, as a rollout does |
| broker pause, broker kill, broker restart | the same of the broker; restart is a clean stop |
| broker disk | the broker's disk (a tmpfs) full for 5 s, then room again |
| role disk | the roles' disk full for 8 s, a role killed meanwhile |
| cut link, slow link | a role's cable pulled for 3 to 15 s; 64 kbit/s for 8 s |
| poison | 120 records of garbage on a topic |
| clocks | real records again, with clocks up to 50 years off |
| partitions | a topic gets one more partition than the topology says |
| deletion | everything in a topic deleted while its reader is stopped |
"""

from __future__ import annotations

import os
import random
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

from benchmarks.chaos_audit import Audit
from benchmarks.chaos_injection import Injector
from benchmarks.fleet import BROKER_HOST, Fleet
from deploy.hosts import Hosts

PAUSES_S = (2.0, 5.0, 14.0)
CUTS_S = (3.0, 8.0, 15.0)
DISK_S = 5.0
FLOOD = 120
SLOW_KILOBIT = 64
POISONED = ("transitions", "priorities", "batches", "gradients", "weights", "episodes", "replay-stats", "checkpoints", "replication", "run")  # fmt: skip
GROWING = ("transitions", "priorities", "batches", "gradients", "weights", "episodes", "replay-stats", "dead-letters")
DELETED = ("transitions", "batches", "weights", "transitions and priorities")
READER = {
    "transitions": "replay-0",
    "transitions and priorities": "replay-0",
    "batches": "learner-0",
    "weights": "learner-0",
}
# Of a hundred: what deletes experience or adds what is never taken away again comes seldom.
SELDOM = {"partitions": 0.4, "deletion": 0.5, "broker disk": 0.7, "role disk": 0.7}


@dataclass(frozen=True)
class Fault:
    """One entry of the schedule."""

    kind: str
    target: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.target}"


@contextmanager
def full(folder: Path) -> Iterator[None]:
    """No byte free on the folder's disk."""
    path = folder / "filler"
    with path.open("wb") as filler:
        size, step = 0, 64 * 2**20
        while step >= 4096:
            try:
                os.posix_fallocate(filler.fileno(), size, step)
                size += step
            except OSError:
                step //= 2
    try:
        yield
    finally:
        path.unlink()


class Striker:
    """Strikes. Without hosts there are no links, without disks of their own none is filled."""

    def __init__(
        self,
        fleet: Fleet,
        injector: Injector,
        audit: Audit,
        hosts: Hosts | None,
        disks: tuple[Path, Path] | None,
        rng: random.Random,
        brief: bool = False,
    ) -> None:
        self._fleet, self._injector, self._audit = fleet, injector, audit
        self._hosts, self._disks, self._rng = hosts, disks, rng
        self._pauses_s, self._cuts_s = (PAUSES_S[:1], CUTS_S[:1]) if brief else (PAUSES_S, CUTS_S)
        self._strikes: dict[str, Callable[[str], None]] = {
            "kill": lambda name: self._signal(name, signal.SIGKILL),
            "pause": self._pause,
            "terminate": lambda name: self._signal(name, signal.SIGTERM),
            "broker pause": self._pause,
            "broker kill": lambda name: self._signal(name, signal.SIGKILL),
            "broker restart": self._broker_restart,
            "broker disk": self._broker_disk,
            "role disk": self._role_disk,
            "cut link": self._cut,
            "slow link": self._slow,
            "poison": lambda topic: self._injector.flood(topic, FLOOD),
            "clocks": lambda _: self._injector.clocks(),
            "partitions": self._injector.add_partition,
            "deletion": self._delete,
        }

    def kinds(self) -> dict[str, tuple[str, ...]]:
        """{kind: targets} of what this machine lets be done."""
        roles = tuple(role.name for role in self._fleet.roles)
        found: dict[str, tuple[str, ...]] = dict.fromkeys(("kill", "pause", "terminate"), roles)
        found |= dict.fromkeys(("broker pause", "broker kill", "broker restart"), (BROKER_HOST,))
        if self._disks is not None:
            found |= {"broker disk": (BROKER_HOST,), "role disk": ("learner-0", "monitor-0", "evaluator-0")}
        if self._hosts is not None:
            found |= {"cut link": roles, "slow link": roles}
        return found | {"poison": POISONED, "clocks": ("all topics",), "partitions": GROWING, "deletion": DELETED}

    def strike(self, fault: Fault) -> None:
        """Do it, and undo what can be undone."""
        self._strikes[fault.kind](fault.target)

    def _pid(self, name: str) -> int | None:
        return self._fleet.broker_pid() if name == BROKER_HOST else self._fleet.role(name).pid

    def _signal(self, name: str, number: signal.Signals) -> None:
        pid = self._pid(name)
        if pid is not None:
            self._fleet.expected.add(name)
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    @contextmanager
    def _paused(self, name: str) -> Iterator[None]:
        pid = self._pid(name)
        if pid is None:
            yield
            return
        os.kill(pid, signal.SIGSTOP)
        try:
            yield
        finally:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)

    def _pause(self, name: str) -> None:
        with self._paused(name):
            self._fleet.live(self._rng.choice(self._pauses_s))

    def _broker_restart(self, _name: str) -> None:
        assert self._fleet.broker is not None
        self._fleet.held.add(BROKER_HOST)
        self._fleet.broker.stop()
        self._fleet.held.discard(BROKER_HOST)

    def _broker_disk(self, _name: str) -> None:
        assert self._disks is not None
        self._fleet.held.add(BROKER_HOST)
        with full(self._disks[1]):
            self._fleet.live(DISK_S)
        self._fleet.held.discard(BROKER_HOST)

    def _role_disk(self, name: str) -> None:
        assert self._disks is not None
        with full(self._disks[0]):
            self._fleet.live(DISK_S)
            self._signal(name, signal.SIGKILL)
            self._fleet.live(3.0)

    def _cut(self, name: str) -> None:
        assert self._hosts is not None
        self._hosts.cut(name)
        try:
            self._fleet.live(self._rng.choice(self._cuts_s))
        finally:
            self._hosts.join(name)

    def _slow(self, name: str) -> None:
        assert self._hosts is not None
        self._hosts.slow(name, SLOW_KILOBIT)
        try:
            self._fleet.live(8.0)
        finally:
            self._hosts.slow(name, 0)

    def _delete(self, what: str) -> None:
        with self._paused(READER[what]):
            self._fleet.live(1.5)  # what comes meanwhile will be gone unread
            for topic in what.split(" and "):
                for partition, end in self._injector.ends(topic).items():
                    if topic in ("transitions", "weights"):
                        self._audit.catch_up(topic, partition, end)
                    keep = 1 if topic == "weights" else 0
                    self._injector.delete_before(topic, partition, max(0, end - keep))


def schedule(kinds: dict[str, tuple[str, ...]], faults: int, rng: random.Random) -> list[Fault]:
    """Each kind once (as far as `faults` reaches), then each target of the process kinds, then at random; in a random order after the first round."""
    first = [Fault(kind, rng.choice(targets)) for kind, targets in kinds.items()]
    rng.shuffle(first)
    rest = [
        Fault(kind, target)
        for kind, targets in kinds.items()
        for target in targets
        if kind in ("kill", "pause", "poison")
    ]
    rest = [fault for fault in rest if fault not in first]
    names = list(kinds)
    weights = [SELDOM.get(name, 1.0) for name in names]
    while len(first) + len(rest) < faults:
        kind = rng.choices(names, weights)[0]
        rest.append(Fault(kind, rng.choice(kinds[kind])))
    rng.shuffle(rest)
    return (first + rest)[:faults]
