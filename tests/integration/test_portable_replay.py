"""The same pipeline on a portable runner, against the real broker: Prism, by the very path a Flink job server takes (EXTERNAL workers of ours)."""

from __future__ import annotations

import logging
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from apache_beam import DoFn
from apache_beam.runners.sdf_utils import RestrictionTrackerView, ThreadsafeRestrictionTracker
from replay_run import Run, until

from gorila.engines import Engine
from gorila.errors import LocalError
from gorila.kafka import Received
from gorila.local.broker_process import free_port, port_is_free
from gorila.messages import ReplayStats
from pipelines import split_registry
from pipelines.elements import Chunk
from pipelines.kafka_io import records_a_poll
from pipelines.main import run_portable_replay
from pipelines.prism import prism, prism_binary
from pipelines.replay_fns import ENDLESS, ReadReplayInputs, TurnTracker
from pipelines.split_registry import Address
from pipelines.split_room import EACH_BUNDLE, EACH_CHECKPOINT, READ_AHEAD_POLLS, SplitRoom

needs_prism = pytest.mark.skipif(prism_binary() is None, reason="Prism is not built here: `make prism` (needs Go)")
JOB_SERVER = Path(__file__).parent.parent / "pipelines" / "beam_job_server.py"
CLI = [sys.executable, "-W", "ignore", "-m", "gorila.cli", "replay"]


@pytest.fixture
def make_run(broker: Any) -> Callable[..., Run]:
    return lambda *sets: Run(broker.bootstrap_servers, *sets)


@contextmanager
def command(output: Path, *words: str) -> Iterator[subprocess.Popen[bytes]]:
    """`gorila replay …` as a process of its own; whatever it started is gone when the block is left."""
    with output.open("wb") as out:
        process = subprocess.Popen([*CLI, *words], stdout=out, stderr=out, stdin=subprocess.DEVNULL)
    children: list[psutil.Process] = []
    try:
        yield process
    except BaseException:
        sys.stderr.write(output.read_text()[-4000:])
        raise
    finally:
        if process.poll() is None:
            children = psutil.Process(process.pid).children(recursive=True)
        process.kill()
        process.wait()
        for child in children:
            if child.is_running():
                child.kill()


def replay_words(run: Run, *more: str) -> list[str]:
    return ["--run", run.name, "--bootstrap-servers", run.servers, *more]


@needs_prism
def test_on_prism_transitions_go_in_batches_come_out_offsets_are_committed_and_sigterm_drains(
    make_run: Callable[..., Run], tmp_path: Path
) -> None:
    run = make_run("replay.max_lag_batches=1000")
    for _ in range(6):
        run.block()
    with command(tmp_path / "out", *replay_words(run, "--runner=prism")) as process:
        batches = run.batches(8)
        assert {len(batch.row) for batch in batches} == {16}
        until(lambda: run.committed() == 6, "the blocks to be committed")
        run.learned(batches[0], 0, 9.0)
        for _ in range(4):
            run.block()
        until(lambda: run.committed() == 10, "the new blocks to be committed, while the job runs")
        family = psutil.Process(process.pid).children(recursive=True)
        assert len(family) >= 2, "Prism and a worker"
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0
    stats = run.newest_stats()
    assert stats.split == "replay-0"
    assert stats.inserts_total == 10 * 16, "everything read went through"
    assert run.end("batches") == stats.batches_total * run.config.record_parts, "everything drawn is in the log"
    assert stats.samples_total + 32 > 8 * stats.inserts_total, "drawn as far as the rate rule lets it"
    assert run.committed() == 10
    until(lambda: not [child for child in family if child.is_running()], "workers and runner to be gone")


@needs_prism
def test_a_job_server_and_a_worker_pool_of_their_own_outlive_the_job_and_serve_the_next(
    make_run: Callable[..., Run], tmp_path: Path
) -> None:
    """As with Flink: the command only submits, the pool stands beside the runner. What the first job committed the second does not read again."""
    run = make_run("replay.max_lag_batches=1000")
    for _ in range(5):
        run.block()
    listen = f"127.0.0.1:{free_port()}"
    with (
        prism(logging.getLogger("gorila.test"), free_port()) as job_server,
        command(tmp_path / "pool", "worker-pool", "--listen", listen) as pool,
    ):
        until(lambda: "pool.listens" in (tmp_path / "pool").read_text(), "the pool to listen")
        there = ["--runner=PortableRunner", "--job-endpoint", job_server, "--worker-pool", listen]
        for turn in (1, 2):
            with command(tmp_path / f"out{turn}", *replay_words(run, *there)) as process:
                until(lambda turn=turn: run.committed() == 5 * turn, "the blocks to be committed")
                until(lambda turn=turn: run.newest_stats().inserts_total == 5 * 16 * turn, "them to be counted once")
                process.send_signal(signal.SIGTERM)
                assert process.wait(30) == 0
            assert pool.poll() is None, "the pool outlives the job"
            until(lambda: not psutil.Process(pool.pid).children(recursive=True), "the job's worker to be gone")
            for _ in range(5):
                run.block()
        pool.send_signal(signal.SIGTERM)
        assert pool.wait(30) == 0


