"""A closed entry log that was truncated between two records is damage, even if only its end shows it."""

import asyncio
import errno
from typing import Any

import pytest
from bindery_bookie.storage.corruption.limbo import LimboLedger, write_marker
from bindery_bookie.storage.engine.engine import StorageEngine
from bindery_bookie.storage.entry_log import entry_log_format as fmt
from bindery_bookie.storage.entry_log import log_manifest
from bindery_bookie.storage.entry_log.entry_log_scan import CUT, EntryLogScanner, LogRecord
from bindery_bookie.storage.entry_log.log_manifest import LogManifest, read_manifest, write_manifest
from bindery_bookie.storage.index.index import Index
from bindery_bookie.storage.io.fault_injection import DrillControl, FaultyDisk
from bindery_bookie.storage.journal.mark import read_mark
from bindery_core.wire.messages import Status

CURRENT = "/ledgers/current"
LIST = f"{CURRENT}/{log_manifest.FILE_NAME}"
FAST = 100 * 1024**3


def boundaries(world: Any, log_id: int, *, stop: int) -> list[int]:
    """Return the offsets before `stop` at which a record begins or the last one ends."""
    records = [
        one for one in EntryLogScanner(world.disk, CURRENT).scan(log_id, stop=stop) if isinstance(one, LogRecord)
    ]
    return [fmt.HEADER_SIZE, *(one.offset + len(one.body) for one in records)]


async def two_logs(world: Any, kit: Any, *, first_dies: bool) -> list[bytes]:
    """Write ledger 5 to log 1, which is sealed or left open by a power loss, and ledger 6 to log 2.

    Return the bodies of ledger 5.
    """
    engine = await world.opened()
    bodies: list[bytes] = await kit.fill(engine, 5, 10)
    await engine.flush()
    if first_dies:
        world.lose_power(1)
    else:
        await engine.close()
    engine = await world.opened()
    await kit.fill(engine, 6, 10)
    await engine.close()
    return bodies


def cut_and_lose_index(world: Any, log_id: int, size: int) -> None:
    world.disk.truncate(f"{CURRENT}/{fmt.file_name(log_id)}", size)
    world.kv.clear()


async def in_limbo(world: Any) -> StorageEngine:
    engine: StorageEngine = await world.opened()
    assert engine.limbo is not None, "lost entries would be reported as absent"
    await engine.repair.enter_limbo_ledgers([LimboLedger(5, b"")])
    await engine.repair.finish_listing()
    return engine


@pytest.mark.parametrize("first_dies", [False, True])
async def test_a_log_truncated_at_any_record_is_damage_even_if_the_index_is_lost(kit: Any, first_dies: bool) -> None:
    world = kit.World()
    bodies = await two_logs(world, kit, first_dies=first_dies)
    size = len(world.disk.contents(f"{CURRENT}/1.log"))
    ends = boundaries(world, 1, stop=size)
    assert (ends[-1] == size) == first_dies
    kept_disk, kept_kv = world.disk, world.kv
    for end in ends[:-1] if first_dies else ends:
        world.disk, world.kv = kept_disk.after_power_cut(1), kept_kv.after_power_cut(1, world.disk)
        world.kv = type(world.kv)(world.disk)
        cut_and_lose_index(world, 1, end)
        engine = await in_limbo(world)
        answers = await kit.read(engine, *((5, entry_id) for entry_id in range(10)))
        kept = [body for body in answers if isinstance(body, bytes)]
        assert answers == bodies[: len(kept)] + [Status.UNKNOWN_LEDGER_STATE] * (10 - len(kept))
        assert "1.log" in engine.limbo.reason
        await engine.close()


async def test_a_log_without_its_trailer_is_reported(world: Any, kit: Any) -> None:
    bodies = await two_logs(world, kit, first_dies=False)
    size = len(world.disk.contents(f"{CURRENT}/1.log"))
    cut_and_lose_index(world, 1, size - fmt.TRAILER_SIZE)
    engine = await in_limbo(world)
    assert await kit.read(engine, *((5, entry_id) for entry_id in range(10))) == bodies
    await engine.close()


async def test_a_log_left_open_by_a_crash_is_rebuilt_without_limbo(world: Any, kit: Any) -> None:
    bodies = await two_logs(world, kit, first_dies=True)
    manifest = read_manifest(world.disk, CURRENT)
    assert manifest.unsealed == {1: len(world.disk.contents(f"{CURRENT}/1.log"))}
    world.kv.clear()
    engine = await world.opened()
    assert engine.limbo is None
    assert not engine.damage.items()
    assert await kit.read(engine, *((5, entry_id) for entry_id in range(10))) == bodies
    await engine.close()


