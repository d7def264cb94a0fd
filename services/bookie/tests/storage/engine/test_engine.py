"""Adds, fences and LAC requests of the engine, its back-pressure, stop and start."""

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest
from bindery_bookie.storage.io.fault_injection import FaultyDisk
from bindery_bookie.storage.memory.write_cache import ENTRY_OVERHEAD
from bindery_bookie.storage.store import EntryStore
from bindery_core.errors import BadRequest, NoSuchLedger, Unauthorized
from bindery_core.wire.messages import Status, WriteFlag

OK = Status.OK


async def test_the_engine_is_an_entry_store(world: Any) -> None:
    store: EntryStore = await world.opened()
    total, free = store.disk_usage()
    assert 0 < free <= total
    await store.close()


# --- adds


async def test_the_ids_in_the_body_are_used(world: Any, kit: Any) -> None:
    engine = await world.opened()
    request = kit.add_request(kit.entry(5, 0, b"x"))
    request.ledger_id, request.entry_id = 99, 98
    assert await kit.add(engine, request) == [OK]
    assert await kit.read(engine, (5, 0), (99, 98)) == [request.body, Status.NO_LEDGER]
    await engine.close()


async def test_an_entry_may_be_added_twice_and_the_last_body_is_kept(world: Any, kit: Any) -> None:
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


async def test_the_maximum_ids_survive_flushes(world: Any, kit: Any) -> None:
    """A client may send the maximum ids at any time, and no key in the index can follow them."""
    top = 2**63 - 1
    engine = await world.opened()
    for payload in (b"1", b"22"):
        for key in ((5, top), (top, top), (top, 0), (5, top - 1)):
            assert await kit.add(engine, kit.add_request(kit.entry(*key, payload))) == [OK]
        await engine.flush()
    assert await kit.read(engine, (5, top), (5, -1), (top, top)) == [
        kit.entry(5, top, b"22"),
        kit.entry(5, top, b"22"),
        kit.entry(top, top, b"22"),
    ]
    assert await engine.entry_ids(5) == [(top - 1, 2)]
    await engine.close()
    again = await world.opened()
    assert await kit.read(again, (5, top), (top, 0)) == [kit.entry(5, top, b"22"), kit.entry(top, 0, b"22")]
    await again.close()


@pytest.mark.parametrize("body", [b"", b"x" * 23], ids=["empty", "no LAC"])
async def test_an_invalid_body_is_refused_without_affecting_other_adds(world: Any, kit: Any, body: bytes) -> None:
    engine = await world.opened()
    good = kit.add_request(kit.entry(5, 0))
    bad = kit.add_request(kit.entry(5, 1))
    bad.body = body
    assert await kit.add(engine, bad, good, bad) == [Status.BAD_REQUEST, OK, Status.BAD_REQUEST]
    await engine.close()


@pytest.mark.parametrize(("ledger_id", "entry_id"), [(5, -1), (5, -0x1000), (5, -0x2000), (-1, 0)])
async def test_a_client_cannot_forge_a_control_record(world: Any, kit: Any, ledger_id: int, entry_id: int) -> None:
    engine = await world.opened()
    await kit.fill(engine, 5, 1)
    assert await kit.add(engine, kit.add_request(kit.entry(ledger_id, entry_id))) == [Status.BAD_REQUEST]
    world.lose_power(1)
    engine = await world.opened()
    assert await kit.add(engine, kit.add_request(kit.entry(5, 1))) == [OK]
    await engine.close()


async def test_the_first_master_key_becomes_the_key_of_the_ledger(world: Any, kit: Any) -> None:
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
    assert await kit.add(engine, kit.add_request(kit.entry(5, 1))) == [
        OK
    ]  # writes zeros ahead, also for the next group
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


async def test_after_a_fence_only_recovery_adds_are_accepted(world: Any, kit: Any) -> None:
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


async def test_a_fence_creates_an_unknown_ledger(world: Any, kit: Any) -> None:
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


async def test_the_lac_is_the_greatest_one_seen_and_never_decreases(world: Any, kit: Any) -> None:
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


async def test_an_explicit_lac_creates_the_ledger_and_is_accepted_after_a_fence(world: Any, kit: Any) -> None:
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


# --- journal failure and full disk


async def test_after_a_journal_failure_all_adds_get_io_error(kit: Any) -> None:
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


async def test_a_flush_waits_until_its_entries_are_durable_in_the_journal(kit: Any) -> None:
    """Otherwise its rows could outlive entry logs that the next start truncates."""
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


async def test_on_a_full_ledger_disk_adds_wait_then_are_refused_then_recover(kit: Any) -> None:
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


async def test_caches_stay_within_their_limits(world: Any, kit: Any) -> None:
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


async def test_idle_ledgers_are_evicted_and_read_from_the_index(kit: Any) -> None:
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


async def test_old_journals_are_deleted(world: Any, kit: Any) -> None:
    engine = await world.opened()
    for first in range(0, 3000, 500):
        await kit.fill(engine, 5, 500, first=first)
        await engine.flush()
    journals = [path for path in world.disk.paths() if path.endswith(".txn")]
    assert len(journals) <= 2
    assert engine.stats.journal_files_dropped >= 4
    assert len([path for path in world.disk.paths() if path.endswith(".log")]) >= 4, "entry logs are rolled too"
    await engine.close()


# --- stop and start


async def test_after_a_clean_stop_nothing_is_replayed(world: Any, kit: Any) -> None:
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
    """A full cache is swapped in the same iteration in which its last entries reach the journal's queue."""
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
    """Durability depends on this order."""
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


async def test_adds_that_arrive_during_a_sync_form_one_group(kit: Any) -> None:
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


async def test_barriers_belong_to_the_group_of_the_batch_before_them(kit: Any) -> None:
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


async def test_a_deleted_fenced_ledger_accepts_copies_but_no_adds_of_a_late_writer(world: Any, kit: Any) -> None:
    """Replication workers may store copies again; the former writer stays fenced, also after restarts."""
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
