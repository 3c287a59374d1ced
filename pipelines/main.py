"""The replay role: one split, one process, the pipeline on the local runner until the service is told to stop."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import apache_beam as beam

from gorila.service import Service
from pipelines import replay_fns, split_registry
from pipelines.runner import local_options, local_runner
from pipelines.split_registry import Address
from pipelines.warm_up import warm_up

if TYPE_CHECKING:
    from gorila.engines import Engine
    from gorila.event_log import EventLogger
    from gorila.offline import OfflineReplay


def run_replay(service: Service) -> None:
    """Run until `service.stop` is set, then return within 5 s: drained, committed.

    Raises:
        BrokerError, RunError: as they were raised inside the pipeline, not as Beam wraps them.
    """
    warm_up()
    split_registry.adopt(service)
    room = split_registry.room(Address.of(service), service.name)
    try:
        pipeline = beam.Pipeline(runner=local_runner(), options=local_options())
        replay_fns.build(pipeline, Address.of(service), [service.name])
        pipeline.run().wait_until_finish()
    except Exception as error:
        raise room.failure or error from None
    finally:
        split_registry.leave(service)
        room.close()


def run_portable_replay(service: Service, engine: Engine) -> None:
    """The same pipeline on Prism, Flink or another portable runner: see pipelines/portable.py."""
    from pipelines.portable import run_portable

    run_portable(service, engine)


def run_worker_pool(log: EventLogger, endpoint: str, state_cache_mb: int, stop: threading.Event) -> None:
    """Keep a worker pool at HOST:PORT until `stop` is set. Raises LocalError when the port is taken."""
    from pipelines.worker_pool import worker_pool

    with worker_pool(log, endpoint, state_cache_mb):
        stop.wait()


def run_offline_replay(service: Service, offline: OfflineReplay) -> None:
    """See pipelines/offline.py."""
    from pipelines.offline import run_offline

    run_offline(service, offline)
