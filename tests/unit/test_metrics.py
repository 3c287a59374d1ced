from __future__ import annotations

import socket
import threading
import urllib.error
import urllib.request
from pathlib import Path

import pytest

from gorila.client_statistics import ClientStatistics
from gorila.errors import LocalError
from gorila.health import BEAT_S, Health
from gorila.metrics import METRICS, Metrics, markdown_table
from gorila.status_page import StatusPage


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
    text = get(StatusPage(metrics, Health(), "127.0.0.1", 0).port, "/metrics")[1]
    assert 'gorila_records_read_total{process="learner-0",role="learner",run="run-1",topic="batches"} 3.0' in text
    assert metrics.value("turn_seconds") == 1
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        with pytest.raises(LocalError, match="metrics_port"):
            StatusPage(Metrics("monitor"), Health(), "127.0.0.1", taken.getsockname()[1])


def get(port: int, path: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}{path}", timeout=10) as page:
            return page.status, page.read().decode()
    except urllib.error.HTTPError as error:
        return error.code, error.read().decode()


def test_a_role_is_healthy_from_its_start_ready_from_its_word_and_stuck_when_its_loop_stops_turning() -> None:
    now, stop = [100.0], threading.Event()
    health = Health(stop, clock=lambda: now[0])
    page = StatusPage(Metrics("actor"), health, "127.0.0.1", 0)
    try:
        now[0] += 10 * BEAT_S
        assert get(page.port, "/healthz") == (200, "starting\n")
        assert get(page.port, "/readyz")[0] == 503
        health.ready()
        assert get(page.port, "/readyz") == (200, "ready\n")
        now[0] += BEAT_S
        assert get(page.port, "/healthz")[0] == 200
        now[0] += 1
        assert get(page.port, "/healthz") == (503, "stuck: its loop last turned 31 s ago, bound 30\n")
        assert get(page.port, "/readyz")[0] == 503
        health.beat()
        assert get(page.port, "/readyz")[0] == 200
        stop.set()
        assert get(page.port, "/healthz") == (200, "leaving\n")
        assert get(page.port, "/readyz")[0] == 503
        assert get(page.port, "/config") == (404, "/metrics, /healthz or /readyz\n")
    finally:
        page.close()


def test_the_health_file_is_young_while_the_loop_turns_and_goes_with_the_process(tmp_path: Path) -> None:
    now = [0.0]
    health = Health(file=tmp_path / "health", clock=lambda: now[0])
    health.beat()
    assert (tmp_path / "health").read_text() == "starting\n"
    health.ready()
    assert (tmp_path / "health").read_text() == "ready\n"
    (tmp_path / "health").unlink()
    now[0] += 0.5
    health.beat()
    assert not (tmp_path / "health").exists()  # once a second: a loop turns a thousand times
    now[0] += 0.5
    health.beat()
    assert (tmp_path / "health").exists()
    health.close()
    assert not (tmp_path / "health").exists()
    with pytest.raises(LocalError, match="health_file"):
        Health(file=tmp_path / "no folder" / "health").ready()


def test_a_total_kept_elsewhere_is_counted_once_and_going_back_counts_nothing() -> None:
    metrics = Metrics("monitor")
    for total in (5.0, 5.0, 8.0, 2.0, 3.0):
        metrics.total("gradients_applied_total", total, shard="0")
    assert metrics.value("gradients_applied_total", shard="0") == 9.0


def test_librdkafkas_statistics_become_series_and_partitions_that_went_away_leave_the_page() -> None:
    metrics = Metrics("replay", "run-1", "replay-0")
    statistics = ClientStatistics(metrics, "run-1.")
    broker = {"txerrs": 1, "req_timeouts": 2, "connects": 3, "rtt": {"p50": 1500, "p99": 9000}, "throttle": {"avg": 20}}
    partition = {"fetch_state": "active", "consumer_lag": 7, "fetchq_cnt": 4}
    topics = {"run-1.transitions": {"partitions": {"0": partition, "1": partition, "-1": {"fetch_state": "none"}}}}
    told = {
        "type": "consumer",
        "rx_bytes": 10,
        "brokers": {"b": broker},
        "topics": topics,
        "cgrp": {"rebalance_cnt": 2},
    }
    statistics.take("transitions", told)
    place = {"client": "transitions", "topic": "transitions"}
    assert metrics.value("kafka_lag_records", partition="1", **place) == 7
    assert metrics.value("kafka_rtt_p99_seconds", client="transitions") == 0.009
    assert metrics.value("kafka_throttle_seconds", client="transitions") == 0.02
    assert metrics.value("kafka_request_errors_total", client="transitions") == 3
    assert metrics.value("kafka_rebalances_total", client="transitions") == 2
    del topics["run-1.transitions"]["partitions"]["1"]
    statistics.take("transitions", told)
    text = metrics.page().decode()
    assert 'partition="0"' in text and 'partition="1"' not in text
    statistics.take("producer", {"type": "producer", "msg_cnt": 3, "msg_size": 99, "brokers": {}})
    assert metrics.value("kafka_queued_bytes", client="producer") == 99