async def test_a_start_reports_a_short_unsealed_log(world: Any, kit: Any) -> None:
    bodies = await two_logs(world, kit, first_dies=True)
    size = len(world.disk.contents(f"{CURRENT}/1.log"))
    world.disk.truncate(f"{CURRENT}/1.log", size - 400)
    engine = await world.opened()
    assert engine.limbo is None
    assert [(damage.path, damage.offset) for damage in engine.damage.items()] == [(f"{CURRENT}/1.log", size - 400)]
    answers = await kit.read(engine, *((5, entry_id) for entry_id in range(10)))
    assert answers[:5] == bodies[:5]
    assert set(answers[7:]) == {Status.IO_ERROR}
    await engine.close()


async def test_a_log_of_a_failed_flush_is_listed_before_the_mark_leaves_it(kit: Any) -> None:
    """This holds without a restart: the flush that continues in the next log lists the log in the manifest."""
    drills = DrillControl(sleep=lambda seconds: None)
    world = kit.World(wrap=drills.wrap_disk, flush_retry_s=0.01)
    engine = await world.opened()
    bodies = await kit.fill(engine, 5, 10)
    await engine.flush()
    drills.set_rules(["datasync */1.log fail EIO times 1"])
    await kit.fill(engine, 6, 10)
    with pytest.raises(OSError, match="flush failed"):
        await engine.flush()
    await engine.flush()
    mark = read_mark(world.disk, CURRENT)
    assert mark is not None
    assert mark.log_id == 2
    size = len(world.disk.contents(f"{CURRENT}/1.log"))
    assert read_manifest(world.disk, CURRENT).unsealed == {1: size}
    world.lose_power(1)
    kept_disk, kept_kv = world.disk, world.kv
    for end in (*boundaries(world, 1, stop=size)[:-1], size):
        world.disk = kept_disk.after_power_cut(1)
        world.kv = type(kept_kv)(world.disk)
        cut_and_lose_index(world, 1, end)
        engine = await world.opened()
        assert (engine.limbo is None) == (end == size)
        if end == size:
            assert await kit.read(engine, *((5, entry_id) for entry_id in range(10))) == bodies
        await engine.close()


async def test_the_mark_does_not_advance_if_the_manifest_cannot_be_written(kit: Any) -> None:
    drills = DrillControl(sleep=lambda seconds: None)
    world = kit.World(wrap=drills.wrap_disk, flush_retry_s=0.01)
    engine = await world.opened()
    await kit.fill(engine, 5, 10)
    await engine.flush()
    drills.set_rules(["datasync */1.log fail EIO times 1", "create */entry-logs.new fail EIO times 1"])
    await kit.fill(engine, 6, 10)
    for log_id in (1, 1):
        with pytest.raises(OSError, match="flush failed"):
            await engine.flush()
        mark = read_mark(world.disk, CURRENT)
        assert mark is not None
        assert mark.log_id == log_id
    await engine.flush()
    assert list(read_manifest(world.disk, CURRENT).unsealed or ()) == [1]
    await engine.close()


@pytest.mark.parametrize("map_offset", [0, 39, 2**40, 2**64 - 1])
async def test_an_entry_that_ends_like_a_trailer_does_not_seal_its_log(kit: Any, map_offset: int) -> None:
    """Clients choose the content of entries."""
    world = kit.World()
    engine = await world.opened()
    body = kit.entry(5, 0, bytes(100) + fmt.pack_trailer(map_offset))
    assert await kit.add(engine, kit.add_request(body)) == [Status.OK]
    await engine.flush()
    world.lose_power(1)
    content = world.disk.contents(f"{CURRENT}/1.log")
    assert content.endswith(fmt.pack_trailer(map_offset))
    assert fmt.read_ledgers_map(world.disk.open_read(f"{CURRENT}/1.log"), path="1.log") is None
    engine = await world.opened()
    assert read_manifest(world.disk, CURRENT).unsealed == {1: len(content)}
    await engine.close()


async def test_a_start_succeeds_if_the_end_of_a_log_cannot_be_read(kit: Any) -> None:
    reads: list[str] = []
    is_bad = False

    def fault(operation: str, path: str) -> OSError | None:
        if operation == "read_at" and path.endswith("/1.log"):
            reads.append(path)
            if is_bad and len(reads) > 1:  # the header is intact
                return OSError(errno.EIO, "Input/output error", path)
        return None

    world = kit.World(wrap=lambda disk: FaultyDisk(disk, fault))
    await (await world.opened()).close()
    engine = await world.opened()
    bodies = await kit.fill(engine, 5, 10)
    await engine.close()
    reads.clear()
    is_bad = True
    engine = await world.opened()
    assert len(reads) > 1
    assert read_manifest(world.disk, CURRENT).unsealed == {1: len(world.disk.contents(f"{CURRENT}/1.log"))}
    is_bad = False
    assert await kit.read(engine, *((5, entry_id) for entry_id in range(10))) == bodies
    await engine.close()
    world.kv.clear()
    engine = await world.opened()
    assert engine.limbo is None
    await engine.close()


