"""What the engine answers. Sections of the protocol: master key, fence, LAC, reads, back-pressure, deletion."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from bindery_bookie.storage.io.fault_injection import FaultyDisk
from bindery_bookie.storage.memory.write_cache import ENTRY_OVERHEAD
from bindery_bookie.storage.store import EntryStore
from bindery_core.errors import BadRequest, DamagedStorage, NoSuchLedger, Unauthorized
from bindery_core.wire.messages import Status, WriteFlag

OK = Status.OK


async def test_it_is_an_entry_store(world: Any) -> None:
    store: EntryStore = await world.opened()
    total, free = store.disk_usage()
    assert 0 < free <= total
    await store.close()


# --- adds


async def test_ids_count_that_are_inside_the_body(world: Any, kit: Any) -> None:
    engine = await world.opened()
    request = kit.add_request(kit.entry(5, 0, b"x"))
    request.ledger_id, request.entry_id = 99, 98
    assert await kit.add(engine, request) == [OK]
    assert await kit.read(engine, (5, 0), (99, 98)) == [request.body, Status.NO_LEDGER]
    await engine.close()


async def test_an_entry_added_twice_is_ok_and_the_last_one_stays(world: Any, kit: Any) -> None:
    engine = await world.opened()
    first, second, third = (kit.entry(5, 0, payload) for payload in (b"1", b"22", b"333"))
    assert await kit.add(engine, kit.add_request(first), kit.add_request(second)) == [OK, OK]
    await engine.flush()
    assert await kit.read(engine, (5, 0)) == [second]
    assert await kit.add(engine, kit.add_request(third)) == [OK]
    assert await kit.read(engine, (5, 0)) == [third]
    await engine.flush()
    assert await kit.read(engine, (5, 0)) == [third]
    assert await engine.entry_ids(5) == [(0, 1)]
    await engine.close()


async def test_the_greatest_ids_there_are_survive_flushes(world: Any, kit: Any) -> None:
    """A client may send them at any time; the index has no key behind them."""
    top = 2**63 - 1
    engine = await world.opened()
    for payload in (b"1", b"22"):
        for key in ((5, top), (top, top), (top, 0), (5, top - 1)):
            assert await kit.add(engine, kit.add_request(kit.entry(*key, payload))) == [OK]
        await engine.flush()
    assert await kit.read(engine, (5, top), (5, -1), (top, top)) == [
        kit.entry(5, top, b"22"), kit.entry(5, top, b"22"), kit.entry(top, top, b"22")
    ]  # fmt: skip
    assert await engine.entry_ids(5) == [(top - 1, 2)]
    await engine.close()
    again = await world.opened()
    assert await kit.read(again, (5, top), (top, 0)) == [kit.entry(5, top, b"22"), kit.entry(top, 0, b"22")]
    await again.close()


@pytest.mark.parametrize("body", [b"", b"x" * 23], ids=["empty", "no LAC"])
async def test_a_body_that_is_no_entry_is_refused_alone(world: Any, kit: Any, body: bytes) -> None:
    engine = await world.opened()
    good = kit.add_request(kit.entry(5, 0))
    bad = kit.add_request(kit.entry(5, 1))
    bad.body = body
    assert await kit.add(engine, bad, good, bad) == [Status.BAD_REQUEST, OK, Status.BAD_REQUEST]
    await engine.close()


@pytest.mark.parametrize(("ledger_id", "entry_id"), [(5, -1), (5, -0x1000), (5, -0x2000), (-1, 0)])
async def test_nobody_forges_a_control_record(world: Any, kit: Any, ledger_id: int, entry_id: int) -> None:
    engine = await world.opened()
    await kit.fill(engine, 5, 1)
    assert await kit.add(engine, kit.add_request(kit.entry(ledger_id, entry_id))) == [Status.BAD_REQUEST]
    world.lose_power(1)
    engine = await world.opened()
    assert await kit.add(engine, kit.add_request(kit.entry(5, 1))) == [OK]
    await engine.close()


async def test_the_first_master_key_is_the_ledgers(world: Any, kit: Any) -> None:
    engine = await world.opened()
    await kit.fill(engine, 5, 1)
    for _ in range(2):
        assert await kit.add(engine, kit.add_request(kit.entry(5, 1), key=b"other")) == [Status.UNAUTHORIZED]
        with pytest.raises(Unauthorized):
            await engine.fence(5, b"other")
        with pytest.raises(Unauthorized):
            await engine.write_lac(5, b"other", 0, kit.lac_packet(5, 0))
        await engine.close()
        engine = await world.opened()
    assert await kit.add(engine, kit.add_request(kit.entry(5, 1))) == [OK]
    await engine.close()


async def test_a_deferred_add_is_answered_before_the_sync_and_force_waits_for_it(kit: Any) -> None:
    order: list[str] = []

    def note(operation: str, path: str) -> None:
        if path.endswith(".txn") and operation in ("write_at", "datasync"):
            order.append(operation)

    world = kit.World(wrap=lambda disk: FaultyDisk(disk, note))
    engine = await world.opened()
    assert await kit.add(engine, kit.add_request(kit.entry(5, 1))) == [OK]  # with zeros ahead, for the next one too
    order.clear()
    request = kit.add_request(kit.entry(5, 0), flags=WriteFlag.DEFERRED_SYNC)
    engine.add_many([request], lambda statuses: order.append(f"answer {list(map(int, statuses))}"))
    await engine.force(5)
    order.append("forced")
    assert sorted(order[:3]) == ["answer [0]", "datasync", "write_at"]
    assert order.index("write_at") < order.index("answer [0]")
    assert order[-1] == "forced"
    assert engine.stats.journal_queue_groups == 0
    await engine.close()


# --- fence


async def test_after_a_fence_only_recovery_adds_pass(world: Any, kit: Any) -> None:
    engine = await world.opened()
    await kit.fill(engine, 5, 3)
    await engine.fence(5, kit.KEY)
    await engine.fence(5, kit.KEY)
    for _ in range(2):
        ordinary, recovery = kit.add_request(kit.entry(5, 3)), kit.add_request(kit.entry(5, 3), recovery=True)
        assert await kit.add(engine, ordinary, recovery) == [Status.FENCED, OK]
        await engine.close()
        engine = await world.opened()
    await engine.close()


async def test_a_fence_creates_the_ledger_it_fences(world: Any, kit: Any) -> None:
    engine = await world.opened()
    await engine.fence(5, kit.KEY)
    assert await kit.read(engine, (5, 0), (5, -1)) == [Status.NO_ENTRY, Status.NO_ENTRY]
    assert await kit.add(engine, kit.add_request(kit.entry(5, 0))) == [Status.FENCED]
    assert list(await engine.list_ledger_ids()) == [5]
    await engine.close()


async def test_adds_before_a_fence_are_answered_before_it_and_later_ones_are_refused(world: Any, kit: Any) -> None:
    engine = await world.opened()
    answers: list[object] = []
    engine.add_many([kit.add_request(kit.entry(5, 0))], lambda statuses: answers.append(list(statuses)))
    fence = asyncio.ensure_future(engine.fence(5, kit.KEY))
    fence.add_done_callback(lambda _: answers.append("fenced"))
    await asyncio.sleep(0)
    engine.add_many([kit.add_request(kit.entry(5, 1))], lambda statuses: answers.append(list(statuses)))
    await fence
    await asyncio.sleep(0)
    assert answers == [[Status.FENCED], [OK], "fenced"]
    await engine.close()


# --- last add confirmed


async def test_the_lac_is_the_greatest_seen_and_never_goes_back(world: Any, kit: Any) -> None:
    engine = await world.opened()
    with pytest.raises(NoSuchLedger):
        engine.last_add_confirmed(5)
    await kit.add(engine, kit.add_request(kit.entry(5, 0, lac=-1)))
    assert engine.last_add_confirmed(5) == -1
    await kit.add(engine, kit.add_request(kit.entry(5, 8, lac=7)), kit.add_request(kit.entry(5, 7, lac=3)))
    assert engine.last_add_confirmed(5) == 7
    await engine.write_lac(5, kit.KEY, 9, kit.lac_packet(5, 9))
    await engine.write_lac(5, kit.KEY, 2, kit.lac_packet(5, 2))
    assert engine.last_add_confirmed(5) == 9
    await engine.close()
    engine = await world.opened()
    assert engine.last_add_confirmed(5) == 9
    await engine.close()


async def test_an_explicit_lac_creates_the_ledger_and_passes_a_fence(world: Any, kit: Any) -> None:
    engine = await world.opened()
    await engine.write_lac(5, kit.KEY, 3, kit.lac_packet(5, 3))
    assert (await engine.read_lac(5)).last_entry is None
    await engine.fence(5, kit.KEY)
    await engine.write_lac(5, kit.KEY, 4, kit.lac_packet(5, 4))
    (body,) = await kit.fill(engine, 6, 1)
    state = await engine.read_lac(5)
    assert (state.explicit_packet, state.last_entry) == (kit.lac_packet(5, 4), None)
    assert (await engine.read_lac(6)).last_entry == body
    with pytest.raises(NoSuchLedger):
        await engine.read_lac(7)
    with pytest.raises(BadRequest):
        await engine.write_lac(5, kit.KEY, 4, b"short")
    await engine.close()


async def test_watchers_are_woken_once_by_an_advance_a_fence_or_a_deletion(world: Any, kit: Any) -> None:
    engine = await world.opened()
    await kit.fill(engine, 5, 2)
    woken: list[str] = []
    engine.watch_lac(5, lambda: woken.append("advance"))
    cancel = engine.watch_lac(5, lambda: woken.append("cancelled"))
    cancel()
    await kit.add(engine, kit.add_request(kit.entry(5, 2, lac=0)))
    assert woken == [], "the LAC did not advance"
    world.now_ms = 2_000
    await kit.add(engine, kit.add_request(kit.entry(5, 2, lac=1)), kit.add_request(kit.entry(5, 3, lac=2)))
    assert woken == ["advance"]
    assert engine.lac_updated_at_ms(5) == 2_000
    assert engine.lac_updated_at_ms(6) == 0
    engine.watch_lac(5, lambda: woken.append("fence"))
    await engine.fence(5, kit.KEY)
    engine.watch_lac(5, lambda: woken.append("deletion"))
    await engine.delete_ledger(5)
    assert woken == ["advance", "fence", "deletion"]
    await engine.close()


# --- reads


async def test_each_tier_answers_in_its_turn(world: Any, kit: Any) -> None:
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


async def test_reading_on_reads_ahead_in_growing_windows(kit: Any) -> None:
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


async def test_reading_around_reads_little_ahead(kit: Any) -> None:
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


async def test_entry_ids_are_runs_over_all_tiers(world: Any, kit: Any) -> None:
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
    """Holes of a striped ledger, filled later by re-replication, some entries overwritten."""
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
async def test_damage_is_an_io_error_and_never_absence(world: Any, kit: Any, harm: str) -> None:
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


async def test_an_index_that_forgot_the_last_entry_is_damage(world: Any, kit: Any) -> None:
    engine = await world.opened()
    await kit.fill(engine, 5, 3)
    await engine.flush()
    for key, _ in list(world.kv.scan(start=b"E", stop=b"F")):
        world.kv.write_batch([], [key])
    assert await kit.read(engine, (5, -1)) == [Status.IO_ERROR]


# --- journal failure and full disk


async def test_a_failed_journal_answers_io_error_and_takes_nothing_more(kit: Any) -> None:
    failing = False

    def fault(operation: str, path: str) -> OSError | None:
        return OSError(5, "Input/output error") if failing and operation == "datasync" else None

    world = kit.World(wrap=lambda disk: FaultyDisk(disk, fault))
    engine = await world.opened()
    (body,) = await kit.fill(engine, 5, 1)
    failing = True
    adds = [kit.add(engine, kit.add_request(kit.entry(5, e)), kit.add_request(b"bad" * 8)) for e in (1, 2)]
    for statuses in await asyncio.gather(*adds):
        assert statuses[0] == Status.IO_ERROR
    failing = False
    assert await kit.add(engine, kit.add_request(kit.entry(5, 3))) == [Status.IO_ERROR]
    with pytest.raises(Exception, match="storage takes no writes"):
        await engine.fence(5, kit.KEY)
    with pytest.raises(Exception, match="journal"):
        await engine.force(5)
    assert engine.stats.journal_failed
    assert await kit.read(engine, (5, 0)) == [body], "reads go on"
    await engine.close()


async def test_the_index_never_holds_what_the_journal_may_still_lose(kit: Any) -> None:
    """A flush waits for the journal first: its rows would outlive entry logs that the next start cuts back."""
    failing = False

    def fault(operation: str, path: str) -> OSError | None:
        return OSError(5, "Input/output error") if failing and operation == "datasync" and ".txn" in path else None

    world = kit.World(wrap=lambda disk: FaultyDisk(disk, fault))
    engine = await world.opened()
    (body,) = await kit.fill(engine, 5, 1)
    await engine.flush()
    rows = list(world.kv.scan(start=b"", stop=b"z"))
    failing = True
    overwrite = kit.add(engine, kit.add_request(kit.entry(5, 0, b"never acknowledged")))
    flush = asyncio.ensure_future(engine.flush())
    assert await overwrite == [Status.IO_ERROR]
    with pytest.raises(OSError, match="flush failed"):
        await flush
    assert list(world.kv.scan(start=b"", stop=b"z")) == rows
    await engine.close()
    world.lose_power(1)
    failing = False
    engine = await world.opened()
    assert await kit.read(engine, (5, 0)) in ([body], [kit.entry(5, 0, b"never acknowledged")])
    await engine.close()


async def test_a_full_ledger_disk_makes_adds_wait_then_refuses_then_recovers(kit: Any) -> None:
    is_full = False

    def fault(operation: str, path: str) -> OSError | None:
        return OSError(28, "No space left on device") if is_full and path.startswith("/ledgers") else None

    world = kit.World(wrap=lambda disk: FaultyDisk(disk, fault), waiting_size_max=4096)
    engine = await world.opened()
    is_full = True
    answers: list[list[int]] = []
    accepted = 0
    for entry_id in range(60):
        engine.add_many([kit.add_request(kit.entry(5, entry_id, bytes(1000)))], lambda s: answers.append(list(s)))
    while len(answers) < 60:
        await asyncio.sleep(0.01)
    accepted = sum(statuses == [OK] for statuses in answers)
    assert answers.count([Status.TOO_MANY_REQUESTS]) == 60 - accepted
    assert 20 <= accepted < 60, "two caches of 16 KiB"
    assert engine.stats.flush_failed
    assert engine.stats.adds_waited > 0
    is_full = False
    while engine.stats.flush_failed:
        await asyncio.sleep(0.01)
    assert await kit.add(engine, kit.add_request(kit.entry(5, 60, bytes(1000)))) == [OK]
    await engine.flush()
    kept = [
        e for e, found in enumerate(await kit.read(engine, *((5, e) for e in range(61)))) if isinstance(found, bytes)
    ]
    assert len(kept) == accepted + 1
    await engine.close()
    engine = await world.opened()
    assert await engine.entry_ids(5) == [(0, accepted), (60, 1)]
    await engine.close()


async def test_adds_that_wait_are_answered_in_order(kit: Any) -> None:
    world = kit.World(waiting_time_max_s=30)
    engine = await world.opened()
    order: list[int] = []
    for entry_id in range(200):
        request = kit.add_request(kit.entry(5, entry_id, bytes(1000)))
        engine.add_many([request], lambda statuses, entry_id=entry_id: order.append(entry_id) or statuses)
    async with asyncio.timeout(30):
        while len(order) < 200:
            await asyncio.sleep(0)
    assert order == sorted(order)
    assert engine.stats.adds_waited > 0
    assert engine.stats.waiting_size == 0
    await engine.close()


# --- bounds


async def test_caches_keep_their_bounds(world: Any, kit: Any) -> None:
    engine = await world.opened()
    settings, stats = engine.settings, engine.stats
    batch_size = 50 * (132 + ENTRY_OVERHEAD)
    for first in range(0, 2000, 50):
        await kit.fill(engine, first % 7, 50, first=first)
        assert stats.active_cache_size <= settings.write_cache_size_max + batch_size
        assert stats.flushing_cache_size <= settings.write_cache_size_max + batch_size
        assert stats.waiting_size <= settings.waiting_size_max
    await engine.flush()
    for ledger_id in range(7):
        await kit.read(engine, *((ledger_id, entry_id) for entry_id in range(2000)))
        assert stats.read_cache_size == engine.parts.reads.cache.size <= settings.read_cache_size_max
        held = sum(
            len(b) + ENTRY_OVERHEAD for bodies in engine.parts.reads.cache.ledgers.values() for b in bodies.values()
        )
        assert held == stats.read_cache_size
    await engine.close()


async def test_idle_ledgers_leave_memory_and_come_back(kit: Any) -> None:
    world = kit.World(ledgers_max=16)
    engine = await world.opened()
    for ledger_id in range(100):
        await kit.fill(engine, ledger_id, 1)
        if ledger_id % 10 == 9:
            await engine.fence(ledger_id, kit.KEY)
            await engine.flush()
    assert engine.stats.ledgers_in_memory <= 16
    assert await kit.add(engine, kit.add_request(kit.entry(9, 1)), kit.add_request(kit.entry(8, 1))) == [
        Status.FENCED,
        OK,
    ]
    assert list(await engine.list_ledger_ids()) == list(range(100))
    await engine.close()


async def test_old_journals_are_dropped(world: Any, kit: Any) -> None:
    engine = await world.opened()
    for first in range(0, 3000, 500):
        await kit.fill(engine, 5, 500, first=first)
        await engine.flush()
    journals = [path for path in world.disk.paths() if path.endswith(".txn")]
    assert len(journals) <= 2
    assert engine.stats.journal_files_dropped >= 4
    assert len([path for path in world.disk.paths() if path.endswith(".log")]) >= 4, "entry logs rolled, too"
    await engine.close()


# --- deletion


async def test_a_deleted_ledger_is_gone_from_every_tier(world: Any, kit: Any) -> None:
    engine = await world.opened()
    await kit.fill(engine, 5, 30)
    await kit.fill(engine, 6, 1)
    await engine.flush()
    await kit.fill(engine, 5, 3, first=30)
    await kit.read(engine, (5, 0))
    await engine.delete_ledger(5)
    await engine.delete_ledger(5)
    for _ in range(3):
        assert await kit.read(engine, (5, 0), (5, 31), (5, -1)) == [Status.NO_LEDGER] * 3
        assert list(await engine.list_ledger_ids()) == [6]
        with pytest.raises(NoSuchLedger):
            engine.last_add_confirmed(5)
        await engine.flush()
    await engine.close()
    engine = await world.opened()
    assert await kit.read(engine, (5, 0), (5, -1)) == [Status.NO_LEDGER] * 2
    await engine.close()


async def test_a_deleted_ledger_can_be_written_anew_without_its_old_entries(world: Any, kit: Any) -> None:
    engine = await world.opened()
    await kit.fill(engine, 5, 30)
    await engine.flush()
    await engine.delete_ledger(5)
    body = kit.entry(5, 7, b"new")
    assert await kit.add(engine, kit.add_request(body, key=b"new key")) == [OK]
    for _ in range(3):
        assert await kit.read(engine, (5, 7), (5, 8), (5, 6), (5, -1)) == [body, Status.NO_ENTRY, Status.NO_ENTRY, body]
        await engine.flush()
    assert await engine.entry_ids(5) == [(7, 1)]
    await engine.close()


async def test_a_late_writer_does_not_bring_a_fenced_and_deleted_ledger_back(world: Any, kit: Any) -> None:
    engine = await world.opened()
    await kit.fill(engine, 5, 3)
    await engine.fence(5, kit.KEY)
    await engine.delete_ledger(5)
    assert await kit.add(engine, kit.add_request(kit.entry(5, 3))) == [Status.FENCED]
    with pytest.raises(NoSuchLedger):
        await engine.fence(5, kit.KEY)
    with pytest.raises(NoSuchLedger):
        await engine.write_lac(5, kit.KEY, 1, kit.lac_packet(5, 1))
    await engine.close()


# --- ends


async def test_after_an_orderly_close_nothing_is_replayed(world: Any, kit: Any) -> None:
    engine = await world.opened()
    bodies = await kit.fill(engine, 5, 300)
    await engine.close()
    await engine.close()
    assert await kit.add(engine, kit.add_request(kit.entry(5, 1))) == [Status.IO_ERROR]
    engine = await world.opened()
    assert engine.stats.replay_entries == 0
    assert await kit.read(engine, *((5, e) for e in range(300))) == bodies
    await engine.close()


async def test_nothing_is_replayed_when_the_last_flush_began_before_its_group_was_written(world: Any, kit: Any) -> None:
    """A full cache is swapped in the same turn in which its last entries reach the journal's queue."""
    engine = await world.opened()
    requests = [kit.add_request(kit.entry(5, e, bytes(200))) for e in range(60)]
    assert await kit.add(engine, *requests) == [OK] * 60
    assert engine.stats.active_cache_size == 0, "the whole batch went into one cache, which is being flushed"
    await engine.close()
    engine = await world.opened()
    assert engine.stats.replay_entries == 0
    await engine.close()


