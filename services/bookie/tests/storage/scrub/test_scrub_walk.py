"""ScrubWalk: what each step verifies, where it ends, and which differences are not damage."""

import errno
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from bindery_bookie.storage.corruption.damage import Damage
from bindery_bookie.storage.entry_log import entry_log_format as fmt
from bindery_bookie.storage.entry_log.log_manifest import LogEnd
from bindery_bookie.storage.index import index_format
from bindery_bookie.storage.index.index import Index
from bindery_bookie.storage.index.index_format import LedgerRow, Run
from bindery_bookie.storage.io.errors import DamagedIndex
from bindery_bookie.storage.io.fault_injection import FaultyDisk
from bindery_bookie.storage.io.kv import MemoryKV
from bindery_bookie.storage.scrub.scrub_walk import ScrubCursor, ScrubPhase, ScrubStep, ScrubWalk, total_size
from bindery_core.ids import ID_MAX
from bindery_simulation.disk import CrashableDisk
from flush_scene import sealed

LOGS, LEDGERS, ENTRIES = ScrubPhase.LOGS, ScrubPhase.LEDGERS, ScrubPhase.ENTRIES
HEADER, RECORD = 32, 100
"""Bytes in a log: the file header, and a record of `WalkScene.put`."""
LEDGER_ROW_SIZE = 9 + 22 + 1
"""Bytes of key and value of a ledger row, whose master key has one byte."""


