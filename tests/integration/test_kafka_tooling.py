"""Kafka's own tools, and ours, on a running loop; then an operator's offset resets on the stopped one (design section 7).

The tests run in the order of the file: one short run is looked at, throttled, looked at again, and stopped.
"""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from gorila.codec import HEADER, schema_id
from gorila.kafka import Cluster
from gorila.local.broker import BrokerAddress
from schemas import text as schema_text
from tests.integration.free_ports import free_ports
from tests.integration.training import ROLES, Training

PATIENCE_S = 150.0
pytestmark = pytest.mark.timeout(400)
ACTOR = 3
"""The actor's place among the processes: its metrics port is counted from the first."""


def gorila(broker: BrokerAddress, *words: str, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "GORILA__KAFKA__BOOTSTRAP_SERVERS": broker.bootstrap_servers}
    command = [sys.executable, "-m", "gorila.cli", *words]
    return subprocess.run(
        command, check=False, capture_output=True, text=True, cwd=folder, env=environ, timeout=PATIENCE_S
    )


def kafka(broker: BrokerAddress, tool: str, *words: str) -> str:
    """Output of one of Kafka's own tools; it must end well."""
    done = gorila(broker, "kafka", tool, "--bootstrap-server", broker.bootstrap_servers, *words)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def rows(table: str) -> list[dict[str, str]]:
    """A tool's tables, one a group, each by its header."""
    found, header = [], []
    for words in (line.split() for line in table.splitlines()):
        if words[:1] == ["GROUP"]:
            header = words
        elif len(words) >= len(header) > 0:
            found.append(dict(zip(header, words, strict=False)))
    return found


def findings(table: str) -> dict[str, tuple[str, str]]:
    """{check: (level, found)} of the doctor's table; of several the first, which is the worst."""
    read: dict[str, tuple[str, str]] = {}
    level = check = text = ""
    for line in [*(row for row in table.splitlines() if row.startswith("│")), "│end│││"]:
        cells = line.split("│")[1:5]
        if cells[0].strip():
            if check:
                read.setdefault(check, (level, text))
            level, check, text = cells[0].strip(), "", ""
        check = f"{check} {cells[1].strip()}".strip()
        text += f" {cells[2].strip()}"
    return read


