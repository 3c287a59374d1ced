"""Avro on the wire, in Confluent framing: 0x00, big-endian int32 schema id, body. The only door to fastavro.

Ids are derived from the schema's CRC-64-AVRO fingerprint (its low 31 bits), so that every process agrees without a registry; with a
registry URL they come from it (gorila/registry.py fills `Schemas.register`). A reader resolves with the *writer's* schema: defaults are filled,
unknown fields skipped. A body that ends early or late, or an id nobody knows, is a BadRecord.
"""

from __future__ import annotations

import dataclasses
import io
import json
import struct
import typing
from collections.abc import Callable
from functools import cache
from typing import Any, TypeVar

import fastavro
import fastavro.schema
import numpy as np

import schemas
from gorila.errors import BadRecord
from gorila.messages import MESSAGES, Message
from gorila.observations import ObservationBlock

MAGIC = 0
MAX_UNKNOWN = 1000  # ids remembered as unknown to the registry
HEADER = struct.Struct(">bI")
M = TypeVar("M", bound=Message)


def schema_id(schema_text: str) -> int:
    """The id every process derives for a schema: its CRC-64-AVRO fingerprint's low 31 bits."""
    canonical = fastavro.schema.to_parsing_canonical_form(json.loads(schema_text))
    return int(fastavro.schema.fingerprint(canonical, "CRC-64-AVRO")[-8:], 16) & 0x7FFFFFFF


@cache
def _parsed(text: str) -> Any:
    return fastavro.parse_schema(json.loads(text))


def _column_types(kind: type) -> dict[str, Any]:
    """numpy dtype of each column field of a message class, by its annotation."""
    hints = typing.get_type_hints(kind)
    columns = {}
    for field in dataclasses.fields(kind):
        arguments = typing.get_args(hints[field.name])
        if typing.get_origin(hints[field.name]) is np.ndarray:
            columns[field.name] = np.dtype(typing.get_args(arguments[1])[0])
    return columns


def _to_plain(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.tolist()
    if isinstance(value, ObservationBlock):
        return {
            "dtype": value.dtype,
            "shape": value.shape,
            "count": value.count,
            "codec": value.codec,
            "data": value.data,
        }
    if isinstance(value, list) and value and isinstance(value[0], ObservationBlock):
        return [_to_plain(item) for item in value]
    return value


def _block(plain: dict[str, Any]) -> ObservationBlock:
    return ObservationBlock(plain["dtype"], tuple(plain["shape"]), plain["count"], plain["codec"], plain["data"])


class Schemas:
    """The schemas of one process by id: ours, every released one, and those learned from a `run` record or a registry."""

    def __init__(self) -> None:
        self.lookup: Callable[[int], str | None] | None = None
        self._unknown: set[int] = set()
        self._by_id: dict[int, str] = {}
        self._name_by_id: dict[int, str] = {}
        self._write_id: dict[str, int] = {}
        self._columns = {name: _column_types(kind) for name, kind in MESSAGES.items()}
        for name in schemas.names():
            for old in schemas.released(name):
                self.learn(schema_id(json.dumps(old)), json.dumps(old))
            current = schemas.text(name)
            self._write_id[name] = self.learn(schema_id(current), current)

    def learn(self, number: int, text: str) -> int:
        """Know a schema under an id; returns the id. Raises BadRecord when the schema is not one of our record types."""
        # A registry serves others too: it may know an id as a schema that is no record at all.
        try:
            parsed = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BadRecord(f"schema {number} is not JSON: {error}") from None
        record_name = str(parsed.get("name", "") if isinstance(parsed, dict) else text[:40]).rsplit(".", 1)[-1]
        for name in schemas.names():
            if schemas.load(name)["name"] == record_name:
                self._by_id[number] = text
                self._name_by_id[number] = name
                return number
        raise BadRecord(f"schema {record_name!r} is not one of ours")

    def register(self, name: str, number: int) -> None:
        """Write records of `name` under an id a registry gave."""
        self._write_id[name] = self.learn(number, schemas.text(name))

    def texts(self) -> dict[str, str]:
        """Schemas written today by id, as the `run` topic carries them."""
        return {str(number): schemas.text(name) for name, number in self._write_id.items()}

    def encode(self, message: Message) -> bytes:
        """A message as framed Avro bytes."""
        name = message.schema
        out = io.BytesIO()
        out.write(HEADER.pack(MAGIC, self._write_id[name]))
        plain = {field.name: _to_plain(getattr(message, field.name)) for field in dataclasses.fields(message)}
        fastavro.schemaless_writer(out, _parsed(schemas.text(name)), plain)
        return out.getvalue()

    def decode(self, data: bytes | None) -> Message:
        """The message in framed Avro bytes, checked. Raises BadRecord (a tombstone is one too)."""
        if data is None:
            raise BadRecord("a tombstone where a record was expected")
        plain, name = self.decode_plain(data)
        kind = MESSAGES[name]
        columns = self._columns[name]
        for column, dtype in columns.items():
            try:
                plain[column] = np.array(plain[column], dtype=dtype)
            except (OverflowError, ValueError) as error:
                raise BadRecord(f"column {column}: {error}") from None
        if name == "transitions":
            plain["observations"] = _block(plain["observations"])
        elif name == "batches":
            plain["blocks"] = [_block(block) for block in plain["blocks"]]
        message = kind(**plain)
        message.check()
        return message

    def decode_plain(self, data: bytes) -> tuple[dict[str, Any], str]:
        """(fields as plain Python, schema name); resolved to today's schema. Raises BadRecord."""
        if len(data) < HEADER.size or data[0] != MAGIC:
            raise BadRecord("not in Confluent framing: the first byte is not 0, or the header is short")
        number = HEADER.unpack_from(data)[1]
        writer = self._by_id.get(number) or self._look_up(number)
        name = self._name_by_id[number]
        body = io.BytesIO(data)
        body.seek(HEADER.size)
        reader = schemas.text(name)
        try:
            # fastavro raises whatever its C code meets on malformed bytes: all of it means the same to us.
            plain = fastavro.schemaless_reader(body, _parsed(writer), None if writer == reader else _parsed(reader))
        except MemoryError:
            raise BadRecord("avro body claims more than memory holds") from None
        except Exception as error:
            raise BadRecord(f"avro body of {name}: {type(error).__name__}: {error}") from None
        if body.tell() != len(data):
            raise BadRecord(f"{len(data) - body.tell()} bytes after the end of the record")
        if not isinstance(plain, dict):
            raise BadRecord("avro body is not a record")
        return plain, name

    def _look_up(self, number: int) -> str:
        """Ask the registry, once an id: what it does not know stays unknown."""
        if self.lookup is not None and number not in self._unknown:
            text = self.lookup(number)
            # Whatever is not ours by now is not asked for again.
            if len(self._unknown) < MAX_UNKNOWN:
                self._unknown.add(number)
            if text is not None:
                self.learn(number, text)
                self._unknown.discard(number)
                return text
        raise BadRecord(f"unknown schema id {number}")

    def expect(self, data: bytes | None, kind: type[M]) -> M:
        """`decode`, and a BadRecord for another kind of message."""
        message = self.decode(data)
        if not isinstance(message, kind):
            raise BadRecord(f"a {message.schema} record where {kind.schema} was expected")
        return message
