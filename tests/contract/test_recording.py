"""What a recording promises to who reads it, and what it says of files and sources that are wrong."""

from __future__ import annotations

import datetime
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from consumers.archive_folder import ArchiveFolder
from consumers.archiver import Archiver
from gorila.cli import main
from gorila.codec import Schemas
from gorila.config import ArchiveSection
from gorila.environment_facts import EnvironmentFacts
from gorila.episodes_of import EpisodeJoiner
from gorila.errors import GorilaError, RunError, UsageError
from gorila.event_log import EventLogger
from gorila.messages import Episode, Run, TransitionBlock
from gorila.metrics import Metrics
from gorila.minari_export import export_minari
from gorila.processor import Incoming
from gorila.recording import ParquetRecording, Range, Recording, parse_source
from gorila.settings import canonical_json, load_config
from gorila.testing.experience import IMAGE_FACTS, VECTOR_FACTS, Experience

SCHEMAS = Schemas()


def archive(
    folder: Path, facts: EnvironmentFacts = VECTOR_FACTS, blocks: int = 60, file_blocks: int = 20
) -> Experience:
    """An archive of one run with two actors; files of `file_blocks` blocks. The experience of actor 0."""
    config = canonical_json(load_config("cartpole", ["actor.count=2"], {}))
    run = Run("demo", config, facts.to_json(), SCHEMAS.texts(), "0.1", 7)
    opened = ArchiveFolder(folder, run)
    starts = {("transitions", 0): 0, ("transitions", 1): 0, ("episodes", 0): 0}
    archiver = Archiver(opened, starts, ArchiveSection(), Metrics("archiver"), EventLogger("test"))
    archiver.assigned(starts)
    first = Experience(facts, 0)
    for partition, experience in enumerate([first, Experience(facts, 1, actor_id="actor-1")]):
        for offset, block in enumerate(experience.blocks(blocks)):
            archiver.process(Incoming("transitions", partition, offset, 1000 + offset, None, block))
            if (offset + 1) % file_blocks == 0:
                archiver.finish(60.0)
    archiver.process(Incoming("episodes", 0, 0, 5, None, Episode("actor", "actor-0", 0, 1.0, 2, True, 0.1, 1, 2, 3)))
    archiver.finish(60.0)
    opened.close()
    return first


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("recording") / "archive"
    archive(folder)
    return folder


@pytest.fixture
def copy(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "copy"))


def files(folder: Path, partition: int = 0) -> list[Path]:
    return sorted(folder.glob(f"transitions/{partition}/*.parquet"), key=lambda path: int(path.stem.split("-")[2]))


def test_a_recording_says_whose_it_is_and_what_it_has(made: Path) -> None:
    recording: Recording = ParquetRecording(made)
    assert (recording.run.name, recording.facts, recording.config.actor.count) == ("demo", VECTOR_FACTS, 2)
    assert {p: (s.first, s.end) for p, s in recording.spans("transitions").items()} == {0: (0, 60), 1: (0, 60)}
    assert recording.spans("priorities")[0].empty
    assert recording.missing == ()
    everything = [(r.partition, r.offset) for r in recording.records("transitions")]
    assert everything == [(p, offset) for p in (0, 1) for offset in range(60)]
    assert [r.offset for r in recording.records("transitions", 1)] == list(range(60))
    assert list(recording.records("priorities")) == []
    assert everything == [(r.partition, r.offset) for r in recording.records("transitions")], "read twice, the same"


def test_another_environment_is_refused_naming_what_differs(made: Path) -> None:
    with pytest.raises(RunError, match="environment actions is 6, the recording was made with 2"):
        ParquetRecording(made).facts.refuse_mismatch(
            EnvironmentFacts("CartPole-v1", (4,), "float32", 6, 1, 500, VECTOR_FACTS.settings)
        )


def cut(folder: Path) -> None:
    path = files(folder)[1]
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])


def garble(folder: Path) -> None:
    path = files(folder)[1]
    data = bytearray(path.read_bytes())
    data[300] ^= 1
    path.write_bytes(data)


def change(folder: Path, edit: Callable[[pa.Table], pa.Table], **metadata: str) -> None:
    path = files(folder)[1]
    with pq.ParquetFile(path) as file:
        table = file.read()
    marks = {**table.schema.metadata, **{f"gorila.{k}".encode(): v.encode() for k, v in metadata.items()}}
    pq.write_table(edit(table).replace_schema_metadata(marks), path)


def retyped(table: pa.Table) -> pa.Table:
    at = table.schema.get_field_index("reward")
    return table.set_column(at, "reward", table["reward"].cast(pa.float64()))


def negative(table: pa.Table) -> pa.Table:
    at = table.schema.get_field_index("lane")
    return table.set_column(at, "lane", pa.array([-1] * len(table), pa.int32()))


def inner(folder: Path) -> None:
    shutil.copy(files(folder)[1], files(folder)[1].with_name("transitions-0-25-30.parquet"))


