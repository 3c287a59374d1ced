"""The Kubernetes manifests, without a cluster: they resolve, fit the API's schemas, and name only what exists."""

from __future__ import annotations

import functools
import inspect
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from apache_beam.options.pipeline_options import FlinkRunnerOptions

from deploy.build import RUN, files
from deploy.kustomize import Manifest, resolve
from gorila.config import Config
from gorila.engines import Engine
from gorila.lag_bounds import refuse_narrow_transitions
from gorila.metrics import BY_NAME
from gorila.topics import TOPOLOGY, full_name
from tests.unit.deploy_facts import DEPLOY, configured, image_target, parse, targets

KUBERNETES = "1.32"
OVERLAYS = ("small", "cluster-100")
WORKLOADS = ("StatefulSet", "Deployment", "Job")
# Kinds of operators: no schema of theirs ships as a package, so their fields are not checked here, only what they refer to.
OPERATORS = {
    ("kafka.strimzi.io/v1beta2", "Kafka"),
    ("kafka.strimzi.io/v1beta2", "KafkaNodePool"),
    ("kafka.strimzi.io/v1beta2", "KafkaUser"),
    ("keda.sh/v1alpha1", "ScaledObject"),
    ("keda.sh/v1alpha1", "TriggerAuthentication"),
    ("monitoring.coreos.com/v1", "ServiceMonitor"),
}
STRIMZI_SECRET = "gorila-cluster-ca-cert"
each_overlay = pytest.mark.parametrize("overlay", OVERLAYS)


@functools.cache
def manifests(overlay: str) -> list[Manifest]:
    return resolve(DEPLOY / "kubernetes" / "overlays" / overlay)


def of_kind(overlay: str, *kinds: str) -> list[Manifest]:
    return [manifest for manifest in manifests(overlay) if manifest["kind"] in kinds]


def pods(overlay: str) -> Iterator[tuple[str, Manifest, dict[str, Any]]]:
    for manifest in of_kind(overlay, *WORKLOADS):
        yield manifest["metadata"]["name"], manifest, manifest["spec"]["template"]["spec"]


def environment(overlay: str) -> dict[str, str]:
    maps = {m["metadata"]["name"]: m["data"] for m in of_kind(overlay, "ConfigMap")}
    return maps["gorila"]


def config(overlay: str) -> Config:
    return configured(environment(overlay)["GORILA_PRESET"], environment(overlay))


def selects(selector: dict[str, str], labels: dict[str, str]) -> bool:
    return all(labels.get(key) == value for key, value in selector.items())


@each_overlay
def test_an_overlay_resolves_as_kubectl_resolves_it(overlay: str) -> None:
    kubectl = shutil.which("kubectl")
    if kubectl is None:
        pytest.skip("no kubectl here: only our own resolver was used")
    made = subprocess.run(
        [kubectl, "kustomize", str(DEPLOY / "kubernetes" / "overlays" / overlay)], capture_output=True, check=True
    )

    def by_name(found: list[Manifest]) -> dict[tuple[str, str], Manifest]:
        return {(m["kind"], m["metadata"]["name"]): m for m in found}

    assert by_name(manifests(overlay)) == by_name([m for m in yaml.safe_load_all(made.stdout) if m])


@each_overlay
def test_every_manifest_fits_the_schema_of_its_kind(overlay: str) -> None:
    for manifest in manifests(overlay):
        if (manifest["apiVersion"], manifest["kind"]) not in OPERATORS:
            kubernetes_validate.validate(manifest, KUBERNETES, strict=True)
    wrong = {**of_kind(overlay, "StatefulSet")[0], "spec": {"replica": 3}}
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate(wrong, KUBERNETES, strict=True)


@each_overlay
def test_names_are_used_once_and_everything_is_in_one_namespace(overlay: str) -> None:
    names = [(m["kind"], m["metadata"]["name"]) for m in manifests(overlay)]
    assert len(names) == len(set(names))
    assert {m["metadata"]["namespace"] for m in manifests(overlay) if m["kind"] != "Namespace"} == {"gorila"}


