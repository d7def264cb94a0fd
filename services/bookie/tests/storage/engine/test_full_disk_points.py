"""A disk becomes full before each single operation that may need space, one after the other.

There are two kinds of runs. In the first one, the operation fails once, and then there is space again. In the second
one, another process takes all free space before the operation and keeps it until the test frees it. Journal writes go
to allocated space, so they cannot fail for lack of space. The creation of journals can fail, and so can every write to
entry logs, mark, index and reserve.
"""

import asyncio
import contextlib
import errno
from collections.abc import Callable
from typing import Any

import pytest
from bindery_bookie.maintenance.storage_watch import StorageWatch
from bindery_bookie.settings import BookieSettings
from bindery_bookie.state import BookieState
from bindery_bookie.storage.io.errors import JournalFailed, JournalFull
from bindery_bookie.storage.io.fault_injection import FaultyDisk, FaultyKV
from bindery_bookie.storage.settings import KIB
from bindery_core.wire.messages import Status
from bindery_kit.observability.health import Health

REFUSED = (Status.READ_ONLY, Status.TOO_MANY_REQUESTS)
RESERVES = (96 * KIB, 0)
"""Reserve sizes in bytes. Without a reserve, the journal itself may stop for lack of space."""

OPERATIONS = ("create", "write_at", "rename", "sync_directory", "write_batch")


class Scene:
    """One bookie's storage and its disk monitor, on a disk whose operations are counted."""

    def __init__(self, kit: Any, *, reserve_size: int) -> None:
        self.kit = kit
        self.points = 0
        """Number of operations so far that a full disk can refuse."""
        self.at_point: Callable[[int], bool] = lambda point: False
        """Called before each operation; True: the operation finds no space."""
        self.world = kit.World(
            wrap=lambda disk: FaultyDisk(disk, self._before),
            journal_file_size_max=64 * KIB,
            journal_retry_s=0.001,
            flush_retry_s=0.001,
            waiting_time_max_s=0.01,
            reserve_size=reserve_size,
        )
        self.world.disk.capacity = 4096 * KIB
        self.state = BookieState()
        self.failures: list[str] = []
        self.acknowledged: dict[tuple[int, int], bytes] = {}
        self.fenced: set[int] = set()
        self.was_journal_full = False
        self.next_id = 0

    def _before(self, operation: str, path: str) -> OSError | None:
        if operation not in OPERATIONS or (operation == "write_at" and path.endswith(".txn")):
            return None
        self.points += 1
        if self.at_point(self.points):
            return OSError(errno.ENOSPC, "No space left on device", path)
        return None

    async def start(self) -> None:
        real = self.world.kv
        self.engine = self.world.engine(open_kv=lambda path: FaultyKV(real, path, self._before))
        self.watch = StorageWatch(
            [self.engine],
            self.world.wrap(self.world.disk),
            self.state,
            Health(),
            BookieSettings(journal_dir="/journal", ledger_dir="/ledgers", high_priority_free_size_min=0),
            wall_clock_ms=lambda: 0,
            on_journal_failed=self.failures.append,
        )
        await self.engine.open()
        self.watch.check_disk()

    async def add(self) -> set[int]:
        """Send three batches at once: one is written, the others are queued."""
        if self.state.read_only:
            return {Status.READ_ONLY}
        found = await asyncio.gather(*(self._add_batch(2) for _ in range(3)))
        return {status for statuses in found for status in statuses}

    async def _add_batch(self, count: int) -> list[int]:
        first, self.next_id = self.next_id, self.next_id + count
        bodies = [self.kit.entry(n % 3, n, bytes([n % 251]) * 2400) for n in range(first, first + count)]
        statuses = await self.kit.add(self.engine, *map(self.kit.add_request, bodies))
        for n, body, status in zip(range(first, first + count), bodies, statuses, strict=True):
            if status == Status.OK:
                self.acknowledged[n % 3, n] = body
            else:
                assert status in REFUSED, Status(status).name
        return statuses

    async def work(self) -> None:
        for turn in range(8):
            await self.add()
            if turn % 3 == 2:
                with contextlib.suppress(OSError):
                    await self.engine.flush()
            if turn == 5:
                with contextlib.suppress(JournalFailed, JournalFull):
                    await self.engine.fence(7, self.kit.KEY)
                    self.fenced.add(7)
            self.was_journal_full |= self.engine.stats.journal_full
            await self.check()
            if turn % 4 == 3:
                self.watch.check_disk()
            self.watch.check_journal()

    async def check(self) -> None:
        """Check that all acknowledged entries are readable and unchanged."""
        keys = list(self.acknowledged)
        found = await self.kit.read(self.engine, *keys)
        wrong = [key for key, body in zip(keys, found, strict=True) if body != self.acknowledged[key]]
        assert not wrong, (wrong, found[keys.index(wrong[0])])

    async def recover(self) -> None:
        """Check that with free space the bookie is writable after two checks, and adds are accepted."""
        for _ in range(100):  # iterations of the loop for retries that have begun
            await asyncio.sleep(0.0005)
            if not (self.engine.stats.flush_failed or self.engine.stats.journal_full):
                break
        self.watch.check_disk()
        self.watch.check_disk()
        assert not self.state.read_only, self.state.reasons
        assert not self.failures
        async with asyncio.timeout(30):
            while (found := await self.add()) != {Status.OK}:  # a retried flush may still use a cache
                assert found <= {Status.OK, Status.TOO_MANY_REQUESTS}, found
                await asyncio.sleep(0.001)
        await self.check()

    async def restart(self) -> None:
        await self.engine.close()
        self.world.disk = self.world.disk.after_power_cut(1)
        self.world.kv = self.world.kv.after_power_cut(1, self.world.disk)
        await self.start()
        await self.check()
        for ledger_id in self.fenced:
            refused = await self.kit.add(self.engine, self.kit.add_request(self.kit.entry(ledger_id, 0)))
            assert refused == [Status.FENCED]


