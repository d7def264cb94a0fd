"""Marks and their locks: BookKeeper's nodes, nothing forgotten, nothing removed that was marked again."""

import asyncio
import random
from collections.abc import Awaitable, Callable

import pytest
from bindery_core.errors import (
    AlreadyExists,
    BadRequest,
    BadVersion,
    BinderyError,
    Corrupt,
    MetadataUnavailable,
    NoSuchNode,
    NotLeader,
)
from bindery_core.ids import ID_MAX, LedgerId
from bindery_metadata.coordination.election import Leadership
from bindery_metadata.layout.layout import CheckKind, LedgersLayout
from bindery_metadata.recovery import underreplication as module
from bindery_metadata.recovery.underreplication import HeldMark, Mark, UnderreplicationManager, has_marks
from bindery_metadata.stores.memory import MemoryTree
from bindery_metadata.stores.store import MetadataStore, Op, Stat
from worlds import PATIENCE_S, World, until

LAYOUT = LedgersLayout()
ROOT = LAYOUT.underreplication
FIVE, SIX, FAR = LedgerId(5), LedgerId(6), LedgerId(4294967301)
NOW_MS = 1_700_000_000_000


def manager_of(store: MetadataStore, *, name: str = "worker-1", seed: int = 1) -> UnderreplicationManager:
    return UnderreplicationManager(
        store, LAYOUT, randomness=random.Random(seed), clock_ms=lambda: NOW_MS, worker_name=name
    )


@pytest.fixture
async def manager(store: MetadataStore) -> UnderreplicationManager:
    manager = manager_of(store)
    await manager.prepare()
    return manager


@pytest.fixture
def others(other: MetadataStore) -> UnderreplicationManager:
    return manager_of(other, name="worker-2", seed=2)


async def marked(manager: UnderreplicationManager) -> list[int]:
    return [mark.ledger_id async for mark in manager.list()]


async def leader(store: MetadataStore) -> Leadership:
    vote = await store.create(f"{LAYOUT.auditor_election}/V_", ephemeral=True, sequential=True, make_parents=True)
    return Leadership(store, name="n", vote_path=vote, version=0, session_id=store.session_id)


def just_before_the_next(
    monkeypatch: pytest.MonkeyPatch, store: MetadataStore, operation: str, happens: Callable[[], Awaitable[object]]
) -> None:
    original = getattr(store, operation)

    async def after_that(*args, **kwargs):
        monkeypatch.undo()
        await happens()
        return await original(*args, **kwargs)

    monkeypatch.setattr(store, operation, after_that)


# --- the tree ---------------------------------------------------------------------------------------------------------


