"""Znode paths of Pulsar's trees that a broker uses.

T, N: tenant and namespace; <enc>: URL form encoding of a topic's local name, or of a subscription's name; owner: the
broker that owns the topic's bundle; set(v), delete(v): a write or deletion at the version that was read.

| key                                   | value             | written by, how          | removed by, how            |
|---------------------------------------|-------------------|--------------------------|----------------------------|
| /managed-ledgers/T/N/persistent/<enc> | ManagedLedgerInfo | owner: create, set(v)    | owner: delete(v)           |
| <its topic's node>/<enc>              | ManagedCursorInfo | owner: create, set(v)    | owner: delete(v)           |
| /namespace/T/N/0xAAAAAAAA_0xBBBBBBBB  | owner, JSON       | owner: ephemeral         | session end; delete(v)     |
| /loadbalance/brokers/<host:port>      | broker, JSON      | broker: ephemeral        | session end; delete(v)     |
| /loadbalance/leader                   | leader, JSON      | leader: ephemeral        | session end; delete(v)     |
| /admin/clusters/<c>                   | ClusterData JSON  | broker: create;          | operator: delete(v)        |
|                                       |                   | operator: create, set(v) |                            |
| /admin/policies/T                     | TenantInfo JSON   | operator: create, set(v) | operator: delete(v)        |
| /admin/policies/T/N                   | Policies JSON     | operator: create, set(v) | operator: delete(v)        |
| /admin/local-policies/T/N             | LocalPolicies     | operator: create, set(v) | operator: delete(v)        |
| /admin/partitioned-topics/.../<enc>   | {"partitions":n}  | operator: create, set(v) | operator: delete(v)        |
| /counters/producer-name               | (its version)     | broker: set(any)         | never                      |
| /bookies                              | racks, JSON       | bookie, operator: create,| never                      |
|                                       |                   | set(v)                   |                            |

The managed ledger's node exists exactly while the topic does.
The encoding is that of HTML forms: UTF-8, in which letters, digits, `.`, `-`, `*` and `_` are unchanged, a space is
`+`, and all other bytes are percent-encoded.
Source: Pulsar 4.x, broker resources and ZooKeeper layout.
"""

import re
from typing import Final
from urllib.parse import quote_plus, unquote_plus

from bindery_core.errors import BadRequest

MANAGED_LEDGERS_ROOT: Final = "/managed-ledgers"
NAMESPACE_ROOT: Final = "/namespace"
POLICIES_ROOT: Final = "/admin/policies"
LOCAL_POLICIES_ROOT: Final = "/admin/local-policies"
CLUSTERS_ROOT: Final = "/admin/clusters"
PARTITIONED_TOPICS_ROOT: Final = "/admin/partitioned-topics"
BROKERS_ROOT: Final = "/loadbalance/brokers"
LEADER: Final = "/loadbalance/leader"
PRODUCER_NAME_COUNTER: Final = "/counters/producer-name"
RACKS: Final = "/bookies"
"""Node with the racks of bookies (`bindery_metadata.bookies.racks`)."""

_NAME = re.compile(r"[-=:.\w]+", re.ASCII)


def encode_name(name: str) -> str:
    """Encode a local topic name or a subscription name as one part of a path.

    Raises BadRequest if the name is empty, `.` or `..`, or cannot be encoded as UTF-8.
    """
    if not name or name in (".", ".."):
        raise BadRequest("not a name that a path can hold", name=name)
    try:
        return quote_plus(name, safe="*").replace("~", "%7E")
    except UnicodeEncodeError as error:
        raise BadRequest("the name contains an incomplete character", name=ascii(name)) from error


def decode_name(part: str) -> str:
    """Return the name that `encode_name` encoded. Raises UnicodeDecodeError if it is not UTF-8."""
    return unquote_plus(part, errors="strict")


def _checked(kind: str, name: str) -> str:
    if not _NAME.fullmatch(name) or name in (".", ".."):
        raise BadRequest(f"not a {kind} name", name=name)
    return name


def cluster(name: str) -> str:
    return f"{CLUSTERS_ROOT}/{_checked('cluster', name)}"


def tenant_policies(tenant: str) -> str:
    return f"{POLICIES_ROOT}/{_checked('tenant', tenant)}"


def _namespace_part(tenant: str, namespace: str) -> str:
    return f"{_checked('tenant', tenant)}/{_checked('namespace', namespace)}"


def namespace_policies(*, tenant: str, namespace: str) -> str:
    return f"{POLICIES_ROOT}/{_namespace_part(tenant, namespace)}"


def local_policies(*, tenant: str, namespace: str) -> str:
    return f"{LOCAL_POLICIES_ROOT}/{_namespace_part(tenant, namespace)}"


def managed_ledgers(*, tenant: str, namespace: str) -> str:
    """Return the path of the parent of the namespace's persistent topics."""
    return f"{MANAGED_LEDGERS_ROOT}/{_namespace_part(tenant, namespace)}/persistent"


def managed_ledger(*, tenant: str, namespace: str, topic: str) -> str:
    """Return the path of a topic's znode. `topic`: the local name, as users write it."""
    return f"{managed_ledgers(tenant=tenant, namespace=namespace)}/{encode_name(topic)}"


def cursor(*, tenant: str, namespace: str, topic: str, subscription: str) -> str:
    return f"{managed_ledger(tenant=tenant, namespace=namespace, topic=topic)}/{encode_name(subscription)}"


def partitioned_topics(*, tenant: str, namespace: str) -> str:
    """Return the parent of the partitioned topics of a namespace."""
    return f"{PARTITIONED_TOPICS_ROOT}/{_namespace_part(tenant, namespace)}/persistent"


def partitioned_topic(*, tenant: str, namespace: str, topic: str) -> str:
    return f"{partitioned_topics(tenant=tenant, namespace=namespace)}/{encode_name(topic)}"


def bundle_name(*, lower: int, upper: int) -> str:
    """Return the name of a bundle. `lower`, `upper`: the ends of its range of hashes, 32 bits each."""
    assert 0 <= lower < upper <= 0xFFFFFFFF
    return f"0x{lower:08x}_0x{upper:08x}"


def bundle_owner(*, tenant: str, namespace: str, bundle: str) -> str:
    return f"{NAMESPACE_ROOT}/{_namespace_part(tenant, namespace)}/{_checked('bundle', bundle)}"


def broker(host_port: str) -> str:
    return f"{BROKERS_ROOT}/{_checked('broker', host_port)}"
