"""The metrics of topics: Pulsar's names and labels, exact values, and a limited number of series."""

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
from bindery_broker.managed_ledger import ManagedLedgerSettings
from bindery_broker.topic_metrics import SLICE, TopicMetrics
from bindery_kit.observability.metrics_page import Page
from bindery_pulsar.message_id import Position
from broker_harness import TOPIC, Clock, Harness, ids, make_namespaces

RANGES = ("pulsar_entry_size_", "pulsar_storage_write_latency_")
LABELS = 'cluster="bindery",namespace="public/default",topic="persistent://public/default/t"'


@pytest.fixture
def metrics_of(tree: Any, ledgers: Any, clock: Clock) -> Any:
    def make(**settings: Any) -> Harness:
        return Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://one", **settings)

    return make


async def samples(broker: Harness, labels: str | None = None) -> dict[str, float]:
    """Return values by name for exactly these labels; for all series, by name and labels, if None."""
    found = {}
    for line in (await broker.topic_page()).decode().splitlines():
        if not line.startswith("#"):
            series, value = line.rsplit(" ", 1)
            name, _, at = series.partition("{")
            if labels is None:
                found[series] = float(value)
            elif at.removesuffix("}") == labels:
                found[name] = float(value)
    return found


async def busy(broker: Harness, clock: Clock) -> int:
    """Produce four messages of two bytes, deliver three, one of them twice, acknowledge one. Returns the entry size."""
    await broker.produce("aa", "bb", "cc", "dd")
    clock.advance(2)
    received = await broker.receive("c1", max=3)
    await broker.post(f"{TOPIC}/subscriptions/s/nack", {"message_ids": ids(received[:1])})
    await broker.receive("c2", max=1)
    await broker.ack(ids(received[1:2]))
    clock.advance(2)
    (topic,) = broker.broker.topics
    await topic.subscription("s").oldest.read()
    return topic.ledger.size // 4


async def test_a_topic_has_pulsars_metrics(broker: Harness, clock: Clock) -> None:
    size = await busy(broker, clock)
    found = await samples(broker, LABELS)
    assert {name: value for name, value in found.items() if not name.startswith(RANGES)} == {
        "pulsar_subscriptions_count": 1,
        "pulsar_producers_count": 0,
        "pulsar_consumers_count": 2,
        "pulsar_rate_in": 1,
        "pulsar_rate_out": 2,
        "pulsar_throughput_in": size,
        "pulsar_throughput_out": 4,
        "pulsar_average_msg_size": size,
        "pulsar_msg_backlog": 3,
        "pulsar_storage_size": 12 * size,
        "pulsar_storage_logical_size": 4 * size,
        "pulsar_storage_write_rate": 1,
        "pulsar_storage_read_rate": 0,
        "pulsar_storage_read_cache_misses_rate": 0,
        "pulsar_storage_backlog_size": 3 * size,
        "pulsar_storage_backlog_quota_limit": -1,
        "pulsar_storage_backlog_quota_limit_time": -1,
        "pulsar_publish_rate_limit_times": 0,
        "pulsar_storage_backlog_age_seconds": 4,
        "pulsar_in_messages_total": 4,
        "pulsar_in_bytes_total": 4 * size,
    }


async def test_latencies_and_sizes_are_those_of_the_last_full_minute(broker: Harness, clock: Clock) -> None:
    clock.advance(60 - clock.now() % 60)
    await broker.produce("a" * 100, "b" * 600, "c" * 600)
    sizes = [len(payload) for _, payload in await entries(broker)]
    assert set(ranges(await samples(broker, LABELS)).values()) == {0}
    clock.advance(60)
    found = ranges(await samples(broker, LABELS))
    assert {name: value for name, value in found.items() if value and "size" in name} == {
        "pulsar_entry_size_le_512": 1,
        "pulsar_entry_size_le_1_kb": 2,
        "pulsar_entry_size_count": 3,
        "pulsar_entry_size_sum": sum(sizes),
    }
    latencies = {name: value for name, value in found.items() if "latency" in name}
    assert latencies.pop("pulsar_storage_write_latency_count") == 3
    assert latencies.pop("pulsar_storage_write_latency_sum") > 0
    assert len(latencies) == 10
    assert sum(latencies.values()) == 3
    clock.advance(60)
    assert set(ranges(await samples(broker, LABELS)).values()) == {0}


