"""The counts of --synchronous: who may go on when (rules.md 17)."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from gorila.rounds import Rounds
from gorila.settings import load_config


def test_cartpole_draws_32_batches_a_round_after_five_that_fill_the_memory() -> None:
    rounds = Rounds.of(load_config("cartpole", environ={}))
    assert (rounds.lanes, rounds.updates_per_round, rounds.warmup_rounds) == (8, 32, 5)
    assert [rounds.updates_after(r) for r in (0, 5, 6, 7)] == [0, 0, 32, 64]


@given(st.integers(1, 16), st.integers(1, 40), st.integers(1, 6), st.integers(0, 100))
def test_lockstep_goes_on_and_nobody_is_ever_ahead(lanes: int, updates: int, warmup: int, limit: int) -> None:
    rounds = Rounds(lanes, updates, warmup, limit)
    blocks = batches = priorities = 0
    for finished in range(1, warmup + 8):
        blocks += lanes
        assert rounds.may_draw(batches, blocks - 1, priorities) == 0, "a block of the round is missing"
        if finished > warmup and batches:
            assert rounds.may_draw(batches, blocks, priorities - 1) == 0, "a priority of the rounds before is missing"
        due = rounds.may_draw(batches, blocks, priorities)
        batches += due
        assert batches == rounds.updates_after(finished)
        assert rounds.may_draw(batches, blocks, batches) == 0, "a round is drawn once"
        priorities = batches
    assert batches == min(limit or batches, 7 * updates)
