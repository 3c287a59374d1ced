"""Rights as data: derived from the topology, in three forms, each understood by who reads it."""

from __future__ import annotations

import json

import pytest
import yaml

from gorila import acls
from gorila.commands.roles import ROLES as COMMANDS
from gorila.topics import TOPOLOGY


def test_every_role_and_every_name_in_the_topology_has_rights() -> None:
    named = {role for topic in TOPOLOGY for role in (*topic.readers, *topic.writers)}
    assert named | set(COMMANDS) <= set(acls.ROLES)


@pytest.mark.parametrize("topic", TOPOLOGY, ids=lambda t: t.name)
def test_only_the_topology_s_writers_may_write(topic) -> None:
    assert {role for role in acls.ROLES if acls.covers(role, "topic", topic.name, "WRITE")} == set(topic.writers)


@pytest.mark.parametrize("topic", TOPOLOGY, ids=lambda t: t.name)
def test_only_readers_the_view_of_a_run_and_people_may_read(topic) -> None:
    readers = {role for role in acls.ROLES if acls.covers(role, "topic", topic.name, "READ")}
    assert readers - set(topic.readers) <= {"train", "people", "topics"}
    assert set(topic.readers) <= readers


@pytest.mark.parametrize("role", list(COMMANDS))
def test_no_service_may_make_delete_or_see_beyond_its_run(role: str) -> None:
    for grant in acls.grants(role):
        assert grant.operation in ("READ", "WRITE", "DESCRIBE")
    for acl in acls.acls("demo", [role]):
        assert acl.name.startswith("demo.") or acl.name == "gorila-no-group"
        assert acl.principal == f"User:{role}"


def test_a_prefix_covers_what_begins_so_and_a_literal_only_itself() -> None:
    assert acls.covers("learner", "group", "parameter-server-3-1", "DESCRIBE")
    assert not acls.covers("learner", "group", "parameter-server-3-1", "READ")
    assert not acls.covers("actor", "group", "replay-2", "DESCRIBE")
    assert acls.covers("actor", "topic", "transitions", "DESCRIBE")  # WRITE implies it


def test_strimzi_users_are_yaml_with_every_right_once() -> None:
    users = list(yaml.safe_load_all(acls.strimzi_yaml(acls.acls("demo", users="{run}-{role}"), "kafka", "ml")))
    assert [user["metadata"]["name"] for user in users] == sorted(f"demo-{role}" for role in acls.ROLES)
    found = set()
    for user in users:
        assert user["metadata"]["labels"] == {"strimzi.io/cluster": "kafka"}
        assert user["metadata"]["namespace"] == "ml"
        for rule in user["spec"]["authorization"]["acls"]:
            resource = rule["resource"]
            found |= {(user["metadata"]["name"], resource["type"], resource["name"], o) for o in rule["operations"]}
    assert len(found) == len(acls.acls("demo"))
    assert ("demo-actor", "topic", "demo.transitions", "Write") in found


def test_json_and_commands_say_the_same() -> None:
    wanted = acls.acls("demo", ["replay"])
    assert [acls.Acl(**entry) for entry in json.loads(acls.json_text(wanted))] == wanted
    lines = acls.kafka_acls_lines(wanted).splitlines()
    assert sum(line.count("--operation") for line in lines) == len(wanted)
    assert all(line.startswith("gorila kafka acls --add --allow-principal User:replay --operation ") for line in lines)
