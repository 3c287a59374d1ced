"""What a reader of the `weights` topic holds: one whole version of each shard, and the target weights that go with it. Pure.

Rules of this file:
1. A shard's values are replaced as one, never edited: nobody sees two versions of one shard mixed.
2. A record whose version is not above the one held is ignored (but for a higher gradient_offset at the same version). So is a delta whose base, or whose
   key frame, is not the one held: `gaps` names the shard until a record of it is taken. What is missing is in the log (read again from the newest key
   frame), and the next key frame mends it too.
3. A payload counts only when the flat float32 values it gives have the hash the server wrote.
4. The global version is the minimum over shards (rules.md 12); it is -1 until every shard has come.
5. Target weights are those of the newest version that every shard has; shards are never mixed where that can be avoided.
"""

from __future__ import annotations

import zlib

import numpy as np
from numpy.typing import NDArray

from gorila import compression, sharding
from gorila.errors import BadRecord, InvalidState
from gorila.messages import Weights

F32 = NDArray[np.float32]
TARGETS_KEPT = 3


def payload_hash(values: F32) -> int:
    """crc32 of flat float32 values, little-endian: what `Weights.payload_hash` carries."""
    return zlib.crc32(np.ascontiguousarray(values, dtype="<f4").data)


class WeightsView:
    """The newest weights of a run as far as they were read.

    Args:
        num_parameters: P, of the whole network; None where the reader has no network: taken from the shards' first records.
        shards: as in parameter_server.shards.
    """

    def __init__(self, num_parameters: int | None, shards: int) -> None:
        self._lengths: list[int | None] = [None] * shards
        if num_parameters is not None:
            self._lengths = [stop - start for start, stop in sharding.bounds(num_parameters, shards)]
        self._codecs: dict[str, compression.Codec] = {}
        self._values: list[F32 | None] = [None] * shards
        self._targets: list[dict[int, F32]] = [{} for _ in range(shards)]
        self._flat: F32 | None = None
        self._key_offsets: list[int | None] = [None] * shards
        self._hashes = [-1] * shards
        self._built_by_delta = [False] * shards
        self.generations = [0] * shards
        """Per shard, how often its values were replaced: the same for the same values."""
        self.gaps: set[int] = set()
        """Shards of which a delta came that did not fit."""
        self.shard_versions = [-1] * shards
        self.gradient_offsets = [-1] * shards
        self.announced_targets = [(-1, -1)] * shards
        """Per shard: (version, offset) of the newest target record a key frame named."""

    @property
    def version(self) -> int:
        """Global version; -1 before every shard has come."""
        return min(self.shard_versions)

    @property
    def num_parameters(self) -> int | None:
        """P, or None while a shard's length is unknown."""
        known = [length for length in self._lengths if length is not None]
        return sum(known) if len(known) == len(self._lengths) else None

    @property
    def target_versions(self) -> list[int]:
        """Per shard, the newest target held; -1 for none."""
        return [max(held, default=-1) for held in self._targets]

    @property
    def target_version(self) -> int:
        """Version of `target_flat()`: the newest that every shard holds; -1 before every shard has one."""
        common = set.intersection(*(set(held) for held in self._targets))
        return max(common) if common else min(self.target_versions)

    def take(self, record: Weights, offset: int | None = None) -> bool:
        """Take a record; whether the view changed.

        Args:
            offset: the record's place in its partition, so that deltas of another key frame can be told; None: not known.

        Raises:
            BadRecord: unknown shard, wrong length, or values without the hash the server wrote. The view stays as it was.
        """
        shard = record.shard_id
        if not 0 <= shard < len(self._lengths):
            raise BadRecord(f"weights of shard {shard}, the run has {len(self._lengths)}")
        length = self._lengths[shard]
        if length is not None and record.num_parameters != length:
            raise BadRecord(f"weights of shard {shard} have {record.num_parameters} parameters, expected {length}")
        if record.kind == "target":
            if record.version <= max(self._targets[shard], default=-1):
                return False
            held = self._targets[shard]
            held[record.version] = self._decode(record, None)
            self._lengths[shard] = record.num_parameters
            while len(held) > TARGETS_KEPT:
                del held[min(held)]
            return True
        held_version = self.shard_versions[shard]
        if record.version < held_version:
            return False
        newly_covers = record.gradient_offset > self.gradient_offsets[shard]
        if record.kind == "delta" and record.version > held_version:
            known = self._key_offsets[shard]
            if record.base_version != held_version or held_version < 0 or known not in (None, record.key_offset):
                self.gaps.add(shard)
                return False
            self._replace(shard, record, self._values[shard])
        elif record.kind == "key":
            # A server that starts again shows the version it is at; what deltas had made of that version may differ in the last bits.
            if record.version > held_version or (
                self._built_by_delta[shard] and record.payload_hash != self._hashes[shard]
            ):
                self._replace(shard, record, None)
                newly_covers = True
            if record.payload_hash == self._hashes[shard]:
                self._key_offsets[shard] = offset
            elif not newly_covers:
                return False
        elif not newly_covers:
            return False
        self.gaps.discard(shard)
        # The same version, with gradients dropped since: whoever waits for one of them to be covered must hear of it.
        newly_covers = newly_covers or record.version > held_version
        self.shard_versions[shard] = record.version
        self.gradient_offsets[shard] = record.gradient_offset
        self.announced_targets[shard] = (record.target_version, record.target_offset)
        return newly_covers

    def _replace(self, shard: int, record: Weights, base: F32 | None) -> None:
        self._values[shard] = self._decode(record, base)
        self._hashes[shard] = record.payload_hash
        self._built_by_delta[shard] = base is not None
        self._lengths[shard] = record.num_parameters
        self.generations[shard] += 1
        self._flat = None

    def flat(self) -> F32:
        """Online weights float32 (P,), read-only. Raises InvalidState before every shard has come."""
        if self._flat is None:
            self._flat = self._joined(self._values)
        return self._flat

    def target_flat(self) -> F32:
        """Target weights float32 (P,), read-only. Raises InvalidState before every shard has one."""
        version = self.target_version
        # Without a common version (a reader that joined between two shards' periods) each shard gives its newest.
        return self._joined([held.get(version, held[max(held)] if held else None) for held in self._targets])

    def _joined(self, parts: list[F32 | None]) -> F32:
        whole = [part for part in parts if part is not None]
        if len(whole) != len(parts):
            raise InvalidState("weights were asked for before every shard had come")
        joined = whole[0] if len(whole) == 1 else np.concatenate(whole)
        joined.flags.writeable = False
        return joined

    def _decode(self, record: Weights, base: F32 | None) -> F32:
        codec = self._codecs.get(record.codec)
        if codec is None:
            codec = self._codecs[record.codec] = compression.codec(record.codec)
        values = codec.decode(record.payload, record.num_parameters)
        if base is not None:
            values = base + values
        if payload_hash(values) != record.payload_hash & 0xFFFFFFFF:
            raise BadRecord(
                f"weights of shard {record.shard_id} version {record.version} do not have the hash the server wrote"
            )
        return values
