"""The runtime's rules, in memory, with a clock moved by hand."""

from __future__ import annotations

import logging
from collections.abc import Iterable

import pytest

from gorila.errors import InvalidState, OffsetGone
from gorila.inputs import Input
from gorila.messages import CheckpointLedger
from gorila.processor import Outgoing
from gorila.testing.driver import ProcessorTestDriver
from gorila.testing.memory_log import MemoryConsumer
from gorila.testing.relay import Relay, answered, episode

EPISODES = Input("episodes")


class Door:
    """A gate opened and shut by hand."""

    def __init__(self) -> None:
        self.open = False
        self.asked: list[tuple[int, int]] = []

    def may_write(self, partition: int, next_offset: int) -> bool:
        self.asked.append((partition, next_offset))
        return self.open

    def waiting_for(self) -> str:
        return "" if self.open else "replay: 70 records behind on partition 0, bound 64"


def test_bytes_that_are_no_record_go_to_dead_letters_and_their_offset_is_committed() -> None:
    driver = ProcessorTestDriver(Relay, EPISODES)
    driver.feed_bytes("episodes", b"\x00junk", None, b"")
    driver.commit()
    assert [record.value for record, _ in driver.service.bad] == [b"\x00junk", None, b""]
    assert driver.committed("episodes") == 3
    assert driver.runtime.metrics.value("dead_letters_total", topic="episodes") == 3


def test_a_record_the_role_refuses_goes_to_dead_letters_with_its_original_bytes() -> None:
    driver = ProcessorTestDriver(Relay, EPISODES)
    driver.feed("episodes", episode(1), episode(666), episode(3))
    driver.commit()
    assert [(record.offset, reason) for record, reason in driver.service.bad] == [(1, "lane 666")]
    assert driver.service.bad[0][0].value == driver.service.schemas.encode(episode(666))
    assert answered(driver.messages("priorities")) == [0, 2]
    assert driver.committed("episodes") == 3


def test_nothing_is_committed_past_a_record_the_role_holds_back_not_even_over_a_bad_one() -> None:
    driver = ProcessorTestDriver(lambda: Relay(hold_back=True), EPISODES)
    driver.feed("episodes", episode(1), episode(666), episode(3))
    driver.commit()
    assert driver.committed("episodes") == 0
    relay = driver.processor
    assert isinstance(relay, Relay)
    relay.tracker.release("episodes", 0, 0)
    driver.commit()
    assert driver.committed("episodes") == 2
    relay.tracker.release("episodes", 0, 2)
    driver.commit()
    assert driver.committed("episodes") == 3


def test_a_commit_comes_after_its_interval_and_not_before() -> None:
    driver = ProcessorTestDriver(Relay, EPISODES, commit_interval_s=1.0)
    driver.feed("episodes", episode())
    driver.advance(0.9)
    assert driver.committed("episodes") is None
    driver.advance(0.2)
    assert driver.committed("episodes") == 1


def test_a_commit_waits_for_the_acknowledgements_of_its_mark_and_not_for_later_ones() -> None:
    driver = ProcessorTestDriver(Relay, EPISODES, automatic=False)
    driver.feed("episodes", episode(0))
    driver.advance(0.3)
    assert driver.committed("episodes") is None
    driver.cluster.acknowledge()
    driver.feed("episodes", episode(1))
    assert driver.committed("episodes") == 1, "offset 0 is answered and acknowledged; offset 1 is answered only"


def test_a_checkpoint_is_in_the_log_and_acknowledged_before_the_positions_it_belongs_to_are_committed() -> None:
    driver = ProcessorTestDriver(lambda: Relay(checkpoints=True), EPISODES, automatic=False)
    driver.feed("episodes", episode(0), episode(1))
    driver.advance(0.3)
    assert driver.messages("checkpoints") == []
    driver.acknowledge()
    checkpoints = driver.messages("checkpoints")
    assert [c.version for c in checkpoints if isinstance(c, CheckpointLedger)] == [2]
    assert driver.committed("episodes") is None
    driver.feed("episodes", episode(2))
    assert driver.committed("episodes") is None
    driver.acknowledge()
    assert driver.committed("episodes") == 2, "the state that was marked, not what came since"


