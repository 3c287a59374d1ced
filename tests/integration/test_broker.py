"""The embedded broker and Kafka's own tools, for real: every start here is a real Kafka."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest

from gorila.errors import BrokerError, GorilaError, LocalError, UsageError
from gorila.kafka import Cluster
from gorila.kafka.admin import NewTopic
from gorila.local import classpath
from gorila.local.broker import BOOTSTRAP_VARIABLE, Broker, BrokerAddress
from gorila.local.broker_process import BrokerRecord, free_port, write_record
from gorila.local.kafka_tools import KAFKA_TOOLS, find_tool, run_kafka_tool, tool_arguments
from gorila.topics import MAX_RECORD_BYTES


def gorila(*words: str, cwd: Path, env: dict[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the real command in its own process."""
    environment = {key: value for key, value in os.environ.items() if key != BOOTSTRAP_VARIABLE} | (env or {})
    environment["PYTHONPATH"] = str(Path(__file__).parents[2])
    command = [sys.executable, "-c", "from gorila.cli import main; main()", *words]
    return subprocess.run(command, check=False, cwd=cwd, env=environment, capture_output=True, text=True, timeout=120)


def one_line(error: pytest.ExceptionInfo[GorilaError]) -> str:
    text = str(error.value)
    assert "\n" not in text
    return text


@pytest.fixture
def bystander() -> Iterator[subprocess.Popen[bytes]]:
    """A process that is not a broker."""
    process = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    yield process
    process.kill()
    process.wait()


# --- its life ---------------------------------------------------------------------------------------------------------


def test_a_broker_keeps_its_data_cluster_id_and_port_over_stop_and_kill(tmp_path: Path) -> None:
    folder = tmp_path / "données, a=b"  # spaces, commas, equals signs and accents are all special to Java or Kafka
    with Broker(folder) as broker:
        status = broker.status()
        assert status is not None
        assert status.answering
        first = status
        assert os.getsid(first.pid) == first.pid  # Ctrl-C in the terminal of its parent does not reach it
        producer = Cluster(first.bootstrap_servers).producer()
        Cluster(first.bootstrap_servers).admin().create_topics([NewTopic("kept", 1, 1, {})])
        producer.send("kept", b"before", partition=0)
        producer.flush(30.0)
        os.kill(first.pid, signal.SIGKILL)
        second = broker.start()
        assert second.pid != first.pid
        assert second.bootstrap_servers == first.bootstrap_servers
        assert broker.stop()
        assert broker.status() is None
        assert not broker.stop()
        third = broker.start()
        assert third.bootstrap_servers == first.bootstrap_servers
        assert Cluster(third.bootstrap_servers).admin().end_offsets([("kept", 0)]) == {("kept", 0): 1}
        status = broker.status()
        assert status is not None
        assert status.cluster_id == first.cluster_id
    assert not psutil.pid_exists(third.pid)


def test_a_second_start_in_the_folder_finds_the_broker_and_leaves_it_running(broker: BrokerAddress) -> None:
    with Broker(broker.folder) as again:
        assert not again.started_here
        status = again.status()
        assert status is not None
        assert (status.pid, status.bootstrap_servers) == (broker.pid, broker.bootstrap_servers)
    assert psutil.pid_exists(broker.pid)
    with pytest.raises(LocalError) as error:
        Broker(broker.folder, port=free_port()).start()
    assert broker.bootstrap_servers.split(":")[1] in one_line(error)


def test_a_process_that_took_over_the_recorded_pid_is_not_touched(
    tmp_path: Path, bystander: subprocess.Popen[bytes]
) -> None:
    write_record(tmp_path / "broker.json", BrokerRecord(bystander.pid, "0" * 32, 1, 2))
    assert Broker(tmp_path).status() is None
    assert not Broker(tmp_path).stop()
    assert bystander.poll() is None


@pytest.mark.parametrize(
    "text", ["", "{", "[]", '{"pid": 1}', '{"pid": -1, "token": "", "port": 1, "controller_port": 2}']
)
def test_a_damaged_record_means_no_broker(tmp_path: Path, text: str) -> None:
    (tmp_path / "broker.json").write_text(text)
    assert Broker(tmp_path).status() is None
    assert not Broker(tmp_path).stop()


# --- what goes wrong --------------------------------------------------------------------------------------------------


