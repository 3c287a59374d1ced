"""The smallest complete role, to try a runtime, a gate or a broker with: it answers each record with one that says which record it was, and
checkpoints how many it took. An example of what gorila.processor asks for, too."""

from __future__ import annotations

from collections.abc import Iterable

from gorila.errors import BadRecord
from gorila.messages import CheckpointLedger, Episode
from gorila.processor import Incoming, OffsetTracker, Outgoing


def episode(number: int = 0) -> Episode:
    """A record that says `number`."""
    return Episode("actor", f"actor-{number}", number, 1.0, 10, True, 0.1, 3, number, 0)


class Relay:
    """Reads `Episode` records of any topic, answers on `priorities`. Lane 666 is a bad record.

    Args:
        hold_back: nothing counts as finished before `tracker.release`.
        tagged: answers carry the offset they are for as their tag.
        checkpoints: each snapshot writes one ledger record whose version is the number of records taken.
    """

    def __init__(self, *, hold_back: bool = False, tagged: bool = False, checkpoints: bool = False) -> None:
        self.tracker = OffsetTracker()
        self.taken: list[Incoming] = []
        self.told: list[int] = []
        self.ticks: list[float] = []
        self.moves: list[tuple[str, object]] = []
        self.unwanted: set[str] = set()
        self.waits_for = ""
        self._hold_back, self._tagged, self._checkpoints = hold_back, tagged, checkpoints

    def process(self, record: Incoming) -> Iterable[Outgoing]:
        assert isinstance(record.message, Episode)
        if record.message.lane == 666:
            raise BadRecord("lane 666")
        self.taken.append(record)
        if self._hold_back:
            self.tracker.take(record)
        else:
            self.tracker.done(record)
        answer = Episode("relay", str(record.partition), record.message.lane, 0.0, 1, True, 0.0, 0, record.offset, 0)
        tag = record.offset if self._tagged else None
        return [Outgoing("priorities", answer, partition=0, tag=tag)]

    def tick(self, now_s: float) -> Iterable[Outgoing]:
        self.ticks.append(now_s)
        return []

    def delivered(self, record: Outgoing, partition: int, offset: int) -> None:
        assert isinstance(record.tag, int)
        self.told.append(record.tag)

    def wants(self, topic: str) -> bool:
        return topic not in self.unwanted

    def waiting_for(self) -> str:
        return self.waits_for

    def positions(self) -> dict[tuple[str, int], int]:
        return self.tracker.positions()

    def snapshot(self) -> Iterable[Outgoing]:
        if not self._checkpoints:
            return []
        return [Outgoing("checkpoints", CheckpointLedger(0, len(self.taken), 0, 0, 0), partition=0)]

    def check_valid(self) -> None:
        return None

    def assigned(self, starts: dict[tuple[str, int], int]) -> None:
        self.moves.append(("assigned", starts))

    def revoked(self, partitions: list[tuple[str, int]]) -> None:
        self.moves.append(("revoked", partitions))
        self.tracker.forget(partitions)


def answered(messages: Iterable[object]) -> list[int]:
    """Offsets the answers are for."""
    return [message.lane_steps_total for message in messages if isinstance(message, Episode)]
