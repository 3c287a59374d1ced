"""What every codec of flat float32 values offers, and the checks they share. numpy only: the parameter server imports it.

Rules of this folder:
1. A codec is deterministic: the same values give the same bytes, and every reader of the bytes gets the same values.
2. What a codec loses is the caller's to keep: residual = values - decode(encode(values)) (error feedback, Seide et al. 2014).
   `lossy` says whether there can be any; `subtract` makes it in place.
3. NaN never goes out (InvalidState: the learner's guard failed) and never comes in (BadRecord).
4. `decode` judges length, indices and values before anyone uses them, and before anything is allocated from a record's claims.
5. A codec may keep counters, nothing else: it can be dropped and made anew at any record.
"""

from __future__ import annotations

import struct
from typing import ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from gorila.errors import BadRecord, InvalidState, ShapeError

F32 = NDArray[np.float32]
F32_MAX = np.finfo(np.float32).max
HALF_HEADER = struct.Struct("<i")
"""Before halves: e; value = half * 2**-e."""


class Codec(Protocol):
    """A codec by its name on the wire. A sparse one (top-k) is a SparseCodec too."""

    name: ClassVar[str]
    lossy: ClassVar[bool]
    saturated: int  # values cut to the largest the form holds, since the codec was made
    underflowed: int  # non-zero values that became zero, since the codec was made

    def encode(self, values: F32, version: int | None = None) -> bytes:
        """Bytes of float32 (P,), which is not changed. Raises ShapeError for another form, InvalidState for NaN.

        Args:
            version: global version the values were computed on, for a codec that warms up; None: past the warm-up.
        """
        ...

    def decode(self, data: bytes, num_parameters: int) -> F32:
        """float32 (P,), possibly a read-only view of `data`. Raises BadRecord: wrong length, a value not finite."""
        ...

    def subtract(self, data: bytes, residual: F32) -> None:
        """residual -= decode(data), in place. `data` is what this codec encoded."""
        ...


class SparseCodec:
    """A codec whose records name the values they hold; the rest are zero. `decode` makes them dense."""

    def decode_sparse(self, data: bytes, num_parameters: int) -> tuple[NDArray[np.int32], F32]:
        """(indices int32 (k,), strictly rising and below P; values float32 (k,), finite). Raises BadRecord."""
        raise NotImplementedError


class Counted:
    """The counters of a codec."""

    def __init__(self) -> None:
        self.saturated = 0
        self.underflowed = 0


def checked(values: F32) -> F32:
    """`values` if they may be encoded. Raises ShapeError, InvalidState."""
    shaped(values)
    if bool(np.isnan(values).any()):
        raise InvalidState("a gradient with NaN reached the codec")
    return values


def shaped(values: F32) -> F32:
    """`values` if they are float32 (P,). Raises ShapeError."""
    if values.dtype != np.float32 or values.ndim != 1:
        raise ShapeError(f"a gradient must be float32 (P,), got {values.dtype} {values.shape}")
    return values


def finite(values: F32) -> F32:
    """`values` if a reader may have them. Raises BadRecord."""
    if not bool(np.isfinite(values).all()):
        raise BadRecord("the payload holds a value that is not finite")
    return values
