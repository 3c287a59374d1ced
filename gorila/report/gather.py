"""Collects what a report shows: the run's folder first, Kafka where it is reachable; what is missing is said, not failed on."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gorila.doctor import Evidence, examine, findings_of, worst_first
from gorila.errors import BadRecord, GorilaError, RunError
from gorila.messages import Episode, Evaluation, Priorities
from gorila.report.content import Chart, Content
from gorila.report.events import Point, scalars
from gorila.run_observer import open_spectator
from gorila.run_record import read_all
from gorila.service import Service

Tags = dict[str, list[Point]]


def gather(
    run: str, runs_dir: Path, bootstrap_servers: str, sets: Sequence[str] = (), why_no_kafka: str = ""
) -> Content:
    """A run's content.

    Args:
        bootstrap_servers: empty: Kafka is not asked, because of `why_no_kafka`.

    Raises:
        RunError: neither a folder nor Kafka knows the run.
    """
    folder = runs_dir / run
    sources: list[str] = []
    summary = _json(folder / "summary.json", sources)
    config = _json(folder / "config.json", sources)
    tags = _tags(folder / "tensorboard", sources)
    evidence: Evidence | None = None
    if bootstrap_servers:
        try:
            service = open_spectator("report", run, bootstrap_servers, sets)
            try:
                config = config or json.loads(service.config.model_dump_json(exclude={"kafka", "monitor", "archive"}))
                if not tags:
                    tags = _from_topics(service)
                    sources.append("Curves from Kafka's topics.")
                evidence = examine(service)
                sources.append("Lag and checklist from Kafka, when this file was made.")
            finally:
                service.close()
        except GorilaError as error:
            sources.append(f"Kafka was not read: {error}.")
    else:
        sources.append(f"Kafka was not asked: {why_no_kafka}.")
    if not folder.is_dir() and evidence is None:
        raise RunError(f"run {run!r} is unknown: there is no {folder}. {' '.join(sources)}")
    return Content(
        run=run,
        sources=sources,
        summary=summary,
        config=config,
        charts=charts(tags, config),
        staleness=_staleness(evidence),
        lags=[(lag.group, f"{lag.topic}/{lag.partition}", lag.records, lag.bound) for lag in evidence.second.lags]
        if evidence
        else (),
        checklist=worst_first(findings_of(evidence)) if evidence else (),
    )


def _json(path: Path, sources: list[str]) -> dict[str, Any]:
    try:
        found = json.loads(path.read_text())
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        sources.append(f"{path.name} cannot be read ({error}).")
        return {}
    return found if isinstance(found, dict) else {}


def _tags(folder: Path, sources: list[str]) -> Tags:
    if not folder.is_dir():
        return {}
    try:
        found = scalars(folder)
    except ImportError:
        sources.append("TensorBoard events were not read: pip install 'gorila-stream[monitor]'.")
        return {}
    if found:
        sources.append("Curves from the monitor's TensorBoard events.")
    return found


def _from_topics(service: Service) -> Tags:
    """The tags the monitor would have written, from the topics that keep history."""
    tags: Tags = defaultdict(list)
    admin = service.cluster.admin()
    for topic in ("episodes", "priorities"):
        name = service.topic(topic)
        if not admin.end_offsets([(name, 0)])[name, 0]:
            continue
        for received in read_all(service.cluster, name, timeout_s=120):
            try:
                message, at = service.schemas.decode(received.value), received.timestamp_ms / 1000
            except BadRecord:
                continue
            if isinstance(message, Evaluation):
                tags[f"evaluation/{message.phase}"].append((message.weights_version, at, message.return_mean))
            elif isinstance(message, Episode) and message.role == "actor":
                tags["return_by_epsilon/exploring"].append((message.weights_version, at, message.episode_return))
            elif isinstance(message, Priorities):
                learner, version = message.learner_id, message.version
                tags[f"loss/{learner}"].append((version, at, message.loss))
                tags[f"gradient_norm/{learner}"].append((version, at, message.gradient_norm))
                tags[f"busy_fraction/{learner}"].append((version, at, message.busy_fraction))
    if updates := sorted((at, v) for tag, points in tags.items() if tag.startswith("loss/") for v, at, _ in points):
        tags["rate/updates_per_s"] = _rate(updates)
    return dict(tags)


def _rate(counted: list[tuple[float, int]], every_s: float = 2.0) -> list[Point]:
    """Change per second of a counter, from (time, count) by time."""
    rates: list[Point] = []
    then, before = counted[0]
    for at, count in counted:
        if at - then >= every_s:
            rates.append((count, at, max(0, count - before) / (at - then)))
            then, before = at, count
    return rates


def charts(tags: Tags, config: Mapping[str, Any]) -> list[Chart]:
    """The charts of a report from scalars by the monitor's tags (consumers/monitor.py)."""
    began = min((points[0][1] for points in tags.values() if points), default=0.0)

    def by_step(prefix: str, strip: bool = True) -> dict[str, list[tuple[float, float]]]:
        return {
            (tag.removeprefix(prefix) if strip else tag): sorted((float(step), value) for step, _, value in points)
            for tag, points in sorted(tags.items())
            if tag.startswith(prefix)
        }

    def by_time(prefix: str) -> dict[str, list[tuple[float, float]]]:
        return {
            tag.removeprefix(prefix): [(at - began, value) for _, at, value in points]
            for tag, points in sorted(tags.items())
            if tag.startswith(prefix)
        }

    evaluator = config.get("evaluator")
    threshold = evaluator.get("threshold") if isinstance(evaluator, Mapping) else None
    exploring = [point for points in by_step("return_by_epsilon/").values() for point in points]
    dots = {"actors, exploring": sorted(exploring)} if exploring else {}
    level = float(threshold) if isinstance(threshold, int | float) else None
    # As curve.png calls them.
    names = {"screen": "evaluation", "confirm": "confirmation"}
    evaluations = {names.get(phase, phase): points for phase, points in by_step("evaluation/").items()}
    rates = by_time("rate/")
    samples = {name: points for name, points in rates.items() if name.startswith("samples")}
    made = [
        Chart("returns", "updates", "per episode", evaluations, dots, level, "solved at"),
        Chart("loss", "updates", "batch mean", by_step("loss/")),
        Chart("gradient norm", "updates", "by learner, before the clip", by_step("gradient_norm/")),
        Chart(
            "learner utilisation",
            "updates",
            "0 to 1",
            by_step("busy_fraction/"),
            level=0.85,
            level_name="checklist: above",
        ),
        Chart("rates", "seconds", "per second", {n: p for n, p in rates.items() if n not in samples}),
        Chart("samples", "seconds", "per second", samples),
        Chart("lag", "seconds", "records", by_time("lag/")),
        Chart("staleness", "updates", "updates", by_step("staleness/")),
        Chart("share of new rows drawn", "inserts", "0 to 1", by_step("replay/new_share/")),
    ]
    return [chart for chart in made if not chart.empty or chart.title in ("returns", "rates")]


def _staleness(evidence: Evidence | None) -> list[int]:
    if evidence is None or not evidence.progress.staleness:
        return []
    histograms = list(evidence.progress.staleness.values())
    total = np.zeros(max(len(h) for h in histograms), np.int64)
    for histogram in histograms:
        total[: len(histogram)] += histogram
    return [int(count) for count in total]
