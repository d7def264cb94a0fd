"""GarbageCollector: ledgers without metadata are deleted, and only if the metadata was read completely."""

import asyncio
import copy
import random
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
from bindery_bookie.maintenance.deleted_ledgers import GarbageCollector
from bindery_bookie.maintenance.rollback_guard import RollbackGuard
from bindery_bookie.storage.stats import StorageStats
from bindery_core.errors import BadVersion, BinderyError, Conflict, MetadataUnavailable, NoSuchNode
from bindery_core.ids import BookieId, LedgerId
from bindery_kit.observability.health import Health
from bindery_metadata.cluster import initialize_cluster
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.ledgers.known_ledgers import KnownLedgersStore, MetadataRollbackSuspected
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
    """A shard that stores these ledgers."""

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

    def active_ledger_ids(self) -> Sequence[int]:
        return self.ledger_ids

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
        if name not in ("get", "children", "sync", "exists"):
            return real

        async def call(path: str, **others: Any) -> Any:
            self.calls.append((name, path))
            error = self.before(name, path)
            if error is not None:
                raise error
            return await real(path, **others)

        return call


class Tree:
    def __init__(self, tree: MemoryTree, store: Any, instance_id: str) -> None:
        self.znodes = tree.znodes
        self.raw = store
        self.store = Store(store)
        self.instance_id = instance_id

    async def put(self, *ledger_ids: int) -> None:
        for ledger_id in ledger_ids:
            await self.raw.create(LAYOUT.ledger(ledger_id), b"metadata of another version", make_parents=True)

    @property
    def known(self) -> KnownLedgersStore:
        return KnownLedgersStore(self.raw, instance_id=self.instance_id)

    async def generate_more(self, count: int) -> None:
        """Advance the generator of short ids."""
        if await self.raw.exists(LAYOUT.idgen) is None:
            await self.raw.create(LAYOUT.idgen, make_parents=True)
        self.znodes._nodes[LAYOUT.idgen].creates += count

    def guard(self, *shards: Shard, bookie_id: str = "bookie-0:3181") -> RollbackGuard:
        return RollbackGuard(
            shards,
            self.store,  # type: ignore[arg-type]
            LAYOUT,
            instance_id=self.instance_id,
            bookie_id=BookieId(bookie_id),
            health=Health(),
            wall_clock_ms=lambda: 5000,
        )

    def collector(self, *shards: Shard, **changes: Any) -> GarbageCollector:
        values: dict[str, Any] = {
            "instance_id": self.instance_id,
            "bookie_id": "bookie-0:3181",
            "guard": self.guard(*shards),
            "connect": None,
            "wait_s": 3600.0,
            "wait_min_s": 3600.0,
            "written_max": 0,
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
    """A cluster whose metadata may have known all ids below 100,000, and long ones below 2^32."""
    memory = MemoryTree()
    store = memory.connect()
    made = await initialize_cluster(store, LAYOUT, randomness=random.Random(1))
    tree = Tree(memory, store, made.instance_id)
    await tree.generate_more(100_000)
    await tree.known.update(lambda known: known.raised(long_end=1 << 32))
    yield tree
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
    checks = ["get", "get", "children", "exists", "get"]
    assert [name for name, _ in calls] == ["sync", *checks, "get", *checks], "cookie, layout, mark: before and after"
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
    paced = [call for call in tree.store.calls if call[0] == "children" and call[1] != LAYOUT.idgen_long]
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


# --- metadata that was rolled back ------------------------------------------------------------------------------------


async def test_ledgers_newer_than_a_snapshot_of_zookeeper_are_kept(tree: Tree) -> None:
    """All other checks pass: it is the same cluster, and the listing is complete."""
    snapshot = copy.deepcopy(tree.znodes._nodes)
    await tree.generate_more(3)
    await tree.put(1, 100_000, 100_002)
    shard = Shard(1, 2, 100_000, 100_001, 100_002)
    tree.znodes._nodes = snapshot
    await tree.put(1)
    collector = tree.collector(shard)
    with pytest.raises(MetadataRollbackSuspected, match="3 replicas of ledgers that this metadata never knew"):
        await collector.collect()
    assert shard.ledger_ids == [1, 2, 100_000, 100_001, 100_002], "not even ledger 2, whose metadata is missing too"
    assert "never knew" in collector.state.last_error
    known, _ = await tree.known.read()
    report = known.reports["bookie-0:3181"]
    assert (report.unknown, report.first, report.last, report.missing) == (3, 100_000, 100_002, 4)
    assert report.ids_protected
    with pytest.raises(MetadataRollbackSuspected):
        await collector.is_gone(2)
    with pytest.raises(MetadataRollbackSuspected):
        await collector.is_gone(100_001)


async def test_after_the_metadata_was_accepted_these_ledgers_are_deleted(tree: Tree) -> None:
    shard = Shard(1, 2, 100_000)
    await tree.put(1)
    collector = tree.collector(shard)
    with pytest.raises(MetadataRollbackSuspected):
        await collector.collect()
    await tree.known.accept(version=(await tree.known.read())[1], by="me", at_ms=1)
    assert await collector.collect() == 2
    assert shard.ledger_ids == [1]
    assert collector.state.last_error == ""


async def test_a_rollback_during_the_listing_deletes_nothing(tree: Tree) -> None:
    await tree.put(1)
    snapshot = copy.deepcopy(tree.znodes._nodes)
    await tree.generate_more(1)
    await tree.put(100_000)
    shard = Shard(1, 100_000)

    def roll_back(operation: str, path: str) -> None:
        if (operation, path) == ("children", LAYOUT.root):
            tree.znodes._nodes = snapshot

    tree.store.before = roll_back
    with pytest.raises(MetadataRollbackSuspected):
        await tree.collector(shard).collect()
    assert shard.ledger_ids == [1, 100_000]


async def test_a_rollback_that_another_bookie_reports_during_the_listing_deletes_nothing(tree: Tree) -> None:
    shard, other = Shard(1), Shard(100_000)
    guard = tree.guard(other, bookie_id="bookie-1:3181")
    collector = tree.collector(shard)
    real = tree.raw.children

    async def children(path: str, **others: Any) -> list[str]:
        if path == LAYOUT.root:
            tree.raw.children = real
            with pytest.raises(MetadataRollbackSuspected):
                await guard.check_all()
        return await real(path, **others)

    tree.raw.children = children
    with pytest.raises(MetadataRollbackSuspected, match="bookie-1"):
        await collector.collect()
    assert shard.ledger_ids == [1]


async def test_the_mark_follows_ids_that_clients_chose(tree: Tree) -> None:
    """A ledger of such an id is deleted like any other, if a listing showed it before."""
    await tree.put(1, 500_000, 2**40)
    shard = Shard(1)
    collector = tree.collector(shard)
    assert await collector.collect() == 0
    shard.ledger_ids += [500_000, 2**40]
    for ledger_id in (LedgerId(500_000), LedgerId(2**40)):
        await tree.raw.delete(LAYOUT.ledger(ledger_id), version=None)
    assert await collector.collect() == 2
    assert shard.ledger_ids == [1]


async def test_ledgers_that_moved_away_are_kept_too(tree: Tree) -> None:
    """An older ensemble does not name a bookie that got its replica after the snapshot."""
    shard = Shard(1)
    collector = tree.collector(shard, over_replicated_wait_s=1.0)
    await collector.over_replicated.step()
    with pytest.raises(MetadataRollbackSuspected):
        await tree.guard(Shard(100_000), bookie_id="bookie-1:3181").check_all()
    collector.over_replicated._search_at = 0.0
    with pytest.raises(MetadataRollbackSuspected):
        await collector.over_replicated.step()


async def test_a_run_that_deleted_ledgers_is_soon_followed_by_another(tree: Tree) -> None:
    await tree.put(2)
    shard = Shard(1, 2)
    collector = tree.collector(shard, wait_s=3600.0, wait_min_s=0.01)
    running = asyncio.ensure_future(collector.run())
    async with asyncio.timeout(30):
        while shard.ledger_ids != [2]:
            await asyncio.sleep(0.001)
        await tree.raw.delete(LAYOUT.ledger(2), version=0)
        while shard.ledger_ids:
            await asyncio.sleep(0.001)
    running.cancel()


async def test_much_written_data_starts_a_run(tree: Tree) -> None:
    shard = Shard(1)
    collector = tree.collector(shard, wait_s=3600.0, wait_min_s=0.01, written_max=1000)
    collector._schedule._unhurried_s = 3600.0
    running = asyncio.ensure_future(collector.run())
    await asyncio.sleep(0.1)
    assert shard.ledger_ids == [1]
    shard.stats.add_bytes += 1000
    async with asyncio.timeout(30):
        while shard.ledger_ids:
            await asyncio.sleep(0.001)
    running.cancel()
