"""How the flat parameter vector is cut into shards: contiguous, balanced, the same in every process.

numpy only: the parameter server imports it.
"""

from __future__ import annotations

import itertools

from gorila.errors import ConfigError
from gorila.messages import MAX_PARAMETERS


def bounds(num_parameters: int, shards: int) -> list[tuple[int, int]]:
    """[(start, stop)] of each shard in the flat vector (P,); sizes differ by at most one, the longer ones first.

    Raises:
        ConfigError: a shard would be empty, or longer than a record of ours takes (MAX_PARAMETERS). Up to 1 M a shard is advised: snapshots
            of more are slow to send.
    """
    fewest = -(-num_parameters // MAX_PARAMETERS)
    if not max(1, fewest) <= shards <= num_parameters:
        allowed = f"{max(1, fewest)} to {num_parameters} for a network of {num_parameters} parameters"
        raise ConfigError("parameter_server.shards", shards, allowed)
    size, longer = divmod(num_parameters, shards)
    starts = [shard * size + min(shard, longer) for shard in range(shards + 1)]
    return list(itertools.pairwise(starts))
