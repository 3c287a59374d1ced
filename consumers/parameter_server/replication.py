"""One member of a chain as a state machine on the `replication` log: records of the log, own version and ticks in, records out. Pure.

The rules it keeps are those of rules.py, by number. Longer than most: what a member may say depends on all it has read and said, which is one state.
"""

from __future__ import annotations

from collections.abc import Iterator

from consumers.parameter_server.chain import View
from consumers.parameter_server.membership import Agreement, Suspicion
from consumers.parameter_server.rules import Pace, Rules
from gorila.messages import ReplicationEvent

NOBODY = View(0, ())
NO_TOKEN = -1


class Replica:
    """One member, or one that wants to be. Implements chain.Chain.

    Call `take` for every record of the log in order, `applied` for every update, and then `tick`, whose records are to be sent in order, each exactly once.

    Args:
        name: of the process, as in `parameter-server-0-1`.
        incarnation: greater than any that this name started with before.
        replicas: members at most.
        view: what is known of the membership at the place in the log where reading begins.
    """

    __slots__ = (
        "_announced",
        "_applied",
        "_beat_due_s",
        "_emitted",
        "_hash_due",
        "_ignored",
        "_joiners",
        "_live",
        "_pace",
        "_proposed",
        "_replicas",
        "_rules",
        "_token_due_s",
        "_tokens",
        "_unreturned",
        "agreement",
        "ceiling",
        "incarnation",
        "is_fenced",
        "limit",
        "must_rebuild",
        "name",
        "suspicion",
        "view",
    )

    def __init__(
        self,
        name: str,
        incarnation: int,
        replicas: int,
        *,
        view: View = NOBODY,
        rules: Rules | None = None,
        pace: Pace | None = None,
        suspicion: Suspicion | None = None,
    ) -> None:
        self.name, self.incarnation, self._replicas = name, incarnation, replicas
        self._rules, self._pace = rules or Rules(), pace or Pace()
        self.view = view
        self.suspicion = suspicion or Suspicion(self._pace.suspect_after)
        self.agreement = Agreement()
        self._applied = 0
        self._live = False
        self.ceiling = NO_TOKEN
        """Highest token of a tail in the log: nothing above it was ever shown."""
        self.limit = NO_TOKEN
        """What this member may show as the tail."""
        self.is_fenced = not self._rules.fence_before_showing
        self.must_rebuild = False
        self._tokens: dict[str, int] = dict.fromkeys(view.members, NO_TOKEN)
        self._joiners: dict[str, int] = {}
        self._emitted = NO_TOKEN
        self._announced = NO_TOKEN
        self._proposed = False
        # Own records on their way, and how many of them were sent before the fence.
        self._unreturned = self._ignored = 0
        self._hash_due: list[tuple[int, int]] = []
        self._beat_due_s = self._token_due_s = float("-inf")
        self._watch()

    # ---- what a shard asks (chain.Chain)

    @property
    def id(self) -> str:
        """Name of this membership (rule 8)."""
        return f"{self.name}.{self.incarnation}"

    @property
    def is_member(self) -> bool:
        """Whether the view as far as it was read holds this one."""
        return self.id in self.view.members

    @property
    def is_tail(self) -> bool:
        """Whether this one is the last of its view."""
        return bool(self.view.members) and self.view.members[-1] == self.id

    def applied(self, version: int) -> None:
        """See Chain."""
        self._applied = version

    def hashed(self, version: int, state_hash: int) -> None:
        """The state had this hash at this version (rule 13)."""
        self._hash_due.append((version, state_hash))

    def publishable(self, version: int) -> bool:
        """Rule 2."""
        if not self.is_tail or not self.is_fenced:
            return False
        return version <= (self.limit if self._rules.only_returned_tokens_are_shown else self._applied)

    # ---- the fence on the weights topic

    @property
    def needs_fence(self) -> bool:
        """Whether the edge is to fence earlier tails now, and then to call `fenced`."""
        return self.is_tail and not self.is_fenced

    def fenced(self) -> None:
        """Nobody who was the tail before can write weights any more. Rule 7: records of ours that are on their way do not count."""
        if not self.is_tail:
            return
        self.is_fenced = True
        if self._rules.only_tokens_after_the_fence_count:
            self._ignored = self._unreturned
            self.limit = NO_TOKEN
        self._emitted = NO_TOKEN

    def fence_lost(self) -> None:
        """A write was refused: somebody fenced us. If we are still the tail it was somebody late, and we fence again."""
        self.is_fenced = False
        self.limit = NO_TOKEN

    # ---- in: the log

    def live(self) -> None:
        """The log was read to where it ended at the start: from here on this one may speak."""
        self._live = True

    def take(self, event: ReplicationEvent) -> None:
        """The next record of the log."""
        sender, kind = event.replica_id, event.kind
        own = sender == self.id
        if own:
            self._unreturned -= 1
            if kind == "heartbeat":
                self.suspicion.came_back()
        else:
            self.suspicion.heard(sender)
        counts = own and self._ignored == 0
        if own and self._ignored:
            self._ignored -= 1
        if kind == "view":
            self._take_view(event, own)
            return
        if event.epoch > self.view.epoch:
            # Only at a start within the log: whoever read all of it saw the view's own record first.
            self._adopt(View(event.epoch, tuple(event.members)))
        if kind == "join":
            if sender not in self._tokens and sender not in self._joiners:
                self._joiners[sender] = event.version
                self._watch()
            elif sender in self._joiners:
                self._joiners[sender] = event.version
        elif sender in self._tokens:
            if kind == "hash":
                self.agreement.report(sender, event.version, event.state_hash)
                self._judge()
                return
            self._tokens[sender] = max(self._tokens[sender], event.version)
            if sender == self.view.members[-1]:
                self.ceiling = max(self.ceiling, event.version)
                if counts:
                    self.limit = max(self.limit, event.version)

    def _take_view(self, event: ReplicationEvent, own: bool) -> None:
        if own:
            self._proposed = False
        rules, current = self._rules, self.view
        if event.epoch <= current.epoch and rules.first_of_an_epoch_wins:
            return
        brings = any(member not in current.members for member in event.members)
        if brings and event.version < self.ceiling and rules.newcomers_have_all_that_was_shown:
            return
        self._adopt(View(event.epoch, tuple(event.members)))

    def _adopt(self, view: View) -> None:
        was_tail, was_member = self.is_tail, self.is_member
        if was_member and self.id not in view.members and not self._rules.the_removed_step_down:
            return
        self.view = view
        self._proposed = False
        self._tokens = {member: self._tokens.get(member, NO_TOKEN) for member in view.members}
        for member in view.members:
            self._joiners.pop(member, None)
        if was_member and not self.is_member:
            self._leave()
        if not (self.is_tail and was_tail):
            self.is_fenced, self.limit = not self._rules.fence_before_showing, NO_TOKEN
        self._watch()
        self._judge()

    def _leave(self) -> None:
        """Rule 8: what was said as a member ends with the membership."""
        if self._rules.a_name_for_each_membership:
            self.incarnation += 1
            self._unreturned = self._ignored = 0
            self.suspicion.renew()
        self._emitted = self._announced = NO_TOKEN

    def _watch(self) -> None:
        self.suspicion.watch(m for m in (*self.view.members, *self._joiners) if m != self.id)

    def _judge(self) -> None:
        if (
            self.is_member
            and self._rules.diverged_are_removed
            and self.id in self.agreement.diverged(self.view.members)
        ):
            self.must_rebuild = True

    # ---- out: the log

    def tick(self, now_s: float) -> list[ReplicationEvent]:
        """What is to be sent now. Time decides when things are said, never what."""
        beat = now_s >= self._beat_due_s
        token = now_s >= self._token_due_s or self._token() - self._emitted >= self._pace.token_versions
        events = self.step(beat=beat, token=token)
        for event in events:
            if event.kind == "heartbeat":
                self._beat_due_s = now_s + self._pace.heartbeat_s
            elif event.kind in ("token", "join"):
                self._token_due_s = now_s + self._pace.token_s
        return events

    def next_due_s(self) -> float:
        """When `tick` may have something to say even if nothing comes in."""
        due_s = self._beat_due_s if self.suspicion.may_beat else float("inf")
        return min(due_s, self._token_due_s) if self._token() > self._emitted else due_s

    def step(self, *, beat: bool, token: bool) -> list[ReplicationEvent]:
        """`tick` without time: whether a heartbeat and whether a token may go out."""
        if not self._live or self.must_rebuild:
            return []
        events = [*self._proposal()]
        if self.is_member:
            events += [self._event("hash", *report) for report in self._hash_due]
            mine = self._token()
            if token and mine > self._emitted:
                self._emitted = mine
                events.append(self._event("token", mine))
            spoken = self._emitted
        else:
            changed = self._applied > self._announced and self._applied >= self.ceiling and not self._proposed
            if (beat or (token and changed)) and self._rules.the_removed_rejoin:
                self._announced = self._applied
                events.append(self._event("join", self._applied))
            spoken = self._applied
        self._hash_due.clear()
        if beat and self.suspicion.may_beat:
            self.suspicion.beat()
            events.append(self._event("heartbeat", spoken))
        self._unreturned += len(events)
        return events

    def _token(self) -> int:
        """Rule 1. NO_TOKEN for one that is no member, and for a tail before its fence: such a token would allow nothing."""
        members = self.view.members
        if self.id not in members:
            return NO_TOKEN
        if self.needs_fence:
            return NO_TOKEN
        place = members.index(self.id)
        if place == 0 or not self._rules.tokens_wait_for_predecessor:
            return self._applied
        return min(self._applied, self._tokens[members[place - 1]])

    def _proposal(self) -> Iterator[ReplicationEvent]:
        """The next view, when this one sees cause for one and has not said so yet."""
        members = self.view.members
        if self._proposed:
            return
        proposed: tuple[str, ...] | None = None
        version = NO_TOKEN
        if self.is_member:
            leaving = {m for m in members if m != self.id and self._is_to_leave(m)}
            if leaving:
                proposed = tuple(m for m in members if m not in leaving)
            elif self.is_tail and len(members) < self._replicas:
                newcomer = self._newcomer()
                if newcomer:
                    behind = self._rules.newcomers_stand_behind_the_tail
                    proposed = (*members, newcomer) if behind else (newcomer, *members)
                    version = self._joiners[newcomer]
        elif all(self.suspicion.suspects(m) for m in members) and self._may_take_over():
            proposed, version = (self.id,), self._applied
        if proposed is not None:
            self._proposed = True
            yield ReplicationEvent(0, self.id, "view", self.view.epoch + 1, list(proposed), version, -1, -1)

    def _is_to_leave(self, member: str) -> bool:
        rules = self._rules
        if rules.suspects_are_removed and self.suspicion.suspects(member):
            return True
        return rules.diverged_are_removed and member in self.agreement.diverged(self.view.members)

    def _newcomer(self) -> str | None:
        """Rule 4, from the tail's side: who asked to join and has everything this one has put, or is about to put, into a token."""
        needed = max(self.ceiling, self._emitted) if self._rules.newcomers_have_all_that_was_shown else NO_TOKEN
        for joiner, version in self._joiners.items():
            if version >= needed and not self.suspicion.suspects(joiner):
                return joiner
        return None

    def _may_take_over(self) -> bool:
        """Rule 10."""
        rules = self._rules
        if not rules.the_removed_rejoin or not (rules.outsiders_take_over_from_the_silent or not self.view.members):
            return False
        return self._applied >= self.ceiling or not rules.newcomers_have_all_that_was_shown

    def _event(self, kind: str, version: int, state_hash: int = -1) -> ReplicationEvent:
        view = self.view
        return ReplicationEvent(0, self.id, kind, view.epoch, list(view.members), version, -1, state_hash)
