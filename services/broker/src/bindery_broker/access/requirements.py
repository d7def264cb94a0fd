"""What each operation of the HTTP API requires. `REQUIREMENTS` has the operations by name; `FAMILIES` those that are
registered in a loop, by the beginning of their names.

An operation without an entry requires a super-user. The tests walk all routes and fail for one without an entry.

| operations                                                        | requirement                                     |
|-------------------------------------------------------------------|-------------------------------------------------|
| that send messages, or look after producers                       | produce on the topic                            |
| that read messages, or use or change subscriptions                | consume on the topic and the subscription       |
| that describe a topic                                             | produce or consume on the topic                 |
| lists over many topics, namespaces, tenants in /v1                | anyone: they contain what the role may use      |
| that create, delete, or administer a topic; policies; permissions | admin of the tenant                             |
| of tenants, bundles, brokers; those that brokers call             | super-user                                      |

Source: Pulsar's PulsarAuthorizationProvider (allowTopicOperationAsync, allowNamespaceOperationAsync) and the resources
of its admin package, which call it.
"""

from collections.abc import Iterable
from typing import Final

from bindery_broker.access.decision import Need

_ANYONE: Final = """
    docs listTopics listTenants listNamespaces listNamespacesOfTenant explainPermission
    showLimits
    adminBrokerReady adminBrokerHealth adminBrokerVersion adminListClusters adminCluster
"""
_LOOKUP: Final = """
    topicStats topicInternalStats topicRetention topicPartitions
    getSchema listSchemaVersions getSchemaVersion compareSchema
    lookupTopic adminPartitionedMetadata adminTopicStats adminInternalStats adminInternalInfo
    adminPartitionedStats adminPartitionedInternalStats adminTopicProperties
    adminSchema adminSchemaVersion adminSchemaVersions adminSchemaMetadata adminCompareSchema adminFindSchema
"""
_PRODUCE: Final = """
    produce cancelMessage getProducer takeTopic releaseTopic uploadSchema adminUploadSchema
"""
_CONSUME: Final = """
    readMessages readMessage receive stream ack nack retry
    listSubscriptions subscribe unsubscribe seek skip expire clearBacklog resetSubscription explainSubscription leave
    listDeadLetters redriveDeadLetters purgeDeadLetters
    adminLastMessageId adminMessageIdAt adminGetEntry adminExamineMessage adminBacklogSize
    adminListSubscriptions adminCreateSubscription adminDeleteSubscription
    adminSkipAll adminSkip adminExpire adminExpireAll adminResetToTime adminResetToMessage adminPeek
    adminSubscriptionProperties adminAnalyzeBacklog
"""
_NAMESPACE_USE: Final = """
    adminListTopics adminListPartitioned adminListNonPersistent adminListNonPersistentPartitioned adminNamespaceTopics
"""
_NAMESPACE_CONSUME: Final = """
    adminClearNamespaceSubscription adminClearBundleSubscription
    adminUnsubscribeNamespace adminUnsubscribeBundle
"""
_TENANT_ADMIN: Final = """
    createTopic deleteTopic setPartitions deletePartitions compact compactionStatus unloadTopic deleteSchema
    getTopicPolicies putTopicPolicies deleteTopicPolicy
    getTenant getNamespace createNamespace deleteNamespace listBundles
    getNamespacePolicies putNamespacePolicies deleteNamespacePolicy
    listNamespacePermissions grantNamespacePermission revokeNamespacePermission
    listTopicPermissions grantTopicPermission revokeTopicPermission
    adminCreateTopic adminDeleteTopic adminUnloadTopic adminTrimTopic adminTruncateTopic adminCompact
    adminCompactionStatus adminTerminate adminTerminatePartitions adminSetTopicProperties adminRemoveTopicProperty
    adminCreatePartitioned adminUpdatePartitioned adminDeletePartitioned adminCreateMissedPartitions
    adminDeleteSchema lookupBundle
    adminTenant adminListNamespaces adminPolicies adminBundles adminCreateNamespace adminDeleteNamespace
    adminReplicationClusters adminNamespaceProperties adminSetNamespaceProperties adminClearNamespaceProperties
    adminNamespaceProperty adminSetNamespaceProperty adminRemoveNamespaceProperty
    adminPermissions adminGrantPermission adminRevokePermission
    adminSubscriptionPermissions adminGrantSubscription adminRevokeSubscription
    adminTopicPermissions adminGrantTopicPermission adminRevokeTopicPermission
    adminClearNamespace adminClearBundle
"""
_SUPER_USER: Final = """
    putTenant deleteTenant unloadNamespace splitBundle takeBundle listBrokers listBrokerBundles
    drainBroker undrainBroker drainStatus
    beginMove storeCopies findUnknown handBack stillHolds
    adminListTenants adminCreateTenant adminUpdateTenant adminDeleteTenant
    adminUnloadNamespace adminUnloadBundle adminSplitBundle
    adminListBrokers adminListBrokersOf adminOwnedNamespaces adminLeaderBroker adminCheckQuotas
    adminRuntimeConfiguration adminDynamicSettings adminDynamicValues adminSetDynamicSetting adminRemoveDynamicSetting
    adminInternalConfiguration adminLoadReport adminBrokerTopics adminListBookies
    adminRacks adminRack adminSetRack adminRemoveRack
"""


