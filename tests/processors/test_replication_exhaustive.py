"""Chain replication, every interleaving: nothing is shown that a member lacks, nothing is taken back, nothing is lost, somebody always goes on. And without any
one of its rules that is not so.

Which processes, failures and bounds are explored is SCENARIOS; what the model leaves out and why is said in replication_model.py and heartbeat_model.py.
"""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest
from heartbeat_model import HeartbeatModel
from replication_model import Model, Violation

from consumers.parameter_server.membership import Suspicion
from consumers.parameter_server.rules import Rules

SCENARIOS: dict[str, dict[str, Any]] = {
    "three, two crashes": {"pace": 2, "crashes": 2, "restarts": 0, "false_suspicions": 0},
    "three, two crashes, one false suspicion": {
        "pace": 4, "crashes": 2, "restarts": 0, "false_suspicions": 1, "lag": 1,
    },
    "three, two crashes, one restart": {"pace": 4, "crashes": 2, "restarts": 1, "false_suspicions": 0, "lag": 1},
    "three, a crash and a restart": {"pace": 4, "crashes": 1, "restarts": 1, "false_suspicions": 0, "lag": 2},
    "two, a crash and a restart": {"replicas": 2, "pace": 2, "crashes": 1, "restarts": 1, "false_suspicions": 0},
    "two, a crash, a restart, one false suspicion": {
        "replicas": 2, "pace": 4, "crashes": 1, "restarts": 1, "false_suspicions": 1, "lag": 2,
    },
    "two, two crashes, two restarts, one false suspicion": {
        "replicas": 2, "pace": 4, "crashes": 2, "restarts": 2, "false_suspicions": 1, "lag": 1,
    },
    "two, a crash, one false suspicion, a token an update": {
        "replicas": 2, "pace": 1, "crashes": 1, "restarts": 0, "false_suspicions": 1, "lag": 1,
    },
    "two from nothing, a crash and a restart": {
        "replicas": 2, "pace": 4, "crashes": 1, "restarts": 1, "false_suspicions": 0, "formed": False, "lag": 2,
    },
    "two and one that joins from a checkpoint, one false suspicion": {
        "pace": 4, "members": 2, "restored": 4, "crashes": 0, "restarts": 0, "false_suspicions": 1, "lag": 1,
    },
    "three from nothing": {"pace": 4, "crashes": 0, "restarts": 0, "false_suspicions": 0, "formed": False, "lag": 1},
    "one, dead and there again": {"replicas": 1, "pace": 1, "crashes": 2, "restarts": 2, "false_suspicions": 0},
}  # fmt: skip
"""4 updates each. `pace`: updates between two tokens of a process. `lag`: nobody is further behind the log's end while others go on (absent: no bound)."""


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_every_interleaving_keeps_the_promises(scenario: str, capsys: pytest.CaptureFixture[str]) -> None:
    began_s = time.process_time()
    report = Model(**SCENARIOS[scenario]).explore()
    with capsys.disabled():
        print(  # noqa: T201 - the figures are asked for
            f"\n{scenario}: {report.states} states, {report.transitions} transitions, {report.ends} ends, {report.depth} steps deep,"
            f" {time.process_time() - began_s:.1f} s of processor"
        )
    assert report.ends > 0


def test_a_stalled_broker_makes_nobody_suspect_a_live_process_and_a_dead_one_is_found(
    capsys: pytest.CaptureFixture[str],
) -> None:
    model = HeartbeatModel()
    model.explore()
    with capsys.disabled():
        print(f"\nheartbeats of three, a stall, a death: {model.states} states, {model.transitions} transitions")  # noqa: T201
    assert (False, True) in model.suspected


TWO: dict[str, Any] = {"replicas": 2, "pace": 2, "crashes": 0, "restarts": 0, "false_suspicions": 0}
MUTATIONS: dict[str, dict[str, Any]] = {
    "tokens_wait_for_predecessor": TWO,
    "only_returned_tokens_are_shown": TWO,
    "first_of_an_epoch_wins": {
        "pace": 4, "members": 2, "restored": 4, "crashes": 0, "restarts": 0, "false_suspicions": 1,
    },
    "newcomers_have_all_that_was_shown": {**TWO, "pace": 4, "crashes": 1, "restarts": 1},
    "newcomers_stand_behind_the_tail": {**TWO, "pace": 4, "crashes": 1, "restarts": 1},
    "fence_before_showing": {**TWO, "false_suspicions": 1},
    "only_tokens_after_the_fence_count": {**TWO, "crashes": 1, "restarts": 1, "false_suspicions": 1, "lag": 3},
    "a_name_for_each_membership": {**TWO, "pace": 4, "crashes": 1, "restarts": 1},
    "suspects_are_removed": {**TWO, "crashes": 1},
    "outsiders_take_over_from_the_silent": {**TWO, "replicas": 1, "crashes": 1, "restarts": 1},
    "the_removed_step_down": {**TWO, "false_suspicions": 1},
    "the_removed_rejoin": {**TWO, "crashes": 1, "false_suspicions": 1},
}  # fmt: skip
IN_OTHER_TESTS = {"diverged_are_removed"}
"""test_replicated_shard.py: needs real state."""


def test_every_rule_of_the_protocol_has_its_mutation() -> None:
    assert {field.name for field in dataclasses.fields(Rules)} == set(MUTATIONS) | IN_OTHER_TESTS


@pytest.mark.parametrize("rule", MUTATIONS)
def test_without_any_one_rule_a_promise_is_broken(rule: str) -> None:
    without = dataclasses.replace(Rules(), **{rule: False})
    with pytest.raises(Violation):
        Model(**MUTATIONS[rule], rules=without).explore()


class ByOwnClock(Suspicion):
    """Counts heartbeats when they are sent, not when they come back."""

    def beat(self) -> None:
        self.in_flight += 1
        for member, count in self._silent.items():
            self._silent[member] = min(count + 1, self._after)

    def came_back(self) -> None:
        self.in_flight -= 1

    @property
    def may_beat(self) -> bool:
        return True


@pytest.mark.parametrize(
    "without",
    [{"one_at_a_time": False}, {"make": ByOwnClock}, {"after": 2}],
    ids=["one at a time", "through the log", "five"],
)
def test_without_any_one_rule_of_suspicion_a_stalled_broker_costs_a_live_member(without: dict[str, Any]) -> None:
    with pytest.raises(AssertionError, match="a live process is suspected"):
        HeartbeatModel(**without).explore()
