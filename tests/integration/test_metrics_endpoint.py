"""A real run, watched: every role's status page, and every query of the dashboards answered by a Prometheus that scraped it."""

from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.dashboards import streaming, training
from gorila.local.broker import BrokerAddress
from gorila.metrics import METRICS
from tests.integration.free_ports import free_ports
from tests.integration.training import ROLES, Training
from tests.unit.deploy_facts import DEPLOY, queries

pytestmark = pytest.mark.timeout(400)  # a slow machine's minutes go by in starting processes, not in what is tested
DEADLINE_S = 150.0
# What a healthy short run has no reason to count; each is declared, and counted in a test of its own.
EVENTS = {
    "dead_letters_total",
    "offsets_gone_total",
    "operator_resets_total",
    "commit_errors_total",
    "forced_flushes_total",
    "replay_new_share_target",
    "learner_batches_refused",
}


def get(port: int, path: str) -> tuple[int, str]:
    """Status and body; (0, reason) while nobody listens."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as page:
            return page.status, page.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()
    except OSError as error:
        return 0, str(error)


def until(what: str, happened: Callable[[], Any]) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while not (value := happened()):
        assert time.monotonic() < deadline, what
        time.sleep(0.2)
    return value


class Watched:
    """A run whose roles serve their pages; `port[role]`."""

    def __init__(self, training: Training, first_port: int) -> None:
        self.training = training
        self.port = {role: first_port + number for number, role in enumerate(ROLES)}

    def scrape(self, role: str) -> str:
        code, text = get(self.port[role], "/metrics")
        assert code == 200, f"{role}: {text}\n{self.training.logs()}"
        return text

    def series(self) -> set[str]:
        """Names on any page."""
        found: set[str] = set()
        for role in ROLES:
            found |= set(re.findall(r"^gorila_(\w+)\{", self.scrape(role), re.MULTILINE))
        return found


@pytest.fixture(scope="module")
def watched(broker: BrokerAddress, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    first = free_ports(len(ROLES))
    sets = [
        f"monitor.metrics_port={first}",
        "actor.max_steps_per_s=300",
        "evaluator.threshold=None",
        "evaluator.episodes=2",
        "evaluator.lanes=2",
        "evaluator.max_episode_steps=20",
    ]
    words = [word for item in sets for word in ("--set", item)]
    training = Training(broker.bootstrap_servers, tmp_path_factory.mktemp("watched"), "cartpole", *words)
    run = Watched(training, first)
    try:
        for role in ROLES:
            training.until(f"ready {role}", lambda role=role: get(run.port[role], "/readyz") == (200, "ready\n"))
        yield run
    finally:
        training.close()


def test_every_role_says_that_it_is_well_and_shows_itself(watched: Watched) -> None:
    for role in ROLES:
        assert get(watched.port[role], "/healthz") == (200, "ready\n")
        assert get(watched.port[role], "/anything")[0] == 404
        text = watched.scrape(role)
        fixed = f'{{process="{role}-0",role="{role}",run="{watched.training.run}"}}'
        assert f"gorila_ready{fixed} 1.0" in text
        assert f"gorila_cpu_seconds_total{fixed}" in text


def test_every_declared_metric_appears_somewhere_in_a_short_run_but_those_of_events(watched: Watched) -> None:
    archiver = {metric.name for metric in METRICS if metric.roles == ("archiver",)}
    wanted = {m.name + ("_count" if m.kind == "histogram" else "") for m in METRICS} - EVENTS - archiver
    try:
        until("series", lambda: wanted <= watched.series())
    except AssertionError:
        pytest.fail(f"never seen: {sorted(wanted - watched.series())}")


def test_a_role_that_stands_still_is_not_ready_any_more_and_its_page_still_answers_when_it_goes_on(
    watched: Watched,
) -> None:
    learner = watched.training.role("learner")
    assert learner is not None
    learner.send_signal(signal.SIGSTOP)
    try:
        with pytest.raises(OSError, match="timed out"):
            urllib.request.urlopen(f"http://127.0.0.1:{watched.port['learner']}/healthz", timeout=1)
    finally:
        learner.send_signal(signal.SIGCONT)
    until("the learner again", lambda: get(watched.port["learner"], "/readyz")[0] == 200)


@pytest.fixture(scope="module")
def prometheus(watched: Watched, tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    """Port of a real Prometheus that scrapes the run every second, with our rules."""
    binary = shutil.which("prometheus")
    if binary is None:
        pytest.skip("no prometheus here (Debian: apt-get install prometheus): the queries were parsed and not run")
    folder, port = tmp_path_factory.mktemp("prometheus"), free_ports(1)
    shutil.copy(DEPLOY / "prometheus" / "rules.yml", folder)
    targets = [f"127.0.0.1:{port_}" for port_ in watched.port.values()]
    configuration = {
        "global": {"scrape_interval": "1s", "evaluation_interval": "1s"},
        "rule_files": ["rules.yml"],
        "scrape_configs": [{"job_name": "gorila", "static_configs": [{"targets": targets}]}],
    }
    (folder / "prometheus.yml").write_text(yaml.safe_dump(configuration))
    process = subprocess.Popen(
        [
            binary,
            f"--config.file={folder / 'prometheus.yml'}",
            f"--storage.tsdb.path={folder / 'data'}",
            f"--web.listen-address=127.0.0.1:{port}",
            "--log.level=error",
        ],
        stdout=subprocess.DEVNULL,
        stderr=(folder / "log").open("wb"),
    )
    try:
        until("Prometheus", lambda: get(port, "/-/ready")[0] == 200)
        yield port
    finally:
        process.terminate()
        process.wait(10)


def ask(port: int, path: str, **parameters: str) -> Any:
    code, text = get(port, f"/api/v1/{path}?{urllib.parse.urlencode(parameters)}")
    assert code == 200, text
    return json.loads(text)["data"]


def test_every_query_of_every_dashboard_has_data_and_every_rule_is_evaluated(watched: Watched, prometheus: int) -> None:
    def empty() -> list[str]:
        found = []
        for dashboard in (training(), streaming()):
            for title, expression in queries(dashboard):
                query = expression.replace("$run", watched.training.run).replace("$__rate_interval", "30s")
                if not ask(prometheus, "query", query=query)["result"]:
                    found.append(f"{dashboard['title']}: {title}: {query}")
        return found

    try:
        until("data", lambda: not empty())
    except AssertionError:
        pytest.fail("no data for\n" + "\n".join(empty()))
    rules = [rule for group in ask(prometheus, "rules")["groups"] for rule in group["rules"]]
    assert len(rules) == len(re.findall(r"- alert:", Path(DEPLOY / "prometheus" / "rules.yml").read_text()))
    until(
        "evaluation", lambda: all(r["health"] == "ok" for g in ask(prometheus, "rules")["groups"] for r in g["rules"])
    )
    runs = ask(prometheus, "label/run/values")
    assert runs == [watched.training.run]
