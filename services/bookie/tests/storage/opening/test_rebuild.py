"""IndexRebuild: the index has what the logs have, in their order, and what the logs have lost is reported."""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
from bindery_bookie.storage import control_records as control
from bindery_bookie.storage.corruption.damage import Damage
from bindery_bookie.storage.entry_log import entry_log_format as fmt
from bindery_bookie.storage.entry_log.log_manifest import LogManifest, write_manifest
from bindery_bookie.storage.index.index import Index
from bindery_bookie.storage.index.index_format import LedgerRow
from bindery_bookie.storage.io.errors import StartCancelled
from bindery_bookie.storage.io.fault_injection import FaultyDisk
from bindery_bookie.storage.io.kv import MemoryKV
from bindery_bookie.storage.journal.journal_format import JournalPosition
from bindery_bookie.storage.journal.mark import LastLogMark
from bindery_bookie.storage.opening import rebuild
from bindery_bookie.storage.opening.rebuild import IndexRebuild
from bindery_core.errors import DamagedStorage
from bindery_simulation.disk import CrashableDisk
from flush_scene import sealed

HEADER, RECORD, KEY_RECORD = 32, 100, 48
"""Bytes in a log: the file header, a record of an entry, and the record of a key."""
NO_KEY = "no log has the key of the ledger"


class CountedKV(MemoryKV):
    """Notes which batches are synced."""

    def __init__(self) -> None:
        super().__init__()
        self.batches: list[bool] = []

    def write_batch(
        self, puts: Iterable[tuple[bytes, bytes]], deletes: Iterable[bytes] = (), *, sync: bool = False
    ) -> None:
        self.batches.append(sync)
        super().write_batch(puts, deletes, sync=sync)


class RebuildScene:
    """Entry logs, written record by record, and an empty index."""

    def __init__(self, kit: Any) -> None:
        self.kit = kit
        self.disk = CrashableDisk()
        self.faults: Callable[[str, str], OSError | None] = lambda operation, path: None
        self.kv = CountedKV()
        self.index = Index(self.kv)
        self.data: dict[int, bytearray] = {}

    def log(self, log_id: int, *bodies: bytes, order: int | None = None) -> None:
        """Append records to a log."""
        data = self.data.setdefault(log_id, bytearray(fmt.pack_file_header(log_id, order=order)))
        for body in bodies:
            data += fmt.pack_record(body)

    def seal(self, log_id: int) -> None:
        self.data[log_id] = bytearray(sealed(bytes(self.data[log_id]), {5: 1}))

    def key(self, ledger_id: int) -> bytes:
        return control.pack_master_key(ledger_id, self.kit.KEY)

    def entry(self, ledger_id: int, entry_id: int, *, lac: int = -1) -> bytes:
        body: bytes = self.kit.entry(ledger_id, entry_id, b"x" * 60, lac=lac)
        return body

    def lac(self, ledger_id: int, lac: int) -> bytes:
        return control.pack_explicit_lac(ledger_id, self.kit.lac_packet(ledger_id, lac))

    def made(
        self, mark_log_id: int, *, end: int | None = None, manifest: LogManifest | None = None, **how: Any
    ) -> IndexRebuild:
        """Write the files, and return a rebuild. `end`: offset of the mark; None: the end of its log."""
        for log_id, data in self.data.items():
            self.disk.create(f"/d/{log_id:x}.log").write_at(bytes(data), 0)
        if manifest is not None:
            write_manifest(self.disk, "/d", manifest)
        end = len(self.data.get(mark_log_id, b"")) if end is None else end
        mark = LastLogMark(7, JournalPosition(2, 512, 7), mark_log_id, end)
        disk = FaultyDisk(self.disk, lambda operation, path: self.faults(operation, path))
        return IndexRebuild(disk, "/d", self.index, mark, **how)

    def run(self, mark_log_id: int, **how: Any) -> IndexRebuild:
        one = self.made(mark_log_id, **how)
        one.run()
        return one

    def partial(self, mark_log_id: int, **how: Any) -> list[Damage]:
        return self.run(mark_log_id, may_be_partial=True, **how).damage

    def located(self, ledger_id: int) -> dict[int, tuple[int, int]]:
        """Return entry id -> (log id, offset of its record), whose record must have that entry."""
        found: dict[int, tuple[int, int]] = {}
        for run in self.index.runs(ledger_id):
            for entry_id, location, size in run.entries():
                log_id, offset = location >> 32, location & (2**32 - 1)
                body = bytes(self.data[log_id][offset : offset + size])
                assert control.unpack_ids(body) == (ledger_id, entry_id)
                assert self.data[log_id][offset - 8 :].startswith(fmt.pack_record(body))
                found[entry_id] = (log_id, offset - 8)
        return found