@each_overlay
def test_every_command_is_one_of_ours_and_every_image_one_we_build(overlay: str) -> None:
    values = environment(overlay)
    for name, manifest, pod in pods(overlay):
        for container in [*pod["containers"], *pod["initContainers"]]:
            assert image_target(container["image"]) in targets()
        container = pod["containers"][0]
        arguments = [re.sub(r"\$\((\w+)\)", lambda m: values[m[1]], argument) for argument in container["args"]]
        indexed = {entry["name"]: "3" for entry in container.get("env", ())}
        parsed = parse(arguments, indexed)
        assert parsed["command"] == ("topics create" if name == "topics" else name)
        assert parsed["run"] == values["GORILA_RUN"] == RUN
        if manifest["kind"] == "StatefulSet":
            assert parsed["index"] == 3
            label = container["env"][0]["valueFrom"]["fieldRef"]["fieldPath"]
            assert label == "metadata.labels['apps.kubernetes.io/pod-index']"


@each_overlay
def test_there_are_as_many_of_each_role_as_the_configuration_wants(overlay: str) -> None:
    wanted = config(overlay)
    replicas = {m["metadata"]["name"]: m["spec"]["replicas"] for m in of_kind(overlay, "StatefulSet", "Deployment")}
    assert replicas["actor"] == wanted.actor.count
    assert replicas["learner"] == wanted.learner.count
    assert replicas["parameter-server"] == wanted.parameter_server.shards
    assert 1 <= replicas["replay"] <= wanted.actor.count
    assert replicas["evaluator"] == replicas["monitor"] == 1
    brokers = of_kind(overlay, "KafkaNodePool")[0]["spec"]["replicas"]
    assert wanted.kafka.replication_factor <= brokers


@each_overlay
def test_every_configuration_secret_volume_and_port_that_is_named_exists(overlay: str) -> None:
    maps = {m["metadata"]["name"] for m in of_kind(overlay, "ConfigMap")}
    secrets = {m["metadata"]["name"] for m in of_kind(overlay, "KafkaUser")} | {STRIMZI_SECRET}
    values = environment(overlay)
    for name, manifest, pod in pods(overlay):
        volumes = {volume["name"] for volume in pod["volumes"]}
        volumes |= {claim["metadata"]["name"] for claim in manifest["spec"].get("volumeClaimTemplates", ())}
        for volume in pod["volumes"]:
            assert volume.get("configMap", {"name": "gorila"})["name"] in maps
            assert volume.get("secret", {"secretName": STRIMZI_SECRET})["secretName"] in secrets
        assert {"name": "kafka-user", "secret": {"secretName": f"gorila-{name}"}} in pod["volumes"]
        for container in [*pod["containers"], *pod["initContainers"]]:
            assert {mount["name"] for mount in container["volumeMounts"]} <= volumes
            for source in container.get("envFrom", ()):
                assert source["configMapRef"]["name"] in maps
        mounted = [mount["mountPath"] for mount in pod["containers"][0]["volumeMounts"]]
        assert str(Path(values["GORILA__KAFKA__CLIENT_PROPERTIES"]).parent) in mounted
        assert str(Path(values["GORILA__MONITOR__HEALTH_FILE"]).parent) in mounted
        if manifest["kind"] == "Job":
            continue
        container = pod["containers"][0]
        ports = {port["name"]: port["containerPort"] for port in container["ports"]}
        assert ports == {"metrics": config(overlay).monitor.metrics_port}
        for probe in ("startupProbe", "readinessProbe", "livenessProbe"):
            assert container[probe]["httpGet"]["port"] in ports
            assert container[probe]["httpGet"]["path"] in ("/readyz", "/healthz")
    client = {m["metadata"]["name"]: m["data"] for m in of_kind(overlay, "ConfigMap")}["kafka-client"]
    assert "ssl.truststore.location=/etc/gorila/ca/ca.crt" in client["client.properties"]
    listener = of_kind(overlay, "Kafka")[0]["spec"]["kafka"]["listeners"][0]
    assert values["GORILA__KAFKA__BOOTSTRAP_SERVERS"] == f"gorila-kafka-bootstrap:{listener['port']}"


