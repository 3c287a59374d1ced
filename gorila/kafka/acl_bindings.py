"""Our ACLs as confluent_kafka's."""

from __future__ import annotations

import confluent_kafka.admin as ck

from gorila.acls import Acl

_RESOURCES = {
    "topic": ck.ResourceType.TOPIC,
    "group": ck.ResourceType.GROUP,
    "transactional-id": ck.ResourceType.TRANSACTIONAL_ID,
}
_PATTERNS = {"literal": ck.ResourcePatternType.LITERAL, "prefixed": ck.ResourcePatternType.PREFIXED}
_ANY_HOST = "*"


def binding(acl: Acl) -> ck.AclBinding:
    """To be created."""
    return ck.AclBinding(*_fields(acl))


def binding_filter(acl: Acl) -> ck.AclBindingFilter:
    """To find or delete exactly this one."""
    return ck.AclBindingFilter(*_fields(acl))


def _fields(acl: Acl) -> tuple[object, ...]:
    operation = ck.AclOperation[acl.operation]
    allow = ck.AclPermissionType.ALLOW
    return _RESOURCES[acl.resource], acl.name, _PATTERNS[acl.pattern], acl.principal, _ANY_HOST, operation, allow
