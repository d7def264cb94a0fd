"""StorageWatch: when a bookie turns read-only, what it reports, and how it recovers."""

import asyncio
import errno
import threading
from collections.abc import Sequence
from typing import Any

import pytest
from bindery_bookie.maintenance import storage_watch
from bindery_bookie.maintenance.storage_watch import DirectoryStatus, StorageWatch
from bindery_bookie.settings import BookieSettings
from bindery_bookie.state import BookieState
from bindery_bookie.storage.io.disk import DiskUsage
from bindery_bookie.storage.io.reserve import Reserve
from bindery_bookie.storage.io.worker import ThreadWorker
from bindery_bookie.storage.stats import StorageStats
from bindery_kit.observability.health import Health
from bindery_simulation.disk import CrashableDisk

TOTAL = 1000


class Disks:
    """One file system per directory, filled with the reserves and with bytes of other users."""

    def __init__(self, directories: Sequence[str]) -> None:
        self.used = dict.fromkeys(directories, 100)
        self.files: dict[str, int] = {}
        self.broken: dict[str, OSError] = {}

    def _root(self, path: str) -> str:
        return next(root for root in self.used if path == root or path.startswith(f"{root}/"))

    def usage(self, path: str) -> DiskUsage:
        root = self._root(path)
        if root in self.broken:
            raise self.broken[root]
        held = sum(size for name, size in self.files.items() if self._root(name) == root)
        return DiskUsage(TOTAL, TOTAL - self.used[root] - held, list(self.used).index(root))

    def create(self, path: str, *, allocate: int = 0) -> Any:
        if allocate > self.usage(path).free:
            raise OSError(errno.ENOSPC, "No space left on device", path)
        self.files[path] = allocate
        return CrashableDisk().create("/x")

    def open_read(self, path: str) -> Any:
        if path not in self.files:
            raise FileNotFoundError(errno.ENOENT, "No such file", path)
        return CrashableDisk().create("/x", allocate=self.files[path])

    def remove(self, path: str, *, is_unread: bool = False) -> None:
        if path not in self.files:
            raise FileNotFoundError(errno.ENOENT, "No such file", path)
        del self.files[path]

    def sync_directory(self, path: str) -> None:
        self._root(path)


class Shard:
    def __init__(self, disks: Disks, journal: str, ledgers: str, *, reserve_size: int) -> None:
        self.stats = StorageStats()
        self.journal_reserve = Reserve(disks, f"{journal}/current", size=reserve_size)  # type: ignore[arg-type]
        self.ledger_reserve = Reserve(disks, f"{ledgers}/current", size=reserve_size)  # type: ignore[arg-type]
        self.start_reserve = Reserve(disks, f"{ledgers}/current", size=0, name="reserve.start")  # type: ignore[arg-type]


class Watched:
    def __init__(self, *, journals: str = "/j", ledgers: str = "/l", reserve_size: int = 0, **changes: Any) -> None:
        settings = BookieSettings(
            journal_dir=journals, ledger_dir=ledgers, high_priority_free_size_min=20, disk_usage_warn=0.8, **changes
        )
        self.disks = Disks(dict.fromkeys((*settings.journal_dirs, *settings.ledger_dirs)))  # type: ignore[arg-type]
        count = max(len(settings.journal_dirs), len(settings.ledger_dirs))
        self.shards = [
            Shard(
                self.disks,
                settings.journal_dirs[at % len(settings.journal_dirs)],
                settings.ledger_dirs[at % len(settings.ledger_dirs)],
                reserve_size=reserve_size,
            )
            for at in range(count)
        ]
        self.stats = self.shards[0].stats
        self.state, self.health = BookieState(), Health()
        self.failures: list[str] = []
        self.now_ms = 1000
        self.watch = StorageWatch(
            self.shards,
            self.disks,  # type: ignore[arg-type]
            self.state,
            self.health,
            settings,
            wall_clock_ms=lambda: self.now_ms,
            on_journal_failed=self.failures.append,
        )

    def look(self, path: str = "/l", *, used: int) -> bool:
        self.disks.used[path] = used
        self.now_ms += 1000
        self.watch.check_disk()
        return self.state.read_only

    def status(self, path: str) -> DirectoryStatus:
        return next(state.status for state in self.watch.directories() if state.path == path)


