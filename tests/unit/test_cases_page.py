"""docs/cases.md names tests that exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NAMED = sorted(set(re.findall(r"[a-z]+/test_\w+\.py(?:::test_\w+)?", (ROOT / "docs/cases.md").read_text())))


def test_the_page_names_tests() -> None:
    assert len(NAMED) > 40


@pytest.mark.parametrize("name", NAMED)
def test_the_test_exists(name: str) -> None:
    file, _, function = name.partition("::")
    text = (ROOT / "tests" / file).read_text()
    assert f"def {function}(" in text if function else "def test_" in text