@needs_prism
def test_two_splits_of_one_job_share_the_actors_out(make_run: Callable[..., Run], tmp_path: Path) -> None:
    run = make_run("actor.count=2", "replay.max_lag_batches=1000")
    with command(tmp_path / "out", *replay_words(run, "--runner=prism", "--parallelism", "2")) as process:
        group = f"{run.name}.replay"

        def shared_out() -> bool:
            members = run.cluster.admin().describe_groups([group])[group].members
            return [(m.instance_id, len(m.partitions)) for m in members] == [("replay-0", 1), ("replay-1", 1)]

        until(shared_out, "each split to own an actor")
        for _ in range(5):
            run.block(0), run.block(1)
        until(lambda: {p: run.committed(p) for p in (0, 1)} == {0: 5, 1: 5}, "both actors' blocks to be committed")

        def said() -> dict[str, int]:
            end = run.end("replay-stats")
            records = run.read("replay-stats", lambda found: bool(found) and found[-1].offset >= end - 1)
            return {s.split: s.inserts_total for s in (run.expect(record, ReplayStats) for record in records)}

        until(lambda: said() == {"replay-0": 80, "replay-1": 80}, "each to count its own")

        def both_drawn() -> bool:
            """A split that had published no actor when rows came has earned no share of them: more must come."""
            run.block(0), run.block(1)
            return {int(p) for batch in run.batches(run.end("batches")) for p in batch.partition} == {0, 1}

        until(both_drawn, "batches of both actors")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


@needs_prism
def test_a_worker_that_is_killed_ends_the_command_with_one_line_and_the_next_goes_on(
    make_run: Callable[..., Run], tmp_path: Path
) -> None:
    run = make_run("replay.max_lag_batches=1000")
    for _ in range(5):
        run.block()
    with command(tmp_path / "out", *replay_words(run, "--runner=prism")) as process:
        until(lambda: run.committed() == 5, "the blocks to be committed")
        until(lambda: run.newest_stats().inserts_total == 5 * 16, "the stats to say so")
        (worker,) = [c for c in psutil.Process(process.pid).children() if "pipelines.worker" in c.cmdline()]
        worker.kill()
        assert process.wait(60) == 1
    last = (tmp_path / "out").read_text().splitlines()[-1]
    assert "Beam job" in last and "Traceback" not in last
    run.block()
    with command(tmp_path / "again", *replay_words(run, "--runner=prism")) as process:
        until(lambda: run.committed() == 6, "the new block to be committed")
        until(lambda: run.newest_stats().inserts_total == 6 * 16, "nothing lost, nothing counted twice")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0


