"""Storage repair: what limbo and the repair of damage change in a shard, and when that is durable."""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
from bindery_bookie.storage.corruption.damage import Damage, DamageRegister
from bindery_bookie.storage.corruption.limbo import (
    LimboLedger,
    LimboPhase,
    LimboState,
    read_marker,
    set_phase,
    write_marker,
)
from bindery_bookie.storage.engine.adds import Adds
from bindery_bookie.storage.engine.storage_repair import StorageRepair
from bindery_bookie.storage.flushing.flush_loop import FlushLoop
from bindery_bookie.storage.index.index import Index
from bindery_bookie.storage.index.index_format import run_rows
from bindery_bookie.storage.io.fault_injection import FaultyDisk
from bindery_bookie.storage.io.kv import MemoryKV
from bindery_bookie.storage.memory.ledgers import LedgerTable
from bindery_bookie.storage.reading.reads import Reads
from bindery_core.errors import DamagedStorage, NoSuchLedger
from bindery_core.wire.messages import AddRequest, Status
from bindery_simulation.disk import CrashableDisk
from direct_worker import DirectWorker

CURRENT = "/ledgers/current"


class Shard:
    """A shard in limbo, with scripted adds and a flush loop that writes only the rows of changed ledgers."""

    def __init__(self, kit: Any, *, phase: LimboPhase = LimboPhase.LISTING) -> None:
        self.kit = kit
        self.disk = CrashableDisk()
        self.faults: Callable[[str, str], OSError | None] = lambda operation, path: None
        write_marker(self.disk, CURRENT, "a test", 5)
        set_phase(self.disk, CURRENT, phase)
        self.index = Index(MemoryKV())
        self.ledgers = LedgerTable(self.index, ledgers_max=16, tombstones_max=16)
        self.damage = DamageRegister()
        self.worker = DirectWorker()
        self.flushes = 0
        self.timers = 0
        self.flush_errors: list[Exception] = []
        self.before_flush: Callable[[], object] = lambda: None
        self.sent: list[tuple[Sequence[AddRequest], Callable[[Sequence[int]], None]]] = []
        self.asked: list[int] = []
        self.repair = StorageRepair(
            disk=FaultyDisk(self.disk, lambda operation, path: self.faults(operation, path)),
            directory=CURRENT,
            damage=self.damage,
            limbo=LimboState("a test", 5, phase),
            index=self.index,
            ledgers=self.ledgers,
            adds=cast(Adds, self),
            reads=cast(Reads, self),
            flush_loop=cast(FlushLoop, self),
            flush_worker=self.worker,
        )

    # --- the flush loop

    async def flush(self) -> None:
        self.before_flush()
        if self.flush_errors:
            raise self.flush_errors.pop()
        self.flushes += 1
        changed, deleted = self.ledgers.take_changes()
        rows = {ledger_id: state.row(indexed_entry_id=-1) for ledger_id, state in changed.items()}
        self.index.commit(runs=[], merges={}, ledgers=rows, deleted=deleted, generation=self.flushes)
        self.ledgers.deletions_flushed()

    def start_age_timer(self) -> None:
        self.timers += 1

    # --- the add path and the read path

    def add_many(self, adds: Sequence[AddRequest], done: Callable[[Sequence[int]], None]) -> None:
        self.sent.append((adds, done))

    async def entry_ids(self, ledger_id: int) -> list[tuple[int, int]]:
        self.asked.append(ledger_id)
        return [(0, 3), (7, 1)]

    # --- limbo

    async def enter(self, *ledger_ids: int) -> None:
        await self.repair.enter_limbo_ledgers([LimboLedger(ledger_id, self.kit.KEY) for ledger_id in ledger_ids])

    def phase(self) -> LimboPhase | None:
        marker = read_marker(self.disk, CURRENT)
        return None if marker is None else marker.phase


@pytest.fixture
def shard(kit: Any) -> Shard:
    return Shard(kit)


# --- listing ----------------------------------------------------------------------------------------------------------


async def test_listed_ledgers_are_durably_in_limbo_and_fenced(shard: Shard) -> None:
    await shard.enter(7, 5)
    assert shard.flushes == 1
    for ledger_id in (5, 7):
        row = shard.index.ledger_row(ledger_id)
        assert row is not None
        assert (row.is_limbo, row.is_fenced, row.master_key) == (True, True, shard.kit.KEY)
    assert list(await shard.repair.limbo_ledger_ids()) == [5, 7]


async def test_the_end_of_the_listing_is_durable(shard: Shard) -> None:
    limbo = shard.repair.limbo
    assert limbo is not None
    phases: list[LimboPhase | None] = []
    shard.before_flush = lambda: phases.append(shard.phase())
    await shard.repair.finish_listing()
    assert phases == [LimboPhase.LISTING], "the listed ledgers are flushed first"
    assert shard.phase() is limbo.phase is LimboPhase.REPAIRING
    assert (shard.flushes, shard.worker.jobs) == (1, 1)
    shard.disk.log.clear()
    await shard.repair.finish_listing()
    assert (shard.flushes, shard.disk.log) == (1, []), "the second call has nothing to do"


