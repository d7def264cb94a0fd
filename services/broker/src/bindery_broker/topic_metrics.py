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
topics keep anyway. It is collected in slices, so that ten thousand topics do not stop the event loop, and takes at most
SHARE_MAX of its time: until then the last page is sent again.
Source: Pulsar's NamespaceStatsAggregator, TopicStats.
"""

import asyncio
from collections.abc import Iterable, Iterator
from operator import add
from typing import Final, NamedTuple

from bindery_kit.observability.metrics_page import Page, labels

from bindery_broker.broker import Broker
from bindery_broker.statistics.traffic import Rates
from bindery_broker.statistics.volume import Volume
from bindery_broker.subscriptions.subscription import Subscription
from bindery_broker.topics.topic import Topic
from bindery_broker.topics.topics import Topics

CLUSTER: Final = "bindery"
"""Value of the `cluster` label."""
SUBSCRIPTIONS_PER_TOPIC: Final = 10
"""Maximum number of subscriptions with metrics of their own, per topic that may have some, on average."""
SHARE_MAX: Final = 0.1
"""Maximum part of the time that is spent on rendering."""
SLICE: Final = 20
"""Number of topics and subscriptions after which other tasks run."""
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
_RATE_IN, _THROUGHPUT_IN = 3, 5
assert (_TOPIC[_RATE_IN].name, _TOPIC[_THROUGHPUT_IN].name) == ("pulsar_rate_in", "pulsar_throughput_in")
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
    _Column("bindery_broker_expired_messages_total", "counter", "Messages whose time to live was over."),
    _Column("bindery_broker_evicted_entries_total", "counter", "Entries acknowledged because of a backlog quota."),
    _Column("bindery_broker_subscription_backlog_bytes", "gauge", "Payload bytes not acknowledged; an estimate."),
)

Row = tuple[str, tuple[float, ...]]
"""Labels, and a value for each column."""


class _Totals:
    """Sums over all loaded topics."""

    def __init__(self) -> None:
        self.columns: tuple[float, ...] = (0,) * len(_TOPIC)
        self.volumes: list[tuple[Topic, Volume]] = []
        self.topics_of: dict[str, int] = {}
        """Number of topics by namespace."""
        self.damaged = 0

    def add(self, topic: Topic, namespace: str, values: tuple[float, ...]) -> None:
        self.columns = tuple(map(add, self.columns, values))
        self.topics_of[namespace] = self.topics_of.get(namespace, 0) + 1
        self.damaged += len(topic.ledger.damaged_cursors)

    def __getitem__(self, name: str) -> float:
        return next(value for column, value in zip(_TOPIC, self.columns, strict=True) if column.name == name)

    def volume(self, topics: Topics) -> Volume:
        """Return what went in and out since the start. A topic that was closed meanwhile is in `former_volume`."""
        total = Volume()
        total.add(topics.former_volume)
        for topic, volume in self.volumes:
            if topic in topics:
                total.add(volume)
        return total


class TopicMetrics:
    """A part of the page of metrics. Empty until `watch`."""

    def __init__(self, *, topics_max: int) -> None:
        """`topics_max`: maximum number of topics with metrics of their own."""
        self._topics_max = topics_max
        self._broker: Broker | None = None
        self._page = b""
        self._fresh_until = float("-inf")
        self._collecting: asyncio.Task[None] | None = None

    def watch(self, broker: Broker) -> None:
        self._broker = broker

    def render(self) -> bytes:
        """Return the last page that was collected."""
        return self._page

    async def collect(self) -> None:
        """Collect a page, unless the last one is fresh. Other tasks run meanwhile; calls share one collection."""
        broker = self._broker
        if broker is None or broker.now() < self._fresh_until:
            return
        if self._collecting is None:
            self._collecting = asyncio.get_running_loop().create_task(self._collect(broker))
            self._collecting.add_done_callback(self._collected)
        await asyncio.shield(self._collecting)

    def _collected(self, _task: "asyncio.Task[None]") -> None:
        self._collecting = None

    async def _collect(self, broker: Broker) -> None:
        worked_s = 0.0
        began = broker.now()
        page = Page()
        for _ in self._slices(broker, page):
            worked_s += broker.now() - began
            await asyncio.sleep(0)
            began = broker.now()
        self._page = page.render()
        ended = broker.now()
        self._fresh_until = ended + (worked_s + ended - began) * (1 / SHARE_MAX - 1)

    def _slices(self, broker: Broker, page: Page) -> Iterator[None]:
        """Add the metrics to `page`. Yields now and then, so that other tasks can run."""
        totals = _Totals()
        topics: list[Row] = []
        ages: list[tuple[str, float]] = []
        others: dict[str, tuple[float, ...]] = {}
        subscriptions: list[Row] = []
        subscriptions_max = self._topics_max * SUBSCRIPTIONS_PER_TOPIC
        done = 0
        for topic in broker.topics:
            done += 1 + len(topic.subscriptions)
            if done >= SLICE:
                done = 0
                yield
            is_shown = len(topics) < self._topics_max
            namespace = f"{topic.name.tenant}/{topic.name.namespace}"
            values, rows, volume = _topic_values(topic, broker, rows_max=subscriptions_max - len(subscriptions))
            totals.volumes.append((topic, volume))
            if not topic.is_open:
                continue
            totals.add(topic, namespace, values)
            if not is_shown:
                before = others.get(namespace)
                others[namespace] = values if before is None else tuple(map(add, before, values))
                continue
            at = labels({"cluster": CLUSTER, "namespace": namespace, "topic": topic.name.full})
            topics.append((at, values))
            if (age := _age_s(topic, broker)) is not None:
                ages.append((at, age))
            for name, row in rows:
                subscriptions.append((f"{at},{labels({'subscription': name})}", row))
        yield
        _add_totals(page, totals, broker)
        topics += [(labels({"cluster": CLUSTER, "namespace": namespace}), row) for namespace, row in others.items()]
        yield from _add_rows(page, _TOPIC, topics)
        page.add(*_AVERAGE, samples=((at, _average(values)) for at, values in topics))
        page.add(*_AGE, samples=ages)
        yield from _add_rows(page, _SUBSCRIPTION, subscriptions)


def _topic_values(topic: Topic, broker: Broker, *, rows_max: int) -> tuple[tuple[float, ...], list[Row], Volume]:
    """Return the values of _TOPIC, `rows_max` rows of _SUBSCRIPTION whose labels are only the subscriptions' names, and
    what went in and out."""
    now = broker.now()
    rows: list[Row] = []
    consumers = backlog = backlog_size_max = 0
    messages_out, bytes_out = topic.statistics.deleted.messages_out, topic.statistics.deleted.bytes_out
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
    statistics, size = topic.statistics, topic.ledger.size
    published = statistics.published
    came = published.rates(now)
    values = (
        len(subscriptions),
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
        published.messages,
        published.bytes,
    )
    return values, rows, Volume(published.messages, published.bytes, messages_out, bytes_out)


def _subscription_values(
    subscription: Subscription, backlog: int, backlog_size: int, out: Rates, broker: Broker
) -> tuple[float, ...]:
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
        stamp(statistics.last_delivered_at),
        stamp(statistics.last_acked_at),
        stamp(statistics.last_request_at),
        statistics.delivered.messages,
        statistics.delivered.bytes,
        statistics.redelivered.messages,
        statistics.acked.messages,
        statistics.expired,
        statistics.evicted,
        backlog_size,
    )


def _age_s(topic: Topic, broker: Broker) -> float | None:
    """Return the age of the oldest unacknowledged message; 0: everything is acknowledged; None: a time is not known."""
    times = []
    for subscription in topic.subscriptions.values():
        time_ms = subscription.oldest.publish_time_ms
        if time_ms is not None:
            times.append(time_ms)
        elif subscription.cursor.backlog_entries:
            return None
    return max(0, broker.clock() - min(times)) / MS if times else 0.0


def _average(values: tuple[float, ...]) -> float:
    rate = values[_RATE_IN]
    return values[_THROUGHPUT_IN] / rate if rate else 0.0


def _add_rows(page: Page, columns: Iterable[_Column], rows: list[Row]) -> Iterator[None]:
    for index, column in enumerate(columns):
        page.add(*column, samples=[(at, values[index]) for at, values in rows])
        yield


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
    cache, volume = topics.cache, totals.volume(topics)
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
