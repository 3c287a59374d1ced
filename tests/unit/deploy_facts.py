"""What the deploy tests ask of the product itself: its command line, its configuration keys, its images."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import typer

from gorila import cli
from gorila.config import Config
from gorila.settings import environment_values, load_config

ROOT = Path(__file__).parent.parent.parent
DEPLOY = ROOT / "deploy"


@functools.cache
def command_line() -> Any:
    """The whole command, as `gorila` has it."""
    cli._add_groups()
    return typer.main.get_command(cli.app)


def parse(arguments: Sequence[str], environ: Mapping[str, str] = {}) -> dict[str, Any]:
    """Parameters of a command line, not run. Raises click's UsageError as the command itself would."""
    command, rest = command_line(), [str(argument) for argument in arguments]
    names = []
    while hasattr(command, "commands"):
        names.append(rest[0])
        assert rest[0] in command.commands, f"gorila has no command {' '.join(names)}"
        command, rest = command.commands[rest[0]], rest[1:]
    for name in ("GORILA_INDEX",):
        if name in environ and "--index" not in rest:
            rest = [*rest, "--index", environ[name]]
    parameters = dict(command.make_context(" ".join(names), rest).params)
    return {"command": " ".join(names), **parameters}


def configured(preset: str, environ: Mapping[str, str]) -> Config:
    """The run's configuration as `gorila topics create` would make it. Raises UsageError for a key that does not exist."""
    ours = {name: value for name, value in environ.items() if name.startswith("GORILA__")}
    assert environment_values(ours) or not ours
    return load_config(preset, environ=ours)


def targets() -> dict[str, str]:
    """{stage: what it is built from} of the Dockerfile."""
    found = re.findall(r"^FROM\s+(\S+)\s+AS\s+(\S+)", (DEPLOY / "Dockerfile").read_text(), re.MULTILINE)
    return {stage: source for source, stage in found}


def image_target(image: str) -> str:
    """The Dockerfile target of one of our images, `gorila-<target>:<tag>`."""
    matched = re.fullmatch(r"gorila-(\w+):(\d+\.\d+\.\d+)", image)
    assert matched, f"{image} is not one of our images with a tag"
    return matched[1]


def queries(dashboard: dict[str, Any]) -> list[tuple[str, str]]:
    """(panel, expression) of everything a dashboard asks Prometheus."""
    return [(panel["title"], target["expr"]) for panel in dashboard["panels"] for target in panel["targets"]]
