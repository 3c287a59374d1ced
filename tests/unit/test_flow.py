"""A writer waits while its reader's committed lag is above the bound, and is never held up by asking."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Any

from gorila.flow import LagGate


class Offsets:
    """Answers when told to, as a broker that may be slow."""

    def __init__(self) -> None:
        self.asked: list[Future[Any]] = []

    def later(self, partitions: list[tuple[str, int]]) -> Future[Any]:
        self.partitions = partitions
        self.asked.append(Future())
        return self.asked[-1]

    def answer(self, **offsets: int) -> None:
        self.asked[-1].set_result(
            {("r.t", int(name[1:])): None if offset < 0 else offset for name, offset in offsets.items()}
        )


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def gate(bound: int = 10, partitions: int = 2) -> tuple[LagGate, Offsets, Clock]:
    offsets, clock = Offsets(), Clock()
    made = LagGate(None, "r.replay", "r.t", range(partitions), bound, clock=clock, source=offsets)  # type: ignore[arg-type]
    return made, offsets, clock


def test_nobody_waits_below_the_bound_and_everybody_above_it_until_the_reader_commits():
    made, offsets, clock = gate()
    offsets.answer(p0=0, p1=0)
    assert made.may_write(0, 10)
    assert made.waiting_for() == ""
    assert not made.may_write(0, 11)
    assert made.waiting_for() == "replay: 11 records behind on partition 0, bound 10"
    assert made.may_write(1, 3)
    clock.now += 1
    assert not made.may_write(0, 11)
    offsets.answer(p0=1, p1=0)
    assert made.may_write(0, 11)
    assert made.waiting_for() == ""


def test_before_the_first_answer_only_a_young_log_may_be_written():
    made, offsets, _ = gate()
    assert made.may_write(0, 0)
    assert made.may_write(0, -1)
    assert not made.may_write(0, 1000)
    assert "not known yet" in made.waiting_for()
    offsets.answer(p0=995, p1=0)
    assert made.may_write(0, 1000)


def test_a_group_that_never_committed_has_everything_before_it():
    made, offsets, _ = gate()
    offsets.answer(p0=-1001, p1=-1001)
    assert made.may_write(0, 10)
    assert not made.may_write(0, 11)


def test_offsets_are_asked_for_one_at_a_time_and_only_while_they_could_matter():
    made, offsets, clock = gate(bound=100)
    offsets.answer(p0=0, p1=0)
    for step in range(40):
        clock.now = step * 0.01
        made.may_write(0, 10)
    asked_while_idle = len(offsets.asked)
    assert asked_while_idle <= 2
    for step in range(40):
        clock.now = 0.5 + step * 0.01
        made.may_write(0, 90)
    assert len(offsets.asked) <= asked_while_idle + 1, "a question is open: no second one is asked"


def test_a_broker_that_does_not_answer_holds_nobody_up_below_the_bound_and_is_asked_again():
    made, offsets, clock = gate()
    offsets.answer(p0=5, p1=5)
    assert made.may_write(0, 6)
    clock.now = 2
    assert made.may_write(0, 6)
    offsets.asked[-1].set_exception(RuntimeError("coordinator moved"))
    clock.now = 3
    assert made.may_write(0, 6)
    assert not offsets.asked[-1].done()
    clock.now = 60
    before = len(offsets.asked)
    assert not made.may_write(0, 100)
    assert len(offsets.asked) > before, "a question lost for ever is given up"
