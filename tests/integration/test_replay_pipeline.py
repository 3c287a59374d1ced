"""The replay pipeline against a real broker, on the local runner."""

from __future__ import annotations

import dataclasses
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import confluent_kafka
import numpy as np
import pytest
from replay_process import fingerprint
from replay_run import Run, a_turn_of, until

from gorila.errors import BadRecord
from gorila.local.broker import Broker
from gorila.messages import Batch, Priorities
from pipelines.elements import Chunk
from pipelines.split_room import SplitRoom


@pytest.fixture
def make_run(broker: Any) -> Callable[..., Run]:
    return lambda *sets: Run(broker.bootstrap_servers, *sets)


def test_transitions_in_whole_learner_batches_out_in_turn(make_run: Callable[..., Run]) -> None:
    run = make_run("learner.count=2", "replay.max_lag_batches=1000")
    sent = {run.block() for _ in range(4)}
    with run.replay():
        until(lambda: run.newest_stats().inserts_total == 4 * 16, "the blocks to be handled")
    ends = [run.end("batches", partition) for partition in (0, 1)]
    first, second = run.batches(ends[0], partition=0), run.batches(ends[1], partition=1)
    for batches in (first, second):
        assert [b.part for b in batches[:6]] == [0, 1, 0, 1, 0, 1], "a learner batch's records follow one another"
        assert {b.parts for b in batches} == {2}
    numbers = sorted({b.batch_number for b in first} | {b.batch_number for b in second})
    assert numbers == list(range(len(numbers))), "every learner batch is on exactly one partition"
    assert not {b.batch_number for b in first} & {b.batch_number for b in second}
    for batch in first + second:
        assert set(batch.offset.tolist()) <= sent
        assert set(batch.behaviour_version.tolist()) == {3}
        assert batch.population > 0
    stats = run.newest_stats()
    assert (stats.split, stats.actors) == ("replay-0", ["0"])
    assert stats.batches_total * 32 == stats.samples_total <= 8 * stats.inserts_total
    assert stats.samples_total + 32 > 8 * stats.inserts_total, "drawn as far as the rate rule lets it"


def test_nothing_is_drawn_while_the_learner_is_behind_and_it_says_so(make_run: Callable[..., Run]) -> None:
    run = make_run()
    for _ in range(4):
        run.block()
    bound = run.config.replay.max_lag_batches * run.config.record_parts
    with run.replay():
        batches = run.batches(bound)
        until(lambda: "learner" in run.newest_stats().waiting_for, "the split to say whom it waits for")
        seen = run.newest_stats().batches_total * 2
        assert bound <= seen <= bound + 2 * run.config.record_parts
        run.commit("learner", "batches", len(batches))
        run.batches(seen + 2)


def test_a_learned_priority_moves_the_leaf_and_an_old_one_is_counted(make_run: Callable[..., Run]) -> None:
    run = make_run()
    run.block(), run.block()
    with run.replay() as room:
        batch = run.batches(1)[0]
        before = fingerprint(room.replay)
        run.learned(batch, 0, 9.0)
        until(lambda: fingerprint(room.replay) != before, "the priorities to be applied")
        room.replay.check_valid()
        gone = dataclasses.replace(batch, offset=batch.offset + 10_000)
        run.learned(gone, 1, 9.0)
        until(lambda: run.newest_stats().stale_priorities == len(batch.row), "the stale ones to be counted")


