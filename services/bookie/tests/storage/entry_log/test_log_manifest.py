"""The log manifest, the assignment of log ids, and the header and ledgers map of compacted logs."""

import random
import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bindery_bookie.storage import control_records as control
from bindery_bookie.storage.entry_log import entry_log_format as logs
from bindery_bookie.storage.entry_log import log_manifest
from bindery_bookie.storage.entry_log.entry_log import EntryLogWriter
from bindery_bookie.storage.entry_log.entry_log_scan import EntryLogScanner, LogRecord
from bindery_bookie.storage.entry_log.log_manifest import LogEnd, LogIds, LogManifest, read_manifest, write_manifest
from bindery_core.errors import BadVersion, BinderyError, DamagedStorage
from bindery_simulation.disk import CrashableDisk
from crc32c import crc32c

GOLDEN = Path(__file__).parents[2] / "golden"
CURRENT = "/ledgers/current"


def sample(version: int = 1) -> LogManifest:
    unsealed = {1: 32, 8: 2**33} if version == 2 else None
    return replace(LogManifest(((2, 5), (9, 9)), {12: 4}), switches=7, unsealed=unsealed)


@pytest.mark.parametrize("version", [1, 2])
def test_the_golden_manifest_is_read_and_written_byte_for_byte(version: int) -> None:
    golden = (GOLDEN / f"log-manifest-v{version}").read_bytes()
    assert LogManifest.unpack(golden, path="p") == sample(version)
    assert sample(version).pack() == golden
    for empty in (LogManifest(), LogManifest(unsealed={})):
        assert LogManifest.unpack(empty.pack(), path="p") == empty


@pytest.mark.parametrize("version", [1, 2])
def test_every_flipped_byte_and_every_truncation_of_a_manifest_is_detected(version: int) -> None:
    golden = (GOLDEN / f"log-manifest-v{version}").read_bytes()
    for at in range(len(golden)):
        damaged = bytearray(golden)
        damaged[at] ^= 0x41
        with pytest.raises(DamagedStorage):
            LogManifest.unpack(bytes(damaged), path="p")
        with pytest.raises(DamagedStorage):
            LogManifest.unpack(golden[:at], path="p")


def test_a_manifest_of_an_unknown_version_or_with_contradictions_is_refused() -> None:
    def signed(version: int, *rows: tuple[int, int, int]) -> bytes:
        data = struct.pack(">4sIQI", b"BNDG", version, 0, len(rows)) + b"".join(
            struct.pack(">QQQ", *row) for row in rows
        )
        return data + struct.pack(">I", crc32c(data))

    assert LogManifest.unpack(signed(1, (2, 3, 0)), path="p").absent == ((2, 3),)
    with pytest.raises(BadVersion):
        LogManifest.unpack(signed(3), path="p")
    for rows in ([(3, 2, 0)], [(0, 1, 0)], [(2, 4, 0), (4, 4, 1)], [(2, 3, 9)], [(5, 5, 1), (4, 4, 0)]):
        with pytest.raises(DamagedStorage, match="contradicts"):
            LogManifest.unpack(signed(1, *rows), path="p")


def test_a_manifest_with_contradicting_unsealed_logs_is_refused() -> None:
    for unsealed in ({3: 40}, {12: 40}, {0: 40}):
        with pytest.raises(DamagedStorage, match="contradicts"):
            LogManifest.unpack(replace(sample(), unsealed=unsealed).pack(), path="p")
    data = bytearray(sample(2).pack()[:-4])
    data[-33] = 3  # three rows, but only two exist
    with pytest.raises(DamagedStorage, match="damaged"):
        LogManifest.unpack(bytes(data) + struct.pack(">I", crc32c(bytes(data))), path="p")


def test_the_manifest_gives_the_expected_end_of_each_log() -> None:
    known = sample(2)
    ends = {log_id: known.end(log_id, mark=(10, 500)) for log_id in (1, 6, 10, 11, 12)}
    assert ends == {
        1: LogEnd(stop=32),
        6: LogEnd(is_sealed=True),
        10: LogEnd(stop=500),
        11: LogEnd(),  # of an unfinished flush
        12: LogEnd(is_sealed=True),
    }
    assert sample().end(6, mark=(10, 500)) == LogEnd()
    assert known.with_absent(1).unsealed == {8: 2**33}
    assert known.with_unsealed({2: 77, 6: 88}).unsealed == {1: 32, 6: 88, 8: 2**33}  # log 2 is absent


def test_expected_logs_come_in_the_order_of_a_rebuild() -> None:
    manifest = sample()
    assert manifest.expected(10) == [1, 12, 6, 7, 8, 10]
    assert manifest.pairs(10) == []
    assert manifest.unused(10) == [11]
    assert manifest.unused(8) == [10, 11]
    assert manifest.next_id(10) == 13
    assert manifest.next_id(20) == 21
    with_source = LogManifest(((2, 3), (5, 5)), {12: 4})
    assert with_source.pairs(10) == [(4, 12)]


