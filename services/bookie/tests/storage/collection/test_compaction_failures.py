"""Compaction loses nothing in a power loss, after an error at any operation, or because of damage."""

import asyncio
from typing import Any

import pytest
from bindery_bookie.storage import control_records as control
from bindery_bookie.storage.collection.collection_interface import CollectionKind, LogState
from bindery_bookie.storage.entry_log.log_manifest import read_manifest
from bindery_bookie.storage.io.fault_injection import FaultyDisk
from bindery_core.wire.messages import Status

CURRENT = "/ledgers/current"
FAST = {"compaction_rate": 2**30}


async def cut_power_during(
    world: Any, kit: Any, compaction: Any, operations: int
) -> tuple[bool, dict[int, list[bytes]]]:
    """Cut the power after this number of operations of a compaction.

    Return True if that was before its end, and the bodies of the live ledgers.
    """
    engine = await world.opened()
    bodies = await compaction.live_and_dead(kit, engine)
    await engine.flush()
    world.disk.cut_after(operations)
    result = await engine.compactor.run(major=True)
    was_cut = world.disk.is_cut
    assert was_cut or result.rewritten == [1]
    world.disk.cut_after(0)
    await engine.close()
    return was_cut, bodies


@pytest.mark.parametrize("seed", range(4))
async def test_a_power_loss_after_any_operation_of_a_compaction_loses_nothing(
    kit: Any, compaction: Any, seed: int
) -> None:
    points = 0
    while True:
        world = kit.World(seed, **FAST)
        was_cut, bodies = await cut_power_during(world, kit, compaction, points)
        for is_index_lost in (False, True):
            after = kit.World(seed, **FAST)
            after.disk, after.kv = world.disk, world.kv
            after.lose_power(seed)
            if is_index_lost:
                after.kv.clear()
            engine = await after.opened()
            assert not engine.damage.items()
            await compaction.check(kit, engine, bodies)
            await engine.compactor.run(major=True, force=True)
            expected = read_manifest(after.disk, CURRENT).expected(engine.parts.flusher.mark.log_id)
            assert sorted(compaction.log_names(after)) == sorted(f"{log_id:x}.log" for log_id in expected)
            assert all(info.live_ratio == 1 for info in engine.compactor.logs() if info.state is LogState.COMPACTED)
            assert "1.log" not in compaction.log_names(after)
            await compaction.check(kit, engine, bodies)
            await engine.close()
            await compaction.check_rebuilt(after, kit, bodies)
        if not was_cut:
            break
        points += 1
    assert points > 20


class Fault:
    """Fails the n-th operation that may need space, once it is armed."""

    def __init__(self, left: int) -> None:
        self.left = left
        self.is_armed = False

    def __call__(self, operation: str, path: str) -> OSError | None:
        if not self.is_armed or operation in ("list_names", "read_at", "open_read", "usage", "size", "close"):
            return None
        self.left -= 1
        return OSError(28, "No space left on device", path) if self.left == -1 else None


async def test_compaction_recovers_from_an_error_at_every_operation(kit: Any, compaction: Any) -> None:
    for failing in range(200):
        fault = Fault(failing)
        world = kit.World(wrap=lambda disk, fault=fault: FaultyDisk(disk, fault), **FAST)
        engine = await world.opened()
        bodies = await compaction.live_and_dead(kit, engine)
        await engine.flush()
        fault.is_armed = True
        result = await engine.compactor.run(major=True)
        fault.is_armed = False
        await compaction.check(kit, engine, bodies)
        if fault.left >= 0:
            assert result.rewritten == [1]
            await engine.close()
            break
        await engine.compactor.run(major=True)
        assert "1.log" not in compaction.log_names(world)
        assert len(compaction.log_names(world)) <= 3
        await compaction.check(kit, engine, bodies)
        await engine.close()
        assert not [name for name in compaction.log_names(world) if "compacting" in name]
        engine = await world.opened()
        assert not engine.damage.items()
        await compaction.check(kit, engine, bodies)
        await engine.close()
        await compaction.check_rebuilt(world, kit, bodies)
    else:
        raise AssertionError("no end")
    assert failing > 12


async def test_a_failed_index_switch_loses_nothing_whether_or_not_it_is_on_disk(kit: Any, compaction: Any) -> None:
    """Whether LevelDB applied a batch that failed is known only after a restart."""
    for is_on_disk in (False, True):
        world = kit.World(**FAST)
        engine = await world.opened()
        bodies = await compaction.live_and_dead(kit, engine)
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
        await compaction.check(kit, engine, bodies)
        result = await engine.compactor.run(major=True)
        assert len(kept) == 2
        if is_on_disk:
            real(*kept[0][0], **kept[0][1])
        world.disk.cut_after(0)
        await engine.close()
        world.lose_power(3)
        engine = await world.opened()
        assert not engine.damage.items()
        await compaction.check(kit, engine, bodies)
        assert ("1.log" in compaction.log_names(world)) is not is_on_disk
        await engine.close()
        await compaction.check_rebuilt(world, kit, bodies)


