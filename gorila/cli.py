"""`gorila`: one command, a sub-command a role. Role code is looked up by name when it runs, so that no role's dependencies weigh on another.

Exit codes: 0 done, 1 something failed (one line says what), 2 the command was wrong (one line says how), 130 interrupted before anything ran.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from gorila import engine_options as engines
from gorila.errors import ConfigError, GorilaError, UsageError
from gorila.local.going_on import GoingOn, Memory
from gorila.two_words import TwoWords

app = typer.Typer(
    name="gorila",
    cls=TwoWords,
    help="Distributed deep Q-learning as a stream: actors, a Beam replay pipeline, learners and parameter servers around Apache Kafka.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode="markdown",
    epilog="Start with: gorila train cartpole",
)

Run = Annotated[str, typer.Option("--run", help="Name of the run.")]
Index = Annotated[
    int, typer.Option(min=0, help="Which one of its kind: actor, learner or shard number.", envvar="GORILA_INDEX")
]
Replica = Annotated[int, typer.Option(min=0, help="Which of a shard's replicas, from 0.", envvar="GORILA_REPLICA")]
Servers = Annotated[
    str, typer.Option("--bootstrap-servers", help="Kafka, host:port[,host:port]. Default: the local embedded broker.")
]
Sets = Annotated[list[str] | None, typer.Option("--set", help="section.key=value; may be repeated.")]
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


ROLES = {
    "actor": ("producers.main:run_actor", "Play environments and publish transitions."),
    "replay": ("pipelines.main:run_replay", "Turn transitions into prioritised batches (Beam)."),
    "learner": ("consumers.main:run_learner", "Turn batches into gradients."),
    "parameter-server": ("consumers.main:run_parameter_server", "Apply gradients to a shard and publish weights."),
    "evaluator": ("consumers.main:run_evaluator", "Measure published weights on full, unclipped games."),
    "monitor": ("consumers.main:run_monitor", "TensorBoard and the learning curve."),
    "archiver": ("consumers.main:run_archiver", "Keep transitions, priorities and episodes as Parquet files."),
}


def _show_version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        print(f"gorila {version('gorila-stream')}")
        raise typer.Exit


@app.callback()
def _gorila(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """What holds for every command."""


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


def _servers(given: str, sets: list[str] | None) -> str:
    from gorila.settings import environment_values, parse_sets

    configured = {**environment_values(os.environ), **parse_sets(sets or [])}
    servers = given or str(configured.get("kafka.bootstrap_servers", ""))
    # A client properties file says where Kafka is, too.
    return servers if servers or configured.get("kafka.client_properties") else local_bootstrap_servers()


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
        _run_role(role, target, run, index, _servers(bootstrap_servers, sets), sets, run_dir)

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
    servers = _servers(bootstrap_servers, sets)
    if not engine.is_local:
        _run_role("replay", "pipelines.main:run_portable_replay", run, index, servers, sets, run_dir, engine)
        return
    if not source:
        if updates or reprioritise or recorded_priorities is not None:
            raise UsageError("--updates, --recorded-priorities, --actor-priorities and --reprioritise go with --from")
        _run_role("replay", ROLES["replay"][0], run, index, servers, sets, run_dir)
        return
    from gorila.kafka import Cluster
    from gorila.offline import OfflineReplay, ensure_run
    from gorila.settings import local_kafka

    offline = OfflineReplay.asked(source, updates, recorded_priorities, reprioritise)
    cluster = Cluster(servers, local_kafka(sets or []).client_properties, client_id=f"{run}-replay-make")
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
    servers = _servers(bootstrap_servers, sets)
    _run_role("parameter-server", target, run, index, servers, sets, run_dir, replica=replica)


_COMMANDS: dict[str, Callable[..., None]] = {"replay": _replay, "parameter-server": _parameter_server}
for _role, (_target, _about) in ROLES.items():
    _command = _COMMANDS.get(_role) or _role_command(_role, _target, _about)
    app.command(_role, rich_help_panel="Roles, each a service")(_command)


def _presets() -> list[str]:
    from gorila.settings import preset_names

    return preset_names()


@app.command()
def train(
    preset: Annotated[
        str,
        typer.Argument(help="Preset name or a path to a .toml file.", autocompletion=_presets, show_default="cartpole"),
    ] = "",
    steps: Annotated[
        int, typer.Option(min=0, help="Stop after this many environment steps; 0: the preset's limit.")
    ] = 0,
    seed: Annotated[int | None, typer.Option(min=0, help="Seed of everything random.")] = None,
    seeds: Annotated[
        int, typer.Option(min=1, help="Train this many seeds, one after another; prints mean and interval.")
    ] = 1,
    synchronous: Annotated[
        bool, typer.Option("--synchronous", help="One actor, one learner, in lockstep: two runs, one seed, one hash.")
    ] = False,
    offline: Annotated[
        str, typer.Option(metavar="SOURCE", help="No actors: learn from kafka:RUN[@START..END] or parquet:DIR.")
    ] = "",
    updates: Updates = 0,
    recorded_priorities: Priorities = None,
    reprioritise: Reprioritise = "",
    resume: Annotated[
        str, typer.Option(metavar="RUN", help="Go on with a run that ended, was stopped or killed.")
    ] = "",
    at: Annotated[
        int | None, typer.Option("--at", min=0, help="With --resume: fork RUN after this offset of its gradients.")
    ] = None,
    at_version: Annotated[int | None, typer.Option(min=0, help="With --resume: fork RUN at this version.")] = None,
    new: Annotated[str, typer.Option("--as", metavar="NEW", help="Name of the fork.")] = "",
    memory: Annotated[
        Memory, typer.Option(help="Of a fork: RUN's transitions up to the point, or nothing.")
    ] = Memory.COPY,
    bootstrap_servers: Servers = "",
    sets: Sets = None,
    runs_dir: Annotated[Path, typer.Option(help="Where the folder of the run is written.")] = Path("runs"),
) -> None:
    """Train: a real broker, topics, every role, a live view, a summary. Ctrl-C ends the run and keeps what it learned.

    Example: gorila train · gorila train catch-pixels · gorila train pong --steps 20000 · gorila train cartpole --seeds 5 --set learner.codec=fp16 · gorila train cartpole --offline kafka:RUN --updates 5000 · gorila train --resume RUN · gorila train --resume RUN --at-version 1200 --as NEW
    """
    going_on = GoingOn(resume, at, at_version, new, memory)
    given = {"PRESET": preset, "--seed": seed is not None, "--seeds": seeds > 1, "--synchronous": synchronous}
    if going_on.check({**given, "--offline": offline, "--reprioritise": reprioritise}):
        more = [f"kafka.bootstrap_servers={bootstrap_servers}"] if bootstrap_servers else []
        _print_summary(going_on.train([*(sets or []), *more], steps, updates, runs_dir), runs_dir)
        return
    preset = preset or "cartpole"
    from gorila.local.seeds_table import print_seeds
    from gorila.local.train import INTERRUPTED, kafka
    from gorila.local.train import train as run_training
    from gorila.settings import load_config

    extra = list(sets or [])
    if steps:
        extra.append(f"run.max_env_steps={steps}")
    if synchronous:
        extra.append("run.synchronous=true")
    if bootstrap_servers:
        extra.append(f"kafka.bootstrap_servers={bootstrap_servers}")
    if updates:
        extra.append(f"run.max_updates={updates}")
    recording = None
    if offline:
        from gorila.offline import offline_training

        recording, more = offline_training(load_config(preset, extra), offline, recorded_priorities, reprioritise)
        extra += more
    elif reprioritise or recorded_priorities is not None:
        raise UsageError("--recorded-priorities, --actor-priorities and --reprioritise go with --offline")
    first = load_config(preset, extra).run.seed if seed is None else seed
    summaries = []
    with kafka(load_config(preset, extra)) if seeds > 1 else nullcontext():  # one broker for all seeds
        for number in range(first, first + seeds):
            summary = run_training(
                load_config(preset, [*extra, f"run.seed={number}"]), root=runs_dir, offline=recording
            )
            _print_summary(summary, runs_dir)
            summaries.append(summary)
            if summary.ended_because == INTERRUPTED:
                break
    if seeds > 1:
        print_seeds(summaries)


def _print_summary(summary: Any, runs_dir: Path) -> None:
    print(f"files in {runs_dir / summary.run}: summary.json, curve.png, weights.safetensors, tensorboard, logs")
    print(json.dumps(dataclasses.asdict(summary), indent=2), flush=True)


@app.command()
def evaluate(
    weights: Annotated[Path, typer.Argument(help="weights.safetensors of a run.")],
    episodes: Annotated[int, typer.Option(min=1, help="Episodes to play.")] = 100,
    epsilon: Annotated[
        float | None, typer.Option(min=0.0, max=1.0, help="Default: the run's evaluator.epsilon.")
    ] = None,
    seed: Annotated[int, typer.Option(min=0)] = 0,
    video: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Film one more episode: FILE.gif, FILE.webp or FILE.png.")
    ] = None,
) -> None:
    """Play episodes with saved weights and print the returns' mean, deviation and human-normalised score.

    Example: gorila evaluate runs/RUN/weights.safetensors --episodes 100 --video play.gif
    """
    filmed = None if video is None else importlib.import_module("gorila.video").film(weights, video, epsilon, seed)
    result = importlib.import_module("gorila.policy").evaluate_file(weights, episodes, epsilon, seed)
    print(json.dumps({**result, **({"video": filmed} if filmed else {})}, indent=2))


@app.command()
def config(
    preset: Annotated[str, typer.Argument(help="Preset name or a path to a .toml file.")] = "cartpole",
    sets: Sets = None,
) -> None:
    """Print the effective configuration of a preset with the environment and --set applied.

    Example: gorila config pong --set learner.batch_size=64
    """
    from gorila.settings import load_config, shown

    print(json.dumps(shown(load_config(preset, sets or [])), indent=2))


@app.command()
def presets() -> None:
    """List the presets that ship.

    Example: gorila presets
    """
    print("\n".join(_presets()))


def _add_groups() -> None:
    from gorila.export_commands import export_app
    from gorila.inspect_commands import register as register_inspect
    from gorila.local.broker_commands import add_kafka_command, broker_app
    from gorila.local.watch_commands import register as register_watch
    from gorila.topic_commands import register_cat, topics_app
    from gorila.weights_commands import weights_app

    app.add_typer(broker_app, name="broker")
    app.add_typer(topics_app, name="topics")
    app.add_typer(export_app, name="export")
    app.add_typer(weights_app, name="weights")
    register_cat(app)
    register_watch(app)
    register_inspect(app)
    add_kafka_command(app)


def main(arguments: list[str] | None = None) -> None:
    """Entry point: errors become one line and an exit code, never a traceback."""
    # Until a role opens its log, what the library has to say is in the one line of the error.
    logging.getLogger("gorila").addHandler(logging.NullHandler())
    if not app.registered_groups:
        _add_groups()
    sys.exit(_exit_code(arguments))


def _exit_code(arguments: list[str] | None) -> int:
    try:
        code = app(args=arguments, prog_name="gorila", standalone_mode=False)
        sys.stdout.flush()
        return code if isinstance(code, int) else 0
    except GorilaError as error:
        return _say(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        return 130
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        if package in ("", "gorila", "producers", "pipelines", "consumers", "schemas"):
            raise
        return _say(f"this needs the package {package!r}: pip install 'gorila-stream[all]'", 1)
    except BrokenPipeError:
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # or the interpreter complains once more on its way out
        return 1
    except OSError as error:
        return _say(f"{error.strerror or error}{': ' + str(error.filename) if error.filename else ''}", 1)
    except Exception as error:
        if not hasattr(error, "format_message") or not hasattr(error, "exit_code"):
            raise
        return _usage(error)


def _usage(error: Any) -> int:
    """What typer refuses, as one line; a command without its sub-command shows its help instead."""
    context = getattr(error, "ctx", None)
    message = str(error.format_message())
    if type(error).__name__ == "NoArgsIsHelpError":  # rich has printed the help when it was asked for the message
        print(message, end="\n" if message else "")
        return 0
    path = context.command_path if context else "gorila"
    return _say(f"{message.rstrip('.?')}; see {path} --help", 2)


def _say(line: str, code: int) -> int:
    print(f"gorila: {line}", file=sys.stderr)
    return code


if __name__ == "__main__":
    main()