async def test_the_ends_of_logs_are_kept_if_the_mark_is_lost(world: Any, kit: Any) -> None:
    await two_logs(world, kit, first_dies=True)
    size = len(world.disk.contents(f"{CURRENT}/1.log"))
    world.disk.truncate(f"{CURRENT}/1.log", size - 400)
    world.disk.remove(f"{CURRENT}/LastLogMark")
    write_marker(world.disk, CURRENT, "a test", 1)
    engine = await world.opened()
    unsealed = read_manifest(world.disk, CURRENT).unsealed
    assert unsealed is not None
    assert unsealed[1] == size
    await engine.close()


# --- directories of older versions ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["no list", "version 1", "damaged"])
async def test_opening_a_directory_of_an_older_version_records_the_ends_of_its_logs(kit: Any, how: str) -> None:
    world = kit.World()
    bodies = await two_logs(world, kit, first_dies=True)
    size = len(world.disk.contents(f"{CURRENT}/1.log"))
    if how == "no list":
        world.disk.remove(LIST)
    elif how == "version 1":
        write_manifest(world.disk, CURRENT, LogManifest())
        assert world.disk.contents(LIST)[4:8] == b"\0\0\0\1"
    else:
        world.disk.corrupt(LIST, 9)
    world.kv.clear()
    engine = await world.opened()
    assert engine.limbo is None
    assert not engine.damage.items()
    assert await kit.read(engine, *((5, entry_id) for entry_id in range(10))) == bodies
    await engine.close()
    assert read_manifest(world.disk, CURRENT).unsealed == {1: size}
    cut_and_lose_index(world, 1, boundaries(world, 1, stop=size)[4])
    await (await in_limbo(world)).close()


async def test_after_a_clean_stop_no_log_is_unsealed(world: Any, kit: Any) -> None:
    await two_logs(world, kit, first_dies=False)
    before = world.disk.contents(LIST)
    assert read_manifest(world.disk, CURRENT).unsealed == {}
    written: list[str] = []
    world.disk.before_change = lambda name, path: written.append(path)
    engine = await world.opened()
    assert not [path for path in written if "entry-logs" in path]
    await engine.close()
    assert world.disk.contents(LIST) == before


# --- with an intact index -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("first_dies", [False, True])
async def test_the_scrub_finds_a_truncated_log(kit: Any, first_dies: bool) -> None:
    world = kit.World()
    await two_logs(world, kit, first_dies=first_dies)
    engine = await world.opened()
    size = boundaries(world, 1, stop=len(world.disk.contents(f"{CURRENT}/1.log")))[5]
    world.disk.truncate(f"{CURRENT}/1.log", size)
    engine.scrubber.request(rate=FAST)
    async with asyncio.timeout(30):
        while not engine.scrubber.state().rounds:
            await asyncio.sleep(0.002)
    found = {(damage.path, damage.offset): damage.reason for damage in engine.damage.items()}
    assert found[f"{CURRENT}/1.log", size] == ("entry log is short" if first_dies else CUT)
    await engine.close()


async def test_the_scrub_does_not_report_the_open_log_as_truncated(kit: Any) -> None:
    world = kit.World()
    engine = await world.opened()
    for first in range(0, 2000, 100):
        engine.scrubber.request(rate=FAST)
        await kit.fill(engine, 5, 100, first=first, size=300)
        await engine.flush()
        await asyncio.sleep(0.005)
    assert engine.parts.flusher.mark.log_id > 5
    async with asyncio.timeout(30):
        while not engine.scrubber.state().rounds:
            await asyncio.sleep(0.002)
    assert not engine.damage.items()
    await engine.close()


async def test_compaction_keeps_a_truncated_log_with_entries_in_the_index(kit: Any) -> None:
    """The rest of the log has no live entries."""
    world = kit.World(compaction_rate=2**30)
    engine = await world.opened()
    await kit.fill(engine, 4, 10)
    await kit.fill(engine, 5, 10)
    await engine.close()
    keep = [
        end
        for end in boundaries(world, 1, stop=len(world.disk.contents(f"{CURRENT}/1.log")))
        if end <= (Index(world.kv).run_before(5, 0).location & fmt.OFFSET_MASK) - fmt.RECORD_HEADER_SIZE  # type: ignore[union-attr]
    ]
    world.disk.truncate(f"{CURRENT}/1.log", keep[-1])
    engine = await world.opened()
    await engine.delete_ledger(4)
    await engine.flush()
    await engine.compactor.run(force=True)
    assert world.disk.contents(f"{CURRENT}/1.log")
    answers = await kit.read(engine, *((5, entry_id) for entry_id in range(10)))
    assert set(answers) == {Status.IO_ERROR}
    await engine.close()
