"""BACKWARD_TRANSITIVE: whatever was ever written is still read (cases.md 35)."""

from __future__ import annotations

import io
import json
from typing import Any

import fastavro
import pytest
from fastavro.utils import generate_many

import schemas as wire
from gorila.codec import HEADER, MAGIC, Schemas, schema_id
from gorila.errors import BadRecord

RELEASED = [(name, version, form) for name in wire.names() for version, form in enumerate(wire.released(name), 1)]


def framed(form: dict[str, Any], plain: Any) -> bytes:
    """A record as a process of that time wrote it."""
    out = io.BytesIO()
    out.write(HEADER.pack(MAGIC, schema_id(json.dumps(form))))
    fastavro.schemaless_writer(out, fastavro.parse_schema(json.loads(json.dumps(form))), plain)
    return out.getvalue()


@pytest.mark.parametrize("name", wire.names())
def test_todays_form_is_the_newest_one_released(name: str):
    forms = wire.released(name)
    assert forms, f"schemas/released/{name}/ is empty"
    assert schema_id(json.dumps(forms[-1])) == schema_id(wire.text(name)), (
        f"add today's form of {name} to schemas/released"
    )


@pytest.mark.parametrize(("name", "version", "form"), RELEASED, ids=[f"{n}-{v}" for n, v, _ in RELEASED])
def test_every_form_ever_released_is_read_with_all_of_todays_fields(name: str, version: int, form: dict[str, Any]):
    schemas = Schemas()
    wanted = {field["name"] for field in wire.load(name)["fields"]}
    for plain in generate_many(fastavro.parse_schema(json.loads(json.dumps(form))), 5):
        read, found = schemas.decode_plain(framed(form, plain))
        assert found == name
        assert set(read) == wanted
        for field in form["fields"]:
            if field["name"] in wanted and field["type"] in ("int", "long", "string", "boolean", "bytes"):
                assert read[field["name"]] == plain[field["name"]]


def with_field(name: str, field: dict[str, Any]) -> str:
    form = wire.load(name)
    form["fields"].insert(1, field)
    return json.dumps(form)


def test_a_field_added_with_a_default_reads_old_records_and_one_without_is_noticed(monkeypatch: pytest.MonkeyPatch):
    old = wire.load("episode")
    data = framed(old, next(iter(generate_many(fastavro.parse_schema(json.loads(json.dumps(old))), 1))))
    schemas = Schemas()
    original = wire.text
    added = with_field("episode", {"name": "lives", "type": "int", "default": 3})
    broken = with_field("episode", {"name": "lives", "type": "int"})
    monkeypatch.setattr(wire, "text", lambda name: added if name == "episode" else original(name))
    assert schemas.decode_plain(data)[0]["lives"] == 3
    monkeypatch.setattr(wire, "text", lambda name: broken if name == "episode" else original(name))
    with pytest.raises(BadRecord, match="lives"):
        schemas.decode_plain(data)


def test_a_newer_writers_field_is_skipped_once_its_schema_is_known():
    newer = with_field("episode", {"name": "lives", "type": "int"})
    plain = next(iter(generate_many(fastavro.parse_schema(json.loads(newer)), 1)))
    data = framed(json.loads(newer), plain)
    schemas = Schemas()
    with pytest.raises(BadRecord, match="unknown schema id"):
        schemas.decode_plain(data)
    schemas.learn(schema_id(newer), newer)
    read, _ = schemas.decode_plain(data)
    assert "lives" not in read
    assert read["steps"] == plain["steps"]


def test_a_schema_that_is_not_a_record_type_of_ours_is_refused():
    with pytest.raises(BadRecord, match="not one of ours"):
        Schemas().learn(5, json.dumps({"type": "record", "name": "Invoice", "fields": []}))
