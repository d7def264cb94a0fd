"""The statistics of a topic as Pulsar's TopicStats, internalStats and internal-info.

Fields that this broker does not measure are left out, unless Pulsar's value for "there is none" is true here. Rates are
over the last 10 seconds; Pulsar's are over the last minute.
"""

from datetime import UTC, datetime
from typing import Any, Final

from bindery_broker.broker import Broker
from bindery_broker.dispatch.sessions import Session
from bindery_broker.http.v1.statistics_view import Times, rounded
from bindery_broker.subscriptions.subscription import Subscription
from bindery_broker.topics.topic import Topic

TYPES: Final = {"exclusive": "Exclusive", "failover": "Failover", "shared": "Shared", "key_shared": "Key_Shared"}
"""Pulsar's names of the types of subscriptions."""
NO_TYPE: Final = "None"
"""Type of a subscription that never had a consumer."""
NO_LIMIT: Final = -1
NO_LEDGER: Final = {"ledgerId": -1, "entries": -1, "size": -1, "offloaded": False, "underReplicated": False}
"""What Pulsar shows instead of a compacted ledger where there is none."""


def iso(wall_ms: int) -> str:
    """Return a time as Pulsar writes it: ISO 8601 with milliseconds, in UTC."""
    moment = datetime.fromtimestamp(wall_ms / 1000, UTC)
    return moment.strftime("%Y-%m-%dT%H:%M:%S.") + f"{wall_ms % 1000:03d}Z"


def topic_stats(topic: Topic, broker: Broker, *, owner: str) -> dict[str, Any]:
    """Return TopicStats. `owner`: `host:port` of this broker."""
    times = Times(broker.now(), broker.clock())
    subscriptions = {name: _subscription(one, times) for name, one in topic.subscriptions.items()}
    came, volume = rounded(topic.statistics.published.rates(times.now)), topic.volume
    size, age = topic.policies.backlog_quota_size, topic.policies.backlog_quota_age
    oldest = [
        (one.oldest.publish_time_ms, name)
        for name, one in topic.subscriptions.items()
        if one.oldest.publish_time_ms is not None
    ]
    return {
        "msgRateIn": came.messages,
        "msgThroughputIn": came.bytes,
        "msgRateOut": sum(one["msgRateOut"] for one in subscriptions.values()),
        "msgThroughputOut": sum(one["msgThroughputOut"] for one in subscriptions.values()),
        "bytesInCounter": volume.bytes_in,
        "msgInCounter": volume.messages_in,
        "bytesOutCounter": volume.bytes_out,
        "msgOutCounter": volume.messages_out,
        "averageMsgSize": came.bytes / came.messages if came.messages else 0.0,
        "storageSize": topic.ledger.size,
        "backlogQuotaLimitSize": NO_LIMIT if size is None else size.limit,
        "backlogQuotaLimitTime": NO_LIMIT if age is None else age.limit,
        "backlogSize": max((one["backlogSize"] for one in subscriptions.values()), default=0),
        "oldestBacklogMessageAgeSeconds": max(0, times.wall_ms - min(oldest)[0]) // 1000 if oldest else -1,
        "oldestBacklogMessageSubscriptionName": min(oldest)[1] if oldest else None,
        "publishers": _publishers(topic),
        "subscriptions": subscriptions,
        "replication": {},
        "nonContiguousDeletedMessagesRanges": sum(
            one["nonContiguousDeletedMessagesRanges"] for one in subscriptions.values()
        ),
        "ownerBroker": owner,
        "lastPublishTimeStamp": times.wall(topic.statistics.last_published_at) or 0,
    }


def _publishers(topic: Topic) -> list[dict[str, Any]]:
    """Return PublisherStats of the producers that are known by name. Rates and addresses of each are not measured."""
    mode = "Shared" if topic.hold.holder is None else "Exclusive"
    return [{"accessMode": mode, "producerName": name} for name in topic.producers]


