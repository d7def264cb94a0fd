"""Encode and decode the JSON records of tenants and namespaces. Pure.

| record      | members that Bindery reads                                             |
|-------------|------------------------------------------------------------------------|
| TenantInfo  | adminRoles, allowedClusters                                            |
| Policies    | bundles, deleted, replication_clusters; the policies of `policy_codec` |

A record stays the mapping that was decoded, so that a change keeps every member that Bindery does not know.
Source: Pulsar's TenantInfo, Policies and BundlesData.
"""

import json
from collections.abc import Sequence
from typing import Any, Final

from bindery_core.errors import BadRequest, Corrupt
from bindery_metadata.cluster import BUNDLE_BOUNDARIES
from bindery_metadata.stores.json_node import SIZE_MAX

Json = dict[str, Any]

BUNDLES: Final = len(BUNDLE_BOUNDARIES) - 1
"""Number of bundles of a namespace, the only one that is supported."""


def encode(record: Json) -> bytes:
    return json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode()


def decode(data: bytes, *, path: str) -> Json:
    """Return the record in a znode. An empty node is an empty record. Raises Corrupt."""
    if len(data) > SIZE_MAX:
        raise Corrupt("the node is too large", path=path, size=len(data), size_max=SIZE_MAX)
    try:
        record = json.loads(data) if data else {}
    except (ValueError, RecursionError) as error:
        raise Corrupt("the node cannot be read", path=path, reason=str(error)[:200]) from error
    if not isinstance(record, dict):
        raise Corrupt("the node cannot be read", path=path, reason="not a JSON object")
    return record


def new_tenant(*, admin_roles: Sequence[str], allowed_clusters: Sequence[str]) -> Json:
    """Return a TenantInfo."""
    return {"adminRoles": sorted(admin_roles), "allowedClusters": sorted(allowed_clusters)}


def new_namespace(*, cluster: str) -> Json:
    """Return the Policies of a namespace that sets none: its bundles, and the cluster that serves it."""
    return {
        "replication_clusters": [cluster],
        "bundles": {"boundaries": list(BUNDLE_BOUNDARIES), "numBundles": BUNDLES},
    }


def is_deleted(policies: Json) -> bool:
    """Return whether the deletion of the namespace has begun: nothing new is created in it."""
    return policies.get("deleted") is True


def check_bundles(policies: Json) -> None:
    """Raise BadRequest if the namespace is divided in another way than into BUNDLES equal ranges.

    Two brokers that divide a namespace differently would both serve the same topic. Absent bundles stand for BUNDLES.
    """
    bundles = policies.get("bundles")
    if bundles is None:
        return
    count = bundles.get("numBundles") if isinstance(bundles, dict) else None
    boundaries = bundles.get("boundaries") if isinstance(bundles, dict) else None
    if count != BUNDLES or (boundaries and tuple(boundaries) != BUNDLE_BOUNDARIES):
        raise BadRequest(
            f"a namespace has {BUNDLES} equal bundles; other numbers and boundaries are not supported yet",
            field="bundles",
            bundles=count,
        )
