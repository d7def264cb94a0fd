"""Flush: what reaches entry logs, index and mark, in which order, and what a repeated attempt changes."""

import asyncio
from typing import Any

import pytest
from bindery_bookie.storage import control_records as control
from bindery_bookie.storage.entry_log import entry_log_format as fmt
from bindery_bookie.storage.entry_log.log_manifest import LogEnd, read_manifest
from bindery_bookie.storage.index.index_format import LedgerRow
from bindery_bookie.storage.journal.journal_format import JournalPosition
from bindery_bookie.storage.journal.mark import LastLogMark, read_mark
from flush_scene import CHUNK_SIZE, HEADER, KEY_RECORD, SLICE_S, FlushScene, sealed

LOG = "/d/5.log"
CREATE_LOG = [f"create {LOG}", f"write {LOG}", f"sync {LOG}", "sync_directory /d"]
WRITE_MARK = [
    "create /d/LastLogMark.new",
    "write /d/LastLogMark.new",
    "sync /d/LastLogMark.new",
    "rename /d/LastLogMark.new /d/LastLogMark",
    "sync_directory /d",
]
NEXT = JournalPosition(3, 512, 9)


@pytest.fixture
def scene(kit: Any) -> FlushScene:
    return FlushScene(kit)


# --- entry log and index ----------------------------------------------------------------------------------------------


async def test_a_flush_writes_control_records_and_then_entries_by_ledger_and_id(scene: FlushScene) -> None:
    late, early = scene.add(6, 1), scene.add(6, 0)
    other = scene.add(3, 7, size=50)
    flush = scene.taken()
    await scene.flusher.store(flush)
    keys = scene.key_record(6) + scene.key_record(3)
    assert scene.log(5) == fmt.pack_file_header(5) + keys + other + early + late
    first = HEADER + 2 * KEY_RECORD
    assert scene.located(3) == {7: (5, first)}
    assert scene.located(6) == {0: (5, first + 58), 1: (5, first + 158)}
    assert scene.index.generation() == 4
    assert scene.index.ledger_row(6) == LedgerRow(scene.kit.KEY, False, -1, 1, None)
    assert scene.index.ledger_row(3) == LedgerRow(scene.kit.KEY, False, -1, 7, None)
    assert (scene.ledgers.states[6].indexed_entry_id, scene.ledgers.states[3].indexed_entry_id) == (1, 7)
    assert await scene.flusher.open_ledgers() == {6: KEY_RECORD + 200, 3: KEY_RECORD + 58}
    assert (scene.stats.flushes, scene.stats.flush_entries) == (1, 3)
    assert scene.stats.flush_bytes == 2 * KEY_RECORD + 258
    assert scene.stats.index_rows_written == 5, "two runs, two ledgers, the generation"
    assert flush.overwritten == []
    assert flush.attempts == 1


async def test_the_entry_log_is_durable_before_the_index(scene: FlushScene) -> None:
    scene.add(6, 0)
    await scene.flusher.store(scene.taken())
    assert scene.disk.log == [*CREATE_LOG, f"write {LOG}", f"datasync {LOG}", "index sync"]
    assert scene.logs.durable == (5, HEADER + KEY_RECORD + 100)


async def test_deletions_come_first_and_remove_the_rows(scene: FlushScene) -> None:
    scene.add(6, 0)
    scene.add(8, 0)
    await scene.flush()
    start = len(scene.log(5))
    scene.ledgers.delete(8)
    scene.ledgers.fence(scene.ledgers.states[6])
    scene.ledgers.states[6].set_explicit_lac(scene.kit.lac_packet(6, 4))
    await scene.flush()
    records = [
        control.pack_deleted(8),
        control.pack_fence(6),
        control.pack_explicit_lac(6, scene.kit.lac_packet(6, 4)),
    ]
    assert scene.log(5)[start:] == b"".join(map(fmt.pack_record, records))
    assert scene.index.ledger_row(8) is None
    assert scene.located(8) == {}
    assert scene.index.ledger_row(6) == LedgerRow(scene.kit.KEY, True, 4, 0, scene.kit.lac_packet(6, 4))
    assert scene.located(6) == {0: (5, HEADER + 2 * KEY_RECORD)}
    await scene.flusher.roll()
    sizes = {6: KEY_RECORD + 100 + 24 + 48, 8: KEY_RECORD + 100 + 24}
    assert scene.log(5) == sealed(scene.log(5)[: start + 96], sizes, [8])


