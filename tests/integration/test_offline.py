"""Recorded experience replayed offline, on a real broker: the same bytes twice, restarts, refusals, and a run that learns without actors."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from gorila.codec import Schemas
from gorila.environment_facts import EnvironmentFacts
from gorila.environments import describe
from gorila.kafka import Cluster
from gorila.local.broker import BrokerAddress
from gorila.messages import Priorities, ReplayStats
from gorila.network import initial_weights
from gorila.run_record import create_run, list_runs, read_all
from gorila.settings import load_config
from gorila.testing.experience import Experience
from tests.integration.training import Training

pytestmark = pytest.mark.timeout(900)  # a busy machine; each wait has its own deadline

SETS = ["actor.count=2", "learner.batch_size=64", "replay.record_rows=32", "replay.max_lag_batches=10000"]
BLOCKS = 60


class Source:
    """A recorded CartPole run of two actors, and `gorila` beside it."""

    def __init__(self, servers: str, name: str, folder: Path) -> None:
        self.servers, self.name, self.folder = servers, name, folder
        self.cluster, self.schemas = Cluster(servers, client_id="test"), Schemas()
        self.config = load_config("cartpole", SETS, {})
        self.facts: EnvironmentFacts = describe(self.config)
        create_run(self.cluster, name, self.config, self.facts, initial_weights(self.config, self.facts))
        producer = self.cluster.producer()
        for partition in range(2):
            actor = Experience(self.facts, partition, actor_id=f"actor-{partition}")
            for block in actor.blocks(BLOCKS):
                producer.send(f"{name}.transitions", self.schemas.encode(block), partition=partition)
        rows = np.arange(4, dtype=np.int32)
        for offset in range(BLOCKS):
            errors = Priorities(
                "learner-0",
                0,
                offset,
                1,
                rows % 2,
                np.full(4, offset, np.int64),
                rows,
                rows + np.float32(9),
                0.5,
                1.0,
                False,
                0.1,
            )
            producer.send(f"{name}.priorities", self.schemas.encode(errors), partition=0)
        assert producer.flush(30) == 0
        producer.close()

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "gorila.cli", *words, "--bootstrap-servers", self.servers]

    def gorila(self, *words: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            self.command(*words), cwd=self.folder, capture_output=True, text=True, check=False, timeout=600
        )

    def replay(self, run: str, *words: str, source: str = "", updates: int = 40) -> subprocess.CompletedProcess[str]:
        return self.gorila(
            *("replay", "--run", run, "--from", source or f"kafka:{self.name}", "--updates", str(updates)), *words
        )

    def batches(self, run: str) -> list[bytes | None]:
        return [record.value for record in read_all(self.cluster, f"{run}.batches")]


@pytest.fixture(scope="module")
def source(broker: BrokerAddress, tmp_path_factory: pytest.TempPathFactory) -> Source:
    return Source(broker.bootstrap_servers, "recorded", tmp_path_factory.mktemp("offline"))


@pytest.fixture(scope="module")
def replayed(source: Source) -> list[bytes | None]:
    """The batches of one offline run."""
    done = source.replay("offline-1")
    assert done.returncode == 0, done.stderr
    return source.batches("offline-1")


def test_two_offline_runs_of_one_seed_have_byte_identical_batches(source: Source, replayed: list[bytes | None]) -> None:
    assert source.replay("offline-2").returncode == 0
    assert len(replayed) == 80, "40 learner batches of 64 rows are two records each"
    assert source.batches("offline-2") == replayed


def test_priorities_are_an_explicit_choice_that_changes_what_is_drawn(
    source: Source, replayed: list[bytes | None]
) -> None:
    assert source.replay("offline-actors", "--actor-priorities", updates=5).returncode == 0
    actors = source.batches("offline-actors")
    assert len(actors) == 10
    assert actors != replayed[:10]


def test_a_replay_killed_in_between_goes_on_with_the_same_batches_and_repeats_none(
    source: Source, replayed: list[bytes | None]
) -> None:
    assert source.replay("offline-half", updates=13).returncode == 0
    assert source.batches("offline-half") == replayed[:26]
    again = source.replay("offline-half")
    assert again.returncode == 0, again.stderr
    assert source.batches("offline-half") == replayed


def test_totals_and_progress_are_in_replay_stats(source: Source, replayed: list[bytes | None]) -> None:
    newest = source.schemas.expect(read_all(source.cluster, "offline-1.replay-stats")[-1].value, ReplayStats)
    assert (newest.batches_total, newest.samples_total, newest.inserts_total) == (40, 40 * 64, 0)
    assert newest.waiting_for.endswith("offline: 40 of 40 batches")


def test_a_run_with_other_batches_is_refused_and_left_as_it_is(source: Source, replayed: list[bytes | None]) -> None:
    refused = source.replay("offline-1", "--actor-priorities")
    assert refused.returncode == 1
    assert "has other batches than" in last_line(refused)
    assert source.batches("offline-1") == replayed
    assert "transitions of its own" in last_line(source.replay(source.name))


def test_a_source_that_starts_late_gets_a_warning_that_names_the_remedy(source: Source) -> None:
    late = source.replay("offline-late", source=f"kafka:{source.name}@20..", updates=2)
    assert late.returncode == 0, late.stderr
    assert "starts late" in late.stderr
    assert "learner.conservative_weight=0.5 is recommended" in late.stderr
    assert len(source.batches("offline-late")) == 4


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--from", "kafka:nowhere", "--updates", "5"], "run 'nowhere' does not exist"),
        (["--from", "parquet:nothing", "--updates", "5"], "nothing"),
        (["--from", "file:x", "--updates", "5"], "source 'file:x' is not allowed"),
        (["--from", "kafka:recorded@7..7", "--updates", "5"], "empty range"),
        (["--from", "kafka:recorded@900..", "--updates", "5"], "holds no transitions"),
        (["--from", "kafka:recorded"], "--updates 0 is not allowed"),
        (["--updates", "5"], "go with --from"),
        (["--from", "kafka:recorded", "--updates", "5", "--reprioritise", "w"], "there is no such file"),
        (
            ["--from", "kafka:recorded", "--updates", "5", "--set", "env.max_episode_steps=100"],
            "environment max_episode_steps is 100, the recording was made with 500",
        ),
        (["--from", "kafka:recorded", "--updates", "5", "--set", "env.reward_transform=sign"], "env.reward_transform"),
    ],
)
def test_bad_input_is_one_clear_line_and_nothing_is_made(source: Source, words: list[str], said: str) -> None:
    refused = source.gorila("replay", "--run", "never", *words)
    assert refused.returncode in (1, 2), refused.stderr
    assert said in last_line(refused)
    assert len(refused.stderr.strip().splitlines()) == 1
    assert "never" not in list_runs(source.cluster)


def last_line(process: subprocess.CompletedProcess[str]) -> str:
    return (process.stderr.strip().splitlines() or [""])[-1]


def test_training_on_a_recording_has_no_actor_and_ends_after_its_updates(source: Source) -> None:
    folder = source.folder / "training"
    folder.mkdir()
    words = ["--offline", f"kafka:{source.name}", "--updates", "60", "--set", "evaluator.min_versions=1"]
    training = Training(source.servers, folder, "cartpole", *words)
    try:
        assert training.wait() == 0, training.errors + training.logs()
        summary = training.summary()
        assert (summary["env_steps"], summary["samples_per_insert"]) == (0, None)
        assert summary["ended_because"] in ("60 updates done", "all 60 batches learned")
        assert 0 < summary["updates"] <= 60
        assert summary["train_wall_s"] > 0
        roles = {path.name.rsplit("-", 1)[0] for path in (training.run_dir / "logs").glob("*.log")}
        assert roles - {"train"} == {"parameter-server", "learner", "replay", "evaluator", "monitor"}
    finally:
        training.close()


def test_training_refuses_a_recording_of_another_environment_and_leaves_no_folder(source: Source) -> None:
    before = list_runs(source.cluster)
    refused = source.gorila(
        *("train", "cartpole", "--offline", f"kafka:{source.name}", "--set", "env.max_episode_steps=77")
    )
    assert refused.returncode == 1
    assert last_line(refused) == ("gorila: environment max_episode_steps is 77, the recording was made with 500")
    assert list_runs(source.cluster) == before
    assert not list((source.folder / "runs").glob("*")) if (source.folder / "runs").exists() else True