def _subscription(subscription: Subscription, times: Times) -> dict[str, Any]:
    subscription.tick()
    statistics, cursor = subscription.statistics, subscription.cursor
    out = rounded(statistics.delivered.rates(times.now))
    entries, size = cursor.backlog
    kind = subscription.type
    return {
        "msgRateOut": out.messages,
        "msgThroughputOut": out.bytes,
        "bytesOutCounter": statistics.delivered.bytes,
        "msgOutCounter": statistics.delivered.messages,
        "msgRateRedeliver": rounded(statistics.redelivered.rates(times.now)).messages,
        "messageAckRate": rounded(statistics.acked.rates(times.now)).messages,
        "msgBacklog": entries,
        "backlogSize": size,
        "msgBacklogNoDelayed": max(entries - subscription.delayed_count, 0),
        "blockedSubscriptionOnUnackedMsgs": subscription.is_blocked_on_unacked,
        "msgDelayed": subscription.delayed_count,
        "unackedMessages": len(subscription.dispatcher.leases),
        "lastConsumedFlowTimestamp": times.wall(statistics.last_request_at) or 0,
        "lastConsumedTimestamp": times.wall(statistics.last_delivered_at) or 0,
        "lastAckedTimestamp": times.wall(statistics.last_acked_at) or 0,
        "consumers": [_consumer(one, times) for one in subscription.sessions],
        "isDurable": subscription.is_durable,
        "isReplicated": False,
        "nonContiguousDeletedMessagesRanges": cursor.ranges_count,
        "subscriptionProperties": dict(cursor.properties),
        "type": NO_TYPE if kind is None else TYPES[kind],
    }


def _consumer(session: Session, times: Times) -> dict[str, Any]:
    statistics = session.statistics
    out = rounded(statistics.delivered.rates(times.now))
    return {
        "msgRateOut": out.messages,
        "msgThroughputOut": out.bytes,
        "bytesOutCounter": statistics.delivered.bytes,
        "msgOutCounter": statistics.delivered.messages,
        "consumerName": session.consumer.name,
        "unackedMessages": session.consumer.held,
        "address": statistics.address,
        "connectedSince": iso(times.wall(session.joined_at) or 0),
        "lastConsumedTimestamp": times.wall(statistics.last_delivered_at) or 0,
        "lastAckedTimestamp": times.wall(statistics.last_acked_at) or 0,
        "metadata": {},
    }


def internal_stats(topic: Topic) -> dict[str, Any]:
    """Return internalStats: the ledgers and cursors of the topic."""
    found = topic.ledger.internal_stats()
    found["ledgers"] = [
        {name: value for name, value in one.items() if name != "timestamp"} | {"underReplicated": False}
        for one in found["ledgers"]
    ]
    for name, cursor in found["cursors"].items():
        subscription = topic.subscriptions.get(name)
        if subscription is not None:
            cursor["readPosition"] = str(subscription.read_position)
    return found | {"schemaLedgers": [], "compactedLedger": NO_LEDGER}


def internal_info(topic: Topic) -> dict[str, Any]:
    """Return internal-info: what the metadata of the topic names."""
    found, end = topic.ledger.internal_stats(), topic.ledger.terminated
    return {
        "ledgers": [
            {"ledgerId": one["ledgerId"], "isOffloaded": False}
            | (
                {"entries": one["entries"], "size": one["size"], "timestamp": one["timestamp"]}
                if one["timestamp"]
                else {}
            )
            for one in found["ledgers"]
        ],
        "cursors": {name: _cursor_info(one) for name, one in topic.subscriptions.items() if one.is_durable},
        "properties": dict(topic.ledger.properties),
        **({} if end is None else {"terminatedPosition": {"ledgerId": end.ledger_id, "entryId": end.entry_id}}),
    }


def _cursor_info(subscription: Subscription) -> dict[str, Any]:
    mark = subscription.cursor.mark_delete
    return {
        "cursorsLedgerId": subscription.cursor.store.ledger_id,
        "markDelete": {"ledgerId": mark.ledger_id, "entryId": mark.entry_id},
    }