async def count_points(kit: Any, *, reserve_size: int) -> range:
    """Return the numbers of the operations after the first start."""
    scene = Scene(kit, reserve_size=reserve_size)
    await scene.start()
    first = scene.points
    await scene.work()
    await scene.engine.close()
    assert scene.points - first > 35
    return range(first + 1, scene.points + 1)


@pytest.mark.parametrize("reserve_size", RESERVES)
async def test_the_bookie_recovers_if_any_operation_finds_no_space_once(kit: Any, reserve_size: int) -> None:
    for failing in await count_points(kit, reserve_size=reserve_size):
        scene = Scene(kit, reserve_size=reserve_size)
        await scene.start()
        scene.at_point = lambda point, failing=failing: point == failing  # type: ignore[misc]
        await scene.work()
        await scene.recover()
        await scene.restart()
        await scene.engine.close()


async def run_full_from(kit: Any, failing: int, *, reserve_size: int, restart: bool = False) -> bool:
    """Let another process take all space before operation `failing`. Return whether the journal was full.

    `restart`: cut the power while the disk is full.
    """
    scene = Scene(kit, reserve_size=reserve_size)
    await scene.start()

    def fill(point: int) -> bool:
        if point == failing:
            scene.world.disk.fill()
        return False

    scene.at_point = fill
    await scene.work()
    await scene.check()
    if restart:
        scene.world.disk = scene.world.disk.after_power_cut(failing)
        scene.world.kv = scene.world.kv.after_power_cut(failing, scene.world.disk)
        scene.world.disk.fill()
        await scene.start()
        await scene.check()
        scene.world.disk.fill()  # the start may have freed space by deleting journals
        scene.watch.check_disk()
        assert scene.state.read_only
        await scene.check()
    scene.world.disk.taken = 0
    scene.at_point = lambda point: False
    await scene.recover()
    await scene.restart()
    await scene.engine.close()
    return scene.was_journal_full


@pytest.mark.parametrize("reserve_size", RESERVES)
async def test_the_bookie_recovers_from_a_disk_that_is_full_from_any_operation_on(kit: Any, reserve_size: int) -> None:
    points = await count_points(kit, reserve_size=reserve_size)
    was_full = [await run_full_from(kit, failing, reserve_size=reserve_size) for failing in points]
    if not reserve_size:
        assert any(was_full), "the journal must have been full in some runs"


async def test_a_start_on_a_full_disk_succeeds_and_serves_reads(kit: Any) -> None:
    for failing in await count_points(kit, reserve_size=RESERVES[0]):
        await run_full_from(kit, failing, reserve_size=RESERVES[0], restart=True)