@pytest.fixture
def scene(kit: Any) -> RebuildScene:
    return RebuildScene(kit)


# --- content ----------------------------------------------------------------------------------------------------------


def test_the_index_has_all_entries_and_ledgers(scene: RebuildScene) -> None:
    scene.log(1, scene.key(5), scene.entry(5, 0), scene.entry(5, 2, lac=1), scene.key(6))
    scene.log(2, scene.entry(6, 4, lac=3), scene.entry(5, 1, lac=0))
    one = scene.run(2)
    assert scene.located(5) == {0: (1, 80), 1: (2, 132), 2: (1, 180)}
    assert scene.located(6) == {4: (2, 32)}
    assert scene.index.ledger_row(5) == LedgerRow(scene.kit.KEY, False, 1, 2, None)
    assert scene.index.ledger_row(6) == LedgerRow(scene.kit.KEY, False, 3, 4, None)
    assert scene.index.generation() == 7
    assert (one.entries_count, one.damage) == (4, [])


def test_a_shard_without_logs_has_an_empty_index(scene: RebuildScene) -> None:
    assert scene.run(0).entries_count == 0
    assert (scene.index.generation(), scene.index.switches(), list(scene.index.ledger_ids())) == (7, 0, [])


def test_closed_logs_are_read_without_their_ledgers_map(scene: RebuildScene) -> None:
    scene.log(1, scene.key(5), scene.entry(5, 0))
    scene.seal(1)
    scene.log(2, scene.entry(5, 1))
    one = scene.run(2, manifest=LogManifest(unsealed={}, switches=3))
    assert scene.located(5) == {0: (1, 80), 1: (2, 32)}
    assert list(scene.index.ledger_ids()) == [5]
    assert (one.entries_count, scene.index.switches()) == (2, 3)


def test_later_records_replace_earlier_ones(scene: RebuildScene) -> None:
    scene.log(1, scene.key(5), scene.entry(5, 0), scene.entry(5, 0), scene.entry(5, 1))
    scene.log(2, scene.entry(5, 1))
    one = scene.run(2)
    assert scene.located(5) == {0: (1, 180), 1: (2, 32)}
    assert one.entries_count == 4


def test_a_compacted_log_has_the_place_of_the_log_that_it_replaced(scene: RebuildScene) -> None:
    scene.log(3, scene.key(5), scene.entry(5, 0), scene.entry(5, 1), order=1)
    scene.seal(3)
    scene.log(2, scene.entry(5, 1))
    scene.run(2, manifest=LogManifest(absent=((1, 1),), compacted={3: 1}, switches=4))
    assert scene.located(5) == {0: (3, 80), 1: (2, 32)}
    assert scene.index.switches() == 4


@pytest.mark.parametrize(("has_source", "log_id"), [(True, 1), (False, 3)])
def test_after_an_unfinished_compaction_the_source_is_read_if_it_exists(
    scene: RebuildScene, has_source: bool, log_id: int
) -> None:
    for found, order in ((1, None), (3, 1)):
        scene.log(found, scene.key(5), scene.entry(5, 0), order=order)
    scene.seal(3)
    scene.log(2)
    if not has_source:
        del scene.data[1]
    manifest = LogManifest(compacted={3: 1})
    damage = scene.partial(2, manifest=manifest)
    assert scene.located(5) == {0: (log_id, 80)}
    assert damage == ([] if has_source else [Damage("/d/1.log", 0, "entry log is missing")])


