"""The statistics of topics, subscriptions and consumers over HTTP, with exact numbers."""

from typing import Any

from bindery_broker.http.v1.statistics_view import OLDEST_READ_MAX, Times, rounded
from bindery_broker.managed_ledger import ManagedLedger
from bindery_broker.statistics.traffic import Rates
from broker_harness import TOPIC, Clock, Harness, ids


async def stats(broker: Harness) -> dict[str, Any]:
    answer = await broker.client.get(TOPIC)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def subscription(broker: Harness) -> dict[str, Any]:
    (found,) = (await broker.client.get(f"{TOPIC}/subscriptions")).json()["subscriptions"]
    return dict(found)


def entry_size(broker: Harness) -> int:
    """Return the bytes of the topic's entries, which have the same size."""
    (topic,) = broker.broker.topics
    return topic.ledger.size // topic.ledger.entries_count


async def test_a_topic_has_rates_over_the_last_ten_seconds(broker: Harness, clock: Clock) -> None:
    await broker.produce(*"abcdefgh")
    clock.advance(4)
    found = await stats(broker)
    size = entry_size(broker)
    assert (found["messages_in"], found["bytes_in"], found["average_message_size"]) == (8, 8 * size, size)
    assert (found["messages_in_per_s"], found["bytes_in_per_s"]) == (2, 2 * size)
    assert found["last_published_at"] == clock.now_ms() - 4_000
    assert (found["messages_out_per_s"], found["bytes_out_per_s"]) == (0, 0)
    clock.advance(20)
    assert (await stats(broker))["messages_in_per_s"] == 0


async def test_a_topic_without_messages_has_no_means(broker: Harness) -> None:
    await broker.client.put(TOPIC)
    found = await stats(broker)
    names = ("average_message_size", "last_published_at", "oldest_unacked_age_ms", "backlog_bytes", "messages_in_per_s")
    assert [found[name] for name in names] == [None, None, None, 0, 0]


async def test_a_subscription_has_what_it_delivered(broker: Harness, clock: Clock) -> None:
    await broker.produce("aa", "bb", "cc", "dd")
    clock.advance(1)
    received = await broker.receive(max=3)
    clock.advance(3)
    await broker.ack(ids(received[:2]))
    found = await subscription(broker)
    expected = {
        "backlog_entries": 2,
        "backlog_bytes": 2 * entry_size(broker),
        "backlog_messages": 2,
        "backlog_messages_exact": True,
        "oldest_unacked_at": clock.now_ms() - 4_000,
        "oldest_unacked_age_ms": 4_000,
        "delayed": 0,
        "unacked": 1,
        "blocked_on_unacked": False,
        "messages_out": 3,
        "bytes_out": 6,
        "messages_out_per_s": 1,
        "bytes_out_per_s": 2,
        "redelivered": 0,
        "redelivered_per_s": 0,
        "acked": 2,
        "expired": 0,
        "evicted": 0,
        "acked_per_s": 2,
        "last_request_at": clock.now_ms() - 3_000,
        "last_delivered_at": clock.now_ms() - 3_000,
        "last_acked_at": clock.now_ms(),
    }
    assert {name: found[name] for name in expected} == expected
    topic = await stats(broker)
    assert {name: topic["subscriptions"]["s"][name] for name in expected} == expected
    assert (topic["messages_out"], topic["bytes_out"], topic["messages_out_per_s"], topic["bytes_out_per_s"]) == (
        3, 6, 1, 2,
    )  # fmt: skip
    assert (topic["backlog_bytes"], topic["oldest_unacked_age_ms"]) == (2 * entry_size(broker), 4_000)


async def test_redeliveries_are_counted_again_and_apart(broker: Harness, clock: Clock) -> None:
    await broker.produce("a", "b")
    first = await broker.receive("c1")
    await broker.post(f"{TOPIC}/subscriptions/s/nack", {"message_ids": ids(first[:1])})
    assert len(await broker.receive("c2")) == 1
    found = await subscription(broker)
    assert (found["messages_out"], found["redelivered"], found["redelivered_per_s"]) == (3, 1, 1)
    assert [(one["consumer"], one["messages"], one["redelivered"]) for one in found["consumers"]] == [
        ("c1", 2, 0),
        ("c2", 1, 1),
    ]


