"""The broker's metrics, with Pulsar's names where Pulsar has the same metric, and `bindery_broker_*` for the rest.

Topics are listed up to TOPICS_SHOWN_MAX; totals count all of them. Counters of a topic start at 0 when it is loaded
again, as Prometheus expects of a restart.
"""

from collections.abc import Iterable, Iterator
from typing import Final

from bindery_kit.observability.metrics import LATENCY_BUCKETS_S, SIZE_BUCKETS, Metrics
from prometheus_client import Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from bindery_broker.ownership.ownership import Ownership
from bindery_broker.topics.topic import Topic
from bindery_broker.topics.topics import Topics

CLUSTER: Final = "bindery"
"""Value of the `cluster` label."""
TOPICS_SHOWN_MAX: Final = 1_000
"""Maximum number of topics with metrics of their own."""


class BrokerMetrics:
    def __init__(self, metrics: Metrics, topics: Topics, ownership: Ownership) -> None:
        self.requests = metrics.counter(
            "http_requests_total", "Requests answered, by operation and status.", ("operation", "status")
        )
        self.request_seconds = metrics.histogram(
            "http_request_seconds", "Time to answer a request.", ("operation",), buckets=LATENCY_BUCKETS_S
        )
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
        self._by_outcome: dict[tuple[str, int], tuple[Counter, Histogram]] = {}
        metrics.registry.register(_TopicCollector(topics, ownership))

    def answered(self, operation: str, status: int, seconds: float) -> None:
        """Count a finished request. `status`: HTTP status of the answer; `seconds`: duration."""
        found = self._by_outcome.get((operation, status))
        if found is None:  # operations and statuses are few
            found = (self.requests.labels(operation, str(status)), self.request_seconds.labels(operation))
            self._by_outcome[operation, status] = found
        found[0].inc()
        found[1].observe(seconds)


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
