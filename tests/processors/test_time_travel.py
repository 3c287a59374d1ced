"""A shard's past on logs in memory: rebuilt versions are those that were shown, and whatever is altered afterwards is found."""

from __future__ import annotations

import contextlib
import dataclasses
import zlib
from collections.abc import Iterator

import numpy as np
import pytest

from consumers.parameter_server.checkpoints import (
    Incomplete,
    ShardState,
    newest_complete,
    restored,
    to_manifest,
    to_parts,
)
from consumers.parameter_server.history import Catalogue, Replayed, replay_to, start_for
from consumers.parameter_server.optimizers import make_optimizer, settings_json
from consumers.parameter_server.shard import Shard
from consumers.parameter_server.verification import APART, BEFORE, Verification
from gorila.compression import codec
from gorila.config import Config
from gorila.errors import BadRecord, OffsetGone, RunError
from gorila.messages import CheckpointLedger, CheckpointManifest, Gradient, Message, Weights
from gorila.processor import Incoming, Outgoing
from gorila.weights_history import Checked, Moment, ShardWindow

P = 700
F = np.float32
NAMES = {name: f"run.{name}" for name in ("checkpoints", "weights", "gradients")}


def config_of(**keys: object) -> Config:
    section = {
        "warmup_versions": 30,
        "target_period_versions": 7,
        "checkpoint_versions": 20,
        "ledger_versions": 8,
        "weights_bytes_per_s": 1e9,
        "key_frame_every": 5,
        **keys,
    }
    return Config.model_validate({"learner": {"max_in_flight": 2}, "parameter_server": section})


def sent(count: int, seed: int = 3) -> list[Gradient]:
    """A learner's gradients, some of them duplicates, stale or bad."""
    rng = np.random.default_rng(seed)
    made, version, batch = [], 0, 0
    for number in range(count):
        kind = (
            "fresh"
            if number < 12
            else str(rng.choice(["fresh", "duplicate", "stale", "bad"], p=[0.8, 0.08, 0.06, 0.06]))
        )
        base = max(0, version - 9) if kind == "stale" else version
        payload = b"?" if kind == "bad" else codec("fp32").encode(rng.standard_normal(P).astype(F))
        made.append(Gradient(0, "l", 0, batch - (kind == "duplicate"), base, 32, P, "fp32", payload, 1.0, 1.0))
        batch += kind != "duplicate"
        version += kind == "fresh"
    return made


