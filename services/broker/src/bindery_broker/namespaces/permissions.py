"""Decode the permissions in the records of tenants and namespaces. Pure.

| record   | member                                  | value                                                          |
|----------|-----------------------------------------|----------------------------------------------------------------|
| tenant   | adminRoles                              | roles                                                          |
| Policies | auth_policies.namespace_auth            | role -> actions                                                |
| Policies | auth_policies.destination_auth          | full name of a topic -> role -> actions                        |
| Policies | auth_policies.subscription_auth_roles   | subscription -> roles; an empty list restricts nothing         |
| Policies | subscription_auth_mode                  | `None`, or `Prefix`: the role must be a prefix of subscriptions|

A member that is missing or null grants nothing. One of another type raises Corrupt: a restriction that cannot be read
must not be treated as if it did not exist. Actions that Bindery does not know are kept and grant nothing here.
Source: Pulsar's AuthPolicies, SubscriptionAuthMode, TenantInfo.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from bindery_core.errors import BadRequest, Corrupt

from bindery_broker.namespaces.records import Json

MEMBER: Final = "auth_policies"
OF_NAMESPACE: Final = "namespace_auth"
OF_TOPICS: Final = "destination_auth"
OF_SUBSCRIPTIONS: Final = "subscription_auth_roles"
ACTIONS: Final = ("produce", "consume", "functions", "sources", "sinks", "packages")
"""Actions that can be granted, in the order in which they are stored. Source: Pulsar's AuthAction."""
ENTRIES_MAX: Final = 1_000
"""Maximum number of roles of a namespace, topic or subscription, and of topics or subscriptions with permissions of
their own: they are written with each change of the policies of the namespace."""
ROLE_SIZE_MAX: Final = 256
"""Maximum characters of the name of a role or a subscription."""
_MODE: Final = "subscription_auth_mode"
_PREFIX: Final = "Prefix"


class Action(StrEnum):
    """Actions that the broker checks. The others are stored for Pulsar's brokers."""

    PRODUCE = "produce"
    CONSUME = "consume"


Grants = Mapping[str, frozenset[str]]
"""Actions by role."""


@dataclass(frozen=True, slots=True)
class Permissions:
    """The permissions of one namespace."""

    namespace: Grants = field(default_factory=dict)
    topics: Mapping[str, Grants] = field(default_factory=dict)
    """By full name of the topic."""
    subscriptions: Grants = field(default_factory=dict)
    """Roles by subscription, only of subscriptions that restrict theirs."""
    prefix: bool = False
    """Whether the name of a subscription must begin with the role."""


NONE: Final = Permissions()
"""The permissions of a namespace that grants nothing, or does not exist."""


def admins_of(tenant: Json | None, *, path: str) -> frozenset[str]:
    """Return the roles of the administrators of a tenant; None: it does not exist. Raises Corrupt."""
    return _names((tenant or {}).get("adminRoles"), path=path)


def permissions_of(policies: Json | None, *, path: str) -> Permissions:
    """Return the permissions in the Policies of a namespace; None: it does not exist. Raises Corrupt.

    `path`: the znode, for the error.
    """
    if policies is None:
        return NONE
    auth = _map(policies.get(MEMBER), path=path)
    by_topic = _map(auth.get(OF_TOPICS), path=path)
    restricted = {name: _names(roles, path=path) for name, roles in _map(auth.get(OF_SUBSCRIPTIONS), path=path).items()}
    return Permissions(
        namespace=_grants(auth.get(OF_NAMESPACE), path=path),
        topics={topic: _grants(grants, path=path) for topic, grants in by_topic.items()},
        subscriptions={name: roles for name, roles in restricted.items() if roles},
        prefix=policies.get(_MODE) == _PREFIX,
    )


