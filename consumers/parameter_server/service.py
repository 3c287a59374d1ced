"""A parameter server process: one replica of one shard on Kafka. Service index = shard id.

Start, in this order:
1. Compile the kernels (from numba's cache after the first time): no gradient waits for the compiler.
2. Restore the newest whole checkpoint; version 0 was written when the run was created.
3. Read gradients from the checkpoint's offset + 1. The group's committed offset is for eyes and flow control only: whoever resets it is told why that
   is refused.
"""

from __future__ import annotations

import time

from consumers.parameter_server.apply import make_apply
from consumers.parameter_server.chain import SoleMember
from consumers.parameter_server.optimizers import warm_up_kernels
from consumers.parameter_server.shard import Shard
from consumers.parameter_server.start import replica_id, restore
from gorila.errors import ConfigError
from gorila.runtime import Input, Runtime
from gorila.service import Service

TICK_INTERVAL_S = 0.1
"""Ticks when idle. What is due earlier says so itself (Shard.next_due_s)."""
CHUNK_RECORDS = 64
"""Gradients taken by one poll. At 4 MB each this is what a turn takes from memory; at 70 KB what a poll finds anyway."""


def run_parameter_server(service: Service) -> None:
    """Serve shard `service.index` until `service.stop`.

    Raises:
        ConfigError: the run has no such shard or replica.
        RunError: no checkpoint to start from, or the log and the checkpoints do not belong together.
        OffsetGone: gradients the newest checkpoint needs are no longer in the log.
        BrokerError.
    """
    started_s = time.monotonic()
    shard, section = service.index, service.config.parameter_server
    if not 0 <= shard < section.shards:
        raise ConfigError(
            "--index",
            shard,
            f"a shard of this run: 0 to {section.shards - 1} (parameter_server.shards = {section.shards})",
        )
    replica = service.replica
    if not 0 <= replica < section.replicas:
        raise ConfigError(
            "--replica",
            replica,
            f"a replica of this run: 0 to {section.replicas - 1} (parameter_server.replicas = {section.replicas})",
        )
    warm_up_kernels(section)
    if section.replicas > 1:
        from consumers.parameter_server.replicated_service import serve_replica

        serve_replica(service, replica)
        return
    state, end = restore(service, shard)
    name = replica_id(shard, replica)
    apply = make_apply(section)
    processor = Shard(service.config, state, caught_up_at=end, chain=SoleMember(name), apply=apply)
    start = state.gradient_offset + 1
    source = Input(
        "gradients",
        "assigned",
        (shard,),
        {shard: start},
        gone="fail",
        obey_operator=False,
        chunk=CHUNK_RECORDS,
        group=f"{service.run}.{name}",
    )
    service.log.info(
        "parameter_server.ready",
        shard=shard,
        parameters=state.num_parameters,
        optimizer=section.optimizer,
        mode=section.mode,
        version=state.version,
        reads_from=start,
        behind=max(0, end - start),
        state_hash=processor.state_hash(),
        startup_s=round(time.monotonic() - started_s, 2),
    )
    runtime = Runtime(
        service,
        processor,
        [source],
        commit_interval_s=section.commit_interval_ms / 1000,
        tick_interval_s=TICK_INTERVAL_S,
    )
    try:
        runtime.run()
    finally:
        apply.close()
    service.log.info(
        "parameter_server.stopped",
        shard=shard,
        version=state.version,
        dropped_stale=state.dropped_stale,
        dropped_duplicate=state.dropped_duplicate,
        dropped_bad=state.dropped_bad,
        state_hash=processor.state_hash(),
    )
