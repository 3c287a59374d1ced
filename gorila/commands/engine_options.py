"""Options of `gorila replay` that choose and set the Beam runner (gorila/engines.py), as typer declares them."""

from __future__ import annotations

from typing import Annotated

import typer

from gorila.engines import CHECKPOINTING_INTERVAL_MS, MAX_BUNDLE_TIME_MS, RUNNERS, STATE_CACHE_MB, WORKER_PORT

PANEL = "Beam runner"

What = Annotated[
    str,
    typer.Argument(
        metavar="[worker-pool]",
        help="worker-pool: no pipeline, but the pool that keeps Python workers for --runner=portable or flink at --listen.",
        show_default=False,
    ),
]
RunName = Annotated[str, typer.Option("--run", help="Name of the run. Needed but for worker-pool.", show_default=False)]
Runner = Annotated[
    str,
    typer.Option(
        "--runner", metavar="|".join(RUNNERS), help="Default: fn-api, in this process.", rich_help_panel=PANEL
    ),
]
JobEndpoint = Annotated[
    str, typer.Option("--job-endpoint", metavar="HOST:PORT", help="Of a Beam job server.", rich_help_panel=PANEL)
]
WorkerPool = Annotated[
    str,
    typer.Option(
        "--worker-pool",
        metavar="HOST:PORT",
        help=f"Where the runner finds our worker pool. Default: one this command starts; flink: localhost:{WORKER_PORT}.",
        rich_help_panel=PANEL,
    ),
]
FlinkMaster = Annotated[
    str,
    typer.Option("--flink-master", metavar="HOST:PORT", help="Flink's REST address.", rich_help_panel=PANEL),
]
Parallelism = Annotated[
    int | None,
    typer.Option("--parallelism", help="Splits, and on Flink task slots. Default: 1.", rich_help_panel=PANEL),
]
CheckpointingInterval = Annotated[
    int | None,
    typer.Option(
        "--checkpointing-interval-ms",
        help=f"Flink: offsets are committed when a checkpoint is complete. Default: {CHECKPOINTING_INTERVAL_MS}.",
        rich_help_panel=PANEL,
    ),
]
MaxBundleTime = Annotated[
    int | None,
    typer.Option(
        "--max-bundle-time-ms",
        help=f"Flink: the floor of the latency. Default: {MAX_BUNDLE_TIME_MS}.",
        rich_help_panel=PANEL,
    ),
]
StateCache = Annotated[
    int | None,
    typer.Option("--state-cache-mb", help=f"Of each worker. Default: {STATE_CACHE_MB}.", rich_help_panel=PANEL),
]
Listen = Annotated[
    str,
    typer.Option(
        "--listen",
        metavar="HOST:PORT",
        help=f"worker-pool: where it listens. Default: localhost:{WORKER_PORT}.",
        rich_help_panel=PANEL,
    ),
]
