"""What the codec promises: what goes in comes out, and nothing that comes in can do more than be refused (cases.md 33, 35)."""

from __future__ import annotations

import dataclasses
import struct
import tracemalloc

import numpy as np
import pytest
from example_messages import example_messages
from hypothesis import given, settings
from hypothesis import strategies as st

import schemas as wire
from gorila.codec import Schemas
from gorila.errors import BadRecord
from gorila.messages import MAX_ROWS, MESSAGES, Batch, CheckpointPart, Episode, Gradient, Message, TransitionBlock
from gorila.observations import ObservationBlock, compress

SCHEMAS = Schemas()
EXAMPLES = example_messages()
ENCODED = [SCHEMAS.encode(message) for message in EXAMPLES]
IDS = [message.schema for message in EXAMPLES]


def same(a: object, b: object) -> bool:
    if isinstance(a, np.ndarray) and isinstance(b, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    return type(a) is type(b) and a == b


def decode_or_refuse(data: bytes) -> Message | None:
    """Whatever else is raised fails the test."""
    try:
        return SCHEMAS.decode(data)
    except BadRecord:
        return None


def test_there_is_an_example_of_every_message():
    assert {message.schema for message in EXAMPLES} == set(MESSAGES) == set(wire.names())


@pytest.mark.parametrize("message", EXAMPLES, ids=IDS)
def test_what_is_encoded_is_decoded_with_the_same_values_and_column_types(message: Message):
    decoded = SCHEMAS.decode(SCHEMAS.encode(message))
    assert type(decoded) is type(message)
    for field in dataclasses.fields(message):
        assert same(getattr(decoded, field.name), getattr(message, field.name)), field.name


@pytest.mark.parametrize("message", EXAMPLES, ids=IDS)
def test_two_processes_give_a_schema_the_same_id(message: Message):
    assert Schemas().encode(message)[:5] == SCHEMAS.encode(message)[:5]


@pytest.mark.parametrize("data", ENCODED, ids=IDS)
def test_a_record_cut_short_anywhere_is_refused(data: bytes):
    for length in range(len(data)):
        with pytest.raises(BadRecord):
            SCHEMAS.decode(data[:length])


@pytest.mark.parametrize("data", ENCODED, ids=IDS)
def test_bytes_after_the_end_are_refused(data: bytes):
    with pytest.raises(BadRecord, match="after the end"):
        SCHEMAS.decode(data + b"\0")


@given(st.binary(max_size=200))
def test_random_bytes_are_only_ever_refused(data: bytes):
    assert decode_or_refuse(data) is None


@given(st.sampled_from(ENCODED), st.binary(max_size=120))
def test_random_bodies_behind_a_known_id_are_refused_or_valid(data: bytes, body: bytes):
    message = decode_or_refuse(data[:5] + body)
    if message is not None:
        message.check()


@settings(max_examples=400)
@given(st.data())
def test_a_damaged_record_is_refused_or_valid(data: st.DataObject):
    damaged = bytearray(data.draw(st.sampled_from(ENCODED)))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(5, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    message = decode_or_refuse(bytes(damaged))
    if message is not None:
        message.check()


def test_a_tombstone_and_an_unknown_id_are_refused_by_name():
    with pytest.raises(BadRecord, match="tombstone"):
        SCHEMAS.decode(None)
    with pytest.raises(BadRecord, match="unknown schema id 123456"):
        SCHEMAS.decode(struct.pack(">bI", 0, 123456) + ENCODED[0][5:])
    with pytest.raises(BadRecord, match="framing"):
        SCHEMAS.decode(b"\1" + ENCODED[0][1:])


def test_another_kind_of_message_than_expected_is_refused():
    with pytest.raises(BadRecord, match="gradients was expected"):
        SCHEMAS.expect(ENCODED[IDS.index("episode")], Gradient)


def varint(number: int) -> bytes:
    number = number << 1 if number >= 0 else ((-number) << 1) - 1
    out = b""
    while number >= 128:
        out += bytes([number & 127 | 128])
        number >>= 7
    return out + bytes([number])


def claims_of(name: str) -> list[bytes]:
    """Bodies of a few bytes that claim gigabytes where the schema's first string, bytes or array stands."""
    head = SCHEMAS.encode(EXAMPLES[IDS.index(name)])[:5]
    return [
        head + varint(8 * 1024**3),
        head + varint(0) * 2 + varint(8 * 1024**3),
        head + varint(0) * 3 + varint(2**62),
    ]


@pytest.mark.parametrize("name", IDS)
def test_ten_bytes_that_claim_gigabytes_are_refused_without_allocating_them(name: str):
    for data in claims_of(name):
        tracemalloc.start()
        try:
            with pytest.raises(BadRecord):
                SCHEMAS.decode(data)
            assert tracemalloc.get_traced_memory()[1] < 4 * 1024 * 1024
        finally:
            tracemalloc.stop()


@pytest.mark.parametrize(
    "claim",
    [
        ObservationBlock("uint8", (4096, 4096, 64), 4096, "zstd", b"x"),
        ObservationBlock("uint8", (84, 84), 2**31 - 1, "zstd", b"x"),
        ObservationBlock("float64", (2**23,), 2, "zstd", b"x"),
        ObservationBlock("uint8", (84, 84), 3, "none", b"x"),
        ObservationBlock("object", (84, 84), 3, "none", b"x"),
    ],
    ids=["shape", "count", "bytes", "short", "dtype"],
)
def test_an_observation_block_that_claims_what_it_has_not_is_refused_at_the_door(claim: ObservationBlock):
    block = EXAMPLES[0]
    assert isinstance(block, TransitionBlock)
    tracemalloc.start()
    try:
        with pytest.raises(BadRecord):
            SCHEMAS.decode(SCHEMAS.encode(dataclasses.replace(block, observations=claim)))
        assert tracemalloc.get_traced_memory()[1] < 4 * 1024 * 1024
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("reward", np.array([np.nan, 0, 0], np.float32)),
        ("q_max", np.array([np.inf, 0, 0], np.float32)),
        ("reward", np.array([1, 2], np.float32)),
        ("action", np.array([-1, 0, -1], np.int32)),
        ("lane", -1),
    ],
)
def test_a_transition_block_with_an_impossible_value_is_refused(field: str, value: object):
    with pytest.raises(BadRecord):
        SCHEMAS.decode(SCHEMAS.encode(dataclasses.replace(EXAMPLES[0], **{field: value})))