async def test_the_tree_is_made_once_and_another_layout_refused(
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


async def test_a_mark_is_bookkeepers(manager: UnderreplicationManager, store: MetadataStore) -> None:
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


async def test_a_mark_without_replicas_is_a_mark(manager: UnderreplicationManager, store: MetadataStore) -> None:
    assert await manager.mark(FIVE)
    assert (await store.get(LAYOUT.mark(FIVE))).data == b"ctime: 1700000000000\n"
    held = await manager.take()
    assert held is not None
    assert held.mark.ledger_id == FIVE


async def test_many_who_mark_one_ledger_lose_nothing(
    manager: UnderreplicationManager, others: UnderreplicationManager
) -> None:
    names = [f"b{n}:1" for n in range(12)]
    await asyncio.gather(*((manager, others)[n % 2].mark(FIVE, [name]) for n, name in enumerate(names)))
    mark = await manager.get(FIVE)
    assert mark is not None
    assert sorted(mark.replicas) == sorted(names)


async def test_a_mark_that_vanishes_while_it_is_merged_is_made_again(
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
async def test_a_mark_whose_answer_is_lost_stands(
    world: World, manager: UnderreplicationManager, store: MetadataStore, applied: bool, existing: bool
) -> None:
    await manager.mark(SIX)  # makes most of the parents
    if existing:
        await manager.mark(FIVE, ["a:1"])
    world.lose_next_write(store, applied=applied)
    assert await manager.mark(FIVE, ["b:1"])
    mark = await manager.get(FIVE)
    assert mark is not None
    assert mark.replicas == (("a:1", "b:1") if existing else ("b:1",))


async def test_the_list_is_ascending_whole_and_passes_over_what_is_no_mark(
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


async def test_an_error_ends_the_list_with_that_error() -> None:
    store = MemoryTree().connect()
    manager = manager_of(store)
    await manager.mark(FIVE)
    for n in range(5):
        store.fail_next(MetadataUnavailable(), matching=lambda _, path, n=n: path.count("/") == 3 + n)
        with pytest.raises(MetadataUnavailable):
            await marked(manager)
    assert await marked(manager) == [FIVE]


@pytest.mark.parametrize("data", [b"\xff\xfe", b"replica: 7", b'replica: "x"\n' * 40_000, b"a{" * 10_000])
async def test_a_mark_that_cannot_be_read_is_told_and_stops_nothing(
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
    assert await manager.mark(FIVE, ["b:1"])  # and marking it anew makes it readable
    assert await manager.get(FIVE) == Mark(FIVE, ("b:1",), NOW_MS, 1)


# --- guarded ----------------------------------------------------------------------------------------------------------


async def test_a_leader_marks_and_a_former_leader_does_not(
    world: World, manager: UnderreplicationManager, others: UnderreplicationManager, store: MetadataStore
) -> None:
    leadership = await leader(store)
    assert await manager.mark(FIVE, ["a:1"], guard=leadership)
    assert await manager.mark(FIVE, ["b:1"], guard=leadership)
    assert not await manager.mark(FIVE, ["b:1"], guard=leadership)
    await manager.set_lost_bookie_delay_s(7, guard=leadership)
    await manager.set_lost_bookie_delay_s(8, guard=leadership)
    await manager.set_check_time_ms(CheckKind.LEDGERS, 9, guard=leadership)
    await world.expire(store)  # of which this object has not heard
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
async def test_a_guarded_mark_whose_answer_is_lost_stands(
    world: World, manager: UnderreplicationManager, store: MetadataStore, applied: bool
) -> None:
    await manager.mark(FIVE, ["a:1"])
    leadership = await leader(store)
    world.lose_next_write(store, applied=applied)
    assert await manager.mark(FIVE, ["b:1"], guard=leadership)
    mark = await manager.get(FIVE)
    assert mark is not None
    assert mark.replicas == ("a:1", "b:1")


# --- locks ------------------------------------------------------------------------------------------------------------


async def test_a_lock_is_bookkeepers(
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


async def test_what_is_not_marked_is_not_locked(manager: UnderreplicationManager, store: MetadataStore) -> None:
    assert await manager.lock(FIVE) is None
    assert await store.children(LAYOUT.underreplication_locks) == []


async def test_each_of_many_takers_gets_another_mark(
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


async def test_taking_skips_what_the_caller_refuses_and_stops_while_disabled(manager: UnderreplicationManager) -> None:
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


async def test_marks_that_are_refused_or_locked_are_not_looked_up_one_by_one(
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


async def test_locks_of_others_may_say_nothing(manager: UnderreplicationManager, store: MetadataStore) -> None:
    for name, text in (("urL0000000005", b"\xff"), ("urL0000000006", b""), ("else", b"")):
        await store.create(f"{LAYOUT.underreplication_locks}/{name}", text)
    assert await manager.locks() == {FIVE: "", SIX: ""}


@pytest.mark.parametrize("applied", [True, False], ids=["done", "not done"])
async def test_a_lock_whose_answer_is_lost_is_held_or_free_but_never_forgotten(
    world: World,
    manager: UnderreplicationManager,
    others: UnderreplicationManager,
    store: MetadataStore,
    applied: bool,
) -> None:
    await manager.mark(FIVE)
    world.lose_next_write(store, applied=applied)
    held = await manager.take()
    assert (held is not None) == applied
    assert set(await others.locks()) == ({FIVE} if applied else set())
    held = held or await manager.take()
    assert held is not None
    assert await manager.mark_replicated(held)
    assert await others.locks() == {}


async def test_a_lock_left_by_a_call_that_failed_is_taken_over() -> None:
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
    world: World, manager: UnderreplicationManager, others: UnderreplicationManager, store: MetadataStore
) -> None:
    await manager.mark(FIVE)
    stale = await manager.take()
    assert stale is not None
    await world.expire(store)
    assert await others.locks() == {}
    again = await manager.take()
    assert again is not None
    assert again.session_id == store.session_id != stale.session_id
    await manager.release(stale)  # is not the lock that is held now
    assert not await manager.mark_replicated(stale)
    assert set(await others.locks()) == {FIVE}
    assert await manager.lock(FIVE) is None
    assert await manager.mark_replicated(again)


async def test_release_leaves_the_lock_that_another_took_in_between(
    monkeypatch: pytest.MonkeyPatch,
    world: World,
    manager: UnderreplicationManager,
    others: UnderreplicationManager,
    store: MetadataStore,
) -> None:
    await manager.mark(FIVE)
    held = await manager.take()
    assert held is not None

    async def another_takes_it() -> None:
        await world.expire(store)
        assert await others.take() is not None

    just_before_the_next(monkeypatch, store, "multi", another_takes_it)
    await manager.release(held)
    assert await manager.locks() == {FIVE: "worker-2"}


# --- healed -----------------------------------------------------------------------------------------------------------


async def test_a_healed_ledger_leaves_no_node_behind(manager: UnderreplicationManager, store: MetadataStore) -> None:
    await manager.mark(FAR, ["a:1"])
    held = await manager.take()
    assert held is not None
    assert await manager.mark_replicated(held)
    assert await store.children(LAYOUT.underreplication_ledgers) == []
    assert await store.children(LAYOUT.underreplication_locks) == []
    assert not await has_marks(store, LAYOUT)


async def test_parents_of_other_marks_stay(manager: UnderreplicationManager) -> None:
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
    """The mark is read, then it goes with its lock, then the lock is looked for: that there is none says nothing."""
    await manager.mark(FIVE, ["b1"])
    held = await others.lock(FIVE)
    assert held is not None
    just_before_the_next(monkeypatch, store, "exists", lambda: others.mark_replicated(held))
    assert await manager.mark(FIVE, ["b1"])
    assert await marked(manager) == [FIVE]
    assert not await manager.mark(FIVE, ["b1"])


async def test_a_mark_may_not_be_removed_without_the_lock(
    world: World, manager: UnderreplicationManager, others: UnderreplicationManager, store: MetadataStore
) -> None:
    await manager.mark(FIVE)
    held = await manager.take()
    assert held is not None
    await world.expire(store)
    assert not await manager.mark_replicated(held)
    assert await others.take() is not None
    assert not await manager.mark_replicated(held)
    assert await marked(manager) == [FIVE]
    assert set(await others.locks()) == {FIVE}


async def test_a_lock_lost_at_the_last_moment_keeps_the_mark_and_the_new_lock(
    monkeypatch: pytest.MonkeyPatch,
    world: World,
    manager: UnderreplicationManager,
    others: UnderreplicationManager,
    store: MetadataStore,
) -> None:
    await manager.mark(FIVE)
    held = await manager.take()
    assert held is not None

    async def another_takes_it() -> None:
        await world.expire(store)
        assert await others.take() is not None

    just_before_the_next(monkeypatch, store, "multi", another_takes_it)
    assert not await manager.mark_replicated(held)
    assert await marked(others) == [FIVE]
    assert await others.locks() == {FIVE: "worker-2"}


async def test_a_mark_removed_by_hand_is_gone_and_the_lock_with_it(
    manager: UnderreplicationManager, others: UnderreplicationManager, other: MetadataStore
) -> None:
    await manager.mark(FIVE)
    held = await manager.take()
    assert held is not None
    await other.delete(LAYOUT.mark(FIVE), version=None)
    assert await manager.mark_replicated(held)
    assert await others.locks() == {}


@pytest.mark.parametrize("applied", [True, False], ids=["done", "not done"])
async def test_a_removal_whose_answer_is_lost_is_settled(
    world: World, manager: UnderreplicationManager, store: MetadataStore, applied: bool
) -> None:
    await manager.mark(FIVE)
    held = await manager.take()
    assert held is not None
    world.lose_next_write(store, applied=applied)
    assert await manager.mark_replicated(held)
    assert await marked(manager) == []
    assert await manager.locks() == {}


async def test_marking_and_healing_at_once_loses_no_mark(
    manager: UnderreplicationManager, others: UnderreplicationManager
) -> None:
    """Every mark made is seen by a repair that took it after it was made."""
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


# --- waiting ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who does not hear of a mark waits until the test has failed."""
    monkeypatch.setattr(module, "POLL_S", 2 * PATIENCE_S)


async def settle(manager: UnderreplicationManager) -> None:
    """Until all that happened is heard and the next mark will be: a short wait may end before it watches."""
    short_s = 0.05
    while await manager.wait_for_marks(short_s) or not manager._watching:
        short_s *= 1.5
        assert short_s < PATIENCE_S


@pytest.mark.usefixtures("no_poll")
async def test_who_waits_hears_of_a_mark_at_once(
    manager: UnderreplicationManager, others: UnderreplicationManager
) -> None:
    for ledger_id in (FIVE, SIX, FAR, LedgerId(70_000)):
        await settle(manager)
        waiting = asyncio.create_task(manager.wait_for_marks(PATIENCE_S))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await others.mark(ledger_id)
        assert await waiting


@pytest.mark.usefixtures("no_poll")
async def test_a_mark_made_between_two_waits_ends_the_second_at_once(
    manager: UnderreplicationManager, others: UnderreplicationManager
) -> None:
    await settle(manager)
    assert await manager.take() is None
    await others.mark(FIVE)
    assert await manager.wait_for_marks(PATIENCE_S)
    await others.mark(FAR)
    await until(manager._marks_changed.is_set)
    assert await manager.wait_for_marks(PATIENCE_S)
    await settle(manager)
    await others.mark(SIX)
    await until(manager._marks_changed.is_set)
    assert await manager.wait_for_marks(PATIENCE_S)


async def test_waiting_ends_by_itself(monkeypatch: pytest.MonkeyPatch, manager: UnderreplicationManager) -> None:
    monkeypatch.setattr(module, "POLL_S", 0.05)
    async with asyncio.timeout(PATIENCE_S):
        assert not await manager.wait_for_marks(60)


@pytest.mark.usefixtures("no_poll")
async def test_waiting_rides_out_an_outage(
    world: World, manager: UnderreplicationManager, others: UnderreplicationManager, store: MetadataStore
) -> None:
    await settle(manager)
    await world.suspend(store)
    await others.mark(FIVE)
    await manager.wait_for_marks(0.1)
    await world.resume(store)
    assert await manager.wait_for_marks(PATIENCE_S)
    assert await manager.take() is not None


# --- switches ---------------------------------------------------------------------------------------------------------


async def test_the_switch_is_bookkeepers(manager: UnderreplicationManager, store: MetadataStore) -> None:
    heard: list[str] = []
    assert await manager.is_enabled(watch=lambda: heard.append("changed"))
    await manager.disable()
    await until(lambda: heard == ["changed"])
    assert (await store.get(f"{ROOT}/disable")).data == b""
    assert not await manager.is_enabled(watch=lambda: heard.append("again"))
    with pytest.raises(AlreadyExists, match="disabled already"):
        await manager.disable()
    await manager.enable()
    await until(lambda: heard == ["changed", "again"])
    with pytest.raises(NoSuchNode, match="enabled already"):
        await manager.enable()


@pytest.mark.parametrize("applied", [True, False], ids=["done", "not done"])
async def test_a_switch_whose_answer_is_lost_is_switched(
    world: World, manager: UnderreplicationManager, store: MetadataStore, applied: bool
) -> None:
    world.lose_next_write(store, applied=applied)
    await manager.disable()
    assert not await manager.is_enabled()
    world.lose_next_write(store, applied=applied)
    await manager.enable()
    assert await manager.is_enabled()


async def test_the_delay_is_seconds_in_ascii_and_writing_it_again_is_heard(
    manager: UnderreplicationManager, others: UnderreplicationManager, store: MetadataStore
) -> None:
    heard: list[int] = []
    assert await manager.lost_bookie_delay_s(watch=lambda: heard.append(1)) is None
    await others.set_lost_bookie_delay_s(120)
    await until(lambda: heard == [1])
    assert (await store.get(f"{ROOT}/lostBookieRecoveryDelay")).data == b"120"
    assert await manager.lost_bookie_delay_s(watch=lambda: heard.append(2)) == 120
    await others.set_lost_bookie_delay_s(120)
    await until(lambda: heard == [1, 2])
    await others.set_lost_bookie_delay_s(0)
    assert await manager.lost_bookie_delay_s() == 0
    for seconds in (-1, 2**31):
        with pytest.raises(BadRequest):
            await manager.set_lost_bookie_delay_s(seconds)


@pytest.mark.parametrize("text", [b"", b"-1", b"1.5", b"soon", b"9" * 5000, "\u0661".encode()])
async def test_a_delay_that_is_none_is_corrupt(
    manager: UnderreplicationManager, store: MetadataStore, text: bytes
) -> None:
    await store.create(LAYOUT.lost_bookie_delay, text)
    with pytest.raises(Corrupt):
        await manager.lost_bookie_delay_s()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        (CheckKind.LEDGERS, "checkallledgersctime"),
        (CheckKind.PLACEMENT, "placementpolicycheckctime"),
        (CheckKind.REPLICAS, "replicascheckctime"),
    ],
)
async def test_times_of_checks_are_bookkeepers(
    manager: UnderreplicationManager, store: MetadataStore, kind: CheckKind, name: str
) -> None:
    assert await manager.check_time_ms(kind) is None
    await manager.set_check_time_ms(kind, 1_700_000_000_000)
    assert (await store.get(f"{ROOT}/{name}")).data.hex() == "0880d095ffbc31"
    await manager.set_check_time_ms(kind, 5)
    assert await manager.check_time_ms(kind) == 5
    await store.set(f"{ROOT}/{name}", b"\xff", version=None)
    with pytest.raises(Corrupt):
        await manager.check_time_ms(kind)


async def test_a_search_among_empty_directories_is_bounded(store: MetadataStore) -> None:
    memory = MemoryTree().connect()
    for n in range(module.SEARCH_READS_MAX):
        await memory.create(f"{LAYOUT.underreplication_ledgers}/{n:04x}", make_parents=True)
    with pytest.raises(BinderyError, match="too many empty directories"):
        await has_marks(memory, LAYOUT)


async def test_endless_conflicts_are_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = MemoryTree()
    store, other = tree.connect(), tree.connect()
    manager = manager_of(store)
    await manager.mark(FIVE, ["a:1"])
    multi = store.multi

    async def too_late(ops: list[Op]) -> list[str | Stat | None]:
        await other.set(LAYOUT.mark(FIVE), b"", version=None)
        return await multi(ops)

    monkeypatch.setattr(store, "multi", too_late)
    with pytest.raises(MetadataUnavailable, match="keeps changing"):
        await manager.mark(FIVE, ["b:1"])
