"""The runtime and its twin against a real broker: cases 28, 29 and 38 of cases.md, rebalances, operators' resets, offsets that are gone."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import confluent_kafka
import confluent_kafka.admin
import pytest

from gorila.codec import Schemas
from gorila.errors import BrokerError, OffsetGone
from gorila.event_log import EventLogger
from gorila.inputs import Input
from gorila.kafka import Cluster, NewTopic, Received
from gorila.local.broker import BrokerAddress
from gorila.messages import Episode
from gorila.processor import Incoming, Outgoing
from gorila.runtime import Runtime
from gorila.source_loop import SourceLoop
from gorila.testing.driver import MemoryService
from gorila.testing.relay import Relay, answered, episode

HANG_S = 60.0  # a deadline for what hangs, never a measure
SCHEMAS = Schemas()


def until(condition: Callable[[], Any], what: str) -> None:
    deadline = time.monotonic() + HANG_S
    while not condition():
        assert time.monotonic() < deadline, f"waited {HANG_S:g} s for {what}"
        threading.Event().wait(0.02)


class Place:
    """A run's topics on the broker, seen from outside."""

    def __init__(self, broker: BrokerAddress, run: str, partitions: int = 1) -> None:
        self.cluster, self.run = Cluster(broker.bootstrap_servers), run
        self.outside = confluent_kafka.admin.AdminClient({"bootstrap.servers": broker.bootstrap_servers})
        self.producer = self.cluster.producer()
        topics = {"batches": partitions, "priorities": 1, "transitions": 1}
        self.cluster.admin().create_topics([NewTopic(f"{run}.{name}", count, 1, {}) for name, count in topics.items()])

    def service(self, name: str = "learner-0", cluster: Cluster | None = None) -> MemoryService:
        log = EventLogger(f"gorila.{name}", logging.INFO)
        log.parent = logging.getLogger()
        return MemoryService(cluster or self.cluster, run=self.run, name=name, log=log)

    def write(self, *numbers: int, partitions: int = 1) -> None:
        for number in numbers:
            self.producer.send(f"{self.run}.batches", SCHEMAS.encode(episode(number)), partition=number % partitions)
        assert self.producer.flush(30.0) == 0

    def read(self, topic: str) -> list[Received]:
        consumer = self.cluster.consumer()
        try:
            low, end = consumer.watermarks(f"{self.run}.{topic}", 0)
            consumer.assign({(f"{self.run}.{topic}", 0): low})
            found: list[Received] = []
            while not found or found[-1].offset + 1 < end:
                found += consumer.poll_many(1000, 0.5)
            return found
        finally:
            consumer.close()

    def committed(self, partition: int = 0) -> int | None:
        consumer = self.cluster.consumer(f"{self.run}.learner")
        try:
            place = (f"{self.run}.batches", partition)
            return consumer.committed([place])[place][0]
        finally:
            consumer.close()

    def members(self) -> int:
        future = self.outside.describe_consumer_groups([f"{self.run}.learner"])[f"{self.run}.learner"]
        return len(future.result(timeout=10).members)


@pytest.fixture
def place(broker: BrokerAddress, run_name: str) -> Place:
    return Place(broker, run_name)


class ImpatientCluster(Cluster):
    """A group whose members may be silent for six seconds only (the broker's least)."""

    def client_settings(self, kind: str, extra: Mapping[str, Any]) -> Any:
        short = {"max.poll.interval.ms": 6_000, "session.timeout.ms": 6_000} if kind == "consumer" else {}
        return super().client_settings(kind, {**extra, **short})


def test_a_step_slower_than_the_poll_interval_rejoins_loses_nothing_and_the_log_says_why(
    place: Place, broker: BrokerAddress, caplog: pytest.LogCaptureFixture
) -> None:
    class Slow(Relay):
        """Is thrown out of its group in the middle of the third record."""

        def process(self, record: Incoming) -> Iterable[Outgoing]:
            if len(self.taken) == 2:
                until(lambda: place.members() == 1, "the member to have joined")
                until(lambda: place.members() == 0, "the group to throw its silent member out")
            return super().process(record)

    service, relay = place.service(cluster=ImpatientCluster(broker.bootstrap_servers)), Slow()
    runtime = Runtime(service, relay, [Input("batches")])
    place.write(*range(6))
    thread = threading.Thread(target=runtime.run)
    with caplog.at_level(logging.WARNING):
        thread.start()
        until(lambda: (place.committed() or 0) >= 6, "everything to be committed after the rejoin")
        place.write(6)
        until(lambda: (place.committed() or 0) >= 7, "the member to go on")
        service.stop.set()
        thread.join(HANG_S)
    assert not thread.is_alive()
    handled = Counter(record.offset for record in relay.taken)
    assert set(handled) == set(range(7))
    assert all(count <= 2 for count in handled.values()), "at most the chunk in hand is handled again"
    assert handled[6] == 1
    assert any(
        "max.poll.interval.ms" in str(vars(r)) or "poll interval" in r.getMessage().lower() for r in caplog.records
    )
    assert [move for move, _ in relay.moves].count("assigned") >= 2


