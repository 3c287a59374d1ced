"""The shard as a pure processor: what it applies, drops, shows and checkpoints. Acknowledgements are given by hand."""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from consumers.parameter_server.chain import View
from consumers.parameter_server.checkpoints import ShardState
from consumers.parameter_server.optimizers import learning_rate_at, make_optimizer
from consumers.parameter_server.shard import MAX_PENDING_CHECKPOINTS, Shard
from gorila.compression import codec
from gorila.config import Config
from gorila.errors import BadRecord, InvalidState
from gorila.messages import CheckpointLedger, CheckpointManifest, CheckpointPart, Gradient, Weights
from gorila.processor import Incoming, Outgoing, Processor
from gorila.weights import WeightsView

P = 11
F = np.float32


def config_of(**keys: Any) -> Config:
    learner = {"max_in_flight": keys.pop("max_in_flight", 1), "count": keys.pop("learners", 1)}
    keys = {"weights_bytes_per_s": 1e9, "target_period_versions": 1000, "checkpoint_versions": 1000, **keys}
    return Config.model_validate({"learner": learner, "parameter_server": keys})


class Bench:
    """A shard with its input log and the places its records got."""

    def __init__(self, config: Config | None = None, **arguments: Any) -> None:
        self.config = config or config_of()
        weights = np.random.default_rng(1).standard_normal(P).astype(F)
        moments = {name: np.zeros(P, F) for name in make_optimizer(self.config.parameter_server).tensors}
        self.shard = Shard(self.config, ShardState(0, weights, moments), **arguments)
        self.now_s = 0.0
        self.next_input = 0
        self.next_offset: dict[str, int] = {}
        self.out: list[Outgoing] = []
        self.unacknowledged: list[Outgoing] = []
        self.acknowledge = True

    def _take(self, records: Iterable[Outgoing]) -> list[Outgoing]:
        taken = list(records)
        self.out += taken
        self.unacknowledged += taken
        if self.acknowledge:
            self.acknowledge_all()
        return taken

    def acknowledge_all(self) -> None:
        for record in self.unacknowledged:
            offset = self.next_offset.get(record.topic, 0)
            self.next_offset[record.topic] = offset + 1
            if record.tag is not None:
                self.shard.delivered(record, 0, offset)
        self.unacknowledged = []

    def feed(self, batch: int, base: int | None = None, partition: int = 0, **fields: Any) -> list[Outgoing]:
        return self._take(self.shard.process(self.record(batch, base, partition, **fields)))

    def record(self, batch: int, base: int | None = None, partition: int = 0, **fields: Any) -> Incoming:
        values = np.random.default_rng([partition, batch]).standard_normal(P).astype(F)
        gradient = Gradient(
            shard_id=0, learner_id="learner-0", batch_partition=partition, batch_offset=batch,
            base_version=self.shard.state.version if base is None else base, num_samples=32, num_parameters=P,
            codec="fp32", payload=codec("fp32").encode(values), gradient_norm=1.0, loss=1.0,
        )  # fmt: skip
        for name, value in fields.items():
            setattr(gradient, name, value)
        offset = self.next_input
        self.next_input += 1
        return Incoming("gradients", 0, offset, 1_000 + offset, b"0", gradient)

    def tick(self, pass_s: float = 1.0) -> list[Weights]:
        self.now_s += pass_s
        return [r.message for r in self._take(self.shard.tick(self.now_s)) if isinstance(r.message, Weights)]

    def of(self, kind: type, weights: str | None = None) -> list[Any]:
        messages = [r.message for r in self.out if isinstance(r.message, kind)]
        return messages if weights is None else [m for m in messages if m.kind == weights]


def test_a_shard_is_a_processor() -> None:
    assert isinstance(Bench().shard, Processor)


def test_version_zero_is_shown_as_target_and_then_as_key_frame_before_any_gradient() -> None:
    bench = Bench()
    start = bench.shard.state.weights.tobytes()
    assert [w.kind for w in bench.tick()] == ["target"]
    [frame] = bench.tick()
    assert (frame.kind, frame.version, frame.target_version, frame.target_offset) == ("key", 0, 0, 0)
    assert (frame.gradient_offset, frame.payload) == (-1, start)
    assert frame.payload_hash == zlib.crc32(start)
    assert bench.out[0].key == b"0/target" and bench.out[1].key == b"0/key"
    assert bench.tick() == []


