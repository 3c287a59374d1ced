"""A secured Kafka: each role works with its own rights and is refused everything else; what is wrong with a connection is one line."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import ssl
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path

import psutil
import pytest

from gorila import acls
from gorila.errors import BrokerError, LocalError, NotAllowed
from gorila.flow import LagGate
from gorila.kafka import Cluster
from gorila.kafka.client_properties import read_client_properties
from gorila.local.broker import PROPERTIES_VARIABLE, Broker
from gorila.local.certificates import Authority
from gorila.local.secured import ADMIN, Secured
from gorila.run_follower import RunFollower
from gorila.run_progress import RunProgress
from gorila.run_record import read_all
from gorila.service import open_service
from gorila.topics import TOPOLOGY, full_name
from tests.integration.secured_clients import Tried

ROLE_PROCESSES = ("parameter-server", "learner", "replay", "actor", "evaluator", "monitor", "archiver")
DEADLINE_S = 400.0
SMALL = ("replay.min_size_rows=200", "evaluator.min_versions=10", "evaluator.episodes=2", "evaluator.threshold=100000")


def environment(properties: Path | None = None) -> dict[str, str]:
    own = {key: value for key, value in os.environ.items() if not key.startswith("GORILA__")}
    own["PYTHONPATH"] = str(Path(__file__).parents[2])
    return own | ({PROPERTIES_VARIABLE: str(properties)} if properties else {})


def gorila(
    *words: str, cwd: Path, properties: Path | None = None, within_s: float = 300.0
) -> subprocess.CompletedProcess[str]:
    """Run the real command in its own process."""
    command = [sys.executable, "-m", "gorila.cli", *words]
    return subprocess.run(
        command, check=False, cwd=cwd, env=environment(properties), capture_output=True, text=True, timeout=within_s
    )


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Secured]:
    """A broker with TLS, users and ACLs."""
    folder = tmp_path_factory.mktemp("secured") / "données, a=b"
    broker = Broker(folder, secure=True)
    broker.start(timeout_s=170.0)
    try:
        yield Secured(folder)
    finally:
        broker.stop()


def make_run(secured: Secured, run: str, folder: Path, *sets: str) -> None:
    """By the commands of the docs: the administrator grants, the user `topics` creates."""
    applied = gorila("topics", "acls", "--run", run, "--apply", cwd=folder, properties=secured.client_properties())
    assert applied.returncode == 0, applied.stderr
    words = [word for item in sets for word in ("--set", item)]
    made = gorila("topics", "create", run, *words, cwd=folder, properties=secured.client_properties("topics"))
    assert made.returncode == 0, made.stderr


def secrets_of(secured: Secured) -> list[str]:
    """Texts that may be nowhere but in the secured files."""
    keys = [(secured.folder / "secure" / name).read_text() for name in ("ca.key", "broker.pem")]
    return [*secured.users().values(), *(key.splitlines()[1] for key in keys)]


# --- the roles, as processes ------------------------------------------------------------------------------------------


class RolesAtWork:
    """Every role of a run as a process with its own user, until each has done its work once; then stopped."""

    def __init__(self, secured: Secured, run: str, folder: Path) -> None:
        self.command_lines: list[str] = []
        self.outputs: dict[str, str] = {}
        self.codes: dict[str, int] = {}
        self.run_dir, self._folder, self._run, self._secured = folder / "run", folder, run, secured
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        try:
            for role in ROLE_PROCESSES:
                self._start(role)
            self.command_lines = [" ".join(psutil.Process(p.pid).cmdline()) for p in self._processes.values()]
            self._until_all_worked()
        finally:
            for process in self._processes.values():
                process.send_signal(signal.SIGTERM)
            for role, process in self._processes.items():
                try:
                    self.codes[role] = process.wait(60)
                except subprocess.TimeoutExpired:
                    process.kill()
                    self.codes[role] = process.wait()
                self.outputs[role] = self._said(role)

    def _start(self, role: str) -> None:
        words = [sys.executable, "-m", "gorila.cli", role, "--run", self._run, "--run-dir", str(self.run_dir)]
        words += ["--set", f"kafka.client_properties={self._secured.client_properties(role)}"]
        words += ["--set", "archive.file_age_s=1"] if role == "archiver" else []
        with (self._folder / f"{role}.out").open("ab") as out:
            self._processes[role] = subprocess.Popen(words, cwd=self._folder, env=environment(), stdout=out, stderr=out)

    def _said(self, role: str) -> str:
        return (self._folder / f"{role}.out").read_text(errors="replace")

    def _until_all_worked(self) -> None:
        run = self._run
        watching = (f"kafka.client_properties={self._secured.client_properties('train')}",)
        service = open_service("train", run, 0, "", watching, terminal=False, environ={})
        progress = RunProgress()
        follower = RunFollower(service, progress)
        poison = Cluster("", str(self._secured.client_properties("actor"))).producer()
        poison.send(full_name(run, "transitions"), b"\x00not avro", partition=0)
        poison.flush(30.0)
        deadline = time.monotonic() + DEADLINE_S
        missing = {"everything"}
        try:
            while missing:
                assert time.monotonic() < deadline, (
                    missing,
                    {role: self._said(role)[-1500:] for role in ROLE_PROCESSES},
                )
                for role, process in self._processes.items():
                    if process.poll() is not None:  # a busy machine's timeouts may end a role; its supervisor is us
                        assert "uthorization failed" not in self._said(role), self._said(role)
                        self._start(role)
                        break
                follower.poll(0.25)
                try:
                    follower.look_at_weights()
                    dead, groups = follower.dead_letters(), {lag.group for lag in follower.lags()}
                except NotAllowed:
                    raise
                except BrokerError:
                    continue
                missing = {
                    name
                    for name, done in {
                        "actor, replay, learner, parameter server": progress.updates >= 20,
                        "evaluator": progress.evaluation is not None,
                        "archiver": any(self.run_dir.glob("archive/**/*.parquet")),
                        "monitor": (self.run_dir / "tensorboard").exists(),
                        "dead letter": dead >= 1,
                        "lags": groups >= {"replay", "learner", "parameter-server-0-0"},
                    }.items()
                    if not done
                }
        finally:
            follower.close()
            service.close()


@pytest.fixture(scope="module")
def roles_at_work(secured: Secured, tmp_path_factory: pytest.TempPathFactory) -> RolesAtWork:
    folder = tmp_path_factory.mktemp("roles")
    make_run(secured, "working", folder, *SMALL)
    return RolesAtWork(secured, "working", folder)


@pytest.mark.timeout(600)
def test_every_role_does_its_work_with_the_rights_it_is_given(roles_at_work: RolesAtWork) -> None:
    assert roles_at_work.codes == dict.fromkeys(ROLE_PROCESSES, 0), roles_at_work.outputs
    for role, output in roles_at_work.outputs.items():
        assert "uthorization failed" not in output, (role, output)


def test_secrets_are_in_no_log_record_result_or_command_line(secured: Secured, roles_at_work: RolesAtWork) -> None:
    admin = Cluster("", str(secured.client_properties()))
    secrets = secrets_of(secured)
    looked_at: dict[str, bytes] = {
        f"command line {n}": line.encode() for n, line in enumerate(roles_at_work.command_lines)
    }
    status = Broker(secured.folder).status()
    assert status is not None
    looked_at["broker"] = " ".join(psutil.Process(status.pid).cmdline()).encode()
    looked_at |= {f"output of {role}": text.encode() for role, text in roles_at_work.outputs.items()}
    files = [path for path in roles_at_work.run_dir.rglob("*") if path.is_file()]
    files += [secured.folder / "broker.log", secured.folder / "broker.json"]
    looked_at |= {str(path): path.read_bytes() for path in files}
    for topic in ("run", "dead-letters", "episodes", "replay-stats"):
        records = read_all(admin, full_name("working", topic))
        assert records, topic
        for record in records:
            headers = b" ".join(value for _, value in record.headers)
            looked_at[f"{topic} {record.offset}"] = (record.value or b"") + (record.key or b"") + headers
    shown = gorila("config", cwd=secured.folder, properties=secured.client_properties())
    assert '"client_properties"' in shown.stdout
    looked_at["gorila config"] = shown.stdout.encode()
    assert len(looked_at) > 30
    found = [where for where, text in looked_at.items() if any(secret.encode() in text for secret in secrets)]
    assert not found


def test_files_with_secrets_are_their_owner_s_alone(secured: Secured) -> None:
    private = [*secured.clients.iterdir(), secured.folder / "server.properties"]
    private += [secured.folder / "secure" / name for name in ("ca.key", "broker.pem", "users.json")]
    assert {path.stem for path in secured.clients.iterdir()} == {ADMIN, *acls.ROLES}
    for path in private:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600, path
    assert stat.S_IMODE(secured.folder.stat().st_mode) == 0o700
    assert not (secured.folder / "secure" / "format.arguments").exists()


# --- the rights, one by one -------------------------------------------------------------------------------------------

GROUPS = ("actor", "replay", "learner", "parameter-server-0-0", "archiver", "people-console", "other")


@pytest.fixture(scope="module")
def granted(secured: Secured, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A run that nothing works on."""
    make_run(secured, "granted", tmp_path_factory.mktemp("granted"))
    return "granted"


