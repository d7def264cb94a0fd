"""Metrics of topics, subscriptions and the broker's totals, under Pulsar's names and labels.

| series                                | labels                                  | of                                |
|---------------------------------------|-----------------------------------------|-----------------------------------|
| pulsar_broker_..., pulsar_ml_...      | cluster                                 | all loaded topics                 |
| pulsar_topics_count                   | cluster, namespace                      | all loaded topics                 |
| pulsar_rate_in, pulsar_storage_size.. | cluster, namespace, topic               | the first `topics_max` topics     |
| the same names                        | cluster, namespace                      | the sum of the others, if any     |
| pulsar_subscription_.., pulsar_out_.. | cluster, namespace, topic, subscription | the first 10 * `topics_max`       |

So sums over a namespace are complete, and the number of series is bounded. Pulsar, too, omits `topic` if it shows
namespaces only. Series of a topic begin again at 0 when it is loaded again, as Prometheus expects of a restart; the
broker's totals do not decrease when a topic is closed.

The page is rendered without prometheus_client, whose objects take several times as long, and from counters that the
topics keep anyway. Rendering takes at most SHARE_MAX of the event loop's time: until then the last page is sent again.
Source: Pulsar's NamespaceStatsAggregator, TopicStats.
"""

from collections.abc import Callable, Iterable, Iterator
from operator import add
from typing import Final, NamedTuple

from bindery_kit.observability.metrics_page import Page, labels

from bindery_broker.broker import Broker
from bindery_broker.statistics.volume import Volume
from bindery_broker.subscriptions.subscription import Subscription
from bindery_broker.topics.topic import Topic

CLUSTER: Final = "bindery"
"""Value of the `cluster` label."""
SUBSCRIPTIONS_PER_TOPIC: Final = 10
"""Maximum number of subscriptions with metrics of their own, per topic that may have some, on average."""
SHARE_MAX: Final = 0.1
"""Maximum part of the time that is spent on rendering."""
MS: Final = 1000


class _Column(NamedTuple):
    name: str
    kind: str
    help: str


_TOPIC: Final = (
    _Column("pulsar_subscriptions_count", "gauge", "Subscriptions."),
    _Column("pulsar_producers_count", "gauge", "Connected producers; HTTP requests connect none."),
    _Column("pulsar_consumers_count", "gauge", "Connected consumers; over HTTP, consumer sessions."),
    _Column("pulsar_rate_in", "gauge", "Messages stored per second, over the last 10 seconds."),
    _Column("pulsar_rate_out", "gauge", "Messages delivered per second, over the last 10 seconds."),
    _Column("pulsar_throughput_in", "gauge", "Bytes stored per second, over the last 10 seconds."),
    _Column("pulsar_throughput_out", "gauge", "Payload bytes delivered per second, over the last 10 seconds."),
    _Column("pulsar_msg_backlog", "gauge", "Entries not acknowledged, over subscriptions."),
    _Column("pulsar_storage_size", "gauge", "Payload bytes stored, times the write quorum."),
    _Column("pulsar_storage_logical_size", "gauge", "Payload bytes stored, without replicas."),
    _Column(
        "pulsar_storage_backlog_size",
        "gauge",
        "Payload bytes not acknowledged by the subscription with the largest backlog; an estimate.",
    ),
    _Column("pulsar_in_messages_total", "counter", "Messages stored."),
    _Column("pulsar_in_bytes_total", "counter", "Bytes of the entries stored for these messages."),
)
"""Columns that are summed over the topics of a namespace."""
_AVERAGE: Final = _Column("pulsar_average_msg_size", "gauge", "Bytes per stored message, over the last 10 seconds.")
_AGE: Final = _Column(
    "pulsar_storage_backlog_age_seconds",
    "gauge",
    "Age of the oldest unacknowledged message, read once per round of maintenance; missing: not known.",
)
_SUBSCRIPTION: Final = (
    _Column("pulsar_subscription_back_log", "gauge", "Entries not acknowledged."),
    _Column("pulsar_subscription_back_log_no_delayed", "gauge", "Entries not acknowledged, without delayed messages."),
    _Column("pulsar_subscription_delayed", "gauge", "Messages that wait for their delivery time."),
    _Column("pulsar_subscription_unacked_messages", "gauge", "Messages held by consumers."),
    _Column(
        "pulsar_subscription_blocked_on_unacked_messages",
        "gauge",
        "1: the maximum number of unacknowledged messages is reached, and no new ones are delivered.",
    ),
    _Column("pulsar_subscription_consumers_count", "gauge", "Connected consumers; over HTTP, consumer sessions."),
    _Column("pulsar_subscription_msg_rate_out", "gauge", "Messages delivered per second, over the last 10 seconds."),
    _Column(
        "pulsar_subscription_msg_throughput_out",
        "gauge",
        "Payload bytes delivered per second, over the last 10 seconds.",
    ),
    _Column(
        "pulsar_subscription_msg_rate_redeliver",
        "gauge",
        "Deliveries per second of messages that had been delivered before, over the last 10 seconds.",
    ),
    _Column("pulsar_subscription_msg_ack_rate", "gauge", "Messages acknowledged per second, over the last 10 seconds."),
    _Column("pulsar_subscription_last_consumed_timestamp", "gauge", "Last delivery, in ms since 1970; 0: never."),
    _Column("pulsar_subscription_last_acked_timestamp", "gauge", "Last acknowledgement, in ms since 1970; 0: never."),
    _Column(
        "pulsar_subscription_last_consumed_flow_timestamp",
        "gauge",
        "Last request of a consumer for messages, in ms since 1970; 0: never.",
    ),
    _Column("pulsar_out_messages_total", "counter", "Messages delivered."),
    _Column("pulsar_out_bytes_total", "counter", "Payload bytes delivered."),
    _Column("bindery_broker_redelivered_messages_total", "counter", "Deliveries of returned messages."),
    _Column("bindery_broker_acked_messages_total", "counter", "Messages acknowledged by consumers."),
    _Column("bindery_broker_subscription_backlog_bytes", "gauge", "Payload bytes not acknowledged; an estimate."),
)

