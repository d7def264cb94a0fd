"""Journal groups that the event loop writes itself."""

import asyncio
import contextlib
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, cast

import pytest
from bindery_bookie.storage.io.worker import ThreadWorker
from bindery_bookie.storage.journal import journal_format as fmt
from bindery_bookie.storage.journal.journal import BUSY_GROUP_RECORDS, INLINE_TIME_MAX_S, Journal, JournalStart
from bindery_bookie.storage.journal.journal_format import JournalPosition
from bindery_bookie.storage.journal.journal_writer import JournalWriter
from bindery_bookie.storage.settings import StorageSettings
from bindery_bookie.storage.stats import StorageStats

SIZE_MAX = StorageSettings().journal_inline_size_max
QUICK_S, SLOW_S = INLINE_TIME_MAX_S / 4, INLINE_TIME_MAX_S * 20


class Writer:
    """A writer that writes nothing, takes `seconds`, and records in which thread it ran."""

    room = 2**30
    is_short = False

    def clock(self) -> float:
        return self.now

    def __init__(self) -> None:
        self.now = 0.0
        self.pauses: list[float] = []
        self.seconds = QUICK_S
        self.fails = False
        self.places: list[bool] = []
        self._loop_thread = threading.get_ident()

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.now += seconds

    def write(self, group: bytes, position: JournalPosition, written: Callable[[], None] | None, link: Any) -> float:
        self.places.append(threading.get_ident() == self._loop_thread)
        if self.fails:
            raise OSError("broken")
        if written is not None:
            written()
        return self.seconds


@pytest.fixture
async def writer() -> Writer:
    return Writer()


@contextlib.contextmanager
def journal_of(writer: Writer, *, next_journal_id: int | None = None) -> Iterator[Journal]:
    loop = asyncio.get_running_loop()
    worker = ThreadWorker("journal", loop, sleep=writer.pause)
    yield Journal(
        writer=cast(JournalWriter, writer),
        worker=worker,
        loop=loop,
        settings=StorageSettings(),
        stats=StorageStats(),
        start=JournalStart(JournalPosition(1, fmt.HEADER_SIZE + fmt.SECTOR_SIZE, 1), next_journal_id),
    )
    worker.close()


@pytest.fixture
async def journal(writer: Writer) -> AsyncIterator[Journal]:
    with journal_of(writer) as journal:
        yield journal


async def append(journal: Journal, size: int, *, when_written: bool = False) -> bool:
    synced = asyncio.get_running_loop().create_future()
    journal.append([bytes(size)], size, synced.set_result, when_written=when_written)
    return bool(await asyncio.wait_for(synced, 30))


async def test_a_small_group_is_written_by_the_loop(journal: Journal, writer: Writer) -> None:
    assert await append(journal, 100)
    assert await append(journal, 100, when_written=True)
    assert writer.places == [True, True]


async def test_a_large_group_goes_to_the_worker(journal: Journal, writer: Writer) -> None:
    assert await append(journal, SIZE_MAX)
    assert writer.places == [False]


async def test_while_syncs_are_slow_the_worker_writes_all_groups(journal: Journal, writer: Writer) -> None:
    writer.seconds = SLOW_S
    for _ in range(10):
        assert await append(journal, 100)
    assert writer.places[0]
    assert not writer.places[-1]
    writer.seconds = QUICK_S
    for _ in range(40):
        assert await append(journal, 100)
    assert writer.places[10:12] == [False, False]
    assert writer.places[-1]


async def test_one_slow_sync_among_quick_ones_changes_nothing(journal: Journal, writer: Writer) -> None:
    for seconds in (QUICK_S, QUICK_S, SLOW_S, QUICK_S, QUICK_S):
        writer.seconds = seconds
        assert await append(journal, 100)
    assert all(writer.places)


async def test_the_worker_creates_files(journal: Journal, writer: Writer) -> None:
    writer.room = 0
    assert await append(journal, 100)
    assert writer.places == [False]


async def test_the_worker_creates_the_first_file_too(writer: Writer) -> None:
    with journal_of(writer, next_journal_id=2) as journal:
        assert await append(journal, 100)
        assert await append(journal, 100)
    assert writer.places == [False, True]


async def test_a_failed_inline_write_fails_the_journal(journal: Journal, writer: Writer) -> None:
    writer.fails = True
    assert not await append(journal, 100)
    assert journal.failed
    assert not await append(journal, 100)
    assert writer.places == [True]


@pytest.mark.parametrize("when_written", [False, True])
async def test_a_failing_callback_does_not_prevent_others(journal: Journal, when_written: bool) -> None:
    told: list[bool] = []

    def broken(ok: bool) -> None:
        told.append(ok)
        raise RuntimeError("a fault of ours")

    journal.append([b"x"], 1, broken, when_written=when_written)
    assert await append(journal, 100, when_written=when_written)
    assert await append(journal, 100)
    assert told == [True]
    assert not journal.failed


