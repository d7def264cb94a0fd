"""Calls on tenants and namespaces, and on the policies of a namespace.

Tenants and namespaces are created, changed and deleted by the directory of the broker, as over `/v1`. A policy is read
(GET), set (POST or PUT) and removed (DELETE). The calls of all policies are made from one table: the last part of the
path, the member of Pulsar's Policies, the method that sets it, and the type of its JSON. The codec of policies checks
the values. A policy that is not set is answered with 204 without a body, as Pulsar does.
Source: Pulsar TenantsBase, Namespaces, Policies.
"""

from typing import Any, Final

import msgspec
from bindery_core.errors import BadRequest, Corrupt
from fastapi import APIRouter
from starlette.responses import Response

from bindery_broker.errors import NamespaceNotEmpty, NoSuchNamespace, NoSuchTenant, TenantNotEmpty
from bindery_broker.http.admin import calls
from bindery_broker.http.admin.calls import ROOT, Call, Refused, answer, call, done, flag, param, text
from bindery_broker.http.admin.policy_rules import (
    Policy,
    check_level,
    check_value,
    quota_json,
    quota_type,
    register_unsupported,
)
from bindery_broker.http.exchange import Exchange
from bindery_broker.namespaces import records
from bindery_broker.namespaces.policy_codec import set_in_namespace
from bindery_broker.namespaces.policy_store import Mutate

router: Final = APIRouter()
TENANT: Final = ROOT + "/tenants/{tenant:form}"
NAMESPACE: Final = ROOT + "/namespaces/{tenant:form}/{namespace:form}"


class _TenantBody(msgspec.Struct):
    adminRoles: list[str] | None = None
    allowedClusters: list[str] | None = None


_POLICIES: Final = (
    Policy("retention", "retention_policies", dict[str, Any]),
    Policy("messageTTL", "message_ttl_in_seconds", int, reason="Invalid value for message TTL, message TTL must >= 0"),
    Policy("deduplication", "deduplicationEnabled", bool),
    Policy("persistence", "persistence", dict[str, Any]),
    Policy("autoTopicCreation", "autoTopicCreationOverride", dict[str, Any]),
    Policy("autoSubscriptionCreation", "autoSubscriptionCreationOverride", dict[str, Any]),
    Policy("delayedDelivery", "delayed_delivery_policies", dict[str, Any]),
    Policy("inactiveTopicPolicies", "inactive_topic_policies", dict[str, Any]),
    Policy(
        "subscriptionExpirationTime",
        "subscription_expiration_time_minutes",
        int,
        reason="Invalid value for subscription expiration time",
    ),
    Policy(
        "deduplicationSnapshotInterval",
        "deduplicationSnapshotIntervalSeconds",
        int,
        reason="interval must be greater than or equal to 0",
    ),
    Policy("maxProducersPerTopic", "max_producers_per_topic", int),
    Policy("maxConsumersPerTopic", "max_consumers_per_topic", int),
    Policy("maxConsumersPerSubscription", "max_consumers_per_subscription", int),
    Policy("maxSubscriptionsPerTopic", "max_subscriptions_per_topic", int),
    Policy("maxTopicsPerNamespace", "max_topics_per_namespace", int),
    Policy("maxUnackedMessagesPerConsumer", "max_unacked_messages_per_consumer", int),
    Policy("maxUnackedMessagesPerSubscription", "max_unacked_messages_per_subscription", int),
    Policy("compactionThreshold", "compaction_threshold", int, "PUT"),
    Policy("schemaCompatibilityStrategy", "schema_compatibility_strategy", str, "PUT", "UNDEFINED"),
    Policy("publishRate", "publishMaxMessageRate", dict[str, Any], by_cluster=True),
    Policy("dispatchRate", "topicDispatchRate", dict[str, Any], by_cluster=True),
    Policy("subscriptionDispatchRate", "subscriptionDispatchRate", dict[str, Any], by_cluster=True),
    Policy("subscribeRate", "clusterSubscribeRate", dict[str, Any], by_cluster=True),
    Policy("subscriptionTypesEnabled", "subscription_types_enabled", list[str], default=[]),
    Policy("encryptionRequired", "encryption_required", bool, default=False),
    Policy("schemaValidationEnforced", "schema_validation_enforced", bool, default=False),
    Policy("isAllowAutoUpdateSchema", "is_allow_auto_update_schema", bool, default=True),
)

