"""Locks of under-replication marks, and the end of a repair. A ledger that is marked again stays marked."""

import asyncio

import pytest
from bindery_core.errors import (
    MetadataUnavailable,
)
from bindery_core.ids import LedgerId
from bindery_metadata.recovery.underreplication import HeldMark, Mark, UnderreplicationManager, has_marks
from bindery_metadata.stores.memory import MemoryTree
from bindery_metadata.stores.store import MetadataStore
from marks import FAR, FIVE, LAYOUT, NOW_MS, ROOT, SIX, just_before_the_next, manager_of, marked
from store_environments import StoreEnvironment

# --- locks ------------------------------------------------------------------------------------------------------------


async def test_a_lock_has_bookkeepers_format(
    manager: UnderreplicationManager, others: UnderreplicationManager, store: MetadataStore
) -> None:
    await manager.mark(FIVE, ["a:1"])
    held = await manager.lock(FIVE)
    assert held == HeldMark(Mark(FIVE, ("a:1",), NOW_MS, 0), f"{ROOT}/locks/urL0000000005", store.session_id)
    node = await store.get(f"{ROOT}/locks/urL0000000005")
    assert (node.data, node.stat.ephemeral_owner) == (b'bookieId: "worker-1"\n', store.session_id)
    assert await others.locks() == {FIVE: "worker-1"}
    assert await others.lock(FIVE) is None
    assert await manager.lock(FIVE) is None
    assert await others.take() is None
    await manager.release(held)
    assert await others.locks() == {}
    assert await others.take() is not None


async def test_a_ledger_without_a_mark_is_not_locked(manager: UnderreplicationManager, store: MetadataStore) -> None:
    assert await manager.lock(FIVE) is None
    assert await store.children(LAYOUT.underreplication_locks) == []


async def test_concurrent_workers_take_different_marks(
    manager: UnderreplicationManager, others: UnderreplicationManager
) -> None:
    for ledger_id in range(20):
        await manager.mark(LedgerId(ledger_id * 1000))
    held = await asyncio.gather(*((manager, others)[n % 2].take() for n in range(24)))
    taken = [one.mark.ledger_id for one in held if one is not None]
    assert sorted(taken) == [ledger_id * 1000 for ledger_id in range(20)]
    assert set(await manager.locks()) == set(taken)


async def test_marks_are_taken_in_a_random_order_of_the_seed(manager: UnderreplicationManager) -> None:
    for ledger_id in range(30):
        await manager.mark(LedgerId(ledger_id))

    async def order(seed: int) -> list[int]:
        taker = manager_of(manager._store, seed=seed)
        taken = [await taker.take() for _ in range(30)]
        for held in taken:
            assert held is not None
            await taker.release(held)
        return [held.mark.ledger_id for held in taken if held]

    first, second = await order(1), await order(2)
    assert sorted(first) == sorted(second) == list(range(30))
    assert first != second
    assert first != sorted(first)
    assert await order(1) == first


async def test_take_skips_excluded_marks_and_returns_none_while_disabled(manager: UnderreplicationManager) -> None:
    await manager.mark(FIVE)
    await manager.mark(SIX)
    for _ in range(5):
        held = await manager.take(skip=lambda ledger_id: ledger_id == FIVE)
        assert held is not None
        assert held.mark.ledger_id == SIX
        await manager.release(held)
    assert await manager.take(skip=lambda _: True) is None
    await manager.disable()
    assert await manager.take() is None
    await manager.enable()
    assert await manager.take() is not None


async def test_excluded_and_locked_marks_are_not_read(
    manager: UnderreplicationManager, others: UnderreplicationManager, store: MetadataStore
) -> None:
    for ledger_id in range(20):
        await manager.mark(LedgerId(ledger_id))
    assert await others.lock(FIVE)
    listed: list[str] = []
    children = store.children

    async def noted(path: str, **others: object) -> list[str]:
        listed.append(path)
        return await children(path, **others)  # type: ignore[arg-type]

    store.children = noted  # type: ignore[method-assign]
    assert await manager.take(skip=lambda ledger_id: ledger_id != FIVE) is None
    assert len(listed) == 5, "the locks, and the directories above all marks"
    held = await manager.take(skip=lambda ledger_id: ledger_id != SIX)
    assert held is not None
    assert held.mark.ledger_id == SIX


