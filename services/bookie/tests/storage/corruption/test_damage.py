"""Damage is never answered as absence: the register, missing entry logs, damaged files of LevelDB."""

import os
import random
import shutil
from pathlib import Path
from typing import Any

import pytest
from bindery_bookie.storage.corruption.damage import Damage, DamageRegister
from bindery_bookie.storage.engine.engine import StorageEngine
from bindery_bookie.storage.entry_log import entry_log_format as fmt
from bindery_bookie.storage.index.index import Index
from bindery_bookie.storage.index.index_format import LedgerRow
from bindery_bookie.storage.io.disk import RealDisk
from bindery_bookie.storage.io.errors import DamagedIndex
from bindery_bookie.storage.io.kv import LevelDbKV, MemoryKV
from bindery_bookie.storage.io.kv_watch import WatchedKV
from bindery_bookie.storage.io.leveldb_check import BLOCK_SIZE, check_files, check_log
from bindery_bookie.storage.opening import opening
from bindery_core.errors import BinderyError
from bindery_core.wire.messages import Status
from bindery_simulation.disk import CrashableDisk

SEEDS = int(os.environ.get("BINDERY_DAMAGE_SEEDS", "10"))


# --- register ---------------------------------------------------------------------------------------------------------


def test_damage_is_reported_once_and_removed_when_healed() -> None:
    register = DamageRegister(items_max=3)
    told: list[Damage] = []
    register.on_report(told.append)
    first = Damage("/1.log", 10, "bad", 5, 1)
    assert register.report(first)
    assert not register.report(Damage("/2.log", 99, "bad elsewhere", 5, 1))  # the same entry
    assert register.report(Damage("/1.log", 10, "a place"))
    assert register.report(Damage("/1.log", 20, "bad", 6, 1))
    assert not register.report(Damage("/1.log", 30, "bad", 6, 2))
    assert (len(told), register.found_count, register.overflow_count) == (3, 3, 1)
    register.healed(5, 1)
    register.healed(5, 1)
    register.healed_region("/1.log", 10)
    register.ledger_deleted(6)
    assert (len(register), register.healed_count) == (0, 2)
    assert register.report(first)


# --- entry logs -------------------------------------------------------------------------------------------------------


async def two_logs(world: Any, kit: Any) -> list[list[bytes]]:
    """Write ledgers 5 and 6 to separate entry logs, flushed and closed."""
    written = []
    for ledger_id in (5, 6):
        engine = await world.opened()
        written.append(await kit.fill(engine, ledger_id, 10))
        await engine.close()
    return written


@pytest.mark.parametrize("how", ["missing", "short"])
async def test_a_lost_entry_log_loses_only_its_entries(world: Any, kit: Any, how: str) -> None:
    first, second = await two_logs(world, kit)
    path = {"missing": "/ledgers/current/1.log", "short": "/ledgers/current/2.log"}[how]
    lost, kept = (first, second) if how == "missing" else (second, first)
    ledger_id, other = (5, 6) if how == "missing" else (6, 5)
    if how == "missing":
        world.disk.remove(path)
    else:
        world.disk.truncate(path, 500)
    engine = await world.opened()
    assert engine.limbo is None
    (damage,) = engine.damage.items()
    assert (damage.path, damage.entry_id) == (path, None)
    answers = await kit.read(engine, *((ledger_id, e) for e in range(11)))
    sound = [body for body in answers if isinstance(body, bytes)]
    assert sound == lost[: len(sound)]
    assert len(sound) == (0 if how == "missing" else 3)
    assert set(answers[len(sound) : 10]) == {Status.IO_ERROR}
    assert answers[10] == Status.NO_ENTRY
    assert await kit.read(engine, *((other, e) for e in range(10))) == kept
    log_id = opening.log_id_of(path)
    found = []
    after = (-1, -1)
    while batch := await engine.repair.entries_in_log(log_id, start=damage.offset, after=after, count=3):
        found += batch
        after = batch[-1]
    assert found == [(ledger_id, e) for e in range(len(sound), 10)]
    await engine.repair.store_recovered(ledger_id, lost)
    await engine.flush()
    assert await engine.repair.entries_in_log(log_id, start=damage.offset, after=(-1, -1), count=9) == []
    assert await kit.read(engine, *((ledger_id, e) for e in range(10))) == lost
    await engine.close()
    engine = await world.opened()  # a log without entries in the index is not reported again
    assert await kit.read(engine, *((ledger_id, e) for e in range(10))) == lost
    if how == "missing":
        assert not engine.damage.items()
    await engine.close()