Row = tuple[str, tuple[float, ...]]
"""Labels, and a value for each column."""


class _Totals:
    """Sums over all loaded topics."""

    def __init__(self, former: Volume) -> None:
        self.volume = Volume()
        self.volume.add(former)
        self.columns: tuple[float, ...] = (0,) * len(_TOPIC)
        self.topics_of: dict[str, int] = {}
        """Number of topics by namespace."""
        self.damaged = 0

    def __getitem__(self, name: str) -> float:
        return next(value for column, value in zip(_TOPIC, self.columns, strict=True) if column.name == name)


class TopicMetrics:
    """A part of the page of metrics. Empty until `watch`."""

    def __init__(self, *, topics_max: int) -> None:
        """`topics_max`: maximum number of topics with metrics of their own."""
        self._topics_max = topics_max
        self._broker: Broker | None = None
        self._page = b""
        self._fresh_until = float("-inf")

    def watch(self, broker: Broker) -> None:
        self._broker = broker

    def render(self) -> bytes:
        """Return the metrics as text for Prometheus."""
        broker = self._broker
        if broker is None:
            return b""
        began = broker.now()
        if began >= self._fresh_until:
            self._page = self._render(broker)
            ended = broker.now()
            self._fresh_until = ended + (ended - began) * (1 / SHARE_MAX - 1)
        return self._page

    def _render(self, broker: Broker) -> bytes:
        page = Page()
        totals = _Totals(broker.topics.former_volume)
        topics: list[Row] = []
        ages: list[tuple[str, float]] = []
        others: dict[str, tuple[float, ...]] = {}
        subscriptions: list[Row] = []
        subscriptions_max = self._topics_max * SUBSCRIPTIONS_PER_TOPIC
        for topic in broker.topics:
            if not topic.is_open:
                continue
            namespace = f"{topic.name.tenant}/{topic.name.namespace}"
            values, rows = _topic_values(topic, broker)
            totals.columns = tuple(map(add, totals.columns, values))
            totals.volume.add(topic.volume)
            totals.topics_of[namespace] = totals.topics_of.get(namespace, 0) + 1
            totals.damaged += len(topic.ledger.damaged_cursors)
            if len(topics) >= self._topics_max:
                before = others.get(namespace)
                others[namespace] = values if before is None else tuple(map(add, before, values))
                continue
            at = labels({"cluster": CLUSTER, "namespace": namespace, "topic": topic.name.full})
            topics.append((at, values))
            if (age := _age_s(topic, broker)) is not None:
                ages.append((at, age))
            for name, row in rows[: subscriptions_max - len(subscriptions)]:
                subscriptions.append((f"{at},{labels({'subscription': name})}", row))
        _add_totals(page, totals, broker)
        topics += [(labels({"cluster": CLUSTER, "namespace": namespace}), row) for namespace, row in others.items()]
        _add_rows(page, _TOPIC, topics)
        page.add(*_AVERAGE, samples=((at, _average(values)) for at, values in topics))
        page.add(*_AGE, samples=ages)
        _add_rows(page, _SUBSCRIPTION, subscriptions)
        return page.render()


def _topic_values(topic: Topic, broker: Broker) -> tuple[tuple[float, ...], list[Row]]:
    """Return the values of _TOPIC, and rows of _SUBSCRIPTION whose labels are only the subscriptions' names."""
    now = broker.now()
    wall_ms = broker.clock()

    def stamp(at: float | None) -> int:
        return 0 if at is None else wall_ms - round((now - at) * MS)

    rows: list[Row] = []
    consumers = backlog = backlog_size_max = 0
    rate_out = throughput_out = 0.0
    for subscription in topic.subscriptions.values():
        subscription.tick()
        row = _subscription_values(subscription, stamp, now)
        backlog += subscription.cursor.backlog_entries
        backlog_size_max = max(backlog_size_max, subscription.cursor.backlog_size)
        consumers += len(subscription.sessions)
        rates = subscription.statistics.delivered.rates(now)
        rate_out += rates.messages
        throughput_out += rates.bytes
        rows.append((subscription.name, row))
    statistics, size = topic.statistics, topic.ledger.size
    came = statistics.published.rates(now)
    values = (
        len(rows),
        statistics.producers,
        consumers,
        came.messages,
        rate_out,
        came.bytes,
        throughput_out,
        backlog,
        size * broker.settings.ledger.write_quorum,
        size,
        backlog_size_max,
        statistics.published.messages,
        statistics.published.bytes,
    )
    return values, rows


