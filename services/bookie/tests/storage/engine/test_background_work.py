"""Background work during a full disk, an admin request, a stop of the bookie, or a bug."""

import asyncio
import errno
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from bindery_bookie.storage.engine import engine as engine_module
from bindery_bookie.storage.engine.engine import StorageEngine
from bindery_bookie.storage.entry_log.entry_log_scan import EntryLogScanner
from bindery_bookie.storage.io.disk import RealDisk
from bindery_bookie.storage.io.fault_injection import FaultyDisk
from bindery_bookie.storage.io.worker import ThreadWorker
from bindery_bookie.storage.memory.read_cache import ReadCache
from bindery_bookie.storage.opening import opening
from bindery_bookie.storage.scrub.scrub_walk import ScrubWalk
from bindery_core.wire.messages import Status

FAST = {"compaction_rate": 2**30}


async def one_dead_log(kit: Any, engine: StorageEngine) -> None:
    """Write log 1, closed and without live entries."""
    await kit.fill(engine, 7, 50)
    await engine.flush()
    await engine.parts.flush_loop.roll()
    await engine.delete_ledger(7)
    await engine.flush()


async def test_dead_logs_are_removed_although_the_disk_is_too_full_to_close_the_open_log(kit: Any) -> None:
    is_full = False

    def fault(operation: str, path: str) -> OSError | None:
        if is_full and operation in ("create", "write_at") and path.endswith(".log"):
            return OSError(errno.ENOSPC, "no space", path)
        return None

    world = kit.World(wrap=lambda disk: FaultyDisk(disk, fault), **FAST)
    engine = await world.opened()
    await one_dead_log(kit, engine)
    await kit.fill(engine, 8, 50)
    await engine.flush()
    await engine.delete_ledger(8)
    await engine.flush()
    is_full = True
    await kit.fill(engine, 9, 5)
    with pytest.raises(OSError, match="flush failed"):
        await engine.flush()
    result = await engine.compactor.run(force=True)
    assert 1 in result.removed
    is_full = False
    await engine.flush()
    await engine.close()


async def test_a_refresh_during_the_removal_of_logs_does_not_fail_the_run(kit: Any) -> None:
    world = kit.World(**FAST)
    engine = await world.opened()
    await one_dead_log(kit, engine)
    parts = engine.compactor._parts
    forget_log = parts.forget_log

    async def look_first(log_id: int) -> None:
        await engine.compactor.refresh()
        await forget_log(log_id)

    parts.forget_log = look_first
    result = await engine.compactor.run(force=True)
    assert 1 in result.removed
    assert not result.left
    assert engine.stats.logs_removed == len(result.removed)
    await engine.close()


async def test_a_flush_requested_after_the_stop_fails_at_once(kit: Any) -> None:
    is_broken = False

    def fault(operation: str, path: str) -> OSError | None:
        return OSError(errno.EIO, "broken", path) if is_broken and path.endswith(".log") else None

    world = kit.World(wrap=lambda disk: FaultyDisk(disk, fault))
    engine = await world.opened()
    await kit.fill(engine, 1, 5)
    is_broken = True
    await engine.close()
    with pytest.raises(OSError, match="closing"):
        async with asyncio.timeout(30):
            await engine.flush()