async def test_groups_keep_their_order_when_loop_and_worker_alternate(journal: Journal) -> None:
    heard: list[int] = []
    for n in range(60):
        size = SIZE_MAX if n % 3 == 0 else 50
        journal.append([bytes(size)], size, lambda ok, n=n: heard.append(n))  # type: ignore[misc]
        if n % 4 == 0:
            await asyncio.sleep(0)
    assert await append(journal, 1)
    assert heard == list(range(60))


async def test_callbacks_of_a_group_run_before_the_next_inline_write(journal: Journal, writer: Writer) -> None:
    """Callbacks also run in the order of the records."""
    heard: list[tuple[str, int]] = []
    journal.append([bytes(SIZE_MAX)], SIZE_MAX, lambda ok: heard.append(("large", len(writer.places))))
    await asyncio.sleep(0)
    journal.append([bytes(9)], 9, lambda ok: heard.append(("small", len(writer.places))))
    assert await append(journal, 9)
    assert writer.places == [False, True]
    assert heard == [("large", 1), ("small", 2)]


async def test_the_next_large_group_is_written_while_callbacks_run(journal: Journal, writer: Writer) -> None:
    """The next group is submitted to the worker before the callbacks, which may take long."""
    seen: list[int] = []

    def wait_for_next(ok: bool) -> None:
        deadline = time.monotonic() + 30
        while len(writer.places) < 2 and time.monotonic() < deadline:
            time.sleep(0.001)
        seen.append(len(writer.places))

    journal.append([bytes(SIZE_MAX)], SIZE_MAX, wait_for_next)
    await asyncio.sleep(0)
    assert await append(journal, SIZE_MAX)
    assert seen == [2]


async def test_an_inline_group_is_counted_in_the_statistics(writer: Writer) -> None:
    now = 100.0
    adds: list[tuple[float, int]] = []
    queued: list[tuple[float, int]] = []
    writer.clock = lambda: now  # type: ignore[method-assign]
    with journal_of(writer) as journal:
        stats = journal._stats
        stats.observe_journal_add = lambda seconds, count: adds.append((seconds, count))
        stats.observe_journal_queue = lambda seconds, count: queued.append((seconds, count))
        for _ in range(2):
            heard = asyncio.get_running_loop().create_future()
            journal.append([bytes(4), bytes(50)], 54, heard.set_result)
            now += 3.0
            assert await heard
            now += 50.0
            await asyncio.sleep(0)
        assert writer.places == [True, True]
        assert adds == [(3.0, 1)] * 2
        assert queued == [(3.0, 1)] * 2
        assert stats.journal_at_disk == 0
        assert (stats.journal_groups, stats.journal_sync_s) == (2, 2 * QUICK_S)


PACE_S = StorageSettings().journal_pace_s


def add_records(journal: Journal, count: int) -> "asyncio.Future[bool]":
    synced: asyncio.Future[bool] = asyncio.get_running_loop().create_future()
    journal.append([b"size", b"body"] * count, 8 * count, synced.set_result)
    return synced


async def append_records(journal: Journal, count: int) -> bool:
    return await asyncio.wait_for(add_records(journal, count), 30)


async def test_busy_groups_are_paced_and_include_adds_that_arrive_meanwhile(journal: Journal, writer: Writer) -> None:
    assert await append_records(journal, BUSY_GROUP_RECORDS)
    assert writer.pauses == []
    writer.now += PACE_S / 3
    first = add_records(journal, 1)
    await asyncio.sleep(0)
    assert writer.pauses == [pytest.approx(PACE_S * 2 / 3)]
    second = add_records(journal, 1)  # as if it arrived at a socket during the pause
    assert await asyncio.wait_for(first, 30)
    assert second.done()
    assert writer.places == [True, True], "one group for both"
    assert await append_records(journal, 1)
    assert len(writer.pauses) == 1, "the group before was a small one"


async def test_every_busy_group_after_the_first_is_paced(journal: Journal, writer: Writer) -> None:
    for _ in range(4):
        assert await append_records(journal, BUSY_GROUP_RECORDS)
    assert writer.pauses == [pytest.approx(PACE_S)] * 3


async def test_single_and_late_adds_never_wait(journal: Journal, writer: Writer) -> None:
    for _ in range(5):
        assert await append_records(journal, BUSY_GROUP_RECORDS - 1)
    for _ in range(5):
        writer.now += PACE_S
        assert await append_records(journal, BUSY_GROUP_RECORDS)
    assert writer.pauses == []


async def test_a_stopped_clock_does_not_delay_groups(journal: Journal, writer: Writer) -> None:
    writer.pause = writer.pauses.append  # type: ignore[method-assign]
    for _ in range(3):
        assert await append_records(journal, BUSY_GROUP_RECORDS)
    assert len(writer.places) == 3
