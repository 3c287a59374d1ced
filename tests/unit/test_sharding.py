"""The cut of the flat vector."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gorila.errors import ConfigError
from gorila.sharding import bounds


@given(st.integers(1, 1_000_000), st.integers(1, 64))
def test_shards_are_contiguous_balanced_and_cover_everything(num_parameters: int, shards: int) -> None:
    if shards > num_parameters:
        with pytest.raises(ConfigError):
            bounds(num_parameters, shards)
        return
    cut = bounds(num_parameters, shards)
    assert cut[0][0] == 0 and cut[-1][1] == num_parameters and len(cut) == shards
    assert all(left[1] == right[0] for left, right in itertools.pairwise(cut))
    sizes = [stop - start for start, stop in cut]
    assert max(sizes) - min(sizes) <= 1


def test_a_shard_that_no_record_could_carry_is_refused_with_the_number_it_takes() -> None:
    with pytest.raises(ConfigError, match=r"parameter_server.shards = 1 is not allowed: 2 to"):
        bounds(2_000_001, 1)
    assert bounds(1_687_206, 1) == [(0, 1_687_206)]
    assert bounds(1_687_206, 2) == [(0, 843_603), (843_603, 1_687_206)]
