"""Options that several commands share, and the Kafka they mean."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gorila.errors import UsageError

if TYPE_CHECKING:
    from gorila.kafka import Cluster

Run = Annotated[str, typer.Option("--run", help="Name of the run.")]
Index = Annotated[
    int, typer.Option(min=0, help="Which one of its kind: actor, learner or shard number.", envvar="GORILA_INDEX")
]
Replica = Annotated[int, typer.Option(min=0, help="Which of a shard's replicas, from 0.", envvar="GORILA_REPLICA")]
Servers = Annotated[
    str, typer.Option("--bootstrap-servers", help="Kafka, host:port[,host:port]. Default: the local embedded broker.")
]
Sets = Annotated[list[str] | None, typer.Option("--set", help="section.key=value; may be repeated.")]
KafkaSets = Annotated[
    list[str] | None, typer.Option("--set", help="kafka.key=value, such as kafka.client_properties=FILE.")
]
Json = Annotated[bool, typer.Option("--json", help="Everything, as one JSON object.")]
AnyRun = Annotated[str, typer.Option("--run", help="Name of the run. Default: the newest on that Kafka.")]
NamedRun = Annotated[str, typer.Argument(metavar="RUN", help="Name of the run.")]
RunDir = Annotated[Path | None, typer.Option(help="Folder for logs and results of this run.")]
Source = Annotated[str, typer.Option("--from", help="Replay a recording: kafka:RUN[@START..END] or parquet:DIR.")]
Updates = Annotated[
    int,
    typer.Option(
        min=0,
        help="Stop after this many updates; of a recording: how many learner batches are drawn. 0: the preset's limit.",
    ),
]
Priorities = Annotated[
    bool | None,
    typer.Option(
        "--recorded-priorities/--actor-priorities",
        help="Of a recording: priorities as its learner left them (default), or as its actors' Q values give them.",
    ),
]
Reprioritise = Annotated[
    str,
    typer.Option("--reprioritise", metavar="WEIGHTS", help="Of a recording: TD errors of this policy file instead."),
]


def refuse_folder(out: Path | None) -> None:
    """`--out` where a folder cannot stand. Raises UsageError."""
    if out is not None and not out.name:
        raise UsageError(f"--out {out}: a folder, not a file to write")


def local_bootstrap_servers() -> str:
    """Of the embedded broker that runs here. Raises UsageError when there is none."""
    from gorila.local.broker import Broker

    local = Broker()
    running = local.status()
    if running is None:
        raise UsageError(
            f"no --bootstrap-servers, and no broker runs in {local.folder}: give one, go to the folder it was started from, or `gorila broker start`"
        )
    if running.client_properties is not None:
        raise UsageError(
            f"the local broker is secured: --set kafka.client_properties={running.client_properties.parent}/NAME.properties"
        )
    return running.bootstrap_servers


def servers_asked(given: str, sets: list[str] | None) -> str:
    """Bootstrap servers as asked for; those of the local broker when nothing was said. Raises UsageError, ConfigError."""
    from gorila.settings import local_kafka

    local = local_kafka(sets or [])
    if given or local.bootstrap_servers or local.client_properties:  # a client properties file says where Kafka is, too
        return given or local.bootstrap_servers
    return local_bootstrap_servers()


def cluster_asked(given: str, sets: list[str] | None, client_id: str) -> Cluster:
    """The Kafka of `servers_asked`; nothing is asked of it yet. Raises UsageError, ConfigError."""
    from gorila.kafka import Cluster
    from gorila.settings import local_kafka

    return Cluster(servers_asked(given, sets), local_kafka(sets or []).client_properties, client_id=client_id)
