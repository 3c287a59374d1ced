"""The one way a loop is compiled in the pipeline: strict IEEE arithmetic, numpy's error model, machine code kept on disk."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar, cast

import numba

from gorila import observations

F = TypeVar("F", bound=Callable[..., object])


def _sources() -> tuple[tuple[str, float, int], ...]:
    """(name, modification time, size) of every file whose code may be compiled into another's."""
    ours = [file for file in Path(__file__).parent.glob("*.py") if "\n@compiled\n" in file.read_text(encoding="utf-8")]
    files = [*ours, Path(observations.__file__)]
    return tuple(sorted((file.name, file.stat().st_mtime, file.stat().st_size) for file in files))


_SOURCES = _sources()


def compiled(function: F) -> F:
    """Compile with numba. No fastmath (it would reorder sums, and two processes must agree); division never raises."""
    dispatcher = numba.njit(cache=True, error_model="numpy", fastmath=False)(function)
    # numba asks only whether the file a function stands in has changed, not those of the functions compiled into it:
    # an edit of sum_tree.py would leave the old trees in sampling.py's machine code.
    file: Any = getattr(getattr(dispatcher, "_cache", None), "_cache_file", None)
    if hasattr(file, "_source_stamp"):
        file._source_stamp = _SOURCES
    return cast(F, dispatcher)
