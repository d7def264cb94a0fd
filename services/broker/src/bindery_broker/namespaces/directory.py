"""Create, list and delete tenants and namespaces.

| change             | steps                                                                                   |
|--------------------|-----------------------------------------------------------------------------------------|
| create a tenant    | create /admin/policies/T                                                                |
| delete a tenant    | delete /admin/policies/T, which ZooKeeper refuses while there are namespaces below it   |
| create a namespace | create /admin/policies/T/N with its bundles; its tenant must exist                      |
| delete a namespace | set `deleted` in its policies, delete its topics, then the nodes that depend on it,     |
|                    | then /admin/policies/T/N. While `deleted` is set, no topic is created in the namespace, |
|                    | and the same request continues after a crash.                                           |

Topics whose names begin with `__` are those of Pulsar's brokers. They are deleted with the namespace and do not keep
it from being deleted.
Source: Pulsar's TenantsBase and NamespacesBase.
"""

import contextlib
import copy
from collections.abc import Awaitable, Callable
from typing import Final

from bindery_core.errors import (
    AlreadyExists,
    BadRequest,
    MetadataOutcomeUnknown,
    MetadataUnavailable,
    NoSuchNode,
    NoSuchTopic,
    NotEmpty,
    VersionConflict,
)
from bindery_kit.observability.logs import get_logger
from bindery_metadata.stores.store import MetadataStore
from bindery_pulsar import znode_layout
from bindery_pulsar.topic_name import NAME_SIZE_MAX, TopicName

from bindery_broker.errors import NamespaceDeleted, NamespaceNotEmpty, NoSuchTenant, TenantNotEmpty
from bindery_broker.namespaces import records
from bindery_broker.namespaces.names import Names
from bindery_broker.namespaces.policy_store import ATTEMPTS_MAX, TOPIC_POLICIES_ROOT, Mutate, PolicyStore
from bindery_broker.namespaces.records import Json

ROUNDS_MAX: Final = 5
"""Maximum number of times that a deletion lists the topics, because other brokers may still create some until they have
read that the namespace is being deleted."""
SHOWN_MAX: Final = 5
"""Maximum number of topics named in an error."""
_SYSTEM: Final = "__"

DeleteTopic = Callable[[TopicName], Awaitable[None]]
"""Delete a topic at its owner, also if it has consumers."""
log = get_logger(__name__)


