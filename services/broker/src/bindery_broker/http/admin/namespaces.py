"""Calls on tenants and namespaces, and on the policies of a namespace.

Tenants and namespaces are created, changed and deleted by the directory of the broker, as over `/v1`. A policy is read
(GET), set (POST or PUT) and removed (DELETE). The calls of all policies are made from one table: the last part of the
path, the member of Pulsar's Policies, the method that sets it, and the type of its JSON. The codec of policies checks
the values. A policy that is not set is answered with 204 without a body, as Pulsar does.
Source: Pulsar TenantsBase, Namespaces, Policies.
"""

from typing import Any, Final, NamedTuple

import msgspec
from bindery_core.errors import BadRequest, Corrupt
from fastapi import APIRouter
from starlette.responses import Response

from bindery_broker.errors import NamespaceNotEmpty, NoSuchNamespace, NoSuchTenant, TenantNotEmpty
from bindery_broker.http.admin import calls
from bindery_broker.http.admin.calls import ROOT, Call, Refused, answer, call, done, flag, param
from bindery_broker.http.exchange import Exchange
from bindery_broker.namespaces import records
from bindery_broker.namespaces.policy_codec import set_in_namespace

router: Final = APIRouter()
TENANT: Final = ROOT + "/tenants/{tenant:form}"
NAMESPACE: Final = ROOT + "/namespaces/{tenant:form}/{namespace:form}"


class _TenantBody(msgspec.Struct):
    adminRoles: list[str] | None = None
    allowedClusters: list[str] | None = None


class _Policy(NamedTuple):
    name: str
    """Last part of the path."""
    member: str
    """Member of Pulsar's Policies."""
    type: Any
    """Type of its JSON."""
    method: str = "POST"
    """Method that sets it."""
    default: Any = None
    """What is answered if it is not set; None: nothing."""


_POLICIES: Final = (
    _Policy("retention", "retention_policies", dict[str, Any]),
    _Policy("messageTTL", "message_ttl_in_seconds", int),
    _Policy("deduplication", "deduplicationEnabled", bool),
    _Policy("persistence", "persistence", dict[str, Any]),
    _Policy("autoTopicCreation", "autoTopicCreationOverride", dict[str, Any]),
    _Policy("autoSubscriptionCreation", "autoSubscriptionCreationOverride", dict[str, Any]),
    _Policy("delayedDelivery", "delayed_delivery_policies", dict[str, Any]),
    _Policy("inactiveTopicPolicies", "inactive_topic_policies", dict[str, Any]),
    _Policy("subscriptionExpirationTime", "subscription_expiration_time_minutes", int),
    _Policy("maxProducersPerTopic", "max_producers_per_topic", int),
    _Policy("maxConsumersPerTopic", "max_consumers_per_topic", int),
    _Policy("maxConsumersPerSubscription", "max_consumers_per_subscription", int),
    _Policy("maxSubscriptionsPerTopic", "max_subscriptions_per_topic", int),
    _Policy("maxTopicsPerNamespace", "max_topics_per_namespace", int),
    _Policy("maxUnackedMessagesPerConsumer", "max_unacked_messages_per_consumer", int),
    _Policy("maxUnackedMessagesPerSubscription", "max_unacked_messages_per_subscription", int),
    _Policy("compactionThreshold", "compaction_threshold", int, "PUT"),
    _Policy("schemaCompatibilityStrategy", "schema_compatibility_strategy", str, "PUT", "UNDEFINED"),
    _Policy("schemaValidationEnforced", "schema_validation_enforced", bool, default=False),
    _Policy("isAllowAutoUpdateSchema", "is_allow_auto_update_schema", bool, default=True),
)


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
    """The body has Policies, or is empty. Other numbers of bundles than four are refused."""
    space = (_name(exchange, "tenant"), _name(exchange, "namespace"))
    policies: dict[str, Any] = await calls.body(exchange, dict[str, Any], missing={})
    records.check_bundles(policies)
    given = {member: value for member, value in policies.items() if value not in (None, {}, []) and member != "bundles"}
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
    return answer(await _read(exchange))


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
    found = await _read(exchange)
    return answer(found.get("bundles") or records.new_namespace(cluster="")["bundles"])


def _register(policy: _Policy) -> None:
    name = policy.name[0].upper() + policy.name[1:]

    @call(router, "GET", f"{NAMESPACE}/{policy.name}", f"adminGet{name}")
    async def read(exchange: Exchange) -> Response:
        value = (await _read(exchange)).get(policy.member, policy.default)
        return done() if value is None else answer(value)

    @call(router, policy.method, f"{NAMESPACE}/{policy.name}", f"adminSet{name}")
    async def write(exchange: Exchange) -> Response:
        return await _change(exchange, policy.member, await calls.body(exchange, policy.type))

    @call(router, "DELETE", f"{NAMESPACE}/{policy.name}", f"adminRemove{name}")
    async def remove(exchange: Exchange) -> Response:
        return await _change(exchange, policy.member, None)

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


async def _change(exchange: Exchange, member: str, value: Any) -> Response:
    """Set a member of the policies; None removes it. Raises Refused (412) if it cannot have the value."""

    def mutate(found: records.Json) -> records.Json:
        return {name: old for name, old in found.items() if name != member} | ({} if value is None else {member: value})

    space = (_name(exchange, "tenant"), _name(exchange, "namespace"))
    try:
        await exchange.broker.policies.update_namespace(*space, mutate)
    except Corrupt as error:
        raise Refused(412, str(error)) from error
    return done()


async def _read(exchange: Exchange) -> records.Json:
    return await exchange.broker.policies.read_namespace(_name(exchange, "tenant"), _name(exchange, "namespace"))


def _name(exchange: Exchange, kind: str) -> str:
    """Return the name of a tenant or a namespace. Raises Refused (404) for one that nothing can have."""
    name = param(exchange, kind)
    if not name or "/" in name or "\0" in name:
        raise Refused(404, f"{kind.capitalize()} does not exist")
    return name
