"""OverReplicated: ledgers that moved away are deleted, unless they may be needed or a copy is in progress."""

import asyncio
import contextlib
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from bindery_bookie.maintenance import over_replicated
from bindery_bookie.maintenance.over_replicated import OverReplicated
from bindery_client.ledger.replica import ReplicaRead, Verdict
from bindery_core.errors import BinderyError, Conflict, MetadataUnavailable
from bindery_core.formats.ledger_metadata import DigestType, LedgerMetadata, LedgerState, Segment
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.wire.messages import Status
from bindery_metadata.cluster import initialize_cluster
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.ledgers.ledger_manager import LedgerManager
from bindery_metadata.recovery.underreplication import UnderreplicationManager
from bindery_metadata.stores.memory import MemoryTree

LAYOUT = LedgersLayout()
US, A, B, C = (BookieId(f"bookie-{n}:3181") for n in range(4))
GRACE_S = 100.0
INTERVAL_S = 1000.0


class Shard:
    """A shard that records when copies arrived, as an engine does."""

    def __init__(self, *ledger_ids: int) -> None:
        self.held = set(ledger_ids)
        self.limbo: object | None = None
        self.copies_at: dict[int, float] = {}
        self.flushes = 0

    async def list_ledger_ids(self) -> Sequence[int]:
        return sorted(self.held)

    def was_given_copies(self, ledger_id: int, *, since_s: float) -> bool:
        return self.copies_at.get(ledger_id, -1.0) >= since_s

    async def delete_ledger(self, ledger_id: int, *, is_closed: bool = False) -> None:
        assert is_closed, "a late writer must stay locked out"
        self.held.remove(ledger_id)

    async def flush(self) -> None:
        self.flushes += 1

    def copy(self, ledger_id: int) -> None:
        self.held.add(ledger_id)
        self.copies_at[ledger_id] = asyncio.get_running_loop().time()


class Store:
    """A metadata store that runs a function of the test before each call."""

    def __init__(self, store: Any) -> None:
        self.real = store
        self.calls = 0
        self.before: Callable[[str, str], Awaitable[None]] | None = None

    def __getattr__(self, name: str) -> Any:
        real = getattr(self.real, name)
        if name not in ("get", "exists", "create", "multi", "sync", "children"):
            return real

        async def call(path: Any, *others: Any, **named: Any) -> Any:
            self.calls += 1
            if self.before is not None:
                await self.before(name, str(path))
            return await real(path, *others, **named)

        return call


class Client:
    """A ledger client whose bookies have all entries except those in `lacking`."""

    def __init__(self, world: "World") -> None:
        self._world = world
        self.is_closed = False

    async def metadata(self, ledger_id: LedgerId) -> LedgerMetadata:
        return (await self._world.ledgers.read(ledger_id)).value

    async def list_bookies(self) -> dict[BookieId, bool]:
        return dict.fromkeys((US, A, B, C), True)

    async def read_replicas(
        self,
        ledger_id: LedgerId,
        metadata: LedgerMetadata,
        bookie_id: BookieId,
        entry_ids: Sequence[EntryId],
        take: Any,
    ) -> list[Any]:
        is_absent = bookie_id in self._world.lacking
        status, verdict = (Status.NO_ENTRY, Verdict.ABSENT) if is_absent else (Status.OK, Verdict.GOOD)
        return [
            take(ReplicaRead(ledger_id, entry_id, bookie_id, int(status), b"" if not is_absent else None, verdict))
            for entry_id in entry_ids
        ]

    async def close(self) -> None:
        self.is_closed = True