WRONG: list[tuple[Callable[[Path], Any], type[GorilaError], str]] = [
    (cut, RunError, "not a complete Parquet file"),
    (garble, RunError, "damaged: "),
    (lambda f: files(f)[1].write_bytes(b""), RunError, "not a complete Parquet file"),
    (lambda f: files(f)[1].unlink(), RunError, "offsets 20 to 39 are missing before it"),
    (lambda f: change(f, lambda t: t.drop_columns(["reward"])), RunError, "column 'reward' is missing"),
    (lambda f: change(f, retyped), RunError, "column 'reward' is double, not float"),
    (
        lambda f: change(f, lambda t: t, format="2", product_version="9.9"),
        RunError,
        r"newer gorila \(archive format 2, 9.9\)",
    ),
    (lambda f: change(f, lambda t: t, run="other"), RunError, "belongs to run other"),
    (lambda f: change(f, lambda t: t, last_offset="44"), RunError, "its footer says transitions/0/transitions-0-20-44"),
    (lambda f: change(f, lambda t: t.slice(0, len(t) - 40)), RunError, "rows|records, its footer says 20|count"),
    (lambda f: change(f, negative), RunError, "offset 20: lane and first_step must not be negative"),
    (inner, RunError, "its footer says"),
    (lambda f: pq.write_table(pa.table({"a": [1]}), files(f)[1]), RunError, "not a file of a gorila archive"),
    (lambda f: (f / "run.parquet").unlink(), UsageError, "no run.parquet in it"),
    (lambda f: (f / "run.parquet").write_bytes(b"x"), RunError, "not a complete Parquet file"),
    (lambda f: shutil.rmtree(f / "transitions"), UsageError, "no transitions were recorded in it"),
    (shutil.rmtree, UsageError, "there is no such folder"),
]


@pytest.mark.parametrize(("spoil", "kind", "words"), WRONG, ids=[str(n) for n in range(len(WRONG))])
def test_what_is_wrong_with_an_archive_is_one_typed_line_naming_it_and_nothing_is_written(
    copy: Path, tmp_path: Path, spoil: Callable[[Path], Any], kind: type[GorilaError], words: str
) -> None:
    spoil(copy)
    with pytest.raises(kind, match=words) as caught:
        export_minari(ParquetRecording(copy), tmp_path / "datasets")
    assert "\n" not in str(caught.value)
    assert str(copy) in str(caught.value)
    assert not list((tmp_path / "datasets").glob("*")) and not list((tmp_path / "datasets").glob(".*"))


def test_files_that_overlap_are_refused(copy: Path) -> None:
    first = files(copy)[0]
    with pq.ParquetFile(first) as file:
        table = file.read()
    marks = {**table.schema.metadata, b"gorila.first_offset": b"10", b"gorila.last_offset": b"19"}
    pq.write_table(table.replace_schema_metadata(marks), first.with_name("transitions-0-10-19.parquet"))
    with pytest.raises(RunError, match=r"overlaps transitions-0-0-19.parquet: both hold offset 10"):
        ParquetRecording(copy)


def test_a_file_that_is_still_being_written_is_not_looked_at(copy: Path) -> None:
    (files(copy)[0].parent / ".transitions-0-60-80.parquet.writing").write_bytes(b"half")
    assert ParquetRecording(copy).spans("transitions")[0].end == 60


def test_a_configuration_of_a_later_version_is_said_to_be_one(copy: Path) -> None:
    table = pq.read_table(copy / "run.parquet")
    config = json.loads(table.schema.metadata[b"gorila.config"])
    config["learner"]["from_the_future"] = 1
    marks = {**table.schema.metadata, b"gorila.config": json.dumps(config).encode()}
    pq.write_table(table.replace_schema_metadata(marks), copy / "run.parquet")
    with pytest.raises(
        RunError, match=r"run demo: its configuration \(of gorila 0.1\) is not understood.*from_the_future"
    ):
        ParquetRecording(copy)


@pytest.mark.parametrize(
    ("text", "range_"),
    [
        ("kafka:demo", Range()),
        ("kafka:demo@10..20", Range(10, 20)),
        ("kafka:demo@10..", Range(10, None)),
        ("kafka:demo@..20", Range(None, 20)),
        (
            "kafka:demo@2026-01-31T12:00:00..2026-02-01",
            Range(
                datetime.datetime(2026, 1, 31, 12, tzinfo=datetime.UTC),
                datetime.datetime(2026, 2, 1, tzinfo=datetime.UTC),
            ),
        ),
    ],
)
def test_a_source_names_a_run_and_its_range(text: str, range_: Range) -> None:
    source = parse_source(text)
    assert (source.kind, source.place, source.range) == ("kafka", "demo", range_)


