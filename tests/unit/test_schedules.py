"""Schedules by global version."""

from __future__ import annotations

import pytest

from gorila.schedules import linear


def test_a_linear_schedule_goes_from_start_to_end_and_stays() -> None:
    betas = [linear(version, 0.4, 1.0, 1000) for version in (0, 250, 500, 1000, 9000)]
    assert betas == pytest.approx([0.4, 0.55, 0.7, 1.0, 1.0])


def test_it_falls_too() -> None:
    assert linear(750, 1.0, 0.04, 1500) == pytest.approx(0.52)


def test_before_any_version_is_known_it_is_at_its_start() -> None:
    assert linear(-1, 0.4, 1.0, 1000) == 0.4


def test_it_depends_on_the_version_alone() -> None:
    """Cases 7 and 23: a restarted process that sees version 700 is where the old one was."""
    before = [linear(version, 0.4, 1.0, 1000) for version in range(800)]
    assert linear(700, 0.4, 1.0, 1000) == before[700]
