"""Replay memory on real Atari frames: bytes a transition, inserts and samples per second on one core.

    python -m benchmarks.replay            # Pong and Seaquest, 20,000 rows a ring
    python -m benchmarks.replay --quick    # a smoke run

Frames come from AtariVectorEnv (84x84, frame skip 4, random actions, 8 lanes) and pass through blocks as an actor writes them: 16 rows, zstd.
Bytes are all that a ring's process holds for it: pixels, columns, trees, tables, Python objects (tracemalloc, from Avro bytes to a full ring).
Rates are per second of this thread's CPU time, so that a busy machine does not change them: ours and the peers' alike.
A sample is drawn, gathered with its blocks and laid out as `batches` records (32 rows, learner batches of 512 over 8 rings); Avro is timed apart, and so is
what the learner does later (inflate, stack): the peers' samples are finished pixels, ours are not yet. Peers hold the same frames stacked (4 x 84 x 84, twice), as their own examples do, on 5,000 transitions.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import json
import time
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from gorila.codec import Schemas
from gorila.config import Config
from gorila.messages import Batch, Priorities, TransitionBlock
from gorila.observations import compress, gather_stack, inflate
from pipelines.replay import ReplaySplit

LANES, BLOCK_ROWS, RINGS, BATCH_ROWS = 8, 16, 8, 512


def record(game: str, rows: int, seed: int = 0) -> list[TransitionBlock]:
    """At least `rows` rows of random play as blocks, lanes in turn."""
    from ale_py.vector_env import AtariVectorEnv

    env = AtariVectorEnv(game, num_envs=LANES, stack_num=1, reward_clipping=False, use_fire_reset=False)
    rng = np.random.default_rng(seed)
    observation, _ = env.reset(seed=seed)
    first, last = np.ones(LANES, bool), np.zeros(LANES, bool)
    columns: dict[str, list[Any]] = {
        name: [] for name in ("frame", "action", "reward", "first", "last", "terminated", "truncated")
    }
    blocks: list[TransitionBlock] = []
    for step in range(-(-rows // LANES)):
        action = rng.integers(env.single_action_space.n, size=LANES).astype(np.int32)
        after, reward, terminated, truncated, _ = env.step(action)  # a lane that has ended ignores it and starts again
        ended = ~last & (terminated | truncated)
        for name, column in (
            ("frame", observation.reshape(LANES, 84, 84)),
            ("action", np.where(last, -1, action)),
            ("reward", np.where(last, 0, reward)),
            ("first", first),
            ("last", last),
            ("terminated", terminated & ended),
            ("truncated", truncated & ended & ~terminated),
        ):
            columns[name].append(column.copy())
        observation, first, last = after, last, ended
        if len(columns["frame"]) == BLOCK_ROWS:
            laid = {name: np.stack(column, axis=1) for name, column in columns.items()}
            blocks.extend(_block(laid, lane, step + 1 - BLOCK_ROWS, rng) for lane in range(LANES))
            columns = {name: [] for name in columns}
    env.close()
    return blocks


def _block(laid: dict[str, Any], lane: int, first_step: int, rng: np.random.Generator) -> TransitionBlock:
    block = TransitionBlock(
        actor_id="actor-0",
        actor_epoch=1,
        lane=lane,
        first_step=first_step,
        weights_version=0,
        epsilon=1.0,
        observations=compress(laid["frame"][lane], "zstd"),
        action=laid["action"][lane].astype(np.int32),
        reward=laid["reward"][lane].astype(np.float32),
        is_first=laid["first"][lane],
        is_last=laid["last"][lane],
        terminated=laid["terminated"][lane],
        truncated=laid["truncated"][lane],
        q_taken=rng.normal(size=BLOCK_ROWS).astype(np.float32),
        q_max=rng.normal(size=BLOCK_ROWS).astype(np.float32),
    )
    block.check()
    return block


def settings(capacity: int) -> Config:
    """Atari: stack 4, n 3, signs of rewards."""
    return Config.model_validate(
        {
            "env": {"stack": 4, "reward_transform": "sign"},
            "replay": {"capacity_rows": capacity, "min_size_rows": 1, "samples_per_insert": 1e6, "record_rows": 32},
            "learner": {"batch_size": BATCH_ROWS},
        }
    )


def bytes_per_transition(blocks: list[TransitionBlock], capacity: int) -> tuple[float, float]:
    """(all bytes, those of the compressed pixels) for each transition held by one full ring."""
    schemas = Schemas()
    wire = [schemas.encode(block) for block in blocks]
    insert_all(ReplaySplit(settings(64), "warm", np.random.default_rng(0)), blocks[:2])
    gc.collect()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    split = ReplaySplit(settings(capacity), "replay-0", np.random.default_rng(0))
    split.open_ring(0, 0)
    for offset, data in enumerate(wire):
        split.insert(0, offset, offset, schemas.expect(data, TransitionBlock))
    gc.collect()
    held = tracemalloc.get_traced_memory()[0] - before
    tracemalloc.stop()
    ring = split.memory.rings[0]
    last_rows = sum(int(blocks[offset].is_last.sum()) for offset in ring.order.offsets.tolist())
    transitions = ring.live_rows - last_rows
    return held / transitions, split.memory.memory_bytes / transitions


def insert_all(split: ReplaySplit, blocks: list[TransitionBlock], partition: int = 0) -> None:
    """All blocks after those the ring has."""
    if split.next_offset(partition) is None:
        split.open_ring(partition, 0)
    for block in blocks:
        offset = split.next_offset(partition) or 0
        split.insert(partition, offset, offset, block)


def per_second(count: float, work: Callable[[], object]) -> float:
    """`count` things done by `work`, per second of this thread's CPU time."""
    gc.collect()
    start = time.thread_time()
    work()
    return count / (time.thread_time() - start)


