"""Messages as Parquet columns, and back, byte for byte. A row group reads with plain pyarrow, pandas or DuckDB.

transitions  A row each; what belongs to a block as a whole is repeated (`lane`, `epsilon`, …). Frames stay as the actor compressed them, once a block:
             `observation_data` with its dtype, shape, count and codec on the block's row 0, null on the others. Float vectors of up to
             MAX_VECTOR values are there as a list column `observation` as well.
priorities   A row a TD error; `partition, offset` are the record's own, `transition_*` what it speaks of.
episodes     A row a record; `kind` is `episode` or `evaluation`, columns of the other kind are null.
run          A row a record.
Every topic has `partition, offset, timestamp_ms, row`: where a record was in Kafka, and its how manyth row this is.
"""

from __future__ import annotations

import dataclasses
import math
import typing
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
from numpy.typing import NDArray

from gorila.environment_facts import EnvironmentFacts
from gorila.errors import BadRecord, RunError
from gorila.messages import Episode, Evaluation, Message, Priorities, Run, TransitionBlock
from gorila.observations import ObservationBlock, inflate
from gorila.recording.recorded import Recorded

MAX_VECTOR = 64
_PLACE = [("partition", pa.int32()), ("offset", pa.int64()), ("timestamp_ms", pa.int64()), ("row", pa.int32())]
_BLOCK: list[tuple[str, Any]] = [
    ("actor_id", pa.string()),
    ("actor_epoch", pa.int64()),
    ("lane", pa.int32()),
    ("weights_version", pa.int64()),
    ("epsilon", pa.float32()),
]
_ROW: list[tuple[str, Any]] = [
    ("action", pa.int32()),
    ("reward", pa.float32()),
    ("is_first", pa.bool_()),
    ("is_last", pa.bool_()),
    ("terminated", pa.bool_()),
    ("truncated", pa.bool_()),
    ("q_taken", pa.float32()),
    ("q_max", pa.float32()),
]
_FRAMES: list[tuple[str, Any]] = [
    ("observation_dtype", pa.string()),
    ("observation_shape", pa.list_(pa.int32())),
    ("observation_count", pa.int32()),
    ("observation_codec", pa.string()),
    ("observation_data", pa.binary()),
]
_BATCH: list[tuple[str, Any]] = [
    ("learner_id", pa.string()),
    ("batch_partition", pa.int32()),
    ("batch_offset", pa.int64()),
    ("version", pa.int64()),
    ("loss", pa.float32()),
    ("gradient_norm", pa.float32()),
    ("rejected", pa.bool_()),
    ("busy_fraction", pa.float32()),
    ("round_trip_ms", pa.float32()),
]
_ERRORS: list[tuple[str, Any]] = [
    ("transition_partition", pa.int32()),
    ("transition_offset", pa.int64()),
    ("transition_row", pa.int32()),
    ("td_error", pa.float32()),
]
_NUMPY: dict[str, type[np.generic]] = {
    "transition_partition": np.int32,
    "transition_offset": np.int64,
    "transition_row": np.int32,
    "td_error": np.float32,
}
_PLAIN = {"str": pa.string(), "int": pa.int64(), "float": pa.float64(), "bool": pa.bool_()}


def _plain_columns(*kinds: type) -> list[tuple[str, Any]]:
    found: dict[str, Any] = {}
    for kind in kinds:
        for field in dataclasses.fields(kind):
            found[field.name] = _PLAIN.get(str(field.type)) or pa.map_(pa.string(), pa.string())
    return list(found.items())


ROW_KINDS: dict[str, dict[str, type[Any]]] = {
    "episodes": {"episode": Episode, "evaluation": Evaluation},
    "run": {"run": Run},
}


def has_vectors(facts: EnvironmentFacts) -> bool:
    """Whether `observation` is a column of its own: float vectors of at most MAX_VECTOR values."""
    dtype = np.dtype(facts.observation_dtype)
    return dtype.kind == "f" and math.prod(facts.observation_shape) <= MAX_VECTOR


def columns_of(topic: str, facts: EnvironmentFacts) -> pa.Schema:
    """The columns of a topic's files."""
    if topic == "transitions":
        value = pa.float64() if facts.observation_dtype == "float64" else pa.float32()
        vector = [("observation", pa.list_(value))] if has_vectors(facts) else []
        return pa.schema([*_PLACE, ("step", pa.int64()), *_BLOCK, *_ROW, *vector, *_FRAMES])
    if topic == "priorities":
        return pa.schema([*_PLACE, *_BATCH, *_ERRORS])
    kinds = ROW_KINDS[topic]
    return pa.schema([*_PLACE, ("kind", pa.string()), *_plain_columns(*kinds.values())])


