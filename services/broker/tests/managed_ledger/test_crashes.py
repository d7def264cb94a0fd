"""Stop a broker at every step, with faults before it: the next broker finds everything that was acknowledged.

History: returned positions and returned acknowledgements. Verdict, after each reopening:
- every entry acknowledged to its producer is at its position, unless it was consumed and trimmed;
- a position never names two entries, and an entry never has two positions;
- entries of one producer are in the order in which they were sent;
- every acknowledgement that returned still holds;
- an entry whose add failed as "not stored" is not stored.
"""

import asyncio
import random
from typing import Any

import pytest
from bindery_broker.managed_ledger import ManagedLedger
from bindery_broker.managed_ledger.ownership_proof import OwnershipCheck
from bindery_core.errors import BinderyError, TopicFenced, TryAgain
from bindery_pulsar.message_id import EARLIEST, Position
from managed_ledger_cluster import Cluster, read_all
from managed_ledger_faults import FaultyClient, FaultyStore, Plan

LIFETIMES = 5
SMALL: dict[str, Any] = {
    "entries_max": 7,
    "cursor_entries_max": 4,
    "cursor_changes_size_max": 1,
    "operation_timeout_s": 0.3,
    "add_timeout_s": 0.3,
}
LONG_TIMEOUTS = SMALL | {"operation_timeout_s": 30, "add_timeout_s": 30}
"""Settings without injected faults. The limits are long, so that a pause of the machine does not cause a timeout."""


class History:
    """The answers that clients received from all brokers."""

    def __init__(self) -> None:
        self.produced: dict[Position, bytes] = {}
        self.consumed: set[Position] = set()
        self.seen: dict[tuple[int, int], bytes] = {}
        self.refused: set[bytes] = set()
        """Payloads of adds that failed with TryAgain: nothing of them was stored, so a producer may send them again."""
        self.sent = 0

    def next_payload(self, producer: int) -> bytes:
        self.sent += 1
        return b"%d/%06d" % (producer, self.sent)

    async def check(self, topic: ManagedLedger) -> None:
        entries = await read_all(topic)
        for position, payload in entries.items():
            assert self.seen.setdefault(position, payload) == payload, f"{position} names two entries"
        assert len(set(self.seen.values())) == len(self.seen), "an entry has two positions"
        assert not self.refused.intersection(entries.values()), "an entry is stored that was reported as not stored"
        for position, payload in self.produced.items():
            if position not in entries:
                assert position < topic.first_position, f"acknowledged entry {position} is lost"
                assert self.seen.get(position, payload) == payload
            else:
                assert entries[position] == payload
        for producer in (b"0/", b"1/"):
            sent = [payload for payload in entries.values() if payload.startswith(producer)]
            assert sent == sorted(sent), "entries of a producer changed their order"
        cursor = topic.cursors.get("s")
        assert cursor is not None or not self.consumed
        for position in self.consumed:
            assert cursor is not None
            assert cursor.is_acked(position), f"acknowledgement of {position} is lost"


async def produce(topic: ManagedLedger, history: History, chance: random.Random, producer: int) -> None:
    while topic.is_open:
        payloads = [history.next_payload(producer) for _ in range(chance.randint(1, 4))]
        try:
            positions = await topic.add_many(payloads)
        except BinderyError as error:
            if isinstance(error, TryAgain):
                history.refused.update(payloads)
            await asyncio.sleep(0)
            continue
        assert len(set(positions)) == len(positions)
        for position, payload in zip(positions, payloads, strict=True):
            assert position not in history.produced, "a position was returned for two entries"
            history.produced[position] = payload


async def consume(topic: ManagedLedger, history: History, chance: random.Random) -> None:
    while topic.is_open:
        try:
            cursor = await topic.open_cursor("s", start=EARLIEST)
            found = await cursor.read_unacked(EARLIEST, entries_max=8, size_max=10**6)
            for entry in found.entries:
                assert history.seen.setdefault(entry.position, entry.payload) == entry.payload
            chosen = [entry.position for entry in found.entries if chance.random() < 0.6]
            if chosen and chance.random() < 0.2:
                await cursor.ack_cumulative(chosen[-1])
            elif chosen:
                await cursor.ack_many(chosen)
            history.consumed.update(chosen)
            if chance.random() < 0.2:
                await topic.trim()
        except BinderyError:
            pass
        await asyncio.sleep(0)