@pytest.mark.parametrize("role", acls.ROLES)
def test_a_role_may_do_what_its_data_say_and_nothing_else(secured: Secured, granted: str, role: str) -> None:
    tried = Tried(secured.client_properties(role))
    topics = {full_name(granted, topic.name): topic.name for topic in TOPOLOGY}
    assert {topics[name] for name in tried.writes(topics)} == {
        name for name in topics.values() if acls.covers(role, "topic", name, "WRITE")
    }
    assert {topics[name] for name in tried.reads(topics)} == {
        name for name in topics.values() if acls.covers(role, "topic", name, "READ")
    }
    groups = {full_name(granted, name): name for name in GROUPS}
    assert {groups[name] for name in tried.looks_at(groups)} == {
        name for name in GROUPS if acls.covers(role, "group", name, "DESCRIBE")
    }
    assert {groups[name] for name in tried.commits_to(groups, full_name(granted, "run"))} == {
        name for name in GROUPS if acls.covers(role, "group", name, "READ")
    }
    assert not tried.reconfigures(full_name(granted, "run"))
    makes = acls.covers(role, "topic", "extra", "CREATE")
    assert makes == (role == "topics")
    assert tried.creates(full_name(granted, "extra")) == makes
    assert tried.deletes(full_name(granted, "extra" if makes else "run")) == makes


