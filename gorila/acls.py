"""Who may touch what, beside the topology: the least each role needs, as data. `gorila topics acls` prints or applies it.

Topics come from the topology's writers and readers; groups, and the few looks a role takes at others, are said here. READ and WRITE imply DESCRIBE
in Kafka, and WRITE on any topic is enough for an idempotent producer (since Kafka 3.0), so no role needs a right on the cluster.
A test runs every role with exactly these rights, and tries everything else.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from gorila.topics import NO_GROUP, TOPOLOGY

Operation = Literal["READ", "WRITE", "DESCRIBE", "CREATE", "DELETE", "DESCRIBE_CONFIGS"]
Resource = Literal["topic", "group", "transactional-id"]
Pattern = Literal["literal", "prefixed"]

ALL_TOPICS = ""
ALL_GROUPS = ""
"""Names are given without the run; the empty prefix is everything of the run."""


@dataclass(frozen=True, order=True)
class Grant:
    """One right: `operation` on a resource of a run. `name` is without the run; prefixed: everything that begins so.

    `of_run` is False for a name that all runs share.
    """

    resource: Resource
    name: str
    pattern: Pattern
    operation: Operation
    of_run: bool = True


@dataclass(frozen=True, order=True)
class Acl:
    """A grant to somebody, as Kafka keeps it: `name` is the full name on the broker."""

    principal: str
    resource: Resource
    name: str
    pattern: Pattern
    operation: Operation


def _topic(name: str, *operations: Operation) -> tuple[Grant, ...]:
    return tuple(Grant("topic", name, "literal" if name else "prefixed", operation) for operation in operations)


def _group(name: str, *operations: Operation) -> tuple[Grant, ...]:
    """A name ending in "-" or empty is a prefix: a group for each shard and replica."""
    pattern: Pattern = "prefixed" if not name or name.endswith("-") else "literal"
    return tuple(Grant("group", name, pattern, operation) for operation in operations)


PARAMETER_SERVERS = "parameter-server-"
# Every role also reads outside any group. It works without this right; Kafka would then note a refusal twice a second for each reader.
EVERYBODY = frozenset({Grant("group", NO_GROUP, "literal", "DESCRIBE", of_run=False)})

# What the topology's writers and readers do not say: groups joined (READ), groups watched for flow control or display (DESCRIBE), topics
# whose ends alone are looked at (DESCRIBE).
BESIDE_TOPOLOGY: dict[str, tuple[Grant, ...]] = {
    "actor": _group("replay", "DESCRIBE"),
    "replay": _group("replay", "READ") + _group("learner", "DESCRIBE"),
    "learner": _group("learner", "READ") + _group(PARAMETER_SERVERS, "DESCRIBE"),
    "parameter-server": (
        *_group(PARAMETER_SERVERS, "READ"),
        Grant("transactional-id", PARAMETER_SERVERS, "prefixed", "WRITE"),
        Grant("transactional-id", PARAMETER_SERVERS, "prefixed", "DESCRIBE"),
    ),
    "evaluator": (),
    "archiver": _group("archiver", "READ"),
    "monitor": _topic(ALL_TOPICS, "DESCRIBE") + _group(ALL_GROUPS, "DESCRIBE"),
    # `gorila topics`: makes and deletes runs, by the names it was given rights on.
    "topics": (
        *_topic(ALL_TOPICS, "CREATE", "DELETE", "DESCRIBE", "DESCRIBE_CONFIGS"),
        *_topic("run", "READ"),
        *_group(ALL_GROUPS, "DESCRIBE", "DELETE"),
    ),
    # The live view of a run, and its summary.
    "train": (
        *_topic(ALL_TOPICS, "DESCRIBE"),
        *(
            grant
            for name in ("transitions", "priorities", "replay-stats", "weights", "run")
            for grant in _topic(name, "READ")
        ),
        *_group(ALL_GROUPS, "DESCRIBE"),
    ),
    # Whoever looks at a run with Kafka's own tools: every record, every lag; nothing that changes a run.
    "people": (
        *_topic(ALL_TOPICS, "READ", "DESCRIBE_CONFIGS"),
        *_group(ALL_GROUPS, "DESCRIBE"),
        *_group("people-", "READ"),
    ),
}
ROLES: tuple[str, ...] = tuple(BESIDE_TOPOLOGY)


def grants(role: str) -> tuple[Grant, ...]:
    """Everything a role may do on its run, sorted. Raises KeyError for what is no role."""
    found = set(BESIDE_TOPOLOGY[role]) | EVERYBODY
    for topic in TOPOLOGY:
        if role in topic.readers and Grant("topic", ALL_TOPICS, "prefixed", "READ") not in found:
            found.add(Grant("topic", topic.name, "literal", "READ"))
        if role in topic.writers:
            found.add(Grant("topic", topic.name, "literal", "WRITE"))
    return tuple(sorted(found))


def covers(role: str, resource: Resource, name: str, operation: Operation) -> bool:
    """Whether a role may do that, as Kafka judges: by literal name or prefix, READ and WRITE implying DESCRIBE."""
    implied_by: dict[str, set[str]] = {
        "DESCRIBE": {"DESCRIBE", "READ", "WRITE", "DELETE"},
    }
    return any(
        grant.resource == resource
        and (name == grant.name if grant.pattern == "literal" else name.startswith(grant.name))
        and grant.operation in implied_by.get(operation, {operation})
        for grant in grants(role)
    )


def user_name(pattern: str, run: str, role: str) -> str:
    """A role's user: `pattern` with {run} and {role} filled in."""
    return pattern.replace("{run}", run).replace("{role}", role)


