"""Permissions of roles in namespaces and topics: show, grant, revoke and explain them.

They are stored in the policies of the namespace, where Pulsar stores them (`bindery_broker.namespaces.permissions`).
Permissions of a partitioned topic are stored for the topic and for each of its partitions, as Pulsar's tools expect.
"""

from typing import Annotated, Any

from bindery_core.errors import Forbidden
from bindery_pulsar import znode_layout
from bindery_pulsar.topic_name import TopicName
from fastapi import APIRouter, Depends, Query

from bindery_broker.access.access import Access, need_of
from bindery_broker.access.decision import Decision, Need, Rule
from bindery_broker.http import openapi
from bindery_broker.http.authorization import may_administer, roles_of, target_for
from bindery_broker.http.exchange import Exchange
from bindery_broker.http.paths import topic_of
from bindery_broker.http.route import JsonLine, OwnedRoute
from bindery_broker.http.v1.namespaces import models
from bindery_broker.http.v1.partitioned.calls import partitions_of
from bindery_broker.namespaces.permissions import (
    OF_NAMESPACE,
    OF_SUBSCRIPTIONS,
    OF_TOPICS,
    Action,
    auth_of,
    check_actions,
    check_name,
    granted,
    revoked,
)

router = APIRouter(route_class=OwnedRoute, default_response_class=JsonLine, tags=["permissions"])
NoQuery = Annotated[models.NoQuery, Query()]
_OFF = "authorization.enabled is off: every client may do everything"
_WHY: dict[Rule, str] = {
    Rule.SUPER_USER: "the role is one of authorization.super_user_roles",
    Rule.TENANT_ADMIN: "the role is an administrator of the tenant",
    Rule.NAMESPACE: "the namespace grants the action to {granted_to}",
    Rule.TOPIC: "the topic grants the action to {granted_to}",
    Rule.PARTITIONED_TOPIC: "the partitioned topic grants the action to {granted_to}",
    Rule.SUBSCRIPTION_ROLES: "only other roles may use the subscription",
    Rule.SUBSCRIPTION_PREFIX: "the namespace requires that names of subscriptions begin with the role",
    Rule.NO_PERMISSION: "neither the namespace nor the topic grants the action to the role",
}


async def _topic_name(tenant: models.Tenant, namespace: models.Namespace, local: models.LocalName) -> TopicName:
    return topic_of(tenant, namespace, local).partitioned_topic


Topic = Annotated[TopicName, Depends(_topic_name)]


async def with_partitions(exchange: Exchange, name: TopicName) -> list[str]:
    """Return the full names of a topic and of its partitions."""
    record = await exchange.broker.partitioned.find_now(name)
    names = [name, *partitions_of(name, record.partitions if record is not None else 0)]
    return [one.full for one in names]


@router.get(
    models.NAMESPACE_PERMISSIONS,
    operation_id="listNamespacePermissions",
    summary="Show which roles may do what in a namespace",
    response_description=openapi.TITLES[200],
    responses=openapi.problems(404),
)
async def list_of_namespace(
    exchange: Exchange, tenant: models.Tenant, namespace: models.Namespace, _query: NoQuery
) -> models.NamespacePermissions:
    auth = auth_of(await exchange.broker.policies.read_namespace(tenant, namespace))
    return models.NamespacePermissions(
        namespace=f"{tenant}/{namespace}",
        permissions=_shown(auth.get(OF_NAMESPACE)),
        topics={
            name.removeprefix("persistent://"): shown
            for name, grants in sorted((auth.get(OF_TOPICS) or {}).items())
            if (shown := _shown(grants))
        },
        subscriptions=_shown(auth.get(OF_SUBSCRIPTIONS)),
    )


