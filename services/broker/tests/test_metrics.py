"""The metrics of a broker: their names and labels, and the topics that are shown."""

from types import SimpleNamespace
from typing import Any

from bindery_broker.metrics import TOPICS_SHOWN_MAX, BrokerMetrics
from bindery_kit.observability.metrics import Metrics
from bindery_pulsar.topic_name import TopicName


class OneSubscription:
    def __init__(self, name: str, *, first: int) -> None:
        """The numbers count up from `first`."""
        self.name = name
        self.sessions = range(first)
        self.cursor = SimpleNamespace(backlog_entries=first + 1)
        self.messages_out = first + 3
        self.bytes_out = first + 4
        self.redeliveries = first + 5
        self.ticks = 0
        self._first = first

    @property
    def dispatcher(self) -> SimpleNamespace:
        """Leases that are over count until the next tick."""
        return SimpleNamespace(leases=range(self._first + 2 if self.ticks else 999))

    def tick(self) -> None:
        self.ticks += 1


def one_topic(local: str, *subscriptions: OneSubscription, is_open: bool = True, damaged: int = 0) -> SimpleNamespace:
    return SimpleNamespace(
        name=TopicName.parse(f"persistent://acme/orders/{local}"),
        is_open=is_open,
        subscriptions={each.name: each for each in subscriptions},
        ledger=SimpleNamespace(size=70, damaged_cursors=range(damaged)),
        messages_in=80,
        bytes_in=90,
    )


class FixedTopics(list[SimpleNamespace]):
    cache = SimpleNamespace(size=11, hits=12, misses=13)
    loads_failed = 14
    responses = SimpleNamespace(used=16, given_up=17)
    read_ahead = SimpleNamespace(used=18)


def made(*topics: SimpleNamespace) -> tuple[BrokerMetrics, Metrics]:
    metrics = Metrics("broker", with_process=False)
    fixed: Any = FixedTopics(topics)
    ownership: Any = SimpleNamespace(held=["bundle"] * 15)
    return BrokerMetrics(metrics, fixed, ownership), metrics


def lines(metrics: Metrics, *prefixes: str) -> dict[str, float]:
    """Return the rendered samples whose names begin with one of the prefixes."""
    found = {}
    for line in metrics.render().decode().splitlines():
        if line.startswith(prefixes) and "_created" not in line:
            name, value = line.rsplit(" ", 1)
            found[name] = float(value)
    return found


def test_the_totals_count_the_open_topics() -> None:
    topics = [
        one_topic("a", OneSubscription("s", first=1), OneSubscription("t", first=2), damaged=1),
        one_topic("b", OneSubscription("s", first=4), damaged=2),
        one_topic("c", OneSubscription("s", first=8), is_open=False, damaged=4),
    ]
    _, metrics = made(*topics)
    shown = lines(metrics, "pulsar_", "bindery_broker_")
    assert {name: value for name, value in shown.items() if "{" not in name and "http" not in name} == {
        "pulsar_broker_topics_count": 2,
        "pulsar_broker_subscriptions_count": 3,
        "pulsar_broker_consumers_count": 7,
        "pulsar_ml_count": 2,
        "pulsar_ml_cache_used_size": 11,
        "bindery_broker_damaged_subscriptions": 3,
        "bindery_broker_bundles_owned": 15,
        "bindery_broker_cache_hits_total": 12,
        "bindery_broker_cache_misses_total": 13,
        "bindery_broker_topic_loads_failed_total": 14,
        "bindery_broker_produce_request_bytes_count": 0,
        "bindery_broker_produce_request_bytes_sum": 0,
        "bindery_broker_request_bytes_in_flight": 0,
        "bindery_broker_response_bytes": 16,
        "bindery_broker_read_ahead_bytes": 18,
        "bindery_broker_responses_given_up_total": 17,
    }


