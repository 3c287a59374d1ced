"""Human-normalised scores: (score - random) / (human - random), always with the table and protocol they are judged by."""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

_TABLES = Path(__file__).parent / "score_tables"
NOOP_STARTS = "atari57_noop_starts"
HUMAN_STARTS = "gorila_scores"


@dataclass(frozen=True)
class NormalisedScore:
    """A score, and what it was judged by: scores of different protocols must never be compared."""

    value: float
    table: str
    protocol: str


@cache
def _rows(table: str) -> dict[str, dict[str, str]]:
    with (_TABLES / f"{table}.csv").open(newline="") as lines:
        return {row["game"]: row for row in csv.DictReader(lines)}


def game_of(env_id: str) -> str | None:
    """`ale:pong`, `ALE/Pong-v5`, `PongNoFrameskip-v4` → `pong`; None for what is not Atari."""
    if env_id.startswith("ale:"):
        return env_id.removeprefix("ale:").lower()
    if env_id.startswith("ALE/"):
        name = env_id.removeprefix("ALE/").split("-")[0]
    elif "NoFrameskip-v" in env_id:
        name = env_id.partition("NoFrameskip")[0]
    else:
        return None
    return "".join("_" + c.lower() if c.isupper() else c for c in name).lstrip("_")


def human_normalised(env_id: str, score: float, table: str = NOOP_STARTS) -> NormalisedScore | None:
    """None where the table has no such game.

    Pong 20.25 → 1.160 and Breakout 366.9 → 12.68 under no-op starts.
    """
    game = game_of(env_id)
    row = _rows(table).get(game) if game else None
    if row is None:
        return None
    random, human = float(row["random"]), float(row["human"])
    protocol = "no-op starts" if table == NOOP_STARTS else "human starts"
    return NormalisedScore((score - random) / (human - random), table, protocol)
