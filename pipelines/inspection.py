"""A run's replay memory looked at from outside: rebuilt from the log by the code that recovers it, then its rows of highest priority.

No group is joined, nothing is committed or written. A running run is read up to where its log ended a moment ago: what a replay process that
started there would hold (ring_recovery.py). A recording is loaded as `gorila replay --from` loads it (offline_split.py).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gorila.config import Config
from gorila.environment_facts import EnvironmentFacts
from gorila.inspected import InspectedRow, Inspection
from gorila.messages import F64, I64, TransitionBlock
from gorila.observations import gather_stack, inflate
from gorila.recording import Recording
from gorila.service import Service
from pipelines.batch_assembly import BatchAssembly
from pipelines.kafka_io import LogReader
from pipelines.offline_split import OfflineSplit
from pipelines.replay import ReplaySplit
from pipelines.ring_kernels import STEPS
from pipelines.ring_recovery import RingRecovery
from pipelines.sampling import DrawnRows, row_probabilities

Name = tuple[str, int, int]


class NamedReplay(ReplaySplit):
    """A split that remembers who wrote each block: (actor, lane, first step) by (partition, offset)."""

    def __init__(self, config: Config, facts: EnvironmentFacts) -> None:
        super().__init__(config, "inspect", np.random.default_rng(0), facts)
        self.names: dict[tuple[int, int], Name] = {}

    @property
    def new_window(self) -> int:
        """An actor's newest rows that count as new."""
        return self._new_window

    def insert(
        self, partition: int, offset: int, timestamp_ms: int, block: TransitionBlock | None, *, new: bool = True
    ) -> None:
        """See ReplaySplit."""
        super().insert(partition, offset, timestamp_ms, block, new=new)
        if block is not None:
            self.names[partition, offset] = (block.actor_id, block.lane, block.first_step)


def inspect_run(service: Service, top: int) -> Inspection:
    """A running run, or one that has ended and is still in Kafka. Raises BrokerError."""
    config = service.config
    split, log = NamedReplay(config, service.facts), LogReader(service)
    try:
        ends = {p: end for p, (_, end) in log.all_bounds("transitions", range(config.actor.count)).items()}
        RingRecovery(service, split, log).open_rings(ends, log.bounds("priorities", 0)[1])
    finally:
        log.close()
    return inspect_split(split, config, f"run {service.run}", top)


def inspect_recording(recording: Recording, source: str, top: int) -> Inspection:
    """All of a recording, as far as its rings hold it, priorities as its learner left them. Raises RunError, BrokerError, OffsetGone."""
    config = recording.config
    loaded = OfflineSplit(config, "inspect", recording.facts)
    loaded.replay = split = NamedReplay(config, recording.facts)
    loaded.open(recording.spans("transitions"))
    for record in recording.records("transitions"):
        loaded.insert(record)
    for record in recording.records("priorities"):
        loaded.learned(record)
    return inspect_split(split, config, source, top)


def inspect_split(split: NamedReplay, config: Config, what: str, top: int) -> Inspection:
    """The rows of highest priority in a memory."""
    memory = split.memory
    rings = memory.active()
    capacity = memory.rules.capacity_rows
    population = sum(ring.sampleable for ring in rings)
    at, slot, priority, probability = [], [], [], []
    for ring in rings:
        base = ring.index * capacity
        slots = np.flatnonzero(memory.ahead[base : base + capacity] & STEPS)
        leaves = memory.forest.leaves(ring.index)[slots]
        if len(slots) > top:  # all that are as high as the top-th: which of equals are shown is decided below
            slots = slots[leaves >= np.partition(leaves, -top)[-top]]
        at.append(base + slots)
        slot.append(slots)
        priority.append(memory.forest.leaves(ring.index)[slots])
        probability.append(
            row_probabilities(
                memory, ring, slots, config.replay.local_fraction, split.new_window, config.replay.target_new_share
            )
        )
    found: tuple[InspectedRow, ...] = ()
    if rings:
        rows = _highest(memory, np.concatenate(at), np.concatenate(slot), np.concatenate(priority), top)
        chosen = np.concatenate(at)[rows]
        drawn = DrawnRows(
            chosen, np.concatenate(slot)[rows], np.concatenate(probability)[rows], np.zeros(len(rows), np.bool_), False
        )
        found = _described(split, drawn, np.concatenate(priority)[rows], population)
    mass = float(sum(memory.forest.mass(ring.index) for ring in rings))
    return Inspection(what, len(rings), population, mass, found)


def _highest(memory: Any, at: I64, slot: I64, priority: F64, top: int) -> I64:
    """Places of the `top` highest; equal ones in the order of their ids."""
    number = memory.block[at]
    row = (slot - memory.blocks.start[number]) % memory.rules.capacity_rows
    order: I64 = np.lexsort((row, memory.blocks.offset[number], memory.blocks.partition[number], -priority))
    return order[:top]


def _described(split: NamedReplay, drawn: DrawnRows, priority: F64, population: int) -> tuple[InspectedRow, ...]:
    """The rows as a learner would get them, one record each, with what only the log knows."""
    steps = split.memory.ahead[drawn.at] & STEPS
    rows = []
    for i, record in enumerate(BatchAssembly(split.memory, "inspect", 1).records(drawn, 0, population)):
        frames = np.concatenate([inflate(block) for block in record.blocks])
        state, after = (
            gather_stack(frames, indices.reshape(1, -1)) for indices in (record.frames_tm1, record.frames_t)
        )
        if record.stack > 1:
            state, after = state[0], after[0]
        partition, offset, row = int(record.partition[0]), int(record.offset[0]), int(record.row[0])
        actor, lane, first_step = split.names[partition, offset]
        rows.append(
            InspectedRow(
                partition,
                offset,
                row,
                actor,
                lane,
                first_step + row,
                int(record.action[0]),
                float(record.n_step_return[0]),
                float(record.discount[0]),
                int(steps[i]),
                int(record.behaviour_version[0]),
                float(priority[i]),
                float(record.probability[0]),
                state,
                after,
            )
        )
    return tuple(rows)
