"""`gorila train` end to end on a real broker: what it writes, how it ends, and what it survives."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import zlib
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path

import numpy as np
import psutil
import pytest

from consumers.parameter_server.checkpoints import ShardState
from consumers.parameter_server.optimizers import make_optimizer
from consumers.parameter_server.shard import Shard
from gorila.errors import BadRecord
from gorila.local.broker import BrokerAddress
from gorila.local.summary import Summary
from gorila.messages import Gradient, Weights
from gorila.network import initial_weights
from gorila.policy import Policy
from gorila.processor import Incoming
from gorila.run_record import read_all
from tests.integration.training import ROLES, Training

pytestmark = pytest.mark.timeout(600)  # a busy machine; each wait has its own deadline

FRAGILE = """
import gymnasium, numpy as np

class Fragile(gymnasium.Env):
    observation_space = gymnasium.spaces.Box(-1, 1, (3,), np.float32)
    action_space = gymnasium.spaces.Discrete(2)
    steps = 0

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return np.zeros(3, np.float32), {}

    def step(self, action):
        Fragile.steps += 1
        if Fragile.steps > 40:
            raise RuntimeError("the game board caught fire")
        return np.zeros(3, np.float32), 1.0, False, False, {}

def make():
    return Fragile()
"""


@pytest.fixture(scope="module")
def killed(broker: BrokerAddress, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    """A run in which every role was killed once, ended by Ctrl-C. Its groups as Kafka's own tool showed them are in `groups.txt`."""
    folder = tmp_path_factory.mktemp("killed")
    training = Training(broker.bootstrap_servers, folder, "cartpole", "--set", "evaluator.min_versions=1000000")
    try:
        training.until("first updates", lambda: training.updates() >= 50)
        for role in ROLES:
            victim = training.until(f"running {role}", lambda role=role: training.role(role))
            victim.kill()
            victim.wait(10)
            training.until(
                f"new {role}",
                lambda role=role, old=victim.pid: (new := training.role(role)) is not None and new.pid != old,
            )
            before = training.updates()
            training.until(f"updates after {role} was killed", lambda at=before: training.updates() >= at + 50)
        tool = [sys.executable, "-m", "gorila.cli", "kafka", "consumer-groups", "--describe", "--all-groups"]
        shown = subprocess.run(
            [*tool, "--bootstrap-server", broker.bootstrap_servers], capture_output=True, text=True, check=True
        )
        (folder / "groups.txt").write_text(shown.stdout)
        (folder / "exit").write_text(str(training.send(signal.SIGINT)))
        yield training
    finally:
        training.close()


