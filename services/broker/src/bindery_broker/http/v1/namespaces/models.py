"""Paths, bodies and answers of the operations on tenants, namespaces and policies."""

from typing import Annotated, Any, Final, Literal

from fastapi import Path
from pydantic import Field

from bindery_broker.http.v1 import models, paths

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
ERRORS: Final = (404, 409, 504)

Tenant = paths.Tenant
Namespace = paths.Namespace
LocalName = Annotated[str, Path(description="The topic's local name, percent-encoded; without a partition suffix.")]
PolicyName = Annotated[str, Path(description="Name of a policy, for example `message_ttl_s`.", max_length=64)]
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
    bundles: int | None = None
    """Number of bundles. Only 4, the default, is supported."""


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