def test_a_checkpoint_is_taken_when_the_role_knows_the_offsets_it_asked_for_and_a_role_that_never_pauses_is_made_to() -> (
    None
):
    driver = ProcessorTestDriver(lambda: Relay(tagged=True, checkpoints=True), EPISODES, automatic=False)
    driver.feed("episodes", episode(0))
    driver.advance(0.3)
    driver.advance(0.05)
    assert driver.messages("checkpoints") == []
    driver.advance(0.2)
    assert len(driver.messages("checkpoints")) == 1
    relay = driver.processor
    assert isinstance(relay, Relay)
    assert relay.told == [0]
    assert driver.runtime.metrics.value("forced_flushes_total") == 1


def test_an_input_that_is_not_wanted_stays_in_kafka_while_the_other_is_read() -> None:
    driver = ProcessorTestDriver(Relay, EPISODES, Input("replay-stats", how="assigned"))
    relay = driver.processor
    assert isinstance(relay, Relay)
    relay.unwanted = {"episodes"}
    driver.feed("episodes", episode(1))
    driver.feed("replay-stats", episode(2))
    assert [record.topic for record in relay.taken] == ["replay-stats"]
    relay.unwanted = set()
    driver.turn()
    assert [record.topic for record in relay.taken] == ["replay-stats", "episodes"]


def test_what_a_role_stops_wanting_in_the_middle_of_a_chunk_is_handed_in_later_in_order() -> None:
    driver = ProcessorTestDriver(Sated, EPISODES)
    relay = driver.processor
    assert isinstance(relay, Sated)
    driver.feed("episodes", *(episode(n) for n in range(4)))
    assert [record.offset for record in relay.taken] == [0]
    driver.commit()
    assert driver.committed("episodes") == 1
    relay.appetite = 4
    driver.turn()
    assert [record.offset for record in relay.taken] == [0, 1, 2, 3]


def test_behind_a_closed_gate_one_record_is_held_and_nothing_is_read_ticked_or_committed() -> None:
    door = Door()
    driver = ProcessorTestDriver(Relay, EPISODES, gates={"priorities": door})
    relay = driver.processor
    assert isinstance(relay, Relay)
    driver.feed("episodes", *(episode(n) for n in range(5)))
    ticks = len(relay.ticks)
    driver.commit()
    assert len(relay.taken) == 1
    assert len(relay.ticks) == ticks
    assert driver.messages("priorities") == []
    assert driver.committed("episodes") is None
    door.open = True
    driver.turn()
    driver.commit()
    assert answered(driver.messages("priorities")) == [0, 1, 2, 3, 4]
    assert driver.committed("episodes") == 5
    assert door.asked[-1] == (0, 4), "a gate is told the offset the record will get"


def test_whoever_waits_for_long_says_for_whom_once_and_says_when_it_is_over(caplog: pytest.LogCaptureFixture) -> None:
    door = Door()
    driver = ProcessorTestDriver(Relay, EPISODES, gates={"priorities": door})
    driver.service.log.parent = logging.getLogger()
    with caplog.at_level(logging.INFO):
        driver.feed("episodes", episode(0))
        for _ in range(5):
            driver.advance(0.4)
        assert driver.runtime.metrics.value("waiting") == 1
        door.open = True
        driver.advance(0.4)
    events = [
        (r.getMessage(), vars(r)["event_keys"]["whom"].split(":")[0])
        for r in caplog.records
        if "waiting" in r.getMessage()
    ]
    assert events == [("waiting.began", "replay"), ("waiting.over", "replay")]
    assert driver.runtime.metrics.value("waiting") == 0


def test_a_wait_nobody_could_notice_is_not_logged(caplog: pytest.LogCaptureFixture) -> None:
    driver = ProcessorTestDriver(Relay, EPISODES)
    driver.service.log.parent = logging.getLogger()
    relay = driver.processor
    assert isinstance(relay, Relay)
    with caplog.at_level(logging.INFO):
        for number in range(50):
            relay.waits_for = "parameter-server: 1 gradient in flight" if number % 2 else ""
            driver.advance(0.1)
    assert [r for r in caplog.records if "waiting" in r.getMessage()] == []


class Sated(Relay):
    """Wants no more than `appetite` records in all."""

    appetite = 1

    def wants(self, topic: str) -> bool:
        return len(self.taken) < self.appetite