def to_columns(topic: str, records: Sequence[Recorded], schema: pa.Schema, facts: EnvironmentFacts) -> pa.RecordBatch:
    """Records of one topic as rows. Raises BadRecord for a message the topic does not carry."""
    if topic == "transitions":
        made = _transition_columns([_expect(r, TransitionBlock) for r in records], records, facts)
    elif topic == "priorities":
        made = _priority_columns([_expect(r, Priorities) for r in records], records)
    else:
        made = _row_columns(topic, records, schema)
    return pa.record_batch([pa.array(made[f.name], f.type) for f in schema], schema=schema)


M = typing.TypeVar("M")


def _expect(record: Recorded, kind: type[M]) -> M:
    if not isinstance(record.message, kind):
        raise BadRecord(f"a {record.message.schema} record is not expected here")
    return record.message


def _places(records: Sequence[Recorded], lengths: NDArray[np.int64]) -> dict[str, Any]:
    total = int(lengths.sum())
    starts = np.cumsum(lengths) - lengths
    return {
        "partition": np.repeat(np.array([r.partition for r in records], np.int32), lengths),
        "offset": np.repeat(np.array([r.offset for r in records], np.int64), lengths),
        "timestamp_ms": np.repeat(np.array([r.timestamp_ms for r in records], np.int64), lengths),
        "row": (np.arange(total) - np.repeat(starts, lengths)).astype(np.int32),
    }


def _repeated(
    messages: Sequence[Any], columns: Sequence[tuple[str, Any]], lengths: NDArray[np.int64]
) -> dict[str, Any]:
    which = pa.array(np.repeat(np.arange(len(messages)), lengths))
    return {name: pa.array([getattr(m, name) for m in messages], kind).take(which) for name, kind in columns}


def _transition_columns(
    blocks: Sequence[TransitionBlock], records: Sequence[Recorded], facts: EnvironmentFacts
) -> dict[str, Any]:
    lengths = np.array([len(block.action) for block in blocks], np.int64)
    made = _places(records, lengths) | _repeated(blocks, _BLOCK, lengths)
    made["step"] = np.repeat(np.array([b.first_step for b in blocks], np.int64), lengths) + made["row"]
    made |= {name: np.concatenate([getattr(b, name) for b in blocks]) for name, _ in _ROW}
    frames: dict[str, list[Any]] = {
        "observation_dtype": [b.observations.dtype for b in blocks],
        "observation_shape": [list(b.observations.shape) for b in blocks],
        "observation_count": [b.observations.count for b in blocks],
        "observation_codec": [b.observations.codec for b in blocks],
        "observation_data": [b.observations.data for b in blocks],
    }
    which = pa.array(np.repeat(np.arange(len(blocks)), lengths), mask=made["row"] != 0)
    made |= {name: pa.array(frames[name], kind).take(which) for name, kind in _FRAMES}
    if has_vectors(facts):
        kind = columns_of("transitions", facts).field("observation").type
        made["observation"] = pa.concat_arrays([_vectors(block.observations, facts, kind) for block in blocks])
    return made


def _vectors(block: ObservationBlock, facts: EnvironmentFacts, kind: Any) -> pa.Array:
    """One list a row; nulls where a block is not what the environment makes (a reader judges it by its bytes)."""
    if block.dtype != facts.observation_dtype or block.shape != facts.observation_shape:
        return pa.nulls(block.count, kind)
    try:
        values = inflate(block).reshape(block.count, -1)
    except BadRecord:
        return pa.nulls(block.count, kind)
    ends = np.arange(block.count + 1, dtype=np.int32) * values.shape[1]
    return pa.ListArray.from_arrays(ends, pa.array(values.ravel(), kind.value_type))


def _priority_columns(messages: Sequence[Priorities], records: Sequence[Recorded]) -> dict[str, Any]:
    rows = np.array([len(message.row) for message in messages], np.int64)
    lengths = np.maximum(rows, 1)  # a record without rows keeps its place as one row of nulls
    made = _places(records, lengths) | _repeated(messages, _BATCH, lengths)
    nothing = np.repeat(rows == 0, lengths)
    for name, kind in _ERRORS:
        own = name.removeprefix("transition_")
        blank = np.zeros(1, _NUMPY[name])
        values = np.concatenate([getattr(m, own) if len(m.row) else blank for m in messages])
        made[name] = pa.array(values, kind, mask=nothing)
    return made


