"""`gorila broker start|stop|status|env` and `gorila kafka TOOL …`. The root command turns errors into one line."""

from __future__ import annotations

import shlex
from pathlib import Path
from typing import Annotated

import typer

from gorila.errors import LocalError
from gorila.local.broker import BOOTSTRAP_VARIABLE, DEFAULT_FOLDER, PROPERTIES_VARIABLE, Broker, BrokerStatus
from gorila.local.kafka_tools import run_kafka_tool, tool_names
from gorila.local.shared_broker import keep_running

broker_app = typer.Typer(
    help="A real Apache Kafka on this machine, without Java or a network once cached.", no_args_is_help=True
)

_Folder = Annotated[
    Path, typer.Option("--dir", help="Folder of the broker's data, log and process record.", show_default=True)
]
_Port = Annotated[
    int | None,
    typer.Option("--port", help="Port to listen on. Default: the last one used in the folder, or a free one."),
]


_Secure = Annotated[
    bool,
    typer.Option(
        "--secure",
        help="TLS, a user for each role, ACLs; client.properties are written to DIR/clients. A folder made secure stays so.",
    ),
]


@broker_app.command()
def start(folder: _Folder = DEFAULT_FOLDER, port: _Port = None, secure: _Secure = False) -> None:
    """Start the broker and wait until it is ready; if one runs in the folder already, say so.

    Example: gorila broker start --dir .gorila/broker --port 9092 · gorila broker start --secure --dir .gorila/secured
    """
    broker = Broker(folder, port, secure=secure)
    address = broker.start()
    keep_running(folder)
    state = "ready" if broker.started_here else "already running"
    typer.echo(f"broker {state} at {address.bootstrap_servers} (pid {address.pid}, data in {address.folder})")
    if address.client_properties is not None:
        names = sorted(file.stem for file in address.client_properties.parent.glob("*.properties"))
        typer.echo(f"secured: {address.client_properties.parent}/NAME.properties for {', '.join(names)}")


@broker_app.command()
def stop(folder: _Folder = DEFAULT_FOLDER) -> None:
    """Stop the broker that was started in the folder; its data stays.

    Example: gorila broker stop
    """
    broker = Broker(folder)
    typer.echo(
        f"broker stopped (data stays in {broker.folder})" if broker.stop() else f"no broker runs in {broker.folder}"
    )


@broker_app.command()
def status(folder: _Folder = DEFAULT_FOLDER) -> None:
    """Show address, pid, data folder and uptime; exit code 1 if none runs.

    Example: gorila broker status
    """
    found = _running(folder)
    state = "ready" if found.answering else "not answering"
    typer.echo(f"status             {state}")
    typer.echo(f"bootstrap servers  {found.bootstrap_servers}")
    typer.echo(f"pid                {found.pid}")
    typer.echo(f"data               {found.folder}")
    typer.echo(f"uptime             {_duration(found.uptime_s)}")
    typer.echo(f"cluster id         {found.cluster_id}")
    if found.client_properties is not None:
        typer.echo(f"secured            clients' files in {found.client_properties.parent}")


@broker_app.command()
def env(folder: _Folder = DEFAULT_FOLDER) -> None:
    """Print what a shell needs to use the broker: as its administrator, where it is a secured one.

    Example: eval "$(gorila broker env)"
    """
    found = _running(folder)
    typer.echo(f"export {BOOTSTRAP_VARIABLE}={shlex.quote(found.bootstrap_servers)}")
    if found.client_properties is not None:
        typer.echo(f"export {PROPERTIES_VARIABLE}={shlex.quote(str(found.client_properties))}")


def add_kafka_command(app: typer.Typer) -> None:
    """Register `kafka TOOL …` on `app`; everything after the tool's name goes to the tool untouched, --help too."""

    @app.command(
        "kafka",
        add_help_option=False,
        context_settings={"allow_extra_args": True, "ignore_unknown_options": True, "allow_interspersed_args": False},
    )
    def kafka(context: typer.Context) -> None:
        """Run one of Kafka's own tools (topics, consumer-groups, …); --bootstrap-server is filled in.

        Example: gorila kafka consumer-groups --describe --all-groups
        """
        words = context.args
        if not words or words[0] in ("--help", "-h"):
            typer.echo(
                f"Usage: gorila kafka TOOL [ARGUMENTS …]\n\nTools: {tool_names()}\n\nExample: gorila kafka consumer-groups --describe --all-groups"
            )
            raise typer.Exit(0 if words else 2)
        raise typer.Exit(run_kafka_tool(words[0], words[1:]))


def _running(folder: Path) -> BrokerStatus:
    broker = Broker(folder)
    found = broker.status()
    if found is None:
        raise LocalError(f"no broker runs in {broker.folder}: start one with gorila broker start")
    return found


def _duration(seconds: float) -> str:
    minutes, whole = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours} h {minutes} min" if hours else f"{minutes} min {whole} s" if minutes else f"{whole} s"
