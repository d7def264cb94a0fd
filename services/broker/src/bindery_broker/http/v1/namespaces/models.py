"""Paths, bodies and answers of the operations on tenants, namespaces, policies and permissions."""

from typing import Annotated, Any, Final, Literal

from fastapi import Path
from pydantic import Field

from bindery_broker.http.v1 import models, paths
from bindery_broker.namespaces.permissions import ACTIONS, ROLE_SIZE_MAX
from bindery_broker.namespaces.records import BUNDLES_MAX

TENANTS: Final = "/v1/tenants"
TENANT: Final = TENANTS + "/{tenant:segment}"
NAMESPACES: Final = "/v1/namespaces"
OF_TENANT: Final = NAMESPACES + "/{tenant:segment}"
NAMESPACE: Final = OF_TENANT + "/{namespace:segment}"
POLICIES: Final = NAMESPACE + "/policies"
POLICY: Final = POLICIES + "/{policy:segment}"
TOPIC_POLICIES: Final = "/v1/topics/{tenant:segment}/{namespace:segment}/{local:segment}/policies"
"""`local`, not `topic`: the request is not passed on to the owner of the topic."""
TOPIC_POLICY: Final = TOPIC_POLICIES + "/{policy:segment}"
NAMESPACE_PERMISSIONS: Final = NAMESPACE + "/permissions"
NAMESPACE_PERMISSION: Final = NAMESPACE_PERMISSIONS + "/{role:segment}"
TOPIC_PERMISSIONS: Final = "/v1/topics/{tenant:segment}/{namespace:segment}/{local:segment}/permissions"
"""`local`, as for the policies: permissions belong to no owner."""
TOPIC_PERMISSION: Final = TOPIC_PERMISSIONS + "/{role:segment}"
ERRORS: Final = (404, 409, 504)

Tenant = paths.Tenant
Namespace = paths.Namespace
LocalName = Annotated[str, Path(description="The topic's local name, percent-encoded; without a partition suffix.")]
PolicyName = Annotated[str, Path(description="Name of a policy, for example `message_ttl_s`.", max_length=64)]
Role = Annotated[str, Path(description="Name of a role, percent-encoded.", min_length=1, max_length=ROLE_SIZE_MAX)]
Name = Annotated[str, Field(min_length=1, max_length=128)]
Policies = dict[str, Any]


class NoQuery(models.Query):
    """No parameters."""


class ListQuery(models.Query):
    after: Annotated[str, Field(max_length=257)] | None = None
    """Continue after this name, or after the `next` of the last page."""
    max: Annotated[int, Field(ge=1, le=10_000)] = 1_000


class DeleteNamespaceQuery(models.Query):
    force: bool = False
    """Also delete the topics of the namespace, with their messages and consumers."""


class PutPoliciesQuery(models.Query):
    mode: Literal["merge", "replace"] = "merge"
    """`merge`: change the policies in the body only. `replace`: also remove all others from this level."""


class TopicPoliciesQuery(models.Query):
    effective: bool = False
    """Show every policy in force with its source, not only those that the topic sets."""


class TenantBody(models.Body):
    admin_roles: Annotated[list[Name], Field(max_length=1_000)] | None = None
    """Roles that may manage the tenant. Absent: as before; for a new tenant, none."""
    allowed_clusters: Annotated[list[Name], Field(max_length=1_000)] | None = None
    """Clusters that may serve the tenant. Absent: as before; for a new tenant, this cluster."""


class NamespaceBody(models.Body):
    policies: Policies | None = None
    """Policies of a new namespace. An existing one is not changed."""
    bundles: Annotated[int, Field(ge=1, le=BUNDLES_MAX)] | None = None
    """Number of bundles of a new namespace; 4 by default. Its topics can be divided among that many brokers."""


class TenantList(models.Answer):
    tenants: list[str]
    next: str | None = None
    """Value of `after` for the next page; absent on the last one."""


class TenantAnswer(models.Answer):
    tenant: str
    admin_roles: list[str]
    allowed_clusters: list[str]


class NamespaceList(models.Answer):
    namespaces: list[str]
    """`tenant/namespace`, sorted."""
    next: str | None = None
    """Value of `after` for the next page; absent on the last one."""


class NamespaceAnswer(models.Answer):
    namespace: str
    policies: Policies
    """Policies that the namespace sets."""
    bundles: int
    topics: int
    """Number of topics; each partition counts."""
    deleted: bool
    """Whether the namespace is being deleted."""


class NamespaceCreated(models.Answer):
    namespace: str
    created: bool
    """Whether the request created the namespace; if not, it existed before and is not changed."""


class NamespaceGone(models.Answer):
    deleted: str
    topics: list[str]
    """Topics that were deleted with it."""


class PoliciesAnswer(models.Answer):
    policies: Policies
    """Policies that this level sets. `"none"`: explicitly no limit."""


class EffectivePolicy(models.Answer):
    value: Any
    """null: no limit, or off."""
    source: Literal["topic", "namespace", "broker"]


class EffectiveAnswer(models.Answer):
    topic: str
    effective: dict[str, EffectivePolicy]


class ActionsBody(models.Body):
    actions: Annotated[list[Name], Field(min_length=1, max_length=len(ACTIONS))]
    """What the role may do: `produce`, `consume`; `functions`, `sources`, `sinks` and `packages` are stored for
    Pulsar's brokers. They replace those that the role has at this level."""


class Permission(models.Answer):
    role: str
    actions: list[str]
    """What the role may do now at this level; empty: nothing."""


class NamespacePermissions(models.Answer):
    namespace: str
    permissions: dict[str, list[str]]
    """Actions by role."""
    topics: dict[str, dict[str, list[str]]]
    """Actions by topic and role, for topics with permissions of their own; each partition is a topic."""
    subscriptions: dict[str, list[str]]
    """Roles by subscription, for subscriptions that only these roles may use."""


class TopicPermissions(models.Answer):
    topic: str
    permissions: dict[str, list[str]]
    """Actions by role that the topic grants."""
    namespace: dict[str, list[str]]
    """Actions by role that the namespace grants, in this topic as well."""


class ExplainQuery(models.Query):
    topic: Annotated[str, Field(min_length=1, max_length=1_024)]
    """The topic, as `tenant/namespace/name`."""
    action: Literal["produce", "consume"]
    role: Annotated[str, Field(min_length=1, max_length=ROLE_SIZE_MAX)] | None = None
    """The role; left out: that of the request."""
    subscription: Annotated[str, Field(min_length=1, max_length=1_024)] | None = None
    """The subscription, if only some roles may use it."""


class Explained(models.Answer):
    role: str | None
    """null: the request has no role, and authorization is off."""
    action: str
    topic: str
    enabled: bool
    """Whether the brokers check roles."""
    allowed: bool
    reason: str
    allowed_if_enabled: bool | None = None
    """While authorization is off: whether the permissions that are stored allow it. The members below say why."""
    rule: str | None = None
    """Rule that decided: `super_user`, `tenant_admin`, `namespace`, `topic`, `partitioned_topic`, `subscription_roles`,
    `subscription_prefix` or `no_permission`."""
    policy: str | None = None
    """Member of the stored record that decided."""
    path: str | None = None
    """Path of the record in ZooKeeper."""
    fix: str | None = None
    """Command that an administrator of the tenant can run to allow it."""
