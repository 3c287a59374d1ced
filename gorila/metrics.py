"""Every metric of the product, declared once: name, kind, unit, help, labels, roles. The only door to prometheus_client.

docs/metrics.md is `markdown_table()`; a test keeps it fresh. A name that is not in METRICS cannot be counted: it is a KeyError in the
first test that runs the line. On the scrape page each name is prefixed `gorila_` and carries the labels `role`, `run`, `process`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, start_http_server
from prometheus_client.registry import Collector

from gorila.errors import LocalError

# Histograms in seconds: from one Kafka round trip on one machine (0.5 ms) to the stop promise (5 s).
SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
UPDATES = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
ANY = ("every role",)
STREAM = ("learner", "parameter-server", "archiver")


@dataclass(frozen=True, slots=True)
class Metric:
    """One declaration. `unit` is a word a person reads; counters end in `_total` as Prometheus wants."""

    name: str
    kind: Literal["counter", "gauge", "histogram"]
    unit: str
    help: str
    labels: tuple[str, ...] = ()
    roles: tuple[str, ...] = ANY
    buckets: tuple[float, ...] = SECONDS


METRICS: tuple[Metric, ...] = (
    Metric("records_read_total", "counter", "records", "records handed in, by topic", ("topic",), STREAM),
    Metric(
        "records_written_total",
        "counter",
        "records",
        "records acknowledged by the broker, by topic",
        ("topic",),
        ("actor", *STREAM),
    ),
    Metric(
        "bytes_written_total",
        "counter",
        "bytes",
        "value bytes handed to the producer, by topic",
        ("topic",),
        ("actor", *STREAM),
    ),
    Metric(
        "dead_letters_total",
        "counter",
        "records",
        "records sent to dead-letters, by the topic they came from",
        ("topic",),
        STREAM,
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
    Metric("learner_updates", "gauge", "updates", "gradients computed since the process began", (), ("learner",)),
    Metric(
        "learner_batches_refused",
        "gauge",
        "batches",
        "no gradient was sent: rejected (outlier or not finite), skipped (handled before a restart), bad (does not inflate)",
        ("why",),
        ("learner",),
    ),
    Metric(
        "learner_orphan_parts",
        "gauge",
        "records",
        "passed over: their batch's beginning or end is missing",
        (),
        ("learner",),
    ),
    Metric(
        "codec_values",
        "gauge",
        "values",
        "what the gradient codec cut to its largest (saturated) or made zero (underflowed)",
        ("what",),
        ("learner",),
    ),
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
    Metric("archive_files_total", "counter", "files", "Parquet files made durable, by topic", ("topic",), ("archiver",)),
    Metric(
        "archive_records_total",
        "counter",
        "records",
        "records in files made durable, by topic",
        ("topic",),
        ("archiver",),
    ),
    Metric("archive_bytes_total", "counter", "bytes", "size of files made durable, by topic", ("topic",), ("archiver",)),
    Metric("archive_buffered_bytes", "gauge", "bytes", "read and not yet in a durable file", (), ("archiver",)),
    Metric(
        "turn_seconds",
        "histogram",
        "seconds",
        "from the first record of a poll to the last record sent for it",
        (),
        STREAM,
    ),
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

    def serve(self, host: str, port: int) -> int:
        """Start the scrape page; returns the port (0 asks the system for a free one). Raises LocalError when it is taken."""
        try:
            server, _ = start_http_server(port, addr=host, registry=self._registry)
        except OSError as error:
            raise LocalError(f"monitor.metrics_port = {port}: cannot listen on {host}: {error.strerror}") from None
        return int(server.server_port)


def markdown_table() -> str:
    """The table of metrics for docs/metrics.md."""
    rows = ["| metric | kind | unit | labels | roles | what it says |", "|---|---|---|---|---|---|"]
    rows += [
        f"| gorila_{m.name} | {m.kind} | {m.unit} | {', '.join(m.labels) or '–'} | {', '.join(m.roles)} | {m.help} |"
        for m in METRICS
    ]
    return "\n".join(rows) + "\n"
