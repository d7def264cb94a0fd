"""Create the directory of a bookie with the real storage engine, for tests of what reads the files of a stopped one."""

import asyncio
import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bindery_bookie.settings import BookieSettings
from bindery_bookie.storage.engine.engine import StorageEngine
from bindery_bookie.storage.engine.shards import ShardedStorage
from bindery_bookie.storage.entry_log.entry_log_scan import EntryLogScanner
from bindery_bookie.storage.io.disk import RealDisk
from bindery_bookie.storage.settings import KIB, StorageSettings
from bindery_core.digest import Digester
from bindery_core.entry import pack
from bindery_core.formats.cookie import Cookie
from bindery_core.formats.ledger_metadata import DigestType
from bindery_core.wire.messages import AddRequest, Status

KEY = b"k" * 20
DIGESTER = Digester(DigestType.CRC32C, b"")

FLUSHED = {1: range(60), 2: range(0, 60, 3), 3: range(5), 4: range(5), 5: range(10)}
"""Ledger -> entries of the first flush. Then ledger 3 is fenced, 4 and 5 are deleted, and SECOND is flushed: ledger 5
exists again with fewer entries."""
SECOND = {2: range(60, 64), 5: range(3)}
IN_JOURNAL = {1: range(60, 64), 9: range(2)}
"""Ledger -> entries that only the journal has."""
RECORDS = 116
"""Number of records in the entry log: 107 entries, a key for each of 6 ledgers, a fence, 2 deletions."""


def payload(ledger_id: int, entry_id: int) -> bytes:
    return f"payload {ledger_id}/{entry_id} ".encode() * 20


def body(ledger_id: int, entry_id: int) -> bytes:
    data = payload(ledger_id, entry_id)
    return pack(
        DIGESTER,
        ledger_id=ledger_id,
        entry_id=entry_id,
        lac=entry_id - 1,
        length=len(data) * (entry_id + 1),
        payload=data,
    )


async def add(engine: StorageEngine, ledgers: dict[int, range]) -> None:
    adds = [AddRequest(0, ledger, entry, KEY, body(ledger, entry)) for ledger, ids in ledgers.items() for entry in ids]
    answered: asyncio.Future[Sequence[int]] = asyncio.get_running_loop().create_future()
    engine.add_many(adds, answered.set_result)
    assert set(await answered) == {Status.OK}


async def _opened(work: Path, **changes: Any) -> StorageEngine:
    settings = StorageSettings(
        journal_directory=str(work / "journal"),
        ledger_directory=str(work / "ledgers"),
        journal_file_size_max=64 * KIB,
        entry_log_size_max=64 * KIB,
        reserve_size=0,
        flush_interval_s=3600,
        **changes,
    )
    engine = StorageEngine.on_real_disk(settings, wall_clock_ms=lambda: 1_000)
    await engine.open()
    return engine


async def _fill(work: Path, copy: Path) -> None:
    engine = await _opened(work)
    await add(engine, FLUSHED)
    await engine.fence(3, KEY)
    await engine.flush()
    await engine.delete_ledger(4)
    await engine.delete_ledger(5)
    await add(engine, SECOND)
    await engine.flush()
    await add(engine, IN_JOURNAL)
    shutil.copytree(work, copy)  # the state after a crash: not closed, and some entries only in the journal
    await engine.close()


def make(root: Path) -> Path:
    """Return the parent directory of a crashed bookie, with `journal` and `ledgers`."""
    asyncio.run(_fill(root / "work", root / "bookie"))
    shutil.rmtree(root / "work")
    return root / "bookie"


def start_and_stop(bookie: Path) -> None:
    async def start() -> None:
        engine = await _opened(bookie)
        await engine.close()

    asyncio.run(start())


async def _store_again(bookie: Path, ledgers: dict[int, range]) -> None:
    engine = await _opened(bookie)
    for ledger_id, entry_ids in ledgers.items():
        statuses = await engine.repair.store_recovered(ledger_id, [body(ledger_id, one) for one in entry_ids])
        assert set(statuses) == {Status.OK}
    await engine.close()