def _table(*rows: tuple[Need, str]) -> dict[str, Need]:
    table: dict[str, Need] = {}
    for need, names in rows:
        for name in names.split():
            assert name not in table, name
            table[name] = need
    return table


REQUIREMENTS: Final = _table(
    (Need.ANYONE, _ANYONE),
    (Need.LOOKUP, _LOOKUP),
    (Need.PRODUCE, _PRODUCE),
    (Need.CONSUME, _CONSUME),
    (Need.NAMESPACE_USE, _NAMESPACE_USE),
    (Need.NAMESPACE_CONSUME, _NAMESPACE_CONSUME),
    (Need.TENANT_ADMIN, _TENANT_ADMIN),
    (Need.SUPER_USER, _SUPER_USER),
)
"""Requirement by name of the operation (OpenAPI's operationId)."""
POLICY_FAMILIES: Final = ("adminGet", "adminSet", "adminRemove")
"""Calls that read, set and remove one policy of a namespace or a topic."""
FIXED_FAMILIES: Final = ("adminRefuse", "adminEmpty", "adminNotMade")
"""Calls of features that Bindery does not have: their answers depend on nothing."""


def requirement(operation: str) -> Need:
    """Return what an operation requires; SUPER_USER for an unknown one."""
    need = REQUIREMENTS.get(operation)
    if need is not None:
        return need
    if operation.startswith(FIXED_FAMILIES):
        return Need.ANYONE
    return Need.TENANT_ADMIN if operation.startswith(POLICY_FAMILIES) else Need.SUPER_USER


def has_entry(operation: str) -> bool:
    """Return whether the tables have the operation."""
    return operation in REQUIREMENTS or operation.startswith(POLICY_FAMILIES + FIXED_FAMILIES)


def check_params(operation: str, params: Iterable[str]) -> None:
    """Raise ValueError if the path of an operation lacks what its requirement refers to. `params`: its names."""
    names = set(params)
    need = requirement(operation)
    lacks = set()
    if need in (Need.LOOKUP, Need.PRODUCE, Need.CONSUME):
        lacks = {"tenant", "namespace"} - names
        if not names & {"topic", "local"}:
            lacks.add("topic")
    elif need in (Need.NAMESPACE_USE, Need.NAMESPACE_CONSUME):
        lacks = {"tenant", "namespace"} - names
    elif need is Need.TENANT_ADMIN:
        lacks = {"tenant"} - names
    if lacks:
        raise ValueError(f"{operation} requires {need.value}, but its path has no {sorted(lacks)}")