async def test_locks_without_a_readable_holder_are_listed(
    manager: UnderreplicationManager, store: MetadataStore
) -> None:
    for name, text in (("urL0000000005", b"\xff"), ("urL0000000006", b""), ("else", b"")):
        await store.create(f"{LAYOUT.underreplication_locks}/{name}", text)
    assert await manager.locks() == {FIVE: "", SIX: ""}


@pytest.mark.parametrize("applied", [True, False], ids=["done", "not done"])
async def test_a_lock_whose_response_is_lost_is_held_or_free_but_never_leaked(
    environment: StoreEnvironment,
    manager: UnderreplicationManager,
    others: UnderreplicationManager,
    store: MetadataStore,
    applied: bool,
) -> None:
    await manager.mark(FIVE)
    environment.lose_next_write(store, applied=applied)
    held = await manager.take()
    assert (held is not None) == applied
    assert set(await others.locks()) == ({FIVE} if applied else set())
    held = held or await manager.take()
    assert held is not None
    assert await manager.mark_replicated(held)
    assert await others.locks() == {}


async def test_a_lock_left_by_a_failed_call_is_adopted() -> None:
    store = MemoryTree().connect()
    manager = manager_of(store)
    await manager.mark(FIVE)
    await manager.prepare()
    store.fail_next(MetadataUnavailable(), matching=lambda operation, path: operation == "exists" and "locks" in path)
    with pytest.raises(MetadataUnavailable):
        await manager.lock(FIVE)
    assert await manager.locks() == {FIVE: "worker-1"}
    held = await manager.lock(FIVE)
    assert held is not None
    await manager.release(held)
    assert await manager.locks() == {}


async def test_the_end_of_a_session_frees_its_locks_for_others_and_for_itself(
    environment: StoreEnvironment,
    manager: UnderreplicationManager,
    others: UnderreplicationManager,
    store: MetadataStore,
) -> None:
    await manager.mark(FIVE)
    stale = await manager.take()
    assert stale is not None
    await environment.expire(store)
    assert await others.locks() == {}
    again = await manager.take()
    assert again is not None
    assert again.session_id == store.session_id != stale.session_id
    await manager.release(stale)  # does not release the lock that is held now
    assert not await manager.mark_replicated(stale)
    assert set(await others.locks()) == {FIVE}
    assert await manager.lock(FIVE) is None
    assert await manager.mark_replicated(again)


async def test_release_keeps_a_lock_that_another_worker_took_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
    environment: StoreEnvironment,
    manager: UnderreplicationManager,
    others: UnderreplicationManager,
    store: MetadataStore,
) -> None:
    await manager.mark(FIVE)
    held = await manager.take()
    assert held is not None

    async def another_takes_it() -> None:
        await environment.expire(store)
        assert await others.take() is not None

    just_before_the_next(monkeypatch, store, "multi", another_takes_it)
    await manager.release(held)
    assert await manager.locks() == {FIVE: "worker-2"}


# --- replicated -------------------------------------------------------------------------------------------------------


async def test_a_replicated_ledger_leaves_no_node(manager: UnderreplicationManager, store: MetadataStore) -> None:
    await manager.mark(FAR, ["a:1"])
    held = await manager.take()
    assert held is not None
    assert await manager.mark_replicated(held)
    assert await store.children(LAYOUT.underreplication_ledgers) == []
    assert await store.children(LAYOUT.underreplication_locks) == []
    assert not await has_marks(store, LAYOUT)


async def test_parents_of_other_marks_are_kept(manager: UnderreplicationManager) -> None:
    await manager.mark(FIVE)
    await manager.mark(SIX)
    held = await manager.lock(FIVE)
    assert held is not None
    assert await manager.mark_replicated(held)
    assert await marked(manager) == [SIX]