def test_a_port_in_use_is_one_line_and_exit_code_1(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = gorila("broker", "start", "--dir", "b", "--port", str(port), cwd=tmp_path)
    assert result.returncode == 1
    assert result.stderr.count("\n") == 1
    assert f"port {port} is in use" in result.stderr


def test_a_port_beyond_65535_is_a_usage_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        Broker(tmp_path, port=70000)
    assert "70000" in one_line(error)


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    with pytest.raises(LocalError) as error:
        Broker(tmp_path / "file" / "broker").start()
    assert str(tmp_path / "file") in one_line(error)


def test_a_nearly_full_disk_is_refused_before_kafka_would_die_of_it(tmp_path: Path) -> None:
    with pytest.raises(LocalError) as error:
        Broker(tmp_path, min_free_bytes=2**62).start()
    assert "disk full" in one_line(error)
    assert not (tmp_path / "kafka").exists()


def test_a_kafka_that_cannot_start_says_why_and_leaves_no_process(tmp_path: Path) -> None:
    (tmp_path / "kafka").mkdir()
    (tmp_path / "kafka" / "meta.properties").write_text("version=1\ncluster.id=abcdefghijklmnopqrstuv\nnode.id=7\n")
    broker = Broker(tmp_path)
    with pytest.raises(BrokerError) as error:
        broker.start()
    assert "configured node id" in str(error.value)
    assert "\tat " not in str(error.value)
    assert str(tmp_path / "broker.log") in str(error.value)
    assert not psutil.pid_exists(json.loads((tmp_path / "broker.json").read_text())["pid"])
    assert broker.status() is None


# --- the jars ---------------------------------------------------------------------------------------------------------


def test_cached_jars_need_no_resolver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, broker: BrokerAddress) -> None:
    known = classpath.java_class_path().jars
    monkeypatch.setenv("GORILA_CACHE_DIR", str(tmp_path))
    assert set(classpath.java_class_path().jars) == set(known)
    monkeypatch.setitem(sys.modules, "jgo", None)  # from here on asking the resolver is an ImportError
    assert set(classpath.java_class_path().jars) == set(known)
    (list_file,) = tmp_path.iterdir()
    stored = json.loads(list_file.read_text())
    stored["jars"][3]["path"] = str(tmp_path / "vanished.jar")
    list_file.write_text(json.dumps(stored))
    with pytest.raises(LocalError) as error:
        classpath.java_class_path()
    assert "`local` extra" in one_line(error)
    monkeypatch.undo()
    monkeypatch.setenv("GORILA_CACHE_DIR", str(tmp_path))
    assert set(classpath.java_class_path().jars) == set(known)


def test_no_network_and_no_cache_is_one_line(tmp_path: Path) -> None:
    closed = f"http://127.0.0.1:{free_port()}"
    nowhere = {"HOME": str(tmp_path), "GORILA_CACHE_DIR": str(tmp_path), "XDG_CACHE_HOME": str(tmp_path)}
    proxies = {"HTTPS_PROXY": closed, "https_proxy": closed, "HTTP_PROXY": closed, "NO_PROXY": "", "no_proxy": ""}
    result = gorila("broker", "start", "--dir", "b", cwd=tmp_path, env=nowhere | proxies)
    assert result.returncode == 1
    assert "could not be downloaded" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stderr.count("\n") == 1


# --- Kafka's own tools ------------------------------------------------------------------------------------------------


