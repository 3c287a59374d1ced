"""What flows between the three steps of the replay pipeline, and its coders: struct framing, deterministic, no pickle.

On the local runner the steps are fused and the objects pass as they are; a runner with workers elsewhere sends these bytes.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass, field

from apache_beam.coders import Coder, registry

from gorila.kafka import Received

_CHUNK = struct.Struct(">qq?")
_ASSIGNED = struct.Struct(">iq")
_RECORD = struct.Struct(">iqq")
_DRAWN = struct.Struct(">ii")
_LENGTH = struct.Struct(">i")
_ABSENT = -1


@dataclass(slots=True)
class Chunk:
    """What one poll brought: records as they came, in the order of each partition; empty, it is a tick.

    Attributes:
        time_ms: the reader's wall clock after the poll.
        priorities_next: offset in `priorities` the reader stood at before this chunk's records.
        assignment: transitions partition -> first offset to come, for all this split owns; None while unchanged since the last chunk.
        transitions, priorities, stats: raw records of the three inputs.
    """

    time_ms: int
    priorities_next: int
    assignment: dict[int, int] | None = None
    transitions: list[Received] = field(default_factory=list)
    priorities: list[Received] = field(default_factory=list)
    stats: list[Received] = field(default_factory=list)

    @property
    def is_tick(self) -> bool:
        """Whether it says nothing but the time."""
        return self.assignment is None and not (self.transitions or self.priorities or self.stats)


@dataclass(slots=True)
class Drawn:
    """Encoded records that go to one partition of one topic, one after another: a learner batch's parts, or a split's stats.

    Attributes:
        topic: logical name.
        partition: explicit: the pipeline leaves no choice to a partitioner.
        key: record key, or None.
        values: framed Avro, in order.
    """

    topic: str
    partition: int
    key: bytes | None
    values: list[bytes]


class _Cursor:
    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def unpack(self, form: struct.Struct) -> tuple[int, ...]:
        values = form.unpack_from(self.data, self.at)
        self.at += form.size
        return values

    def optional(self) -> bytes | None:
        (length,) = self.unpack(_LENGTH)
        if length == _ABSENT:
            return None
        piece = self.data[self.at : self.at + length]
        self.at += length
        return piece

    def present(self) -> bytes:
        return self.optional() or b""

    def count(self) -> int:
        return self.unpack(_LENGTH)[0]


def _optional(data: bytes | None) -> bytes:
    return _LENGTH.pack(_ABSENT) if data is None else _LENGTH.pack(len(data)) + data


def _record_pieces(record: Received) -> list[bytes]:
    pieces = [_optional(record.topic.encode()), _RECORD.pack(record.partition, record.offset, record.timestamp_ms)]
    pieces += [_optional(record.key), _optional(record.value), _LENGTH.pack(len(record.headers))]
    for name, value in record.headers:
        pieces += [_optional(name.encode()), _optional(value)]
    return pieces


def _record(cursor: _Cursor) -> Received:
    topic = cursor.present().decode()
    partition, offset, timestamp_ms = cursor.unpack(_RECORD)
    key, value = cursor.optional(), cursor.optional()
    headers = tuple((cursor.present().decode(), cursor.present()) for _ in range(cursor.count()))
    return Received(topic, partition, offset, timestamp_ms, key, value, headers)


def _owned_pieces(assignment: dict[int, int]) -> list[bytes]:
    return [_LENGTH.pack(len(assignment))] + [_ASSIGNED.pack(*pair) for pair in sorted(assignment.items())]


def _owned(cursor: _Cursor) -> dict[int, int]:
    owned: dict[int, int] = {}
    for _ in range(cursor.count()):
        partition, offset = cursor.unpack(_ASSIGNED)
        owned[partition] = offset
    return owned


class AssignmentCoder(Coder):
    """{partition: offset} <-> bytes."""

    def encode(self, value: dict[int, int]) -> bytes:
        """Sorted: equal assignments are equal bytes."""
        return b"".join(_owned_pieces(value))

    def decode(self, encoded: bytes) -> dict[int, int]:
        """The inverse."""
        return _owned(_Cursor(encoded))

    def is_deterministic(self) -> bool:
        """Beam asks before it takes a coder for a key."""
        return True


class ChunkCoder(Coder):
    """Chunk <-> bytes."""

    def encode(self, value: Chunk) -> bytes:
        """Equal chunks are equal bytes."""
        owned = value.assignment
        pieces = [_CHUNK.pack(value.time_ms, value.priorities_next, owned is not None)]
        pieces += [] if owned is None else _owned_pieces(owned)
        for records in (value.transitions, value.priorities, value.stats):
            pieces.append(_LENGTH.pack(len(records)))
            for record in records:
                pieces += _record_pieces(record)
        return b"".join(pieces)

    def decode(self, encoded: bytes) -> Chunk:
        """The inverse."""
        cursor = _Cursor(encoded)
        time_ms, priorities_next, has_assignment = cursor.unpack(_CHUNK)
        assignment = _owned(cursor) if has_assignment else None
        inputs = [[_record(cursor) for _ in range(cursor.count())] for _ in range(3)]
        return Chunk(time_ms, priorities_next, assignment, *inputs)

    def is_deterministic(self) -> bool:
        """Beam asks before it takes a coder for a key."""
        return True


class DrawnCoder(Coder):
    """Drawn <-> bytes."""

    def encode(self, value: Drawn) -> bytes:
        """Records in order."""
        pieces = [
            _optional(value.topic.encode()),
            _DRAWN.pack(value.partition, len(value.values)),
            _optional(value.key),
        ]
        return b"".join(pieces + [_optional(record) for record in value.values])

    def decode(self, encoded: bytes) -> Drawn:
        """The inverse."""
        cursor = _Cursor(encoded)
        topic = cursor.present().decode()
        partition, count = cursor.unpack(_DRAWN)
        key = cursor.optional()
        return Drawn(topic, partition, key, [cursor.present() for _ in range(count)])

    def is_deterministic(self) -> bool:
        """Beam asks before it takes a coder for a key."""
        return True


registry.register_coder(Chunk, ChunkCoder)
registry.register_coder(Drawn, DrawnCoder)
