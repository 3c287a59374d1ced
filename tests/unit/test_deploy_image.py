"""Dockerfile and compose file, without an engine: what they name exists, and their commands are ours."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
import yaml

from gorila.settings import environment_values
from tests.unit.deploy_facts import DEPLOY, ROOT, configured, image_target, parse, targets

IMAGES = ("base", "pipeline", "server", "learn", "all")
DOCKERFILE = (DEPLOY / "Dockerfile").read_text()
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ROLES = ("parameter-server", "learner", "replay", "actor", "evaluator", "monitor")


def compose() -> dict[str, Any]:
    """The compose file as it is with no variable set."""
    text = (DEPLOY / "compose.yaml").read_text()
    return yaml.safe_load(re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", text))


def test_each_image_is_the_runtime_with_one_set_of_packages_and_every_stage_is_used() -> None:
    stages = targets()
    for image in IMAGES:
        assert stages[image] == "runtime"
        assert f"COPY --from=build-{image} /opt/gorila /opt/gorila" in DOCKERFILE
        assert stages[f"build-{image}"] == "source"
    assert set(stages) == {"source", "runtime", *IMAGES, *(f"build-{image}" for image in IMAGES)}


def test_packages_come_from_extras_that_exist_with_the_versions_we_test() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    named = re.findall(r"\.\[([\w,]+)\]", DOCKERFILE) + re.findall(r"^ARG \w+_EXTRAS=(\S+)", DOCKERFILE, re.MULTILINE)
    assert named
    for extra in ",".join(named).split(","):
        assert extra in extras
    assert DOCKERFILE.count("pip install") == DOCKERFILE.count("pip install --constraint constraints.txt") == 5
    assert not {"torch", "gymnasium"} & {re.split(r"[><=]", d)[0] for e in ("pipeline", "server") for d in extras[e]}


def test_what_is_copied_exists_and_is_not_ignored() -> None:
    let_through = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    sources = [
        name for line in re.findall(r"^COPY (?!--from)(.+)$", DOCKERFILE, re.MULTILINE) for name in line.split()[:-1]
    ]
    packages = {name.rstrip("*") for name in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert packages <= set(sources)
    for name in sources:
        assert (ROOT / name).exists()
        assert name in let_through


def test_the_image_runs_as_nobody_and_writes_to_tmp_and_data_only() -> None:
    runtime = DOCKERFILE.split("AS runtime", 1)[1].split("\nFROM ", 1)[0]
    assert "USER 10001:10001" in runtime
    assert 'VOLUME ["/data", "/tmp"]' in runtime
    assert 'ENTRYPOINT ["gorila"]' in runtime
    environment = dict(re.findall(r"(\w+)=(\S+)", runtime.split("ENV ", 1)[1].split("\nUSER", 1)[0]))
    assert environment["HOME"] == "/tmp"
    ours = {name: value for name, value in environment.items() if name.startswith("GORILA__")}
    monitor = configured("cartpole", ours).monitor
    assert f"EXPOSE {monitor.metrics_port}" in runtime
    assert monitor.health_file in runtime.split("HEALTHCHECK", 1)[1]
    assert len(environment_values(ours)) == 3


def test_compose_starts_every_role_from_an_image_it_can_build_with_a_command_we_have() -> None:
    services = compose()["services"]
    assert set(services) == {"kafka", "topics", *ROLES, "prometheus", "grafana"}
    for name in ("topics", *ROLES):
        service = services[name]
        assert image_target(service["image"]) == service["build"]["target"]
        assert service["build"]["target"] in IMAGES
        assert (DEPLOY / service["build"]["context"] / service["build"]["dockerfile"]).exists()
        parsed = parse(service["command"])
        assert parsed["command"] == ("topics create" if name == "topics" else name)
        assert parsed["run"] == "demo"
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
        configured("cartpole", service["environment"])
    assert parse(services["topics"]["command"])["preset"] == "cartpole"


def test_compose_has_one_process_for_each_that_the_preset_wants() -> None:
    config = configured("cartpole", {})
    assert (config.actor.count, config.learner.count, config.parameter_server.shards) == (1, 1, 1)


def test_compose_names_only_volumes_files_services_and_ports_that_are_there() -> None:
    tree = compose()
    services = tree["services"]
    for name, service in services.items():
        depends = service.get("depends_on", [])
        assert set(depends) <= set(services)
        for volume in service.get("volumes", []):
            source = volume.split(":")[0]
            if source.startswith("."):
                assert (DEPLOY / source).exists(), f"{name}: {source}"
            else:
                assert source in tree["volumes"]
    listeners = services["kafka"]["environment"]["KAFKA_ADVERTISED_LISTENERS"]
    for name in ("topics", *ROLES):
        environment = services[name]["environment"]
        assert f"://{environment['GORILA__KAFKA__BOOTSTRAP_SERVERS']}" in listeners
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "prometheus.yml").read_text())["scrape_configs"]
    wanted = {f"{name}:{services[name]['environment']['GORILA__MONITOR__METRICS_PORT']}" for name in ROLES}
    assert {target for job in scraped for static in job["static_configs"] for target in static["targets"]} == wanted
    assert int(services["kafka"]["environment"]["KAFKA_MESSAGE_MAX_BYTES"]) >= 8 * 1024 * 1024


def test_a_command_that_is_not_ours_is_noticed() -> None:
    with pytest.raises(AssertionError, match="no command actors"):
        parse(["actors", "--run", "demo"])
    with pytest.raises(Exception, match="No such option"):
        parse(["actor", "--run", "demo", "--number", "1"])
