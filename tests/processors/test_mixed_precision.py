"""Mixed precision: the step is nearly that of float32, what leaves the step is unscaled, and what overflows costs no batch."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch

from consumers.batch_assembly import assemble
from consumers.gradient_step import GradientStep
from consumers.precision import Precision, device_of
from gorila.compression import codec
from gorila.config import LOCAL_KEYS, LearnerSection
from gorila.environment_facts import EnvironmentFacts
from gorila.errors import ConfigError, UsageError
from gorila.network import build_network
from gorila.settings import load_config, validate
from tests.processors.learning_loop import CARTPOLE, CATCH, LearningLoop, make_batch, make_weights, small_config

CONV = {"factory": "small-conv", "hidden": [32]}


def after(updates: int, facts: EnvironmentFacts, **learner: Any) -> LearningLoop:
    network = CONV if facts is CATCH else {"hidden": [32]}
    loop = LearningLoop(small_config(learner=learner, network=network), facts)
    loop.serve()
    for number in range(1, updates + 1):
        loop.feed(number)
        loop.serve()
    return loop


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize("facts", [CARTPOLE, CATCH], ids=["vectors", "frames"])
def test_bfloat16_learns_a_step_close_to_float32s_and_sends_it_as_halves(facts: EnvironmentFacts) -> None:
    whole, mixed = after(1, facts), after(1, facts, mixed_precision="on")
    assert mixed.learner.step.precision.half == "bfloat16" and whole.learner.step.precision.half == "float32"
    assert [g.codec for g in whole.gradients] == ["fp32"] and [g.codec for g in mixed.gradients] == ["fp16"]
    steps = [loop.shards[0].state.weights - loop.initial for loop in (whole, mixed)]
    sent = [loop.sent() for loop in (whole, mixed)]
    assert not np.array_equal(sent[0], sent[1]), "nothing was computed in halves"
    assert cosine(*sent) > 0.995 and np.linalg.norm(sent[1]) == pytest.approx(np.linalg.norm(sent[0]), rel=0.05)
    assert mixed.gradients[0].gradient_norm == pytest.approx(whole.gradients[0].gradient_norm, rel=0.05)
    assert mixed.gradients[0].loss == pytest.approx(whole.gradients[0].loss, rel=0.05)
    assert cosine(*steps) > 0.9, "Adam's first step is a sign: small gradients may turn"
    assert whole.shards[0].state.weights.dtype == mixed.shards[0].state.weights.dtype == np.float32


def test_over_many_updates_the_loss_falls_as_it_does_in_float32() -> None:
    losses = {}
    for name in ("off", "on"):
        loop = LearningLoop(
            small_config(
                learner={"mixed_precision": name, "clip_norm": 0.0}, network={"hidden": [32]},
                replay={"discount": 0.0}, parameter_server={"target_period_versions": 10_000},
            )
        )  # fmt: skip
        loop.serve()
        for update in range(120):
            loop.feed(update % 4)
            loop.serve()
        losses[name] = [g.loss for g in loop.gradients]
    first, last = np.mean(losses["off"][:4]), np.mean(losses["off"][-4:])
    assert last < 0.7 * first
    assert np.mean(losses["on"][-4:]) == pytest.approx(last, rel=0.25)


def test_a_codec_that_is_set_stays_set() -> None:
    loop = after(1, CARTPOLE, mixed_precision="on", codec="fp32")
    assert loop.gradients[0].codec == "fp32" and loop.learner.step.precision.mixed


def test_the_clip_judges_the_unscaled_gradient() -> None:
    loop = after(1, CARTPOLE, mixed_precision="on", codec="fp32", clip_norm=0.05)
    (sent,) = loop.gradients
    assert sent.gradient_norm > 0.05
    assert np.linalg.norm(codec("fp32").decode(sent.payload, sent.num_parameters)) == pytest.approx(0.05, rel=1e-4)


def step_with(scale: float, config: Any) -> GradientStep:
    step = GradientStep(config, CARTPOLE)
    step.precision = Precision(config.learner, step.online, initial_scale=scale)
    return step


def test_a_scale_that_overflows_is_halved_until_it_does_not_and_the_gradient_is_the_same() -> None:
    config = small_config(learner={"mixed_precision": "on", "huber_delta": 1e4}, network={"hidden": [32]})
    batch = assemble(make_batch(1, config, scale=100.0))  # errors, and so gradients, far above 1
    fine, wild = step_with(65536.0, config), step_with(2.0**127, config)
    gradients = [step.compute(batch, 0.5).gradient.copy() for step in (fine, wild)]
    assert fine.precision.overflows == 0 and wild.precision.overflows > 0
    assert wild.precision.scale < 2.0**127
    assert np.isfinite(gradients[1]).all() and cosine(*gradients) > 0.9999
    assert gradients[1] == pytest.approx(gradients[0], rel=1e-2, abs=1e-6)


def test_a_loss_that_is_not_finite_rejects_the_batch_and_does_not_wear_the_scale_down() -> None:
    loop = LearningLoop(small_config(learner={"mixed_precision": "on"}))
    scale = loop.learner.step.precision.scale
    huge = np.full(len(loop.initial), 3e38, np.float32)
    loop.show(make_weights(loop.initial, 0, kind="target"), make_weights(huge, 1))
    loop.feed(1)
    (priorities,) = loop.priorities
    assert priorities.rejected and loop.gradients == [] and loop.learner.counts.rejected == 1
    assert loop.learner.step.precision.scale == scale and loop.learner.step.precision.overflows == 0
    assert not loop.learner.writer.residual.any(), "a rejected batch never enters the residual"
    loop.show(make_weights(loop.initial, 2))
    loop.feed(2)
    assert len(loop.gradients) == 1 and math.isfinite(loop.gradients[0].gradient_norm)


def test_automatic_means_off_where_there_is_no_gpu() -> None:
    net = build_network(validate({}), CARTPOLE)
    assert not Precision(LearnerSection(), net).mixed
    assert not Precision(LearnerSection(mixed_precision="off"), net).mixed
    if not torch.cuda.is_available():
        assert device_of(LearnerSection(device="auto")).type == "cpu"
        with pytest.raises(ConfigError, match=r"learner\.device.*cuda.*cpu or auto"):
            device_of(LearnerSection(device="cuda"))


def test_the_keys_are_of_a_process_and_a_synchronous_run_stays_on_the_cpu() -> None:
    assert {"learner.device", "learner.mixed_precision"} <= LOCAL_KEYS
    with pytest.raises(UsageError, match=r"learner\.device"):
        load_config("cartpole", ["run.synchronous=true", "learner.device=auto"], {})
