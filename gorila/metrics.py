"""Every metric of the product, declared once: name, kind, unit, help, labels, roles (here what roles count at work; what every process shows
and what the monitor tells of a run in gorila/metric_catalogue.py). The only door to prometheus_client.

docs/metrics.md is `markdown_table()`; a test keeps it fresh. A name that is not in METRICS cannot be counted: it is a KeyError in the
first test that runs the line. On the scrape page each name is prefixed `gorila_` and carries the labels `role`, `run`, `process`.
"""

from __future__ import annotations

import time

import psutil
from prometheus_client import CONTENT_TYPE_LATEST as CONTENT_TYPE
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.registry import Collector

from gorila.metric_catalogue import CLIENTS, LEARNER, PROCESS, RUN, Metric

__all__ = ["BY_NAME", "CONTENT_TYPE", "METRICS", "Metric", "Metrics", "markdown_table"]

STREAM = ("learner", "parameter-server", "archiver")
FLOW = (*STREAM, "replay")

METRICS: tuple[Metric, ...] = (
    *PROCESS,
    Metric("records_read_total", "counter", "records", "records handed in, by topic", ("topic",), FLOW),
    Metric(
        "records_written_total",
        "counter",
        "records",
        "records acknowledged by the broker, by topic",
        ("topic",),
        ("actor", "evaluator", *FLOW),
    ),
    Metric(
        "bytes_written_total",
        "counter",
        "bytes",
        "value bytes handed to the producer, by topic",
        ("topic",),
        ("actor", "evaluator", *FLOW),
    ),
    Metric(
        "dead_letters_total",
        "counter",
        "records",
        "records sent to dead-letters, by the topic they came from",
        ("topic",),
        FLOW,
    ),
    Metric(
        "offsets_gone_total",
        "counter",
        "times",
        "an offset was no longer in the log and the input's policy moved on",
        ("topic",),
        STREAM,
    ),
    Metric(
        "operator_resets_total",
        "counter",
        "partitions",
        "committed offsets written by an operator, obeyed or refused",
        ("obeyed",),
        STREAM,
    ),
    Metric("env_steps", "gauge", "steps", "environment steps taken since the process began", (), ("actor",)),
    Metric("behaviour_version", "gauge", "updates", "version of the weights acted with", (), ("actor",)),
    Metric("epsilon", "gauge", "0 to 1", "share of random actions, mean over lanes", (), ("actor",)),
    *LEARNER,
    Metric("commits_total", "counter", "times", "offset commits asked for", (), STREAM),
    Metric(
        "commit_errors_total", "counter", "times", "commits refused, as on partitions lost in a rebalance", (), STREAM
    ),
    Metric("rebalances_total", "counter", "times", "assignments that changed, by what happened", ("event",), STREAM),
    Metric(
        "forced_flushes_total",
        "counter",
        "times",
        "commits that had to wait for acknowledgements; 0 in a healthy run",
        (),
        STREAM,
    ),
    Metric(
        "outstanding_records",
        "gauge",
        "records",
        "emitted and not yet acknowledged, held ones included",
        (),
        ("actor", *STREAM),
    ),
    Metric(
        "held_records",
        "gauge",
        "records",
        "emitted and held back by a lag gate, by topic",
        ("topic",),
        ("actor", *STREAM),
    ),
    Metric(
        "waiting",
        "gauge",
        "0 or 1",
        "1 while the role waits for another; the log says for whom",
        (),
        ("actor", *STREAM),
    ),
    Metric("waiting_seconds_total", "counter", "seconds", "time spent waiting for other roles", (), ("actor", *STREAM)),
    Metric(
        "archive_files_total", "counter", "files", "Parquet files made durable, by topic", ("topic",), ("archiver",)
    ),
    Metric(
        "archive_records_total",
        "counter",
        "records",
        "records in files made durable, by topic",
        ("topic",),
        ("archiver",),
    ),
    Metric(
        "archive_bytes_total", "counter", "bytes", "size of files made durable, by topic", ("topic",), ("archiver",)
    ),
    Metric("archive_buffered_bytes", "gauge", "bytes", "read and not yet in a durable file", (), ("archiver",)),
    Metric(
        "turn_seconds",
        "histogram",
        "seconds",
        "from the first record of a poll to the last record sent for it",
        (),
        STREAM,
    ),
    *CLIENTS,
    *RUN,
)
BY_NAME = {metric.name: metric for metric in METRICS}