async def test_a_ledger_without_entries_gets_its_row(scene: FlushScene) -> None:
    scene.ledgers.fence(scene.ledgers.create(9, scene.kit.KEY))
    await scene.flush()
    assert scene.index.ledger_row(9) == LedgerRow(scene.kit.KEY, True, -1, -1, None)
    assert scene.ledgers.states[9].indexed_entry_id == -1
    assert scene.stats.flush_entries == 0
    assert scene.stats.flush_bytes == KEY_RECORD + 24


async def test_entries_with_holes_are_found(scene: FlushScene) -> None:
    entry_ids = [0, 2, 3, 50, 1000, 1001]
    scene.add_many(6, entry_ids)
    await scene.flush()
    first = HEADER + KEY_RECORD
    assert scene.located(6) == {entry_id: (5, first + 100 * at) for at, entry_id in enumerate(entry_ids)}


@pytest.mark.parametrize("entry_ids", [[4, 6, 7], [4, 7], [4, 6, 13], [4, 7, 8]])
async def test_small_holes_are_found_too(scene: FlushScene, entry_ids: list[int]) -> None:
    scene.add_many(6, entry_ids)
    await scene.flush()
    first = HEADER + KEY_RECORD
    assert scene.located(6) == {entry_id: (5, first + 100 * at) for at, entry_id in enumerate(entry_ids)}


async def test_dense_entries_have_one_row_per_128(scene: FlushScene) -> None:
    scene.add_many(6, range(300), size=32)
    await scene.flush()
    assert [(run.first_entry_id, len(run.sizes)) for run in scene.index.runs(6)] == [(0, 128), (128, 128), (256, 44)]


async def test_entries_without_full_chunks_in_between_have_the_same_rows(kit: Any) -> None:
    scene = FlushScene(kit, chunk_size=2**20)
    scene.add_many(6, range(300), size=32)
    scene.add_many(7, range(0, 600, 2), size=32)
    await scene.flush()
    assert [(run.first_entry_id, len(run.sizes)) for run in scene.index.runs(6)] == [(0, 128), (128, 128), (256, 44)]
    assert [run.first_entry_id for run in scene.index.runs(7)] == [0, 128, 256, 384, 512]
    assert sorted(scene.located(7)) == list(range(0, 600, 2))


# --- entries that the index has already -------------------------------------------------------------------------------


async def test_entries_stored_again_replace_their_rows(scene: FlushScene) -> None:
    scene.add_many(6, range(5))
    await scene.flush()
    end = len(scene.log(5))
    scene.add_many(6, [2, 4, 5, 6])
    flush = await scene.flush()
    first = HEADER + KEY_RECORD
    assert scene.located(6) == {
        0: (5, first),
        1: (5, first + 100),
        2: (5, end),
        3: (5, first + 300),
        4: (5, end + 100),
        5: (5, end + 200),
        6: (5, end + 300),
    }
    assert flush.overwritten == [(6, 2), (6, 4)], "5 and 6 are above everything in the index"
    assert scene.ledgers.states[6].indexed_entry_id == 6
    scene.add(6, 1)
    flush = await scene.flush()
    assert flush.overwritten == [(6, 1)]
    assert scene.ledgers.states[6].indexed_entry_id == 6, "it never decreases"
    row = scene.index.ledger_row(6)
    assert row is not None
    assert row.last_entry_id == 6


async def test_a_repeated_attempt_replaces_what_the_first_may_have_written(scene: FlushScene) -> None:
    scene.add_many(6, range(3))
    scene.ledgers.create(9, scene.kit.KEY)
    flush = scene.taken()
    scene.kv.errors = [OSError(5, "written, but the answer was lost")]
    with pytest.raises(OSError, match="answer was lost"):
        await scene.flusher.store(flush)
    assert (flush.attempts, scene.stats.flushes) == (1, 0)
    assert scene.ledgers.states[6].indexed_entry_id == -1
    await scene.flusher.store(flush)
    assert flush.attempts == 2
    assert flush.overwritten == [(6, 0), (6, 1), (6, 2)]
    assert scene.index.generation() == 4
    assert scene.stats.flush_entries == 3
    keys = scene.key_record(6) + scene.key_record(9)
    assert scene.log(6).startswith(fmt.pack_file_header(6) + keys)
    first = HEADER + len(keys)
    assert scene.located(6) == {0: (6, first), 1: (6, first + 100), 2: (6, first + 200)}
    assert scene.ledgers.states[6].indexed_entry_id == 2
    assert await scene.flusher.open_ledgers() == {6: KEY_RECORD + 300, 9: KEY_RECORD}