async def test_a_fence_in_a_lost_log_survives_the_loss_of_the_index(world: Any, kit: Any) -> None:
    await two_logs(world, kit)
    engine = await world.opened()
    await engine.fence(5, kit.KEY)
    await engine.close()
    world.disk.remove("/ledgers/current/3.log")  # it has the fence, and no entry of the index
    for _ in range(2):
        engine = await world.opened()
        assert not engine.damage.items()
        assert await kit.add(engine, kit.add_request(kit.entry(5, 99))) == [Status.FENCED]
        await engine.close()
    world.kv.clear()
    engine = await world.opened()
    assert engine.limbo is not None
    assert "3.log" in engine.limbo.reason
    await engine.close()


async def test_after_a_rebuild_entries_without_a_key_are_not_answered_as_absent(world: Any, kit: Any) -> None:
    engine = await world.opened()
    await engine.fence(5, kit.KEY)
    await engine.flush()
    await engine.close()
    engine = await world.opened()
    body = kit.entry(5, 0)
    assert await kit.add(engine, kit.add_request(body, recovery=True)) == [Status.OK]
    await engine.close()
    header = world.disk.contents("/ledgers/current/1.log")[: fmt.HEADER_SIZE]
    world.disk.remove("/ledgers/current/1.log")  # as if a crash had left it without records
    world.disk.create("/ledgers/current/1.log").write_at(header, 0)
    world.disk.remove("/ledgers/current/entry-logs")  # the manifest would contradict that
    world.kv.clear()
    engine = await world.opened()
    assert engine.limbo is not None
    assert "key" in engine.limbo.reason
    assert await kit.read(engine, (5, 0)) == [body]
    await engine.close()


async def test_a_damaged_log_manifest_is_recreated(world: Any, kit: Any) -> None:
    first, second = await two_logs(world, kit)
    world.disk.truncate("/ledgers/current/entry-logs", 7)
    engine = await world.opened()
    assert await kit.read(engine, (5, 3), (6, 3)) == [first[3], second[3]]
    await engine.close()


# --- the index's batches ----------------------------------------------------------------------------------------------


def commit(index: Index, number: int) -> None:
    row = LedgerRow(b"k" * 20, False, -1, number, None)
    index.commit(runs=[], merges={}, ledgers={number: row}, deleted=(), generation=number)


def test_a_missing_batch_in_the_middle_is_detected() -> None:
    for lost in (2, 3, 4):
        kv = MemoryKV()
        index = Index(kv)
        for number in range(1, 6):
            before = dict(kv.scan(start=b"", stop=b"\xff"))
            commit(index, number)
            if number == lost:
                after = dict(kv.scan(start=b"", stop=b"\xff"))
                new = [key for key in after if key not in before]
        Index(kv).check_complete()
        kv.write_batch([], new)
        with pytest.raises(DamagedIndex):
            Index(kv).check_complete()


def test_batch_rows_of_an_earlier_run_are_dropped() -> None:
    kv = MemoryKV()
    for run in range(1, 4):
        index = Index(kv)
        index.check_complete()
        for number in range(10):
            commit(index, run * 10 + number)
        index.check_complete()
    assert len(list(kv.scan(start=b"B", stop=b"C"))) == 11


def test_every_kv_operation_reports_damage_of_the_index() -> None:
    class Broken(MemoryKV):
        def _check_open(self) -> None:
            raise DamagedIndex("bad block")

    told: list[str] = []
    kv = WatchedKV(Broken(), told.append)
    for call in (
        lambda: kv.get(b"k"),
        lambda: kv.get_many([b"k"]),
        lambda: kv.floor(lowest=b"a", key=b"k"),
        lambda: list(kv.scan(start=b"a", stop=b"k")),
        lambda: kv.write_batch([(b"k", b"v")]),
        lambda: kv.compact(start=b"a", stop=b"k"),
    ):
        with pytest.raises(DamagedIndex):
            call()
        assert told.pop() == "bad block"
        assert not told


