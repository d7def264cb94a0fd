"""Which operations of the broker the audit log records as administrative changes.

| kind     | operations                                                                              | recorded        |
|----------|-----------------------------------------------------------------------------------------|-----------------|
| CHANGE   | what an administrator does: tenants, namespaces, topics, subscriptions, their           | before and after|
|          | positions, policies, schemas, permissions, bundles                                      |                 |
| DATA     | what producers and consumers do with messages all the time                              | refusals only   |
| INTERNAL | steps of an operation that another broker runs, which it has recorded                   | refusals only   |
| READ     | changes nothing, although the method is not GET; every GET                              | refusals only   |

`STATED` has the operations by id, and `BEGINNINGS` those that are registered in loops, by the beginning of their ids.
An operation that is in neither counts as a change, so that a forgotten entry writes too much rather than too little; a
test finds it.
"""

import enum
from collections.abc import Iterable, Mapping
from typing import Final

PROXIED_HEADER: Final = b"bindery-proxied"
"""Set in requests that a broker forwards to the owner of the topic."""


class Kind(enum.Enum):
    CHANGE = enum.auto()
    DATA = enum.auto()
    INTERNAL = enum.auto()
    READ = enum.auto()


_BY_KIND: Final[Mapping[Kind, tuple[str, ...]]] = {
    Kind.CHANGE: (
        "createTopic", "deleteTopic", "setPartitions", "deletePartitions", "compact", "unloadTopic",
        "subscribe", "unsubscribe", "seek", "skip", "expire", "clearBacklog", "resetSubscription",
        "redriveDeadLetters", "purgeDeadLetters",
        "uploadSchema", "deleteSchema",
        "putTenant", "deleteTenant", "createNamespace", "deleteNamespace", "unloadNamespace", "splitBundle",
        "drainBroker", "undrainBroker",
        "putNamespacePolicies", "deleteNamespacePolicy", "putTopicPolicies", "deleteTopicPolicy",
        "adminCreatePartitioned", "adminUpdatePartitioned", "adminDeletePartitioned", "adminCreateMissedPartitions",
        "adminCreateTopic", "adminDeleteTopic", "adminUnloadTopic", "adminTrimTopic", "adminTruncateTopic",
        "adminCompact", "adminTerminate", "adminTerminatePartitions",
        "adminCreateSubscription", "adminDeleteSubscription", "adminSkipAll", "adminSkip", "adminExpire",
        "adminExpireAll", "adminResetToTime", "adminResetToMessage",
        "adminUploadSchema", "adminDeleteSchema",
        "adminCreateTenant", "adminUpdateTenant", "adminDeleteTenant",
        "adminCreateNamespace", "adminDeleteNamespace", "adminClearNamespaceProperties",
        "adminUnloadNamespace", "adminUnloadBundle", "adminSplitBundle",
        "grantNamespacePermission", "revokeNamespacePermission", "grantTopicPermission", "revokeTopicPermission",
        "adminGrantPermission", "adminRevokePermission", "adminGrantSubscription", "adminRevokeSubscription",
        "adminGrantTopicPermission", "adminRevokeTopicPermission",
        "adminClearBundle", "adminClearNamespace", "adminClearBundleSubscription", "adminClearNamespaceSubscription",
        "adminUnsubscribeBundle", "adminUnsubscribeNamespace",
        "adminSetRack", "adminRemoveRack",
    ),
    Kind.DATA: (
        "produce", "cancelMessage", "takeTopic", "releaseTopic", "receive", "ack", "nack", "retry", "leave",
    ),
    Kind.INTERNAL: ("beginMove", "storeCopies", "findUnknown", "handBack", "stillHolds", "takeBundle"),
    Kind.READ: ("compareSchema", "adminBacklogSize", "adminCompareSchema", "adminFindSchema", "adminAnalyzeBacklog"),
}  # fmt: skip
STATED: Final[Mapping[str, Kind]] = {name: kind for kind, names in _BY_KIND.items() for name in names}
BEGINNINGS: Final[Mapping[str, Kind]] = {
    "adminSet": Kind.CHANGE,
    "adminRemove": Kind.CHANGE,
    "adminRefuse": Kind.READ,
}


def kind_of(operation: str, methods: Iterable[str]) -> Kind | None:
    """Return the kind of an operation by its id and its methods; None if it is in no table."""
    stated = STATED.get(operation)
    if stated is not None:
        return stated
    for beginning, kind in BEGINNINGS.items():
        if operation.startswith(beginning):
            return kind
    return Kind.READ if set(methods) <= {"GET", "HEAD"} else None


def is_change(operation: str, methods: Iterable[str]) -> bool:
    """Return whether an operation is recorded before and after."""
    return kind_of(operation, methods) in (Kind.CHANGE, None)
