"""gorila/kafka against a real broker: what its rules promise (cases.md 28, 30, 31, 32, 36)."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from confluent_kafka import KafkaException, TopicPartition

from gorila.errors import BrokerError, OffsetGone, RecordTooLarge
from gorila.flow import LagGate
from gorila.kafka import Cluster, Consumer, NewTopic, Producer, Received
from gorila.kafka import producer as producer_module
from gorila.local.broker import Broker, BrokerAddress
from gorila.run_record import read_all

MIB = 1024 * 1024
NOWHERE = "127.0.0.1:1"


@pytest.fixture
def cluster(broker: BrokerAddress) -> Cluster:
    return Cluster(broker.bootstrap_servers, client_id="test")


@pytest.fixture
def topic(cluster: Cluster, run_name: str) -> Iterator[str]:
    """Two partitions, and room for our largest record."""
    cluster.admin().create_topics([NewTopic(run_name, 2, 1, {"max.message.bytes": str(8 * MIB)})])
    yield run_name
    cluster.admin().delete_topics([run_name])


@pytest.fixture
def producer(cluster: Cluster) -> Iterator[Producer]:
    made = cluster.producer()
    yield made
    made.close()


def read(consumer: Consumer, records: int, most: int = 100) -> list[Received]:
    """Poll until so many have come; the test's own timeout is the limit."""
    found: list[Received] = []
    while len(found) < records:
        found += consumer.poll_many(most, 0.5)
    return found


def reader(cluster: Cluster, topic: str, offset: int = 0) -> Consumer:
    consumer = cluster.consumer(ends=True)
    consumer.assign({(topic, 0): offset, (topic, 1): 0})
    return consumer


def test_a_record_arrives_as_it_was_sent_and_its_offset_is_reported(cluster: Cluster, topic: str, producer: Producer):
    reported: list[tuple[int, int]] = []
    producer.send(
        topic,
        b"value",
        key=b"key",
        partition=1,
        headers=[("h", b"1")],
        on_delivery=lambda p, o: reported.append((p, o)),
    )
    producer.send(topic, None, key=b"tombstone", partition=1, on_delivery=lambda p, o: reported.append((p, o)))
    assert producer.flush(10) == 0
    assert reported == [(1, 0), (1, 1)]
    first, second = read(reader(cluster, topic), 2)
    assert (first.topic, first.partition, first.offset, first.key, first.value) == (topic, 1, 0, b"key", b"value")
    assert first.headers == (("h", b"1"),)
    assert second.value is None


def test_records_of_every_size_up_to_the_limit_pass_and_a_larger_one_names_topic_size_and_key(
    cluster: Cluster, topic: str, producer: Producer
):
    sizes = [900_000, 1_000_000, 1_100_000, 8 * MIB - 200]
    for size in sizes:
        producer.send(topic, b"x" * size, partition=0)
    assert producer.flush(20) == 0
    with pytest.raises(RecordTooLarge, match=rf"12000000 bytes .*{topic}.*max\.message\.bytes"):
        producer.send(topic, b"x" * 12_000_000, partition=0)
    producer.send(topic, b"still working", partition=0)
    assert producer.flush(10) == 0
    assert [len(r.value or b"") for r in read(reader(cluster, topic), 5)] == [*sizes, 13]


def test_a_topic_that_takes_less_than_we_do_is_named_too(cluster: Cluster, run_name: str):
    cluster.admin().create_topics([NewTopic(run_name, 1, 1, {"max.message.bytes": "1000000"})])
    producer = cluster.producer()
    producer.send(run_name, b"x" * 1_100_000)
    with pytest.raises(RecordTooLarge, match=rf"1100000 bytes .*{run_name}.*max\.message\.bytes"):
        producer.flush(10)
    producer.close()


def test_a_full_queue_is_waited_for_and_nothing_is_dropped(cluster: Cluster, topic: str, producer: Producer):
    delivered: list[int] = []
    for _ in range(80):
        producer.send(topic, b"x" * MIB, partition=0, on_delivery=lambda _, offset: delivered.append(offset))
    assert producer.flush(60) == 0
    assert delivered == list(range(80))


def test_an_offset_that_is_not_in_the_log_is_an_error_with_its_partition_and_seek_goes_on(
    cluster: Cluster, topic: str, producer: Producer
):
    producer.send(topic, b"a", partition=0)
    producer.flush(10)
    consumer = reader(cluster, topic, offset=1000)
    with pytest.raises(OffsetGone) as caught:
        read(consumer, 1)
    assert (caught.value.topic, caught.value.partition) == (topic, 0)
    consumer.seek(topic, 0, 0)
    assert read(consumer, 1)[0].value == b"a"


