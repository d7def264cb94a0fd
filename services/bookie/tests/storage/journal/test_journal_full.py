"""No space for the next journal file: adds are refused, nothing fails, and adds continue once there is space."""

import asyncio
import errno
from typing import Any

import pytest
from bindery_bookie.storage.corruption.limbo import LimboLedger, write_marker
from bindery_bookie.storage.io.errors import JournalFailed, JournalFull
from bindery_bookie.storage.io.fault_injection import FaultyDisk
from bindery_bookie.storage.journal.journal_files import list_journals
from bindery_bookie.storage.journal.journal_needed import write_needed
from bindery_bookie.storage.journal.mark import read_mark
from bindery_bookie.storage.opening.opening import check_new
from bindery_bookie.storage.settings import KIB
from bindery_core.errors import DamagedStorage
from bindery_core.wire.messages import Status
from bindery_simulation.disk import CrashableDisk

OK, READ_ONLY = Status.OK, Status.READ_ONLY


class JournalDisk:
    """A disk on which journals cannot be created while `is_full`.

    The other attributes do the same for entry logs, LastLogMark, and the markers of needed journals.
    """

    def __init__(self, kit: Any, **settings: Any) -> None:
        self.kit = kit
        self.is_full = self.is_log_full = self.is_needed_full = self.is_mark_full = False
        self.told: list[str] = []
        self.world = kit.World(
            wrap=lambda disk: FaultyDisk(disk, self._fault),
            **{
                "journal_file_size_max": 64 * KIB,
                "journal_retry_s": 0.005,
                "flush_retry_s": 0.005,
                "write_cache_size_max": 256 * KIB,
                "reserve_size": 0,
                **settings,
            },
        )

    def _fault(self, operation: str, path: str) -> OSError | None:
        suffixes = {".txn": self.is_full, ".log": self.is_log_full, ".needed": self.is_needed_full}
        if operation == "create" and suffixes.get(path[path.rindex(".") :] if "." in path else ""):
            return OSError(errno.ENOSPC, "No space left on device", path)
        if operation == "create" and self.is_mark_full and "/LastLogMark" in path:
            return OSError(errno.ENOSPC, "No space left on device", path)
        return None

    async def opened(self) -> Any:
        engine = await self.world.opened()
        engine.stats.no_space = self.told.append
        return engine

    async def add(self, engine: Any, first: int, count: int = 5) -> dict[int, int]:
        """Add entries to ledger 5. Return the status by entry id."""
        adds = [self.kit.add_request(self.kit.entry(5, n, b"%d" % n * 700)) for n in range(first, first + count)]
        return dict(zip(range(first, first + count), await self.kit.add(engine, *adds), strict=True))

    async def fill(self, engine: Any) -> dict[int, int]:
        """Add three batches at a time until one is refused. Return the status by entry id."""
        self.is_full = True
        statuses: dict[int, int] = {}
        for turn in range(40):
            found = await asyncio.gather(*(self.add(engine, turn * 15 + at * 5) for at in range(3)))
            for part in found:
                statuses.update(part)
            if READ_ONLY in statuses.values():
                return statuses
        raise AssertionError("the journal found room all the time")

    def body(self, entry_id: int) -> bytes:
        found: bytes = self.kit.entry(5, entry_id, b"%d" % entry_id * 700)
        return found


async def until(condition: Any) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0.001)


