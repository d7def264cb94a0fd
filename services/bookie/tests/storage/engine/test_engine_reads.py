"""Reads of the engine: caches, read-ahead, entry lists, and damage."""

import asyncio
from typing import Any

import pytest
from bindery_core.errors import DamagedStorage, NoSuchLedger
from bindery_core.wire.messages import Status

OK = Status.OK


# --- reads


async def test_reads_are_answered_by_the_write_caches_then_the_read_cache_then_the_disk(world: Any, kit: Any) -> None:
    engine = await world.opened()
    stats = engine.stats
    (body,) = await kit.fill(engine, 5, 1)
    assert await kit.read(engine, (5, 0), (5, -1)) == [body, body]
    assert stats.reads_active_cache == 2
    flush = asyncio.ensure_future(engine.flush())
    while engine.parts.caches.flushing is None:
        await asyncio.sleep(0)
    assert await kit.read(engine, (5, 0)) == [body]
    assert stats.reads_flushing_cache == 1
    await flush
    assert await kit.read(engine, (5, 0)) == [body]
    assert (stats.reads_disk, stats.read_jobs) == (1, 1)
    assert await kit.read(engine, (5, -1)) == [body]
    assert (stats.reads_read_cache, stats.read_jobs) == (1, 1)
    assert await kit.read(engine, (5, 1), (6, 0), (6, -1)) == [Status.NO_ENTRY, Status.NO_LEDGER, Status.NO_LEDGER]
    assert stats.reads_absent == 3
    await engine.close()


async def test_sequential_reads_read_ahead_in_growing_windows(kit: Any) -> None:
    world = kit.World(write_cache_size_max=2**20, read_cache_size_max=2**20)
    engine = await world.opened()
    bodies = await kit.fill(engine, 5, 1000)
    await engine.flush()
    jobs = []
    for entry_id, body in enumerate(bodies):
        before = engine.stats.read_jobs
        assert await kit.read(engine, (5, entry_id)) == [body]
        if engine.stats.read_jobs != before:
            jobs.append(entry_id)
    assert jobs[:3] == [0, 33, 98]
    assert len(jobs) <= 8
    assert engine.stats.read_ahead_entries >= 950
    await engine.close()


async def test_random_reads_read_ahead_in_small_windows(kit: Any) -> None:
    world = kit.World(write_cache_size_max=2**20, read_cache_size_max=2**20)
    engine = await world.opened()
    bodies = await kit.fill(engine, 5, 1000)
    await engine.flush()
    for entry_id in (900, 500, 100, 700, 300):
        assert await kit.read(engine, (5, entry_id)) == [bodies[entry_id]]
    assert engine.stats.read_ahead_entries == 5 * 16
    await engine.close()


async def test_many_cold_reads_take_one_job(world: Any, kit: Any) -> None:
    engine = await world.opened()
    bodies = {ledger_id: (await kit.fill(engine, ledger_id, 1))[0] for ledger_id in range(20)}
    await engine.flush()
    reads = [kit.read(engine, (ledger_id, 0)) for ledger_id in range(20)]
    assert await asyncio.gather(*reads) == [[body] for body in bodies.values()]
    assert engine.stats.read_jobs <= 2
    await engine.close()


async def test_entry_ids_include_caches_and_index(world: Any, kit: Any) -> None:
    engine = await world.opened()
    with pytest.raises(NoSuchLedger):
        await engine.entry_ids(5)
    await kit.fill(engine, 5, 3)
    await kit.fill(engine, 5, 2, first=10)
    await engine.flush()
    await kit.fill(engine, 5, 4, first=12)
    await kit.fill(engine, 5, 1, first=3)
    assert await engine.entry_ids(5) == [(0, 4), (10, 6)]
    await engine.close()


async def test_striped_and_late_entries_are_found_after_every_flush(world: Any, kit: Any) -> None:
    """Re-replication fills holes of a striped ledger later; some entries are overwritten."""
    engine = await world.opened()
    expected: dict[int, bytes] = {}
    for step, ids in enumerate([range(0, 300, 4), range(1, 300, 4), range(100, 160), [5, 299, 3], range(2, 300, 4)]):
        for entry_id in ids:
            expected[entry_id] = kit.entry(5, entry_id, b"%d" % step)
            assert await kit.add(engine, kit.add_request(expected[entry_id])) == [OK]
        await engine.flush()
        found = await kit.read(engine, *((5, entry_id) for entry_id in range(300)))
        assert found == [expected.get(entry_id, Status.NO_ENTRY) for entry_id in range(300)]
    await engine.close()


# --- damage


@pytest.mark.parametrize("harm", ["flip", "missing", "short"])
async def test_a_damaged_entry_is_answered_with_io_error(world: Any, kit: Any, harm: str) -> None:
    engine = await world.opened()
    bodies = await kit.fill(engine, 5, 3)
    await engine.flush()
    path = "/ledgers/current/1.log"
    if harm == "flip":
        world.disk.corrupt(path, world.disk.contents(path).index(bodies[1]) + 40)
    elif harm == "missing":
        world.disk.remove(path)
    else:
        world.disk.truncate(path, world.disk.contents(path).index(bodies[1]) + 40)
    found = await kit.read(engine, (5, 1), (5, 0))
    assert found[0] == Status.IO_ERROR
    assert found[1] == (Status.IO_ERROR if harm == "missing" else bodies[0])
    assert engine.stats.damage_found >= 1
    if harm == "flip":
        world.disk.corrupt(path, world.disk.contents(path).index(bodies[2]) + 40)
    engine.parts.reads.cache.drop_ledger(5)
    with pytest.raises(DamagedStorage):
        await engine.read_lac(5)


async def test_an_index_without_the_last_entry_of_a_ledger_is_damaged(world: Any, kit: Any) -> None:
    engine = await world.opened()
    await kit.fill(engine, 5, 3)
    await engine.flush()
    for key, _ in list(world.kv.scan(start=b"E", stop=b"F")):
        world.kv.write_batch([], [key])
    assert await kit.read(engine, (5, -1)) == [Status.IO_ERROR]