def test_partitions_whose_offsets_are_gone_at_the_same_moment_are_each_told_of(cluster: Cluster, run_name: str):
    cluster.admin().create_topics([NewTopic(run_name, 4, 1, {})])
    producer = cluster.producer()
    for partition in range(4):
        producer.send(run_name, b"%d" % partition, partition=partition)
    producer.flush(10)
    consumer = cluster.consumer()
    consumer.assign({(run_name, partition): 1000 for partition in range(4)})
    gone: list[int] = []
    read_on: list[bytes | None] = []
    deadline = time.monotonic() + 60
    while len(read_on) < 4 and time.monotonic() < deadline:
        time.sleep(0.2)  # all four errors lie in the queue before the first poll
        try:
            read_on += [record.value for record in consumer.poll_many(100, 0.5)]
        except OffsetGone as error:
            gone.append(error.partition)
            consumer.seek(run_name, error.partition, 0)
    assert sorted(gone) == [0, 1, 2, 3]
    assert sorted(value or b"" for value in read_on) == [b"0", b"1", b"2", b"3"]


def test_the_end_is_reached_past_transaction_markers_and_aborted_records_are_not_seen(
    cluster: Cluster, topic: str, run_name: str
):
    producer = cluster.producer(transactional_id=run_name)
    for values, ends_well in (([b"a", b"b"], True), ([b"never"], False), ([b"c"], True)):
        producer.begin()
        for value in values:
            producer.send(topic, value, partition=0)
        producer.flush(10)
        producer.commit_transaction() if ends_well else producer.abort_transaction()
    producer.close()
    assert [(r.offset, r.value) for r in read_all(cluster, topic)] == [(0, b"a"), (1, b"b"), (5, b"c")]
    consumer = reader(cluster, topic)
    _, high = consumer.watermarks(topic, 0)
    assert high == 7, "two markers of commits, one of an abort"
    read(consumer, 3)
    while consumer.end_reached(topic, 0) != high:
        assert consumer.poll_many(10, 0.5) == []
    group = cluster.consumer(run_name)
    group.commit({(topic, 0): consumer.end_reached(topic, 0) or 0}, wait=True)
    assert cluster.admin().group_offsets(run_name, [(topic, 0)]) == {(topic, 0): high}, "lag is nothing"


def test_a_new_transactional_producer_fences_the_one_before(cluster: Cluster, topic: str, run_name: str):
    zombie = cluster.producer(transactional_id=run_name)
    zombie.begin()
    zombie.send(topic, b"zombie", partition=0)
    zombie.flush(10)
    successor = cluster.producer(transactional_id=run_name)
    with pytest.raises(BrokerError):
        zombie.commit_transaction()
    successor.begin()
    successor.send(topic, b"successor", partition=0)
    successor.commit_transaction()
    assert [r.value for r in read_all(cluster, topic)] == [b"successor"]
    successor.close()
    zombie.close(0.1)


def test_a_group_starts_where_it_is_told_else_where_it_committed_else_at_the_earliest(
    cluster: Cluster, topic: str, run_name: str, producer: Producer
):
    for partition in (0, 1):
        for number in range(6):
            producer.send(topic, b"%d" % number, partition=partition)
    producer.flush(10)
    first = cluster.consumer(run_name)
    first.subscribe([topic])
    assert {(r.partition, r.offset) for r in read(first, 12)} == {(p, o) for p in (0, 1) for o in range(6)}
    first.commit({(topic, 0): 4, (topic, 1): 4}, wait=True)
    assert first.committed([(topic, 0), (topic, 1)]) == {(topic, 0): (4, "gorila"), (topic, 1): (4, "gorila")}
    first.close()
    came: list[list[tuple[str, int]]] = []
    second = cluster.consumer(run_name, on_assign=lambda partitions: came.append(partitions) or {(topic, 1): 1})
    second.subscribe([topic])
    assert sorted((r.partition, r.offset) for r in read(second, 7)) == [
        (0, 4),
        (0, 5),
        (1, 1),
        (1, 2),
        (1, 3),
        (1, 4),
        (1, 5),
    ]
    assert [sorted(partitions) for partitions in came] == [[(topic, 0), (topic, 1)]]
    second.close()


def test_partitions_move_between_members_and_every_record_is_read_by_one_of_them(
    cluster: Cluster, topic: str, run_name: str, producer: Producer
):
    went: list[tuple[str, int]] = []
    one = cluster.consumer(run_name, instance_id="one", on_revoke=went.extend)
    one.subscribe([topic])
    while len(one.assignment()) < 2:
        one.poll_many(1, 0.1)
    two = cluster.consumer(run_name, instance_id="two")
    two.subscribe([topic])
    while not two.assignment():
        one.poll_many(1, 0.05)
        two.poll_many(1, 0.05)
    assert went == two.assignment()
    for partition in (0, 1):
        producer.send(topic, b"x", partition=partition)
    producer.flush(10)
    assert (topic, read(two, 1)[0].partition) == went[0]
    assert [(topic, read(one, 1)[0].partition)] == one.assignment()
    two.close()
    one.close()


