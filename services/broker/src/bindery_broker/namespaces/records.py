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

HASH_MAX: Final = 2**32 - 1
"""Largest hash of a topic, and last boundary."""
BUNDLES_DEFAULT: Final = len(BUNDLE_BOUNDARIES) - 1
"""Number of bundles of a namespace that sets none. Source: Pulsar's defaultNumberOfNamespaceBundles."""
BUNDLES_MAX: Final = 1024
"""Maximum number of bundles with which a namespace is created, or that it has after a split. An unload or a list of a
namespace makes a request for each. Pulsar takes up to 2^32, and splits by itself up to 128."""


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
    return {"replication_clusters": [cluster], "bundles": bundles_data(None)}


def is_deleted(policies: Json) -> bool:
    """Return whether the deletion of the namespace has begun: nothing new is created in it."""
    return policies.get("deleted") is True


def bundles_data(given: Any) -> Json:
    """Return BundlesData with the boundaries of a new namespace. `given`: BundlesData; None: BUNDLES_DEFAULT bundles.

    Boundaries are sorted, and repeated ones are left out; without them, `numBundles` equal ranges are meant, or the
    default if it is not positive. Raises BadRequest for more than BUNDLES_MAX bundles, and for boundaries that do not
    divide all hashes. Source: Pulsar NamespacesBase.validateBundlesData, PoliciesUtil.getBundles.
    """
    if given is None:
        return _data(_equal(BUNDLES_DEFAULT))
    count = given.get("numBundles", 0) if isinstance(given, dict) else None
    texts = (given.get("boundaries") or []) if isinstance(given, dict) else None
    if not isinstance(count, int) or isinstance(count, bool) or not isinstance(texts, list):
        raise BadRequest("bundles must have a number `numBundles` and a list `boundaries`", field="bundles")
    if count <= 0 or not texts:
        count = count if count > 0 else BUNDLES_DEFAULT
        _check_count(count)
        return _data(_equal(count))
    try:
        found = sorted({int(text, 16 if text.lower().startswith("0x") else 10) for text in texts})
    except (AttributeError, ValueError):
        raise BadRequest("boundaries must be numbers such as 0x40000000", field="bundles") from None
    _check_count(len(found) - 1)
    if found[0] != 0 or found[-1] != HASH_MAX or len(found) < 2:
        raise BadRequest(
            f"Input bundles do not cover the whole hash range. first:{_boundary(found[0])}, last:{_boundary(found[-1])}"
        )
    return _data(found)


def bundles_with(boundaries: Sequence[int]) -> Json:
    """Return BundlesData with these boundaries."""
    return _data(boundaries)


def _check_count(count: int) -> None:
    if count > BUNDLES_MAX:
        raise BadRequest(f"a namespace has at most {BUNDLES_MAX} bundles", field="bundles", bundles=count)


def _equal(count: int) -> list[int]:
    """Return the boundaries of `count` equal ranges; the last one is longer if the hashes cannot be divided equally."""
    size = (HASH_MAX + 1) // count
    return [*(index * size for index in range(count)), HASH_MAX]


def _data(boundaries: Sequence[int]) -> Json:
    return {"boundaries": [_boundary(one) for one in boundaries], "numBundles": len(boundaries) - 1}


def _boundary(value: int) -> str:
    return f"0x{value:08x}"