def test_records_after_the_mark_are_ignored(scene: RebuildScene) -> None:
    scene.log(1, scene.key(5), scene.entry(5, 0), scene.entry(5, 1))
    scene.log(2, scene.entry(5, 2))
    scene.run(1, end=HEADER + KEY_RECORD + RECORD)
    assert scene.located(5) == {0: (1, 80)}
    row = scene.index.ledger_row(5)
    assert row is not None
    assert row.last_entry_id == 0


def test_fences_and_explicit_lacs_are_restored(scene: RebuildScene) -> None:
    scene.log(1, scene.key(5), scene.entry(5, 3, lac=2), scene.lac(5, 1), control.pack_fence(5))
    scene.log(1, scene.key(6), scene.lac(6, 8), scene.entry(6, 3, lac=2), scene.lac(6, 7))
    scene.run(1)
    assert scene.index.ledger_row(5) == LedgerRow(scene.kit.KEY, True, 2, 3, scene.kit.lac_packet(5, 1))
    assert scene.index.ledger_row(6) == LedgerRow(scene.kit.KEY, False, 8, 3, scene.kit.lac_packet(6, 7))


def test_lac_and_last_entry_are_the_greatest_of_all_entries(scene: RebuildScene) -> None:
    scene.log(1, scene.key(5), scene.entry(5, 9, lac=0), scene.entry(5, 1, lac=5), scene.entry(5, 2, lac=1))
    scene.run(1)
    assert scene.index.ledger_row(5) == LedgerRow(scene.kit.KEY, False, 5, 9, None)


def test_a_key_that_a_replay_wrote_again_changes_nothing(scene: RebuildScene) -> None:
    scene.log(1, scene.key(5), scene.entry(5, 0, lac=-1), control.pack_fence(5))
    scene.log(1, control.pack_master_key(5, b"other"))
    scene.run(1)
    assert scene.index.ledger_row(5) == LedgerRow(scene.kit.KEY, True, -1, 0, None)


def test_a_ledger_without_entries_has_neither_lac_nor_last_entry(scene: RebuildScene) -> None:
    scene.log(1, scene.key(5), control.pack_fence(6))
    assert len(scene.partial(1)) == 1
    assert scene.index.ledger_row(5) == LedgerRow(scene.kit.KEY, False, -1, -1, None)
    assert scene.index.ledger_row(6) == LedgerRow(b"", True, -1, -1, None)


# --- deleted ledgers --------------------------------------------------------------------------------------------------


def test_a_deleted_ledger_is_not_in_the_index(scene: RebuildScene) -> None:
    scene.log(1, scene.key(5), scene.entry(5, 0), scene.key(6), scene.entry(6, 0), control.pack_deleted(5))
    scene.run(1)
    assert (scene.located(5), scene.index.ledger_row(5)) == ({}, None)
    assert scene.located(6) == {0: (1, 2 * KEY_RECORD + RECORD + HEADER)}


def test_a_ledger_created_again_has_only_its_new_entries(scene: RebuildScene) -> None:
    scene.log(1, scene.key(5), scene.entry(5, 0), scene.entry(5, 8), control.pack_fence(5))
    scene.log(2, control.pack_deleted(5), control.pack_master_key(5, b"new"), scene.entry(5, 1))
    scene.run(2)
    assert list(scene.located(5)) == [1]
    assert scene.index.ledger_row(5) == LedgerRow(b"new", False, -1, 1, None)


def test_a_deleted_ledger_needs_no_key(scene: RebuildScene) -> None:
    """Compaction removed the log that had its key."""
    scene.log(1, scene.entry(5, 0), control.pack_deleted(5))
    assert scene.run(1).damage == []
    assert list(scene.index.ledger_ids()) == []


# --- lost keys --------------------------------------------------------------------------------------------------------


def test_a_ledger_without_a_key_makes_the_index_partial(scene: RebuildScene) -> None:
    scene.log(1, scene.key(6), scene.entry(5, 0, lac=-1), scene.entry(5, 1), scene.entry(6, 0))
    assert scene.partial(1) == [Damage("/d/1.log", HEADER + KEY_RECORD + 8, NO_KEY, 5)]
    assert scene.index.ledger_row(5) == LedgerRow(b"", True, -1, 1, None)
    assert scene.index.ledger_row(6) == LedgerRow(scene.kit.KEY, False, -1, 0, None)
    assert list(scene.located(5)) == [0, 1]


