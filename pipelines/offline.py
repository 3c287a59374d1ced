"""Replay of a recording: a bounded Beam pipeline around the replay memory of the live one.

    Source -> Load -> Draw -> WriteBatches

Load fills the rings, Draw forms `updates` learner batches, WriteBatches hands them to the producer: fused into one stage, so a batch is with the
producer before the next is drawn, and Draw waits while a learner is behind. With `--reprioritise`, States → RunInference → KeepValues come before Load
(its side input): a policy file's Q values take the place of the actors', and priorities are made of them as online. This module alone of the pipeline's
reads pixels and imports torch, and only then. Batch k goes to partition k mod learners, whatever the learners do: so
the bytes of every partition follow from recording, configuration and seed, and a restart passes over what the log has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import apache_beam as beam
import numpy as np
from apache_beam.ml.inference.base import ModelHandler, RunInference
from apache_beam.options.pipeline_options import PipelineOptions
from numpy.typing import NDArray

from gorila.environment_facts import EnvironmentFacts
from gorila.errors import UsageError
from gorila.messages import TransitionBlock
from gorila.observations import RecentFrames, inflate
from gorila.offline import OfflineReplay
from gorila.service import Service
from pipelines.elements import Drawn
from pipelines.offline_room import OfflineRoom
from pipelines.offline_split import Values
from pipelines.runner import local_runner
from pipelines.warm_up import warm_up

_rooms: dict[str, OfflineRoom] = {}


@dataclass(frozen=True, slots=True)
class BlockStates:
    """A block's states (rows, *state_shape) and actions (rows,); where it is."""

    partition: int
    offset: int
    states: NDArray[Any]
    action: NDArray[np.int32]


class Stacker:
    """States of blocks that come in the order of their partition. A lane whose block does not go on where it was begins anew."""

    def __init__(self, facts: EnvironmentFacts) -> None:
        self._facts = facts
        self._lanes: dict[tuple[int, int], tuple[tuple[int, int], RecentFrames]] = {}

    def states(self, partition: int, block: TransitionBlock) -> NDArray[Any]:
        """(rows, *state_shape). Raises BadRecord when the block does not inflate."""
        facts, key = self._facts, (partition, block.lane)
        frames = inflate(block.observations)
        goes_on, recent = self._lanes.get(key, ((-1, -1), None))
        first = block.is_first.copy()
        if recent is None or goes_on != (block.actor_epoch, block.first_step):
            recent = RecentFrames(1, facts.observation_shape, np.dtype(facts.observation_dtype), facts.stack)
            first[0] = True
        self._lanes[key] = ((block.actor_epoch, block.first_step + len(frames)), recent)
        return np.stack([recent.push(frames[row, None], first[row, None])[0].copy() for row in range(len(frames))])


class States(beam.DoFn):
    """The recording's blocks as states."""

    def process(self, run: str) -> Iterator[BlockStates]:
        """One element a block."""
        room = _rooms[run]
        with room.remembering():
            stacker = Stacker(room.service.facts)
            for record in room.recording.records("transitions"):
                block = record.message
                if room.service.stop.is_set():
                    return
                if (
                    isinstance(block, TransitionBlock)
                    and block.observations.shape == room.service.facts.observation_shape
                ):
                    states = stacker.states(record.partition, block)
                    yield BlockStates(record.partition, record.offset, states, block.action)


class QValues(ModelHandler[BlockStates, tuple[int, int, Values], Any]):
    """A policy file's Q values. One block at a time whatever the size of Beam's batches: sums of other shapes differ in their last bits."""

    def __init__(self, path: str, threads: int) -> None:
        super().__init__()
        self._path, self._threads = path, threads

    def load_model(self) -> Any:
        """The network."""
        import torch

        from gorila.policy import Policy

        torch.set_num_threads(self._threads)
        return Policy.load(self._path).network

    def run_inference(
        self, batch: Sequence[BlockStates], model: Any, inference_args: dict[str, Any] | None = None
    ) -> Iterator[tuple[int, int, Values]]:
        """(partition, offset, (q_taken, q_max)) of each block; q_taken is 0 where no action was taken, as an actor writes it."""
        import torch

        for block in batch:
            with torch.inference_mode():
                q = model(torch.from_numpy(block.states)).numpy()
            taken = np.where(block.action >= 0, q[np.arange(len(q)), block.action], 0.0).astype(np.float32)
            yield block.partition, block.offset, (taken, q.max(axis=1))


