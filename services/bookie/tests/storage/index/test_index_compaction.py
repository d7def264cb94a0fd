"""Compaction of the index on request: it frees space, reads continue, and a stop waits for it."""

import asyncio
import time
from pathlib import Path

import pytest
from bindery_bookie.storage.engine.engine import StorageEngine
from bindery_bookie.storage.index.index import COMPACTION_STEPS, Index
from bindery_bookie.storage.index.index_format import LedgerRow
from bindery_bookie.storage.io.disk import RealDisk
from bindery_bookie.storage.io.kv import LevelDbKV, MemoryKV
from bindery_bookie.storage.io.worker import ThreadWorker
from bindery_bookie.storage.settings import StorageSettings
from bindery_core.digest import Digester
from bindery_core.entry import pack_many
from bindery_core.formats.ledger_metadata import DigestType
from bindery_core.wire.messages import AddRequest, Status

DIGESTER = Digester(DigestType.DUMMY, b"")
KEY = DIGESTER.master_key


def filled(index: Index, ledgers: int) -> None:
    rows = {ledger_id: LedgerRow(b"k" * 20, False, -1, -1, None) for ledger_id in range(ledgers)}
    index.commit(runs=[], merges={}, ledgers=rows, deleted=[], generation=1, sync=True)


@pytest.mark.parametrize("ledgers", [0, 1, 63, 64, 65, 1000])
def test_the_steps_cover_all_rows_and_are_few(ledgers: int) -> None:
    index = Index(MemoryKV())
    filled(index, ledgers)
    bounds = index.compaction_bounds()
    assert bounds == sorted(set(bounds))
    assert (bounds[0], bounds[-1]) == (b"E", b"M")
    assert len(bounds) - 1 <= COMPACTION_STEPS + 1


def test_compaction_frees_the_space_of_deleted_rows(tmp_path: Path) -> None:
    kv = LevelDbKV(str(tmp_path / "index"), write_buffer_size=64 * 1024)
    index = Index(kv)
    filled(index, 20_000)
    index.commit(runs=[], merges={}, ledgers={}, deleted=range(19_990), generation=2, sync=True)
    for start, stop in zip(index.compaction_bounds(), index.compaction_bounds()[1:], strict=False):
        index.compact(start=start, stop=stop)
    size = sum(path.stat().st_size for path in (tmp_path / "index").iterdir() if path.suffix == ".ldb")
    assert size < 64 * 1024
    assert list(index.ledger_ids()) == list(range(19_990, 20_000))
    index.close()


async def test_the_engine_serves_during_a_compaction_and_its_stop_ends_it(tmp_path: Path) -> None:
    settings = StorageSettings(journal_directory=str(tmp_path / "journal"), ledger_directory=str(tmp_path / "ledgers"))
    engine = StorageEngine.on_real_disk(settings, wall_clock_ms=lambda: 1)
    await engine.open()
    compacting = asyncio.create_task(engine.compact_index())
    bodies = pack_many(DIGESTER, [b"x"] * 10, ledger_id=3, first_entry_id=0, lac=-1, length=0)
    added: asyncio.Future[list[int]] = asyncio.get_running_loop().create_future()
    engine.add_many([AddRequest(1, 3, at, KEY, body) for at, body in enumerate(bodies)], added.set_result)
    assert set(await added) == {Status.OK}
    await compacting
    late = asyncio.create_task(engine.compact_index())
    await asyncio.sleep(0)
    await engine.close()
    with pytest.raises(OSError, match="not open"):
        await late


class SlowlyCompacting(MemoryKV):
    """A KV that records whether it was closed during a compaction."""

    def __init__(self) -> None:
        super().__init__()
        self.steps = 0
        self.is_busy = self.was_closed_busy = False

    def compact(self, *, start: bytes, stop: bytes) -> None:
        self.is_busy = True
        time.sleep(0.1)
        self.is_busy = False
        self.steps += 1

    def close(self) -> None:
        self.was_closed_busy = self.was_closed_busy or self.is_busy
        super().close()


async def test_a_stop_waits_for_one_step_only(tmp_path: Path) -> None:
    settings = StorageSettings(journal_directory=str(tmp_path / "journal"), ledger_directory=str(tmp_path / "ledgers"))
    kv = SlowlyCompacting()
    loop = asyncio.get_running_loop()
    engine = StorageEngine(
        settings,
        disk=RealDisk(),
        open_kv=lambda path: kv,
        destroy_kv=lambda path: None,
        start_worker=lambda name: ThreadWorker(name, loop),
        wall_clock_ms=lambda: 1,
    )
    await engine.open()
    compacting = asyncio.create_task(engine.compact_index())
    while not kv.is_busy:
        await asyncio.sleep(0.005)
    await engine.close()
    with pytest.raises(OSError, match="not open"):
        await compacting
    assert not kv.was_closed_busy
    assert kv.steps == 1