@pytest.fixture
def watched() -> Watched:
    return Watched()


@pytest.mark.parametrize("path", ["/l", "/j"])
async def test_the_bookie_is_read_only_above_the_high_mark_until_below_the_low_mark(
    watched: Watched, path: str
) -> None:
    """A full journal directory has the same effect as a full ledger directory."""
    assert [watched.look(path, used=used) for used in (100, 950, 951, 940, 901, 900, 899, 930)] == [
        False,
        False,
        True,
        True,
        True,
        True,
        False,
        False,
    ]


async def test_a_directory_has_its_usage_and_the_time_of_its_status(watched: Watched) -> None:
    watched.look(used=850)
    ledgers, journal = watched.watch.directories()
    assert (ledgers.path, ledgers.holds, journal.path, journal.holds) == ("/l", ("ledgers",), "/j", ("journal",))
    assert ledgers.status == DirectoryStatus.WARN
    assert ledgers.reason == "/l fills up: 850 of 1000 bytes (85.0% with its reserve) in use, more than 80%"
    assert (journal.status, journal.reason, journal.usage) == (DirectoryStatus.OK, "", 0.1)
    assert (ledgers.since_ms, ledgers.last_check_ms, ledgers.free, ledgers.total) == (2000, 2000, 150, 1000)
    watched.look(used=860)
    assert (watched.watch.directories()[0].since_ms, watched.watch.directories()[0].last_check_ms) == (2000, 3000)
    watched.look(used=960)
    assert watched.state.reasons == {
        "disk": "/l is full: 960 of 1000 bytes (96.0% with its reserve) in use, more than 95%; writable again below 90%"
    }
    assert watched.watch.directories()[0].since_ms == 4000
    watched.look(used=920)
    assert watched.state.reasons == {
        "disk": "/l is full: 920 of 1000 bytes (92.0% with its reserve) in use; writable again below 90%"
    }


async def test_the_bookie_is_read_only_until_the_last_full_directory_recovers() -> None:
    watched = Watched(journals="/j0,/j1", ledgers="/l0,/l1,/l2")
    assert [state.path for state in watched.watch.directories()] == ["/l0", "/l1", "/l2", "/j0", "/j1"]
    assert watched.look("/l1", used=960)
    assert watched.look("/j0", used=960)
    assert [name for name in ("/l0", "/l1", "/l2", "/j0", "/j1") if watched.status(name) == "full"] == ["/l1", "/j0"]
    reason = watched.state.reasons["disk"]
    assert "/l1 is full" in reason
    assert "/j0 is full" in reason
    assert watched.look("/l1", used=100)
    assert not watched.look("/j0", used=100)


async def test_usage_is_right_before_the_first_check(watched: Watched) -> None:
    """Gauges of a bookie that has just started must not show empty disks."""
    watched.disks.used["/l"] = 970
    assert watched.watch.usage == 0.97
    assert watched.state.read_only


async def test_a_failed_write_makes_a_directory_full_at_once() -> None:
    watched = Watched(reserve_size=80)
    assert not watched.look(used=500)
    assert set(watched.disks.files) == {"/l/current/reserve", "/j/current/reserve"}
    watched.stats.no_space("[Errno 28] No space left on device: '/l/current/3.log'")
    assert watched.look(used=500)
    assert watched.status("/l") == DirectoryStatus.FULL
    assert watched.status("/j") == DirectoryStatus.OK
    assert "/l/current/3.log" in watched.state.reasons["disk"]
    assert set(watched.disks.files) == {"/j/current/reserve"}
    assert not watched.look(used=500)
    assert set(watched.disks.files) == {"/l/current/reserve", "/j/current/reserve"}


