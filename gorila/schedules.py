"""Schedules are functions of the global version, never of a process's own count: a restart or a resume changes nothing (cases.md 7, 23)."""

from __future__ import annotations


def linear(version: int, start: float, end: float, versions: int) -> float:
    """`start` at version 0 (and before any is known, -1), `end` from `versions` on, a straight line between."""
    fraction = min(max(version, 0) / versions, 1.0)
    return start + (end - start) * fraction
