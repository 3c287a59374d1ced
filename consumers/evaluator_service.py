"""The evaluator as a service: follows the weights, publishes evaluations, keeps the best policy as a file."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np
import torch
from numpy.typing import NDArray

from consumers.evaluator import EvaluatorCore
from gorila.batch_statistics import WARM_ROWS, Buffers, checkpointed
from gorila.environments import make_lanes
from gorila.errors import LocalError, UsageError
from gorila.kafka import Producer
from gorila.messages import Evaluation
from gorila.policy import WEIGHTS_FILE, notes_of, save_weights
from gorila.processor import Outgoing
from gorila.service import Service
from gorila.weights_sampler import WeightsSampler


def wall_ms() -> int:
    """Milliseconds for records; the core takes it as a function."""
    return int(time.time() * 1000)


def run_evaluator_service(service: Service) -> None:
    """Until stopped: evaluate the newest version, pause, again. Stops between two environment steps."""
    torch.set_num_threads(1)
    config = service.config
    core = EvaluatorCore(
        config,
        service.facts,
        service.name,
        lambda seeds: make_lanes(config, seeds, config.evaluator.max_episode_steps),
        epoch=0 if config.run.synchronous else wall_ms(),
    )
    keeper = PolicyKeeper(service)
    follower = WeightsSampler(service, 0.1)
    producer = service.cluster.producer(watched="")  # idle, it is not polled
    evaluated = -1
    next_s = 0.0
    service.log.info("ready", threshold=config.evaluator.threshold, best=keeper.best, solved=keeper.solved)
    service.health.ready()
    while not service.stop.is_set():
        service.health.beat()
        follower.poll()
        view = follower.view
        if view.version <= evaluated or view.version < config.evaluator.min_versions or time.monotonic() < next_s:
            service.stop.wait(0.05)
            continue
        evaluated, flat = view.version, view.flat()
        for outgoing in core.evaluate(evaluated, flat, wall_ms):
            service.health.beat()
            keeper.look(outgoing, flat, core.buffers)
            _send(service, producer, outgoing)
            if service.stop.is_set():
                break
        producer.flush(2.0)
        next_s = time.monotonic() + config.evaluator.interval_s
    producer.flush(2.0)
    producer.close()
    follower.close()


class PolicyKeeper:
    """Keeps the best policy as a file: the confirmed one for good, until then the one with the best screening.

    The file is written before the record that tells of it is sent: who reads of a solved run finds its weights. It also says what it was kept for,
    so that an evaluator that is started again does not put a worse policy in its place.
    """

    def __init__(self, service: Service) -> None:
        self._service = service
        self._path = None if service.run_dir is None else service.run_dir / WEIGHTS_FILE
        self.best, self.solved = self._remembered()

    def _remembered(self) -> tuple[float, bool]:
        """(best return, whether it was a confirmed one) of the file an evaluator of this run left."""
        try:
            notes = notes_of(self._path) if self._path is not None and self._path.exists() else {}
            if notes.get("run") == self._service.run:
                return float(notes["return_mean"]), notes["solved"] == "yes"
        except (UsageError, KeyError, ValueError):
            pass  # not a file of ours: it is overwritten
        return float("-inf"), False

    def look(self, records: list[Outgoing], flat: NDArray[np.float32], buffers: Callable[[], Buffers] = dict) -> None:
        """Save the evaluated weights (P,) if one of the records says that they are worth it.

        A disk that refuses costs a screened version, and is told of; the version that solves the run must be written before that is said.

        Raises:
            LocalError: the solving version cannot be written.

        Args:
            buffers: the evaluator's own BatchNorm statistics, for a run whose learners leave their checkpoints elsewhere.
        """
        for record in records:
            evaluation = record.message
            if not isinstance(evaluation, Evaluation) or self.solved or self._path is None:
                continue
            better = evaluation.phase == "screen" and evaluation.return_mean > self.best
            if evaluation.solved or better:
                notes = {
                    "run": self._service.run,
                    "return_mean": repr(evaluation.return_mean),
                    "episodes": str(evaluation.episodes),
                    "solved": "yes" if evaluation.solved else "no",
                }
                config, facts = self._service.config, self._service.facts
                own = buffers()
                whose = f"{evaluation.evaluator_id} of {WARM_ROWS} frames"
                found = (
                    checkpointed(self._service.run_dir, self._service.run, evaluation.weights_version) if own else None
                )
                statistics = found or ((whose, own) if own else None)
                try:
                    save_weights(self._path, flat, evaluation.weights_version, config, facts, notes, statistics)
                except LocalError as error:
                    if evaluation.solved:
                        raise
                    self._service.log.warning("policy.not_kept", version=evaluation.weights_version, reason=str(error))
                    continue
                self.best, self.solved = max(self.best, evaluation.return_mean), evaluation.solved


def _send(service: Service, producer: Producer, records: list[Outgoing]) -> None:
    for record in records:
        topic, value = record.topic, service.schemas.encode(record.message)
        producer.send(
            service.topic(topic),
            value,
            key=record.key,
            partition=record.partition,
            on_delivery=lambda _partition, _offset: service.metrics.count("records_written_total", topic="episodes"),
        )
        service.metrics.count("bytes_written_total", len(value), topic=topic)
    producer.poll(0.0)
