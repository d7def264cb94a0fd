"""Compaction begins before its interval if there are too many dead bytes, and not otherwise."""

import asyncio
from typing import Any

import pytest
from bindery_bookie.storage.collection import compaction as compaction_module
from bindery_bookie.storage.collection.collection_interface import LogState
from bindery_core.wire.messages import Status

FAST = {"compaction_rate": 2**30}
SMALL = {"dead_size_min": 1000, **FAST}


async def sparse_logs(kit: Any, engine: Any, *lives: int) -> dict[int, list[bytes]]:
    """Write a closed log for each number: that many live entries of ledger 1.., and 60 of a deleted ledger."""
    bodies = {}
    for ledger_id, live in enumerate(lives, 1):
        bodies[ledger_id] = await kit.fill(engine, ledger_id, live, size=200)
        await kit.fill(engine, 100 + ledger_id, 60, size=200)
        await engine.flush()
        await engine.delete_ledger(100 + ledger_id)
        await engine.compactor._parts.roll()
    return bodies


async def check(kit: Any, engine: Any, bodies: dict[int, list[bytes]]) -> None:
    assert list(await engine.list_ledger_ids()) == sorted(bodies)
    for ledger_id, expected in bodies.items():
        found = await kit.read(engine, *((ledger_id, entry_id) for entry_id in range(len(expected) + 1)))
        assert found == [*expected, Status.NO_ENTRY]


async def test_a_run_rewrites_logs_although_no_compaction_is_due(kit: Any) -> None:
    world = kit.World(**SMALL)
    engine = await world.opened()
    bodies = await sparse_logs(kit, engine, 5, 30)
    result = await engine.compactor.run()
    assert result.rewritten == [1, 2]
    assert (engine.stats.compactions_minor, engine.stats.compactions_major) == (1, 1)
    assert engine.stats.compactions_for_space == 2
    state = engine.compactor.state()
    assert (state.last_minor_ms, state.last_major_ms) == (0, 0), "the intervals are not affected"
    assert state.dead_bytes < 1000
    assert state.dead_bytes_allowed == max(1000, state.live_bytes)
    assert engine.stats.dead_bytes == state.dead_bytes
    assert engine.stats.compaction_speed == 0
    await check(kit, engine, bodies)
    await engine.close()
    world.kv.clear()
    engine = await world.opened()
    await check(kit, engine, bodies)
    await engine.close()


async def test_few_dead_bytes_wait_for_the_interval(kit: Any) -> None:
    world = kit.World(**FAST)  # 512 MiB
    engine = await world.opened()
    await sparse_logs(kit, engine, 5, 30)
    assert not (await engine.compactor.run()).rewritten
    explained = await engine.compactor.explain(1)
    assert any("Earlier if the shard has more than 536870912 dead bytes" in one for one in explained.sentences)
    await engine.close()


async def test_a_ratio_of_zero_leaves_compaction_to_the_intervals(kit: Any) -> None:
    world = kit.World(dead_ratio_max=0, **SMALL)
    engine = await world.opened()
    await sparse_logs(kit, engine, 5)
    assert not (await engine.compactor.run()).rewritten
    assert engine.compactor.state().dead_bytes_allowed is None
    await engine.close()


async def test_a_pass_ends_when_enough_is_freed(kit: Any) -> None:
    world = kit.World(dead_size_min=30_000, **FAST)
    engine = await world.opened()
    await sparse_logs(kit, engine, 20, 5, 10)  # about 15,000 dead bytes each
    dead = (await engine.compactor.run()).rewritten
    assert dead == [2, 3], "the third log may stay: the goal is three quarters of what is allowed"
    assert 1000 < engine.stats.dead_bytes <= 22_500
    await engine.close()


async def test_a_dense_log_is_never_rewritten(kit: Any) -> None:
    world = kit.World(**SMALL)
    engine = await world.opened()
    await sparse_logs(kit, engine, 400)
    assert engine.compactor.state().dead_bytes_allowed is not None
    assert not (await engine.compactor.run()).rewritten
    await engine.close()


async def test_suspended_compaction_waits_until_it_is_resumed(kit: Any) -> None:
    world = kit.World(**SMALL)
    engine = await world.opened()
    bodies = await sparse_logs(kit, engine, 5, 30)
    engine.compactor.suspend(minor=True, major=True)
    assert not (await engine.compactor.run()).rewritten
    assert not (await engine.compactor.run(force=True)).rewritten, "a forced run includes only what it names"
    engine.compactor.resume(minor=True)
    async with asyncio.timeout(30):
        while engine.stats.compactions_minor < 1:
            await asyncio.sleep(0.01)
    assert engine.stats.compactions_major == 0, "log 2 belongs to major compaction"
    engine.compactor.resume(major=True)
    async with asyncio.timeout(30):
        while engine.stats.compactions_major < 1:
            await asyncio.sleep(0.01)
    await check(kit, engine, bodies)
    await engine.close()


async def test_the_open_log_is_closed_and_rewritten_if_the_dead_bytes_are_in_it(kit: Any) -> None:
    world = kit.World(entry_log_size_max=2**21, **SMALL)
    engine = await world.opened()
    bodies = {1: await kit.fill(engine, 1, 20, size=200)}
    await kit.fill(engine, 2, 200, size=200)
    await engine.flush()
    assert engine.compactor.logs() == []
    await engine.delete_ledger(2)
    result = await engine.compactor.run()
    assert result.rewritten == [1]
    assert [one.state for one in engine.compactor.logs()] == [LogState.COMPACTED]
    await check(kit, engine, bodies)
    await engine.close()


async def test_a_log_that_cannot_be_rewritten_does_not_stop_the_others(kit: Any) -> None:
    world = kit.World(**SMALL)
    engine = await world.opened()
    bodies = await sparse_logs(kit, engine, 5, 10, 15)
    rewrite = engine.compactor._rewrite
    tries: list[int] = []

    async def failing(log_id: int, *others: Any) -> None:
        tries.append(log_id)
        if log_id == 1:
            raise OSError("an error of the disk")
        await rewrite(log_id, *others)

    engine.compactor._rewrite = failing
    result = await engine.compactor.run()
    assert (result.rewritten, [log_id for log_id, _ in result.left]) == ([2, 3], [1])
    assert tries == [1, 2, 3], "a failed log is not tried again in the same run"
    await check(kit, engine, bodies)
    await engine.close()


@pytest.mark.parametrize("is_urgent", [False, True])
async def test_runs_for_deletions_rest_in_proportion_to_their_refreshes(
    kit: Any, monkeypatch: pytest.MonkeyPatch, is_urgent: bool
) -> None:
    monkeypatch.setattr(compaction_module, "REST_PART", 10**9)
    world = kit.World(**FAST)
    engine = await world.opened()
    await sparse_logs(kit, engine, 5)
    await engine.compactor.run()
    assert engine.compactor._rested_at > 0
    engine.compactor._rested_at = asyncio.get_running_loop().time() + 1000
    runs = engine.stats.gc_runs
    engine.compactor.request(minor=is_urgent)
    await asyncio.sleep(0.2)
    if is_urgent:
        async with asyncio.timeout(30):
            while engine.stats.gc_runs == runs:
                await asyncio.sleep(0.01)
    else:
        assert engine.stats.gc_runs == runs
        assert (await engine.compactor.run()).left == [], "an operator who waits for the result is served at once"
    await engine.close()
