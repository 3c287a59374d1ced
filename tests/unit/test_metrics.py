from __future__ import annotations

import socket
import urllib.request

import pytest

from gorila.errors import LocalError
from gorila.metrics import METRICS, Metrics, markdown_table


def test_every_metric_is_declared_once_and_stands_in_the_table() -> None:
    names = [metric.name for metric in METRICS]
    assert len(names) == len(set(names))
    assert all(f"| gorila_{name} |" in markdown_table() for name in names)
    assert all(
        name.endswith("_total") == (metric.kind == "counter") for name, metric in zip(names, METRICS, strict=True)
    )


def test_a_metric_nobody_declared_or_other_labels_cannot_be_counted() -> None:
    metrics = Metrics("learner")
    with pytest.raises(KeyError):
        metrics.count("records_red_total", topic="batches")
    with pytest.raises(KeyError):
        metrics.count("records_read_total")
    with pytest.raises(KeyError):
        metrics.gauge("records_read_total", 1, topic="batches")


def test_the_scrape_page_shows_role_run_and_value_and_a_taken_port_is_one_clear_line() -> None:
    metrics = Metrics("learner", "run-1", "learner-0")
    metrics.count("records_read_total", 3, topic="batches")
    metrics.observe("turn_seconds", 0.003)
    port = metrics.serve("127.0.0.1", 0)
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=10) as page:
        text = page.read().decode()
    assert 'gorila_records_read_total{process="learner-0",role="learner",run="run-1",topic="batches"} 3.0' in text
    assert metrics.value("turn_seconds") == 1
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(LocalError, match="metrics_port"):
            Metrics("monitor").serve("127.0.0.1", taken.getsockname()[1])
