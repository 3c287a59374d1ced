"""Synthetic learners: many learners' readers in one process, without a network: they read batches, write priorities back and commit.

    python -m benchmarks.load.learners RUN SERVERS FIRST END     # learners FIRST .. END - 1, until standard input ends

What came is audited: every part of every learner batch once, every row an id that transitions can have.
"""

from __future__ import annotations

import json
import select
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np

from gorila.codec import Schemas
from gorila.config import Config
from gorila.kafka import Cluster, Producer, Received
from gorila.messages import Priorities
from gorila.run_record import read_run
from gorila.settings import config_of_run
from gorila.topics import full_name, group_name


class SyntheticLearner:
    """One member of the learners' group.

    Args:
        watch: called with each record and its plain fields.
    """

    def __init__(
        self, cluster: Cluster, run: str, config: Config, index: int, schemas: Schemas, producer: Producer,
        watch: Callable[[Received, dict[str, Any]], None],
    ) -> None:  # fmt: skip
        self._config, self._schemas, self._producer, self._watch = config, schemas, producer, watch
        self._name = f"learner-{index}"
        self._topic, self._priorities = full_name(run, "batches"), full_name(run, "priorities")
        self._consumer = cluster.consumer(group_name(run, "learner"), instance_id=self._name)
        self._consumer.subscribe([self._topic])
        self._parts: dict[int, list[dict[str, Any]]] = {}
        self._handled: dict[tuple[str, int], int] = {}
        self._committed_s = 0.0
        self._rng = np.random.default_rng(index)
        self.rows = 0

    def turn(self, timeout_s: float) -> int:
        """Take at most a learner batch; records taken."""
        records = self._consumer.poll_many(self._config.record_parts, timeout_s)
        for record in records:
            batch, _ = self._schemas.decode_plain(record.value or b"")
            self._watch(record, batch)
            self.rows += len(batch["row"])
            parts = self._parts.setdefault(record.partition, [])
            parts.append(batch)
            if batch["part"] == batch["parts"] - 1:
                self._learned(record, parts)
                parts.clear()
                self._handled[(self._topic, record.partition)] = record.offset + 1
        if self._handled and time.monotonic() - self._committed_s > self._config.learner.commit_interval_ms / 1000:
            self._consumer.commit(self._handled)
            self._handled, self._committed_s = {}, time.monotonic()
        return len(records)

    def _learned(self, last: Received, parts: Iterable[dict[str, Any]]) -> None:
        columns = {
            name: np.concatenate([np.asarray(part[name]) for part in parts]) for name in ("partition", "offset", "row")
        }
        errors = self._rng.exponential(size=len(columns["row"])).astype(np.float32)
        learned = Priorities(
            self._name, last.partition, last.offset, 0, **columns, td_error=errors, loss=0.0, gradient_norm=0.0,
            rejected=False, busy_fraction=0.0,
        )  # fmt: skip
        self._producer.send(self._priorities, self._schemas.encode(learned), partition=0)

    def close(self) -> None:
        """Commit and leave."""
        self._consumer.commit(self._handled, wait=True)
        self._consumer.close()


class Audit:
    """Which parts of which learner batches came, and which blocks their rows are of."""

    def __init__(self) -> None:
        self._parts: set[tuple[str, int, int]] = set()
        self._highest: dict[int, int] = {}
        self.records = 0

    def take(self, _record: Received, batch: dict[str, Any]) -> None:
        """One record."""
        self.records += 1
        self._parts.add((batch["split"], batch["batch_number"], batch["part"]))
        for partition, offset in zip(batch["partition"], batch["offset"], strict=True):
            if offset > self._highest.get(partition, -1):
                self._highest[partition] = offset

    def result(self) -> dict[str, Any]:
        """`highest`: offset by partition of transitions, of a row drawn."""
        highest = {str(partition): offset for partition, offset in self._highest.items()}
        return {"records": self.records, "distinct": len(self._parts), "highest": highest}


def learn(run: str, servers: str, indices: range) -> None:
    """Until standard input ends. One JSON line at the end."""
    cluster, schemas, audit = Cluster(servers), Schemas(), Audit()
    config = config_of_run(read_run(cluster, run, Schemas()).config, (), {})
    producer = cluster.producer()
    learners = [SyntheticLearner(cluster, run, config, index, schemas, producer, audit.take) for index in indices]
    print("ready", flush=True)
    while not select.select([sys.stdin], [], [], 0)[0]:
        taken = sum(learner.turn(0.0) for learner in learners)
        producer.poll(0.0 if taken else 0.002)
    for learner in learners:
        learner.close()
    producer.flush(10)
    print(json.dumps(audit.result()), flush=True)


if __name__ == "__main__":
    learn(sys.argv[1], sys.argv[2], range(int(sys.argv[3]), int(sys.argv[4])))
