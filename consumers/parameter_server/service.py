"""A parameter server process: one replica of one shard on Kafka. Service index = shard id.

Start, in this order:
1. Compile the kernels (from numba's cache after the first time): no gradient waits for the compiler.
2. Restore the newest whole checkpoint; version 0 was written when the run was created.
3. Read gradients from the checkpoint's offset + 1. The group's committed offset is for eyes and flow control only: whoever resets it is told why that
   is refused.
"""

from __future__ import annotations

import time
from collections.abc import Iterator

from consumers.parameter_server.apply import make_apply
from consumers.parameter_server.chain import SoleMember
from consumers.parameter_server.checkpoints import ShardState, newest_complete
from consumers.parameter_server.optimizers import make_optimizer, settings_json, warm_up_kernels
from consumers.parameter_server.shard import Shard
from gorila.errors import BadRecord, BrokerError, ConfigError, OffsetGone, RunError
from gorila.kafka import SLICE_S, Consumer
from gorila.messages import Message
from gorila.runtime import Input, Runtime
from gorila.service import Service

READ_S = 60.0
TICK_INTERVAL_S = 0.1
"""Ticks when idle. What is due earlier says so itself (Shard.next_due_s)."""
CHUNK_RECORDS = 64
"""Gradients taken by one poll. At 4 MB each this is what a turn takes from memory; at 70 KB what a poll finds anyway."""


def replica_id(shard: int, replica: int) -> str:
    """As the tools show it: `<run>.parameter-server-<shard>-<replica>` is the group."""
    return f"parameter-server-{shard}-{replica}"


def run_parameter_server(service: Service, replica: int = 0) -> None:
    """Serve shard `service.index` until `service.stop`.

    Raises:
        ConfigError: the run has no such shard.
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
    warm_up_kernels(section)
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


def restore(service: Service, shard: int) -> tuple[ShardState, int]:
    """(newest whole state of a shard, end of its gradients partition). Raises RunError, OffsetGone, BrokerError."""
    section, checkpoints, gradients = (
        service.config.parameter_server,
        service.topic("checkpoints"),
        service.topic("gradients"),
    )
    consumer = service.cluster.consumer(ends=True)
    try:

        def log(start: int, stop: int) -> Iterator[tuple[int, Message]]:
            return _read(service, consumer, checkpoints, shard, start, stop)

        low, end = consumer.watermarks(checkpoints, shard)
        state = newest_complete(
            log,
            low,
            end,
            shard_id=shard,
            moments=make_optimizer(section).tensors,
            optimizer=settings_json(section),
            ignored=lambda reason: service.log.warning("checkpoint.ignored", shard=shard, reason=reason),
        )
        if state is None:
            raise RunError(
                f"topic {checkpoints} partition {shard} holds no whole checkpoint: not even version 0, which `gorila topics create` writes"
            )
        low, end = consumer.watermarks(gradients, shard)
    finally:
        consumer.close()
    wanted = state.gradient_offset + 1
    if wanted < low:
        raise OffsetGone(
            f"shard {shard} is restored at version {state.version} and needs gradients from offset {wanted}, but {gradients} begins at {low}: "
            "retention was shorter than two checkpoints",
            gradients,
            shard,
        )
    if wanted > end:
        raise RunError(
            f"shard {shard} is restored at gradient offset {state.gradient_offset}, but {gradients} ends at {end}: its topic was made anew or cut"
        )
    return state, end


def _read(
    service: Service, consumer: Consumer, topic: str, partition: int, start: int, stop: int
) -> Iterator[tuple[int, Message]]:
    """What can be decoded of a range of offsets. Records with nothing behind them but gaps end at the partition's end event."""
    consumer.assign({(topic, partition): start})
    deadline_s = time.monotonic() + READ_S
    while True:
        for received in consumer.poll_many(CHUNK_RECORDS, SLICE_S):
            if received.offset >= stop:
                return
            try:
                yield received.offset, service.schemas.decode(received.value)
            except BadRecord as error:
                service.log.warning(
                    "checkpoint.unreadable", topic=topic, partition=partition, offset=received.offset, reason=str(error)
                )
            if received.offset + 1 >= stop:
                return
        if (consumer.end_reached(topic, partition) or 0) >= stop:
            return
        if time.monotonic() > deadline_s:
            raise BrokerError(f"reading topic {topic} partition {partition} took more than {READ_S:g} s")
