"""`gorila replay inspect` on a real broker: the memory a running replay has, without touching its group; and the same from a recording."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.image import imread
from replay_run import Run, until

from gorila.codec import Schemas
from gorila.environment_facts import EnvironmentFacts
from gorila.kafka import Cluster
from gorila.run_record import create_run
from gorila.settings import load_config
from gorila.testing.experience import IMAGE_FACTS, Experience
from pipelines.replay import ReplaySplit


def inspect(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-W", "ignore", "-m", "gorila.cli", "replay", "inspect", *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def highest(replay: ReplaySplit, count: int) -> list[tuple[float, int, int, int]]:
    """(priority, partition, offset, row) of a live memory."""
    memory, found = replay.memory, []
    for ring in memory.active():
        leaves = memory.forest.leaves(ring.index)
        for number in ring.order.numbers.tolist():
            start, rows = int(memory.blocks.start[number]), int(memory.blocks.count[number])
            for row in range(rows):
                priority = float(leaves[(start + row) % memory.rules.capacity_rows])
                found.append((priority, ring.partition, int(memory.blocks.offset[number]), row))
    return sorted(found, key=lambda one: (-one[0], *one[1:]))[:count]


def test_it_shows_what_a_running_replay_holds_and_joins_and_commits_nothing(broker: Any, tmp_path: Path) -> None:
    run = Run(broker.bootstrap_servers, "replay.max_lag_batches=1000", "actor.count=2")
    for _ in range(20):
        run.block(0), run.block(1)
    with run.replay() as room:
        until(lambda: room.positions() == {0: 20, 1: 20}, "the blocks to be handled")
        batches = run.batches(run.end("batches"))[-12:]
        for number, batch in enumerate(batches):
            run.learned(batch, number, 5.0 + number)
        until(lambda: room._priorities_next == len(batches), "the learned priorities to be applied")
        before = run.committed(0), run.cluster.admin().describe_groups([f"{run.name}.replay"])
        found = inspect("--run", run.name, "--top", "9", "--json", "--bootstrap-servers", broker.bootstrap_servers)
        assert found.returncode == 0, found.stderr
        rows = [json.loads(line) for line in found.stdout.splitlines()]
        ids = [(one["priority"], one["partition"], one["offset"], one["row"]) for one in rows]
        assert ids == highest(room.replay, 9)
        assert rows[0]["priority"] > 3.0, "a learned one is on top"
        assert all(one["step"] == one["offset"] * 16 + one["row"] for one in rows)
        assert {one["actor"] for one in rows} <= {"actor-0", "actor-1"}
        assert (run.committed(0), run.cluster.admin().describe_groups([f"{run.name}.replay"])) == before
    recorded = inspect(
        "--from", f"kafka:{run.name}", "--top", "9", "--json", "--bootstrap-servers", broker.bootstrap_servers
    )
    assert recorded.returncode == 0, recorded.stderr
    assert recorded.stdout == found.stdout, "the recording of a run is that run"
    vectors = inspect(
        "--run", run.name, "--png", str(tmp_path / "x.png"), "--bootstrap-servers", broker.bootstrap_servers
    )
    assert (vectors.returncode, vectors.stdout) == (2, "")
    assert "not images" in vectors.stderr
    assert not (tmp_path / "x.png").exists()


def test_image_states_go_to_a_contact_sheet_and_the_lines_to_the_pipe(
    broker: Any, run_name: str, tmp_path: Path
) -> None:
    cluster, schemas = Cluster(broker.bootstrap_servers), Schemas()
    config = load_config("pong", ["replay.capacity_rows=256", "replay.min_size_rows=16"], {})
    facts = EnvironmentFacts(
        IMAGE_FACTS.id, IMAGE_FACTS.observation_shape, IMAGE_FACTS.observation_dtype, IMAGE_FACTS.actions, 4, 100
    )
    create_run(cluster, run_name, config, facts, np.zeros(8, np.float32))
    producer = cluster.producer()
    for block in Experience(IMAGE_FACTS).blocks(12):
        producer.send(f"{run_name}.transitions", schemas.encode(block), partition=0)
    assert producer.flush(10) == 0
    sheet = tmp_path / "top.png"
    found = inspect(
        "--run", run_name, "--top", "3", "--png", str(sheet), "--bootstrap-servers", broker.bootstrap_servers
    )
    assert found.returncode == 0, found.stderr
    lines = found.stdout.splitlines()
    assert lines[0].startswith(f"run {run_name}: ")
    assert len(lines) == 1 + 1 + 3 + 1
    assert imread(sheet).ndim == 3


def test_a_run_without_a_sampleable_row_or_that_is_not_there_is_said_plainly(broker: Any) -> None:
    run = Run(broker.bootstrap_servers)
    empty = inspect("--run", run.name, "--bootstrap-servers", broker.bootstrap_servers)
    assert empty.returncode == 0, empty.stderr
    assert "0 sampleable rows of 0 actors" in empty.stdout
    missing = inspect("--run", "nobody", "--bootstrap-servers", broker.bootstrap_servers)
    assert missing.returncode == 1
    assert "nobody" in missing.stderr
    assert "Traceback" not in missing.stderr
    both = inspect("--run", run.name, "--from", "kafka:x", "--bootstrap-servers", broker.bootstrap_servers)
    assert both.returncode == 2
