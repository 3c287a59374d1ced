"""The local runner keeps nothing of the Beam bundles that have gone by (../shared/runners.md: about 1.7 MB/s without the mend)."""

from __future__ import annotations

import gc
import types
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.io.restriction_trackers import OffsetRange, OffsetRestrictionTracker
from apache_beam.runners.portability.fn_api_runner import FnApiRunner, fn_runner
from apache_beam.transforms.core import RestrictionProvider
from apache_beam.utils.timestamp import Duration

from pipelines.runner import LEAKY_VERSIONS, local_options, local_runner, mend_leak

BUNDLES = 60
kept: list[int] = []


class Count(RestrictionProvider):
    def initial_restriction(self, element: bytes) -> OffsetRange:
        return OffsetRange(0, BUNDLES)

    def create_tracker(self, restriction: OffsetRange) -> OffsetRestrictionTracker:
        return OffsetRestrictionTracker(restriction)

    def restriction_size(self, element: bytes, restriction: OffsetRange) -> int:
        return 1


class OneABundle(beam.DoFn):
    def process(self, element: bytes, tracker: Any = beam.DoFn.RestrictionParam(Count())) -> Any:
        position = tracker.current_restriction().start
        if tracker.try_claim(position):
            kept.append(lazy_consolidations())
            yield position
            tracker.defer_remainder(Duration.of(0))


def lazy_consolidations() -> int:
    return sum(
        1
        for thing in gc.get_objects()
        if isinstance(thing, types.GeneratorType)
        and thing.gi_code.co_name == "consolidate"
        and thing.gi_frame is not None
    )


def run_bundles(runner: FnApiRunner) -> int:
    kept.clear()
    with beam.Pipeline(runner=runner, options=local_options()) as pipeline:
        pipeline | beam.Impulse() | beam.ParDo(OneABundle())
    assert len(kept) == BUNDLES
    return kept[-1]


def test_sixty_beam_bundles_leave_no_nested_generators_behind() -> None:
    assert run_bundles(local_runner()) == 0


def test_without_the_mend_every_beam_bundle_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    """Says that the test above looks at the right thing, and when Beam no longer needs us."""
    mend_leak()
    monkeypatch.setattr(fn_runner, "consolidate_monitoring_infos", fn_runner.consolidate_monitoring_infos.__wrapped__)
    assert run_bundles(FnApiRunner()) >= BUNDLES


def test_a_beam_nobody_tried_is_left_alone(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    mend_leak()
    original = fn_runner.consolidate_monitoring_infos.__wrapped__
    monkeypatch.setattr(fn_runner, "consolidate_monitoring_infos", original)
    monkeypatch.setattr(beam, "__version__", "9.9.9")
    assert not mend_leak()
    assert fn_runner.consolidate_monitoring_infos is original
    assert "beam_leak_not_mended" in caplog.text


def test_the_beam_installed_here_is_one_that_was_tried() -> None:
    assert beam.__version__.startswith(LEAKY_VERSIONS)
    assert mend_leak()
