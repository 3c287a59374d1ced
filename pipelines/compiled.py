"""The one way a loop is compiled in the pipeline: strict IEEE arithmetic, numpy's error model, machine code kept on disk."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba

F = TypeVar("F", bound=Callable[..., object])


def compiled(function: F) -> F:
    """Compile with numba. No fastmath (it would reorder sums, and two processes must agree); division never raises."""
    return cast(F, numba.njit(cache=True, error_model="numpy", fastmath=False)(function))
