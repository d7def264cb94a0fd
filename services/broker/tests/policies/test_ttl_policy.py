"""Time to live: messages expire for every durable subscription, and never before they are due."""

from collections.abc import AsyncIterator, Sequence

import pytest
from bindery_broker.managed_ledger import SYSTEM_CURSORS, ManagedLedgerSettings
from bindery_client.ledger.api import Entry
from bindery_client.memory.memory import MemoryLedgerClient, MemoryLedgers
from bindery_core.errors import NoSuchEntry
from bindery_core.ids import LedgerId
from bindery_metadata.stores.memory import MemoryTree
from bindery_pulsar.message_id import EARLIEST, MessageId
from bindery_pulsar.topic_name import TopicName
from broker_harness import TOPIC, Clock, Harness, ids, payloads
from policy_parts import set_policies

NAME = TopicName.parse("public/default/t")


async def enforce(broker: Harness) -> None:
    await broker.broker.topics.enforce()


async def stats(broker: Harness, sub: str = "s") -> dict[str, int]:
    found: dict[str, int] = (await broker.client.get(TOPIC)).json()["subscriptions"][sub]
    return found


async def backlog(broker: Harness, sub: str = "s") -> int:
    return (await stats(broker, sub))["backlog_entries"]


async def test_messages_expire_for_every_durable_subscription_and_are_counted(broker: Harness) -> None:
    set_policies(broker, message_ttl_s=10)
    await broker.receive(sub="s")
    await broker.receive(sub="other")
    await broker.produce("a")
    await broker.produce_batch("b", "c")
    broker.clock.advance(5)
    await broker.produce("d")
    broker.clock.advance(4.9)
    await enforce(broker)
    assert (await backlog(broker), await backlog(broker, "other")) == (3, 3)
    broker.clock.advance(0.1)
    await enforce(broker)
    for sub in ("s", "other"):
        found = await stats(broker, sub)
        assert (found["backlog_entries"], found["expired"]) == (1, 3)
    assert payloads(await broker.receive()) == ["d"]


async def test_nothing_expires_without_a_policy(broker: Harness) -> None:
    await broker.receive()
    await broker.produce("a")
    broker.clock.advance(10**8)
    await enforce(broker)
    assert await backlog(broker) == 1


async def test_a_delayed_message_expires_only_after_its_time_and_holds_up_no_other(broker: Harness) -> None:
    set_policies(broker, message_ttl_s=10)
    await broker.receive()
    await broker.produce("delayed", params={"deliver_after_ms": 60_000})
    await broker.produce("plain")
    broker.clock.advance(10)
    await enforce(broker)
    assert (await backlog(broker), (await stats(broker))["expired"]) == (1, 1)
    broker.clock.advance(59)  # due since 9 seconds
    await enforce(broker)
    assert await backlog(broker) == 1
    broker.clock.advance(1)
    await enforce(broker)
    assert (await backlog(broker), (await stats(broker))["expired"]) == (0, 2)


async def test_a_delayed_message_is_delivered_when_it_is_due_although_its_publish_time_is_over(broker: Harness) -> None:
    set_policies(broker, message_ttl_s=10)
    await broker.receive()
    await broker.produce("delayed", params={"deliver_after_ms": 60_000})
    for _ in range(6):
        broker.clock.advance(10)
        await enforce(broker)
    assert payloads(await broker.receive()) == ["delayed"]


async def test_expiry_releases_no_key_that_is_in_flight(broker: Harness) -> None:
    set_policies(broker, message_ttl_s=10)
    await broker.produce("1", params={"key": "k"})
    first = await broker.receive("c1", type="key_shared", ack_timeout_ms=3_600_000, session_ttl_ms=3_600_000)
    assert payloads(first) == ["1"]
    broker.clock.advance(10)
    await enforce(broker)
    assert await backlog(broker) == 0
    await broker.receive("c2", type="key_shared", session_ttl_ms=3_600_000)  # may inherit the key
    await broker.produce("2", params={"key": "k"})
    found = {name: payloads(await broker.receive(name, type="key_shared")) for name in ("c2", "c1")}
    assert found["c2"] == [], "another consumer got a key that c1 still works on"
    assert (await broker.ack(ids(first))).status_code == 200  # accepted as a repetition
    got = [*found["c1"], *payloads(await broker.receive("c2", type="key_shared"))]
    assert got == ["2"]


async def test_a_seek_backwards_is_judged_anew(broker: Harness) -> None:
    set_policies(broker, message_ttl_s=10)
    await broker.receive()
    await broker.produce("a", "b")
    await broker.ack(ids(await broker.receive()))
    broker.clock.advance(5)
    await enforce(broker)
    assert (await broker.post(f"{TOPIC}/subscriptions/s/seek", {"message_id": "earliest"})).status_code == 200
    assert await backlog(broker) == 2
    broker.clock.advance(5)
    await enforce(broker)
    assert (await backlog(broker), (await stats(broker))["expired"]) == (0, 2)


async def test_a_partly_acknowledged_batch_counts_the_rest(broker: Harness) -> None:
    set_policies(broker, message_ttl_s=10)
    await broker.receive()
    await broker.produce_batch("a", "b", "c")
    await broker.ack(ids(await broker.receive(max=1)))
    broker.clock.advance(10)
    await enforce(broker)
    assert (await backlog(broker), (await stats(broker))["expired"]) == (0, 2)


