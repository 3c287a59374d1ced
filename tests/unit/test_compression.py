"""Codecs of gradients: what they keep, what they lose, what they refuse."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from gorila.compression import HALF_HEADER, NAMES, codec
from gorila.errors import BadRecord, InvalidState, ShapeError

finite = arrays(np.float32, st.integers(1, 200), elements=st.floats(-(2.0**100), 2.0**100, width=32))


@given(finite)
@settings(deadline=None)
def test_fp32_loses_nothing(values: np.ndarray) -> None:
    fp32 = codec("fp32")
    assert np.array_equal(fp32.decode(fp32.encode(values), len(values)), values)
    assert not fp32.lossy


@given(finite)
@settings(max_examples=200, deadline=None)
def test_fp16_keeps_every_value_to_half_precision_of_the_records_largest(values: np.ndarray) -> None:
    fp16 = codec("fp16")
    decoded = fp16.decode(fp16.encode(values), len(values))
    largest = float(np.abs(values).max())
    # 11 bits of mantissa above the subnormal range, whose step is 2**-24 below a largest value of at least 2**14.
    allowed = np.maximum(np.abs(values.astype(np.float64)) * 2.0**-11, largest * 2.0**-38 + 1e-38)
    assert (np.abs(decoded.astype(np.float64) - values) <= allowed).all()
    assert fp16.saturated == 0


def test_fp16_is_two_bytes_a_value_for_any_scale_of_gradient() -> None:
    for scale in (1e-12, 1e-3, 1.0, 1e6):
        values = (np.linspace(-1, 1, 1001) * scale).astype(np.float32)
        fp16 = codec("fp16")
        data = fp16.encode(values)
        assert len(data) == 2 * 1001 + HALF_HEADER.size
        assert fp16.decode(data, 1001) == pytest.approx(values, rel=1e-3, abs=scale * 1e-6)
        assert fp16.underflowed == 0


def test_fp16_counts_what_underflows() -> None:
    values = np.array([1.0, 1e-20, -1e-20, 0.0], np.float32)
    fp16 = codec("fp16")
    assert fp16.decode(fp16.encode(values), 4).tolist() == [1.0, 0.0, 0.0, 0.0]
    assert fp16.underflowed == 2 and fp16.saturated == 0


def test_fp16_saturates_and_counts_instead_of_sending_infinity() -> None:
    """Case 25."""
    values = np.array([np.inf, -np.inf, 3.4e38, 1.0], np.float32)
    fp16 = codec("fp16")
    decoded = fp16.decode(fp16.encode(values), 4)
    assert np.isfinite(decoded).all() and fp16.saturated == 3
    assert decoded[0] == decoded[2] == -decoded[1] > 1e38


def test_fp32_saturates_and_counts_infinity() -> None:
    fp32 = codec("fp32")
    assert np.isfinite(fp32.decode(fp32.encode(np.array([np.inf, 1], np.float32)), 2)).all()
    assert fp32.saturated == 1


@given(st.sampled_from(NAMES), finite)
@settings(deadline=None)
def test_equal_values_give_equal_bytes(name: str, values: np.ndarray) -> None:
    assert codec(name).encode(values) == codec(name).encode(values.copy())


@pytest.mark.parametrize("name", NAMES)
def test_nan_never_goes_out(name: str) -> None:
    with pytest.raises(InvalidState):
        codec(name).encode(np.array([1.0, np.nan], np.float32))


@pytest.mark.parametrize("name", NAMES)
def test_other_shapes_and_dtypes_are_refused(name: str) -> None:
    for wrong in (np.zeros((2, 2), np.float32), np.zeros(2, np.float64)):
        with pytest.raises(ShapeError):
            codec(name).encode(wrong)


@pytest.mark.parametrize("name", NAMES)
def test_a_payload_of_another_length_is_refused(name: str) -> None:
    data = codec(name).encode(np.ones(4, np.float32))
    for wrong in (data[:-1], data + b"\0", b"", data[:3]):
        with pytest.raises(BadRecord):
            codec(name).decode(wrong, 4)


def test_payloads_with_values_that_are_not_finite_are_refused() -> None:
    with pytest.raises(BadRecord, match="finite"):
        codec("fp32").decode(np.array([1, np.nan], "<f4").tobytes(), 2)
    with pytest.raises(BadRecord, match="finite"):
        codec("fp16").decode(HALF_HEADER.pack(0) + np.array([1, np.inf], "<f2").tobytes(), 2)


@given(st.integers(-(2**31), 2**31 - 1))
@settings(deadline=None)
def test_no_scale_gives_infinity(exponent: int) -> None:
    data = HALF_HEADER.pack(exponent) + np.array([65504], "<f2").tobytes()
    try:
        decoded = codec("fp16").decode(data, 1)
    except BadRecord:
        return
    assert np.isfinite(decoded).all()


def test_an_unknown_codec_is_a_bad_record_that_names_ours() -> None:
    with pytest.raises(BadRecord, match="fp32, fp16, one-bit, top-k"):
        codec("zip")
