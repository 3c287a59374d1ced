"""Updates a second of the learner on recorded batches, against a bare torch loop on the same batches already in tensors.

    python -m benchmarks.learner [--quick] [--seconds S]

The learner's side is the product's own path, without Kafka and without the in-flight window (rules.md 19): Avro decode, inflate and stack (prefetch
thread), double-DQN TD error, backward, clip, compression, outbox, Avro encode of gradients and priorities. The bare side: the same network, the same
loss, backward and clip, on tensors made beforehand. Both compute the whole gradient and apply none: that is the parameter server's work. Interleaved in
rounds, same torch threads; the figures are medians over rounds. Pong-like frames: 84x84 grey, two paddles and a ball, in 16-frame zstd blocks.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from consumers.batch_assembly import assemble
from consumers.learner import Learner
from consumers.outbox import Outbox
from consumers.prefetch import Prefetch
from gorila.codec import Schemas
from gorila.compression import codec
from gorila.config import Config
from gorila.environment_facts import EnvironmentFacts
from gorila.messages import Batch, Gradient, Weights
from gorila.network import build_network, initial_weights
from gorila.observations import ObservationBlock, compress, frame_indices
from gorila.processor import Incoming
from gorila.settings import validate
from gorila.sharding import bounds
from gorila.td import huber, importance_weights, td_error
from gorila.weights import WeightsView, payload_hash

PONG = EnvironmentFacts("ale:pong", (84, 84), "uint8", 6, 4, 27_000)
CARTPOLE = EnvironmentFacts("CartPole-v1", (4,), "float32", 2, 1, 500)
BLOCK = 16
RECORDED = 24


def nature_config(torch_threads: int) -> Config:
    """Batch 32, window off."""
    return validate(
        {
            "network": {"factory": "nature"},
            "env": {"stack": 4},
            "parameter_server": {"shards": 2},
            "learner": {"batch_size": 32, "max_in_flight": 0, "torch_threads": torch_threads},
        }
    )


def cartpole_config(torch_threads: int) -> Config:
    """The cartpole preset's learner, window off."""
    return validate({"learner": {"batch_size": 128, "max_in_flight": 0, "torch_threads": torch_threads}})


def pong_like(rng: np.random.Generator) -> np.ndarray:
    """uint8 (BLOCK, 84, 84): a court, two paddles and a ball that move."""
    frames = np.full((BLOCK, 84, 84), 87, np.uint8)
    frames[:, :12], frames[:, 78:] = 236, 236
    ball, speed = rng.uniform(20, 60, 2), rng.uniform(-2, 2, 2)
    left, right = rng.integers(14, 66, 2)
    for t in range(BLOCK):
        x, y = np.clip(ball + t * speed, 14, 76).astype(int)
        frames[t, y : y + 2, x : x + 1] = 236
        frames[t, left : left + 8, 8:10], frames[t, right : right + 8, 74:76] = 147, 148
        left, right = (
            int(np.clip(left + rng.integers(-2, 3), 14, 66)),
            int(np.clip(right + rng.integers(-2, 3), 14, 66)),
        )
    return frames


def record(config: Config, facts: EnvironmentFacts, number: int) -> list[Batch]:
    """One learner batch as the pipeline sends it: every row from a block of its own, two where its stack or bootstrap state reaches over."""
    rng = np.random.default_rng(number)
    rows, parts = config.replay.record_rows, config.record_parts
    made = []
    for part in range(parts):
        blocks: list[ObservationBlock] = []
        tm1, t = [], []
        for _ in range(rows):
            start = len(blocks) * BLOCK
            row = int(rng.integers(3, BLOCK))
            for _ in range(2 if row + config.replay.n_steps >= BLOCK else 1):
                raw = pong_like(rng) if facts is PONG else rng.standard_normal((BLOCK, 4)).astype(np.float32)
                blocks.append(compress(raw, "zstd"))
            tm1 += frame_indices(start + row, row, facts.stack)
            t += frame_indices(start + row + config.replay.n_steps, row, facts.stack)
        made.append(
            Batch(
                split="bench", batch_number=number, part=part, parts=parts, population=100_000,
                partition=np.zeros(rows, np.int32),
                offset=rng.integers(0, 10_000, rows),
                row=rng.integers(0, BLOCK, rows).astype(np.int32),
                probability=rng.uniform(1e-6, 1e-4, rows),
                action=rng.integers(0, facts.actions, rows).astype(np.int32),
                n_step_return=rng.standard_normal(rows).astype(np.float32),
                discount=np.full(rows, 0.97, np.float32),
                behaviour_version=np.zeros(rows, np.int64),
                stack=facts.stack,
                frames_tm1=np.array(tm1, np.int32),
                frames_t=np.array(t, np.int32),
                blocks=blocks,
            )
        )  # fmt: skip
    return made


def shown_weights(config: Config, facts: EnvironmentFacts) -> WeightsView:
    """A reader that holds version 0 and its target."""
    flat = initial_weights(config, facts)
    view = WeightsView(len(flat), config.parameter_server.shards)
    for shard, (start, stop) in enumerate(bounds(len(flat), config.parameter_server.shards)):
        for kind in ("target", "key"):
            values = flat[start:stop]
            view.take(
                Weights(
                    shard, 0, kind, len(values), -1, -1, 0, 0, -1, "fp32", codec("fp32").encode(values), payload_hash(values),
                    -1, 0, 0, 0, 0, np.zeros(0, np.int32), 0.0,
                )
            )  # fmt: skip
    return view


