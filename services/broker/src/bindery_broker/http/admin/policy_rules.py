"""What the policies of namespaces and of topics have in common in Pulsar's admin API: a table row, and the checks.

| value                                                     | status | reason                                        |
|-----------------------------------------------------------|-------:|-----------------------------------------------|
| a number below 0, or one that 32 bits cannot hold         |    412 | that of the policy                            |
| a retention with one limit that is 0                      |    400 | `Invalid retention policy: ...`               |
| a quorum larger than the one before it                    |    400 | `Bookkeeper Ensemble (1) >= ...`              |
| a retention that is not larger than a quota of the level  |    412 | `Retention Quota must exceed ...`, or         |
|                                                           |        | `Backlog Quota exceeds ...`                   |
| anything that the codec of policies cannot read           |    412 | the text of the error                         |

Source: Pulsar NamespacesBase, PersistentTopicsBase, AdminResource.validateRetentionPolicies.
"""

from typing import Any, Final, NamedTuple

from fastapi import APIRouter
from starlette.responses import Response

from bindery_broker.errors import InvalidPolicy
from bindery_broker.http.admin.calls import Call, Refused, call
from bindery_broker.http.exchange import Exchange, Reply
from bindery_broker.namespaces import policy_values
from bindery_broker.namespaces.policy_codec import PolicySet
from bindery_broker.namespaces.policy_values import INT32_MAX, INT64_MAX

UNSUPPORTED: Final = {
    "replicatorDispatchRate": "replication between clusters",
    "shadowTopics": "shadow topics",
    "offloadPolicies": "offloading of ledgers",
    "entryFilters": "entry filters",
    "dispatcherPauseOnAckStatePersistent": "this policy",
    "resourcegroup": "resource groups",
    "antiAffinity": "anti-affinity groups of namespaces",
    "subscriptionAuthMode": "this policy",
}
"""Policies that no call sets, because nothing would follow them; what they are about."""
QUOTA_TYPES: Final = ("destination_storage", "message_age")
_LARGE: Final = frozenset(("compactionThreshold",))
_RETENTION: Final = (
    "Invalid retention policy: Setting a single time or size limit to 0 is invalid when one of the limits has a "
    "non-zero value. Use the value of -1 instead of 0 to ignore a specific limit. To disable retention both limits "
    "must be set to 0."
)


class Policy(NamedTuple):
    name: str
    """Last part of the path."""
    member: str
    """Member of Pulsar's Policies or TopicPolicies."""
    type: Any
    """Type of its JSON."""
    method: str = "POST"
    """Method that sets it."""
    default: Any = None
    """What is answered if it is not set; None: nothing."""
    reason: str = ""
    """Reason of the refusal of a wrong number; empty: that the policy must be 0 or more."""
    most: int = INT32_MAX
    """Largest number."""
    by_cluster: bool = False
    """Whether the member is a map from the name of a cluster to the value."""
    field: str = ""
    """Field of EffectivePolicies, if the policy in force can be asked for."""


def register_unsupported(router: APIRouter, root: str, level: str, check: Call) -> None:
    """Register the calls of policies that are not supported, below the path `root`: they are not set (200, empty), and
    cannot be (501). `check`: raises the error of a missing topic or namespace."""

    async def read(exchange: Exchange) -> Response:
        await check(exchange)
        return Reply(200, b"")

    for name, what in UNSUPPORTED.items():
        title = f"{level}{name[0].upper()}{name[1:]}"
        call(router, "GET", f"{root}/{name}", f"adminGet{title}")(read)
        for method in ("POST", "PUT", "DELETE"):
            call(router, method, f"{root}/{name}", f"adminRefuse{method.title()}{title}")(_refuse(what))


def _refuse(what: str) -> Call:
    async def refuse(_exchange: Exchange) -> Response:
        raise Refused(501, f"Bindery does not support {what}")

    return refuse


def check_value(policy: Policy, value: Any) -> None:
    """Raise Refused if the policy cannot have this value."""
    if isinstance(value, int) and not isinstance(value, bool):
        most = INT64_MAX if policy.name in _LARGE else policy.most
        if not 0 <= value <= most:
            raise Refused(412, policy.reason or f"{policy.name} must be 0 or more")
    if policy.name == "retention":
        minutes, megabytes = value.get("retentionTimeInMinutes"), value.get("retentionSizeInMB")
        if (minutes == 0) != (megabytes == 0):
            raise Refused(400, _RETENTION)
    if policy.name == "persistence":
        names = ("bookkeeperEnsemble", "bookkeeperWriteQuorum", "bookkeeperAckQuorum")
        ensemble, write, ack = (value.get(name, 0) for name in names)
        if all(isinstance(one, int) for one in (ensemble, write, ack)) and not ensemble >= write >= ack:
            raise Refused(400, f"Bookkeeper Ensemble ({ensemble}) >= WriteQuorum ({write}) >= AckQuorum ({ack})")


def check_level(policies: PolicySet, name: str, *, level: str) -> None:
    """Raise Refused if the policies of a level contradict one another. `name`: of the policy that is changed."""
    if name not in ("retention", "backlogQuota"):
        return
    try:
        policy_values.check_level(policies)
    except InvalidPolicy as error:
        retry = "Please increase retention quota and retry"
        if name == "backlogQuota":
            reason = f"Backlog Quota exceeds configured retention quota for {level}. {retry}"
        elif level == "topic":
            reason = f"Retention Quota must exceed configured backlog quota for topic. {retry}"
        else:
            reason = "Retention Quota must exceed configured backlog quota for namespace."
        raise Refused(412, reason) from error


def quota_type(exchange: Exchange) -> str:
    """Return which quota a call changes. Raises Refused (400) for another name."""
    found = exchange.query_params.get("backlogQuotaType", QUOTA_TYPES[0])
    if found not in QUOTA_TYPES:
        raise Refused(400, f"query: backlogQuotaType must be one of {', '.join(QUOTA_TYPES)}")
    return found


def quota_json(value: dict[str, Any]) -> dict[str, Any]:
    """Return a BacklogQuota as Pulsar stores it: with all members, and with the former name of `limitSize`."""
    size = value.get("limitSize", value.get("limit", -1))
    return {**value, "limit": size, "limitSize": size, "limitTime": value.get("limitTime", -1)}
