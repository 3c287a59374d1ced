"""The parts a run was trained in, one a `gorila train`: so that its summary counts working time and not the pauses between.

`parts.json` in the run's folder holds where each partition of `transitions` ended when a part began. When the parts themselves began and ended is in the
log: an actor's start, and the append time of the last block before the next part.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from gorila.errors import BadRecord, LocalError
from gorila.kafka import Received
from gorila.log_ranges import bounds, read_range
from gorila.messages import TransitionBlock
from gorila.run_follower import RunFollower
from gorila.service import Service

FILE = "parts.json"
LOOK_BACK = 64
"""Records before a part's end that are looked at: the newest of them may be one nobody can decode."""


@dataclass(frozen=True, slots=True)
class Part:
    """One `gorila train`. `starts`: the next offset of each transitions partition when it began."""

    started_ms: int
    starts: tuple[int, ...]


def read_parts(folder: Path) -> list[Part]:
    """Oldest first; none where the folder knows of none."""
    try:
        return [
            Part(int(part["started_ms"]), tuple(part["starts"])) for part in json.loads((folder / FILE).read_text())
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return []


def begin_part(service: Service, started_ms: int) -> list[Part]:
    """All parts, the one that begins now included. Raises BrokerError, LocalError."""
    assert service.run_dir is not None
    places = [(service.topic("transitions"), p) for p in range(service.config.actor.count)]
    ends = service.cluster.admin().end_offsets(places)
    earlier = read_parts(service.run_dir)
    now = Part(started_ms, tuple(ends[place] for place in places))
    if not earlier and any(now.starts) and not (service.run_dir / "fork.json").exists():
        earlier = [Part(0, (0,) * len(places))]  # of another machine's folder: one, as far as the log tells
    parts = [*earlier, now]
    try:
        (service.run_dir / FILE).write_text(
            json.dumps([{"started_ms": p.started_ms, "starts": p.starts} for p in parts]) + "\n"
        )
    except OSError as error:
        raise LocalError(f"cannot write to {service.run_dir / FILE}: {error.strerror}") from None
    return parts


def last_step_ms(service: Service, next_part: Part) -> int | None:
    """Append time of the last block before a part. Raises BrokerError."""
    ends = []
    for partition, offset in enumerate(next_part.starts):
        low, _ = bounds(service.cluster, service.topic("transitions"), partition)
        start = max(low, offset - LOOK_BACK)
        records = read_range(service.cluster, service.topic("transitions"), partition, start, offset)
        ends += [received.timestamp_ms for received, _ in _blocks(service, records)][-1:]
    return max(ends, default=None)


def earlier_s(service: Service, follower: RunFollower, parts: list[Part]) -> float:
    """Seconds from first to last step of each part but the newest, together; a part without a step took none. Raises BrokerError."""
    total_ms = 0
    for part, after in itertools.pairwise(parts):
        if any(end > start for start, end in zip(part.starts, after.starts, strict=True)):
            began, ended = follower.first_step_ms(part.starts), last_step_ms(service, after)
            total_ms += max(0, ended - began) if began is not None and ended is not None else 0
    return total_ms / 1000


def _blocks(service: Service, records: Iterable[Received]) -> Iterable[tuple[Received, TransitionBlock]]:
    for received in records:
        try:
            yield received, service.schemas.expect(received.value, TransitionBlock)
        except BadRecord:
            continue
