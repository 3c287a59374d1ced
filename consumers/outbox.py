"""What kill -9 must not lose: the newest gradients and the residual after them, in a memory-mapped file (design §6).

Rules of this file:
1. A slot is complete before its gradient is produced. Two slots, A and B, are written in turn: while one is written the other is whole.
2. A slot is overwritten only when its gradient was acknowledged (the learner's rule): then a restart re-sends every complete slot, oldest
   first, byte for byte; the shards drop what they have. So Σ sent + residual = Σ gradient survives.
3. A torn slot is found by its checksum and does not exist. The checksum is a sum over 64-bit words: it has to find half-written pages, not
   an enemy, and costs a quarter of a CRC. A killed process cannot even tear one (the pages are the kernel's), a lost machine can.
4. A file of another run, or of another number of parameters, is not ours: it is put aside as `….old`, never read.

Layout: two slots of equal size; each a header (`HEADER`: magic, sequence, checksum, body bytes, batch partition, batch offset, number of
records, residual bytes, crc32 of the run's name, P), then the body: the residual, and per shard the Gradient record without its payload and the payload, each
after its length.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from gorila.codec import Schemas
from gorila.errors import BadRecord, LocalError
from gorila.messages import Gradient

F32 = NDArray[np.float32]

MAGIC = b"GORILA01"
HEADER = struct.Struct("<8sQQQqqIIII")
LENGTH = struct.Struct("<I")
ALIGN = 8
RECORD_SLACK = 512  # an encoded Gradient is its payload and less than this


@dataclass(frozen=True, slots=True)
class Slot:
    """One batch's gradients as sent, and what its compression left over.

    Attributes:
        batch_partition, batch_offset: identity.
        residual: float32 (P,) after this batch; None where the codec loses nothing.
        gradients: one a shard, in shard order, as sent.
    """

    batch_partition: int
    batch_offset: int
    residual: F32 | None
    gradients: tuple[Gradient, ...]


class OutboxPort(Protocol):
    """What the learner needs of an outbox; tests keep one in memory."""

    def write(self, slot: Slot) -> None:
        """Make a slot complete, over the older of the two."""
        ...

    def complete_slots(self) -> list[Slot]:
        """What a restart must send again, oldest first: at most two."""
        ...


class MemoryOutbox:
    """Two slots that live as long as their object: for tests, and where nothing has to survive (benchmarks)."""

    def __init__(self) -> None:
        self._slots: list[Slot] = []

    def write(self, slot: Slot) -> None:
        """See OutboxPort. The residual is copied: the learner goes on changing its own."""
        residual = None if slot.residual is None else slot.residual.copy()
        self._slots = [*self._slots[-1:], replace(slot, residual=residual)]

    def complete_slots(self) -> list[Slot]:
        """See OutboxPort."""
        return list(self._slots)


def _checksum(header: bytes, body: memoryview) -> int:
    words = np.frombuffer(body, dtype="<u8")
    return (int(words.sum(dtype=np.uint64)) ^ (zlib.crc32(header) << 32)) & 0xFFFF_FFFF_FFFF_FFFF


class Outbox:
    """Two slots in a file."""

    def __init__(self, path: Path, run: str, num_parameters: int, shards: int, schemas: Schemas) -> None:
        """Opens or creates the file. Raises LocalError: no space, no permission."""
        self._path = path
        self._schemas = schemas
        self._run_hash = zlib.crc32(run.encode())
        self._num_parameters = num_parameters
        body = 8 * num_parameters + shards * (RECORD_SLACK + 2 * LENGTH.size)
        self._slot_bytes = (HEADER.size + body + 2 * ALIGN) // 4096 * 4096 + 4096
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            if path.exists() and path.stat().st_size != 2 * self._slot_bytes:
                path.replace(path.with_name(path.name + ".old"))
            with path.open("a+b") as file:
                # Every block is claimed now: a full disk must fail here, not as SIGBUS in the middle of a step.
                os.posix_fallocate(file.fileno(), 0, 2 * self._slot_bytes)
                self._map = mmap.mmap(file.fileno(), 2 * self._slot_bytes)
        except OSError as error:
            raise LocalError(
                f"learner outbox {path}: {error.strerror}; it needs {2 * self._slot_bytes} bytes"
            ) from None
        self._sequence = max((sequence for sequence, _ in self._complete()), default=0)

    def write(self, slot: Slot) -> None:
        """Make a slot complete, over the older of the two. Raises LocalError when it does not fit (a bug in the sizes)."""
        start = (self._sequence + 1) % 2 * self._slot_bytes
        position = start + HEADER.size
        pieces: list[bytes | memoryview] = []
        if slot.residual is not None:
            pieces.append(slot.residual.astype("<f4", copy=False).view(np.uint8).data)
        for gradient in slot.gradients:
            # The payload beside its record: Avro would copy megabytes twice to put it inside.
            for string in (self._schemas.encode(replace(gradient, payload=b"")), gradient.payload):
                pieces += [LENGTH.pack(len(string)), string]
        body_bytes = sum(len(piece) for piece in pieces)
        padded = -(-body_bytes // ALIGN) * ALIGN
        if HEADER.size + padded > self._slot_bytes:
            raise LocalError(
                f"learner outbox {self._path}: a slot of {body_bytes} bytes does not fit in {self._slot_bytes}"
            )
        self._map[start : start + 8] = bytes(8)  # from here on the old slot does not exist
        for piece in pieces:
            self._map[position : position + len(piece)] = piece  # type: ignore[assignment]
            position += len(piece)
        self._map[position : start + HEADER.size + padded] = bytes(padded - body_bytes)
        self._sequence += 1
        residual_bytes = 0 if slot.residual is None else slot.residual.nbytes
        fields = (self._sequence, padded, slot.batch_partition, slot.batch_offset, len(slot.gradients), residual_bytes)
        with memoryview(self._map)[start + HEADER.size : start + HEADER.size + padded] as body:
            checksum = self._sum(fields, body)
        sequence, *rest = fields
        header = HEADER.pack(MAGIC, sequence, checksum, *rest, self._run_hash, self._num_parameters)
        self._map[start : start + HEADER.size] = header

    def _sum(self, fields: tuple[int, ...], body: memoryview) -> int:
        sequence, *rest = fields
        return _checksum(HEADER.pack(MAGIC, sequence, 0, *rest, self._run_hash, self._num_parameters), body)

    def complete_slots(self) -> list[Slot]:
        """What a restart must send again, oldest first: at most two."""
        return [slot for _, slot in self._complete()]

    def _complete(self) -> list[tuple[int, Slot]]:
        found = []
        for start in (0, self._slot_bytes):
            with contextlib.suppress(ValueError, struct.error, BadRecord):
                found.append(self._read(start))
        return sorted(found, key=lambda pair: pair[0])

    def _read(self, start: int) -> tuple[int, Slot]:
        """(sequence, slot) at `start`; ValueError when there is none that is whole and ours."""
        magic, sequence, checksum, padded, partition, offset, count, residual_bytes, run_hash, parameters = (
            HEADER.unpack_from(self._map, start)
        )
        if magic != MAGIC or run_hash != self._run_hash or parameters != self._num_parameters:
            raise ValueError("no slot of ours")
        if padded % ALIGN or HEADER.size + padded > self._slot_bytes or residual_bytes not in (0, 4 * parameters):
            raise ValueError("sizes out of bounds")
        with memoryview(self._map)[start + HEADER.size : start + HEADER.size + padded] as view:
            if self._sum((sequence, padded, partition, offset, count, residual_bytes), view) != checksum:
                raise ValueError("torn")
            body = bytes(view)
        residual = np.frombuffer(body, dtype="<f4", count=parameters).copy() if residual_bytes else None
        position = residual_bytes
        strings = []
        for _ in range(2 * count):
            (length,) = LENGTH.unpack_from(body, position)
            position += LENGTH.size
            strings.append(body[position : position + length])
            position += length
        gradients = [
            replace(self._schemas.expect(record, Gradient), payload=payload)
            for record, payload in zip(strings[::2], strings[1::2], strict=True)
        ]
        return sequence, Slot(partition, offset, residual, tuple(gradients))

    def close(self) -> None:
        """Unmap. The kernel writes the pages when it likes; the file stays."""
        self._map.close()