def test_a_ledger_without_a_key_is_refused_unless_the_index_may_be_partial(scene: RebuildScene) -> None:
    scene.log(1, scene.entry(5, 0))
    message = f"the index cannot be rebuilt completely from the entry logs: {NO_KEY}"
    with pytest.raises(DamagedStorage, match=message) as raised:
        scene.run(1)
    assert raised.value.facts == {"path": "/d/1.log", "offset": 40}
    assert scene.index.generation() == 0


def test_a_key_may_follow_in_a_later_log(scene: RebuildScene) -> None:
    scene.log(1, scene.entry(5, 3, lac=2))
    scene.log(2, scene.key(5))
    assert scene.run(2).damage == []
    assert scene.index.ledger_row(5) == LedgerRow(scene.kit.KEY, False, 2, 3, None)


def test_earlier_damage_explains_lost_keys(scene: RebuildScene) -> None:
    scene.log(2, scene.entry(5, 0), scene.entry(6, 0))
    assert scene.partial(2) == [Damage("/d/1.log", 0, "entry log is missing")]
    for ledger_id in (5, 6):
        assert scene.index.ledger_row(ledger_id) == LedgerRow(b"", True, -1, 0, None)


def test_only_the_first_of_several_lost_keys_is_reported(scene: RebuildScene) -> None:
    scene.log(1, scene.entry(6, 0), scene.entry(5, 0))
    assert scene.partial(1) == [Damage("/d/1.log", 40, NO_KEY, 6)]


# --- damage -----------------------------------------------------------------------------------------------------------


def test_a_missing_log_is_damage(scene: RebuildScene) -> None:
    scene.log(2, scene.key(5), scene.entry(5, 0))
    message = "the index cannot be rebuilt completely from the entry logs: entry log is missing"
    with pytest.raises(DamagedStorage, match=message) as raised:
        scene.run(2)
    assert raised.value.facts == {"path": "/d/1.log", "offset": 0}


def test_a_log_that_cannot_be_opened_is_damage(scene: RebuildScene) -> None:
    scene.log(1, scene.key(5), scene.entry(5, 0))
    scene.log(2, scene.key(6))
    scene.faults = lambda operation, path: OSError(5, "broken") if (operation, path[-5:]) == ("size", "1.log") else None
    assert scene.partial(2) == [Damage("/d/1.log", 0, "entry log cannot be read: [Errno 5] broken")]
    assert list(scene.index.ledger_ids()) == [6]


def test_records_after_damage_of_a_log_are_ignored(scene: RebuildScene) -> None:
    scene.log(1, scene.key(5), scene.entry(5, 0), scene.entry(5, 1), scene.entry(5, 2))
    scene.log(2, scene.entry(5, 3))
    scene.data[1][HEADER + KEY_RECORD + RECORD + 50] ^= 1
    assert scene.partial(2) == [Damage("/d/1.log", 180, "entry digest mismatch")]
    assert list(scene.located(5)) == [0, 3]


def test_a_log_that_is_shorter_than_the_mark_is_damage(scene: RebuildScene) -> None:
    scene.log(1, scene.key(5), scene.entry(5, 0))
    assert scene.partial(1, end=181) == [Damage("/d/1.log", 180, "entry log is short")]
    assert list(scene.located(5)) == [0]


def test_a_closed_log_without_a_trailer_is_damage(scene: RebuildScene) -> None:
    scene.log(1, scene.key(5), scene.entry(5, 0))
    scene.log(2)
    reason = "entry log is cut: it was closed, and its trailer is not at its end"
    assert scene.partial(2, manifest=LogManifest(unsealed={})) == [Damage("/d/1.log", 180, reason)]