async def entries(broker: Harness) -> list[tuple[Position, bytes]]:
    (topic,) = broker.broker.topics
    return await topic.ledger.read(topic.ledger.first_position, entries_max=10, size_max=10_000)


def ranges(found: dict[str, float]) -> dict[str, float]:
    return {name: value for name, value in found.items() if name.startswith(RANGES)}


async def test_a_topic_without_stored_entries_has_no_series_of_ranges(broker: Harness) -> None:
    await broker.client.put(f"{TOPIC}/subscriptions/s", json={})
    assert ranges(await samples(broker, LABELS)) == {}


async def test_entries_that_the_cache_has_lost_are_read_from_bookies(metrics_of: Any, clock: Clock) -> None:
    broker = metrics_of(ledger=ManagedLedgerSettings(cache_size_max=0))
    await broker.produce("a", "b")
    clock.advance(2)
    await broker.receive(max=2)
    found = await samples(broker, LABELS)
    assert found["pulsar_storage_read_rate"] == found["pulsar_storage_read_cache_misses_rate"] == 2
    totals = await samples(broker, 'cluster="bindery"')
    assert (totals["pulsar_ml_cache_misses_rate"], totals["pulsar_ml_cache_hits_rate"]) == (2, 0)
    assert totals["pulsar_broker_storage_read_rate"] == 2
    await broker.close()


async def test_quotas_evictions_expiries_and_limited_requests_are_counted(broker: Harness, clock: Clock) -> None:
    make_namespaces(
        broker.tree,
        "public/limited",
        backlog_quota_map={
            "destination_storage": {"limitSize": 100, "limitTime": -1, "policy": "consumer_backlog_eviction"}
        },
        publishMaxMessageRate={"bindery": {"publishThrottlingRateInMsg": 1, "publishThrottlingRateInByte": -1}},
        message_ttl_in_seconds=60,
    )
    topic = "/v1/topics/public/limited/t"
    at = LABELS.replace("default", "limited")
    await broker.client.put(f"{topic}/subscriptions/s", json={})
    for _ in range(4):
        await broker.produce("a" * 50, topic=topic)
        clock.advance(2)
    await broker.broker.topics.enforce()
    await broker.produce_batch("b", "c", "d", "e", topic=topic)
    answer = await broker.client.post(f"{topic}/messages", content="f")
    assert answer.json()["code"] == "publish_rate_exceeded"
    clock.advance(61)
    await broker.broker.topics.enforce()
    found = await samples(broker, at)
    assert found["pulsar_storage_backlog_quota_limit"] == 100
    assert found["pulsar_storage_backlog_quota_limit_time"] == -1
    assert found["pulsar_publish_rate_limit_times"] == 1
    evictions = "pulsar_storage_backlog_quota_exceeded_evictions_total"
    assert (await samples(broker, f'{at},quota_type="destination_storage"')) == {evictions: 1}
    assert (await samples(broker, f'{at},quota_type="message_age"')) == {evictions: 0}
    of_broker = await samples(broker, 'cluster="bindery",quota_type="destination_storage"')
    assert of_broker == {"pulsar_broker_storage_backlog_quota_exceeded_evictions_total": 1}
    subscription = await samples(broker, f'{at},subscription="s"')
    expired = subscription["pulsar_subscription_total_msg_expired"]
    assert expired == subscription["bindery_broker_expired_messages_total"] > 0
    assert subscription["pulsar_subscription_last_expire_timestamp"] == clock.now_ms()
    assert subscription["pulsar_subscription_msg_rate_expired"] > 0


