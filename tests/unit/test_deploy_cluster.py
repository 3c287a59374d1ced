"""`make cluster` runs what compose.yaml says: read from it, not repeated. The hosts themselves need root and iproute2."""

from __future__ import annotations

import subprocess

import pytest

from deploy.cluster import CREATES, KAFKA, services
from deploy.hosts import NAMES, Hosts, lan_listener, missing
from tests.unit.deploy_facts import parse


def test_every_service_of_ours_is_run_with_composes_command_environment_and_host_name() -> None:
    found = services({"RUN": "other", "PRESET": "pong"})
    assert set(found) == {CREATES, "parameter-server", "learner", "replay", "actor", "evaluator", "monitor"}
    for name, service in found.items():
        parsed = parse(service.command)
        assert parsed.get("run", parsed.get("name")) == "other"
        assert parsed["command"].split()[0] == name
        assert service.environment["GORILA__KAFKA__BOOTSTRAP_SERVERS"] == f"{KAFKA}:19092"
        assert service.status_url == f"http://{name}:9464"
    assert "pong" in found[CREATES].command


def test_defaults_stand_in_composes_own_words() -> None:
    text = "services: {a: {image: 'gorila-x:1', command: [actor, --run, '${RUN:-demo}'], environment: {N: 3}}, b: {image: other, command: []}}"
    [service] = services({}, text).values()
    assert service.command == ["actor", "--run", "demo"] and service.environment == {"N": "3"}


def test_a_broker_for_other_hosts_tells_each_side_its_own_address() -> None:
    settings = lan_listener("10.78.0.1", 19092, "kafka")(1111, 2222)
    assert settings["listeners"] == "PLAINTEXT://127.0.0.1:1111,LAN://10.78.0.1:19092,CONTROLLER://127.0.0.1:2222"
    assert settings["advertised.listeners"] == "PLAINTEXT://127.0.0.1:1111,LAN://kafka:19092"


@pytest.mark.skipif(bool(missing()), reason=f"needs {missing()}")
def test_hosts_reach_each_other_by_name_until_a_cable_is_cut_and_nothing_is_left_behind() -> None:
    def reaches(hosts: Hosts, port: int) -> bool:
        script = f"import socket; socket.create_connection(('b', {port}), 3)"
        return (
            subprocess.run(hosts.command_on("a", "python3", "-c", script), capture_output=True, check=False).returncode
            == 0
        )

    with Hosts(["a", "b"]) as hosts:
        spaces = [hosts.space("a"), hosts.space("b")]
        listen = (
            "import socket, time; s = socket.create_server(('0.0.0.0', 4000)); print('up', flush=True); time.sleep(600)"
        )
        server = subprocess.Popen(hosts.command_on("b", "python3", "-c", listen), stdout=subprocess.PIPE)
        try:
            assert server.stdout is not None and server.stdout.readline() == b"up\n"
            assert reaches(hosts, 4000)
            hosts.cut("b")
            assert not reaches(hosts, 4000)
            hosts.join("b")
            hosts.slow("b", 1000)
            assert reaches(hosts, 4000)
            hosts.slow("b", 0)
        finally:
            server.kill()
            server.wait()
            assert server.stdout is not None
            server.stdout.close()
    left = subprocess.run(("ip", "netns", "list"), capture_output=True, text=True, check=True).stdout
    assert not any(space in left or (NAMES / space).exists() for space in spaces)
