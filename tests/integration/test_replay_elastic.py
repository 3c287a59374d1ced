"""Pipeline processes come, go and are killed while a run goes on (issue 4, elasticity): nothing is lost, every actor has one owner, probabilities stay exact.

What a memory must be is computed here from the log alone, by handing it to the pure ReplaySplit from its first record on: no recovery code takes part.
"""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from replay_process import fingerprint
from replay_run import PROCESS, Run

from gorila.kafka import Received
from gorila.messages import Batch, Priorities, ReplayStats, TransitionBlock
from pipelines.replay import ReplaySplit
from pipelines.sampling import row_probabilities

pytestmark = pytest.mark.timeout(400)
ACTORS = 8
PATIENCE_S = 150.0
ENOUGH_RECORDS = 600


def until(condition: Callable[[], Any], what: str) -> Any:
    """Wait for what processes do that import Beam first; the deadline is for a hang, not a measure."""
    deadline = time.monotonic() + PATIENCE_S
    while not (found := condition()):
        assert time.monotonic() < deadline, f"waited {PATIENCE_S} s for {what}"
        threading.Event().wait(0.05)
    return found


class Fleet:
    """Replay processes by index, each able to write down a fingerprint of its memory."""

    def __init__(self, run: Run, folder: Path) -> None:
        self.run, self._folder = run, folder
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def start(self, index: int) -> None:
        words = [str(PROCESS), self.run.name, self.run.servers, str(self._file(index)), str(index)]
        self._processes[index] = subprocess.Popen([sys.executable, "-W", "ignore", *words])

    def _file(self, index: int) -> Path:
        return self._folder / f"memory-{index}"

    def stop(self, index: int) -> None:
        process = self._processes.pop(index)
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0

    def kill(self, index: int) -> None:
        process = self._processes.pop(index)
        process.kill()
        process.wait()

    def memory(self, index: int) -> str:
        """Its fingerprint now."""
        file = self._file(index)
        file.unlink(missing_ok=True)
        self._processes[index].send_signal(signal.SIGUSR1)
        return str(until(lambda: file.exists() and file.read_text(), "the process to write its memory down"))

    def close(self) -> None:
        for index in list(self._processes):
            self.kill(index)


@contextlib.contextmanager
def fleet(run: Run, folder: Path) -> Iterator[Fleet]:
    made = Fleet(run, folder)
    try:
        yield made
    finally:
        made.close()


class Load:
    """Actors that write all the time, on a thread; `pause` for what must be looked at at rest."""

    def __init__(self, run: Run, actors: int, pause_s: float) -> None:
        self._run, self._actors, self._pause_s = run, actors, pause_s
        self._go, self._over = threading.Event(), threading.Event()
        self._idle = threading.Event()
        self.failures: list[BaseException] = []
        self._thread = threading.Thread(target=self._write)
        self._thread.start()

    def _write(self) -> None:
        try:
            while not self._over.is_set():
                if not self._go.is_set():
                    self._idle.set()
                    self._go.wait(0.05)
                    continue
                for partition in range(self._actors):
                    self._run.block(partition)
                self._over.wait(self._pause_s)
        except BaseException as error:
            self.failures.append(error)
        self._idle.set()

    def go_on(self) -> None:
        self._idle.clear()
        self._go.set()

    def pause(self) -> None:
        self._go.clear()
        assert self._idle.wait(60)
        assert not self.failures

    def close(self) -> None:
        self._over.set()
        self._thread.join(60)
        assert not self._thread.is_alive()


def all_of(run: Run, topic: str, partition: int = 0) -> list[Received]:
    end = run.end(topic, partition)
    return run.read(topic, lambda found: not end or (bool(found) and found[-1].offset >= end - 1), partition)


def newest_stats(run: Run) -> dict[str, ReplayStats]:
    found = [run.expect(record, ReplayStats) for record in all_of(run, "replay-stats")]
    return {stats.split: stats for stats in found}


def owners(run: Run, alive: set[int], since_ms: int) -> dict[str, list[str]] | None:
    """{actor: splits that hold it}, once each of these splits has said what it holds after `since_ms`."""
    stats = newest_stats(run)
    names = [f"replay-{index}" for index in sorted(alive)]
    if any(name not in stats or stats[name].time_ms < since_ms for name in names):
        return None
    held: dict[str, list[str]] = {}
    for name in names:
        for actor in stats[name].actors:
            held.setdefault(actor, []).append(name)
    return held


def until_shared_out(run: Run, alive: set[int]) -> None:
    """Every actor has exactly one owner, and every process has some."""
    everybody = {f"replay-{index}" for index in alive}

    def settled() -> bool:
        held = owners(run, alive, int(time.time() * 1000) - 2000)
        return (
            held is not None
            and set(held) == {str(actor) for actor in range(ACTORS)}
            and all(len(splits) == 1 for splits in held.values())
            and {splits[0] for splits in held.values()} == everybody
        )

    until(settled, f"the actors to be shared out over {sorted(everybody)}")


