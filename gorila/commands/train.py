"""`gorila train|evaluate|config|presets`: on one machine, from a preset to a policy."""

from __future__ import annotations

import dataclasses
import importlib
import json
from contextlib import nullcontext
from pathlib import Path
from typing import Annotated, Any

import typer

from gorila.commands.options import Priorities, Reprioritise, Servers, Sets, Updates
from gorila.errors import UsageError
from gorila.local.going_on import GoingOn, Memory


def _presets() -> list[str]:
    from gorila.settings import preset_names

    return preset_names()


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


def config(
    preset: Annotated[str, typer.Argument(help="Preset name or a path to a .toml file.")] = "cartpole",
    sets: Sets = None,
) -> None:
    """Print the effective configuration of a preset with the environment and --set applied.

    Example: gorila config pong --set learner.batch_size=64
    """
    from gorila.settings import load_config, shown

    print(json.dumps(shown(load_config(preset, sets or [])), indent=2))


def presets() -> None:
    """List the presets that ship.

    Example: gorila presets
    """
    print("\n".join(_presets()))


def register(app: typer.Typer) -> None:
    """Add the commands."""
    for command in (train, evaluate, config, presets):
        app.command()(command)
