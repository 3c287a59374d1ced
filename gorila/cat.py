"""The core of `gorila cat`: any of our topics as JSON lines, payloads summarised, whatever is in it.

A record that does not decode is shown too, with the reason and its first bytes: this is the tool one looks at dead-letters with.
"""

from __future__ import annotations

import datetime
import difflib
import json
import math
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

from gorila.codec import Schemas
from gorila.errors import BadRecord, RunError, UsageError
from gorila.kafka import SLICE_S, Cluster, Received
from gorila.moments import number_or_time
from gorila.run_record import RUN_TOPIC, find_run
from gorila.topics import BY_NAME

SHOWN_BYTES = 32


def summary(value: Any) -> Any:
    """A decoded value as JSON can hold it: bytes become their length and crc32, non-finite numbers their names."""
    if isinstance(value, bytes):
        return f"<{len(value)} bytes, crc32 {zlib.crc32(value):08x}>"
    if isinstance(value, Mapping):
        return {str(key): summary(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [summary(item) for item in value]
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


def _text(data: bytes | None) -> str | None:
    return None if data is None else data.decode(errors="backslashreplace")


def line_of(record: Received, schemas: Schemas) -> str:
    """One record as one line of JSON."""
    shown: dict[str, Any] = {
        "topic": record.topic,
        "partition": record.partition,
        "offset": record.offset,
        "timestamp_ms": record.timestamp_ms,
        "key": _text(record.key),
    }
    if record.headers:
        shown["headers"] = {name: _text(value) for name, value in record.headers}
    if record.value is None:
        shown["value"] = None
    else:
        try:
            plain, name = schemas.decode_plain(record.value)
            shown |= {"bytes": len(record.value), "schema": name, "value": summary(plain)}
        except BadRecord as error:
            shown |= {"bytes": len(record.value), "error": str(error), "first_bytes": record.value[:SHOWN_BYTES].hex()}
    return json.dumps(shown, ensure_ascii=False, allow_nan=False)


def parse_start(text: str) -> str | int | datetime.datetime:
    """What `--from` says: "earliest", "latest", an offset, or a time (ISO 8601; without a zone it is UTC). Raises UsageError."""
    if text in ("earliest", "latest"):
        return text
    try:
        return number_or_time(text)
    except ValueError:
        raise UsageError(
            f"--from {text[:40]!r} is not allowed: earliest, latest, an offset, or a time like 2026-01-31T12:00:00"
        ) from None


def start_offsets(
    cluster: Cluster, topic: str, partitions: int, start: str | int | datetime.datetime, most: int
) -> dict[int, tuple[int, int]]:
    """{partition: (first offset to show, end)}; "latest" means the newest `most` of each partition (0: none but new ones)."""
    admin = cluster.admin()
    keys = [(topic, p) for p in range(partitions)]
    lows, highs = admin.offsets(keys, "earliest"), admin.offsets(keys, "latest")
    if isinstance(start, datetime.datetime):
        wanted = admin.offsets(keys, int(start.timestamp() * 1000))
        wanted = {key: highs[key] if offset < 0 else offset for key, offset in wanted.items()}
    elif isinstance(start, int):
        wanted = dict.fromkeys(keys, start)
    else:
        wanted = {key: lows[key] if start == "earliest" else highs[key] - most for key in keys}
    return {key[1]: (min(max(wanted[key], lows[key]), highs[key]), highs[key]) for key in keys}


def learn_run_schemas(cluster: Cluster, topic: str, schemas: Schemas) -> None:
    """A recording explains itself: know the schemas that the topic's run was written with."""
    run, _, name = topic.rpartition(".")
    if run and name in BY_NAME and name != RUN_TOPIC:
        try:
            record = find_run(cluster, run, schemas)
        except RunError:
            return
        for number, text in (record.schemas if record else {}).items():
            schemas.learn(int(number), text)


def cat(
    cluster: Cluster,
    topic: str,
    *,
    start: str = "earliest",
    most: int = 0,
    follow: bool = False,
    schemas: Schemas | None = None,
) -> Iterator[str]:
    """Lines of a topic, up to its end as it is now.

    Args:
        topic: full name on the broker, as in `RUN.transitions`.
        start: see `parse_start`.
        most: stop after this many lines; 0: no limit.
        follow: go on with what comes.
        schemas: default: ours; those of the topic's run are added.

    Raises:
        UsageError: no such topic, or `start` is not understood.
        BrokerError.
    """
    parsed = parse_start(start)
    there = cluster.admin().topics()
    if topic not in there:
        close = difflib.get_close_matches(topic, there, 3, 0.5) or sorted(there)[:6]
        raise UsageError(
            f"topic {topic!r} does not exist on Kafka at {cluster.bootstrap_servers}: near: {', '.join(close) or 'it has none'}"
        )
    schemas = schemas or Schemas()
    learn_run_schemas(cluster, topic, schemas)
    spans = start_offsets(cluster, topic, there[topic], parsed, most or (0 if follow else 10))
    consumer = cluster.consumer(ends=True)
    try:
        consumer.assign({(topic, p): first for p, (first, _) in spans.items()})
        shown = 0
        unread = {p for p, (first, end) in spans.items() if first < end}
        while follow or unread:
            for record in consumer.poll_many(500, SLICE_S):
                _, end = spans[record.partition]
                if record.offset >= end - 1:
                    unread.discard(record.partition)
                if follow or record.offset < end:
                    yield line_of(record, schemas)
                    shown += 1
                    if most and shown >= most:
                        return
            # Past gaps too: control records and compaction leave no record to wait for.
            unread -= {p for p in unread if (consumer.end_reached(topic, p) or 0) >= spans[p][1]}
    finally:
        consumer.close()