class Run:
    """The logs of a run's shard, and a server that works on them and can be killed."""

    def __init__(self, config: Config | None = None, gradients: list[Gradient] | None = None) -> None:
        self.config = config or config_of()
        self.optimizer = settings_json(self.config.parameter_server)
        self.moments = make_optimizer(self.config.parameter_server).tensors
        self.logs: dict[str, list[Message]] = {"checkpoints": [], "weights": []}
        state = ShardState(0, np.random.default_rng(0).standard_normal(P).astype(F), {})
        parts = to_parts(state)
        manifest = to_manifest(state, len(parts), "", 0)
        manifest.first_part_offset, manifest.state_hash = 0, -1
        self.logs["checkpoints"] += [*parts, manifest]
        self.gradients = gradients if gradients is not None else sent(60)
        self.low = {"checkpoints": 0, "gradients": 0}
        self.reached: dict[int, bytes] = {}
        self.version_at: dict[int, int] = {}
        self.written = 0  # gradients in the log when a process starts

    def read(self, start: int, stop: int) -> Iterator[tuple[int, Message]]:
        for offset in range(max(start, self.low["checkpoints"]), min(stop, len(self.logs["checkpoints"]))):
            yield offset, self.logs["checkpoints"][offset]

    def serve(self, upto: int) -> Shard:
        """A server process from its start to the gradient before `upto`, then killed."""
        state = newest_complete(
            self.read, 0, len(self.logs["checkpoints"]), shard_id=0, moments=self.moments, optimizer=self.optimizer
        )
        assert state is not None
        shard = Shard(self.config, state, caught_up_at=self.written)
        self._emit(shard, shard.tick(0.0))
        self._emit(shard, shard.tick(1.0))
        for offset in range(state.gradient_offset + 1, upto):
            with contextlib.suppress(BadRecord):
                self._emit(shard, list(shard.process(self.incoming(offset))))
            self._emit(shard, shard.tick(2.0 + offset))
            self._emit(shard, shard.tick(2.5 + offset))
            self.reached.setdefault(shard.state.version, shard.state.weights.tobytes())
            self.version_at[offset] = shard.state.version
            self.written = max(self.written, offset + 1)
        return shard

    def _emit(self, shard: Shard, records: object) -> None:
        for record in list(records):  # type: ignore[call-overload]
            assert isinstance(record, Outgoing)
            self.logs[record.topic].append(record.message)
            if record.tag is not None:
                shard.delivered(record, 0, len(self.logs[record.topic]) - 1)

    def incoming(self, offset: int) -> Incoming:
        return Incoming("gradients", 0, offset, 100 + offset, b"0", self.gradients[offset])

    def catalogue(self) -> Catalogue:
        found = Catalogue.empty(0)
        for name, log in self.logs.items():
            for offset, message in enumerate(log):
                if offset >= self.low.get(name, 0):
                    found.take(offset, 100, message)
        return found

    def window(self) -> ShardWindow:
        return self.catalogue().window(self.low["checkpoints"], (self.low["gradients"], len(self.gradients)))

    def restored(self, line_offset: int) -> ShardState:
        return restored(
            self.read, self.low["checkpoints"], line_offset, self.catalogue().manifests[line_offset],
            moments=self.moments, optimizer=self.optimizer,
        )  # fmt: skip

    def rebuild(self, moment: Moment) -> Replayed:
        window = self.window()
        replayed = Replayed(self.config, self.restored(start_for(window, moment, "run.gradients")[0].offset))
        after = range(replayed.state.gradient_offset + 1, len(self.gradients))
        if not replay_to(replayed, map(self.incoming, after), moment):
            raise OffsetGone("not there yet")
        return replayed

    def verify(self) -> Checked:
        window = self.window()
        oldest = window.oldest
        assert oldest is not None
        replayed = Replayed(self.config, self.restored(oldest.offset))
        verification = Verification(self.config, replayed, window, NAMES)
        verification.begin()
        for offset in range(replayed.state.gradient_offset + 1, len(self.gradients)):
            verification.take(self.incoming(offset))
        return verification.finish()

    def find(self, kind: type, version: int) -> int:
        """Offset of the first; a server that was killed writes some twice."""
        return next(
            offset
            for offset, message in enumerate(self.logs["checkpoints"])
            if isinstance(message, kind) and message.version == version
        )


@pytest.fixture
def killed() -> Run:
    """A server killed between two checkpoints, and its successor."""
    run = Run()
    run.serve(33)
    run.serve(60)
    return run


def test_any_version_and_any_offset_is_rebuilt_to_the_bytes_it_had(killed: Run) -> None:
    for version, weights in killed.reached.items():
        replayed = killed.rebuild(Moment(version=version))
        assert (replayed.state.version, replayed.state.weights.tobytes()) == (version, weights)
    for offset, version in killed.version_at.items():
        state = killed.rebuild(Moment(offset=offset)).state
        assert (state.gradient_offset, state.version, state.weights.tobytes()) == (
            offset,
            version,
            killed.reached[version],
        )


def test_a_rebuilt_version_is_what_was_published_at_it(killed: Run) -> None:
    shown = [message for message in killed.logs["weights"] if isinstance(message, Weights)]
    assert len(shown) > 30
    for message in shown:
        assert zlib.crc32(killed.rebuild(Moment(version=message.version)).state.weights.data) == message.payload_hash


@pytest.mark.parametrize(
    ("weights_codec", "delta_codec"),
    [("fp32", "one-bit"), ("fp16", "one-bit"), ("delta", "fp16"), ("delta", "one-bit"), ("delta", "top-k")],
)
def test_a_run_whose_server_was_killed_is_verified_record_by_record(weights_codec: str, delta_codec: str) -> None:
    run = Run(config_of(weights_codec=weights_codec, delta_codec=delta_codec))
    run.serve(33)
    end = run.serve(60).state.version
    checked = run.verify()
    assert (checked.first_version, checked.last_version) == (0, end)
    assert checked.compared["checkpoint"] == end // 20 and checked.compared["ledger"] >= end // 8
    shown = [message.kind for message in run.logs["weights"] if isinstance(message, Weights)]
    assert {kind: checked.compared[kind] for kind in set(shown)} == {kind: shown.count(kind) for kind in set(shown)}
    assert ("delta" in shown) == (weights_codec == "delta")
    assert not checked.skipped


