"""The archiver as a service: one consumer a topic, read from where the files end."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from consumers.archive_folder import ArchiveFolder, Place
from consumers.archiver import Archiver
from gorila.errors import ConfigError
from gorila.inputs import Input
from gorila.recording.recorded import TOPICS
from gorila.run_record import read_run
from gorila.runtime import Runtime
from gorila.service import Service
from gorila.topics import BY_NAME

TICK_S = 0.25
FINISH_S = 3.0  # of the 5 that a stop may take


def run_archiver_service(service: Service) -> None:
    """Until stopped.

    Raises:
        ConfigError: no folder given. UsageError: the folder is another run's, or in use. LocalError: it cannot be written; nothing half-written is left and
        nothing unwritten is committed.
    """
    config = service.config.archive
    if not config.dir and service.run_dir is None:
        raise ConfigError(
            "archive.dir", "", "a folder (the archive is DIR/RUN), or give --run-dir DIR (then it is DIR/archive)"
        )
    folder = ArchiveFolder(
        Path(config.dir) / service.run if config.dir else Path(service.run_dir or "") / "archive",
        read_run(service.cluster, service.run, service.schemas),
    )
    try:
        _archive(service, folder)
    finally:
        folder.close()
        service.close()


def _archive(service: Service, folder: ArchiveFolder) -> None:
    ends = folder.next_offsets(
        lambda file, reason: service.log.warning("archive.damaged", reason=reason, then="read again from Kafka")
    )
    places = {(t, p): (service.topic(t), p) for t in TOPICS for p in range(BY_NAME[t].partitions(service.config))}
    lows = service.cluster.admin().offsets(list(places.values()), "earliest")
    planned = {place: ends.get(place, lows[full]) for place, full in places.items()}
    service.log.info(
        "archive.begins", folder=folder.folder, at={f"{t}/{p}": offset for (t, p), offset in planned.items()}
    )
    archiver = Archiver(folder, planned, service.config.archive, service.metrics, service.log)
    runtime = Runtime(service, archiver, inputs_of(planned), tick_interval_s=TICK_S)
    try:
        runtime.open()
        service.log.info("ready")
        service.health.ready()
        while not service.stop.is_set():
            runtime.turn()
        archiver.finish(FINISH_S)
        runtime.drain()
    finally:
        runtime.close()


def inputs_of(planned: Mapping[Place, int]) -> list[Input]:
    """One input a topic. An operator's reset is obeyed; what is gone is passed over, counted (gorila/inputs.py)."""
    return [
        Input(topic, "assigned", start={p: at for (t, p), at in planned.items() if t == topic}, gone="earliest")
        for topic in TOPICS
    ]