async def test_each_attempt_lists_the_overwritten_entries_anew(scene: FlushScene) -> None:
    scene.add_many(6, range(2))
    flush = scene.taken()
    for expected in ([], [(6, 0), (6, 1)], [(6, 0), (6, 1)]):
        scene.kv.errors = [OSError(5, "broken")]
        with pytest.raises(OSError, match="broken"):
            await scene.flusher.store(flush)
        assert flush.overwritten == expected


async def test_the_remains_of_an_attempt_that_did_not_become_durable_are_removed(scene: FlushScene) -> None:
    scene.add_many(6, range(3))
    flush = scene.taken()
    scene.faults = lambda operation, path: OSError(5, "broken") if operation == "datasync" else None
    with pytest.raises(OSError, match="broken"):
        await scene.flusher.store(flush)
    scene.faults = lambda operation, path: None
    assert scene.index.generation() == 0, "the index was not written"
    scene.disk.log.clear()
    await scene.flusher.store(flush)
    assert scene.disk.log[:3] == [f"remove {LOG}", "sync_directory /d", f"create {LOG}"]
    assert scene.located(6)[0] == (5, HEADER + KEY_RECORD)


# --- chunks, slices and logs ------------------------------------------------------------------------------------------


def writes_of(scene: FlushScene) -> list[int]:
    """Let the disk note the size of each write to an entry log, and return the list of sizes."""
    sizes: list[int] = []
    append = scene.logs.append

    def noted(data: bytes, **others: Any) -> None:
        sizes.append(len(data))
        append(data, **others)

    scene.logs.append = noted  # type: ignore[method-assign]
    return sizes


async def test_entries_are_written_in_chunks(scene: FlushScene) -> None:
    sizes = writes_of(scene)
    records = scene.add_many(6, range(100))
    await scene.flush()
    # 45 bodies of 92 bytes exceed a chunk of 4096; the key is in the first one.
    assert sizes == [KEY_RECORD + 4500, 4500, 1000]
    assert scene.log(5) == fmt.pack_file_header(5) + scene.key_record(6) + records
    assert sorted(scene.located(6)) == list(range(100))


