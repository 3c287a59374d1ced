"""A model of processes around the real protocol core (consumers/parameter_server/replication.py), explored exhaustively.

What is real: every decision, by `Replica` itself. What is modelled: the replication log (a total order; a record is appended when it is sent), the gradients
log (all updates are there from the beginning, each process applies the next one whenever it likes, from none after a restart), the weights topic (who
fenced last, what was shown last), and failures.

A global state is: per process (its core's state, the version it has prepared to show, whether a fence of its own is under way, its place in the log), what
of the log somebody has yet to read, the weights topic, and which failures may still happen. `Model.explore` visits every reachable one once.

Reductions, and why nothing is lost:
1. Sending is atomic with appending. A member whose record is long under way is a member that reads slowly: what it does depends on what it read, and the
   log keeps its records' order. What a crash loses is what was not yet sent: the crash before the step.
2. What a process does until somebody can notice is one step: it reads, applies and suspects in every order, until it sends, shows or fences. Others
   cannot tell when the rest happened; between such steps a process counts as having applied only what it had at its last one, which is the worst case
   for what others show.
3. A read that changes nothing is done at once, and so is one that is only noted: a token of somebody else than the predecessor (for an outsider: than the
   tail), a request to join that does not come to a tail which may heed it, the tail's own token. It shows nobody anything, forbids nothing, and commutes
   with whatever else can happen.
4. Neighbouring tokens of different senders between which nobody stands are kept in one order: no reader heeds more than one of them.
5. What can no longer matter is forgotten: log that all have read, suspicion of names that are nobody's, what a starting process would know when none can
   start any more.
6. Time is gone. A token goes out at every `pace` updates, never late: a slow sender is a slow process; and as nobody can tell versions between two tokens
   apart, `pace` updates are applied in one step. Suspicion of a dead process comes at any moment to anybody; of a live one `false_suspicions` times. The
   counting of heartbeats which does that in production is explored by itself, under a stall of the broker (heartbeat_model.py).

Bounds, which do leave something out: the numbers of a scenario, and `lag` where it is given.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from consumers.parameter_server.chain import View
from consumers.parameter_server.membership import Suspicion
from consumers.parameter_server.replication import Replica
from consumers.parameter_server.rules import Rules
from gorila.messages import ReplicationEvent

Frozen = tuple[Any, ...]
Event = tuple[str, str, int, tuple[str, ...], int]
"""sender, kind, epoch, members, version"""


class Violation(AssertionError):
    """The protocol does not keep its promise."""


class Oracle(Suspicion):
    """Suspects whom it is told to."""

    __slots__ = ("told",)

    def __init__(self, told: frozenset[str] = frozenset()) -> None:
        super().__init__(1)
        self.told = told

    def suspects(self, member: str) -> bool:
        return member in self.told


class Process(NamedTuple):
    """A live process at its last step that others could notice.

    Attributes:
        staged: version prepared to be shown; -1: none; -2 - v: v was shown and nothing newer is there.
        at: records read of those somebody has yet to read.
    """

    core: int
    staged: int
    fencing: bool
    at: int


class Dead(NamedTuple):
    slot: int
    incarnation: int


class State(NamedTuple):
    processes: tuple[Process | Dead, ...]
    log: tuple[int, ...]
    observer: int
    shown: int
    owner: int
    crashes: int
    restarts: int
    false_suspicions: int


class Outcome(NamedTuple):
    """What a process's step ends with. `act`: sends, fences, shows, is refused."""

    act: str
    process: Process
    events: tuple[int, ...]
    version: int
    wrong: int


NAME, INCARNATION, EPOCH, MEMBERS, APPLIED, _, _, FENCED, TOKENS, JOINERS, _, _, PROPOSED, _, TOLD = range(15)


@dataclass
class Report:
    states: int = 0
    transitions: int = 0
    ends: int = 0
    depth: int = 0


