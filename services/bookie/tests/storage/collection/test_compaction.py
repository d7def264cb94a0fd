"""Compaction: the space of deleted ledgers comes back, and nothing else changes, whatever fails and whenever."""

import asyncio
from typing import Any

import pytest
from bindery_bookie.storage import control_records as control
from bindery_bookie.storage.collection import rewrite
from bindery_bookie.storage.collection.collection_interface import CollectionKind, LogState, NoSuchEntryLog
from bindery_bookie.storage.engine.engine import StorageEngine
from bindery_bookie.storage.entry_log.log_manifest import read_manifest
from bindery_bookie.storage.io.fault_injection import FaultyDisk
from bindery_core.wire.messages import Status

CURRENT = "/ledgers/current"
FAST = {"compaction_rate": 2**30}


async def two_kinds(kit: Any, engine: StorageEngine, *, dead: int = 60, live: int = 10) -> dict[int, list[bytes]]:
    """Ledgers 1 to 4 in one closed log: 1 (fenced, with an explicit LAC) and 3 live, 2 and 4 deleted. Bodies of all."""
    bodies = {
        ledger_id: await kit.fill(engine, ledger_id, live if ledger_id % 2 else dead, size=200)
        for ledger_id in (1, 2, 3, 4)
    }
    await engine.fence(1, kit.KEY)
    await engine.write_lac(1, kit.KEY, 3, kit.lac_packet(1, 3))
    await engine.flush()
    await engine.compactor.run(force=True)
    for ledger_id in (2, 4):
        await engine.delete_ledger(ledger_id)
        del bodies[ledger_id]
    return bodies


async def check(kit: Any, engine: StorageEngine, bodies: dict[int, list[bytes]]) -> None:
    """All of it is there, and nothing else: entries, fence, key, explicit LAC."""
    assert list(await engine.list_ledger_ids()) == sorted(bodies)
    for ledger_id, expected in bodies.items():
        found = await kit.read(engine, *((ledger_id, entry_id) for entry_id in range(len(expected) + 1)))
        assert found == [*expected, Status.NO_ENTRY]
    assert (await engine.read_lac(1)).explicit_packet == kit.lac_packet(1, 3)
    (status,) = await kit.add(engine, kit.add_request(kit.entry(1, 500)))
    assert status == Status.FENCED
    (status,) = await kit.add(engine, kit.add_request(kit.entry(3, 500), key=b"another"))
    assert status == Status.UNAUTHORIZED


def logs(world: Any) -> list[str]:
    return [name for name in world.disk.list_names(CURRENT) if ".log" in name]


async def rebuilt(world: Any, kit: Any, bodies: dict[int, list[bytes]]) -> None:
    """The same from the entry logs alone."""
    world.kv.clear()
    engine = await world.opened()
    await check(kit, engine, bodies)
    await engine.close()


async def test_live_entries_move_and_the_old_log_goes(kit: Any) -> None:
    world = kit.World(**FAST)
    engine = await world.opened()
    bodies = await two_kinds(kit, engine)
    before = {info.log_id: info for info in await engine.compactor.look()}
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
    assert "1.log" not in logs(world)
    await check(kit, engine, bodies)
    again = await engine.compactor.run(major=True, minor=True)
    assert not again.rewritten
    await engine.close()
    engine = await world.opened()
    await check(kit, engine, bodies)
    await engine.close()
    await rebuilt(world, kit, bodies)


async def test_a_log_without_live_ledgers_is_removed_unread(kit: Any) -> None:
    world = kit.World(**FAST)
    engine = await world.opened()
    await kit.fill(engine, 7, 50)
    await engine.flush()
    await engine.delete_ledger(7)
    result = await engine.compactor.run(force=True)  # the open log is all dead too
    assert result.removed == [1]
    assert not result.rewritten
    assert engine.stats.logs_removed == 1
    assert engine.stats.reclaimed_deletion_bytes > 50 * 100
    assert logs(world) == []
    assert await kit.read(engine, (7, 0)) == [Status.NO_LEDGER]
    bodies = await kit.fill(engine, 8, 5)
    await engine.close()
    engine = await world.opened()
    assert await kit.read(engine, *((8, entry_id) for entry_id in range(5))) == bodies
    await engine.close()