async def test_releasing_the_reserve_does_not_count_as_free_space() -> None:
    """Otherwise the bookie would alternate between writable and read-only."""
    watched = Watched(reserve_size=100)
    assert not watched.look(used=800)
    watched.stats.no_space("/l/current/3.log")
    assert [watched.look(used=used) for used in (800, 805, 799, 790)] == [True, True, False, False]
    state = watched.watch.directories()[0]
    assert (state.reserve_size, state.reserve_held, state.usage) == (100, 100, 0.89)


async def test_a_directory_without_space_for_its_reserve_is_full() -> None:
    watched = Watched(reserve_size=100, disk_usage_max=1.0, disk_usage_low=1.0)
    assert watched.look(used=950)
    assert "no room for its reserve of 100 bytes" in watched.state.reasons["disk"]
    assert not watched.look(used=890)


async def test_a_journal_that_waits_for_space_keeps_the_bookie_read_only(watched: Watched) -> None:
    watched.stats.journal_full = True
    assert watched.look(used=100)
    assert watched.status("/j") == DirectoryStatus.FULL
    watched.stats.journal_full = False
    assert not watched.look(used=100)


async def test_high_priority_adds_need_free_space(watched: Watched) -> None:
    watched.look(used=970)
    assert watched.state.accepts_add(priority=1)
    assert not watched.state.accepts_add(priority=0)
    watched.look(used=990)
    assert not watched.state.accepts_add(priority=1)


async def test_a_disk_that_does_not_answer_has_failed_and_makes_the_bookie_read_only(watched: Watched) -> None:
    watched.disks.broken["/l"] = OSError(5, "Input/output error")
    watched.watch.check_disk()
    assert watched.state.reasons == {"disk": "/l does not answer: Input/output error"}
    assert watched.status("/l") == DirectoryStatus.FAILED
    watched.disks.broken.clear()
    assert not watched.look(used=100)


async def test_repeatedly_failing_flushes_make_the_bookie_read_only_until_one_succeeds() -> None:
    watched = Watched(ledgers="/l,/k")
    watched.shards[1].stats.flush_failed = True
    looks = []
    for _ in range(4):
        watched.watch.check_flush()
        looks.append(watched.state.read_only)
    assert looks == [False, False, True, True]
    assert watched.state.reasons == {"flush": "entries cannot be moved from the journal to the ledger disk"}
    watched.shards[1].stats.flush_failed = False
    watched.watch.check_flush()
    assert not watched.state.read_only
    watched.shards[0].stats.flush_failed = True
    watched.watch.check_flush()
    assert not watched.state.read_only


async def test_the_watch_checks_flushes(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage_watch, "TICK_S", 0.001)
    watched.stats.flush_failed = True
    watching = asyncio.create_task(watched.watch.run())
    async with asyncio.timeout(30):
        while not watched.state.read_only:
            await asyncio.sleep(0.001)
    watching.cancel()


async def test_a_journal_that_failed_ends_the_bookie_once() -> None:
    watched = Watched(journals="/j,/k")
    watched.watch.check_journal()
    assert watched.failures == []
    watched.shards[1].stats.journal_failed = True
    watched.watch.check_journal()
    watched.watch.check_journal()
    assert watched.failures == ["the journal could not be written"]
    assert not watched.health.is_live
    assert watched.state.read_only


async def test_the_watch_checks_periodically() -> None:
    watched = Watched(disk_check_interval_s=0.01)
    watched.disks.used["/l"] = 1000
    running = asyncio.create_task(watched.watch.run())
    async with asyncio.timeout(30):
        while not watched.state.read_only:
            await asyncio.sleep(0.001)
        watched.disks.used["/l"] = 100
        while watched.state.read_only:
            await asyncio.sleep(0.001)
    running.cancel()


