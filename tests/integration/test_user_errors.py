"""Every mistake a user can make: one line that says what is wrong and what is right, an exit code, never a traceback."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import safetensors.numpy

from gorila.cli import main
from gorila.environment_facts import EnvironmentFacts
from gorila.kafka import Cluster
from gorila.local.broker import BrokerAddress
from gorila.network import initial_weights
from gorila.run_record import create_run
from gorila.settings import load_config

GAMES = """
import gymnasium, numpy as np
from gymnasium.spaces import Box, Dict, Discrete

class Game(gymnasium.Env):
    def __init__(self, observation_space, action_space):
        self.observation_space, self.action_space = observation_space, action_space

def dictionary(): return Game(Dict({"a": Box(0, 1, (2,))}), Discrete(2))
def continuous(): return Game(Box(0, 1, (2,)), Box(-1, 1, (2,)))
def broken(): raise ValueError("no board")
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The working directory of every command here, with what the mistakes need."""
    made = tmp_path_factory.mktemp("mistakes")
    (made / "games.py").write_text(GAMES)
    (made / "a-file").write_text("hello")
    (made / "not.toml").write_text("env = [")
    safetensors.numpy.save_file({"x": np.zeros(3, np.float32)}, made / "foreign.safetensors")
    (made / "no-torch").mkdir()
    (made / "no-torch" / "torch.py").write_text("raise ModuleNotFoundError(\"No module named 'torch'\", name='torch')")
    return made


def gorila(folder: Path, *words: str, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    clean = {name: value for name, value in os.environ.items() if not name.startswith("GORILA__")}
    return subprocess.run(
        [sys.executable, "-m", "gorila.cli", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        env={**clean, "COLUMNS": "80", **(env or {})},
        timeout=120,
        check=False,
    )


LOG_LINE = re.compile(r"\d{4}-\d\d-\d\dT[\d:.]+Z (INFO|WARNING) ")


def judge(output: str, errors: str, code: int, wanted_code: int, says: tuple[str, ...]) -> str:
    """The one line beside the log, if all is as it should be."""
    assert "Traceback" not in output + errors, errors
    assert code == wanted_code, errors
    lines = [line for line in errors.splitlines() if not LOG_LINE.match(line)]
    assert len(lines) == 1 and lines[0].startswith("gorila: "), errors
    for part in says:
        assert part in lines[0]
    return lines[0]


def refused(folder: Path, code: int, *words: str, says: tuple[str, ...], env: dict[str, str] | None = None) -> str:
    """The one line of a command run by itself."""
    result = gorila(folder, *words, env=env)
    return judge(result.stdout, result.stderr, result.returncode, code, says)


USAGE: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "a command that is not there": (("trian",), ("trian", "train")),
    "an option that is not there": (("train", "--step", "5"), ("--step",)),
    "an option that is missing": (("learner",), ("--run", "gorila learner --help")),
    "an option of the wrong type": (("train", "--steps", "many"), ("--steps", "integer")),
    "a negative seed": (("train", "--seed", "-1"), ("--seed", "greater than or equal to 0")),
    "a preset with a typing error": (("train", "cartpol"), ("'cartpol'", "did you mean cartpole?")),
    "a preset file that is not there": (("train", "mine.toml"), ("mine.toml", "No such file")),
    "a preset file that is not TOML": (("config", "not.toml"), ("not.toml", "not TOML")),
    "a key that is not there": (("train", "--set", "learner.batchsize=3"), ("learner.batchsize", "learner.batch_size")),
    "a section as a key": (("config", "--set", "learner=3"), ("learner is a section",)),
    "a value of the wrong type": (("train", "--set", "learner.batch_size=big"), ("learner.batch_size", "'big'", "integer")),
    "a value out of range": (("config", "--set", "replay.alpha=-1"), ("replay.alpha", "-1", "greater than or equal to 0")),
    "a value not of the choices": (("config", "--set", "learner.codec=zip"), ("learner.codec", "'fp32'")),
    "values that do not go together": (
        ("train", "--set", "run.synchronous=true", "--set", "actor.count=2"),
        ("run.synchronous needs actor.count = 1",),
    ),
    "--set without =": (("train", "--set", "learner.batch_size"), ("expected key=value",)),
    "weights that are not there": (("evaluate", "none.safetensors"), ("none.safetensors is not a weights file",)),
    "weights that are text": (("evaluate", "a-file"), ("a-file is not a weights file",)),
    "weights that are a folder": (("evaluate", "."), (". is not a weights file",)),
    "weights of another product": (("evaluate", "foreign.safetensors"), ("not one this product wrote",)),
    "an environment that is not there": (("train", "--set", "env.id=CartPol-v1"), ("env.id", "CartPole-v1")),
    "a game that is not there": (("train", "pong", "--set", "env.id=ale:pongg"), ("ale:pongg", "did you mean ale:pong")),
    "a module that is not there": (("train", "--set", "env.id=nowhere.games:make"), ("no module 'nowhere'",)),
    "a name its module does not have": (("train", "--set", "env.id=games:continous"), ("near: continuous",)),
    "an environment that cannot be made": (("train", "--set", "env.id=games:broken"), ("ValueError: no board",)),
    "a dictionary space": (("train", "--set", "env.id=games:dictionary"), ("Dict", "an array (Box)")),
    "continuous actions": (("train", "--set", "env.id=games:continuous"), ("Box", "Discrete")),
    "a network that is not there": (("train", "--set", "network.factory=natur"), ("network.factory", "nature")),
    "a network that is no module": (
        ("train", "--set", "network.factory=games:broken", "--set", "network.hidden=[]"),
        ("network.factory", "(state_shape, actions"),
    ),
    "a role without any Kafka": (("learner", "--run", "x"), ("--bootstrap-servers", "gorila broker start")),
    "a Kafka tool that is not there": (("kafka", "topic"), ("topic", "topics")),
}  # fmt: skip


@pytest.mark.parametrize("mistake", USAGE)
def test_a_wrong_command_is_one_line_and_exit_code_2(
    mistake: str,
    folder: Path,
    broker: BrokerAddress,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    words, says = USAGE[mistake]
    if words[0] == "train":
        words = (*words, "--bootstrap-servers", broker.bootstrap_servers)
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "path", [*sys.path])  # the user's folder is put on it
    with pytest.raises(SystemExit) as ended:
        main([*words])
    said = capsys.readouterr()
    judge(said.out, said.err, int(ended.value.code or 0), 2, says)
    assert not list(folder.glob("runs/*")), "a refused run left something behind"


def test_a_wrong_command_by_itself_is_one_line_too(folder: Path) -> None:
    refused(folder, 2, "train", "cartpol", says=("did you mean cartpole?",))


def test_a_kafka_that_does_not_answer_is_one_line_and_exit_code_1(folder: Path) -> None:
    commands = (("train",), ("actor", "--run", "x"), ("topics", "create", "x"), ("cat", "x.episodes"))
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        nobody = f"127.0.0.1:{taken.getsockname()[1]}"  # bound, never listening
        started = [
            subprocess.Popen(
                [sys.executable, "-m", "gorila.cli", *words, "--bootstrap-servers", nobody],
                cwd=folder,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            for words in commands
        ]
        for process in started:
            output, errors = process.communicate(timeout=120)
            judge(output, errors, process.returncode, 1, (f"Kafka at {nobody} does not answer",))
    assert not list(folder.glob("runs/*"))


def test_a_port_in_use_is_one_line(folder: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        refused(folder, 1, "broker", "start", "--dir", "b", "--port", port, says=(f"port {port} is in use",))


def test_a_runs_folder_that_cannot_be_written_is_one_line(folder: Path, broker: BrokerAddress) -> None:
    words = ("train", "--runs-dir", "a-file/runs", "--bootstrap-servers", broker.bootstrap_servers)
    refused(folder, 1, *words, says=("cannot write to a-file/runs",))


def test_a_broker_folder_that_cannot_be_written_is_one_line(folder: Path, tmp_path: Path) -> None:
    (tmp_path / ".gorila").write_text("a file where the folder should be")
    refused(tmp_path, 1, "train", says=(".gorila",))


@pytest.fixture(scope="module")
def run(broker: BrokerAddress) -> str:
    """A run that exists."""
    config = load_config("cartpole", [], {})
    facts = EnvironmentFacts("CartPole-v1", (4,), "float32", 2, 1, 500)
    create_run(Cluster(broker.bootstrap_servers), "errors-run", config, facts, initial_weights(config, facts))
    return "errors-run"


def test_a_role_of_an_unknown_run_lists_the_runs_there_are(folder: Path, broker: BrokerAddress, run: str) -> None:
    words = ("learner", "--run", "eror-run", "--bootstrap-servers", broker.bootstrap_servers)
    refused(folder, 1, *words, says=("run 'eror-run' does not exist", run))


def test_a_role_that_contradicts_its_run_names_the_key(folder: Path, broker: BrokerAddress, run: str) -> None:
    words = ("learner", "--run", run, "--bootstrap-servers", broker.bootstrap_servers)
    line = refused(folder, 1, *words, "--set", "learner.batch_size=64", says=("learner.batch_size = 64", "has 128"))
    again = refused(folder, 1, *words, env={"GORILA__LEARNER__BATCH_SIZE": "64"}, says=("learner.batch_size = 64",))
    assert line == again


def test_an_index_the_run_does_not_have_is_refused(
    folder: Path, broker: BrokerAddress, run: str, capsys: pytest.CaptureFixture[str]
) -> None:
    for role in ("actor", "learner", "parameter-server", "evaluator", "monitor"):  # replay: any number of splits
        words = [role, "--run", run, "--index", "1", "--bootstrap-servers", broker.bootstrap_servers]
        with pytest.raises(SystemExit) as ended:
            main(words)
        said = capsys.readouterr()
        judge(said.out, said.err, int(ended.value.code or 0), 2, ("--index", "1", "0 to 0"))


def test_a_missing_package_is_named_with_the_way_to_get_it(folder: Path, broker: BrokerAddress, run: str) -> None:
    env = {"PYTHONPATH": str(folder / "no-torch")}
    words = ("learner", "--run", run, "--bootstrap-servers", broker.bootstrap_servers)
    for command in (words, ("evaluate", "a-file")):
        refused(folder, 1, *command, says=("'torch'", "pip install 'gorila-stream[all]'"), env=env)


def test_without_words_it_shows_its_help(folder: Path) -> None:
    result = gorila(folder)
    assert "Usage: gorila" in result.stdout and result.stderr == ""
    assert max(map(len, result.stdout.splitlines())) <= 80


COMMANDS = [
    *(("train",), ("evaluate",), ("config",), ("presets",), ("cat",), ("kafka",)),
    *(("actor",), ("replay",), ("learner",), ("parameter-server",), ("evaluator",), ("monitor",)),
    *(("broker", "start"), ("broker", "stop"), ("broker", "status"), ("broker", "env")),
    *(("topics", "create"), ("topics", "describe"), ("topics", "delete")),
]


@pytest.mark.parametrize("command", COMMANDS, ids=" ".join)
def test_every_command_s_help_has_an_example(command: tuple[str, ...], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main([*command, "--help"])
    assert not ended.value.code
    text = " ".join(capsys.readouterr().out.split())
    assert f"gorila {' '.join(command)}" in text.partition("Example: ")[2]
