"""Several engines as one store: the contract of an EntryStore holds for any number of directories."""

import asyncio
import random
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from bindery_bookie.settings import BookieSettings
from bindery_bookie.storage.engine.engine import StorageEngine
from bindery_bookie.storage.engine.shards import ShardedStorage
from bindery_bookie.storage.journal.journal_format import JournalPosition
from bindery_bookie.storage.opening.replay import Replay
from bindery_bookie.storage.settings import KIB
from bindery_bookie.storage.store import EntryStore, ReplayProgress
from bindery_core.errors import DamagedStorage, NoSuchLedger, Unauthorized
from bindery_core.wire.messages import Status
from bindery_simulation.disk import CrashableDisk, CrashableKV

OK = Status.OK
LAYOUTS = {"1+1": ("/j", "/l"), "3+1": ("/j", "/l,/m,/n"), "2+2": ("/j,/k", "/l,/m"), "1+2": ("/j,/k", "/l")}
"""Journal and ledger directories; the names are the numbers of ledger directories and of journals."""


class Bookie:
    """The shards of one bookie, on disks that can lose power, over several runs."""

    def __init__(self, kit: Any, journal_dir: str, ledger_dir: str) -> None:
        self.kit = kit
        settings = BookieSettings(
            journal_dir=journal_dir, ledger_dir=ledger_dir, storage=kit.small_settings(reserve_size=0)
        )
        self.settings = settings.resolved_storages()
        self.disk = CrashableDisk()
        self.kvs: dict[str, CrashableKV] = {}

    def engines(self) -> list[StorageEngine]:
        lots = random.Random(1)
        return [
            StorageEngine(
                settings,
                disk=self.disk,
                open_kv=lambda path: self.kvs.setdefault(path, CrashableKV(self.disk)),
                destroy_kv=lambda path: self.kvs[path].clear(),
                start_worker=lambda name: self.kit.InlineWorker(lots),
                wall_clock_ms=lambda: 1000,
            )
            for settings in self.settings
        ]

    async def opened(self) -> ShardedStorage:
        store = ShardedStorage(self.engines())
        await store.open()
        return store

    def lose_power(self) -> None:
        self.disk = self.disk.after_power_cut(7)
        self.kvs = {path: kv.after_power_cut(7, self.disk) for path, kv in self.kvs.items()}


@pytest.fixture(params=LAYOUTS.values(), ids=LAYOUTS)
def bookie(kit: Any, request: pytest.FixtureRequest) -> Bookie:
    return Bookie(kit, *request.param)


async def fill(kit: Any, store: EntryStore, ledgers: Sequence[int], entries: int) -> dict[tuple[int, int], bytes]:
    bodies = {(n, e): kit.entry(n, e, b"%d" % (n * 1000 + e) * 20, lac=e - 1) for n in ledgers for e in range(entries)}
    mixed = sorted(bodies, key=lambda key: (key[1], key[0]))
    for at in range(0, len(mixed), 10):
        adds = [kit.add_request(bodies[key]) for key in mixed[at : at + 10]]
        assert await kit.add(store, *adds) == [OK] * len(adds)
    return bodies


async def test_entries_of_all_ledgers_survive_a_power_loss(kit: Any, bookie: Bookie) -> None:
    store: EntryStore = await bookie.opened()
    bodies = await fill(kit, store, range(7), 30)
    assert await kit.read(store, *bodies) == list(bodies.values())
    bookie.lose_power()
    store = await bookie.opened()
    assert await kit.read(store, *bodies) == list(bodies.values())
    assert list(await store.list_ledger_ids()) == list(range(7))
    assert await store.entry_ids(3) == [(0, 30)]
    total, free = store.disk_usage()
    assert 0 < free < total == bookie.disk.capacity, "a file system is counted once"
    await store.close()