def _subscription_values(
    subscription: Subscription, stamp: Callable[[float | None], int], now: float
) -> tuple[float, ...]:
    statistics = subscription.statistics
    backlog = subscription.cursor.backlog_entries
    out = statistics.delivered.rates(now)
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
        stamp(statistics.last_delivered_at),
        stamp(statistics.last_acked_at),
        stamp(statistics.last_request_at),
        statistics.delivered.messages,
        statistics.delivered.bytes,
        statistics.redelivered.messages,
        statistics.acked.messages,
        subscription.cursor.backlog_size,
    )


def _age_s(topic: Topic, broker: Broker) -> float | None:
    """Return the age of the oldest unacknowledged message whose time is known; 0: everything is acknowledged."""
    times = []
    for subscription in topic.subscriptions.values():
        time_ms = subscription.oldest.publish_time_ms
        if time_ms is not None:
            times.append(time_ms)
        elif subscription.cursor.backlog_entries:
            return None
    return max(0, broker.clock() - min(times)) / MS if times else 0.0


def _average(values: tuple[float, ...]) -> float:
    by_name = {column.name: value for column, value in zip(_TOPIC, values, strict=True)}
    rate = by_name["pulsar_rate_in"]
    return by_name["pulsar_throughput_in"] / rate if rate else 0.0


def _add_rows(page: Page, columns: Iterable[_Column], rows: list[Row]) -> None:
    for index, column in enumerate(columns):
        page.add(*column, samples=((at, values[index]) for at, values in rows))


def _add_totals(page: Page, totals: _Totals, broker: Broker) -> None:
    at = labels({"cluster": CLUSTER})
    for column, value in _total_values(totals, broker):
        page.add(*column, samples=[(at if column.name.startswith("pulsar_") else "", value)])
    page.add(
        "pulsar_topics_count",
        "gauge",
        "Topics loaded.",
        [
            (labels({"cluster": CLUSTER, "namespace": namespace}), count)
            for namespace, count in sorted(totals.topics_of.items())
        ],
    )


def _total_values(totals: _Totals, broker: Broker) -> Iterator[tuple[_Column, float]]:
    topics = broker.topics
    cache, volume = topics.cache, totals.volume
    topics_count = sum(totals.topics_of.values())
    yield _Column("pulsar_broker_topics_count", "gauge", "Topics loaded."), topics_count
    for column in _TOPIC:
        if column.kind == "gauge" and column.name != "pulsar_storage_backlog_size":
            total = column.name.replace("pulsar_", "pulsar_broker_", 1)
            yield _Column(total, "gauge", f"Of all loaded topics: {column.help}"), totals[column.name]
    yield _Column("pulsar_broker_in_bytes_total", "counter", "Bytes of entries stored for messages."), volume.bytes_in
    yield _Column("pulsar_broker_out_bytes_total", "counter", "Payload bytes delivered."), volume.bytes_out
    yield _Column("bindery_broker_messages_in_total", "counter", "Messages stored."), volume.messages_in
    yield _Column("bindery_broker_messages_out_total", "counter", "Messages delivered."), volume.messages_out
    yield _Column("pulsar_ml_count", "gauge", "Managed ledgers open."), topics_count
    yield _Column("pulsar_ml_cache_used_size", "gauge", "Bytes of the entry cache."), cache.size
    yield _Column("pulsar_ml_cache_entries", "gauge", "Entries in the cache."), len(cache)
    yield _Column("pulsar_ml_cache_inserted_entries_total", "counter", "Entries added to the cache."), cache.inserted
    yield _Column("pulsar_ml_cache_evicted_entries_total", "counter", "Entries evicted by its limit."), cache.evicted
    yield _Column("bindery_broker_cache_tail_bytes", "gauge", "Bytes of the tails of topics in it."), cache.tail_size
    yield _Column("bindery_broker_cache_hits_total", "counter", "Entries read from the cache."), cache.hits
    yield _Column("bindery_broker_cache_misses_total", "counter", "Cache reads that found only a part."), cache.misses
    yield (
        _Column("bindery_broker_topic_loads_failed_total", "counter", "Topics that could not be opened."),
        topics.loads_failed,
    )
    yield (
        _Column(
            "bindery_broker_responses_given_up_total",
            "counter",
            "Responses ended because their clients read too slowly while others waited for memory.",
        ),
        topics.responses.given_up,
    )
    yield (
        _Column(
            "bindery_broker_damaged_subscriptions",
            "gauge",
            "Subscriptions of loaded topics whose stored state cannot be read.",
        ),
        totals.damaged,
    )
    yield (
        _Column("bindery_broker_bundles_owned", "gauge", "Namespace bundles owned."),
        len(broker.ownership.held),
    )
