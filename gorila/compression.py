"""Codecs of gradients: float32 (P,) to bytes and back. numpy only: the parameter server imports it.

Rules of this file:
1. A codec is deterministic: the same values give the same bytes, and every reader of the bytes gets the same values.
2. What a codec loses is the caller's to keep: residual = values - decode(encode(values)) (error feedback, Seide et al. 2014).
   `lossy` says whether there can be any.
3. NaN never goes out (InvalidState: the learner's guard failed) and never comes in (BadRecord).
4. `decode` judges length and values before anyone uses them; it takes nothing of the record on trust.
5. A codec may keep counters, nothing else: it can be dropped and made anew at any record.
"""

from __future__ import annotations

import struct
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from gorila.errors import BadRecord, InvalidState, ShapeError

F32 = NDArray[np.float32]

HALF_MAX = 65504.0
HALF_HEADER = struct.Struct("<i")
# The scale 2**e must be a normal float32, and HALF_MAX * 2**-e finite: e in [-111, 126].
MIN_EXPONENT, MAX_EXPONENT = -111, 126


class Codec(Protocol):
    """What every codec offers. A sparse one (top-k) adds `decode_sparse(data, P) -> (indices, values)`; `decode` stays dense."""

    name: ClassVar[str]
    lossy: ClassVar[bool]
    saturated: int  # values cut to the largest the form holds, since the codec was made
    underflowed: int  # non-zero values that became zero, since the codec was made

    def encode(self, values: F32) -> bytes:
        """Bytes of float32 (P,). Raises ShapeError for another form, InvalidState for NaN."""
        ...

    def decode(self, data: bytes, num_parameters: int) -> F32:
        """float32 (P,), possibly a read-only view of `data`. Raises BadRecord: wrong length, a value not finite."""
        ...


def _checked(values: F32) -> F32:
    if values.dtype != np.float32 or values.ndim != 1:
        raise ShapeError(f"a gradient must be float32 (P,), got {values.dtype} {values.shape}")
    # One pass where all is well; what is infinite is the codec's to cut.
    if not bool(np.isfinite(values).all()) and bool(np.isnan(values).any()):
        raise InvalidState("a gradient with NaN reached the codec")
    return values


def _finite(values: F32) -> F32:
    if not bool(np.isfinite(values).all()):
        raise BadRecord("the payload holds a value that is not finite")
    return values


class Fp32:
    """The values as they are: 4 bytes each, little-endian."""

    name: ClassVar[str] = "fp32"
    lossy: ClassVar[bool] = False

    def __init__(self) -> None:
        self.saturated = 0
        self.underflowed = 0

    def encode(self, values: F32) -> bytes:
        """See Codec. Infinite values are cut to the largest float32 and counted."""
        checked = _checked(values)
        limit = np.finfo(np.float32).max
        if len(checked) and float(max(checked.max(), -checked.min())) > limit:
            self.saturated += int(np.count_nonzero(np.isinf(checked)))
            checked = np.clip(checked, -limit, limit)
        return checked.astype("<f4", copy=False).tobytes()

    def decode(self, data: bytes, num_parameters: int) -> F32:
        """See Codec. A read-only view."""
        if len(data) != 4 * num_parameters:
            raise BadRecord(f"fp32 payload of {len(data)} bytes for {num_parameters} parameters")
        return _finite(np.frombuffer(data, dtype="<f4"))


class Fp16:
    """Half precision: int32 e, then P halfs h; value = h * 2**-e (rules.md 14).

    One power-of-two scale a record puts the largest value just under 2**15: gradients are small numbers, which underflow in half
    precision long before they overflow. A power of two costs no bits.
    """

    name: ClassVar[str] = "fp16"
    lossy: ClassVar[bool] = True

    def __init__(self) -> None:
        self.saturated = 0
        self.underflowed = 0

    def encode(self, values: F32) -> bytes:
        """See Codec."""
        checked = _checked(values)
        magnitude = np.abs(checked)
        largest = float(magnitude.max(initial=0.0))
        if np.isinf(largest):
            largest = float(magnitude.max(initial=0.0, where=np.isfinite(magnitude)))
        # frexp: largest = m * 2**k with m in [.5, 1), so largest * 2**(15 - k) lies in [2**14, 2**15).
        exponent = min(max(15 - int(np.frexp(largest)[1]), MIN_EXPONENT), MAX_EXPONENT) if largest > 0 else 0
        scaled = checked * np.float32(2.0**exponent)
        over = np.abs(scaled) > HALF_MAX
        if bool(over.any()):
            self.saturated += int(np.count_nonzero(over))
            scaled = np.clip(scaled, -HALF_MAX, HALF_MAX)
        half = scaled.astype("<f2")
        self.underflowed += int(np.count_nonzero(checked) - np.count_nonzero(half))
        return HALF_HEADER.pack(exponent) + half.tobytes()

    def decode(self, data: bytes, num_parameters: int) -> F32:
        """See Codec."""
        if len(data) != HALF_HEADER.size + 2 * num_parameters:
            raise BadRecord(f"fp16 payload of {len(data)} bytes for {num_parameters} parameters")
        exponent = HALF_HEADER.unpack_from(data)[0]
        if not MIN_EXPONENT <= exponent <= MAX_EXPONENT:
            raise BadRecord(f"fp16 scale exponent {exponent} is outside {MIN_EXPONENT} … {MAX_EXPONENT}")
        half = np.frombuffer(data, dtype="<f2", offset=HALF_HEADER.size)
        return _finite(half.astype(np.float32) * np.float32(2.0**-exponent))


_CODECS: dict[str, type[Fp32] | type[Fp16]] = {kind.name: kind for kind in (Fp32, Fp16)}


def codec(name: str) -> Codec:
    """A fresh codec by its name on the wire (Gradient.codec). Raises BadRecord for a name that is not ours."""
    kind = _CODECS.get(name)
    if kind is None:
        raise BadRecord(f"gradient codec {name[:20]!r} is not one of ours: {', '.join(_CODECS)}")
    return kind()