@pytest.mark.parametrize("role", acls.ROLES)
def test_rights_on_one_run_are_none_on_another(secured: Secured, granted: str, role: str) -> None:
    others = ["another.transitions", "another.run", "granted-too.weights"]
    admin = Tried(secured.client_properties())
    for topic in others:
        if topic not in Cluster("", str(secured.client_properties())).admin().topics():
            assert admin.creates(topic)
    tried = Tried(secured.client_properties(role))
    assert tried.writes(others) == set()
    assert tried.reads(others) == set()
    assert not tried.creates("another.extra")


# --- what goes wrong --------------------------------------------------------------------------------------------------


def refused(properties: Path, cwd: Path) -> str:
    """The one line of a role that cannot connect."""
    answer = gorila("actor", "--run", "granted", cwd=cwd, properties=properties)
    assert answer.returncode == 1, answer.stderr
    assert answer.stderr.count("\n") == 1, answer.stderr
    return answer.stderr


def changed(properties: Path, to: Path, **values: str) -> Path:
    """A copy of a properties file with other values."""
    lines = properties.read_text().splitlines()
    for key, value in values.items():
        name = key.replace("_", ".")
        lines = [line for line in lines if not line.startswith(name + "=")] + [f"{name}={value}"]
    to.write_text("\n".join(lines) + "\n")
    return to


