"""Reads a range of offsets of one partition, whatever its length: for those who look at a log beside the loop that writes it."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

from gorila.errors import BrokerError
from gorila.kafka import SLICE_S, Cluster, Received

PATIENCE_S = 30.0
READ_RECORDS = 500


def bounds(cluster: Cluster, topic: str, partition: int) -> tuple[int, int]:
    """(first offset in the log, next offset to be written). Raises BrokerError."""
    consumer = cluster.consumer()
    try:
        return consumer.watermarks(topic, partition)
    finally:
        consumer.close()


def read_range(
    cluster: Cluster, topic: str, partition: int, start: int, stop: int, ended: threading.Event | None = None
) -> Iterator[Received]:
    """Records with start <= offset < stop, in order; offsets with nothing behind them but gaps are passed over.

    Args:
        ended: set to give up: the reader then sees an end.

    Raises:
        OffsetGone: `start` is not in the log, or retention overtook the read.
        BrokerError: nothing came for PATIENCE_S.
    """
    if start >= stop:
        return
    consumer = cluster.consumer(ends=True)
    try:
        consumer.assign({(topic, partition): start})
        heard_s = time.monotonic()
        while ended is None or not ended.is_set():
            found = consumer.poll_many(READ_RECORDS, SLICE_S)
            for received in found:
                if received.offset >= stop:
                    return
                yield received
                if received.offset + 1 >= stop:
                    return
            # The end event, not the last offset, says that all was read: compaction and control records leave gaps.
            if (consumer.end_reached(topic, partition) or 0) >= stop:
                return
            # A caller that works on what it was given is not Kafka's silence.
            heard_s = time.monotonic() if found else heard_s
            if time.monotonic() - heard_s > PATIENCE_S:
                raise BrokerError(f"reading {topic} partition {partition}: nothing came for {PATIENCE_S:g} s")
    finally:
        consumer.close()