async def test_adds_are_refused_and_reads_served_until_there_is_space(kit: Any) -> None:
    disk = JournalDisk(kit)
    engine = await disk.opened()
    statuses = await disk.fill(engine)
    assert set(statuses.values()) == {OK, READ_ONLY}
    assert engine.stats.journal_full
    assert not engine.stats.journal_failed
    assert len(disk.told) == 1
    assert "/journal/current/3.txn" in disk.told[0]
    queued = engine.stats.journal_queue_size
    assert set((await disk.add(engine, 1000)).values()) == {READ_ONLY}
    assert engine.stats.journal_queue_size == queued, "adds that are refused at once are not kept"
    with pytest.raises(JournalFull):
        await engine.write_lac(5, kit.KEY, 3, kit.lac_packet(5, 3))
    for ledger_id in range(5, 20):
        with pytest.raises(JournalFull):
            await engine.fence(ledger_id, kit.KEY)
    assert engine.stats.journal_queue_size == queued
    assert list(await engine.list_ledger_ids()) == [5], (
        "fences that cannot be written are not kept: requests may continue for hours"
    )
    with pytest.raises(JournalFailed):
        await engine.force(5)
    acknowledged = [n for n, status in statuses.items() if status == OK]
    assert await kit.read(engine, *((5, n) for n in acknowledged)) == [disk.body(n) for n in acknowledged]
    disk.is_full = False
    await until(lambda: not engine.stats.journal_full)
    assert set((await disk.add(engine, 2000)).values()) == {OK}
    assert (engine.stats.journal_queue_size, engine.stats.journal_queue_groups) == (0, 0)
    await engine.flush()
    await engine.close()
    again = await disk.opened()
    acknowledged += range(2000, 2005)
    assert await kit.read(again, *((5, n) for n in acknowledged)) == [disk.body(n) for n in acknowledged]
    assert list(await again.list_ledger_ids()) == [5]
    assert await kit.add(again, kit.add_request(kit.entry(5, 3000))) == [OK], "a fence that was refused did not happen"
    await again.close()


@pytest.mark.parametrize("seed", range(8))
async def test_no_flush_advances_past_a_journal_that_waits_for_space(kit: Any, seed: int) -> None:
    """Otherwise LastLogMark would refer to a file that does not exist."""
    disk = JournalDisk(kit)
    engine = await disk.opened()
    statuses = await disk.fill(engine)
    with pytest.raises(OSError, match="flush failed"):
        await engine.flush()
    disk.world.lose_power(seed)
    again = await disk.opened()  # on a disk that is still full
    acknowledged = [n for n, status in statuses.items() if status == OK]
    assert await kit.read(again, *((5, n) for n in acknowledged)) == [disk.body(n) for n in acknowledged]
    assert set((await disk.add(again, 3000)).values()) == {READ_ONLY}
    disk.is_full = False
    await until(lambda: not again.stats.journal_full)
    assert set((await disk.add(again, 4000)).values()) == {OK}
    disk.world.lose_power(seed)
    third = await disk.opened()
    acknowledged += range(4000, 4005)
    assert await kit.read(third, *((5, n) for n in acknowledged)) == [disk.body(n) for n in acknowledged]
    await third.close()


@pytest.mark.parametrize("seed", range(4))
async def test_records_queued_in_a_full_journal_are_written_before_later_records(kit: Any, seed: int) -> None:
    """The key of a new ledger and fences were queued. They were not confirmed, but they are in memory from then on."""
    disk = JournalDisk(kit)
    engine = await disk.opened()
    await disk.add(engine, 0)
    disk.is_full = True
    new, last = (kit.add_request(kit.entry(6, n, b"x" * 700)) for n in (0, 1))
    first, second, fenced = await asyncio.gather(
        kit.add(engine, kit.add_request(kit.entry(5, 900, bytes(60 * KIB)))),  # larger than the rest of this file
        _later(kit.add(engine, new)),
        _later(engine.fence(5, kit.KEY)),
        return_exceptions=True,
    )
    assert (first, second) == ([READ_ONLY], [READ_ONLY])
    assert isinstance(fenced, JournalFailed)
    with pytest.raises(JournalFull):
        await engine.fence(7, kit.KEY)  # arrives when the journal is full already
    assert engine.stats.journal_queue_groups >= 2
    disk.is_full = False
    await until(lambda: not engine.stats.journal_full)
    assert await kit.add(engine, last) == [OK]
    for ledger_id in (5, 7):
        await engine.fence(ledger_id, kit.KEY)
    disk.world.lose_power(seed)
    again = await disk.opened()
    assert await kit.read(again, (6, 1)) == [last.body]
    for ledger_id in (5, 7):
        assert await kit.add(again, kit.add_request(kit.entry(ledger_id, 901))) == [Status.FENCED]
    await again.close()


async def _later(what: Any) -> Any:
    """Wait for one iteration of the loop, so that the operation is in the next group."""
    await asyncio.sleep(0)
    return await what


async def test_a_stop_on_a_full_disk_ends(kit: Any) -> None:
    disk = JournalDisk(kit)
    engine = await disk.opened()
    statuses = await disk.fill(engine)
    async with asyncio.timeout(30):
        await engine.close()
    disk.is_full = False
    again = await disk.opened()
    acknowledged = [n for n, status in statuses.items() if status == OK]
    assert await kit.read(again, *((5, n) for n in acknowledged)) == [disk.body(n) for n in acknowledged]
    await again.close()


