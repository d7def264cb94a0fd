"""Show the statistics of topics, subscriptions and consumers as fields of JSON. The models describe the fields."""

from typing import Any, NamedTuple

from bindery_broker.statistics.delivery import ConsumerStatistics
from bindery_broker.statistics.traffic import Rates
from bindery_broker.subscriptions.subscription import Subscription
from bindery_broker.topics.backlog import backlog_of
from bindery_broker.topics.topic import Topic

OLDEST_READ_MAX = 20
"""Maximum number of entries that one answer reads to find the age of the oldest messages. The next answer reads the
others."""


class Times(NamedTuple):
    """The present time on both clocks."""

    now: float
    """Monotonic seconds."""
    wall_ms: int
    """Milliseconds since 1970."""

    def wall(self, at: float | None) -> int | None:
        """Return the wall time of a monotonic time, in ms since 1970."""
        return None if at is None else self.wall_ms - round((self.now - at) * 1000)


async def read_oldest(subscriptions: list[Subscription]) -> None:
    """Find out how old the oldest messages are, for OLDEST_READ_MAX of the subscriptions whose age is not known."""
    unknown = [subscription for subscription in subscriptions if subscription.oldest.must_read]
    for subscription in unknown[:OLDEST_READ_MAX]:
        await subscription.oldest.read()


def delivery_fields(topic: Topic, subscription: Subscription, times: Times) -> dict[str, Any]:
    """Return the fields of `DeliveryStats`."""
    statistics = subscription.statistics
    backlog = backlog_of(subscription.cursor, topic.ledger, topic.statistics)
    oldest_ms = subscription.oldest.publish_time_ms
    out = rounded(statistics.delivered.rates(times.now))
    return {
        "backlog_entries": backlog.entries,
        "backlog_bytes": backlog.size,
        "backlog_messages": backlog.messages,
        "backlog_messages_exact": backlog.is_exact,
        "oldest_unacked_at": oldest_ms,
        "oldest_unacked_age_ms": None if oldest_ms is None else max(0, times.wall_ms - oldest_ms),
        "delayed": subscription.delayed_count,
        "unacked": len(subscription.dispatcher.leases),
        "blocked_on_unacked": subscription.is_blocked_on_unacked,
        "messages_out": statistics.delivered.messages,
        "bytes_out": statistics.delivered.bytes,
        "messages_out_per_s": out.messages,
        "bytes_out_per_s": out.bytes,
        "redelivered": statistics.redelivered.messages,
        "redelivered_per_s": rounded(statistics.redelivered.rates(times.now)).messages,
        "acked": statistics.acked.messages,
        "acked_per_s": rounded(statistics.acked.rates(times.now)).messages,
        "expired": statistics.expired.messages,
        "evicted": statistics.evicted,
        "last_request_at": times.wall(statistics.last_request_at),
        "last_delivered_at": times.wall(statistics.last_delivered_at),
        "last_acked_at": times.wall(statistics.last_acked_at),
    }


def consumer_fields(statistics: ConsumerStatistics, *, joined_at: float, times: Times) -> dict[str, Any]:
    """Return the fields of `ConsumerInfo` that are counted."""
    out = rounded(statistics.delivered.rates(times.now))
    return {
        "address": statistics.address,
        "connected_since": times.wall(joined_at),
        "messages": statistics.delivered.messages,
        "bytes": statistics.delivered.bytes,
        "messages_per_s": out.messages,
        "bytes_per_s": out.bytes,
        "redelivered": statistics.redelivered,
        "acked": statistics.acked,
        "last_delivered_at": times.wall(statistics.last_delivered_at),
        "last_acked_at": times.wall(statistics.last_acked_at),
    }


def rounded(rates: Rates) -> Rates:
    """Return rates for people: three decimals."""
    return Rates(round(rates.messages, 3), round(rates.bytes, 3))
