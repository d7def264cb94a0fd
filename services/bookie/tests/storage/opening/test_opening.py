"""States of the files that a start accepts, repairs, or refuses with file and offset (the table in `opening`)."""

import asyncio
from typing import Any

import pytest
from bindery_bookie.storage.journal import journal_format
from bindery_core.errors import DamagedStorage
from bindery_core.wire.messages import Status

MARK = "/ledgers/current/LastLogMark"


async def crashed(world: Any, kit: Any, *, flushed: int = 0, journaled: int = 0) -> list[bytes]:
    """Cut the power of a bookie, and return the bodies of its entries.

    `flushed`: number of entries that were flushed. `journaled`: number of entries only in the journal, one per group.
    """
    engine = await world.opened()
    bodies = await kit.fill(engine, 5, flushed)
    if flushed:
        await engine.fence(5, kit.KEY)
        await engine.write_lac(5, kit.KEY, 1, kit.lac_packet(5, 1))
        await engine.flush()
    for entry_id in range(flushed, flushed + journaled):
        bodies.append(kit.entry(5, entry_id, b"j" * 600))
        assert await kit.add(engine, kit.add_request(bodies[-1], recovery=True)) == [Status.OK]
    world.disk.cut_after(0)
    await engine.close()
    world.lose_power(1)
    return bodies


async def check(world: Any, kit: Any, bodies: list[bytes], *, is_fenced: bool) -> None:
    engine = await world.opened()
    assert await kit.read(engine, *((5, e) for e in range(len(bodies)))) == bodies
    (status,) = await kit.add(engine, kit.add_request(kit.entry(5, 10_000)))
    assert status == (Status.FENCED if is_fenced else Status.OK)
    if is_fenced:
        assert (await engine.read_lac(5)).explicit_packet == kit.lac_packet(5, 1)
    await engine.close()


async def refused(world: Any) -> DamagedStorage:
    engine = world.engine()
    with pytest.raises(DamagedStorage) as raised:
        await engine.open()
    assert "path" in raised.value.facts
    assert "offset" in raised.value.facts
    return raised.value


def last_journal(world: Any) -> str:
    return max(path for path in world.disk.paths() if path.endswith(".txn"))


def groups(world: Any, path: str) -> list[int]:
    data = world.disk.contents(path)
    return [at for at in range(512, len(data), 512) if data[at : at + 4] == journal_format.GROUP_MAGIC]


async def test_a_torn_last_group_is_skipped_and_the_others_replayed(world: Any, kit: Any) -> None:
    bodies = await crashed(world, kit, journaled=5)
    path = last_journal(world)
    at = groups(world, path)[-1]
    for offset in range(at + 512, at + 1024):
        if world.disk.contents(path)[offset]:
            world.disk.corrupt(path, offset, world.disk.contents(path)[offset])
    await check(world, kit, bodies[:4], is_fenced=False)
    await check(world, kit, bodies[:4], is_fenced=False)


async def test_a_damaged_group_in_the_middle_refuses_the_start(world: Any, kit: Any) -> None:
    await crashed(world, kit, journaled=5)
    path = last_journal(world)
    at = groups(world, path)[2]
    world.disk.corrupt(path, at + 100)
    error = await refused(world)
    assert (error.facts["path"], error.facts["offset"]) == (path, at)


async def test_groups_lost_at_the_end_of_an_earlier_file_refuse_the_start(kit: Any) -> None:
    world = kit.World(write_cache_size_max=2**20)
    engine = await world.opened()
    await kit.fill(engine, 5, 400, size=400)
    world.disk.cut_after(0)
    await engine.close()
    world.lose_power(1)
    first, second = [path for path in world.disk.paths() if path.endswith(".txn")][-2:]
    at = groups(world, first)[-1]
    for offset in range(at, len(world.disk.contents(first))):
        if world.disk.contents(first)[offset]:
            world.disk.corrupt(first, offset, world.disk.contents(first)[offset])
    error = await refused(world)
    assert error.facts["path"] == second
    assert error.message.startswith("journal groups are missing; ")


@pytest.mark.parametrize("which", ["journal", "log", "mark"])
async def test_lost_storage_is_not_treated_as_an_empty_bookie(world: Any, kit: Any, which: str) -> None:
    """With `refuse` the start fails; with `repair`, the default, no entry is reported as absent."""
    await crashed(world, kit, flushed=5, journaled=5)
    suffix = {"journal": ".txn", "log": ".log", "mark": "LastLogMark"}[which]
    for path in world.disk.paths():
        if path.endswith(suffix):
            world.disk.remove(path)
    if which == "log":
        world.kv.clear()
    lenient, world.settings = world.settings, kit.small_settings(on_lost_storage="refuse")
    await refused(world)
    if which == "mark":
        return
    world.settings = lenient
    engine = await world.opened()
    assert engine.limbo is not None
    assert engine.limbo.is_listing
    answers = await kit.read(engine, *((5, e) for e in range(12)))
    assert {one for one in answers if isinstance(one, int)} == {Status.UNKNOWN_LEDGER_STATE}
    await engine.close()


