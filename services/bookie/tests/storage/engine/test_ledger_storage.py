"""One contract for both forms of LedgerStorage, on the disk that loses power and on real files with LevelDB.

The tests use only LedgerStorage and the files. The forms differ only in the layout of entries in the logs.
"""

import asyncio
import random
import shutil
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from bindery_bookie.storage.corruption import limbo
from bindery_bookie.storage.corruption.limbo import LimboLedger
from bindery_bookie.storage.engine.engine import StorageEngine
from bindery_bookie.storage.engine.interleaved import InterleavedCache
from bindery_bookie.storage.engine.ledger_storage import LedgerStorage
from bindery_bookie.storage.entry_log import entry_log_format as fmt
from bindery_bookie.storage.entry_log.entry_log_scan import EntryLogScanner, LogRecord
from bindery_bookie.storage.io.disk import RealDisk
from bindery_bookie.storage.io.fault_injection import DrillControl, WrappedDisk
from bindery_core.errors import LedgerStateUnknown, NoSuchLedger
from bindery_core.wire.messages import Status

OK = Status.OK
FORMS = ["sorted", "interleaved"]


class CrashablePlace:
    """A directory on the disk that loses power."""

    def __init__(self, kit: Any, directory: Path) -> None:
        self.drills = DrillControl(sleep=lambda seconds: None)
        self.world = kit.World(7, wrap=self.drills.wrap_disk, scrub_rate=2**36)
        self.current = "/ledgers/current"

    @property
    def disk(self) -> Any:
        return self.world.disk

    async def open(self, form: str) -> LedgerStorage:
        self.world.settings = self.world.settings.model_copy(update={"ledger_storage": form})
        storage: LedgerStorage = await self.world.opened()
        return storage

    async def crash(self, storage: LedgerStorage) -> None:
        self.world.disk.cut_after(0)
        await storage.close()
        self.world.lose_power()

    def lose_index(self) -> None:
        self.world.kv.clear()

    def flip(self, path: str, offset: int) -> None:
        self.world.disk.corrupt(path, offset)


class RealPlace:
    """A directory of files, with LevelDB and threads."""

    def __init__(self, kit: Any, directory: Path) -> None:
        self.kit = kit
        self.drills = DrillControl(sleep=lambda seconds: None)
        self.root = directory / "0"
        self.disk = RealDisk()

    @property
    def current(self) -> str:
        return f"{self.root}/ledgers/current"

    async def open(self, form: str) -> LedgerStorage:
        settings = self.kit.small_settings(
            journal_directory=f"{self.root}/journal",
            ledger_directory=f"{self.root}/ledgers",
            ledger_storage=form,
            scrub_rate=2**36,
        )
        storage = StorageEngine.on_real_disk(settings, wall_clock_ms=lambda: 5, drills=self.drills)
        await storage.open()
        return storage

    async def crash(self, storage: LedgerStorage) -> None:
        """Continue with a copy of the files as they were before the stop."""
        copy = self.root.with_name(str(int(self.root.name) + 1))
        shutil.copytree(self.root, copy)
        await storage.close()
        self.root = copy

    def lose_index(self) -> None:
        shutil.rmtree(f"{self.current}/index")

    def flip(self, path: str, offset: int) -> None:
        data = bytearray(Path(path).read_bytes())
        data[offset] ^= 0xFF
        Path(path).write_bytes(data)


Place = CrashablePlace | RealPlace


@pytest.fixture(params=FORMS)
def form(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=[CrashablePlace, RealPlace], ids=["crashable", "real"])
def place(request: pytest.FixtureRequest, kit: Any, tmp_path: Path) -> Place:
    made: Place = request.param(kit, tmp_path)
    return made


@pytest.fixture
async def storage(place: Place, form: str) -> AsyncIterator[LedgerStorage]:
    storage = await place.open(form)
    yield storage
    await storage.close()


async def add_mixed(
    kit: Any, storage: LedgerStorage, ledgers: range, count: int, *, first: int = 0
) -> dict[Any, bytes]:
    """Add entries of all ledgers alternately, as several writers do. Return the bodies by (ledger id, entry id)."""
    bodies = {
        (ledger_id, entry_id): kit.entry(ledger_id, entry_id, b"%d." % entry_id * 20, lac=entry_id - 1)
        for entry_id in range(first, first + count)
        for ledger_id in ledgers
    }
    requests = [kit.add_request(body) for body in bodies.values()]
    for start in range(0, len(requests), 40):
        left = requests[start : start + 40]
        async with asyncio.timeout(60):
            while left:  # a real disk may be slow, and adds are then rejected
                statuses = await kit.add(storage, *left)
                assert set(statuses) <= {OK, Status.TOO_MANY_REQUESTS}
                left = [one for one, status in zip(left, statuses, strict=True) if status != OK]
                if left:
                    await storage.flush()
    return bodies