async def test_the_cluster_has_the_name_of_the_settings(metrics_of: Any) -> None:
    broker = metrics_of(cluster_name="east")
    await broker.produce("a")
    found = await samples(broker)
    shown = [series for series in found if series.startswith("pulsar_")]
    assert shown
    assert all('cluster="east"' in series for series in shown)
    assert any(series.startswith('pulsar_version_info{cluster="east",version="bindery') for series in shown)
    await broker.close()


async def test_a_subscription_has_pulsars_metrics(broker: Harness, clock: Clock) -> None:
    size = await busy(broker, clock)
    (topic,) = broker.broker.topics
    assert topic.subscription("s")._reader.delays.add(Position(0, 99), 1 << 60)
    assert (await samples(broker, f'{LABELS},subscription="s"')) == {
        "pulsar_subscription_back_log": 3,
        "pulsar_subscription_back_log_no_delayed": 2,
        "pulsar_subscription_delayed": 1,
        "pulsar_subscription_unacked_messages": 2,
        "pulsar_subscription_blocked_on_unacked_messages": 0,
        "pulsar_subscription_consumers_count": 2,
        "pulsar_subscription_msg_rate_out": 2,
        "pulsar_subscription_msg_throughput_out": 4,
        "pulsar_subscription_msg_rate_redeliver": 0.5,
        "pulsar_subscription_msg_ack_rate": 0.5,
        "pulsar_subscription_msg_rate_expired": 0,
        "pulsar_subscription_total_msg_expired": 0,
        "pulsar_subscription_last_expire_timestamp": 0,
        "pulsar_subscription_last_consumed_timestamp": clock.now_ms() - 2_000,
        "pulsar_subscription_last_acked_timestamp": clock.now_ms() - 2_000,
        "pulsar_subscription_last_consumed_flow_timestamp": clock.now_ms() - 2_000,
        "pulsar_out_messages_total": 4,
        "pulsar_out_bytes_total": 8,
        "bindery_broker_redelivered_messages_total": 1,
        "bindery_broker_acked_messages_total": 1,
        "bindery_broker_expired_messages_total": 0,
        "bindery_broker_evicted_entries_total": 0,
        "bindery_broker_subscription_backlog_bytes": 3 * size,
    }


async def test_a_subscription_that_was_never_used_has_no_times(broker: Harness) -> None:
    await broker.client.put(f"{TOPIC}/subscriptions/s", json={})
    found = await samples(broker, f'{LABELS},subscription="s"')
    assert {value for name, value in found.items() if name.endswith("_timestamp")} == {0}
    assert set(found.values()) == {0}


async def test_leases_that_are_over_are_not_counted(broker: Harness, clock: Clock) -> None:
    await broker.produce("a")
    await broker.receive("c1", ack_timeout_ms=10_000, session_ttl_ms=20_000)
    clock.advance(30)
    found = await samples(broker, f'{LABELS},subscription="s"')
    assert (found["pulsar_subscription_unacked_messages"], found["pulsar_subscription_consumers_count"]) == (0, 0)


async def test_a_full_subscription_is_blocked(metrics_of: Any) -> None:
    broker = metrics_of(unacked_max=2, unacked_per_consumer_max=2)
    await broker.produce("a", "b", "c")
    await broker.receive()
    assert (await samples(broker, f'{LABELS},subscription="s"'))["pulsar_subscription_blocked_on_unacked_messages"] == 1
    await broker.close()


async def test_the_age_is_missing_until_it_is_read_and_0_without_a_backlog(broker: Harness, clock: Clock) -> None:
    await broker.produce("a")
    await broker.client.put(f"{TOPIC}/subscriptions/s", json={})
    clock.advance(7)
    name = "pulsar_storage_backlog_age_seconds"
    assert name not in (await samples(broker, LABELS))
    await broker.broker.topics.maintain()
    assert (await samples(broker, LABELS))[name] == 7
    await broker.ack(ids(await broker.receive()))
    assert (await samples(broker, LABELS))[name] == 0


