"""Initialize a cluster, and report whether it is initialized.

| created                                 | data                                           |
|-----------------------------------------|------------------------------------------------|
| root, `available`, `available/readonly` | empty; in one transaction with INSTANCEID if   |
|                                         | the root does not exist                        |
| `INSTANCEID`                            | a random UUID                                  |
| `LAYOUT`                                | LAYOUT_TEXT                                    |
| `/managed-ledgers`, `/namespace`        | empty                                          |
| `/admin/clusters/<name>`                | ClusterData JSON without addresses: what a     |
|                                         | Pulsar broker needs to load topics beside ours |
| `/admin/policies/public`                | TenantInfo JSON                                |
| `/admin/policies/public/default`        | Policies JSON with four bundles                |

Under the root, only the nodes of BookKeeper's `initnewcluster` are created: `cookies`, `idgen` and `underreplication`
are created at their first use. Existing nodes are kept. An existing LAYOUT that differs from LAYOUT_TEXT is an error.
"""

import json
import uuid
from dataclasses import dataclass
from typing import Final

from bindery_core.errors import AlreadyExists, BadVersion, MetadataOutcomeUnknown, MetadataUnavailable, NoSuchNode
from bindery_core.sources import RandomBits
from bindery_pulsar import znode_layout

from bindery_metadata.bookies.cookies import CookieStore
from bindery_metadata.layout.layout import LAYOUT_TEXT, READONLY, LedgersLayout
from bindery_metadata.layout.znode_path import parent_of
from bindery_metadata.stores.parents import make_path
from bindery_metadata.stores.store import Create, MetadataStore

CLUSTER_NAME_DEFAULT: Final = "bindery"
"""Name of the Pulsar cluster in the policies of the default tenant and namespace."""
TENANT: Final = "public"
"""Name of the default tenant."""
NAMESPACE: Final = "default"
"""Name of the default namespace."""
BUNDLE_BOUNDARIES: Final = ("0x00000000", "0x40000000", "0x80000000", "0xc0000000", "0xffffffff")
"""Boundaries of the default namespace's bundles: ranges of 32-bit topic name hashes, ascending."""
ATTEMPTS_MAX: Final = 5
"""Maximum number of attempts to create one node if responses are lost."""


@dataclass(frozen=True, slots=True)
class ClusterInit:
    instance_id: str
    created: tuple[str, ...]
    """Paths created by this call."""
    found: tuple[str, ...]
    """Paths that existed already."""


@dataclass(frozen=True, slots=True)
class ClusterStatus:
    initialized: bool
    instance_id: str | None
    writable: tuple[str, ...]
    read_only: tuple[str, ...]
    known: tuple[str, ...]
    """Bookies with a cookie."""


async def initialize_cluster(
    store: MetadataStore,
    layout: LedgersLayout,
    *,
    randomness: RandomBits,
    cluster_name: str = CLUSTER_NAME_DEFAULT,
) -> ClusterInit:
    """Create the missing nodes of a cluster. Repeated or concurrent calls are harmless.

    Raises BadVersion if the existing LAYOUT is not supported; MetadataUnavailable.
    """
    instance_id = str(uuid.UUID(int=randomness.getrandbits(128), version=4))
    ledger_nodes = (
        Create(layout.root),
        Create(layout.available),
        Create(layout.available_readonly),
        Create(layout.instance_id, instance_id.encode("ascii")),
    )
    created, found = await _create_ledger_tree(store, layout, ledger_nodes)
    for node in (Create(layout.layout, LAYOUT_TEXT), *_pulsar_nodes(cluster_name)):
        (created if await _create_missing(store, node) else found).append(node.path)
    await _check_layout(store, layout)
    return ClusterInit(await CookieStore(store, layout).instance_id(), tuple(created), tuple(found))


async def record_cluster(store: MetadataStore, name: str) -> bool:
    """Create the record of a Pulsar cluster, as `initialize_cluster` does, if it is missing. Returns whether it was.

    Clusters that older versions initialized lack it. Raises BadRequest for an invalid name; MetadataUnavailable.
    """
    return await _create_missing(store, _cluster_node(name))


async def cluster_status(store: MetadataStore, layout: LedgersLayout) -> ClusterStatus:
    """Return the current state. Raises MetadataUnavailable; a cluster that is not initialized is not an error."""
    cookies = CookieStore(store, layout)
    try:
        instance_id = await cookies.instance_id()
        writable = tuple(name for name in await store.children(layout.available) if name != READONLY)
        read_only = tuple(await store.children(layout.available_readonly))
    except NoSuchNode:
        return ClusterStatus(False, None, (), (), ())
    initialized = await store.exists(layout.layout) is not None
    return ClusterStatus(initialized, instance_id, writable, read_only, tuple(await cookies.bookies()))


async def _create_ledger_tree(
    store: MetadataStore, layout: LedgersLayout, nodes: tuple[Create, ...]
) -> tuple[list[str], list[str]]:
    """Create the nodes and return the paths of (created, found) nodes.

    If the root does not exist, one transaction creates all nodes, so that no client sees a partial cluster. Otherwise
    the missing nodes are created one by one.
    """
    parent = parent_of(layout.root)
    if parent != "/":
        await make_path(store, parent)
    if await store.exists(layout.root) is None:
        try:
            await store.multi(nodes)
            return [node.path for node in nodes], []
        except (AlreadyExists, MetadataOutcomeUnknown):
            await store.sync(layout.root)  # another client was faster, or the lost response was ours: read again
    created: list[str] = []
    found: list[str] = []
    for node in nodes:
        (created if await _create_missing(store, node) else found).append(node.path)
    return created, found


async def _create_missing(store: MetadataStore, node: Create) -> bool:
    """Return whether this call created the node."""
    for _ in range(ATTEMPTS_MAX):
        try:
            await store.create(node.path, node.data, make_parents=True)
            return True
        except AlreadyExists:
            return False
        except MetadataOutcomeUnknown:
            await store.sync(node.path)
    raise MetadataUnavailable("the responses to a creation were lost", path=node.path, attempts=ATTEMPTS_MAX)


async def _check_layout(store: MetadataStore, layout: LedgersLayout) -> None:
    found = (await store.get(layout.layout)).data
    if found != LAYOUT_TEXT:
        raise BadVersion("the ledgers root has a different layout", path=layout.layout, layout=found[:200])


def _cluster_node(name: str) -> Create:
    """Return the record of a cluster. The addresses of Bindery's brokers are in their registrations."""
    record = {"serviceUrl": "", "brokerServiceUrl": ""}
    return Create(znode_layout.cluster(name), json.dumps(record).encode())


def _pulsar_nodes(cluster_name: str) -> tuple[Create, ...]:
    tenant = {"adminRoles": [], "allowedClusters": [cluster_name]}
    policies = {
        "replication_clusters": [cluster_name],
        "bundles": {"boundaries": list(BUNDLE_BOUNDARIES), "numBundles": len(BUNDLE_BOUNDARIES) - 1},
    }
    return (
        Create(znode_layout.MANAGED_LEDGERS_ROOT),
        Create(znode_layout.NAMESPACE_ROOT),
        _cluster_node(cluster_name),
        Create(znode_layout.tenant_policies(TENANT), json.dumps(tenant).encode()),
        Create(znode_layout.namespace_policies(tenant=TENANT, namespace=NAMESPACE), json.dumps(policies).encode()),
    )