_NULL_REMOVES: Final = frozenset(("deduplicationSnapshotInterval",))
"""Policies that a body `null` removes, besides DELETE."""
_QUOTAS: Final = "backlog_quota_map"


@call(router, "GET", ROOT + "/tenants", "adminListTenants")
async def list_tenants(exchange: Exchange) -> Response:
    return answer(await exchange.broker.directory.tenants())


@call(router, "GET", TENANT, "adminTenant")
async def tenant(exchange: Exchange) -> Response:
    try:
        return answer(await exchange.broker.directory.tenant(_name(exchange, "tenant")))
    except (NoSuchTenant, BadRequest):  # nothing has a name that is not valid
        raise Refused(404, "Tenant does not exist") from None


@call(router, "PUT", TENANT, "adminCreateTenant")
async def create_tenant(exchange: Exchange) -> Response:
    name, info = _name(exchange, "tenant"), await _tenant_info(exchange)
    if not await exchange.broker.directory.create_tenant(name, info):
        raise Refused(409, "Tenant already exist")
    return done()


@call(router, "POST", TENANT, "adminUpdateTenant")
async def update_tenant(exchange: Exchange) -> Response:
    name, info = _name(exchange, "tenant"), await _tenant_info(exchange)
    try:
        await exchange.broker.directory.update_tenant(name, lambda stored: stored | info)
    except NoSuchTenant as error:
        raise Refused(404, "Tenant does not exist") from error
    return done()


@call(router, "DELETE", TENANT, "adminDeleteTenant")
async def delete_tenant(exchange: Exchange) -> Response:
    """With `?force=true`, its namespaces and their topics are deleted first."""
    name, directory = _name(exchange, "tenant"), exchange.broker.directory
    try:
        if flag(exchange, "force"):
            for namespace in await directory.namespaces(name):
                await directory.delete_namespace(
                    name, namespace, force=True, delete_topic=exchange.at_owner.delete_topic
                )
        await directory.delete_tenant(name)
    except NoSuchTenant as error:
        raise Refused(404, "Tenant doesn't exist") from error
    except TenantNotEmpty as error:
        raise Refused(409, "The tenant still has active namespaces") from error
    return done()


@call(router, "PUT", NAMESPACE, "adminCreateNamespace")
async def create_namespace(exchange: Exchange) -> Response:
    """The body has Policies, or is empty."""
    space = (_name(exchange, "tenant"), _name(exchange, "namespace"))
    policies: dict[str, Any] = await calls.body(exchange, dict[str, Any], missing={})
    given = {member: value for member, value in policies.items() if value not in (None, {}, [])}
    try:
        given["bundles"] = records.bundles_data(given.get("bundles"))
    except BadRequest as error:
        raise Refused(400, error.message) from error
    try:
        set_in_namespace(given, cluster=exchange.broker.settings.cluster_name)
        if not await exchange.broker.directory.create_namespace(*space, given):
            raise Refused(409, "Namespace already exists")
    except Corrupt as error:
        raise Refused(412, str(error)) from error
    except NoSuchTenant as error:
        raise Refused(404, "Tenant does not exist") from error
    return done()


@call(router, "DELETE", NAMESPACE, "adminDeleteNamespace")
async def delete_namespace(exchange: Exchange) -> Response:
    space = (_name(exchange, "tenant"), _name(exchange, "namespace"))
    try:
        await exchange.broker.directory.delete_namespace(
            *space, force=flag(exchange, "force"), delete_topic=exchange.at_owner.delete_topic
        )
    except NoSuchNamespace as error:
        raise Refused(404, f"Namespace {'/'.join(space)} does not exist.") from error
    except NamespaceNotEmpty as error:
        raise Refused(409, "Cannot delete non empty namespace") from error
    return done()


@call(router, "GET", ROOT + "/namespaces/{tenant:form}", "adminListNamespaces")
async def list_namespaces(exchange: Exchange) -> Response:
    name = _name(exchange, "tenant")
    try:
        return answer([f"{name}/{child}" for child in await exchange.broker.directory.namespaces(name)])
    except (NoSuchTenant, BadRequest):  # nothing has a name that is not valid
        raise Refused(404, "Tenant not found") from None


