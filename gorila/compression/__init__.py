"""Codecs of gradients and of the weights' deltas: float32 (P,) to bytes and back. One file a codec; the rules are in codec.py.

| name | bytes for P = 1,687,206 | what it loses |
|---|---|---|
| fp32 | 6,748,824 | nothing |
| fp16 | 3,374,412 + 4 | what half precision rounds away |
| one-bit | 210,901 + 4 + 8 a block | all but the sign, and the mean size of each sign in a block |
| top-k | 10,122 + 4 at k = 0.1 % | what is not among the k largest, until it is |

numba (all but fp32) is imported when such a codec is first asked for: an actor that reads fp32 weights never pays for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gorila.compression.codec import HALF_HEADER, Codec, SparseCodec
from gorila.compression.fp32 import Fp32
from gorila.errors import BadRecord

if TYPE_CHECKING:
    from gorila.config import LearnerSection, ParameterServerSection

__all__ = ["HALF_HEADER", "NAMES", "Codec", "SparseCodec", "codec", "delta_codec", "gradient_codec", "warm_up"]

NAMES = ("fp32", "fp16", "one-bit", "top-k")
DELTA_BLOCK = 256
"""One-bit deltas of weights: small blocks, for layers whose weights move at different speeds."""


def codec(name: str) -> Codec:
    """A fresh codec by its name on the wire (Gradient.codec), with default settings: readers need no others.

    Raises:
        BadRecord: a name that is not ours.
    """
    if name == "fp32":
        return Fp32()
    if name == "fp16":
        from gorila.compression.fp16 import Fp16

        return Fp16()
    if name == "one-bit":
        from gorila.compression.one_bit import OneBit

        return OneBit()
    if name == "top-k":
        from gorila.compression.top_k import TopK

        return TopK()
    raise BadRecord(f"codec {name[:20]!r} is not one of ours: {', '.join(NAMES)}")


def gradient_codec(section: LearnerSection, mixed: bool = False) -> Codec:
    """The codec a learner writes with. `mixed`: it computes in mixed precision, so that `auto` is fp16."""
    if section.codec == "one-bit":
        from gorila.compression.one_bit import OneBit

        return OneBit(section.one_bit_block)
    if section.codec == "top-k":
        from gorila.compression.top_k import TopK

        return TopK(section.top_k_fraction, section.top_k_warmup_versions)
    if section.codec == "auto":
        return codec("fp16" if mixed else "fp32")
    return codec(section.codec)


def delta_codec(section: ParameterServerSection) -> Codec:
    """The codec of changes of weights between two snapshots."""
    if section.delta_codec == "one-bit":
        from gorila.compression.one_bit import OneBit

        return OneBit(DELTA_BLOCK)
    if section.delta_codec == "top-k":
        from gorila.compression.top_k import TopK

        return TopK(section.delta_fraction)
    return codec(section.delta_codec)


def warm_up() -> None:
    """Compile (or load from numba's cache) every codec's loops, so that no record waits for the compiler."""
    import numpy as np

    values = np.linspace(-1, 1, 100, dtype=np.float32)
    for name in NAMES:
        one = codec(name)
        payload = one.encode(values)
        one.decode(payload, len(values))
        one.subtract(payload, values.copy())
