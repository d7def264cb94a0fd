"""Compaction frees the space of deleted ledgers and changes nothing else."""

import asyncio
from typing import Any

import pytest
from bindery_bookie.storage.collection import rewrite
from bindery_bookie.storage.collection.collection_interface import CollectionKind, LogState, NoSuchEntryLog
from bindery_core.wire.messages import Status

CURRENT = "/ledgers/current"
FAST = {"compaction_rate": 2**30}


async def test_live_entries_are_copied_and_the_old_log_is_removed(kit: Any, compaction: Any) -> None:
    world = kit.World(**FAST)
    engine = await world.opened()
    bodies = await compaction.live_and_dead(kit, engine)
    before = {info.log_id: info for info in await engine.compactor.refresh()}
    assert before[1].live_ratio > 0
    result = await engine.compactor.run(major=True)
    assert result.rewritten == [1]
    assert not result.left
    info = {found.log_id: found for found in engine.compactor.logs()}
    assert 1 not in info
    (target,) = [found for found in info.values() if found.state is LogState.COMPACTED]
    assert target.order == 1
    assert target.live_ratio == 1.0
    assert target.size < before[1].size / 3
    assert result.reclaimed_bytes > 0
    assert "1.log" not in compaction.log_names(world)
    await compaction.check(kit, engine, bodies)
    again = await engine.compactor.run(major=True, minor=True)
    assert not again.rewritten
    await engine.close()
    engine = await world.opened()
    await compaction.check(kit, engine, bodies)
    await engine.close()
    await compaction.check_rebuilt(world, kit, bodies)


async def test_a_log_without_live_ledgers_is_removed_without_reading_it(kit: Any, compaction: Any) -> None:
    world = kit.World(**FAST)
    engine = await world.opened()
    await kit.fill(engine, 7, 50)
    await engine.flush()
    await engine.delete_ledger(7)
    result = await engine.compactor.run(force=True)  # the open log has no live entries either
    assert result.removed == [1]
    assert not result.rewritten
    assert engine.stats.logs_removed == 1
    assert engine.stats.reclaimed_deletion_bytes > 50 * 100
    assert compaction.log_names(world) == []
    assert await kit.read(engine, (7, 0)) == [Status.NO_LEDGER]
    bodies = await kit.fill(engine, 8, 5)
    await engine.close()
    engine = await world.opened()
    assert await kit.read(engine, *((8, entry_id) for entry_id in range(5))) == bodies
    await engine.close()


async def test_adds_reads_and_deletions_succeed_during_a_rewrite(kit: Any, compaction: Any) -> None:
    world = kit.World(compaction_rate=4096, entry_log_size_max=2**20, write_cache_size_max=2**18)
    engine = await world.opened()
    bodies = await compaction.live_and_dead(kit, engine, dead=400, live=150)
    await engine.flush()
    rewrite.STEP_SIZE, before = 512, rewrite.STEP_SIZE  # type: ignore[misc]
    try:
        settings = engine.compactor._settings
        engine.compactor._settings = settings.model_copy(update={"compaction_rate": 2**20})
        running = asyncio.ensure_future(engine.compactor.run(major=True))
        turns = 0
        progress: list[int] = []
        while not running.done():
            turns += 1
            again = kit.entry(3, turns % 150, b"again %d" % turns)
            bodies[3][turns % 150] = again
            new = kit.entry(5, turns, b"new")
            assert await kit.add(engine, kit.add_request(again), kit.add_request(new)) == [Status.OK] * 2
            assert await kit.read(engine, (3, turns % 150), (1, turns % 150)) == [again, bodies[1][turns % 150]]
            if turns % 3 == 0:
                await engine.flush()
            state = engine.compactor.state()
            if state.log_id == 1 and state.bytes_total:
                assert state.bytes_done <= state.bytes_total
                progress.append(state.bytes_done)
        assert turns > 10
        assert progress == sorted(progress)
        assert len(set(progress)) > 5, "the state shows the copy's progress while it runs"
        assert (await running).rewritten == [1]
    finally:
        rewrite.STEP_SIZE = before  # type: ignore[misc]
    found = await kit.read(engine, *((3, entry_id) for entry_id in range(150)))
    assert found == bodies[3]
    await engine.delete_ledger(5)
    await engine.flush()
    await compaction.check(kit, engine, bodies)
    await engine.close()
    engine = await world.opened()
    await compaction.check(kit, engine, bodies)
    await engine.close()
    await compaction.check_rebuilt(world, kit, bodies)


