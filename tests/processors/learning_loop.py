"""A learner in its real runtime over a log in memory, beside real shards: for tests of the learner and the golden losses."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from consumers.learner import Learner
from consumers.outbox import MemoryOutbox, OutboxPort
from consumers.parameter_server.checkpoints import ShardState
from consumers.parameter_server.optimizers import make_optimizer
from consumers.parameter_server.shard import Shard
from gorila.compression import codec
from gorila.config import Config
from gorila.environment_facts import EnvironmentFacts
from gorila.messages import Batch, Gradient, Priorities, Weights
from gorila.network import initial_weights
from gorila.observations import compress
from gorila.processor import Incoming, Outgoing
from gorila.runtime import Input
from gorila.settings import validate
from gorila.sharding import bounds
from gorila.testing.driver import ProcessorTestDriver
from gorila.weights import WeightsView

CARTPOLE = EnvironmentFacts("CartPole-v1", (4,), "float32", 2, 1, 500)
CATCH = EnvironmentFacts("catch", (24, 24), "uint8", 3, 2, 7)
F32 = np.ndarray
torch.set_num_threads(1)  # two threads on nets this small only fight


def small_config(**sections: dict[str, Any]) -> Config:
    """16 rows in 2 records, a network of 8 units, snapshots as fast as they are asked for."""
    tree: dict[str, dict[str, Any]] = {
        "learner": {"batch_size": 16, "clip_norm": 0.0, "outlier_sigma": 0.0},
        "replay": {"record_rows": 8},
        "network": {"hidden": [8]},
        "parameter_server": {"weights_bytes_per_s": 1e12, "learning_rate": 1e-2},
    }
    for section, keys in sections.items():
        tree[section] = {**tree.get(section, {}), **keys}
    return validate(tree)


def make_batch(
    number: int, config: Config, facts: EnvironmentFacts = CARTPOLE, split: str = "split-0", scale: float = 1.0
) -> list[Batch]:
    """The records of one learner batch, a function of its number."""
    rng = np.random.default_rng([number, len(split)])
    parts, rows = config.record_parts, config.replay.record_rows
    made = []
    for part in range(parts):
        blocks = []
        for _ in range(4):
            frames = rng.integers(0, 256, (16, *facts.observation_shape))
            if facts.observation_dtype != "uint8":
                frames = (frames / 128.0 - 1.0) * scale
            blocks.append(compress(frames.astype(facts.observation_dtype), "zstd"))
        made.append(
            Batch(
                split=split, batch_number=number, part=part, parts=parts, population=1000,
                partition=np.zeros(rows, np.int32),
                offset=rng.integers(0, 100, rows),
                row=rng.integers(0, 16, rows).astype(np.int32),
                probability=rng.uniform(1e-4, 1e-2, rows),
                action=rng.integers(0, facts.actions, rows).astype(np.int32),
                n_step_return=(rng.standard_normal(rows) * scale).astype(np.float32),
                discount=np.where(rng.random(rows) < 0.2, 0.0, 0.97).astype(np.float32),
                behaviour_version=np.zeros(rows, np.int64),
                stack=facts.stack,
                frames_tm1=rng.integers(0, 64, rows * facts.stack).astype(np.int32),
                frames_t=rng.integers(0, 64, rows * facts.stack).astype(np.int32),
                blocks=blocks,
            )
        )  # fmt: skip
    return made


def make_weights(
    values: F32, version: int, *, shard: int = 0, kind: str = "key", gradient_offset: int = -1, target: int = 0
) -> Weights:
    """A snapshot of one shard."""
    import zlib

    payload = codec("fp32").encode(values.astype(np.float32))
    return Weights(
        shard_id=shard, version=version, kind=kind, num_parameters=len(values), base_version=-1, key_offset=-1,
        target_version=target, target_offset=0, gradient_offset=gradient_offset, codec="fp32", payload=payload,
        payload_hash=zlib.crc32(payload), state_hash=-1, applied=version, dropped_stale=0, dropped_duplicate=0,
        dropped_bad=0, staleness=np.zeros(0, np.int32), learning_rate=1e-3,
    )  # fmt: skip


class LearningLoop:
    """A learner; `serve()` lets real shards apply what it sent and shows it their snapshots."""

    def __init__(
        self,
        config: Config,
        facts: EnvironmentFacts = CARTPOLE,
        *,
        outbox: OutboxPort | None = None,
        automatic: bool = True,
        wrap: Callable[[Learner], Learner] = lambda learner: learner,
    ) -> None:
        self.config, self.facts = config, facts
        self.outbox = outbox or MemoryOutbox()
        self.initial = initial_weights(config, facts)
        self.bounds = bounds(len(self.initial), config.parameter_server.shards)
        moments = make_optimizer(config.parameter_server).tensors
        self.shards = [
            Shard(
                config,
                ShardState(s, self.initial[a:b].copy(), {m: np.zeros(b - a, np.float32) for m in moments}),
            )
            for s, (a, b) in enumerate(self.bounds)
        ]
        self.bad: list[str] = []

        def build() -> Learner:
            view = WeightsView(len(self.initial), config.parameter_server.shards)
            self.learner = wrap(
                Learner(
                    config, facts, "learner-0", view, self.outbox,
                    on_bad_batch=lambda records, reason: self.bad.append(reason),
                )
            )  # fmt: skip
            for message in self.shown:
                self.learner.view.take(message)
            return self.learner

        self.shown: list[Weights] = []
        self.driver = ProcessorTestDriver(
            build, Input("weights", how="newest"), Input("batches", chunk=8), config=config, automatic=automatic
        )
        self._taken = [0] * len(self.shards)

    def feed(self, *numbers: int, **arguments: Any) -> None:
        """Batches by number into partition 0."""
        for number in numbers:
            for part in make_batch(number, self.config, self.facts, **arguments):
                self.driver.feed("batches", part)

    def show(self, *messages: Weights) -> None:
        """Records into `weights`."""
        for message in messages:
            self.shown.append(message)
            name = "target" if message.kind == "target" else "key"
            self.driver.feed("weights", message, partition=message.shard_id, key=f"{message.shard_id}/{name}".encode())

    def serve(self, only: int | None = None) -> None:
        """Real shards take what is new in `gradients` and show what is due, until nothing is."""
        for index, shard in enumerate(self.shards):
            if only is not None and only != index:
                continue
            full = self.driver.service.topic("gradients")
            records = self.driver.cluster.read(full, index)
            out: list[Outgoing] = list(shard.tick(self.driver.now_s))
            for record in records[self._taken[index] :]:
                message = self.driver.service.schemas.decode(record.value)
                out += shard.process(Incoming("gradients", index, record.offset, 0, record.key, message))
            self._taken[index] = len(records)
            out += shard.tick(self.driver.now_s)
            while out:
                for outgoing in out:
                    if isinstance(outgoing.message, Weights):
                        if outgoing.tag is not None:
                            shard.delivered(
                                outgoing,
                                index,
                                len(self.driver.cluster.read(self.driver.service.topic("weights"), index)),
                            )
                        self.show(outgoing.message)
                self.driver.now_s += 0.001
                out = list(shard.tick(self.driver.now_s))
        self.driver.turn()

    @property
    def gradients(self) -> list[Gradient]:
        """Sent so far, shard by shard."""
        return [m for m in self.driver.messages("gradients") if isinstance(m, Gradient)]

    @property
    def priorities(self) -> list[Priorities]:
        """Sent so far."""
        return [m for m in self.driver.messages("priorities") if isinstance(m, Priorities)]

    def sent(self) -> F32:
        """Σ of what the shards would apply: one gradient an identity, decoded, float64 (P,)."""
        total = np.zeros(len(self.initial), np.float64)
        for shard, (start, stop) in enumerate(self.bounds):
            handled = -1
            for message in self.driver.messages("gradients", shard):
                assert isinstance(message, Gradient)
                if message.batch_offset > handled:
                    handled = message.batch_offset
                    total[start:stop] += codec(message.codec).decode(message.payload, stop - start)
        return total
