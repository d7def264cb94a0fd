"""Salvage: which problem is found in which files, and that nothing is lost when they are put aside."""

from collections.abc import Sequence
from typing import Any

import pytest
from bindery_bookie.storage.corruption.limbo import LimboMarker, read_marker
from bindery_bookie.storage.entry_log import entry_log_format
from bindery_bookie.storage.index import index_format
from bindery_bookie.storage.index.index import Index
from bindery_bookie.storage.io.errors import DamagedIndex
from bindery_bookie.storage.io.fault_injection import FaultyDisk
from bindery_bookie.storage.io.kv import KV, MemoryKV
from bindery_bookie.storage.journal import journal_format
from bindery_bookie.storage.journal.journal_format import JournalPosition
from bindery_bookie.storage.journal.mark import LastLogMark
from bindery_bookie.storage.opening import salvage as module
from bindery_bookie.storage.opening.salvage import SalvageStep, salvage
from bindery_core.errors import BadVersion, DamagedStorage
from bindery_simulation.disk import CrashableDisk
from crc32c import crc32c

LEDGERS, JOURNALS, QUARANTINE = "/s/ledgers/current", "/s/journal/current", "/s/ledgers/quarantine"
MARK = f"{LEDGERS}/LastLogMark"
GROUP_SIZE = 512


class ShardFiles:
    """The files of a stopped shard, with three groups in journal 2."""

    def __init__(self) -> None:
        self.disk = CrashableDisk()
        self.kv = MemoryKV()
        self.opened: list[str] = []

    def write(self, path: str, data: bytes) -> None:
        self.disk.create(path).write_at(data, 0)

    def mark(self, *, journal_id: int = 2, generation: int = 7) -> None:
        self.write(MARK, LastLogMark(generation, JournalPosition(journal_id, 512, 7), 0, 0).pack())

    def journal(self, journal_id: int = 2, *, groups: int = 3, sequence: int = 7, missing_size: int = 0) -> None:
        record = b"".join(journal_format.record_parts(bytes(range(1, 101))))
        packed = b"".join(
            journal_format.pack_group(record, journal_id=journal_id, sequence=sequence + number)
            for number in range(groups)
        )
        size = 512 + len(packed) + missing_size
        self.write(
            f"{JOURNALS}/{journal_id:x}.txn", journal_format.pack_file_header(journal_id, file_size=size) + packed
        )

    def open_kv(self, path: str) -> KV:
        self.opened.append(path)
        return self.kv

    def generation(self, generation: int) -> None:
        Index(self.kv).commit(runs=[], merges={}, ledgers={}, deleted=(), generation=generation)

    def salvage(self, *, apply: bool = False, **how: Any) -> Sequence[SalvageStep]:
        self.disk.log.clear()
        return salvage(
            self.disk, journal_directory=JOURNALS, ledger_directory=LEDGERS, now_ms=5_000, apply=apply, **how
        )

    def marker(self) -> LimboMarker | None:
        return read_marker(self.disk, LEDGERS)


@pytest.fixture
def files() -> ShardFiles:
    return ShardFiles()


# --- no problem -------------------------------------------------------------------------------------------------------


def test_a_new_shard_needs_no_salvage(files: ShardFiles) -> None:
    assert files.salvage(apply=True) == []
    assert (files.disk.paths(), files.disk.log) == ([], [])


def test_an_intact_shard_needs_no_salvage(files: ShardFiles) -> None:
    files.mark()
    files.journal()
    files.generation(8)
    assert files.salvage(apply=True, open_kv=files.open_kv) == []
    assert (files.marker(), files.disk.log) == (None, [])


def test_a_journal_without_groups_needs_no_mark(files: ShardFiles) -> None:
    """The first start of the shard was interrupted."""
    files.journal(1, groups=0)
    assert files.salvage() == []


def test_a_shard_that_lost_all_journals_starts_by_itself(files: ShardFiles) -> None:
    files.mark()
    assert files.salvage() == []
    files.journal(1)  # before the mark
    assert files.salvage() == []


def test_a_torn_end_of_the_journal_is_no_problem(files: ShardFiles) -> None:
    files.mark()
    files.journal(groups=1, missing_size=GROUP_SIZE)
    path = f"{JOURNALS}/2.txn"
    data = files.disk.contents(path)
    files.disk.remove(path)
    files.write(path, data + bytes(GROUP_SIZE))
    assert files.salvage() == []


# --- the mark ---------------------------------------------------------------------------------------------------------