async def test_a_log_with_damaged_live_entries_is_kept(kit: Any, compaction: Any) -> None:
    world = kit.World(**FAST)
    engine = await world.opened()
    bodies = await compaction.live_and_dead(kit, engine)
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
    world.disk.corrupt(f"{CURRENT}/1.log", dead - 5)  # the size of a dead record does not matter
    result = await engine.compactor.run(major=True)
    assert result.rewritten == [2]
    assert result.left == [(1, "2 live entries cannot be read")]
    assert [(one.ledger_id, one.entry_id) for one in engine.damage.items()] == [(3, 4), (3, 6)]
    explained = await engine.compactor.explain(1)
    assert explained.log.state is LogState.DAMAGED
    assert "cannot be read" in explained.sentences[0] + explained.sentences[1]
    assert not [name for name in compaction.log_names(world) if "compacting" in name]
    for entry_id in (4, 6):  # healed: stored again
        assert await kit.add(engine, kit.add_request(bodies[3][entry_id], recovery=True)) == [Status.OK]
    await engine.flush()
    assert (await engine.compactor.run(major=True)).rewritten == [1]
    await engine.delete_ledger(7)
    await engine.flush()
    await compaction.check(kit, engine, bodies)
    await engine.close()
    await compaction.check_rebuilt(world, kit, bodies)


@pytest.mark.parametrize("with_scan_damage", [False, True])
async def test_a_log_without_ledgers_map_is_compacted(kit: Any, compaction: Any, with_scan_damage: bool) -> None:
    world = kit.World(**FAST)
    engine = await world.opened()
    bodies = await compaction.live_and_dead(kit, engine)
    await engine.flush()
    await engine.compactor._parts.roll()
    path = f"{CURRENT}/1.log"
    size = len(world.disk.contents(path))
    world.disk.corrupt(path, size - 3)  # the trailer
    if with_scan_damage:
        dead = world.disk.contents(path).index(kit.entry(2, 3, bytes([3]) * 200, lac=2))
        world.disk.corrupt(path, dead - 5)
    info = (await engine.compactor.refresh())[0]
    assert (info.live_ledgers, info.dead_ledgers) == (2, 2) or with_scan_damage
    assert (await engine.compactor.run(major=True)).rewritten == [1]
    await compaction.check(kit, engine, bodies)
    await engine.close()
    await compaction.check_rebuilt(world, kit, bodies)


async def test_a_stop_during_a_copy_loses_nothing(kit: Any, compaction: Any) -> None:
    world = kit.World(compaction_rate=4096)
    engine = await world.opened()
    bodies = await compaction.live_and_dead(kit, engine)
    await engine.flush()
    running = asyncio.ensure_future(engine.compactor.run(major=True))
    while engine.compactor.state().running is not CollectionKind.MAJOR:
        await asyncio.sleep(0)
    async with asyncio.timeout(30):
        await engine.close()
        assert (await running).left
    assert not [name for name in compaction.log_names(world) if "compacting" in name]
    engine = await world.opened()
    await compaction.check(kit, engine, bodies)
    await engine.close()


async def test_a_log_is_kept_and_reported_if_there_is_no_space_for_its_copy(kit: Any, compaction: Any) -> None:
    world = kit.World(reserve_size=0, **FAST)
    engine = await world.opened()
    bodies = await compaction.live_and_dead(kit, engine)
    await engine.flush()
    used = world.disk.capacity - world.disk.usage(CURRENT).free
    world.disk.capacity = used + 4096
    result = await engine.compactor.run(major=True)
    assert result.left == [(1, "no space")]
    assert "no space" in engine.compactor.state().last_error
    world.disk.capacity = 2**30
    assert (await engine.compactor.run(major=True)).rewritten == [1]
    await compaction.check(kit, engine, bodies)
    await engine.close()


async def test_a_deletion_that_is_not_flushed_frees_no_space(kit: Any) -> None:
    """A crash would undo the deletion, and the ledger's rows would refer to a removed log."""
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


async def test_logs_of_an_unfinished_flush_are_not_collected(kit: Any, compaction: Any) -> None:
    world = kit.World(write_cache_size_max=2**19, flush_retry_s=600, **FAST)
    engine = await world.opened()
    bodies = await kit.fill(engine, 9, 1000, size=200)
    real = engine.parts.flusher._commit

    def refuse(*args: Any) -> int:
        raise OSError(28, "no space")

    engine.parts.flusher._commit = refuse  # type: ignore[method-assign]
    with pytest.raises(OSError, match="flush"):
        await engine.flush()
    there = compaction.log_names(world)
    assert len(there) > 3
    result = await engine.compactor.run(major=True)
    assert not result.removed
    assert compaction.log_names(world) == there
    assert {info.state for info in engine.compactor.logs()} == {LogState.OPEN}
    engine.parts.flusher._commit = real  # type: ignore[method-assign]
    await engine.flush()
    await engine.compactor.run(major=True)
    assert await kit.read(engine, *((9, entry_id) for entry_id in range(1000))) == bodies
    await engine.close()


async def test_a_power_loss_during_a_copy_after_later_flushes_loses_nothing(kit: Any, compaction: Any) -> None:
    """The id of the unfinished copy is then below that of LastLogMark, and must not count as a lost log."""
    world = kit.World(**FAST)
    engine = await world.opened()
    bodies = await compaction.live_and_dead(kit, engine)
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
    await compaction.check(kit, engine, bodies)
    await engine.close()


async def test_keys_and_fences_survive_the_removal_of_a_damaged_log_of_dead_entries(kit: Any, compaction: Any) -> None:
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
    assert "1.log" not in compaction.log_names(world)
    await engine.close()
    world.kv.clear()
    engine = await world.opened()
    assert await kit.read(engine, (1, 0)) == [body]
    assert await kit.add(engine, kit.add_request(kit.entry(1, 1))) == [Status.FENCED]
    await engine.close()
