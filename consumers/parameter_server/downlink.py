"""Weights on their way to the readers: whole, in half precision, or as key frames and deltas. Pure.

Rules of this file:
1. `published` is what a reader holds after the newest record, bit for bit; `payload_hash` is of it. Readers compute with exactly these values.
2. A delta is the codec's best approximation of weights - published. What it loses stays in that difference, so the next delta carries it (error feedback): the
   server's weights themselves never lose anything.
3. A delta names the version it adds to and the offset of its key frame. So none is made before the key frame's place in the log is known, and a reader that
   lacks the base ignores it.
4. Deltas go to the keys `shard/d0`, `shard/d1`, … in turn and begin again at 0 after each key frame: compaction keeps the newest of each key, and a key frame
   is newer than any delta of the one before. So from the newest key frame on nothing is ever missing. A version shown again because gradients were dropped
   changes no value and goes to `shard/repeat`, so that it does not take a delta's place.
5. Whoever begins to publish (a start, a new tail) begins with a key frame.
6. Target records are whole: a learner may need one long after the deltas around it have gone.
"""

from __future__ import annotations

import zlib
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from gorila.compression import Codec, codec, delta_codec
from gorila.config import ParameterServerSection

F32 = NDArray[np.float32]

WORK_BYTES_PER_S = 200e6
"""A snapshot costs the server and each reader about 6 ms for 1.7 M parameters, however few bytes it takes: no more than this much weights a second."""


@dataclass(frozen=True, slots=True)
class Frame:
    """One snapshot as it goes into a Weights record.

    Attributes:
        kind: key | delta | target.
        name: what the record's key ends with.
        base_version, key_offset: of a delta, else -1.
    """

    kind: str
    name: str
    base_version: int
    key_offset: int
    codec: str
    payload: bytes
    payload_hash: int


class Downlink:
    """Makes the snapshots of one shard."""

    def __init__(self, section: ParameterServerSection, num_parameters: int) -> None:
        self._deltas: Codec | None = delta_codec(section) if section.weights_codec == "delta" else None
        self._whole = codec("fp32" if section.weights_codec == "fp32" else "fp16")
        self._every = section.key_frame_every
        self._bytes_per_s = section.weights_bytes_per_s
        self._shortest_s = 4 * num_parameters / WORK_BYTES_PER_S
        self._published: F32 | None = None
        self._version = -1
        self._key_offset = -1
        self._awaits_key = False
        self._slot = 0
        self._last_bytes = 4 * num_parameters

    @property
    def ready(self) -> bool:
        """Whether a frame may be made: not while the place of the newest key frame, which deltas must name, is unknown."""
        return not self._awaits_key

    @property
    def wants_key_offset(self) -> bool:
        """Whether `key_frame_delivered` must be told of key frames."""
        return self._deltas is not None

    @property
    def interval_s(self) -> float:
        """Pause after the newest frame: its bytes at the configured rate (rules.md 11)."""
        seconds = self._last_bytes / self._bytes_per_s
        return max(seconds, self._shortest_s) if self._deltas is not None else seconds

    def restart(self) -> None:
        """The next frame is a key frame: this server was not, or may not have been, the one that published last."""
        self._published = None
        self._awaits_key = False

    def whole(self, weights: F32) -> tuple[str, bytes, int]:
        """(codec, payload, payload_hash) of float32 (P,), for a record that stands alone."""
        payload = self._whole.encode(weights)
        if not self._whole.lossy:
            return self._whole.name, payload, zlib.crc32(payload)
        return self._whole.name, payload, zlib.crc32(self._whole.decode(payload, len(weights)).data)

    def frame(self, weights: F32, version: int) -> Frame:
        """The next snapshot of float32 (P,), which is not changed. `ready` must hold."""
        if self._deltas is None:
            made = Frame("key", "key", -1, -1, *self.whole(weights))
        elif self._published is None:
            made = self._key_frame(weights)
        elif version == self._version:
            made = self._repeat(self._deltas, self._published)
        elif self._slot >= self._every - 1:
            made = self._key_frame(weights)
        else:
            made = self._delta(weights, self._deltas, self._published)
        self._version = version
        self._last_bytes = len(made.payload)
        return made

    def key_frame_delivered(self, offset: int) -> None:
        """The newest key frame's place in the log."""
        self._key_offset = offset
        self._awaits_key = False

    def target(self, weights: F32) -> Frame:
        """A target record of float32 (P,): it names no base."""
        return Frame("target", "target", -1, -1, *self.whole(weights))

    def _key_frame(self, weights: F32) -> Frame:
        payload = self._whole.encode(weights)
        self._published = self._whole.decode(payload, len(weights))
        self._awaits_key, self._slot = True, 0
        return Frame("key", "key", -1, -1, self._whole.name, payload, zlib.crc32(self._published.data))

    def _delta(self, weights: F32, deltas: Codec, published: F32) -> Frame:
        payload = deltas.encode(weights - published)
        published += deltas.decode(payload, len(weights))
        name, self._slot = f"d{self._slot}", self._slot + 1
        return self._adds(name, deltas, payload, published)

    def _repeat(self, deltas: Codec, published: F32) -> Frame:
        return self._adds("repeat", deltas, deltas.encode(np.zeros_like(published)), published)

    def _adds(self, name: str, deltas: Codec, payload: bytes, published: F32) -> Frame:
        return Frame("delta", name, self._version, self._key_offset, deltas.name, payload, zlib.crc32(published.data))
