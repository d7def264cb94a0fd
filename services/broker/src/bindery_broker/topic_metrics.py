"""Metrics of topics, subscriptions and the broker's totals, under Pulsar's names and labels.

| series                                | labels                                  | of                                |
|---------------------------------------|-----------------------------------------|-----------------------------------|
| pulsar_broker_..., pulsar_ml_...      | cluster                                 | all loaded topics                 |
| pulsar_version_info                   | cluster, version                        | 1; dashboards list clusters by it |
| pulsar_topics_count                   | cluster, namespace                      | all loaded topics                 |
| pulsar_rate_in, pulsar_storage_size.. | cluster, namespace, topic               | the first `topics_max` topics     |
| the same names                        | cluster, namespace                      | the sum of the others, if any     |
| pulsar_entry_size_.., ..write_latency | as the two before                       | topics with entries stored        |
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
from functools import cache
from importlib import metadata
from operator import add
from typing import Final

from bindery_kit.observability.metrics_page import Page, labels

from bindery_broker.broker import Broker
from bindery_broker.statistics.traffic import Rates
from bindery_broker.statistics.volume import Volume
from bindery_broker.topic_columns import (
    AGE,
    AVERAGE,
    BROKER,
    BROKER_EVICTIONS,
    EVICTIONS,
    QUOTA_TYPES,
    QUOTAS,
    SUBSCRIPTION,
    TOPIC,
    WRITES,
    Column,
    Row,
    Values,
    age_s,
    average,
    quota_values,
    topic_values,
    write_values,
)
from bindery_broker.topics.topic import Topic
from bindery_broker.topics.topics import Topics

SUBSCRIPTIONS_PER_TOPIC: Final = 10
"""Maximum number of subscriptions with metrics of their own, per topic that may have some, on average."""
SHARE_MAX: Final = 0.1
"""Maximum part of the time that is spent on rendering."""
SLICE: Final = 20
"""Number of topics and subscriptions after which other tasks run."""


class _Rows:
    """Values of topics with metrics of their own, and sums of the others by namespace."""

    def __init__(self) -> None:
        self._rows: list[Row] = []
        self._others: dict[str, Values] = {}

    def __len__(self) -> int:
        return len(self._rows)

    def put(self, at: str, values: Values) -> None:
        """Add the values of a topic. `at`: its labels."""
        self._rows.append((at, values))

    def sum_up(self, namespace: str, values: Values) -> None:
        before = self._others.get(namespace)
        self._others[namespace] = values if before is None else tuple(map(add, before, values))

    def all(self, cluster: str) -> list[Row]:
        sums = ((labels({"cluster": cluster, "namespace": name}), values) for name, values in self._others.items())
        return [*self._rows, *sums]


class _Totals:
    """Sums over all loaded topics."""

    def __init__(self) -> None:
        self.columns: Values = (0,) * len(TOPIC)
        self.volumes: list[tuple[Topic, Volume]] = []
        self.topics_of: dict[str, int] = {}
        """Number of topics by namespace."""
        self.damaged = 0
        self.fetched = Rates(0.0, 0.0)
        """Entries read from bookies; `cached`: found in the cache."""
        self.cached = Rates(0.0, 0.0)

    def add(self, topic: Topic, namespace: str, values: Values, now: float) -> None:
        self.columns = tuple(map(add, self.columns, values))
        self.topics_of[namespace] = self.topics_of.get(namespace, 0) + 1
        self.damaged += len(topic.ledger.damaged_cursors)
        statistics = topic.ledger.statistics
        self.fetched = Rates(*map(add, self.fetched, statistics.read.rates(now)))
        self.cached = Rates(*map(add, self.cached, statistics.cached.rates(now)))

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
        topics, writes, evictions = _Rows(), _Rows(), _Rows()
        ages: list[tuple[str, float]] = []
        quotas: list[Row] = []
        subscriptions: list[Row] = []
        cluster = broker.settings.cluster_name
        subscriptions_max = self._topics_max * SUBSCRIPTIONS_PER_TOPIC
        done = 0
        for topic in broker.topics:
            done += 1 + len(topic.subscriptions)
            if done >= SLICE:
                done = 0
                yield
            is_shown = len(topics) < self._topics_max
            namespace = f"{topic.name.tenant}/{topic.name.namespace}"
            values, rows, volume = topic_values(topic, broker, rows_max=subscriptions_max - len(subscriptions))
            totals.volumes.append((topic, volume))
            if not topic.is_open:
                continue
            totals.add(topic, namespace, values, broker.now())
            evicted = (volume.evictions_by_size, volume.evictions_by_age)
            written = write_values(topic, broker.now())
            if not is_shown:
                topics.sum_up(namespace, values)
                evictions.sum_up(namespace, evicted)
                if written is not None:
                    writes.sum_up(namespace, written)
                continue
            at = labels({"cluster": cluster, "namespace": namespace, "topic": topic.name.full})
            topics.put(at, values)
            evictions.put(at, evicted)
            if written is not None:
                writes.put(at, written)
            if (age := age_s(topic, broker)) is not None:
                ages.append((at, age))
            quotas.append((at, quota_values(topic)))
            for name, row in rows:
                subscriptions.append((f"{at},{labels({'subscription': name})}", row))
        yield
        _add_totals(page, totals, broker)
        shown = topics.all(cluster)
        yield from _add_rows(page, TOPIC, shown)
        page.add(*AVERAGE, samples=((at, average(values)) for at, values in shown))
        page.add(*AGE, samples=ages)
        yield from _add_rows(page, QUOTAS, quotas)
        page.add(*EVICTIONS, samples=_by_quota(evictions.all(cluster)))
        yield from _add_rows(page, WRITES, writes.all(cluster))
        yield from _add_rows(page, SUBSCRIPTION, subscriptions)


def _by_quota(rows: Iterable[Row]) -> Iterator[tuple[str, float]]:
    """Return a sample for each quota, with its label."""
    for at, values in rows:
        for quota_type, value in zip(QUOTA_TYPES, values, strict=True):
            yield f'{at},quota_type="{quota_type}"', value


@cache
def _version() -> str:
    try:
        return f"bindery-{metadata.version('bindery-broker')}"
    except metadata.PackageNotFoundError:
        return "bindery"


def _add_rows(page: Page, columns: Iterable[Column], rows: list[Row]) -> Iterator[None]:
    for index, column in enumerate(columns):
        page.add(*column, samples=[(at, values[index]) for at, values in rows])
        yield


def _add_totals(page: Page, totals: _Totals, broker: Broker) -> None:
    cluster = broker.settings.cluster_name
    at = labels({"cluster": cluster})
    for column, value in _total_values(totals, broker):
        page.add(*column, samples=[(at if column.name.startswith("pulsar_") else "", value)])
    page.add(
        "pulsar_topics_count",
        "gauge",
        "Topics loaded.",
        [
            (labels({"cluster": cluster, "namespace": namespace}), count)
            for namespace, count in sorted(totals.topics_of.items())
        ],
    )
    volume = totals.volume(broker.topics)
    page.add(*BROKER_EVICTIONS, samples=_by_quota([(at, (volume.evictions_by_size, volume.evictions_by_age))]))
    page.summary(
        "pulsar_broker_publish_latency",
        "Milliseconds until the entries of a call are durable, the wait in the queue too.",
        [(at, broker.topics.publish_ms)],
    )
    page.add(
        "pulsar_version_info",
        "gauge",
        "1. The version of this broker.",
        [(labels({"cluster": cluster, "version": _version()}), 1)],
    )


def _total_values(totals: _Totals, broker: Broker) -> Iterator[tuple[Column, float]]:
    topics = broker.topics
    cache, volume = topics.cache, totals.volume(topics)
    topics_count = sum(totals.topics_of.values())
    yield Column("pulsar_broker_topics_count", "gauge", "Topics loaded."), topics_count
    for column, value in zip(TOPIC, totals.columns, strict=True):
        if column.name in BROKER:
            total = column.name.replace("pulsar_", "pulsar_broker_", 1)
            yield Column(total, "gauge", f"Of all loaded topics: {column.help}"), value
    yield Column("pulsar_broker_in_bytes_total", "counter", "Bytes of entries stored for messages."), volume.bytes_in
    yield Column("pulsar_broker_out_bytes_total", "counter", "Payload bytes delivered."), volume.bytes_out
    yield Column("bindery_broker_messages_in_total", "counter", "Messages stored."), volume.messages_in
    yield Column("bindery_broker_messages_out_total", "counter", "Messages delivered."), volume.messages_out
    yield Column("pulsar_ml_count", "gauge", "Managed ledgers open."), topics_count
    yield Column("pulsar_ml_cache_used_size", "gauge", "Bytes of the entry cache."), cache.size
    yield Column("pulsar_ml_cache_entries", "gauge", "Entries in the cache."), len(cache)
    yield Column("pulsar_ml_cache_inserted_entries_total", "counter", "Entries added to the cache."), cache.inserted
    yield Column("pulsar_ml_cache_evicted_entries_total", "counter", "Entries evicted by its limit."), cache.evicted
    window = "per second, over the last 10 seconds."
    yield Column("pulsar_ml_cache_hits_rate", "gauge", f"Entries found in the cache {window}"), totals.cached.messages
    yield Column("pulsar_ml_cache_hits_throughput", "gauge", f"Bytes found in the cache {window}"), totals.cached.bytes
    yield Column("pulsar_ml_cache_misses_rate", "gauge", f"Entries read from bookies {window}"), totals.fetched.messages
    yield (
        Column("pulsar_ml_cache_misses_throughput", "gauge", f"Bytes read from bookies {window}"),
        totals.fetched.bytes,
    )
    yield Column("bindery_broker_cache_tail_bytes", "gauge", "Bytes of the tails of topics in it."), cache.tail_size
    yield Column("bindery_broker_cache_hits_total", "counter", "Entries read from the cache."), cache.hits
    yield Column("bindery_broker_cache_misses_total", "counter", "Cache reads that found only a part."), cache.misses
    yield (
        Column("bindery_broker_topic_loads_failed_total", "counter", "Topics that could not be opened."),
        topics.loads_failed,
    )
    yield (
        Column(
            "bindery_broker_responses_given_up_total",
            "counter",
            "Responses ended because their clients read too slowly while others waited for memory.",
        ),
        topics.responses.given_up,
    )
    yield (
        Column(
            "bindery_broker_damaged_subscriptions",
            "gauge",
            "Subscriptions of loaded topics whose stored state cannot be read.",
        ),
        totals.damaged,
    )
    yield (
        Column("bindery_broker_bundles_owned", "gauge", "Namespace bundles owned."),
        len(broker.ownership.held),
    )