def until(what: str, happened: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + PATIENCE_S
    while not (value := happened()):
        assert time.monotonic() < deadline, f"no {what} within {PATIENCE_S:g} s"
        time.sleep(0.2)
    return value


@pytest.fixture(scope="module")
def live(broker: BrokerAddress, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Training]:
    """A run that learns, gently."""
    port = free_ports(len(ROLES))
    sets = ["actor.max_steps_per_s=300", "evaluator.min_versions=1000000", f"monitor.metrics_port={port}"]
    words = [word for item in sets for word in ("--set", item)]
    training = Training(broker.bootstrap_servers, tmp_path_factory.mktemp("live"), "cartpole", *words)
    training.actor_metrics = f"http://127.0.0.1:{port + ACTOR}/metrics"  # type: ignore[attr-defined]
    try:
        training.until("first updates", lambda: training.updates() >= 100)
        yield training
    finally:
        training.close()


@pytest.fixture(scope="module")
def stopped(live: Training, broker: BrokerAddress) -> Training:
    """The same run, ended; its static members' sessions over."""
    assert live.send(signal.SIGINT) == 0, live.errors
    admin = Cluster(broker.bootstrap_servers).admin()
    groups = [f"{live.run}.{name}" for name in ("replay", "learner")]
    until("empty groups", lambda: not any(facts.members for facts in admin.describe_groups(groups).values()))
    return live


def test_consumer_groups_shows_committed_offsets_lag_and_members(live: Training, broker: BrokerAddress):
    shown = rows(kafka(broker, "consumer-groups", "--describe", "--all-groups"))
    ours = {row["GROUP"].removeprefix(f"{live.run}."): row for row in shown if row["GROUP"].startswith(live.run)}
    assert {"replay", "learner", "parameter-server-0-0"} <= set(ours)
    for row in ours.values():
        assert int(row["CURRENT-OFFSET"]) > 0 and int(row["LAG"]) == int(row["LOG-END-OFFSET"]) - int(
            row["CURRENT-OFFSET"]
        )
    assert ours["replay"]["CONSUMER-ID"].startswith("replay-0-")
    assert ours["learner"]["CLIENT-ID"] == f"{live.run}-learner-0-consumer"
    members = rows(kafka(broker, "consumer-groups", "--describe", "--members", "--group", f"{live.run}.learner"))
    assert [(row["#PARTITIONS"], row["CONSUMER-ID"][:9]) for row in members] == [("1", "learner-0")]


def test_top_prints_a_frame_of_80_columns_from_kafka_alone(live: Training, broker: BrokerAddress, tmp_path: Path):
    done = gorila(broker, "top", "--run", live.run, "--once", folder=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    lines = done.stdout.splitlines()
    assert max(map(len, lines)) == 80 and "running" in lines[0] and live.run in lines[0]
    for word in ("replay", "learner", "server-0-0", "actor-0", "evaluator-0", "staleness"):
        assert word in done.stdout
    assert int(re.search(r"updates +([\d,]+)", done.stdout)[1].replace(",", "")) >= 100  # type: ignore[index]


def test_doctor_sees_a_setting_that_somebody_changed_and_finds_the_rest_in_order(
    live: Training, broker: BrokerAddress, tmp_path: Path
):
    topic = ("--entity-type", "topics", "--entity-name", f"{live.run}.replication")
    kafka(broker, "configs", "--alter", *topic, "--add-config", "max.message.bytes=1000")
    done = gorila(broker, "doctor", "--run", live.run, folder=tmp_path)
    assert (done.returncode, done.stderr) == (1, "")
    found = findings(done.stdout)
    level, text = found["topics"]
    assert level == "wrong" and "max.message.bytes is 1000, the topology says 8388608" in " ".join(text.split()), (
        done.stdout
    )
    # Roles, lag, clocks and the cosine (of the nearest snapshot kept) are judged by time, and this machine may be held up; these are not.
    assert found["cosine similarity > .99"][0] in ("fine", "advice"), done.stdout
    for check in ("broker", "schemas", "dead letters", "PS CPU < 60 %"):
        assert found[check][0] == "fine", done.stdout


def test_report_of_a_running_run_from_kafka_alone(live: Training, broker: BrokerAddress, tmp_path: Path):
    done = gorila(broker, "report", live.run, "--out", str(tmp_path / "r.html"), folder=tmp_path)
    assert done.returncode == 0, done.stderr
    text = (tmp_path / "r.html").read_text()
    HTMLParser().feed(text)
    assert "Curves from Kafka" in text and text.count("<polyline") >= 3 and "transitions/0" in text


def test_kcat_lists_and_consumes_our_topics(live: Training, broker: BrokerAddress):
    kcat = shutil.which("kcat") or shutil.which("kafkacat")
    if kcat is None:
        pytest.skip("kcat is not installed here (Debian: apt-get install kcat)")

    def ask(*words: str) -> bytes:
        return subprocess.run(
            [kcat, "-b", broker.bootstrap_servers, *words], capture_output=True, check=True, timeout=60
        ).stdout

    listed = ask("-L", "-t", f"{live.run}.transitions").decode()
    assert f'topic "{live.run}.transitions" with 1 partitions' in listed
    keys = ask(
        "-C", "-t", f"{live.run}.episodes", "-o", "beginning", "-c", "3", "-e", "-q", "-f", r"%p %o %k\n"
    ).decode()
    assert [line.split()[:2] for line in keys.splitlines()] == [["0", str(i)] for i in range(3)]
    value = ask("-C", "-t", f"{live.run}.episodes", "-o", "beginning", "-c", "1", "-e", "-q", "-f", "%s")
    assert HEADER.unpack_from(value) == (0, schema_id(schema_text("episode")))


def test_a_quota_on_an_actor_throttles_it_and_its_metrics_say_so(live: Training, broker: BrokerAddress):
    def throttle_s() -> float:
        with urllib.request.urlopen(live.actor_metrics, timeout=10) as answer:  # type: ignore[attr-defined]
            page = answer.read().decode()
        found = re.search(r'^gorila_kafka_throttle_seconds\{[^}]*client="producer"[^}]*\} (\S+)$', page, re.MULTILINE)
        return float(found[1]) if found else 0.0

    assert throttle_s() == 0
    client = ("--entity-type", "clients", "--entity-name", f"{live.run}-actor-0-producer")
    kafka(broker, "configs", "--alter", *client, "--add-config", "producer_byte_rate=300")
    shown = kafka(broker, "configs", "--describe", *client)
    assert "producer_byte_rate=300" in shown
    try:
        assert until("throttled actor", throttle_s) > 0
    finally:
        kafka(broker, "configs", "--alter", *client, "--delete-config", "producer_byte_rate")
    before = live.updates()
    live.until("updates once the quota is gone", lambda: live.updates() >= before + 20)


def test_replay_and_learner_obey_an_operators_reset_and_the_parameter_server_refuses(
    stopped: Training, broker: BrokerAddress
):
    run, servers = stopped.run, broker.bootstrap_servers
    admin = Cluster(servers).admin()
    gradients = (f"{run}.gradients", 0)
    before = admin.group_offsets(f"{run}.parameter-server-0-0", [gradients])[gradients]
    assert before is not None and before > 0
    resets = {
        "replay": ("replay", "transitions", "--to-earliest"),
        "learner": ("learner", "batches", "--shift-by=-8"),
        "parameter-server": ("parameter-server-0-0", "gradients", "--to-earliest"),
    }
    for group, topic, how in resets.values():
        words = [*how.split("="), "--group", f"{run}.{group}", "--topic", f"{run}.{topic}", "--execute"]
        kafka(broker, "consumer-groups", "--reset-offsets", *words)
    assert admin.group_offsets(f"{run}.parameter-server-0-0", [gradients])[gradients] == 0
    outputs = {role: stopped.folder / f"{role}.again" for role in resets}
    processes = []
    try:
        for role, path in outputs.items():
            words = [sys.executable, "-m", "gorila.cli", role, "--run", run, "--bootstrap-servers", servers]
            with path.open("wb") as out:
                processes.append(
                    subprocess.Popen(
                        [*words, "--run-dir", str(stopped.run_dir)], stdout=out, stderr=out, stdin=subprocess.DEVNULL
                    )
                )
        said = {
            "replay": "replay.operator_reset_obeyed",
            "learner": "operator.reset_obeyed",
            "parameter-server": "operator.reset_refused",
        }
        lines = {}
        for role, event in said.items():

            def line(role: str = role, event: str = event) -> str | None:
                return next((text for text in outputs[role].read_text().splitlines() if event in text), None)

            lines[role] = until(f"{event} from {role}", line)
        assert "offset=0" in lines["replay"] and "partition=0" in lines["replay"]
        assert "topic=batches" in lines["learner"]
        starts_at = int(re.search(r"starts_at=(\d+)", lines["parameter-server"])[1])  # type: ignore[index]
        assert 0 < starts_at <= before
        assert "fork the run" in lines["parameter-server"]
        # Its own offset is what the group shows again: the number in the tools is the number it acts on.
        until(
            "commit of the server's own",
            lambda: (admin.group_offsets(f"{run}.parameter-server-0-0", [gradients])[gradients] or 0) >= before,
        )
        # Replay reads the log again as the operator asked, as fast as learners take what is drawn from it.
        transitions = (f"{run}.transitions", 0)
        until(
            "replay's own commit after the reset",
            lambda: (admin.group_offsets(f"{run}.replay", [transitions])[transitions] or 0) > 0,
        )
    finally:
        for process in processes:
            process.terminate()
        codes = [process.wait(30) for process in processes]
    assert codes == [0, 0, 0], [path.read_text()[-500:] for path in outputs.values()]
