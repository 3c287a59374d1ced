"""Dashboards, alert rules and scrape configuration name only metrics and labels we declare; promtool agrees with the rest where it is installed."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from deploy.dashboards import streaming, training
from gorila.metrics import BY_NAME
from tests.unit.deploy_facts import DEPLOY, queries

RULES = DEPLOY / "prometheus" / "rules.yml"
ALWAYS = {"run", "role", "process", "le"}
CHECKLIST = {"ParameterServerBusy", "LearnerIdle", "ReplayShareOffTarget", "WeightsApart"}


def alerts() -> dict[str, dict[str, Any]]:
    return {rule["alert"]: rule for group in yaml.safe_load(RULES.read_text())["groups"] for rule in group["rules"]}


def expressions() -> dict[str, str]:
    found = {f"alert {name}": rule["expr"] for name, rule in alerts().items()}
    for dashboard in (training(), streaming()):
        found |= {f"{dashboard['title']}: {title}": expression for title, expression in queries(dashboard)}
    return found


def promtool(*arguments: str) -> str:
    tool = shutil.which("promtool")
    if tool is None:
        pytest.skip("no promtool here (Debian: apt-get install prometheus): the rules were not run")
    done = subprocess.run([tool, *arguments], capture_output=True, text=True, check=False, cwd=RULES.parent)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_query_names_declared_metrics_and_their_labels() -> None:
    for where, expression in expressions().items():
        names = re.findall(r"gorila_(\w+)", expression)
        assert names, where
        labels = set(ALWAYS)
        for name in names:
            stem = re.sub(r"_(bucket|sum|count)$", "", name)
            metric = BY_NAME[stem if stem in BY_NAME and BY_NAME[stem].kind == "histogram" else name]
            labels |= set(metric.labels)
        used = set(re.findall(r"(\w+)\s*(?:=~?|!=)\s*\"", expression))
        for group in re.findall(r"(?:by|on)\s*\(([^)]*)\)", expression):
            used |= {label.strip() for label in group.split(",")}
        assert used <= labels, f"{where}: {used - labels}"


def test_counters_are_looked_at_by_rate_and_gauges_are_not() -> None:
    for where, expression in expressions().items():
        for function, name in re.findall(r"(rate|increase|deriv)\(gorila_(\w+)", expression):
            stem = name.removesuffix("_bucket")
            assert (BY_NAME[stem].kind == "gauge") == (function == "deriv"), where


def test_the_checklist_is_four_panels_of_each_dashboard_and_four_alerts() -> None:
    for dashboard in (training(), streaming()):
        panels = [panel for panel in dashboard["panels"] if panel["title"].startswith("Checklist")]
        assert len(panels) == 4
        bounds = [panel["fieldConfig"]["defaults"]["thresholds"]["steps"][1]["value"] for panel in panels]
        assert bounds == [0.6, 0.85, 0.8, 0.99]
    assert set(alerts()) >= CHECKLIST | {"LagGrows", "DeadLetters", "CrashLoop"}
    assert "> 0.6" in alerts()["ParameterServerBusy"]["expr"]
    assert "< 0.85" in alerts()["LearnerIdle"]["expr"]
    assert "gorila_replay_new_share_target" in alerts()["ReplayShareOffTarget"]["expr"]
    assert "< 0.99" in alerts()["WeightsApart"]["expr"]


def test_panels_have_ids_and_places_of_their_own_and_ask_for_the_chosen_run() -> None:
    for dashboard in (training(), streaming()):
        panels = dashboard["panels"]
        assert len({panel["id"] for panel in panels}) == len(panels)
        cells = {(x, y) for p in panels for x in range(*_span(p, "x", "w")) for y in range(*_span(p, "y", "h"))}
        assert len(cells) == sum(p["gridPos"]["w"] * p["gridPos"]["h"] for p in panels), "panels overlap"
        assert max(x for x, _ in cells) == 23
        assert [variable["name"] for variable in dashboard["templating"]["list"]] == ["run"]
        for title, expression in queries(dashboard):
            assert expression.count('run="$run"') == len(re.findall(r"gorila_\w+", expression)), title


def _span(panel: dict[str, Any], start: str, length: str) -> tuple[int, int]:
    place = panel["gridPos"]
    return place[start], place[start] + place[length]


def test_every_alert_says_what_is_wrong_and_what_to_do() -> None:
    for name, rule in alerts().items():
        assert rule["labels"]["severity"] in ("warning", "critical"), name
        assert "{{ $labels.run }}" in rule["annotations"]["summary"], name
        assert rule["annotations"]["action"], name


def test_promtool_takes_the_rules_the_configuration_and_every_query_of_the_dashboards(tmp_path: Path) -> None:
    assert "8 rules found" in promtool("check", "rules", str(RULES))
    promtool("check", "config", str(DEPLOY / "prometheus" / "prometheus.yml"))
    rules = [
        {"record": f"query:{number}", "expr": expression.replace("$__rate_interval", "1m")}
        for number, expression in enumerate(expressions().values())
    ]
    (tmp_path / "queries.yml").write_text(yaml.safe_dump({"groups": [{"name": "queries", "rules": rules}]}))
    assert f"{len(rules)} rules found" in promtool("check", "rules", str(tmp_path / "queries.yml"))


def test_every_alert_is_silent_below_its_bound_and_fires_above_it() -> None:
    assert "SUCCESS" in promtool("test", "rules", "rules_test.yml")
    tested = {
        check["alertname"]: check["exp_alerts"]
        for test in yaml.safe_load((RULES.parent / "rules_test.yml").read_text())["tests"]
        for check in test["alert_rule_test"]
    }
    assert set(tested) == set(alerts())
    assert all(tested.values()), "the last check of each alert is of its firing"