@pytest.mark.parametrize("what", ["write_batch", "floor"])
async def test_a_damaged_index_causes_read_errors_until_a_restart_rebuilds_it(
    world: Any, kit: Any, monkeypatch: pytest.MonkeyPatch, what: str
) -> None:
    engine = await world.opened()
    bodies = await kit.fill(engine, 5, 20)
    await engine.close()
    engine = await world.opened()

    def broken(*args: Any, **others: Any) -> None:
        raise DamagedIndex("bad block", path="/ledgers/current/index")

    monkeypatch.setattr(world.kv, what, broken)
    if what == "floor":
        assert await kit.read(engine, (5, 3), (5, 30)) == [Status.IO_ERROR] * 2
    bodies += await kit.fill(engine, 5, 5, first=20)
    if what == "write_batch":
        with pytest.raises(OSError, match="flush failed"):
            await engine.flush()
    assert engine.repair.is_index_damaged
    assert [damage.path for damage in engine.damage.items()] == ["/ledgers/current/index"]
    await engine.close()
    assert opening.REBUILD_REQUEST in world.disk.list_names("/ledgers/current")
    monkeypatch.undo()
    engine = await world.opened()
    assert await kit.read(engine, *((5, e) for e in range(26))) == [*bodies, Status.NO_ENTRY]
    assert engine.limbo is None
    assert not engine.repair.is_index_damaged
    assert opening.REBUILD_REQUEST not in world.disk.list_names("/ledgers/current")
    await engine.close()


# --- LevelDB's own files ----------------------------------------------------------------------------------------------


def leveldb(path: Path, *, batches: int) -> list[Path]:
    kv = LevelDbKV(str(path), write_buffer_size=64 * 1024)
    for number in range(batches):
        kv.write_batch([(b"E%06d" % n, b"%06d" % n * 10) for n in range(number * 50, number * 50 + 50)], sync=True)
    kv.close()
    return sorted(path.iterdir())


def test_an_intact_store_passes_the_check(tmp_path: Path) -> None:
    disk = RealDisk()
    check_files(disk, str(tmp_path / "nothing"))
    leveldb(tmp_path / "index", batches=1)
    check_files(disk, str(tmp_path / "index"))
    files = leveldb(tmp_path / "index", batches=60)
    check_files(disk, str(tmp_path / "index"))
    assert [file for file in files if file.suffix == ".log" and file.stat().st_size]