async def test_a_bug_in_a_flush_counts_as_a_failed_flush(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    world = kit.World()
    engine = await world.opened()
    bodies = await kit.fill(engine, 1, 5)
    store = engine.parts.flusher.store

    async def broken(flush: Any) -> None:
        raise KeyError("a fault of ours")

    monkeypatch.setattr(engine.parts.flusher, "store", broken)
    with pytest.raises(OSError, match="flush failed"):
        async with asyncio.timeout(30):
            await engine.flush()
    assert engine.stats.flush_failed
    monkeypatch.setattr(engine.parts.flusher, "store", store)
    await engine.flush()
    assert not engine.stats.flush_failed
    assert await kit.read(engine, *((1, entry_id) for entry_id in range(5))) == bodies
    await engine.close()


async def test_a_bug_in_a_scrub_step_is_reported_and_the_scrub_continues(
    kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bindery_bookie.storage.scrub.scrub.RETRY_S", 0.01)
    world = kit.World(scrub_rate=2**30)
    engine = await world.opened()
    await kit.fill(engine, 1, 5)
    await engine.flush()
    step, faults = ScrubWalk.step, ["a fault of ours"]

    def broken(self: ScrubWalk, cursor: Any) -> Any:
        if faults:
            raise KeyError(faults.pop())
        return step(self, cursor)

    monkeypatch.setattr(ScrubWalk, "step", broken)
    engine.scrubber.request()
    async with asyncio.timeout(30):
        while not engine.scrubber.state().rounds:
            await asyncio.sleep(0.01)
    assert not faults
    await engine.close()


async def test_many_deletions_are_flushed_in_parts(kit: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(engine_module, "DELETIONS_MAX", 10)
    world = kit.World()
    engine = await world.opened()
    for ledger_id in range(25):
        await kit.fill(engine, ledger_id, 1)
    await engine.flush()
    waiting = 0
    for ledger_id in range(25):
        await engine.delete_ledger(ledger_id)
        waiting = max(waiting, len(engine.parts.ledgers.deleted))
    assert 0 < waiting <= 10
    assert not list(await engine.list_ledger_ids())
    await engine.close()


async def test_a_read_waiting_during_the_deletion_of_its_ledger_leaves_nothing_in_the_cache(kit: Any) -> None:
    world = kit.World()
    engine = await world.opened()
    await kit.fill(engine, 1, 5)
    await kit.fill(engine, 2, 5)
    await engine.flush()
    answered: list[Any] = []
    engine.read_many([(2, 0)], answered.append)
    engine.read_many([(1, 0)], answered.append)  # waits for the job of the first
    await engine.delete_ledger(1)
    while len(answered) < 2:
        await asyncio.sleep(0)
    assert engine.parts.reads.cache.get(1, 0) is None
    new = kit.entry(1, 0, b"anew")
    assert await kit.add(engine, kit.add_request(new)) == [Status.OK]
    await engine.flush()
    assert await kit.read(engine, (1, 0)) == [new]
    await engine.close()


def test_the_read_cache_drops_the_keys_of_deleted_ledgers() -> None:
    cache = ReadCache(1024 * 1024)
    cache.put_many([((1, entry_id), b"kept") for entry_id in range(5)])
    for ledger_id in range(2, 50_000):
        cache.put_many([((ledger_id, 0), b"deleted")])
        cache.drop_ledger(ledger_id)
    assert len(cache._order) < 5000
    assert len(cache) == 5
    cache.size_max = 0
    cache.put_many([])
    assert (cache.size, len(cache)) == (0, 0)


async def test_an_entry_flushed_during_its_lookup_is_not_reported_as_damage(kit: Any) -> None:
    world = kit.World()
    engine = await world.opened()
    bodies = await kit.fill(engine, 1, 5)
    await engine.flush()
    index = engine.parts.index
    run_before, stale = index.run_before, [None]

    def looked_up_before(ledger_id: int, entry_id: int) -> Any:
        return stale.pop() if stale else run_before(ledger_id, entry_id)

    index.run_before = looked_up_before  # type: ignore[method-assign]
    assert await kit.read(engine, (1, 4)) == [bodies[4]]
    assert not engine.damage.items()
    await engine.close()


# --- cancelled starts ---------------------------------------------------------------------------


def on_real_disk(tmp_path: Path, kit: Any) -> StorageEngine:
    settings = kit.small_settings(
        journal_directory=str(tmp_path / "j"), ledger_directory=str(tmp_path / "l"), reserve_size=0
    )
    return StorageEngine.on_real_disk(settings, wall_clock_ms=lambda: 1)


async def test_a_cancelled_start_does_not_block_the_loop_while_its_worker_ends(
    tmp_path: Path, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_work, may_end = threading.Event(), threading.Event()
    heard: list[bool] = []
    real = opening.open_storage

    def slow(*args: Any, **others: Any) -> Any:
        at_work.set()
        heard.append(may_end.wait(10))
        return real(*args, **others)

    monkeypatch.setattr(opening, "open_storage", slow)
    engine = on_real_disk(tmp_path, kit)
    start = asyncio.create_task(engine.open())
    async with asyncio.timeout(30):
        while not at_work.is_set():
            await asyncio.sleep(0.001)
        start.cancel()
        await asyncio.sleep(0.01)  # the loop continues, and the start waits for its threads
        assert not start.done()
        may_end.set()
        await asyncio.gather(start, return_exceptions=True)
    assert heard == [True]
    engine = on_real_disk(tmp_path, kit)
    await engine.open()  # the index of the cancelled start was closed
    await engine.close()


async def test_a_cancelled_start_closes_an_index_whose_result_is_lost(
    tmp_path: Path, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cancellation arrives after the worker opened the index and before the start receives it."""
    real_finished = ThreadWorker._finished
    opened: list[Any] = []

    def finished(self: ThreadWorker, done: Any, result: Any, error: BaseException | None) -> None:
        if isinstance(result, opening.Opened) and not opened:
            opened.append(result)
            start.cancel()
        real_finished(self, done, result, error)

    monkeypatch.setattr(ThreadWorker, "_finished", finished)
    engine = on_real_disk(tmp_path, kit)
    start = asyncio.create_task(engine.open())
    with pytest.raises(asyncio.CancelledError):
        async with asyncio.timeout(30):
            await start
    assert len(opened) == 1
    with pytest.raises(OSError, match="closed"):
        opened[0].index.generation()


async def test_a_cancelled_start_stops_the_index_rebuild(
    tmp_path: Path, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = on_real_disk(tmp_path, kit)
    await engine.open()
    bodies = await kit.fill(engine, 5, 50)
    await engine.close()
    opening.request_rebuild(RealDisk(), str(tmp_path / "l" / "current"), "a test")
    real, at_work = EntryLogScanner.scan, threading.Event()

    def endless(*args: Any, **others: Any) -> Iterator[Any]:
        (*records,) = real(*args, **others)
        at_work.set()
        while True:
            yield from records

    engine = on_real_disk(tmp_path, kit)
    with monkeypatch.context() as patched:
        patched.setattr(EntryLogScanner, "scan", endless)
        start = asyncio.create_task(engine.open())
        async with asyncio.timeout(20):
            while not at_work.is_set():
                await asyncio.sleep(0.001)
            start.cancel()
            with pytest.raises(asyncio.CancelledError):
                await start
    await engine.open()  # rebuilds the index
    assert await kit.read(engine, *((5, e) for e in range(50))) == bodies
    await engine.close()