def repair(bookie: Path, ledgers: dict[int, range]) -> None:
    """Store entries as a bookie does that fetched damaged entries from other bookies, and stop it."""
    asyncio.run(_store_again(bookie, ledgers))


async def _compact(work: Path, **changes: Any) -> None:
    engine = await _opened(work, compaction_rate=2**30, **changes)
    for start in range(0, 200, 40):
        await add(engine, {ledger_id: range(start, start + 40) for ledger_id in range(1, 5)})
    await engine.fence(3, KEY)
    await engine.flush()
    await engine.delete_ledger(2)
    await engine.delete_ledger(4)
    await engine.flush()
    done = await engine.compactor.run(major=True, force=True)
    assert done.rewritten
    await add(engine, {1: range(200, 210)})
    await engine.close()


def make_compacted(root: Path, **changes: Any) -> Path:
    """A stopped bookie with compacted logs: ledgers 2 and 4 were deleted, 1 has 210 entries, 3 (fenced) has 200."""
    asyncio.run(_compact(root, **changes))
    return root


def _shards(root: Path, ledger_dirs: Sequence[str] = ("l0", "l1")) -> list[StorageEngine]:
    settings = BookieSettings(
        journal_dir=str(root / "j"),
        ledger_dir=",".join(str(root / name) for name in ledger_dirs),
        storage=StorageSettings(reserve_size=0, flush_interval_s=3600),
    )
    return [StorageEngine.on_real_disk(one, wall_clock_ms=lambda: 1_000) for one in settings.resolved_storages()]


async def _fill_sharded(work: Path, copy: Path, ledger_dirs: Sequence[str]) -> None:
    for turn in range(3):  # the first shard has more starts, so its journals have other ids
        engines = _shards(work, ledger_dirs)
        await engines[0].open()
        await add(engines[0], {100 * turn: range(20)})
        await engines[0].close()
    for engine in engines:
        await engine.open()
    for entry_id in range(20):  # one group per entry
        await add(engines[1], {1: range(entry_id, entry_id + 1)})
        if entry_id == 9:
            await engines[1].flush()
    shutil.copytree(work, copy)
    for engine in engines:
        await engine.close()


def make_sharded(root: Path, ledger_dirs: Sequence[str] = ("l0", "l1")) -> Path:
    """Return the parent directory of a crashed bookie with the journal directory `j` and the given ledger directories.

    Ledger 1 is in the second shard, with entries 0 .. 19.
    """
    made = root / "bookie"
    asyncio.run(_fill_sharded(root / "work", made, ledger_dirs))
    shutil.rmtree(root / "work")
    # The cookie has the paths of the original directories; these files are a copy.
    cookie = Cookie(
        bookie_id="b-1:3181", journal_dirs=("/far/j",), ledger_dirs=tuple(f"/far/{name}" for name in ledger_dirs)
    )
    for name in ("j", *ledger_dirs):
        (made / name / "current").mkdir(exist_ok=True)
        (made / name / "current" / "VERSION").write_bytes(cookie.text())
    return made


def start_sharded(made: Path) -> None:
    """Open and close all shards of a directory from `make_sharded`. Raises the error of a refused start."""

    async def start() -> None:
        store = ShardedStorage(_shards(made))
        await store.open()
        await store.close()

    asyncio.run(start())


def fingerprint(directory: Path) -> dict[str, tuple[str, int, int]]:
    """Return digest, size and modification time of every file: equal results prove that no file changed."""
    return {
        str(path.relative_to(directory)): (
            hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else "",
            path.stat().st_size,
            path.stat().st_mtime_ns,
        )
        for path in sorted(directory.rglob("*"))
    }


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 0xFF
    path.write_bytes(data)


def location(log: Path, ledger_id: int, entry_id: int) -> int:
    """Return the offset of the body of an entry."""
    for record in EntryLogScanner(RealDisk(), str(log.parent)).scan(1):
        if getattr(record, "ledger_id", None) == ledger_id and getattr(record, "entry_id", None) == entry_id:
            return record.offset
    raise AssertionError("no such record")
