"""Limbo: lost entries are never answered with "no such entry", and limbo ends when all of them are restored."""

import errno
from typing import Any

import pytest
from bindery_bookie.storage.corruption import limbo
from bindery_bookie.storage.corruption.limbo import LimboLedger, LimboMarker, LimboPhase, read_marker, write_marker
from bindery_bookie.storage.index.index_format import LedgerRow, pack_ledger_row, unpack_ledger_row
from bindery_bookie.storage.io.fault_injection import FaultyDisk
from bindery_bookie.storage.journal import journal_format
from bindery_bookie.storage.opening.salvage import salvage
from bindery_core.errors import BinderyError, LedgerStateUnknown, Unauthorized
from bindery_core.wire.messages import Status
from bindery_simulation.disk import CrashableDisk

CURRENT = "/ledgers/current"
UNKNOWN = Status.UNKNOWN_LEDGER_STATE


async def unknown(call: Any) -> None:
    with pytest.raises(LedgerStateUnknown):
        await call


# --- marker -----------------------------------------------------------------------------------------------------------


def test_a_marker_has_its_reason_and_start_time() -> None:
    disk = CrashableDisk()
    assert read_marker(disk, CURRENT) is None
    write_marker(disk, CURRENT, "the disk is empty", 5)
    assert read_marker(disk, CURRENT) == LimboMarker("the disk is empty", 5, LimboPhase.LISTING)
    limbo.set_phase(disk, CURRENT, LimboPhase.REPAIRING)
    write_marker(disk, CURRENT, "the journal too \u20ac" * 1000, 9)
    again = read_marker(disk, CURRENT)
    assert again is not None
    assert again.reason.startswith("the disk is empty; the journal too")
    assert (again.since_ms, again.phase) == (5, LimboPhase.LISTING)
    limbo.remove_marker(disk, CURRENT)
    limbo.remove_marker(disk, CURRENT)
    assert read_marker(disk, CURRENT) is None


@pytest.mark.parametrize("data", [b"", b"\0" * 80, b"{}", b'{"version": 9}', b"[1]", b'{"phase": "repairing"}'])
def test_an_unreadable_marker_counts_as_phase_listing(data: bytes) -> None:
    assert LimboMarker.unpack(data).phase is LimboPhase.LISTING


def test_a_marker_survives_a_power_loss_at_every_operation() -> None:
    for operations in range(20):
        disk = CrashableDisk()
        write_marker(disk, CURRENT, "first", 1)
        limbo.set_phase(disk, CURRENT, LimboPhase.REPAIRING)
        disk.cut_after(operations)
        is_written = True
        try:
            write_marker(disk, CURRENT, "second", 2)
        except OSError:
            is_written = False
        found = read_marker(disk.after_power_cut(operations), CURRENT)
        assert found is not None
        assert found.phase is LimboPhase.LISTING or not is_written
        if is_written:
            assert "second" in found.reason
            break
    else:
        raise AssertionError("never written")


def test_a_limbo_row_has_one_additional_flag() -> None:
    row = LedgerRow(b"k" * 20, True, 7, 9, b"p" * 20)
    old = pack_ledger_row(row)
    new = pack_ledger_row(LedgerRow(b"k" * 20, True, 7, 9, b"p" * 20, is_limbo=True))
    assert (old[1], new[1]) == (3, 7)
    assert old[:1] + old[2:] == new[:1] + new[2:]
    assert not unpack_ledger_row(old, ledger_id=1).is_limbo
    assert unpack_ledger_row(new, ledger_id=1).is_limbo


# --- engine -----------------------------------------------------------------------------------------------------------


async def in_limbo(world: Any, kit: Any) -> tuple[Any, list[bytes]]:
    """Put ledger 5 with ten entries, and ledger 7 without entries, into limbo; ledger 6 is not in limbo."""
    engine = await world.opened()
    bodies = await kit.fill(engine, 5, 10)
    await kit.fill(engine, 6, 10)
    await engine.close()
    write_marker(world.disk, CURRENT, "a test", 1)
    engine = await world.opened()
    assert engine.limbo.is_listing
    await engine.repair.enter_limbo_ledgers([LimboLedger(5, kit.KEY), LimboLedger(7, kit.KEY)])
    await engine.repair.finish_listing()
    return engine, bodies