class BreakableKV(MemoryKV):
    """A store whose scans fail at one key."""

    def __init__(self) -> None:
        super().__init__()
        self.broken_at: bytes | None = None

    def scan(self, *, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        for key, value in super().scan(start=start, stop=stop):
            if key == self.broken_at:
                raise DamagedIndex("block checksum mismatch")
            yield key, value


class ChangingIndex(Index):
    """An index whose scans may return old rows, as if it changed while it was read."""

    def __init__(self, kv: MemoryKV) -> None:
        super().__init__(kv)
        self.old_rows: list[tuple[bytes, bytes]] | None = None
        self.looked_up: Callable[[], None] = lambda: None
        """Called after each lookup of a run or a ledger row."""

    def rows(self, *, start: bytes, stop: bytes) -> Iterator[tuple[bytes, bytes]]:
        if self.old_rows is None:
            return super().rows(start=start, stop=stop)
        return iter([(key, value) for key, value in self.old_rows if start <= key < stop])

    def keep_rows(self) -> None:
        """From now on scans return the rows as they are now."""
        self.old_rows = list(super().rows(start=b"", stop=b"\xff"))

    def run_before(self, ledger_id: int, entry_id: int) -> Run | None:
        found = super().run_before(ledger_id, entry_id)
        self.looked_up()
        return found

    def ledger_row(self, ledger_id: int) -> LedgerRow | None:
        found = super().ledger_row(ledger_id)
        self.looked_up()
        return found


class WalkScene:
    """Entry logs and an index, written record by record."""

    def __init__(self, kit: Any) -> None:
        self.kit = kit
        self.memory = CrashableDisk()
        self.operations: list[tuple[str, str]] = []
        self.faults: Callable[[str, str], OSError | None] = lambda operation, path: None
        self.disk = FaultyDisk(self.memory, self._before)
        self.kv = BreakableKV()
        self.index = ChangingIndex(self.kv)
        self.data: dict[int, bytearray] = {}

    def _before(self, operation: str, path: str) -> OSError | None:
        self.operations.append((operation, path))
        return self.faults(operation, path)

    def put(self, ledger_id: int, entry_id: int, *, size: int = RECORD, log_id: int = 1) -> tuple[int, int, int]:
        """Append a record of `size` bytes to a log; return (entry id, location, body size)."""
        data = self.data.setdefault(log_id, bytearray(fmt.pack_file_header(log_id)))
        body = self.kit.entry(ledger_id, entry_id, bytes([entry_id % 251]) * (size - 40))
        location = log_id << 32 | len(data) + 8
        data += fmt.pack_record(body)
        return entry_id, location, len(body)

    def fill(self, ledger_id: int, count: int, *, first: int = 0, size: int = RECORD, log_id: int = 1) -> None:
        """Store entries of a ledger, with their rows."""
        located = [self.put(ledger_id, entry_id, size=size, log_id=log_id) for entry_id in range(first, first + count)]
        self.kv.write_batch(index_format.run_rows(ledger_id, located))
        self.row(ledger_id, last=first + count - 1)

    def row(self, ledger_id: int, *, last: int = -1, is_limbo: bool = False) -> None:
        row = LedgerRow(b"k", False, -1, last, None, is_limbo)
        self.kv.write_batch([(index_format.ledger_key(ledger_id), index_format.pack_ledger_row(row))])

    def delete(self, ledger_id: int) -> None:
        self.index.commit(runs=[], merges={}, ledgers={}, deleted=[ledger_id], generation=None)

    def save(self) -> None:
        for log_id, data in self.data.items():
            path = f"/d/{log_id:x}.log"
            if path in self.memory.paths():
                self.memory.remove(path)
            self.memory.create(path).write_at(bytes(data), 0)

    def seal(self, log_id: int, *ledger_ids: int) -> None:
        data = self.data.setdefault(log_id, bytearray(fmt.pack_file_header(log_id)))
        self.data[log_id] = bytearray(sealed(bytes(data), dict.fromkeys(ledger_ids, 1)))

    def walk(self, **how: Any) -> ScrubWalk:
        self.save()
        self.operations.clear()
        return ScrubWalk(self.disk, "/d", self.index, **how)

    def step(self, phase: ScrubPhase, first: int = 0, entry_id: int = 0, **how: Any) -> ScrubStep:
        return self.walk(**how).step(ScrubCursor(phase, first, entry_id))

    def count(self, operation: str) -> int:
        return sum(found == operation for found, _ in self.operations)


@pytest.fixture
def scene(kit: Any) -> WalkScene:
    return WalkScene(kit)


def failing(number: int, operation: str = "read_at", *, times: int = 99) -> Callable[[str, str], OSError | None]:
    """Return faults: the first `times` operations of a kind fail with this errno."""
    left = [times]

    def fault(found: str, path: str) -> OSError | None:
        if found != operation or left[0] == 0:
            return None
        left[0] -= 1
        return OSError(number, "broken")

    return fault


# --- logs -------------------------------------------------------------------------------------------------------------


def test_a_step_verifies_one_log(scene: WalkScene) -> None:
    for log_id in (1, 3, 16):
        scene.seal(log_id, 5, 6)
    walk = scene.walk()
    assert walk.step(ScrubCursor()) == ScrubStep(ScrubCursor(LOGS, 2), entries=0, size=32 + 16 + 2 * 16, damage=[])
    assert walk.step(ScrubCursor(LOGS, 2)).cursor == ScrubCursor(LOGS, 4)
    assert walk.step(ScrubCursor(LOGS, 4)).cursor == ScrubCursor(LOGS, 17)
    assert walk.step(ScrubCursor(LOGS, 17)) == ScrubStep(ScrubCursor(LEDGERS))


def test_a_round_begins_with_the_first_log() -> None:
    assert ScrubCursor() == ScrubCursor(ScrubPhase.LOGS, 0, 0)


def test_logs_that_are_not_durable_yet_are_skipped(scene: WalkScene) -> None:
    scene.seal(2)
    scene.seal(3)
    walk = scene.walk(durable_log_id=lambda: 2)
    assert walk.step(ScrubCursor()) == ScrubStep(ScrubCursor(LOGS, 3), size=48)
    assert walk.step(ScrubCursor(LOGS, 3)) == ScrubStep(ScrubCursor(LEDGERS))


def test_a_log_that_was_never_closed_is_intact_by_default(scene: WalkScene) -> None:
    scene.put(5, 0)
    assert scene.step(LOGS) == ScrubStep(ScrubCursor(LOGS, 2), size=48)


def test_a_damaged_header_is_reported(scene: WalkScene) -> None:
    scene.seal(1, 5)
    scene.data[1][9] ^= 1
    step = scene.step(LOGS)
    assert step.damage == [(Damage("/d/1.log", 0, "entry log header is damaged"), 0)]
    assert (step.cursor, step.size) == (ScrubCursor(LOGS, 2), 0)


def test_a_damaged_ledgers_map_is_reported_with_its_offset(scene: WalkScene) -> None:
    scene.put(5, 0)
    scene.seal(1, 5)
    scene.data[1][-17] ^= 1
    assert scene.step(LOGS).damage == [(Damage("/d/1.log", 32 + 100 + 8, "entry digest mismatch"), 0)]


def test_a_closed_log_without_a_trailer_was_truncated(scene: WalkScene) -> None:
    scene.put(5, 0)
    reason = "entry log is cut: it was closed, and its trailer is not at its end"
    asked: list[int] = []

    def end(log_id: int) -> LogEnd:
        asked.append(log_id)
        return LogEnd(is_sealed=True)

    assert scene.step(LOGS, log_end=end).damage == [(Damage("/d/1.log", 132, reason), 0)]
    assert set(asked) == {1}


def test_a_log_that_is_shorter_than_its_durable_part_is_reported(scene: WalkScene) -> None:
    scene.put(5, 0)
    step = scene.step(LOGS, log_end=lambda log_id: LogEnd(stop=133))
    assert step.damage == [(Damage("/d/1.log", 132, "entry log is short"), 0)]
    assert scene.step(LOGS, log_end=lambda log_id: LogEnd(stop=132)).damage == []
    assert scene.step(LOGS, log_end=lambda log_id: LogEnd(stop=131)).damage == []


def test_a_closed_log_with_its_ledgers_map_ends_as_expected(scene: WalkScene) -> None:
    scene.seal(1, 5)
    assert scene.step(LOGS, log_end=lambda log_id: LogEnd(stop=10_000, is_sealed=True)).damage == []


def test_a_log_removed_since_it_was_listed_is_not_damage(scene: WalkScene) -> None:
    scene.seal(1, 5)
    scene.faults = lambda operation, path: FileNotFoundError(2, "gone") if operation == "open_read" else None
    assert scene.step(LOGS) == ScrubStep(ScrubCursor(LOGS, 2))
    assert scene.count("open_read") == 1


def test_damage_of_a_log_is_confirmed_by_a_second_look(scene: WalkScene) -> None:
    """The log may be closed between the look at its expected end and the look at the file, or the reverse."""
    scene.put(5, 0)
    ends = [LogEnd(is_sealed=True), LogEnd()]
    assert scene.step(LOGS, log_end=lambda log_id: ends.pop(0)) == ScrubStep(ScrubCursor(LOGS, 2), size=48)
    scene.faults = failing(errno.EIO, times=1)
    assert scene.step(LOGS) == ScrubStep(ScrubCursor(LOGS, 2), size=48)


@pytest.mark.parametrize("number", [errno.EIO, errno.ENODATA, errno.EILSEQ, errno.EUCLEAN])
def test_an_unreadable_log_is_damage(scene: WalkScene, number: int) -> None:
    scene.seal(1, 5)
    scene.faults = failing(number)
    assert scene.step(LOGS).damage == [(Damage("/d/1.log", 0, f"cannot be read: [Errno {number}] broken"), 0)]


def test_a_temporary_error_is_raised_so_that_the_step_is_repeated(scene: WalkScene) -> None:
    scene.seal(1, 5)
    scene.faults = failing(errno.EMFILE, "open_read")
    with pytest.raises(OSError, match="broken"):
        scene.step(LOGS)


# --- ledgers ----------------------------------------------------------------------------------------------------------


def test_a_step_verifies_32_ledger_rows(scene: WalkScene) -> None:
    for ledger_id in range(0, 66, 2):
        scene.row(ledger_id)
    walk = scene.walk()
    assert walk.step(ScrubCursor(LEDGERS)) == ScrubStep(ScrubCursor(LEDGERS, 64), size=32 * LEDGER_ROW_SIZE)
    assert walk.step(ScrubCursor(LEDGERS, 64)) == ScrubStep(ScrubCursor(ENTRIES), size=LEDGER_ROW_SIZE)
    assert walk.step(ScrubCursor(LEDGERS, 1)) == ScrubStep(ScrubCursor(ENTRIES), size=32 * LEDGER_ROW_SIZE)
    assert walk.step(ScrubCursor(LEDGERS, 65)) == ScrubStep(ScrubCursor(ENTRIES))


def test_the_last_entry_of_a_ledger_must_be_in_the_index(scene: WalkScene) -> None:
    scene.fill(3, 5)
    scene.fill(4, 5)
    scene.row(4, last=5)
    scene.row(5, last=0)
    scene.row(6, last=-1)
    assert scene.step(LEDGERS).damage == [
        (Damage("/d/index", 0, "entry is missing from the index", 4, 5), 0),
        (Damage("/d/index", 0, "entry is missing from the index", 5, 0), 0),
    ]


def test_an_undecodable_ledger_row_does_not_stop_the_step(scene: WalkScene) -> None:
    scene.row(3)
    scene.kv.write_batch([(index_format.ledger_key(4), b"")])
    scene.row(5, last=9)
    step = scene.step(LEDGERS)
    assert [damage for damage, _ in step.damage] == [
        Damage("/d/index", 0, "ledger row is short", 4),
        Damage("/d/index", 0, "entry is missing from the index", 5, 9),
    ]
    assert step.cursor == ScrubCursor(ENTRIES)
    assert step.size == 2 * LEDGER_ROW_SIZE + 9


def test_a_ledger_deleted_meanwhile_has_no_missing_entry(scene: WalkScene) -> None:
    scene.row(3, last=7)
    scene.index.keep_rows()
    scene.delete(3)
    assert scene.step(LEDGERS).damage == []


def test_a_ledger_in_limbo_may_miss_its_last_entry(scene: WalkScene) -> None:
    scene.row(3, last=7, is_limbo=True)
    assert scene.step(LEDGERS).damage == []


def test_a_ledger_whose_row_changed_is_verified_with_its_new_row(scene: WalkScene) -> None:
    scene.fill(3, 5)
    scene.row(3, last=7)
    scene.row(4, last=7)
    scene.row(5, last=7)
    scene.index.keep_rows()
    scene.row(3, last=4)
    scene.row(4, last=9)
    scene.row(5, last=9, is_limbo=True)
    assert scene.step(LEDGERS).damage == [(Damage("/d/index", 0, "entry is missing from the index", 4, 9), 0)]


def test_a_ledger_whose_row_changes_all_the_time_is_looked_up_three_times(scene: WalkScene) -> None:
    scene.row(3, last=7)
    last = [7]

    def change() -> None:
        last[0] += 1
        scene.row(3, last=last[0])

    scene.index.looked_up = change
    assert scene.step(LEDGERS).damage == [(Damage("/d/index", 0, "entry is missing from the index", 3, 12), 0)]


def test_an_unreadable_part_of_the_ledger_rows_is_skipped_by_one_ledger_at_a_time(scene: WalkScene) -> None:
    for ledger_id in (3, 5, 8):
        scene.row(ledger_id)
    scene.kv.broken_at = index_format.ledger_key(8)
    walk = scene.walk()
    step = walk.step(ScrubCursor(LEDGERS))
    assert step.damage == [(Damage("/d/index", 0, "block checksum mismatch", 5), 0)]
    assert step.cursor == ScrubCursor(LEDGERS, 6)
    step = walk.step(ScrubCursor(LEDGERS, 6))
    assert step.damage == [(Damage("/d/index", 0, "block checksum mismatch", 6), 0)]
    assert step.cursor == ScrubCursor(ENTRIES)


def test_a_key_that_is_not_a_ledger_key_is_reported(scene: WalkScene) -> None:
    scene.row(3)
    scene.kv.write_batch([(b"Lodd", b"")])
    walk = scene.walk()
    step = walk.step(ScrubCursor(LEDGERS))
    assert step.damage == [(Damage("/d/index", 0, "ledger key has the wrong size", 3), 0)]
    assert (step.cursor, step.size) == (ScrubCursor(LEDGERS, 4), LEDGER_ROW_SIZE + 4)
    step = walk.step(ScrubCursor(LEDGERS, 4))
    assert step.damage == [(Damage("/d/index", 0, "ledger key has the wrong size", 4), 0)]
    assert step.cursor == ScrubCursor(ENTRIES)


def test_an_unreadable_part_after_the_greatest_ledger_ends_the_phase(scene: WalkScene) -> None:
    scene.row(ID_MAX)
    scene.kv.write_batch([(b"L\x80", b"")])
    step = scene.step(LEDGERS)
    assert step.damage == [(Damage("/d/index", 0, "ledger key has the wrong size", ID_MAX), 0)]
    assert step.cursor == ScrubCursor(ENTRIES)


# --- entries: steps ---------------------------------------------------------------------------------------------------


def test_all_entries_of_a_small_shard_are_verified_in_one_step(scene: WalkScene) -> None:
    scene.fill(3, 5)
    scene.fill(4, 2)
    assert scene.step(ENTRIES) == ScrubStep(None, entries=7, size=7 * RECORD)
    assert scene.count("read_at") == 2  # one per run
    assert scene.count("open_read") == scene.count("close") == 1


def test_an_empty_index_ends_the_round(scene: WalkScene) -> None:
    assert scene.step(ENTRIES) == ScrubStep(None)


def test_a_step_has_256_entries(scene: WalkScene) -> None:
    scene.fill(3, 300)
    walk = scene.walk()
    assert walk.step(ScrubCursor(ENTRIES)) == ScrubStep(ScrubCursor(ENTRIES, 3, 256), entries=256, size=25_600)
    assert walk.step(ScrubCursor(ENTRIES, 3, 256)) == ScrubStep(None, entries=44, size=4_400)


def test_a_step_may_end_inside_a_run_and_in_the_next_ledger(scene: WalkScene) -> None:
    scene.fill(3, 100)
    scene.fill(4, 100)
    scene.fill(5, 100)
    scene.fill(6, 7)
    walk = scene.walk()
    assert walk.step(ScrubCursor(ENTRIES)) == ScrubStep(ScrubCursor(ENTRIES, 5, 56), entries=256, size=25_600)
    assert walk.step(ScrubCursor(ENTRIES, 5, 56)) == ScrubStep(None, entries=51, size=5_100)


def test_a_full_step_at_the_end_of_all_entries_is_followed_by_an_empty_one(scene: WalkScene) -> None:
    scene.fill(3, 256)
    walk = scene.walk()
    assert walk.step(ScrubCursor(ENTRIES)).cursor == ScrubCursor(ENTRIES, 3, 256)
    assert walk.step(ScrubCursor(ENTRIES, 3, 256)) == ScrubStep(None)


def test_a_step_of_large_entries_ends_after_about_128_kib(scene: WalkScene) -> None:
    scene.fill(3, 6, size=40_000)
    walk = scene.walk()
    assert walk.step(ScrubCursor(ENTRIES)) == ScrubStep(ScrubCursor(ENTRIES, 3, 4), entries=4, size=160_000)
    assert scene.count("read_at") == 2  # three entries together, then one
    assert walk.step(ScrubCursor(ENTRIES, 3, 4)) == ScrubStep(None, entries=2, size=80_000)


def test_entries_are_read_together_up_to_exactly_128_kib(scene: WalkScene) -> None:
    """The header of the first record is not counted."""
    for size, reads in ((65_540, 1), (65_541, 2)):
        one = WalkScene(scene.kit)
        one.fill(3, 2, size=size)
        assert one.step(ENTRIES).entries == 2
        assert one.count("read_at") == reads


@pytest.mark.parametrize(("entry_id", "entries"), [(0, 200), (100, 100), (127, 73), (128, 72), (199, 1), (200, 0)])
def test_a_new_walk_continues_anywhere(scene: WalkScene, entry_id: int, entries: int) -> None:
    scene.fill(3, 200)
    assert scene.step(ENTRIES, 3, entry_id) == ScrubStep(None, entries=entries, size=entries * RECORD)


def test_a_walk_continues_after_a_gap_between_runs(scene: WalkScene) -> None:
    scene.fill(3, 10)
    scene.fill(3, 10, first=50)
    assert scene.step(ENTRIES, 3, 10).entries == 10
    assert scene.step(ENTRIES, 3, 49).entries == 10
    assert scene.step(ENTRIES, 2, 5).entries == 20


def test_holes_of_a_run_are_not_read(scene: WalkScene) -> None:
    located = [scene.put(3, entry_id) for entry_id in (0, 3, 5)]
    scene.kv.write_batch(index_format.run_rows(3, located))
    scene.row(3, last=5)
    assert scene.step(ENTRIES) == ScrubStep(None, entries=3, size=300)
    assert scene.step(ENTRIES, 3, 1) == ScrubStep(None, entries=2, size=200)


def test_the_greatest_ids_end_the_round(scene: WalkScene) -> None:
    for ledger_id, entry_id in ((3, ID_MAX), (ID_MAX, ID_MAX)):
        scene.fill(ledger_id, 1, first=entry_id, size=140_000)
    walk = scene.walk()
    assert walk.step(ScrubCursor(ENTRIES)).cursor == ScrubCursor(ENTRIES, 4)
    assert walk.step(ScrubCursor(ENTRIES, 4)).cursor is None


def test_files_are_closed_after_a_step_that_fails(scene: WalkScene) -> None:
    scene.fill(3, 1)
    scene.fill(3, 1, first=1, log_id=2)
    scene.faults = failing(errno.EMFILE)
    with pytest.raises(OSError, match="broken"):
        scene.step(ENTRIES)
    assert scene.count("open_read") == scene.count("close") > 0


# --- entries: rows ----------------------------------------------------------------------------------------------------


def test_entries_without_a_ledger_row_are_reported_once_per_ledger(scene: WalkScene) -> None:
    scene.fill(3, 200)
    scene.fill(4, 1)
    scene.fill(5, 1)
    scene.kv.write_batch([], [index_format.ledger_key(3), index_format.ledger_key(5)])
    step = scene.step(ENTRIES)
    assert step.damage == [
        (Damage("/d/index", 0, "entries without a ledger row", 3), 0),
        (Damage("/d/index", 0, "entries without a ledger row", 5), 0),
    ]
    assert step.entries == 202


def test_a_ledger_deleted_meanwhile_needs_no_row(scene: WalkScene) -> None:
    scene.fill(3, 5)
    scene.index.keep_rows()
    scene.delete(3)
    assert scene.step(ENTRIES).damage == []


def test_a_ledger_row_that_appears_meanwhile_is_found(scene: WalkScene) -> None:
    """Its flush wrote the row and the entries in one batch, after the first lookup."""
    scene.fill(3, 5)
    scene.kv.write_batch([], [index_format.ledger_key(3)])
    lookups = [0]

    def looked_up() -> None:
        lookups[0] += 1
        if lookups[0] == 5:
            scene.row(3, last=4)

    scene.index.looked_up = looked_up
    assert scene.step(ENTRIES).damage == []


def test_an_undecodable_ledger_row_is_reported_for_its_entries(scene: WalkScene) -> None:
    scene.fill(3, 5)
    scene.kv.write_batch([(index_format.ledger_key(3), b"")])
    step = scene.step(ENTRIES)
    assert step.damage == [(Damage("/d/index", 0, "ledger row is short", 3), 0)]
    assert step.entries == 5


def test_an_undecodable_run_is_reported_with_its_ids(scene: WalkScene) -> None:
    scene.fill(3, 5)
    scene.kv.write_batch([(index_format.run_key(3, 9), b"short"), (b"Eodd", b"12")])
    scene.fill(4, 1)
    step = scene.step(ENTRIES)
    assert step.damage == [
        (Damage("/d/index", 0, "index row is damaged", 3, 9), 0),
        (Damage("/d/index", 0, "index row is damaged"), 0),
    ]
    assert (step.entries, step.size) == (6, 600 + 17 + 5 + 4 + 2)


def test_runs_that_overlap_are_reported(scene: WalkScene) -> None:
    scene.fill(3, 10)
    scene.fill(3, 4, first=9)  # one entry in both
    step = scene.step(ENTRIES)
    assert step.damage == [(Damage("/d/index", 0, "index rows overlap", 3, 9), 0)]
    assert step.entries == 14


def test_runs_that_follow_each_other_do_not_overlap(scene: WalkScene) -> None:
    scene.fill(3, 10)
    scene.fill(3, 4, first=10)
    scene.fill(4, 10)
    assert scene.step(ENTRIES).damage == []


def test_runs_that_overlap_only_in_old_rows_are_not_damage(scene: WalkScene) -> None:
    for remaining in (0, 5, None):
        one = WalkScene(scene.kit)
        one.fill(3, 10)
        one.fill(3, 10, first=5)
        one.index.keep_rows()
        for first in (0, 5):
            if first != remaining:
                one.kv.write_batch([], [index_format.run_key(3, first)])
        assert one.step(ENTRIES).damage == []


@pytest.mark.parametrize("inner", [130, 250, 255])
def test_an_overlapping_run_in_the_part_that_a_step_read_is_found_by_the_next_step(
    scene: WalkScene, inner: int
) -> None:
    scene.fill(3, 256)
    scene.fill(3, 3, first=inner)
    scene.row(3, last=255)
    walk = scene.walk()
    first = walk.step(ScrubCursor(ENTRIES))
    assert first.cursor == ScrubCursor(ENTRIES, 3, 256)
    assert first.damage == []
    second = walk.step(first.cursor)
    assert second.damage == [(Damage("/d/index", 0, "index rows overlap", 3, inner), 0)]
    assert (second.entries, second.cursor) == (3, None)


def test_an_overlapping_run_is_found_if_a_step_ended_inside_the_outer_run(scene: WalkScene) -> None:
    scene.fill(2, 200)
    scene.fill(3, 100)
    scene.fill(3, 2, first=30)
    scene.row(3, last=99)
    walk = scene.walk()
    first = walk.step(ScrubCursor(ENTRIES))
    assert first.cursor == ScrubCursor(ENTRIES, 3, 56)
    second = walk.step(first.cursor)
    assert second.damage == [(Damage("/d/index", 0, "index rows overlap", 3, 30), 0)]
    assert (second.entries, second.cursor) == (44 + 2, None)


def test_a_round_continues_with_the_next_ledger_after_an_unreadable_part(scene: WalkScene) -> None:
    scene.fill(3, 200)
    scene.fill(6, 3)
    scene.kv.broken_at = index_format.run_key(3, 128)
    walk = scene.walk()
    step = walk.step(ScrubCursor(ENTRIES))
    assert step.damage == [(Damage("/d/index", 0, "block checksum mismatch", 3), 0)]
    assert (step.cursor, step.entries) == (ScrubCursor(ENTRIES, 6), 128)
    assert walk.step(ScrubCursor(ENTRIES, 6)) == ScrubStep(None, entries=3, size=300)


def test_a_round_ends_after_an_unreadable_part_of_the_last_ledger(scene: WalkScene) -> None:
    for ledger_id in (3, ID_MAX):
        one = WalkScene(scene.kit)
        one.fill(ledger_id, 200)
        one.kv.broken_at = index_format.run_key(ledger_id, 128)
        step = one.step(ENTRIES)
        assert step.damage == [(Damage("/d/index", 0, "block checksum mismatch", ledger_id), 0)]
        assert step.cursor is None


def test_a_round_ends_if_the_following_ledger_rows_are_unreadable_too(scene: WalkScene) -> None:
    scene.fill(3, 5)
    scene.kv.write_batch([(b"Lodd", b"")])
    scene.kv.broken_at = index_format.run_key(3, 0)
    step = scene.step(ENTRIES, 2)
    assert step.damage == [(Damage("/d/index", 0, "block checksum mismatch", 2), 0)]
    assert step.cursor == ScrubCursor(ENTRIES, 3)
    step = scene.step(ENTRIES, 3)
    assert step.cursor is None


# --- entries: damage --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("at", "reason"),
    [
        (-8, "entry digest mismatch"),
        (-1, "entry size differs"),
        (0, "entry digest mismatch"),
        (91, "entry digest mismatch"),
    ],
)
def test_a_damaged_entry_is_reported_with_its_place_and_size(scene: WalkScene, at: int, reason: str) -> None:
    scene.fill(3, 5)
    offset = HEADER + 2 * RECORD + 8
    scene.data[1][offset + at] ^= 1
    step = scene.step(ENTRIES)
    assert step.damage == [(Damage("/d/1.log", offset, reason, 3, 2), 92)]
    assert (step.entries, step.size) == (5, 500)