@each_overlay
def test_services_budgets_policies_and_scalers_choose_pods_that_exist(overlay: str) -> None:
    labels = {name: m["spec"]["template"]["metadata"]["labels"] for name, m, _ in pods(overlay)}
    services = {m["metadata"]["name"]: m for m in of_kind(overlay, "Service")}
    budgets = set()
    for manifest in of_kind(overlay, "PodDisruptionBudget"):
        chosen = [name for name, has in labels.items() if selects(manifest["spec"]["selector"]["matchLabels"], has)]
        assert chosen == [manifest["metadata"]["name"]]
        budgets |= set(chosen)
    assert budgets == {m["metadata"]["name"] for m in of_kind(overlay, "StatefulSet")}
    for manifest in of_kind(overlay, "StatefulSet"):
        assert manifest["spec"]["serviceName"] in services
        assert manifest["spec"]["podManagementPolicy"] == "Parallel"
    port = config(overlay).monitor.metrics_port
    for service in services.values():
        assert all(selects(service["spec"]["selector"], has) for has in labels.values())
        assert service["spec"]["ports"][0]["port"] == port
    monitor = of_kind(overlay, "ServiceMonitor")[0]["spec"]
    assert all(selects(monitor["selector"]["matchLabels"], s["metadata"]["labels"]) for s in services.values())
    named = {entry["name"] for service in services.values() for entry in service["spec"]["ports"]}
    assert {endpoint["port"] for endpoint in monitor["endpoints"]} <= named
    policy = of_kind(overlay, "NetworkPolicy")[0]["spec"]
    assert all(selects(policy["podSelector"]["matchLabels"], has) for has in labels.values())
    assert policy["policyTypes"] == ["Ingress", "Egress"]
    assert policy["ingress"][0]["ports"] == [{"protocol": "TCP", "port": port}]


@each_overlay
def test_scalers_stay_within_what_the_run_was_made_with_and_look_at_names_that_exist(overlay: str) -> None:
    wanted = config(overlay)
    most = {"replay": wanted.actor.count, "learner": wanted.learner.count}
    scalers = {m["spec"]["scaleTargetRef"]["name"]: m["spec"] for m in of_kind(overlay, "ScaledObject")}
    sets = {m["metadata"]["name"]: m["spec"]["replicas"] for m in of_kind(overlay, "StatefulSet")}
    assert set(scalers) == set(most)
    for name, spec in scalers.items():
        assert spec["minReplicaCount"] <= sets[name] <= spec["maxReplicaCount"] <= most[name]
    lag = scalers["replay"]["triggers"][0]["metadata"]
    assert (lag["topic"], lag["consumerGroup"]) == (full_name(RUN, "transitions"), f"{RUN}.replay")
    query = scalers["learner"]["triggers"][0]["metadata"]["query"]
    assert all(name in BY_NAME for name in re.findall(r"gorila_(\w+)", query))
    secrets = {m["metadata"]["name"] for m in of_kind(overlay, "KafkaUser")} | {STRIMZI_SECRET}
    for reference in of_kind(overlay, "TriggerAuthentication")[0]["spec"]["secretTargetRef"]:
        assert reference["name"] in secrets


@each_overlay
def test_every_container_is_nobody_with_a_read_only_root_and_bounded_memory(overlay: str) -> None:
    for _, _, pod in pods(overlay):
        assert pod["securityContext"]["runAsNonRoot"] and pod["securityContext"]["runAsUser"] == 10001
        assert pod["automountServiceAccountToken"] is False
        for container in [*pod["containers"], *pod["initContainers"]]:
            security = container["securityContext"]
            assert security["readOnlyRootFilesystem"] and security["allowPrivilegeEscalation"] is False
            assert security["capabilities"] == {"drop": ["ALL"]}
            assert container["resources"]["limits"]["memory"] and container["resources"]["requests"]["cpu"]


