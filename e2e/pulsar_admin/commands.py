"""The commands that are run against Pulsar and against Bindery, in order, and the differences that are allowed.

`{topic}` is `persistent://public/default/pulsar-admin`, which does not exist at first; `{parts}` is
`persistent://public/default/parts`, likewise; `{cluster}` and `{broker}` are the names of the cluster and of the broker
(`host:port`). Messages `one` and `two` are published before MESSAGES_BEFORE.
"""

from dataclasses import dataclass
from typing import Final

MESSAGES_BEFORE: Final = "topics peek-messages {topic} -s first -n 1"


@dataclass(frozen=True)
class Difference:
    """An allowed difference, and why it is there."""

    reason: str
    text_differs: bool = False
    """Whether the outputs are not compared, or the reasons of two refusals."""
    fields_differ: bool = False
    """Whether not even the names of the fields are compared."""
    status_differs: bool = False
    """Whether one accepts and the other refuses the command."""


MISSING_FIELDS: Final = frozenset(
    (
        ".deduplicationStatus",
        ".lastLedgerCreatedTimestamp",
        ".schemaLedgers.*.ledgerId",
        ".schemaLedgers.*.entries",
        ".schemaLedgers.*.size",
        ".schemaLedgers.*.offloaded",
        ".schemaLedgers.*.underReplicated",
        ".cursors.*.lastLedgerSwitchTimestamp",
        ".cursors.*.version",
        ".cursors.*.creationDate",
        ".cursors.*.modificationDate",
        ".version",
        ".creationDate",
        ".modificationDate",
        ".ledgers.*.timestamp",
        ".brokerClientSslFactoryPlugin",
        ".brokerClientTlsKeyStoreType",
        ".brokerClientTlsTrustStoreType",
        ".is_allow_auto_update_schema",
    )
)
"""Fields that Pulsar prints and Bindery does not: it does not measure or keep them in this form."""
EXTRA_FIELDS: Final = frozenset((".oldestBacklogMessageSubscriptionName", ".properties"))
"""Fields that Bindery prints at once, and Pulsar after its next check of quotas, or only if they are not empty."""

NUMBERS: Final = Difference("ids and sizes are those of each cluster", text_differs=True)
NAMES: Final = Difference("names, addresses and versions are those of each cluster", text_differs=True)
NOTHING_TO_EXPIRE: Final = Difference(
    "Pulsar refuses it if nothing has to be read; here nothing is done", status_differs=True
)
SORTED: Final = Difference("sorted by name; Pulsar has no order", text_differs=True)
NO_BINARY: Final = Difference("no binary protocol: the address is empty", text_differs=True)
MISSING: Final = Difference("not supported", status_differs=True)