async def test_the_listing_does_not_end_if_a_flush_or_the_marker_fails(shard: Shard) -> None:
    limbo = shard.repair.limbo
    assert limbo is not None
    shard.flush_errors = [OSError(5, "flush failed")]
    with pytest.raises(OSError, match="flush failed"):
        await shard.repair.finish_listing()
    assert shard.phase() is limbo.phase is LimboPhase.LISTING
    shard.faults = lambda operation, path: OSError(28, "no space") if operation == "create" else None
    with pytest.raises(OSError, match="no space"):
        await shard.repair.finish_listing()
    assert shard.phase() is limbo.phase is LimboPhase.LISTING


async def test_ledgers_are_listed_only_in_phase_listing(kit: Any) -> None:
    shard = Shard(kit, phase=LimboPhase.REPAIRING)
    with pytest.raises(AssertionError):
        await shard.enter(5)


# --- repair of ledgers in limbo ---------------------------------------------------------------------------------------


async def test_the_ledgers_in_limbo_are_read_from_the_index_once(shard: Shard) -> None:
    await shard.enter(5, 6, 7, 8)
    assert list(await shard.repair.limbo_ledger_ids()) == [5, 6, 7, 8]
    assert (shard.flushes, shard.worker.jobs) == (2, 1)
    shard.repair.leave_limbo(6)
    shard.repair.ledger_deleted(8)
    assert shard.timers == 1, "the end of a ledger's limbo is flushed"
    found = await shard.repair.limbo_ledger_ids()
    assert list(found) == [5, 7]
    assert await shard.repair.limbo_ledger_ids() is found, "a list of a million ledgers is not copied for each call"
    assert (shard.flushes, shard.worker.jobs) == (2, 1)
    assert not shard.ledgers.states[6].is_limbo
    assert shard.ledgers.states[6].is_fenced
    assert shard.ledgers.changed == {6: shard.ledgers.states[6]}


async def test_a_listing_makes_the_ledgers_be_read_again(shard: Shard) -> None:
    await shard.enter(5, 6)
    assert list(await shard.repair.limbo_ledger_ids()) == [5, 6]
    shard.repair.leave_limbo(6)
    await shard.enter(6, 9)
    assert list(await shard.repair.limbo_ledger_ids()) == [5, 6, 9], "6 is in limbo again"


async def test_the_ledgers_are_read_again_on_request(shard: Shard) -> None:
    await shard.enter(5, 6)
    await shard.repair.limbo_ledger_ids()
    shard.ledgers.enter_limbo([LimboLedger(9, shard.kit.KEY)])
    assert list(await shard.repair.limbo_ledger_ids()) == [5, 6]
    assert list(await shard.repair.limbo_ledger_ids(reread=True)) == [5, 6, 9], "after a flush"


async def test_ledgers_that_leave_while_the_index_is_read_are_not_listed(shard: Shard) -> None:
    await shard.enter(5, 6, 7)
    submit = shard.worker.submit

    def leave_before(job: Callable[[], Any], done: Any) -> None:
        shard.repair.leave_limbo(6)
        submit(job, done)

    shard.worker.submit = leave_before  # type: ignore[method-assign]
    assert list(await shard.repair.limbo_ledger_ids()) == [5, 7]


async def test_only_a_ledger_in_limbo_can_leave_it(shard: Shard) -> None:
    await shard.enter(5)
    await shard.repair.limbo_ledger_ids()
    shard.ledgers.create(6, shard.kit.KEY)
    shard.repair.leave_limbo(6)
    shard.repair.leave_limbo(99)
    assert shard.timers == 0
    assert list(await shard.repair.limbo_ledger_ids()) == [5]


async def test_the_end_of_limbo_is_durable(shard: Shard) -> None:
    await shard.enter(5)
    await shard.repair.limbo_ledger_ids()
    shard.repair.leave_limbo(5)
    phases: list[LimboPhase | None] = []
    shard.before_flush = lambda: phases.append(shard.phase())
    await shard.repair.end_limbo()
    assert phases == [LimboPhase.LISTING], "the marker is removed after the flush"
    assert shard.phase() is None
    assert shard.repair.limbo is None
    assert shard.disk.log[-2:] == [f"remove {CURRENT}/LIMBO", f"sync_directory {CURRENT}"]
    jobs = shard.worker.jobs
    assert list(await shard.repair.limbo_ledger_ids()) == []
    assert shard.worker.jobs == jobs + 1, "the list is read again"