def test_what_goes_in_a_rebalance_is_committed_first_and_its_backlog_is_left_to_the_new_owner() -> None:
    driver = ProcessorTestDriver(Sated, Input("batches"))
    topic = driver.service.topic("batches")
    driver.cluster.partitions[topic] = 2
    relay = driver.processor
    assert isinstance(relay, Sated)
    relay.appetite = 2
    driver.feed("batches", episode(1), partition=0)
    driver.feed("batches", episode(2), episode(3), episode(4), partition=1)
    assert [(record.partition, record.offset) for record in relay.taken] == [(0, 0), (1, 0)]
    other = MemoryConsumer(driver.cluster, driver.service.group, None, None)
    other.subscribe([topic])
    driver.runtime._readers[0].poll(0.0)  # in production the rest of an unwanted input, or its next wanted poll
    assert driver.committed("batches", 1) == 1
    assert relay.moves[-1] == ("revoked", [("batches", 1)])
    assert [record.offset for record in other.poll_many(10, 0)] == [1, 2]
    relay.appetite = 10
    driver.turn()
    assert len(relay.taken) == 2


def test_a_commit_for_a_partition_lost_meanwhile_is_swallowed_and_counted() -> None:
    driver = ProcessorTestDriver(Relay, Input("batches"))
    topic = driver.service.topic("batches")
    driver.feed("batches", episode(1))
    first = driver.cluster.members[driver.service.group]
    first.insert(0, MemoryConsumer(driver.cluster, driver.service.group, None, None))
    first[0].subscribe([topic])
    first.pop()
    driver.runtime.drain()
    assert driver.committed("batches") is None
    assert driver.runtime.metrics.value("commit_errors_total") == 1


def test_a_commit_that_was_refused_is_made_again_although_nothing_new_came() -> None:
    driver = ProcessorTestDriver(Relay, EPISODES)
    driver.feed("episodes", episode(0))
    driver.commit()
    driver.cluster.offsets.clear()
    reader = driver.runtime._readers[0]
    reader._consumer.refused_commits += 1
    driver.commit()
    assert driver.committed("episodes") == 1


def test_an_offset_an_operator_wrote_is_obeyed() -> None:
    driver = ProcessorTestDriver(Relay, EPISODES)
    driver.feed("episodes", *(episode(n) for n in range(5)))
    driver.stop()
    driver.cluster.offsets[driver.service.group, driver.service.topic("episodes"), 0] = (2, "")
    driver.crash()
    relay = driver.processor
    assert isinstance(relay, Relay)
    assert [record.offset for record in relay.taken] == [2, 3, 4]
    assert driver.runtime.metrics.value("operator_resets_total", obeyed="yes") == 1


def test_a_role_whose_state_has_its_own_offset_refuses_an_operators_reset_and_says_why(
    caplog: pytest.LogCaptureFixture,
) -> None:
    spec = Input("episodes", how="assigned", start={0: 3}, obey_operator=False)
    driver = ProcessorTestDriver(Relay, spec)
    driver.service.log.parent = logging.getLogger()
    driver.cluster.offsets[driver.service.group, driver.service.topic("episodes"), 0] = (1, "")
    for number in range(5):
        driver.cluster.append(driver.service.topic("episodes"), 0, driver.service.schemas.encode(episode(number)))
    driver.crash()
    relay = driver.processor
    assert isinstance(relay, Relay)
    assert [record.offset for record in relay.taken] == [3, 4]
    refused = [vars(r)["event_keys"] for r in caplog.records if r.getMessage() == "operator.reset_refused"]
    assert len(refused) == 1
    assert "fork" in refused[0]["reason"]


def test_an_explicit_start_wins_over_our_own_commit() -> None:
    driver = ProcessorTestDriver(Relay, Input("episodes", how="assigned", start={0: 1}))
    driver.feed("episodes", *(episode(n) for n in range(3)))
    driver.commit()
    assert driver.committed("episodes") == 3
    driver.crash()
    relay = driver.processor
    assert isinstance(relay, Relay)
    assert [record.offset for record in relay.taken] == [1, 2]


@pytest.mark.parametrize(("policy", "handled"), [("earliest", [4, 5]), ("latest", [6])])
def test_an_offset_no_longer_in_the_log_follows_the_inputs_policy_and_is_counted(
    policy: str, handled: list[int]
) -> None:
    driver = ProcessorTestDriver(Relay, Input("episodes", gone=policy))  # type: ignore[arg-type]
    driver.feed("episodes", *(episode(n) for n in range(2)))
    driver.commit()
    for number in range(2, 6):
        driver.cluster.append(driver.service.topic("episodes"), 0, driver.service.schemas.encode(episode(number)))
    driver.cluster.delete_below(driver.service.topic("episodes"), 0, 4)
    driver.crash()
    driver.turn()
    driver.feed("episodes", episode(6))
    relay = driver.processor
    assert isinstance(relay, Relay)
    assert [record.offset for record in relay.taken] == [*handled, 6][: len(handled) + (6 not in handled)]
    assert driver.runtime.metrics.value("offsets_gone_total", topic="episodes") == 1