async def lost_during(world: Any, kit: Any, operations: int) -> tuple[bool, dict[int, list[bytes]]]:
    """Power lost so many operations into a compaction; whether that was before its end. The bodies of live ledgers."""
    engine = await world.opened()
    bodies = await two_kinds(kit, engine)
    await engine.flush()
    world.disk.cut_after(operations)
    result = await engine.compactor.run(major=True)
    was_cut = world.disk.is_cut
    assert was_cut or result.rewritten == [1]
    world.disk.cut_after(0)
    await engine.close()
    return was_cut, bodies


@pytest.mark.parametrize("seed", range(4))
async def test_power_lost_after_every_operation(kit: Any, seed: int) -> None:
    points = 0
    while True:
        world = kit.World(seed, **FAST)
        was_cut, bodies = await lost_during(world, kit, points)
        for is_index_lost in (False, True):
            after = kit.World(seed, **FAST)
            after.disk, after.kv = world.disk, world.kv
            after.lose_power(seed)
            if is_index_lost:
                after.kv.clear()
            engine = await after.opened()
            assert not engine.damage.items()
            await check(kit, engine, bodies)
            await engine.compactor.run(major=True, force=True)
            expected = read_manifest(after.disk, CURRENT).expected(engine.parts.flusher.mark.log_id)
            assert sorted(logs(after)) == sorted(f"{log_id:x}.log" for log_id in expected)
            assert all(info.live_ratio == 1 for info in engine.compactor.logs() if info.state is LogState.COMPACTED)
            assert "1.log" not in logs(after)
            await check(kit, engine, bodies)
            await engine.close()
            await rebuilt(after, kit, bodies)
        if not was_cut:
            break
        points += 1
    assert points > 20


class Fault:
    """Fails the n-th operation that may want space, once it is armed."""

    def __init__(self, left: int) -> None:
        self.left = left
        self.is_armed = False

    def __call__(self, operation: str, path: str) -> OSError | None:
        if not self.is_armed or operation in ("list_names", "read_at", "open_read", "usage", "size", "close"):
            return None
        self.left -= 1
        return OSError(28, "No space left on device", path) if self.left == -1 else None


async def test_an_error_at_every_operation_is_got_over(kit: Any) -> None:
    for failing in range(200):
        fault = Fault(failing)
        world = kit.World(wrap=lambda disk, fault=fault: FaultyDisk(disk, fault), **FAST)
        engine = await world.opened()
        bodies = await two_kinds(kit, engine)
        await engine.flush()
        fault.is_armed = True
        result = await engine.compactor.run(major=True)
        fault.is_armed = False
        await check(kit, engine, bodies)
        if fault.left >= 0:
            assert result.rewritten == [1]
            await engine.close()
            break
        await engine.compactor.run(major=True)
        assert "1.log" not in logs(world)
        assert len(logs(world)) <= 3
        await check(kit, engine, bodies)
        await engine.close()
        assert not [name for name in logs(world) if "compacting" in name]
        engine = await world.opened()
        assert not engine.damage.items()
        await check(kit, engine, bodies)
        await engine.close()
        await rebuilt(world, kit, bodies)
    else:
        raise AssertionError("no end")
    assert failing > 12


async def test_the_index_switch_may_fail_and_be_on_the_disk_all_the_same(kit: Any) -> None:
    """What LevelDB did of a batch that it refused is known after a restart only."""
    for is_on_disk in (False, True):
        world = kit.World(**FAST)
        engine = await world.opened()
        bodies = await two_kinds(kit, engine)
        await engine.flush()
        real = engine.parts.index.switch
        kept: list[Any] = []

        def switch(*args: Any, kept: list[Any] = kept, **kwargs: Any) -> None:
            kept.append((args, kwargs))
            raise OSError(5, "refused")

        engine.parts.index.switch = switch  # type: ignore[method-assign]
        result = await engine.compactor.run(major=True)
        assert result.left
        assert not result.rewritten
        await check(kit, engine, bodies)
        result = await engine.compactor.run(major=True)
        assert len(kept) == 2
        if is_on_disk:
            real(*kept[0][0], **kept[0][1])
        world.disk.cut_after(0)
        await engine.close()
        world.lose_power(3)
        engine = await world.opened()
        assert not engine.damage.items()
        await check(kit, engine, bodies)
        assert ("1.log" in logs(world)) is not is_on_disk
        await engine.close()
        await rebuilt(world, kit, bodies)


