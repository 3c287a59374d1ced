"""One-bit and top-k: what they send, what they keep back, and that no bytes from outside get past them."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from consumers.gradient_step import Computed
from consumers.gradient_writer import GradientWriter
from consumers.outbox import MemoryOutbox
from gorila.compression import NAMES, codec, half_kernels
from gorila.compression import one_bit as one_bit_file
from gorila.compression.codec import HALF_HEADER
from gorila.compression.one_bit import HEADER, OneBit
from gorila.compression.selection import SMALL, STRIDE, largest
from gorila.compression.top_k import WARMUP, TopK, fraction_at
from gorila.config import LearnerSection
from gorila.errors import BadRecord, InvalidState

F = np.float32
NATURE = 1_687_206
floats = st.floats(-(2.0**60), 2.0**60, width=32)


def by_sorting(values: np.ndarray, k: int) -> list[int]:
    order = np.argsort(-np.abs(values), kind="stable")[:k]
    return sorted(int(i) for i in order if values[i] != 0)


# ---- sizes: the table of shared/reference.md


def test_payloads_of_the_nature_network_have_the_sizes_the_reference_names() -> None:
    values = np.random.default_rng(0).standard_normal(NATURE).astype(F)
    sizes = {name: len(codec(name).encode(values)) for name in NAMES}
    assert sizes == {
        "fp32": 6_748_824,
        "fp16": 3_374_412 + 4,
        "one-bit": 210_901 + 4 + 8 * 1_648,
        "top-k": 10_122 + 4,
    }


# ---- selection


@given(arrays(F, st.integers(1, 300), elements=floats), st.integers(1, 300))
@settings(deadline=None)
def test_selection_is_exact_with_ties_to_the_lowest_position(values: np.ndarray, k: int) -> None:
    assert largest(values, k).tolist() == by_sorting(values, k)


@given(
    st.integers(0, 2**32 - 1),
    st.integers(SMALL + 1, 60_000),
    st.integers(1, 3000),
    st.sampled_from(["normal", "heavy tail", "few distinct", "mostly zero", "equal", "at the stride", "rising"]),
)
@settings(max_examples=60, deadline=None)
def test_selection_by_a_sampled_threshold_is_exact_whatever_the_sample_shows(
    seed: int, size: int, k: int, kind: str
) -> None:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal(size).astype(F)
    if kind == "heavy tail":
        values = (values * np.exp(4 * rng.standard_normal(size))).astype(F)
    elif kind == "few distinct":
        values = rng.integers(-3, 4, size).astype(F)
    elif kind == "mostly zero":
        values[rng.random(size) < 0.999] = 0
    elif kind == "equal":
        values[:] = -2.5
    elif kind == "at the stride":  # the sample sees only giants, or only dwarfs
        values[::STRIDE] *= F(1e6 if seed % 2 else 1e-6)
    elif kind == "rising":
        values = np.arange(size, dtype=F)
    assert largest(values, k).tolist() == by_sorting(values, k)


# ---- one bit


@given(arrays(F, st.integers(1, 200), elements=floats), st.sampled_from([8, 16, 64]))
@settings(deadline=None)
def test_a_bit_stands_for_the_mean_of_its_sign_in_its_block(values: np.ndarray, block: int) -> None:
    one_bit = OneBit(block)
    decoded = one_bit.decode(one_bit.encode(values), len(values))
    for start in range(0, len(values), block):
        part, got = values[start : start + block].astype(np.float64), decoded[start : start + block]
        for chosen in (part < 0, part >= 0):
            if chosen.any():
                expected = part[chosen].mean()
                np.testing.assert_allclose(got[chosen], expected, rtol=1e-5, atol=1e-30)


def test_any_reader_decodes_the_block_a_record_names() -> None:
    values = np.random.default_rng(1).standard_normal(1000).astype(F)
    written = OneBit(64).encode(values)
    assert np.array_equal(codec("one-bit").decode(written, 1000), OneBit(64).decode(written, 1000))


def test_one_bit_cuts_and_counts_infinity() -> None:
    one_bit = OneBit(8)
    decoded = one_bit.decode(one_bit.encode(np.array([np.inf, 1, -np.inf] * 8, F)), 24)
    assert np.isfinite(decoded).all() and one_bit.saturated == 16


@given(st.binary(max_size=60), st.integers(1, 40))
@settings(max_examples=300, deadline=None)
def test_random_bytes_are_refused_or_give_finite_values_of_the_right_length(data: bytes, size: int) -> None:
    for name in NAMES:
        try:
            values = codec(name).decode(data, size)
        except BadRecord:
            continue
        assert values.dtype == F and values.shape == (size,) and np.isfinite(values).all()


@given(st.sampled_from(NAMES), st.integers(1, 300), st.data())
@settings(max_examples=400, deadline=None)
def test_a_damaged_payload_is_refused_or_gives_finite_values_of_the_right_length(
    name: str, size: int, data: st.DataObject
) -> None:
    values = np.random.default_rng(size).standard_normal(size).astype(F)
    payload = bytearray(codec(name).encode(values))
    for _ in range(data.draw(st.integers(1, 4))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(payload)))
    for damaged in (bytes(payload), bytes(payload[:cut]), bytes(payload) + bytes(payload[:cut])):
        try:
            decoded = codec(name).decode(damaged, size)
        except BadRecord:
            continue
        assert decoded.shape == (size,) and np.isfinite(decoded).all()


def test_one_bit_refuses_blocks_scales_and_bits_that_no_encoder_writes() -> None:
    scales = np.array([[-1, 1]], "<f4")
    for block in (0, 4, 12, one_bit_file.MAX_BLOCK + 8, 2**32 - 8):
        with pytest.raises(BadRecord, match="block"):
            codec("one-bit").decode(HEADER.pack(block) + scales.tobytes() + b"\0", 8)
    for wrong in ([[1, 1]], [[-1, -1]], [[np.nan, 1]], [[-1, np.inf]]):
        with pytest.raises(BadRecord):
            codec("one-bit").decode(HEADER.pack(8) + np.array(wrong, "<f4").tobytes() + b"\0", 8)
    with pytest.raises(BadRecord, match="beyond"):
        codec("one-bit").decode(HEADER.pack(8) + scales.tobytes() + b"\x80", 7)


# ---- top-k


def top_k_payload(indices: list[int], halves: list[float], exponent: int = 0) -> bytes:
    return HALF_HEADER.pack(exponent) + np.array(indices, "<i4").tobytes() + np.array(halves, "<f2").tobytes()


@pytest.mark.parametrize("indices", [[3, 1], [1, 1], [-1, 2], [1, 10], [0, 2**31 - 1], [-(2**31), 0]])
def test_top_k_refuses_indices_that_do_not_rise_within_the_shard(indices: list[int]) -> None:
    """An index out of range would write outside the array."""
    with pytest.raises(BadRecord, match="rising"):
        TopK().decode_sparse(top_k_payload(indices, [1, 1]), 10)


def test_top_k_refuses_what_is_not_finite_and_more_entries_than_parameters() -> None:
    for value in (np.inf, -np.inf, np.nan):
        with pytest.raises(BadRecord, match="finite"):
            TopK().decode_sparse(top_k_payload([1], [value]), 10)
    with pytest.raises(BadRecord):
        TopK().decode_sparse(top_k_payload([0, 1, 2], [1, 1, 1]), 2)
    with pytest.raises(BadRecord, match="exponent"):
        TopK().decode_sparse(top_k_payload([0], [1], 127), 2)


def test_top_k_sends_its_share_and_never_fewer_than_64_of_them() -> None:
    top_k = TopK(0.001)
    assert [top_k.entries(size) for size in (10, 64, 1000, 64_000, 100_000, NATURE)] == [10, 64, 64, 64, 100, 1687]


def test_the_share_falls_in_four_quarters_of_the_warm_up_and_never_below_the_final_one() -> None:
    assert [fraction_at(version, 400, 0.001) for version in (0, 99, 100, 200, 300, 399, 400, 9999)] == [
        WARMUP[0], WARMUP[0], WARMUP[1], WARMUP[2], WARMUP[3], WARMUP[3], 0.001, 0.001,
    ]  # fmt: skip
    assert [fraction_at(version, 400, 0.05) for version in (0, 100, 200, 300)] == [0.25, 0.0625, 0.05, 0.05]
    assert fraction_at(0, 0, 0.001) == fraction_at(None, 400, 0.001) == 0.001


def test_a_value_whose_half_is_zero_is_counted_and_stays_behind() -> None:
    top_k = TopK()
    values = np.array([1.0, 1e-20, 0.5, 0.0], F)
    indices, sent = top_k.decode_sparse(top_k.encode(values), 4)
    assert (indices.tolist(), sent.tolist(), top_k.underflowed) == ([0, 2], [1.0, 0.5], 1)
    residual = values.copy()
    top_k.subtract(top_k.encode(values), residual)
    assert residual.tolist() == [0.0, F(1e-20), 0.0, 0.0]


def test_top_k_cuts_and_counts_infinity_and_never_sends_nan() -> None:
    top_k = TopK()
    decoded = top_k.decode(top_k.encode(np.array([np.inf, -2, 1], F)), 3)
    assert np.isfinite(decoded).all() and decoded[0] > 2 and decoded[1:].tolist() == [-2, 1] and top_k.saturated == 1
    values = np.zeros(100_000, F)
    values[77_777] = np.nan
    with pytest.raises(InvalidState):
        top_k.encode(values)


def test_a_gradient_of_zeros_is_an_empty_record() -> None:
    payload = TopK().encode(np.zeros(100_000, F))
    assert len(payload) == HALF_HEADER.size and not TopK().decode(payload, 100_000).any()


# ---- conservation: Σ sent + residual = Σ gradient


@given(
    st.sampled_from(NAMES),
    st.integers(1, 400),
    st.integers(1, 4),
    st.lists(st.tuples(st.integers(0, 2**32 - 1), st.floats(-6, 3)), min_size=1, max_size=12),
)
@settings(max_examples=150, deadline=None)
def test_what_was_sent_and_what_is_left_are_what_was_computed(
    name: str, size: int, shards: int, steps: list[tuple[int, float]]
) -> None:
    section = LearnerSection(codec=name, one_bit_block=16, top_k_warmup_versions=8)  # type: ignore[arg-type]
    shards = min(shards, size)
    writer = GradientWriter("learner-0", size, shards, section, MemoryOutbox())
    total, sent, largest_seen = np.zeros(size), np.zeros(size), 0.0
    for number, (seed, scale) in enumerate(steps):
        gradient = (np.random.default_rng(seed).standard_normal(size) * 10**scale).astype(F)
        total += gradient
        largest_seen += float(np.abs(gradient).max())
        for record in writer.write((0, number), Computed(gradient, 1.0, 1.0, gradient), 1, [number] * shards):
            start, stop = writer.bounds[record.shard_id]
            sent[start:stop] += codec(record.codec).decode(record.payload, stop - start)
    left = 0.0 if writer.residual is None else writer.residual.astype(np.float64)
    # Each step rounds once in float32, at the size of what is there.
    np.testing.assert_allclose(sent + left, total, rtol=0, atol=2.0**-22 * largest_seen * (len(steps) + 1))


@pytest.mark.parametrize("name", ["fp16", "one-bit", "top-k"])
def test_subtracting_in_place_gives_the_bits_of_subtracting_what_was_decoded(name: str) -> None:
    values = np.random.default_rng(2).standard_normal(5000).astype(F)
    payload, residual = codec(name).encode(values), values.copy()
    codec(name).subtract(payload, residual)
    assert np.array_equal(residual, values - codec(name).decode(payload, 5000))


def test_what_is_held_back_is_sent_in_the_end() -> None:
    """Error feedback: of one gradient and then nothing, everything arrives."""
    values = np.random.default_rng(3).standard_normal(1000).astype(F)
    for name, rounds in (("one-bit", 400), ("top-k", 20)):
        residual, sent = values.copy(), np.zeros(1000)
        for _ in range(rounds):
            payload = codec(name).encode(residual)
            sent += codec(name).decode(payload, 1000)
            codec(name).subtract(payload, residual)
        assert np.linalg.norm(residual) < 0.02 * np.linalg.norm(values), name
        np.testing.assert_allclose(sent + residual, values, atol=1e-4)


# ---- half precision without the processor's help


def test_our_halves_are_ieee_halves() -> None:
    every = np.arange(65536, dtype=np.uint16)
    decoded = np.empty(65536, F)
    assert not half_kernels.from_halves(every, F(1), decoded)
    reference = every.view(np.float16).astype(F)
    finite = np.isfinite(reference)
    assert np.array_equal(decoded[finite].view(np.uint32), reference[finite].view(np.uint32))
    halves = np.sort(reference[finite])
    between = (halves[1:].astype(np.float64) + halves[:-1]) / 2
    values = np.concatenate(
        [halves, between, np.nextafter(between.astype(F), F(9e9)), np.nextafter(between.astype(F), F(-9e9))]
    )
    values = values[np.abs(values) <= 65504].astype(F)
    encoded = np.empty(len(values), np.uint16)
    half_kernels.to_halves(values, F(1), np.empty_like(values), encoded)
    assert np.array_equal(encoded, values.astype(np.float16).view(np.uint16))
