"""Golden losses: 20 updates on fixed synthetic batches, learner and server together, against numbers kept in losses.json.

A change that should not change behaviour leaves the file as it is. One that does brings a learning curve, and the new file:
`python -m tests.golden.test_losses` writes it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from gorila.environment_facts import EnvironmentFacts
from tests.processors.learning_loop import CARTPOLE, CATCH, LearningLoop, small_config

FILE = Path(__file__).parent / "losses.json"
UPDATES = 20
CASES: dict[str, tuple[EnvironmentFacts, dict[str, dict[str, Any]]]] = {
    "mlp": (CARTPOLE, {"network": {"hidden": [32, 32]}, "learner": {"beta_versions": 20, "clip_norm": 0.2}}),
    "mlp-dueling-fp16": (
        CARTPOLE,
        {
            "network": {"hidden": [32, 32], "dueling": True},
            "learner": {"codec": "fp16"},
            "parameter_server": {"shards": 2},
        },
    ),
    "small-conv": (
        CATCH,
        {"network": {"factory": "small-conv", "hidden": [32]}, "parameter_server": {"learning_rate": 1e-3}},
    ),
}


def losses(name: str) -> list[float]:
    """The loss of each update."""
    facts, sections = CASES[name]
    server = {"target_period_versions": 5, **sections.get("parameter_server", {})}
    loop = LearningLoop(small_config(**{**sections, "parameter_server": server}), facts)
    loop.serve()
    for number in range(UPDATES):
        loop.feed(number % 8)
        loop.serve()
    return [record.loss for record in loop.priorities]


@pytest.mark.parametrize("name", CASES)
def test_losses_are_the_golden_ones(name: str) -> None:
    golden = json.loads(FILE.read_text())[name]
    assert len(golden) == UPDATES
    # Another CPU sums in another order: 1e-3 is far above that and far below what any change of the arithmetic does.
    assert losses(name) == pytest.approx(golden, rel=1e-3, abs=1e-6)


def test_the_golden_losses_would_notice_another_learner() -> None:
    every = json.loads(FILE.read_text())
    assert every.keys() == CASES.keys()
    for golden in every.values():
        assert golden[16] != pytest.approx(golden[8], rel=1e-2), (
            "batch 0 again, eight updates later: it must have learned something"
        )


if __name__ == "__main__":
    FILE.write_text(json.dumps({name: [round(loss, 7) for loss in losses(name)] for name in CASES}, indent=1) + "\n")