async def test_everything_goes_on_while_a_log_is_rewritten(kit: Any) -> None:
    world = kit.World(compaction_rate=4096, entry_log_size_max=2**20, write_cache_size_max=2**18)
    engine = await world.opened()
    bodies = await two_kinds(kit, engine, dead=400, live=150)
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
    await check(kit, engine, bodies)
    await engine.close()
    engine = await world.opened()
    await check(kit, engine, bodies)
    await engine.close()
    await rebuilt(world, kit, bodies)


async def test_a_ledger_deleted_while_it_is_copied(kit: Any) -> None:
    world = kit.World(**FAST)
    engine = await world.opened()
    bodies = await two_kinds(kit, engine)
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


async def test_a_later_copy_of_an_entry_wins_a_rebuild_although_the_earlier_moved_behind_it(kit: Any) -> None:
    world = kit.World(**FAST)
    engine = await world.opened()
    bodies = await two_kinds(kit, engine)
    await engine.compactor.run(force=True, major=True)  # log 1 is closed and rewritten, entry (3, 0) in it
    await engine.compactor._parts.roll()
    bodies[3][0] = kit.entry(3, 0, b"second")
    assert await kit.add(engine, kit.add_request(bodies[3][0])) == [Status.OK]
    await kit.fill(engine, 6, 60, size=200)
    await engine.flush()
    await engine.delete_ledger(6)
    await engine.flush()
    assert (await engine.compactor.run(force=True, major=True)).rewritten
    await check(kit, engine, bodies)
    await engine.close()
    await rebuilt(world, kit, bodies)


async def test_deletions_are_kept_while_an_older_log_holds_the_ledger(kit: Any) -> None:
    world = kit.World(major_compaction_threshold=0.9, **FAST)
    engine = await world.opened()
    kept = await kit.fill(engine, 1, 200, size=200)  # log 1: mostly alive, stays
    await kit.fill(engine, 2, 10)
    await engine.flush()
    await engine.compactor._parts.roll()
    await engine.delete_ledger(2)  # log 2: the deletion, and much that dies
    await kit.fill(engine, 4, 100, size=200)
    await engine.flush()
    await engine.compactor._parts.roll()
    await engine.delete_ledger(4)
    again = await kit.fill(engine, 2, 3, first=20)  # log 3: the ledger is made anew
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
    assert result.removed.index(1) < result.removed.index(4)  # nobody needs the deletion once the older log is gone
    assert logs(world) == []
    await engine.close()


async def test_what_is_damaged_keeps_its_log_and_no_other(kit: Any) -> None:
    world = kit.World(**FAST)
    engine = await world.opened()
    bodies = await two_kinds(kit, engine)
    await engine.compactor._parts.roll()
    await kit.fill(engine, 6, 60, size=200)
    await kit.fill(engine, 7, 5)
    await engine.flush()
    await engine.delete_ledger(6)
    await engine.flush()
    await engine.compactor._parts.roll()
    ids = {one: (await engine.compactor.explain(1)).log for one in (1,)}
    assert ids[1].state is LogState.SEALED
    data = world.disk.contents(f"{CURRENT}/1.log")
    world.disk.corrupt(f"{CURRENT}/1.log", data.index(bodies[3][4]) + 40)
    world.disk.corrupt(f"{CURRENT}/1.log", data.index(bodies[3][6]) + 40)
    dead = data.index(kit.entry(2, 3, bytes([3]) * 200, lac=2))
    world.disk.corrupt(f"{CURRENT}/1.log", dead - 5)  # a dead record's size: of no account
    result = await engine.compactor.run(major=True)
    assert result.rewritten == [2]
    assert result.left == [(1, "2 live entries cannot be read")]
    assert [(one.ledger_id, one.entry_id) for one in engine.damage.items()] == [(3, 4), (3, 6)]
    explained = await engine.compactor.explain(1)
    assert explained.log.state is LogState.DAMAGED
    assert "cannot be read" in explained.sentences[0] + explained.sentences[1]
    assert not [name for name in logs(world) if "compacting" in name]
    for entry_id in (4, 6):  # healed: stored anew
        assert await kit.add(engine, kit.add_request(bodies[3][entry_id], recovery=True)) == [Status.OK]
    await engine.flush()
    assert (await engine.compactor.run(major=True)).rewritten == [1]
    await engine.delete_ledger(7)
    await engine.flush()
    await check(kit, engine, bodies)
    await engine.close()
    await rebuilt(world, kit, bodies)