def _row_columns(topic: str, records: Sequence[Recorded], schema: pa.Schema) -> dict[str, Any]:
    kinds = ROW_KINDS[topic]
    made: dict[str, Any] = _places(records, np.ones(len(records), np.int64))
    for record in records:
        if record.message.schema not in kinds:
            raise BadRecord(f"a {record.message.schema} record is not expected on topic {topic}")
    made["kind"] = [record.message.schema for record in records]
    for name in schema.names[5:]:
        values = [getattr(record.message, name, None) for record in records]
        made[name] = [list(v.items()) if isinstance(v, dict) else v for v in values]
    return made


def from_columns(topic: str, batches: Iterator[pa.RecordBatch], where: str) -> Iterator[Recorded]:
    """The records of one file. A block may begin in one batch and end in a later one.

    Raises:
        RunError: rows are missing or contradict each other, naming `where` and the offset.
    """
    rest: pa.Table | None = None
    for batch in batches:
        if batch.num_rows == 0:
            continue
        table = pa.Table.from_batches([batch])
        if rest is not None:
            table = pa.concat_tables([rest, table]).combine_chunks()
        starts = np.flatnonzero(table["row"].to_numpy() == 0)
        if len(starts) == 0 or starts[0] != 0:
            raise RunError(f"{where}: rows before the first row of a record")
        last = int(starts[-1])
        yield from _messages(topic, table.slice(0, last), starts[:-1], where)
        rest = table.slice(last)
    if rest is not None:
        yield from _messages(topic, rest, np.zeros(1, np.int64), where)


def _messages(topic: str, table: pa.Table, starts: NDArray[Any], where: str) -> Iterator[Recorded]:
    if len(starts) == 0:
        return
    table = table.combine_chunks()
    place = {name: table[name].to_numpy() for name, _ in _PLACE}
    make = _Transitions(table) if topic == "transitions" else _PriorityRows(table) if topic == "priorities" else None
    plain = table.to_pylist() if make is None else []
    for start, stop in zip(starts.tolist(), [*starts[1:].tolist(), len(table)], strict=True):
        offset = int(place["offset"][start])
        one = slice(start, stop)
        if not (place["offset"][one] == offset).all() or not (place["row"][one] == np.arange(stop - start)).all():
            raise RunError(f"{where}: offset {offset}: rows are missing")
        try:
            message = make.message(start, stop) if make is not None else _row_message(topic, plain[start])
            message.check()
        except (BadRecord, TypeError, KeyError, ValueError) as error:
            raise RunError(f"{where}: offset {offset}: {error}") from None
        yield Recorded(int(place["partition"][start]), offset, int(place["timestamp_ms"][start]), message)


class _Transitions:
    """Rows of `transitions` as blocks. Columns are copied: a block kept for hours must not pin a whole row group."""

    def __init__(self, table: pa.Table) -> None:
        self._rows = {name: table[name].to_numpy(zero_copy_only=False) for name, _ in _ROW}
        self._block = {name: table[name].combine_chunks() for name, _ in (*_BLOCK, *_FRAMES)}
        self._step = table["step"].to_numpy()

    def message(self, start: int, stop: int) -> TransitionBlock:
        first = {name: column[start].as_py() for name, column in self._block.items()}
        frames = ObservationBlock(
            first["observation_dtype"],
            tuple(first["observation_shape"]),
            first["observation_count"],
            first["observation_codec"],
            first["observation_data"],
        )
        return TransitionBlock(
            **{name: first[name] for name, _ in _BLOCK},
            first_step=int(self._step[start]),
            observations=frames,
            **{name: column[start:stop].copy() for name, column in self._rows.items()},
        )


class _PriorityRows:
    """Rows of `priorities` as records."""

    def __init__(self, table: pa.Table) -> None:
        self._batch = {name: table[name].combine_chunks() for name, _ in _BATCH}
        self._nothing = table["td_error"].is_null().to_numpy(zero_copy_only=False)
        self._errors = {name.removeprefix("transition_"): table[name].fill_null(0).to_numpy() for name, _ in _ERRORS}

    def message(self, start: int, stop: int) -> Priorities:
        stop = start if self._nothing[start] else stop
        return Priorities(
            **{name: column[start].as_py() for name, column in self._batch.items()},
            **{name: column[start:stop].copy() for name, column in self._errors.items()},
        )


def _row_message(topic: str, row: dict[str, Any]) -> Message:
    kind = ROW_KINDS[topic][row["kind"]]
    values = {field.name: row[field.name] for field in dataclasses.fields(kind)}
    message: Message = kind(**{name: dict(v) if isinstance(v, list) else v for name, v in values.items()})
    return message
