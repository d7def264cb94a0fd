"""Read-ahead: windows are read before a client waits for them, and deleted or damaged entries are not kept."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from bindery_core.wire.messages import Status

SETTINGS = {"write_cache_size_max": 2**20, "read_cache_size_max": 2**20, "read_ahead_size_max": 64 * 1024}


class Held:
    """A worker whose jobs wait until they are released."""

    def __init__(self, inner: Any) -> None:
        self._inner = inner
        self._held: list[tuple[Any, Any]] | None = None
        self.jobs = 0

    def hold(self) -> None:
        self._held = []

    def release(self) -> None:
        held, self._held = self._held or [], None
        for job, done in held:
            self._inner.submit(job, done)

    def submit(self, job: Any, done: Any) -> None:
        self.jobs += 1
        if self._held is not None:
            self._held.append((job, done))
        else:
            self._inner.submit(job, done)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


async def flushed(kit: Any, count: int = 1000, **changes: Any) -> tuple[Any, list[bytes], Held]:
    """Return an engine with ledger 5 on disk and nothing cached, the entries, and the read worker."""
    engine = await kit.World(**(SETTINGS | changes)).opened()
    bodies = await kit.fill(engine, 5, count)
    await engine.flush()
    worker = Held(engine.parts.reads._worker)
    engine.parts.reads._worker = worker
    return engine, bodies, worker


async def settled() -> None:
    for _ in range(30):
        await asyncio.sleep(0)


def started(engine: Any, *keys: tuple[int, int]) -> list[list[bytes | int]]:
    """Begin one `read_many`; return the list that receives its answers."""
    answers: list[list[bytes | int]] = []

    def done(found: Sequence[bytes | int]) -> None:
        answers.append(list(found))

    engine.read_many(keys, done)
    return answers


async def test_a_sequential_reader_waits_for_the_disk_once(kit: Any) -> None:
    engine, bodies, _ = await flushed(kit)
    for entry_id, body in enumerate(bodies):
        assert await kit.read(engine, (5, entry_id)) == [body]
        await settled()
    assert engine.stats.read_jobs == 1
    assert engine.stats.reads_disk == 1
    assert engine.stats.reads_read_cache == 999
    assert engine.stats.read_ahead_entries == 999, "each entry is read once"
    await engine.close()


async def test_readers_at_different_positions_of_a_ledger_do_not_affect_each_other(kit: Any) -> None:
    engine, bodies, _ = await flushed(kit)
    places = [0, 300, 600]
    for _ in range(300):
        for reader, entry_id in enumerate(places):
            assert await kit.read(engine, (5, entry_id)) == [bodies[entry_id]]
            await settled()
            places[reader] += 1
    stats = engine.stats
    assert stats.read_jobs <= 3 + 2, "readers that began in the middle wait for their second window"
    ahead = stats.read_ahead_entries + stats.reads_disk
    assert ahead <= 1000 + 2 * 200, "only the last windows of two readers overlap those of the next reader"
    await engine.close()


@pytest.mark.parametrize("step", [1, 3, 9])
async def test_striped_reads_are_read_ahead(kit: Any, step: int) -> None:
    """A client may read, for example, each third entry from a bookie."""
    engine, bodies, _ = await flushed(kit)
    for entry_id in range(0, 1000, step):
        assert await kit.read(engine, (5, entry_id)) == [bodies[entry_id]]
        await settled()
    assert engine.stats.read_jobs == 1
    await engine.close()


@pytest.mark.parametrize("held", [{0}, {0, 1}, {1, 2}])
async def test_striped_ledgers_are_read_ahead(kit: Any, held: set[int]) -> None:
    """If the ensemble is larger than the write quorum, a bookie has only a part of the entries."""
    engine = await kit.World(**SETTINGS).opened()
    here = [entry_id for entry_id in range(900) if entry_id % 3 in held]
    for entry_id in here:
        assert await kit.add(engine, kit.add_request(kit.entry(5, entry_id, b"x" * 100))) == [0]
    await engine.flush()
    for entry_id in here:
        (body,) = await kit.read(engine, (5, entry_id))
        assert body == kit.entry(5, entry_id, b"x" * 100)
        await settled()
    assert engine.stats.read_jobs == 1
    await engine.close()


@pytest.mark.parametrize("gone", ["deleted", "evicted"])
async def test_the_next_window_of_an_evicted_or_deleted_ledger_does_not_fail_reads(kit: Any, gone: str) -> None:
    engine, bodies, _ = await flushed(kit)
    (other,) = await kit.fill(engine, 6, 1)
    await kit.fill(engine, 6, 99, first=1)
    await engine.flush()
    await kit.read(engine, (5, 0))
    assert await kit.read(engine, (6, 0)) == [other]
    ((start, due_at),) = engine.parts.reads._next_windows[6].items()
    if gone == "deleted":
        await engine.delete_ledger(6)
    else:
        engine.parts.reads.cache.drop([(6, entry_id) for entry_id in range(100)])
    found = await kit.read(engine, (5, 1), (6, due_at))
    assert found[0] == bodies[1]
    assert (found[1] == Status.NO_LEDGER) == (gone == "deleted")
    assert (6 in engine.parts.reads._next_windows) == (gone == "evicted")
    assert start > due_at
    await engine.close()


async def test_a_failing_callback_does_not_prevent_others(kit: Any) -> None:
    engine, bodies, worker = await flushed(kit)
    worker.hold()

    def broken(found: Sequence[bytes | int]) -> None:
        raise RuntimeError("a bug")

    engine.read_many([(5, 0)], broken)
    good = started(engine, (5, 1))
    late = started(engine, (5, 2))
    worker.release()
    await settled()
    assert (good, late) == ([[bodies[1]]], [[bodies[2]]])
    assert await kit.read(engine, (5, 500)) == [bodies[500]]
    await engine.close()


async def test_windows_are_read_a_few_at_a_time(kit: Any) -> None:
    """Another cold read must not wait for all windows."""
    engine = await kit.World(**SETTINGS).opened()
    for ledger_id in range(10):
        await kit.fill(engine, ledger_id, 100)
    await engine.flush()
    worker = engine.parts.reads._worker = Held(engine.parts.reads._worker)
    for ledger_id in range(10):
        await kit.read(engine, (ledger_id, 0))
    before = worker.jobs
    worker.hold()
    for ledger_id in range(10):
        await kit.read(engine, (ledger_id, 20))
    worker.release()
    await settled()
    assert worker.jobs - before >= 3
    assert engine.stats.reads_disk == 10
    await engine.close()


async def test_windows_are_not_read_in_advance_into_a_small_cache(kit: Any) -> None:
    engine, bodies, _ = await flushed(kit, read_cache_size_max=7 * 64 * 1024)
    for entry_id, body in enumerate(bodies):
        assert await kit.read(engine, (5, entry_id)) == [body]
        await settled()
    assert engine.stats.read_jobs > 3
    await engine.close()


async def test_waiting_reads_are_answered_by_the_result_of_the_previous_job(kit: Any) -> None:
    engine, bodies, worker = await flushed(kit)
    worker.hold()
    first = started(engine, (5, 0), (5, 1))
    second = started(engine, (5, 2), (5, 3))
    partly = started(engine, (5, 4), (5, 999), (5, 5))
    absent = started(engine, (6, 0), (5, 1000))
    assert engine.stats.read_queue_entries == 8
    worker.release()
    await settled()
    assert first == [bodies[0:2]]
    assert second == [bodies[2:4]]
    assert partly == [[bodies[4], bodies[999], bodies[5]]]
    assert absent == [[Status.NO_LEDGER, Status.NO_ENTRY]]
    stats = engine.stats
    assert (stats.reads_disk, stats.reads_read_cache, stats.reads_absent) == (3, 4, 2)
    assert stats.read_queue_entries == 0
    assert stats.read_jobs == 2
    await engine.close()


async def test_a_ledger_deleted_during_read_ahead_leaves_nothing_in_the_cache(kit: Any) -> None:
    engine, _, worker = await flushed(kit)
    await kit.read(engine, *((5, entry_id) for entry_id in range(17)))
    worker.hold()
    await kit.read(engine, *((5, entry_id) for entry_id in range(17)))
    assert worker.jobs == 2, "the next window is being read"
    await engine.delete_ledger(5)
    worker.release()
    await settled()
    assert 5 not in engine.parts.reads.cache.ledgers
    assert await kit.read(engine, (5, 40)) == [Status.NO_LEDGER]
    await engine.close()


async def test_an_entry_overwritten_during_read_ahead_is_not_cached(kit: Any) -> None:
    engine, bodies, worker = await flushed(kit)
    await kit.read(engine, *((5, entry_id) for entry_id in range(17)))
    worker.hold()
    await kit.read(engine, *((5, entry_id) for entry_id in range(17)))
    assert worker.jobs == 2
    other = kit.entry(5, 40, b"another")
    assert await kit.add(engine, kit.add_request(other)) == [0]
    flush = asyncio.ensure_future(engine.flush())
    await settled()
    worker.release()
    await flush
    await settled()
    assert await kit.read(engine, (5, 39), (5, 40), (5, 41)) == [bodies[39], other, bodies[41]]
    await engine.close()


async def test_damage_found_by_read_ahead_is_reported_when_the_entry_is_requested(kit: Any) -> None:
    world = kit.World(**SETTINGS)
    engine = await world.opened()
    bodies = await kit.fill(engine, 5, 200)
    await engine.flush()
    (path,) = (path for path in world.disk.paths() if path.endswith(".log"))
    world.disk.corrupt(path, world.disk.contents(path).index(bodies[60]) + 40)
    for entry_id in range(60):
        assert await kit.read(engine, (5, entry_id)) == [bodies[entry_id]]
        await settled()
    assert not engine.damage.items()
    assert await kit.read(engine, (5, 60), (5, 61)) == [Status.IO_ERROR, bodies[61]]
    (damage,) = engine.damage.items()
    assert (damage.ledger_id, damage.entry_id) == (5, 60)
    for entry_id in range(62, 200):
        assert await kit.read(engine, (5, entry_id)) == [bodies[entry_id]]
        await settled()
    await engine.close()


@pytest.mark.parametrize("turns", range(12))
async def test_a_close_during_read_ahead_leaves_nothing_waiting(kit: Any, turns: int) -> None:
    engine, _, worker = await flushed(kit)
    worker.hold()
    begun = started(engine, *((5, entry_id) for entry_id in range(40)))
    worker.release()
    for _ in range(turns):
        await asyncio.sleep(0)
    if begun:
        started(engine, *((5, entry_id) for entry_id in range(40)))
    await engine.close()
    assert not engine.parts.reads._ahead_waiting
