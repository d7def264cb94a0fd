"""BrokerSettings: the defaults, their bounds, the checks across settings, and the limits of topics."""

from typing import Any

import pytest
from bindery_broker.dispatch.item import DispatchLimits
from bindery_broker.settings import BrokerSettings
from bindery_broker.topics.topics import TopicLimits
from bindery_kit.configuration.settings import WrongSettings


def test_the_defaults() -> None:
    settings = dict(BrokerSettings())
    assert not settings.pop("auth").is_set
    assert not settings.pop("authorization").enabled
    for name in ("ledger", "client", "http", "limits", "balancing", "audit_log", "peers", "zookeeper_access"):
        del settings[name]
    assert settings == {
        "host": "127.0.0.1",
        "port": 8080,
        "insecure": False,
        "advertised_url": "",
        "advertised_listeners": "",
        "zookeeper": "127.0.0.1:2181",
        "zookeeper_session_ms": 10_000,
        "zookeeper_connect_timeout_s": 0.0,
        "ledgers_root": "/ledgers",
        "cluster_name": "bindery",
        "log_level": "info",
        "access_log": False,
        "auto_create_topics": True,
        "request_bytes_max": 16_777_216,
        "control_bytes_max": 1_048_576,
        "in_flight_bytes_max": 67_108_864,
        "messages_per_request_max": 10_000,
        "receive_wait_ms_max": 30_000,
        "topics_max": 10_000,
        "topic_idle_s": 3600,
        "read_ahead_bytes_max": 67_108_864,
        "response_bytes_max": 67_108_864,
        "decoded_bytes_max": 16_777_216,
        "compaction_keys_bytes_max": 67_108_864,
        "metrics_topics_max": 1_000,
        "subscriptions_per_topic_max": 1_000,
        "partitions_per_topic_max": 256,
        "consumers_per_subscription_max": 1_000,
        "unacked_max": 50_000,
        "unacked_per_consumer_max": 10_000,
        "delayed_delivery_max_delay_s": 0,
        "idempotency_window_s": 300,
        "idempotency_keys_max": 100_000,
        "maintenance_interval_s": 60,
        "held_request_s_max": 5.0,
        "held_requests_max": 10_000,
        "drain_bundles_max": 4,
        "stop_timeout_s": 30,
    }


def test_variables_set_the_fields_and_those_of_the_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BROKER_TOPICS_MAX", "7")
    monkeypatch.setenv("BROKER_LEDGER_ENTRIES_MAX", "8")
    settings = BrokerSettings()
    assert (settings.topics_max, settings.ledger.entries_max) == (7, 8)


@pytest.mark.parametrize(
    "changes",
    [
        {"port": -1},
        {"port": 65_536},
        {"zookeeper_session_ms": 999},
        {"zookeeper_session_ms": 600_001},
        {"zookeeper_connect_timeout_s": -0.5},
        {"zookeeper_connect_timeout_s": 86_400.5},
        {"request_bytes_max": 1023},
        {"control_bytes_max": 1023},
        {"in_flight_bytes_max": 1023},
        {"messages_per_request_max": 0},
        {"messages_per_request_max": 10_001},
        {"receive_wait_ms_max": -1},
        {"receive_wait_ms_max": 30_001},
        {"topics_max": 0},
        {"topic_idle_s": 0},
        {"read_ahead_bytes_max": -1},
        {"subscriptions_per_topic_max": 0},
        {"consumers_per_subscription_max": 0},
        {"unacked_max": 0},
        {"unacked_per_consumer_max": 0},
        {"delayed_delivery_max_delay_s": -1},
        {"maintenance_interval_s": 0},
        {"stop_timeout_s": 0},
    ],
)
def test_a_value_out_of_bounds_is_refused(changes: dict[str, Any]) -> None:
    with pytest.raises(WrongSettings, match=next(iter(changes))):
        BrokerSettings(**changes)