async def check(kit: Any, storage: LedgerStorage, bodies: dict[Any, bytes]) -> None:
    assert await kit.read(storage, *bodies) == list(bodies.values())


async def scrub(storage: LedgerStorage) -> int:
    """Scrub everything; return the number of verified entries."""
    storage.scrubber.request()
    async with asyncio.timeout(30):
        while not storage.scrubber.state().rounds:
            await asyncio.sleep(0.002)
    assert list(storage.scrubber.regions()) == []
    return storage.scrubber.state().entries


async def test_entries_are_readable_from_caches_and_disk_and_after_restarts(kit: Any, place: Place, form: str) -> None:
    storage = await place.open(form)
    bodies = await add_mixed(kit, storage, range(5), 60)
    await check(kit, storage, bodies)
    await storage.flush()
    await check(kit, storage, bodies)
    bodies |= await add_mixed(kit, storage, range(2, 7), 10, first=60)
    await check(kit, storage, bodies)
    assert await kit.read(storage, (0, -1), (3, -1), (6, -1)) == [bodies[0, 59], bodies[3, 69], bodies[6, 69]]
    assert await kit.read(storage, (0, 60), (6, 59), (9, 0)) == [Status.NO_ENTRY, Status.NO_ENTRY, Status.NO_LEDGER]
    await storage.close()
    storage = await place.open(form)
    assert storage.stats.replay_entries == 0
    await check(kit, storage, bodies)
    assert [list(await storage.entry_ids(ledger_id)) for ledger_id in (0, 3, 6)] == [[(0, 60)], [(0, 70)], [(60, 10)]]
    assert list(await storage.list_ledger_ids()) == list(range(7))
    await storage.close()


async def test_a_crash_is_replayed_and_a_lost_index_rebuilt(kit: Any, place: Place, form: str) -> None:
    storage = await place.open(form)
    bodies = await add_mixed(kit, storage, range(4), 40)
    await storage.flush()
    bodies |= await add_mixed(kit, storage, range(4), 5, first=35)
    await storage.fence(2, kit.KEY)
    await storage.write_lac(3, kit.KEY, 50, kit.lac_packet(3, 50))
    await place.crash(storage)
    storage = await place.open(form)
    assert storage.stats.replay_entries >= 20
    await check(kit, storage, bodies)
    await storage.close()
    place.lose_index()
    storage = await place.open(form)
    await check(kit, storage, bodies)
    assert await kit.add(storage, kit.add_request(kit.entry(2, 90))) == [Status.FENCED]
    assert storage.last_add_confirmed(3) == 50
    assert (await storage.read_lac(3)).explicit_packet == kit.lac_packet(3, 50)
    await storage.close()


async def test_the_last_of_several_adds_is_kept(kit: Any, place: Place, form: str) -> None:
    storage = await place.open(form)
    versions = [kit.entry(5, 7, payload) for payload in (b"1", b"22" * 30, b"333")]
    same = kit.add_request(versions[0])
    assert await kit.add(storage, same, same, kit.add_request(versions[1])) == [OK, OK, OK]
    assert await kit.read(storage, (5, 7)) == [versions[1]]
    await storage.flush()
    assert await kit.read(storage, (5, 7)) == [versions[1]]
    assert await kit.add(storage, kit.add_request(versions[2]), kit.add_request(kit.entry(5, 3))) == [OK, OK]
    await storage.flush()
    await storage.close()
    for loses in (False, True):
        if loses:
            place.lose_index()
        storage = await place.open(form)
        assert await kit.read(storage, (5, 7), (5, 3), (5, 5)) == [versions[2], kit.entry(5, 3), Status.NO_ENTRY]
        assert list(await storage.entry_ids(5)) == [(3, 1), (7, 1)]
        await storage.close()


