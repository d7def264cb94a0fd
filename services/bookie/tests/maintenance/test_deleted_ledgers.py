"""GarbageCollector: ledgers without metadata are deleted, and only if the metadata was read completely."""

import asyncio
import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from bindery_bookie.maintenance.deleted_ledgers import GarbageCollector
from bindery_bookie.storage.stats import StorageStats
from bindery_core.errors import BadVersion, BinderyError, Conflict, MetadataUnavailable, NoSuchNode
from bindery_metadata.cluster import initialize_cluster
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.memory import MemoryTree

LAYOUT = LedgersLayout()
LONG = 2**31 + 7
"""An id above 2^31, whose znode is in the deeper tree."""


class Requests:
    def __init__(self) -> None:
        self.count = 0
        self.compactions = 0

    def request(self, *, minor: bool = False, major: bool = False) -> None:
        assert minor is major
        self.count += 1
        self.compactions += major


class Shard:
    def __init__(self, *ledger_ids: int) -> None:
        self.ledger_ids = list(ledger_ids)
        self.stats = StorageStats()
        self.compactor: Any = Requests()
        self.limbo: object | None = None
        self.after_list: Callable[[], None] = lambda: None

    async def list_ledger_ids(self) -> Sequence[int]:
        found = sorted(self.ledger_ids)
        self.after_list()
        return found

    async def delete_ledger(self, ledger_id: int, *, is_closed: bool = False) -> None:
        assert not is_closed
        self.ledger_ids.remove(ledger_id)

    def was_given_copies(self, ledger_id: int, *, since_s: float) -> bool:
        return False

    async def flush(self) -> None:
        raise NotImplementedError


class Store:
    """A metadata store whose responses a test can change."""

    def __init__(self, store: Any) -> None:
        self._store = store
        self.before: Callable[[str, str], BinderyError | None] = lambda operation, path: None
        self.calls: list[tuple[str, str]] = []

    def __getattr__(self, name: str) -> Any:
        real = getattr(self._store, name)
        if name not in ("get", "children", "sync"):
            return real

        async def call(path: str, **others: Any) -> Any:
            self.calls.append((name, path))
            error = self.before(name, path)
            if error is not None:
                raise error
            return await real(path, **others)

        return call


class Tree:
    def __init__(self, store: Any, instance_id: str) -> None:
        self.raw = store
        self.store = Store(store)
        self.instance_id = instance_id

    async def put(self, *ledger_ids: int) -> None:
        for ledger_id in ledger_ids:
            await self.raw.create(LAYOUT.ledger(ledger_id), b"metadata of another version", make_parents=True)

    def collector(self, *shards: Shard, **changes: Any) -> GarbageCollector:
        values: dict[str, Any] = {
            "instance_id": self.instance_id,
            "bookie_id": "bookie-0:3181",
            "connect": None,
            "wait_s": 3600.0,
            "over_replicated_wait_s": 0.0,
            "op_rate": 1e6,
            "clock": asyncio.get_running_loop().time,
            "wall_clock_ms": lambda: 5000,
            "randomness": random.Random(1),
            **changes,
        }
        return GarbageCollector(shards, self.store, LAYOUT, **values)


@pytest.fixture
async def tree() -> AsyncIterator[Tree]:
    store = MemoryTree().connect()
    made = await initialize_cluster(store, LAYOUT, randomness=random.Random(1))
    yield Tree(store, made.instance_id)
    await store.close()


async def test_ledgers_without_metadata_are_deleted_from_every_shard(tree: Tree) -> None:
    await tree.put(1, 4, 6, 99, LONG)
    shards = [Shard(2, 4, 6, LONG + 1), Shard(1, 3, LONG), Shard(99)]
    collector = tree.collector(*shards)
    assert await collector.collect() == 3
    assert [shard.ledger_ids for shard in shards] == [[4, 6], [1, LONG], [99]]
    assert [shard.stats.ledgers_deleted for shard in shards] == [2, 1, 0]
    assert [shard.compactor.count for shard in shards] == [1, 1, 0]
    state = collector.state
    assert (state.ledgers_here, state.ledgers_listed, state.ledgers_deleted) == (8, 5, 3)
    assert (state.running, state.last_error, state.last_success_ms) == (False, "", 5000)
    assert await collector.collect() == 0


