"""The dashboards as code: `training` (does it learn) and `streaming` (does it flow). Both end with the reference's checklist as four panels.

Every query names metrics of gorila/metrics.py only, and is filtered by the dashboard's `run` variable.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

HEIGHT, WIDTH = 8, 24
DATASOURCE = {"type": "prometheus", "uid": "prometheus"}
RUN = 'run="$run"'
Panel = dict[str, Any]
Query = tuple[str, str]  # expression, legend


def chart(title: str, *queries: Query, unit: str = "short", about: str = "", **custom: Any) -> Panel:
    """Lines over time."""
    panel = _panel("timeseries", title, queries, unit, about)
    panel["fieldConfig"]["defaults"]["custom"] = {"lineWidth": 1, "fillOpacity": 5, "showPoints": "never", **custom}
    panel["options"] = {"legend": {"displayMode": "list", "placement": "bottom"}, "tooltip": {"mode": "multi"}}
    return panel


def states(title: str, *queries: Query, about: str = "") -> Panel:
    """Who is in which state when."""
    panel = _panel("state-timeline", title, queries, "short", about)
    panel["options"] = {"mergeValues": True, "showValue": "never", "legend": {"displayMode": "list"}}
    return panel


def checked(title: str, expression: str, bound: float, good: str, unit: str, about: str) -> Panel:
    """A line of the checklist: green on the `good` side ("below" or "above") of `bound`, red on the other."""
    panel = _panel("stat", title, ((expression, "{{process}}{{learner}}{{split}}"),), unit, about)
    colours = ("green", "red") if good == "below" else ("red", "green")
    steps = [{"color": colours[0], "value": None}, {"color": colours[1], "value": bound}]
    panel["fieldConfig"]["defaults"]["thresholds"] = {"mode": "absolute", "steps": steps}
    panel["options"] = {"colorMode": "background", "graphMode": "area", "reduceOptions": {"calcs": ["lastNotNull"]}}
    return panel


def _panel(kind: str, title: str, queries: Sequence[Query], unit: str, about: str) -> Panel:
    return {
        "type": kind,
        "title": title,
        "description": about,
        "datasource": DATASOURCE,
        "fieldConfig": {"defaults": {"unit": unit}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + number), "datasource": DATASOURCE, "expr": expression, "legendFormat": legend}
            for number, (expression, legend) in enumerate(queries)
        ],
    }


def _rate(metric: str, by: str = "", more: str = "") -> str:
    selector = f"{{{RUN}{',' + more if more else ''}}}"
    inner = f"rate({metric}{selector}[$__rate_interval])"
    return f"sum by ({by}) ({inner})" if by else f"sum({inner})"


def _each(metric: str) -> str:
    return f"rate(gorila_{metric}{{{RUN}}}[$__rate_interval])"


def checklist() -> list[Panel]:
    """The reference's four lines (deploy/prometheus/rules.yml alerts on the same)."""
    return [
        checked(
            "Checklist: parameter-server CPU",
            f'rate(gorila_cpu_seconds_total{{role="parameter-server",{RUN}}}[$__rate_interval])',
            0.6,
            "below",
            "percentunit",
            "below 60 % of a core",
        ),
        checked(
            "Checklist: learner utilisation",
            f"avg_over_time(gorila_busy_fraction{{{RUN}}}[1m])",
            0.85,
            "above",
            "percentunit",
            "above 85 %",
        ),
        checked(
            "Checklist: share of new replay data",
            f"gorila_replay_new_share{{{RUN}}}",
            0.8,
            "above",
            "percentunit",
            "the reference's new:old 4:1 is 80 %; an alert only where replay.target_new_share is set",
        ),
        checked(
            "Checklist: cosine similarity between nodes",
            f"gorila_weights_cosine{{{RUN}}}",
            0.99,
            "above",
            "short",
            "of the weights each learner computes on and the newest: above 0.99",
        ),
    ]


def training() -> dict[str, Any]:
    """Does it learn."""
    staleness = f"sum by (le) (rate(gorila_staleness_updates_bucket{{{RUN}}}[$__rate_interval]))"
    return dashboard(
        "gorila-training",
        "gorila training",
        [
            chart(
                "Returns by exploration rate",
                (f"gorila_return_by_epsilon{{{RUN}}}", "ε {{epsilon}}"),
                about="actors' newest 100 episodes at each rate",
            ),
            chart("Evaluation return", (f"gorila_evaluation_return{{{RUN}}}", "{{phase}}")),
            chart("Loss", (f"gorila_loss{{{RUN}}}", "{{learner}}")),
            chart(
                "Gradient norm by learner",
                (f"gorila_gradient_norm{{{RUN}}}", "{{learner}}"),
                about="all shards, before clipping: look node by node for exploding gradients",
                scaleDistribution={"type": "log", "log": 10},
            ),
            chart(
                "Staleness",
                (f"histogram_quantile(0.5, {staleness})", "p50"),
                (f"histogram_quantile(0.99, {staleness})", "p99"),
                about="updates between the weights a gradient was computed on and those it was applied to",
            ),
            chart("Cosine of weights by learner", (f"gorila_weights_cosine{{{RUN}}}", "{{learner}}")),
            chart(
                "Steps, updates, rows drawn per second",
                (_rate("gorila_run_env_steps_total"), "environment steps"),
                (_rate("gorila_run_updates_total"), "updates"),
                (_rate("gorila_run_samples_total"), "rows drawn"),
            ),
            chart("Learner busy", (f"gorila_busy_fraction{{{RUN}}}", "{{learner}}"), unit="percentunit"),
            chart(
                "Gradients dropped and batches rejected per second",
                (_rate("gorila_gradients_dropped_total", "why"), "dropped: {{why}}"),
                (_rate("gorila_rejected_batches_total", "learner"), "rejected: {{learner}}"),
            ),
            chart(
                "Gradient codec: bytes a gradient",
                (f"{_each('codec_bytes_total')} / {_each('codec_gradients_total')}", "{{process}}"),
                unit="bytes",
                about="all shards of one batch, compressed",
            ),
            chart(
                "Gradient codec: what it loses",
                (f"gorila_codec_residual_norm{{{RUN}}}", "{{process}} residual norm"),
                (_rate("gorila_codec_values_total", "process, what"), "{{process}} {{what}} per s"),
                about="the residual goes out with the next gradients; it must not grow without end",
                scaleDistribution={"type": "log", "log": 10},
            ),
            chart("Exploration rate", (f"gorila_epsilon{{{RUN}}}", "{{process}}")),
            chart("Learning rate", (f"gorila_learning_rate{{{RUN}}}", "shard {{shard}}")),
            chart(
                "Replay",
                (f"gorila_replay_rows{{{RUN}}}", "rows {{split}}"),
                (_rate("gorila_replay_stale_priorities_total", "split"), "stale priorities per s {{split}}"),
            ),
            *checklist(),
        ],
    )