def test_a_snapshot_is_shown_again_after_a_silence_for_readers_that_missed_it_but_never_by_the_clock_in_rounds() -> (
    None
):
    for synchronous, again in ((False, 2), (True, 0)):
        run = {"synchronous": synchronous}
        bench = Bench(Config.model_validate({"run": run, "parameter_server": {"weights_bytes_per_s": 1e9}}))
        bench.tick()
        [first] = bench.tick()
        silence = [frame for _ in range(4) for frame in bench.tick()]
        repeated = [frame for _ in range(8) for frame in bench.tick()]
        assert silence == [] and len(repeated) == again
        for frame in repeated:
            assert (frame.kind, frame.version, frame.gradient_offset, frame.payload) == (
                first.kind, first.version, first.gradient_offset, first.payload,
            )  # fmt: skip


def test_the_initial_target_holds_the_initial_weights_even_when_gradients_come_before_the_first_tick() -> None:
    bench = Bench()
    start = bench.shard.state.weights.tobytes()
    bench.feed(0)
    assert bench.of(Weights, "target")[0].payload == start


def test_versions_count_applied_updates_exactly_and_the_weights_are_the_optimizers() -> None:
    bench = Bench(config_of(warmup_versions=5))
    section = bench.config.parameter_server
    expected, optimizer = bench.shard.state.weights.copy(), make_optimizer(section)
    moments = {name: np.zeros(P, F) for name in optimizer.tensors}
    for batch in range(9):
        bench.feed(batch)
        values = np.random.default_rng([0, batch]).standard_normal(P).astype(F)
        optimizer.update(expected, moments, values, learning_rate_at(section, batch))
        assert bench.shard.state.version == batch + 1
    assert bench.shard.state.weights.tobytes() == expected.tobytes()


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(0, 12)), max_size=60))
@settings(max_examples=60, deadline=None)
def test_each_batch_is_applied_at_most_once_whoever_sends_it_and_in_whatever_order(
    sent: list[tuple[int, int]],
) -> None:
    """Zombies, restarts and rebalances re-send: per batches partition only what is above the highest handled is applied."""
    bench = Bench(config_of(max_in_flight=0))
    highest: dict[int, int] = {}
    applied = 0
    for partition, batch in sent:
        bench.feed(batch, partition=partition)
        if batch > highest.get(partition, -1):
            highest[partition] = batch
            applied += 1
    state = bench.shard.state
    assert (state.version, state.applied, state.handled) == (applied, applied, highest)
    assert state.dropped_duplicate == len(sent) - applied


def test_a_record_handed_in_again_after_a_crash_of_the_runtime_changes_nothing() -> None:
    bench = Bench()
    record = bench.record(0)
    list(bench.shard.process(record))
    before = bench.shard.state_hash()
    assert list(bench.shard.process(record)) == []
    assert (bench.shard.state_hash(), bench.shard.state.dropped_duplicate) == (before, 0)


@pytest.mark.parametrize(("learners", "window", "bound"), [(1, 1, 4), (2, 3, 24)])
def test_gradients_staler_than_four_times_learners_times_window_are_dropped_and_counted(
    learners: int, window: int, bound: int
) -> None:
    bench = Bench(config_of(learners=learners, max_in_flight=window))
    for batch in range(30):
        bench.feed(batch)
    bench.feed(30, base=30 - bound)
    assert (bench.shard.state.version, bench.shard.state.dropped_stale) == (31, 0)
    bench.feed(31, base=31 - bound - 1)
    assert (bench.shard.state.version, bench.shard.state.dropped_stale) == (31, 1)
    bench.feed(31)
    assert bench.shard.state.dropped_duplicate == 1, "a stale batch is handled: it does not come back fresher"


