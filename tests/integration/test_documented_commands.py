"""docs/operations.md keeps its word: every command of its ```console blocks is run against a fresh run and answers as printed."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gorila.local.broker import BOOTSTRAP_VARIABLE, BrokerAddress
from tests.integration.training import Training

DOCUMENT = Path(__file__).parents[2] / "docs" / "operations.md"
PATIENCE_S = 150.0
pytestmark = pytest.mark.timeout(300)
BY_TIME = ("gorila doctor", "gorila top")
"""What these say of roles depends on the machine not being held up; that they answer does not."""


def documented() -> list[tuple[str, list[str]]]:
    """(command, its output's lines) of every console block, in order."""
    found: list[tuple[str, list[str]]] = []
    for block in re.findall(r"^```console\n(.*?)^```", DOCUMENT.read_text(), re.MULTILINE | re.DOTALL):
        for line in block.splitlines():
            if line.startswith("$ "):
                found.append((line[2:], []))
            else:
                found[-1][1].append(line)
    return found


@pytest.fixture(scope="module")
def run(broker: BrokerAddress, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    words = ("--set", "actor.max_steps_per_s=200", "--set", "evaluator.min_versions=1000000")
    training = Training(broker.bootstrap_servers, tmp_path_factory.mktemp("documented"), "cartpole", *words)
    try:
        training.until("first updates", lambda: training.updates() >= 50)
        yield training
        assert training.send(signal.SIGINT) == 0, training.errors
    finally:
        training.close()


def answer(command: str, run: Training) -> subprocess.CompletedProcess[str]:
    """The command as a shell runs it, with `gorila` and the run of this test."""
    real = command.replace("demo", run.run).replace("HOST:PORT", run.servers)
    real = re.sub(r"\bgorila(?= )", f"{shlex.quote(sys.executable)} -m gorila.cli", real)
    servers = {"GORILA__KAFKA__BOOTSTRAP_SERVERS": run.servers, BOOTSTRAP_VARIABLE: run.servers}
    return subprocess.run(
        ["bash", "-c", real],
        check=False,
        cwd=run.folder,
        env={**os.environ, **servers},
        capture_output=True,
        text=True,
        timeout=PATIENCE_S,
    )


def shape(line: str, name: str = "demo") -> str:
    """A line without what differs from run to run: the run's name, figures, ids, curves, room between columns and frames."""
    line = line.replace(name, "demo")
    line = re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", "ID", line)
    line = re.sub(r"\d[\d.,]*", "0", line)
    line = re.sub(r"[─━═╭╮╰╯┏┓┡┩╇┳]+", "─", line)
    return re.sub(r"\s+", " ", line).strip()


def test_the_document_has_commands_of_every_tool():
    commands = " ".join(command for command, _ in documented())
    tools = (
        "gorila top",
        "gorila doctor",
        "gorila report",
        "gorila weights verify",
        "gorila cat",
        "consumer-groups",
        "kafka configs",
        "kcat -b",
    )
    assert all(tool in commands for tool in tools)
    assert all(lines for _, lines in documented()), "a command without its output"


@pytest.mark.parametrize("number", range(len(documented())))
def test_a_documented_command_answers_as_printed(number: int, run: Training):
    command, printed = documented()[number]
    if shutil.which(command.split()[0]) is None and command.split()[0] != "gorila":
        pytest.skip(f"{command.split()[0]} is not installed here")
    done = answer(command, run)
    by_time = command.startswith(BY_TIME)
    assert done.returncode == 0 or (by_time and done.returncode == 1), done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    shown = [shape(line, run.run) for line in done.stdout.splitlines()]
    wanted = [shape(line) for line in printed if line.strip() not in ("", "…")]
    # The first line says what it is; the last line of a command that measures nothing says how it ended.
    assert wanted[0] in shown, (wanted[0], done.stdout)
    if not by_time and "kcat" not in command:
        missing = [line for line in wanted if line not in shown]
        assert not missing, (missing, done.stdout)