async def test_readers_and_cursors_of_the_broker_are_left_alone(broker: Harness) -> None:
    set_policies(broker, message_ttl_s=10)
    await broker.produce("a")
    topic = await broker.broker.topic(NAME)
    for name in SYSTEM_CURSORS:
        await topic.ledger.open_cursor(name, start=EARLIEST)
    await topic.subscribe("reader", durable=False)
    broker.clock.advance(11)
    await enforce(broker)
    assert topic.subscriptions["reader"].cursor.backlog_entries == 1
    found = [topic.ledger.system_cursor(name) for name in SYSTEM_CURSORS]
    assert [cursor.backlog_entries for cursor in found if cursor is not None] == [1, 1]


async def test_a_new_owner_continues(broker: Harness) -> None:
    set_policies(broker, message_ttl_s=10)
    await broker.receive()
    await broker.produce("a", "b")
    broker.clock.advance(10)
    topic = await broker.broker.topic(NAME)
    await topic.close()
    await broker.broker.topic(NAME)
    await enforce(broker)
    assert await backlog(broker) == 0


async def lose(broker: Harness, monkeypatch: pytest.MonkeyPatch, *texts: str) -> None:
    """Store messages in a ledger, close it, and lose the entries named "lost"."""
    stored = [MessageId.parse(one).position for one in await broker.produce(*texts)]
    await (await broker.broker.topic(NAME)).ledger.roll()
    lost = {position.entry_id for text, position in zip(texts, stored, strict=True) if text == "lost"}
    ledger = broker.ledgers.find(LedgerId(stored[0].ledger_id))
    some = ledger.some

    def read(entry_ids: Sequence[int], limit: int) -> list[Entry]:
        if lost.intersection(entry_ids):
            raise NoSuchEntry("no bookie has the entry", ledger_id=ledger.ledger_id)
        return some(entry_ids, limit)

    monkeypatch.setattr(ledger, "some", read)


@pytest.fixture
async def uncached(tree: MemoryTree, ledgers: MemoryLedgers) -> AsyncIterator[Harness]:
    """A broker that reads from bookies what it has just stored."""
    settings = ManagedLedgerSettings(cache_size_max=0)
    broker = Harness(tree=tree, ledgers=ledgers, clock=Clock(), url="http://one", ledger=settings)
    yield broker
    await broker.close()


async def test_lost_entries_expire_when_their_ledger_was_closed_that_long_ago(
    uncached: Harness, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker = uncached
    set_policies(broker, message_ttl_s=10)
    await broker.receive()
    await lose(broker, monkeypatch, "a", "lost", "b", "c", "lost")
    broker.clock.advance(9.9)
    await broker.produce("young")
    await enforce(broker)
    assert await backlog(broker) == 6
    broker.clock.advance(0.1)
    await enforce(broker)
    assert (await backlog(broker), (await stats(broker))["expired"]) == (1, 5)
    assert payloads(await broker.receive()) == ["young"]


async def test_a_lost_ledger_expires_as_a_whole(uncached: Harness) -> None:
    broker = uncached
    set_policies(broker, message_ttl_s=10)
    await broker.receive()
    (first, *_) = await broker.produce(*"abcdefg")
    await (await broker.broker.topic(NAME)).ledger.roll()
    await MemoryLedgerClient(broker.ledgers).delete(LedgerId(MessageId.parse(first).ledger_id))
    await broker.produce("young")
    await enforce(broker)
    assert await backlog(broker) == 8
    broker.clock.advance(9.9)
    await broker.produce("younger")
    broker.clock.advance(0.1)
    await enforce(broker)
    assert (await backlog(broker), (await stats(broker))["expired"]) == (1, 8)
    assert payloads(await broker.receive()) == ["younger"]


async def test_a_message_that_was_read_for_a_consumer_that_left_expires_behind_a_delayed_one(broker: Harness) -> None:
    set_policies(broker, message_ttl_s=10)
    await broker.receive(type="shared")
    await broker.produce("delayed", params={"deliver_after_ms": 600_000})
    await broker.produce("first", "second")
    assert payloads(await broker.receive(type="shared", max=1)) == ["first"]
    assert (await broker.client.delete(f"{TOPIC}/subscriptions/s/consumers/c1")).status_code == 200
    topic = await broker.broker.topic(NAME)
    assert topic.subscriptions["s"].dispatcher.known_count > 0
    broker.clock.advance(11)
    await enforce(broker)
    assert (await backlog(broker), (await stats(broker))["expired"]) == (1, 2)
    assert payloads(await broker.receive(type="shared", max=10)) == []


async def test_a_message_that_a_consumer_has_does_not_expire_behind_a_delayed_one(broker: Harness) -> None:
    set_policies(broker, message_ttl_s=10)
    await broker.receive(type="shared")
    await broker.produce("delayed", params={"deliver_after_ms": 600_000})
    await broker.produce("held")
    held = await broker.receive(type="shared", ack_timeout_ms=3_600_000, session_ttl_ms=3_600_000)
    assert payloads(held) == ["held"]
    broker.clock.advance(11)
    await enforce(broker)
    assert await backlog(broker) == 2
    assert (await broker.ack(ids(held))).status_code == 200
    assert await backlog(broker) == 1