class World:
    def __init__(self, tree: MemoryTree, *ledger_ids: int) -> None:
        self.tree = tree
        self.session = tree.connect()
        self.store = Store(self.session)
        self.shard = Shard(*ledger_ids)
        self.healer = tree.connect()
        self.ledgers = LedgerManager(self.healer, LAYOUT, randomness=random.Random(1))
        self.marks = UnderreplicationManager(
            self.healer, LAYOUT, randomness=random.Random(1), clock_ms=lambda: 1, worker_name="healer"
        )
        self.cluster_error: BinderyError | None = None
        self.lacking: set[BookieId] = set()
        self.clients: list[Client] = []
        self.collector = self.new_collector()

    def new_collector(self, **changes: Any) -> OverReplicated:
        async def check_cluster() -> None:
            if self.cluster_error:
                raise self.cluster_error

        async def connect() -> Client:
            self.clients.append(Client(self))
            return self.clients[-1]

        values: dict[str, Any] = {"connect": connect, "interval_s": INTERVAL_S, "grace_s": GRACE_S, **changes}
        return OverReplicated(
            [self.shard],
            self.store,
            self.store,
            LAYOUT,  # type: ignore[arg-type]
            bookie_id=US,
            check_cluster=check_cluster,
            wall_clock_ms=lambda: 7,
            randomness=random.Random(1),
            **values,
        )

    async def put(
        self, ledger_id: int, *ensembles: tuple[BookieId, ...], state: LedgerState = LedgerState.CLOSED
    ) -> None:
        is_closed = state is LedgerState.CLOSED
        metadata = LedgerMetadata(
            ensemble_size=2,
            write_quorum=2,
            ack_quorum=1,
            state=state,
            digest_type=DigestType.CRC32C,
            password=b"",
            segments=tuple(Segment(EntryId(10 * n), ensemble) for n, ensemble in enumerate(ensembles)),
            length=100 if is_closed else 0,
            last_entry_id=99 if is_closed else -1,
        )
        await self.ledgers.create_with_id(LedgerId(ledger_id), metadata)

    async def name(self, ledger_id: int, *ensemble: BookieId) -> None:
        def change(found: LedgerMetadata) -> LedgerMetadata:
            return found.with_changes(segments=(Segment(EntryId(0), ensemble),))

        await self.ledgers.update(LedgerId(ledger_id), change)

    async def grow_ripe(self) -> int:
        """Search, wait for the grace period, and collect."""
        assert await self.collector.step() == 0
        await asyncio.sleep(GRACE_S)
        return await self.collector.step()

    async def locks(self) -> list[str]:
        try:
            return list(await self.healer.children(LAYOUT.underreplication_locks))
        except BinderyError:
            return []


@pytest.fixture
async def world() -> World:
    tree = MemoryTree()
    store = tree.connect()
    await initialize_cluster(store, LAYOUT, randomness=random.Random(1))
    return World(tree, 1)


async def test_over_replicated_ledgers_are_deleted_after_the_grace_period_and_not_before(world: World) -> None:
    world.shard.held = {1, 2, 3, 4, 5}
    await world.put(1, (A, B))
    await world.put(2, (A, US), (A, B))
    await world.put(3, (A, B), state=LedgerState.OPEN)
    await world.put(4, (A, B), (A, C))
    assert await world.collector.step() == 0
    await asyncio.sleep(GRACE_S - 1)
    assert await world.collector.step() == 0
    await asyncio.sleep(1)
    assert await world.collector.step() == 2
    assert world.shard.held == {2, 3, 5}, (
        "named in some segment; open; without metadata, which the garbage collector handles"
    )
    assert await world.locks() == []
    assert (world.collector.state.forgotten, world.collector.state.candidates) == (2, 0)
    assert [client.is_closed for client in world.clients] == [True]


async def test_the_search_for_over_replicated_ledgers_can_be_disabled(world: World) -> None:
    await world.put(1, (A, B))
    world.collector = world.new_collector(interval_s=0.0)
    assert await world.grow_ripe() == 0
    assert world.store.calls == 0


