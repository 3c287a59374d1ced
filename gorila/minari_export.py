"""A recording as a Minari dataset (arrow format, frames lossless). The only door to Minari, which the `export` extra installs."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from gorila.episodes_of import EpisodeJoiner, WholeEpisode
from gorila.errors import UsageError
from gorila.recording import Recording

_ID = re.compile(r"[-_\w]+-v\d+")


@dataclass(frozen=True, slots=True)
class Exported:
    """What was written: `folder` is the dataset's, to be found by MINARI_DATASETS_PATH=folder.parent."""

    dataset_id: str
    folder: Path
    episodes: int
    steps: int
    dropped: int


class _Counting:
    """Whole episodes, counted as they pass: only one is in memory."""

    def __init__(self, recording: Recording) -> None:
        self._recording = recording
        self.episodes = self.steps = self.dropped = 0

    def __iter__(self) -> Iterator[WholeEpisode]:
        for partition in self._recording.spans("transitions"):
            joiner = EpisodeJoiner(self._recording.facts)
            for record in self._recording.records("transitions", partition):
                for episode in joiner.take(record.message):  # type: ignore[arg-type]
                    self.episodes += 1
                    self.steps += len(episode.action)
                    yield episode
            joiner.end()
            self.dropped += joiner.dropped


def default_id(run: str) -> str:
    """A dataset name made of a run's."""
    return re.sub(r"[^-_\w]+", "-", run) + "-v0"


def export_minari(recording: Recording, folder: Path, dataset_id: str = "") -> Exported:
    """Write FOLDER/ID/data, whole or not at all.

    Observations are single ones, (T + 1, ...): the run's stack is made by who reads them. Rewards are raw.

    Raises:
        UsageError: the id is not allowed or taken, or the recording has no whole episode.
        ModuleNotFoundError: Minari is not installed (the CLI names the extra).
    """
    from minari import __version__ as minari_version
    from minari.data_collector.episode_buffer import EpisodeBuffer
    from minari.dataset.minari_storage import MinariStorage

    from gorila.environments import recorded_spaces, recorded_spec

    name = dataset_id or default_id(recording.run.name)
    if not _ID.fullmatch(name):
        raise UsageError(f"--id {name!r} is not allowed: letters, digits, '_' and '-', ending in a version such as -v0")
    folder = folder.resolve()  # Minari's arrow writer doubles a relative one
    target, temporary = folder / name, folder / f".{name}.writing"
    if target.exists():
        raise UsageError(f"{target} exists: choose another --id, or delete it")
    folder.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(temporary, ignore_errors=True)
    data = temporary / "data"
    data.mkdir(parents=True)
    observation_space, action_space = recorded_spaces(recording.facts)
    counting = _Counting(recording)

    def buffers() -> Iterator[Any]:
        for episode in counting:
            yield EpisodeBuffer(
                observations=episode.observations,
                actions=episode.action.astype(np.int64),
                rewards=episode.reward,
                terminations=episode.terminated,
                truncations=episode.truncated,
            )

    try:
        storage = MinariStorage.new(
            data,
            observation_space=observation_space,
            action_space=action_space,
            env_spec=recorded_spec(recording.facts),
            data_format="arrow",
            jpeg_encoding=False,
        )
        storage.update_metadata(_about(recording, name, minari_version))
        # Minari walks over every file to measure the data set, once an episode: quadratic. Measured once, below.
        measure, storage.get_size = storage.get_size, lambda: 0.0
        storage.update_episodes(buffers())
        if counting.episodes == 0:
            raise UsageError(f"the recording of run {recording.run.name} has no whole episode: nothing was written")
        storage.update_metadata({"dataset_size": float(measure())})
        os.replace(temporary, target)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)
    return Exported(name, target, counting.episodes, counting.steps, counting.dropped)


def _about(recording: Recording, name: str, minari_version: str) -> dict[str, Any]:
    facts = recording.facts
    return {
        "dataset_id": name,
        "minari_version": minari_version,
        "algorithm_name": "Gorila DQN",
        "description": f"Whole episodes of run {recording.run.name} on {facts.id}; observations are single ones, the run stacked {facts.stack};"
        f" rewards are raw. Environment: {facts.to_json()}",
    }
