"""One embedded broker for every `gorila train` of a folder: the first starts it, the last one out stops it.

Each user holds a shared lock on `<folder>/users.lock` for as long as it runs. Who leaves tries for the exclusive one: whoever gets it is the last.
A broker that a person started (`gorila broker start`) carries no `started-by-train` mark and is left running.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gorila.errors import LocalError
from gorila.local.broker import DEFAULT_FOLDER, Broker
from gorila.local.secured import Secured

_MARK = "started-by-train"


@contextmanager
def shared_broker(folder: Path = DEFAULT_FOLDER) -> Iterator[str]:
    """Bootstrap servers of the folder's broker, started if none runs. Raises LocalError, BrokerError."""
    broker = Broker(folder)
    try:
        broker.folder.mkdir(parents=True, exist_ok=True)
        lock = (broker.folder / "users.lock").open("w")
    except OSError as error:
        raise LocalError(f"cannot keep the broker's data in {broker.folder}: {error.strerror}") from None
    mark = broker.folder / _MARK
    with lock:
        fcntl.flock(lock, fcntl.LOCK_SH)
        if Secured.of(broker.folder) is not None:
            raise LocalError(
                f"the broker in {broker.folder} is secured: --set kafka.client_properties={broker.folder}/clients/admin.properties"
            )
        address = broker.start()
        if broker.started_here:
            mark.touch()
        try:
            yield address.bootstrap_servers
        finally:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except OSError:
                pass  # somebody else trains here
            else:
                if mark.exists():
                    mark.unlink()
                    broker.stop()


def keep_running(folder: Path) -> None:
    """A person asked for this broker: no `gorila train` stops it any more."""
    (Broker(folder).folder / _MARK).unlink(missing_ok=True)