async def test_fences_persist_and_the_lac_never_decreases(kit: Any, place: Place, form: str) -> None:
    storage = await place.open(form)
    await add_mixed(kit, storage, range(5, 6), 10)
    await storage.fence(5, kit.KEY)
    for _ in range(2):
        ordinary, recovery = kit.add_request(kit.entry(5, 10)), kit.add_request(kit.entry(5, 10), recovery=True)
        assert await kit.add(storage, ordinary, recovery) == [Status.FENCED, OK]
        await storage.force(5)
        assert storage.last_add_confirmed(5) == 8
        with pytest.raises(NoSuchLedger):
            storage.last_add_confirmed(6)
        await storage.close()
        storage = await place.open(form)
    await storage.close()


async def test_refused_adds_change_nothing(kit: Any, storage: LedgerStorage) -> None:
    bodies = await add_mixed(kit, storage, range(2), 5)
    other = kit.add_request(kit.entry(1, 1, b"other key"), key=b"other")
    negative = kit.add_request(kit.entry(1, -5))
    assert await kit.add(storage, other, negative) == [Status.UNAUTHORIZED, Status.BAD_REQUEST]
    await storage.fence(1, kit.KEY)
    assert await kit.add(storage, kit.add_request(kit.entry(1, 1, b"late"))) == [Status.FENCED]
    await storage.flush()
    await check(kit, storage, bodies)
    assert storage.stats.flush_entries == len(bodies)


async def test_a_deleted_ledger_is_removed_and_can_be_created_again(kit: Any, place: Place, form: str) -> None:
    storage = await place.open(form)
    bodies = await add_mixed(kit, storage, range(3), 30)
    await storage.flush()
    await add_mixed(kit, storage, range(1, 2), 5, first=30)
    await storage.delete_ledger(1)
    assert await kit.read(storage, (1, 0), (1, 31)) == [Status.NO_LEDGER] * 2
    new = kit.entry(1, 2, b"new")
    assert await kit.add(storage, kit.add_request(new)) == [OK]
    kept = {key: body for key, body in bodies.items() if key[0] != 1} | {(1, 2): new}
    await storage.flush()
    for loses in (False, True):
        await check(kit, storage, kept)
        assert await kit.read(storage, (1, 0), (1, 31)) == [Status.NO_ENTRY] * 2
        await storage.close()
        if not loses:
            place.lose_index()
        storage = await place.open(form)
    await check(kit, storage, kept)
    await storage.close()


async def test_a_ledger_deleted_during_its_flush_stays_deleted(kit: Any, storage: LedgerStorage) -> None:
    bodies = await add_mixed(kit, storage, range(3), 30)
    flush = asyncio.ensure_future(storage.flush())
    await asyncio.sleep(0)
    await storage.delete_ledger(1)
    await flush
    await storage.flush()
    assert await kit.read(storage, (1, 0)) == [Status.NO_LEDGER]
    await check(kit, storage, {key: body for key, body in bodies.items() if key[0] != 1})


async def test_a_full_disk_delays_adds_and_loses_nothing(kit: Any, place: Place, form: str) -> None:
    storage = await place.open(form)
    bodies = await add_mixed(kit, storage, range(3), 20)
    place.drills.set_rules(["write_at *.log fail ENOSPC after 1 times 1", "datasync *.log fail EIO times 2"])
    for _ in range(10):
        try:
            await storage.flush()
        except OSError:
            await check(kit, storage, bodies)
        else:
            break
    assert storage.stats.flushes > 0
    assert any(state.acted for state in place.drills.states())
    place.drills.clear()
    bodies |= await add_mixed(kit, storage, range(3), 20, first=15)
    await storage.flush()
    await check(kit, storage, bodies)
    await storage.close()
    storage = await place.open(form)
    await check(kit, storage, bodies)
    assert await scrub(storage) == len(bodies)
    await storage.close()


async def test_full_logs_are_closed_and_all_are_readable(kit: Any, place: Place, form: str) -> None:
    storage = await place.open(form)
    bodies = {}
    for round_number in range(6):
        bodies |= await add_mixed(kit, storage, range(4), 60, first=60 * round_number)
        await storage.flush()
    await storage.close()
    logs = EntryLogScanner(place.disk, place.current)
    assert len(logs.log_ids()) >= 2
    found = [item for log_id in logs.log_ids() for item in logs.scan(log_id)]
    assert {
        (item.ledger_id, item.entry_id) for item in found if isinstance(item, LogRecord) and item.entry_id >= 0
    } == set(bodies)
    storage = await place.open(form)
    await check(kit, storage, bodies)
    await storage.close()