async def test_the_reserve_is_used_for_adds_that_were_already_accepted(kit: Any) -> None:
    """The engine refuses nothing: records go to a short file, the disk monitor is informed, and flushes continue."""
    disk = JournalDisk(kit, journal_file_size_max=2048 * KIB, reserve_size=1536 * KIB, write_cache_size_max=8192 * KIB)
    engine = await disk.opened()
    assert engine.journal_reserve.restore()
    disk.world.disk.taken = disk.world.disk.capacity - disk.world.disk.used - 500 * KIB
    statuses: dict[int, int] = {}
    while not disk.told:
        statuses.update(await disk.add(engine, len(statuses), 50))
        assert len(statuses) < 3000
    (reason,) = disk.told
    assert reason.startswith("there is no room for a journal file of full size: /journal/current/"), (
        "without a path the watch would take the ledgers' disk for full too"
    )
    assert set(statuses.values()) == {OK}
    disk.world.disk.taken = 0
    await engine.flush()
    assert await kit.read(engine, *((5, n) for n in statuses)) == [disk.body(n) for n in statuses]
    await engine.close()


async def test_a_group_larger_than_the_file_size_gets_a_larger_file(kit: Any) -> None:
    """Beyond the allocated space of the file, the disk may have no free space."""
    disk = JournalDisk(kit)
    engine = await disk.opened()
    allocated: dict[str, int] = {}
    create = disk.world.disk.create

    def noted(path: str, *, allocate: int = 0) -> Any:
        allocated[path] = allocate
        return create(path, allocate=allocate)

    disk.world.disk.create = noted
    assert await kit.add(engine, kit.add_request(kit.entry(5, 0, bytes(200 * KIB)))) == [OK]
    path = "/journal/current/3.txn"
    assert len(disk.world.disk.contents(path)) == allocated[path] > 200 * KIB
    await engine.close()


# --- the first file of a start that found no space --------------------------------------------------------------------


def needed(disk: JournalDisk) -> list[str]:
    return [path for path in disk.world.disk.paths() if path.endswith(".needed")]


async def started_without_space(disk: JournalDisk, what: str) -> Any:
    """Return a bookie that replayed entries and found no space for a journal file, or for a flush of the entries."""
    engine = await disk.opened()
    await disk.add(engine, 0)
    disk.world.lose_power(1)
    if what == "journal":
        disk.is_full = True
    else:
        disk.is_log_full = True
    engine = await disk.opened()
    assert engine.stats.replay_entries == 5
    return engine


@pytest.mark.parametrize("what", ["journal", "flush"])
async def test_the_loss_of_an_unlinked_journal_is_detected(kit: Any, what: str) -> None:
    disk = JournalDisk(kit)
    engine = await started_without_space(disk, what)
    disk.is_full = False
    await add_until_taken(disk, engine, 100)
    (name,) = needed(disk)
    newest = max(path for path in disk.world.disk.paths() if path.endswith(".txn"))
    assert name == f"{newest}.needed"
    disk.world.lose_power(1)
    kept = disk.world.disk
    disk.world.disk = kept.after_power_cut(1)
    disk.world.disk.remove(newest)
    with pytest.raises(DamagedStorage, match="journal is missing") as raised:
        await disk.world.opened()
    assert raised.value.facts["path"] == newest
    disk.world.disk = kept.after_power_cut(1)
    disk.world.disk.truncate(newest, 100)
    with pytest.raises(DamagedStorage, match="journal header is damaged"):
        await disk.world.opened()
    disk.world.disk = kept
    disk.is_log_full = False
    engine = await disk.opened()
    keys = [(5, n) for n in (*range(5), *range(100, 105))]
    assert all(isinstance(body, bytes) for body in await disk.kit.read(engine, *keys))
    assert not needed(disk)  # LastLogMark names it now
    await engine.close()


