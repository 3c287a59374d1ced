"""The rooms of this worker process: one a split, keyed by (run, split), holding the replay memory that Beam must not.

A DoFn carries strings only. It finds its room here, or opens it: from the Service that `run_replay` put here, or, in a worker process of a
portable runner, from the run's own record. What a room holds can be rebuilt from the log at any time (split_room.py).
"""

from __future__ import annotations

import threading
from dataclasses import dataclass

from gorila.service import Service, open_service
from pipelines.split_room import SplitRoom


@dataclass(frozen=True, slots=True)
class Address:
    """Where a run is, in strings: all that a DoFn may carry."""

    run: str
    bootstrap_servers: str
    sets: tuple[str, ...] = ()

    @classmethod
    def of(cls, service: Service) -> Address:
        """The address of a service's run."""
        return cls(service.run, service.cluster.bootstrap_servers, tuple(service.sets))


_lock = threading.Lock()
_services: dict[tuple[str, str], Service] = {}
_rooms: dict[tuple[str, str], SplitRoom] = {}


def adopt(service: Service) -> None:
    """Make a live Service known to the DoFns of this process: its name is the split's."""
    with _lock:
        _services[(service.run, service.name)] = service


def room(address: Address, split: str) -> SplitRoom:
    """The split's room, opened when it is not there. Raises RunError, BrokerError."""
    key = (address.run, split)
    with _lock:
        if key not in _rooms:
            service = _services.get(key) or open_service(
                "replay", address.run, int(split.rpartition("-")[2]), address.bootstrap_servers, address.sets, None
            )
            _rooms[key] = SplitRoom(service, split)
        return _rooms[key]


def leave(service: Service) -> SplitRoom | None:
    """Forget the service and its room, which is returned for its last commit."""
    with _lock:
        _services.pop((service.run, service.name), None)
        return _rooms.pop((service.run, service.name), None)