async def test_the_totals_count_all_topics(broker: Harness, clock: Clock) -> None:
    size = await busy(broker, clock)
    make_namespaces(broker.tree, "public/other")
    await broker.produce("ee", topic="/v1/topics/public/other/u")
    found = await samples(broker, 'cluster="bindery"')
    assert found.pop("pulsar_broker_publish_latency_sum") > 0
    assert found.pop("pulsar_ml_cache_hits_rate") > 0
    assert found.pop("pulsar_ml_cache_hits_throughput") > 0
    assert found == {
        "pulsar_broker_topics_count": 2,
        "pulsar_broker_subscriptions_count": 1,
        "pulsar_broker_producers_count": 0,
        "pulsar_broker_consumers_count": 2,
        "pulsar_broker_rate_in": 2,
        "pulsar_broker_rate_out": 2,
        "pulsar_broker_throughput_in": 2 * size,
        "pulsar_broker_throughput_out": 4,
        "pulsar_broker_msg_backlog": 3,
        "pulsar_broker_storage_size": 15 * size,
        "pulsar_broker_storage_logical_size": 5 * size,
        "pulsar_broker_storage_write_rate": 2,
        "pulsar_broker_storage_read_rate": 0,
        "pulsar_broker_storage_read_cache_misses_rate": 0,
        "pulsar_broker_publish_latency_count": 5,
        "pulsar_broker_in_bytes_total": 5 * size,
        "pulsar_broker_out_bytes_total": 8,
        "pulsar_ml_count": 2,
        "pulsar_ml_cache_used_size": 5 * (size + 200),
        "pulsar_ml_cache_entries": 5,
        "pulsar_ml_cache_misses_rate": 0,
        "pulsar_ml_cache_misses_throughput": 0,
        "pulsar_ml_cache_inserted_entries_total": 5,
        "pulsar_ml_cache_evicted_entries_total": 0,
    }
    others = await samples(broker, "")
    assert others.pop("bindery_broker_cache_hits_total") > 0
    assert others == {
        "bindery_broker_messages_in_total": 5,
        "bindery_broker_messages_out_total": 4,
        "bindery_broker_cache_tail_bytes": 5 * (size + 200),
        "bindery_broker_cache_misses_total": 0,
        "bindery_broker_topic_loads_failed_total": 0,
        "bindery_broker_responses_given_up_total": 0,
        "bindery_broker_damaged_subscriptions": 0,
        "bindery_broker_bundles_owned": 2,
    }
    assert (await samples(broker, 'cluster="bindery",namespace="public/default"')) == {"pulsar_topics_count": 1}
    assert (await samples(broker, 'cluster="bindery",namespace="public/other"')) == {"pulsar_topics_count": 1}


async def test_a_topic_that_is_closed_while_the_page_is_collected_counts_once(broker: Harness) -> None:
    for number in range(50):
        await broker.produce("a", topic=f"/v1/topics/public/default/t{number}")
    collecting = asyncio.create_task(broker.topic_page())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    topics = list(broker.broker.topics)
    topics[0].abandon("made up")
    topics[-1].abandon("made up")
    assert b"bindery_broker_messages_in_total 50\n" in await collecting
    assert (await samples(broker, ""))["bindery_broker_messages_in_total"] == 50


async def test_counters_of_the_broker_do_not_decrease_when_topics_and_subscriptions_go(
    broker: Harness, clock: Clock
) -> None:
    await busy(broker, clock)
    before = (await samples(broker, 'cluster="bindery"')) | (await samples(broker, ""))
    await broker.client.delete(f"{TOPIC}/subscriptions/s", params={"force": "true"})
    await broker.client.delete(TOPIC, params={"force": "true"})
    after = (await samples(broker, 'cluster="bindery"')) | (await samples(broker, ""))
    assert after["pulsar_broker_topics_count"] == 0
    counters = [name for name in before if name.endswith("_total")]
    assert {name: after[name] for name in counters} == {name: before[name] for name in counters}
    assert after["bindery_broker_messages_out_total"] == 4


