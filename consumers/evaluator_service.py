"""The evaluator as a service: follows the weights, publishes evaluations, keeps the best policy as a file."""

from __future__ import annotations

import time

import torch

from consumers.evaluator import EvaluatorCore, wall_ms
from gorila.environments import make_lanes
from gorila.kafka import Producer
from gorila.policy import save_weights
from gorila.processor import Outgoing
from gorila.service import Service
from gorila.weights_sampler import WeightsSampler


def run_evaluator_service(service: Service) -> None:
    """Until stopped: evaluate the newest version, pause, again. Stops between two environment steps."""
    torch.set_num_threads(1)
    config = service.config
    core = EvaluatorCore(
        config, service.facts, service.name, lambda seeds: make_lanes(config, seeds, config.evaluator.max_episode_steps)
    )
    follower = WeightsSampler(service, 0.1)
    producer = service.cluster.producer()
    best = float("-inf")
    solved = False
    evaluated = -1
    next_s = 0.0
    service.log.info("ready", extra={"threshold": config.evaluator.threshold})
    while not service.stop.is_set():
        follower.poll()
        view = follower.view
        if view.version <= evaluated or view.version < config.evaluator.min_versions or time.monotonic() < next_s:
            service.stop.wait(0.05)
            continue
        evaluated, flat = view.version, view.flat()
        for outgoing in core.evaluate(evaluated, flat, wall_ms):
            _send(service, producer, outgoing)
            if service.stop.is_set():
                break
        verdict = core.verdict
        producer.flush(5.0)
        if verdict is not None and service.run_dir is not None and not solved:
            solved = verdict.solved
            if solved or verdict.screening.return_mean > best:
                best = max(best, verdict.screening.return_mean)
                save_weights(service.run_dir / "weights.safetensors", flat, evaluated, config, service.facts)
        next_s = time.monotonic() + config.evaluator.interval_s
    producer.flush(3.0)
    producer.close()
    follower.close()


def _send(service: Service, producer: Producer, records: list[Outgoing]) -> None:
    for record in records:
        producer.send(
            service.topic(record.topic),
            service.schemas.encode(record.message),
            key=record.key,
            partition=record.partition,
        )
    producer.poll(0.0)