def members(run: Run) -> dict[str, list[int]]:
    """{static member: its partitions}, as `gorila kafka consumer-groups --members` shows them."""
    words = ["--bootstrap-server", run.servers, "--describe", "--group", f"{run.name}.replay", "--members", "--verbose"]
    command = [sys.executable, "-m", "gorila.cli", "kafka", "consumer-groups", *words]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    found: dict[str, list[int]] = {}
    topic = run.topic("transitions")
    for line in done.stdout.splitlines():
        for name in (word for word in line.split() if word.startswith("replay-") and word[7:].isdecimal()):
            inside = line.partition(f"{topic}(")[2].partition(")")[0] or line.partition(f"{topic}:")[2].split()[0]
            found[name] = sorted(int(p) for p in inside.replace(",", " ").replace(f"{topic}:", " ").split())
    return found


def memory_of_the_log(run: Run, learned: bool = True) -> ReplaySplit:
    """All of it from the first record on: what nobody disturbed would hold."""
    split = ReplaySplit(run.config, "undisturbed", np.random.default_rng(0))
    for partition in range(run.config.actor.count):
        split.open_ring(partition, 0)
        for record in all_of(run, "transitions", partition):
            split.insert(partition, record.offset, record.timestamp_ms, run.expect(record, TransitionBlock))
    for record in all_of(run, "priorities") if learned else ():
        split.learned(run.expect(record, Priorities))
    return split


def handled(run: Run) -> bool:
    return all(run.committed(p) == run.end("transitions", p) for p in range(run.config.actor.count))


def probabilities(split: ReplaySplit) -> dict[tuple[int, int, int], float]:
    """P of every sampleable row by its identity, as a split that holds all actors draws it."""
    memory, found = split.memory, {}
    capacity = memory.rules.capacity_rows
    for ring in memory.active():
        base = ring.index * capacity
        slots = np.flatnonzero(memory.ahead[base : base + capacity])
        numbers = memory.block[base + slots]
        rows = (slots - memory.blocks.start[numbers]) % capacity
        p = row_probabilities(memory, ring, slots, 0.7, 0, None)
        ids = zip(
            memory.blocks.partition[numbers].tolist(),
            memory.blocks.offset[numbers].tolist(),
            rows.tolist(),
            strict=True,
        )
        found.update(zip(ids, p.tolist(), strict=True))
    return found


def draws_at_rest(run: Run) -> list[Batch]:
    """Batches drawn while nothing is inserted and nothing learned: the learner lets them be drawn only now."""
    start = run.end("batches")
    consumer = run.cluster.consumer(f"{run.name}.learner")
    quiet_since, end = time.monotonic(), start
    while time.monotonic() - quiet_since < 5.0 and end - start < ENOUGH_RECORDS:
        consumer.commit({(run.topic("batches"), 0): end}, metadata="gorila", wait=True)
        now = run.end("batches")
        if now != end:
            quiet_since, end = time.monotonic(), now
        threading.Event().wait(0.02)
    consumer.close()
    found = [run.expect(record, Batch) for record in all_of(run, "batches") if record.offset >= start]
    assert len(found) >= ENOUGH_RECORDS / 6, f"{len(found)} records were drawn at rest"
    return found


def check_probabilities(run: Run, batches: list[Batch], splits: int) -> None:
    """Each recorded probability is the one that the state gives, and each split draws its rows in proportion to it."""
    given = probabilities(memory_of_the_log(run))
    assert sum(given.values()) == pytest.approx(1.0)
    counts: dict[str, dict[tuple[int, int, int], int]] = {}
    for batch in batches:
        ids = list(zip(batch.partition.tolist(), batch.offset.tolist(), batch.row.tolist(), strict=True))
        assert batch.population == len(given)
        assert [given[one] for one in ids] == pytest.approx(batch.probability.tolist(), rel=1e-6)
        of_split = counts.setdefault(batch.split, {})
        for one in ids:
            of_split[one] = of_split.get(one, 0) + 1
    assert len(counts) == splits
    for of_split in counts.values():
        actors = {one[0] for one in of_split}
        mine = {one: p for one, p in given.items() if one[0] in actors}
        drawn, mass = sum(of_split.values()), sum(mine.values())
        statistic = sum((of_split.get(one, 0) - drawn * p / mass) ** 2 / (drawn * p / mass) for one, p in mine.items())
        freedom = len(mine) - 1
        # Rows that expect a tenth of a draw make the statistic's variance larger than 2 per degree: sum of 1 / expected on top.
        spread = np.sqrt(2 * freedom + sum(mass / (drawn * p) for p in mine.values()))
        assert abs(statistic - freedom) < 6 * spread