async def test_damage_is_answered_with_an_error_and_reported(kit: Any, place: Place, form: str) -> None:
    storage = await place.open(form)
    bodies = await add_mixed(kit, storage, range(3), 30)
    await storage.close()
    (record,) = [
        item
        for item in EntryLogScanner(place.disk, place.current).scan(1)
        if isinstance(item, LogRecord) and (item.ledger_id, item.entry_id) == (1, 17)
    ]
    path = f"{place.current}/{fmt.file_name(1)}"
    place.flip(path, record.offset + 30)
    storage = await place.open(form)
    expected = [Status.IO_ERROR if key == (1, 17) else body for key, body in bodies.items()]
    assert await kit.read(storage, *bodies) == expected
    (damage,) = storage.damage.items()
    assert (damage.path, damage.offset, damage.ledger_id, damage.entry_id) == (path, record.offset, 1, 17)
    assert await kit.add(storage, kit.add_request(bodies[1, 17], recovery=True)) == [OK]
    await storage.flush()
    await check(kit, storage, bodies)
    await storage.close()
    storage = await place.open(form)
    await check(kit, storage, bodies)
    await storage.close()


async def test_in_limbo_no_entry_is_reported_as_absent(kit: Any, place: Place, form: str) -> None:
    place.disk.make_directories(place.current)
    limbo.write_marker(place.disk, place.current, "a test took its disk away", 1)
    storage = await place.open(form)
    assert isinstance(storage, StorageEngine)
    await storage.repair.enter_limbo_ledgers([LimboLedger(5, kit.KEY)])
    await storage.repair.finish_listing()
    body = kit.entry(5, 3, b"refilled")
    assert await kit.add(storage, kit.add_request(kit.entry(5, 4)), kit.add_request(body, recovery=True)) == [
        Status.FENCED,
        OK,
    ]
    await storage.flush()
    assert list(await storage.repair.limbo_ledger_ids()) == [5]
    assert list(await storage.repair.entries_here(5)) == [(3, 1)]
    unknown = Status.UNKNOWN_LEDGER_STATE
    assert await kit.read(storage, (5, 3), (5, 0), (5, -1)) == [body, unknown, unknown]
    with pytest.raises(LedgerStateUnknown):
        storage.last_add_confirmed(5)
    with pytest.raises(LedgerStateUnknown):
        await storage.read_lac(5)
    await storage.close()
    storage = await place.open(form)
    assert await kit.read(storage, (5, 3), (5, 0)) == [body, unknown]
    storage.repair.leave_limbo(5)
    await storage.flush()
    assert await kit.read(storage, (5, 3), (5, 0), (5, -1)) == [body, Status.NO_ENTRY, body]
    await storage.close()


async def test_each_form_opens_a_directory_of_the_other_form(kit: Any, place: Place, form: str) -> None:
    other = next(one for one in FORMS if one != form)
    bodies: dict[Any, bytes] = {}
    for life, kind in enumerate((form, other, form)):
        storage = await place.open(kind)
        await check(kit, storage, bodies)
        bodies |= await add_mixed(kit, storage, range(4), 30, first=20 * life)
        if life == 1:
            await place.crash(storage)
        else:
            await storage.close()
    place.lose_index()
    storage = await place.open(other)
    await check(kit, storage, bodies)
    await storage.close()


@pytest.mark.parametrize("crashes", [False, True])
async def test_entries_are_written_in_the_order_of_the_form(kit: Any, place: Place, form: str, crashes: bool) -> None:
    storage = await place.open(form)
    bodies = await add_mixed(kit, storage, range(3), 20)
    again = bytes(bytearray(bodies.pop((2, 0))))
    assert await kit.add(storage, kit.add_request(again)) == [OK]
    bodies[2, 0] = again
    if crashes:
        await place.crash(storage)
        storage = await place.open(form)
        assert storage.stats.replay_entries == 61
    else:
        await storage.delete_ledger(0)
    await storage.close()
    found = [
        (item.ledger_id, item.entry_id)
        for item in EntryLogScanner(place.disk, place.current).scan(1)
        if isinstance(item, LogRecord) and item.entry_id >= 0
    ]
    sent = [key for key in bodies if crashes or key[0] != 0]
    assert found == (sorted(sent) if form == "sorted" else sent)


