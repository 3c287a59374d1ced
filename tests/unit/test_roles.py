"""Supervision of role processes: restarted with patience, given up when they keep dying, stopped for good."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gorila.config import Config
from gorila.errors import ConfigError, RunError
from gorila.local.roles import CRASHES_ALLOWED, RoleProcess, instances, local_sets, role_processes, stop_all
from gorila.settings import load_config


def role(folder: Path, code: str) -> RoleProcess:
    return RoleProcess("actor", 0, [sys.executable, "-c", code], folder / "logs" / "actor-0.log", dict(os.environ))


def dies(process: RoleProcess, started_s: float, lived_s: float) -> str:
    """Let it die after a life of `lived_s` and be started again; what was said of its end."""
    assert process._process is not None
    process._process.wait()
    said = process.watch(started_s + lived_s)
    assert said is not None
    return said


def test_a_role_that_dies_at_once_is_restarted_five_times_and_then_ends_the_run_with_its_last_words(
    tmp_path: Path,
) -> None:
    process = role(tmp_path, "import sys; print('no board left'); sys.exit(3)")
    process.start(0.0)
    now, pauses = 0.0, []
    for restart in range(1, CRASHES_ALLOWED + 1):
        said = dies(process, now, 0.1)
        assert "exit code 3" in said
        pauses.append(float(said.rpartition(" in ")[2].removesuffix(" s")))
        assert process.watch(now + 0.1 + pauses[-1] * 0.9) is None, "not before its pause is over"
        now += 0.2 + pauses[-1]
        assert process.watch(now) == f"actor-0 restarted (restart {restart})"
    assert pauses == [0.1, 0.2, 0.4, 0.8, 1.6]
    with pytest.raises(RunError, match=r"actor-0 keeps ending \(exit code 3, 5 restarts\)[^$]*no board left"):
        dies(process, now, 0.1)


@pytest.mark.parametrize(("lived_s", "deaths"), [(30.0, 7), (90.0, 18)])
def test_a_role_that_dies_for_ever_ends_the_run_even_if_it_lives_a_while_each_time(
    tmp_path: Path, lived_s: float, deaths: int
) -> None:
    process = role(tmp_path, "raise SystemExit(1)")
    process.start(0.0)
    now = 0.0
    for died in range(1, 100):  # noqa: B007
        try:
            dies(process, now, lived_s)
        except RunError:
            break
        now += lived_s + 10
        process.watch(now)
    assert died == deaths


def test_a_kill_every_few_minutes_is_survived_for_ever(tmp_path: Path) -> None:
    process = role(tmp_path, "import time; time.sleep(600)")
    process.start(0.0)
    now = 0.0
    for _ in range(20):
        assert process._process is not None
        process._process.kill()
        assert "SIGKILL" in dies(process, now, 130.0)
        now += 140.0
        process.watch(now)
    assert process.restarts == 20
    assert stop_all([process]) == []


def test_a_role_that_refuses_its_command_is_not_started_again(tmp_path: Path) -> None:
    process = role(tmp_path, "import sys; print('gorila: --index = 9 is not allowed'); sys.exit(2)")
    process.start(0.0)
    with pytest.raises(RunError, match="actor-0 refused to start: gorila: --index = 9"):
        dies(process, 0.0, 0.1)
    assert process.restarts == 0


def test_what_does_not_stop_is_killed_and_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gorila.local.roles.STOP_WITHIN_S", 0.3)
    deaf = role(
        tmp_path, "import signal, time; signal.signal(15, signal.SIG_IGN); print('deaf', flush=True); time.sleep(600)"
    )
    deaf.start(0.0)
    deadline = time.monotonic() + 60
    while deaf.last_lines(1) != "deaf" and time.monotonic() < deadline:
        time.sleep(0.02)
    assert stop_all([deaf]) == ["actor-0"]
    assert deaf.pid is None


def test_a_run_s_processes_are_those_its_configuration_counts() -> None:
    config = load_config("cartpole", ["actor.count=3", "learner.count=2", "parameter_server.shards=2"], {})
    found = list(instances(config))
    assert len(found) == len(set(found))
    counts = {name: sum(1 for role, _ in found if role == name) for name, _ in found}
    wanted = {"parameter-server": 2, "learner": 2, "replay": 1, "actor": 3, "evaluator": 1, "monitor": 1}
    assert wanted.items() <= counts.items()


def test_roles_are_told_what_the_run_s_record_does_not_carry_and_nothing_from_the_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("GORILA__LEARNER__BATCH_SIZE", "64")
    config = load_config(
        "cartpole", ["learner.batch_size=32", "monitor.tensorboard=false", "monitor.metrics_port=9100"]
    )
    roles = role_processes("r", config, "somewhere:1", tmp_path)
    assert not any(name.startswith("GORILA__") for process in roles for name in process.environ)
    assert all("monitor.tensorboard=False" in process.command for process in roles)
    ports = [word for process in roles for word in process.command if word.startswith("monitor.metrics_port=")]
    assert len(set(ports)) == len(roles) and "monitor.metrics_port=9100" in ports
    assert local_sets(Config()) == ()


def test_a_role_s_watch_of_its_supervisor_ends_it(tmp_path: Path) -> None:
    child = "import threading; from gorila.local.roles import stop_with_supervisor as s; e = threading.Event(); s(e); print('up', flush=True); e.wait(600)"
    parent = (
        "import os, subprocess, sys, time\n"
        "os.environ['GORILA_SUPERVISOR_PID'] = str(os.getpid())\n"
        f"child = subprocess.Popen([sys.executable, '-c', {child!r}], stdout=subprocess.PIPE)\n"
        "child.stdout.readline(); print(child.pid, flush=True); time.sleep(600)"
    )
    supervisor = subprocess.Popen([sys.executable, "-c", parent], stdout=subprocess.PIPE, text=True)
    assert supervisor.stdout is not None
    pid = int(supervisor.stdout.readline())
    supervisor.kill()
    supervisor.communicate()
    deadline = time.monotonic() + 60
    while (
        Path(f"/proc/{pid}/cmdline").exists()
        and Path(f"/proc/{pid}/cmdline").read_bytes()
        and time.monotonic() < deadline
    ):
        time.sleep(0.05)
    assert not Path(f"/proc/{pid}/cmdline").exists() or not Path(f"/proc/{pid}/cmdline").read_bytes()


def test_a_shard_has_a_process_for_each_replica_and_each_a_name_and_a_log_of_its_own(tmp_path: Path) -> None:
    config = load_config("cartpole", ["parameter_server.shards=2", "parameter_server.replicas=3"], {})
    servers = [p for p in role_processes("r", config, "somewhere:1", tmp_path) if p.role == "parameter-server"]
    assert [p.name for p in servers] == [f"parameter-server-{shard}-{n}" for shard in range(2) for n in range(3)]
    assert len({p.log for p in servers}) == 6
    assert [p.command[-2:] for p in servers[:3]] == [["--replica", str(n)] for n in range(3)]


def test_more_replicas_than_a_chain_can_use_are_refused_with_the_key_and_what_is_allowed() -> None:
    with pytest.raises(ConfigError, match=r"parameter_server\.replicas.*6.*5"):
        load_config("cartpole", ["parameter_server.replicas=6"], {})