def test_an_intact_record_of_another_entry_is_damage(scene: WalkScene) -> None:
    wrong = scene.put(4, 0), scene.put(3, 1)
    scene.kv.write_batch(index_format.run_rows(3, [(0, *wrong[0][1:]), (9, *wrong[1][1:])]))
    scene.row(3, last=9)
    reason = "the record's ledger id or entry id differs from the index"
    assert scene.step(ENTRIES).damage == [
        (Damage("/d/1.log", 40, reason, 3, 0), 92),
        (Damage("/d/1.log", 140, reason, 3, 9), 92),
    ]


def test_the_smallest_entry_is_intact(scene: WalkScene) -> None:
    _, location, _ = scene.put(3, 0)
    scene.data[1][HEADER:] = fmt.pack_record(scene.kit.entry(3, 0)[:16])
    scene.kv.write_batch(index_format.run_rows(3, [(0, location, 16)]))
    scene.row(3, last=0)
    assert scene.step(ENTRIES) == ScrubStep(None, entries=1, size=24)


def test_entries_after_the_end_of_a_log_are_damaged(scene: WalkScene) -> None:
    scene.fill(3, 3)
    del scene.data[1][HEADER + RECORD + 50 :]
    assert scene.step(ENTRIES).damage == [
        (Damage("/d/1.log", 140, "entry size differs", 3, 1), 92),
        (Damage("/d/1.log", 240, "entry log is short", 3, 2), 92),
    ]