def test_without_a_window_nothing_is_too_stale() -> None:
    bench = Bench(config_of(max_in_flight=0))
    for batch in range(300):
        bench.feed(batch, base=0)
    assert (bench.shard.state.version, bench.shard.state.dropped_stale) == (300, 0)


@pytest.mark.parametrize("reason", ["stale", "duplicate", "bad"])
def test_a_dropped_gradient_is_covered_by_a_new_snapshot_so_that_its_learner_does_not_wait_for_ever(
    reason: str,
) -> None:
    bench = Bench()
    for batch in range(10):
        bench.feed(batch)
    bench.tick()
    bench.tick()
    version = bench.shard.state.version
    if reason == "stale":
        bench.feed(10, base=0)
    elif reason == "duplicate":
        bench.feed(9)
    else:
        with pytest.raises(BadRecord):
            bench.feed(10, payload=b"")
    view = WeightsView(P, 1)
    view.take(bench.of(Weights, "key")[-1])
    [frame] = bench.tick()
    assert (frame.version, frame.gradient_offset) == (version, 10)
    assert view.take(frame) and view.gradient_offsets == [10], "a reader takes it though the version is the same"
    assert [frame.dropped_stale, frame.dropped_duplicate, frame.dropped_bad] == [
        int(reason == r) for r in ("stale", "duplicate", "bad")
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"payload": b""},
        {"payload": b"\0" * (4 * P + 4)},
        {"payload": np.full(P, np.nan, F).tobytes()},
        {"payload": np.full(P, np.inf, F).tobytes()},
        {"payload": np.full(P, 1e19, F).tobytes()},
        {"num_parameters": P + 1, "payload": b"\0" * (4 * P + 4)},
        {"shard_id": 1},
        {"codec": "no-such-codec"},
        {"base_version": 99},
        {"base_version": -1},
    ],
)
def test_a_gradient_that_must_not_be_used_is_refused_and_leaves_the_state_as_it_was(fields: dict[str, Any]) -> None:
    bench = Bench()
    bench.feed(0)
    before = bench.shard.state_hash()
    with pytest.raises(BadRecord):
        bench.feed(1, **fields)
    state = bench.shard.state
    assert (bench.shard.state_hash(), state.version, state.dropped_bad) == (before, 1, 1)
    assert bench.shard.positions() == {("gradients", 0): 2}
    bench.feed(1)
    assert state.version == 2, "the batch itself was not handled: a good copy of it is applied"


def test_fp16_gradients_are_applied_as_what_their_codec_decodes() -> None:
    bench, other = Bench(), Bench()
    values = np.random.default_rng(5).standard_normal(P).astype(F)
    payload = codec("fp16").encode(values)
    bench.feed(0, codec="fp16", payload=payload)
    decoded = np.ascontiguousarray(codec("fp16").decode(payload, P))
    other.feed(0, payload=codec("fp32").encode(decoded))
    assert bench.shard.state.weights.tobytes() == other.shard.state.weights.tobytes()


def test_snapshots_are_no_more_frequent_than_their_bytes_allow() -> None:
    bench = Bench(config_of(weights_bytes_per_s=4 * P / 0.010))  # one per 10 ms
    bench.tick()
    shown = 0
    for batch in range(100):
        bench.feed(batch)
        shown += len(bench.tick(pass_s=0.001))
    assert shown == 10
    assert bench.shard.next_due_s() == np.inf, "all is shown"
    bench.feed(100)
    assert bench.now_s < bench.shard.next_due_s() <= bench.now_s + 0.0101


def test_a_snapshot_covers_all_that_a_poll_brought_and_counts_gradients_by_staleness() -> None:
    bench = Bench(config_of(max_in_flight=8))
    bench.tick()
    bench.tick()
    for batch, base in enumerate([0, 0, 1, 0, 4]):
        bench.feed(batch, base=base)
    [frame] = bench.tick()
    assert (frame.version, frame.gradient_offset, frame.applied) == (5, 4, 5)
    assert frame.staleness.tolist() == [2, 2, 0, 1]
    bench.feed(5)
    [frame] = bench.tick()
    assert frame.staleness.tolist() == [3, 2, 0, 1], (
        "counted since the process started: any one snapshot tells the whole distribution"
    )