@call(router, "GET", NAMESPACE, "adminPolicies")
async def policies(exchange: Exchange) -> Response:
    found = await _read(exchange)
    return answer({**found, "bundles": await _bundles(exchange)})


@call(router, "GET", NAMESPACE + "/topics", "adminNamespaceTopics")
async def namespace_topics(exchange: Exchange) -> Response:
    await _read(exchange)
    mode = exchange.query_params.get("mode", "ALL")
    if mode == "NON_PERSISTENT":
        return answer([])
    space = (param(exchange, "tenant"), param(exchange, "namespace"))
    prefix = f"persistent://{'/'.join(space)}/"
    return answer([prefix + name for name in await exchange.broker.names.local_names(*space)])


@call(router, "GET", NAMESPACE + "/bundles", "adminBundles")
async def bundles(exchange: Exchange) -> Response:
    await _read(exchange)
    return answer(await _bundles(exchange))


@call(router, "GET", NAMESPACE + "/backlogQuotaMap", "adminGetBacklogQuotas")
async def quotas(exchange: Exchange) -> Response:
    return answer((await _read(exchange)).get(_QUOTAS) or {})


@call(router, "POST", NAMESPACE + "/backlogQuota", "adminSetBacklogQuota")
async def set_quota(exchange: Exchange) -> Response:
    kind, value = quota_type(exchange), quota_json(await calls.body(exchange, dict[str, Any]))
    return await _update(
        exchange, "backlogQuota", lambda found: {**found, _QUOTAS: {**(found.get(_QUOTAS) or {}), kind: value}}
    )


@call(router, "DELETE", NAMESPACE + "/backlogQuota", "adminRemoveBacklogQuota")
async def remove_quota(exchange: Exchange) -> Response:
    kind = quota_type(exchange)

    def mutate(found: records.Json) -> records.Json:
        left = {name: value for name, value in (found.get(_QUOTAS) or {}).items() if name != kind}
        return {**found, _QUOTAS: left}

    return await _update(exchange, "backlogQuota", mutate)


@call(router, "GET", NAMESPACE + "/replication", "adminReplicationClusters")
async def replication_clusters(exchange: Exchange) -> Response:
    return answer((await _read(exchange)).get("replication_clusters") or [exchange.broker.settings.cluster_name])


@call(router, "GET", NAMESPACE + "/properties", "adminNamespaceProperties")
async def properties(exchange: Exchange) -> Response:
    return answer((await _read(exchange)).get("properties") or {})


@call(router, "PUT", NAMESPACE + "/properties", "adminSetNamespaceProperties")
async def set_properties(exchange: Exchange) -> Response:
    """Properties that the body does not name stay."""
    given: dict[str, str] = await calls.body(exchange, dict[str, str])
    return await _update(
        exchange, "properties", lambda found: {**found, "properties": {**(found.get("properties") or {}), **given}}
    )


@call(router, "DELETE", NAMESPACE + "/properties", "adminClearNamespaceProperties")
async def clear_properties(exchange: Exchange) -> Response:
    return await _update(exchange, "properties", lambda found: {**found, "properties": {}})


@call(router, "GET", NAMESPACE + "/property/{key:form}", "adminNamespaceProperty")
async def get_property(exchange: Exchange) -> Response:
    return text(((await _read(exchange)).get("properties") or {}).get(param(exchange, "key"), ""))


@call(router, "PUT", NAMESPACE + "/property/{key:form}/{value:form}", "adminSetNamespaceProperty")
async def set_property(exchange: Exchange) -> Response:
    given = {param(exchange, "key"): param(exchange, "value")}
    return await _update(
        exchange, "properties", lambda found: {**found, "properties": {**(found.get("properties") or {}), **given}}
    )


@call(router, "DELETE", NAMESPACE + "/property/{key:form}", "adminRemoveNamespaceProperty")
async def remove_property(exchange: Exchange) -> Response:
    """The answer is the former value."""
    key, former = param(exchange, "key"), ""

    def mutate(found: records.Json) -> records.Json:
        nonlocal former
        before = dict(found.get("properties") or {})
        former = before.pop(key, "")
        return {**found, "properties": before}

    await _update(exchange, "properties", mutate)
    return text(former)


