"""The contract, and the loss of bookies, with real bookies and a real ZooKeeper."""

import asyncio
import socket
from collections.abc import AsyncIterator, Iterator

import pytest
from bindery_client.ledger.api import Entry
from bindery_client.ledger.replica import Verdict
from bindery_client.ledger.writer import WriteHandle
from bindery_client.settings import ClientSettings
from bindery_core.errors import NotEnoughBookies
from bindery_core.ids import EntryId
from ledger_client_contract import LedgerClientContract, MakeClient
from real_cluster import BOOKIES, Clients, RealCluster

pytestmark = pytest.mark.integration
LIMIT_S = 30.0
QUICK = ClientSettings(reconnect_pause_s=0.05, reconnect_pause_s_max=0.5, replacement_retry_s=0.5)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RealCluster]:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    cluster = RealCluster(tmp_path_factory.mktemp("cluster"), zookeeper_port=port)
    try:
        asyncio.run(cluster.start())
        yield cluster
    finally:
        asyncio.run(cluster.stop())


@pytest.fixture
async def whole(cluster: RealCluster) -> AsyncIterator[RealCluster]:
    """The cluster with every bookie running, also for the next test."""
    yield cluster
    for number in range(BOOKIES):
        if f"bookie-{number}" not in cluster.processes:
            cluster.start_bookie(f"bookie-{number}")
    await cluster.wait_for_bookies(BOOKIES)


class TestRealCluster(LedgerClientContract):
    @pytest.fixture
    async def make_client(self, cluster: RealCluster) -> AsyncIterator[MakeClient]:
        async with Clients(cluster) as make:
            yield make


class TestRealClusterInVersion2(LedgerClientContract):
    @pytest.fixture
    async def make_client(self, cluster: RealCluster) -> AsyncIterator[MakeClient]:
        async with Clients(cluster, ClientSettings(wire_version=2)) as make:
            yield make


async def add_numbers(writer: WriteHandle, first: int, end: int) -> None:
    async with asyncio.timeout(LIMIT_S), asyncio.TaskGroup() as group:
        for number in range(first, end):
            group.create_task(writer.add(b"%d" % number))


async def test_bookies_store_the_stripes_of_their_write_sets(whole: RealCluster) -> None:
    async with Clients(whole) as make:
        client = await make()
        writer = await client.create(ensemble_size=4, write_quorum=3, ack_quorum=2)
        await add_numbers(writer, 0, 8)
        await writer.close()
        b1, b2, b3, b4 = writer.metadata.last_segment.ensemble
        holders = []
        for entry_id in range(8):
            replicas = [await client.read_from_bookie(writer.ledger_id, EntryId(entry_id), b) for b in (b1, b2, b3, b4)]
            assert sum(replica.verdict is Verdict.ABSENT for replica in replicas) == 1
            holders.append({replica.bookie_id for replica in replicas if replica.verdict is Verdict.GOOD})
        assert holders == [{b1, b2, b3}, {b2, b3, b4}, {b3, b4, b1}, {b4, b1, b2}] * 2


async def test_adds_continue_after_kill_9_of_a_bookie(whole: RealCluster) -> None:
    async with Clients(whole, QUICK) as make:
        writer = await (await make()).create()
        await add_numbers(writer, 0, 500)
        before = writer.metadata.last_segment.ensemble
        adding = asyncio.ensure_future(add_numbers(writer, 500, 3000))
        await asyncio.sleep(0.01)
        whole.kill(before[1])
        await adding
        count = 3000
        async with asyncio.timeout(LIMIT_S):
            while before[1] in (await (await make()).metadata(writer.ledger_id)).last_segment.ensemble:
                await add_numbers(writer, count, count + 100)
                count += 100
        await add_numbers(writer, count, count + 100)
        reader = await (await make()).open(writer.ledger_id)
        entries = await reader.read(EntryId(0), EntryId(count + 99))
        assert [entry.payload for entry in entries] == [b"%d" % i for i in range(count + 100)]


async def test_no_acknowledged_entry_is_lost_if_bookies_without_a_spare_fail_and_restart(whole: RealCluster) -> None:
    """Without a spare, adds continue with the ack quorum, then fail. The restart loses no acknowledged entry."""
    async with Clients(whole, QUICK) as make:
        client = await make()
        writer = await client.create()
        await add_numbers(writer, 0, 100)
        first, second, _third = writer.metadata.last_segment.ensemble
        spare = next(name for name in whole.processes if name not in writer.metadata.last_segment.ensemble)
        whole.kill(spare)
        whole.kill(first)
        await add_numbers(writer, 100, 200)
        whole.kill(second)
        with pytest.raises(NotEnoughBookies) as refused:
            await add_numbers_one_by_one(writer, 200, 300)
        assert first in str(refused.value)
        for name in (spare, first, second):
            whole.start_bookie(name)
        await whole.wait_for_bookies(BOOKIES)
        reader = await (await make()).open(writer.ledger_id)
        entries = await reader.read(EntryId(0), EntryId(199))
        assert [entry.payload for entry in entries] == [b"%d" % i for i in range(200)]


async def add_numbers_one_by_one(writer: WriteHandle, first: int, end: int) -> None:
    for number in range(first, end):
        await asyncio.wait_for(writer.add(b"%d" % number), LIMIT_S)


async def test_a_bookie_that_restarts_at_another_address_is_found_by_its_id(whole: RealCluster) -> None:
    """The new process listens on another port, which its registration contains."""
    async with Clients(whole, QUICK) as make:
        writer = await (await make()).create()
        await add_numbers(writer, 0, 100)
        await writer.close()
        client = await make()
        reader = await client.open(writer.ledger_id)
        ensemble = writer.metadata.last_segment.ensemble
        for name in ensemble:
            whole.kill(name)
        for name in ensemble:
            whole.start_bookie(name)
        await whole.wait_for_bookies(BOOKIES)
        async with asyncio.timeout(LIMIT_S):
            while not set(ensemble) <= {
                bookie for bookie, writable in (await client.list_bookies()).items() if writable
            }:
                await asyncio.sleep(0.05)
        entries = await reader.read(EntryId(0), EntryId(99))
        assert [entry.payload for entry in entries] == [b"%d" % i for i in range(100)]


async def test_a_tail_continues_after_a_bookie_is_killed(whole: RealCluster) -> None:
    async with Clients(whole, QUICK) as make:
        writer = await (await make()).create()
        await writer.add(b"0")
        reader = await (await make()).open(writer.ledger_id, recover=False)
        seen: list[Entry] = []

        async def follow() -> None:
            async for batch in reader.tail(EntryId(0)):
                seen.extend(batch)

        following = asyncio.ensure_future(follow())
        await add_numbers_one_by_one(writer, 1, 30)
        whole.kill(writer.metadata.last_segment.ensemble[0])
        await add_numbers_one_by_one(writer, 30, 60)
        await writer.close()
        await asyncio.wait_for(following, LIMIT_S)
        assert [entry.payload for entry in seen] == [b"%d" % i for i in range(60)]
