"""Calls that are refused, with what they are about: Bindery has nothing that would follow them.

| answer                   | calls                                                              |
|--------------------------|--------------------------------------------------------------------|
| 501 and what is missing  | all of REFUSED, by path; `{rest}` stands for the rest of a path    |
| 404, as Pulsar's         | those that ask for something that was never made (NOT_MADE)        |
| an empty list or map     | those that list such things (EMPTY)                                |

A call that is in none of these tables is unknown: 404, or 405 for a method that its path does not have. The policies of
namespaces and topics that are refused are in `policy_rules`.
Source: Pulsar's admin package, for paths and answers of a broker where nothing of the kind was made.
"""

from typing import Any, Final

from fastapi import APIRouter
from starlette.convertors import register_url_convertor
from starlette.responses import Response

from bindery_broker.http.admin.calls import ROOT, Call, Refused, answer, call
from bindery_broker.http.exchange import Exchange, Reply
from bindery_broker.http.paths import SegmentConvertor

router: Final = APIRouter()
V3: Final = "/admin/v3"
CLUSTER: Final = ROOT + "/clusters/{cluster:form}"
TOPIC: Final = ROOT + "/persistent/{tenant:form}/{namespace:form}/{local:form}"
NON_PERSISTENT: Final = ROOT + "/non-persistent/{tenant:form}/{namespace:form}/{local:form}"
SUBSCRIPTION: Final = TOPIC + "/subscription/{name:form}"
NAMESPACE: Final = ROOT + "/namespaces/{tenant:form}/{namespace:form}"
ALL: Final = ("GET", "POST", "PUT", "DELETE")
WRITES: Final = ("POST", "PUT", "DELETE")

_CLUSTERS: Final = "other clusters: there is no replication between clusters"
_ISOLATION: Final = "isolation of namespaces on certain brokers"
_NO_ISOLATION: Final = "NamespaceIsolationPolicies for cluster {cluster} does not exist"
_QUOTAS: Final = "quotas of bundles: the load of bundles decides nothing here"
_GROUPS: Final = "resource groups"
_FUNCTIONS: Final = "functions, sources and sinks"
_JVM: Final = "figures of a Java process; GET /metrics has those of the broker"

REFUSED: Final[tuple[tuple[tuple[str, ...], str, str], ...]] = (
    (WRITES, CLUSTER, _CLUSTERS),
    (("POST",), CLUSTER + "/peers", _CLUSTERS),
    (("GET", "POST"), CLUSTER + "/migrate", _CLUSTERS),
    (WRITES, CLUSTER + "/failureDomains/{name:form}", "failure domains of brokers"),
    (WRITES, CLUSTER + "/namespaceIsolationPolicies/{name:form}", _ISOLATION),
    (ALL, ROOT + "/resource-quotas", _QUOTAS),
    (ALL, ROOT + "/resource-quotas/{rest:rest}", _QUOTAS),
    (WRITES, ROOT + "/resourcegroups/{name:form}", _GROUPS),
    (("POST",), ROOT + "/brokers/shutdown", "a stop over HTTP; send SIGTERM to the process"),
    (("GET",), ROOT + "/broker-stats/metrics", _JVM),
    (("GET",), ROOT + "/broker-stats/mbeans", _JVM),
    (("GET",), ROOT + "/broker-stats/allocator-stats/{name:form}", _JVM),
    (ALL, ROOT + "/functions/{rest:rest}", _FUNCTIONS),
    (ALL, ROOT + "/worker/{rest:rest}", _FUNCTIONS),
    (ALL, ROOT + "/worker-stats/{rest:rest}", _FUNCTIONS),
    *((ALL, f"{V3}/{kind}/{{rest:rest}}", _FUNCTIONS) for kind in ("functions", "source", "sources", "sink", "sinks")),
    (ALL, V3 + "/packages/{rest:rest}", "packages"),
    (ALL, V3 + "/transactions/{rest:rest}", "transactions"),
    (ALL, NON_PERSISTENT, "topics that are not persistent"),
    (ALL, NON_PERSISTENT + "/{rest:rest}", "topics that are not persistent"),
    (("GET", "PUT"), TOPIC + "/offload", "offloading of ledgers"),
    (("GET",), TOPIC + "/getMessageIdByIndex", "indexes of messages"),
    (WRITES, TOPIC + "/replication", _CLUSTERS),
    (("GET", "POST"), SUBSCRIPTION + "/replicatedSubscriptionStatus", _CLUSTERS),
    (("POST",), NAMESPACE + "/replication", _CLUSTERS),
    (WRITES, NAMESPACE + "/persistence/bookieAffinity", "groups of bookies of a namespace"),
    (("POST",), NAMESPACE + "/migration", _CLUSTERS),
)
"""Methods, path, and what is not supported."""
NOT_MADE: Final = {
    CLUSTER + "/namespaceIsolationPolicies": _NO_ISOLATION,
    CLUSTER + "/namespaceIsolationPolicies/{name:form}": _NO_ISOLATION,
    CLUSTER + "/failureDomains/{name:form}": "Domain-name {name} or cluster {cluster} does not exist",
    ROOT + "/resourcegroups/{name:form}": "ResourceGroup does not exist",
}
"""Path of a GET, and the reason of its 404."""
EMPTY: Final[dict[str, Any]] = {
    NAMESPACE + "/persistence/bookieAffinity": None,
    CLUSTER + "/failureDomains": {},
    CLUSTER + "/peers": [],
    ROOT + "/resourcegroups": [],
}
"""Path of a GET, and its answer; None: an empty one."""


class RestConvertor(SegmentConvertor):
    """Matches the rest of a path."""

    regex = ".*"


register_url_convertor("rest", RestConvertor())


def _refuse(what: str) -> Call:
    async def refuse(_exchange: Exchange) -> Response:
        raise Refused(501, f"Bindery does not support {what}")

    return refuse


def _not_made(reason: str) -> Call:
    async def refuse(exchange: Exchange) -> Response:
        params = {name: value[:100] for name, value in exchange.scope["path_params"].items()}
        raise Refused(404, reason.format(**params))

    return refuse


def _empty(value: Any) -> Call:
    async def show(_exchange: Exchange) -> Response:
        return Reply(200, b"") if value is None else answer(value)

    return show


for _number, (_path, _value) in enumerate(EMPTY.items()):
    call(router, "GET", _path, f"adminEmpty{_number}")(_empty(_value))
for _number, (_path, _reason) in enumerate(NOT_MADE.items()):
    call(router, "GET", _path, f"adminNotMade{_number}")(_not_made(_reason))
for _number, (_methods, _path, _what) in enumerate(REFUSED):
    for _method in _methods:
        call(router, _method, _path, f"adminRefuse{_method.title()}{_number}")(_refuse(_what))