def _register(policy: Policy) -> None:
    name = policy.name[0].upper() + policy.name[1:]

    @call(router, "GET", f"{NAMESPACE}/{policy.name}", f"adminGet{name}")
    async def read(exchange: Exchange) -> Response:
        value = (await _read(exchange)).get(policy.member)
        if policy.by_cluster:
            value = (value or {}).get(exchange.broker.settings.cluster_name)
        value = policy.default if value is None else value
        return done() if value is None else answer(value)

    @call(router, policy.method, f"{NAMESPACE}/{policy.name}", f"adminSet{name}")
    async def write(exchange: Exchange) -> Response:
        if policy.name in _NULL_REMOVES and (await exchange.body()).strip() in (b"", b"null"):
            return await _change(exchange, policy, None)
        value = await calls.body(exchange, policy.type)
        check_value(policy, value)
        return await _change(exchange, policy, value)

    @call(router, "DELETE", f"{NAMESPACE}/{policy.name}", f"adminRemove{name}")
    async def remove(exchange: Exchange) -> Response:
        return await _change(exchange, policy, None)

    _calls: tuple[Call, ...] = (read, write, remove)


for _policy in _POLICIES:
    _register(_policy)


async def _tenant_info(exchange: Exchange) -> records.Json:
    """Return the TenantInfo in the body, with the cluster if it names none. Raises Refused (412) for other clusters."""
    found: _TenantBody = await calls.body(exchange, _TenantBody, missing=_TenantBody())
    clusters = [exchange.broker.settings.cluster_name]
    if unknown := sorted(set(found.allowedClusters or ()) - set(clusters)):
        raise Refused(412, f"Clusters do not exist: {', '.join(unknown)[:200]}")
    return records.new_tenant(admin_roles=found.adminRoles or [], allowed_clusters=clusters)


async def _change(exchange: Exchange, policy: Policy, value: Any) -> Response:
    """Set a policy; None removes it. Raises Refused (412) if it cannot have the value."""
    cluster = exchange.broker.settings.cluster_name

    def mutate(found: records.Json) -> records.Json:
        new = value
        if policy.by_cluster:
            others = {name: old for name, old in (found.get(policy.member) or {}).items() if name != cluster}
            new = others if value is None else {**others, cluster: value}
        left = {name: old for name, old in found.items() if name != policy.member}
        return left if new is None else {**left, policy.member: new}

    return await _update(exchange, policy.name, mutate)


async def _update(exchange: Exchange, name: str, mutate: Mutate) -> Response:
    """Change the policies. `name`: of the policy that is changed."""
    cluster = exchange.broker.settings.cluster_name

    def change(found: records.Json) -> records.Json:
        changed = mutate(found)
        check_level(set_in_namespace(changed, cluster=cluster), name, level="namespace")
        return changed

    try:
        await exchange.broker.policies.update_namespace(*namespace_of(exchange), change)
    except Corrupt as error:
        raise Refused(412, str(error)) from error
    return done()


async def _bundles(exchange: Exchange) -> records.Json:
    """Return how the namespace is divided now, also after splits."""
    return records.bundles_with(await exchange.broker.ownership.divisions.boundaries(*namespace_of(exchange)))


async def _read(exchange: Exchange) -> records.Json:
    return await exchange.broker.policies.read_namespace(_name(exchange, "tenant"), _name(exchange, "namespace"))


def namespace_of(exchange: Exchange) -> tuple[str, str]:
    """Return the tenant and the namespace in the path. Raises Refused (404) for names that nothing can have."""
    return _name(exchange, "tenant"), _name(exchange, "namespace")


def _name(exchange: Exchange, kind: str) -> str:
    """Return the name of a tenant or a namespace. Raises Refused (404) for one that nothing can have."""
    name = param(exchange, kind)
    if not name or "/" in name or "\0" in name:
        raise Refused(404, f"{kind.capitalize()} does not exist")
    return name


register_unsupported(router, NAMESPACE, "Namespace", policies)