async def test_the_loss_of_a_journal_is_detected_if_nothing_was_to_be_flushed_before_it(kit: Any) -> None:
    """Everything was flushed before the crash; only LastLogMark had to advance, and there was no space for it."""
    disk = JournalDisk(kit)
    engine = await disk.opened()
    await disk.add(engine, 0)
    await engine.flush()
    disk.world.lose_power(1)
    disk.is_mark_full = True
    engine = await disk.opened()
    await disk.add(engine, 100)
    await engine.fence(5, kit.KEY)
    (name,) = needed(disk)
    newest = max(path for path in disk.world.disk.paths() if path.endswith(".txn"))
    assert name == f"{newest}.needed"
    disk.world.lose_power(1)
    disk.is_mark_full = False
    kept = disk.world.disk
    disk.world.disk = kept.after_power_cut(1)
    disk.world.disk.remove(newest)
    with pytest.raises(DamagedStorage, match="journal is missing") as raised:
        await disk.world.opened()
    assert raised.value.facts["path"] == newest
    disk.world.disk = kept
    engine = await disk.opened()
    assert await disk.kit.read(engine, (5, 100)) == [disk.body(100)]
    assert not needed(disk)
    await engine.close()


async def test_a_start_with_space_writes_no_needed_file(kit: Any) -> None:
    disk = JournalDisk(kit)
    engine = await disk.opened()
    await disk.add(engine, 0)
    disk.world.lose_power(1)
    engine = await disk.opened()
    await disk.add(engine, 100)
    assert not needed(disk)
    await engine.close()


async def test_the_journal_is_full_if_there_is_no_space_for_its_needed_file(kit: Any) -> None:
    disk = JournalDisk(kit)
    engine = await started_without_space(disk, "flush")
    disk.is_needed_full = True
    assert set((await disk.add(engine, 100)).values()) == {READ_ONLY}
    assert engine.stats.journal_full
    assert not needed(disk)
    disk.is_needed_full = False
    await add_until_taken(disk, engine, 200)
    assert len(needed(disk)) == 1
    disk.is_log_full = False
    await engine.flush()
    assert not needed(disk)
    await engine.close()


async def add_until_taken(disk: JournalDisk, engine: Any, first: int) -> None:
    async with asyncio.timeout(30):
        while set((await disk.add(engine, first)).values()) != {OK}:
            await asyncio.sleep(0.005)


async def test_the_loss_of_two_journals_is_detected_if_the_first_only_links_the_second(kit: Any) -> None:
    """The first group after the start does not fit into the file that the start created."""
    disk = JournalDisk(kit)
    engine = await started_without_space(disk, "flush")
    assert await kit.add(engine, kit.add_request(kit.entry(5, 900, bytes(70 * KIB)))) == [OK]
    disk.world.lose_power(1)
    mark = read_mark(disk.world.disk, "/ledgers/current")
    assert mark is not None
    behind = [one for one in list_journals(disk.world.disk, "/journal/current") if one > mark.journal.journal_id]
    assert len(behind) == 2
    for journal_id in behind:
        disk.world.disk.remove(f"/journal/current/{journal_id:x}.txn")
    with pytest.raises(DamagedStorage, match="journal is missing"):
        await disk.world.opened()


async def test_a_lost_needed_journal_is_reported_once(kit: Any) -> None:
    disk = JournalDisk(kit)
    engine = await started_without_space(disk, "flush")
    await add_until_taken(disk, engine, 100)
    disk.world.lose_power(1)
    assert needed(disk)
    for path in [path for path in disk.world.disk.paths() if path.endswith((".txn", "/LastLogMark"))]:
        disk.world.disk.remove(path)
    disk.is_log_full = False
    write_marker(disk.world.disk, "/ledgers/current", "salvage", 1)
    engine = await disk.opened()
    await engine.repair.enter_limbo_ledgers([LimboLedger(5, b"")])
    await engine.repair.finish_listing()
    assert not needed(disk)
    await engine.close()
    await (await disk.opened()).close()


def test_a_needed_journal_prevents_the_start_of_a_new_bookie() -> None:
    disk = CrashableDisk()
    for directory in ("/journal", "/ledgers"):
        disk.make_directories(directory)
    check_new(disk, "/journal", "/ledgers", None)
    write_needed(disk, "/journal", 5)
    with pytest.raises(DamagedStorage, match="LastLogMark is missing") as raised:
        check_new(disk, "/journal", "/ledgers", None)
    assert raised.value.facts["journal"] == "/journal/5.txn"
