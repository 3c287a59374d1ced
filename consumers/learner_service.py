"""A learner process: the pure learner on Kafka, with its outbox, its prefetch thread and its local checkpoint.

Start, in this order:
1. The outbox says what the process before had in hand; what it sent last is sent again first.
2. Weights and their target are looked for once, from the end of the log; then read as they come.
3. Batches go on at the group's committed offset. A batch that the outbox knows is skipped.
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path

import torch

from consumers import learner_checkpoint
from consumers.learner import Learner
from consumers.outbox import Outbox
from consumers.outlier_guard import MAX_IN_A_ROW
from consumers.prefetch import Prefetch
from gorila.errors import LocalError
from gorila.flow import LagGate
from gorila.kafka import Received
from gorila.metrics import Metrics
from gorila.network import build_network
from gorila.processor import Incoming, Outgoing
from gorila.runtime import Input, Runtime
from gorila.service import Service
from gorila.topics import group_name
from gorila.weights import WeightsView
from gorila.weights_follower import WeightsFollower

TICK_INTERVAL_S = 0.05
"""Ticks when idle. A learner with something to compute says so itself (Learner.next_due_s)."""

NORM_INTERVAL_S = 1.0


class GradientGate:
    """Each replica of each shard is a group of its own; this is one gate for all (gorila.ports.Gate).

    Of a shard's replicas the foremost counts: a dead one must not hold up the run. What all of them have is the in-flight window's business.
    """

    def __init__(self, service: Service) -> None:
        section, bound = service.config.parameter_server, service.config.learner.max_lag_records
        self._gates = [
            [
                LagGate(
                    service.cluster,
                    group_name(service.run, f"parameter-server-{shard}-{replica}"),
                    service.topic("gradients"),
                    [shard],
                    bound,
                )
                for replica in range(section.replicas)
            ]
            for shard in range(section.shards)
        ]

    def may_write(self, partition: int, next_offset: int) -> bool:
        """See Gate."""
        return any(gate.may_write(partition, next_offset) for gate in self._gates[partition])

    def waiting_for(self) -> str:
        """See Gate: the first shard all of whose replicas are behind."""
        for replicas in self._gates:
            texts = [gate.waiting_for() for gate in replicas]
            if all(texts):
                return texts[0]
        return ""


class ServedLearner(Learner):
    """A learner that leaves a local checkpoint every `checkpoint_interval_s`, at a moment when its gradients are acknowledged."""

    service: Service
    metrics: Metrics
    checkpoint_path: Path
    checkpoint_interval_s: float
    checkpoint_due_s: float
    _norm_due_s: float = 0.0
    _outliers_accepted: int = 0

    def snapshot(self) -> Iterable[Outgoing]:
        """Nothing for Kafka; see Learner."""
        now_s = time.monotonic()
        if now_s >= self.checkpoint_due_s and self.counts.updates:
            self.checkpoint_due_s = now_s + self.checkpoint_interval_s
            self.save_checkpoint()
        self._show(now_s)
        return ()

    def save_checkpoint(self) -> None:
        """A disk that refuses is told of; learning goes on. What a restart needs is in the outbox, whose room was claimed at the start."""
        try:
            learner_checkpoint.save(self.checkpoint_path, self.service.run, self)
        except LocalError as error:
            self.service.log.warning(
                "checkpoint.not_saved", reason=str(error), tried_again_in_s=self.checkpoint_interval_s
            )

    def _show(self, now_s: float) -> None:
        counts, metrics = self.counts, self.metrics
        metrics.gauge("learner_updates", counts.updates)
        refused = {"rejected": counts.rejected, "skipped": counts.skipped_batches, "bad": counts.bad_batches}
        for why, number in refused.items():
            metrics.gauge("learner_batches_refused", number, why=why)
        metrics.gauge("learner_orphan_parts", self.orphan_parts)
        if self.guard.accepted_after_row > self._outliers_accepted:
            self._outliers_accepted = self.guard.accepted_after_row
            self.service.log.warning(
                "loss.outlier_accepted",
                rejected_in_a_row=MAX_IN_A_ROW,
                loss_mean=self.guard.mean,
                reason="the loss stayed far above its mean: it is taken as the new scale",
            )
        metrics.total("codec_values_total", self.writer.saturated, what="saturated")
        metrics.total("codec_values_total", self.writer.underflowed, what="underflowed")
        metrics.total("codec_gradients_total", self.writer.written)
        metrics.total("codec_bytes_total", self.writer.payload_bytes)
        if self.service.config.monitor.metrics_port and now_s >= self._norm_due_s:  # half a millisecond for Nature's
            self._norm_due_s = now_s + NORM_INTERVAL_S
            metrics.gauge("codec_residual_norm", self.writer.residual_norm)


def run_learner(service: Service) -> None:
    """Learn until `service.stop`.

    Raises:
        BrokerError, LocalError (outbox or checkpoint cannot be written), RunError (nothing but bad records comes).
    """
    started_s = time.monotonic()
    config, facts = service.config, service.facts
    torch.set_num_threads(config.learner.torch_threads)
    folder = service.run_dir or Path(".gorila") / "runs" / service.run
    num_parameters = build_network(config, facts).num_parameters
    shards = config.parameter_server.shards
    outbox_path = folder / f"{service.name}.outbox"
    outbox = Outbox(outbox_path, service.run, num_parameters, shards, service.schemas)
    if _of_an_earlier_life(service, outbox):
        service.log.warning(
            "outbox.ignored", path=str(outbox_path), reason="it names batches that this run's topic does not have"
        )
        outbox.close()
        outbox_path.replace(outbox_path.with_name(outbox_path.name + ".old"))
        outbox = Outbox(outbox_path, service.run, num_parameters, shards, service.schemas)
    prefetch = Prefetch()
    view = WeightsView(num_parameters, shards)
    learner = ServedLearner(
        config,
        facts,
        service.name,
        view,
        outbox,
        assembler=prefetch,
        clock=time.monotonic,
        on_bad_batch=lambda records, reason: _dead_letter(service, records, reason),
        look_again=lambda: _look_for_weights(service, view),
    )
    learner.service = service
    learner.metrics = service.metrics
    learner.checkpoint_path = folder / f"{service.name}.safetensors"
    learner.checkpoint_interval_s = config.learner.checkpoint_interval_s
    learner.checkpoint_due_s = started_s + learner.checkpoint_interval_s
    lost = learner.writer.residual_lost
    restored = learner_checkpoint.restore(learner.checkpoint_path, service.run, learner, residual_too=lost)
    _look_for_weights(service, view)
    service.log.info(
        "learner.ready",
        parameters=num_parameters,
        device=str(learner.step.precision.device),
        precision=learner.step.precision.half,
        codec=learner.writer.codec,
        version=view.version,
        target_version=view.target_version,
        unsent=len(learner.writer.unsent),
        checkpoint_restored=restored,
        residual_lost=lost and restored,
        startup_s=round(time.monotonic() - started_s, 2),
    )
    runtime = Runtime(
        service,
        learner,
        [Input("weights", how="newest"), Input("batches", how="group", gone="latest", chunk=4 * config.record_parts)],
        gates={"gradients": GradientGate(service)},
        commit_interval_s=config.learner.commit_interval_ms / 1000,
        tick_interval_s=TICK_INTERVAL_S,
    )
    try:
        runtime.run()
        learner.save_checkpoint()
    finally:
        prefetch.close()
        outbox.close()
        counts = learner.counts
        service.log.info(
            "learner.stopped",
            version=view.version,
            updates=counts.updates,
            rejected=counts.rejected,
            skipped_batches=counts.skipped_batches,
            bad_batches=counts.bad_batches,
            resent=counts.resent,
            orphan_parts=learner.orphan_parts,
            underflowed=learner.writer.underflowed,
            loss_scale_overflows=learner.step.precision.overflows,
            saturated=learner.writer.saturated,
        )


def _of_an_earlier_life(service: Service, outbox: Outbox) -> bool:
    """Whether the outbox names a batch beyond the end of its partition: the run was deleted and made anew under one name."""
    slots = outbox.complete_slots()
    if not slots:
        return False
    consumer = service.cluster.consumer()
    try:
        topic, known = service.topic("batches"), service.config.learner.count
        return any(
            slot.batch_partition >= known or slot.batch_offset >= consumer.watermarks(topic, slot.batch_partition)[1]
            for slot in slots
        )
    finally:
        consumer.close()


def _look_for_weights(service: Service, view: WeightsView) -> None:
    """Put the newest snapshot of every shard, and the target record it names, into the view. What is not there yet comes by the input."""
    follower = WeightsFollower(service, targets=True, num_parameters=view.num_parameters)
    try:
        follower.view = view
        follower.poll()
    finally:
        follower.close()


def _dead_letter(service: Service, records: list[Incoming], reason: str) -> None:
    for record in records:
        value = service.schemas.encode(record.message)
        topic = service.topic(record.topic)
        service.dead_letter(
            Received(topic, record.partition, record.offset, record.timestamp_ms, record.key, value), reason
        )