def test_a_damaged_mark_is_moved_to_quarantine(files: ShardFiles) -> None:
    files.mark()
    files.journal()
    files.disk.corrupt(MARK, 20)
    data = files.disk.contents(MARK)
    step = SalvageStep(MARK, 0, "LastLogMark is damaged", f"{QUARANTINE}/LastLogMark", is_copy=False)
    assert files.salvage() == [step]
    assert files.disk.log == []
    assert files.salvage(apply=True) == [step]
    assert files.disk.contents(f"{QUARANTINE}/LastLogMark") == data
    assert MARK not in files.disk.paths()
    assert files.marker() == LimboMarker(f"salvage: LastLogMark is damaged ({MARK})", 5_000)


def test_the_limbo_is_durable_before_the_first_file_is_moved(files: ShardFiles) -> None:
    files.mark()
    files.disk.corrupt(MARK, 20)
    files.salvage(apply=True)
    marker = f"{LEDGERS}/LIMBO"
    assert files.disk.log == [
        f"create {marker}.new",
        f"write {marker}.new",
        f"sync {marker}.new",
        f"rename {marker}.new {marker}",
        f"sync_directory {LEDGERS}",
        f"rename {MARK} {QUARANTINE}/LastLogMark",
        f"sync_directory {QUARANTINE}",
        f"sync_directory {LEDGERS}",
    ]


def test_the_quarantine_is_created_before_a_file_is_moved(files: ShardFiles) -> None:
    files.mark()
    files.disk.corrupt(MARK, 20)
    done: list[tuple[str, str]] = []

    def note(operation: str, path: str) -> None:
        done.append((operation, path))

    disk = FaultyDisk(files.disk, note)
    salvage(disk, journal_directory=JOURNALS, ledger_directory=LEDGERS, now_ms=5_000, apply=True)
    assert done.index(("make_directories", QUARANTINE)) < done.index(("rename", MARK))


def test_a_file_in_quarantine_is_not_replaced(files: ShardFiles) -> None:
    for number in range(3):
        files.mark()
        files.disk.corrupt(MARK, 20 + number)
        (step,) = files.salvage(apply=True)
        assert step.moved_to == f"{QUARANTINE}/LastLogMark" + ("", ".1", ".2")[number]
    assert len([path for path in files.disk.paths() if path.startswith(QUARANTINE)]) == 3


def test_a_mark_of_a_newer_version_is_not_damaged(files: ShardFiles) -> None:
    fields = b"BNDM\0\0\0\2".ljust(56, b"\0")
    files.write(MARK, fields + crc32c(fields).to_bytes(4, "big"))
    with pytest.raises(BadVersion, match="LastLogMark has an unknown version"):
        files.salvage(apply=True)


def test_a_missing_mark_of_a_shard_with_entry_logs_needs_only_limbo(files: ShardFiles) -> None:
    files.write(f"{LEDGERS}/1.log", entry_log_format.pack_file_header(1))
    problem = "LastLogMark is missing, but there are entry logs or an index"
    assert files.salvage(apply=True) == [SalvageStep(MARK, 0, problem, None, is_copy=False)]
    assert files.marker() == LimboMarker(f"salvage: {problem} ({MARK})", 5_000)
    assert files.disk.paths() == [f"{LEDGERS}/1.log", f"{LEDGERS}/LIMBO"]


def test_a_missing_mark_of_a_shard_with_a_journal_needs_only_limbo(files: ShardFiles) -> None:
    files.journal()
    assert files.salvage() == [SalvageStep(MARK, 0, "LastLogMark is missing, but a journal has records")]


def test_a_missing_mark_of_a_shard_with_a_needed_journal_needs_only_limbo(files: ShardFiles) -> None:
    files.journal(1, groups=0)
    files.write(f"{JOURNALS}/1.txn.needed", b"")
    problem = "LastLogMark is missing, but a journal with records is needed"
    assert files.salvage() == [SalvageStep(MARK, 0, problem)]


async def test_a_shard_of_which_only_the_name_of_a_needed_journal_is_left_can_start(kit: Any) -> None:
    world = kit.World()
    world.disk.create("/journal/current/2.txn.needed")
    with pytest.raises(DamagedStorage, match=r"a journal with records is needed; .*bindery bookie salvage"):
        await world.opened()
    steps = salvage(
        world.disk,
        journal_directory="/journal/current",
        ledger_directory="/ledgers/current",
        now_ms=5_000,
        apply=True,
    )
    assert [step.problem for step in steps] == ["LastLogMark is missing, but a journal with records is needed"]
    engine = await world.opened()
    assert engine.limbo.is_listing
    await engine.close()