def test_staleness_counts_are_bounded_and_the_last_counts_all_beyond() -> None:
    bench = Bench(config_of(max_in_flight=0))
    for batch in range(1500):
        bench.feed(batch, base=0)
    [frame] = bench.tick()
    assert frame.staleness.tolist() == [1] * 127 + [1500 - 127]


def test_a_target_period_of_501_gives_a_target_at_every_501st_update_with_that_very_versions_weights() -> None:
    """Case 18: synced on the wrong unit, 501 became 5,010. One poll brings many gradients here, so none falls on a tick."""
    bench = Bench(config_of(target_period_versions=501, max_in_flight=0))
    bench.tick()
    weights = {0: bench.shard.state.weights.tobytes()}
    for batch in range(1700):
        bench.feed(batch)
        weights[bench.shard.state.version] = bench.shard.state.weights.tobytes()
    targets = bench.of(Weights, "target")
    assert [t.version for t in targets] == [0, 501, 1002, 1503]
    assert all(t.payload == weights[t.version] for t in targets)
    assert [t.gradient_offset for t in targets] == [-1, 500, 1001, 1502]


def test_dropped_gradients_do_not_count_towards_the_target_period() -> None:
    bench = Bench(config_of(target_period_versions=5))
    for batch in range(4):
        bench.feed(batch)
    for _ in range(7):
        bench.feed(0)
    assert [t.version for t in bench.of(Weights, "target")] == [0]
    bench.feed(4)
    assert [t.version for t in bench.of(Weights, "target")] == [0, 5]


def test_key_frames_wait_until_the_broker_has_said_where_the_target_lies() -> None:
    bench = Bench(config_of(target_period_versions=5))
    bench.tick()
    bench.tick()
    bench.acknowledge = False
    for batch in range(7):
        bench.feed(batch)
    assert bench.tick() == []
    assert "target of version 5" in bench.shard.waiting_for()
    bench.acknowledge_all()
    bench.acknowledge = True
    [frame] = bench.tick()
    assert (frame.version, frame.target_version, frame.target_offset) == (7, 5, 2)
    assert bench.shard.waiting_for() == ""


def test_two_targets_in_one_poll_are_both_emitted_and_the_newer_one_is_named() -> None:
    bench = Bench(config_of(target_period_versions=5))
    bench.acknowledge = False
    for batch in range(11):
        bench.feed(batch)
    bench.tick()
    bench.acknowledge_all()
    bench.acknowledge = True
    [frame] = bench.tick()
    assert (frame.version, frame.target_version, frame.target_offset) == (11, 10, 2)


def test_a_restarted_shard_shows_nothing_but_targets_before_it_has_caught_up() -> None:
    bench = Bench(config_of(target_period_versions=5), caught_up_at=8)
    shown: list[Weights] = []
    for batch in range(7):
        bench.feed(batch)
        shown += bench.tick(0.01)
    assert {w.kind for w in shown} <= {"target"}
    bench.feed(7)
    assert [w.version for w in bench.tick(0.01)] == [8]


def test_a_log_that_ends_in_records_nobody_can_decode_does_not_keep_a_restarted_shard_silent() -> None:
    bench = Bench(caught_up_at=100)
    bench.feed(0)
    seen = [bench.tick(0.5) for _ in range(8)]
    assert [w.version for frames in seen for w in frames] == [1]


def test_a_checkpoint_is_of_the_exact_version_and_its_manifest_comes_after_all_parts_are_acknowledged() -> None:
    bench = Bench(config_of(checkpoint_versions=4, target_period_versions=4))
    bench.tick()
    bench.acknowledge = False
    hashes = {}
    for batch in range(6):
        bench.feed(batch, partition=batch % 2)
        hashes[bench.shard.state.version] = bench.shard.state_hash()
    bench.tick()
    parts = bench.of(CheckpointPart)
    assert [(p.tensor, p.version, p.start, p.total) for p in parts] == [
        (tensor, 4, 0, P) for tensor in ("weights", "moment1", "moment2")
    ]
    assert bench.of(CheckpointManifest) == []
    bench.acknowledge_all()
    bench.tick()
    [manifest] = bench.of(CheckpointManifest)
    assert (manifest.version, manifest.parts, manifest.first_part_offset) == (4, 3, 0)
    assert manifest.state_hash == hashes[4] != hashes[6]
    assert (manifest.gradient_offset, manifest.applied, manifest.time_ms) == (3, 4, 1003)
    assert dict(zip(manifest.handled_partition.tolist(), manifest.handled_offset.tolist(), strict=True)) == {0: 2, 1: 3}
    assert (manifest.target_version, manifest.target_offset) == (4, 1)


