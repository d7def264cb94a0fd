"""The metrics of topics and subscriptions: a name, and a value from what is counted in memory, for each column.

Most names and labels are Pulsar's. docs/pulsar-metrics.md lists for each name what it is here, and which of Pulsar's
names are left out.
Source: Pulsar's TopicStats and AggregatedSubscriptionStats.
"""

from typing import Final, NamedTuple

from bindery_broker.broker import Broker
from bindery_broker.statistics.entries import LATENCY_BOUNDS_MS, SIZE_BOUNDS
from bindery_broker.statistics.traffic import Rates
from bindery_broker.statistics.volume import Volume
from bindery_broker.subscriptions.subscription import Subscription
from bindery_broker.topics.topic import Topic

MS: Final = 1000
NO_LIMIT: Final = -1
"""Pulsar's value of a quota that is not set."""


class Column(NamedTuple):
    name: str
    kind: str
    help: str


TOPIC: Final = (
    Column("pulsar_subscriptions_count", "gauge", "Subscriptions."),
    Column("pulsar_producers_count", "gauge", "Connected producers; over HTTP, those named in the last 30 s."),
    Column("pulsar_consumers_count", "gauge", "Connected consumers; over HTTP, consumer sessions."),
    Column("pulsar_rate_in", "gauge", "Messages stored per second, over the last 10 seconds."),
    Column("pulsar_rate_out", "gauge", "Messages delivered per second, over the last 10 seconds."),
    Column("pulsar_throughput_in", "gauge", "Bytes stored per second, over the last 10 seconds."),
    Column("pulsar_throughput_out", "gauge", "Payload bytes delivered per second, over the last 10 seconds."),
    Column("pulsar_msg_backlog", "gauge", "Entries not acknowledged, over subscriptions."),
    Column("pulsar_storage_size", "gauge", "Payload bytes stored, times the write quorum."),
    Column("pulsar_storage_logical_size", "gauge", "Payload bytes stored, without replicas."),
    Column("pulsar_storage_write_rate", "gauge", "Entries stored per second, over the last 10 seconds."),
    Column("pulsar_storage_read_rate", "gauge", "Entries read from bookies per second, over the last 10 seconds."),
    Column(
        "pulsar_storage_read_cache_misses_rate",
        "gauge",
        "Entries per second that were not in the cache, over the last 10 seconds.",
    ),
    Column(
        "pulsar_storage_backlog_size",
        "gauge",
        "Payload bytes not acknowledged by the subscription with the largest backlog; an estimate.",
    ),
    Column(
        "pulsar_publish_rate_limit_times",
        "gauge",
        "Requests that waited for the policy publish_rate, or were refused, since the topic was loaded.",
    ),
    Column("pulsar_in_messages_total", "counter", "Messages stored."),
    Column("pulsar_in_bytes_total", "counter", "Bytes of the entries stored for these messages."),
)
"""Columns that are summed over the topics of a namespace."""
_RATE_IN, _THROUGHPUT_IN = 3, 5
assert (TOPIC[_RATE_IN].name, TOPIC[_THROUGHPUT_IN].name) == ("pulsar_rate_in", "pulsar_throughput_in")
BROKER: Final = frozenset(
    column.name
    for column in TOPIC
    if column.kind == "gauge" and column.name not in ("pulsar_storage_backlog_size", "pulsar_publish_rate_limit_times")
)
"""Columns of which Pulsar has a total of the broker."""


def _ranges(prefix: str, names: tuple[str, ...], overflow: str, *, what: str, unit: str) -> tuple[Column, ...]:
    return (
        *(Column(f"{prefix}_le_{name}", "gauge", f"{what} in this range, in the last full minute.") for name in names),
        Column(f"{prefix}_{overflow}", "gauge", f"{what} above all ranges, in the last full minute."),
        Column(f"{prefix}_count", "gauge", f"{what}, in the last full minute."),
        Column(f"{prefix}_sum", "gauge", f"Sum over the last full minute, in {unit}."),
    )


WRITES: Final = (
    *_ranges(
        "pulsar_storage_write_latency",
        ("0_5", "1", "5", "10", "20", "50", "100", "200", "1000"),
        "overflow",
        what="Entries stored with a latency in milliseconds",
        unit="microseconds",
    ),
    *_ranges(
        "pulsar_entry_size",
        ("128", "512", "1_kb", "2_kb", "4_kb", "16_kb", "100_kb", "1_mb"),
        "le_overflow",
        what="Entries stored with a size",
        unit="bytes",
    ),
)
"""Columns of topics that have stored an entry since they were loaded. Summed as those of TOPIC."""
assert len(WRITES) == len(LATENCY_BOUNDS_MS) + len(SIZE_BOUNDS) + 2 * 3

