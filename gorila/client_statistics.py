"""librdkafka's own statistics as metrics. Called from inside a client's poll every few seconds, and only where metrics are served."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gorila.metrics import Metrics


class ClientStatistics:
    """Turns statistics (confluent_kafka's `stats_cb`, parsed) into gauges and counters; fields as librdkafka's STATISTICS.md names them."""

    def __init__(self, metrics: Metrics, prefix: str) -> None:
        """`prefix`: of the run's topic names, left away in labels."""
        self._metrics, self._prefix = metrics, prefix
        self._shown: dict[str, set[tuple[str, str]]] = {}

    def take(self, client: str, statistics: Mapping[str, Any]) -> None:
        """One client's newest statistics."""
        metrics = self._metrics
        brokers = list(statistics.get("brokers", {}).values())
        metrics.total("kafka_received_bytes_total", statistics.get("rx_bytes", 0), client=client)
        metrics.total("kafka_sent_bytes_total", statistics.get("tx_bytes", 0), client=client)
        errors = sum(broker.get("txerrs", 0) + broker.get("req_timeouts", 0) for broker in brokers)
        metrics.total("kafka_request_errors_total", errors, client=client)
        metrics.total("kafka_connections_total", sum(broker.get("connects", 0) for broker in brokers), client=client)
        metrics.gauge("kafka_rtt_p50_seconds", _slowest(brokers, "rtt", "p50") / 1e6, client=client)
        metrics.gauge("kafka_rtt_p99_seconds", _slowest(brokers, "rtt", "p99") / 1e6, client=client)
        metrics.gauge("kafka_throttle_seconds", _slowest(brokers, "throttle", "avg") / 1e3, client=client)
        if statistics.get("type") == "producer":
            metrics.gauge("kafka_queued_records", statistics.get("msg_cnt", 0), client=client)
            metrics.gauge("kafka_queued_bytes", statistics.get("msg_size", 0), client=client)
            return
        metrics.total("kafka_rebalances_total", statistics.get("cgrp", {}).get("rebalance_cnt", 0), client=client)
        self._partitions(client, statistics.get("topics", {}))

    def _partitions(self, client: str, topics: Mapping[str, Any]) -> None:
        shown = set()
        for name, topic in topics.items():
            for number, partition in topic.get("partitions", {}).items():
                if partition.get("fetch_state") != "active":
                    continue
                place = {"client": client, "topic": name.removeprefix(self._prefix), "partition": str(number)}
                shown.add((place["topic"], place["partition"]))
                self._metrics.gauge("kafka_lag_records", partition.get("consumer_lag", -1), **place)
                self._metrics.gauge("kafka_fetched_records", partition.get("fetchq_cnt", 0), **place)
        for topic, number in self._shown.get(client, set()) - shown:  # another member's now: not ours to report
            for metric in ("kafka_lag_records", "kafka_fetched_records"):
                self._metrics.forget(metric, client=client, topic=topic, partition=number)
        self._shown[client] = shown


def _slowest(brokers: Iterable[Mapping[str, Any]], window: str, figure: str) -> float:
    return max((float(broker.get(window, {}).get(figure, 0)) for broker in brokers), default=0.0)
