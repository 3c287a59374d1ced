"""The learner as a pure processor, in its real runtime over a log in memory, beside real shards."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from consumers import learner_checkpoint
from consumers.learner import Learner
from consumers.learner_service import ServedLearner
from consumers.outbox import MemoryOutbox, Outbox
from gorila.codec import Schemas
from gorila.compression import codec
from gorila.messages import Batch
from gorila.metrics import Metrics
from gorila.network import build_network, load_flat
from gorila.observations import ObservationBlock, gather_stack, inflate
from gorila.processor import Incoming, Outgoing, Processor
from gorila.weights import WeightsView
from tests.processors.learning_loop import CARTPOLE, CATCH, LearningLoop, make_batch, make_weights, small_config

SCHEMAS = Schemas()


def reference_gradient(
    parts: list[Batch],
    config,
    facts,
    online: np.ndarray,
    target: np.ndarray,
    beta: float,  # type: ignore[no-untyped-def]
) -> tuple[np.ndarray, float, np.ndarray]:
    """(gradient, loss, |TD error|) written out row by row with plain autograd."""
    net, frozen = build_network(config, facts), build_network(config, facts)
    load_flat(net, online)
    load_flat(frozen, target)
    probability = np.concatenate([part.probability for part in parts])
    weights = (1.0 / (1000 * probability)) ** beta
    weights /= weights.max()
    losses, errors, row = [], [], 0
    for part in parts:
        frames = np.concatenate([inflate(block) for block in part.blocks])
        states = [
            torch.from_numpy(gather_stack(frames, getattr(part, name).reshape(-1, part.stack)))
            for name in ("frames_tm1", "frames_t")
        ]
        for i in range(len(part.action)):
            q_tm1, q_select = net(states[0][i : i + 1])[0], net(states[1][i : i + 1])[0].detach()
            q_target = frozen(states[1][i : i + 1])[0].detach()
            chosen = int(q_select.argmax()) if config.learner.double else int(q_target.argmax())
            goal = float(part.n_step_return[i]) + float(part.discount[i]) * float(q_target[chosen])
            error = goal - q_tm1[int(part.action[i])]
            losses.append(
                weights[row] * torch.nn.functional.huber_loss(error, torch.zeros(()), delta=config.learner.huber_delta)
            )
            errors.append(abs(float(error.detach())))
            row += 1
    loss = torch.stack(losses).mean()
    net.flat_gradients.zero_()
    loss.backward()
    return net.flat_gradients.numpy().copy(), float(loss.detach()), np.array(errors)


def one_update(**sections):  # type: ignore[no-untyped-def]
    loop = LearningLoop(small_config(**sections))
    loop.serve()
    loop.feed(1)
    return loop


def test_it_is_a_processor() -> None:
    assert isinstance(LearningLoop(small_config()).learner, Processor)


def test_a_batch_becomes_one_gradient_a_shard_and_one_priorities_record() -> None:
    loop = one_update(parameter_server={"shards": 2})
    gradients, (priorities,) = loop.gradients, loop.priorities
    assert [g.shard_id for g in gradients] == [0, 1]
    assert {(g.batch_partition, g.batch_offset, g.base_version, g.num_samples) for g in gradients} == {(0, 1, 0, 16)}
    assert (priorities.batch_partition, priorities.batch_offset, priorities.version) == (0, 1, 0)
    parts = make_batch(1, loop.config)
    for column in ("partition", "offset", "row"):
        assert getattr(priorities, column).tolist() == np.concatenate([getattr(p, column) for p in parts]).tolist()
    loop.driver.commit()
    assert loop.driver.committed("batches") == 2


@pytest.mark.parametrize("facts", [CARTPOLE, CATCH], ids=["vectors", "frames"])
@pytest.mark.parametrize("double", [True, False])
def test_the_gradient_is_that_of_the_textbook(facts, double) -> None:  # type: ignore[no-untyped-def]
    factory = {"factory": "small-conv", "hidden": [16]} if facts is CATCH else {}
    config = small_config(learner={"double": double}, network=factory)
    loop = LearningLoop(config, facts)
    rng = np.random.default_rng(3)
    target = loop.initial + rng.standard_normal(len(loop.initial)).astype(np.float32) * np.float32(0.02)
    loop.show(make_weights(target, 0, kind="target"), make_weights(loop.initial, 40))
    loop.feed(1)
    gradient, loss, errors = reference_gradient(
        make_batch(1, config, facts), config, facts, loop.initial, target, beta_at(40, config)
    )
    (sent,) = loop.gradients
    assert codec("fp32").decode(sent.payload, sent.num_parameters) == pytest.approx(gradient, abs=1e-6, rel=1e-3)
    assert sent.loss == pytest.approx(loss, rel=1e-4) and sent.gradient_norm == pytest.approx(
        np.linalg.norm(gradient), rel=1e-4
    )
    assert loop.priorities[0].td_error == pytest.approx(errors, rel=1e-4, abs=1e-5)


def beta_at(version: int, config) -> float:  # type: ignore[no-untyped-def]
    learner = config.learner
    return float(
        learner.beta_start + (learner.beta_end - learner.beta_start) * min(1.0, version / learner.beta_versions)
    )


def test_beta_follows_the_global_version_after_a_restart_too() -> None:
    """Case 7."""
    config = small_config(learner={"beta_start": 0.0, "beta_end": 1.0, "beta_versions": 100})
    for version in (0, 50, 100, 400):
        loop = LearningLoop(config)
        loop.show(make_weights(loop.initial, 0, kind="target"), make_weights(loop.initial, version))
        loop.driver.crash()
        loop.feed(1)
        _, loss, _ = reference_gradient(
            make_batch(1, config), config, CARTPOLE, loop.initial, loop.initial, min(1.0, version / 100)
        )
        assert loop.gradients[0].loss == pytest.approx(loss, rel=1e-4)


# ---- the window


def test_with_a_window_of_one_every_gradient_is_computed_on_weights_that_include_the_one_before() -> None:
    loop = LearningLoop(small_config())
    loop.serve()
    loop.feed(1, 2, 3)
    assert len(loop.gradients) == 1
    assert loop.learner.waiting_for() == "parameter-server: 1 gradients in flight, bound 1"
    for expected in (2, 3):
        loop.serve()
        assert len(loop.gradients) == expected
    assert [g.base_version for g in loop.gradients] == [0, 1, 2]


def test_a_larger_window_lets_that_many_out_and_no_more() -> None:
    loop = LearningLoop(small_config(learner={"max_in_flight": 3}))
    loop.serve()
    loop.feed(*range(1, 7))
    for _ in range(10):
        loop.driver.turn()
    assert [g.base_version for g in loop.gradients] == [0, 0, 0]
    loop.serve()
    for _ in range(10):
        loop.driver.turn()
    assert len(loop.gradients) == 6
    loop.learner.check_valid()


def test_every_shard_must_cover_a_gradient() -> None:
    loop = LearningLoop(small_config(parameter_server={"shards": 2}))
    loop.serve()
    loop.feed(1, 2)
    loop.serve(only=0)
    assert len(loop.gradients) == 2, "shard 1 has not applied the first yet"
    loop.serve(only=1)
    assert len(loop.gradients) == 4


def test_a_snapshot_counts_only_against_the_delivered_offset() -> None:
    loop = LearningLoop(small_config(), automatic=False)
    loop.serve()
    loop.feed(1, 2)
    loop.show(make_weights(loop.initial, 1, gradient_offset=0))
    assert len(loop.gradients) == 1, "the broker has not said where the gradient lies"
    loop.driver.acknowledge()
    loop.driver.turn()
    assert len(loop.gradients) == 2


def test_a_dropped_gradient_does_not_hold_the_window() -> None:
    """gradient_offset covers what was dropped: the version stays, the learner goes on."""
    loop = LearningLoop(small_config())
    loop.serve()
    loop.feed(1, 2)
    loop.show(make_weights(loop.initial, 1, gradient_offset=0))
    assert len(loop.gradients) == 2


def test_without_a_bound_at_most_one_batch_is_unacknowledged_when_the_next_is_written() -> None:
    loop = LearningLoop(small_config(learner={"max_in_flight": 0}), automatic=False)
    loop.serve()
    loop.feed(1, 2, 3, 4)
    for _ in range(5):
        loop.driver.turn()
    assert len(loop.gradients) == 2 and loop.learner.waiting_for() == "Kafka: a gradient is not acknowledged"
    loop.driver.acknowledge()
    for _ in range(5):
        loop.driver.turn()
    assert len(loop.gradients) == 4


def test_synchronous_runs_have_a_window_of_one() -> None:
    loop = LearningLoop(small_config(run={"synchronous": True}, learner={"max_in_flight": 8}))
    loop.serve()
    loop.feed(1, 2)
    assert len(loop.gradients) == 1


def test_it_says_for_whom_it_waits() -> None:
    loop = LearningLoop(small_config())
    assert loop.learner.waiting_for().startswith("replay:")
    loop.feed(1)
    assert loop.learner.waiting_for().startswith("parameter-server: no weights")
    assert loop.gradients == []


def test_it_takes_no_more_batches_than_it_can_hold_ready() -> None:
    loop = LearningLoop(small_config())
    loop.feed(1, 2, 3, 4, 5)
    assert not loop.learner.wants("batches") and loop.learner.wants("weights")
    loop.learner.check_valid()


# ---- target weights


def test_nothing_is_computed_until_the_target_record_that_the_snapshot_names_is_here() -> None:
    loop = LearningLoop(small_config())
    asked: list[int] = []
    loop.learner._look_again = lambda: asked.append(1)
    loop.show(make_weights(loop.initial, 0, kind="target"), make_weights(loop.initial, 60, target=50))
    loop.feed(1)
    assert loop.gradients == [] and asked == [1]
    loop.show(make_weights(loop.initial, 50, kind="target"))
    assert len(loop.gradients) == 1


def test_target_weights_are_exactly_the_target_records_of_a_period_of_501() -> None:
    """Case 18: counted in global updates; 0, 501 and 1,002, and the very values of those versions."""
    config = small_config(
        learner={"batch_size": 2},
        replay={"record_rows": 2},
        network={"hidden": [1]},
        parameter_server={"target_period_versions": 501},
    )
    loop = LearningLoop(config)
    loaded: list[np.ndarray] = []
    load_target = loop.learner.step.load_target
    loop.learner.step.load_target = lambda flat: (loaded.append(flat.copy()), load_target(flat))[1]  # type: ignore[method-assign]
    wanted = {0: loop.initial.copy()}
    loop.serve()
    for number in range(1, 1010):
        loop.feed(number)
        loop.serve()
        version = loop.shards[0].state.version
        assert version == number
        if version % 501 == 0:
            wanted[version] = loop.shards[0].state.weights.copy()
    assert list(wanted) == [0, 501, 1002]
    assert [values.tolist() for values in loaded] == [values.tolist() for values in wanted.values()]


# ---- batches in parts


def test_it_never_computes_from_half_a_batch() -> None:
    loop = LearningLoop(small_config())
    loop.serve()
    first, second = make_batch(1, loop.config), make_batch(2, loop.config)
    loop.driver.feed("batches", first[1], *second)
    (gradient,) = loop.gradients
    assert gradient.batch_offset == 2 and loop.learner.orphan_parts == 1
    loop.driver.commit()
    assert loop.driver.committed("batches") == 3


def test_a_batch_that_lost_its_end_is_passed_over() -> None:
    loop = LearningLoop(small_config())
    loop.serve()
    loop.driver.feed("batches", make_batch(1, loop.config)[0], *make_batch(2, loop.config))
    assert [g.batch_offset for g in loop.gradients] == [2]
    loop.driver.commit()
    assert loop.driver.committed("batches") == 3


def test_a_beginning_whose_split_is_gone_does_not_hold_the_commit_back_until_replay_waits() -> None:
    loop = LearningLoop(small_config(learner={"max_in_flight": 0}))
    bound = loop.config.replay.max_lag_batches * loop.config.record_parts
    loop.serve()
    loop.driver.feed("batches", make_batch(1, loop.config, split="killed")[0])
    written = 1
    for number in range(1, 60):
        lag = written - (loop.driver.committed("batches") or 0)
        assert lag <= bound, (
            "replay would wait for this learner, and this learner for a split that is not there any more"
        )
        loop.feed(number)
        written += loop.config.record_parts
        loop.serve()
        loop.driver.commit()
    assert (loop.learner.orphan_parts, loop.learner.counts.updates) == (1, 59)


def test_parts_of_two_splits_may_alternate() -> None:
    loop = LearningLoop(small_config(learner={"max_in_flight": 4}))
    loop.serve()
    one, other = make_batch(1, loop.config), make_batch(1, loop.config, split="the-other")
    loop.driver.feed("batches", one[0], other[0], one[1])
    loop.driver.commit()
    assert [g.batch_offset for g in loop.gradients] == [2]
    assert loop.driver.committed("batches") == 1, (
        "the other split's batch is not complete: its part is read again after a restart"
    )
    loop.driver.feed("batches", other[1])
    loop.driver.commit()
    assert [g.batch_offset for g in loop.gradients] == [2, 3] and loop.driver.committed("batches") == 4


def test_a_record_of_another_environment_is_a_dead_letter_and_its_batch_is_passed_over() -> None:
    loop = LearningLoop(small_config(learner={"max_in_flight": 4}))
    loop.serve()
    wrong_stack, wrong_action = make_batch(1, loop.config), make_batch(2, loop.config)
    wrong_stack[0].stack, wrong_stack[0].frames_tm1, wrong_stack[0].frames_t = (
        2,
        np.zeros(16, np.int32),
        np.zeros(16, np.int32),
    )
    wrong_action[1].action[3] = 2
    frames = make_batch(3, loop.config, CATCH)
    loop.driver.feed("batches", *wrong_stack, *wrong_action, *frames, *make_batch(4, loop.config))
    assert [reason.split(" ")[0] for reason in loop.driver.dead_letters()] == [
        "stack",
        "an",
        "observations",
        "observations",
    ]
    assert [g.batch_offset for g in loop.gradients] == [7]
    loop.driver.commit()
    assert loop.driver.committed("batches") == 8


def test_a_block_that_does_not_inflate_costs_its_batch_and_nothing_else() -> None:
    loop = LearningLoop(small_config(network={"factory": "small-conv", "hidden": [8]}), CATCH)
    loop.serve()
    broken = make_batch(1, loop.config, CATCH)
    block = broken[1].blocks[0]
    broken[1].blocks[0] = ObservationBlock(block.dtype, block.shape, block.count, "zstd", b"not zstd")
    loop.driver.feed("batches", *broken, *make_batch(2, loop.config, CATCH))
    assert len(loop.bad) == 1 and "inflate" in loop.bad[0]
    assert [g.batch_offset for g in loop.gradients] == [3]


def test_a_partition_that_went_to_another_learner_takes_its_batches_along() -> None:
    loop = LearningLoop(small_config())
    loop.feed(1)
    loop.driver.feed("batches", make_batch(2, loop.config)[0])
    loop.learner.revoked([("batches", 0)])
    loop.serve()
    assert loop.gradients == [] and loop.learner.positions() == {}


# ---- clip, outliers


def test_the_norm_is_clipped_over_all_shards_so_that_1_2_and_4_shards_make_the_same_update() -> None:
    """Case 26."""
    updates, weights = [], []
    for shards in (1, 2, 4):
        loop = LearningLoop(
            small_config(learner={"clip_norm": 0.05}, parameter_server={"shards": shards, "optimizer": "sgd"})
        )
        loop.serve()
        for number in range(1, 6):
            loop.feed(number)
            loop.serve()
        updates.append(loop.sent())
        weights.append(np.concatenate([shard.state.weights for shard in loop.shards]))
        assert all(g.gradient_norm > 0.05 for g in loop.gradients)
        first = [codec("fp32").decode(g.payload, g.num_parameters) for g in loop.gradients if g.base_version == 0]
        assert np.linalg.norm(np.concatenate(first)) == pytest.approx(0.05, rel=1e-5)
    for other in (1, 2):
        assert np.array_equal(updates[0], updates[other]) and np.array_equal(weights[0], weights[other])


def test_an_outlier_sends_its_priorities_and_no_gradient_and_leaves_the_residual_alone() -> None:
    loop = LearningLoop(small_config(learner={"outlier_sigma": 6.0, "outlier_warmup_batches": 5, "codec": "fp16"}))
    loop.serve()
    for number in range(1, 8):
        loop.feed(number)
        loop.serve()
    residual = loop.learner.writer.residual.copy()
    loop.feed(100, scale=1000.0)
    loop.serve()
    assert loop.priorities[-1].rejected and len(loop.gradients) == 7 and len(loop.priorities) == 8
    assert np.array_equal(residual, loop.learner.writer.residual)
    loop.feed(8)
    assert len(loop.gradients) == 8, "the window is not held by what was never sent"
    loop.driver.commit()
    assert loop.driver.committed("batches") == 18


def test_ten_outliers_in_a_row_are_rejected_the_next_is_taken_and_the_log_says_so() -> None:
    """rules.md 13."""
    config = small_config(learner={"outlier_sigma": 6.0, "outlier_warmup_batches": 3})
    loop = LearningLoop(config)
    warned: list[tuple[str, int]] = []

    class Log:
        def warning(self, event: str, **keys: object) -> None:
            warned.append((event, int(str(keys["rejected_in_a_row"]))))

    served = ServedLearner(config, CARTPOLE, "learner-0", loop.learner.view, MemoryOutbox())
    served.service = SimpleNamespace(config=config, log=Log())  # type: ignore[assignment]
    served.metrics, served.checkpoint_due_s = Metrics("learner"), math.inf
    for loss in (1.0, 1.1, 0.9, 1.0):
        assert not served.guard.rejects(loss, 1.0)
    verdicts = []
    for number in range(11):
        verdicts.append(served.guard.rejects(100.0**number * 1e4, 1.0))  # whatever the averages have become
        served.snapshot()
    assert verdicts == [True] * 10 + [False] and warned == [("loss.outlier_accepted", 10)]


def test_a_loss_that_is_not_finite_is_rejected_and_its_bad_rows_keep_their_priorities() -> None:
    loop = LearningLoop(small_config())
    huge = np.full(len(loop.initial), 3e38, np.float32)
    loop.show(make_weights(loop.initial, 0, kind="target"), make_weights(huge, 1))
    loop.feed(1)
    (priorities,) = loop.priorities
    assert priorities.rejected and loop.gradients == [] and len(priorities.td_error) < 16
    assert loop.learner.counts.rejected == 1


# ---- error feedback and restarts


def remembering(computed: list[np.ndarray]) -> Callable[[Learner], Learner]:
    """Wraps a learner so that what it computes is appended to `computed`, before the residual is added."""

    def wrap(learner: Learner) -> Learner:
        compute = learner.step.compute

        def remember(batch, beta):  # type: ignore[no-untyped-def]
            result = compute(batch, beta)
            computed.append(result.gradient.astype(np.float64))
            return result

        learner.step.compute = remember  # type: ignore[method-assign]
        return learner

    return wrap


def conserved(loop: LearningLoop, computed: list[np.ndarray]) -> None:
    residual = loop.learner.writer.residual
    assert residual is not None
    total = np.sum(computed, axis=0)
    assert loop.sent() + residual == pytest.approx(total, abs=1e-7 * len(computed))
    assert np.abs(residual).max() > 0


LOSSY = ("fp16", "one-bit", "top-k")


def lossy_config(name: str, shards: int, **learner: object):  # type: ignore[no-untyped-def]
    """450 parameters, so that top-k leaves some out; it does not go with Adam."""
    return small_config(
        learner={"codec": name, "top_k_warmup_versions": 0, "one_bit_block": 64, **learner},
        network={"hidden": [64]},
        parameter_server={"shards": shards, "optimizer": "adagrad"},
    )


@pytest.mark.parametrize("name", LOSSY)
@pytest.mark.parametrize("shards", [1, 2, 4])
def test_what_was_sent_and_the_residual_are_what_was_computed(shards: int, name: str) -> None:
    """Case 24."""
    computed: list[np.ndarray] = []
    config = lossy_config(name, shards)
    loop = LearningLoop(config, wrap=remembering(computed))
    loop.serve()
    for number in range(1, 21):
        loop.feed(number)
        loop.serve()
    assert len(computed) == 20
    conserved(loop, computed)
    writer = loop.learner.writer
    assert writer.residual_norm == pytest.approx(np.linalg.norm(writer.residual))
    assert (writer.written, writer.payload_bytes) == (20, sum(len(g.payload) for g in loop.gradients))


@pytest.mark.parametrize(
    ("call", "after"),
    [("poll", 0), ("poll", 1), ("produce", 0), ("produce", 1), ("produce", 2), ("commit", 0)],
)
@pytest.mark.parametrize("name", LOSSY)
def test_a_kill_at_any_call_loses_and_doubles_nothing(name: str, call: str, after: int, tmp_path: Path) -> None:
    """Case 24: Σ sent + residual = Σ gradient, each batch once; what is sent again is the same bytes."""
    config = lossy_config(name, 2)
    outbox = Outbox(tmp_path / "learner-0.outbox", "test", len(LearningLoop(config).initial), 2, SCHEMAS)
    computed: list[np.ndarray] = []
    loop = LearningLoop(config, outbox=outbox, wrap=remembering(computed))
    written: dict[int, np.ndarray] = {}
    write = outbox.write

    def remember(slot) -> None:  # type: ignore[no-untyped-def]
        assert slot.batch_offset not in written, "a batch was learned from twice"
        written[slot.batch_offset] = computed[-1]
        write(slot)

    outbox.write = remember  # type: ignore[method-assign]
    loop.serve()
    killed = 0
    for number in range(1, 13):
        if number % 3 == 0:
            killed += loop.driver.crash_at(
                call,
                lambda number=number: (loop.feed(number), loop.driver.commit()),
                after=after,
            )
            if len(loop.driver.cluster.read("test.batches")) < 2 * number:
                position = len(loop.driver.cluster.read("test.batches"))
                loop.driver.feed("batches", *make_batch(number, config)[position % 2 :])
        else:
            loop.feed(number)
        for _ in range(4):
            loop.serve()
    assert killed >= 2
    assert sorted(written) == [2 * number - 1 for number in range(1, 13)]
    residual = loop.learner.writer.residual
    assert loop.sent() + residual == pytest.approx(np.sum(list(written.values()), axis=0), abs=1e-6)
    for shard in (0, 1):
        payloads: dict[int, set[bytes]] = {}
        for record in loop.driver.cluster.read("test.gradients", shard):
            message = SCHEMAS.decode(record.value)
            payloads.setdefault(message.batch_offset, set()).add(record.value)
        assert len(payloads) == 12 and all(len(distinct) == 1 for distinct in payloads.values())
    assert [shard.state.version for shard in loop.shards] == [12, 12]


def test_a_residual_left_by_a_lossy_codec_is_sent_by_one_that_loses_nothing() -> None:
    outbox, computed = MemoryOutbox(), []  # type: ignore[var-annotated]
    loop = LearningLoop(lossy_config("top-k", 1), outbox=outbox, wrap=remembering(computed))
    loop.serve()
    loop.feed(1)
    left = loop.learner.writer.residual.copy()
    assert np.abs(left).max() > 0
    other = LearningLoop(lossy_config("fp32", 1), outbox=outbox, wrap=remembering(computed))
    other.serve()
    other.feed(1, 2)  # batch 1 is in the outbox
    other.serve()
    newest = other.gradients[-1]
    assert newest.codec == "fp32"
    assert codec("fp32").decode(newest.payload, len(left)) == pytest.approx(left + computed[-1], abs=1e-7)
    assert not other.learner.writer.residual.any()


def test_top_k_sends_more_while_the_global_version_is_young() -> None:
    loop = LearningLoop(lossy_config("top-k", 1, top_k_warmup_versions=4))
    loop.serve()
    for number in range(1, 7):
        loop.feed(number)
        loop.serve()
    entries = [len(g.payload) // 6 for g in loop.gradients]
    assert entries == [112, 64, 64, 64, 64, 64]  # 25 % of 450, then never fewer than 64


def test_a_restart_sends_the_newest_slots_again_byte_for_byte_before_anything_new() -> None:
    outbox = MemoryOutbox()
    loop = LearningLoop(small_config(), outbox=outbox)
    loop.serve()
    loop.feed(1)
    before = loop.driver.cluster.read("test.gradients")[0].value
    loop.driver.crash()
    loop.feed(2)
    again = [record.value for record in loop.driver.cluster.read("test.gradients")]
    assert again == [before, before], "batch 1 is not computed again, and batch 2 waits for the window"
    loop.serve()
    assert [g.batch_offset for g in loop.gradients] == [1, 1, 3]
    assert loop.learner.counts.skipped_batches == 1
    assert loop.shards[0].state.dropped_duplicate == 1 and loop.shards[0].state.version == 1


def test_another_shard_count_keeps_the_residual_and_sends_nothing_that_no_shard_would_take() -> None:
    """Case 24: the residual is of the parameters, not of the cut."""
    outbox = MemoryOutbox()
    computed: list[np.ndarray] = []
    loop = LearningLoop(small_config(learner={"codec": "fp16"}), outbox=outbox, wrap=remembering(computed))
    loop.serve()
    for number in range(1, 6):
        loop.feed(number)
        loop.serve()
    residual = loop.learner.writer.residual.copy()
    conserved(loop, computed)
    other = LearningLoop(small_config(learner={"codec": "fp16"}, parameter_server={"shards": 4}), outbox=outbox)
    assert np.array_equal(other.learner.writer.residual, residual)
    assert other.learner.writer.unsent == []


# ---- the local checkpoint


def test_the_local_checkpoint_brings_back_residual_buffers_and_averages(tmp_path: Path) -> None:
    config = small_config(
        learner={"codec": "fp16", "outlier_sigma": 6.0},
        network={"factory": "tests.unit.user_networks:Normed", "hidden": []},
    )
    loop = LearningLoop(config)
    loop.serve()
    for number in range(1, 5):
        loop.feed(number)
        loop.serve()
    path = tmp_path / "learner-0.safetensors"
    learner_checkpoint.save(path, "test", loop.learner)
    fresh = Learner(config, CARTPOLE, "learner-0", WeightsView(len(loop.initial), 1), MemoryOutbox())
    assert fresh.writer.residual_lost
    assert not learner_checkpoint.restore(path, "another-run", fresh, residual_too=True)
    assert learner_checkpoint.restore(path, "test", fresh, residual_too=True)
    assert np.array_equal(fresh.writer.residual, loop.learner.writer.residual)
    assert fresh.guard.state() == loop.learner.guard.state() and fresh.guard.batches == 4
    buffers = loop.learner.step.buffers()
    assert int(buffers["body.norm.num_batches_tracked"]) == 4
    assert {k: v.tolist() for k, v in fresh.step.buffers().items()} == {k: v.tolist() for k, v in buffers.items()}


def test_a_checkpoint_that_cannot_be_read_is_no_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "learner-0.safetensors"
    learner = LearningLoop(small_config()).learner
    assert not learner_checkpoint.restore(path, "test", learner, residual_too=True)
    path.write_bytes(b"\xff" * 100)
    assert not learner_checkpoint.restore(path, "test", learner, residual_too=True)


def test_the_round_trip_is_from_a_gradients_emission_to_weights_that_include_it() -> None:
    config = small_config(learner={"max_in_flight": 2})
    now_s = [10.0]
    loop = LearningLoop(config)
    learner = Learner(config, CARTPOLE, "learner-0", loop.learner.view, MemoryOutbox(), clock=lambda: now_s[0])
    loop.show(make_weights(loop.initial, 0, kind="target"), make_weights(loop.initial, 0))

    def update(number: int) -> list[Outgoing]:
        for part, message in enumerate(make_batch(number, config)):
            learner.process(Incoming("batches", 0, 2 * number + part, 0, None, message))
        return list(learner.tick(now_s[0]))

    gradient, first = update(0)
    learner.delivered(gradient, 0, 7)
    now_s[0] = 10.004
    learner.process(Incoming("weights", 0, 0, 0, b"0/key", make_weights(loop.initial, 1, gradient_offset=6)))
    now_s[0] = 10.005
    learner.process(Incoming("weights", 0, 0, 0, b"0/key", make_weights(loop.initial, 2, gradient_offset=7)))
    told = [first, update(1)[-1], update(2)[-1]]
    assert [record.message.round_trip_ms for record in told] == pytest.approx([-1.0, 5.0, 5.0])  # type: ignore[union-attr]