@pytest.fixture
def make_run(broker: Any) -> Callable[..., Run]:
    return lambda *sets: Run(broker.bootstrap_servers, *sets)


def test_from_one_process_to_two_to_four_to_one_no_transition_is_lost_and_every_actor_has_one_owner(
    make_run: Callable[..., Run], tmp_path: Path
) -> None:
    run = make_run(
        f"actor.count={ACTORS}", "replay.max_lag_batches=8", "replay.samples_per_insert=1", "replay.max_error_rows=1000000",
    )  # fmt: skip
    load = Load(run, ACTORS, 0.1)
    try:
        with fleet(run, tmp_path) as processes:
            load.go_on()
            processes.start(0)
            until_shared_out(run, {0})
            processes.start(1)
            until_shared_out(run, {0, 1})
            processes.start(2), processes.start(3)
            until_shared_out(run, {0, 1, 2, 3})
            shown = members(run)
            assert set(shown) == {"replay-0", "replay-1", "replay-2", "replay-3"}
            assert sorted(p for partitions in shown.values() for p in partitions) == list(range(ACTORS))

            load.pause()
            until(lambda: handled(run), "everything to be handled")
            # Two rounds of stats at rest: all four divide the batches by the same figures.
            since_ms = int(time.time() * 1000)
            until(lambda: owners(run, {0, 1, 2, 3}, since_ms + 1000), "all splits to say what they hold")
            check_probabilities(run, draws_at_rest(run), 4)

            load.go_on()
            for index in (1, 2):
                processes.stop(index)
            processes.kill(3)
            until_shared_out(run, {0})
            assert members(run) == {"replay-0": list(range(ACTORS))}
            load.pause()
            until(lambda: handled(run), "everything to be handled")
            assert processes.memory(0) == fingerprint(memory_of_the_log(run)), "the memory is that of the whole log"
            check_probabilities(run, draws_at_rest(run), 1)
    finally:
        load.close()


def test_killed_at_any_moment_under_load_it_comes_back_with_the_memory_nobody_disturbed(
    make_run: Callable[..., Run], tmp_path: Path
) -> None:
    """Learned priorities included: a learner writes them for every batch while the process is killed, again and again."""
    run = make_run("actor.count=2", "replay.max_lag_batches=1000", "replay.samples_per_insert=2")
    load, over = Load(run, 2, 0.03), threading.Event()
    rng = np.random.default_rng(7)

    def learn() -> None:
        consumer, producer, seen = run.cluster.consumer(f"{run.name}.learner"), run.cluster.producer(), 0
        consumer.assign({(run.topic("batches"), 0): 0})
        while not over.is_set():
            for record in consumer.poll_many(100, 0.05):
                batch = run.expect(record, Batch)
                errors = np.full(len(batch.row), 1.0 + seen % 50, np.float32)
                learned = Priorities(
                    "learner-0", 0, record.offset, 1, batch.partition, batch.offset, batch.row, errors, 0.1, 1.0, False, 0.5
                )  # fmt: skip
                producer.send(run.topic("priorities"), run.schemas.encode(learned), partition=0)
                seen += 1
            consumer.commit({(run.topic("batches"), 0): seen}, metadata="gorila")
        producer.flush(10)
        consumer.close()

    learner = threading.Thread(target=learn)
    learner.start()
    try:
        with fleet(run, tmp_path) as processes:
            load.go_on()
            for _ in range(3):
                processes.start(0)
                # Somewhere in its life: before it owns anything, while it fills its rings, at work.
                before = run.end("batches")
                until(lambda seen=before: run.end("batches") > seen + 20, "batches to be drawn")
                threading.Event().wait(float(rng.random()))
                processes.kill(0)
            processes.start(0)
            last = run.end("batches")
            until(lambda: run.end("batches") > last + 20, "batches to be drawn")
            load.pause()
            until(lambda: handled(run), "everything to be handled")
            until(lambda: _rests(run), "the last batch to be drawn and learned")
            over.set()
            learner.join(60)
            wanted = memory_of_the_log(run)
            until(lambda: processes.memory(0) == fingerprint(wanted), "a memory equal to the one of the log")
            assert fingerprint(wanted) != fingerprint(memory_of_the_log(run, learned=False)), "some of it was learned"
    finally:
        over.set()
        learner.join(60)
        load.close()


def _rests(run: Run) -> bool:
    """Every batch there is has been answered, and no more comes."""
    before = run.end("batches"), run.end("priorities")
    threading.Event().wait(1.0)
    after = run.end("batches"), run.end("priorities")
    return before == after and after[0] == after[1]
