"""TensorBoard event files as lists of points, without TensorBoard's own readers: a frame is length, check sum, record, check sum."""

from __future__ import annotations

import math
import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

LARGEST_RECORD = 1024 * 1024
"""Of ours a record is some fifty bytes; a damaged length must not be believed."""
_LENGTH = struct.Struct("<QI")

Point = tuple[int, float, float]
"""(step, seconds since 1970, value)."""


def records(path: Path) -> Iterator[bytes]:
    """Up to the file's end, or to where it is cut off or damaged."""
    with path.open("rb") as file:
        while len(head := file.read(_LENGTH.size)) == _LENGTH.size:
            length, _ = _LENGTH.unpack(head)
            if length > LARGEST_RECORD:
                return
            body = file.read(length + 4)
            if len(body) < length + 4:
                return
            yield body[:length]


def scalars(folder: Path) -> dict[str, list[Point]]:
    """Every scalar by tag, by time; empty when there is none. Raises OSError; ImportError without the `monitor` extra."""
    from google.protobuf.message import DecodeError  # type: ignore[import-untyped]
    from tensorboard.compat.proto.event_pb2 import Event

    found: dict[str, list[Point]] = defaultdict(list)
    for path in sorted(folder.glob("events.out.tfevents.*")):
        for record in records(path):
            try:
                event = Event.FromString(record)
            except DecodeError:
                break
            for value in event.summary.value:
                if value.HasField("simple_value") and math.isfinite(value.simple_value):
                    found[value.tag].append((event.step, event.wall_time, value.simple_value))
    for points in found.values():
        points.sort(key=lambda point: (point[1], point[0]))
    return dict(found)
