"""The broker's metrics, with Pulsar's names where Pulsar has the same metric, and `bindery_broker_*` for the rest.

Topics are listed up to TOPICS_SHOWN_MAX; totals count all of them. Counters of a topic start at 0 when it is loaded
again, as Prometheus expects of a restart.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import Final

from bindery_kit.observability.metrics import LATENCY_BUCKETS_S, SIZE_BUCKETS, Metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from bindery_broker.ownership.ownership import Ownership
from bindery_broker.topics.topic import Topic
from bindery_broker.topics.topics import Topics

CLUSTER: Final = "bindery"
"""Value of the `cluster` label."""
TOPICS_SHOWN_MAX: Final = 1_000
"""Maximum number of topics with metrics of their own."""


class BrokerMetrics:
    def __init__(self, metrics: Metrics, topics: Topics, ownership: Ownership) -> None:
        self._requests = _RequestCollector()
        self.produce_bytes = metrics.histogram(
            "produce_request_bytes", "Bytes of produce requests.", buckets=SIZE_BUCKETS
        )
        self.in_flight_bytes = metrics.gauge("request_bytes_in_flight", "Bytes of request bodies held.")
        self.response_bytes = metrics.gauge(
            "response_bytes", "Bytes of messages in responses that are not read by their clients yet."
        )
        self.response_bytes.set_function(lambda: topics.responses.used)
        self.read_ahead_bytes = metrics.gauge(
            "read_ahead_bytes", "Bytes of messages that were read for consumers and not delivered yet."
        )
        self.read_ahead_bytes.set_function(lambda: topics.read_ahead.used)
        self.proxied = metrics.counter("http_proxied_total", "Requests passed on to a topic's owner.")
        metrics.registry.register(self._requests)
        metrics.registry.register(_TopicCollector(topics, ownership))

    def answered(self, operation: str, status: int, seconds: float) -> None:
        """Count a finished request. `status`: HTTP status of the answer; `seconds`: duration."""
        self._requests.add(operation, status, seconds)


class _Durations:
    """Numbers of requests by bucket, and the sum of their seconds."""

    __slots__ = ("counts", "sum_s")

    def __init__(self) -> None:
        self.counts = [0] * (len(LATENCY_BUCKETS_S) + 1)
        self.sum_s = 0.0


class _RequestCollector(Collector):
    """Counts finished requests without the locks of prometheus_client, which take longer than the counting: only the
    event loop counts."""

    def __init__(self) -> None:
        self._counts: dict[tuple[str, int], int] = {}
        """By operation and status, which are few."""
        self._durations: dict[str, _Durations] = {}
        """By operation."""

    def describe(self) -> Iterable[Metric]:
        return []

    def add(self, operation: str, status: int, seconds: float) -> None:
        outcome = (operation, status)
        count = self._counts.get(outcome, 0)
        self._counts[outcome] = count + 1
        if not count:
            self._durations.setdefault(operation, _Durations())
        durations = self._durations[operation]
        durations.counts[bisect_left(LATENCY_BUCKETS_S, seconds)] += 1
        durations.sum_s += seconds

    def collect(self) -> Iterator[Metric]:
        requests = CounterMetricFamily(
            "bindery_broker_http_requests",
            "Requests answered, by operation and status.",
            labels=["operation", "status"],
        )
        for (operation, status), count in self._counts.items():
            requests.add_metric([operation, str(status)], count)
        yield requests
        seconds = HistogramMetricFamily(
            "bindery_broker_http_request_seconds", "Time to answer a request.", labels=["operation"]
        )
        names = [*map(floatToGoString, LATENCY_BUCKETS_S), "+Inf"]
        for operation, durations in self._durations.items():
            buckets = zip(names, accumulate(durations.counts), strict=True)
            seconds.add_metric([operation], buckets=list(buckets), sum_value=durations.sum_s)
        yield seconds


class _TopicCollector(Collector):
    """Reads the loaded topics at each scrape, so that the hot path updates no counters for the metrics."""

    def __init__(self, topics: Topics, ownership: Ownership) -> None:
        self._topics = topics
        self._ownership = ownership

    def describe(self) -> Iterable[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        topics = [topic for topic in self._topics if topic.is_open]
        shown = topics[:TOPICS_SHOWN_MAX]
        yield from _totals(topics, cache_size=self._topics.cache.size, bundles=len(self._ownership.held))
        cache = self._topics.cache
        yield CounterMetricFamily("bindery_broker_cache_hits", "Entries read from the cache.", value=cache.hits)
        yield CounterMetricFamily(
            "bindery_broker_cache_misses", "Cache reads that found only a part.", value=cache.misses
        )
        yield CounterMetricFamily(
            "bindery_broker_topic_loads_failed", "Topics that could not be opened.", value=self._topics.loads_failed
        )
        yield CounterMetricFamily(
            "bindery_broker_responses_given_up",
            "Responses ended because their clients read too slowly while others waited for memory.",
            value=self._topics.responses.given_up,
        )
        yield from _by_topic(shown)
        yield from _by_subscription(shown)


def _totals(topics: list[Topic], *, cache_size: int, bundles: int) -> Iterator[Metric]:
    subscriptions = [s for topic in topics for s in topic.subscriptions.values()]
    for name, text, value in (
        ("pulsar_broker_topics_count", "Topics loaded.", len(topics)),
        ("pulsar_broker_subscriptions_count", "Subscriptions of loaded topics.", len(subscriptions)),
        ("pulsar_broker_consumers_count", "Consumer sessions.", sum(len(s.sessions) for s in subscriptions)),
        ("pulsar_ml_count", "Managed ledgers open.", len(topics)),
        ("pulsar_ml_cache_used_size", "Bytes of the entry cache.", cache_size),
        (
            "bindery_broker_damaged_subscriptions",
            "Subscriptions of loaded topics whose stored state cannot be read.",
            sum(len(topic.ledger.damaged_cursors) for topic in topics),
        ),
        ("bindery_broker_bundles_owned", "Namespace bundles owned.", bundles),
    ):
        yield GaugeMetricFamily(name, text, value=value)


def _by_topic(topics: list[Topic]) -> Iterator[Metric]:
    labels = ["cluster", "namespace", "topic"]
    storage = GaugeMetricFamily("pulsar_storage_size", "Payload bytes stored.", labels=labels)
    subscriptions = GaugeMetricFamily("pulsar_subscriptions_count", "Subscriptions.", labels=labels)
    consumers = GaugeMetricFamily("pulsar_consumers_count", "Consumer sessions.", labels=labels)
    backlog = GaugeMetricFamily("pulsar_msg_backlog", "Entries not acknowledged, over subscriptions.", labels=labels)
    messages_in = CounterMetricFamily("pulsar_in_messages_total", "Messages received.", labels=labels)
    bytes_in = CounterMetricFamily(
        "pulsar_in_bytes_total", "Bytes of the entries stored for received messages.", labels=labels
    )
    for topic in topics:
        values = [CLUSTER, f"{topic.name.tenant}/{topic.name.namespace}", topic.name.full]
        found = topic.subscriptions.values()
        storage.add_metric(values, topic.ledger.size)
        subscriptions.add_metric(values, len(found))
        consumers.add_metric(values, sum(len(s.sessions) for s in found))
        backlog.add_metric(values, sum(s.cursor.backlog_entries for s in found))
        messages_in.add_metric(values, topic.messages_in)
        bytes_in.add_metric(values, topic.bytes_in)
    yield from (storage, subscriptions, consumers, backlog, messages_in, bytes_in)


def _by_subscription(topics: list[Topic]) -> Iterator[Metric]:
    labels = ["cluster", "namespace", "topic", "subscription"]
    backlog = GaugeMetricFamily("pulsar_subscription_back_log", "Entries not acknowledged.", labels=labels)
    unacked = GaugeMetricFamily("pulsar_subscription_unacked_messages", "Messages held by consumers.", labels=labels)
    consumers = GaugeMetricFamily("pulsar_subscription_consumers_count", "Consumer sessions.", labels=labels)
    messages_out = CounterMetricFamily("pulsar_out_messages_total", "Messages delivered.", labels=labels)
    bytes_out = CounterMetricFamily("pulsar_out_bytes_total", "Payload bytes delivered.", labels=labels)
    redelivered = CounterMetricFamily(
        "bindery_broker_redelivered_messages", "Deliveries of returned messages.", labels=labels
    )
    for topic in topics:
        namespace = f"{topic.name.tenant}/{topic.name.namespace}"
        for subscription in topic.subscriptions.values():
            subscription.tick()
            values = [CLUSTER, namespace, topic.name.full, subscription.name]
            backlog.add_metric(values, subscription.cursor.backlog_entries)
            unacked.add_metric(values, len(subscription.dispatcher.leases))
            consumers.add_metric(values, len(subscription.sessions))
            messages_out.add_metric(values, subscription.messages_out)
            bytes_out.add_metric(values, subscription.bytes_out)
            redelivered.add_metric(values, subscription.redeliveries)
    yield from (backlog, unacked, consumers, messages_out, bytes_out, redelivered)
