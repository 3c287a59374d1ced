"""A replica process of a shard with more than one: the chain's protocol and the guarded producer around what service.py does for a sole one.

Start: restore as a sole one does, read the replication log from HISTORY records before its end (enough to know the view: every record of a member carries it),
join. A replica whose state contradicts the others' is taken apart and starts again from a checkpoint, in the same process.
"""

from __future__ import annotations

import time

from consumers.parameter_server.apply import ApplyNow
from consumers.parameter_server.chain import View
from consumers.parameter_server.replicated_shard import Diverged, ReplicatedShard, Showing
from consumers.parameter_server.replication import NOBODY, Replica
from consumers.parameter_server.shard import Shard
from consumers.parameter_server.start import replica_id, restore
from gorila.guarded_sender import GuardedSender, RoutedProducer
from gorila.runtime import Input, Runtime
from gorila.service import Service

CHUNK_RECORDS = 16
"""Gradients between two ticks, at most: heartbeats and tokens go out at ticks."""
TICK_INTERVAL_S = 0.05
HISTORY = 20_000
"""Records of the replication log read at a start: minutes of it. A record older than those around it can mislead only whoever begins right there."""


def serve_replica(service: Service, replica: int) -> None:
    """Serve as replica `replica` of shard `service.index` until `service.stop`. Raises what run_parameter_server does."""
    while not service.stop.is_set():
        try:
            _serve_once(service, replica)
        except Diverged as error:
            service.log.error("chain.diverged", reason=str(error), then="rebuilt from a checkpoint")


def _serve_once(service: Service, replica: int) -> None:
    started_s = time.monotonic()
    shard, section = service.index, service.config.parameter_server
    name = replica_id(shard, replica)
    state, end = restore(service, shard)
    log_start, log_end, view = _replication_log(service, shard)
    # The wall clock in ms: greater than at any start of this replica before.
    core = Replica(name, time.time_ns() // 1_000_000, section.replicas, view=view)
    showing = Showing(core)
    processor_shard = Shard(service.config, state, caught_up_at=end, chain=showing, apply=ApplyNow())
    guard = GuardedSender(service.cluster, f"{service.run}.parameter-server-{shard}", service.log)

    def viewed(now: View) -> None:
        if processor.is_live:
            service.log.info("chain.view", epoch=now.epoch, members=list(now.members), me=core.id)

    processor = ReplicatedShard(processor_shard, showing, guard, log_start=log_start, log_end=log_end, on_view=viewed)
    group = f"{service.run}.{name}"
    start = state.gradient_offset + 1
    inputs = [
        Input(
            "gradients", "assigned", (shard,), {shard: start},
            gone="fail", obey_operator=False, chunk=CHUNK_RECORDS, group=group,
        ),
        Input(
            "replication", "assigned", (shard,), {shard: log_start}, gone="earliest", obey_operator=False, group=group
        ),
    ]  # fmt: skip
    service.log.info(
        "parameter_server.ready",
        shard=shard,
        replica=core.id,
        parameters=state.num_parameters,
        optimizer=section.optimizer,
        version=state.version,
        reads_from=start,
        behind=max(0, end - start),
        state_hash=processor_shard.state_hash(),
        startup_s=round(time.monotonic() - started_s, 2),
    )
    guarded = frozenset({service.topic("weights"), service.topic("checkpoints")})
    runtime = Runtime(
        service,
        processor,
        inputs,
        commit_interval_s=section.commit_interval_ms / 1000,
        tick_interval_s=TICK_INTERVAL_S,
        producer=RoutedProducer(service.cluster.producer(), guard, guarded),
    )
    try:
        runtime.run()
    finally:
        guard.close()
    service.log.info(
        "parameter_server.stopped",
        shard=shard,
        replica=core.id,
        version=state.version,
        dropped_stale=state.dropped_stale,
        dropped_duplicate=state.dropped_duplicate,
        dropped_bad=state.dropped_bad,
        state_hash=processor_shard.state_hash(),
    )


def _replication_log(service: Service, shard: int) -> tuple[int, int, View]:
    """(where to begin, its end, what is known there). Nothing is known at an offset but this: as many epochs as records have passed at most."""
    consumer = service.cluster.consumer()
    try:
        low, end = consumer.watermarks(service.topic("replication"), shard)
    finally:
        consumer.close()
    start = max(low, end - HISTORY)
    # Whatever epoch a record beyond names is taken. If none does (all of it was deleted: nobody was there for long), the next one is above all before.
    return start, end, NOBODY if start < end else View(end, ())