@router.put(
    models.NAMESPACE_PERMISSION,
    operation_id="grantNamespacePermission",
    summary="Set what a role may do in a namespace",
    response_description=openapi.TITLES[200],
    responses=openapi.problems(*openapi.BODY_ERRORS, *models.ERRORS),
)
async def grant_in_namespace(
    exchange: Exchange,
    tenant: models.Tenant,
    namespace: models.Namespace,
    role: models.Role,
    body: models.ActionsBody,
    _query: NoQuery,
) -> models.Permission:
    actions = check_actions(body.actions)
    check_name(role, "the role")
    await exchange.broker.policies.update_namespace(
        tenant, namespace, lambda found: granted(found, None, role, actions)
    )
    return models.Permission(role=role, actions=actions)


@router.delete(
    models.NAMESPACE_PERMISSION,
    operation_id="revokeNamespacePermission",
    summary="Remove everything that a role may do in a namespace; idempotent",
    response_description=openapi.TITLES[200],
    responses=openapi.problems(*models.ERRORS),
)
async def revoke_in_namespace(
    exchange: Exchange, tenant: models.Tenant, namespace: models.Namespace, role: models.Role, _query: NoQuery
) -> models.Permission:
    """Permissions of single topics stay."""
    await exchange.broker.policies.update_namespace(tenant, namespace, lambda found: revoked(found, None, role))
    return models.Permission(role=role, actions=[])


@router.get(
    models.TOPIC_PERMISSIONS,
    operation_id="listTopicPermissions",
    summary="Show which roles may do what in a topic, by permissions of the topic and of its namespace",
    response_description=openapi.TITLES[200],
    responses=openapi.problems(404, 413),
)
async def list_of_topic(exchange: Exchange, name: Topic, _query: NoQuery) -> models.TopicPermissions:
    auth = auth_of(await exchange.broker.policies.read_namespace(name.tenant, name.namespace))
    return models.TopicPermissions(
        topic=name.short,
        permissions=_shown((auth.get(OF_TOPICS) or {}).get(name.full)),
        namespace=_shown(auth.get(OF_NAMESPACE)),
    )


@router.put(
    models.TOPIC_PERMISSION,
    operation_id="grantTopicPermission",
    summary="Set what a role may do in a topic and its partitions",
    response_description=openapi.TITLES[200],
    responses=openapi.problems(*openapi.BODY_ERRORS, *models.ERRORS),
)
async def grant_in_topic(
    exchange: Exchange, name: Topic, role: models.Role, body: models.ActionsBody, _query: NoQuery
) -> models.Permission:
    """The topic need not exist. Its permissions are removed when it is deleted."""
    actions = check_actions(body.actions)
    check_name(role, "the role")
    topics = await with_partitions(exchange, name)
    await exchange.broker.policies.update_namespace(
        name.tenant, name.namespace, lambda found: granted(found, topics, role, actions)
    )
    return models.Permission(role=role, actions=actions)


@router.delete(
    models.TOPIC_PERMISSION,
    operation_id="revokeTopicPermission",
    summary="Remove everything that a role may do in a topic by permissions of the topic; idempotent",
    response_description=openapi.TITLES[200],
    responses=openapi.problems(*models.ERRORS, 413),
)
async def revoke_in_topic(exchange: Exchange, name: Topic, role: models.Role, _query: NoQuery) -> models.Permission:
    """Permissions of the namespace stay."""
    topics = await with_partitions(exchange, name)
    await exchange.broker.policies.update_namespace(
        name.tenant, name.namespace, lambda found: revoked(found, topics, role)
    )
    return models.Permission(role=role, actions=[])


