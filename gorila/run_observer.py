"""Looks at a run from outside, by Kafka's administration alone: joins no group, commits nothing, reads no payload."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping, Sequence

from gorila.errors import RunError
from gorila.kafka import Admin, Cluster
from gorila.run_record import RUN_TOPIC, list_runs
from gorila.run_state import PartitionLag, RunState, readers
from gorila.service import Service, open_service
from gorila.settings import local_kafka
from gorila.topics import TOPOLOGY, full_name, group_name

Place = tuple[str, int]


def newest_run(cluster: Cluster) -> str:
    """The run whose record is the newest. Raises RunError when there is none, BrokerError."""
    runs = list_runs(cluster)
    times = cluster.admin().newest_times([(full_name(run, RUN_TOPIC), 0) for run in runs])
    newest = max(times, key=lambda place: times[place] or 0, default=None)
    if newest is None or times[newest] is None:
        raise RunError(
            f"no run on Kafka at {cluster.bootstrap_servers}: `gorila train` or `gorila topics create RUN` makes one"
        )
    return newest[0].removesuffix(f".{RUN_TOPIC}")


def open_spectator(what: str, run: str, bootstrap_servers: str, sets: Sequence[str] = ()) -> Service:
    """A run as a reader of it has it; nothing is said on the terminal.

    Args:
        what: the command's name, for the client id.
        run: empty: the newest.

    Raises:
        RunError, BrokerError, UsageError.
    """
    kafka = local_kafka(sets)
    only_kafka = [
        f"kafka.{key}={getattr(kafka, key)}"
        for key in ("client_properties", "schema_registry_url")
        if getattr(kafka, key)
    ]
    servers = bootstrap_servers or kafka.bootstrap_servers
    if not run:
        cluster = Cluster(servers, kafka.client_properties, client_id=f"gorila-{what}")
        cluster.admin().ping()
        run = newest_run(cluster)
    logging.getLogger().addHandler(
        logging.NullHandler()
    )  # or warnings of the Kafka library are printed over the screen
    return open_service(what, run, 0, servers, only_kafka, terminal=False, environ={})


class RunObserver:
    """Use `look` as often as there is a screen to fill: three requests, and one a group."""

    def __init__(self, service: Service) -> None:
        self._service, self._config, self._run = service, service.config, service.run
        self.admin: Admin = service.cluster.admin()
        there = self.admin.topics()  # one that is missing is the doctor's to tell of
        names = {full_name(service.run, topic.name): topic.partitions(service.config) for topic in TOPOLOGY}
        self._places = [(name, p) for name, count in names.items() for p in range(min(count, there.get(name, 0)))]

    def look(self) -> RunState:
        """As it is now. Raises BrokerError when Kafka does not answer."""
        prefix = full_name(self._run, "")
        ends = self.admin.end_offsets(self._places)
        starts = self.admin.offsets(self._places, "earliest")
        newest = {(t.removeprefix(prefix), p): ms for (t, p), ms in self._newest(starts, ends).items()}
        lags = []
        for group, topic, partitions, bound in readers(self._config):
            keys = [key for p in partitions if (key := (full_name(self._run, topic), p)) in ends]
            committed = self.admin.group_offsets(group_name(self._run, group), keys)
            lags += [
                PartitionLag(group, topic, key[1], committed.get(key), starts[key], ends[key], bound) for key in keys
            ]
        names = [name for name in self.admin.groups() if name.startswith(prefix)]
        groups = {name.removeprefix(prefix): facts for name, facts in self.admin.describe_groups(names).items()}
        dead = (full_name(self._run, "dead-letters"), 0)
        return RunState(self._run, time.time_ns() // 1_000_000, tuple(lags), groups, newest, ends.get(dead, 0))

    def _newest(self, starts: Mapping[Place, int], ends: Mapping[Place, int]) -> dict[Place, int | None]:
        """Times of newest records. Of a compacted partition Kafka now and then does not know; then, the age it certainly does not exceed."""
        now_ms = time.time_ns() // 1_000_000
        newest = self.admin.newest_times(self._places)
        unknown = [place for place, ms in newest.items() if ms is None and ends[place] > starts[place]]
        for age_ms in (1_000, 5_000, 60_000, 3_600_000, 86_400_000):
            if unknown:
                since = self.admin.offsets(unknown, now_ms - age_ms)
                newest |= {place: now_ms - age_ms for place in unknown if since[place] >= 0}
                unknown = [place for place in unknown if since[place] < 0]
        return newest