@pytest.mark.parametrize("policy", ["earliest", "latest"])
def test_where_reading_goes_on_behind_a_hole_is_committed_though_nothing_came(policy: str) -> None:
    # A run resumed after its batches were deleted: replay waits while the learner's lag is above a bound, and the learner waits for replay.
    driver = ProcessorTestDriver(Relay, Input("episodes", gone=policy))  # type: ignore[arg-type]
    driver.feed("episodes", *(episode(n) for n in range(2)))
    driver.commit()
    for number in range(2, 6):
        driver.cluster.append(driver.service.topic("episodes"), 0, driver.service.schemas.encode(episode(number)))
    driver.cluster.delete_below(driver.service.topic("episodes"), 0, 6)
    driver.crash()
    assert driver.committed("episodes") == 2
    driver.commit()
    assert driver.committed("episodes") == 6
    driver.feed("episodes", episode(6))
    driver.commit()
    assert driver.committed("episodes") == 7


def test_an_offset_no_longer_in_the_log_stops_the_role_where_nothing_may_be_missed() -> None:
    driver = ProcessorTestDriver(Relay, Input("episodes", how="assigned", start={0: 0}, gone="fail"))
    for number in range(3):
        driver.cluster.append(driver.service.topic("episodes"), 0, driver.service.schemas.encode(episode(number)))
    driver.cluster.delete_below(driver.service.topic("episodes"), 0, 2)
    with pytest.raises(OffsetGone):
        driver.turn()


def test_of_a_newest_input_only_the_newest_record_of_each_key_is_handed_in_and_nothing_is_committed() -> None:
    driver = ProcessorTestDriver(Relay, Input("weights", how="newest"))
    full, schemas = driver.service.topic("weights"), driver.service.schemas
    for number, key in enumerate([b"0/key", b"0/target", b"0/key", b"0/key", b"0/target"]):
        driver.cluster.append(full, 0, schemas.encode(episode(number)), key)
    driver.turn()
    relay = driver.processor
    assert isinstance(relay, Relay)
    assert [record.offset for record in relay.taken] == [3, 4]
    driver.commit()
    assert driver.committed("weights") is None
    driver.crash()
    relay = driver.processor
    assert isinstance(relay, Relay)
    assert [record.offset for record in relay.taken] == [4], "a start looks at the end of the log only"


def test_a_stop_commits_everything_taken_so_that_the_next_process_repeats_nothing() -> None:
    driver = ProcessorTestDriver(Relay, EPISODES, automatic=False)
    driver.feed("episodes", *(episode(n) for n in range(4)))
    driver.stop()
    driver.crash()
    relay = driver.processor
    assert isinstance(relay, Relay)
    assert relay.taken == []
    assert answered(driver.messages("priorities")) == [0, 1, 2, 3]


def test_a_stop_behind_a_closed_gate_sends_what_is_held() -> None:
    driver = ProcessorTestDriver(Relay, EPISODES, gates={"priorities": Door()})
    driver.feed("episodes", episode(0), episode(1))
    driver.stop()
    assert answered(driver.messages("priorities")) == [0]
    assert driver.committed("episodes") == 1


def test_after_an_error_of_the_role_nothing_more_is_committed() -> None:
    class Broken(Relay):
        def tick(self, now_s: float) -> Iterable[Outgoing]:
            if self.taken:
                raise InvalidState("sum tree does not add up")
            return []

    driver = ProcessorTestDriver(Broken, EPISODES)
    driver.runtime.close()
    driver.cluster.append(driver.service.topic("episodes"), 0, driver.service.schemas.encode(episode(0)))
    with pytest.raises(InvalidState):
        driver.runtime.run()
    assert driver.committed("episodes") is None


def test_an_idle_role_is_ticked_when_it_says_it_is_due_and_at_least_once_an_interval() -> None:
    class Due(Relay):
        due = 0.005

        def next_due_s(self) -> float:
            return self.due

    driver = ProcessorTestDriver(Due, EPISODES)
    assert driver.runtime._until_tick_s() == pytest.approx(0.005)
    relay = driver.processor
    assert isinstance(relay, Due)
    relay.due = float("inf")
    assert driver.runtime._until_tick_s() == pytest.approx(0.02)
    relay.due = -float("inf")
    assert driver.runtime._until_tick_s() == 0.0
