"""The embedded broker's settings: one KRaft node, loopback only, for one run on one machine."""

from __future__ import annotations

from collections.abc import Mapping

# Every topic of ours takes 8 MiB records (design §6); the rest is room for a record batch's framing.
MESSAGE_MAX_BYTES = 8 * 1024 * 1024 + 64 * 1024

# C1 only: on 2 cores shared with the roles the broker starts 0.9 s sooner, spends 40 % less CPU in its first minute
# and moves the same bytes, because compiling with C2 costs more than it gives back (measured: 3.9 → 3.0 s, 11.7 → 7.1 CPU s).
JVM_OPTIONS = (
    # Touched at once: else memory grows for hours until the heap has been walked through once, which looks like a leak (benchmarks.soak).
    "-Xms256m",
    "-XX:+AlwaysPreTouch",
    "-Xmx512m",
    "-XX:+UseSerialGC",
    "-XX:TieredStopAtLevel=1",
    "-XX:+ExitOnOutOfMemoryError",
    "-Dorg.slf4j.simpleLogger.defaultLogLevel=warn",
    "-Dorg.slf4j.simpleLogger.log.kafka.server.KafkaRaftServer=info",
    "-Dorg.slf4j.simpleLogger.showDateTime=true",
    "-Dorg.slf4j.simpleLogger.dateTimeFormat=yyyy-MM-dd HH:mm:ss.SSS",
    "-Dorg.slf4j.simpleLogger.showThreadName=false",
)


def server_properties(port: int, controller_port: int, also: Mapping[str, object] | None = None) -> str:
    """server.properties for a combined broker and controller; log.dirs is relative to the data folder the JVM runs in.

    Args:
        also: settings that replace or join the plain broker's.
    """
    settings: dict[str, object] = {
        "process.roles": "broker,controller",
        "node.id": 1,
        "controller.quorum.voters": f"1@127.0.0.1:{controller_port}",
        "controller.listener.names": "CONTROLLER",
        "listeners": f"PLAINTEXT://127.0.0.1:{port},CONTROLLER://127.0.0.1:{controller_port}",
        "advertised.listeners": f"PLAINTEXT://127.0.0.1:{port}",
        "log.dirs": "kafka",
        "auto.create.topics.enable": "false",
        "message.max.bytes": MESSAGE_MAX_BYTES,
        "replica.fetch.max.bytes": MESSAGE_MAX_BYTES,
        # One node: replication 1, and few partitions, since each costs files and start time.
        "offsets.topic.replication.factor": 1,
        "offsets.topic.num.partitions": 4,
        "transaction.state.log.replication.factor": 1,
        "transaction.state.log.min.isr": 1,
        "transaction.state.log.num.partitions": 4,
        "share.coordinator.state.topic.replication.factor": 1,
        "share.coordinator.state.topic.min.isr": 1,
        "share.coordinator.state.topic.num.partitions": 4,
        "group.initial.rebalance.delay.ms": 0,
        "group.min.session.timeout.ms": 1000,
        # A broker that is held up for longer is fenced, and its topics are unknown for a moment: a busy laptop does that at Kafka's 9 s seldom, at 3 s often.
        # The price: after a kill -9 the controller refuses the broker's new self until the old session has run out.
        "broker.heartbeat.interval.ms": 500,
        "broker.session.timeout.ms": 9000,
        # Bounds by size are kept only as well as they are looked at: at 100 MB/s the default 5 min is 30 GB.
        "log.retention.check.interval.ms": 10_000,
        "log.segment.delete.delay.ms": 10_000,
        "log.cleaner.threads": 1,
        "log.cleaner.dedupe.buffer.size": 16 * 1024 * 1024,  # the default 128 MiB is half of the heap
        "log.cleaner.backoff.ms": 5_000,
        "num.network.threads": 2,
        "num.io.threads": 4,
        **(also or {}),
    }
    return "".join(f"{key}={value}\n" for key, value in settings.items())