def test_lag_falls_within_two_commit_intervals_and_a_stop_and_start_repeats_nothing(place: Place) -> None:
    now = [0.0]
    relay = Relay()
    runtime = Runtime(place.service(), relay, [Input("batches")], commit_interval_s=0.2, clock=lambda: now[0])
    place.write(*range(200))
    runtime.open()
    until(lambda: runtime.turn(0.1) is not None and len(relay.taken) == 200, "the records")
    for _ in range(4):
        now[0] += 0.1
        until(lambda: runtime.turn(0.05) is not None and runtime._emission.outstanding == 0, "the acknowledgements")
    # Two intervals have passed on the runtime's clock; what it asked for then may still be on its way.
    until(lambda: place.committed() == 200, "the commit to arrive")

    place.write(*range(200, 250))
    until(lambda: runtime.turn(0.1) is not None and len(relay.taken) == 250, "the rest")
    runtime.drain()
    runtime.close()
    assert place.committed() == 250

    second = Relay()
    service = place.service()
    thread = threading.Thread(target=Runtime(service, second, [Input("batches")]).run)
    thread.start()
    until(lambda: second.moves, "the second process to join")
    place.write(250)
    until(lambda: second.taken, "the next record")
    service.stop.set()
    thread.join(HANG_S)
    assert [record.offset for record in second.taken] == [250]
    assert answered(SCHEMAS.decode(record.value) for record in place.read("priorities")) == list(range(251))


