"""Follows the `weights` topic to its newest records: for actors, learners and evaluators that read weights beside their own work.

In no group, commits nothing. Of what has come since the last poll only the newest record of each key is decoded. A reader that has been
away longer than AWAY_S, or to whom a delta came that did not fit, goes back to the newest key frame instead of fetching what nobody will look at.
"""

from __future__ import annotations

import time

from gorila.errors import BadRecord, BrokerError, OffsetGone
from gorila.kafka import SLICE_S, Consumer, Received
from gorila.messages import Weights
from gorila.service import Service
from gorila.weights import WeightsView

AWAY_S = 2.0
MEND_S = 0.5  # a gap that the log itself has must not be looked for all the time
STEPS_BACK = (2, 16, 256, 1 << 62)
MOST_ROUNDS = 64
ROUND_RECORDS = 256
QUEUED_KIB = 32 * 1024


class WeightsFollower:
    """Keeps a `WeightsView` current.

    Args:
        service: the role's.
        targets: whether target weights are wanted too (the learner).
        num_parameters: P of the whole network, or None where the reader has no network of its own.
        jump: each poll looks at the end of the log and fetches nothing between polls: for a reader that needs a fraction of the snapshots
            (gorila/weights_sampler.py). A poll then waits for Kafka. Where deltas are published it reads them all: a delta is a fraction of a snapshot.
    """

    def __init__(
        self, service: Service, targets: bool, num_parameters: int | None = None, *, jump: bool = False
    ) -> None:
        self._service = service
        self._jump = jump and service.config.parameter_server.weights_codec != "delta"
        self._ends_seen: dict[int, int] = {}
        self._targets = targets
        self._topic = service.topic("weights")
        self._shards = service.config.parameter_server.shards
        self._consumer: Consumer = service.cluster.consumer(ends=True, queued_kib=QUEUED_KIB)
        self.view = WeightsView(num_parameters, self._shards)
        self._last_poll_s: float | None = None
        self._mend_s = 0.0
        self._told = False
        self.bad_records = 0

    def poll(self, timeout_s: float = 0.0) -> bool:
        """Take what has come; whether the view changed. Waits up to `timeout_s` for a first record, never for a second.

        Raises:
            BrokerError: Kafka refuses. (Kafka being away is no error: the view stays as it is.)
        """
        newest: dict[tuple[int, bytes], Received] = {}
        now_s = time.monotonic()
        away = self._jump or self._last_poll_s is None or now_s - self._last_poll_s > AWAY_S
        if self.view.gaps and now_s >= self._mend_s:
            away, self._mend_s = True, now_s + MEND_S
        if away:
            try:
                newest = self._find_newest()
            except BrokerError as error:
                if self._last_poll_s is None:
                    raise
                if not self._told:
                    self._told = True
                    self._service.log.warning("weights.not_found", reason=str(error))
                return False
            self._told = False
        if not newest and not self._jump:
            newest = self._drain(timeout_s)
        self._last_poll_s = time.monotonic()
        changed = self._take_all(newest)
        if self._targets:
            for shard, (version, offset) in enumerate(self.view.announced_targets):
                if offset >= 0 and version > self.view.target_versions[shard]:
                    changed = self._fetch_target(shard, offset) or changed
        return changed

    def close(self) -> None:
        """Close the reader."""
        self._consumer.close()

    def _drain(self, timeout_s: float) -> dict[tuple[int, bytes], Received]:
        """Newest record by (shard, key) of what is there."""
        newest: dict[tuple[int, bytes], Received] = {}
        deadline = time.monotonic() + timeout_s
        for _ in range(MOST_ROUNDS):
            wait = 0.0 if newest else max(0.0, min(SLICE_S, deadline - time.monotonic()))
            records = self._poll(ROUND_RECORDS, wait)
            for record in records:
                newest[record.partition, record.key or b""] = record
            if not records and (newest or time.monotonic() >= deadline or self._service.stop.is_set()):
                break
        return newest

    def _poll(self, most: int, wait_s: float) -> list[Received]:
        try:
            return self._consumer.poll_many(most, wait_s)
        except OffsetGone as gone:
            # Cleaned up under a slow reader: what is newest is at the end.
            self._service.log.warning("weights.offset_gone", partition=gone.partition)
            self._consumer.seek(
                self._topic, gone.partition, max(0, self._consumer.watermarks(self._topic, gone.partition)[1] - 2)
            )
            return []

    def _find_newest(self) -> dict[tuple[int, bytes], Received]:
        """Step back from the end of every shard's partition until a key frame is found; leaves the reader at the end."""
        newest: dict[tuple[int, bytes], Received] = {}
        starts: dict[tuple[str, int], int] = {}
        for shard in range(self._shards):
            low, high = self._consumer.watermarks(self._topic, shard)
            if self._jump and self._ends_seen.get(shard) == high:
                continue
            self._ends_seen[shard] = end = high
            for back in STEPS_BACK:
                start = max(low, high - back)
                found, end = self._read(shard, start, high)
                newest.update({(shard, record.key or b""): record for record in found})
                if start == low or any((record.key or b"").endswith(b"/key") for record in found):
                    break
            starts[self._topic, shard] = end
        self._consumer.assign({} if self._jump else starts)
        return newest

    def _read(self, shard: int, start: int, high: int) -> tuple[list[Received], int]:
        """The newest record of each key in [start, high), as far as they exist, and the next offset to read."""
        self._consumer.assign({(self._topic, shard): start})
        found: dict[bytes, Received] = {}
        position = start
        while position < high and not self._service.stop.is_set():
            records = self._poll(ROUND_RECORDS, SLICE_S)
            for record in records:
                found[record.key or b""] = record
            if records:
                position = records[-1].offset + 1
            position = max(position, self._consumer.end_reached(self._topic, shard) or 0)
        return list(found.values()), position

    def _fetch_target(self, shard: int, offset: int) -> bool:
        """The target record a key frame named; if compaction took it, the one that replaced it comes later in the log."""
        _, high = self._consumer.watermarks(self._topic, shard)
        reader = self._service.cluster.consumer(ends=True, queued_kib=QUEUED_KIB)
        try:
            reader.assign({(self._topic, shard): offset})
            while (reader.end_reached(self._topic, shard) or 0) < high and not self._service.stop.is_set():
                for record in reader.poll_many(8, SLICE_S):
                    if (record.key or b"").endswith(b"/target"):
                        return self._take_all({(shard, record.key or b""): record})
        except OffsetGone:
            self._service.log.warning("weights.target_gone", shard=shard, offset=offset)
        finally:
            reader.close()
        return False

    def _take_all(self, newest: dict[tuple[int, bytes], Received]) -> bool:
        changed = False
        # Target records first: a key frame names a target at or below it. Then as they lie in the log: deltas build on one another.
        order = sorted(newest.items(), key=lambda item: (not item[0][1].endswith(b"/target"), item[1].offset))
        for (_, key), received in order:
            if key.endswith(b"/target") and not self._targets:
                continue
            try:
                message = self._service.schemas.expect(received.value, Weights)
                changed = self.view.take(message, received.offset) or changed
            except BadRecord as error:
                # Its own reader group's dead letter would be written once a reader; the count and one line will do.
                self.bad_records += 1
                self._service.log.warning(
                    "weights.bad_record", partition=received.partition, offset=received.offset, reason=str(error)
                )
        return changed
