"""What a role emits, from its hands to the broker's acknowledgement. Used by the runtime and its twin without a poll.

Rules of this file:
1. Every emission gets a sequence number. `acknowledged` is the watermark: all emissions up to it are in the log. What was read before
   emission n may be committed once `acknowledged >= n`, however much was emitted since: so commits never wait for the newest record.
2. A record to a gated topic is held while the topic's reader is too far behind, in order per partition; a held record is not acknowledged.
3. Held records are bounded by the caller: it reads nothing, and ticks nothing, while `held` is not 0.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from functools import partial

from gorila.codec import Schemas
from gorila.metrics import Metrics
from gorila.ports import Gate, ProducerPort
from gorila.processor import Outgoing

Delivered = Callable[[Outgoing, int, int], None]


class Emission:
    """One producer's records on their way.

    Args:
        topic_of: logical topic name → name on the broker.
        gates: by logical topic. Records to such a topic must name their partition.
        delivered: told (record, partition, offset) for tagged records, from inside `serve` and `flush`.
    """

    def __init__(
        self,
        producer: ProducerPort,
        schemas: Schemas,
        topic_of: Callable[[str], str],
        gates: Mapping[str, Gate],
        delivered: Delivered,
        metrics: Metrics,
    ) -> None:
        self._producer, self._schemas, self._topic_of = producer, schemas, topic_of
        self._gates, self._delivered, self._metrics = dict(gates), delivered, metrics
        self._numbers = itertools.count(1)
        self.emitted = 0
        self.tagged = 0
        self.acknowledgements = 0
        self._open: dict[int, None] = {}
        self._held: dict[tuple[str, int], deque[tuple[int, Outgoing]]] = {}
        self._end: dict[tuple[str, int], int] = {}
        self._in_flight: dict[tuple[str, int], int] = {}

    @property
    def acknowledged(self) -> int:
        """The watermark of rule 1. `_open` is in order of emission, so its first key is the lowest."""
        return next(iter(self._open)) - 1 if self._open else self.emitted

    @property
    def outstanding(self) -> int:
        """Emitted and not acknowledged, held ones included."""
        return len(self._open)

    @property
    def held(self) -> int:
        """Waiting behind a gate."""
        return sum(len(waiting) for waiting in self._held.values())

    def emit(self, records: Iterable[Outgoing]) -> int:
        """Send or hold; how many. Raises BrokerError, RecordTooLarge; ValueError for a record without a partition."""
        count = 0
        for record in records:
            if record.partition is None:
                # A key would send some to partitions that somebody added to the topic, where nobody of ours reads.
                raise ValueError(f"a record to {record.topic} must name its partition")
            number = self.emitted = next(self._numbers)
            self._open[number] = None
            self.tagged += record.tag is not None
            count += 1
            if record.topic not in self._gates:
                self._send(number, record)
                continue
            place = (record.topic, record.partition)
            if self._held.get(place) or not self._may_write(place):
                self._held.setdefault(place, deque()).append((number, record))
            else:
                self._send(number, record)
        return count

    def release(self, *, anyway: bool = False) -> None:
        """Send held records whose gate opened; `anyway` (at a stop) sends them all: the overshoot is bounded by rule 3."""
        for place, waiting in list(self._held.items()):
            while waiting and (anyway or self._may_write(place)):
                self._send(*waiting.popleft())
            if not waiting:
                del self._held[place]

    def _may_write(self, place: tuple[str, int]) -> bool:
        # Before the first acknowledgement nobody here knows where the partition ends: at least behind what is on its way, which a slow
        # first acknowledgement must not let grow past the bound. A gate takes a negative offset as "not known".
        in_flight = self._in_flight.get(place, 0)
        next_offset = self._end[place] + in_flight if place in self._end else in_flight or -1
        return self._gates[place[0]].may_write(place[1], next_offset)

    def _send(self, number: int, record: Outgoing) -> None:
        assert record.partition is not None
        value, place = self._schemas.encode(record.message), (record.topic, record.partition)
        self._in_flight[place] = self._in_flight.get(place, 0) + 1
        self._producer.send(
            self._topic_of(record.topic),
            value,
            key=record.key,
            partition=record.partition,
            on_delivery=partial(self._acknowledge, number, record),
        )
        self._metrics.count("bytes_written_total", len(value), topic=record.topic)

    def _acknowledge(self, number: int, record: Outgoing, partition: int, offset: int) -> None:
        self._open.pop(number, None)
        self.acknowledgements += 1
        place = (record.topic, partition)
        self._end[place] = max(offset + 1, self._end.get(place, 0))
        self._in_flight[place] -= 1
        self._metrics.count("records_written_total", topic=record.topic)
        if record.tag is not None:
            self.tagged -= 1
            self._delivered(record, partition, offset)

    def serve(self, timeout_s: float = 0.0) -> bool:
        """Take acknowledgements, waiting at most `timeout_s` for one; whether any came. Raises BrokerError."""
        before = self.acknowledgements
        self._producer.poll(timeout_s)
        return self.acknowledgements != before

    def flush(self, timeout_s: float) -> bool:
        """Wait for what was sent; whether everything emitted is acknowledged. Raises BrokerError."""
        if self._open:
            self._producer.flush(timeout_s)
        return not self._open

    def waiting_for(self) -> str:
        """Whom held records wait for; empty when none is held."""
        for topic, _ in self._held:
            return self._gates[topic].waiting_for() or f"the readers of {topic}"
        return ""

    def show(self) -> None:
        """Gauges, at the pace of commits."""
        self._metrics.gauge("outstanding_records", len(self._open))
        for topic in self._gates:
            held = sum(len(waiting) for (name, _), waiting in self._held.items() if name == topic)
            self._metrics.gauge("held_records", held, topic=topic)

    def close(self, timeout_s: float) -> None:
        """Give the producer back."""
        self._producer.close(timeout_s)