async def check_limbo(engine: Any, kit: Any, bodies: list[bytes]) -> None:
    assert await kit.read(engine, *((5, e) for e in range(10))) == bodies
    asked = [(5, 10), (5, -1), (7, 0), (7, -1), (99, 0), (99, -1)]
    assert await kit.read(engine, *asked) == [UNKNOWN] * len(asked)
    for ledger_id in (5, 7, 99):
        await unknown(engine.read_lac(ledger_id))
        await unknown(engine.entry_ids(ledger_id))
        with pytest.raises(LedgerStateUnknown):
            engine.last_add_confirmed(ledger_id)
        with pytest.raises(LedgerStateUnknown):
            engine.watch_lac(ledger_id, lambda: None)
    assert await kit.read(engine, (6, 10)) == [Status.NO_ENTRY]
    assert await engine.entry_ids(6) == [(0, 10)]
    assert await kit.add(engine, kit.add_request(kit.entry(5, 50))) == [Status.FENCED]
    assert await kit.add(engine, kit.add_request(kit.entry(7, 50))) == [Status.FENCED]
    assert await kit.add(engine, kit.add_request(kit.entry(5, 0), key=b"other")) == [Status.UNAUTHORIZED]
    assert list(await engine.repair.limbo_ledger_ids()) == [5, 7]


async def test_a_ledger_in_limbo_serves_stored_entries_and_reports_none_as_absent(world: Any, kit: Any) -> None:
    engine, bodies = await in_limbo(world, kit)
    await check_limbo(engine, kit, bodies)
    await engine.close()
    engine = await world.opened()  # the ledger is not in memory now
    assert (engine.limbo.reason, engine.limbo.since_ms, engine.limbo.phase) == ("a test", 1, LimboPhase.REPAIRING)
    await check_limbo(engine, kit, bodies)
    await engine.fence(7, kit.KEY)
    assert await kit.read(engine, (7, -1)) == [UNKNOWN]
    new = [kit.entry(8, 0)]
    assert await kit.add(engine, kit.add_request(new[0])) == [Status.OK]  # a ledger created later is not in limbo
    assert await kit.read(engine, (8, 0), (8, 1)) == [*new, Status.NO_ENTRY]
    await engine.close()


async def test_recovered_entries_are_accepted_and_a_complete_ledger_leaves_limbo(world: Any, kit: Any) -> None:
    engine, bodies = await in_limbo(world, kit)
    more = [kit.entry(5, e) for e in range(10, 15)]
    assert await engine.repair.store_recovered(5, more) == [Status.OK] * 5
    assert await kit.add(engine, kit.add_request(kit.entry(7, 0), recovery=True)) == [Status.OK]
    engine.repair.leave_limbo(5)
    assert await kit.read(engine, *((5, e) for e in range(16))) == [*bodies, *more, Status.NO_ENTRY]
    assert await engine.entry_ids(5) == [(0, 15)]
    assert engine.last_add_confirmed(5) == 8
    assert await kit.add(engine, kit.add_request(kit.entry(5, 50))) == [Status.FENCED]
    assert list(await engine.repair.limbo_ledger_ids()) == [7]
    await engine.delete_ledger(7)
    assert list(await engine.repair.limbo_ledger_ids()) == []
    await engine.repair.end_limbo()
    assert await kit.read(engine, (99, 0)) == [Status.NO_LEDGER]
    await engine.close()
    engine = await world.opened()
    assert engine.limbo is None
    assert await kit.read(engine, (5, 15), (7, 0)) == [Status.NO_ENTRY, Status.NO_LEDGER]
    await engine.close()


async def test_a_key_missing_in_the_metadata_is_taken_from_the_first_client(world: Any, kit: Any) -> None:
    write_marker(world.disk, CURRENT, "a test", 1)
    engine = await world.opened()
    await engine.repair.enter_limbo_ledgers([LimboLedger(5, b""), LimboLedger(6, b"")])
    await engine.repair.finish_listing()
    await engine.fence(5, kit.KEY)
    assert await kit.add(engine, kit.add_request(kit.entry(6, 0), recovery=True)) == [Status.OK]
    world.lose_power(3)
    engine = await world.opened()
    for ledger_id in (5, 6):
        with pytest.raises(Unauthorized):
            await engine.fence(ledger_id, b"other")
        await engine.fence(ledger_id, kit.KEY)
    await engine.close()