class Directory:
    def __init__(self, store: MetadataStore, policies: PolicyStore, names: Names) -> None:
        self.on_stored: Callable[[str, Json | None], None] = _ignore
        """Called with the path of a tenant and its record after this directory has changed it, and with the path of a
        tenant or a namespace and None after it was deleted."""
        self._store = store
        self._names = names
        self._policies = policies

    # -- tenants -------------------------------------------------------------------------------------------------

    async def tenants(self) -> list[str]:
        """Return the names of all tenants, sorted."""
        return await self._children(znode_layout.POLICIES_ROOT)

    async def tenant(self, tenant: str) -> Json:
        """Return the TenantInfo. Raises NoSuchTenant, Corrupt."""
        path = znode_layout.tenant_policies(tenant)
        try:
            return records.decode((await self._store.get(path)).data, path=path)
        except NoSuchNode as error:
            raise NoSuchTenant.of(tenant) from error

    async def create_tenant(self, tenant: str, info: Json) -> bool:
        """Return whether this call created the tenant; an existing one is not changed."""
        check_name("tenant", tenant)
        return await self._create(znode_layout.tenant_policies(tenant), records.encode(info))

    async def update_tenant(self, tenant: str, mutate: Mutate) -> Json:
        """Change the TenantInfo by compare-and-set. Raises NoSuchTenant, Corrupt."""
        path = znode_layout.tenant_policies(tenant)
        for _ in range(ATTEMPTS_MAX):
            try:
                node = await self._store.get(path)
            except NoSuchNode as error:
                raise NoSuchTenant.of(tenant) from error
            before = records.decode(node.data, path=path)
            changed = mutate(copy.deepcopy(before))
            try:
                if changed != before:
                    await self._store.set(path, records.encode(changed), version=node.stat.version)
                self.on_stored(path, changed)
                return changed
            except (VersionConflict, NoSuchNode):
                continue
            except MetadataOutcomeUnknown:
                await self._store.sync(path)
        raise MetadataUnavailable("the tenant keeps changing", path=path, attempts=ATTEMPTS_MAX)

    async def delete_tenant(self, tenant: str) -> None:
        """Raises NoSuchTenant, TenantNotEmpty."""
        path = znode_layout.tenant_policies(tenant)
        try:
            await self._store.delete(path, version=None)
        except NoSuchNode as error:
            raise NoSuchTenant.of(tenant) from error
        except NotEmpty as error:
            namespaces = await self._children(path)
            raise TenantNotEmpty(
                "the tenant has namespaces; delete them first", tenant=tenant, namespaces=namespaces[:SHOWN_MAX]
            ) from error
        self.on_stored(path, None)  # its administrators are none of a new tenant of this name

    # -- namespaces ----------------------------------------------------------------------------------------------

    async def namespaces(self, tenant: str) -> list[str]:
        """Return the names of the tenant's namespaces without the tenant, sorted. Raises NoSuchTenant."""
        try:
            return await self._store.children(znode_layout.tenant_policies(tenant))
        except NoSuchNode as error:
            raise NoSuchTenant.of(tenant) from error

    async def create_namespace(self, tenant: str, namespace: str, policies: Json | None = None) -> bool:
        """Return whether this call created the namespace; an existing one is not changed.

        `policies`: Policies JSON; None: a namespace that sets none. Raises NoSuchTenant; BadRequest for a name, or for
        bundles that do not divide all topics; NamespaceDeleted while the namespace is being deleted.
        """
        check_name("tenant", tenant)
        check_name("namespace", namespace)
        record = {**records.new_namespace(cluster=self._policies.cluster), **(policies or {})}
        record["bundles"] = records.bundles_data(record["bundles"])
        if await self._store.exists(znode_layout.tenant_policies(tenant)) is None:
            raise NoSuchTenant.of(tenant)
        path = znode_layout.namespace_policies(tenant=tenant, namespace=namespace)
        if await self._create(path, records.encode(record)):
            log.info("namespace_created", namespace=f"{tenant}/{namespace}")
            return True
        if records.is_deleted(await self._policies.read_namespace(tenant, namespace)):
            raise NamespaceDeleted(
                "the namespace is being deleted; repeat its deletion, then create it", namespace=f"{tenant}/{namespace}"
            )
        return False

    async def delete_namespace(
        self, tenant: str, namespace: str, *, force: bool, delete_topic: DeleteTopic
    ) -> list[TopicName]:
        """Delete a namespace, and with `force` also its topics. Return the topics that were deleted.

        Can be repeated after any failure. Raises NoSuchNamespace; NamespaceNotEmpty if it has topics, unless `force`;
        the errors of `delete_topic`, after which the namespace stays marked as deleted.
        """
        was_marked = records.is_deleted(await self._policies.read_namespace(tenant, namespace))
        if not force and not was_marked:
            await self._check_empty(tenant, namespace)
        await self._policies.update_namespace(tenant, namespace, lambda record: {**record, "deleted": True})
        if not force:
            try:
                await self._check_empty(tenant, namespace)
            except NamespaceNotEmpty:
                if not was_marked:
                    await self._policies.update_namespace(
                        tenant, namespace, lambda record: {**record, "deleted": False}
                    )
                raise
        deleted: list[TopicName] = []
        for _ in range(ROUNDS_MAX):
            names = await self.topics(tenant, namespace)
            if not names:
                break
            for name in names:
                with contextlib.suppress(NoSuchTopic):
                    await delete_topic(name)
                    deleted.append(name)
        await self._delete_dependents(tenant, namespace)
        path = znode_layout.namespace_policies(tenant=tenant, namespace=namespace)
        await self._delete(path)
        self.on_stored(path, None)
        log.info("namespace_deleted", namespace=f"{tenant}/{namespace}", topics=len(deleted))
        return deleted

    async def topics(self, tenant: str, namespace: str) -> list[TopicName]:
        """Return the topics of a namespace, system topics included, sorted."""
        names = await self._names.local_names(tenant, namespace)
        return [TopicName.of(tenant=tenant, namespace=namespace, local=local) for local in names]

    async def _check_empty(self, tenant: str, namespace: str) -> None:
        topics = [name for name in await self.topics(tenant, namespace) if not name.local.startswith(_SYSTEM)]
        if topics:
            raise NamespaceNotEmpty(
                "the namespace has topics; delete them first, or pass force=true to delete them with it",
                namespace=f"{tenant}/{namespace}",
                count=len(topics),
                topics=[name.local for name in topics[:SHOWN_MAX]],
            )

    async def _delete_dependents(self, tenant: str, namespace: str) -> None:
        """Delete what only this namespace uses. Raises NotEmpty if topics were created again."""
        partitioned = f"{znode_layout.PARTITIONED_TOPICS_ROOT}/{tenant}/{namespace}"
        trees = [f"{partitioned}/persistent", f"{partitioned}/non-persistent", partitioned]
        trees.append(f"{TOPIC_POLICIES_ROOT}/{tenant}/{namespace}")
        for parent in trees:
            for child in await self._children(parent):
                await self._delete(f"{parent}/{child}")
            await self._delete(parent)
        await self._delete(znode_layout.local_policies(tenant=tenant, namespace=namespace))
        ledgers = znode_layout.managed_ledgers(tenant=tenant, namespace=namespace)
        await self._delete(ledgers)
        await self._delete(f"{znode_layout.MANAGED_LEDGERS_ROOT}/{tenant}/{namespace}")

    async def _delete(self, path: str) -> None:
        with contextlib.suppress(NoSuchNode):
            await self._store.delete(path, version=None)

    async def _children(self, path: str) -> list[str]:
        try:
            return await self._store.children(path)
        except NoSuchNode:
            return []

    async def _create(self, path: str, data: bytes) -> bool:
        for _ in range(ATTEMPTS_MAX):
            try:
                await self._store.create(path, data, make_parents=True)
                return True
            except AlreadyExists:
                return False
            except MetadataOutcomeUnknown:
                await self._store.sync(path)
        raise MetadataUnavailable("the responses to a creation were lost", path=path, attempts=ATTEMPTS_MAX)


def _ignore(_path: str, _record: Json | None) -> None:
    pass


def check_name(kind: str, name: str) -> None:
    """Raise BadRequest if `name` cannot be that of a tenant or a namespace. `kind`: which of them."""
    if kind == "tenant":
        znode_layout.tenant_policies(name)
    else:
        znode_layout.namespace_policies(tenant="t", namespace=name)
    if len(name) > NAME_SIZE_MAX:
        raise BadRequest(f"the {kind} name is too long", size=len(name), size_max=NAME_SIZE_MAX)