def test_a_missing_log_is_reported_once_per_round(scene: WalkScene) -> None:
    scene.fill(3, 300)
    scene.fill(4, 2, log_id=2)
    walk = scene.walk()
    scene.memory.remove("/d/1.log")
    first = walk.step(ScrubCursor(ENTRIES))
    assert first.damage == [(Damage("/d/1.log", 0, "entry log is missing"), 0)]
    assert (first.entries, first.size) == (256, 25_600)
    assert walk.step(ScrubCursor(ENTRIES, 3, 256)) == ScrubStep(None, entries=46, size=4_600)
    assert scene.walk().step(ScrubCursor(ENTRIES, 4)) == ScrubStep(None, entries=2, size=200)


def test_an_entry_on_a_bad_sector_is_damaged(scene: WalkScene) -> None:
    scene.fill(3, 1)
    scene.faults = failing(errno.EIO)
    assert scene.step(ENTRIES).damage == [(Damage("/d/1.log", 40, "cannot be read: [Errno 5] broken", 3, 0), 92)]


def test_a_read_that_fails_once_is_repeated(scene: WalkScene) -> None:
    scene.fill(3, 3)
    scene.faults = failing(errno.EIO, times=1)
    assert scene.step(ENTRIES) == ScrubStep(None, entries=3, size=300)
    assert scene.count("read_at") == 1 + 3


