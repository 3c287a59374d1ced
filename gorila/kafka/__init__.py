"""The only door to confluent_kafka. Its errors become ours here, its records become `Received`, its waits are sliced.

Rules of this folder:
1. A record that was accepted by `send` is delivered, or BrokerError is raised by a later call: never dropped. A full queue is waited for.
2. No wait is longer than SLICE_S at a time, so that a signal is served; a client made before a fork refuses to work after it.
3. Nothing returned points into librdkafka's buffers: a fetched message pins its whole fetch buffer, so bytes are Python's own copies.
4. Kafka being away is no error: clients retry with back-off and log one line a change of state. Only waits with a deadline give up.
5. Offsets are never guessed: out of range is OffsetGone (auto.offset.reset=error), and the caller has a policy.
"""

from gorila.kafka.admin import Admin, NewTopic, TopicFacts
from gorila.kafka.cluster import Cluster
from gorila.kafka.committed import CommittedOffsets
from gorila.kafka.connection import SLICE_S
from gorila.kafka.consumer import EARLIEST, LATEST, Consumer, Partition, Received
from gorila.kafka.group_facts import GroupFacts, Member
from gorila.kafka.producer import Producer

__all__ = [
    "EARLIEST",
    "LATEST",
    "SLICE_S",
    "Admin",
    "Cluster",
    "CommittedOffsets",
    "Consumer",
    "GroupFacts",
    "Member",
    "NewTopic",
    "Partition",
    "Producer",
    "Received",
    "TopicFacts",
]
