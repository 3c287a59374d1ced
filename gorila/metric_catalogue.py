"""Metrics of every process, of its Kafka clients, and of a run as its monitor sees it: declarations only, part of gorila.metrics.METRICS."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

# Histograms in seconds: from one Kafka round trip on one machine (0.5 ms) to the stop promise (5 s).
SECONDS = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
UPDATES = (0.0, 1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0, 128.0)
ANY = ("every role",)
MONITOR = ("monitor",)


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


def _counter(name: str, unit: str, about: str, *labels: str, roles: tuple[str, ...] = ANY) -> Metric:
    return Metric(name, "counter", unit, about, labels, roles)


def _gauge(name: str, unit: str, about: str, *labels: str, roles: tuple[str, ...] = ANY) -> Metric:
    return Metric(name, "gauge", unit, about, labels, roles)


PROCESS: tuple[Metric, ...] = (
    _gauge("ready", "0 or 1", "the role takes part in the run and its loop turns, as /readyz says"),
    _gauge("beat_age_seconds", "seconds", "since the role's loop last turned"),
    _gauge("start_time_seconds", "seconds", "when the process began, Unix time: changes are restarts"),
    _counter("cpu_seconds_total", "seconds", "processor time of all threads of the process"),
    _gauge("resident_bytes", "bytes", "memory the process holds"),
    _gauge(
        "waiting_for",
        "0 or 1",
        "1 for whom the role has waited longer than a second, or for nobody",
        "whom",
        roles=("actor", "learner", "parameter-server", "replay"),
    ),
)

LEARNER: tuple[Metric, ...] = (
    _gauge("learner_updates", "updates", "gradients computed since the process began", roles=("learner",)),
    _gauge(
        "learner_batches_refused",
        "batches",
        "no gradient was sent: rejected (outlier or not finite), skipped (handled before a restart), bad (does not inflate)",
        "why",
        roles=("learner",),
    ),
    _gauge(
        "learner_orphan_parts",
        "records",
        "passed over: their batch's beginning or end is missing",
        roles=("learner",),
    ),
    _counter(
        "codec_values_total",
        "values",
        "that the gradient codec cut to the largest its form holds (saturated) or made zero (underflowed; fp16, and top-k's halves)",
        "what",
        roles=("learner",),
    ),
    _gauge(
        "codec_residual_norm",
        "norm",
        "of what a lossy codec left over and the next gradients send (error feedback); growing without end: it sends too little",
        roles=("learner",),
    ),
    _counter("codec_gradients_total", "gradients", "compressed, all shards of a batch as one", roles=("learner",)),
    _counter("codec_bytes_total", "bytes", "of compressed gradients, all shards", roles=("learner",)),
)

CLIENTS: tuple[Metric, ...] = (
    # From librdkafka's own statistics, every 5 s, only where metrics are served (gorila/client_statistics.py).
    _gauge(
        "kafka_lag_records",
        "records",
        "of this consumer, by librdkafka: -1 where not known",
        "client",
        "topic",
        "partition",
    ),
    _gauge("kafka_fetched_records", "records", "fetched and not yet polled", "client", "topic", "partition"),
    _gauge("kafka_queued_records", "records", "accepted by the producer and not yet acknowledged", "client"),
    _gauge("kafka_queued_bytes", "bytes", "accepted by the producer and not yet acknowledged", "client"),
    _gauge("kafka_rtt_p50_seconds", "seconds", "request to answer, the slowest broker's median", "client"),
    _gauge("kafka_rtt_p99_seconds", "seconds", "request to answer, the slowest broker's 99th percentile", "client"),
    _gauge("kafka_throttle_seconds", "seconds", "by which quotas delayed requests, mean of the last window", "client"),
    _counter("kafka_received_bytes_total", "bytes", "from brokers", "client"),
    _counter("kafka_sent_bytes_total", "bytes", "to brokers", "client"),
    _counter("kafka_request_errors_total", "requests", "failed or timed out", "client"),
    _counter("kafka_connections_total", "connections", "made to brokers: rises when Kafka goes away", "client"),
    _counter("kafka_rebalances_total", "rebalances", "of the consumer's group, seen by this member", "client"),
)

RUN: tuple[Metric, ...] = (
    # The run as its topics tell it, exported once, by the monitor (consumers/monitor_metrics.py).
    _counter("run_env_steps_total", "steps", "actions of all actors that replay inserted", roles=MONITOR),
    _counter("run_updates_total", "updates", "global version", roles=MONITOR),
    _counter("run_samples_total", "rows", "rows drawn", roles=MONITOR),
    _counter("run_batches_total", "batches", "learner batches drawn", roles=MONITOR),
    _counter("run_episodes_total", "episodes", "finished by actors", roles=MONITOR),
    _counter("run_dead_letters_total", "records", "in the run's dead-letters topic", roles=MONITOR),
    _gauge(
        "lag_records",
        "records",
        "committed lag of a group, as Kafka's tools show it",
        "group",
        "topic",
        "partition",
        roles=MONITOR,
    ),
    _gauge(
        "return_by_epsilon",
        "return",
        "mean of the newest 100 episodes at this exploration rate",
        "epsilon",
        roles=MONITOR,
    ),
    _gauge("evaluation_return", "return", "mean of the newest evaluation, by phase", "phase", roles=MONITOR),
    _gauge("loss", "loss", "of the newest batch of each learner", "learner", roles=MONITOR),
    _gauge(
        "gradient_norm",
        "norm",
        "of the newest batch of each learner, all shards, before clipping",
        "learner",
        roles=MONITOR,
    ),
    _gauge(
        "busy_fraction",
        "0 to 1",
        "share of a learner's time spent computing, mean over the batches of the last 2 s",
        "learner",
        roles=MONITOR,
    ),
    _counter("rejected_batches_total", "batches", "of a learner, as outliers or not finite", "learner", roles=MONITOR),
    Metric(
        "round_trip_seconds",
        "histogram",
        "seconds",
        "from a gradient's emission to the learner reading weights that include it",
        ("learner",),
        MONITOR,
    ),
    Metric(
        "staleness_updates",
        "histogram",
        "updates",
        "between the weights a gradient was computed on and those it was applied to",
        ("shard",),
        MONITOR,
        UPDATES,
    ),
    _counter("gradients_applied_total", "gradients", "by shard", "shard", roles=MONITOR),
    _counter(
        "gradients_dropped_total",
        "gradients",
        "by shard and reason: stale, duplicate (normal after a restart), bad",
        "shard",
        "why",
        roles=MONITOR,
    ),
    _gauge("learning_rate", "rate", "applied last, by shard", "shard", roles=MONITOR),
    _gauge(
        "weights_cosine",
        "-1 to 1",
        "cosine of the newest weights and those a learner computes on (the nearest the monitor has seen): 1 when it keeps up",
        "learner",
        roles=MONITOR,
    ),
    _gauge("replay_rows", "rows", "that can be drawn, by split", "split", roles=MONITOR),
    _gauge("replay_memory_bytes", "bytes", "of a split's rings", "split", roles=MONITOR),
    _gauge("replay_new_share", "0 to 1", "share of new rows among those drawn", "split", roles=MONITOR),
    _gauge("replay_new_share_target", "0 to 1", "replay.target_new_share, where the run has one", roles=MONITOR),
    _counter(
        "replay_stale_priorities_total", "rows", "priorities of rows that had left the ring", "split", roles=MONITOR
    ),
)