def test_kafka_s_tools_work_on_the_broker(
    broker: BrokerAddress, run_name: str, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(BOOTSTRAP_VARIABLE, broker.bootstrap_servers)

    def tool(*words: str) -> str:
        assert run_kafka_tool(words[0], words[1:]) == 0
        return capfd.readouterr().out

    tool("topics", "--create", "--topic", run_name, "--partitions", "2", "--config", "retention.bytes=1000000")
    assert run_name in tool("topics", "--list").split()
    configs = tool("configs", "--describe", "--entity-type", "topics", "--entity-name", run_name)
    assert "retention.bytes=1000000" in configs
    words = ("--topic", run_name, "--num-records", "50", "--record-size", "1000", "--throughput", "-1")
    assert "50 records sent" in tool("producer-perf-test", *words)
    offsets = tool("get-offsets", "--topic", run_name).split()
    assert sum(int(line.split(":")[2]) for line in offsets) == 50
    consumer = Cluster(broker.bootstrap_servers).consumer(f"{run_name}.reader")
    consumer.commit({(run_name, 0): 0, (run_name, 1): 0}, wait=True)
    consumer.close()
    lines = tool("consumer-groups", "--describe", "--all-groups").splitlines()
    lags = [line.split()[5] for line in lines if line.startswith(f"{run_name}.reader")]
    assert len(lags) == 2
    assert sum(map(int, lags)) == 50


def test_a_tool_s_exit_code_is_handed_on(broker: BrokerAddress, run_name: str) -> None:
    words = ["--describe", "--topic", run_name]
    assert run_kafka_tool("topics", words, folder=broker.folder) != 0


def test_every_tool_s_class_is_on_the_class_path(broker: BrokerAddress) -> None:
    import zipfile

    entries = {
        name
        for jar in classpath.java_class_path().jars
        if jar.name.startswith("kafka")
        for name in zipfile.ZipFile(jar).namelist()
    }
    missing = [
        name for name, tool in KAFKA_TOOLS.items() if tool.main_class.replace(".", "/") + ".class" not in entries
    ]
    assert not missing


@pytest.mark.parametrize(
    ("name", "given", "handed_on"),
    [
        ("topics", ["--list"], ["--bootstrap-server", "h:1", "--list"]),
        ("kafka-topics.sh", ["--list"], ["--bootstrap-server", "h:1", "--list"]),
        ("cluster", ["cluster-id"], ["cluster-id", "--bootstrap-server", "h:1"]),
        ("broker-api-versions", [], ["--bootstrap-server", "h:1"]),
        ("topics", [], []),
        ("topics", ["--help"], ["--help"]),
        ("topics", ["--list", "--bootstrap-server", "mine:9"], ["--list", "--bootstrap-server", "mine:9"]),
        ("topics", ["--list", "--bootstrap-server=mine:9"], ["--list", "--bootstrap-server=mine:9"]),
        (
            "metadata-quorum",
            ["--bootstrap-controller", "c:9", "describe"],
            ["--bootstrap-controller", "c:9", "describe"],
        ),
        (
            "producer-perf-test",
            ["--producer-props", "bootstrap.servers=m:9"],
            ["--producer-props", "bootstrap.servers=m:9"],
        ),
        ("dump-log", ["--files", "x"], ["--files", "x"]),
    ],
)
def test_bootstrap_servers_are_filled_in_only_where_the_user_did_not_say(
    monkeypatch: pytest.MonkeyPatch, name: str, given: list[str], handed_on: list[str]
) -> None:
    monkeypatch.setenv(BOOTSTRAP_VARIABLE, "h:1")
    assert tool_arguments(find_tool(name), given) == handed_on


def test_an_unknown_tool_is_one_line_that_lists_the_tools(tmp_path: Path) -> None:
    with pytest.raises(UsageError) as error:
        find_tool("topic")
    text = one_line(error)
    assert "did you mean topics?" in text
    assert all(name in text for name in KAFKA_TOOLS)


def test_a_tool_without_any_broker_says_how_to_get_one(tmp_path: Path) -> None:
    result = gorila("kafka", "topics", "--list", cwd=tmp_path)
    assert result.returncode == 2
    assert result.stderr.count("\n") == 1
    assert "gorila broker start" in result.stderr


# --- the commands -----------------------------------------------------------------------------------------------------


def test_the_commands_show_a_running_broker_and_what_a_shell_needs(broker: BrokerAddress, tmp_path: Path) -> None:
    folder = str(broker.folder)
    started = gorila("broker", "start", "--dir", folder, cwd=tmp_path)
    assert (started.returncode, started.stderr) == (0, "")
    assert f"already running at {broker.bootstrap_servers}" in started.stdout
    shown = gorila("broker", "status", "--dir", folder, cwd=tmp_path).stdout
    assert all(text in shown for text in (broker.bootstrap_servers, str(broker.pid), folder, "uptime"))
    exported = gorila("broker", "env", "--dir", folder, cwd=tmp_path).stdout
    assert exported == f"export {BOOTSTRAP_VARIABLE}={broker.bootstrap_servers}\n"


def test_status_stop_and_env_without_a_broker(tmp_path: Path) -> None:
    assert gorila("broker", "status", cwd=tmp_path).returncode == 1
    assert gorila("broker", "env", cwd=tmp_path).stdout == ""
    stopped = gorila("broker", "stop", cwd=tmp_path)
    assert stopped.returncode == 0
    assert "no broker runs" in stopped.stdout
    assert list(tmp_path.iterdir()) == []  # looking leaves nothing behind


def test_help_after_the_tool_s_name_is_the_tool_s(tmp_path: Path, broker: BrokerAddress) -> None:
    ours = gorila("kafka", "--help", cwd=tmp_path)
    assert "consumer-groups" in ours.stdout
    assert ours.returncode == 0
    theirs = gorila("kafka", "topics", "--help", cwd=tmp_path)
    assert "--partitions" in theirs.stdout + theirs.stderr


def test_the_broker_takes_the_largest_record_of_ours(broker: BrokerAddress, run_name: str) -> None:
    cluster = Cluster(broker.bootstrap_servers)
    cluster.admin().create_topics([NewTopic(run_name, 1, 1, {})])
    producer = cluster.producer()
    producer.send(run_name, os.urandom(MAX_RECORD_BYTES - 1024), partition=0)
    producer.flush(30.0)
    assert cluster.admin().end_offsets([(run_name, 0)]) == {(run_name, 0): 1}