@pytest.mark.parametrize("replicas", [["b:1"], ["a:1"], []], ids=["more", "the same", "none"])
async def test_a_ledger_marked_again_during_its_repair_stays_marked(
    manager: UnderreplicationManager, others: UnderreplicationManager, store: MetadataStore, replicas: list[str]
) -> None:
    await manager.mark(FIVE, ["a:1"])
    held = await manager.take()
    assert held is not None
    assert await others.mark(FIVE, replicas) == (replicas == ["b:1"])
    assert not await manager.mark_replicated(held)
    assert await marked(manager) == [FIVE]
    assert await manager.locks() == {}
    held = await others.take()
    assert held is not None
    assert await others.mark_replicated(held)


async def test_a_ledger_marked_again_while_its_repair_ends_stays_marked(
    monkeypatch: pytest.MonkeyPatch,
    manager: UnderreplicationManager,
    others: UnderreplicationManager,
    store: MetadataStore,
) -> None:
    """The mark is read, then deleted with its lock, then the lock is read. A missing lock does not prove that the mark
    still exists."""
    await manager.mark(FIVE, ["b1"])
    held = await others.lock(FIVE)
    assert held is not None
    just_before_the_next(monkeypatch, store, "exists", lambda: others.mark_replicated(held))
    assert await manager.mark(FIVE, ["b1"])
    assert await marked(manager) == [FIVE]
    assert not await manager.mark(FIVE, ["b1"])


async def test_a_mark_may_not_be_removed_without_the_lock(
    environment: StoreEnvironment,
    manager: UnderreplicationManager,
    others: UnderreplicationManager,
    store: MetadataStore,
) -> None:
    await manager.mark(FIVE)
    held = await manager.take()
    assert held is not None
    await environment.expire(store)
    assert not await manager.mark_replicated(held)
    assert await others.take() is not None
    assert not await manager.mark_replicated(held)
    assert await marked(manager) == [FIVE]
    assert set(await others.locks()) == {FIVE}


async def test_a_lock_lost_at_the_last_moment_keeps_mark_and_new_lock(
    monkeypatch: pytest.MonkeyPatch,
    environment: StoreEnvironment,
    manager: UnderreplicationManager,
    others: UnderreplicationManager,
    store: MetadataStore,
) -> None:
    await manager.mark(FIVE)
    held = await manager.take()
    assert held is not None

    async def another_takes_it() -> None:
        await environment.expire(store)
        assert await others.take() is not None

    just_before_the_next(monkeypatch, store, "multi", another_takes_it)
    assert not await manager.mark_replicated(held)
    assert await marked(others) == [FIVE]
    assert await others.locks() == {FIVE: "worker-2"}


async def test_the_lock_of_a_mark_that_an_operator_deleted_is_deleted(
    manager: UnderreplicationManager, others: UnderreplicationManager, other: MetadataStore
) -> None:
    await manager.mark(FIVE)
    held = await manager.take()
    assert held is not None
    await other.delete(LAYOUT.mark(FIVE), version=None)
    assert await manager.mark_replicated(held)
    assert await others.locks() == {}


@pytest.mark.parametrize("applied", [True, False], ids=["done", "not done"])
async def test_a_deletion_whose_response_is_lost_is_resolved(
    environment: StoreEnvironment, manager: UnderreplicationManager, store: MetadataStore, applied: bool
) -> None:
    await manager.mark(FIVE)
    held = await manager.take()
    assert held is not None
    environment.lose_next_write(store, applied=applied)
    assert await manager.mark_replicated(held)
    assert await marked(manager) == []
    assert await manager.locks() == {}


async def test_concurrent_marks_and_repairs_lose_no_mark(
    manager: UnderreplicationManager, others: UnderreplicationManager
) -> None:
    """Every mark is processed by a repair that took it after it was created."""
    made, seen = [f"b{n}:1" for n in range(20)], set()

    async def mark_all() -> None:
        for name in made:
            await manager.mark(FIVE, [name])

    async def heal_until(done: asyncio.Task[None]) -> None:
        while not done.done() or await others.get(FIVE):
            held = await others.take()
            if held is None:
                await asyncio.sleep(0)
                continue
            seen.update(held.mark.replicas)
            await others.mark_replicated(held)

    marking = asyncio.create_task(mark_all())
    await heal_until(marking)
    await marking
    assert seen == set(made)