async def test_a_ledger_deleted_during_its_copy_stays_deleted(kit: Any, compaction: Any) -> None:
    world = kit.World(**FAST)
    engine = await world.opened()
    bodies = await compaction.live_and_dead(kit, engine)
    await engine.flush()
    replaced = engine.compactor._replacement.install

    async def replace_after_deletion(copied: Any) -> None:
        await engine.delete_ledger(3)
        await engine.flush()
        await replaced(copied)

    engine.compactor._replacement.install = replace_after_deletion  # type: ignore[method-assign]
    assert (await engine.compactor.run(major=True)).rewritten == [1]
    assert await kit.read(engine, (3, 0)) == [Status.NO_LEDGER]
    assert await kit.read(engine, (1, 0)) == [bodies[1][0]]
    world.kv.clear()
    world.disk.cut_after(0)
    await engine.close()
    world.lose_power(1)
    world.kv.clear()
    engine = await world.opened()
    assert list(await engine.list_ledger_ids()) == [1]
    await engine.close()


async def test_a_rebuild_uses_the_latest_write_although_compaction_moved_an_earlier_one_to_a_later_log(
    kit: Any,
    compaction: Any,
) -> None:
    world = kit.World(**FAST)
    engine = await world.opened()
    bodies = await compaction.live_and_dead(kit, engine)
    await engine.compactor.run(force=True, major=True)  # log 1 is closed and rewritten, entry (3, 0) in it
    await engine.compactor._parts.roll()
    bodies[3][0] = kit.entry(3, 0, b"second")
    assert await kit.add(engine, kit.add_request(bodies[3][0])) == [Status.OK]
    await kit.fill(engine, 6, 60, size=200)
    await engine.flush()
    await engine.delete_ledger(6)
    await engine.flush()
    assert (await engine.compactor.run(force=True, major=True)).rewritten
    await compaction.check(kit, engine, bodies)
    await engine.close()
    await compaction.check_rebuilt(world, kit, bodies)


async def test_deleted_records_are_kept_while_an_older_log_has_the_ledger(kit: Any, compaction: Any) -> None:
    world = kit.World(major_compaction_threshold=0.9, **FAST)
    engine = await world.opened()
    kept = await kit.fill(engine, 1, 200, size=200)  # log 1: mostly live, is kept
    await kit.fill(engine, 2, 10)
    await engine.flush()
    await engine.compactor._parts.roll()
    await engine.delete_ledger(2)  # log 2: the deleted record, and many dead entries
    await kit.fill(engine, 4, 100, size=200)
    await engine.flush()
    await engine.compactor._parts.roll()
    await engine.delete_ledger(4)
    again = await kit.fill(engine, 2, 3, first=20)  # log 3: the ledger is created again
    await engine.flush()
    result = await engine.compactor.run(major=True)
    assert result.rewritten == [2]
    assert not (await engine.compactor.run(major=True)).rewritten
    await engine.close()
    world.kv.clear()
    engine = await world.opened()
    assert await kit.read(engine, (2, 0), (2, 20), (1, 7), (4, 0)) == [
        Status.NO_ENTRY,
        again[0],
        kept[7],
        Status.NO_LEDGER,
    ]
    for ledger_id in (1, 2):
        await engine.delete_ledger(ledger_id)
    result = await engine.compactor.run(force=True)
    assert result.removed.index(1) < result.removed.index(
        4
    )  # after the older log is removed, the deleted record is not needed
    assert compaction.log_names(world) == []
    await engine.close()


async def test_a_read_repeats_its_lookup_if_compaction_moved_the_entry(kit: Any, compaction: Any) -> None:
    world = kit.World(read_cache_size_max=0, **FAST)
    engine = await world.opened()
    bodies = await compaction.live_and_dead(kit, engine)
    await engine.flush()
    real = engine.parts.index.run_before
    stale: dict[tuple[int, int], Any] = {}
    for entry_id in range(10):
        stale[3, entry_id] = real(3, entry_id)
    stale[1, 0] = real(1, 0)
    assert (await engine.compactor.run(major=True)).rewritten == [1]
    await engine.delete_ledger(1)
    await engine.flush()

    def run_before(ledger_id: int, entry_id: int) -> Any:
        return stale.pop((ledger_id, entry_id), None) or real(ledger_id, entry_id)

    engine.parts.index.run_before = run_before  # type: ignore[method-assign]
    reader = engine.parts.reader
    assert reader.read([(3, 5), (1, 0)]).answers == [bodies[3][5], Status.NO_LEDGER]
    assert not engine.damage.items()
    await engine.close()


