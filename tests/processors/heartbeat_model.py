"""Who suspects whom, explored exhaustively: the real counting of heartbeats (consumers/parameter_server/membership.py) on one log, under a stalled broker.

Time passes in heartbeat periods, for everybody at once. The one assumption: while the broker does not stall, what a live process sent comes back to it, and it has
read the log, before another period has passed. During the stall, which begins at any moment, nothing is appended and `stall_periods` pass. Then everything
queued is appended, in every order. A record is read by all when it is appended: what a process counts depends on the log's order alone, not on when it reads.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

from consumers.parameter_server.membership import Suspicion


class Beating(NamedTuple):
    """A process: own heartbeats that came back since each of the others was heard, own heartbeats under way, those not yet appended."""

    silent: tuple[int, ...]
    in_flight: int
    queued: int
    alive: bool


class Beats(NamedTuple):
    processes: tuple[Beating, ...]
    stall: int  # -1: not yet; 0: over; n: periods it will still last
    may_die: int
    periods: int


@dataclass
class HeartbeatModel:
    replicas: int = 3
    after: int = 5
    stall_periods: int = 7
    deaths: int = 1
    periods: int = 16
    make: type[Suspicion] = Suspicion
    one_at_a_time: bool = True
    states: int = 0
    transitions: int = 0
    suspected: set[tuple[bool, bool]] = field(default_factory=set)

    def _thaw(self, process: Beating) -> Suspicion:
        suspicion = self.make(self.after, one_at_a_time=self.one_at_a_time)
        suspicion.watch(str(n) for n in range(self.replicas))
        suspicion._silent = {str(n): count for n, count in enumerate(process.silent)}
        suspicion.in_flight = process.in_flight
        return suspicion

    def _frozen(self, process: Beating, suspicion: Suspicion, **changes: int) -> Beating:
        silent = tuple(suspicion._silent[str(n)] for n in range(self.replicas))
        return process._replace(silent=silent, in_flight=suspicion.in_flight, **changes)

    def next_states(self, state: Beats) -> Iterator[Beats]:
        stalled = state.stall > 0
        if state.periods and (stalled or not any(p.queued for p in state.processes)):
            yield self._period(state, stalled)
        if state.stall == -1:
            yield state._replace(stall=self.stall_periods)
        for number, process in enumerate(state.processes):
            if process.queued and not stalled:
                yield self._appended(state, number)
            if process.alive and state.may_die:
                # What it had queued may still be appended: a request was under way.
                processes = list(state.processes)
                processes[number] = process._replace(alive=False, silent=(0,) * self.replicas)
                yield state._replace(processes=tuple(processes), may_die=state.may_die - 1)

    def _period(self, state: Beats, stalled: bool) -> Beats:
        processes = list(state.processes)
        for number, process in enumerate(processes):
            suspicion = self._thaw(process)
            if process.alive and suspicion.may_beat:
                suspicion.beat()
                processes[number] = self._frozen(process, suspicion, queued=process.queued + 1)
        stall = state.stall - 1 if stalled else state.stall
        return state._replace(processes=tuple(processes), periods=state.periods - 1, stall=stall)

    def _appended(self, state: Beats, sender: int) -> Beats:
        processes = list(state.processes)
        processes[sender] = processes[sender]._replace(queued=processes[sender].queued - 1)
        for number, process in enumerate(processes):
            suspicion = self._thaw(process)
            if sender == number:
                suspicion.came_back()
            else:
                suspicion.heard(str(sender))
            if process.alive:
                suspicion._silent[str(number)] = 0
                processes[number] = self._frozen(process, suspicion)
        return state._replace(processes=tuple(processes))

    def explore(self) -> None:
        """Raises AssertionError when a live process suspects a live one. `suspected`: the (is alive, is suspected) that were seen."""
        first = Beats((Beating((0,) * self.replicas, 0, 0, True),) * self.replicas, -1, self.deaths, self.periods)
        seen, todo = {first}, [first]
        while todo:
            state = todo.pop()
            self._check(state)
            for after in self.next_states(state):
                self.transitions += 1
                if after not in seen:
                    seen.add(after)
                    todo.append(after)
        self.states = len(seen)

    def _check(self, state: Beats) -> None:
        for number, process in enumerate(state.processes):
            suspicion = self._thaw(process)
            for other, judged in enumerate(state.processes):
                if other != number and process.alive:
                    suspects = suspicion.suspects(str(other))
                    assert not (suspects and judged.alive), f"a live process is suspected: {state}"
                    self.suspected.add((judged.alive, suspects))