def test_without_prism_the_command_says_how_to_get_it(
    make_run: Callable[..., Run], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipelines.prism.BUILT", tmp_path / "none")
    monkeypatch.setenv("PATH", str(tmp_path))
    run = make_run()
    service = run.service()
    with pytest.raises(LocalError, match="`make prism` builds it where Go is installed"):
        run_portable_replay(service, Engine.asked("prism"))
    service.close()


def test_a_job_server_that_is_not_there_is_one_line(make_run: Callable[..., Run], tmp_path: Path) -> None:
    run = make_run()
    nowhere = f"127.0.0.1:{free_port()}"
    done = subprocess.run(
        [*CLI, *replay_words(run, "--runner=portable", "--job-endpoint", nowhere)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 1, done.stderr
    assert f"the Beam job server at {nowhere} does not answer" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr


def test_flinks_command_runs_on_a_job_server_that_knows_its_options(
    make_run: Callable[..., Run], tmp_path: Path
) -> None:
    """Not Flink: Beam's own job server with FnApiRunner behind it. The words, options, workers, graph and commits are those Flink would get."""
    run = make_run("replay.max_lag_batches=1000")
    for _ in range(5):
        run.block()
    port, listen = free_port(), f"127.0.0.1:{free_port()}"
    server = subprocess.Popen([sys.executable, "-W", "ignore", str(JOB_SERVER), str(port), str(tmp_path)])
    try:
        until(lambda: not port_is_free(port), "the job server to listen")
        with command(tmp_path / "pool", "worker-pool", "--listen", listen) as pool:
            until(lambda: "pool.listens" in (tmp_path / "pool").read_text(), "the pool to listen")
            words = ["--runner=flink", "--flink-master", "jobmanager:8081", "--checkpointing-interval-ms=100"]
            words += ["--job-endpoint", f"127.0.0.1:{port}", "--worker-pool", listen]
            with command(tmp_path / "out", *replay_words(run, *words)) as process:
                until(lambda: run.committed() == 5, "the blocks to be committed")
                until(lambda: run.newest_stats().inserts_total == 5 * 16, "them to be counted")
                run.batches(4)
                process.send_signal(signal.SIGTERM)
                assert process.wait(30) == 0
            pool.send_signal(signal.SIGTERM)
            assert pool.wait(30) == 0
    finally:
        server.kill()
        server.wait()
    assert run.committed() == 5
    assert "runner=flink" in (tmp_path / "out").read_text()


def test_with_the_memory_in_another_process_the_source_reads_no_further_ahead_than_its_stats_allow(
    make_run: Callable[..., Run],
) -> None:
    """On Flink the two may be apart. What was read is committed when a checkpoint is complete, and never else."""
    run = make_run("replay.max_lag_batches=1000")
    polls = records_a_poll(run.config)
    bound, blocks = READ_AHEAD_POLLS * polls, (READ_AHEAD_POLLS + 3) * polls
    for _ in range(blocks):
        run.block()
    source = SplitRoom(run.service(), "replay-0", EACH_CHECKPOINT)
    memory = SplitRoom(run.service(), "replay-0", EACH_CHECKPOINT)
    reader = source.open_reader()
    on_their_way: list[Chunk] = []
    stats: list[Received] = []

    def polled() -> bool:
        """One turn of the source; whether transitions came."""
        chunk = reader.poll(0.01, source.may_read(stats))
        stats[:] = chunk.stats
        on_their_way.append(chunk)
        return bool(chunk.transitions)

    until(lambda: polled() and sum(len(c.transitions) for c in on_their_way) > bound, "the bound to be passed")
    assert not any(polled() for _ in range(100)), "as long as the memory has taken nothing"
    assert sum(len(chunk.transitions) for chunk in on_their_way) <= bound + polls

    def taken() -> bool:
        polled()
        for chunk in on_their_way:
            for drawn in memory.handle(chunk):
                memory.writer.write(drawn)
        on_their_way.clear()
        return memory.positions() == {0: blocks}

    until(taken, "the rest to be read, once the memory's stats say it may be")
    assert not source.assigned, "it never had a memory"
    assert run.committed() is None, "no checkpoint was complete"
    at_checkpoint = dict(reader.read)
    run.block()
    until(polled, "a record that no checkpoint covers")
    source.commit_final(at_checkpoint)
    until(lambda: run.committed() == blocks, "the commit of the checkpoint")
    memory.close()
    source.close()
    assert run.committed() == blocks, "nothing more at the end"
    assert run.newest_stats().inserts_total == blocks * 16, "a source without a memory has no stats to publish"


def test_a_worker_that_ends_leaves_flink_the_rest_of_its_split(make_run: Callable[..., Run]) -> None:
    """A source that only stopped would be taken for finished, and the split never be read again."""
    run = make_run()
    for commits, deferred in ((EACH_CHECKPOINT, 1), (EACH_BUNDLE, 0)):
        service = run.service()
        service.stop.set()
        split_registry.adopt(service)
        tracker = ThreadsafeRestrictionTracker(TurnTracker((0, ENDLESS)))
        try:
            source = ReadReplayInputs(Address.of(service, commits))
            assert not list(
                source.process(
                    "replay-0", finalizer=DoFn.BundleFinalizerParam(), tracker=RestrictionTrackerView(tracker)
                )
            )
            residual = tracker.deferred_status()
            assert (residual is not None) == deferred
        finally:
            room = split_registry.leave(service)
            assert room is not None
            room.close()
            service.close()