@pytest.mark.parametrize(
    "changes",
    [
        {"port": 0, "zookeeper_session_ms": 1_000, "zookeeper_connect_timeout_s": 0, "receive_wait_ms_max": 0},
        {"port": 65_535, "zookeeper_session_ms": 600_000, "zookeeper_connect_timeout_s": 86_400},
        {"request_bytes_max": 1_024, "control_bytes_max": 1_024, "in_flight_bytes_max": 1_024},
        {"messages_per_request_max": 1, "topics_max": 1, "topic_idle_s": 0.01, "read_ahead_bytes_max": 0},
        {"subscriptions_per_topic_max": 1, "consumers_per_subscription_max": 1},
        {"unacked_max": 1, "unacked_per_consumer_max": 1, "maintenance_interval_s": 0.01, "stop_timeout_s": 0.01},
    ],
)
def test_values_at_the_bounds_are_accepted(changes: dict[str, Any]) -> None:
    settings = dict(BrokerSettings(**changes))
    assert {name: settings[name] for name in changes} == changes


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"request_bytes_max": 2_049, "in_flight_bytes_max": 2_048},
            "request_bytes_max must not exceed in_flight_bytes_max",
        ),
        ({"unacked_max": 5, "unacked_per_consumer_max": 6}, "unacked_per_consumer_max must not exceed unacked_max"),
        (
            {"ledger": {"ensemble_size": 3, "write_quorum": 2, "ack_quorum": 3}},
            r"BROKER_LEDGER_ACK_QUORUM \(3\) must not exceed BROKER_LEDGER_WRITE_QUORUM \(2\)",
        ),
        (
            {"ledger": {"ensemble_size": 2, "write_quorum": 3, "ack_quorum": 2}},
            r"\(3\), which must not exceed BROKER_LEDGER_ENSEMBLE_SIZE \(2\)",
        ),
    ],
)
def test_settings_that_contradict_each_other_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(WrongSettings, match=message):
        BrokerSettings(**changes)


def test_settings_that_are_equal_do_not_contradict_each_other() -> None:
    settings = BrokerSettings(
        request_bytes_max=2_048,
        in_flight_bytes_max=2_048,
        unacked_max=5,
        unacked_per_consumer_max=5,
        ledger={"ensemble_size": 2, "write_quorum": 2, "ack_quorum": 2},
    )
    assert settings.ledger.ensemble_size == 2


def test_the_limits_of_topics_come_from_the_settings() -> None:
    settings = BrokerSettings(
        topics_max=1,
        subscriptions_per_topic_max=2,
        consumers_per_subscription_max=3,
        topic_idle_s=4,
        read_ahead_bytes_max=5,
        response_bytes_max=8_388_608,
        compaction_keys_bytes_max=1_048_577,
        decoded_bytes_max=8_388_609,
        auto_create_topics=False,
        unacked_max=7,
        unacked_per_consumer_max=6,
    )
    assert settings.topic_limits() == TopicLimits(
        topics_max=1,
        subscriptions_max=2,
        consumers_max=3,
        idle_s_max=4,
        read_ahead_bytes_max=5,
        response_bytes_max=8_388_608,
        decoded_bytes_max=8_388_609,
        compaction_keys_bytes_max=1_048_577,
        dispatch=DispatchLimits(unacked_max=7, unacked_per_consumer_max=6),
    )


def test_a_broker_with_tls_is_not_advertised_without_it() -> None:
    tls: Any = {"http": {"tls": {"certificate_file": "/c"}}}
    with pytest.raises(ValueError, match=r"advertised_url \(http://b:8080\) must begin with https:"):
        BrokerSettings(**tls, advertised_url="http://b:8080")
    assert BrokerSettings(**tls, advertised_url="https://b:8080").http.tls.is_set
    assert BrokerSettings(**tls).http.tls.is_set
    assert BrokerSettings(advertised_url="https://in-front-of-it:443").advertised_url  # TLS ends at a proxy
