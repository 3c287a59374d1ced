"""`gorila top`, `doctor`, `report`, `schema-registry`: looking at runs from outside. Added to the application by `register`."""

from __future__ import annotations

import signal
from contextlib import suppress
from pathlib import Path
from typing import Annotated

import typer

from gorila.commands.options import AnyRun, KafkaSets, NamedRun, Servers, cluster_asked, refuse_folder, servers_asked

_PANEL = "Watch a run"


def register(app: typer.Typer) -> None:
    """Add the commands."""

    @app.command(rich_help_panel=_PANEL)
    def top(
        run: AnyRun = "",
        once: Annotated[bool, typer.Option("--once", help="Print one frame and exit.")] = False,
        bootstrap_servers: Servers = "",
        sets: KafkaSets = None,
    ) -> None:
        """Watch a run live, wherever it runs: rates, lag, returns, staleness, roles up and down, who waits for whom. Ctrl-C ends it.

        Example: gorila top --run RUN --bootstrap-servers localhost:9092
        """
        from gorila.local.top import top as show
        from gorila.run_observer import open_spectator

        show(open_spectator("top", run, servers_asked(bootstrap_servers, sets), sets or ()), once)

    @app.command(rich_help_panel=_PANEL)
    def doctor(run: AnyRun = "", bootstrap_servers: Servers = "", sets: KafkaSets = None) -> int:
        """Examine Kafka and a run: topics, lag, clocks, schemas, dead letters, the reference's checklist; each finding with what to do.

        Exit code 0: nothing is wrong; 1: something is; 2: the command was.

        Example: gorila doctor --run RUN
        """
        from gorila.local.doctor_view import doctor as visit

        return visit(run, servers_asked(bootstrap_servers, sets), sets or ())

    @app.command(name="schema-registry", rich_help_panel=_PANEL)
    def schema_registry(
        run: Annotated[
            list[str] | None, typer.Option("--run", help="Serve this run's topics as subjects too; may be repeated.")
        ] = None,
        host: Annotated[str, typer.Option(help="Where to listen; 0.0.0.0 for all interfaces.")] = "127.0.0.1",
        port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one.")] = 8081,
        bootstrap_servers: Servers = "",
        sets: KafkaSets = None,
    ) -> None:
        """Serve our schemas in Confluent's registry interface, read-only: Avro deserializers, kafka-ui and AKHQ then read every topic. Ctrl-C ends it.

        Example: gorila schema-registry --port 8081
        """
        from gorila.schema_server import SchemaServer, catalogue

        runs = {}
        for name in run or []:
            from gorila.codec import Schemas
            from gorila.run_record import read_run

            cluster = cluster_asked(bootstrap_servers, sets, "gorila-schema-registry")
            runs[name] = read_run(cluster, name, Schemas()).schemas
        shown = catalogue(runs)
        server = SchemaServer(shown, host, port)
        typer.echo(
            f"schema registry at http://{host}:{server.port}: {len(shown.subjects)} subjects, {len(shown.texts)} schemas, read-only"
        )
        signal.signal(signal.SIGTERM, signal.default_int_handler)  # a service manager stops it as Ctrl-C does
        with suppress(KeyboardInterrupt):
            server.serve()

    @app.command(rich_help_panel=_PANEL)
    def report(
        run: NamedRun,
        runs_dir: Annotated[Path, typer.Option(help="Where the folders of runs are.")] = Path("runs"),
        out: Annotated[
            Path | None, typer.Option(help="The file to write. Default: report.html in the run's folder.")
        ] = None,
        bootstrap_servers: Servers = "",
        sets: KafkaSets = None,
    ) -> None:
        """Write a run as one HTML file that opens offline: curves, rates, lag, staleness, checklist, configuration, summary.

        Example: gorila report RUN --out report.html
        """
        from gorila.errors import LocalError, UsageError
        from gorila.report import gather, page
        from gorila.run_record import check_name

        check_name(run)
        refuse_folder(out)
        try:
            servers, why = servers_asked(bootstrap_servers, sets), ""
        except UsageError as error:  # a report of a folder needs no Kafka
            servers, why = "", str(error)
        text = page(gather(run, runs_dir, servers, sets or (), why))
        path = out or (runs_dir / run / "report.html" if (runs_dir / run).is_dir() else Path(f"{run}.html"))
        temporary = path.with_name(path.name + ".tmp")
        try:
            temporary.write_text(text)
            temporary.replace(path)
        except OSError as error:
            raise LocalError(f"cannot write {path}: {error.strerror}") from None
        typer.echo(f"{path}: {len(text) // 1024} KiB")