def test_a_parquet_source_is_a_folder_whatever_its_name() -> None:
    assert (parse_source("parquet:/a@b:c").kind, parse_source("parquet:/a@b:c").place) == ("parquet", "/a@b:c")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("demo", "is not allowed: kafka:RUN"),
        ("kafka:", "is not allowed: kafka:RUN"),
        ("s3:demo", "is not allowed: kafka:RUN"),
        ("kafka:demo@", "is not allowed: kafka:RUN"),
        ("kafka:demo@5", "is not allowed: kafka:RUN"),
        ("kafka:demo@..", "is not allowed: kafka:RUN"),
        ("kafka:demo@20..10", "is an empty range"),
        ("kafka:demo@20..20", "is an empty range"),
        ("kafka:demo@soon..later", "'soon' is neither an offset nor a time"),
        ("kafka:demo@10..2026-01-01", "both ends are offsets, or both are times"),
    ],
)
def test_a_source_that_is_not_one_is_refused_in_one_line(text: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        parse_source(text)


# ---- episodes, Minari


def test_episodes_are_joined_across_blocks_and_lanes_and_what_is_not_whole_is_dropped() -> None:
    experience = Experience(VECTOR_FACTS, 3, lanes=3)
    blocks = list(experience.blocks(60))
    joiner = EpisodeJoiner(VECTOR_FACTS)
    found = [episode for block in blocks for episode in joiner.take(block)]
    joiner.end()
    assert len(found) == len(experience.whole) > 20
    assert joiner.dropped == 3
    for episode, wrote in zip(found, experience.whole, strict=True):
        assert np.array_equal(episode.observations, wrote.observations)
        assert (episode.action.tolist(), episode.reward.tolist()) == (wrote.action, wrote.reward)
        assert episode.terminated.tolist() == [False] * (len(wrote.action) - 1) + [wrote.terminated]
        assert episode.truncated.tolist() == [False] * (len(wrote.action) - 1) + [not wrote.terminated]
    late = EpisodeJoiner(VECTOR_FACTS)
    holed = [e for n, block in enumerate(blocks) if n not in (0, 30) for e in late.take(block)]
    assert len(holed) < len(found)
    assert {e.observations.tobytes() for e in holed} < {e.observations.tobytes() for e in found}, (
        "nothing is patched together"
    )


def test_a_restarted_actor_does_not_go_on_with_the_episode_its_death_cut() -> None:
    blocks = list(Experience(VECTOR_FACTS, 3, lanes=1).blocks(6, rows=2))
    joiner = EpisodeJoiner(VECTOR_FACTS)
    list(joiner.take(blocks[0]))
    second: TransitionBlock = blocks[1]
    second.actor_epoch += 1
    before = joiner.dropped
    list(joiner.take(second))
    assert joiner.dropped > before


@pytest.mark.parametrize("facts", [VECTOR_FACTS, IMAGE_FACTS], ids=["vectors", "images"])
def test_minari_loads_what_was_exported(
    facts: EnvironmentFacts, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    minari = pytest.importorskip("minari", reason="Minari is not installed: pip install 'gorila-stream[export]'")
    wrote = archive(tmp_path / "archive", facts)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as ended:
        main(["export", "minari", "sets", "--from", f"parquet:{tmp_path / 'archive'}"])
    assert ended.value.code == 0
    monkeypatch.setenv("MINARI_DATASETS_PATH", str(tmp_path / "sets"))
    dataset = minari.load_dataset("demo-v0")
    episodes = list(dataset.iterate_episodes())
    assert dataset.total_episodes == len(episodes) > len(wrote.whole)
    assert dataset.total_steps == sum(len(episode) for episode in episodes)
    assert dataset.action_space.n == facts.actions
    assert dataset.observation_space.shape == facts.observation_shape
    for episode, one in zip(episodes, wrote.whole, strict=False):  # partition 0 comes first
        assert episode.observations.shape == (len(one.action) + 1, *facts.observation_shape)
        assert episode.observations.dtype == facts.observation_dtype
        assert np.array_equal(episode.observations, one.observations)
        assert (episode.actions.tolist(), episode.rewards.tolist()) == (one.action, one.reward)
        assert (bool(episode.terminations[-1]), bool(episode.truncations[-1])) == (one.terminated, not one.terminated)
        assert not episode.terminations[:-1].any() and not episode.truncations[:-1].any()
    assert os.listdir(tmp_path / "sets") == ["demo-v0"]
    if facts is VECTOR_FACTS:
        assert dataset.recover_environment().spec.id == "CartPole-v1"


def test_an_export_that_cannot_be_says_so_in_one_line_and_leaves_nothing(
    made: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("minari", reason="Minari is not installed: pip install 'gorila-stream[export]'")
    archive(tmp_path / "short", blocks=1, file_blocks=1)
    target = tmp_path / "sets"

    def refused(*arguments: str) -> str:
        with pytest.raises(SystemExit) as ended:
            main(["export", "minari", str(target), *arguments])
        assert ended.value.code == 2
        return capsys.readouterr().err.strip()

    assert "no whole episode" in refused("--from", f"parquet:{tmp_path / 'short'}")
    assert "--id 'a b' is not allowed" in refused("--from", f"parquet:{made}", "--id", "a b")
    assert not list(target.glob("*")) and not list(target.glob(".*"))
    (target / "demo-v0").mkdir(parents=True)
    assert "exists: choose another --id" in refused("--from", f"parquet:{made}")