def streaming() -> dict[str, Any]:
    """Does it flow."""
    turn = f"sum by (le, role) (rate(gorila_turn_seconds_bucket{{{RUN}}}[$__rate_interval]))"
    trip = f"sum by (le) (rate(gorila_round_trip_seconds_bucket{{{RUN}}}[$__rate_interval]))"
    return dashboard(
        "gorila-streaming",
        "gorila streaming",
        [
            chart(
                "Lag by group and partition",
                (f"gorila_lag_records{{{RUN}}}", "{{group}} {{topic}}-{{partition}}"),
                about="committed lag: the number Kafka's tools show and the number writers wait on",
            ),
            states(
                "Who waits for whom",
                (
                    f"gorila_waiting_for{{{RUN}}}",
                    "{{process}} → {{whom}}",
                ),
                about="1: the process has waited for it longer than a second; 1 for nobody: it does not wait",
            ),
            chart("Records written per second", (_rate("gorila_records_written_total", "topic"), "{{topic}}")),
            chart("Bytes written per second", (_rate("gorila_bytes_written_total", "topic"), "{{topic}}"), unit="Bps"),
            chart("Records read per second", (_rate("gorila_records_read_total", "role, topic"), "{{role}} {{topic}}")),
            chart("Time waited", (_rate("gorila_waiting_seconds_total", "process"), "{{process}}"), unit="percentunit"),
            chart(
                "Latency per stage, p50 and p99",
                (f"histogram_quantile(0.5, {turn})", "{{role}} turn p50"),
                (f"histogram_quantile(0.99, {turn})", "{{role}} turn p99"),
                (f"histogram_quantile(0.5, {trip})", "gradient to weights p50"),
                (f"histogram_quantile(0.99, {trip})", "gradient to weights p99"),
                unit="s",
            ),
            chart(
                "Kafka round trip, p99",
                (f"gorila_kafka_rtt_p99_seconds{{{RUN}}}", "{{process}} {{client}}"),
                unit="s",
                about="a consumer's contains its long poll (100 ms)",
            ),
            chart("Dead letters", (f"gorila_run_dead_letters_total{{{RUN}}}", "in the topic")),
            chart(
                "Producer queues",
                (f"gorila_kafka_queued_records{{{RUN}}}", "{{process}} records"),
                (f"gorila_outstanding_records{{{RUN}}}", "{{process}} not acknowledged"),
            ),
            chart(
                "Throttled, errors, connections",
                (f"gorila_kafka_throttle_seconds{{{RUN}}}", "{{process}} {{client}} throttled, s"),
                (_rate("gorila_kafka_request_errors_total", "process"), "{{process}} errors per s"),
                (_rate("gorila_kafka_connections_total", "process"), "{{process}} connections per s"),
            ),
            chart(
                "Rebalances",
                (
                    f"sum by (process, client) (increase(gorila_kafka_rebalances_total{{{RUN}}}[$__rate_interval]))",
                    "{{process}} {{client}}",
                ),
            ),
            chart("Processor time", (_rate("gorila_cpu_seconds_total", "process"), "{{process}}"), unit="percentunit"),
            chart("Memory", (f"gorila_resident_bytes{{{RUN}}}", "{{process}}"), unit="bytes"),
            states("Ready", (f"gorila_ready{{{RUN}}}", "{{process}}")),
            chart("Since the loop last turned", (f"gorila_beat_age_seconds{{{RUN}}}", "{{process}}"), unit="s"),
            *checklist(),
        ],
    )


def dashboard(uid: str, title: str, panels: list[Panel]) -> dict[str, Any]:
    """Panels in rows of two, the checklist's four in one row at the end; a variable for the run."""
    for number, panel in enumerate(panels):
        panel["id"] = number + 1
        tail = number - (len(panels) - 4)
        if tail < 0:
            panel["gridPos"] = {"x": number % 2 * 12, "y": number // 2 * HEIGHT, "w": 12, "h": HEIGHT}
        else:
            panel["gridPos"] = {"x": tail * 6, "y": (len(panels) - 3) // 2 * HEIGHT, "w": 6, "h": HEIGHT // 2}
    variable = {
        "name": "run",
        "type": "query",
        "datasource": DATASOURCE,
        "query": {"query": "label_values(gorila_ready, run)", "refId": "run"},
        "refresh": 2,
        "sort": 2,
    }
    return {
        "uid": uid,
        "title": title,
        "tags": ["gorila"],
        "timezone": "browser",
        "schemaVersion": 39,
        "refresh": "5s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {"list": [variable]},
        "panels": panels,
    }
