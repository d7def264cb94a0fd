"""The engine on real files, LevelDB and threads, and after kill -9 in the middle of its work."""

import asyncio
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from bindery_bookie.storage.engine.engine import StorageEngine
from bindery_bookie.storage.io.disk import RealDisk
from bindery_bookie.storage.io.worker import ThreadWorker, run_in
from bindery_bookie.storage.settings import KIB, LedgerStorageKind, StorageSettings
from bindery_core.wire.messages import Status

SMALL = {
    "journal_file_size_max": 256 * KIB,
    "write_cache_size_max": 64 * KIB,
    "entry_log_size_max": 256 * KIB,
    "flush_chunk_size": 16 * KIB,
}


def real_engine(directory: Path, **changes: Any) -> StorageEngine:
    settings = StorageSettings(
        journal_directory=str(directory / "journal"),
        ledger_directory=str(directory / "ledgers"),
        **{**SMALL, **changes},
    )
    return StorageEngine.on_real_disk(settings, wall_clock_ms=lambda: time.time_ns() // 1_000_000)


@contextlib.asynccontextmanager
async def opened(directory: Path, **changes: Any) -> AsyncIterator[StorageEngine]:
    engine = real_engine(directory, **changes)
    await engine.open()
    try:
        yield engine
    finally:
        await engine.close()


async def test_entries_are_readable_from_caches_and_disk_and_after_a_restart(tmp_path: Path, kit: Any) -> None:
    async with opened(tmp_path) as engine:
        bodies = await kit.fill(engine, 5, 3000)
        await engine.fence(5, kit.KEY)
        assert await kit.read(engine, *((5, e) for e in range(3000))) == bodies
        assert engine.stats.flushes > 2
    async with opened(tmp_path) as engine:
        assert engine.stats.replay_entries == 0
        assert await kit.read(engine, *((5, e) for e in range(3000))) == bodies
        assert await kit.add(engine, kit.add_request(kit.entry(5, 3000))) == [Status.FENCED]
        total, free = engine.disk_usage()
        assert 0 < free < total


@pytest.mark.parametrize("past_cache", [True, False])
async def test_the_journal_uses_direct_io_unless_disabled(tmp_path: Path, kit: Any, past_cache: bool) -> None:
    def is_direct(path: str) -> bool:
        (fd,) = [fd for fd in os.listdir("/proc/self/fd") if os.path.realpath(f"/proc/self/fd/{fd}") == path]
        flags = Path(f"/proc/self/fdinfo/{fd}").read_text().split("flags:")[1].split()[0]
        return bool(int(flags, 8) & os.O_DIRECT)

    probe = f"{tmp_path.resolve()}/probe"
    file = RealDisk().create(probe, allocate=4096)
    is_offered = is_direct(probe)
    file.close()
    async with opened(tmp_path, journal_past_cache=past_cache) as engine:
        bodies = await kit.fill(engine, 5, 20)
        (path,) = [path for path in open_files() if path.endswith(".txn")]
        assert is_direct(path) == (past_cache and is_offered)
        assert await kit.read(engine, *((5, e) for e in range(20))) == bodies


def open_files() -> list[str]:
    """Return the open files of this process; the kernel marks deleted ones."""
    names = []
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):
            names.append(os.readlink(f"/proc/self/fd/{fd}"))
    return names


@pytest.mark.parametrize("kind", LedgerStorageKind)
async def test_compaction_frees_space(tmp_path: Path, kit: Any, kind: LedgerStorageKind) -> None:
    """Entries are added and read meanwhile, and checked again after a restart and after an index rebuild."""
    current = tmp_path / "ledgers/current"
    changes = {"ledger_storage": kind, "compaction_rate": 2**30, "read_cache_size_max": 0, "reserve_size": 0}

    def size() -> int:
        return sum(path.stat().st_size for path in current.glob("*.log"))

    async def check(engine: StorageEngine) -> None:
        for ledger_id, expected in bodies.items():
            found = await kit.read(engine, *((ledger_id, entry_id) for entry_id in range(len(expected) + 1)))
            assert found == [*expected, Status.NO_ENTRY]
        assert await kit.add(engine, kit.add_request(kit.entry(3, 9000))) == [Status.FENCED]
        assert list(await engine.list_ledger_ids()) == sorted(bodies)

    bodies: dict[int, list[bytes]] = {ledger_id: [] for ledger_id in range(1, 6)}
    async with opened(tmp_path, **changes) as engine:
        for first in range(0, 600, 50):
            for ledger_id, known in bodies.items():
                known += await kit.fill(engine, ledger_id, 50, first=first, size=300)
        await engine.fence(3, kit.KEY)
        await engine.flush()
        before = size()
        for ledger_id in (1, 2, 4):
            await engine.delete_ledger(ledger_id)
            del bodies[ledger_id]
        await engine.flush()
        running = asyncio.create_task(engine.compactor.run(major=True, force=True))
        turns = 0
        while not running.done():
            bodies[5] += await kit.fill(engine, 5, 10, first=len(bodies[5]))
            await check(engine)
            turns += 1
        result = await running
        assert turns > 1
        assert len(result.rewritten) >= 3
        assert not result.left
        assert size() < before * 0.6
        await check(engine)
        still_open = [name for name in open_files() if name.startswith(f"{current}/") and name.endswith(" (deleted)")]
        assert [name for name in still_open if "/index/" not in name] == [], (
            "a removed log takes space while it is open"
        )
    async with opened(tmp_path, **changes) as engine:
        await check(engine)
    shutil.rmtree(current / "index")
    async with opened(tmp_path, **changes) as engine:
        await check(engine)
        assert engine.limbo is None