@pytest.mark.parametrize("with_scan_damage", [False, True])
async def test_a_log_without_its_ledgers_map_is_compacted_all_the_same(kit: Any, with_scan_damage: bool) -> None:
    world = kit.World(**FAST)
    engine = await world.opened()
    bodies = await two_kinds(kit, engine)
    await engine.flush()
    await engine.compactor._parts.roll()
    path = f"{CURRENT}/1.log"
    size = len(world.disk.contents(path))
    world.disk.corrupt(path, size - 3)  # the trailer
    if with_scan_damage:
        dead = world.disk.contents(path).index(kit.entry(2, 3, bytes([3]) * 200, lac=2))
        world.disk.corrupt(path, dead - 5)
    info = (await engine.compactor.look())[0]
    assert (info.live_ledgers, info.dead_ledgers) == (2, 2) or with_scan_damage
    assert (await engine.compactor.run(major=True)).rewritten == [1]
    await check(kit, engine, bodies)
    await engine.close()
    await rebuilt(world, kit, bodies)


async def test_a_read_that_looked_up_before_the_log_moved_looks_again(kit: Any) -> None:
    world = kit.World(read_cache_size_max=0, **FAST)
    engine = await world.opened()
    bodies = await two_kinds(kit, engine)
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


async def test_open_files_of_removed_logs_are_closed(kit: Any) -> None:
    world = kit.World(**FAST)
    engine = await world.opened()
    bodies = await two_kinds(kit, engine)
    await engine.flush()
    assert await kit.read(engine, (3, 5)) == [bodies[3][5]]
    files = engine.parts.reader._logs._files
    assert 1 in files
    await engine.compactor.run(major=True)
    assert 1 not in files
    await engine.close()


async def test_copying_keeps_to_its_pace(kit: Any) -> None:
    world = kit.World(compaction_rate=64 * 1024, entry_log_size_max=2**20, write_cache_size_max=2**19)
    engine = await world.opened()
    await two_kinds(kit, engine, dead=600, live=60)
    await engine.flush()
    loop = asyncio.get_running_loop()
    started = loop.time()
    result = await engine.compactor.run(major=True)
    assert result.rewritten == [1]
    assert loop.time() - started >= 0.9 * result.copied_bytes / (64 * 1024)
    await engine.close()


async def test_the_bookie_stops_in_the_middle_of_a_copy(kit: Any) -> None:
    world = kit.World(compaction_rate=4096)
    engine = await world.opened()
    bodies = await two_kinds(kit, engine)
    await engine.flush()
    running = asyncio.ensure_future(engine.compactor.run(major=True))
    while engine.compactor.state().running is not CollectionKind.MAJOR:
        await asyncio.sleep(0)
    async with asyncio.timeout(30):
        await engine.close()
        assert (await running).left
    assert not [name for name in logs(world) if "compacting" in name]
    engine = await world.opened()
    await check(kit, engine, bodies)
    await engine.close()


async def test_a_log_for_which_there_is_no_room_is_left_and_told(kit: Any) -> None:
    world = kit.World(reserve_size=0, **FAST)
    engine = await world.opened()
    bodies = await two_kinds(kit, engine)
    await engine.flush()
    used = world.disk.capacity - world.disk.usage(CURRENT).free
    world.disk.capacity = used + 4096
    result = await engine.compactor.run(major=True)
    assert result.left == [(1, "no room")]
    assert "no room" in engine.compactor.state().last_error
    world.disk.capacity = 2**30
    assert (await engine.compactor.run(major=True)).rewritten == [1]
    await check(kit, engine, bodies)
    await engine.close()


async def test_the_sparsest_log_is_first(kit: Any) -> None:
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


async def test_explain_says_what_happens_and_why(kit: Any) -> None:
    world = kit.World(**FAST)
    engine = await world.opened()
    world.now_ms = 77_000
    await two_kinds(kit, engine, dead=30, live=20)
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


async def test_runs_come_by_themselves(kit: Any) -> None:
    world = kit.World(gc_wait_time_s=0.02, minor_compaction_interval_s=0.02, major_compaction_interval_s=0.05, **FAST)
    engine = await world.opened()
    bodies = await two_kinds(kit, engine)
    async with asyncio.timeout(30):
        while not engine.stats.compactions_major + engine.stats.compactions_minor:
            await asyncio.sleep(0.01)
    await check(kit, engine, bodies)
    assert engine.stats.gc_runs >= 1
    assert engine.stats.reclaimed_compaction_bytes > 0
    await engine.close()