def test_a_partition_that_was_paused_and_went_and_came_back_is_read_again(
    cluster: Cluster, topic: str, run_name: str, producer: Producer
):
    """Seen with a broker stopped for 15 s: the learner's partition was paused while it waited, lost, given back, and never read again."""
    went: list[tuple[str, int]] = []
    one = cluster.consumer(run_name, on_revoke=went.extend)
    one.subscribe([topic])
    while len(one.assignment()) < 2:
        one.poll_many(1, 0.1)
    one.pause(one.assignment())
    two = cluster.consumer(run_name)
    two.subscribe([topic])
    while not two.assignment():
        one.poll_many(1, 0.05)
        two.poll_many(1, 0.05)
    two.close()
    while len(one.assignment()) < 2:
        one.poll_many(1, 0.1)
    producer.send(topic, b"x", partition=went[0][1])
    producer.flush(10)
    assert read(one, 1)[0].value == b"x"
    one.close()


def test_a_commit_that_comes_too_late_is_swallowed_and_counted(cluster: Cluster, topic: str, run_name: str):
    member = cluster.consumer(run_name)
    member.subscribe([topic])
    while not member.assignment():
        member.poll_many(1, 0.1)
    outsider = cluster.consumer(run_name)
    outsider.commit({(topic, 0): 1}, wait=True)
    assert outsider.refused_commits == 1, "a process that is no member may not commit for a group that has members"
    assert member.committed([(topic, 0)]) == {(topic, 0): (None, "")}
    member.close()


def test_a_zombie_with_the_same_static_name_is_told_so(cluster: Cluster, topic: str, run_name: str):
    zombie = cluster.consumer(run_name, instance_id="same")
    zombie.subscribe([topic])
    while not zombie.assignment():
        zombie.poll_many(1, 0.1)
    successor = cluster.consumer(run_name, instance_id="same")
    successor.subscribe([topic])
    while not successor.assignment():
        successor.poll_many(1, 0.1)
    with pytest.raises(BrokerError, match="fenced"):
        read(zombie, 1)
    successor.close()
    zombie.close()