@each_overlay
def test_a_kafka_user_may_write_and_read_what_the_topology_says_and_nothing_else(overlay: str) -> None:
    users = {m["metadata"]["name"].removeprefix("gorila-"): m["spec"] for m in of_kind(overlay, "KafkaUser")}
    assert set(users) == {name for name, _, _ in pods(overlay)}
    for role, spec in users.items():
        rules = [(rule["resource"], set(rule["operations"])) for rule in spec["authorization"]["acls"]]
        for topic in TOPOLOGY:
            name = full_name(RUN, topic.name)
            may = set().union(*(ops for resource, ops in rules if _covers(resource, name)))
            if role == "topics":
                assert "Create" in may
            else:
                assert ("Read" in may) == (role in topic.readers), f"{role} reading {topic.name}"
                assert not {"Create", "Delete", "Alter", "AlterConfigs"} & may
            assert ("Write" in may) == (role in topic.writers), f"{role} writing {topic.name}"


def _covers(resource: dict[str, str], topic: str) -> bool:
    if resource["type"] != "topic":
        return False
    return topic.startswith(resource["name"]) if resource["patternType"] == "prefix" else topic == resource["name"]


def test_generated_files_are_what_the_code_says() -> None:
    stale = [str(path) for path, text in files().items() if path.read_text() != text]
    assert not stale, "run: python -m deploy.build"


def flink() -> dict[str, Manifest]:
    return {manifest["kind"]: manifest for manifest in resolve(DEPLOY / "kubernetes" / "flink")}


def engine_of(parsed: dict[str, Any]) -> Engine:
    """As the command itself makes it: what could not work raises."""
    names = inspect.signature(Engine.asked).parameters
    return Engine.asked(**{name: parsed[name] for name in names})


def test_what_was_not_run_says_so() -> None:
    found = flink()
    assert set(found) == {"FlinkDeployment", "Deployment", "NetworkPolicy"}
    for kind in ("FlinkDeployment", "Deployment"):
        assert found[kind]["metadata"]["labels"]["gorila/tested"] == "no"
    for kind in ("Deployment", "NetworkPolicy"):
        kubernetes_validate.validate(found[kind], KUBERNETES, strict=True)


def test_flinks_job_has_a_split_a_slot_and_finds_the_pool_beside_each_task_manager() -> None:
    found = flink()
    values = environment("small")
    job = found["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    parsed = parse([re.sub(r"\$\((\w+)\)", lambda m: values[m[1]], argument) for argument in job["args"]])
    assert (parsed["command"], parsed["run"]) == ("replay", RUN)
    engine = engine_of(parsed)
    assert engine.runner == "flink"
    cluster = found["FlinkDeployment"]["spec"]
    slots = int(cluster["flinkConfiguration"]["taskmanager.numberOfTaskSlots"])
    assert engine.parallelism == slots * cluster["taskManager"]["replicas"]
    assert engine.flink_master == f"{found['FlinkDeployment']['metadata']['name']}-rest:8081"
    workers = cluster["taskManager"]["podTemplate"]["spec"]["containers"][0]
    pool = parse(workers["args"])
    assert (pool["command"], pool["what"]) == ("replay", "worker-pool")
    assert Engine.pool_asked(pool["runner"], pool["listen"], pool["state_cache_mb"]) == (
        engine.worker_pool,
        engine.state_cache_mb,
    )
    for container in (workers, job):
        assert image_target(container["image"]) == "pipeline"
        assert container["envFrom"][0]["configMapRef"]["name"] in {
            m["metadata"]["name"] for m in of_kind("small", "ConfigMap")
        }
    refuse_narrow_transitions(config("cluster-100"), engine.checkpointing_interval_ms)


def test_the_job_server_is_of_the_beam_that_is_pinned_and_of_the_clusters_flink() -> None:
    found = flink()
    (server,) = [c for c in found["Deployment"]["spec"]["template"]["spec"]["containers"] if c["name"] == "job-server"]
    pinned = re.search(r"^apache-beam==(\S+)$", (DEPLOY.parent / "constraints.txt").read_text(), re.MULTILINE)
    assert pinned
    version = found["FlinkDeployment"]["spec"]["image"].split(":")[1]
    assert server["image"] == f"apache/beam_flink{version}_job_server:{pinned[1]}"
    assert version in FlinkRunnerOptions.PUBLISHED_FLINK_VERSIONS
