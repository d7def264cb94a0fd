"""Under-replication marks are stored as in BookKeeper, and no mark is lost."""

import asyncio
import random

import pytest
from bindery_core.errors import (
    BadVersion,
    MetadataUnavailable,
    NotLeader,
)
from bindery_core.ids import ID_MAX, LedgerId
from bindery_metadata.layout.layout import CheckKind
from bindery_metadata.recovery.underreplication import Mark, UnderreplicationManager, has_marks
from bindery_metadata.stores.memory import MemoryTree
from bindery_metadata.stores.store import MetadataStore
from marks import FAR, FIVE, LAYOUT, NOW_MS, ROOT, SIX, just_before_the_next, leader, manager_of, marked
from store_environments import StoreEnvironment

# --- the tree ---------------------------------------------------------------------------------------------------------


async def test_the_tree_is_created_once_and_another_layout_is_refused(
    manager: UnderreplicationManager, others: UnderreplicationManager, store: MetadataStore
) -> None:
    assert (await store.get(f"{ROOT}/LAYOUT")).data == b'type: "BASIC"\nversion: 1\n'
    assert await store.children(ROOT) == ["LAYOUT", "ledgers", "locks"]
    await asyncio.gather(manager.prepare(), others.prepare())
    await store.set(f"{ROOT}/LAYOUT", b'version: 1 type: "BASIC"', version=None)
    await manager.prepare()
    for text in (b'type: "BASIC"\nversion: 2\n', b"nonsense", b""):
        await store.set(f"{ROOT}/LAYOUT", text, version=None)
        with pytest.raises(BadVersion):
            await manager.prepare()


async def test_without_a_tree_there_are_no_marks(store: MetadataStore) -> None:
    manager = manager_of(store)
    assert await marked(manager) == []
    assert await manager.locks() == {}
    assert await manager.take() is None
    assert not await has_marks(store, LAYOUT)


# --- marks ------------------------------------------------------------------------------------------------------------


async def test_a_mark_has_bookkeepers_format(manager: UnderreplicationManager, store: MetadataStore) -> None:
    assert await manager.mark(FAR, ["10.0.0.1:3181", "10.0.0.2:3181"])
    node = await store.get(f"{ROOT}/ledgers/0000/0001/0000/0005/urL4294967301")
    assert node.data == b'replica: "10.0.0.1:3181"\nreplica: "10.0.0.2:3181"\nctime: 1700000000000\n'
    assert node.stat.ephemeral_owner == 0
    assert await manager.get(FAR) == Mark(FAR, ("10.0.0.1:3181", "10.0.0.2:3181"), NOW_MS, 0)
    assert await manager.get(FIVE) is None
    assert await has_marks(store, LAYOUT)


async def test_marking_again_merges_and_writes_only_what_is_new(manager: UnderreplicationManager) -> None:
    assert await manager.mark(FIVE, ["a:1"])
    assert not await manager.mark(FIVE, ["a:1"])
    assert not await manager.mark(FIVE)
    assert await manager.get(FIVE) == Mark(FIVE, ("a:1",), NOW_MS, 0)
    assert await manager.mark(FIVE, ["b:1", "a:1", "b:1"])
    assert await manager.get(FIVE) == Mark(FIVE, ("a:1", "b:1"), NOW_MS, 1)


async def test_a_mark_may_have_no_replicas(manager: UnderreplicationManager, store: MetadataStore) -> None:
    assert await manager.mark(FIVE)
    assert (await store.get(LAYOUT.mark(FIVE))).data == b"ctime: 1700000000000\n"
    held = await manager.take()
    assert held is not None
    assert held.mark.ledger_id == FIVE


async def test_concurrent_marks_of_one_ledger_lose_no_replica(
    manager: UnderreplicationManager, others: UnderreplicationManager
) -> None:
    names = [f"b{n}:1" for n in range(12)]
    await asyncio.gather(*((manager, others)[n % 2].mark(FIVE, [name]) for n, name in enumerate(names)))
    mark = await manager.get(FIVE)
    assert mark is not None
    assert sorted(mark.replicas) == sorted(names)


async def test_a_mark_that_is_deleted_while_it_is_merged_is_created_again(
    monkeypatch: pytest.MonkeyPatch,
    manager: UnderreplicationManager,
    others: UnderreplicationManager,
    store: MetadataStore,
) -> None:
    await manager.mark(FIVE, ["a:1"])

    async def it_is_healed() -> None:
        held = await others.lock(FIVE)
        assert held is not None
        assert await others.mark_replicated(held)

    just_before_the_next(monkeypatch, store, "multi", it_is_healed)
    assert await manager.mark(FIVE, ["b:1"])
    mark = await manager.get(FIVE)
    assert mark is not None
    assert mark.replicas == ("b:1",)