async def test_a_damaged_mark_refuses_the_start(world: Any, kit: Any) -> None:
    await crashed(world, kit, flushed=5)
    world.disk.corrupt(MARK, 9)
    assert (await refused(world)).facts["path"] == MARK


async def test_an_older_mark_refuses_the_start(world: Any, kit: Any) -> None:
    await crashed(world, kit, flushed=5)
    old = world.disk.contents(MARK)
    engine = await world.opened()
    for first in (10, 20, 30):
        for body in (kit.entry(5, e) for e in range(first, first + 5)):
            await kit.add(engine, kit.add_request(body, recovery=True))
        await engine.flush()
    await engine.close()
    world.disk.remove(MARK)
    world.disk.create(MARK).write_at(old, 0)
    await refused(world)


async def test_a_lost_index_is_rebuilt_with_keys_fences_and_explicit_lacs(world: Any, kit: Any) -> None:
    bodies = await crashed(world, kit, flushed=500, journaled=5)
    world.kv.clear()
    await check(world, kit, bodies, is_fenced=True)
    engine = await world.opened()
    assert await kit.add(engine, kit.add_request(kit.entry(5, 600), key=b"other")) == [Status.UNAUTHORIZED]
    await engine.close()


async def test_an_index_that_lost_its_last_flush_is_rebuilt(world: Any, kit: Any) -> None:
    """If the disk did not sync the index, its generation shows it."""
    engine = await world.opened()
    bodies = await kit.fill(engine, 5, 50)
    await engine.flush()
    bodies += await kit.fill(engine, 5, 50, first=50)
    await engine.flush()
    world.disk.cut_after(0)
    await engine.close()
    world.lose_power(1)
    world.kv.forget(1)
    await check(world, kit, bodies, is_fenced=False)


async def test_a_rebuild_does_not_restore_a_deleted_ledger(world: Any, kit: Any) -> None:
    engine = await world.opened()
    await kit.fill(engine, 6, 50)
    await engine.flush()
    await engine.delete_ledger(6)
    bodies = await kit.fill(engine, 5, 50)
    await engine.close()
    world.kv.clear()
    engine = await world.opened()
    assert await kit.read(engine, (6, 0)) == [Status.NO_LEDGER]
    assert list(await engine.list_ledger_ids()) == [5]
    assert await kit.read(engine, *((5, e) for e in range(50))) == bodies
    await engine.close()


async def test_after_a_rebuild_from_a_damaged_log_no_entry_is_reported_as_absent(world: Any, kit: Any) -> None:
    bodies = await crashed(world, kit, flushed=50)
    path = "/ledgers/current/1.log"
    at = world.disk.contents(path).index(bodies[20])
    world.disk.corrupt(path, at + 50)
    world.kv.clear()
    engine = await world.opened()
    assert engine.limbo is not None
    assert path in engine.limbo.reason
    assert await kit.read(engine, *((5, e) for e in range(20))) == bodies[:20]
    assert await kit.read(engine, (5, 20), (5, 60), (5, -1)) == [Status.UNKNOWN_LEDGER_STATE] * 3
    await engine.close()
    world.settings = kit.small_settings(on_lost_storage="refuse")
    world.kv.clear()
    world.disk.remove("/ledgers/current/LIMBO")
    error = await refused(world)
    assert error.facts["path"] == path


async def test_an_unfinished_flush_is_truncated(world: Any, kit: Any) -> None:
    bodies = await crashed(world, kit, flushed=50, journaled=5)
    path = "/ledgers/current/2.log"
    world.disk.create(path).write_at(b"half a log", 0)
    await check(world, kit, bodies, is_fenced=True)
    assert world.disk.contents(path)[:4] == b"BNDL"


@pytest.mark.parametrize("operations", range(0, 44, 3))
async def test_a_crash_between_index_and_mark_followed_by_a_crash_of_the_start_loses_nothing(
    kit: Any, operations: int
) -> None:
    """The index is one flush ahead. Wherever the next start crashes, the start after it finds all entries."""
    world = kit.World(operations)
    engine = await world.opened()
    bodies = await kit.fill(engine, 5, 60)
    await engine.flush()
    again = [kit.entry(5, e, b"again") for e in range(20, 40)]
    assert set(await kit.add(engine, *map(kit.add_request, again))) == {Status.OK}
    bodies[20:40] = again
    bodies += await kit.fill(engine, 5, 60, first=60)
    world.disk.log.clear()
    flush = asyncio.ensure_future(engine.flush())
    while "kv sync" not in world.disk.log:
        await asyncio.sleep(0)
    world.disk.cut_after(0)
    with pytest.raises(OSError, match="flush failed"):
        await flush
    await engine.close()
    for cut in (operations, operations // 2):
        world.lose_power()
        world.disk.cut_after(cut)
        engine = world.engine()
        try:
            await engine.open()
        except OSError:
            assert world.disk.is_cut
        else:
            world.disk.cut_after(0)
            await engine.close()
    world.lose_power()
    await check(world, kit, bodies, is_fenced=False)