async def test_after_a_power_loss_at_any_operation_no_entry_is_reported_as_absent(kit: Any) -> None:
    """The power is cut after each change of disk and index, from an empty directory to the end of limbo."""
    step = 0
    for operations in range(1, 2000):
        world = kit.World(seed=operations)
        write_marker(world.disk, CURRENT, "a test", 1)
        world.disk.cut_after(operations)
        step = await limbo_until_cut(world, kit)
        world.lose_power(operations)
        engine = await world.opened()
        answers = await kit.read(engine, (7, 0), (7, 1), (7, -1))
        if engine.limbo is None:
            assert step >= 3, "limbo ended before end_limbo was called"
        else:
            assert engine.limbo.is_listing or step >= 1
        if step < 2:
            assert answers[1:] == [UNKNOWN] * 2
        if step >= 2:  # entry 0 was stored and acknowledged
            assert answers[0] == kit.entry(7, 0)
        if step >= 1 and engine.limbo is not None and not engine.limbo.is_listing:
            assert await kit.add(engine, kit.add_request(kit.entry(7, 9))) == [Status.FENCED]
        await engine.close()
        if step == 4:
            return
    raise AssertionError("never came to the end")


async def limbo_until_cut(world: Any, kit: Any) -> int:
    """Return the last step: 1 before finish_listing, 2 entry stored, 3 before end_limbo, 4 limbo ended."""
    step = 0
    engine = world.engine()
    try:
        await engine.open()
        await engine.repair.enter_limbo_ledgers([LimboLedger(7, kit.KEY)])
        step = 1
        await engine.repair.finish_listing()
        if await engine.repair.store_recovered(7, [kit.entry(7, 0)]) != [Status.OK]:
            raise OSError("not stored")
        step = 2
        engine.repair.leave_limbo(7)
        await engine.flush()
        step = 3
        await engine.repair.end_limbo()
        step = 4
        await engine.close()
    except (OSError, BinderyError):
        world.disk.cut_after(0)
        await engine.close()
    return step


# --- limbo entered by a start --------------------------------------------------------------------------------------


async def test_the_listing_is_repeated_if_the_index_is_lost_during_the_repair(world: Any, kit: Any) -> None:
    engine, bodies = await in_limbo(world, kit)
    await engine.close()
    world.kv.clear()
    engine = await world.opened()
    assert engine.limbo.is_listing
    assert await kit.read(engine, *((5, e) for e in range(11)), (7, 0)) == [*bodies, UNKNOWN, UNKNOWN]
    await engine.close()


async def test_a_fence_of_limbo_survives_a_crash_in_the_listing_and_a_later_loss_of_the_index(kit: Any) -> None:
    """No journal has the fence, so the listing after the crash must write it to the entry log again."""
    faults: list[str] = []

    def fault(operation: str, path: str) -> OSError | None:
        return OSError(errno.EIO, "a test", path) if any(name in path for name in faults) else None

    world = kit.World(wrap=lambda disk: FaultyDisk(disk, fault), reserve_size=0)
    engine = await world.opened()
    await kit.fill(engine, 5, 10)
    await engine.close()
    write_marker(world.disk, CURRENT, "the journal was lost", 1)
    listed = [LimboLedger(5, kit.KEY), LimboLedger(7, kit.KEY)]
    engine = await world.opened()
    faults.append("LastLogMark")
    with pytest.raises(OSError, match="flush failed"):
        await engine.repair.enter_limbo_ledgers(listed)  # the index has the flush, LastLogMark does not
    faults.clear()
    world.lose_power(1)
    engine = await world.opened()
    await engine.repair.enter_limbo_ledgers(listed)
    await engine.repair.finish_listing()
    for ledger_id in (5, 7):
        engine.repair.leave_limbo(ledger_id)
    await engine.repair.end_limbo()
    await engine.close()
    world.kv.clear()
    engine = await world.opened()
    assert engine.limbo is None
    for ledger_id in (5, 7):
        assert await kit.add(engine, kit.add_request(kit.entry(ledger_id, 10))) == [Status.FENCED]
        assert await kit.add(engine, kit.add_request(kit.entry(ledger_id, 9), key=b"other")) == [Status.UNAUTHORIZED]
    await engine.close()


async def check_copies_are_taken(kit: Any, engine: Any, ledger_id: int) -> None:
    """Check that a worker can store copies with the key, which was lost here. The metadata has other bookies."""
    await engine.repair.finish_listing()
    await engine.repair.end_limbo()
    assert await kit.add(engine, kit.add_request(kit.entry(ledger_id, 400))) == [Status.FENCED]
    for entry_id in (5, 6):
        copy = kit.add_request(kit.entry(ledger_id, entry_id), recovery=True)
        assert await kit.add(engine, copy) == [Status.OK]
        await engine.flush()
    refused = kit.add_request(kit.entry(ledger_id, 7), key=b"other", recovery=True)
    assert await kit.add(engine, refused) == [Status.UNAUTHORIZED]
    await engine.close()