@pytest.mark.parametrize(("topics_max", "shown"), [(0, []), (2, ["t0", "t1"]), (9, ["t0", "t1", "t2", "t3"])])
async def test_topics_above_the_maximum_are_summed_by_namespace(
    metrics_of: Any, topics_max: int, shown: list[str]
) -> None:
    broker = metrics_of(metrics_topics_max=topics_max)
    for number in range(4):
        for sub in "sr":
            await broker.client.put(f"/v1/topics/public/default/t{number}/subscriptions/{sub}", json={})
        await broker.produce("a", topic=f"/v1/topics/public/default/t{number}")
    found = await samples(broker)
    backlogs = {series: value for series, value in found.items() if series.startswith("pulsar_msg_backlog{")}
    assert sum(backlogs.values()) == 8
    assert [series.partition("/t")[2][:1] for series in backlogs if 'topic="' in series] == [one[1:] for one in shown]
    rest = 'pulsar_msg_backlog{cluster="bindery",namespace="public/default"}'
    assert backlogs.get(rest) == (2 * (4 - len(shown)) or None)
    subscriptions = [series for series in found if series.startswith("pulsar_subscription_back_log{")]
    assert len(subscriptions) == 2 * len(shown)
    assert found['pulsar_topics_count{cluster="bindery",namespace="public/default"}'] == 4
    assert found['pulsar_broker_msg_backlog{cluster="bindery"}'] == 8
    await broker.close()


async def test_subscriptions_with_metrics_of_their_own_are_limited(metrics_of: Any) -> None:
    broker = metrics_of(metrics_topics_max=1)
    for number in range(12):
        await broker.client.put(f"{TOPIC}/subscriptions/s{number}", json={})
    found = await samples(broker)
    assert len([series for series in found if series.startswith("pulsar_subscription_back_log{")]) == 10
    assert found[f"pulsar_subscriptions_count{{{LABELS}}}"] == 12
    await broker.close()


async def test_every_name_has_one_type(broker: Harness, clock: Clock) -> None:
    await busy(broker, clock)
    lines = (await broker.topic_page()).decode().splitlines()
    kinds = [line.split()[2:] for line in lines if line.startswith("# TYPE")]
    assert len({name for name, _ in kinds}) == len(kinds)
    assert all((kind == "counter") == name.endswith("_total") for name, kind in kinds)


async def test_a_page_that_takes_long_is_sent_again_for_a_while(
    broker: Harness, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = iter("abc")

    def slices(_self: TopicMetrics, _broker: object, page: Page) -> Iterator[None]:
        clock.advance(0.25)
        yield
        clock.advance(0.25)
        page.add(next(pages), "gauge", "x", [("", 1)])

    monkeypatch.setattr(TopicMetrics, "_slices", slices)
    assert b"a 1" in await broker.topic_page()
    clock.advance(4.4)
    assert b"a 1" in await broker.topic_page()
    clock.advance(0.1)
    assert b"b 1" in await broker.topic_page()


async def test_requests_at_the_same_time_share_one_page_and_let_other_tasks_run(
    broker: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(50):
        await broker.produce("a", topic=f"/v1/topics/public/default/t{number}")
    turns = collections = 0
    slices = TopicMetrics._slices

    def counted(self: TopicMetrics, *rest: Any) -> Iterator[None]:
        nonlocal collections
        collections += 1
        return slices(self, *rest)

    async def other() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    monkeypatch.setattr(TopicMetrics, "_slices", counted)
    task = asyncio.create_task(other())
    pages = await asyncio.gather(broker.topic_page(), broker.topic_page())
    task.cancel()
    assert pages[0] == pages[1]
    assert b"/t49" in pages[0]
    assert collections == 1
    assert turns > 50 // SLICE


def test_there_are_no_metrics_before_the_broker_serves() -> None:
    assert TopicMetrics(topics_max=9).render() == b""