async def test_without_stored_ledgers_no_metadata_is_read(tree: Tree) -> None:
    assert await tree.collector(Shard()).collect() == 0
    assert tree.store.calls == []


async def test_a_ledger_created_during_the_run_is_kept(tree: Tree) -> None:
    shard = Shard(1)
    shard.after_list = lambda: shard.ledger_ids.append(8)
    assert await tree.collector(shard).collect() == 1
    assert shard.ledger_ids == [8]


async def test_an_error_of_any_metadata_call_deletes_nothing(tree: Tree) -> None:
    await tree.put(1, 20_000, LONG)
    await tree.collector(Shard(1, 2, LONG)).collect()
    calls = len(tree.store.calls)
    assert calls > 12
    for failing in range(calls):
        shard = Shard(1, 2, LONG)
        left = iter(range(calls))

        def fail(operation: str, path: str, left: Any = left, failing: int = failing) -> BinderyError | None:
            return MetadataUnavailable("connection lost") if next(left) == failing else None

        tree.store.before = fail
        collector = tree.collector(shard)
        with pytest.raises(MetadataUnavailable):
            await collector.collect()
        assert shard.ledger_ids == [1, 2, LONG]
        assert "connection lost" in collector.state.last_error
        assert not collector.state.running


async def test_a_single_ledger_is_gone_only_if_every_check_passes(tree: Tree) -> None:
    await tree.put(1, LONG)
    collector = tree.collector()
    assert await collector.is_gone(2)
    calls = tree.store.calls[:]
    assert (calls[0], len(calls)) == (("sync", LAYOUT.root), 6), "cookie and layout, before and after"
    assert not await collector.is_gone(LONG), "its metadata exists, although it cannot be read"
    for failing in range(len(calls)):
        left = iter(range(len(calls)))

        def fail(operation: str, path: str, left: Any = left, failing: int = failing) -> BinderyError | None:
            return MetadataUnavailable("connection lost") if next(left) == failing else None

        tree.store.before = fail
        with pytest.raises(MetadataUnavailable):
            await collector.is_gone(2)
    tree.store.before = lambda operation, path: None
    with pytest.raises(Conflict, match="cookie"):
        await tree.collector(instance_id="another").is_gone(2)


async def test_nothing_is_deleted_by_the_metadata_of_another_cluster_or_none(tree: Tree) -> None:
    shard = Shard(1)
    with pytest.raises(Conflict, match="cookie"):
        await tree.collector(shard, instance_id="another").collect()
    await tree.raw.delete(LAYOUT.instance_id, version=None)
    with pytest.raises(NoSuchNode):
        await tree.collector(shard).collect()
    assert shard.ledger_ids == [1]


async def test_a_missing_root_deletes_nothing(tree: Tree) -> None:
    shard = Shard(1)
    collector = tree.collector(shard)
    collector._layout = LedgersLayout("/elsewhere")
    with pytest.raises(NoSuchNode):
        await collector.collect()
    assert shard.ledger_ids == [1]


@pytest.mark.parametrize("layout", [None, b"2\norg.apache.bookkeeper.meta.LongHierarchicalLedgerManagerFactory:1"])
async def test_a_tree_with_another_layout_deletes_nothing(tree: Tree, layout: bytes | None) -> None:
    shard = Shard(1)
    if layout is None:
        await tree.raw.delete(LAYOUT.layout, version=None)
    else:
        await tree.raw.set(LAYOUT.layout, layout, version=None)
    with pytest.raises(BadVersion if layout else NoSuchNode):
        await tree.collector(shard).collect()
    assert shard.ledger_ids == [1]


async def test_a_tree_that_vanishes_during_the_walk_deletes_nothing(tree: Tree) -> None:
    """Missing parts of the tree look like deleted ledgers."""
    await tree.put(1, 2, 3)
    shard = Shard(1, 2, 3)

    def before(operation: str, path: str) -> BinderyError | None:
        if operation == "children":
            return NoSuchNode(path=path) if path != LAYOUT.root else None
        return NoSuchNode(path=path) if ("get", LAYOUT.ledger(1)) in tree.store.calls else None

    tree.store.before = before
    with pytest.raises(NoSuchNode):
        await tree.collector(shard).collect()
    assert shard.ledger_ids == [1, 2, 3]


