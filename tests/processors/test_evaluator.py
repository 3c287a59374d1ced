"""The evaluator's rules: one version held fixed, screened and then confirmed on episodes nobody has seen."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from consumers.evaluator import EvaluatorCore
from consumers.evaluator_service import PolicyKeeper
from gorila.config import Config
from gorila.environment_facts import EnvironmentFacts
from gorila.environments import describe, make_lanes
from gorila.errors import LocalError
from gorila.lanes import Lanes
from gorila.messages import Episode, Evaluation
from gorila.network import initial_weights
from gorila.policy import Policy
from gorila.processor import Outgoing
from gorila.settings import load_config

SETS = ["evaluator.lanes=4", "evaluator.episodes=6", "evaluator.confirm_episodes=9", "evaluator.max_episode_steps=200"]


class Bench:
    """A core on real environments, whose seeds are noted."""

    def __init__(self, preset: str = "cartpole", *sets: str, epoch: int = 0) -> None:
        self.config: Config = load_config(preset, [*SETS, *sets], {})
        self.facts: EnvironmentFacts = describe(self.config)
        self.flat = initial_weights(self.config, self.facts)
        self.seeds: list[int] = []
        self.core = EvaluatorCore(self.config, self.facts, "evaluator-0", self._make, epoch)

    def _make(self, seeds: list[int]) -> Lanes:
        self.seeds += seeds
        return make_lanes(self.config, seeds, self.config.evaluator.max_episode_steps)

    def evaluate(self, version: int = 7) -> list[Any]:
        return [record.message for records in self.core.evaluate(version, self.flat, lambda: 5) for record in records]


def of(kind: type, messages: list[Any]) -> list[Any]:
    return [message for message in messages if isinstance(message, kind)]


def test_below_the_threshold_there_is_a_screening_and_nothing_else() -> None:
    bench = Bench()
    messages = bench.evaluate()
    episodes, [screening] = of(Episode, messages), of(Evaluation, messages)
    assert len(episodes) == screening.episodes == 6
    assert screening.return_mean == np.mean([e.episode_return for e in episodes])
    assert (screening.phase, screening.weights_version, screening.solved) == ("screen", 7, False)
    assert {(e.role, e.weights_version, e.epsilon) for e in episodes} == {("evaluator", 7, 0.0)}
    assert bench.core.verdict is not None and not bench.core.verdict.solved


def test_at_the_threshold_the_same_version_is_confirmed_on_fresh_episodes() -> None:
    bench = Bench("cartpole", "evaluator.threshold=1")
    messages = bench.evaluate()
    screening, confirmation = of(Evaluation, messages)
    assert [m.phase for m in (screening, confirmation)] == ["screen", "confirm"]
    assert (confirmation.episodes, confirmation.weights_version, confirmation.solved) == (9, 7, True)
    assert confirmation.return_mean == np.mean([e.episode_return for e in of(Episode, messages)[6:]])
    assert not screening.solved, "a screening alone solves nothing"
    assert bench.core.verdict is not None and bench.core.verdict.solved


def test_a_confirmation_that_fails_leaves_the_run_unsolved_and_the_next_version_is_evaluated() -> None:
    bench = Bench("cartpole", "evaluator.threshold=8")
    limits = iter(
        [8, 8, 5, 5, 5, *[8] * 5]
    )  # CartPole pays a point a step and always lasts eight: rounds of version 1, then of 2
    bench.core._make_lanes = lambda seeds: make_lanes(bench.config, seeds, next(limits))
    lucky = of(Evaluation, bench.evaluate(1))
    assert [(e.phase, e.return_mean, e.solved) for e in lucky] == [("screen", 8.0, False), ("confirm", 5.0, False)]
    assert bench.core.verdict is not None and not bench.core.verdict.solved
    good = of(Evaluation, bench.evaluate(2))
    assert [(e.phase, e.return_mean, e.solved) for e in good] == [("screen", 8.0, False), ("confirm", 8.0, True)]


def test_no_episode_is_ever_played_twice_nor_after_a_restart() -> None:
    bench = Bench("cartpole", "evaluator.threshold=1")
    for version in range(3):
        bench.evaluate(version)
    restarted = Bench("cartpole", "evaluator.threshold=1", epoch=1_700_000_000_000)
    restarted.evaluate()
    seeds = bench.seeds + restarted.seeds
    assert len(bench.seeds) == 3 * 15 and len(set(seeds)) == len(seeds)


def test_the_same_seed_gives_the_same_evaluation() -> None:
    assert Bench().evaluate() == Bench().evaluate()


def test_a_stop_is_never_further_away_than_one_step() -> None:
    bench = Bench()
    going = bench.core.evaluate(7, bench.flat, lambda: 5)
    assert next(going) == []
    going.close()
    assert bench.core.verdict is None
    assert len(of(Evaluation, bench.evaluate(8))) == 1


def test_a_policy_on_atari_is_explored_with_the_evaluators_epsilon_and_raw_rewards() -> None:
    pytest.importorskip("ale_py")
    bench = Bench(
        "pong",
        *("evaluator.lanes=2", "evaluator.episodes=2", "evaluator.max_episode_steps=40", "network.factory=small-conv"),
    )
    messages = bench.evaluate()
    [screening] = of(Evaluation, messages)
    assert screening.epsilon == 0.05
    assert [e.steps for e in of(Episode, messages)] == [40, 40]
    assert all(-21 <= e.episode_return <= 0 for e in of(Episode, messages))


def evaluation(phase: str, mean: float, version: int, solved: bool = False) -> list[Outgoing]:
    return [Outgoing("episodes", Evaluation("e", version, phase, 6, mean, 0, mean, mean, 0.0, solved, 0))]


def keeper_of(bench: Bench, folder: Path, run: str = "r") -> PolicyKeeper:
    return PolicyKeeper(SimpleNamespace(run=run, run_dir=folder, config=bench.config, facts=bench.facts))  # type: ignore[arg-type]


SCREENINGS = (
    evaluation("screen", 100, 1),
    evaluation("screen", 90, 2),
    evaluation("screen", 480, 3),
    evaluation("confirm", 470, 3),
    evaluation("screen", 476, 4),
    evaluation("confirm", 478, 4, solved=True),
    evaluation("screen", 500, 5),
)


@pytest.mark.parametrize("restarted", [False, True], ids=["one-life", "restarted-each-time"])
def test_the_file_is_the_best_screened_policy_until_one_is_confirmed_for_good(tmp_path: Path, restarted: bool) -> None:
    bench = Bench()
    keeper = keeper_of(bench, tmp_path)
    kept = []
    for records in SCREENINGS:
        if restarted:
            keeper = keeper_of(bench, tmp_path)
        keeper.look(records, bench.flat)
        kept.append(Policy.load(tmp_path / "weights.safetensors").version)
    assert kept == [1, 1, 3, 3, 3, 4, 4]


def test_a_disk_that_refuses_costs_a_screened_version_but_nothing_is_called_solved_without_its_weights(
    tmp_path: Path,
) -> None:
    bench, folder = Bench(), tmp_path / "not-there-yet"
    warned: list[str] = []
    service = SimpleNamespace(run="r", run_dir=folder, config=bench.config, facts=bench.facts)
    service.log = SimpleNamespace(warning=lambda event, **_: warned.append(event))
    keeper = PolicyKeeper(service)  # type: ignore[arg-type]
    keeper.look(evaluation("screen", 100, 1), bench.flat)
    assert warned == ["policy.not_kept"] and not folder.exists()
    with pytest.raises(LocalError, match="weights"):
        keeper.look(evaluation("confirm", 480, 1, solved=True), bench.flat)
    folder.mkdir()
    keeper.look(evaluation("screen", 90, 2), bench.flat)  # worse than what could not be kept, better than nothing
    assert Policy.load(folder / "weights.safetensors").version == 2
    keeper.look(evaluation("confirm", 480, 3, solved=True), bench.flat)
    assert Policy.load(folder / "weights.safetensors").version == 3 and keeper.solved


def test_a_file_of_another_run_or_of_nobody_is_no_memory(tmp_path: Path) -> None:
    bench = Bench()
    keeper_of(bench, tmp_path).look(evaluation("screen", 100, 1), bench.flat)
    keeper_of(bench, tmp_path, "another").look(evaluation("screen", 50, 2), bench.flat)
    assert Policy.load(tmp_path / "weights.safetensors").version == 2
    (tmp_path / "weights.safetensors").write_text("scribble")
    keeper_of(bench, tmp_path).look(evaluation("screen", 10, 3), bench.flat)
    assert Policy.load(tmp_path / "weights.safetensors").version == 3