@dataclass
class Model:
    """`replicas` processes, `updates` in the gradients log.

    Attributes:
        pace: updates between two tokens of a process.
        formed: the first view exists, of the first `members` processes (0: all); the others want to join. False: all start on an empty log.
        restored: version of the checkpoint from which those others started; a restart after a crash begins at 0.
        lag: nobody is further behind the log's end than this while others go on; 0: no bound.
    """

    replicas: int = 3
    updates: int = 4
    pace: int = 1
    crashes: int = 2
    restarts: int = 2
    false_suspicions: int = 1
    rules: Rules = field(default_factory=Rules)
    formed: bool = True
    members: int = 0
    restored: int = 0
    lag: int = 0
    most_states: int = 0

    def __post_init__(self) -> None:
        self.report = Report()
        self._started = False
        self._cores: list[Frozen] = []
        self._ids: list[str] = []
        self._tails: list[bool] = []
        self._core_numbers: dict[Frozen, int] = {}
        self._events: list[ReplicationEvent] = []
        self._event_numbers: dict[Event, int] = {}
        self._steps: dict[tuple[int, str, Any], tuple[int, tuple[int, ...]]] = {}
        self._outcomes: dict[Any, tuple[Outcome, ...]] = {}

    # ---- the real core, one step of it

    def _thaw(self, number: int) -> Replica:
        (name, incarnation, epoch, members, applied, ceiling, limit, fenced, tokens, joiners, emitted, announced, proposed, ignored, told) = self._cores[number]  # fmt: skip
        core = Replica(
            name, incarnation, self.replicas, view=View(epoch, members), rules=self.rules, suspicion=Oracle(told)
        )
        core.live()
        core.applied(applied)
        core.ceiling, core.limit, core.is_fenced = ceiling, limit, fenced
        core._tokens, core._joiners = dict(tokens), dict(joiners)
        core._emitted, core._announced, core._proposed, core._ignored = emitted, announced, proposed, ignored
        return core

    def _freeze(self, core: Replica) -> int:
        members, mine, suspicion = core.view.members, core.id, core.suspicion
        assert isinstance(suspicion, Oracle)
        frozen = (
            core.name, core.incarnation, core.view.epoch, members, core._applied, core.ceiling, core.limit, core.is_fenced,
            tuple((m, -1 if m == mine else token) for m, token in core._tokens.items()),
            tuple(core._joiners.items()), core._emitted, -1 if core.is_member else core._announced, core._proposed,
            core._ignored if core.is_tail else 0,
            suspicion.told & {*members, *core._joiners},
        )  # fmt: skip
        return self._number_of(frozen)

    def _number_of(self, frozen: Frozen) -> int:
        number = self._core_numbers.get(frozen)
        if number is None:
            number = self._core_numbers[frozen] = len(self._cores)
            self._cores.append(frozen)
            self._ids.append(f"{frozen[NAME]}.{frozen[INCARNATION]}")
            self._tails.append(frozen[MEMBERS][-1:] == (self._ids[-1],))
        return number

    def _event_number(self, event: ReplicationEvent) -> int:
        key = (event.replica_id, event.kind, event.epoch, tuple(event.members), event.version)
        number = self._event_numbers.get(key)
        if number is None:
            number = self._event_numbers[key] = len(self._events)
            self._events.append(event)
        return number

    def _step(self, number: int, act: str, argument: Any = None) -> tuple[int, tuple[int, ...]]:
        known = self._steps.get((number, act, argument))
        if known is None:
            core = self._thaw(number)
            if act == "take":
                core.take(self._events[argument])
            elif act == "apply":
                core.applied(self._cores[number][APPLIED] + self.pace)
            elif act == "suspect":
                assert isinstance(core.suspicion, Oracle)
                core.suspicion.told |= {argument}
            elif act == "fence":
                core._unreturned = argument
                core.fenced()
            elif act == "refused":
                core.fence_lost()
            events: list[int] = []
            if core.name != "observer":
                due = core._applied % self.pace == 0 or core._token() % self.pace == 0
                while sent := core.step(beat=False, token=due):
                    events += [self._event_number(event) for event in sent]
            known = self._steps[number, act, argument] = self._freeze(core), tuple(events)
        return known

    # ---- a process, until somebody notices

    def _at(self, process: Process, core: int, read: int = 0) -> Process:
        """The process with this core. A tail prepares what it has applied at the first moment it can: the lowest version it may ever show."""
        frozen = self._cores[core]
        if not self._tails[core]:
            return Process(core, -1, process.fencing, process.at + read)
        if not frozen[FENCED]:
            return Process(core, -1, True, process.at + read)
        staged = process.staged
        if staged < 0 and frozen[APPLIED] > -2 - staged:
            staged = frozen[APPLIED]
        return Process(core, staged, process.fencing, process.at + read)

    def _until_noticed(
        self, start: Process, log: tuple[int, ...], alive: tuple[str, ...], wrong: int
    ) -> tuple[Outcome, ...]:
        key = (start.core, start.staged, start.fencing, log[start.at :], alive, wrong)
        known = self._outcomes.get(key)
        if known is not None:
            return known
        unread = log[start.at :]
        first = (start._replace(at=0), 0)
        found: dict[Outcome, None] = {}
        seen, todo = {first}, [first]
        while todo:
            process, used = todo.pop()
            core, frozen = process.core, self._cores[process.core]
            for act, argument, read, mistake in self._choices(process, unread, alive, wrong - used):
                after, events = self._step(core, act, argument)
                then = self._at(process._replace(fencing=process.fencing and act != "fence"), after, read)
                if events or act == "fence":
                    found[Outcome("fences" if act == "fence" else "sends", then, events, -1, used + mistake)] = None
                elif (then, used + mistake) not in seen:
                    seen.add((then, used + mistake))
                    todo.append((then, used + mistake))
            if process.staged >= 0 and self._thaw(core).publishable(process.staged):
                later = frozen[APPLIED] if frozen[APPLIED] > process.staged else -2 - process.staged
                found[Outcome("shows", process._replace(staged=later), (), process.staged, used)] = None
                after, events = self._step(core, "refused")
                found[Outcome("is refused", self._at(process, after), events, -1, used)] = None
        known = self._outcomes[key] = tuple(found)
        return known

    def _choices(
        self, process: Process, unread: tuple[int, ...], alive: tuple[str, ...], wrong: int
    ) -> Iterator[tuple[str, Any, int, int]]:
        frozen, mine = self._cores[process.core], self._ids[process.core]
        if process.fencing:
            on_the_way = sum(self._events[event].replica_id == mine for event in unread[process.at :])
            yield "fence", on_the_way, 0, 0
        if process.at < len(unread):
            yield "take", unread[process.at], 1, 0
        if frozen[APPLIED] < self.updates:
            yield "apply", None, 0, 0
        told = frozen[TOLD]
        for name in (*frozen[MEMBERS], *(name for name, _ in frozen[JOINERS])):
            if name in told or name == mine:
                continue
            if name not in alive:
                yield "suspect", name, 0, 0
            elif wrong and name in frozen[MEMBERS]:
                yield "suspect", name, 0, 1

    # ---- the whole

    def start(self) -> State:
        names = "abc"[: self.members or self.replicas]
        view = View(int(self.formed), tuple(f"{name}.0" for name in names) if self.formed else ())
        observer = self._freeze(Replica("observer", 0, self.replicas, view=view, rules=self.rules, suspicion=Oracle()))
        dead = tuple(Dead(slot, 0) for slot in range(self.replicas))
        # Without the rule nobody is ever fenced: everybody may write.
        owner = -1 if self.rules.fence_before_showing else -2
        state = State(dead, (), observer, -1, owner, self.crashes, self.restarts, self.false_suspicions)
        for slot in range(len(names) if self.formed else self.replicas):
            state = self._begin(state, slot, 0)
        if not self.formed:
            return state
        # Everybody has said, heard and shown version 0.
        while busy := [
            slot
            for slot, p in enumerate(state.processes)
            if isinstance(p, Process) and (p.at < len(state.log) or p.fencing)
        ]:
            slot = busy[0]
            process = state.processes[slot]
            assert isinstance(process, Process)
            if process.fencing:
                core, events = self._step(process.core, "fence", 0)
                state = state._replace(owner=slot)
                process = process._replace(fencing=False)
            else:
                core, events = self._step(process.core, "take", state.log[process.at])
                process = process._replace(at=process.at + 1)
            state = self._settle(state, slot, self._at(process, core), events)
        processes = list(state.processes)
        tail = processes[len(names) - 1]
        assert isinstance(tail, Process)
        assert tail.staged == 0
        processes[len(names) - 1] = tail._replace(staged=-2)
        state = state._replace(processes=tuple(processes), shown=0)
        for slot in range(len(names), self.replicas):
            state = self._begin(state, slot, 0, self.restored)
        return state

    def _begin(self, state: State, slot: int, incarnation: int, restored: int = 0) -> State:
        """A process starts from a checkpoint: it reads the log to its end, and then speaks."""
        known = self._cores[state.observer]
        core = self._number_of(("abc"[slot], incarnation, *known[2:APPLIED], restored, *known[APPLIED + 1 :]))
        core, events = self._step(core, "begin")
        return self._settle(state, slot, self._at(Process(core, -1, False, len(state.log)), core), events)

    def _settle(self, state: State, slot: int, process: Process | Dead, events: tuple[int, ...]) -> State:
        """`slot` is now like this and sent these: append, let everybody do the reads of reduction 3, forget what all have read."""
        log, observer = state.log, state.observer
        processes = list(state.processes)
        processes[slot] = process
        for event in events:
            observer = self._step(observer, "take", event)[0]
            log += (event,)
        read = len(log)
        for number, other in enumerate(processes):
            if isinstance(other, Process):
                core, at = other.core, other.at
                while at < len(log):
                    after, sent = self._step(core, "take", log[at])
                    if sent or not (after == core or self._only_notes(core, after, log[at])):
                        break
                    core, at = after, at + 1
                if at != other.at:
                    processes[number] = Process(core, other.staged, other.fencing, at)
                read = min(read, at)
        if read:
            log = log[read:]
            processes = [p._replace(at=p.at - read) if isinstance(p, Process) else p for p in processes]
        if self._cores[observer][MEMBERS] != self._cores[state.observer][MEMBERS]:
            self._check_members(processes, observer, state.shown)
        if self._started and (not state.restarts or not (state.crashes or any(isinstance(p, Dead) for p in processes))):
            observer = self._members_only(observer)
        if len(log) > 1:
            log = self._sorted(log, {p.at for p in processes if isinstance(p, Process)})
        return state._replace(processes=tuple(processes), log=log, observer=observer)

    def _members_only(self, observer: int) -> int:
        """Nobody will start any more: of what a process that starts would know, only what decides on views counts."""
        known = self._steps.get((observer, "members", None))
        if known is None:
            core = self._thaw(observer)
            core._tokens, core._joiners = dict.fromkeys(core.view.members, -1), {}
            known = self._steps[observer, "members", None] = self._freeze(core), ()
        return known[0]

    def _sorted(self, log: tuple[int, ...], places: set[int]) -> tuple[int, ...]:
        """Reduction 4: neighbouring tokens by sender, wherever nobody stands between them."""
        made: list[int] = []
        run: list[int] = []
        for place, number in enumerate(log):
            token = self._events[number].kind == "token"
            if run and (not token or place in places):
                made += sorted(run, key=self._sender)
                run = []
            if token:
                run.append(number)
            else:
                made.append(number)
        return tuple(made + sorted(run, key=self._sender))

    def _sender(self, number: int) -> str:
        return self._events[number].replica_id

    def _only_notes(self, before: int, after: int, number: int) -> bool:
        members, mine, event = self._cores[before][MEMBERS], self._ids[before], self._events[number]
        if event.kind == "view" or self._cores[after][MEMBERS] != members:
            return False
        if self._tails[before]:
            return event.kind == ("token" if event.replica_id == mine else "join") and (
                event.replica_id == mine or self._cores[before][PROPOSED]
            )
        if event.kind == "join":
            return True
        heeded = members[members.index(mine) - 1] if mine in members else members[-1] if members else ""
        return event.replica_id != heeded

    def next_states(self, state: State) -> Iterator[tuple[str, State]]:
        """Everything but crashes and restarts."""
        alive = tuple(self._ids[p.core] for p in state.processes if isinstance(p, Process))
        full = False
        for slot, process in enumerate(state.processes):
            if isinstance(process, Dead):
                continue
            for outcome in self._until_noticed(process, state.log, alive, state.false_suspicions):
                mine = state.owner in (slot, -2)
                if outcome.act == ("is refused" if mine else "shows"):
                    continue
                changes: dict[str, Any] = {}
                if outcome.wrong:
                    changes["false_suspicions"] = state.false_suspicions - outcome.wrong
                if outcome.act == "fences":
                    changes["owner"] = slot
                elif outcome.act == "shows":
                    self._check_shown(state, slot, outcome)
                    changes["shown"] = outcome.version
                then = outcome.process._replace(at=outcome.process.at + process.at)
                after = self._settle(state, slot, then, outcome.events)
                if self._is_full(state, process, outcome, after):
                    full = True
                    continue
                yield f"{slot} {outcome.act}", after._replace(**changes) if changes else after

        if full:
            for slot, process in enumerate(state.processes):
                if isinstance(process, Process) and process.at == 0 and state.log:
                    core, events = self._step(process.core, "take", state.log[0])
                    if not events:
                        yield f"{slot} reads", self._settle(state, slot, self._at(process, core, 1), events)

    def _is_full(self, state: State, process: Process, outcome: Outcome, after: State) -> bool:
        """Whether this would leave somebody more than `lag` records behind who can read first."""
        behind = process.at > 0 or outcome.process.at == 0
        return bool(self.lag and outcome.events and state.log and behind and len(after.log) > self.lag)

    def _check_shown(self, state: State, slot: int, outcome: Outcome) -> None:
        version = outcome.version
        processes = [*state.processes]
        processes[slot] = outcome.process
        self._check_members(processes, state.observer, version)
        if version < state.shown:
            raise Violation(f"{version} is shown after {state.shown}")

    def _check_members(self, processes: list[Process | Dead], observer: int, shown: int) -> None:
        """Every live member of the view as it is in the log has applied all that was shown."""
        members = self._cores[observer][MEMBERS]
        for process in processes:
            if isinstance(process, Process) and self._ids[process.core] in members:
                applied = self._cores[process.core][APPLIED]
                if applied < shown:
                    raise Violation(f"{shown} is shown and member {self._ids[process.core]} has applied {applied}")

    def failures(self, state: State) -> Iterator[tuple[str, State]]:
        """Crashes and restarts."""
        for slot, process in enumerate(state.processes):
            if isinstance(process, Process):
                if state.crashes:
                    dead = Dead(slot, self._cores[process.core][INCARNATION])
                    left = self._settle(state, slot, dead, ())
                    owner = -1 if state.owner == slot else state.owner
                    yield f"{slot} dies", left._replace(owner=owner, crashes=state.crashes - 1)
            elif state.restarts:
                incarnation = process.incarnation + self.rules.a_name_for_each_membership
                yield f"{slot} restarts", self._begin(state._replace(restarts=state.restarts - 1), slot, incarnation)

    def explore(self, *, deep: bool = False) -> Report:
        """Every reachable state, in order of distance, or the newest found first: which finds a deep violation sooner. Raises Violation."""
        first = self.start()
        self._started = True
        seen = {first}
        todo, report = deque([(first, 0)]), self.report
        while todo and not (self.most_states and len(seen) > self.most_states):
            state, depth = todo.pop() if deep else todo.popleft()
            report.depth = max(report.depth, depth)
            went_on = False
            for number, moves in enumerate((self.next_states(state), self.failures(state))):
                for _, after in moves:
                    went_on |= number == 0 and after != state
                    report.transitions += 1
                    if after not in seen:
                        seen.add(after)
                        todo.append((after, depth + 1))
            if not went_on:
                report.ends += 1
                self._check_end(state)
        report.states = len(seen)
        return report

    def _check_end(self, state: State) -> None:
        """Nothing but failures can happen any more: then all updates are shown, unless nobody is left."""
        if any(isinstance(p, Process) for p in state.processes) and state.shown != self.updates:
            raise Violation(f"it ends with {state.shown} shown: {state}")