def test_id_states_agree_with_a_model_of_sets() -> None:
    lots = random.Random(3)
    manifest, absent, compacted = LogManifest(), set(), {}
    for _ in range(600):
        log_id = lots.randrange(1, 30)
        if log_id in absent and lots.random() < 0.5:
            compacted[log_id] = lots.randrange(1, 30)
            absent.discard(log_id)
            manifest = manifest.with_compacted(log_id, compacted[log_id])
        else:
            absent.add(log_id)
            compacted.pop(log_id, None)
            manifest = manifest.with_absent(log_id)
        assert {one for one in range(40) if manifest.is_absent(one)} == absent
        assert manifest.compacted == compacted
        assert all(b[0] > a[1] + 1 for a, b in zip(manifest.absent, manifest.absent[1:], strict=False))
        assert LogManifest.unpack(manifest.pack(), path="p") == manifest


def test_flushes_use_the_ids_that_a_crash_left_and_compaction_does_not() -> None:
    ids = LogIds.after(LogManifest(((7, 7),), {9: 2}), mark_log_id=4)
    assert [ids.for_flush(), ids.for_compaction(), ids.for_flush(), ids.for_flush(), ids.for_flush()] == [
        5,
        10,
        6,
        8,
        11,
    ]


def test_after_any_power_loss_the_manifest_is_the_old_or_the_new_one() -> None:
    for operations in range(8):
        for seed in range(6):
            disk = CrashableDisk()
            write_manifest(disk, CURRENT, LogManifest(((3, 3),)))
            disk.cut_after(operations)
            try:
                write_manifest(disk, CURRENT, sample())
                is_done = True
            except OSError:
                is_done = False
            found = read_manifest(disk.after_power_cut(seed), CURRENT)
            assert found == sample() if is_done else found in (sample(), LogManifest(((3, 3),)))
    assert is_done
    assert read_manifest(CrashableDisk(), CURRENT) == LogManifest()


def test_the_golden_log_of_a_compaction_is_read() -> None:
    golden = (GOLDEN / "entry-log-compacted-v2.log").read_bytes()
    disk = CrashableDisk()
    disk.create("/f").write_at(golden, 0)
    file = disk.open_read("/f")
    assert logs.check_file_header(file, path="/f", log_id=12) == 4
    assert golden[: logs.HEADER_SIZE] == logs.pack_file_header(12, order=4)
    found = logs.read_ledgers_and_deletions(file, path="/f")
    assert found is not None
    sizes, deletions = found
    assert deletions == {5}
    disk.create(f"/d/{logs.file_name(12)}").write_at(golden, 0)
    records = [one.body for one in EntryLogScanner(disk, "/d").scan(12) if isinstance(one, LogRecord)]
    assert records[0] == control.pack_deleted(5)
    assert sizes == {
        ledger_id: sum(8 + len(body) for body in records if logs.unpack_ids(body)[0] == ledger_id)
        for ledger_id in (5, 6)
    }
    assert logs.read_ledgers_map(file, path="/f") == sizes
    for at in range(logs.HEADER_SIZE):
        disk.corrupt("/f", at)
        with pytest.raises(BinderyError):
            logs.check_file_header(file, path="/f", log_id=12)
        disk.corrupt("/f", at)


def test_the_log_ids_of_a_failed_flush_are_used_by_the_next_attempt(kit: Any) -> None:
    disk = CrashableDisk()
    ids = LogIds(1)
    writer = EntryLogWriter(disk, CURRENT, log_id=0, offset=0, sync_size=2**20, new_id=ids.for_flush)

    def write(log_id: int, offset: int = logs.HEADER_SIZE) -> None:
        record = logs.pack_record(kit.entry(1, log_id))
        writer.append(record, log_id=log_id, offset=offset, sizes={1: len(record)})

    write(writer.next_place[0])
    write(writer.next_log_id)
    assert ids.for_compaction() == 3
    writer.roll_back()
    assert disk.list_names(CURRENT) == []
    assert writer.next_place == (1, logs.HEADER_SIZE)
    for log_id in (1, 2, 4):
        assert writer.next_log_id == log_id
        write(log_id)
    writer.sync()
    durable = writer.durable
    write(writer.next_log_id)
    writer.roll_back()
    assert writer.durable == durable
    assert disk.list_names(CURRENT) == ["1.log", "2.log", "4.log"]
    assert writer.next_place == (5, logs.HEADER_SIZE)


async def test_a_lost_manifest_is_recreated_from_compacted_logs(kit: Any) -> None:
    world = kit.World(compaction_rate=2**30)
    engine = await world.opened()
    for ledger_id in (1, 2):
        await kit.fill(engine, ledger_id, 40, size=200)
    bodies = [(await kit.read(engine, (1, entry_id)))[0] for entry_id in range(40)]
    await engine.flush()
    await engine.delete_ledger(2)
    assert (await engine.compactor.run(major=True)).rewritten == [1]
    before = engine.compactor._replacement.manifest
    await engine.close()
    world.disk.remove(f"{CURRENT}/{log_manifest.FILE_NAME}")
    engine = await world.opened()
    assert read_manifest(world.disk, CURRENT).compacted == before.compacted
    assert not engine.damage.items()
    assert await kit.read(engine, *((1, entry_id) for entry_id in range(40))) == bodies
    await kit.fill(engine, 3, 5)
    await engine.close()
    world.kv.clear()
    engine = await world.opened()
    assert await kit.read(engine, *((1, entry_id) for entry_id in range(40))) == bodies
    await engine.close()