def test_killed_it_comes_back_with_an_equal_memory(make_run: Callable[..., Run], tmp_path: Path) -> None:
    """Live rows, every leaf (learned ones too) and N, after more blocks than the ring holds."""
    run = make_run("replay.max_lag_batches=1000")
    seen = tmp_path / "memory"
    process = run.process(seen)
    try:
        for _ in range(40):
            run.block()

        def memory() -> str:
            seen.unlink(missing_ok=True)
            process.send_signal(signal.SIGUSR1)
            return until(lambda: seen.exists() and seen.read_text(), "the process to write its memory down")

        until(lambda: run.committed() == 40, "the blocks to be handled")
        plain = memory()
        batches = run.batches(run.end("batches"))[-20:]
        for number, batch in enumerate(batches):
            run.learned(batch, number, 5.0 + number)
        # The last record's rows are stale: once they are counted, the records before it were applied.
        gone = dataclasses.replace(batches[0], offset=batches[0].offset + 10_000)
        run.learned(gone, 99, 1.0)
        stale = sum(int((batch.offset < 40 - 256 // 16).sum()) for batch in batches) + len(gone.row)
        until(lambda: run.newest_stats().stale_priorities == stale, "the learned priorities to be applied")
        last = memory()
        assert last != plain
    finally:
        process.kill()
        process.wait()
    with run.replay() as room:
        until(lambda: room.positions() == {0: 40} and fingerprint(room.replay) == last, "an equal memory")
        room.replay.check_valid()
        assert run.newest_stats().inserts_total == 40 * 16, "rows read again are no new inserts"


def test_a_priority_of_a_row_that_is_still_to_come_waits_for_it(make_run: Callable[..., Run]) -> None:
    """Killed between a block and its commit: what was learned about that block is in the log before the ring has it again."""
    run = make_run()
    for _ in range(6):
        run.block()
    records = run.read("transitions", lambda found: len(found) == 6)
    undisturbed = SplitRoom(run.service(1), "replay-1")
    drawn = list(undisturbed.handle(Chunk(0, 0, {0: 0}, records)))
    batches = [run.schemas.expect(value, Batch) for one in drawn if one.topic == "batches" for value in one.values]
    for number, batch in enumerate(batches):
        run.learned(batch, number, 5.0 + number)
    learned = run.read("priorities", lambda found: len(found) == len(batches))
    list(undisturbed.handle(Chunk(0, 0, None, [], learned)))
    equal = fingerprint(undisturbed.replay)
    undisturbed.close()
    run.commit("replay", "transitions", 3)
    with run.replay() as room:
        until(lambda: room.positions() == {0: 6} and fingerprint(room.replay) == equal, "an equal memory")
        assert run.newest_stats().inserts_total <= 3 * 16, "it did start at the commit"


def test_what_an_operator_committed_is_obeyed_and_the_ring_is_filled_from_before_it(
    make_run: Callable[..., Run], capfd: pytest.CaptureFixture[str]
) -> None:
    run = make_run()
    for _ in range(6):
        run.block()
    run.commit("replay", "transitions", 4, metadata="")
    with run.replay() as room:
        until(lambda: room.positions() == {0: 6}, "the blocks to be handled")
        rows = sum(n for n, *_ in room.replay.state_fingerprint().values())
        assert rows == 6 * 16 - 3, "four blocks from before, two after; the newest three rows have no successors yet"
        until(lambda: run.newest_stats().inserts_total == 2 * 16, "only two blocks counted as inserts")
    assert "replay.operator_reset_obeyed" in capfd.readouterr().err


def test_reset_to_the_earliest_offset_it_reads_all_again_and_counts_no_insert_twice(
    make_run: Callable[..., Run],
) -> None:
    """Samples per insert would be wrong for the rest of the run."""
    run = make_run("replay.max_lag_batches=1000")
    for _ in range(20):  # more than the ring holds
        run.block()
    records = run.read("transitions", lambda found: len(found) == 20)
    # Its life before, outside the group: a static member would keep the group from the operator for ten seconds.
    first = SplitRoom(run.service(), "replay-0")
    for drawn in first.handle(Chunk(0, 0, {0: 0}, records)):
        first.writer.write(drawn)
    first.close()
    before = run.newest_stats()
    assert before.inserts_total == 20 * 16
    run.commit("replay", "transitions", 0, metadata="")
    with run.replay() as room:
        until(lambda: room.positions() == {0: 20} and run.committed() == 20, "everything to be read again")
        run.block()
        until(lambda: run.newest_stats().inserts_total > 20 * 16, "the new block to be handled")
    after = run.newest_stats()
    assert after.inserts_total == 21 * 16
    assert 0 <= after.samples_total - before.samples_total <= 8 * 16 + 32, "drawn for the one new block only"


def test_priorities_of_rows_that_are_not_in_memory_are_counted_and_never_dead_letters(
    make_run: Callable[..., Run],
) -> None:
    """Learned while replay was down, of rows the ring has lost since, of a poisoned record, of a record never written."""
    run = make_run()
    for _ in range(20):
        run.block()
    poison = run.send("transitions", b"not avro at all")
    run.block()
    rows = np.arange(16, dtype=np.int32)

    def learned(offset: int, row: np.ndarray = rows) -> int:
        columns = np.zeros(len(row), np.int32), np.full(len(row), offset, np.int64), row.astype(np.int32)
        message = Priorities("learner-0", 0, 0, 1, *columns, np.ones(len(row), np.float32), 0.1, 1.0, False, 0.5)
        return run.send("priorities", run.schemas.encode(message))

    gone = (0, poison, 10_000)
    for offset in gone:  # before it ever ran: recovery reads these again
        learned(offset)
    with run.replay() as room:
        until(lambda: run.committed() == 22, "the blocks to be handled")
        before = run.newest_stats().stale_priorities
        for offset in gone:
            learned(offset)
        learned(poison + 1, rows + 1_000)
        last = learned(poison + 1, rows[:4])
        until(lambda: room._priorities_next == last + 1, "the priorities to be handled")
        a_turn_of(room)
        leaves = fingerprint(room.replay)
        until(lambda: run.newest_stats().stale_priorities == before + 4 * 16, "all of them to be counted")
        room.replay.check_valid()
        assert fingerprint(room.replay) == leaves
    assert [r.value for r in run.read("dead-letters", bool)] == [b"not avro at all"]
    assert run.end("dead-letters") == 1


def test_records_of_machines_whose_clocks_are_years_off_pass_and_recovery_finds_all_of_them(
    make_run: Callable[..., Run],
) -> None:
    """The broker's clock is the only one: what a producer says the time is decides neither what is kept nor what is read again."""
    run = make_run()
    year_ms = 365 * 24 * 3600 * 1000
    now_ms = int(time.time() * 1000)
    raw = confluent_kafka.Producer({"bootstrap.servers": run.servers})
    for clock_ms in (now_ms + 5 * year_ms, 1, now_ms - 40 * year_ms, now_ms + 60 * year_ms):
        block = dataclasses.replace(run.next_block(), actor_epoch=clock_ms)
        raw.produce(run.topic("transitions"), run.schemas.encode(block), partition=0, timestamp=clock_ms)
        raw.flush(10)
        run.block()
    with run.replay() as room:
        until(lambda: room.positions() == {0: 8} and run.committed() == 8, "all of them to be handled")
        oldest_ms = room.replay.oldest_timestamp_ms()
        assert oldest_ms is not None
        assert now_ms - 600_000 < oldest_ms < now_ms + 600_000
        batches = run.batches(6)
        for number, batch in enumerate(batches):
            row = Priorities(
                "learner-0", 0, number, 1, batch.partition, batch.offset, batch.row,
                np.full(len(batch.row), 5.0 + number, np.float32), 0.1, 1.0, False, 0.5,
            )  # fmt: skip
            value = run.schemas.encode(row)
            raw.produce(run.topic("priorities"), value, partition=0, timestamp=now_ms + (number - 3) * 10 * year_ms)
            raw.flush(10)
        until(lambda: room._priorities_next == len(batches), "the priorities to be handled")
        a_turn_of(room)
        memory = fingerprint(room.replay)
    with run.replay() as room:
        until(lambda: room.positions() == {0: 8} and fingerprint(room.replay) == memory, "an equal memory")
        room.replay.check_valid()


def test_poison_goes_to_dead_letters_and_the_offset_moves_on(make_run: Callable[..., Run]) -> None:
    run = make_run()
    run.block()
    nan = run.next_block()
    nan.reward[3] = np.nan
    poison = [b"not avro at all", None, run.schemas.encode(nan), b"\x00\x00\x00\x00\x01rest"]
    for value in poison:
        run.send("transitions", value)
    run.block()
    bad_priorities = b"\x00garbage"
    with run.replay() as room:
        run.batches(2)
        run.send("priorities", bad_priorities)
        dead = run.read("dead-letters", lambda found: len(found) >= 5)
        until(lambda: run.committed() == 6, "the offset to move on")
        run.batches(2)
        room.replay.check_valid()
    assert sorted(r.value or b"" for r in dead) == sorted(v or b"" for v in [*poison, bad_priorities])
    with run.replay():
        run.batches(2)
        assert len(run.read("dead-letters", lambda found: len(found) >= 5)) == 5, "read again, it is not sent again"


def test_a_gap_is_filled_from_the_log_first(make_run: Callable[..., Run]) -> None:
    """What Beam's redelivery, a rebalance or a lost chunk look like to the room."""
    run = make_run()
    offsets = [run.block() for _ in range(8)]
    records = run.read("transitions", lambda found: len(found) == 8)
    room = SplitRoom(run.service(), "replay-0")
    list(room.handle(Chunk(0, 0, {0: 0}, records[:2])))
    list(room.handle(Chunk(0, 0, None, records[5:6])))
    assert room.positions() == {0: 6}
    list(room.handle(Chunk(0, 0, None, records[1:7])))
    assert room.positions() == {0: 7}
    list(room.handle(Chunk(0, 0, None, records[7:])))
    assert room.positions() == {0: offsets[-1] + 1}
    other = SplitRoom(run.service(1), "replay-1")
    list(other.handle(Chunk(0, 0, {0: 0}, records)))
    assert fingerprint(room.replay) == fingerprint(other.replay)
    assert room.replay.stats(0).inserts_total < other.replay.stats(0).inserts_total
    for made in (room, other):
        made.close()


def test_a_second_split_takes_over_actors_with_their_memory(make_run: Callable[..., Run]) -> None:
    run = make_run("actor.count=2", "replay.max_lag_batches=1000")
    for partition in (0, 1):
        for _ in range(6):
            run.block(partition)
    with run.replay(0) as first:
        batches = run.batches(20)
        for number, batch in enumerate(batches):
            run.learned(batch, number, 5.0 + number)
        until(lambda: first._priorities_next == 20, "the priorities to be handled")
        until(lambda: first.positions() == {0: 6, 1: 6}, "both actors")
        a_turn_of(first)
        whole = first.replay.state_fingerprint()
        with run.replay(1) as second:
            until(lambda: len(second.positions()) == 1 and len(first.positions()) == 1, "Kafka to share the actors out")
            until(
                lambda: {**first.replay.state_fingerprint(), **second.replay.state_fingerprint()} == whole,
                "the same memory in two",
            )
        assert {p: run.committed(p) for p in (0, 1)} == {0: 6, 1: 6}


def test_sigterm_drains_and_commits(make_run: Callable[..., Run], tmp_path: Path) -> None:
    run = make_run()
    process = run.process(tmp_path / "memory")
    for _ in range(5):
        run.block()
    run.batches(2)
    process.send_signal(signal.SIGTERM)
    assert process.wait(20) == 0
    position = run.committed()
    stats = run.newest_stats()
    assert position is not None
    assert stats.inserts_total == position * 16, "everything handled is committed, and nothing else"
    assert run.end("batches") == stats.batches_total * run.config.record_parts, "everything drawn is in the log"


def test_stopped_while_it_joins_the_group_it_stops_all_the_same(make_run: Callable[..., Run]) -> None:
    """The group's answer may come while the consumer closes; asking it for committed offsets then waited for ten seconds."""
    run = make_run()
    run.block()
    for pause_s in (0.0, 0.1, 0.2, 0.3):
        with run.replay() as room:
            until(lambda room=room: room.reader is not None, "the reader to be opened")
            threading.Event().wait(pause_s)  # somewhere between asking to join and being told


def test_kafka_goes_away_and_comes_back_and_the_pipeline_goes_on(tmp_path: Path) -> None:
    """A process of its own: asking an admin client for committed offsets at this moment ends the process (kafka_io.CommittedOffsets)."""
    own = Broker(tmp_path / "broker")
    run = Run(own.start().bootstrap_servers)
    process = run.process(tmp_path / "memory")
    try:
        run.block(), run.block()
        run.batches(2)
        own.stop()
        # Its socket closed, every client of the process has noticed; what it was about to write waits in its queue.
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(3)
        own.start()
        run.block()
        until(lambda: run.committed() == 3, "the new block to be handled")
        process.send_signal(signal.SIGTERM)
        assert process.wait(20) == 0
        assert run.newest_stats().inserts_total == 3 * 16
    finally:
        process.kill()
        process.wait()
        own.stop()


def test_a_beam_bundle_ends_by_itself_whether_records_come_or_not(make_run: Callable[..., Run]) -> None:
    """A process() that goes on for ever is never final: no commit, no state, no split. Counted in Beam bundles, not in time."""
    run = make_run("replay.bundle_s=0.1", "replay.max_lag_batches=100000")
    with run.replay() as room:
        until(lambda: room.reader is not None and room.assigned, "the first poll")
        ended = 0
        final = room.commit_final

        def counted(read: dict[int, int]) -> None:
            nonlocal ended
            ended += 1
            final(read)

        room.commit_final = counted  # type: ignore[method-assign]
        until(lambda: ended >= 3, "Beam bundles to end while nothing comes")
        before = ended
        for _ in range(400):
            run.block()
            if ended >= before + 3:
                break
        assert ended >= before + 3, "Beam bundles end while records keep coming"
        until(lambda: run.committed() == run.end("transitions"), "everything to be committed")


def test_idle_it_does_not_spin(make_run: Callable[..., Run]) -> None:
    run = make_run()
    with run.replay() as room:
        until(lambda: room.reader is not None and room.assigned, "the first poll")
        assert room.reader is not None
        before, start = room.reader.polls, run.newest_stats().time_ms
        newest = until(lambda: (s := run.newest_stats()).time_ms > start + 1500 and s, "more stats").time_ms
        polls = room.reader.polls - before
    assert polls <= 1.5 * (newest - start) / run.config.replay.poll_ms, "more polls than waits"
    assert polls < 0.5 * (newest - start) / run.config.replay.poll_ms + 250, "a quiet second makes ticks rarer"


def test_a_failure_inside_the_pipeline_comes_out_as_it_was(make_run: Callable[..., Run]) -> None:
    run = make_run()
    broken = BadRecord("broken on purpose")

    def fail(*_: Any) -> Any:
        raise broken

    def break_it() -> None:
        with run.replay() as room:
            room.handle = fail  # type: ignore[method-assign]
            until(lambda: room.failure, "the failure")

    with pytest.raises(BadRecord, match="broken on purpose"):
        break_it()
