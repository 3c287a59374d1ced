"""The wire contract: Avro schemas, data only.

`NAME.avsc` is what is written today. `released/NAME/V.avsc` is every form ever written: a record of any of them must still be read
(tests/contract). A change to a schema adds its new form to released/ in the same commit.
"""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

_FOLDER = Path(__file__).parent


@cache
def names() -> tuple[str, ...]:
    """Names of all schemas, sorted."""
    return tuple(sorted(path.stem for path in _FOLDER.glob("*.avsc")))


@cache
def text(name: str) -> str:
    """The schema's canonical JSON text; KeyError for a name that does not exist."""
    path = _FOLDER / f"{name}.avsc"
    if not path.is_file():
        raise KeyError(name)
    return json.dumps(json.loads(path.read_text()), separators=(",", ":"), sort_keys=False)


def load(name: str) -> dict[str, Any]:
    """The schema as a fresh object (parsers may mark the object they are given)."""
    loaded: dict[str, Any] = json.loads(text(name))
    return loaded


def released(name: str) -> list[dict[str, Any]]:
    """Every form of the schema ever written, oldest first."""
    folder = _FOLDER / "released" / name
    return [json.loads(path.read_text()) for path in sorted(folder.glob("*.avsc"), key=lambda p: int(p.stem))]
