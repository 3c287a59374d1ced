"""Case 8: a key that nobody reads is a promise nobody keeps. Static: each key's name is read as an attribute somewhere in the product."""

from __future__ import annotations

import ast
from functools import cache
from pathlib import Path

import pytest

from gorila.settings import known_keys

ROOT = Path(__file__).parents[2]
NOT_READERS = {"config.py", "settings.py", "generated_docs.py"}


@cache
def attributes_read() -> frozenset[str]:
    """Names of all attributes loaded in the product's code."""
    names = set()
    for folder in ("gorila", "producers", "pipelines", "consumers"):
        for path in (ROOT / folder).rglob("*.py"):
            if path.name in NOT_READERS:
                continue
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                    names.add(node.attr)
    # Keys that config.py itself turns into something others read.
    names |= {"max_staleness_versions"} if "staleness_bound" in names else set()
    return frozenset(names)


@pytest.mark.parametrize("key", known_keys())
def test_the_key_is_read_by_somebody(key: str) -> None:
    assert key.partition(".")[2] in attributes_read(), f"{key} is configured, documented, and read by nobody"
