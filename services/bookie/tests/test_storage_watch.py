"""Read-only when the disk is full, writable again by itself, and an end when the journal is lost."""

import asyncio

import pytest
from bindery_bookie import storage_watch
from bindery_bookie.settings import BookieSettings
from bindery_bookie.state import BookieState
from bindery_bookie.storage.stats import StorageStats
from bindery_bookie.storage_watch import StorageWatch
from bindery_kit.health import Health


class Watched:
    def __init__(self, store, **settings) -> None:  # type: ignore[no-untyped-def]
        self.store, self.stats, self.state, self.health = store, StorageStats(), BookieState(), Health()
        self.failures: list[str] = []
        self.watch = StorageWatch(
            store,
            self.stats,
            self.state,
            self.health,
            BookieSettings(**settings),
            on_journal_failed=self.failures.append,
        )

    def look(self, *, used: int, total: int = 1000) -> bool:
        self.store.usage = (total, total - used)
        self.watch.check_disk()
        return self.state.read_only


@pytest.fixture
def watched(memory_store) -> Watched:
    return Watched(memory_store, high_priority_free_size_min=20)


async def test_the_bookie_turns_read_only_above_one_mark_and_back_below_the_other(watched) -> None:
    assert [watched.look(used=used) for used in (100, 950, 951, 940, 901, 900, 899, 930)] == [
        False, False, True, True, True, True, False, False,
    ]  # fmt: skip


async def test_high_priority_adds_need_room(watched) -> None:
    watched.look(used=970)
    assert watched.state.accepts_add(priority=1)
    assert not watched.state.accepts_add(priority=0)
    watched.look(used=990)
    assert not watched.state.accepts_add(priority=1)


async def test_a_disk_that_does_not_answer_is_full(watched, monkeypatch) -> None:
    def broken() -> tuple[int, int]:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(watched.store, "disk_usage", broken)
    watched.watch.check_disk()
    assert watched.state.reasons == {"disk": "the ledger disk does not answer: Input/output error"}


async def test_flushes_that_go_on_failing_turn_the_bookie_read_only_until_one_succeeds(watched) -> None:
    watched.stats.flush_failed = True
    looks = []
    for _ in range(4):
        watched.watch.check_flush()
        looks.append(watched.state.read_only)
    assert looks == [False, False, True, True]
    assert watched.state.reasons == {"flush": "entries cannot be moved from the journal to the ledger disk"}
    watched.stats.flush_failed = False
    watched.watch.check_flush()
    assert not watched.state.read_only
    watched.stats.flush_failed = True
    watched.watch.check_flush()
    assert not watched.state.read_only


async def test_the_watch_looks_at_flushes(watched, monkeypatch) -> None:
    monkeypatch.setattr(storage_watch, "TICK_S", 0.001)
    watched.stats.flush_failed = True
    watching = asyncio.create_task(watched.watch.run())
    async with asyncio.timeout(5):
        while not watched.state.read_only:
            await asyncio.sleep(0.001)
    watching.cancel()


async def test_a_journal_that_failed_ends_the_bookie_once(watched) -> None:
    watched.watch.check_journal()
    assert watched.failures == []
    watched.stats.journal_failed = True
    watched.watch.check_journal()
    watched.watch.check_journal()
    assert watched.failures == ["the journal could not be written"]
    assert not watched.health.is_live
    assert watched.state.read_only


async def test_it_looks_by_itself(memory_store) -> None:
    watched = Watched(memory_store, disk_check_interval_s=0.01)
    memory_store.usage = (1000, 0)
    running = asyncio.create_task(watched.watch.run())
    async with asyncio.timeout(5):
        while not watched.state.read_only:
            await asyncio.sleep(0.001)
        memory_store.usage = (1000, 1000)
        while watched.state.read_only:
            await asyncio.sleep(0.001)
    running.cancel()