def test_a_client_made_before_a_fork_refuses_to_work_after_it(cluster: Cluster, topic: str, producer: Producer):
    consumer = reader(cluster, topic)
    child = os.fork()
    if child == 0:
        refused = 0
        for use in (lambda: producer.send(topic, b"x"), lambda: consumer.poll_many(1, 0)):
            try:
                use()
            except BrokerError as error:
                refused += "fork" in str(error)
        os._exit(0 if refused == 2 else 1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    producer.send(topic, b"parent", partition=0)
    assert producer.flush(10) == 0


def test_an_unreachable_kafka_is_one_line_where_an_answer_is_needed_and_patience_elsewhere():
    nowhere = Cluster(NOWHERE)
    with pytest.raises(BrokerError, match=f"Kafka at {NOWHERE} does not answer") as caught:
        nowhere.admin().ping(0.3)
    assert "\n" not in str(caught.value)
    consumer = nowhere.consumer()
    consumer.assign({("t", 0): 0})
    assert consumer.poll_many(10, 0.2) == []
    producer = nowhere.producer()
    producer.send("t", b"kept")
    assert producer.flush(0.2) == 1
    producer.close(0.1)
    consumer.close()


def _fill(producer: Producer) -> None:
    for _ in range(100):
        producer.send("t", b"x" * MIB)


def _flush_all(producer: Producer) -> None:
    while producer.flush(1):
        pass


def test_a_full_queue_lets_go_of_a_process_that_must_stop(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(producer_module, "STOP_GRACE_S", 0.2)
    stop = threading.Event()
    stop.set()
    producer = Cluster(NOWHERE, stop=stop).producer()
    with pytest.raises(BrokerError, match="while stopping"):
        _fill(producer)
    assert producer.outstanding >= 60
    producer.close(0.1)


def test_a_record_for_a_topic_that_does_not_exist_fails_a_later_call_naming_it(cluster: Cluster, run_name: str):
    producer = cluster.producer()
    producer.send(f"{run_name}.nowhere", b"x")
    with pytest.raises(BrokerError, match=rf"{run_name}\.nowhere"):
        _flush_all(producer)
    with pytest.raises(BrokerError):
        producer.poll()
    producer.close(0.1)


def test_topics_are_made_once_described_and_gone_when_deleted(cluster: Cluster, run_name: str):
    admin = cluster.admin()
    wanted = [NewTopic(f"{run_name}.a", 3, 1, {"cleanup.policy": "compact"}), NewTopic(f"{run_name}.b", 1, 1, {})]
    assert sorted(admin.create_topics(wanted)) == [f"{run_name}.a", f"{run_name}.b"]
    assert admin.create_topics(wanted) == []
    facts = admin.describe([f"{run_name}.a", "nix"])
    assert list(facts) == [f"{run_name}.a"]
    assert facts[f"{run_name}.a"].partitions == admin.partitions(f"{run_name}.a") == 3
    assert facts[f"{run_name}.a"].settings == {"cleanup.policy": "compact"}
    assert facts[f"{run_name}.a"].ends == {0: 0, 1: 0, 2: 0}
    assert sorted(admin.delete_topics([f"{run_name}.a", f"{run_name}.b", "nix"])) == [f"{run_name}.a", f"{run_name}.b"]
    with pytest.raises(BrokerError, match="does not exist"):
        admin.partitions(f"{run_name}.a")
    with pytest.raises(BrokerError, match=r"bad/name"):
        admin.create_topics([NewTopic("bad/name", 1, 1, {})])


def test_a_writer_waits_for_the_readers_commit(cluster: Cluster, topic: str, run_name: str):
    gate = LagGate(cluster, run_name, topic, [0, 1], 10)
    while not gate.waiting_for().startswith(run_name.rsplit(".", 1)[-1] + ": 11 records behind on partition 0"):
        assert not gate.may_write(0, 11)
    assert gate.may_write(0, 10)
    group = cluster.consumer(run_name)
    group.commit({(topic, 0): 1}, wait=True)
    while not gate.may_write(0, 11):
        pass
    assert gate.waiting_for() == ""


def test_a_broker_that_goes_and_comes_back_costs_two_log_lines_and_no_record(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.WARNING, "gorila.kafka")
    embedded = Broker(tmp_path / "broker")
    cluster = Cluster(embedded.start().bootstrap_servers)
    try:
        cluster.admin().create_topics([NewTopic("t", 1, 1, {})])
        producer = cluster.producer()
        producer.send("t", b"before", partition=0)
        assert producer.flush(10) == 0
        embedded.stop()
        while not any("kafka.away" in message for message in caplog.messages):
            producer.poll(0.1)
        for number in range(20):
            producer.send("t", b"%d" % number, partition=0)
        assert producer.flush(1) == 20
        embedded = Broker(tmp_path / "broker")
        assert embedded.start().bootstrap_servers == cluster.bootstrap_servers
        _flush_all(producer)
        assert [r.value for r in read_all(cluster, "t")] == [b"before", *(b"%d" % n for n in range(20))]
        changes = [m.split()[0] for m in caplog.messages if "client=gorila-producer" in m]
        assert changes == ["kafka.away", "kafka.back"]
        producer.close()
    finally:
        embedded.stop()


@pytest.mark.parametrize("past_the_door", [False, True])
def test_a_static_member_whose_session_ran_out_is_not_fenced_by_itself(tmp_path: Path, past_the_door: bool):
    """Seen with brokers that were away for 10 s: what is sent between the session's end and the next joining names the member without its id, and Kafka
    takes it for another process of that name. Commits are held back then; librdkafka's own heartbeats cannot be: a commit past our door stands for them."""
    went: list[tuple[str, int]] = []
    own = Broker(tmp_path / "broker")
    cluster = Cluster(own.start().bootstrap_servers)
    restart = threading.Timer(10.5, own.start)  # a session is 10 s; the group's members are kept in its log

    def revoked(partitions: list[tuple[str, int]]) -> None:
        if past_the_door and not went:
            with pytest.raises(KafkaException, match="fenced"):
                member._consumer.commit(offsets=[TopicPartition("t", 0, 0)], asynchronous=False)
        else:
            member.commit(dict.fromkeys(partitions, 0), wait=True)  # as roles do: their next owner starts there
        went.extend(partitions)

    try:
        cluster.admin().create_topics([NewTopic("t", 1, 1, {})])
        member = cluster.consumer("g", instance_id="one", on_revoke=revoked)
        member.subscribe(["t"])
        while not member.assignment():
            member.poll_many(1, 0.1)
        own.stop()
        restart.start()
        while not went:
            member.poll_many(1, 0.1)
        while not member.assignment():
            member.poll_many(1, 0.1)
        assert went == [("t", 0)] and member.refused_commits == (0 if past_the_door else 1)
        producer = cluster.producer()
        producer.send("t", b"x", partition=0)
        _flush_all(producer)
        assert read(member, 1)[0].value == b"x"
        member.close()
        producer.close()
    finally:
        restart.cancel()
        if restart.is_alive():
            restart.join()
        own.stop()
