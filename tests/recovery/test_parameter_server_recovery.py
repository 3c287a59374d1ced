"""A parameter server killed at any point is, at every version it reaches again, the server that was never disturbed: bit for bit."""

from __future__ import annotations

from collections.abc import Iterator
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consumers.parameter_server.checkpoints import ShardState, newest_complete, to_manifest, to_parts
from consumers.parameter_server.optimizers import make_optimizer, settings_json
from consumers.parameter_server.shard import Shard
from gorila.compression import codec
from gorila.config import Config
from gorila.errors import BadRecord, RunError
from gorila.messages import CheckpointManifest, CheckpointPart, Gradient, Message, Weights
from gorila.processor import Incoming, Outgoing

P = 13
F = np.float32
GRADIENTS = 90


def config_of(optimizer: str = "adam", **keys: object) -> Config:
    section = {
        "optimizer": optimizer,
        "momentum": 0.5,
        "warmup_versions": 30,
        "target_period_versions": 7,
        "checkpoint_versions": 10,
        "ledger_versions": 16,
        "weights_bytes_per_s": 1e9,
        **keys,
    }
    return Config.model_validate({"learner": {"max_in_flight": 2}, "parameter_server": section})


class Topics:
    """The logs of a run's shard, as a broker keeps them: what was appended stays, whoever dies."""

    def __init__(self, config: Config) -> None:
        self.config = config
        self.optimizer = settings_json(config.parameter_server)
        self.moments = make_optimizer(config.parameter_server).tensors
        self.logs: dict[str, list[Message]] = {"weights": [], "checkpoints": []}
        weights = np.random.default_rng(0).standard_normal(P).astype(F)
        state = ShardState(0, weights, {})
        parts = to_parts(state)
        manifest = to_manifest(state, len(parts), "", 0)
        manifest.first_part_offset, manifest.state_hash = 0, -1
        self.logs["checkpoints"] += [*parts, manifest]
        self.written = 0  # gradients the learners had sent so far: the end of the log a starting process sees
        self.gradients = [Incoming("gradients", 0, i, 100 + i, b"0", gradient) for i, gradient in enumerate(sent())]

    def read(self, start: int, stop: int) -> Iterator[tuple[int, Message]]:
        for offset in range(start, min(stop, len(self.logs["checkpoints"]))):
            yield offset, self.logs["checkpoints"][offset]

    def restore(self, ignored: list[str] | None = None) -> ShardState:
        end = len(self.logs["checkpoints"])
        say = (ignored if ignored is not None else []).append
        state = newest_complete(
            self.read, 0, end, shard_id=0, moments=self.moments, optimizer=self.optimizer, ignored=say
        )
        assert state is not None
        return state

    def start(self) -> Shard:
        return Shard(self.config, self.restore(), caught_up_at=self.written)

    def append(self, record: Outgoing) -> int:
        self.logs[record.topic].append(record.message)
        return len(self.logs[record.topic]) - 1


@cache
def sent() -> tuple[Gradient, ...]:
    """Two learners' gradients with duplicates, stale ones and bad ones among them."""
    rng = np.random.default_rng(11)
    made: list[Gradient] = []
    version = 0
    next_batch = [0, 0]
    for _ in range(GRADIENTS):
        partition = int(rng.integers(2))
        kind = rng.choice(["fresh", "duplicate", "stale", "bad"], p=[0.85, 0.05, 0.05, 0.05])
        batch = next_batch[partition] - (kind == "duplicate")
        next_batch[partition] = max(next_batch[partition], batch + 1)
        base = max(0, version - 9) if kind == "stale" else max(0, version - int(rng.integers(3)))
        values = rng.standard_normal(P).astype(F)
        name = str(rng.choice(["fp32", "fp16"]))
        payload = b"?" if kind == "bad" else codec(name).encode(values)
        made.append(Gradient(0, "l", partition, max(0, batch), base, 32, P, name, payload, 1.0, 1.0))
        version += kind == "fresh"
    return tuple(made)


def take(shard: Shard, record: Incoming) -> list[Outgoing]:
    try:
        return list(shard.process(record))
    except BadRecord:
        return []


@cache
def undisturbed(optimizer: str) -> tuple[dict[int, int], dict[int, bytes]]:
    """State hash at every gradient offset, and the weights at every version."""
    shard = Topics(config_of(optimizer)).start()
    hashes, weights = {}, {0: shard.state.weights.tobytes()}
    for record in Topics(config_of(optimizer)).gradients:
        take(shard, record)
        hashes[record.offset] = shard.state_hash()
        weights[shard.state.version] = shard.state.weights.tobytes()
    assert shard.state.version > 50 and min(shard.state.dropped_stale, shard.state.dropped_bad) > 0
    assert shard.state.dropped_duplicate > 0
    return hashes, weights


