"""A crash or a fault at any step of a compaction leaves the former state or the new one, and in the end no ledger."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest
from bindery_broker.managed_ledger import ManagedLedger
from bindery_client.memory.memory import MemoryLedgerClient, MemoryLedgers
from bindery_metadata.stores.memory import MemoryTree
from broker_harness import TOPIC, Clock, Harness
from compaction_parts import compact, pairs, publish, read_all, table_of
from managed_ledger_faults import Plan

SETTINGS = {"ledger": {"entries_max": 4, "age_s_min": 0, "operation_timeout_s": 5}}
TABLE = {"a": "2", "b": "1", "d": "1"}
OLD = [("a", "1"), ("b", "1"), ("c", "1"), ("a", "2"), ("d", "1"), ("c", "")]
"""What a reader gets while the first compaction is in force, and after it the rest of the topic."""
NEW = [("b", "1"), ("a", "2"), ("d", "1")]


class Cluster:
    def __init__(self) -> None:
        self.tree, self.ledgers, self.clock = MemoryTree(), MemoryLedgers(), Clock()

    def broker(self, url: str, plan: Plan | None = None) -> Harness:
        return Harness(tree=self.tree, ledgers=self.ledgers, clock=self.clock, url=url, plan=plan, **SETTINGS)

    def compacted_ledgers(self, *, with_empty: bool = False) -> list[int]:
        """The compacted ledgers. An empty one may be left over, because its creation was not answered."""
        return [
            ledger_id
            for ledger_id, ledger in self.ledgers.ledgers.items()
            if ledger.metadata.custom.get("component") == b"compacted-ledger" and (ledger.entries or with_empty)
        ]


async def prepare(broker: Harness) -> None:
    await publish(broker, *OLD[:3], batch=False)
    await compact(broker)
    await publish(broker, *OLD[3:], batch=False)


@asynccontextmanager
async def successor(cluster: Cluster) -> AsyncIterator[Harness]:
    broker = cluster.broker("http://two")
    yield broker
    await broker.close()


async def steps_of_a_compaction() -> range:
    cluster, plan = Cluster(), Plan(0, die_at=None, fault_rate=0)
    broker = cluster.broker("http://one", plan)
    await prepare(broker)
    first = plan.steps + 1
    await compact(broker)
    await broker.close()
    return range(first, plan.steps + 1)


async def test_a_crash_at_any_step_leaves_one_of_the_two_states():
    steps = await steps_of_a_compaction()
    assert len(steps) > 8
    states = set()
    for seed in range(2):  # whether the last call is done
        for step in steps:
            cluster, plan = Cluster(), Plan(seed, die_at=step, fault_rate=0)
            broker = cluster.broker("http://one", plan)
            await prepare(broker)
            await broker.client.put(f"{TOPIC}/compaction")
            (topic,) = broker.broker.topics
            died, ended = asyncio.create_task(plan.died.wait()), asyncio.create_task(topic.compaction.wait())
            async with asyncio.timeout(30):
                await asyncio.wait([died, ended], return_when=asyncio.FIRST_COMPLETED)
            died.cancel()  # if the number of steps varies
            ended.cancel()
            await broker.die()
            async with successor(cluster) as second:
                found = pairs(await read_all(second))
                assert found in (OLD, NEW), step
                assert table_of(found) == TABLE
                states.add(len(found))
                await compact(second)
                assert pairs(await read_all(second)) == NEW
                after = await compact(second)  # also without new entries
                assert cluster.compacted_ledgers() == [after["ledger_id"]], step
            for topic in list(broker.broker.topics):
                topic.compaction.cancel()
    assert states == {len(OLD), len(NEW)}


@pytest.mark.parametrize("seed", range(20))
async def test_faults_leave_one_of_the_two_states_too(seed):
    cluster = Cluster()
    broker = cluster.broker("http://one")
    await prepare(broker)
    await broker.close()
    plan = Plan(seed, die_at=None, fault_rate=0)
    second = cluster.broker("http://two", plan)
    await read_all(second)
    plan._fault_rate = 0.15
    answer = await second.client.put(f"{TOPIC}/compaction")
    assert answer.status_code in (200, 503)
    for topic in list(second.broker.topics):
        await topic.compaction.wait()
    plan._fault_rate = 0
    if len(second.broker.topics):
        assert table_of(pairs(await read_all(second))) == TABLE
    await second.close()
    third = cluster.broker("http://three")
    assert table_of(pairs(await read_all(third))) == TABLE
    await compact(third)
    assert pairs(await read_all(third)) == NEW
    after = await compact(third)
    assert cluster.compacted_ledgers() == [after["ledger_id"]]
    await third.close()


async def test_a_replaced_owner_that_ends_its_compaction_changes_nothing():
    """The first broker has not recorded its new ledger when another process takes the topic over."""
    cluster = Cluster()
    first = cluster.broker("http://one")
    await prepare(first)
    (topic,) = first.broker.topics
    before = topic.compaction.ledger_ids()
    cluster.ledgers.hold_adds()
    await first.client.put(f"{TOPIC}/compaction")
    while len(cluster.compacted_ledgers(with_empty=True)) < 2:
        await asyncio.sleep(0)
    second = await ManagedLedger.open(
        topic.name.managed_ledger_name,
        client=MemoryLedgerClient(cluster.ledgers),
        store=cluster.tree.connect(),
        clock=cluster.clock.now_ms,
        settings=first.settings.ledger,
        create=False,
    )
    cluster.ledgers.release_adds()
    await topic.compaction.wait()
    assert topic.compaction.last_run.status.value == "ERROR"
    cursor = second.system_cursor("__compaction")
    assert cursor is not None
    assert [cursor.position_properties["CompactedTopicLedger"]] == before == cluster.compacted_ledgers()
    await second.close()
    async with successor(cluster) as third:
        await first.die()
        assert pairs(await read_all(third)) == OLD
        await compact(third)
        assert pairs(await read_all(third)) == NEW
