"""Reads of unexpectedly large entries stay within the memory limit of a job."""

from typing import Any

from bindery_bookie.storage.settings import KIB
from bindery_core.wire.messages import Status

SIZE = 20 * KIB


async def test_one_read_job_stays_within_its_size_limit(kit: Any) -> None:
    world = kit.World(read_job_size_max=100 * KIB, read_cache_size_max=0, read_ahead_size_max=4096 * KIB)
    engine = await world.opened()
    bodies = [kit.entry(ledger_id, 0, bytes(SIZE)) for ledger_id in range(12)]
    for body in bodies:
        assert await kit.add(engine, kit.add_request(body)) == [Status.OK]
    await engine.flush()
    absent = engine.stats.reads_absent
    found = await kit.read(engine, *((ledger_id, 0) for ledger_id in range(12)))
    assert found == [*bodies[:5], *[Status.TOO_MANY_REQUESTS] * 7]
    assert engine.stats.reads_absent == absent
    assert await kit.read(engine, *((ledger_id, 0) for ledger_id in range(5, 10))) == bodies[5:10]
    await engine.close()


async def test_read_ahead_of_many_ledgers_in_one_job_is_limited(kit: Any) -> None:
    world = kit.World(read_job_size_max=400 * KIB, read_cache_size_max=1024 * KIB, read_ahead_size_max=4096 * KIB)
    engine = await world.opened()
    for ledger_id in range(20):
        await kit.fill(engine, ledger_id, 16, size=2000)
    await engine.flush()
    found = await kit.read(engine, *((ledger_id, 0) for ledger_id in range(20)))
    assert all(isinstance(one, bytes) for one in found)
    assert engine.stats.read_cache_size < 400 * KIB
    assert engine.stats.read_ahead_entries > 0
    await engine.close()
