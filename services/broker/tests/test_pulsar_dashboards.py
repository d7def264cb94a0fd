"""What public dashboards for Pulsar query, against the page of a broker under a small load.

pulsar_dashboards.csv has the names of metrics, and the labels of Pulsar by which they are selected or grouped, as the
dashboards of apache/pulsar, streamnative/apache-pulsar-grafana-dashboard and lhotari/pulsar-grafana-dashboards have
them; without the dashboards of other programs (proxy, functions, connectors, bookies).
"""

import csv
import re
from fnmatch import fnmatchcase
from pathlib import Path
from typing import NamedTuple

import pytest
from broker_harness import TOPIC, Clock, Harness, ids

QUERIES = Path(__file__).parent / "pulsar_dashboards.csv"
DOCUMENT = Path(__file__).parents[3] / "docs" / "pulsar-metrics.md"
SERIES = re.compile(r"^(\w+)(?:\{(.*)\})? (\S+)$")
IN_VAIN = {("streamnative/topic", "pulsar_topics_count")}
"""Queries that no broker answers: Pulsar counts topics by namespace, without a label `topic`."""
LABEL = re.compile(r'(\w+)="((?:[^"\\]|\\.)*)"')


class Series(NamedTuple):
    name: str
    labels: dict[str, str]
    value: float


class Query(NamedTuple):
    dashboard: str
    metric: str
    labels: frozenset[str]


def queries() -> list[Query]:
    rows = csv.DictReader(QUERIES.read_text().splitlines())
    return [Query(row["dashboard"], row["metric"], frozenset(row["labels"].split())) for row in rows]


def left_out() -> list[str]:
    """Return the patterns of the metrics that the document leaves out."""
    rows = DOCUMENT.read_text().partition("## Left out")[2].splitlines()
    return [name for row in rows if row.startswith("| `") for name in re.findall(r"`([\w*]+)`", row.split(" | ")[0])]


def is_left_out(metric: str, shown: set[str]) -> bool:
    return metric not in shown and any(fnmatchcase(metric, pattern) for pattern in left_out())


async def page_of(broker: Harness) -> list[Series]:
    found = []
    for line in (await broker.topic_page()).decode().splitlines():
        match = SERIES.match(line)
        if match is not None:
            name, labels, value = match.groups()
            found.append(Series(name, dict(LABEL.findall(labels or "")), float(value)))
    return found


@pytest.fixture
async def page(broker: Harness, clock: Clock) -> list[Series]:
    """The page after three messages and a batch of two, of which two messages were delivered and one acknowledged, and
    a delayed one that is stored in an entry of its own."""
    clock.advance(60 - clock.now() % 60)
    await broker.client.put(f"{TOPIC}/subscriptions/other", json={})
    await broker.produce("aa", "bb", "cc")
    await broker.produce_batch("dd", "ee")
    await broker.produce("later", params={"deliver_after_ms": "3600000"})
    received = await broker.receive("c1", max=2)
    await broker.ack(ids(received[:1]))
    clock.advance(60)
    return await page_of(broker)


async def test_every_query_finds_series_with_its_labels(page: list[Series]) -> None:
    shown: dict[str, list[set[str]]] = {}
    for series in page:
        shown.setdefault(series.name, []).append(set(series.labels))
    missing = [
        query
        for query in queries()
        if (query.dashboard, query.metric) not in IN_VAIN
        and not is_left_out(query.metric, set(shown))
        and not any(query.labels <= labels for labels in shown.get(query.metric, ()))
    ]
    assert missing == []


def test_the_queries_of_the_main_dashboards_are_answered() -> None:
    """Of the dashboards of topics and namespaces, only features that this broker does not have are left out."""
    main = [query for query in queries() if query.dashboard.partition("/")[2] in ("topic", "namespace", "messaging")]
    unanswered = {query.metric for query in main if is_left_out(query.metric, set())}
    assert len(main) > 200
    assert {name for name in unanswered if not name.startswith("pulsar_replication_")} == {
        "pulsar_consumer_msg_rate_redeliver",
        "pulsar_entry_size_overflow",
        "pulsar_storage_offloaded_size",
        "pulsar_storage_read_latency_count",
    }


def test_each_row_of_what_is_left_out_is_about_a_metric_that_is_not_there() -> None:
    text = DOCUMENT.read_text().partition("## Left out")[0]
    here = {name for row in text.splitlines() if row.startswith("| `") for name in re.findall(r"`(pulsar_\w+)`", row)}
    exact = [pattern for pattern in left_out() if "*" not in pattern]
    assert here.isdisjoint(exact)
    assert len(here) > 80


async def test_the_values_are_those_of_what_was_sent(page: list[Series], broker: Harness) -> None:
    at = {"cluster": "bindery", "namespace": "public/default", "topic": "persistent://public/default/t"}
    of_topic = {series.name: series.value for series in page if series.labels == at}
    of_s = {series.name: series.value for series in page if series.labels == {**at, "subscription": "s"}}
    of_other = {series.name: series.value for series in page if series.labels == {**at, "subscription": "other"}}
    (topic,) = broker.broker.topics
    size = topic.ledger.size
    assert of_topic["pulsar_in_messages_total"] == 6
    assert of_topic["pulsar_in_bytes_total"] == of_topic["pulsar_storage_logical_size"] == size
    assert of_topic["pulsar_storage_size"] == size * broker.settings.ledger.write_quorum
    assert of_topic["pulsar_entry_size_count"] == of_topic["pulsar_storage_write_latency_count"] == 5
    assert of_topic["pulsar_entry_size_sum"] == size
    assert of_topic["pulsar_subscriptions_count"] == 2
    assert of_s["pulsar_out_messages_total"] == 2
    assert of_s["pulsar_out_bytes_total"] == 4
    assert of_s["pulsar_subscription_unacked_messages"] == 0  # the lease is over
    assert (of_s["pulsar_subscription_back_log"], of_other["pulsar_subscription_back_log"]) == (4, 5)
    assert of_topic["pulsar_msg_backlog"] == 9
    assert of_s["bindery_broker_acked_messages_total"] == 1


async def test_counters_never_decrease_under_load(broker: Harness, clock: Clock) -> None:
    before: dict[str, float] = {}
    for number in range(5):
        await broker.produce(*"abc"[: number % 3 + 1])
        await broker.ack(ids(await broker.receive("c", max=2)))
        clock.advance(31)
        found = {f"{one.name}{one.labels}": one.value for one in await page_of(broker) if one.name.endswith("_total")}
        assert {series: value for series, value in before.items() if found.get(series, -1) < value} == {}
        assert found["pulsar_in_messages_total" + str(_topic_labels())] > before.get(
            "pulsar_in_messages_total" + str(_topic_labels()), 0
        )
        before = found


def _topic_labels() -> dict[str, str]:
    return {"cluster": "bindery", "namespace": "public/default", "topic": "persistent://public/default/t"}