async def test_open_files_of_removed_logs_are_closed(kit: Any, compaction: Any) -> None:
    world = kit.World(**FAST)
    engine = await world.opened()
    bodies = await compaction.live_and_dead(kit, engine)
    await engine.flush()
    assert await kit.read(engine, (3, 5)) == [bodies[3][5]]
    files = engine.parts.reader._logs._files
    assert 1 in files
    await engine.compactor.run(major=True)
    assert 1 not in files
    await engine.close()


async def test_copying_is_rate_limited(kit: Any, compaction: Any) -> None:
    world = kit.World(compaction_rate=64 * 1024, entry_log_size_max=2**20, write_cache_size_max=2**19)
    engine = await world.opened()
    await compaction.live_and_dead(kit, engine, dead=600, live=60)
    await engine.flush()
    loop = asyncio.get_running_loop()
    started = loop.time()
    result = await engine.compactor.run(major=True)
    assert result.rewritten == [1]
    assert loop.time() - started >= 0.9 * result.copied_bytes / (64 * 1024)
    await engine.close()


async def test_the_sparsest_log_is_compacted_first(kit: Any) -> None:
    world = kit.World(**FAST)
    engine = await world.opened()
    for log_id, live in ((1, 40), (2, 5), (3, 20)):
        await kit.fill(engine, log_id, live, size=200)
        await kit.fill(engine, 10 + log_id, 60, size=200)
        await engine.flush()
        await engine.delete_ledger(10 + log_id)
        await engine.compactor._parts.roll()
    assert (await engine.compactor.run(major=True)).rewritten[:3] == [2, 3, 1]
    await engine.close()


async def test_explain_reports_the_next_collection_and_its_reason(kit: Any, compaction: Any) -> None:
    world = kit.World(**FAST)
    engine = await world.opened()
    world.now_ms = 77_000
    await compaction.live_and_dead(kit, engine, dead=30, live=20)
    await engine.flush()
    compactor = engine.compactor
    explained = await compactor.explain(1)
    assert explained.log.state is LogState.OPEN
    assert explained.next_kind is None
    assert (explained.live_ledger_ids, explained.dead_ledger_ids) == ([1, 3], [2, 4])
    await compactor._parts.roll()
    explained = await compactor.explain(1)
    assert explained.log.looked_at_ms == 77_000
    assert explained.log.size == len(world.disk.contents(f"{CURRENT}/1.log"))
    dead = sum(8 + len(kit.entry(1, 0, bytes(200))) for _ in range(60)) + 2 * (8 + 20 + len(kit.KEY)) + 2 * 24
    assert explained.log.live_bytes == explained.log.size - dead
    assert (explained.next_kind, explained.due_in_s) == (CollectionKind.MAJOR, pytest.approx(86400, abs=5))
    assert "not below the 20% of minor" in explained.sentences[1]
    compactor.suspend(major=True)
    explained = await compactor.explain(1)
    assert explained.next_kind is None
    assert "suspended" in explained.sentences[-1]
    assert not (await compactor.run(major=True)).rewritten
    assert (await compactor.run(major=True, force=True)).rewritten == [1]
    compactor.resume(major=True)
    assert not compactor.state().major_suspended
    with pytest.raises(NoSuchEntryLog):
        await compactor.explain(1)
    await engine.close()


async def test_runs_are_scheduled_by_interval(kit: Any, compaction: Any) -> None:
    world = kit.World(gc_wait_time_s=0.02, minor_compaction_interval_s=0.02, major_compaction_interval_s=0.05, **FAST)
    engine = await world.opened()
    bodies = await compaction.live_and_dead(kit, engine)
    async with asyncio.timeout(30):
        while not engine.stats.compactions_major + engine.stats.compactions_minor:
            await asyncio.sleep(0.01)
    await compaction.check(kit, engine, bodies)
    assert engine.stats.gc_runs >= 1
    assert engine.stats.reclaimed_compaction_bytes > 0
    await engine.close()
