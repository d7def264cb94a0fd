"""Decide whether a role may do something. Pure.

The first row that applies decides:

| role                                                 | required                  | decision                    |
|------------------------------------------------------|---------------------------|-----------------------------|
| any, also none                                       | ANYONE                    | allowed                     |
| none                                                 | anything else             | denied: no_role             |
| one of `super_user_roles`                            | anything                  | allowed: super_user         |
| any                                                  | SUPER_USER                | denied: needs_super_user    |
| one of the tenant's adminRoles                       | anything in the tenant    | allowed: tenant_admin       |
| any                                                  | TENANT_ADMIN              | denied: needs_tenant_admin  |
| not one of the subscription's roles, if it has any   | CONSUME of a subscription | denied: subscription_roles  |
| no prefix of the subscription, if the mode is Prefix | CONSUME of a subscription | denied: subscription_prefix |
| has the action in the namespace                      | PRODUCE, CONSUME          | allowed: namespace          |
| has the action in the topic                          | PRODUCE, CONSUME          | allowed: topic              |
| has the action in the partitioned topic              | of a partition            | allowed: partitioned_topic  |
| any                                                  | PRODUCE, CONSUME          | denied: no_permission       |

LOOKUP is allowed if PRODUCE or CONSUME without a subscription is. NAMESPACE_USE and NAMESPACE_CONSUME are LOOKUP and
CONSUME without a topic: permissions of topics do not count for them. With `allow_wildcards`, permissions of `*`, `x*`
and `*x` count for all roles, those that begin with x, and those that end with it.

Both roles of a request that a proxy passes on are decided alone, and both must be allowed.
Source: Pulsar's PulsarAuthorizationProvider, AuthorizationService.
"""

from dataclasses import dataclass
from enum import Enum, StrEnum
from typing import Final, NamedTuple

from bindery_pulsar.topic_name import TopicName

from bindery_broker.namespaces.permissions import Action, Grants, Permissions

NO_ROLES: Final[frozenset[str]] = frozenset()


class Need(Enum):
    """What an operation requires of the role. The values are those of the documentation."""

    ANYONE = "anyone"
    LOOKUP = "produce or consume on the topic"
    PRODUCE = "produce on the topic"
    CONSUME = "consume on the topic, and on the subscription if the path names one"
    NAMESPACE_USE = "produce or consume on the namespace"
    NAMESPACE_CONSUME = "consume on the namespace, and on the subscription if the path names one"
    TENANT_ADMIN = "admin of the tenant"
    SUPER_USER = "super-user"


class Rule(StrEnum):
    """The row that decided."""

    ANYONE = "anyone"
    SUPER_USER = "super_user"
    TENANT_ADMIN = "tenant_admin"
    NAMESPACE = "namespace"
    TOPIC = "topic"
    PARTITIONED_TOPIC = "partitioned_topic"
    NO_ROLE = "no_role"
    NEEDS_SUPER_USER = "needs_super_user"
    NEEDS_TENANT_ADMIN = "needs_tenant_admin"
    SUBSCRIPTION_ROLES = "subscription_roles"
    SUBSCRIPTION_PREFIX = "subscription_prefix"
    NO_PERMISSION = "no_permission"


class Decision(NamedTuple):
    is_allowed: bool
    rule: Rule
    granted_to: str = ""
    """Role or pattern whose permission decided; empty if no permission did."""


@dataclass(frozen=True, slots=True)
class Rules:
    """What the settings of the broker decide."""

    super_users: frozenset[str]
    allow_wildcards: bool = False


ANYONE: Final = Decision(True, Rule.ANYONE)
NO_ROLE: Final = Decision(False, Rule.NO_ROLE)
SUPER_USER: Final = Decision(True, Rule.SUPER_USER)
TENANT_ADMIN: Final = Decision(True, Rule.TENANT_ADMIN)
NEEDS_SUPER_USER: Final = Decision(False, Rule.NEEDS_SUPER_USER)
NEEDS_TENANT_ADMIN: Final = Decision(False, Rule.NEEDS_TENANT_ADMIN)
NO_PERMISSION: Final = Decision(False, Rule.NO_PERMISSION)


def decide_by_settings(role: str | None, need: Need, rules: Rules) -> Decision | None:
    """Return the decision that needs no record; None: the tenant decides next."""
    if need is Need.ANYONE:
        return ANYONE
    if role is None:
        return NO_ROLE
    if role in rules.super_users:
        return SUPER_USER
    return NEEDS_SUPER_USER if need is Need.SUPER_USER else None


def decide_by_tenant(role: str, need: Need, admins: frozenset[str]) -> Decision | None:
    """Return the decision that needs no permissions; None: those of the namespace decide next."""
    if role in admins:
        return TENANT_ADMIN
    return NEEDS_TENANT_ADMIN if need is Need.TENANT_ADMIN else None


def decide_by_permissions(
    role: str, need: Need, permissions: Permissions, rules: Rules, *, topic: TopicName | None, subscription: str | None
) -> Decision:
    """Return the decision for a role that is no administrator. `topic`: None for a need of a namespace."""
    if need is Need.PRODUCE:
        return _find(role, Action.PRODUCE, permissions, rules, topic)
    if need in (Need.LOOKUP, Need.NAMESPACE_USE):
        found = _find(role, Action.PRODUCE, permissions, rules, topic)
        return found if found.is_allowed else _find(role, Action.CONSUME, permissions, rules, topic)
    if subscription is not None:
        roles = permissions.subscriptions.get(subscription, NO_ROLES)
        if roles and role not in roles:
            return Decision(False, Rule.SUBSCRIPTION_ROLES)
        if permissions.prefix and not subscription.startswith(role):
            return Decision(False, Rule.SUBSCRIPTION_PREFIX)
    return _find(role, Action.CONSUME, permissions, rules, topic)


def has_permission_of_a_topic(role: str, permissions: Permissions, rules: Rules) -> bool:
    """Return whether the role may produce to or consume from at least one topic by a permission of that topic."""
    return any(
        _granted(role, action, grants, rules) is not None for grants in permissions.topics.values() for action in Action
    )


def _find(role: str, action: Action, permissions: Permissions, rules: Rules, topic: TopicName | None) -> Decision:
    levels: list[tuple[Rule, Grants]] = [(Rule.NAMESPACE, permissions.namespace)]
    if topic is not None and permissions.topics:
        if (own := permissions.topics.get(topic.full)) is not None:
            levels.append((Rule.TOPIC, own))
        if topic.partition >= 0 and (whole := permissions.topics.get(topic.partitioned_topic.full)) is not None:
            levels.append((Rule.PARTITIONED_TOPIC, whole))
    for rule, grants in levels:
        granted_to = _granted(role, action, grants, rules)
        if granted_to is not None:
            return Decision(True, rule, granted_to)
    return NO_PERMISSION


def _granted(role: str, action: Action, grants: Grants, rules: Rules) -> str | None:
    """Return the role or pattern that has the action; None: none that applies to the role."""
    if action in grants.get(role, NO_ROLES):
        return role
    if rules.allow_wildcards:
        for pattern, actions in grants.items():
            if action in actions and _matches(pattern, role):
                return pattern
    return None


def _matches(pattern: str, role: str) -> bool:
    if pattern.endswith("*"):
        return role.startswith(pattern[:-1])
    return pattern.startswith("*") and role.endswith(pattern[1:])