async def live(topic: ManagedLedger, history: History, chance: random.Random) -> None:
    """Run producers and a consumer until the topic is lost."""
    async with asyncio.TaskGroup() as group:
        group.create_task(produce(topic, history, chance, 0))
        group.create_task(produce(topic, history, chance, 1))
        group.create_task(consume(topic, history, chance))


async def broker(cluster: Cluster, history: History, chance: random.Random, plan: Plan) -> None:
    """Open the topic, repeatedly if that fails, and run traffic until the broker stops. The topic must not be lost."""
    while True:
        client, store = FaultyClient(cluster.ledgers, plan), FaultyStore(cluster.tree.connect(), plan)
        try:
            topic = await cluster.open(client=client, store=store, **SMALL)
        except BinderyError:
            continue
        cluster.forget(topic)  # a failed broker closes nothing
        await live(topic, history, chance)
        raise AssertionError("the broker lost the topic although no other broker opened it")


@pytest.mark.parametrize("seed", range(40))
async def test_a_broker_may_fail_at_any_step(cluster: Cluster, seed: int) -> None:
    """Replay one: pytest -k 'may_fail_at_any_step and [SEED]'"""
    chance = random.Random(seed)
    history = History()
    for _ in range(LIFETIMES):
        plan = Plan(chance.randrange(2**32), die_at=chance.randint(1, 400), fault_rate=chance.choice([0, 0.05, 0.2]))
        died = asyncio.ensure_future(plan.died.wait())
        working = asyncio.ensure_future(broker(cluster, history, chance, plan))
        await asyncio.wait([working, died], return_when=asyncio.FIRST_COMPLETED, timeout=60)
        assert plan.died.is_set() or working.done()
        working.cancel()
        for result in await asyncio.gather(working, return_exceptions=True):
            if isinstance(result, Exception):
                raise result
        died.cancel()
        survivor = await cluster.open(**LONG_TIMEOUTS)
        await history.check(survivor)
        await survivor.crash()
    assert history.sent


async def stale_owner() -> bool:
    return True


async def take_over(cluster: Cluster, **options: Any) -> ManagedLedger:
    """Open the topic as a new owner. Repeat the open if the old owner writes the znode meanwhile.

    An old owner that considers itself the owner takes the recovery of its ledger for healing.
    """
    while True:
        try:
            return await cluster.open(**options)
        except TopicFenced:
            await asyncio.sleep(0)


@pytest.mark.parametrize("is_owner", [None, stale_owner], ids=["without-ownership-check", "stale-ownership-check"])
@pytest.mark.parametrize("seed", range(10))
async def test_a_replaced_broker_acknowledges_nothing(
    cluster: Cluster, seed: int, is_owner: OwnershipCheck | None
) -> None:
    """The old owner is not notified, or still considers itself the owner; both get requests."""
    chance = random.Random(seed)
    history = History()
    old = await cluster.open(**LONG_TIMEOUTS, is_owner=is_owner)
    for _ in range(LIFETIMES):
        traffic = asyncio.ensure_future(live(old, history, chance))
        await asyncio.sleep(chance.random() * 0.01)
        new = await take_over(cluster, **LONG_TIMEOUTS, is_owner=is_owner)
        with pytest.raises(TopicFenced):
            await old.add_many([b"late"])
        if "s" in old.cursors:
            with pytest.raises(TopicFenced):
                await old.cursors["s"].seek(EARLIEST)
        await traffic
        assert not old.is_open
        await new.trim()  # otherwise it may trim entries that `check` is about to read
        await history.check(new)
        old = new
    assert history.produced
    assert history.consumed