async def test_a_second_attempt_replaces_the_rows_of_the_first(kit: Any, tmp_path: Path, form: str) -> None:
    """The index applied the batch and then failed; the second attempt writes to other locations, in other runs."""
    place = CrashablePlace(kit, tmp_path)
    storage = await place.open(form)
    bodies = await add_mixed(kit, storage, range(2), 15)
    assert storage.stats.flushes == 0
    kv = place.world.kv
    really_write = kv.write_batch

    def write_and_fail(*args: Any, **options: Any) -> None:
        kv.write_batch = really_write
        really_write(*args, **options)
        raise OSError(5, "Input/output error")

    kv.write_batch = write_and_fail
    with pytest.raises(OSError, match="flush failed"):
        await storage.flush()
    await storage.delete_ledger(1)
    await storage.flush()
    kept = {key: body for key, body in bodies.items() if key[0] == 0}
    await check(kit, storage, kept)
    assert await scrub(storage) == len(kept), "overlapping rows would be verified and reported too"
    await storage.close()
    storage = await place.open(form)
    await check(kit, storage, kept)
    await storage.close()


async def test_a_flush_writes_in_chunks(kit: Any, form: str) -> None:
    """One large write would keep a large part of the cache in memory twice, and delay the journal's sync."""
    sizes: list[int] = []

    class Counted(WrappedDisk):
        def create(self, path: str, *, allocate: int = 0) -> Any:
            file = super().create(path, allocate=allocate)
            if path.endswith(".log"):
                really_write = file.write_at
                file = SimpleNamespace(
                    write_at=lambda data, offset: (sizes.append(len(data)), really_write(data, offset)),
                    datasync=file.datasync,
                    sync=file.sync,
                    close=file.close,
                )
            return file

    chunk_size = 4 * 1024
    world = kit.World(
        wrap=lambda disk: Counted(disk, lambda operation, path: None),
        write_cache_size_max=2**20,
        flush_chunk_size=chunk_size,
        ledger_storage=form,
    )
    storage = await world.opened()
    await add_mixed(kit, storage, range(4), 500)
    await storage.flush()
    assert sum(sizes) > 10 * chunk_size
    assert max(sizes) < 2 * chunk_size + 200
    await storage.close()


@pytest.mark.parametrize("seed", range(6))
async def test_both_forms_give_the_same_results(kit: Any, tmp_path: Path, seed: int) -> None:
    answers = []
    for form in FORMS:
        lots = random.Random(seed)
        place = CrashablePlace(kit, tmp_path)
        storage = await place.open(form)
        heard: list[Any] = []
        for serial in range(150):
            kind = lots.random()
            ledger_id, first = lots.randrange(3), lots.randrange(100)
            if kind < 0.6:
                bodies = [
                    kit.entry(lots.randrange(3), first + at, b"%d" % serial * lots.randrange(40))
                    for at in range(lots.randint(1, 30))
                ]
                recovery = lots.random() < 0.5
                heard.append(await kit.add(storage, *(kit.add_request(body, recovery=recovery) for body in bodies)))
            elif kind < 0.7:
                await storage.flush()
            elif kind < 0.75:
                await storage.delete_ledger(ledger_id)
                await storage.flush()
            elif kind < 0.8:
                try:
                    await storage.fence(ledger_id, kit.KEY)
                except NoSuchLedger:
                    heard.append("tombstone")
            elif kind < 0.85:
                await storage.close()
                if lots.random() < 0.5:
                    place.lose_index()
                storage = await place.open(form)
            else:
                heard.append(await kit.read(storage, *((ledger_id, e) for e in range(first, first + 30))))
        for ledger_id in range(3):
            heard.append(await kit.read(storage, *((ledger_id, e) for e in range(-1, 130))))
        await storage.close()
        answers.append(heard)
    assert answers[0] == answers[1]


async def test_an_entry_missing_from_the_order_of_arrival_is_flushed(kit: Any, tmp_path: Path) -> None:
    place = CrashablePlace(kit, tmp_path)
    storage = await place.open("interleaved")
    bodies = await add_mixed(kit, storage, range(3), 10)
    assert isinstance(storage, StorageEngine)
    cache = storage.parts.caches.active
    assert isinstance(cache, InterleavedCache)
    del cache.order[5:20]
    await storage.close()
    storage = await place.open("interleaved")
    assert storage.stats.replay_entries == 0
    await check(kit, storage, bodies)
    await storage.close()