class Metrics:
    """The metrics of one process, in a registry of its own (two roles in one test process never meet)."""

    def __init__(self, role: str, run: str = "", process: str = "") -> None:
        self._fixed = {"role": role, "run": run, "process": process}
        self._registry = CollectorRegistry()
        self._made: dict[str, Collector] = {}
        # Looking a child up by its labels takes prometheus_client several microseconds; the loops count every record.
        self._children: dict[tuple[str, str, tuple[tuple[str, str], ...]], Counter | Gauge | Histogram] = {}
        self._totals: dict[tuple[str, tuple[tuple[str, str], ...]], float] = {}
        self._process = psutil.Process()

    def _child(self, name: str, kind: str, labels: dict[str, str]) -> Counter | Gauge | Histogram:
        key = (name, kind, tuple(labels.items()))
        child = self._children.get(key)
        if child is None:
            child = self._children[key] = self._find(name, kind, labels)
        return child

    def _find(self, name: str, kind: str, labels: dict[str, str]) -> Counter | Gauge | Histogram:
        metric = BY_NAME[name]
        if metric.kind != kind or set(labels) != set(metric.labels):
            raise KeyError(
                f"metric {name} is a {metric.kind} with labels {metric.labels}, used as {kind} with {tuple(labels)}"
            )
        made = self._made.get(name)
        if made is None:
            made = self._made[name] = self._make(metric)
        assert isinstance(made, Counter | Gauge | Histogram)
        return made.labels(**self._fixed, **labels)

    def _make(self, metric: Metric) -> Collector:
        labels = (*self._fixed, *metric.labels)
        text = f"{metric.help} ({metric.unit})"
        name = f"gorila_{metric.name}"
        if metric.kind == "counter":
            return Counter(name, text, labels, registry=self._registry)
        if metric.kind == "gauge":
            return Gauge(name, text, labels, registry=self._registry)
        return Histogram(name, text, labels, registry=self._registry, buckets=metric.buckets)

    def count(self, name: str, amount: float = 1.0, **labels: str) -> None:
        """Add to a counter. Raises KeyError for an undeclared name or other labels than declared."""
        child = self._child(name, "counter", labels)
        assert isinstance(child, Counter)
        child.inc(amount)

    def total(self, name: str, value: float, **labels: str) -> None:
        """Bring a counter to a total that is kept elsewhere. One that went back (its keeper restarted) is counted on from where it is now."""
        key = (name, tuple(labels.items()))
        self.count(name, max(0.0, value - self._totals.get(key, 0.0)), **labels)
        self._totals[key] = value

    def gauge(self, name: str, value: float, **labels: str) -> None:
        """Set a gauge. Raises KeyError as `count` does."""
        child = self._child(name, "gauge", labels)
        assert isinstance(child, Gauge)
        child.set(value)

    def observe(self, name: str, value: float, **labels: str) -> None:
        """Put a value in a histogram. Raises KeyError as `count` does."""
        child = self._child(name, "histogram", labels)
        assert isinstance(child, Histogram)
        child.observe(value)

    def value(self, name: str, **labels: str) -> float:
        """What a counter or gauge shows now (a histogram: how many observations); 0 before it was first touched."""
        suffix = "_count" if BY_NAME[name].kind == "histogram" else ""
        found = self._registry.get_sample_value(f"gorila_{name}{suffix}", {**self._fixed, **labels})
        return 0.0 if found is None else found

    def show_process(self, ready: bool, beat_age_s: float) -> None:
        """What every process shows, as it is now."""
        self.gauge("ready", float(ready))
        self.gauge("beat_age_seconds", beat_age_s)
        self.gauge("start_time_seconds", self._process.create_time())
        self.total("cpu_seconds_total", time.process_time())
        self.gauge("resident_bytes", self._process.memory_info().rss)

    def forget(self, name: str, **labels: str) -> None:
        """Take a series off the page: what it told of is not this process's any more."""
        made = self._made.get(name)
        if isinstance(made, Counter | Gauge | Histogram):
            made.remove(*self._fixed.values(), *(labels[label] for label in BY_NAME[name].labels))
        for kind in ("counter", "gauge", "histogram"):
            self._children.pop((name, kind, tuple(labels.items())), None)

    def page(self) -> bytes:
        """What Prometheus scrapes (content type: CONTENT_TYPE)."""
        return generate_latest(self._registry)


def markdown_table() -> str:
    """The table of metrics for docs/metrics.md."""
    rows = ["| metric | kind | unit | labels | roles | what it says |", "|---|---|---|---|---|---|"]
    rows += [
        f"| gorila_{m.name} | {m.kind} | {m.unit} | {', '.join(m.labels) or '–'} | {', '.join(m.roles)} | {m.help} |"
        for m in METRICS
    ]
    return "\n".join(rows) + "\n"