async def test_a_deletion_that_no_flush_has_finished_frees_nothing(kit: Any) -> None:
    """It would be undone by a crash, and the ledger's rows would point nowhere."""
    world = kit.World(**FAST)
    engine = await world.opened()
    bodies = await kit.fill(engine, 9, 20)
    await engine.flush()
    await engine.compactor._parts.roll()

    async def refuse() -> None:
        raise OSError(28, "no space")

    engine.compactor._parts.flush_deletions = refuse
    await engine.delete_ledger(9)
    assert not (await engine.compactor.run(force=True, major=True)).removed
    world.disk.cut_after(0)
    await engine.close()
    world.lose_power(1)
    engine = await world.opened()
    assert await kit.read(engine, *((9, entry_id) for entry_id in range(20))) == bodies
    await engine.close()


async def test_logs_of_a_flush_that_is_not_finished_are_left_alone(kit: Any) -> None:
    world = kit.World(write_cache_size_max=2**19, flush_retry_s=600, **FAST)
    engine = await world.opened()
    bodies = await kit.fill(engine, 9, 1000, size=200)
    real = engine.parts.flusher._commit

    def refuse(*args: Any) -> int:
        raise OSError(28, "no space")

    engine.parts.flusher._commit = refuse  # type: ignore[method-assign]
    with pytest.raises(OSError, match="flush"):
        await engine.flush()
    there = logs(world)
    assert len(there) > 3
    result = await engine.compactor.run(major=True)
    assert not result.removed
    assert logs(world) == there
    assert {info.state for info in engine.compactor.logs()} == {LogState.OPEN}
    engine.parts.flusher._commit = real  # type: ignore[method-assign]
    await engine.flush()
    await engine.compactor.run(major=True)
    assert await kit.read(engine, *((9, entry_id) for entry_id in range(1000))) == bodies
    await engine.close()


async def test_power_lost_during_a_copy_that_flushes_overtook(kit: Any) -> None:
    """The id that the copy had is below LastLogMark's then, and no log of it was lost."""
    world = kit.World(**FAST)
    engine = await world.opened()
    bodies = await two_kinds(kit, engine)
    await engine.flush()

    async def overtaken(copied: Any) -> None:
        bodies[5] = await kit.fill(engine, 5, 20)
        await engine.flush()
        await engine.compactor._parts.roll()
        await kit.fill(engine, 3, 1)
        await engine.flush()
        world.disk.cut_after(0)
        raise OSError(5, "the power is gone")

    engine.compactor._replacement.install = overtaken  # type: ignore[method-assign]
    assert (await engine.compactor.run(major=True)).left
    await engine.close()
    world.lose_power(5)
    world.kv.clear()
    engine = await world.opened()
    assert not engine.damage.items()
    assert engine.limbo is None
    bodies[3][0] = (await kit.read(engine, (3, 0)))[0]
    await check(kit, engine, bodies)
    await engine.close()


async def test_a_damaged_log_of_dead_entries_does_not_take_keys_and_fences_along(kit: Any) -> None:
    world = kit.World(**FAST)
    engine = await world.opened()
    await engine.fence(1, kit.KEY)
    await kit.fill(engine, 2, 60)
    await engine.flush()
    await engine.compactor._parts.roll()
    body = kit.entry(1, 0, b"recovered")
    assert await kit.add(engine, kit.add_request(body, recovery=True)) == [Status.OK]
    await engine.flush()
    path = f"{CURRENT}/1.log"
    world.disk.corrupt(path, len(world.disk.contents(path)) - 3)  # the trailer
    world.disk.corrupt(path, world.disk.contents(path).index(kit.KEY))
    world.disk.corrupt(path, world.disk.contents(path).index(control.pack_fence(1)))
    await engine.delete_ledger(2)
    assert (await engine.compactor.run(major=True)).rewritten == [1]
    assert "1.log" not in logs(world)
    await engine.close()
    world.kv.clear()
    engine = await world.opened()
    assert await kit.read(engine, (1, 0)) == [body]
    assert await kit.add(engine, kit.add_request(kit.entry(1, 1))) == [Status.FENCED]
    await engine.close()