def test_compaction_takes_deltas_apart_and_only_those_are_skipped() -> None:
    run = Run(config_of(weights_codec="delta"))
    run.serve(60)
    log = run.logs["weights"]
    gone = next(i for i, m in enumerate(log) if isinstance(m, Weights) and m.kind == "delta")
    log[gone] = CheckpointLedger(9, 0, 0, 0, 0)  # a hole: nothing of this shard
    checked = run.verify()
    assert 1 <= checked.skipped[APART] < 5  # until the next key frame
    assert checked.compared["delta"] > checked.skipped[APART]


def test_an_altered_gradient_is_found_at_the_first_record_that_can_tell(killed: Run) -> None:
    at = next(o for o in range(20, 60) if killed.version_at[o] == killed.version_at[o - 1] + 1)
    gradient = killed.gradients[at]
    values = codec("fp32").decode(gradient.payload, P).copy()
    values[5] = np.nextafter(values[5], F(9))  # one bit of one value
    killed.gradients[at] = dataclasses.replace(gradient, payload=codec("fp32").encode(values))
    before = killed.version_at[at - 1]
    with pytest.raises(
        RunError, match=rf"shard 0 version {before + 1}: .* says .*hash .* give .*agreed up to version {before} "
    ):
        killed.verify()


@pytest.mark.parametrize("kind", [CheckpointLedger, CheckpointManifest])
def test_an_altered_hash_is_named_with_its_place(killed: Run, kind: type) -> None:
    offset = killed.find(kind, 40)
    killed.logs["checkpoints"][offset] = dataclasses.replace(killed.logs["checkpoints"][offset], state_hash=12345)
    what = "ledger" if kind is CheckpointLedger else "checkpoint"
    with pytest.raises(RunError, match=rf"version 40: {what} at run\.checkpoints/0@{offset} says state hash 00003039"):
        killed.verify()


def test_a_ledger_of_another_offset_is_a_mismatch(killed: Run) -> None:
    offset = killed.find(CheckpointLedger, 24)
    said = killed.logs["checkpoints"][offset]
    killed.logs["checkpoints"][offset] = dataclasses.replace(said, gradient_offset=said.gradient_offset + 1)
    with pytest.raises(RunError, match="says after gradient offset"):
        killed.verify()


def test_a_gradient_cut_off_the_end_leaves_a_version_that_nothing_gives(killed: Run) -> None:
    del killed.gradients[-3:]
    with pytest.raises(RunError, match="give only version"):
        killed.verify()


def test_what_retention_took_is_outside_the_window_and_said(killed: Run) -> None:
    killed.low["gradients"] = killed.window().checkpoints[1].gradient_offset + 1
    window = killed.window()
    assert [line.usable for line in window.checkpoints] == [False, True, True][: len(window.checkpoints)]
    assert "gradients from offset 0 follow it" in window.checkpoints[0].why
    oldest = window.oldest
    assert oldest is not None and oldest.version == 20
    with pytest.raises(OffsetGone, match=r"version 19 is outside .* from version 20 "):
        killed.rebuild(Moment(version=19))
    with pytest.raises(OffsetGone, match="gradient offset 3 is outside"):
        killed.rebuild(Moment(offset=3))
    checked = killed.verify()
    assert checked.first_version == 20 and checked.skipped[BEFORE] > 20


def test_a_checkpoint_whose_parts_are_cut_is_not_usable(killed: Run) -> None:
    killed.low["checkpoints"] = killed.catalogue().checkpoints[0].offset  # its part went, its manifest stayed
    line = killed.window().checkpoints[0]
    assert not line.usable and "its parts began at offset 0" in line.why
    with pytest.raises(Incomplete):
        killed.restored(line.offset)


def test_the_target_next_to_a_version_is_that_of_the_last_multiple_of_the_period(killed: Run) -> None:
    for version in (0, 7, 13, 14, 20):
        replayed = killed.rebuild(Moment(version=version))
        if replayed.target is None:
            replayed.first_target()
        due = version - version % 7
        assert replayed.target is None or replayed.target.version == due or version == 20
        if replayed.target is not None and replayed.target.version == due:
            assert replayed.target.payload == killed.reached.get(due, killed.restored(1).weights.tobytes())


def test_a_moment_is_one_of_three_things() -> None:
    for wrong in ({}, {"version": 1, "offset": 2}):
        with pytest.raises(ValueError, match="exactly one"):
            Moment(**wrong)
