"""Live consumers are served from the cache while other consumers catch up."""

from collections.abc import Sequence
from typing import Any

import pytest
from bindery_broker.managed_ledger import ManagedLedgerSettings
from bindery_broker.managed_ledger.ledger_list import LedgerRecord
from bindery_broker.managed_ledger.reader import EntryReader
from broker_harness import Clock, Harness, ids
from managed_ledger_cluster import QUICK

LIVE, OLD = "/v1/topics/public/default/live", "/v1/topics/public/default/old"
CACHE_SIZE = 200_000
"""Bytes. The backlog has five times as many."""


@pytest.fixture
async def broker(tree: Any, ledgers: Any, clock: Clock) -> Any:
    """A broker with a small cache. Without room to read ahead, each call reads what it delivers."""
    settings = {"ledger": ManagedLedgerSettings(**QUICK, cache_size_max=CACHE_SIZE), "read_ahead_bytes_max": 0}
    harness = Harness(tree=tree, ledgers=ledgers, clock=clock, url="http://one", **settings)
    yield harness
    await harness.close()


@pytest.fixture
def fetched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the ledger of each read from bookies."""
    found: list[int] = []
    fetch = EntryReader._fetch

    async def recorded(self: EntryReader, record: LedgerRecord, **limits: int) -> Sequence[bytes]:
        found.append(record.ledger_id)
        return await fetch(self, record, **limits)

    monkeypatch.setattr(EntryReader, "_fetch", recorded)
    return found


async def consume(broker: Harness, topic: str, sub: str, count: int) -> int:
    """Receive and acknowledge. Returns the number of messages."""
    messages = await broker.receive(sub=sub, topic=topic, max=count)
    if messages:
        await broker.ack(ids(messages), sub=sub, topic=topic)
    return len(messages)


async def test_a_live_consumer_never_reads_from_bookies_while_another_one_catches_up(
    broker: Harness, fetched: list[int]
) -> None:
    """The live consumer is up to 20 entries behind, and the other one reads five times the size of the cache."""
    await broker.client.put(f"{LIVE}/subscriptions/live", json={})
    for _ in range(200):
        await broker.produce("b" * 5_000, topic=OLD)
    old, live = (topic for topic in sorted(broker.broker.topics, key=lambda topic: topic.name.local, reverse=True))
    assert old.ledger.size > 5 * CACHE_SIZE
    delivered = caught_up = 0
    while caught_up < 200:
        await broker.produce(*["m" * 100] * 20, topic=LIVE)
        for _ in range(5):  # more bytes than the cache has
            caught_up += await consume(broker, OLD, "s", 10)
        delivered += await consume(broker, LIVE, "live", 20)
    assert delivered == 80
    ledger_of = {topic.name.local: topic.ledger.last_confirmed.ledger_id for topic in (old, live)}
    assert fetched.count(ledger_of["old"]) > 10
    assert fetched.count(ledger_of["live"]) == 0


async def test_a_consumer_that_catches_up_in_the_same_topic_does_not_disturb_the_live_one(
    broker: Harness, fetched: list[int]
) -> None:
    for _ in range(200):
        await broker.produce("b" * 5_000, topic=LIVE)
    await broker.client.put(f"{LIVE}/subscriptions/live", json={"initial": "latest"})
    caught_up = 0
    while caught_up < 200:
        await broker.produce(*["m" * 100] * 10, topic=LIVE)
        reads = len(fetched)
        assert await consume(broker, LIVE, "live", 10) == 10
        assert len(fetched) == reads
        caught_up += await consume(broker, LIVE, "s", 10)
    assert fetched


async def test_subscriptions_that_catch_up_together_share_their_reads(broker: Harness, fetched: list[int]) -> None:
    for _ in range(200):
        await broker.produce("b" * 5_000, topic=OLD)
    for _ in range(25):
        assert await consume(broker, OLD, "s", 8) == 8
        reads = len(fetched)
        assert await consume(broker, OLD, "t", 8) == 8
        assert len(fetched) == reads
    assert reads > 20