def test_each_topic_has_its_metrics() -> None:
    _, metrics = made(one_topic("a", OneSubscription("s", first=1), OneSubscription("t", first=2)))
    labels = '{cluster="bindery",namespace="acme/orders",topic="persistent://acme/orders/a"}'
    shown = lines(metrics, "pulsar_")
    assert {name: value for name, value in shown.items() if name.endswith(labels)} == {
        f"pulsar_storage_size{labels}": 70,
        f"pulsar_subscriptions_count{labels}": 2,
        f"pulsar_consumers_count{labels}": 3,
        f"pulsar_msg_backlog{labels}": 5,
        f"pulsar_in_messages_total{labels}": 80,
        f"pulsar_in_bytes_total{labels}": 90,
    }


def test_each_subscription_has_its_metrics_after_its_deadlines_were_applied() -> None:
    subscription = OneSubscription("s", first=20)
    _, metrics = made(one_topic("a", subscription))
    labels = '{cluster="bindery",namespace="acme/orders",subscription="s",topic="persistent://acme/orders/a"}'
    shown = lines(metrics, "pulsar_", "bindery_broker_redelivered")
    assert {name: value for name, value in shown.items() if "subscription=" in name} == {
        f"pulsar_subscription_consumers_count{labels}": 20,
        f"pulsar_subscription_back_log{labels}": 21,
        f"pulsar_subscription_unacked_messages{labels}": 22,
        f"pulsar_out_messages_total{labels}": 23,
        f"pulsar_out_bytes_total{labels}": 24,
        f"bindery_broker_redelivered_messages_total{labels}": 25,
    }
    assert subscription.ticks == 1


def test_totals_count_the_topics_that_are_not_shown() -> None:
    assert TOPICS_SHOWN_MAX == 1000
    _, metrics = made(*(one_topic(f"t{i}") for i in range(1002)))
    shown = lines(metrics, "pulsar_storage_size", "pulsar_broker_topics_count")
    assert shown.pop("pulsar_broker_topics_count") == 1002
    assert len(shown) == 1000
    assert not any("/t1000" in name or "/t1001" in name for name in shown)


def test_no_topic_is_read_when_the_metrics_are_registered() -> None:
    subscription = OneSubscription("s", first=1)
    made(one_topic("a", subscription))
    assert subscription.ticks == 0


def test_requests_are_counted_by_operation_and_status() -> None:
    broker, metrics = made()
    broker.answered("produce", 200, 0.25)
    broker.answered("produce", 200, 0.5)
    broker.answered("produce", 503, 4.0)
    broker.answered("receive", 200, 8.0)
    assert lines(metrics, "bindery_broker_http_requests_total") == {
        'bindery_broker_http_requests_total{operation="produce",status="200"}': 2,
        'bindery_broker_http_requests_total{operation="produce",status="503"}': 1,
        'bindery_broker_http_requests_total{operation="receive",status="200"}': 1,
    }
    assert lines(metrics, "bindery_broker_http_request_seconds_sum", "bindery_broker_http_request_seconds_count") == {
        'bindery_broker_http_request_seconds_count{operation="produce"}': 3,
        'bindery_broker_http_request_seconds_sum{operation="produce"}': 4.75,
        'bindery_broker_http_request_seconds_count{operation="receive"}': 1,
        'bindery_broker_http_request_seconds_sum{operation="receive"}': 8,
    }


def test_the_metrics_of_requests_that_others_update() -> None:
    broker, metrics = made()
    broker.produce_bytes.observe(300)
    broker.in_flight_bytes.set(7)
    broker.proxied.inc()
    shown = lines(metrics, "bindery_broker_")
    assert shown["bindery_broker_produce_request_bytes_sum"] == 300
    assert shown['bindery_broker_produce_request_bytes_bucket{le="128.0"}'] == 0
    assert shown['bindery_broker_produce_request_bytes_bucket{le="512.0"}'] == 1
    assert shown["bindery_broker_request_bytes_in_flight"] == 7
    assert shown["bindery_broker_http_proxied_total"] == 1


def test_the_memory_of_responses_is_shown() -> None:
    _, metrics = made()
    shown = lines(metrics, "bindery_broker_response")
    assert (shown["bindery_broker_response_bytes"], shown["bindery_broker_responses_given_up_total"]) == (16, 17)