def test_an_entry_deleted_meanwhile_is_not_damaged(scene: WalkScene) -> None:
    scene.fill(3, 5)
    scene.index.keep_rows()
    scene.delete(3)
    scene.data[1][50] ^= 1
    assert scene.step(ENTRIES).damage == []


def test_an_entry_that_moved_is_read_at_its_new_place(scene: WalkScene) -> None:
    scene.fill(3, 1)
    scene.index.keep_rows()
    scene.fill(3, 1, log_id=2)
    del scene.data[1]
    assert scene.step(ENTRIES).damage == []
    scene.data[2][50] ^= 1
    assert scene.step(ENTRIES).damage == [(Damage("/d/2.log", 40, "entry digest mismatch", 3, 0), 92)]


def test_an_entry_that_moves_while_it_is_confirmed_is_read_again(scene: WalkScene) -> None:
    scene.fill(3, 1)
    scene.data[1][50] ^= 1
    walk = scene.walk(is_cached=lambda ledger_id, entry_id: moved())

    def moved() -> bool:
        """A flush moves the entry from the cache into the index after the walk has looked into the caches."""
        scene.fill(3, 1, log_id=2)
        scene.save()
        return False

    assert walk.step(ScrubCursor(ENTRIES)).damage == []


def test_an_entry_that_moves_all_the_time_is_not_reported(scene: WalkScene) -> None:
    scene.fill(3, 1)
    scene.data[1][50] ^= 1
    log_id = [1]

    def move(ledger_id: int, entry_id: int) -> bool:
        log_id[0] += 1
        scene.fill(3, 1, log_id=log_id[0])
        scene.data[log_id[0]][50] ^= 1
        scene.save()
        return False

    assert scene.walk(is_cached=move).step(ScrubCursor(ENTRIES)).damage == []
    assert log_id == [4]


def test_a_damaged_entry_that_was_stored_again_is_not_reported(scene: WalkScene) -> None:
    scene.fill(3, 3)
    scene.data[1][50] ^= 1
    scene.data[1][250] ^= 1
    asked: list[tuple[int, int]] = []

    def is_cached(ledger_id: int, entry_id: int) -> bool:
        asked.append((ledger_id, entry_id))
        return entry_id == 0

    step = scene.step(ENTRIES, is_cached=is_cached)
    assert step.damage == [(Damage("/d/1.log", 240, "entry digest mismatch", 3, 2), 92)]
    assert asked == [(3, 0), (3, 2)]


# --- sizes ------------------------------------------------------------------------------------------------------------


def test_the_total_size_leaves_out_logs_that_were_removed(scene: WalkScene) -> None:
    scene.put(3, 0)
    scene.put(3, 0, log_id=16)
    scene.save()
    assert total_size(scene.disk, "/d", [1, 5, 16]) == 2 * 132
    assert total_size(scene.disk, "/d", []) == 0


def test_the_index_is_beside_the_logs(scene: WalkScene) -> None:
    assert scene.walk().index_path == "/d/index"