async def test_a_failed_write_is_checked_before_the_interval_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk is also checked every tick, not every `disk_check_interval_s`."""
    watched = Watched(disk_check_interval_s=3600.0)
    running = asyncio.create_task(watched.watch.run())
    await asyncio.sleep(0.01)
    assert not watched.state.read_only
    monkeypatch.setattr(storage_watch, "TICK_S", 0.001)
    watched.disks.used["/l"] = 1000
    watched.stats.no_space("/l/current/3.log")
    async with asyncio.timeout(30):
        while not watched.state.read_only:
            await asyncio.sleep(0.001)
        watched.disks.used["/l"] = 100
    async with asyncio.timeout(30):
        while watched.state.read_only:
            await asyncio.sleep(0.001)
    running.cancel()


def test_a_ledger_disk_that_fills_up_requests_garbage_collection(watched: Watched) -> None:
    calls: list[str] = []
    watched.watch._on_pressure = lambda: calls.append("collect")
    watched.look("/l", used=100)
    watched.look("/j", used=990)
    assert calls == []
    watched.look("/l", used=960)
    watched.look("/l", used=970)
    assert calls == ["collect"]
    watched.look("/l", used=100)
    watched.look("/l", used=920)
    assert calls == ["collect", "collect"]


def test_a_ledger_disk_that_stays_full_repeats_the_request() -> None:
    """By then, more garbage may be collectable."""
    watched = Watched(storage={"gc_wait_time_s": 60.0})
    calls: list[int] = []
    watched.watch._on_pressure = lambda: calls.append(watched.now_ms // 1000)
    for _ in range(200):
        watched.look("/l", used=970)
    assert calls == [2, 62, 122, 182]
    for _ in range(200):
        watched.look("/l", used=850)  # above the warning level: requested once
    assert len(calls) == 5
    watched.look("/l", used=970)
    watched.now_ms -= 10**9  # the clock was set back
    watched.look("/l", used=970)
    assert len(calls) == 7


async def test_a_slow_reserve_does_not_block_the_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker allocates and syncs the reserve, while the event loop continues."""
    loop = asyncio.get_running_loop()
    watched = Watched(reserve_size=80)
    watched.watch._start_worker = lambda: ThreadWorker("watch", loop)
    real, moved_on, waits = watched.disks.create, threading.Event(), []

    def create(path: str, *, allocate: int = 0) -> Any:
        waits.append(path)
        assert moved_on.wait(30), "the loop waits for the disk"
        return real(path, allocate=allocate)

    monkeypatch.setattr(watched.disks, "create", create)
    running = asyncio.create_task(watched.watch.run())
    async with asyncio.timeout(60):
        while not waits:
            await asyncio.sleep(0.001)
        assert not watched.disks.files
        moved_on.set()
        while watched.watch.directories()[0].reserve_held != 80:
            await asyncio.sleep(0.001)
    assert len(watched.disks.files) == 2
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert watched.watch._worker is None


async def test_a_failed_write_during_a_check_is_not_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    loop = asyncio.get_running_loop()
    watched = Watched(reserve_size=80, disk_check_interval_s=3600.0)
    watched.watch._start_worker = lambda: ThreadWorker("watch", loop)
    real = watched.disks.usage
    looks: list[str] = []

    def usage(path: str) -> DiskUsage:
        if path == "/l" and path not in looks:
            loop.call_soon_threadsafe(watched.stats.no_space, "/l/current/3.log")
        looks.append(path)
        return real(path)

    monkeypatch.setattr(watched.disks, "usage", usage)
    await watched.watch.check()
    found = watched.watch._check_now.is_set()
    await watched.watch.check()
    assert (found, watched.status("/l")) == (True, DirectoryStatus.FULL)
    watched.watch._worker.close()  # type: ignore[union-attr]


async def test_reading_gauges_during_the_start_restores_no_reserve(watched: Watched) -> None:
    watched = Watched(reserve_size=80)
    assert watched.watch.usage == 0.18
    assert not watched.disks.files
