"""Opening of a shard: every part is connected, and after a failure the index is closed and all workers have ended."""

import asyncio
import errno
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
from bindery_bookie.storage.corruption.damage import DamageRegister
from bindery_bookie.storage.corruption.limbo import LimboPhase, LimboState, set_phase, write_marker
from bindery_bookie.storage.engine.interleaved import InterleavedAdds, InterleavedCache
from bindery_bookie.storage.engine.open_storage import (
    StorageEnvironment,
    StorageParts,
    StorageWorkers,
    open_storage,
    synced,
)
from bindery_bookie.storage.io.errors import DamagedIndex, JournalFailed
from bindery_bookie.storage.io.fault_injection import FaultyDisk
from bindery_bookie.storage.io.reserve import Reserve, reserves_of
from bindery_bookie.storage.io.worker import Done
from bindery_bookie.storage.journal.journal import Journal
from bindery_bookie.storage.journal.journal_format import JournalPosition
from bindery_bookie.storage.scrub.scrub_state import ScrubRecord, write_scrub_record
from bindery_bookie.storage.stats import StorageStats
from bindery_bookie.storage.store import ReplayProgress
from bindery_core.errors import DamagedStorage
from bindery_core.wire.messages import AddRequest, Status
from bindery_simulation.disk import CrashableDisk, CrashableKV
from bindery_simulation.instant import BEGINNING_S
from direct_worker import DirectWorker

JOURNAL, CURRENT = "/journal/current", "/ledgers/current"
NAMES = ["journal", "flush", "read", "compaction"]


