"""Key frames and deltas: a reader always holds, bit for bit, a value that was published; whatever it missed, compaction took, or a server's restart changed."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consumers.parameter_server.checkpoints import ShardState
from consumers.parameter_server.optimizers import make_optimizer
from consumers.parameter_server.shard import Shard
from gorila.compression import codec
from gorila.config import Config
from gorila.messages import Gradient, Weights
from gorila.processor import Incoming, Outgoing
from gorila.weights import WeightsView, payload_hash

P = 301
F = np.float32
EVERY = 5


class Published:
    """A shard, its log of `weights` records as the broker would hold it, and the values that were published."""

    def __init__(self, **section: Any) -> None:
        server = {"optimizer": "adagrad", "weights_codec": "delta", "key_frame_every": EVERY, "weights_bytes_per_s": 1e15, "target_period_versions": 7, **section}  # fmt: skip
        self.config = Config.model_validate({"learner": {"max_in_flight": 0}, "parameter_server": server})
        tensors = make_optimizer(self.config.parameter_server).tensors
        rng = np.random.default_rng(0)
        self.state = ShardState(0, rng.standard_normal(P).astype(F), {name: np.zeros(P, F) for name in tensors})
        self.log: list[tuple[int, bytes, Weights]] = []
        self.now_s, self.input, self.batch = 0.0, 0, 0
        self.restart()

    def restart(self) -> None:
        """The process dies after everything was acknowledged, and another takes its place."""
        self.shard = Shard(self.config, self.state)

    def _emit(self, records: Any) -> None:
        for record in records:
            assert isinstance(record, Outgoing) and isinstance(record.message, Weights) and record.key is not None
            offset = 2 * len(self.log)  # gaps are normal
            self.log.append((offset, record.key, record.message))
            if record.tag is not None:
                self.shard.delivered(record, 0, offset)

    def gradient(self, stale: bool = False) -> None:
        values = np.random.default_rng(self.batch).standard_normal(P).astype(F)
        batch = self.batch - 1 if stale else self.batch
        payload = codec("fp32").encode(values)
        message = Gradient(0, "learner-0", 0, batch, self.state.version, 32, P, "fp32", payload, 1.0, 1.0)
        self._emit(self.shard.process(Incoming("gradients", 0, self.input, 0, b"0", message)))
        self.input += 1
        self.batch += not stale

    def tick(self) -> None:
        for _ in range(3):  # a target, its acknowledgement, a snapshot
            self.now_s += 1.0
            self._emit(self.shard.tick(self.now_s))

    def run(self, updates: int) -> None:
        for _ in range(updates):
            self.gradient()
            self.tick()


def read(view: WeightsView, records: list[tuple[int, bytes, Weights]]) -> WeightsView:
    for offset, _, message in records:
        before = view.version
        view.take(message, offset)
        assert view.version >= before
    return view


def compacted(log: list[tuple[int, bytes, Weights]]) -> list[tuple[int, bytes, Weights]]:
    newest = {key: offset for offset, key, _ in log}
    return [record for record in log if newest[record[1]] == record[0]]


def snapshots(run: Published) -> list[Weights]:
    return [message for _, _, message in run.log if message.kind != "target"]


@pytest.mark.parametrize("delta", ["fp16", "one-bit", "top-k"])
def test_a_reader_of_everything_holds_each_published_value_exactly(delta: str) -> None:
    run = Published(delta_codec=delta)
    run.tick()
    run.run(23)
    view = WeightsView(P, 1)
    for offset, _, message in run.log:
        if message.kind != "target":
            assert view.take(message, offset)
            assert payload_hash(view.flat()) == message.payload_hash and view.version == message.version
    assert view.version == 23
    kinds = [message.kind for message in snapshots(run)]
    assert kinds == (["key"] + ["delta"] * (EVERY - 1)) * 4 + ["key"] + ["delta"] * 3
    keys = [key for _, key, message in run.log if message.kind == "delta"][: EVERY - 1]
    assert keys == [b"0/d0", b"0/d1", b"0/d2", b"0/d3"]
    # fp16 of key frames keeps three digits; what one bit loses comes back with the next.
    assert np.abs(view.flat() - run.state.weights).max() < {"fp16": 2e-3, "one-bit": 0.06, "top-k": 0.06}[delta]


@pytest.mark.parametrize("mode", ["fp32", "fp16"])
def test_without_deltas_every_snapshot_is_a_key_frame(mode: str) -> None:
    run = Published(weights_codec=mode)
    run.run(3)
    assert {message.kind for message in snapshots(run)} == {"key"}
    assert {message.codec for _, _, message in run.log} == {mode}
    view = read(WeightsView(P, 1), run.log)
    expected = run.state.weights if mode == "fp32" else codec("fp16").decode(codec("fp16").encode(run.state.weights), P)
    assert view.flat().tobytes() == expected.tobytes()
    assert view.target_version == 0 and view.target_flat().shape == (P,)


def test_error_feedback_brings_the_published_weights_to_the_servers() -> None:
    run = Published(delta_codec="one-bit", key_frame_every=128)
    run.run(40)
    distance = [float(np.abs(read(WeightsView(P, 1), run.log).flat() - run.state.weights).mean())]
    for _ in range(60):  # gradients of almost nothing: the server stands, the deltas go on
        message = Gradient(0, "learner-0", 0, run.batch, run.state.version, 32, P, "fp32", np.full(P, 1e-9, F).tobytes(), 1.0, 1.0)  # fmt: skip
        run._emit(run.shard.process(Incoming("gradients", 0, run.input, 0, b"0", message)))
        run.input, run.batch = run.input + 1, run.batch + 1
        run.tick()
    distance.append(float(np.abs(read(WeightsView(P, 1), run.log).flat() - run.state.weights).mean()))
    assert distance[1] < 0.2 * distance[0]


def test_a_late_reader_of_the_compacted_log_holds_what_a_reader_of_everything_holds() -> None:
    run = Published()
    for updates in range(1, 3 * EVERY):
        run.run(1)
        whole, late = read(WeightsView(P, 1), run.log), read(WeightsView(P, 1), compacted(run.log))
        assert late.version == whole.version == updates and late.gradient_offsets == whole.gradient_offsets
        assert late.flat().tobytes() == whole.flat().tobytes()


@given(st.lists(st.booleans(), min_size=40, max_size=40), st.integers(0, 39))
@settings(max_examples=80, deadline=None)
def test_a_reader_that_missed_records_holds_a_published_value_says_so_and_is_mended_by_the_log(
    missed: list[bool], restart_at: int
) -> None:
    run = Published()
    hashes: dict[int, set[int]] = {}
    view, seen = WeightsView(P, 1), 0
    for number in range(20):
        if number == restart_at:
            run.restart()
        run.run(1)
        for offset, _, message in run.log[seen:]:
            if message.kind == "target":
                continue
            hashes.setdefault(message.version, set()).add(message.payload_hash)
            if not missed[number]:
                view.take(message, offset)
        seen = len(run.log)
        if view.version >= 0:
            assert payload_hash(view.flat()) in hashes[view.version]
    if view.gaps:
        read(view, compacted(run.log))
    assert not view.gaps
    if not missed[19] or view.version == 20:
        assert payload_hash(view.flat()) == snapshots(run)[-1].payload_hash


def test_a_snapshot_of_the_same_version_covers_dropped_gradients_and_changes_no_value() -> None:
    run = Published()
    run.run(3)
    view = read(WeightsView(P, 1), run.log)
    before = view.flat().tobytes()
    run.gradient(stale=True)
    run.tick()
    offset, key, message = run.log[-1]
    assert (message.kind, message.version, message.base_version, key) == ("delta", 3, 3, b"0/repeat")
    assert view.take(message, offset) and view.gradient_offsets == [3] and view.flat().tobytes() == before
    run.run(2)
    read(view, run.log[4:])
    assert view.version == 5 and view.flat().tobytes() == read(WeightsView(P, 1), compacted(run.log)).flat().tobytes()


def test_a_server_that_starts_again_begins_with_a_key_frame_even_at_a_version_already_shown() -> None:
    run = Published()
    run.run(4)
    view = read(WeightsView(P, 1), run.log)
    generations = view.generations[0]
    run.restart()
    run.tick()
    offset, _, frame = run.log[-1]
    assert (frame.kind, frame.version) == ("key", 4)
    assert view.take(frame, offset), "its values are not those the deltas had made"
    assert payload_hash(view.flat()) == frame.payload_hash and view.generations[0] == generations + 1
    run.run(1)
    assert view.take(run.log[-1][2], run.log[-1][0]) and view.version == 5


def test_a_delta_of_another_key_frame_is_ignored_though_its_base_has_the_same_version() -> None:
    """A server that was replaced and does not know it yet."""
    run = Published()
    run.run(3)
    zombie = run.shard
    run.restart()
    run.tick()
    view = read(WeightsView(P, 1), run.log)
    frame = zombie._downlink.frame(run.state.weights + F(1), 4)
    stray = zombie._weights(frame, 0, 0)
    stray.version, stray.gradient_offset = 4, 99
    assert (stray.kind, stray.base_version) == ("delta", view.version)
    assert not view.take(stray, 1000) and view.gaps == {0}


def test_no_delta_is_made_before_the_place_of_its_key_frame_is_known() -> None:
    run = Published()
    run.run(1)  # the first snapshot
    run.shard._downlink.restart()
    run.gradient()
    out = list(run.shard.tick(run.now_s + 1))
    assert [o.key for o in out] == [b"0/key"]
    run.gradient()
    assert not [o for o in run.shard.tick(run.now_s + 2) if o.topic == "weights"]
    run.shard.delivered(out[0], 0, 4242)
    [delta] = run.shard.tick(run.now_s + 3)
    assert isinstance(delta.message, Weights) and (delta.message.kind, delta.message.key_offset) == ("delta", 4242)


def test_snapshots_are_paced_by_the_bytes_they_take() -> None:
    deltas = Published(weights_bytes_per_s=1e3, delta_codec="top-k", delta_fraction=0.01)
    whole = Published(weights_bytes_per_s=1e3, weights_codec="fp32")
    for run in (deltas, whole):
        for _ in range(4):
            run.gradient()
            run.now_s += 5
            run.tick()
    assert whole.shard._downlink.interval_s == 4 * P / 1e3
    assert deltas.shard._downlink.interval_s < 0.5


def test_a_damaged_delta_leaves_the_reader_as_it_was() -> None:
    run = Published()
    run.run(3)
    view = read(WeightsView(P, 1), run.log[:-1])
    before, (offset, _, message) = view.flat().tobytes(), run.log[-1]
    message.payload_hash = zlib.crc32(b"another")
    with pytest.raises(Exception, match="hash"):
        view.take(message, offset)
    assert view.flat().tobytes() == before and view.version == 2