async def test_replay_reports_its_progress(kit: Any) -> None:
    world = kit.World(write_cache_size_max=2**20, journal_file_size_max=2**20)
    engine = await world.opened()
    await kit.fill(engine, 5, 300)
    world.disk.cut_after(0)
    await engine.close()
    world.lose_power(1)
    seen = []
    engine = world.engine()
    await engine.open(on_progress=seen.append)
    assert [one.entries for one in seen] == [50, 100, 150, 200, 250, 300]
    assert all(0 < one.bytes_done <= one.bytes_total for one in seen)
    assert engine.stats.replay_entries == 300
    await engine.close()


async def test_the_order_of_syncs_is_entry_log_then_index_then_mark_then_old_journals(kit: Any) -> None:
    """The order is the promise: changed, it shows here before it shows as a loss."""
    world = kit.World()
    engine = await world.opened()
    await kit.fill(engine, 5, 1)
    world.disk.log.clear()
    await engine.flush()
    assert world.disk.log == [
        "create /ledgers/current/1.log",
        "write /ledgers/current/1.log",
        "sync /ledgers/current/1.log",
        "sync_directory /ledgers/current",
        "write /ledgers/current/1.log",
        "datasync /ledgers/current/1.log",
        "kv sync",
        "create /ledgers/current/LastLogMark.new",
        "write /ledgers/current/LastLogMark.new",
        "sync /ledgers/current/LastLogMark.new",
        "rename /ledgers/current/LastLogMark.new /ledgers/current/LastLogMark",
        "sync_directory /ledgers/current",
    ]
    world.disk.log.clear()
    await kit.add(engine, kit.add_request(kit.entry(5, 1)))
    assert world.disk.log == ["write /journal/current/2.txn", "datasync /journal/current/2.txn"]
    await engine.close()


