"""`gorila replay inspect`: the transitions of highest priority, of a running run or of a recording."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from gorila.commands.options import AnyRun, KafkaSets, Servers, cluster_asked, servers_asked
from gorila.errors import UsageError
from gorila.inspected import Inspection

if TYPE_CHECKING:
    from gorila.kafka import Cluster

MAX_TOP = 1000


def register(app: typer.Typer) -> None:
    """Add the command."""

    @app.command(name="replay inspect", rich_help_panel="Watch a run")
    def inspect(
        run: AnyRun = "",
        top: Annotated[int, typer.Option(min=1, max=MAX_TOP, help="How many transitions.")] = 20,
        source: Annotated[
            str, typer.Option("--from", help="A recording instead: kafka:RUN[@START..END] or parquet:DIR.")
        ] = "",
        png: Annotated[
            Path | None, typer.Option(metavar="FILE", help="Images: write their states as a contact sheet.")
        ] = None,
        as_json: Annotated[bool, typer.Option("--json", help="One JSON object a line.")] = False,
        bootstrap_servers: Servers = "",
        sets: KafkaSets = None,
    ) -> None:
        """Show the transitions of highest priority in a run's replay memory, rebuilt from the log: no group is joined, nothing is committed.

        Example: gorila replay inspect --run RUN --top 20 · gorila replay inspect --from parquet:archive/RUN --png top.png
        """
        from gorila.local.inspection_view import show, write_sheet

        if run and source:
            raise UsageError("--run and --from exclude each other: a recording says which run it is of")
        found = (
            _recorded(source, top, bootstrap_servers, sets) if source else _running(run, top, bootstrap_servers, sets)
        )
        if png is not None:
            write_sheet(found, png)
        show(found, as_json, sys.stdout)
        if png is not None and not as_json:
            typer.echo(f"{png}: {len(found.top)} transitions")


def _running(run: str, top: int, servers: str, sets: list[str] | None) -> Inspection:
    from gorila.run_observer import open_spectator

    service = open_spectator("inspect", run, servers_asked(servers, sets), sets or ())
    try:
        found: Inspection = importlib.import_module("pipelines.inspection").inspect_run(service, top)
        return found
    finally:
        service.close()


def _recorded(source: str, top: int, servers: str, sets: list[str] | None) -> Inspection:
    from gorila.recording import parse_source

    def cluster() -> Cluster:
        made = cluster_asked(servers, sets, "gorila-inspect")
        made.admin().ping()
        return made

    recording = parse_source(source).open(cluster)
    try:
        found: Inspection = importlib.import_module("pipelines.inspection").inspect_recording(recording, source, top)
        return found
    finally:
        recording.close()