EVICTIONS: Final = Column(
    "pulsar_storage_backlog_quota_exceeded_evictions_total", "counter", "Evictions because of a backlog quota."
)
BROKER_EVICTIONS: Final = Column(
    "pulsar_broker_storage_backlog_quota_exceeded_evictions_total", "counter", f"Of all topics: {EVICTIONS.help}"
)
QUOTA_TYPES: Final = ("destination_storage", "message_age")
"""Values of the label `quota_type` of evictions: the quotas of size and of age."""
AVERAGE: Final = Column("pulsar_average_msg_size", "gauge", "Bytes per stored message, over the last 10 seconds.")
AGE: Final = Column(
    "pulsar_storage_backlog_age_seconds",
    "gauge",
    "Age of the oldest unacknowledged message, read once per round of maintenance; missing: not known.",
)
QUOTAS: Final = (
    Column("pulsar_storage_backlog_quota_limit", "gauge", "Backlog quota in bytes; -1: no quota."),
    Column("pulsar_storage_backlog_quota_limit_time", "gauge", "Backlog quota in seconds; -1: no quota."),
)
SUBSCRIPTION: Final = (
    Column("pulsar_subscription_back_log", "gauge", "Entries not acknowledged."),
    Column("pulsar_subscription_back_log_no_delayed", "gauge", "Entries not acknowledged, without delayed messages."),
    Column("pulsar_subscription_delayed", "gauge", "Messages that wait for their delivery time."),
    Column("pulsar_subscription_unacked_messages", "gauge", "Messages held by consumers."),
    Column(
        "pulsar_subscription_blocked_on_unacked_messages",
        "gauge",
        "1: the maximum number of unacknowledged messages is reached, and no new ones are delivered.",
    ),
    Column("pulsar_subscription_consumers_count", "gauge", "Connected consumers; over HTTP, consumer sessions."),
    Column("pulsar_subscription_msg_rate_out", "gauge", "Messages delivered per second, over the last 10 seconds."),
    Column(
        "pulsar_subscription_msg_throughput_out",
        "gauge",
        "Payload bytes delivered per second, over the last 10 seconds.",
    ),
    Column(
        "pulsar_subscription_msg_rate_redeliver",
        "gauge",
        "Deliveries per second of messages that had been delivered before, over the last 10 seconds.",
    ),
    Column("pulsar_subscription_msg_ack_rate", "gauge", "Messages acknowledged per second, over the last 10 seconds."),
    Column("pulsar_subscription_msg_rate_expired", "gauge", "Messages expired per second, over the last 10 seconds."),
    Column("pulsar_subscription_total_msg_expired", "gauge", "Messages expired since the topic was loaded."),
    Column("pulsar_subscription_last_expire_timestamp", "gauge", "Last expiry, in ms since 1970; 0: never."),
    Column("pulsar_subscription_last_consumed_timestamp", "gauge", "Last delivery, in ms since 1970; 0: never."),
    Column("pulsar_subscription_last_acked_timestamp", "gauge", "Last acknowledgement, in ms since 1970; 0: never."),
    Column(
        "pulsar_subscription_last_consumed_flow_timestamp",
        "gauge",
        "Last request of a consumer for messages, in ms since 1970; 0: never.",
    ),
    Column("pulsar_out_messages_total", "counter", "Messages delivered."),
    Column("pulsar_out_bytes_total", "counter", "Payload bytes delivered."),
    Column("bindery_broker_redelivered_messages_total", "counter", "Deliveries of returned messages."),
    Column("bindery_broker_acked_messages_total", "counter", "Messages acknowledged by consumers."),
    Column("bindery_broker_expired_messages_total", "counter", "Messages whose time to live was over."),
    Column("bindery_broker_evicted_entries_total", "counter", "Entries acknowledged because of a backlog quota."),
    Column("bindery_broker_subscription_backlog_bytes", "gauge", "Payload bytes not acknowledged; an estimate."),
)

Values = tuple[float, ...]
"""A value for each column."""
Row = tuple[str, Values]
"""Labels, and a value for each column."""