class KeepValues(beam.DoFn):
    """Into the room; nothing comes out, but Load waits for it."""

    def __init__(self, run: str) -> None:
        self._run = run

    def process(self, element: tuple[int, int, Values]) -> Iterator[bytes]:
        """One block's."""
        partition, offset, values = element
        _rooms[self._run].values[partition, offset] = values
        yield from ()


def refuse_policy(path: str, service: Service) -> None:
    """Raises RunError, UsageError: no policy file, or one of another environment."""
    from gorila.policy import Policy

    service.facts.refuse_mismatch(Policy.load(path).facts)


class Load(beam.DoFn):
    """The recording into the room's memory."""

    def process(self, run: str, _values: Any = None) -> Iterator[str]:
        """The run's name, once everything is loaded."""
        room = _rooms[run]
        with room.remembering():
            room.load()
        if not room.service.stop.is_set():
            yield run


class Draw(beam.DoFn):
    """The batches."""

    def process(self, run: str) -> Iterator[tuple[str, Drawn]]:
        """One element a learner batch."""
        room = _rooms[run]
        with room.remembering():
            for drawn in room.drawn():
                yield run, drawn


class WriteBatches(beam.DoFn):
    """Hands drawn records to the producer."""

    def process(self, element: tuple[str, Drawn]) -> None:
        """One learner batch."""
        run, drawn = element
        room = _rooms[run]
        with room.remembering():
            room.writer.write(drawn)


def build(pipeline: beam.Pipeline, run: str, policy: str = "", threads: int = 1) -> None:
    """The graph; DoFns carry strings."""
    source = pipeline | "Source" >> beam.Create([run], reshuffle=False).with_output_types(str)
    load = beam.ParDo(Load())
    if policy:
        kept = (
            source
            | "States" >> beam.ParDo(States())
            | "RunInference" >> RunInference(QValues(policy, threads))
            | "KeepValues" >> beam.ParDo(KeepValues(run)).with_output_types(bytes)
        )
        load = beam.ParDo(Load(), beam.pvalue.AsIter(kept))
    (
        source
        | "Load" >> load.with_output_types(str)
        | "Draw" >> beam.ParDo(Draw()).with_output_types(tuple[str, Drawn])
        | "WriteBatches" >> beam.ParDo(WriteBatches()).with_output_types(bytes)
    )


def bounded_options() -> PipelineOptions:
    """All of them: without an explicit list Beam would read this process's command line."""
    return PipelineOptions(["--direct_num_workers=1", "--direct_running_mode=in_memory", "--no_save_main_session"])


def run_offline(service: Service, offline: OfflineReplay) -> None:
    """Until all batches are in the log, or `service.stop`.

    Raises:
        UsageError, RunError, BrokerError: as they were raised inside the pipeline, not as Beam wraps them.
    """
    if service.index:
        raise UsageError(f"--index {service.index}: a recording is replayed by one process, 0")
    recording = offline.open(lambda: service.cluster)
    try:
        for warning in offline.check(recording, service.config, service.facts):
            service.log.warning("offline.warning", about=warning)
        if offline.reprioritise:
            refuse_policy(offline.reprioritise, service)
        warm_up()
        room = OfflineRoom(service, offline, recording)
        service.health.ready()
        _rooms[service.run] = room
        try:
            pipeline = beam.Pipeline(runner=local_runner(), options=bounded_options())
            build(pipeline, service.run, offline.reprioritise, service.config.learner.torch_threads)
            pipeline.run().wait_until_finish()
        except Exception as error:
            room.failure = room.failure or error
            raise room.failure from None
        finally:
            del _rooms[service.run]
            room.close()
    finally:
        recording.close()
