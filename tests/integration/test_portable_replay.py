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
from replay_run import Run, until

from gorila.engines import Engine
from gorila.errors import LocalError
from gorila.local.broker_process import free_port
from pipelines.main import run_portable_replay
from pipelines.prism import prism, prism_binary

needs_prism = pytest.mark.skipif(prism_binary() is None, reason="Prism is not built here: `make prism` (needs Go)")
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