class LearnerSide:
    """The product's path over recorded bytes, round and round."""

    def __init__(self, config: Config, facts: EnvironmentFacts, batches: list[list[Batch]], folder: Path) -> None:
        self._schemas = Schemas()
        self._recorded = [self._schemas.encode(part) for parts in batches for part in parts]
        view = shown_weights(config, facts)
        outbox = Outbox(
            folder / f"{facts.id.replace(':', '-')}.outbox",
            "bench",
            view.num_parameters or 0,
            config.parameter_server.shards,
            self._schemas,
        )
        self._prefetch = Prefetch()
        self._learner = Learner(config, facts, "bench", view, outbox, assembler=self._prefetch, clock=time.monotonic)
        self._next = 0
        self._offset = 0

    def update(self) -> None:
        """Until one more gradient is encoded."""
        learner, updates = self._learner, self._learner.counts.updates
        while learner.counts.updates == updates:
            while learner.wants("batches"):
                message = self._schemas.decode(self._recorded[self._next % len(self._recorded)])
                learner.process(Incoming("batches", 0, self._next, 0, None, message))
                self._next += 1
            for outgoing in learner.tick(0.0):
                self._schemas.encode(outgoing.message)
                if isinstance(outgoing.message, Gradient):
                    learner.delivered(outgoing, outgoing.message.shard_id, self._offset)
            self._offset += 1
            learner.in_flight.covered_by([self._offset] * len(learner.writer.bounds))

    def close(self) -> None:
        """End the thread."""
        self._prefetch.close()


class BareSide:
    """A loop as one would write it in a notebook."""

    def __init__(self, config: Config, facts: EnvironmentFacts, batches: list[list[Batch]]) -> None:
        self._config = config.learner
        self._online, self._target = build_network(config, facts), build_network(config, facts)
        for parameter in self._online.parameters():
            parameter.data, parameter.grad = parameter.data.clone(), None
        self._batches = []
        for parts in batches:
            batch = assemble(parts)
            columns = (batch.states_tm1, batch.states_t, batch.action, batch.n_step_return, batch.discount)
            weights = importance_weights(torch.from_numpy(batch.probability), self._config.beta_start)
            self._batches.append((*(torch.from_numpy(column) for column in columns), weights))
        self._next = 0

    def update(self) -> None:
        """One gradient."""
        states_tm1, states_t, action, returns, discount, weights = self._batches[self._next % len(self._batches)]
        self._next += 1
        with torch.no_grad():
            q_target, q_select = self._target(states_t), self._online(states_t)
        error = td_error(self._online(states_tm1), action, returns, discount, q_target, q_select)
        loss = (weights * huber(error, self._config.huber_delta)).mean()
        self._online.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._online.parameters(), self._config.clip_norm)
        loss.item()

    def close(self) -> None:
        """Nothing to end."""


def _rate(update: Callable[[], None], seconds: float) -> float:
    began_s, count = time.perf_counter(), 0
    while (elapsed_s := time.perf_counter() - began_s) < seconds:
        update()
        count += 1
    return count / elapsed_s


def compare(
    name: str, config: Config, facts: EnvironmentFacts, seconds: float, rounds: int
) -> tuple[float, float, float]:
    """(learner's updates/s, bare updates/s, ratio): medians over interleaved rounds."""
    batches = [record(config, facts, number) for number in range(RECORDED)]
    with tempfile.TemporaryDirectory() as folder:
        sides = (LearnerSide(config, facts, batches, Path(folder)), BareSide(config, facts, batches))
        for side in sides:
            _rate(side.update, min(seconds, 1.0))
        rates: list[tuple[float, float]] = []
        for number in range(rounds):
            first = number % 2  # neither side always runs on a machine the other has warmed up
            pair = {which: _rate(sides[which].update, seconds) for which in (first, 1 - first)}
            rates.append((pair[0], pair[1]))
        for side in sides:
            side.close()
    ours, bare = (statistics.median(rate[which] for rate in rates) for which in (0, 1))
    ratio = statistics.median(one / other for one, other in rates)
    print(
        f"{name}: learner {ours:.1f} updates/s, bare {bare:.1f} updates/s, ratio {ratio:.3f} ({rounds} rounds of {seconds:g} s a side)"
    )
    return ours, bare, ratio


def main() -> None:
    """See the module's docstring."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.learner", description="the learner's path against a bare torch loop"
    )
    parser.add_argument("--quick", action="store_true", help="a smoke run of a few seconds")
    parser.add_argument("--seconds", type=float, default=3.0, help="of each side in each round")
    parser.add_argument("--torch-threads", type=int, default=1)
    arguments = parser.parse_args()
    seconds, rounds = (0.5, 2) if arguments.quick else (arguments.seconds, 7)
    torch.set_num_threads(arguments.torch_threads)
    ours, bare, ratio = compare("nature, batch 32", nature_config(arguments.torch_threads), PONG, seconds, rounds)
    small = compare(
        "cartpole mlp, batch 128", cartpole_config(arguments.torch_threads), CARTPOLE, min(seconds, 1.0), rounds
    )
    print(
        json.dumps(
            {
                "updates_per_s": round(ours, 2),
                "bare_updates_per_s": round(bare, 2),
                "ratio": round(ratio, 4),
                "cartpole_updates_per_s": round(small[0], 1),
                "cartpole_bare_updates_per_s": round(small[1], 1),
                "cartpole_ratio": round(small[2], 4),
                "torch_threads": arguments.torch_threads,
            }
        )
    )


if __name__ == "__main__":
    main()