@pytest.fixture
def impostor(secured: Secured, tmp_path: Path) -> Iterator[Callable[[str], Path]]:
    """Properties that lead to a TLS server with another certificate, signed by the right authority."""
    servers: list[socket.socket] = []

    def stand_in(pem: str) -> Path:
        (tmp_path / "server.pem").write_text(pem)
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(tmp_path / "server.pem")
        server = socket.create_server(("127.0.0.1", 0))
        servers.append(server)

        def serve() -> None:
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with contextlib.suppress(OSError), connection:
                    context.wrap_socket(connection, server_side=True).recv(1)

        threading.Thread(target=serve, daemon=True).start()
        address = f"localhost:{server.getsockname()[1]}"
        return changed(secured.client_properties("actor"), tmp_path / "c.properties", bootstrap_servers=address)

    yield stand_in
    for server in servers:
        server.shutdown(socket.SHUT_RDWR)
        server.close()


def authority(secured: Secured) -> Authority:
    return Authority(secured.ca_file.read_text(), (secured.folder / "secure" / "ca.key").read_text())


def test_a_wrong_password_is_one_line(secured: Secured, tmp_path: Path) -> None:
    module = "org.apache.kafka.common.security.scram.ScramLoginModule"
    wrong = f'{module} required username="actor" password="not-this-one";'
    line = refused(
        changed(secured.client_properties("actor"), tmp_path / "c.properties", sasl_jaas_config=wrong), tmp_path
    )
    assert "refuses user or password" in line
    assert "not-this-one" not in line


def test_a_certificate_that_has_expired_is_one_line(
    secured: Secured, impostor: Callable[[str], Path], tmp_path: Path
) -> None:
    old = authority(secured).issue("broker", ["localhost"], since=datetime.now(UTC) - timedelta(days=9), days=1)
    assert "its certificate has expired" in refused(impostor(old), tmp_path)


def test_a_certificate_for_another_host_is_one_line(
    secured: Secured, impostor: Callable[[str], Path], tmp_path: Path
) -> None:
    line = refused(impostor(authority(secured).issue("broker", ["kafka.example"])), tmp_path)
    assert "its certificate is not for the name localhost" in line


def test_an_unknown_authority_is_one_line(secured: Secured, tmp_path: Path) -> None:
    stranger = Authority.create("another").certificate.strip().replace("\n", "\\n")
    wrong = changed(secured.client_properties("actor"), tmp_path / "c.properties", ssl_truststore_certificates=stranger)
    assert "an authority this client does not know" in refused(wrong, tmp_path)


def test_a_client_without_tls_is_told_so(secured: Secured, tmp_path: Path) -> None:
    plain = tmp_path / "c.properties"
    settings = read_client_properties(str(secured.client_properties("actor")))
    plain.write_text(f"bootstrap.servers={settings['bootstrap.servers']}\n")
    with pytest.raises(BrokerError, match="it speaks TLS, and this client does not"):
        Cluster("", str(plain)).admin().ping(1.0)


def test_a_missing_right_names_what_is_missing_and_where_the_rights_are_listed(secured: Secured, granted: str) -> None:
    evaluator = Cluster("", str(secured.client_properties("evaluator")))
    producer = evaluator.producer()
    producer.send(full_name(granted, "gradients"), b"", partition=0)
    with pytest.raises(NotAllowed, match=r"granted.gradients.*gorila topics acls"):
        producer.flush(10.0)
    producer.close()
    gate = LagGate(evaluator, f"{granted}.replay", full_name(granted, "transitions"), [0], 10)
    with pytest.raises(NotAllowed, match=r"granted\.replay.*authorization failed"):
        repeat(lambda: gate.may_write(0, 100))
    reader = evaluator.consumer(f"{granted}.evaluator")
    reader.assign({(full_name(granted, "run"), 0): 0})
    with pytest.raises(NotAllowed, match=r"reading granted.evaluator: Group authorization failed"):
        repeat(lambda: reader.poll_many(1, 0.2))
    reader.close()
    # The actor may look at the replay group, and so finds its coordinator; it may not commit for it.
    actor = Cluster("", str(secured.client_properties("actor"))).consumer(f"{granted}.replay")
    with pytest.raises(NotAllowed, match=r"committing for granted.replay: Group authorization failed"):
        repeat(lambda: (actor.commit({(full_name(granted, "run"), 0): 0}), actor.poll_many(1, 0.2)))
    actor.close()


def repeat(attempt: Callable[[], object]) -> None:
    """Until it raises, for a while."""
    deadline = time.monotonic() + 20.0
    while time.monotonic() < deadline:
        attempt()