def granted(policies: Json, topics: Iterable[str] | None, role: str, actions: Iterable[str]) -> Json:
    """Return Policies in which the role has exactly these actions in the topics; None: in the namespace.

    `topics`: full names. Raises BadRequest for more than ENTRIES_MAX entries.
    """
    auth = auth_of(policies)
    if topics is None:
        return {**policies, MEMBER: with_entry(auth, OF_NAMESPACE, role, list(actions))}
    for topic in topics:
        grants = with_entry(auth.get(OF_TOPICS) or {}, topic, role, list(actions))[topic]
        auth = with_entry(auth, OF_TOPICS, topic, grants)
    return {**policies, MEMBER: auth}


def revoked(policies: Json, topics: Iterable[str] | None, role: str) -> Json:
    """Return Policies in which the role has no permissions in the topics; None: in the namespace."""
    auth = auth_of(policies)
    if topics is None:
        return {**policies, MEMBER: _without_entry(auth, OF_NAMESPACE, role)}
    for topic in topics:
        left = _without_entry(auth.get(OF_TOPICS) or {}, topic, role)[topic]
        auth = with_entry(auth, OF_TOPICS, topic, left) if left else _without_entry(auth, OF_TOPICS, topic)
    return {**policies, MEMBER: auth}


def auth_of(policies: Json) -> Json:
    """Return the stored permissions, as they are."""
    found = policies.get(MEMBER)
    return found if isinstance(found, dict) else {}


def with_entry(whole: Mapping[str, Any], member: str, name: str, value: Any) -> Json:
    """Return `whole` with another value at `member`, `name`. Raises BadRequest for more than ENTRIES_MAX entries."""
    entries = {**(whole.get(member) or {}), name: value}
    check_count(entries)
    return {**whole, member: entries}


def check_count(entries: Any) -> None:
    """Raise BadRequest for too many entries."""
    if len(entries) > ENTRIES_MAX:
        raise BadRequest(f"too many permissions: at most {ENTRIES_MAX} names are allowed")


def check_name(name: str, what: str) -> str:
    """Return the name of a role or a subscription. Raises BadRequest for one that nothing can have."""
    if not 0 < len(name) <= ROLE_SIZE_MAX or not name.isprintable():
        raise BadRequest(f"not a name for {what}: from 1 to {ROLE_SIZE_MAX} printable characters are allowed")
    return name


def check_actions(given: Iterable[str]) -> list[str]:
    """Return the actions in the order in which they are stored. Raises BadRequest for an unknown one."""
    wanted = set(given)
    if unknown := sorted(wanted - set(ACTIONS)):
        raise BadRequest(f"no such action: {unknown[0][:40]}; actions are {', '.join(ACTIONS)}")
    return [action for action in ACTIONS if action in wanted]


def _without_entry(whole: Mapping[str, Any], member: str, name: str) -> Json:
    return {**whole, member: {key: value for key, value in (whole.get(member) or {}).items() if key != name}}


def without_topic(policies: Json, topic: str) -> Json:
    """Return Policies without the permissions of a topic and of its partitions; the same object if it has none.

    `topic`: full name of a topic, not of a partition.
    """
    auth = policies.get(MEMBER)
    if not isinstance(auth, dict):
        return policies
    by_topic = auth.get(OF_TOPICS)
    if not isinstance(by_topic, dict) or not by_topic:
        return policies
    kept = {name: grants for name, grants in by_topic.items() if not _is_part(name, topic)}
    return policies if len(kept) == len(by_topic) else {**policies, MEMBER: {**auth, OF_TOPICS: kept}}


def _is_part(name: str, topic: str) -> bool:
    if not name.startswith(topic):
        return False
    rest = name.removeprefix(topic)
    return not rest or (rest.startswith("-partition-") and rest.removeprefix("-partition-").isdecimal())


def _grants(value: Any, *, path: str) -> dict[str, frozenset[str]]:
    return {role: _names(actions, path=path) for role, actions in _map(value, path=path).items()}


def _map(value: Any, *, path: str) -> dict[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, dict):
        raise Corrupt("the permissions cannot be read", path=path, reason="not an object where roles are expected")
    return value


def _names(value: Any, *, path: str) -> frozenset[str]:
    if value is None:
        return frozenset()
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise Corrupt("the permissions cannot be read", path=path, reason="not a list of names")
    return frozenset(value)