def test_zeros_in_the_middle_of_a_log_are_damage_but_at_its_end_they_are_not(tmp_path: Path) -> None:
    leveldb(tmp_path / "index", batches=1)
    (log,) = (tmp_path / "index").glob("*.log")
    kv = LevelDbKV(str(tmp_path / "index"), write_buffer_size=1 << 20)
    for number in range(40):
        kv.write_batch([(b"E%d" % number, b"x" * 4000)], sync=True)
    kv.close()
    log = max((tmp_path / "index").glob("*.log"), key=lambda path: path.stat().st_size)
    data = log.read_bytes()
    assert len(data) > 4 * BLOCK_SIZE
    disk = CrashableDisk()

    def check(changed: bytes) -> None:
        if "/log" in disk.paths():
            disk.remove("/log")
        file = disk.create("/log")
        file.write_at(changed, 0)
        check_log(file, path="/log")  # type: ignore[arg-type]

    check(data)
    check(data[:-100])
    check(data[: -BLOCK_SIZE // 2] + bytes(BLOCK_SIZE // 2))
    for start, end in ((0, 100), (5000, 5001), (BLOCK_SIZE, 2 * BLOCK_SIZE), (100, 3 * BLOCK_SIZE)):
        with pytest.raises(DamagedIndex):
            check(data[:start] + bytes(end - start) + data[end:])


def test_a_damaged_block_at_either_end_of_the_store_is_detected(tmp_path: Path) -> None:
    """LevelDB's iterators skip a damaged block; at an end of the store they then reach the end without an error."""
    path = tmp_path / "index"
    keys = [b"E%06d" % n for n in range(4000)]
    kv = LevelDbKV(str(path))
    kv.write_batch([(key, key * 3) for key in keys], sync=True)
    kv.close()
    LevelDbKV(str(path)).close()  # moves the pairs into a table
    (table,) = path.glob("*.ldb")
    good = table.read_bytes()
    for key in (keys[0], keys[-1]):
        data = bytearray(good)
        data[good.index(key * 3)] ^= 255
        table.write_bytes(data)
        with pytest.raises(DamagedIndex):
            LevelDbKV(str(path)).floor(lowest=b"E", key=key)
        with pytest.raises(DamagedIndex):
            list(LevelDbKV(str(path)).scan(start=key, stop=b"F"))
    table.write_bytes(good)
    kv = LevelDbKV(str(path))
    assert kv.floor(lowest=b"E", key=b"Z") == (keys[-1], keys[-1] * 3)
    assert [key for key, _ in kv.scan(start=b"", stop=b"\xff" * 99)] == keys
    kv.close()


@pytest.mark.parametrize("data", [b"", b"MANIFEST-000002", b"MANIFEST-999999\n", b"../LOCK\n", b"\0" * 16])
def test_a_damaged_current_file_is_detected(tmp_path: Path, data: bytes) -> None:
    leveldb(tmp_path / "index", batches=2)
    (tmp_path / "index" / "CURRENT").write_bytes(data)
    with pytest.raises(DamagedIndex):
        check_files(RealDisk(), str(tmp_path / "index"))
    (tmp_path / "index" / "CURRENT").unlink()
    if list((tmp_path / "index").glob("*.ldb")):
        with pytest.raises(DamagedIndex):
            check_files(RealDisk(), str(tmp_path / "index"))


def spoil(path: Path, lots: random.Random) -> str:
    """Damage a file in one of several ways."""
    size = path.stat().st_size
    kind = lots.choice(["flip", "flip", "zero", "zero", "cut", "empty", "delete"])
    if kind == "delete":
        path.unlink()
        return kind
    at = lots.randrange(size) if size else 0
    if kind == "cut":
        os.truncate(path, at)
    elif kind == "empty":
        os.truncate(path, 0)
    elif size:
        data = bytearray(path.read_bytes())
        if kind == "flip":
            data[at] ^= 1 << lots.randrange(8)
        else:
            end = min(size, at + lots.choice([1, 64, 512, 4096, 40_000]))
            data[at:end] = bytes(end - at)
        path.write_bytes(data)
    return f"{kind} {at}/{size}"


async def test_no_damage_of_the_index_makes_an_entry_absent(tmp_path: Path, kit: Any) -> None:
    """Real engines with LevelDB tables, logs and a manifest, of which one file, chosen by the seed, is damaged."""
    template, written = tmp_path / "template", await index_template(tmp_path / "template", kit)
    for seed in range(SEEDS):
        lots = random.Random(seed)
        home = tmp_path / "spoilt"
        shutil.copytree(template, home)
        files = [
            path for path in sorted((home / "ledgers/current/index").iterdir()) if path.name not in ("LOCK", "LOG")
        ]
        victim = lots.choice(files)
        what = f"seed {seed}: {victim.name} {spoil(victim, lots)}"
        engine = real_engine(home, kit)
        try:
            await engine.open()
        except BinderyError as error:
            raise AssertionError(f"{what}: {error}") from error
        for ledger_id, bodies in written.items():
            answers = await kit.read(engine, *((ledger_id, e) for e in range(len(bodies))))
            for entry_id, (answer, body) in enumerate(zip(answers, bodies, strict=True)):
                assert answer in (body, Status.IO_ERROR), f"{what}: entry {entry_id} of {ledger_id}: {answer!r}"
        if engine.repair.is_index_damaged:
            await engine.close()
            engine = real_engine(home, kit)
            await engine.open()
            for ledger_id, bodies in written.items():  # the next start rebuilt the index
                assert await kit.read(engine, *((ledger_id, e) for e in range(len(bodies)))) == bodies, what
        assert engine.limbo is None, what
        await engine.close()
        shutil.rmtree(home)


def real_engine(home: Path, kit: Any) -> StorageEngine:
    settings = kit.small_settings(
        journal_directory=str(home / "journal"),
        ledger_directory=str(home / "ledgers"),
        index_write_buffer_size=64 * 1024,
        write_cache_size_max=1024 * 1024,
    )
    return StorageEngine.on_real_disk(settings, wall_clock_ms=lambda: 0)


async def index_template(home: Path, kit: Any) -> dict[int, list[bytes]]:
    written: dict[int, list[bytes]] = {}
    for run in range(2):
        engine = real_engine(home, kit)
        await engine.open()
        for part in range(4):
            for ledger_id in range(run * 20, run * 20 + 12):
                first = part * 120
                bodies = [kit.entry(ledger_id, e, b"%d %d" % (ledger_id, e)) for e in range(first, first + 120)]
                assert set(await kit.add(engine, *map(kit.add_request, bodies))) == {Status.OK}
                written.setdefault(ledger_id, []).extend(bodies)
            await engine.flush()
        await engine.close()
    return written