@router.get(
    "/v1/permissions/explain",
    operation_id="explainPermission",
    summary="Explain whether a role may produce to or consume from a topic, and why",
    response_model_exclude_unset=True,
    response_description=openapi.TITLES[200],
    responses=openapi.problems(413),
)
async def explain(exchange: Exchange, query: Annotated[models.ExplainQuery, Query()]) -> models.Explained:
    """Administrators of the tenant may ask for every role, others for their own, without the reason of a refusal.

    While authorization is off, every client may ask for every role. `allowed` is true then; `allowed_if_enabled`,
    `rule` and `fix` are what permissions decide once it is on, so that they can be prepared.
    """
    name = TopicName.parse(query.topic)
    access, own = exchange.broker.permissions, roles_of(exchange)[0]
    role = query.role if query.role is not None else own
    is_enabled = exchange.broker.access is not None
    if not is_enabled and role is None:
        return models.Explained(
            role=role, action=query.action, topic=name.short, enabled=False, allowed=True, reason=_OFF
        )
    is_admin = await may_administer(exchange, name.tenant)
    if role is None or (role != own and not is_admin):
        raise Forbidden(
            "only an administrator of the tenant may ask what other roles may do; leave role out to ask for your own",
            requires=Need.TENANT_ADMIN.value,
        )
    action = Action(query.action)
    target = target_for(name, subscription=query.subscription if action is Action.CONSUME else None)
    # While it is off, nothing is followed, so that the records of this question are not read again for each change.
    decision = await access.decide(role, need_of(action), target, reads=None if is_enabled else exchange.list_reads)
    if not decision.is_allowed and not is_admin:
        decision = Decision(False, Rule.NO_PERMISSION)
    explained = _explained(access, role, action, name, decision, query.subscription)
    if not is_enabled:
        explained.enabled, explained.allowed, explained.allowed_if_enabled = False, True, decision.is_allowed
        could = "could" if decision.is_allowed else "could not"
        explained.reason = f"{_OFF}; if it were on, the role {could}: {explained.reason}"
    return explained


def _explained(
    access: Access, role: str, action: Action, name: TopicName, decision: Decision, subscription: str | None
) -> models.Explained:
    path = znode_layout.namespace_policies(tenant=name.tenant, namespace=name.namespace)
    member: dict[Rule, str] = {
        Rule.NAMESPACE: f"auth_policies.{OF_NAMESPACE}",
        Rule.TOPIC: f"auth_policies.{OF_TOPICS}",
        Rule.PARTITIONED_TOPIC: f"auth_policies.{OF_TOPICS}",
        Rule.SUBSCRIPTION_ROLES: f"auth_policies.{OF_SUBSCRIPTIONS}",
        Rule.SUBSCRIPTION_PREFIX: "subscription_auth_mode",
        Rule.NO_PERMISSION: "auth_policies",
        Rule.TENANT_ADMIN: "adminRoles",
    }
    explained = models.Explained(
        role=role,
        action=action.value,
        topic=name.short,
        enabled=True,
        allowed=decision.is_allowed,
        rule=decision.rule.value,
        reason=_WHY[decision.rule].format(granted_to=decision.granted_to),
    )
    if decision.rule in member:
        explained.policy = member[decision.rule]
        explained.path = znode_layout.tenant_policies(name.tenant) if decision.rule is Rule.TENANT_ADMIN else path
        if not access.records.is_readable(explained.path):
            explained.reason += "; the record cannot be decoded, so the last one that could is in force, or none"
    if decision.rule is Rule.NO_PERMISSION:
        explained.fix = f"bindery permissions grant {name.short} --role {role} --action {action.value}"
    elif decision.rule is Rule.SUBSCRIPTION_ROLES:
        explained.fix = (
            f"pulsar-admin namespaces grant-subscription-permission {name.tenant}/{name.namespace} "
            f"--subscription {subscription} --roles {role}"
        )
    elif decision.rule is Rule.SUBSCRIPTION_PREFIX:
        explained.fix = f"use a subscription whose name begins with {role}"
    return explained


def _shown(grants: Any) -> dict[str, list[str]]:
    """Return roles with their actions as they are stored, without what cannot be read."""
    if not isinstance(grants, dict):
        return {}
    return {
        role: [str(action) for action in actions]
        for role, actions in sorted(grants.items())
        if isinstance(actions, list) and actions
    }
