"""The metrics of requests and memory."""

from types import SimpleNamespace
from typing import Any

from bindery_broker.metrics import BrokerMetrics
from bindery_broker.settings import BrokerSettings
from bindery_kit.observability.metrics import Metrics


def made() -> tuple[BrokerMetrics, Metrics]:
    metrics = Metrics("broker", with_process=False)
    topics: Any = SimpleNamespace(responses=SimpleNamespace(used=16), read_ahead=SimpleNamespace(used=18))
    policies: Any = SimpleNamespace(unreadable={"/admin/policies/t/n"})
    return BrokerMetrics(metrics, topics, policies, BrokerSettings().limits.accounts()), metrics


def lines(metrics: Metrics, *prefixes: str) -> dict[str, float]:
    """Return the rendered samples whose names begin with one of the prefixes."""
    found = {}
    for line in metrics.render().decode().splitlines():
        if line.startswith(prefixes) and "_created" not in line:
            name, value = line.rsplit(" ", 1)
            found[name] = float(value)
    return found


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


def test_the_memory_of_messages_is_shown() -> None:
    _, metrics = made()
    shown = lines(metrics, "bindery_broker_re")
    assert (shown["bindery_broker_response_bytes"], shown["bindery_broker_read_ahead_bytes"]) == (16, 18)
