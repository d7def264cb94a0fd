"""Waiting for marks, and the switches and times of automatic recovery."""

import asyncio

import pytest
from bindery_core.errors import (
    AlreadyExists,
    BadRequest,
    BinderyError,
    Corrupt,
    MetadataUnavailable,
    NoSuchNode,
)
from bindery_core.ids import LedgerId
from bindery_metadata.layout.layout import CheckKind
from bindery_metadata.recovery import underreplication as module
from bindery_metadata.recovery.underreplication import UnderreplicationManager, has_marks
from bindery_metadata.stores.memory import MemoryTree
from bindery_metadata.stores.store import MetadataStore, Op, Stat
from marks import FAR, FIVE, LAYOUT, ROOT, SIX, manager_of
from store_environments import TIMEOUT_S, StoreEnvironment, until

# --- waiting ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def no_poll(monkeypatch: pytest.MonkeyPatch) -> None:
    """Disable polling, so that only a watch can end a wait before the test fails."""
    monkeypatch.setattr(module, "POLL_S", 2 * TIMEOUT_S)


async def settle(manager: UnderreplicationManager) -> None:
    """Wait until all earlier events are processed and the watches are set."""
    short_s = 0.05
    while await manager.wait_for_marks(short_s) or not manager._watching:
        short_s *= 1.5
        assert short_s < TIMEOUT_S


@pytest.mark.usefixtures("no_poll")
async def test_a_mark_ends_a_wait_at_once(manager: UnderreplicationManager, others: UnderreplicationManager) -> None:
    for ledger_id in (FIVE, SIX, FAR, LedgerId(70_000)):
        await settle(manager)
        waiting = asyncio.create_task(manager.wait_for_marks(TIMEOUT_S))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await others.mark(ledger_id)
        assert await waiting


@pytest.mark.usefixtures("no_poll")
async def test_a_mark_created_between_two_waits_ends_the_second_at_once(
    manager: UnderreplicationManager, others: UnderreplicationManager
) -> None:
    await settle(manager)
    assert await manager.take() is None
    await others.mark(FIVE)
    assert await manager.wait_for_marks(TIMEOUT_S)
    await others.mark(FAR)
    await until(manager._marks_changed.is_set)
    assert await manager.wait_for_marks(TIMEOUT_S)
    await settle(manager)
    await others.mark(SIX)
    await until(manager._marks_changed.is_set)
    assert await manager.wait_for_marks(TIMEOUT_S)


@pytest.mark.usefixtures("no_poll")
async def test_the_end_of_the_lock_of_the_last_mark_ends_a_wait(
    manager: UnderreplicationManager, others: UnderreplicationManager
) -> None:
    await others.mark(FIVE)
    await settle(manager)
    for _ in range(2):
        held = await others.take()
        assert held is not None
        assert await manager.take(skip=lambda _: True) is None
        assert manager._watched_locks == set(), "a lock of a mark that is skipped is of no interest"
        for _ in range(2):
            assert await manager.take() is None
        assert len(manager._watched_locks) == 1
        waiting = asyncio.create_task(manager.wait_for_marks(TIMEOUT_S))
        await asyncio.sleep(0.1)
        assert not waiting.done()
        await others.release(held)
        assert await waiting
        assert manager._watched_locks == set()
        await settle(manager)


@pytest.mark.usefixtures("no_poll")
async def test_a_lock_that_ends_between_two_waits_ends_the_second_at_once(
    monkeypatch: pytest.MonkeyPatch, manager: UnderreplicationManager, others: UnderreplicationManager
) -> None:
    await settle(manager)
    for ledger_id in (FIVE, SIX, FAR):
        await others.mark(ledger_id)
    held = [await others.take() for _ in range(3)]
    monkeypatch.setattr(module, "WATCHED_LOCKS_MAX", 2)
    assert await manager.take() is None
    assert len(manager._watched_locks) == 2
    await settle(manager)
    for one in held:
        assert one is not None
        await others.release(one)
    await until(lambda: not manager._watched_locks)
    assert await manager.wait_for_marks(TIMEOUT_S)


async def test_a_wait_ends_at_its_timeout(monkeypatch: pytest.MonkeyPatch, manager: UnderreplicationManager) -> None:
    assert await manager.wait_for_marks(TIMEOUT_S), "there may have been changes before the first watches"
    monkeypatch.setattr(module, "POLL_S", 0.05)
    async with asyncio.timeout(TIMEOUT_S):
        assert not await manager.wait_for_marks(60)


@pytest.mark.usefixtures("no_poll")
async def test_a_wait_continues_through_an_outage(
    environment: StoreEnvironment,
    manager: UnderreplicationManager,
    others: UnderreplicationManager,
    store: MetadataStore,
) -> None:
    await settle(manager)
    await environment.suspend(store)
    await others.mark(FIVE)
    await manager.wait_for_marks(0.1)
    await environment.resume(store)
    assert await manager.wait_for_marks(TIMEOUT_S)
    assert await manager.take() is not None


# --- switches ---------------------------------------------------------------------------------------------------------


async def test_the_switch_has_bookkeepers_format(manager: UnderreplicationManager, store: MetadataStore) -> None:
    calls: list[str] = []
    assert await manager.is_enabled(watch=lambda: calls.append("changed"))
    await manager.disable()
    await until(lambda: calls == ["changed"])
    assert (await store.get(f"{ROOT}/disable")).data == b""
    assert not await manager.is_enabled(watch=lambda: calls.append("again"))
    with pytest.raises(AlreadyExists, match="disabled already"):
        await manager.disable()
    await manager.enable()
    await until(lambda: calls == ["changed", "again"])
    with pytest.raises(NoSuchNode, match="enabled already"):
        await manager.enable()


@pytest.mark.parametrize("applied", [True, False], ids=["done", "not done"])
async def test_a_switch_whose_response_is_lost_is_applied(
    environment: StoreEnvironment, manager: UnderreplicationManager, store: MetadataStore, applied: bool
) -> None:
    environment.lose_next_write(store, applied=applied)
    await manager.disable()
    assert not await manager.is_enabled()
    environment.lose_next_write(store, applied=applied)
    await manager.enable()
    assert await manager.is_enabled()


async def test_the_delay_is_seconds_in_ascii_and_writing_it_again_fires_the_watch(
    manager: UnderreplicationManager, others: UnderreplicationManager, store: MetadataStore
) -> None:
    calls: list[int] = []
    assert await manager.lost_bookie_delay_s(watch=lambda: calls.append(1)) is None
    await others.set_lost_bookie_delay_s(120)
    await until(lambda: calls == [1])
    assert (await store.get(f"{ROOT}/lostBookieRecoveryDelay")).data == b"120"
    assert await manager.lost_bookie_delay_s(watch=lambda: calls.append(2)) == 120
    await others.set_lost_bookie_delay_s(120)
    await until(lambda: calls == [1, 2])
    await others.set_lost_bookie_delay_s(0)
    assert await manager.lost_bookie_delay_s() == 0
    for seconds in (-1, 2**31):
        with pytest.raises(BadRequest):
            await manager.set_lost_bookie_delay_s(seconds)


@pytest.mark.parametrize("text", [b"", b"-1", b"1.5", b"soon", b"9" * 5000, "\u0661".encode()])
async def test_an_unreadable_delay_raises_corrupt(
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
async def test_times_of_checks_have_bookkeepers_format(
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


async def test_too_many_conflicts_raise_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
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