async def test_a_ledger_missing_in_the_listing_is_read_before_it_is_deleted(tree: Tree) -> None:
    await tree.put(1, 2)
    shard = Shard(1, 2, 5)
    real = tree.raw.children

    async def children(path: str, **others: Any) -> list[str]:
        return [name for name in await real(path, **others) if name != "L0002"]

    tree.raw.children = children
    assert await tree.collector(shard).collect() == 1
    assert shard.ledger_ids == [1, 2]


async def test_a_listing_out_of_order_deletes_nothing(tree: Tree) -> None:
    await tree.put(1, 2)
    shard = Shard(1, 2, 5)
    real = tree.raw.children

    async def children(path: str, **others: Any) -> list[str]:
        return (await real(path, **others))[::-1]

    tree.raw.children = children
    with pytest.raises(Conflict, match="order"):
        await tree.collector(shard).collect()
    assert shard.ledger_ids == [1, 2, 5]


async def test_the_collector_syncs_before_the_listing_and_before_the_reads_of_candidates(tree: Tree) -> None:
    await tree.put(1)
    await tree.collector(Shard(2)).collect()
    calls = tree.store.calls
    listed = calls.index(("children", LAYOUT.root))
    read = calls.index(("get", LAYOUT.ledger(2)))
    assert ("sync", LAYOUT.root) in calls[:listed]
    assert ("sync", LAYOUT.root) in calls[listed:read]


async def test_reads_of_metadata_are_rate_limited(tree: Tree) -> None:
    await tree.put(*range(0, 50_000, 10_000))
    loop = asyncio.get_running_loop()
    started = loop.time()
    await tree.collector(Shard(1, 2, 3, 4), op_rate=100.0).collect()
    paced = [call for call in tree.store.calls if call[0] == "children"]
    assert len(paced) >= 7
    assert loop.time() - started >= 0.8 * (len(paced) + 4) / 100


async def test_the_collector_runs_periodically_and_on_request_and_survives_outages(tree: Tree) -> None:
    shard = Shard(1)
    collector = tree.collector(shard)
    tree.store.before = lambda operation, path: MetadataUnavailable("down")
    running = asyncio.ensure_future(collector.run())
    await asyncio.sleep(0)
    collector.request()
    async with asyncio.timeout(30):
        while not collector.state.last_error:
            await asyncio.sleep(0.001)
        tree.store.before = lambda operation, path: None
        collector.request()
        while shard.ledger_ids:
            await asyncio.sleep(0.001)
    running.cancel()
    shard = Shard(1)
    running = asyncio.ensure_future(tree.collector(shard, wait_s=0.01).run())
    async with asyncio.timeout(30):
        while shard.ledger_ids:
            await asyncio.sleep(0.001)
    running.cancel()


async def test_under_pressure_logs_are_compacted_even_if_the_metadata_is_unavailable(tree: Tree) -> None:
    shard = Shard(1)
    collector = tree.collector(shard)
    running = asyncio.ensure_future(collector.run())
    async with asyncio.timeout(30):
        for expected, error in ((1, MetadataUnavailable("down")), (2, None)):
            tree.store.before = lambda operation, path, error=error: error
            collector.request(compact=True)
            while shard.compactor.compactions < expected:
                await asyncio.sleep(0.001)
    assert shard.ledger_ids == []
    assert shard.compactor.count == 3
    running.cancel()


async def test_an_unexpected_error_ends_a_run_and_not_the_collector(tree: Tree) -> None:
    shard = Shard(1)
    collector = tree.collector(shard)

    def broken(operation: str, path: str) -> None:
        raise ValueError("a fault of ours")

    tree.store.before = broken
    running = asyncio.ensure_future(collector.run())
    collector.request()
    async with asyncio.timeout(30):
        while not collector.state.last_error:
            await asyncio.sleep(0.001)
        tree.store.before = lambda operation, path: None
        collector.request()
        while shard.ledger_ids:
            await asyncio.sleep(0.001)
    running.cancel()