class NamedWorker(DirectWorker):
    """A worker that records its end. A held worker runs its jobs when a test says so."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name
        self.closed = 0
        self.is_held = False
        self._held: list[tuple[Callable[[], Any], Done]] = []

    def submit(self, job: Callable[[], Any], done: Done) -> None:
        if self.is_held:
            self._held.append((job, done))
        else:
            super().submit(job, done)

    def release(self) -> None:
        self.is_held = False
        held, self._held = self._held, []
        for job, done in held:
            super().submit(job, done)

    def close(self) -> None:
        assert not self._held
        self.closed += 1


class ClosingKV(CrashableKV):
    """An index store that counts how often it is closed, and can be damaged."""

    closed = 0
    is_damaged = False

    def get(self, key: bytes) -> bytes | None:
        if self.is_damaged:
            raise DamagedIndex("a block is damaged")
        return super().get(key)

    def close(self) -> None:
        self.closed += 1


class Shard:
    """The disk of a shard over several starts."""

    def __init__(self, kit: Any, **settings: Any) -> None:
        self.kit = kit
        self.disk = CrashableDisk()
        self.faults: Callable[[str, str], OSError | None] = lambda operation, path: None
        self.kv = ClosingKV(self.disk)
        self.settings = kit.small_settings(**settings)
        self.damage = DamageRegister()
        self.workers: list[NamedWorker] = []
        self.is_held = False
        """Whether the flush worker of the next start holds its jobs."""
        self.reports: list[str] = []
        self.now = 100.0
        self.has_clock = True
        self.stats = StorageStats()
        self.no_space: list[str] = []

    def environment(self) -> StorageEnvironment:
        disk = FaultyDisk(self.disk, lambda operation, path: self.faults(operation, path))
        self.workers, self.stats = [], StorageStats(no_space=self.no_space.append)
        ledger_reserve, start_reserve = reserves_of(disk, CURRENT, size=self.settings.reserve_size)
        return StorageEnvironment(
            settings=self.settings,
            stats=self.stats,
            damage=self.damage,
            disk=disk,
            open_kv=lambda path: self.kv,
            destroy_kv=lambda path: self.kv.clear(),
            start_worker=self._start_worker,
            wall_clock_ms=lambda: 7_000,
            clock=(lambda: self.now) if self.has_clock else None,
            journal_reserve=Reserve(disk, JOURNAL, size=self.settings.reserve_size),
            ledger_reserve=ledger_reserve,
            start_reserve=start_reserve,
        )

    def _start_worker(self, name: str) -> NamedWorker:
        worker = NamedWorker(name)
        worker.is_held = self.is_held and name == "flush"
        self.workers.append(worker)
        return worker

    async def open(
        self,
        environment: StorageEnvironment | None = None,
        *,
        on_progress: Callable[[ReplayProgress], None] | None = None,
    ) -> StorageParts:
        return await open_storage(
            environment or self.environment(), index_damaged=self.reports.append, on_progress=on_progress
        )

    async def crashed_with(self, count: int, *, size: int = 100) -> list[bytes]:
        """Add entries of ledger 5, each in a journal group of its own, and abandon the storage. Return the bodies."""
        parts = await self.open()
        bodies = [self.kit.entry(5, entry_id, bytes([entry_id]) * size) for entry_id in range(count)]
        for body in bodies:
            assert await add(parts, self.kit.add_request(body)) == [Status.OK]
        await parts.workers.stop()
        return bodies

    def fill(self, prefix: str) -> None:
        """Let the files below `prefix` get no more space."""

        def full(operation: str, path: str) -> OSError | None:
            is_refused = operation in ("create", "write_at") and path.startswith(prefix)
            return OSError(errno.ENOSPC, "No space left on device", path) if is_refused else None

        self.faults = full

    def names(self, directory: str) -> list[str]:
        return [name for name in self.disk.list_names(directory) if name != "LastLogMark"]


async def add(parts: StorageParts, *requests: AddRequest) -> list[int]:
    answered: asyncio.Future[Sequence[int]] = asyncio.get_running_loop().create_future()
    parts.adds.add_many(requests, answered.set_result)
    return list(await answered)


async def read(parts: StorageParts, *keys: tuple[int, int]) -> list[bytes | int]:
    answered: asyncio.Future[Sequence[bytes | int]] = asyncio.get_running_loop().create_future()
    parts.reads.read_many(keys, answered.set_result)
    return list(await answered)


async def stop(parts: StorageParts) -> None:
    """Stop the background tasks and the workers."""
    await parts.scrubber.stop()
    await parts.compactor.stop()
    await parts.flush_loop.stop()
    parts.journal.stop()
    await parts.workers.stop()


@pytest.fixture
def shard(kit: Any) -> Shard:
    return Shard(kit)


# --- environment and workers ------------------------------------------------------------------------------------------


def test_room_is_made_by_the_reserve_of_the_ledgers_and_then_by_that_of_the_start(kit: Any) -> None:
    shard = Shard(kit, reserve_size=4000)
    environment = shard.environment()
    assert (environment.journal_directory, environment.directory) == (JOURNAL, CURRENT)
    assert environment.ledger_reserve.restore()
    assert environment.start_reserve.restore()
    assert environment.make_room()
    assert shard.disk.paths() == [f"{CURRENT}/reserve.start"]
    assert environment.make_room()
    assert shard.disk.paths() == []
    assert not environment.make_room()


async def test_workers_are_started_by_name_and_stopped_once(shard: Shard) -> None:
    workers = StorageWorkers(shard.environment().start_worker)
    extra = workers.start("scrub")
    assert [worker.name for worker in shard.workers] == [*NAMES, "scrub"]
    assert [workers.journal, workers.flush, workers.read, workers.compaction, extra] == shard.workers
    await workers.stop()
    await workers.stop()
    assert [worker.closed for worker in shard.workers] == [1] * 5


# --- waiting for the journal ------------------------------------------------------------------------------------------


class ScriptedJournal:
    """Records its calls; a test calls back."""

    def __init__(self) -> None:
        self.calls: list[tuple[Sequence[bytes], int]] = []
        self.waiting: list[Callable[[bool], None]] = []

    def append(self, parts: Sequence[bytes], size: int, done: Callable[[bool], None]) -> None:
        self.calls.append((parts, size))
        self.waiting.append(done)

    def barrier(self, done: Callable[[bool], None]) -> None:
        self.calls.append(((), 0))
        self.waiting.append(done)


@pytest.mark.parametrize(("parts", "size"), [([b"1234", b"body"], 8), ([], 0)], ids=["records", "barrier"])
async def test_a_caller_waits_until_records_are_durable(parts: list[bytes], size: int) -> None:
    journal = ScriptedJournal()
    for is_durable in (True, False):
        waiting = asyncio.ensure_future(synced(cast(Journal, journal), parts))
        await asyncio.sleep(0)
        assert not waiting.done()
        journal.waiting.pop()(is_durable)
        if is_durable:
            await waiting
        else:
            with pytest.raises(JournalFailed):
                await waiting
    assert [(list(found), length) for found, length in journal.calls] == [(parts, size)] * 2


async def test_a_cancelled_caller_does_not_disturb_the_journal() -> None:
    journal = ScriptedJournal()
    waiting = asyncio.ensure_future(synced(cast(Journal, journal)))
    await asyncio.sleep(0)
    waiting.cancel()
    await asyncio.gather(waiting, return_exceptions=True)
    journal.waiting.pop()(True)
    assert waiting.cancelled()


# --- a start ----------------------------------------------------------------------------------------------------------


async def test_a_new_shard_has_an_empty_journal_file_and_no_limbo(shard: Shard) -> None:
    parts = await shard.open()
    assert shard.names(JOURNAL) == ["2.txn"]
    assert shard.stats.journal_files_created == 1
    assert parts.journal.position == JournalPosition(2, 512, 1)
    assert parts.flusher.mark.journal == JournalPosition(2, 512, 1)
    assert parts.repair.limbo is None
    assert parts.scrub_record == ScrubRecord()
    assert parts.flush_loop.is_done
    assert shard.damage.items() == ()
    assert shard.no_space == []
    assert [worker.name for worker in shard.workers] == NAMES
    await parts.workers.stop()


async def test_background_tasks_run_after_the_start_only(shard: Shard) -> None:
    shard.has_clock = False
    write_scrub_record(shard.disk, CURRENT, ScrubRecord(rounds=3, last_end_ms=6_000))
    parts = await shard.open()
    assert (await parts.compactor.run()).left == ((0, "the bookie is not running"),)
    assert await add(parts, shard.kit.add_request(shard.kit.entry(5, 0))) == [Status.OK]
    with pytest.raises(OSError, match="closing"):
        await parts.flush_loop.flush()
    assert parts.ledgers.count is None
    assert parts.scrubber.state().rounds == 0
    parts.start()
    assert parts.ledgers.count == 1
    await parts.flush_loop.flush()
    assert (await parts.compactor.run()).left == []
    assert parts.scrubber.state().rounds == 3
    await stop(parts)


async def test_acknowledged_entries_are_replayed_and_flushed(shard: Shard) -> None:
    bodies = await shard.crashed_with(3)
    seen: list[ReplayProgress] = []

    def progress(one: ReplayProgress) -> None:
        seen.append(one)
        shard.now += 2.5

    parts = await shard.open(on_progress=progress)
    assert [one.entries for one in seen] == [1, 2, 3]
    assert shard.stats.replay_s == 7.5
    assert shard.stats.flushes == 1
    assert parts.flusher.mark.journal == parts.journal.position == JournalPosition(3, 512, 4)
    assert shard.names(JOURNAL) == ["3.txn"]
    assert await read(parts, (5, 0), (5, 1), (5, 2)) == bodies
    await parts.workers.stop()


async def test_without_a_clock_that_of_the_loop_is_used(shard: Shard) -> None:
    await shard.crashed_with(1)
    shard.has_clock = False
    assert asyncio.get_running_loop().time() == BEGINNING_S
    parts = await shard.open()
    assert shard.stats.replay_s == 0
    assert parts.compactor.state().next_run_in_s == 0
    await parts.workers.stop()


async def test_the_setting_selects_the_form(kit: Any) -> None:
    shard = Shard(kit, ledger_storage="interleaved")
    parts = await shard.open()
    assert isinstance(parts.caches.active, InterleavedCache)
    assert isinstance(parts.adds, InterleavedAdds)
    parts.start()
    sent = [kit.entry(ledger_id, 0) for ledger_id in (7, 5)]
    await add(parts, *map(kit.add_request, sent))
    await parts.flush_loop.flush()
    data = shard.disk.contents(f"{CURRENT}/1.log")
    assert 0 < data.index(sent[0]) < data.index(sent[1])
    await stop(parts)


@pytest.mark.parametrize("last", [2, 3, 8])
async def test_the_new_journal_file_follows_all_existing_ones(shard: Shard, last: int) -> None:
    await shard.crashed_with(1)
    for journal_id in range(3, last + 1):
        shard.disk.create(f"{JOURNAL}/{journal_id}.txn")  # the crash was during its creation
    parts = await shard.open()
    assert shard.names(JOURNAL) == [f"{last + 1}.txn"]
    assert parts.journal.position.journal_id == last + 1
    await parts.workers.stop()


async def test_known_damage_is_reported(shard: Shard) -> None:
    await shard.crashed_with(3)
    parts = await shard.open()
    await parts.workers.stop()
    shard.disk.remove(f"{CURRENT}/1.log")
    parts = await shard.open()
    (damage,) = shard.damage.items()
    assert damage.path == f"{CURRENT}/1.log"
    await parts.workers.stop()


async def test_damage_of_the_index_found_later_is_reported_with_its_reason(shard: Shard) -> None:
    parts = await shard.open()
    shard.kv.is_damaged = True
    with pytest.raises(DamagedIndex):
        parts.index.generation()
    assert len(shard.reports) == 1
    assert "a block is damaged" in shard.reports[0]
    await parts.workers.stop()


# --- limbo ------------------------------------------------------------------------------------------------------------


async def test_a_marked_shard_is_in_limbo(shard: Shard) -> None:
    write_marker(shard.disk, CURRENT, "a test", 5)
    parts = await shard.open()
    assert parts.repair.limbo == LimboState("a test", 5, LimboPhase.LISTING)
    assert await read(parts, (5, 0)) == [Status.UNKNOWN_LEDGER_STATE], "reads know the limbo"
    await parts.repair.finish_listing()
    await parts.repair.end_limbo()
    assert await read(parts, (5, 0)) == [Status.NO_LEDGER]
    await parts.workers.stop()


@pytest.mark.parametrize("phase", [None, LimboPhase.REPAIRING, LimboPhase.LISTING])
async def test_a_damaged_journal_is_skipped_in_phase_listing_only(shard: Shard, phase: LimboPhase | None) -> None:
    bodies = await shard.crashed_with(3)
    path = f"{JOURNAL}/2.txn"
    shard.disk.corrupt(path, shard.disk.contents(path).index(bodies[1]) + 40)
    if phase is not None:
        write_marker(shard.disk, CURRENT, "a test", 5)
        set_phase(shard.disk, CURRENT, phase)
    if phase is LimboPhase.LISTING:
        parts = await shard.open()
        assert shard.stats.replay_entries == 2
        assert await read(parts, (5, 0), (5, 1), (5, 2)) == [bodies[0], Status.UNKNOWN_LEDGER_STATE, bodies[2]]
        await parts.workers.stop()
    else:
        with pytest.raises(DamagedStorage):
            await shard.open()


@pytest.mark.parametrize("on_lost_storage", ["repair", "refuse"])
async def test_the_setting_decides_whether_a_shard_that_lost_its_journal_starts(kit: Any, on_lost_storage: str) -> None:
    shard = Shard(kit, on_lost_storage=on_lost_storage)
    await shard.crashed_with(1)
    for name in shard.names(JOURNAL):
        shard.disk.remove(f"{JOURNAL}/{name}")
    if on_lost_storage == "refuse":
        with pytest.raises(DamagedStorage, match="refuse"):
            await shard.open()
    else:
        parts = await shard.open()
        assert parts.repair.limbo is not None
        assert (parts.repair.limbo.since_ms, parts.repair.limbo.is_listing) == (7_000, True)
        await parts.workers.stop()


# --- full disks -------------------------------------------------------------------------------------------------------


async def test_without_space_for_a_journal_file_the_start_succeeds(shard: Shard) -> None:
    bodies = await shard.crashed_with(2)
    shard.fill(JOURNAL)
    parts = await shard.open()
    await asyncio.sleep(0)
    assert len(shard.no_space) == 1
    assert "no room for a journal file" in shard.no_space[0]
    assert shard.stats.journal_files_created == 0
    assert shard.names(JOURNAL) == ["2.txn"]
    assert await read(parts, (5, 0), (5, 1)) == bodies
    assert parts.flusher.mark.journal == JournalPosition(2, 512 + 2 * 512, 3)
    shard.faults = lambda operation, path: None
    assert await add(parts, shard.kit.add_request(shard.kit.entry(5, 2))) == [Status.OK]
    assert parts.journal.position.journal_id == 3
    assert shard.names(JOURNAL) == ["2.txn", "3.txn", "3.txn.needed"], "nothing else names the file"
    await parts.workers.stop()


async def test_without_space_for_a_flush_the_entries_stay_in_memory_and_the_journal_is_needed(shard: Shard) -> None:
    bodies = await shard.crashed_with(2)
    shard.fill(CURRENT)
    parts = await shard.open()
    assert shard.no_space
    assert not parts.flush_loop.is_done
    assert parts.flusher.mark.journal.journal_id == 2
    assert parts.journal.position.journal_id == 3
    assert await read(parts, (5, 0), (5, 1)) == bodies
    assert shard.names(JOURNAL) == ["2.txn", "3.txn"]
    assert await add(parts, shard.kit.add_request(shard.kit.entry(5, 2))) == [Status.OK]
    assert shard.names(JOURNAL) == ["2.txn", "3.txn", "3.txn.needed"]
    shard.faults = lambda operation, path: None
    parts.start()
    await parts.flush_loop.flush()
    assert parts.flusher.mark.journal.journal_id == 3
    assert shard.names(JOURNAL) == ["3.txn"]
    await stop(parts)


async def test_a_journal_that_the_mark_names_needs_no_other_file(shard: Shard) -> None:
    await shard.crashed_with(1)
    parts = await shard.open()
    await add(parts, shard.kit.add_request(shard.kit.entry(5, 2)))
    assert shard.names(JOURNAL) == ["3.txn"]
    await parts.workers.stop()


async def test_a_lost_needed_journal_is_not_replaced_by_a_file_of_its_id(shard: Shard) -> None:
    await shard.crashed_with(1)
    shard.disk.create(f"{JOURNAL}/6.txn.needed")
    write_marker(shard.disk, CURRENT, "a test", 5)
    parts = await shard.open()
    assert parts.journal.position.journal_id == 7
    await parts.workers.stop()


async def test_a_start_releases_reserves_to_open_its_files(kit: Any) -> None:
    shard = Shard(kit, reserve_size=4000)
    environment = shard.environment()
    assert environment.ledger_reserve.restore()
    assert environment.start_reserve.restore()
    released: list[str] = []

    def full(operation: str, path: str) -> OSError | None:
        if operation == "create" and path.endswith("LastLogMark.new") and "reserve.start" in shard.names(CURRENT):
            released.append(",".join(shard.names(CURRENT)))
            return OSError(errno.ENOSPC, "No space left on device", path)
        return None

    shard.faults = full
    parts = await shard.open(environment)
    assert released == ["reserve,reserve.start", "reserve.start"]
    await parts.workers.stop()


# --- connections between the parts ------------------------------------------------------------------------------------


async def test_a_flush_removes_overwritten_entries_from_the_read_cache(shard: Shard) -> None:
    parts = await shard.open()
    parts.start()
    old, new = shard.kit.entry(5, 0, b"old"), shard.kit.entry(5, 0, b"new")
    await add(parts, shard.kit.add_request(old))
    await parts.flush_loop.flush()
    assert await read(parts, (5, 0)) == [old]
    assert parts.reads.cache.get(5, 0) == old
    await add(parts, shard.kit.add_request(new))
    await parts.flush_loop.flush()
    assert parts.reads.cache.get(5, 0) is None
    assert await read(parts, (5, 0)) == [new]
    await stop(parts)


async def test_waiting_adds_are_accepted_after_a_flush(shard: Shard) -> None:
    parts = await shard.open()
    requests = [shard.kit.add_request(shard.kit.entry(5, entry_id, bytes(17_000))) for entry_id in range(3)]
    adds = [asyncio.ensure_future(add(parts, request)) for request in requests]
    await asyncio.sleep(0.01)
    assert [one.done() for one in adds] == [True, True, False]
    parts.start()
    assert await asyncio.gather(*adds) == [[Status.OK]] * 3
    assert shard.stats.adds_waited == 1
    assert asyncio.get_running_loop().time() < BEGINNING_S + 1
    await stop(parts)


async def test_compaction_flushes_deletions_before_it_removes_logs(shard: Shard) -> None:
    parts = await shard.open()
    parts.start()
    await add(parts, shard.kit.add_request(shard.kit.entry(5, 0)))
    await parts.flush_loop.flush()
    assert shard.names(CURRENT) == ["1.log", "entry-logs"]
    flushes = shard.stats.flushes
    await parts.compactor.run()
    assert shard.stats.flushes == flushes, "without deletions no flush is needed"
    parts.ledgers.delete(5)
    result = await parts.compactor.run(force=True)
    assert result.removed[0] == 1
    assert "1.log" not in shard.names(CURRENT)
    assert parts.index.ledger_row(5) is None
    await stop(parts)


async def test_compaction_does_not_use_the_reserve_of_the_start(kit: Any) -> None:
    shard = Shard(kit, reserve_size=4000)
    environment = shard.environment()
    parts = await shard.open(environment)
    assert environment.ledger_reserve.restore()
    assert environment.start_reserve.restore()
    make_room = parts.compactor._parts.make_room
    assert [make_room(), make_room()] == [True, False]
    assert "reserve.start" in shard.names(CURRENT)
    await parts.workers.stop()


async def test_the_scrub_has_a_worker_of_its_own_that_ends_with_the_others(shard: Shard) -> None:
    parts = await shard.open()
    parts.start()
    shard.now += 10**6
    parts.scrubber.request()
    for _ in range(100):
        await asyncio.sleep(0.1)
        shard.now += 10**6
        if parts.scrubber.state().rounds:
            break
    assert parts.scrubber.state().rounds == 1
    await stop(parts)
    assert "scrub" in [worker.name for worker in shard.workers]
    assert all(worker.closed for worker in shard.workers)


# --- failed and cancelled starts --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("operation", "path"),
    [("list_names", JOURNAL), ("open_read", f"{CURRENT}/LastLogMark"), ("create", f"{JOURNAL}/3.txn")],
)
async def test_after_a_failure_the_index_is_closed_and_all_workers_have_ended(
    shard: Shard, operation: str, path: str
) -> None:
    bodies = await shard.crashed_with(1)
    shard.kv.closed = 0
    shard.faults = lambda found, at: OSError(5, "broken", at) if (found, at) == (operation, path) else None
    with pytest.raises(OSError, match="broken"):
        await shard.open()
    is_index_open = path != f"{CURRENT}/LastLogMark"
    assert shard.kv.closed == is_index_open
    assert [(worker.name, worker.closed) for worker in shard.workers] == [(name, 1) for name in NAMES]
    shard.faults = lambda found, at: None
    parts = await shard.open()
    assert await read(parts, (5, 0)) == bodies
    await parts.workers.stop()


async def test_an_index_opened_during_a_cancellation_is_closed(shard: Shard) -> None:
    await shard.crashed_with(1)
    shard.kv.closed = 0
    shard.is_held = True
    opening = asyncio.ensure_future(shard.open())
    await asyncio.sleep(0)
    opening.cancel()
    await asyncio.sleep(0.01)
    assert not opening.done(), "the start waits for its worker"
    shard.workers[1].release()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert shard.kv.closed == 1
    assert [worker.closed for worker in shard.workers] == [1] * 4


async def test_a_cancelled_start_stops_a_rebuild(shard: Shard) -> None:
    await shard.crashed_with(1)
    parts = await shard.open()
    await parts.workers.stop()
    shard.disk.create(f"{CURRENT}/rebuild-index")
    shard.is_held = True
    opening = asyncio.ensure_future(shard.open())
    await asyncio.sleep(0)
    opening.cancel()
    await asyncio.sleep(0)
    shard.workers[1].release()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert "rebuild-index" in shard.names(CURRENT)