def live(topics: Topics, steps: list[int], lost: int, hashes: dict[int, int]) -> None:
    """One process: polls of the given sizes, then a kill which loses the last `lost` records that were not yet on the broker."""
    shard = topics.start()
    assert shard.state.gradient_offset < 0 or shard.state_hash() == hashes[shard.state.gradient_offset]
    queue: list[Outgoing] = []
    now_s = 0.0
    for size in steps:
        for _ in range(size):
            at = shard.state.gradient_offset + 1
            if at >= len(topics.gradients):
                break
            topics.written = max(topics.written, at + 1)
            queue += take(shard, topics.gradients[at])
            assert shard.state_hash() == hashes[at]
        now_s += 1.0
        queue += shard.tick(now_s)
        # The broker takes what was sent in order, and acknowledges some of it.
        keep = min(lost, len(queue))
        for record in queue[: len(queue) - keep]:
            shard.delivered(record, 0, topics.append(record))
        queue = queue[len(queue) - keep :]
    # The kill: of what was under way, the first arrived without this process ever hearing of it; the rest is gone.
    for record in queue[: len(queue) // 2]:
        topics.append(record)


@pytest.mark.parametrize("optimizer", ["adam", "adagrad", "rmsprop", "sgd"])
@given(lives=st.lists(st.tuples(st.lists(st.integers(0, 25), min_size=1, max_size=6), st.integers(0, 5)), max_size=6))
@settings(max_examples=40, deadline=None)
def test_a_server_killed_at_any_points_equals_the_undisturbed_one_at_every_gradient(
    optimizer: str, lives: list[tuple[list[int], int]]
) -> None:
    hashes, weights = undisturbed(optimizer)
    topics = Topics(config_of(optimizer))
    for steps, lost in lives:
        live(topics, steps, lost, hashes)
    live(topics, [40, 40, 40, 0, 0, 0], 0, hashes)

    shown = [m for m in topics.logs["weights"] if isinstance(m, Weights)]
    assert all(m.payload == weights[m.version] for m in shown), "whoever published a version published the same bytes"
    frames = [m for m in shown if m.kind == "key"]
    assert [m.version for m in frames] == sorted(m.version for m in frames), "readers never saw the shard go back"
    assert frames[-1].version == max(weights) and frames[-1].gradient_offset == GRADIENTS - 1
    for frame in frames:
        target = shown[frame.target_offset]
        assert (target.kind, target.version) == ("target", frame.target_version)
        assert frame.target_version == frame.version - frame.version % 7


def crash_after(updates: int) -> Topics:
    topics = Topics(config_of())
    live(topics, [updates, 0, 0], 0, undisturbed("adam")[0])
    return topics


def manifests(topics: Topics) -> list[int]:
    return [m.version for m in topics.logs["checkpoints"] if isinstance(m, CheckpointManifest)]


def test_parts_without_their_manifest_are_no_checkpoint() -> None:
    topics = crash_after(50)
    log = topics.logs["checkpoints"]
    newest = manifests(topics)[-1]
    topics.logs["checkpoints"] = log[: max(i for i, m in enumerate(log) if isinstance(m, CheckpointManifest))]
    assert topics.restore().version == manifests(topics)[-1] < newest


@pytest.mark.parametrize("damage", ["part lost", "bit flipped", "wrong size", "another tensor"])
def test_a_manifest_whose_parts_are_not_whole_is_ignored_and_the_one_before_is_used(damage: str) -> None:
    topics = crash_after(50)
    log = topics.logs["checkpoints"]
    *_, before, newest = manifests(topics)
    where = max(i for i, m in enumerate(log) if isinstance(m, CheckpointPart) and m.version == newest)
    part = log[where]
    assert isinstance(part, CheckpointPart)
    if damage == "part lost":
        log[where] = topics.logs["checkpoints"][0]
    elif damage == "bit flipped":
        part.data = bytes([part.data[0] ^ 1]) + part.data[1:]
    elif damage == "wrong size":
        part.data = part.data[:-4]
    else:
        part.tensor = "moment9"
    ignored: list[str] = []
    assert topics.restore(ignored).version == before
    assert len(ignored) == 1 and f"version {newest}" in ignored[0]


def test_a_checkpoint_far_from_the_end_of_the_log_is_found() -> None:
    topics = crash_after(50)
    newest = manifests(topics)[-1]
    orphan = CheckpointPart(0, 999, "weights", 0, P, b"\0" * 4 * P)
    topics.logs["checkpoints"] += [orphan] * 1000
    assert topics.restore().version == newest


def test_parts_written_twice_by_a_zombie_do_not_hurt() -> None:
    topics = crash_after(50)
    log = topics.logs["checkpoints"]
    newest = manifests(topics)[-1]
    end = max(i for i, m in enumerate(log) if isinstance(m, CheckpointManifest))
    parts = [m for m in log if isinstance(m, CheckpointPart) and m.version == newest]
    topics.logs["checkpoints"] = [*log[:end], *parts, *log[end:]]
    assert topics.restore().version == newest


def test_an_empty_or_truncated_log_gives_nothing() -> None:
    topics = Topics(config_of())
    topics.logs["checkpoints"] = []
    found = newest_complete(topics.read, 0, 0, shard_id=0, moments=topics.moments, optimizer=topics.optimizer)
    assert found is None


def test_a_checkpoint_made_with_other_optimizer_settings_is_refused_with_both_named() -> None:
    topics = crash_after(50)
    other = settings_json(config_of(learning_rate=0.5).parameter_server)
    with pytest.raises(RunError, match=r"0\.002.*0\.5"):
        newest_complete(
            topics.read, 0, len(topics.logs["checkpoints"]), shard_id=0, moments=topics.moments, optimizer=other
        )


def test_version_zero_needs_only_the_initial_weights() -> None:
    topics = Topics(config_of())
    state = topics.restore()
    assert (state.version, state.gradient_offset, state.target_offset) == (0, -1, -1)
    assert set(state.moments) == set(topics.moments) and not any(m.any() for m in state.moments.values())