COMMANDS: Final[dict[str, Difference | None]] = {
    "topics list public/default": None,
    "topics stats {topic}": None,
    "topics subscriptions {topic}": None,
    "topics create {topic}": None,
    "topics create {topic} ": None,
    "topics list public/default ": None,
    "topics list-partitioned-topics public/default": None,
    "topics subscriptions {topic} ": None,
    "topics create-subscription {topic} -s first -m earliest": None,
    "topics create-subscription {topic} -s first -m earliest ": None,
    "topics create-subscription {topic} -s last -m latest": None,
    "topics create-subscription {topic} -s with/slash": None,
    "topics subscriptions {topic}  ": SORTED,
    MESSAGES_BEFORE: NUMBERS,
    "topics peek-messages {topic} -s first -n 2": NUMBERS,
    "topics peek-messages {topic} -s peeked -n 1": Difference("Pulsar creates the subscription", text_differs=True),
    "topics stats {topic} ": NUMBERS,
    "topics stats {topic} --get-precise-backlog": NUMBERS,
    "topics stats-internal {topic}": NUMBERS,
    "topics info-internal {topic}": NUMBERS,
    "topics last-message-id {topic}": NUMBERS,
    "topics get-message-id {topic} -d 1m": NUMBERS,
    "topics examine-messages {topic} -i earliest -m 1": NUMBERS,
    "topics examine-messages {topic} -i latest -m 1": NUMBERS,
    "topics get-message-by-id {topic} -l 99999999 -e 0": None,
    "topics get-backlog-size {topic} -m 99999999:0": Difference(
        "0 behind the last message; Pulsar takes the id for the earliest", text_differs=True
    ),
    "topics skip {topic} -s first -n 1": None,
    "topics skip {topic} -s none -n 1": None,
    "topics peek-messages {topic} -s first -n 1 ": NUMBERS,
    "topics clear-backlog {topic} -s first": None,
    "topics clear-backlog {topic} -s none": None,
    "topics peek-messages {topic} -s first -n 1  ": None,
    "topics reset-cursor {topic} -s first -t 10m": None,
    "topics reset-cursor {topic} -s first -m earliest": None,
    "topics reset-cursor {topic} -s first -m latest": None,
    "topics reset-cursor {topic} -s none -t 10m": None,
    "topics reset-cursor {topic} -s none -m earliest": None,
    "topics expire-messages {topic} -s first -t 3600": NOTHING_TO_EXPIRE,
    "topics expire-messages {topic} -s none -t 3600": None,
    "topics expire-messages-all-subscriptions {topic} -t 3600": NOTHING_TO_EXPIRE,
    "topics get-properties {topic}": None,
    "topics get-subscription-properties {topic} -s first": None,
    "topics update-properties {topic} -p a=b": MISSING,
    "topics remove-properties {topic} -k a": MISSING,
    "topics update-subscription-properties {topic} -s first -p x=y": MISSING,
    "topics analyze-backlog {topic} -s first": MISSING,
    "topics compaction-status {topic}": MISSING,
    "topics lookup {topic}": NO_BINARY,
    "topics bundle-range {topic}": None,
    "topics unload {topic}": None,
    "topics unload {topic}-none": None,
    "topics trim-topic {topic}": None,
    "topics truncate {topic}": None,
    "topics terminate {topic}": MISSING,
    "topics unsubscribe {topic} -s none": None,
    "topics unsubscribe {topic} -s last": None,
    "topics unsubscribe {topic} -s with/slash": None,
    "topics delete {topic}": None,
    "topics unsubscribe {topic} -s first": None,
    "topics delete {topic} ": None,
    "topics delete {topic}  ": None,
    "topics stats {topic}  ": None,
    "topics stats-internal {topic} ": None,
    "topics subscriptions {topic}   ": None,
    "topics clear-backlog {topic} -s first ": None,
    "topics create persistent://public/default/a%20b+c": None,
    "topics stats persistent://public/default/a%20b+c": NUMBERS,
    "topics delete persistent://public/default/a%20b+c": None,
    "topics create non-persistent://public/default/x": Difference("all topics are persistent", status_differs=True),
    "topics list-partitioned-topics public/none": None,
    "topics create-partitioned-topic {parts} -p 0": None,
    "topics create-partitioned-topic persistent://public/none/parts -p 2": None,
    "topics create-partitioned-topic {parts}-partition-1 -p 2": None,
    "topics get-partitioned-topic-metadata {parts}": None,
    "topics create-partitioned-topic {parts} -p 3": None,
    "topics create-partitioned-topic {parts} -p 3 ": None,
    "topics create {parts}": None,
    "topics create {parts}-partition-7": None,
    "topics create {parts}-partition-1": None,
    "topics list-partitioned-topics public/default ": None,
    "topics list public/default  ": SORTED,
    "topics get-partitioned-topic-metadata {parts} ": None,
    "topics get-partitioned-topic-metadata {parts}-partition-0": None,
    "topics create-missed-partitions {parts}": None,
    "topics create-missed-partitions {parts}-none": None,
    "topics create-subscription {parts} -s first": None,
    "topics create-subscription {parts} -s first ": None,
    "topics create-subscription {parts}-partition-0 -s one": None,
    "topics create-subscription {parts} -s one": None,
    "topics subscriptions {parts}": None,
    "topics update-partitioned-topic {parts} -p 2": None,
    "topics update-partitioned-topic {parts} -p 3": None,
    "topics update-partitioned-topic {parts}-none -p 3": None,
    "topics update-partitioned-topic {parts} -p 4": None,
    "topics subscriptions {parts}-partition-3": None,
    "topics partitioned-stats {parts}": None,
    "topics partitioned-stats {parts} --per-partition": NUMBERS,
    "topics partitioned-stats {parts}-none": None,
    "topics partitioned-stats-internal {parts}": NUMBERS,
    "topics partitioned-stats-internal {parts}-none": None,
    "topics partitioned-lookup {parts}": NO_BINARY,
    "topics stats {parts}": None,
    "topics stats-internal {parts}": None,
    "topics info-internal {parts}": NUMBERS,
    "topics last-message-id {parts}": None,
    "topics peek-messages {parts} -s first": None,
    "topics examine-messages {parts}": None,
    "topics skip {parts} -s first -n 1": None,
    "topics clear-backlog {parts} -s first": None,
    "topics clear-backlog {parts} -s none": None,
    "topics reset-cursor {parts} -s first -t 10m": None,
    "topics reset-cursor {parts} -s none -t 10m": Difference("Pulsar names one of the partitions", text_differs=True),
    "topics reset-cursor {parts} -s first -m earliest": None,
    "topics expire-messages {parts} -s first -t 3600": NOTHING_TO_EXPIRE,
    "topics expire-messages {parts} -s none -t 3600": None,
    "topics get-message-by-id {parts} -l 1 -e 0": None,
    "topics get-backlog-size {parts} -m 1:0": None,
    "topics get-properties {parts}": Difference(
        "pulsar-admin fails on the empty answer of Pulsar; here there is an empty map", status_differs=True
    ),
    "topics get-subscription-properties {parts} -s first": None,
    "topics get-subscription-properties {parts} -s none": None,
    "topics unload {parts}": None,
    "topics trim-topic {parts}": None,
    "topics truncate {parts}": None,
    "topics delete {parts}": None,
    "topics unsubscribe {parts} -s none": None,
    "topics unsubscribe {parts} -s one": None,
    "topics delete-partitioned-topic {parts}-none": None,
    "topics delete-partitioned-topic {parts}": None,
    "topics delete-partitioned-topic {parts} ": None,
    "topics create {parts} ": None,
    "topics create-partitioned-topic {parts} -p 2": None,
    "topics update-partitioned-topic {parts} -p 3 ": None,
    "topics partitioned-stats {parts} ": None,
    "topics delete-partitioned-topic {parts}  ": None,
    "topics delete {parts} ": None,
    "brokers list {cluster}": NAMES,
    "brokers list none": Difference("Pulsar does not check the name of the cluster", status_differs=True),
    "brokers healthcheck": None,
    "brokers version": NAMES,
    "brokers namespaces {cluster} --url {broker}": NAMES,
    "brokers leader-broker": MISSING,
    "brokers get-internal-config": MISSING,
    "brokers list-dynamic-config": MISSING,
    "clusters list": NAMES,
    "clusters get {cluster}": NAMES,
    "clusters get none": None,
    "broker-stats topics": Difference(
        "the fields of each topic are those of `topics stats`; Pulsar has other ones", fields_differ=True
    ),
    "broker-stats load-report": MISSING,
    "tenants list": Difference("Pulsar has a tenant of its own", text_differs=True),
    "tenants get public": NAMES,
    "tenants get none": None,
    "tenants create shop -c {cluster} -r clerk": None,
    "tenants create shop -c {cluster} -r clerk ": None,
    "tenants get shop": NAMES,
    "tenants update shop -c {cluster} -r owner": None,
    "tenants update none -c {cluster}": None,
    "namespaces create shop/orders": None,
    "namespaces create shop/orders ": None,
    "namespaces create none/orders": None,
    "namespaces list shop": None,
    "tenants delete shop": None,
    "namespaces delete shop/orders": None,
    "namespaces delete shop/orders ": None,
    "tenants delete shop ": None,
    "tenants delete shop  ": None,
    "namespaces list public": None,
    "namespaces list none": None,
    "namespaces topics public/default": None,
    "namespaces bundles public/default": None,
    "namespaces policies public/default": NAMES,
    "namespaces policies public/none": None,
    "namespaces get-retention public/default": None,
    "namespaces set-retention public/default -t 60m -s 100M": None,
    "namespaces get-retention public/default ": None,
    "namespaces remove-retention public/default": None,
    "namespaces get-retention public/default  ": None,
    "namespaces get-retention public/none": None,
    "namespaces set-message-ttl public/default -ttl 3600": None,
    "namespaces get-message-ttl public/default": None,
    "namespaces remove-message-ttl public/default": None,
    "namespaces set-deduplication public/default --enable": None,
    "namespaces get-deduplication public/default": None,
    "namespaces remove-deduplication public/default": None,
    "namespaces set-max-producers-per-topic public/default -p 5": None,
    "namespaces get-max-producers-per-topic public/default": None,
    "namespaces set-max-subscriptions-per-topic public/default -m 7": None,
    "namespaces get-max-subscriptions-per-topic public/default": None,
    "namespaces set-auto-topic-creation public/default --enable --type non-partitioned": None,
    "namespaces get-auto-topic-creation public/default": None,
    "namespaces set-subscription-expiration-time public/default -t 60": None,
    "namespaces get-subscription-expiration-time public/default": None,
}
"""Command -> the allowed difference; None: none. Spaces at the end make a repeated command another key."""
