"""Reads a run's small topics and lags for the live view: everything here can be had with Kafka's own tools too."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from gorila.config import Config
from gorila.errors import BadRecord, BrokerError
from gorila.kafka import Cluster, Received
from gorila.messages import Message, TransitionBlock, Weights
from gorila.run_progress import RunProgress
from gorila.service import Service
from gorila.topics import BY_NAME, full_name, group_name

log = logging.getLogger("gorila.follower")

# Kafka's own cost of a record that travels alone, as blocks do: batch header 61 bytes, record framing about 10.
RECORD_OVERHEAD_BYTES = 71
FOLLOWED = ("episodes", "replay-stats", "priorities")
SIZE_SAMPLE = 500
LOOK_S = 1.0  # a live view looks again soon
READ_S = 60.0  # what is said once, at the end, is waited for on the slowest machine that still answers
SILENCE_S = 5.0  # after so long without a record Kafka is asked whether it is there


@dataclass(frozen=True)
class Lag:
    """Records a group is behind, over its partitions; `topic` is the logical name."""

    group: str
    records: int
    topic: str = ""
    partitions: Mapping[int, int] = field(default_factory=dict)


class _Patience:
    """How long to wait for records that are there: `most_s` in all, and Kafka is asked (which raises) in every silence of SILENCE_S."""

    def __init__(self, ask: Callable[[], object], most_s: float) -> None:
        self._ask, self._until_s = ask, time.monotonic() + most_s
        self._heard_s = time.monotonic()

    def left(self, came: int) -> bool:
        """Whether to go on after a poll that brought `came` records."""
        now_s = time.monotonic()
        if came:
            self._heard_s = now_s
        elif now_s - self._heard_s >= SILENCE_S:
            self._ask()
            self._heard_s = now_s
        return now_s < self._until_s


class RunFollower:
    """Keeps a RunProgress current. Not a member of any group: it commits nothing and slows nobody."""

    def __init__(
        self,
        service: Service,
        progress: RunProgress,
        also: Callable[[Message, int], None] | None = None,
        newest: int | None = None,
    ) -> None:
        """`newest`: begin so many records before the end of each partition, for a view that need not know the past."""
        self._service = service
        self._also = also
        self._cluster: Cluster = service.cluster
        self._config: Config = service.config
        self._progress = progress
        self._consumer = self._cluster.consumer(ends=True, hurried=False)
        self._admin = self._cluster.admin()
        self._tail = self._cluster.consumer(ends=True)
        places = [(service.topic(t), p) for t in FOLLOWED for p in range(BY_NAME[t].partitions(self._config))]
        ends = self._admin.end_offsets(places) if newest is not None else {}
        lows = self._admin.offsets(places, "earliest") if newest is not None else {}
        self._next = {p: max(lows[p], ends[p] - newest) if newest is not None else 0 for p in places}
        self._consumer.assign(self._next)

    def poll(self, timeout_s: float) -> int:
        """Fold in what has come, at most 2,000 records; how many. Waits for the first up to `timeout_s`."""
        came = self._consumer.poll_many(2000, timeout_s)
        for received in came:
            self._next[(received.topic, received.partition)] = received.offset + 1
            try:
                message = self._service.schemas.decode(received.value)
            except BadRecord:
                continue  # whose reader it is sends it to dead-letters; a view only looks
            self._progress.take(message, received.timestamp_ms)
            if self._also is not None:
                self._also(message, received.timestamp_ms)
        return len(came)

    def catch_up(self) -> None:
        """Fold in all that was in the topics when this was called. Raises BrokerError when Kafka is away."""
        ends = self._admin.end_offsets(list(self._next))
        patience = _Patience(lambda: self._admin.end_offsets(list(ends)), READ_S)
        while any(max(next_, self._consumer.end_reached(*p) or 0) < ends[p] for p, next_ in self._next.items()):
            if not patience.left(self.poll(0.2)):
                log.warning("run_follower.not_caught_up after_s=%g", READ_S)
                return

    def look_at_weights(self, patience_s: float = LOOK_S) -> None:
        """Newest weights of each shard: one record, not the whole topic (a Nature snapshot is 7 MB)."""
        for shard in range(self._config.parameter_server.shards):
            newest = self._newest("weights", shard, patience_s)
            if newest is not None:
                try:
                    weights = self._service.schemas.expect(newest.value, Weights)
                except BadRecord:
                    continue
                self._progress.take(weights, newest.timestamp_ms)
                if self._also is not None:
                    self._also(weights, newest.timestamp_ms)

    def _newest(self, topic: str, partition: int, patience_s: float) -> Received | None:
        for back in (1, 4, 16):  # transaction markers and compaction leave gaps before the end
            found = self._read(topic, partition, -back, back, patience_s)
            if found:
                return found[-1]
        return None

    def lags(self) -> list[Lag]:
        """Committed lag of each group, as the Kafka tools show it."""
        config, lags = self._config, []
        wanted = [("replay", "transitions", "replay"), ("learner", "batches", "learner")]
        wanted += [
            (f"parameter-server-{s}-0", "gradients", "parameter-server") for s in range(config.parameter_server.shards)
        ]
        for group, topic, role in wanted:
            partitions = range(BY_NAME[topic].partitions(config))
            if role == "parameter-server":
                partitions = range(int(group.split("-")[2]), int(group.split("-")[2]) + 1)
            keys = [(full_name(self._service.run, topic), p) for p in partitions]
            try:
                ends = self._admin.end_offsets(keys)
                committed = self._admin.group_offsets(group_name(self._service.run, group), keys)
            except BrokerError:
                continue
            behind = {key[1]: max(0, ends[key] - (committed.get(key) or 0)) for key in keys}
            lags.append(Lag(group, sum(behind.values()), topic, behind))
        return lags

    def dead_letters(self) -> int:
        """Records in dead-letters."""
        key = (self._service.topic("dead-letters"), 0)
        return self._admin.end_offsets([key])[key]

    def first_step_ms(self, starts: Sequence[int] = ()) -> int | None:
        """Start of the earliest actor that published, by its own epoch (or its first block's append time without one).

        Args:
            starts: per transitions partition, where to begin: a resumed run's newest part. Empty: at the run's first.
        """
        began = []
        for partition in range(self._config.actor.count):
            for received in self._read("transitions", partition, starts[partition] if starts else 0, 1):
                block = self._service.schemas.expect(received.value, TransitionBlock)
                began.append(block.actor_epoch or received.timestamp_ms)
        return min(began) if began else None

    def first_batch_ms(self) -> int | None:
        """Append time of the first batch, where a run without actors began; None when the log has it no more."""
        batches = self._read("batches", 0, 0, 1)
        return batches[0].timestamp_ms if batches and batches[0].offset == 0 else None

    def bytes_per_transition(self) -> float | None:
        """Over the newest blocks of every partition: key, value and Kafka's own framing, per transition."""
        size = rows = 0
        for partition in range(self._config.actor.count):
            for received in self._read("transitions", partition, -SIZE_SAMPLE, SIZE_SAMPLE):
                try:
                    block = self._service.schemas.expect(received.value, TransitionBlock)
                except BadRecord:
                    continue
                size += len(received.value or b"") + len(received.key or b"") + RECORD_OVERHEAD_BYTES
                rows += int((~block.is_last).sum())
        return size / rows if rows else None

    def _read(self, topic: str, partition: int, start: int, count: int, patience_s: float = READ_S) -> list[Received]:
        """Records from `start` (negative: so far before the end) on, to the end that the partition has now. Raises BrokerError when Kafka is away."""
        place = (self._service.topic(topic), partition)
        low, high = self._tail.watermarks(*place)
        begin = max(low, start if start >= 0 else high + start)
        if begin >= high:
            return []
        self._tail.assign({place: begin})
        found: list[Received] = []
        patience = _Patience(lambda: self._tail.watermarks(*place), patience_s)
        while len(found) < count and not (found and found[-1].offset + 1 >= high):
            came = self._tail.poll_many(count - len(found), min(0.2, patience_s))
            found += came
            if (self._tail.end_reached(*place) or 0) >= high:  # what is left are markers
                break
            if not patience.left(len(came)):
                log.warning("run_follower.read_in_part topic=%s partition=%d records=%d", topic, partition, len(found))
                break
        return found

    def close(self) -> None:
        """Close both consumers."""
        self._consumer.close()
        self._tail.close()