def replay_rates(blocks: list[TransitionBlock], capacity: int, rounds: int) -> dict[str, float]:
    """Our own rates."""
    split = ReplaySplit(settings(capacity), "replay-0", np.random.default_rng(0))
    for partition in range(RINGS):
        insert_all(split, blocks, partition)
    again = [dataclasses.replace(block, actor_epoch=2 + n) for n in range(rounds) for block in blocks]
    inserted = sum(int((~block.is_last).sum()) for block in again)
    result = {"inserts_per_s": per_second(inserted, lambda: insert_all(split, again))}
    split.draw(2)
    batches = 40 * rounds
    result["samples_per_s"] = per_second(batches * BATCH_ROWS, lambda: split.draw(batches))

    def with_updates() -> None:
        for _ in range(batches):
            split.learned(_priorities(split.draw(1)[0]))

    result["samples_and_updates_per_s"] = per_second(batches * BATCH_ROWS, with_updates)
    schemas = Schemas()
    wire = [schemas.encode(block) for block in blocks[:200]]
    rows = 200 * BLOCK_ROWS
    result["avro_decoded_rows_per_s"] = per_second(rows, lambda: [schemas.decode(data) for data in wire])
    records = [part for batch in split.draw(rounds) for part in batch]
    result["avro_encoded_samples_per_s"] = per_second(
        BATCH_ROWS * rounds, lambda: [schemas.encode(part) for part in records]
    )
    result["batch_bytes_per_sample"] = sum(len(schemas.encode(part)) for part in records) / (BATCH_ROWS * rounds)
    result["inflated_samples_per_s"] = per_second(BATCH_ROWS * rounds, lambda: [_pixels(part) for part in records])
    split.check_valid()
    return result


def _pixels(part: Batch) -> tuple[Any, Any]:
    """What a learner does with a record, once: s_tm1 and s_t as (B, 4, 84, 84)."""
    frames = np.concatenate([inflate(block) for block in part.blocks])
    indices = part.frames_tm1.reshape(-1, part.stack), part.frames_t.reshape(-1, part.stack)
    return gather_stack(frames, indices[0]), gather_stack(frames, indices[1])


def _priorities(batch: list[Batch]) -> Priorities:
    partition, offset, row = (
        np.concatenate([getattr(part, name) for part in batch]) for name in ("partition", "offset", "row")
    )
    td_error = np.abs(np.sin(np.arange(len(row)))).astype(np.float32)
    return Priorities("learner-0", 0, 0, 1, partition, offset, row, td_error, 0.0, 0.0, False, 0.0)


