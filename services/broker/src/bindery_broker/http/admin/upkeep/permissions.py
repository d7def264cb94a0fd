"""Calls that store and show which roles may use a namespace, a topic or a subscription.

They are stored where Pulsar stores them, so that its brokers beside those of Bindery follow them, and nobody who
changes over loses them. Brokers check them if `authorization.enabled` is set (`bindery_broker.access`).

| member of `auth_policies` in the Policies of the namespace | value                                       |
|------------------------------------------------------------|---------------------------------------------|
| namespace_auth                                             | role -> actions                             |
| destination_auth                                           | full name of a topic -> role -> actions     |
| subscription_auth_roles                                    | subscription -> roles                       |

Permissions of a partitioned topic are stored for the topic and for each of its partitions.
Source: Pulsar AuthPolicies, PulsarAuthorizationProvider, PersistentTopicsBase.
"""

from collections.abc import Callable
from typing import Final

from bindery_core.errors import BadRequest, Corrupt
from fastapi import APIRouter
from starlette.responses import Response

from bindery_broker.http.admin import calls
from bindery_broker.http.admin.calls import ANY_TOPIC, Refused, answer, call, done, named, param
from bindery_broker.http.admin.namespaces import NAMESPACE, namespace_of
from bindery_broker.http.exchange import Exchange
from bindery_broker.http.v1.namespaces.permissions import with_partitions
from bindery_broker.namespaces.permissions import (
    MEMBER,
    OF_NAMESPACE,
    OF_SUBSCRIPTIONS,
    OF_TOPICS,
    auth_of,
    check_actions,
    check_count,
    check_name,
    granted,
    revoked,
    with_entry,
)
from bindery_broker.namespaces.records import Json

router: Final = APIRouter()


@call(router, "GET", NAMESPACE + "/permissions", "adminPermissions")
async def permissions(exchange: Exchange) -> Response:
    return answer((await _read(exchange)).get(OF_NAMESPACE) or {})


@call(router, "POST", NAMESPACE + "/permissions/{role:form}", "adminGrantPermission")
async def grant(exchange: Exchange) -> Response:
    role, actions = _role(exchange), await _actions(exchange)
    return await _update(exchange, lambda found: granted(found, None, role, actions))


@call(router, "DELETE", NAMESPACE + "/permissions/{role:form}", "adminRevokePermission")
async def revoke(exchange: Exchange) -> Response:
    role = _role(exchange)
    return await _update(exchange, lambda found: revoked(found, None, role))


@call(router, "GET", NAMESPACE + "/permissions/subscription", "adminSubscriptionPermissions")
async def subscription_permissions(exchange: Exchange) -> Response:
    return answer((await _read(exchange)).get(OF_SUBSCRIPTIONS) or {})


@call(router, "POST", NAMESPACE + "/permissions/subscription/{name:form}", "adminGrantSubscription")
async def grant_subscription(exchange: Exchange) -> Response:
    """The body is the list of the roles that may use the subscription."""
    name = _checked(param(exchange, "name"), "the subscription")
    roles = [_checked(role, "the role") for role in await calls.body(exchange, list[str])]

    def change(found: Json) -> Json:
        check_count(roles)
        return {**found, MEMBER: with_entry(auth_of(found), OF_SUBSCRIPTIONS, name, list(dict.fromkeys(roles)))}

    return await _update(exchange, change)


@call(router, "DELETE", NAMESPACE + "/permissions/{name:form}/{role:form}", "adminRevokeSubscription")
async def revoke_subscription(exchange: Exchange) -> Response:
    name, role = _checked(param(exchange, "name"), "the subscription"), _role(exchange)

    def change(found: Json) -> Json:
        auth = auth_of(found)
        roles = (auth.get(OF_SUBSCRIPTIONS) or {}).get(name)
        if not roles:
            return found
        return {**found, MEMBER: with_entry(auth, OF_SUBSCRIPTIONS, name, [one for one in roles if one != role])}

    return await _update(exchange, change)


@call(router, "GET", ANY_TOPIC + "/permissions", "adminTopicPermissions")
async def topic_permissions(exchange: Exchange) -> Response:
    """Those of the topic and of its namespace together."""
    name, auth = named(exchange), await _read(exchange)
    found: dict[str, list[str]] = {}
    of_topic = (auth.get(OF_TOPICS) or {}).get(name.full) or {}
    for part in (auth.get(OF_NAMESPACE) or {}, of_topic):
        for role, actions in part.items():
            found[role] = sorted({*found.get(role, ()), *actions})
    return answer(found)


@call(router, "POST", ANY_TOPIC + "/permissions/{role:form}", "adminGrantTopicPermission")
async def grant_topic(exchange: Exchange) -> Response:
    names, role, actions = await _topics(exchange), _role(exchange), await _actions(exchange)
    return await _update(exchange, lambda found: granted(found, names, role, actions))


@call(router, "DELETE", ANY_TOPIC + "/permissions/{role:form}", "adminRevokeTopicPermission")
async def revoke_topic(exchange: Exchange) -> Response:
    names, role = await _topics(exchange), _role(exchange)
    return await _update(exchange, lambda found: revoked(found, names, role))


async def _topics(exchange: Exchange) -> list[str]:
    """Return the full names of the topic in the path, and of its partitions."""
    return await with_partitions(exchange, named(exchange))


async def _read(exchange: Exchange) -> Json:
    return auth_of(await exchange.broker.policies.read_namespace(*namespace_of(exchange)))


async def _update(exchange: Exchange, change: Callable[[Json], Json]) -> Response:
    try:
        await exchange.broker.policies.update_namespace(*namespace_of(exchange), change)
    except (BadRequest, Corrupt) as error:
        raise Refused(412, str(error)) from error
    return done()


def _role(exchange: Exchange) -> str:
    return _checked(param(exchange, "role"), "the role")


def _checked(name: str, what: str) -> str:
    try:
        return check_name(name, what)
    except BadRequest as error:
        raise Refused(412, str(error)) from error


async def _actions(exchange: Exchange) -> list[str]:
    try:
        return check_actions(await calls.body(exchange, list[str]))
    except BadRequest as error:
        raise Refused(400, str(error)) from error