async def test_a_consumer_has_its_own_counts(broker: Harness, clock: Clock) -> None:
    joined = clock.now_ms()
    await broker.produce("aa", "bb", "cc")
    received = await broker.receive("c1", max=2)
    other = await broker.receive("c2")
    clock.advance(2)
    await broker.ack(ids(received))
    await broker.post(f"{TOPIC}/subscriptions/s/ack", {"message_ids": ids(other), "consumer": "c1"})
    clock.advance(2)
    one, two = (await subscription(broker))["consumers"]
    expected = {
        "type": "shared",
        "address": "127.0.0.1",
        "connected_since": joined,
        "messages": 2,
        "bytes": 4,
        "messages_per_s": 0.5,
        "bytes_per_s": 1,
        "redelivered": 0,
        "acked": 3,
        "last_delivered_at": joined,
        "last_acked_at": joined + 2_000,
    }
    assert {name: one[name] for name in expected} == expected
    assert (two["messages"], two["acked"], two["last_acked_at"]) == (1, 0, None)


async def test_acknowledging_up_to_a_message_counts_all_before_it(broker: Harness) -> None:
    await broker.produce("a", "b", "c")
    received = await broker.receive("c1", type="exclusive")
    await broker.post(f"{TOPIC}/subscriptions/s/ack", {"cumulative": ids(received)[1]})
    found = await subscription(broker)
    assert (found["acked"], [one["acked"] for one in found["consumers"]]) == (2, [2])


async def test_a_repeated_acknowledgement_counts_once(broker: Harness) -> None:
    await broker.produce("a")
    received = await broker.receive()
    for _ in range(3):
        await broker.ack(ids(received))
    found = await subscription(broker)
    assert (found["acked"], found["oldest_unacked_at"], found["backlog_messages"]) == (1, None, 0)


async def test_what_a_deleted_subscription_delivered_still_counts(broker: Harness) -> None:
    await broker.produce("aa", "bb")
    await broker.receive("c1")
    await broker.client.delete(f"{TOPIC}/subscriptions/s", params={"force": "true"})
    found = await stats(broker)
    assert (found["messages_out"], found["bytes_out"], found["subscriptions"]) == (2, 4, {})


async def test_the_limit_of_unacknowledged_messages_is_shown(tree: Any, ledgers: Any, clock: Clock) -> None:
    broker = Harness(
        tree=tree, ledgers=ledgers, clock=clock, url="http://one", unacked_max=2, unacked_per_consumer_max=2
    )
    await broker.produce("a", "b", "c")
    await broker.client.put(f"{TOPIC}/subscriptions/s", json={})
    assert (await subscription(broker))["blocked_on_unacked"] is False
    await broker.receive()
    assert (await subscription(broker))["blocked_on_unacked"] is True
    await broker.close()


async def test_batches_make_the_number_of_messages_an_estimate(broker: Harness) -> None:
    await broker.client.put(f"{TOPIC}/subscriptions/s", json={})
    await broker.produce_batch(*"abcde")
    await broker.produce("f")
    found = await subscription(broker)
    assert (found["backlog_entries"], found["backlog_messages"], found["backlog_messages_exact"]) == (2, 6, False)


async def test_one_answer_reads_a_limited_number_of_entries(broker: Harness, monkeypatch: Any) -> None:
    await broker.produce("a")
    for number in range(OLDEST_READ_MAX + 5):
        await broker.client.put(f"{TOPIC}/subscriptions/s{number}", json={})
    reads: list[object] = []
    read = ManagedLedger.read

    async def counted(self: ManagedLedger, position: Any, **limits: int) -> Any:
        reads.append(position)
        return await read(self, position, **limits)

    monkeypatch.setattr(ManagedLedger, "read", counted)
    for known in (OLDEST_READ_MAX, OLDEST_READ_MAX + 5, OLDEST_READ_MAX + 5):
        found = (await stats(broker))["subscriptions"].values()
        assert sum(one["oldest_unacked_at"] is not None for one in found) == len(reads) == known


async def test_a_forwarded_request_shows_the_broker_that_passed_it_on(broker: Harness) -> None:
    await broker.receive_raw("c1")
    await broker.client.post(
        f"{TOPIC}/subscriptions/s/receive", json={"consumer": "c2", "wait_ms": 0}, headers={"bindery-proxied": "1"}
    )
    found = await subscription(broker)
    assert [one["address"] for one in found["consumers"]] == ["127.0.0.1", "via 127.0.0.1"]


def test_times_are_converted_to_the_wall_clock() -> None:
    times = Times(now=100.0, wall_ms=1_700_000_000_000)
    assert times.wall(98.5) == 1_699_999_998_500
    assert times.wall(None) is None


def test_rates_have_three_decimals() -> None:
    assert rounded(Rates(1 / 3, 2e6 / 3)) == (0.333, 666_666.667)
