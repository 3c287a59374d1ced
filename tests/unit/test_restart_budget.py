"""What keeps dying runs out of restarts; what dies now and then never does."""

from __future__ import annotations

from gorila.local.restart_budget import RestartBudget


def test_so_many_ends_in_a_row_and_no_more() -> None:
    budget = RestartBudget(3, 100.0)
    told = [(budget.spend(0.0), budget.in_a_row) for _ in range(4)]
    assert told == [(True, 0), (True, 1), (True, 2), (False, 3)]


def test_a_long_life_earns_one_more_and_never_more_than_were_allowed() -> None:
    budget = RestartBudget(3, 100.0)
    assert all(budget.spend(100.0) for _ in range(50))
    assert budget.spend(1e9) and [budget.spend(0.0) for _ in range(3)] == [True, True, False]
