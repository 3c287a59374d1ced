"""The twin without a poll, in memory."""

from __future__ import annotations

import math
from collections.abc import Iterable

from gorila.messages import Episode
from gorila.processor import Outgoing
from gorila.source_loop import SourceLoop
from gorila.testing.driver import MemoryService
from gorila.testing.memory_log import MemoryCluster
from gorila.testing.relay import episode


class Counting:
    """Emits one record a step; `left` steps in all."""

    def __init__(self, left: float = math.inf) -> None:
        self.left, self.steps, self.ticks = left, 0, 0

    def step(self, now_s: float) -> Iterable[Outgoing]:
        self.steps += 1
        self.left -= 1
        return [Outgoing("transitions", episode(self.steps), partition=0)]

    def tick(self, now_s: float) -> Iterable[Outgoing]:
        self.ticks += 1
        return []

    def pause_s(self, now_s: float) -> float:
        return 0.0 if self.left > 0 else math.inf

    def finish(self) -> Iterable[Outgoing]:
        return [Outgoing("transitions", episode(-1), partition=0)]

    def waiting_for(self) -> str:
        return ""


class Door:
    def __init__(self) -> None:
        self.open = False

    def may_write(self, partition: int, next_offset: int) -> bool:
        return self.open

    def waiting_for(self) -> str:
        return "replay: behind"


def started(source: Counting, door: Door | None = None) -> tuple[SourceLoop, MemoryCluster]:
    cluster = MemoryCluster()
    loop = SourceLoop(MemoryService(cluster, role="actor"), source, gates={"transitions": door} if door else None)
    loop.open()
    return loop, cluster


def lanes(loop: SourceLoop, cluster: MemoryCluster) -> list[int]:
    messages = [loop.service.schemas.decode(record.value) for record in cluster.read("test.transitions")]
    return [message.lane for message in messages if isinstance(message, Episode)]


def test_the_source_does_not_step_while_a_record_of_its_own_is_held_and_loses_none_of_them() -> None:
    door, source = Door(), Counting()
    loop, cluster = started(source, door)
    assert loop.turn()
    assert not loop.turn()
    assert not loop.turn()
    assert (source.steps, source.ticks) == (1, 2)
    assert lanes(loop, cluster) == []
    door.open = True
    assert loop.turn()
    assert lanes(loop, cluster) == [1, 2]


def test_a_source_that_wants_no_more_steps_is_ticked_and_not_stepped() -> None:
    source = Counting(left=2)
    loop, _ = started(source)
    for _ in range(5):
        loop.turn()
    assert (source.steps, source.ticks) == (2, 3)


def test_at_a_stop_what_was_begun_and_what_is_held_go_out() -> None:
    loop, cluster = started(Counting(), Door())
    loop.turn()
    loop.turn()
    loop.drain()
    loop.close()
    assert lanes(loop, cluster) == [1, -1]
