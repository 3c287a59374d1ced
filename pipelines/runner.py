"""The runner, by name, and the mend of its leak (decision: docs/decisions; figures: ../shared/runners.md).

FnApiRunner, never DirectRunner: that one tries Prism first, which downloads a binary. Everything from the source to the sink is fused into one
stage of one thread here: what `process()` yields has gone through the whole chain when `yield` returns.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable, Iterable
from typing import Any

import apache_beam
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner, fn_runner

# Versions in which the nesting was seen and the mend was tested (tests/pipelines/test_runner_leak.py). Any other is left alone, loudly.
LEAKY_VERSIONS = ("2.76.", "2.77.")
_log = logging.getLogger(__name__)


def _eager(lazy: Callable[..., Iterable[Any]]) -> Callable[..., list[Any]]:
    @functools.wraps(lazy)
    def consolidate(*arguments: Any, **named: Any) -> list[Any]:
        return list(lazy(*arguments, **named))

    consolidate.__dict__["mended"] = True
    return consolidate


def mend_leak() -> bool:
    """Keep a streaming FnApiRunner from growing by about 1.7 MB/s. Returns whether the mend is in place.

    After each Beam bundle the runner replaces its monitoring infos by `consolidate(new + old)`, a generator over the previous generator: nothing
    consumes it until the pipeline ends, so every bundle's infos stay. A list holds one bundle's worth.
    """
    consolidate = getattr(fn_runner, "consolidate_monitoring_infos", None)
    if consolidate is None or not inspect.isgeneratorfunction(inspect.unwrap(consolidate)):
        return False
    if getattr(consolidate, "mended", False):
        return True
    if not apache_beam.__version__.startswith(LEAKY_VERSIONS):
        _log.warning("event=beam_leak_not_mended beam=%s tested=%s", apache_beam.__version__, ",".join(LEAKY_VERSIONS))
        return False
    fn_runner.consolidate_monitoring_infos = _eager(consolidate)
    return True


def local_runner() -> FnApiRunner:
    """The in-process runner of one split."""
    mend_leak()
    return FnApiRunner()


def local_options() -> PipelineOptions:
    """Its options, all of them: without an explicit list Beam would read this process's command line."""
    return PipelineOptions(
        ["--streaming", "--direct_num_workers=1", "--direct_running_mode=in_memory", "--no_save_main_session"]
    )