def test_a_folder_never_changes_between_plain_and_secured(secured: Secured, tmp_path: Path) -> None:
    (tmp_path / "kafka").mkdir()
    (tmp_path / "kafka" / "meta.properties").write_text("version=1\ncluster.id=abcdefghijklmnopqrstuv\nnode.id=1\n")
    with pytest.raises(LocalError, match="without security"):
        Broker(tmp_path, secure=True).start()
    again = Broker(secured.folder)  # nobody says --secure, and secured it is
    assert again.start().client_properties == secured.client_properties()


# --- other ways in ----------------------------------------------------------------------------------------------------


def test_kafka_s_tools_are_given_the_administrator_s_file(secured: Secured, granted: str, tmp_path: Path) -> None:
    folder = str(secured.folder)
    exported = gorila("broker", "env", "--dir", folder, cwd=tmp_path).stdout
    assert f"export {PROPERTIES_VARIABLE}=" in exported
    shown = gorila(
        "kafka", "acls", "--list", "--topic", "granted.weights", cwd=tmp_path, properties=secured.client_properties()
    )
    rights = {
        (f"User:{role}", right)
        for role in acls.ROLES
        for right in ("READ", "WRITE")
        if acls.covers(role, "topic", "weights", right)
    }
    listed = set(re.findall(r"principal=(\S+), host=\*, operation=(READ|WRITE)", shown.stdout))
    assert listed == rights - {("User:people", "READ")}  # by prefix
    line = acls.kafka_acls_lines(acls.acls("pasted", ["actor"])).splitlines()[0]
    assert gorila(*line.split()[1:], cwd=tmp_path, properties=secured.client_properties()).returncode == 0


def test_a_user_is_made_by_kafka_s_tool_from_a_file(secured: Secured, tmp_path: Path) -> None:
    (tmp_path / "user").write_text("SCRAM-SHA-512=password=of-ann\n")
    words = ("--alter", "--entity-type", "users", "--entity-name", "ann", "--add-config-file", str(tmp_path / "user"))
    made = gorila("kafka", "configs", *words, cwd=tmp_path, properties=secured.client_properties())
    assert made.returncode == 0, made.stderr
    module = "org.apache.kafka.common.security.scram.ScramLoginModule"
    jaas = f'{module} required username="ann" password="of-ann";'
    Cluster(
        "", str(changed(secured.client_properties("actor"), tmp_path / "c.properties", sasl_jaas_config=jaas))
    ).admin().ping()


def test_rights_are_taken_back(secured: Secured, tmp_path: Path) -> None:
    admin = Cluster("", str(secured.client_properties())).admin()
    wanted = acls.acls("short-lived", ["actor"])
    admin.create_acls(wanted)
    admin.create_acls(wanted)
    words = ("topics", "acls", "--run", "short-lived", "--role", "actor", "--revoke")
    told = gorila(*words, cwd=tmp_path, properties=secured.client_properties())
    assert f"{len(wanted) - 1} rights" in told.stdout  # all runs share the one on readers outside any group
    actor = gorila(*words, cwd=tmp_path, properties=secured.client_properties("actor"))
    assert (actor.returncode, actor.stderr.count("\n")) == (1, 1)
    assert "luster authorization failed" in actor.stderr


@pytest.mark.timeout(600)
def test_gorila_train_runs_on_a_secured_kafka(secured: Secured, tmp_path: Path) -> None:
    words = ["train", "cartpole", "--steps", "600", "--set", f"kafka.client_properties={secured.client_properties()}"]
    ended = gorila(*words, *(word for item in SMALL[:1] for word in ("--set", item)), cwd=tmp_path, within_s=550.0)
    assert ended.returncode == 0, ended.stderr
    [run_dir] = (tmp_path / "runs").iterdir()
    summary = json.loads((run_dir / "summary.json").read_text())
    assert summary["updates"] > 0
    texts = [ended.stdout, ended.stderr, *(p.read_text(errors="replace") for p in run_dir.rglob("*") if p.is_file())]
    assert not any(secret in text for secret in secrets_of(secured) for text in texts)