async def test_a_chunk_ends_when_it_is_exactly_full(scene: FlushScene) -> None:
    sizes = writes_of(scene)
    scene.add_many(6, range(3), size=CHUNK_SIZE)
    await scene.flush()
    assert sizes == [KEY_RECORD + CHUNK_SIZE + 8, CHUNK_SIZE + 8, CHUNK_SIZE + 8]
    sizes.clear()
    scene.add_many(6, range(3, 5), size=(CHUNK_SIZE - 16) // 2)
    scene.add(6, 5)
    await scene.flush()
    assert sizes == [CHUNK_SIZE + 100], "only bodies count until the next check"
    sizes.clear()
    scene.add_many(6, range(6, 9), size=CHUNK_SIZE // 2)
    await scene.flush()
    assert sizes == [CHUNK_SIZE + 16, CHUNK_SIZE // 2 + 8]
    sizes.clear()
    scene.add(6, 9, size=CHUNK_SIZE // 2 - 1)
    scene.add_many(6, range(10, 12), size=CHUNK_SIZE // 2)
    await scene.flush()
    assert sizes == [3 * CHUNK_SIZE // 2 + 23], "a byte was left"
    for ledger_id in (7, 8, 9):
        scene.ledgers.create(ledger_id, scene.kit.KEY)
    await scene.flush()
    sizes.clear()
    for ledger_id in (7, 8, 9):
        scene.add(ledger_id, 0, size=CHUNK_SIZE // 2 - 8)
    await scene.flush()
    assert sizes == [CHUNK_SIZE, CHUNK_SIZE // 2], "a check after each ledger"


async def test_small_ledgers_share_a_chunk(scene: FlushScene) -> None:
    sizes = writes_of(scene)
    for ledger_id in range(60):
        scene.add(ledger_id, 0)
    await scene.flush()
    # 86 keys of 48 bytes would fill a chunk; 60 keys and 13 entries do so first.
    assert sizes == [60 * KEY_RECORD + 1300, 4100, 600]


async def test_control_records_fill_chunks_too(scene: FlushScene) -> None:
    sizes = writes_of(scene)
    for ledger_id in range(100):
        scene.ledgers.create(ledger_id, scene.kit.KEY)
    await scene.flush()
    assert sizes == [86 * KEY_RECORD, 14 * KEY_RECORD]


async def test_a_log_above_its_maximum_size_is_closed_and_a_new_one_begun(scene: FlushScene) -> None:
    records = [scene.add(6, entry_id, size=8192) for entry_id in range(20)]
    scene.add(7, 0)
    await scene.flush()
    keys = scene.key_record(6) + scene.key_record(7)
    first = fmt.pack_file_header(5) + keys + b"".join(records[:8])
    assert scene.log(5) == sealed(first, {6: KEY_RECORD + 8 * 8200, 7: KEY_RECORD})
    second = fmt.pack_file_header(6) + b"".join(records[8:16])
    assert scene.log(6) == sealed(second, {6: 8 * 8200})
    assert scene.log(7).startswith(fmt.pack_file_header(7) + b"".join(records[16:]))
    assert scene.located(6)[7] == (5, HEADER + 2 * KEY_RECORD + 7 * 8200)
    assert scene.located(6)[8] == (6, HEADER)
    assert scene.located(6)[19] == (7, HEADER + 3 * 8200)
    assert scene.flusher.mark.log_id == 7


async def test_a_log_that_becomes_full_within_a_chunk_gets_the_chunk(scene: FlushScene) -> None:
    for ledger_id in (7, 8, 9):
        scene.ledgers.create(ledger_id, scene.kit.KEY)
    scene.add(6, 0, size=65_000)
    await scene.flush()
    size = len(scene.log(5))
    records = [scene.add(ledger_id, 0, size=192) for ledger_id in (7, 8, 9)]
    sizes = writes_of(scene)
    await scene.flush()
    assert sizes == [400, 200]
    assert scene.log(5)[size:].startswith(records[0] + records[1])
    assert (scene.located(8), scene.located(9)) == ({0: (5, size + 200)}, {0: (6, HEADER)})


async def test_a_log_of_exactly_its_maximum_size_is_continued(scene: FlushScene) -> None:
    scene.add_many(6, range(8), size=8076)
    await scene.flush()
    size = len(scene.log(5))
    scene.add(7, 0, size=64 * 1024 - size - KEY_RECORD - 8)
    await scene.flush()
    assert len(scene.log(5)) == 64 * 1024
    scene.add(6, 8)
    await scene.flush()
    assert scene.flusher.mark.log_id == 5
    scene.add(6, 9)
    await scene.flush()
    assert scene.flusher.mark.log_id == 6
    assert scene.located(6)[9] == (6, HEADER)


async def turns_of(scene: FlushScene) -> int:
    """Flush, and return how often other callbacks of the loop could run meanwhile."""
    turns: list[None] = []

    def count() -> None:
        turns.append(None)
        asyncio.get_running_loop().call_soon(count)

    asyncio.get_running_loop().call_soon(count)
    await scene.flusher.store(scene.taken())
    return len(turns)


@pytest.mark.parametrize(("tick", "expected"), [(0.0, 0), (SLICE_S / 2, 12), (SLICE_S, 24)])
async def test_others_run_once_a_slice_of_time_is_over(scene: FlushScene, tick: float, expected: int) -> None:
    """The clock is checked after each of 12 control records and 12 ledger rows."""
    scene.tick = tick
    for ledger_id in range(12):
        scene.ledgers.create(ledger_id, scene.kit.KEY)
    assert await turns_of(scene) == expected


async def test_others_run_between_parts_of_ledgers(scene: FlushScene) -> None:
    for ledger_id in range(6):
        scene.add(ledger_id, 0)
    await scene.flush()
    for ledger_id in range(6):
        scene.add(ledger_id, 1)
    scene.tick = SLICE_S
    assert await turns_of(scene) == 6


async def test_others_run_after_each_part_of_256_entries(kit: Any) -> None:
    scene = FlushScene(kit, chunk_size=2**20)
    scene.ledgers.create(6, kit.KEY)
    await scene.flush()
    scene.add_many(6, range(600), size=32)
    scene.tick = SLICE_S
    assert await turns_of(scene) == 3


# --- mark and journals ------------------------------------------------------------------------------------------------


async def test_the_mark_follows_the_flush_and_old_journals_are_removed(scene: FlushScene) -> None:
    for name in ("1.txn", "2.txn", "3.txn", "4.txn", "3.txn.needed", "4.txn.needed", "reserve"):
        scene.disk.create(f"/j/{name}")
    scene.add(6, 0)
    flush = scene.taken()
    await scene.flusher.store(flush)
    assert scene.flusher.mark.generation == 3
    assert scene.flusher.closed_below == 5
    scene.disk.log.clear()
    unread: list[tuple[str, bool]] = []
    remove = scene.disk.remove

    def noted(path: str, *, is_unread: bool = False) -> None:
        unread.append((path, is_unread))
        remove(path, is_unread=is_unread)

    scene.disk.remove = noted  # type: ignore[method-assign]
    await scene.flusher.advance_mark(NEXT)
    mark = LastLogMark(4, NEXT, 5, HEADER + KEY_RECORD + 100)
    assert scene.flusher.mark == read_mark(scene.disk, "/d") == mark
    assert scene.disk.log == [*WRITE_MARK, "remove /j/1.txn", "remove /j/2.txn", "remove /j/3.txn.needed"]
    assert unread == [("/j/1.txn", True), ("/j/2.txn", True), ("/j/3.txn.needed", False)]
    assert scene.disk.list_names("/j") == ["3.txn", "4.txn", "4.txn.needed", "reserve"]
    assert scene.stats.journal_files_dropped == 2
    assert scene.flusher.closed_below == 5, "log 5 is open"
    await scene.flusher.advance_mark(JournalPosition(4, 512, 20), is_stored=False)
    assert scene.flusher.mark == LastLogMark(4, JournalPosition(4, 512, 20), 5, HEADER + KEY_RECORD + 100)
    assert scene.stats.journal_files_dropped == 3


async def test_a_failed_mark_changes_nothing(scene: FlushScene) -> None:
    scene.disk.create("/j/1.txn")
    before = scene.flusher.mark
    scene.add(6, 0)
    await scene.flusher.store(scene.taken())
    scene.faults = lambda operation, path: OSError(5, "broken") if operation == "rename" else None
    with pytest.raises(OSError, match="broken"):
        await scene.flusher.advance_mark(NEXT)
    assert scene.flusher.mark is before
    assert scene.disk.list_names("/j") == ["1.txn"]
    scene.faults = lambda operation, path: None
    await scene.flusher.advance_mark(NEXT)
    assert scene.flusher.mark.generation == 4


# --- closing the open log ---------------------------------------------------------------------------------------------


async def test_a_close_seals_the_log_and_advances_the_mark(scene: FlushScene) -> None:
    scene.add(6, 0)
    await scene.flush()
    await scene.flusher.close(JournalPosition(3, 1024, 10))
    data = fmt.pack_file_header(5) + scene.key_record(6) + scene.log(5)[HEADER + KEY_RECORD :][:100]
    assert scene.log(5) == sealed(data, {6: KEY_RECORD + 100})
    assert scene.flusher.mark == LastLogMark(4, JournalPosition(3, 1024, 10), 5, len(scene.log(5)))
    assert scene.flusher.closed_below == 6
    assert await scene.flusher.open_ledgers() == {}
    scene.disk.log.clear()
    await scene.flusher.close(JournalPosition(3, 1024, 10))
    assert scene.disk.log == [], "nothing changed"
    await scene.flusher.close(JournalPosition(3, 1536, 11))
    assert scene.disk.log == WRITE_MARK
    assert scene.flusher.mark == LastLogMark(4, JournalPosition(3, 1536, 11), 5, len(scene.log(5)))


async def test_a_roll_closes_the_log_and_keeps_the_position_in_the_journal(scene: FlushScene) -> None:
    scene.add(6, 0)
    await scene.flush()
    await scene.flusher.roll()
    assert scene.flusher.mark == LastLogMark(4, NEXT, 5, len(scene.log(5)))
    assert scene.flusher.closed_below == 6
    scene.disk.log.clear()
    await scene.flusher.roll()
    assert scene.disk.log == []
    scene.add(6, 1)
    await scene.flush()
    assert scene.located(6)[1] == (6, HEADER)


async def test_a_log_that_cannot_be_sealed_is_closed_without_a_trailer(scene: FlushScene) -> None:
    scene.add(6, 0)
    await scene.flush()
    size = len(scene.log(5))
    failing = ["sync"]

    def fault(operation: str, path: str) -> OSError | None:
        return OSError(28, "no space") if operation in failing and path == LOG else None

    scene.faults = fault
    await scene.flusher.roll()
    failing.clear()
    assert len(scene.log(5)) == size, "the remains of the trailer are removed"
    assert scene.flusher.closed_below == 6
    assert scene.flusher.mark == LastLogMark(4, NEXT, 5, size)
    assert scene.logs.unsealed == {5: size}
    assert read_manifest(scene.disk, "/d").unsealed is None, "not needed while the mark is in this log"
    scene.add(6, 1)
    scene.disk.log.clear()
    await scene.flush()
    assert scene.located(6) == {0: (5, HEADER + KEY_RECORD), 1: (6, HEADER)}
    assert scene.manifest.manifest.unsealed == read_manifest(scene.disk, "/d").unsealed == {5: size}
    assert scene.logs.unsealed == {}
    renames = [line for line in scene.disk.log if line.startswith("rename")]
    assert renames == ["rename /d/entry-logs.new /d/entry-logs", "rename /d/LastLogMark.new /d/LastLogMark"]


async def failed_roll(scene: FlushScene) -> int:
    """Let the seal of log 5 fail, and the removal of its remains too. Return the size that the log should have."""
    scene.add(6, 0)
    await scene.flush()
    size = len(scene.log(5))
    scene.faults = lambda operation, path: OSError(5, "broken") if operation in ("sync", "truncate") else None
    with pytest.raises(OSError, match="broken"):
        await scene.flusher.roll()
    scene.faults = lambda operation, path: None
    assert scene.flusher.closed_below == 5
    assert len(scene.log(5)) > size
    return size


async def test_a_repeated_roll_removes_the_remains_of_a_failed_seal(scene: FlushScene) -> None:
    size = await failed_roll(scene)
    await scene.flusher.roll()
    assert len(scene.log(5)) == size
    assert scene.logs.unsealed == {5: size}
    assert scene.flusher.closed_below == 6
    scene.disk.log.clear()
    await scene.flusher.roll()
    assert scene.disk.log == []


async def test_the_next_flush_removes_the_remains_of_a_failed_seal(scene: FlushScene) -> None:
    """Its trailer may not be durable, so nothing may expect one."""
    size = await failed_roll(scene)
    scene.add(6, 1)
    flush = await scene.flush()
    assert len(scene.log(5)) == size
    assert scene.flusher.log_end(5) == LogEnd(stop=size)
    assert scene.located(6) == {0: (5, HEADER + KEY_RECORD), 1: (6, HEADER)}
    assert flush.overwritten == []
    scene.disk.log.clear()
    scene.add(6, 2)
    await scene.flush()
    assert scene.disk.log[0] == "write /d/6.log", "the next flush continues the log"


async def test_the_expected_end_of_a_log_is_that_of_the_mark_or_the_manifest(scene: FlushScene) -> None:
    scene.manifest.manifest = scene.manifest.manifest.with_unsealed({2: 700}).with_absent(1)
    assert scene.flusher.log_end(2) == LogEnd(stop=700)
    assert scene.flusher.log_end(3) == LogEnd(is_sealed=True)
    assert scene.flusher.log_end(4) == LogEnd(stop=900)
    assert scene.flusher.log_end(5) == LogEnd()
    scene.add(6, 0)
    await scene.flush()
    assert scene.flusher.log_end(4) == LogEnd(is_sealed=True)
    assert scene.flusher.log_end(5) == LogEnd(stop=HEADER + KEY_RECORD + 100)


async def test_the_next_place_follows_the_last_record(scene: FlushScene) -> None:
    assert scene.flusher.next_place() == (5, HEADER)
    assert scene.flusher.next_log_id() == 5
    scene.add(6, 0)
    await scene.flush()
    assert scene.flusher.next_place() == (5, HEADER + KEY_RECORD + 100)
    assert scene.flusher.next_log_id() == 6