def test_a_manifest_is_not_written_before_its_own_target_is_acknowledged() -> None:
    bench = Bench(config_of(checkpoint_versions=4, target_period_versions=4))
    bench.tick()
    bench.acknowledge = False
    for batch in range(4):
        bench.feed(batch)
    target, *parts = bench.unacknowledged
    bench.unacknowledged = parts
    bench.acknowledge_all()
    bench.tick()
    assert bench.of(CheckpointManifest) == []
    bench.unacknowledged = [target]
    bench.acknowledge_all()
    bench.tick()
    assert len(bench.of(CheckpointManifest)) == 1


def test_a_broker_that_acknowledges_no_checkpoint_stops_the_intake_instead_of_filling_memory() -> None:
    bench = Bench(config_of(checkpoint_versions=2))
    bench.acknowledge = False
    batch = 0
    while bench.shard.wants("gradients"):
        bench.feed(batch)
        batch += 1
    assert batch == 2 * MAX_PENDING_CHECKPOINTS
    assert "not acknowledged" in bench.shard.waiting_for()
    bench.acknowledge_all()
    bench.tick()
    assert bench.shard.wants("gradients")


def test_the_ledger_says_what_the_state_was_at_every_multiple() -> None:
    bench = Bench(config_of(ledger_versions=3))
    hashes = {}
    for batch in range(7):
        bench.feed(batch)
        hashes[bench.shard.state.version] = bench.shard.state_hash()
    lines = bench.of(CheckpointLedger)
    assert [(line.version, line.gradient_offset, line.state_hash) for line in lines] == [
        (3, 2, hashes[3]),
        (6, 5, hashes[6]),
    ]
    assert [line.time_ms for line in lines] == [1002, 1005]


@pytest.mark.parametrize("what", ["weights", "moment", "version", "handled", "settings", "shard"])
def test_the_state_hash_covers_everything_the_future_depends_on(what: str) -> None:
    bench = Bench()
    bench.feed(0)
    state, before = bench.shard.state, bench.shard.state_hash()
    if what == "weights":
        state.weights[3] = np.nextafter(state.weights[3], F(9))
    elif what == "moment":
        state.moments["moment2"][0] = np.nextafter(state.moments["moment2"][0], F(9))
    elif what == "version":
        state.version += 1
    elif what == "handled":
        state.handled[0] += 1
    elif what == "shard":
        state.shard_id = 1
    changed = state.state_hash("other") if what == "settings" else bench.shard.state_hash()
    assert changed != before


def test_only_versions_the_chain_allows_are_shown() -> None:
    class Token:
        view = View(1, ("a", "b"))
        token = 2

        def applied(self, version: int) -> None: ...

        def publishable(self, version: int) -> bool:
            return version <= self.token

    chain = Token()
    bench = Bench(chain=chain)
    for batch in range(3):
        bench.feed(batch)
    bench.tick()
    assert bench.of(Weights, "key") == []
    chain.token = 3
    assert [w.version for w in bench.tick()] == [3]


def test_check_valid_raises_for_a_state_that_cannot_be() -> None:
    bench = Bench()
    bench.feed(0)
    bench.shard.check_valid()
    bench.shard.state.weights[0] = np.nan
    with pytest.raises(InvalidState, match="not finite"):
        bench.shard.check_valid()
    other = Bench()
    other.shard.state.version = 3
    with pytest.raises(InvalidState, match="0 gradients applied"):
        other.shard.check_valid()
