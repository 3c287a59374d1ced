"""The rules of chain replication (van Renesse & Schneider 2004; design section 6) on the `replication` log, and its pace.

All members read the same ordered partition, their own records included. Each rule is a flag of `Rules`, and
tests/processors/test_replication_exhaustive.py shows that none can be left out:
 1. token_i = min(applied_i, token_{i-1}), the head's is what it applied: a token says that its sender *and all before it* have applied that much.
 2. The tail shows a version only when a token of its own for it has come back through the log while it was still the tail.
 3. A view is (epoch, members, head to tail). The first record of a greater epoch is the view from there on; later ones of that epoch are void.
 4. A record that brings a newcomer carries what the newcomer had applied, and is void when the log before it holds a token of the tail above that.
 5. Newcomers stand behind the tail; the others keep their order: so tokens stay true from view to view.
 6. A new tail fences its predecessors on the weights topic before it shows anything.
 7. Only tokens sent *after* the fence count for rule 2: whoever fences late finds out from the log before it shows anything.
 8. A membership has a name of its own: a process that starts, or was removed, goes by a new one. Nobody inherits a promise.
 9. A member five of whose fellows' heartbeats came back without it (membership.py) is removed.
10. When all members are silent, an outsider that has applied all that may have been shown takes over alone.
11. A member obeys a view that leaves it out: it shows and says nothing more as a member,
12. and asks to be let in again.
13. Members whose state hash contradicts the others' at the same version are removed, and rebuild from a checkpoint.

Why that is enough: whatever is shown was in a token of the tail (2), which every member before it had applied (1, 5, 8); a newcomer joins only with all
tokens of tails up to its own admission applied (4); so at every place of the log each member has all that may be shown.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Rules:
    """The rules above, each of which a test takes out."""

    tokens_wait_for_predecessor: bool = True
    only_returned_tokens_are_shown: bool = True
    first_of_an_epoch_wins: bool = True
    newcomers_have_all_that_was_shown: bool = True
    newcomers_stand_behind_the_tail: bool = True
    fence_before_showing: bool = True
    only_tokens_after_the_fence_count: bool = True
    a_name_for_each_membership: bool = True
    suspects_are_removed: bool = True
    outsiders_take_over_from_the_silent: bool = True
    the_removed_step_down: bool = True
    the_removed_rejoin: bool = True
    diverged_are_removed: bool = True


@dataclass(frozen=True, slots=True)
class Pace:
    """How often a member speaks. Nothing but delays depends on it.

    Attributes:
        token_s, token_versions: a token waits until this much time has passed or this many updates have come, since the last.
        suspect_after: own heartbeats.
    """

    heartbeat_s: float = 0.1
    token_s: float = 0.02
    token_versions: int = 500
    suspect_after: int = 5
