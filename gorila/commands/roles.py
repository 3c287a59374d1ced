"""A command a role: each runs one process of it. Role code is looked up by name, so that no role's dependencies weigh on another."""

from __future__ import annotations

import importlib
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from gorila.commands import engine_options as engines
from gorila.commands.options import (
    Index,
    Priorities,
    Replica,
    Reprioritise,
    Run,
    RunDir,
    Servers,
    Sets,
    Source,
    Updates,
    cluster_asked,
    servers_asked,
)
from gorila.errors import ConfigError, UsageError

ROLES = {
    "actor": ("producers.main:run_actor", "Play environments and publish transitions."),
    "replay": ("pipelines.main:run_replay", "Turn transitions into prioritised batches (Beam)."),
    "learner": ("consumers.main:run_learner", "Turn batches into gradients."),
    "parameter-server": ("consumers.main:run_parameter_server", "Apply gradients to a shard and publish weights."),
    "evaluator": ("consumers.main:run_evaluator", "Measure published weights on full, unclipped games."),
    "monitor": ("consumers.main:run_monitor", "TensorBoard and the learning curve."),
    "archiver": ("consumers.main:run_archiver", "Keep transitions, priorities and episodes as Parquet files."),
}


def _run_role(
    role: str,
    target: str,
    run: str,
    index: int,
    servers: str,
    sets: list[str] | None,
    run_dir: Path | None,
    *more: Any,
    replica: int = 0,
) -> None:
    """Open the service, run `target(service, *more)`, leave."""
    from gorila.local.roles import instances, stop_with_supervisor
    from gorila.service import open_service

    service = open_service(role, run, index, servers, tuple(sets or ()), run_dir, replica=replica)
    count = max(1, len({number for name, number in instances(service.config) if name == role}))
    if index >= count and role != "replay":  # as many splits as there are processes
        raise ConfigError("--index", index, f"run {run} has {count} of role {role}: 0 to {count - 1}")
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: service.stop.set())
    stop_with_supervisor(service.stop)
    service.serve_status()
    module, _, name = target.partition(":")
    try:
        getattr(importlib.import_module(module), name)(service, *more)
    finally:
        service.health.close()
    # Everything is flushed, committed and closed. Taking torch and Beam apart object by object costs a second of the five a stop may take.
    logging.shutdown()
    sys.stdout.flush()
    os._exit(0)


def _role_command(role: str, target: str, about: str) -> Callable[..., None]:
    def command(
        run: Run, index: Index = 0, bootstrap_servers: Servers = "", sets: Sets = None, run_dir: RunDir = None
    ) -> None:
        _run_role(role, target, run, index, servers_asked(bootstrap_servers, sets), sets, run_dir)

    command.__doc__ = f"{about}\n\nExample: gorila {role} --run RUN --bootstrap-servers localhost:9092"
    return command


def _replay(
    what: engines.What = "",
    run: engines.RunName = "",
    index: Index = 0,
    bootstrap_servers: Servers = "",
    sets: Sets = None,
    run_dir: RunDir = None,
    source: Source = "",
    updates: Updates = 0,
    recorded_priorities: Priorities = None,
    reprioritise: Reprioritise = "",
    runner: engines.Runner = "",
    job_endpoint: engines.JobEndpoint = "",
    worker_pool: engines.WorkerPool = "",
    flink_master: engines.FlinkMaster = "",
    parallelism: engines.Parallelism = None,
    checkpointing_interval_ms: engines.CheckpointingInterval = None,
    max_bundle_time_ms: engines.MaxBundleTime = None,
    state_cache_mb: engines.StateCache = None,
    listen: engines.Listen = "",
) -> None:
    """Turn transitions into prioritised batches (Beam). With --from: a recording's, into a run that has no actors. With --runner: on another Beam runner.

    Example: gorila replay --run RUN --bootstrap-servers localhost:9092 · gorila replay --run NEW --from parquet:archive/RUN --updates 5000 · gorila replay --run RUN --runner=flink --flink-master jobmanager:8081 --parallelism 4
    """
    from gorila.engines import Engine

    if what == "worker-pool":
        _keep_worker_pool(Engine.pool_asked(runner, listen, state_cache_mb), run, source)
        return
    if what or listen:
        raise UsageError(
            f"gorila replay {what or '--listen'}: --listen goes with worker-pool, the only word replay takes"
        )
    if not run:
        raise UsageError("--run is needed: the name of the run")
    engine = Engine.asked(
        runner,
        job_endpoint,
        worker_pool,
        flink_master,
        parallelism,
        checkpointing_interval_ms,
        max_bundle_time_ms,
        state_cache_mb,
    )
    if source and not engine.is_local:
        raise UsageError(
            f"--from goes with --runner=fn-api, not with {engine.runner}: a recording is replayed by one process"
        )
    servers = servers_asked(bootstrap_servers, sets)
    if not engine.is_local:
        _run_role("replay", "pipelines.main:run_portable_replay", run, index, servers, sets, run_dir, engine)
        return
    if not source:
        if updates or reprioritise or recorded_priorities is not None:
            raise UsageError("--updates, --recorded-priorities, --actor-priorities and --reprioritise go with --from")
        _run_role("replay", ROLES["replay"][0], run, index, servers, sets, run_dir)
        return
    from gorila.offline import OfflineReplay, ensure_run

    offline = OfflineReplay.asked(source, updates, recorded_priorities, reprioritise)
    cluster = cluster_asked(servers, sets, f"{run}-replay-make")
    cluster.admin().ping()
    ensure_run(cluster, run, offline, sets or ())
    _run_role("replay", "pipelines.main:run_offline_replay", run, index, servers, sets, run_dir, offline)


def _keep_worker_pool(asked: tuple[str, int], run: str, source: str) -> None:
    from gorila.event_log import open_log
    from gorila.local.roles import stop_with_supervisor

    if run or source:
        raise UsageError(
            "gorila replay worker-pool takes no --run and no --from: the job that asks for a worker names its run"
        )
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    stop_with_supervisor(stop)
    log = open_log("replay-worker-pool", {"role": "replay-worker-pool"}, None)
    importlib.import_module("pipelines.main").run_worker_pool(log, *asked, stop)
    logging.shutdown()
    os._exit(0)


def _parameter_server(
    run: Run,
    index: Index = 0,
    replica: Replica = 0,
    bootstrap_servers: Servers = "",
    sets: Sets = None,
    run_dir: RunDir = None,
) -> None:
    """Apply gradients to a shard and publish weights. --index is the shard; with parameter_server.replicas above 1 it takes that many processes a shard.

    Example: gorila parameter-server --run RUN --index 0 --replica 1 --bootstrap-servers localhost:9092
    """
    target = ROLES["parameter-server"][0]
    servers = servers_asked(bootstrap_servers, sets)
    _run_role("parameter-server", target, run, index, servers, sets, run_dir, replica=replica)


_COMMANDS: dict[str, Callable[..., None]] = {"replay": _replay, "parameter-server": _parameter_server}


def register(app: typer.Typer) -> None:
    """Add the roles."""
    for role, (target, about) in ROLES.items():
        command = _COMMANDS.get(role) or _role_command(role, target, about)
        app.command(role, rich_help_panel="Roles, each a service")(command)
