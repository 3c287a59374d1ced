"""The parameter server's heart: gradients of one shard in, weights, checkpoints and ledger lines out. Pure: no Kafka, clock or thread.

Rules of this file:
1. A gradient's identity is (batch_partition, batch_offset). Per batches partition only the highest handled is kept, and what is not above it is dropped:
   right for restarts, zombies and rebalances alike.
2. The state after gradient offset N depends on the gradients up to N and nothing else: not on time, on ticks, or on restarts. What depends on time is which
   versions are *shown*.
3. Version counts applied updates, exactly. A dropped gradient advances `gradient_offset` and not the version.
4. At every exact multiple of the target period those very weights are emitted as the target record, and no key frame is until the broker has said where that
   record lies: so a reader of a key frame can always load the target of its version.
5. After a restart nothing but targets is shown until everything read before has been applied again: a reader never sees the shard go back.

Longer than most: what is applied, what is shown and what is checkpointed at a version are one invariant (rules 2-5), best read in one place.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from consumers.parameter_server import kernels
from consumers.parameter_server.apply import Apply, ApplyNow
from consumers.parameter_server.chain import Chain, SoleMember
from consumers.parameter_server.checkpoints import NO_HASH, ShardState, to_ledger, to_manifest, to_parts
from consumers.parameter_server.downlink import Downlink, Frame
from consumers.parameter_server.optimizers import learning_rate_at, make_optimizer, settings_json
from gorila.compression import Codec, SparseCodec, codec
from gorila.config import Config
from gorila.errors import BadRecord, InvalidState
from gorila.messages import CheckpointManifest, Gradient, Message, Weights
from gorila.processor import Incoming, Outgoing

I32 = NDArray[np.int32]

STALENESS_COUNTS = 128
"""Gradients are counted by staleness 0, 1, 2, …; the last counts all from there on."""
MAX_PENDING_CHECKPOINTS = 3
REPEAT_S = 5.0
"""The newest snapshot is shown again after so long without another: a reader that missed it (cleaned up, overtaken by a copy of an older one) waits for
weights, and this server for its gradients."""
QUIET_S = 2.0
"""A start counts as caught up when nothing came for this long: what is left of the log may be records nobody can decode, which never get here."""


@dataclass(slots=True)
class _TargetTag:
    version: int


@dataclass(slots=True)
class _KeyTag:
    """Of a key frame that deltas will name."""


@dataclass(slots=True)
class _PartTag:
    version: int


@dataclass(slots=True)
class _PendingCheckpoint:
    manifest: CheckpointManifest
    parts_left: int

    @property
    def complete(self) -> bool:
        """All parts and the target of its version are acknowledged."""
        return self.parts_left == 0 and self.manifest.target_offset >= 0


class Shard:
    """One replica of one shard. Implements gorila.processor.Processor; input topic `gradients`, partition = shard.

    Args:
        config: the run's.
        state: restored, owned by this object from now on.
        caught_up_at: end of the gradients partition when the process started. No key frame before everything below it was taken in.
        chain: who else holds the shard; None: nobody.
        apply: who makes dense updates; None: this thread, at once (ordered mode).
    """

    def __init__(
        self,
        config: Config,
        state: ShardState,
        *,
        caught_up_at: int = 0,
        chain: Chain | None = None,
        apply: Apply | None = None,
    ) -> None:
        self.state = state
        self._settings = config.parameter_server
        self._optimizer_json = settings_json(self._settings)
        self._optimizer = make_optimizer(self._settings)
        self._optimizer.restore(state.version)
        self._apply = apply or ApplyNow()
        self._staleness_bound = self._settings.staleness_bound(config.learner.count, config.learner.max_in_flight)
        self._downlink = Downlink(self._settings, state.num_parameters)
        self._chain = chain or SoleMember(f"{state.shard_id}-0")
        self._chain.applied(state.version)
        self._caught_up_at = caught_up_at
        self._quiet_since_s: float | None = None
        self._codecs: dict[str, Codec] = {}
        self._staleness = np.zeros(STALENESS_COUNTS, np.int32)
        self._published: tuple[int, int] | None = None
        self._next_publish_s, self._repeat_s = -np.inf, np.inf
        self._repeats = not config.run.synchronous  # there, nothing is written because of a clock
        self._last_rate = learning_rate_at(self._settings, max(0, state.version - 1))
        self._checkpoints: deque[_PendingCheckpoint] = deque()
        # The newest target emitted; acknowledged once state.target_offset belongs to it.
        self._target_emitted = state.target_version
        self._first: list[Outgoing] = [] if state.target_offset >= 0 else [self._target()]

    def process(self, record: Incoming) -> Iterable[Outgoing]:
        """Apply or drop one gradient. Raises BadRecord for one that must not be used; its offset is taken in all the same."""
        state = self.state
        if record.offset <= state.gradient_offset:
            return []
        state.gradient_offset = record.offset
        self._quiet_since_s = None
        outgoing, self._first = self._first, []
        gradient = record.message
        try:
            indices, values = self._checked(gradient)
        except BadRecord:
            state.dropped_bad += 1
            self._first = outgoing
            raise
        assert isinstance(gradient, Gradient)
        if gradient.batch_offset <= state.handled.get(gradient.batch_partition, -1):
            state.dropped_duplicate += 1
            return outgoing
        state.handled[gradient.batch_partition] = gradient.batch_offset
        staleness = state.version - gradient.base_version
        if self._staleness_bound and staleness > self._staleness_bound:
            state.dropped_stale += 1
            return outgoing
        self._staleness[min(max(staleness, 0), STALENESS_COUNTS - 1)] += 1
        self._last_rate = learning_rate_at(self._settings, state.version)
        if indices is None:
            self._apply.submit(*self._optimizer.call(state.weights, state.moments, values, self._last_rate))
        else:
            self._apply.settle()  # sums of floats depend on their order
            self._optimizer.update_sparse(state.weights, state.moments, indices, values, self._last_rate)
        state.version += 1
        state.applied += 1
        self._chain.applied(state.version)
        outgoing += self._due_at_this_version(record.timestamp_ms)
        return outgoing

    def tick(self, now_s: float) -> Iterable[Outgoing]:
        """Manifests whose parts are all acknowledged, and a key frame when one is due."""
        outgoing, self._first = self._first, []
        while self._checkpoints and self._checkpoints[0].complete:
            manifest = self._checkpoints.popleft().manifest
            outgoing.append(self._to_checkpoints(manifest, manifest.version, "manifest"))
        if self._caught_up_at > self.state.gradient_offset + 1:
            self._quiet_since_s = now_s if self._quiet_since_s is None else self._quiet_since_s
            if now_s - self._quiet_since_s >= QUIET_S:
                self._caught_up_at = 0
        if self._key_frame_due(now_s):
            outgoing.append(self._snapshot())
            self._next_publish_s = now_s + self._downlink.interval_s
            self._repeat_s = now_s + REPEAT_S if self._repeats else np.inf
        return outgoing

    def next_due_s(self) -> float:
        """When (on tick's clock) the next key frame may be emitted if one is wanted: a runtime need not wait longer. inf: nothing is waiting for time."""
        return self._next_publish_s if self._something_to_show() else np.inf

    def delivered(self, record: Outgoing, partition: int, offset: int) -> None:
        """A target or a checkpoint part has its place in the log."""
        tag = record.tag
        if isinstance(tag, _TargetTag):
            if tag.version >= self.state.target_version:
                self.state.target_version, self.state.target_offset = tag.version, offset
            for pending in self._checkpoints:
                if pending.manifest.target_version == tag.version:
                    pending.manifest.target_offset = offset
        elif isinstance(tag, _KeyTag):
            self._downlink.key_frame_delivered(offset)
        elif isinstance(tag, _PartTag):
            for pending in self._checkpoints:
                if pending.manifest.version == tag.version:
                    pending.parts_left -= 1
                    first = pending.manifest.first_part_offset
                    pending.manifest.first_part_offset = offset if first < 0 else min(first, offset)

    def wants(self, topic: str) -> bool:
        """Not while several checkpoints wait for the broker: their copies are what memory is bounded by."""
        return len(self._checkpoints) < MAX_PENDING_CHECKPOINTS

    def waiting_for(self) -> str:
        """See Processor."""
        if not self.wants("gradients"):
            return f"the broker: {len(self._checkpoints)} checkpoints are not acknowledged"
        if self._target_emitted != self.state.target_version or self.state.target_offset < 0:
            return f"the broker: the target of version {self._target_emitted} is not acknowledged"
        return ""

    def positions(self) -> dict[tuple[str, int], int]:
        """For eyes and flow control: a start reads from the checkpoint's offset, never from this."""
        return {("gradients", self.state.shard_id): self.state.gradient_offset + 1}

    def snapshot(self) -> Iterable[Outgoing]:
        """Nothing: a checkpoint is of an exact version, so `process` emits its parts and `tick` its manifest."""
        return []

    def check_valid(self) -> None:
        """Raises InvalidState."""
        self._apply.settle()
        self.state.check_valid()
        if self._target_emitted > self.state.version or self.state.target_version > self._target_emitted:
            raise InvalidState(
                f"target {self._target_emitted} emitted and {self.state.target_version} acknowledged at version {self.state.version}"
            )

    def start_publishing(self) -> None:
        """Somebody else may have published since this shard last did: begin with a key frame."""
        self._downlink.restart()
        self._published = None

    def stop_publishing(self) -> None:
        """Somebody else publishes from here on: what was begun is given up."""
        self._checkpoints.clear()

    @property
    def caught_up(self) -> bool:
        """Whether everything that was in the log at the start has been taken in."""
        return self.state.gradient_offset + 1 >= self._caught_up_at

    def state_hash(self) -> int:
        """Of the state as it is now."""
        self._apply.settle()
        return self.state.state_hash(self._optimizer_json)

    def _checked(self, gradient: object) -> tuple[I32 | None, kernels.F32]:
        """What a gradient that may be used holds: (None, float32 (P,)), or of a sparse one (indices int32 (k,), float32 (k,)). Raises BadRecord."""
        state = self.state
        if not isinstance(gradient, Gradient):
            raise BadRecord("not a gradient")
        size = len(state.weights)
        if gradient.shard_id != state.shard_id or gradient.num_parameters != size:
            raise BadRecord(
                f"a gradient of shard {gradient.shard_id} with {gradient.num_parameters} parameters came to shard {state.shard_id} with {size}"
            )
        if not -1 < gradient.base_version <= state.version:
            raise BadRecord(f"computed on version {gradient.base_version}, but this shard is at {state.version}")
        decoder = self._codecs.get(gradient.codec) or self._codecs.setdefault(gradient.codec, codec(gradient.codec))
        indices: I32 | None = None
        if isinstance(decoder, SparseCodec):
            indices, values = decoder.decode_sparse(gradient.payload, size)
        else:
            values = decoder.decode(gradient.payload, size)
            if values.dtype != np.float32 or values.shape != state.weights.shape or not values.flags.c_contiguous:
                raise BadRecord(f"the payload decodes to {values.dtype} {values.shape}")
        unusable = kernels.count_unusable(values.view(np.uint32))
        if unusable:
            raise BadRecord(f"{unusable} values are not finite or above {kernels.LARGEST_GRADIENT:.0e}")
        return indices, values

    def _due_at_this_version(self, time_ms: int) -> list[Outgoing]:
        """Target, checkpoint parts and ledger line of an exact version. `time_ms` is the gradient's append time: the same after every restart."""
        state, settings, outgoing = self.state, self._settings, []
        periods = settings.target_period_versions, settings.checkpoint_versions, settings.ledger_versions
        if not any(state.version % period == 0 for period in periods):
            return []
        self._apply.settle()
        if state.version % settings.target_period_versions == 0:
            outgoing.append(self._target())
        if state.version % settings.checkpoint_versions == 0 and self._chain.is_tail:
            state.check_valid()
            parts = to_parts(state)
            manifest = to_manifest(state, len(parts), self._optimizer_json, time_ms)
            manifest.target_version = self._target_emitted
            if self._target_emitted != state.target_version:
                manifest.target_offset = -1
            self._checkpoints.append(_PendingCheckpoint(manifest, len(parts)))
            outgoing += [
                self._to_checkpoints(part, state.version, str(number), _PartTag(state.version))
                for number, part in enumerate(parts)
            ]
        if state.version % settings.ledger_versions == 0:
            outgoing.append(
                self._to_checkpoints(to_ledger(state, self._optimizer_json, time_ms), state.version, "ledger")
            )
        return outgoing

    def _to_checkpoints(self, message: Message, version: int, name: str, tag: object = None) -> Outgoing:
        shard = self.state.shard_id
        return Outgoing("checkpoints", message, f"{shard}/{version}/{name}".encode(), shard, tag)

    def _something_to_show(self) -> bool:
        return (self.state.version, self.state.gradient_offset) != self._published and self._can_show()

    def _can_show(self) -> bool:
        state = self.state
        return (
            self.caught_up
            and self._target_emitted == state.target_version
            and state.target_offset >= 0
            and self._downlink.ready
        )

    def _key_frame_due(self, now_s: float) -> bool:
        wanted = self._something_to_show() or (now_s >= self._repeat_s and self._can_show())
        return wanted and now_s >= self._next_publish_s and self._chain.publishable(self.state.version)

    def _target(self) -> Outgoing:
        self._target_emitted = self.state.version
        frame = self._downlink.target(self.state.weights)
        return self._to_weights(frame, self.state.version, -1, _TargetTag(self.state.version))

    def _snapshot(self) -> Outgoing:
        state = self.state
        self._apply.settle()
        frame = self._downlink.frame(state.weights, state.version)
        tag = _KeyTag() if frame.kind == "key" and self._downlink.wants_key_offset else None
        self._published = (state.version, state.gradient_offset)
        return self._to_weights(frame, state.target_version, state.target_offset, tag)

    def _to_weights(self, frame: Frame, target_version: int, target_offset: int, tag: object) -> Outgoing:
        message = self._weights(frame, target_version, target_offset)
        return Outgoing("weights", message, f"{self.state.shard_id}/{frame.name}".encode(), self.state.shard_id, tag)

    def _weights(self, frame: Frame, target_version: int, target_offset: int) -> Weights:
        state = self.state
        return Weights(
            shard_id=state.shard_id,
            version=state.version,
            kind=frame.kind,
            num_parameters=state.num_parameters,
            base_version=frame.base_version,
            key_offset=frame.key_offset,
            target_version=target_version,
            target_offset=target_offset,
            gradient_offset=state.gradient_offset,
            codec=frame.codec,
            payload=frame.payload,
            payload_hash=frame.payload_hash,
            state_hash=NO_HASH,
            applied=state.applied,
            dropped_stale=state.dropped_stale,
            dropped_duplicate=state.dropped_duplicate,
            dropped_bad=state.dropped_bad,
            staleness=np.trim_zeros(self._staleness, "b").copy(),
            learning_rate=self._last_rate,
        )