async def test_copies_are_accepted_if_the_key_was_lost_with_the_journal(kit: Any) -> None:
    world = kit.World(reserve_size=0)
    engine = await world.opened()
    await kit.fill(engine, 7, 300)
    world.lose_power(1)
    for path in [path for path in world.disk.paths() if path.startswith("/ledgers/")]:
        world.disk.remove(path)
    world.kv.clear()
    first = next(path for path in sorted(world.disk.paths()) if path.endswith(".txn") and len(groups_of(world, path)))
    for offset in range(512 + 32, 512 + 100):  # the first group has the key
        world.disk.corrupt(first, offset)
    write_marker(world.disk, CURRENT, "the ledger disk was lost", 1)
    engine = await world.opened()
    assert engine.stats.replay_entries
    await check_copies_are_taken(kit, engine, 7)


async def test_copies_are_accepted_if_the_key_was_lost_with_the_entry_log(kit: Any) -> None:
    world = kit.World(reserve_size=0)
    engine = await world.opened()
    await kit.fill(engine, 7, 10)
    await engine.close()
    engine = await world.opened()
    await kit.fill(engine, 7, 10, first=10)
    await engine.close()
    world.disk.remove(f"{CURRENT}/1.log")
    world.kv.clear()
    engine = await world.opened()
    assert (await kit.read(engine, (7, 10), (7, 5)))[1] == UNKNOWN
    await check_copies_are_taken(kit, engine, 7)


def groups_of(world: Any, path: str) -> list[int]:
    data = world.disk.contents(path)
    return [at for at in range(512, len(data), 512) if data[at : at + 4] == journal_format.GROUP_MAGIC]


async def journaled(world: Any, kit: Any, count: int) -> list[bytes]:
    """Crash a bookie with this number of groups in its journal, and return the bodies of their entries."""
    engine = await world.opened()
    bodies = []
    for entry_id in range(count):
        bodies.append(kit.entry(5, entry_id, b"j" * 600))
        assert await kit.add(engine, kit.add_request(bodies[-1])) == [Status.OK]
    world.disk.cut_after(0)
    await engine.close()
    world.lose_power(1)
    return bodies


def run_salvage(world: Any, *, apply: bool) -> list[str]:
    steps = salvage(
        world.disk,
        journal_directory="/journal/current",
        ledger_directory=CURRENT,
        now_ms=7,
        apply=apply,
        open_kv=lambda path: world.kv,
    )
    return [step.path for step in steps]


@pytest.mark.parametrize("what", ["journal", "mark", "mark-lost"])
async def test_salvage_makes_a_refused_bookie_start_and_keeps_readable_entries(world: Any, kit: Any, what: str) -> None:
    bodies = await journaled(world, kit, 6)
    (journal,) = [path for path in world.disk.paths() if path.endswith(".txn")][-1:]
    mark = f"{CURRENT}/LastLogMark"
    lost = set()
    if what == "journal":
        world.disk.corrupt(journal, world.disk.contents(journal).index(bodies[2]) + 100)
        lost = {2}
    elif what == "mark":
        world.disk.corrupt(mark, 9)
    else:
        world.disk.remove(mark)
    refused = world.engine()
    with pytest.raises(BinderyError, match="bindery bookie salvage"):
        await refused.open()
    before = {path: world.disk.contents(path) for path in world.disk.paths()}
    expected = [journal if what == "journal" else mark]
    assert run_salvage(world, apply=False) == expected
    assert {path: world.disk.contents(path) for path in world.disk.paths()} == before
    assert run_salvage(world, apply=True) == expected
    if what != "mark-lost":
        assert before[expected[0]] in [world.disk.contents(p) for p in world.disk.paths() if "/quarantine/" in p]
    for _ in range(2):
        engine = await world.opened()
        assert engine.limbo.is_listing
        answers = await kit.read(engine, *((5, e) for e in range(7)))
        assert answers == [UNKNOWN if e in lost or e == 6 else bodies[e] for e in range(7)]
        await engine.close()
    assert run_salvage(world, apply=False) == []


async def test_salvage_of_an_intact_bookie_changes_nothing(world: Any, kit: Any) -> None:
    assert run_salvage(world, apply=True) == []
    await journaled(world, kit, 3)
    assert run_salvage(world, apply=True) == []
    assert (await world.opened()).limbo is None
