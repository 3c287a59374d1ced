"""The auditor of benchmarks.chaos must itself find what it looks for: a hole, a repetition, other bytes, an update made twice."""

from __future__ import annotations

import random

import numpy as np
import pytest

from benchmarks.chaos_audit import Findings, Lives, Undisturbed
from benchmarks.chaos_faults import schedule
from consumers.parameter_server.checkpoints import ShardState
from consumers.parameter_server.optimizers import make_optimizer
from consumers.parameter_server.shard import Shard
from gorila.kafka import Received
from gorila.messages import Gradient, TransitionBlock, Weights
from gorila.observations import compress
from gorila.settings import load_config

P = 32


def block(first_step: int, rows: int = 4, lane: int = 0, epoch: int = 1) -> TransitionBlock:
    no = np.zeros(rows, np.bool_)
    zeros = np.zeros(rows, np.float32)
    frames = compress(np.zeros((rows, 4), np.float32), "none")
    return TransitionBlock(
        "actor-0",
        epoch,
        lane,
        first_step,
        0,
        0.1,
        frames,
        np.zeros(rows, np.int32),
        zeros,
        no,
        no,
        no,
        no,
        zeros,
        zeros,
    )


@pytest.mark.parametrize(
    ("steps", "lost", "doubled"),
    [([0, 4, 8], 0, 0), ([0, 8], 4, 0), ([4], 4, 0), ([0, 4, 4], 0, 4), ([0, 12, 16], 8, 0)],
)
def test_a_hole_in_a_life_is_lost_and_a_repetition_doubled(steps: list[int], lost: int, doubled: int) -> None:
    findings = Findings()
    lives = Lives(findings)
    for step in steps:
        lives.take(block(step), "here")
    assert (findings.lost, findings.doubled) == (lost, doubled)
    assert lives.rows == 4 * len(steps)


def test_lanes_and_lives_are_followed_one_by_one() -> None:
    findings = Findings()
    lives = Lives(findings)
    for step, lane, epoch in ((0, 0, 1), (0, 1, 1), (4, 0, 1), (0, 0, 2), (4, 1, 1), (4, 0, 2)):
        lives.take(block(step, lane=lane, epoch=epoch), "here")
    assert (findings.lost, findings.doubled) == (0, 0)


class Story:
    """A server that shows what it makes, and the auditor that reads the same log."""

    def __init__(self) -> None:
        config = load_config("cartpole", ["parameter_server.ledger_versions=2", "learner.max_in_flight=0"], {})
        rng = np.random.default_rng(0)
        self.payloads = [rng.standard_normal(P).astype(np.float32).tobytes() for _ in range(8)]
        weights = rng.standard_normal(P).astype(np.float32)

        def shard() -> Shard:
            moments = {name: np.zeros(P, np.float32) for name in make_optimizer(config.parameter_server).tensors}
            return Shard(config, ShardState(0, weights.copy(), moments))

        self.findings = Findings()
        self.audit = Undisturbed(shard(), 2, 1000, self.findings)
        self.server = Undisturbed(shard(), 2, 1000, Findings())

    def gradient(self, offset: int, batch: int, *, audited: bool = True) -> None:
        message = Gradient(0, "learner-0", 0, batch, 0, 32, P, "fp32", self.payloads[batch % 8], 1.0, 1.0)
        record = Received("r.gradients", 0, offset, 1, b"0", b"")
        self.server.gradient(record, message)
        if audited:
            self.audit.gradient(record, message)

    def show(self, flip: bool = False) -> None:
        state = self.server._shard.state
        payload = bytearray(state.weights.tobytes())
        payload[0] ^= flip
        self.audit.weights(
            Weights(
                0,
                state.version,
                "key",
                P,
                -1,
                -1,
                0,
                0,
                0,
                "fp32",
                bytes(payload),
                0,
                0,
                0,
                0,
                0,
                0,
                np.zeros(1, np.int32),
                0.1,
            )
        )


def test_what_was_shown_and_made_from_the_same_log_passes() -> None:
    story = Story()
    for batch in range(4):
        story.gradient(batch, batch)
        story.show()
    story.gradient(4, 3)  # sent again by a restarted learner: dropped by both
    story.show()
    story.audit.state(2, story.server._states[2], "ledger")
    assert story.audit.compare() == 5
    assert (story.findings.lost, story.findings.doubled) == (0, 0), story.findings.lines


def test_other_bytes_a_lost_update_and_another_hash_are_found() -> None:
    story = Story()
    story.gradient(0, 0)
    story.show(flip=True)
    story.audit.compare()
    assert story.findings.doubled == 1
    lost = Story()
    for batch in range(3):
        lost.gradient(batch, batch)
        if batch < 2:
            lost.show()
    lost.audit.compare()
    assert lost.findings.lost == 1
    other = Story()
    for batch in range(2):
        other.gradient(batch, batch)
    other.audit.state(2, other.server._states[2] + 1, "ledger")
    assert other.findings.lost == 1


def test_a_server_that_applied_something_twice_is_found() -> None:
    story = Story()
    story.gradient(0, 0)
    story.gradient(1, 1, audited=False)  # the server made a version the log does not make
    story.show()
    story.audit.compare()
    assert story.findings.doubled == 2  # the bytes of an unknown version, and the version itself


@pytest.mark.parametrize("faults", [5, 12, 100])
def test_a_schedule_is_its_seeds_and_begins_with_every_kind(faults: int) -> None:
    kinds = {
        "kill": ("a", "b"),
        "poison": ("t", "u", "v"),
        "clocks": ("all",),
        "partitions": ("t",),
        "pause": ("a", "b"),
    }
    first, again, other = (schedule(kinds, faults, random.Random(seed)) for seed in (3, 3, 4))
    assert first == again != other
    assert len(first) == faults and {fault.kind for fault in first[:5]} == set(kinds)
    if faults == 100:
        assert {fault.target for fault in first if fault.kind == "poison"} == {"t", "u", "v"}