async def test_limbo_does_not_end_if_the_marker_cannot_be_removed(shard: Shard) -> None:
    shard.faults = lambda operation, path: OSError(5, "broken") if operation == "remove" else None
    with pytest.raises(OSError, match="broken"):
        await shard.repair.end_limbo()
    assert shard.repair.limbo is not None


# --- damaged regions and their entries --------------------------------------------------------------------------------


def test_files_of_the_shard_are_recognized(shard: Shard) -> None:
    assert shard.repair.holds("/ledgers/current/5.log")
    assert not shard.repair.holds("/ledgers/current2/5.log")
    assert not shard.repair.holds("/ledgers/current")
    assert not shard.repair.holds("/other/ledgers/current/5.log")


async def test_the_entries_stored_here_are_those_of_the_read_path(shard: Shard) -> None:
    assert await shard.repair.entries_here(5) == [(0, 3), (7, 1)]
    assert shard.asked == [5]


async def test_entries_of_a_log_are_listed_in_parts_after_a_flush(shard: Shard) -> None:
    def located(entry_ids: Sequence[int], offset: int) -> list[tuple[int, int, int]]:
        return [(entry_id, 4 << 32 | offset + 100 * at, 92) for at, entry_id in enumerate(entry_ids)]

    def commit() -> None:
        rows = run_rows(5, located([0, 1, 2, 3], 40)) + run_rows(6, located([8, 9], 440))
        shard.index.commit(runs=rows, merges={}, ledgers={}, deleted=(), generation=1)

    shard.before_flush = commit
    found = shard.repair.entries_in_log
    assert await found(4, start=240, after=(-1, -1), count=3) == [(5, 2), (5, 3), (6, 8)]
    assert await found(4, start=240, after=(6, 8), count=3) == [(6, 9)]
    assert await found(4, start=0, after=(-1, -1), count=100) == [(5, 0), (5, 1), (5, 2), (5, 3), (6, 8), (6, 9)]
    assert await found(3, start=0, after=(-1, -1), count=100) == []
    assert (shard.flushes, shard.worker.jobs) == (4, 4)


async def test_fetched_entries_are_added_as_copies_with_the_stored_key(shard: Shard) -> None:
    await shard.enter(5)
    bodies = [shard.kit.entry(5, 3, b"a"), shard.kit.entry(5, 9, b"b")]
    storing = asyncio.ensure_future(shard.repair.store_recovered(5, bodies))
    await asyncio.sleep(0)
    ((adds, done),) = shard.sent
    assert list(adds) == [
        AddRequest(0, 5, 3, shard.kit.KEY, bodies[0], recovery=True),
        AddRequest(0, 5, 9, shard.kit.KEY, bodies[1], recovery=True),
    ]
    assert not storing.done()
    done([Status.OK, Status.TOO_MANY_REQUESTS])
    assert await storing == [Status.OK, Status.TOO_MANY_REQUESTS]


async def test_an_answer_after_a_cancelled_store_is_ignored(shard: Shard) -> None:
    await shard.enter(5)
    storing = asyncio.ensure_future(shard.repair.store_recovered(5, [shard.kit.entry(5, 3)]))
    await asyncio.sleep(0)
    storing.cancel()
    await asyncio.gather(storing, return_exceptions=True)
    shard.sent[0][1]([Status.OK])
    assert storing.cancelled()


async def test_entries_of_an_unknown_ledger_are_not_stored(shard: Shard) -> None:
    with pytest.raises(NoSuchLedger):
        await shard.repair.store_recovered(5, [shard.kit.entry(5, 0)])
    assert shard.sent == []


# --- damage of the index ----------------------------------------------------------------------------------------------


def test_damage_of_the_index_is_reported_once_and_requests_a_rebuild(shard: Shard) -> None:
    assert not shard.repair.is_index_damaged
    shard.repair.index_damaged("a block is damaged")
    assert shard.repair.is_index_damaged
    shard.repair.index_damaged("another block is damaged")
    assert shard.damage.items() == (Damage("/ledgers/current/index", 0, "a block is damaged; a restart rebuilds it"),)
    assert shard.disk.contents(f"{CURRENT}/rebuild-index") == b"a block is damaged\n"
    assert shard.worker.jobs == 1


def test_a_rebuild_that_cannot_be_requested_does_not_raise(shard: Shard) -> None:
    shard.faults = lambda operation, path: OSError(28, "no space") if operation == "create" else None
    shard.repair.index_damaged("a block is damaged")
    assert len(shard.damage) == 1
    assert shard.disk.paths() == [f"{CURRENT}/LIMBO"]


async def test_the_damage_of_a_row_is_raised_by_the_listing(shard: Shard) -> None:
    shard.flush_errors = [DamagedStorage("index row is damaged")]
    with pytest.raises(DamagedStorage):
        await shard.repair.limbo_ledger_ids()
    await shard.enter(5)
    assert list(await shard.repair.limbo_ledger_ids()) == [5]
