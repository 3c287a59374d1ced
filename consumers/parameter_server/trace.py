"""From an update back to the experience behind it: gradient → learner batch → transitions, as far as the logs still go.

A gradient names the last record of its batch (batch_partition, batch_offset). The batch names its rows; where it has been deleted (`batches` is kept for
minutes), the learner's `priorities` record of the same batch names them too.
"""

from __future__ import annotations

from collections import defaultdict

from gorila.errors import BadRecord
from gorila.log_ranges import bounds, read_range
from gorila.messages import Batch, Gradient, Message, Priorities
from gorila.processor import Incoming
from gorila.service import Service
from gorila.weights_history import TracedUpdate

CLOCKS_APART_MS = 600_000
"""A batch's priorities are sent with its gradient; by so much their times may differ, of two machines' clocks."""
Rows = dict[tuple[int, int], tuple[int, ...]]


class Tracer:
    """Looks up what gradients were made of. Raises BrokerError."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._lows: dict[tuple[str, int], int] = {}

    def update(self, record: Incoming, version: int) -> TracedUpdate:
        """Of a gradient that made `version`."""
        gradient = record.message
        assert isinstance(gradient, Gradient)
        partition, offset = gradient.batch_partition, gradient.batch_offset
        cut: list[str] = []
        parts = self._batch(partition, offset, cut)
        rows, source = _rows(list(parts.values())), "batches"
        if not parts:
            learned = self._priorities(partition, offset, record.timestamp_ms, cut)
            rows, source = (_rows([learned]), "priorities") if learned is not None else ({}, "")
        cut += self._gone(rows)
        return TracedUpdate(
            shard=gradient.shard_id,
            version=version,
            gradient_offset=record.offset,
            learner_id=gradient.learner_id,
            base_version=gradient.base_version,
            codec=gradient.codec,
            num_samples=gradient.num_samples,
            loss=gradient.loss,
            gradient_norm=gradient.gradient_norm,
            batch_partition=partition,
            batch_offsets=tuple(sorted(parts)) or (offset,),
            rows=rows,
            rows_from=source,
            cut=tuple(cut),
        )

    def _low(self, topic: str, partition: int) -> int:
        place = (topic, partition)
        if place not in self._lows:
            self._lows[place] = bounds(self._service.cluster, self._service.topic(topic), partition)[0]
        return self._lows[place]

    def _decoded(self, value: bytes | None) -> Message | None:
        try:
            return self._service.schemas.decode(value)
        except BadRecord:
            return None

    def _batch(self, partition: int, last: int, cut: list[str]) -> dict[int, Batch]:
        """{offset: part} of the batch whose last record is at `last`; empty when any of it is gone."""
        name, low = self._service.topic("batches"), self._low("batches", partition)
        # Another split's parts may lie between.
        first = max(low, last + 1 - 4 * self._service.config.record_parts)
        found: dict[int, Batch] = {}
        if last >= low:
            for received in read_range(self._service.cluster, name, partition, first, last + 1):
                message = self._decoded(received.value)
                if isinstance(message, Batch):
                    found[received.offset] = message
        end = found.get(last)
        mine = {o: b for o, b in found.items() if end and (b.split, b.batch_number) == (end.split, end.batch_number)}
        if end is not None and len(mine) == end.parts:
            return mine
        cut.append(f"batch {name}/{partition}@{last} is gone: the log begins at {low} (retention)")
        return {}

    def _priorities(self, partition: int, offset: int, time_ms: int, cut: list[str]) -> Priorities | None:
        name, low = self._service.topic("priorities"), self._low("priorities", 0)
        end = bounds(self._service.cluster, name, 0)[1]
        start = self._service.cluster.admin().offsets([(name, 0)], max(0, time_ms - CLOCKS_APART_MS))[name, 0]
        for received in read_range(self._service.cluster, name, 0, max(low, start) if start >= 0 else end, end):
            message = self._decoded(received.value)
            if isinstance(message, Priorities) and (message.batch_partition, message.batch_offset) == (
                partition,
                offset,
            ):
                return message
        cut.append(
            f"no priorities of that batch in {name}: the log begins at {low} (retention); its rows are not known"
        )
        return None

    def _gone(self, rows: Rows) -> list[str]:
        lines = []
        for partition in sorted({place[0] for place in rows}):
            low = self._low("transitions", partition)
            gone = sum(place[0] == partition and place[1] < low for place in rows)
            if gone:
                name = self._service.topic("transitions")
                lines.append(f"{gone} blocks of {name}/{partition} are gone: the log begins at {low} (retention)")
        return lines


def _rows(records: list[Batch] | list[Priorities] | list[Batch | Priorities]) -> Rows:
    """Rows by block. A row that was drawn twice is named once."""
    found: dict[tuple[int, int], set[int]] = defaultdict(set)
    for record in records:
        for partition, offset, row in zip(
            record.partition.tolist(), record.offset.tolist(), record.row.tolist(), strict=True
        ):
            found[partition, offset].add(row)
    return {place: tuple(sorted(found[place])) for place in sorted(found)}