# --- the index --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("generation", "is_older"), [(0, False), (7, False), (8, False), (9, True), (20, True)])
def test_a_mark_that_is_older_than_the_index_is_moved(files: ShardFiles, generation: int, is_older: bool) -> None:
    files.mark(generation=7)
    files.journal()
    files.generation(generation)
    step = SalvageStep(MARK, 0, "LastLogMark is older than the index", f"{QUARANTINE}/LastLogMark")
    assert files.salvage(open_kv=files.open_kv) == ([step] if is_older else [])
    assert files.opened == [f"{LEDGERS}/index"]
    assert files.kv.closed


def test_without_the_index_the_age_of_the_mark_is_unknown(files: ShardFiles) -> None:
    files.mark()
    files.journal()
    files.generation(20)
    assert files.salvage() == []


def test_a_damaged_index_is_no_problem(files: ShardFiles) -> None:
    """The start rebuilds it."""
    files.mark()
    files.journal()

    def refuse(path: str) -> KV:
        raise DamagedIndex("a table is missing")

    assert files.salvage(open_kv=refuse) == []
    files.kv.write_batch([(index_format.GENERATION_KEY, b"short")])
    assert files.salvage(open_kv=files.open_kv) == []
    assert files.kv.closed


# --- journals ---------------------------------------------------------------------------------------------------------


def test_a_journal_damaged_in_the_middle_is_copied_and_kept(files: ShardFiles) -> None:
    files.mark()
    files.journal()
    path, copy = f"{JOURNALS}/2.txn", f"{QUARANTINE}/2.txn"
    files.disk.corrupt(path, 512 + GROUP_SIZE + 60)
    data = files.disk.contents(path)
    step = SalvageStep(path, 512 + GROUP_SIZE, "journal group is damaged", copy, is_copy=True)
    assert files.salvage() == [step]
    assert copy not in files.disk.paths()
    assert files.salvage(apply=True) == [step]
    assert files.disk.contents(path) == files.disk.contents(copy) == data
    assert files.disk.log[5:] == [f"create {copy}", f"write {copy}", f"sync {copy}", f"sync_directory {QUARANTINE}"]
    assert files.marker() == LimboMarker(f"salvage: journal group is damaged ({path})", 5_000)


@pytest.mark.parametrize("size", [511, 512, 1000, 2048])
def test_a_large_journal_is_copied_in_parts(files: ShardFiles, monkeypatch: pytest.MonkeyPatch, size: int) -> None:
    monkeypatch.setattr(module, "_COPY_SIZE", size)
    files.mark()
    files.journal()
    path, copy = f"{JOURNALS}/2.txn", f"{QUARANTINE}/2.txn"
    files.disk.corrupt(path, 512 + 60)
    files.salvage(apply=True)
    assert files.disk.contents(copy) == files.disk.contents(path)
    assert files.disk.log.count(f"write {copy}") == -(-2048 // size)


def test_a_short_journal_is_copied(files: ShardFiles) -> None:
    files.mark()
    files.journal(missing_size=100)
    path = f"{JOURNALS}/2.txn"
    assert files.salvage() == [
        SalvageStep(path, 512 + 3 * GROUP_SIZE, "journal is short", f"{QUARANTINE}/2.txn", is_copy=True)
    ]


def test_a_missing_journal_needs_only_limbo(files: ShardFiles) -> None:
    files.mark()
    files.journal(3, sequence=10)
    step = SalvageStep(f"{JOURNALS}/2.txn", 0, "journal is missing", None, is_copy=False)
    assert files.salvage(apply=True) == [step]
    assert files.disk.paths() == [f"{JOURNALS}/3.txn", f"{LEDGERS}/LIMBO", MARK]
    assert files.marker() == LimboMarker(f"salvage: journal is missing ({JOURNALS}/2.txn)", 5_000)


def test_salvage_in_limbo_adds_its_reason(files: ShardFiles) -> None:
    files.mark()
    files.journal(3, sequence=10)
    files.salvage(apply=True)
    files.disk.corrupt(MARK, 20)
    files.salvage(apply=True)
    marker = files.marker()
    assert marker is not None
    assert marker.reason == (
        f"salvage: journal is missing ({JOURNALS}/2.txn); salvage: LastLogMark is damaged ({MARK})"
    )