@pytest.mark.parametrize("applied", [True, False], ids=["done", "not done"])
@pytest.mark.parametrize("existing", [True, False], ids=["merged", "new"])
async def test_a_mark_whose_response_is_lost_is_stored(
    environment: StoreEnvironment, manager: UnderreplicationManager, store: MetadataStore, applied: bool, existing: bool
) -> None:
    await manager.mark(SIX)  # creates most of the parents
    if existing:
        await manager.mark(FIVE, ["a:1"])
    environment.lose_next_write(store, applied=applied)
    assert await manager.mark(FIVE, ["b:1"])
    mark = await manager.get(FIVE)
    assert mark is not None
    assert mark.replicas == (("a:1", "b:1") if existing else ("b:1",))


async def test_the_list_is_ascending_and_complete_and_skips_other_nodes(
    manager: UnderreplicationManager, store: MetadataStore
) -> None:
    ids = [0, 5, 255, 256, 65535, 65536, 70_000, 2**31 - 1, 2**31, 4294967301, 2**48, ID_MAX, *range(1000, 1150)]
    random.Random(4).shuffle(ids)
    for ledger_id in ids:
        await manager.mark(LedgerId(ledger_id), ["a:1"])
    ledgers = LAYOUT.underreplication_ledgers
    for strange in ("zzzz", "0000/x", "0000/0000/0000/0005/other", "0000/0000/0000/0005/urL0000065535", "00"):
        await store.create(f"{ledgers}/{strange}", make_parents=True)
    assert await marked(manager) == sorted(ids)


async def test_an_error_of_the_store_ends_the_list() -> None:
    store = MemoryTree().connect()
    manager = manager_of(store)
    await manager.mark(FIVE)
    for n in range(5):
        store.fail_next(MetadataUnavailable(), matching=lambda _, path, n=n: path.count("/") == 3 + n)
        with pytest.raises(MetadataUnavailable):
            await marked(manager)
    assert await marked(manager) == [FIVE]


@pytest.mark.parametrize("data", [b"\xff\xfe", b"replica: 7", b'replica: "x"\n' * 40_000, b"a{" * 10_000])
async def test_an_unreadable_mark_is_listed_with_its_problem_and_can_be_locked(
    manager: UnderreplicationManager, store: MetadataStore, data: bytes
) -> None:
    await store.create(LAYOUT.mark(FIVE), data, make_parents=True)
    await manager.mark(SIX, ["a:1"])
    first, second = [mark async for mark in manager.list()]
    assert (first.ledger_id, first.replicas, first.ctime_ms) == (FIVE, (), None)
    assert "not a readable UnderreplicatedLedgerFormat" in first.problem
    assert second == Mark(SIX, ("a:1",), NOW_MS, 0)
    held = await manager.lock(FIVE)
    assert held is not None
    assert held.mark == first
    await manager.release(held)
    assert await manager.mark(FIVE, ["b:1"])  # another mark makes it readable
    assert await manager.get(FIVE) == Mark(FIVE, ("b:1",), NOW_MS, 1)


# --- guarded ----------------------------------------------------------------------------------------------------------


async def test_a_leader_marks_and_a_former_leader_does_not(
    environment: StoreEnvironment,
    manager: UnderreplicationManager,
    others: UnderreplicationManager,
    store: MetadataStore,
) -> None:
    leadership = await leader(store)
    assert await manager.mark(FIVE, ["a:1"], guard=leadership)
    assert await manager.mark(FIVE, ["b:1"], guard=leadership)
    assert not await manager.mark(FIVE, ["b:1"], guard=leadership)
    await manager.set_lost_bookie_delay_s(7, guard=leadership)
    await manager.set_lost_bookie_delay_s(8, guard=leadership)
    await manager.set_check_time_ms(CheckKind.LEDGERS, 9, guard=leadership)
    await environment.expire(store)  # the leadership object is not notified
    assert not leadership.is_over
    with pytest.raises(NotLeader):
        await manager.mark(SIX, ["a:1"], guard=leadership)
    for write in (
        manager.mark(FIVE, ["c:1"], guard=leadership),
        manager.set_lost_bookie_delay_s(1, guard=leadership),
        manager.set_check_time_ms(CheckKind.LEDGERS, 1, guard=leadership),
        manager.set_check_time_ms(CheckKind.REPLICAS, 1, guard=leadership),
    ):
        leadership._over = False
        with pytest.raises(NotLeader):
            await write
    assert await others.get(FIVE) == Mark(FIVE, ("a:1", "b:1"), NOW_MS, 1)
    assert await others.get(SIX) is None
    assert await others.lost_bookie_delay_s() == 8
    assert await others.check_time_ms(CheckKind.LEDGERS) == 9
    assert await others.check_time_ms(CheckKind.REPLICAS) is None


@pytest.mark.parametrize("applied", [True, False], ids=["done", "not done"])
async def test_a_guarded_mark_whose_response_is_lost_is_stored(
    environment: StoreEnvironment, manager: UnderreplicationManager, store: MetadataStore, applied: bool
) -> None:
    await manager.mark(FIVE, ["a:1"])
    leadership = await leader(store)
    environment.lose_next_write(store, applied=applied)
    assert await manager.mark(FIVE, ["b:1"], guard=leadership)
    mark = await manager.get(FIVE)
    assert mark is not None
    assert mark.replicas == ("a:1", "b:1")