def _stacked(rows: int) -> Iterator[tuple[Any, ...]]:
    rng = np.random.default_rng(0)
    frames = rng.integers(0, 255, (64, 4, 84, 84), dtype=np.uint8)
    for i in range(rows):
        yield frames[i % 63], i % 6, 0.0, frames[i % 63 + 1], 0.0


def cpprb_rate(rows: int) -> float | None:
    """cpprb: prioritised sample and update, per second; None when it is not installed."""
    try:
        import cpprb
    except ImportError:
        return None
    image = {"shape": (4, 84, 84), "dtype": np.uint8}
    buffer = cpprb.PrioritizedReplayBuffer(
        rows, {"obs": image, "act": {}, "rew": {}, "next_obs": image, "done": {}}, alpha=0.6
    )
    for obs, act, rew, next_obs, done in _stacked(rows):
        buffer.add(obs=obs, act=act, rew=rew, next_obs=next_obs, done=done)
    batches = max(4, rows // 100)

    def work() -> None:
        for _ in range(batches):
            batch = buffer.sample(BATCH_ROWS, beta=0.4)
            buffer.update_priorities(batch["indexes"], np.abs(np.sin(np.arange(BATCH_ROWS))) + 1e-3)

    return per_second(batches * BATCH_ROWS, work)


def torchrl_rate(rows: int) -> tuple[float, float] | None:
    """TorchRL: (prioritised sample and update per second, bytes a transition); None when it is not installed."""
    try:
        import torch
        from tensordict import TensorDict
        from torchrl.data import LazyTensorStorage, TensorDictPrioritizedReplayBuffer
    except ImportError:
        return None
    torch.set_num_threads(1)
    buffer = TensorDictPrioritizedReplayBuffer(
        alpha=0.6, beta=0.4, storage=LazyTensorStorage(rows), batch_size=BATCH_ROWS, priority_key="td_error"
    )
    for start in range(0, rows, 500):
        obs, act, rew, next_obs, done = map(np.stack, zip(*_stacked(min(500, rows - start)), strict=True))
        columns = {"obs": obs, "act": act, "rew": rew, "next_obs": next_obs, "done": done}
        tensors = {name: torch.as_tensor(column) for name, column in columns.items()}
        tensors["td_error"] = torch.rand(len(act)) + 1e-3
        buffer.extend(TensorDict(tensors, batch_size=[len(act)]))
    size = sum(
        tensor.element_size() * tensor[0].numel() for tensor in buffer[:].values(include_nested=True, leaves_only=True)
    )

    def work() -> None:
        for _ in range(20):
            batch = buffer.sample()
            batch["td_error"] = torch.rand(BATCH_ROWS) + 1e-3
            buffer.update_tensordict_priority(batch)

    return per_second(20 * BATCH_ROWS, work), float(size)


def main() -> None:
    """Run, print, and end with one JSON line."""
    parser = argparse.ArgumentParser(description="Replay memory: bytes a transition, inserts and samples per second")
    parser.add_argument("--quick", action="store_true", help="a smoke run: 2,000 rows, peers on 500")
    quick = parser.parse_args().quick
    capacity, peer_rows = (2_000, 500) if quick else (20_000, 5_000)
    result: dict[str, float | None] = {}
    for game in ("pong", "seaquest"):
        print(f"{game}: recording {int(1.2 * capacity):,} rows of random play", flush=True)
        blocks = record(game, int(1.2 * capacity))
        result[f"{game}_bytes_per_transition"], result[f"{game}_pixel_bytes_per_transition"] = bytes_per_transition(
            blocks, capacity
        )
        print(f"{game}: {result[f'{game}_bytes_per_transition']:.1f} bytes a transition", flush=True)
        if game == "pong":
            result |= replay_rates(blocks, capacity, 1 if quick else 5)
            print(f"inserts {result['inserts_per_s']:,.0f}/s, samples {result['samples_per_s']:,.0f}/s", flush=True)
    torchrl = torchrl_rate(peer_rows)
    result["torchrl_samples_per_s"], result["torchrl_bytes_per_transition"] = torchrl or (None, None)
    result["cpprb_samples_per_s"] = cpprb_rate(peer_rows)
    print(json.dumps({name: value if value is None else round(value, 1) for name, value in result.items()}))


if __name__ == "__main__":
    main()
