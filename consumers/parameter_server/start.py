"""How a parameter server process finds its state: the newest whole checkpoint, and the gradients that come after it."""

from __future__ import annotations

import time
from collections.abc import Iterator

from consumers.parameter_server.checkpoints import ShardState, newest_complete
from consumers.parameter_server.optimizers import make_optimizer, settings_json
from gorila.errors import BadRecord, BrokerError, OffsetGone, RunError
from gorila.kafka import SLICE_S, Consumer
from gorila.messages import Message
from gorila.service import Service

READ_S = 60.0
CHUNK_RECORDS = 64


def replica_id(shard: int, replica: int) -> str:
    """As the tools show it: `<run>.parameter-server-<shard>-<replica>` is the group."""
    return f"parameter-server-{shard}-{replica}"


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
