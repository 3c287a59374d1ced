"""A consumer group as Kafka describes it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Member:
    """One process in a group.

    Attributes:
        instance_id: of static membership; a role's is its name (`learner-0`).
        partitions: (topic, partition) it reads now.
    """

    client_id: str
    instance_id: str
    host: str
    partitions: tuple[tuple[str, int], ...]


@dataclass(frozen=True)
class GroupFacts:
    """`state`: as Kafka's own tools print it (Stable, Empty, PreparingRebalance, …). A group that only commits has no members."""

    group: str
    state: str
    members: tuple[Member, ...]


def read_group(answer: Any) -> GroupFacts:
    """From a ConsumerGroupDescription."""
    members = []
    for member in answer.members:
        assigned = member.assignment.topic_partitions if member.assignment is not None else []
        partitions = tuple(sorted((p.topic, p.partition) for p in assigned))
        members.append(Member(member.client_id, member.group_instance_id or "", member.host, partitions))
    state = "".join(word.capitalize() for word in answer.state.name.split("_"))
    return GroupFacts(answer.group_id, state, tuple(sorted(members, key=lambda m: (m.instance_id, m.client_id))))