async def test_a_damaged_leveldb_is_rebuilt(tmp_path: Path, kit: Any) -> None:
    async with opened(tmp_path) as engine:
        bodies = await kit.fill(engine, 5, 500)
    for name in ("CURRENT", "MANIFEST-000002"):
        found = tmp_path / "ledgers/current/index" / name
        if found.exists():
            found.write_bytes(b"\xff" * found.stat().st_size)
    async with opened(tmp_path) as engine:
        assert await kit.read(engine, *((5, e) for e in range(500))) == bodies


_CHILD = textwrap.dedent(
    """
    import asyncio, struct, sys, time
    from bindery_bookie.storage.engine.engine import StorageEngine
    from bindery_bookie.storage.settings import StorageSettings
    from bindery_core.wire.messages import AddRequest

    async def main(directory, first):
        settings = StorageSettings(
            journal_directory=directory + "/journal", ledger_directory=directory + "/ledgers",
            journal_file_size_max=256 * 1024, write_cache_size_max=64 * 1024, entry_log_size_max=256 * 1024,
        )
        engine = StorageEngine.on_real_disk(settings, wall_clock_ms=lambda: 0)
        await engine.open()
        loop = asyncio.get_running_loop()
        entry_id = first
        while True:
            done = loop.create_future()
            ids = range(entry_id, entry_id + 20)
            adds = [AddRequest(0, 5, e, b"k" * 20, struct.pack(">qqqq", 5, e, -1, 0) + b"%d," % e * 20) for e in ids]
            engine.add_many(adds, done.set_result)
            assert not any(await done)
            entry_id += 20
            print(entry_id, flush=True)

    asyncio.run(main(sys.argv[1], int(sys.argv[2])))
    """
)


@pytest.mark.integration
async def test_acknowledged_entries_survive_kill_9(tmp_path: Path, kit: Any) -> None:
    acknowledged = 0
    for run in range(3):
        child = await asyncio.create_subprocess_exec(
            sys.executable, "-c", _CHILD, str(tmp_path), str(acknowledged), stdout=subprocess.PIPE
        )
        try:
            assert child.stdout is not None
            async with asyncio.timeout(30):
                for _ in range(60 + 37 * run):
                    acknowledged = int(await child.stdout.readline())
                os.kill(child.pid, signal.SIGKILL)
                rest = (await child.stdout.read()).split(b"\n")[:-1]
            acknowledged = int(rest[-1]) if rest else acknowledged
        finally:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()
        async with opened(tmp_path) as engine:
            if run == 2:
                assert engine.stats.replay_entries > 0
            found = await kit.read(engine, *((5, e) for e in range(acknowledged)))
            expected = [kit.entry(5, e)[:24] + bytes(8) + b"%d," % e * 20 for e in range(acknowledged)]
            assert found == expected
            (beyond,) = await kit.read(engine, (5, acknowledged + 1000))
            assert beyond == Status.NO_ENTRY


# --- adapters


def test_a_real_disk_reads_the_bytes_that_it_wrote(tmp_path: Path) -> None:
    disk = RealDisk()
    directory = f"{tmp_path}/a/b"
    disk.make_directories(directory)
    disk.make_directories(directory)
    file = disk.create(f"{directory}/f", allocate=4096)
    file.write_at(b"hello", 10)
    file.write_at(memoryview(b"world"), 15)
    file.datasync()
    file.sync()
    file.close()
    file.close()
    reader = disk.open_read(f"{directory}/f")
    assert reader.size() == 4096
    assert reader.read_at(8, 14) == b"\0\0helloworld\0\0"
    assert reader.read_at(4090, 100) == bytes(6)
    reader.close()
    disk.rename(f"{directory}/f", f"{directory}/g")
    disk.truncate(f"{directory}/g", 12)
    disk.sync_directory(directory)
    assert list(disk.list_names(directory)) == ["g"]
    assert list(disk.list_names(f"{directory}/none")) == []
    disk.remove(f"{directory}/g")
    with pytest.raises(FileNotFoundError):
        disk.open_read(f"{directory}/g")
    disk.create(f"{directory}/h").close()
    with pytest.raises(FileExistsError):
        disk.create(f"{directory}/h")
    assert disk.usage(directory).total > 0


async def test_a_thread_worker_keeps_order_and_returns_errors() -> None:
    worker = ThreadWorker("test", asyncio.get_running_loop())
    order: list[object] = []
    worker.submit(lambda: worker.post(order.append, "posted"), lambda result, error: order.append("first"))
    worker.submit(lambda: 1 // 0, lambda result, error: order.append(type(error)))
    assert await run_in(worker, lambda: 42) == 42
    assert order == ["posted", "first", ZeroDivisionError]
    with pytest.raises(ZeroDivisionError):
        await run_in(worker, lambda: 1 // 0)
    worker.close()
