"""Committed offsets of a group we are not in.

Asked by a consumer that never joins, not by an admin client: librdkafka's ListConsumerGroupOffsets ends the process with SIGSEGV when the coordinator is
moving or Kafka stops (confluentinc/librdkafka issue 5040, seen here with 2.16.1 at each stop of a broker).
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING

from gorila.errors import BrokerError

if TYPE_CHECKING:
    from gorila.kafka.cluster import Cluster

ANSWER_S = 4.0  # before who waits (flow.ANSWER_S) stops listening
Partition = tuple[str, int]


class CommittedOffsets:
    """Answers for one group; `later` in the background, so that a writer never waits."""

    def __init__(self, cluster: Cluster, group: str) -> None:
        self._consumer = cluster.consumer(group)
        self._thread: ThreadPoolExecutor | None = None

    def now(self, partitions: Sequence[Partition], timeout_s: float = ANSWER_S) -> dict[Partition, int | None]:
        """{partition: committed next offset, or None}. Raises BrokerError, NotAllowed."""
        try:
            found = self._consumer.committed(partitions, timeout_s)
        except BrokerError:
            self._consumer.poll_many(1, 0.0)  # the group may not be looked at: librdkafka says so here only
            raise
        return {where: offset for where, (offset, _) in found.items()}

    def later(self, partitions: Sequence[Partition]) -> Future[dict[Partition, int | None]]:
        """As `now`, not waiting."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "committed-offsets")
        return self._thread.submit(self.now, list(partitions))

    def close(self) -> None:
        """After the question on its way, which takes ANSWER_S at most."""
        if self._thread is not None:
            self._thread.shutdown(cancel_futures=True)
        self._consumer.close()