async def test_the_number_of_candidates_is_limited_over_all_shards(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(over_replicated, "CANDIDATES_MAX", 2)
    world.collector._shards = [Shard(1, 3), Shard(2, 4), Shard(5)]  # type: ignore[list-item]
    for ledger_id in range(1, 6):
        await world.put(ledger_id, (A, B))
    await world.collector.step()
    assert world.collector.state.candidates == 2


async def test_a_search_is_not_repeated_before_the_interval_ends(world: World) -> None:
    assert await world.collector.step() == 0
    calls = world.store.calls
    await asyncio.sleep(INTERVAL_S - 1)
    assert await world.collector.step() == 0
    assert world.store.calls == calls
    await asyncio.sleep(1)
    await world.collector.step()
    assert world.store.calls > calls


@pytest.mark.parametrize(
    "what", ["marked", "locked", "disabled", "limbo", "copies", "changed", "named", "lacking", "other cluster"]
)
async def test_each_protecting_condition_keeps_a_ledger(world: World, what: str) -> None:
    await world.put(1, (A, B))
    await world.collector.step()
    await asyncio.sleep(GRACE_S)
    held = None
    match what:
        case "marked":
            await world.marks.mark(LedgerId(1), [A])
        case "locked":
            await world.marks.mark(LedgerId(1), [A])
            held = await world.marks.lock(LedgerId(1))
            await world.healer.delete(LAYOUT.mark(LedgerId(1)), version=None)
        case "disabled":
            await world.marks.disable()
        case "limbo":
            world.shard.limbo = object()
        case "copies":
            world.shard.copy(1)
        case "changed":
            await world.name(1, A, C)
        case "named":
            await world.name(1, A, US)
        case "lacking":
            world.lacking.add(B)
        case "other cluster":
            world.cluster_error = Conflict("another cluster")
    if world.cluster_error:
        with pytest.raises(Conflict):
            await world.collector.step()
    else:
        assert await world.collector.step() == 0
    assert world.shard.held == {1}
    assert len(await world.locks()) == (held is not None), "the worker's is left alone, and ours is gone"


async def test_a_worker_that_starts_at_any_moment_keeps_its_copies(world: World) -> None:
    """The worker copies to this bookie: it marks, locks, copies, updates the metadata and removes the mark."""
    await world.put(1, (A, B))
    await world.collector.step()
    await asyncio.sleep(GRACE_S)
    before = world.store.calls
    assert await world.collector.step() == 1
    calls = world.store.calls - before
    assert calls > 8

    outcomes = set()
    for moment in range(calls):
        tree = MemoryTree()
        await initialize_cluster(tree.connect(), LAYOUT, randomness=random.Random(1))
        here = World(tree, 1)
        await here.put(1, (A, B))
        await here.collector.step()
        await asyncio.sleep(GRACE_S)
        left = iter(range(calls))

        async def heal(here: World = here) -> bool:
            await here.marks.mark(LedgerId(1), [B])
            held = await here.marks.take()
            if held is None:
                return False
            here.shard.copy(1)
            await here.name(1, A, US)
            assert await here.marks.mark_replicated(held)
            return True

        healed: list[bool] = []

        async def before_call(
            name: str, path: str, left: Any = left, moment: int = moment, heal: Any = heal, healed: Any = healed
        ) -> None:
            if next(left, None) == moment:
                healed.append(await heal())

        here.store.before = before_call
        forgotten = await here.collector.step()
        assert len(healed) == 1
        if not healed[0]:
            assert await heal(), "the lock is free again"
        assert here.shard.held == {1}, moment
        outcomes.add((forgotten, healed[0]))
    assert {(0, True), (1, False)} <= outcomes


async def test_an_outage_at_any_call_deletes_nothing_and_leaves_no_lock(world: World) -> None:
    await world.put(1, (A, B))
    before = world.store.calls
    await world.collector.step()
    await asyncio.sleep(GRACE_S)
    await world.collector.step()
    calls = world.store.calls - before
    refused = 0
    for failing in range(calls):
        world.shard.held = {1}
        world.collector = world.new_collector()
        left = iter(range(calls))

        async def fail(name: str, path: str, left: Any = left, failing: int = failing) -> None:
            if next(left, None) == failing:
                raise MetadataUnavailable("connection lost")

        world.store.before = fail
        try:
            await world.grow_ripe()
        except MetadataUnavailable:
            refused += 1
            assert world.shard.held == {1}
        world.store.before = None
        await world.collector.step()
        assert await world.locks() == []
    assert refused > 8


async def test_after_the_loss_of_its_session_the_bookie_deletes_nothing(world: World) -> None:
    """The lock is lost with the session, so a worker may already repair the ledger."""
    await world.put(1, (A, B))
    await world.collector.step()
    await asyncio.sleep(GRACE_S)
    reads = 0

    async def expire(name: str, path: str) -> None:
        nonlocal reads
        reads += path == LAYOUT.ledger(LedgerId(1))
        if name == "get" and reads == 1:
            world.tree.expire(world.session)

    world.store.before = expire
    with contextlib.suppress(MetadataUnavailable):
        await world.collector.step()
    assert reads == 1
    assert world.shard.held == {1}


async def test_many_deletions_are_flushed_in_batches(world: World) -> None:
    world.shard.held = set(range(250))
    for ledger_id in range(250):
        await world.put(ledger_id, (A, B))
    assert await world.grow_ripe() == 250
    assert world.shard.flushes == 2