def topic_values(topic: Topic, broker: Broker, *, rows_max: int) -> tuple[Values, list[Row], Volume]:
    """Return the values of TOPIC, `rows_max` rows of SUBSCRIPTION whose labels are only the subscriptions' names, and
    what went in and out."""
    now = broker.now()
    rows: list[Row] = []
    consumers = backlog = backlog_size_max = 0
    statistics, entries_of = topic.statistics, topic.ledger.statistics
    messages_out, bytes_out = statistics.deleted.messages_out, statistics.deleted.bytes_out
    rate_out = throughput_out = 0.0
    subscriptions = topic.subscriptions.values()
    for subscription in subscriptions:
        subscription.tick()
        entries, size = subscription.cursor.backlog
        delivered = subscription.statistics.delivered
        rates = delivered.rates(now)
        backlog += entries
        backlog_size_max = max(backlog_size_max, size)
        consumers += len(subscription.sessions)
        rate_out += rates.messages
        throughput_out += rates.bytes
        messages_out += delivered.messages
        bytes_out += delivered.bytes
        if len(rows) < rows_max:
            rows.append((subscription.name, _subscription_values(subscription, entries, size, rates, broker)))
    size, published = topic.ledger.size, statistics.published
    came = published.rates(now)
    fetched = entries_of.read.rates(now).messages
    values = (
        len(subscriptions),
        topic.producers_count,
        consumers,
        came.messages,
        rate_out,
        came.bytes,
        throughput_out,
        backlog,
        size * broker.settings.ledger.write_quorum,
        size,
        entries_of.added.rates(now).messages,
        fetched,
        fetched,
        backlog_size_max,
        statistics.publish_limited,
        published.messages,
        published.bytes,
    )
    volume = Volume(
        published.messages,
        published.bytes,
        messages_out,
        bytes_out,
        statistics.evictions_by_size,
        statistics.evictions_by_age,
    )
    return values, rows, volume


def write_values(topic: Topic, now: float) -> Values | None:
    """Return the values of WRITES; None: no entry was stored since the topic was loaded."""
    statistics = topic.ledger.statistics
    if not statistics.added.messages:
        return None
    *latencies, sum_ms = statistics.latency_ms.last(now)
    return (*latencies, sum_ms * MS, *statistics.size.last(now))


def quota_values(topic: Topic) -> Values:
    """Return the values of QUOTAS."""
    policies = topic.policies
    size, age = policies.backlog_quota_size, policies.backlog_quota_age
    return (NO_LIMIT if size is None else size.limit, NO_LIMIT if age is None else age.limit)


def _subscription_values(
    subscription: Subscription, backlog: int, backlog_size: int, out: Rates, broker: Broker
) -> Values:
    statistics = subscription.statistics
    now, wall_ms = broker.now(), broker.clock()

    def stamp(at: float | None) -> int:
        return 0 if at is None else wall_ms - round((now - at) * MS)

    return (
        backlog,
        max(backlog - subscription.delayed_count, 0),
        subscription.delayed_count,
        len(subscription.dispatcher.leases),
        int(subscription.is_blocked_on_unacked),
        len(subscription.sessions),
        out.messages,
        out.bytes,
        statistics.redelivered.rates(now).messages,
        statistics.acked.rates(now).messages,
        statistics.expired.rates(now).messages,
        statistics.expired.messages,
        stamp(statistics.last_expired_at),
        stamp(statistics.last_delivered_at),
        stamp(statistics.last_acked_at),
        stamp(statistics.last_request_at),
        statistics.delivered.messages,
        statistics.delivered.bytes,
        statistics.redelivered.messages,
        statistics.acked.messages,
        statistics.expired.messages,
        statistics.evicted,
        backlog_size,
    )


def age_s(topic: Topic, broker: Broker) -> float | None:
    """Return the age of the oldest unacknowledged message; 0: everything is acknowledged; None: a time is not known."""
    times = []
    for subscription in topic.subscriptions.values():
        time_ms = subscription.oldest.publish_time_ms
        if time_ms is not None:
            times.append(time_ms)
        elif subscription.cursor.backlog_entries:
            return None
    return max(0, broker.clock() - min(times)) / MS if times else 0.0


def average(values: Values) -> float:
    """Return the value of AVERAGE for the values of TOPIC."""
    rate = values[_RATE_IN]
    return values[_THROUGHPUT_IN] / rate if rate else 0.0
