"""A shard's past from its logs: which checkpoints there are, and the state at any version or offset after them. Pure.

Rules of this file:
1. The state after a gradient offset depends on the gradients up to it and nothing else (shard.py, rule 2). So the shard that served is the shard that
   rebuilds: there is no second implementation of an update.
2. A version's state is the one at the moment the version was reached: gradients dropped after it belong to the next.
3. A checkpoint is usable when its parts and every gradient after it are still in the log.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from consumers.parameter_server.chain import View
from consumers.parameter_server.checkpoints import NO_HASH, ShardState
from consumers.parameter_server.shard import Shard
from gorila.config import Config
from gorila.errors import BadRecord, OffsetGone
from gorila.messages import CheckpointLedger, CheckpointManifest, Message, Weights
from gorila.processor import Incoming, Outgoing
from gorila.weights_history import Line, Moment, ShardWindow


class Onlooker:
    """A chain member that nobody reads from: it writes no checkpoint and shows nothing."""

    is_tail = False

    def __init__(self) -> None:
        self.view = View(epoch=0, members=())

    def applied(self, version: int) -> None:
        """See Chain."""

    def publishable(self, version: int) -> bool:
        """Never."""
        return False


class Replayed:
    """A shard's state, gradient by gradient, and the target record it would publish next to it."""

    def __init__(self, config: Config, state: ShardState) -> None:
        self.state = state
        self._shard = Shard(config, state, chain=Onlooker())
        self.target: Weights | None = None
        self.took = 0

    def take(self, record: Incoming) -> bool:
        """Apply or drop a gradient, exactly as the server does; whether a version was made of it."""
        before = self.state.version
        self.took += 1
        try:
            self._remember(self._shard.process(record))
        except BadRecord:
            return False
        return self.state.version != before

    def _remember(self, emitted: Iterable[Outgoing]) -> None:
        for outgoing in emitted:
            if isinstance(outgoing.message, Weights) and outgoing.message.kind == "target":
                self.target = outgoing.message

    def first_target(self) -> None:
        """Make the target of a state that has none yet (version 0)."""
        self._remember(self._shard.tick(0.0))

    def state_hash(self) -> int:
        """Of the state as it is."""
        return self._shard.state_hash()


@dataclass(slots=True)
class Catalogue:
    """Collects what a shard's `checkpoints` and `weights` partitions hold, without their payloads."""

    shard: int
    checkpoints: list[Line]
    ledger: list[Line]
    published: list[Line]
    manifests: dict[int, CheckpointManifest]
    """By offset."""

    @classmethod
    def empty(cls, shard: int) -> Catalogue:
        """Nothing seen."""
        return cls(shard, [], [], [], {})

    def take(self, offset: int, timestamp_ms: int, message: Message) -> None:
        """A record of either topic; what is of another shard or no concern is ignored."""
        if getattr(message, "shard_id", self.shard) != self.shard:
            return
        if isinstance(message, CheckpointManifest):
            self.manifests[offset] = message
            self.checkpoints.append(_line("checkpoint", offset, message))
        elif isinstance(message, CheckpointLedger):
            self.ledger.append(_line("ledger", offset, message))
        elif isinstance(message, Weights):
            self.published.append(
                Line(
                    message.kind,
                    message.version,
                    offset,
                    message.gradient_offset,
                    timestamp_ms,
                    message.state_hash,
                    message.payload_hash & 0xFFFFFFFF,
                    message.base_version,
                    message.key_offset,
                )
            )

    def window(self, checkpoints_low: int, gradients: tuple[int, int]) -> ShardWindow:
        """With each checkpoint judged. `checkpoints_low`: first offset of its partition."""
        judged = [self._judged(line, checkpoints_low, gradients) for line in self.checkpoints]
        return ShardWindow(self.shard, gradients, tuple(judged), tuple(self.ledger), tuple(self.published))

    def _judged(self, line: Line, low: int, gradients: tuple[int, int]) -> Line:
        first = self.manifests[line.offset].first_part_offset
        why = ""
        if first < low:
            why = f"its parts began at offset {first}, the topic begins at {low}"
        elif not gradients[0] <= line.gradient_offset + 1 <= gradients[1]:
            why = f"gradients from offset {line.gradient_offset + 1} follow it, the log has {gradients[0]} up to {gradients[1]}"
        return Line(
            line.kind, line.version, line.offset, line.gradient_offset, line.time_ms, line.state_hash,
            usable=not why, why=why,
        )  # fmt: skip


def _line(kind: str, offset: int, message: CheckpointManifest | CheckpointLedger) -> Line:
    return Line(kind, message.version, offset, message.gradient_offset, message.time_ms, message.state_hash)


def start_for(window: ShardWindow, moment: Moment, topic: str) -> list[Line]:
    """Usable checkpoints that a moment (of a version or an offset) can be rebuilt from, the nearest first. Raises OffsetGone: it is outside the window."""
    before = [line for line in window.checkpoints if line.usable and _not_after(line, moment)]
    if not before:
        what = f"version {moment.version}" if moment.version is not None else f"gradient offset {moment.offset}"
        raise OffsetGone(f"{what} is outside what {topic} still holds: {window.describe()}", topic, window.shard)
    # Of one version written twice (before and after a kill) the later is as good, and more likely still whole.
    return sorted(before, key=lambda line: (line.version, line.offset), reverse=True)


def _not_after(line: Line, moment: Moment) -> bool:
    if moment.version is not None:
        return line.version <= moment.version
    assert moment.offset is not None
    return line.gradient_offset <= moment.offset


def replay_to(replayed: Replayed, gradients: Iterable[Incoming], moment: Moment) -> bool:
    """Take gradients in until the moment; whether it was reached. `gradients` begin right after the state's, and are read no further than needed."""
    state = replayed.state
    if moment.version is not None:
        if state.version == moment.version:
            return True
        return any(replayed.take(record) and state.version == moment.version for record in gradients)
    assert moment.offset is not None
    for record in gradients:
        if record.offset > moment.offset:
            break
        replayed.take(record)
    return True


def hash_known(line: Line) -> bool:
    """Whether a record names a state hash."""
    return line.state_hash != NO_HASH