def acls(run: str, roles: Iterable[str] = ROLES, users: str = "{role}") -> list[Acl]:
    """What Kafka must be told for a run, sorted.

    Args:
        users: name of a role's user, in which {run} and {role} are filled in.
    """
    return sorted(
        Acl(
            f"User:{user_name(users, run, role)}",
            g.resource,
            f"{run}.{g.name}" if g.of_run else g.name,
            g.pattern,
            g.operation,
        )
        for role in roles
        for g in grants(role)
    )


_TOOL_OPTION = {"topic": "--topic", "group": "--group", "transactional-id": "--transactional-id"}


def _by_resource(wanted: Iterable[Acl]) -> dict[tuple[str, Resource, str, Pattern], list[str]]:
    found: dict[tuple[str, Resource, str, Pattern], list[str]] = {}
    for acl in wanted:
        found.setdefault((acl.principal, acl.resource, acl.name, acl.pattern), []).append(acl.operation)
    return found


def kafka_acls_lines(wanted: Iterable[Acl]) -> str:
    """One `gorila kafka acls --add …` a resource, to be pasted in a shell (every name is of letters, digits, '.', '_' and '-')."""
    lines = []
    for (principal, resource, name, pattern), operations in _by_resource(wanted).items():
        words = ["gorila kafka acls --add", f"--allow-principal {principal}"]
        words += [f"--operation {_CAMEL[operation]}" for operation in operations]
        words += [f"{_TOOL_OPTION[resource]} {name}", f"--resource-pattern-type {pattern}"]
        lines.append(" ".join(words))
    return "\n".join(lines) + "\n"


_CAMEL = {
    "READ": "Read",
    "WRITE": "Write",
    "DESCRIBE": "Describe",
    "CREATE": "Create",
    "DELETE": "Delete",
    "DESCRIBE_CONFIGS": "DescribeConfigs",
}
_STRIMZI_RESOURCE = {"topic": "topic", "group": "group", "transactional-id": "transactionalId"}
_STRIMZI_PATTERN = {"literal": "literal", "prefixed": "prefix"}


def json_text(wanted: Iterable[Acl]) -> str:
    """A JSON list of objects."""
    return json.dumps([vars(acl) for acl in wanted], indent=2) + "\n"


def strimzi_yaml(wanted: Iterable[Acl], cluster: str, namespace: str = "") -> str:
    """A Strimzi KafkaUser a user: SCRAM-SHA-512 (Strimzi makes the password), simple authorisation.

    Args:
        cluster: name of the Kafka resource (label strimzi.io/cluster).
        namespace: of the users; empty: left to kubectl.
    """
    users: dict[str, list[str]] = {}
    for (principal, resource, name, pattern), operations in _by_resource(wanted).items():
        words = ", ".join(_CAMEL[operation] for operation in operations)
        users.setdefault(principal.removeprefix("User:"), []).append(
            f"      - resource: {{type: {_STRIMZI_RESOURCE[resource]}, name: {json.dumps(name)}, patternType: {_STRIMZI_PATTERN[pattern]}}}\n"
            f"        operations: [{words}]\n"
        )
    place = f"  namespace: {namespace}\n" if namespace else ""
    return "---\n".join(
        "apiVersion: kafka.strimzi.io/v1beta2\n"
        "kind: KafkaUser\n"
        f"metadata:\n  name: {user}\n{place}  labels:\n    strimzi.io/cluster: {cluster}\n"
        "spec:\n  authentication:\n    type: scram-sha-512\n"
        f"  authorization:\n    type: simple\n    acls:\n{''.join(rules)}"
        for user, rules in users.items()
    )


def markdown_table() -> str:
    """The table of rights for the docs (generated; a test keeps it fresh): names without the run's. `*` is a prefix of the run's names."""
    rows = [
        "| role | topics read | topics written | other rights on topics | groups | transactional ids |",
        "|---|---|---|---|---|---|",
    ]
    for role in ROLES:
        cells: dict[str, dict[str, list[str]]] = {}
        for g in grants(role):
            if not g.of_run:
                continue
            column = (
                g.resource if g.resource != "topic" else {"READ": "read", "WRITE": "write"}.get(g.operation, "topic")
            )
            shown = f"`{g.name}{'*' if g.pattern == 'prefixed' else ''}`"
            cells.setdefault(column, {}).setdefault(shown, []).append(_CAMEL[g.operation])

        def names(column: str, cells: dict[str, dict[str, list[str]]] = cells) -> str:
            return " ".join(cells.get(column, {})) or "–"

        def rights(column: str, cells: dict[str, dict[str, list[str]]] = cells) -> str:
            return ", ".join(f"{name} {'+'.join(found)}" for name, found in cells.get(column, {}).items()) or "–"

        rows.append(
            f"| {role} | {names('read')} | {names('write')} | {rights('topic')} | {rights('group')} | {rights('transactional-id')} |"
        )
    return "\n".join(rows) + "\n"