def test_a_second_member_takes_its_share_and_gives_it_back_and_no_record_is_missed(
    broker: BrokerAddress, run_name: str
) -> None:
    place = Place(broker, run_name, partitions=4)
    relays = [Relay(), Relay()]
    services = [place.service(f"learner-{n}") for n in range(2)]
    threads = [
        threading.Thread(target=Runtime(service, relay, [Input("batches")], commit_interval_s=0.05).run)
        for service, relay in zip(services, relays, strict=True)
    ]

    def written(*numbers: int) -> set[tuple[int, int]]:
        place.write(*numbers, partitions=4)
        return {(number % 4, number // 4) for number in numbers}

    def handled() -> list[tuple[int, int]]:
        return [(record.partition, record.offset) for relay in relays for record in relay.taken]

    threads[0].start()
    everything = written(*range(40))
    until(lambda: everything <= set(handled()), "the only member")
    threads[1].start()
    until(lambda: relays[1].moves, "the second member to get partitions")
    everything |= written(*range(40, 120))
    until(lambda: everything <= set(handled()), "two members")
    assert relays[1].taken, "the second member does its share"
    services[0].stop.set()
    threads[0].join(HANG_S)
    everything |= written(*range(120, 160))
    # A static member that stops keeps its place until its session times out (10 s): so does its restart find it.
    until(lambda: everything <= set(handled()), "the member that is left")
    services[1].stop.set()
    threads[1].join(HANG_S)
    twice = [place for place, count in Counter(handled()).items() if count > 1]
    assert len(twice) <= 80, "at most what was in hand when partitions moved"
    for relay in relays:
        by_partition = [record.offset for record in relay.taken if record.partition == 0]
        assert by_partition == sorted(by_partition)


def test_offsets_reset_with_kafkas_own_tools_are_obeyed_at_the_next_start(
    place: Place, caplog: pytest.LogCaptureFixture
) -> None:
    place.write(*range(10))
    for expected, reset in ((list(range(10)), 4), ([4, 5, 6, 7, 8, 9], None)):
        service, relay = place.service(), Relay()
        thread = threading.Thread(target=Runtime(service, relay, [Input("batches")]).run)
        with caplog.at_level(logging.INFO):
            thread.start()
            until(lambda relay=relay, expected=expected: len(relay.taken) >= len(expected), "the records")
            service.stop.set()
            thread.join(HANG_S)
        assert [record.offset for record in relay.taken] == expected
        if reset is not None:
            until(lambda: place.members() == 0, "the static member's session to end, as the tools demand")
            group, topic = f"{place.run}.learner", f"{place.run}.batches"
            offsets = [confluent_kafka.TopicPartition(topic, 0, reset)]
            request = confluent_kafka.ConsumerGroupTopicPartitions(group, offsets)
            place.outside.alter_consumer_group_offsets([request])[group].result(timeout=10)
    obeyed = [vars(r)["event_keys"] for r in caplog.records if r.getMessage() == "operator.reset_obeyed"]
    assert [(keys["partition"], keys["offset"]) for keys in obeyed] == [(0, 4)]


@pytest.mark.parametrize("policy", ["fail", "earliest", "latest"])
def test_an_offset_that_retention_took_is_an_error_or_follows_the_inputs_policy(place: Place, policy: Any) -> None:
    place.write(*range(10))
    gone = confluent_kafka.TopicPartition(f"{place.run}.batches", 0, 6)
    place.outside.delete_records([gone])[gone].result(timeout=10)
    relay = Relay()
    runtime = Runtime(place.service(), relay, [Input("batches", "assigned", start={0: 2}, gone=policy)])
    runtime.open()
    try:
        if policy == "fail":
            with pytest.raises(OffsetGone, match="partition 0"):
                until(lambda: runtime.turn(0.1) is None, "the error")
            return
        until(
            lambda: runtime.turn(0.1) is not None and runtime.metrics.value("offsets_gone_total", topic="batches"),
            "the policy",
        )
        place.write(10)
        until(
            lambda: runtime.turn(0.1) is not None and relay.taken and relay.taken[-1].offset == 10, "the newest record"
        )
        assert [record.offset for record in relay.taken] == ([6, 7, 8, 9, 10] if policy == "earliest" else [10])
    finally:
        runtime.close()


class SmallQueueCluster(Cluster):
    """A producer that is full after a handful of records."""

    def client_settings(self, kind: str, extra: Mapping[str, Any]) -> Any:
        small = {"queue.buffering.max.messages": 8} if kind == "producer" else {}
        return super().client_settings(kind, {**extra, **small})


def test_a_full_producer_queue_makes_an_actor_wait_and_neither_kills_it_nor_loses_a_record(
    place: Place, broker: BrokerAddress
) -> None:
    service = place.service("actor-0", SmallQueueCluster(broker.bootstrap_servers))

    class Source:
        steps = 0

        def step(self, now_s: float) -> Iterable[Outgoing]:
            self.steps += 1
            if self.steps == 20:
                service.stop.set()
            return [Outgoing("transitions", episode(self.steps * 100 + n), partition=0) for n in range(50)]

        def tick(self, now_s: float) -> Iterable[Outgoing]:
            return []

        def pause_s(self, now_s: float) -> float:
            return 0.0

        def finish(self) -> Iterable[Outgoing]:
            return []

        def waiting_for(self) -> str:
            return ""

    source = Source()
    SourceLoop(service, source).run()
    messages = [SCHEMAS.decode(record.value) for record in place.read("transitions")]
    lanes = [message.lane for message in messages if isinstance(message, Episode)]
    assert lanes == [step * 100 + n for step in range(1, 21) for n in range(50)]


def test_a_client_made_before_a_fork_refuses_to_work_in_the_child_instead_of_hanging(place: Place) -> None:
    consumer = place.cluster.consumer()
    child = os.fork()
    if child == 0:
        try:
            consumer.poll_many(1, 0.1)
            place.producer.send(f"{place.run}.batches", b"")
        except BrokerError as error:
            os._exit(7 if "fork" in str(error) else 8)
        os._exit(9)
    _, status = os.waitpid(child, 0)
    consumer.close()
    assert os.waitstatus_to_exitcode(status) == 7


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_during_a_long_wait_ends_the_role_flushed_and_committed(
    place: Place, broker: BrokerAddress, number: signal.Signals
) -> None:
    place.write(0, 1, 2)
    program = textwrap.dedent("""
        import signal, sys
        from gorila.kafka import Cluster
        from gorila.runtime import Input, Runtime
        from gorila.testing.driver import MemoryService
        from gorila.testing.relay import Relay

        class Telling(Relay):
            def tick(self, now_s):
                if len(self.taken) == 3:
                    print("idle", flush=True)
                return []

        service = MemoryService(Cluster(sys.argv[1]), run=sys.argv[2])
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda *_: service.stop.set())
        Runtime(service, Telling(), [Input("batches")], tick_interval_s=3600, commit_interval_s=3600).run()
    """)
    process = subprocess.Popen(
        [sys.executable, "-c", program, broker.bootstrap_servers, place.run], stdout=subprocess.PIPE, text=True
    )
    assert process.stdout is not None
    try:
        assert process.stdout.readline() == "idle\n"
        process.send_signal(number)
        assert process.wait(HANG_S) == 0
    finally:
        process.kill()
        process.wait()
        process.stdout.close()
    assert place.committed() == 3
