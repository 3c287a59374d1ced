"""The rooms of this worker process: one a split, keyed by (run, split), holding the replay memory that Beam must not.

A DoFn carries strings only. It finds its room here, or opens it: from the Service that `run_replay` put here, or, in a worker process of a
portable runner, from the run's own record. What a room holds can be rebuilt from the log at any time (split_room.py).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from gorila.errors import LocalError
from gorila.service import Service, open_service
from pipelines.split_room import EACH_POLL, SplitRoom


@dataclass(frozen=True, slots=True)
class Address:
    """Where a run is, in strings: all that a DoFn may carry.

    Attributes:
        commits: when the source commits: EACH_POLL, EACH_BUNDLE or EACH_CHECKPOINT (split_room.py).
    """

    run: str
    bootstrap_servers: str
    sets: tuple[str, ...] = ()
    commits: str = EACH_POLL

    @classmethod
    def of(cls, service: Service, commits: str = EACH_POLL) -> Address:
        """The address of a service's run. Where a process shows itself (`monitor.…`) is its own business: a worker's is in its environment."""
        sets = tuple(item for item in service.sets if commits == EACH_POLL or not item.startswith("monitor."))
        return cls(service.run, service.cluster.bootstrap_servers, sets, commits)


_lock = threading.Lock()
_services: dict[tuple[str, str], Service] = {}
_rooms: dict[tuple[str, str], SplitRoom] = {}
_stopping = False


def adopt(service: Service) -> None:
    """Make a live Service known to the DoFns of this process: its name is the split's."""
    with _lock:
        _services[(service.run, service.name)] = service


def room(address: Address, split: str) -> SplitRoom:
    """The split's room, opened when it is not there. Raises RunError, BrokerError."""
    key = (address.run, split)
    with _lock:
        if key not in _rooms:
            _rooms[key] = SplitRoom(_services.get(key) or _open(address, split), split, address.commits)
        return _rooms[key]


def _open(address: Address, split: str) -> Service:
    """A service in a worker process of a portable runner."""
    index = int(split.rpartition("-")[2])
    service = open_service("replay", address.run, index, address.bootstrap_servers, address.sets, None)
    try:
        service.serve_status()
    except LocalError as error:  # one page a process: the first split's
        service.log.warning("replay.no_page", reason=str(error))
    if _stopping:
        service.stop.set()
    return service


def leave(service: Service) -> SplitRoom | None:
    """Forget the service and its room, which is returned for its last commit."""
    with _lock:
        _services.pop((service.run, service.name), None)
        return _rooms.pop((service.run, service.name), None)


def stop_all() -> None:
    """A worker process has to end: every source of it stops after its poll. May be called by a signal handler: takes no lock."""
    global _stopping  # noqa: PLW0603 - one worker process, one life
    _stopping = True
    for split_room in list(_rooms.values()):
        split_room.service.stop.set()


def close_all() -> None:
    """Close every room of a worker process: published, committed, left. Failures are logged: the other rooms still close."""
    with _lock:
        rooms = list(_rooms.values())
        _rooms.clear()
    for split_room in rooms:
        try:
            split_room.close()
        except Exception as error:  # whatever one room dies of, the others have records to commit
            split_room.service.log.error("replay.close_failed", split=split_room.split, reason=str(error))
        split_room.service.close()
