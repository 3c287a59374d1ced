"""Records that nobody of ours wrote: garbage, and real records with clocks years off. They go past our own door to Kafka, which would refuse most of them.

Every one carries the header INJECTED.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Iterator
from typing import Any

import confluent_kafka as ck
import numpy as np
from confluent_kafka.admin import AdminClient, NewPartitions

from benchmarks.chaos_audit import INJECTED
from gorila.kafka import Received
from gorila.messages import Episode, Priorities, ReplayStats, TransitionBlock, Weights
from gorila.service import Service
from gorila.topics import BY_NAME

YEARS_MS = (-50 * 365 * 86_400_000, -3 * 365 * 86_400_000, 5 * 365 * 86_400_000, 40 * 365 * 86_400_000)
PATIENCE_S = 60.0
COMPACTED = ("replay-stats", "weights", "run")
CLOCKED = ("transitions", "priorities", "batches", "gradients", "weights", "episodes", "replay-stats")


class Injector:
    """Writes to a run's topics, adds partitions, deletes what lies at their beginning."""

    def __init__(self, service: Service, rng: random.Random) -> None:
        self._service, self._rng = service, rng
        settings = {"bootstrap.servers": service.cluster.bootstrap_servers, "log_level": 0}
        self._producer = ck.Producer({**settings, "linger.ms": 0, "message.timeout.ms": 20_000})
        self._admin = AdminClient(settings)
        self._reader = service.cluster.consumer()
        self.refused: list[str] = []
        self.poisoned = 0

    def newest(self, topic: str, partition: int = 0) -> Received | None:
        """A record near the end of a partition that is not one of these."""
        place = (self._service.topic(topic), partition)
        low, end = self._reader.watermarks(*place, PATIENCE_S)
        if end <= low:
            return None
        self._reader.assign({place: max(low, end - 50)})
        records: list[Received] = []
        for _ in range(20):
            records += self._reader.poll_many(50, 0.2)
            if records and records[-1].offset >= end - 2:
                break
        real = [record for record in records if not any(name == INJECTED for name, _ in record.headers)]
        return real[-1] if real else None

    def _write(self, topic: str, value: bytes | None, key: bytes | None, partition: int, clock_ms: int = 0) -> None:
        def told(error: Any, _message: Any) -> None:
            if error is not None:
                self.refused.append(f"{topic}: {error.str()}")

        more = {"timestamp": clock_ms} if clock_ms else {}
        self._producer.produce(
            self._service.topic(topic),
            value,
            key=key,
            partition=partition,
            headers=[(INJECTED, b"1")],
            on_delivery=told,
            **more,
        )
        self._producer.poll(0)

    def flood(self, topic: str, records: int) -> None:
        """Garbage of every sort. Raises SystemExit when Kafka takes none of it."""
        sample = self.newest(topic)
        real = (sample.value or b"") if sample else b""
        rng, partitions = self._rng, BY_NAME[topic].partitions(self._service.config)
        for number in range(records):
            kind = number % 6
            value: bytes | None = (
                rng.randbytes(rng.randrange(1, 200)),
                b"",
                b"\x00" + rng.randbytes(4) + real[5:],
                real[: rng.randrange(5, max(6, len(real)))] if kind == 3 else b"\x00",
                real[:5] + b"\xfe\xff\xff\xff\xff\xff\xff\xff\x7f" * 2,  # claims lengths beyond any memory
                None,
            )[kind]
            key = rng.randbytes(8) if topic in COMPACTED or rng.random() < 0.5 else None
            self._write(topic, value, key, rng.randrange(partitions))
        self.poisoned += records
        self._flush(topic)

    def clocks(self) -> None:
        """Real records again, as written by machines whose clocks are years off."""
        for topic in CLOCKED:
            record = self.newest(topic)
            if record is None:
                continue
            for offset_ms in YEARS_MS:
                clock_ms = max(1, record.timestamp_ms + offset_ms)
                for value in self._with_clock(record, clock_ms):
                    self._write(topic, value, record.key or b"chaos", record.partition, clock_ms)
            self._flush(topic)

    def _with_clock(self, record: Received, clock_ms: int) -> Iterator[bytes]:
        message = self._service.schemas.decode(record.value)
        if isinstance(message, TransitionBlock):
            # Another actor's life on a lane of its own: what is real stays whole.
            lane = self._service.config.actor.lanes + 1
            is_first = np.zeros_like(message.is_first)
            is_first[0] = True
            message = dataclasses.replace(
                message,
                actor_id="chaos",
                actor_epoch=clock_ms,
                lane=lane,
                first_step=0,
                is_first=is_first | message.is_first,
            )
        elif isinstance(message, Episode):
            message = dataclasses.replace(message, actor_id="chaos", time_ms=clock_ms)
        elif isinstance(message, ReplayStats):
            return  # a split that does not exist would get a share of the batches
        elif not isinstance(message, Priorities | Weights):
            yield record.value or b""
            return
        yield self._service.schemas.encode(message)

    def _flush(self, topic: str) -> None:
        if self._producer.flush(30):
            raise SystemExit(f"Kafka took no records for {topic} within 30 s")

    def add_partition(self, topic: str) -> None:
        """One more than there are."""
        name = self._service.topic(topic)
        count = self._service.cluster.admin().partitions(name)
        self._admin.create_partitions([NewPartitions(name, count + 1)])[name].result(30)

    def delete_before(self, topic: str, partition: int, offset: int) -> None:
        """As retention would, whoever reads there."""
        place = ck.TopicPartition(self._service.topic(topic), partition, offset)
        for future in self._admin.delete_records([place]).values():
            future.result(30)

    def ends(self, topic: str) -> dict[int, int]:
        """Next offset by partition of the topology."""
        count = BY_NAME[topic].partitions(self._service.config)
        places = [(self._service.topic(topic), p) for p in range(count)]
        return {p: end for (_, p), end in self._service.cluster.admin().end_offsets(places).items()}

    def close(self) -> None:
        """Give the clients back."""
        self._reader.close()