def test_an_unsealed_log_ends_where_the_manifest_says(scene: RebuildScene) -> None:
    scene.log(1, scene.key(5), scene.entry(5, 0), scene.entry(5, 1))
    scene.log(2)
    assert scene.partial(2, manifest=LogManifest(unsealed={1: 180})) == []
    assert list(scene.located(5)) == [0]


def test_a_damaged_manifest_is_damage_and_counts_as_empty(scene: RebuildScene) -> None:
    scene.log(1, scene.key(5), scene.entry(5, 0))
    scene.disk.create("/d/entry-logs").write_at(b"x" * 60, 0)
    assert scene.partial(1) == [Damage("/d/entry-logs", 0, "list of entry logs is damaged")]
    assert list(scene.located(5)) == [0]
    assert scene.index.switches() == 0


def test_a_damaged_manifest_is_refused_unless_the_index_may_be_partial(scene: RebuildScene) -> None:
    scene.disk.create("/d/entry-logs").write_at(b"x", 0)
    with pytest.raises(DamagedStorage, match="entry logs: list of entry logs is short") as raised:
        scene.run(0)
    assert raised.value.facts == {"path": "/d/entry-logs", "offset": 0}


# --- batches ----------------------------------------------------------------------------------------------------------


def test_the_index_becomes_valid_with_the_last_batch(scene: RebuildScene) -> None:
    scene.log(1, scene.key(5), scene.entry(5, 0))
    seen: list[tuple[int, int, int]] = []

    def before_valid(one: IndexRebuild) -> None:
        seen.append((one.entries_count, scene.index.generation(), len(list(scene.index.ledger_ids()))))

    scene.run(1, before_valid=before_valid)
    assert seen == [(1, 0, 0)]
    assert scene.kv.batches == [False, True]


def test_an_error_before_the_last_batch_leaves_the_index_invalid(scene: RebuildScene) -> None:
    scene.log(1, scene.key(5), scene.entry(5, 0))

    def refuse(one: IndexRebuild) -> None:
        raise DamagedStorage("refused")

    with pytest.raises(DamagedStorage, match="refused"):
        scene.run(1, before_valid=refuse)
    assert scene.index.generation() == 0


def test_many_entries_are_written_in_several_batches(scene: RebuildScene, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rebuild, "_ENTRIES_MAX", 3)
    scene.log(1, scene.key(5), *(scene.entry(5, entry_id) for entry_id in (4, 1, 0, 2, 3, 9, 7)))
    one = scene.run(1)
    assert scene.kv.batches == [False, False, False, True]  # two of three entries, the switches, the rest
    offsets = [180 + 100 * place for place in range(-1, 6)]
    assert scene.located(5) == {
        entry_id: (1, offset) for entry_id, offset in zip((4, 1, 0, 2, 3, 9, 7), offsets, strict=True)
    }
    assert one.entries_count == 7


@pytest.mark.parametrize(("entries", "batches"), [(2, 2), (3, 3), (5, 3), (6, 4)])
def test_a_batch_has_as_many_entries_as_are_held(
    scene: RebuildScene, monkeypatch: pytest.MonkeyPatch, entries: int, batches: int
) -> None:
    monkeypatch.setattr(rebuild, "_ENTRIES_MAX", 3)
    scene.log(1, scene.key(5), *(scene.entry(5, entry_id) for entry_id in range(entries)))
    scene.run(1)
    assert len(scene.kv.batches) == batches


def test_a_deletion_is_written_after_the_entries_before_it(scene: RebuildScene) -> None:
    scene.log(1, scene.key(5), scene.entry(5, 0), control.pack_deleted(5))
    scene.run(1)
    assert scene.kv.batches == [False, False, False, True]
    assert scene.located(5) == {}


def test_a_rebuild_can_be_cancelled_at_every_record(scene: RebuildScene) -> None:
    scene.log(1, scene.key(5), scene.entry(5, 0), scene.entry(5, 1))
    asked = [0]

    def is_cancelled() -> bool:
        asked[0] += 1
        return asked[0] == 3

    one = scene.made(1, is_cancelled=is_cancelled)
    with pytest.raises(StartCancelled):
        one.run()
    assert (one.entries_count, scene.index.generation()) == (1, 0)