@pytest.fixture(scope="module")
def finished(broker: BrokerAddress, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    """A run that ended by itself at a number of steps, with evaluations on the way."""
    folder = tmp_path_factory.mktemp("finished")
    # Slow enough that a second in which a loaded machine does not look is 5 % of the steps, and that there is time for an evaluation.
    sets = ["evaluator.min_versions=1", "evaluator.threshold=499.9", "actor.max_steps_per_s=200"]
    training = Training(
        broker.bootstrap_servers,
        folder,
        *("cartpole", "--steps", "4000", "--seed", "3"),
        *(word for item in sets for word in ("--set", item)),
    )
    try:
        (folder / "exit").write_text(str(training.wait()))
        yield training
    finally:
        training.close()


def test_ctrl_c_ends_a_run_in_order_with_a_summary_and_exit_code_0(killed: Training) -> None:
    assert (killed.folder / "exit").read_text() == "0", killed.errors
    assert killed.summary()["ended_because"] == "interrupted"
    for role, said in (("learner", "learner.stopped"), ("parameter-server", "parameter_server.stopped")):
        assert said in (killed.run_dir / "logs" / f"{role}-0.log").read_text().splitlines()[-1]
    assert killed.left_behind() == []
    assert "Traceback" not in killed.output + killed.errors


def test_every_role_killed_once_is_restarted_and_counted(killed: Training) -> None:
    for role in ROLES:
        assert f"{role}-0 ended (SIGKILL)" in killed.output
        assert f"{role}-0 restarted (restart 1)" in killed.output
    # On a machine too busy for heartbeats a role may also end by itself and come back; that is counted too.
    assert killed.summary()["restarts"] == killed.output.count(" restarted (restart ") >= len(ROLES)


def test_with_every_role_killed_no_gradient_is_lost_or_applied_twice(killed: Training) -> None:
    service, cluster = killed.service(), killed.cluster()
    flat = initial_weights(service.config, service.facts)
    moments = {
        name: np.zeros(len(flat), np.float32) for name in make_optimizer(service.config.parameter_server).tensors
    }
    undisturbed = Shard(service.config, ShardState(0, flat, moments))
    hash_at = {0: zlib.crc32(flat.tobytes())}
    shown = [service.schemas.expect(r.value, Weights) for r in read_all(cluster, service.topic("weights"))]
    last = shown[-1]
    gradients = 0
    for received in read_all(cluster, service.topic("gradients")):
        if received.offset > last.gradient_offset:
            break  # sent as the run ended: in the log, for the server that goes on
        message = service.schemas.expect(received.value, Gradient)
        gradients += 1
        try:
            list(undisturbed.process(Incoming("gradients", 0, received.offset, received.timestamp_ms, b"0", message)))
        except BadRecord as error:
            pytest.fail(f"the learner wrote a gradient that must not be used: {error}")
        hash_at[undisturbed.state.version] = zlib.crc32(flat.tobytes())
    assert last.version == last.applied == undisturbed.state.version > 300
    assert last.applied + last.dropped_stale + last.dropped_duplicate == gradients
    assert all(record.payload_hash == hash_at[record.version] for record in shown)
    service.close()


def test_kafka_s_own_tool_shows_the_groups_with_committed_offsets(killed: Training) -> None:
    rows = [line.split() for line in (killed.folder / "groups.txt").read_text().splitlines()]
    committed = {row[0]: row[3] for row in rows if len(row) > 5 and row[0].startswith(killed.run)}
    wanted = {f"{killed.run}.{group}" for group in ("replay", "learner", "parameter-server-0-0")}
    assert wanted <= set(committed)
    assert all(committed[group].isdigit() and int(committed[group]) > 0 for group in wanted)


def test_a_run_without_any_evaluation_still_leaves_its_newest_weights(killed: Training) -> None:
    summary = killed.summary()
    assert summary["eval_return_mean"] is None and summary["eval_episodes"] == 0
    policy = Policy.load(killed.run_dir / "weights.safetensors")
    assert policy.version == summary["weights_version"] >= summary["updates"] - 1 > 0


def test_steps_end_a_run_close_to_the_number_asked_for(finished: Training) -> None:
    assert (finished.folder / "exit").read_text() == "0", finished.errors
    summary = finished.summary()
    assert 4000 <= summary["env_steps"] <= 4200
    assert summary["ended_because"] == "4000 environment steps done"
    assert finished.left_behind() == []


def test_summary_json_has_every_key_measured(finished: Training) -> None:
    summary = finished.summary()
    assert list(summary) == [field.name for field in fields(Summary)]
    assert json.loads(finished.output[finished.output.index("{") :]) == summary
    unmeasured = {
        "human_normalised_score",
        "human_normalised_table",
        "human_normalised_protocol",
    }  # CartPole is in no table
    assert {key for key, value in summary.items() if value is None} == unmeasured
    assert (summary["run"], summary["preset"], summary["seed"]) == (finished.run, "cartpole", 3)
    assert (summary["solved"], summary["restarts"], summary["dead_letters"]) == (False, 0, 0)
    assert summary["eval_episodes"] == 20 and 8 <= summary["eval_return_mean"] <= 500
    assert summary["updates"] >= summary["eval_weights_version"] >= 1
    assert summary["updates"] >= summary["weights_version"] >= 1
    assert 0 < summary["samples_per_insert"] <= 33
    assert 0 < summary["bytes_per_transition"] < 250
    assert summary["staleness_p50"] == 0 == summary["staleness_p99"]


def test_a_run_s_folder_explains_itself(finished: Training) -> None:
    folder = finished.run_dir
    config = json.loads((folder / "config.json").read_text())
    assert (config["run"]["seed"], config["run"]["max_env_steps"]) == (3, 4000)
    for role in ROLES:
        said = (folder / "logs" / f"{role}-0.log").read_text()
        assert said.count("service.start") == 1 and "Traceback" not in said
    assert not list((folder / "logs").glob("*.out"))
    assert (folder / "curve.png").read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    assert list((folder / "tensorboard").glob("events.out.tfevents.*"))
    policy = Policy.load(folder / "weights.safetensors")
    assert policy.version == finished.summary()["weights_version"]
    assert policy.act(np.zeros(4, np.float32)) in (0, 1)


def test_plain_output_fits_80_columns_and_says_where_the_files_are(finished: Training) -> None:
    numbers = [line for line in finished.output.splitlines() if "| updates" in line]
    assert numbers and max(map(len, numbers)) <= 80, numbers
    assert f"files in runs/{finished.run}" in finished.output


def test_sigterm_ends_a_run_like_ctrl_c(broker: BrokerAddress, tmp_path: Path) -> None:
    training = Training(broker.bootstrap_servers, tmp_path, "cartpole")
    try:
        training.until("updates", lambda: training.updates() >= 20)
        assert training.send(signal.SIGTERM) == 0, training.errors
        assert training.summary()["ended_because"] == "interrupted"
        assert training.left_behind() == []
        assert (training.run_dir / "weights.safetensors").exists()
    finally:
        training.close()


def test_roles_do_not_outlive_a_supervisor_that_was_killed(broker: BrokerAddress, tmp_path: Path) -> None:
    training = Training(broker.bootstrap_servers, tmp_path, "cartpole")
    try:
        for role in ROLES:
            training.until(f"running {role}", lambda role=role: training.role(role))
        training.process.kill()
        training.wait()
        training.until("end of all roles", lambda: not training.left_behind(), while_running=False)
    finally:
        training.close()


def test_a_role_that_keeps_dying_ends_the_run_with_its_last_lines(broker: BrokerAddress, tmp_path: Path) -> None:
    (tmp_path / "fragile.py").write_text(FRAGILE)
    words = ("cartpole", "--set", "env.id=fragile:make", "--set", "env.max_episode_steps=100")
    training = Training(broker.bootstrap_servers, tmp_path, *words)
    try:
        assert training.wait(500.0) == 1  # six starts of an actor
        assert "gorila: actor-0 keeps ending" in training.errors
        assert "the game board caught fire" in training.errors
        summary = training.summary()
        assert (summary["ended_because"], summary["restarts"]) == ("a role kept failing", 5)
        running = [p for p in psutil.process_iter(["cmdline"]) if training.run in (p.info["cmdline"] or [])]
        assert running == []
    finally:
        training.close()