async def test_what_arrives_during_a_sync_is_one_group(kit: Any) -> None:
    world = kit.World()
    engine = await world.opened()
    answers: list[Sequence[int]] = []
    engine.add_many([kit.add_request(kit.entry(5, 0))], answers.append)
    await asyncio.sleep(0)
    for entry_id in range(1, 40):
        engine.add_many([kit.add_request(kit.entry(5, entry_id))], answers.append)
    await engine.force(5)
    assert len(answers) == 40
    assert engine.stats.journal_groups == 2
    await engine.close()


async def test_a_batch_larger_than_a_group_takes_the_barriers_behind_it_along(kit: Any) -> None:
    world = kit.World(write_cache_size_max=2**20)
    engine = await world.opened()
    answers: list[Sequence[int]] = []
    for first in (0, 100):
        large = [kit.add_request(kit.entry(5, e, bytes(1000))) for e in range(first, first + 100)]
        engine.add_many(large, answers.append)
    async with asyncio.timeout(30):
        await asyncio.gather(engine.force(5), engine.force(5))
    assert [len(statuses) for statuses in answers] == [100, 100]
    assert engine.stats.journal_groups == 2
    assert engine.stats.journal_queue_groups == engine.stats.journal_queue_size == 0
    await engine.close()


async def test_a_bookie_that_forgot_a_fenced_ledger_takes_copies_of_it_and_no_late_writer(world: Any, kit: Any) -> None:
    """It may be given copies again, by whoever heals; the ledger's former writer stays locked out, restarts or not."""
    engine = await world.opened()
    await kit.add(engine, kit.add_request(kit.entry(7, 0)))
    await engine.fence(7, kit.KEY)
    await engine.delete_ledger(7)
    assert await kit.add(engine, kit.add_request(kit.entry(7, 1))) == [Status.FENCED]
    assert await kit.add(engine, kit.add_request(kit.entry(7, 0), recovery=True)) == [OK]
    assert await kit.add(engine, kit.add_request(kit.entry(7, 1))) == [Status.FENCED]
    world.disk.cut_after(0)
    await engine.close()
    world.lose_power(1)
    engine = await world.opened()
    assert await kit.read(engine, (7, 0)) == [kit.entry(7, 0)]
    assert await kit.add(engine, kit.add_request(kit.entry(7, 1))) == [Status.FENCED]
    await engine.close()