async def test_results_are_returned_once_and_in_the_order_of_the_batch(kit: Any, bookie: Bookie) -> None:
    store = await bookie.opened()
    await store.fence(2, kit.KEY)
    adds = [kit.add_request(kit.entry(n % 5, n)) for n in range(20)]
    adds[7].body = b"short"
    adds[9] = kit.add_request(kit.entry(9 % 5, 9), key=b"another key of 20 by")
    first, second = adds[:5], adds[5:]
    assert await kit.add(store, *first) == [Status.FENCED if n == 2 else OK for n in range(5)]
    expected = [Status.FENCED if n % 5 == 2 else OK for n in range(5, 20)]
    expected[2], expected[4] = Status.BAD_REQUEST, Status.UNAUTHORIZED
    assert await kit.add(store, *second) == expected
    keys = [(4, 14), (77, 0), (0, 10), (1, -1), (0, 11), (3, 3), (4, 14)]
    found = await kit.read(store, *keys)
    assert found[0] == found[6] == adds[14].body
    assert found[1:5] == [Status.NO_LEDGER, adds[10].body, adds[16].body, Status.NO_ENTRY]
    await store.close()


async def test_calls_for_a_ledger_go_to_its_shard(kit: Any, bookie: Bookie) -> None:
    store = await bookie.opened()
    await fill(kit, store, range(6), 3)
    woken: list[int] = []
    for ledger_id in range(6):
        assert store.last_add_confirmed(ledger_id) == 1
        assert store.lac_updated_at_ms(ledger_id) == 1000
        last = (await store.read_lac(ledger_id)).last_entry
        assert last is not None
        store.watch_lac(ledger_id, lambda n=ledger_id: woken.append(n))  # type: ignore[misc]
        await store.force(ledger_id)
    await store.write_lac(4, kit.KEY, 2, kit.lac_packet(4, 2))
    await store.fence(5, kit.KEY)
    assert woken == [4, 5]
    await store.delete_ledger(3)
    assert list(await store.list_ledger_ids()) == [0, 1, 2, 4, 5]
    with pytest.raises(NoSuchLedger):
        await store.entry_ids(3)
    with pytest.raises(Unauthorized):
        await store.fence(5, b"another key of 20 by")
    await store.close()


async def test_a_batch_for_one_shard_is_passed_unchanged(kit: Any) -> None:
    store = await Bookie(kit, *LAYOUTS["3+1"]).opened()
    seen: list[Any] = []
    for shard in store.shards:
        shard.add_many = lambda adds, done: seen.append((adds, done))  # type: ignore[method-assign]
        shard.read_many = lambda keys, done: seen.append((keys, done))  # type: ignore[method-assign]
    adds, keys, done = [kit.add_request(kit.entry(4, n)) for n in range(3)], [(4, 0), (7, 1)], print
    store.add_many(adds, done)
    store.read_many(keys, done)
    assert seen[0][0] is adds
    assert seen[1][0] is keys
    assert seen[0][1] is seen[1][1] is done
    empty: list[Any] = []
    del store.shards[0].add_many, store.shards[0].read_many
    store.add_many([], empty.append)
    store.read_many([], empty.append)
    assert empty == [[], []]
    for shard in store.shards:
        await shard.close()


async def test_progress_is_the_sum_of_all_shards(kit: Any) -> None:
    bookie = Bookie(kit, *LAYOUTS["3+1"])
    await fill(kit, await bookie.opened(), range(6), 10)
    bookie.lose_power()
    seen: list[ReplayProgress] = []
    store = ShardedStorage(bookie.engines())
    await store.open(on_progress=seen.append)
    assert seen[-1].entries == 60
    assert [part.entries for part in seen] == sorted(part.entries for part in seen)
    assert seen[-1].bytes_done <= seen[-1].bytes_total
    await store.close()


class Fragile:
    """A shard whose open and close may fail."""

    def __init__(self, *, opens: Exception | None = None, closes: Exception | None = None) -> None:
        self._opens, self._closes = opens, closes
        self.calls: list[str] = []

    async def open(self, *, on_progress: Any = None) -> None:
        await asyncio.sleep(0)
        self.calls.append("open")
        if self._opens:
            raise self._opens

    async def close(self) -> None:
        self.calls.append("close")
        if self._closes:
            raise self._closes


