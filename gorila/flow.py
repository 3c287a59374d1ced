"""A writer waits while its reader's committed lag is above a bound: the number the Kafka tools show is the number we act on.

Lag is counted against the offset the writer would write next, so it needs no high watermark; gaps in the log make it larger than the
records there are, never smaller, and only until the reader commits past them. Nothing here blocks: committed offsets are asked for in the
background, and only while they could matter.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from concurrent.futures import Future
from typing import Any, Protocol

from gorila.kafka import Cluster, CommittedOffsets
from gorila.kafka.connection import right_missing

REFRESH_S = 0.05
STALE_S = 1.0
ANSWER_S = 5.0
_log = logging.getLogger("gorila.flow")


class OffsetsSource(Protocol):
    """Answers with committed offsets later (gorila.kafka.CommittedOffsets)."""

    def later(self, partitions: list[tuple[str, int]]) -> Future[dict[tuple[str, int], int | None]]: ...


class LagGate:
    """Whether a topic's reader group keeps up.

    Args:
        cluster: where to ask.
        group: the reader's full group name.
        topic: full name of the topic written.
        partitions: those this writer writes to.
        bound: records; may_write says no while more than this many would be uncommitted.
        clock: seconds, monotonic.
        refresh_s: committed offsets are asked for at most this often, and only while they could matter.
    """

    def __init__(
        self,
        cluster: Cluster,
        group: str,
        topic: str,
        partitions: Iterable[int],
        bound: int,
        clock: Callable[[], float] = time.monotonic,
        source: OffsetsSource | None = None,
        refresh_s: float = REFRESH_S,
    ) -> None:
        self._group, self._topic, self._bound, self._clock = group, topic, bound, clock
        self._refresh_s = refresh_s
        self._keys = [(topic, p) for p in sorted(partitions)]
        self._source: OffsetsSource = source or CommittedOffsets(cluster, group)
        self._committed: dict[int, int] = {}
        self._wanted: dict[int, int] = {}
        self._pending: Future[Any] | None = None
        self._asked_s = float("-inf")
        self._answered_s = float("-inf")
        self._refresh()

    def may_write(self, partition: int, next_offset: int) -> bool:
        """Whether a record may be written now.

        Args:
            next_offset: what the record's offset would be; negative while the writer does not know yet (nothing written: yes).
        """
        lag = self._lag(partition, next_offset)
        if lag is None or lag * 2 > self._bound or self._clock() - self._answered_s > STALE_S:
            self._refresh()
            lag = self._lag(partition, next_offset)
        if lag is None or lag <= self._bound:
            # Before the first answer nothing is known to be behind; it is there within milliseconds of the start.
            allowed = lag is not None or next_offset < self._bound
        else:
            allowed = False
        if allowed:
            self._wanted.pop(partition, None)
        else:
            self._wanted[partition] = next_offset
        return allowed

    def lag(self, partition: int, next_offset: int) -> int | None:
        """Records the group is behind as last heard; None before the first answer."""
        return self._lag(partition, next_offset)

    def waiting_for(self) -> str:
        """Empty, or as in "replay: 120 records behind on partition 3, bound 64"."""
        if not self._wanted:
            return ""
        self._refresh()
        reader = self._group.rsplit(".", 1)[-1]
        behind = {p: lag for p, offset in self._wanted.items() if (lag := self._lag(p, offset)) is not None}
        if not behind:
            return f"{reader}: its committed offsets are not known yet"
        worst = max(behind, key=lambda p: behind[p])
        return f"{reader}: {behind[worst]} records behind on partition {worst}, bound {self._bound}"

    def _lag(self, partition: int, next_offset: int) -> int | None:
        if next_offset < 0:
            return 0
        committed = self._committed.get(partition)
        return None if committed is None else max(0, next_offset - committed)

    def _refresh(self) -> None:
        now = self._clock()
        if self._pending is not None:
            if self._pending.done():
                self._read(self._pending, now)
                self._pending = None
            elif now - self._asked_s > ANSWER_S:
                self._pending = None
        if self._pending is None and now - self._asked_s >= self._refresh_s:
            self._asked_s = now
            self._pending = self._source.later(self._keys)

    def _read(self, answer: Future[Any], now: float) -> None:
        error = answer.exception()
        if error is not None:
            missing = right_missing(
                f"committed offsets of group {self._group}, which writing {self._topic} waits for", error
            )
            if missing is not None:
                raise missing
            # Kafka away or the coordinator moving: the last known offsets hold, and the door's own log says what is wrong.
            _log.debug("flow.no_answer group=%s reason=%s", self._group, error)
            return
        self._answered_s = now
        for (_, partition), offset in answer.result().items():
            # A group that never committed has everything before it: a run's topics begin at 0.
            self._committed[partition] = offset or 0