def test_a_checkpoint_piece_outside_its_tensor_is_refused():
    with pytest.raises(BadRecord, match="outside"):
        SCHEMAS.decode(SCHEMAS.encode(CheckpointPart(0, 1, "weights", 2, 3, np.zeros(2, np.float32).tobytes())))


def test_an_id_learned_from_a_registry_is_asked_for_once_and_an_unknown_one_too():
    asked: list[int] = []
    known = {77: wire.text("episode")}

    def lookup(number: int) -> str | None:
        asked.append(number)
        return known.get(number)

    schemas = Schemas()
    schemas.lookup = lookup
    data = struct.pack(">bI", 0, 77) + ENCODED[IDS.index("episode")][5:]
    assert isinstance(schemas.decode(data), Episode)
    assert isinstance(schemas.decode(data), Episode)
    for _ in range(2):
        with pytest.raises(BadRecord, match="unknown schema id 78"):
            schemas.decode(struct.pack(">bI", 0, 78) + data[5:])
    assert asked == [77, 78]


@pytest.mark.parametrize(
    "text", ['"string"', "[1]", "not JSON", '{"type": "record", "name": "theirs", "fields": []}', '{"name": 7}']
)
def test_an_id_that_the_registry_knows_as_a_schema_of_others_is_a_bad_record_and_is_asked_for_once(text: str):
    asked: list[int] = []
    schemas = Schemas()
    schemas.lookup = lambda number: (asked.append(number), text)[1]
    for _ in range(2):
        with pytest.raises(BadRecord):
            schemas.decode(struct.pack(">bI", 0, 77) + b"theirs")
    assert asked == [77]


def test_a_batch_whose_blocks_together_inflate_to_gigabytes_is_refused_before_any_is():
    (batch,) = [message for message in EXAMPLES if isinstance(message, Batch)]
    rows = len(batch.action)
    wide = {
        field.name: np.resize(column, MAX_ROWS)
        for field in dataclasses.fields(batch)
        if isinstance(column := getattr(batch, field.name), np.ndarray) and len(column) == rows
    }
    places = np.zeros(MAX_ROWS * batch.stack, np.int32)
    empty = compress(np.zeros((1000, 84, 84), np.uint8), "zstd")  # a few hundred bytes that claim 7 MB
    for blocks, sound in ((10, True), (100, False)):
        wide |= {"frames_tm1": places, "frames_t": places}
        data = SCHEMAS.encode(dataclasses.replace(batch, **wide, blocks=[empty] * blocks))
        if sound:
            assert SCHEMAS.decode(data)
        else:
            with pytest.raises(BadRecord, match="inflate to"):
                SCHEMAS.decode(data)