async def test_if_one_shard_fails_to_open_the_others_are_closed() -> None:
    shards: list[Any] = [Fragile(), Fragile(opens=DamagedStorage("bad")), Fragile(closes=OSError("too"))]
    with pytest.raises(DamagedStorage, match="bad"):
        await ShardedStorage(shards).open()
    assert [shard.calls for shard in shards] == [["open", "close"], ["open"], ["open", "close"]]


class Slow(Fragile):
    """A shard with a long replay, which takes a moment to end after a cancellation."""

    async def open(self, *, on_progress: Any = None) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0.01)
            self.calls.append("cancelled")


async def test_a_cancelled_start_closes_the_opened_shards() -> None:
    shards: list[Any] = [Fragile(), Slow(), Fragile(closes=OSError("too"))]
    opening = asyncio.create_task(ShardedStorage(shards).open())
    while not all(shard.calls for shard in (shards[0], shards[2])):
        await asyncio.sleep(0)
    opening.cancel()
    with pytest.raises(asyncio.CancelledError):
        await opening
    assert [shard.calls for shard in shards] == [["open", "close"], ["cancelled"], ["open", "close"]]


async def test_after_a_cancelled_start_the_same_directories_can_be_opened(
    tmp_path: Path, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    settings = BookieSettings(
        journal_dir=str(tmp_path / "j"),
        ledger_dir=f"{tmp_path}/l,{tmp_path}/m",
        storage=kit.small_settings(reserve_size=0),
    ).resolved_storages()

    def engines() -> list[StorageEngine]:
        return [StorageEngine.on_real_disk(one, wall_clock_ms=lambda: 0) for one in settings]

    first, second = engines()
    real_replay = Replay.run

    async def run(replay: Replay, *args: Any) -> JournalPosition:
        if replay._directory == f"{settings[1].journal_directory}/current":
            await asyncio.sleep(3600)
        return await real_replay(replay, *args)

    monkeypatch.setattr(Replay, "run", run)
    opening = asyncio.create_task(ShardedStorage([first, second]).open())
    async with asyncio.timeout(30):
        while not first.is_open:
            await asyncio.sleep(0.001)
    opening.cancel()
    await asyncio.gather(opening, return_exceptions=True)
    assert not first.is_open
    assert [thread.name for thread in threading.enumerate() if thread.name.startswith("bookie-")] == []
    monkeypatch.undo()
    store = ShardedStorage(engines())
    await store.open()
    bodies = await fill(kit, store, range(2), 5)
    assert await kit.read(store, *bodies) == list(bodies.values())
    await store.close()


async def test_all_shards_are_closed_even_if_one_fails() -> None:
    shards: list[Any] = [Fragile(closes=OSError("no")), Fragile(), Fragile()]
    with pytest.raises(OSError, match="no"):
        await ShardedStorage(shards).close()
    assert [shard.calls for shard in shards] == [["close"]] * 3


async def test_files_are_in_the_directories_of_the_layout(tmp_path: Path, kit: Any) -> None:
    """With one shard the files are directly in the directory, with several in a subdirectory per shard."""
    settings = BookieSettings(
        journal_dir=str(tmp_path / "j"),
        ledger_dir=f"{tmp_path}/l,{tmp_path}/m",
        storage=kit.small_settings(reserve_size=64 * KIB),
    ).resolved_storages()
    store = ShardedStorage([StorageEngine.on_real_disk(one, wall_clock_ms=lambda: 0) for one in settings])
    await store.open()
    bodies = await fill(kit, store, range(4), 5)
    await store.close()
    assert sorted(path.name for path in tmp_path.glob("*/current/LastLogMark")) == ["LastLogMark"] * 2
    journals = sorted(str(path.relative_to(tmp_path).parent) for path in tmp_path.glob("j/**/*.txn"))
    assert set(journals) == {"j/shard-0/current", "j/shard-1/current"}
    store = ShardedStorage([StorageEngine.on_real_disk(one, wall_clock_ms=lambda: 0) for one in settings])
    await store.open()
    assert await kit.read(store, *bodies) == list(bodies.values())
    await store.close()
