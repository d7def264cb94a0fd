"""Flush loop: when flushes begin, what their failure means for those who wait, and how the loop ends."""

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any, cast

import pytest
from bindery_bookie.storage.flushing.flush import Flush, Flusher
from bindery_bookie.storage.flushing.flush_loop import FlushLoop, drop_flushed, take_flush
from bindery_bookie.storage.index.index import Index
from bindery_bookie.storage.io.kv import MemoryKV
from bindery_bookie.storage.journal.journal import Journal
from bindery_bookie.storage.journal.journal_format import JournalPosition
from bindery_bookie.storage.memory.ledgers import LedgerTable
from bindery_bookie.storage.memory.write_cache import WriteCache, WriteCaches
from bindery_bookie.storage.settings import StorageSettings
from bindery_bookie.storage.stats import StorageStats
from bindery_core.errors import DamagedStorage
from bindery_simulation.instant import BEGINNING_S

KEY = b"k" * 20
ENTRY = 100 + 160
"""Bytes that a write cache counts for an entry of `World.add`."""
INTERVAL_S, RETRY_S = 10.0, 2.0
DEADLINE_S = 100_000.0


class ScriptedFlusher:
    """A Flusher that writes nothing. It records its calls, and fails with the errors that a test adds."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.errors: dict[str, list[Exception]] = {"store": [], "mark": [], "roll": []}
        self.seconds = 0.0
        """Duration of a store."""
        self.in_store: Callable[[], object] = lambda: None

    async def store(self, flush: Flush) -> None:
        self._called("store", str(sorted(flush.cache.ledgers)))
        if self.seconds:
            await asyncio.sleep(self.seconds)
        self.in_store()

    async def advance_mark(self, position: JournalPosition) -> None:
        self._called("mark", str(position.offset))

    async def roll(self) -> None:
        self._called("roll", "")

    def _called(self, name: str, what: str) -> None:
        self.calls.append(f"{name} {what}".rstrip())
        if self.errors[name]:
            raise self.errors[name].pop(0)


class ScriptedJournal:
    """The end of a journal, which a test moves."""

    def __init__(self) -> None:
        self.failed = False
        self.position = JournalPosition(1, 512, 1)
        self.synced = 0
        self.errors: list[Exception] = []

    async def all_synced(self) -> None:
        self.synced += 1
        if self.errors:
            raise self.errors.pop(0)


class World:
    """A flush loop over two small write caches."""

    def __init__(self, *, unfinished: Flush | None = None) -> None:
        self.stats = StorageStats()
        self.caches = WriteCaches(3 * ENTRY)
        self.ledgers = LedgerTable(Index(MemoryKV()), ledgers_max=16, tombstones_max=16)
        self.journal = ScriptedJournal()
        self.flusher = ScriptedFlusher()
        self.done: list[Flush] = []
        self.at_done: Callable[[Flush], object] = lambda flush: None
        self.no_space: list[str] = []
        self.seconds: list[float] = []
        self.stats.no_space = self.no_space.append
        self.stats.observe_flush_s = self.seconds.append
        self.loop = FlushLoop(
            caches=self.caches,
            ledgers=self.ledgers,
            journal=cast(Journal, self.journal),
            journal_synced=self.journal.all_synced,
            flusher=cast(Flusher, self.flusher),
            clock=now,
            settings=StorageSettings(flush_interval_s=INTERVAL_S, flush_retry_s=RETRY_S),
            stats=self.stats,
            flushed=self._flushed,
            unfinished=unfinished,
        )

    def add(self, ledger_id: int, count: int = 1) -> None:
        if self.ledgers.find(ledger_id) is None:
            self.ledgers.create(ledger_id, KEY)
        for entry_id in range(count):
            self.caches.active.put(ledger_id, entry_id, bytes(100))
        self.journal.position = JournalPosition(1, self.journal.position.offset + 100 * count, 1)

    def _flushed(self, flush: Flush) -> None:
        self.done.append(flush)
        self.at_done(flush)

    @property
    def stored(self) -> list[str]:
        return [call.removeprefix("store ") for call in self.flusher.calls if call.startswith("store")]


def now() -> float:
    """Return the seconds since the start of the test."""
    return asyncio.get_running_loop().time() - BEGINNING_S


async def settle() -> None:
    """Return once no task can continue without a timer."""
    await asyncio.sleep(0.001)


def begun(work: Coroutine[Any, Any, None]) -> "asyncio.Task[None]":
    return asyncio.get_running_loop().create_task(work)


@pytest.fixture
async def world() -> World:
    return World()


@pytest.fixture(autouse=True)
async def deadline() -> AsyncIterator[None]:
    """Fail a test that waits forever. The simulated clock reaches the deadline once all tasks are blocked."""
    loop = asyncio.get_running_loop()
    timer = loop.call_later(DEADLINE_S, loop.stop)
    yield
    timer.cancel()


# --- taking and dropping a flush --------------------------------------------------------------------------------------


def test_without_entries_and_changes_there_is_no_flush() -> None:
    caches, stats = WriteCaches(1000), StorageStats()
    ledgers = LedgerTable(Index(MemoryKV()), ledgers_max=16, tombstones_max=16)
    active = caches.active
    assert take_flush(caches, ledgers, stats, JournalPosition(1, 512, 1)) is None
    assert caches.active is active


def test_a_flush_has_the_cache_and_the_states_of_its_ledgers_and_all_changes() -> None:
    caches, stats = WriteCaches(1000), StorageStats(active_cache_size=7)
    ledgers = LedgerTable(Index(MemoryKV()), ledgers_max=16, tombstones_max=16)
    for ledger_id in (1, 2, 3):
        ledgers.create(ledger_id, KEY)
    ledgers.take_changes()
    ledgers.fence(ledgers.states[2])
    ledgers.delete(3)
    caches.active.put(1, 0, bytes(100))
    active = caches.active
    flush = take_flush(caches, ledgers, stats, JournalPosition(4, 1024, 9))
    assert flush is not None
    assert flush.cache is caches.flushing is active
    assert caches.active.ledgers == {}
    assert flush.states == {2: ledgers.states[2], 1: ledgers.states[1]}
    assert list(flush.deleted) == [3]
    assert flush.position == JournalPosition(4, 1024, 9)
    assert (stats.active_cache_size, stats.flushing_cache_size) == (0, ENTRY)
    assert (flush.attempts, flush.is_stored, flush.control_records) == (0, False, None)


@pytest.mark.parametrize("what", ["entries", "a fence", "a deletion"])
def test_any_change_is_flushed(what: str) -> None:
    caches, stats = WriteCaches(1000), StorageStats()
    ledgers = LedgerTable(Index(MemoryKV()), ledgers_max=16, tombstones_max=16)
    state = ledgers.create(1, KEY)
    ledgers.take_changes()
    if what == "entries":
        caches.active.put(1, 0, b"body")
    elif what == "a fence":
        ledgers.fence(state)
    else:
        ledgers.delete(1)
    assert take_flush(caches, ledgers, stats, JournalPosition(1, 512, 1)) is not None
    assert not ledgers.has_changes


def test_after_a_flush_its_cache_and_idle_ledgers_are_dropped() -> None:
    caches, stats = WriteCaches(1000), StorageStats()
    ledgers = LedgerTable(Index(MemoryKV()), ledgers_max=2, tombstones_max=16)
    for ledger_id in range(1, 6):
        ledgers.create(ledger_id, KEY)
        caches.active.put(ledger_id, 0, bytes(100))
    ledgers.delete(5)
    caches.drop_ledger(5)
    flush = take_flush(caches, ledgers, stats, JournalPosition(1, 512, 1))
    assert flush is not None
    assert ledgers.is_hidden(5)
    caches.active.put(1, 1, b"in the next flush")
    drop_flushed(caches, ledgers, stats)
    assert caches.flushing is None
    assert not ledgers.is_hidden(5)
    assert sorted(ledgers.states) == [1, 4]
    assert (stats.flushing_cache_size, stats.ledgers_in_memory) == (0, 2)


# --- when a flush begins ----------------------------------------------------------------------------------------------


async def test_entries_of_the_start_are_flushed_after_the_interval(world: World) -> None:
    world.add(1)
    world.loop.start()
    await asyncio.sleep(INTERVAL_S - 0.01)
    assert world.flusher.calls == []
    assert not world.loop.is_done
    await asyncio.sleep(0.02)
    assert world.flusher.calls == ["store [1]", "mark 612"]
    assert world.loop.is_done
    await world.loop.stop()
    assert world.stored == ["[1]"]


async def test_the_age_of_the_first_entry_counts(world: World) -> None:
    world.loop.start()
    await asyncio.sleep(5)
    world.add(1)
    world.loop.start_age_timer()
    await asyncio.sleep(INTERVAL_S - 1)
    world.add(2)
    world.loop.start_age_timer()
    await asyncio.sleep(0.9)
    assert world.stored == []
    await asyncio.sleep(0.2)
    assert world.stored == ["[1, 2]"]
    world.add(3)
    world.loop.start_age_timer()
    await asyncio.sleep(INTERVAL_S - 0.1)
    assert world.stored == ["[1, 2]"]
    await asyncio.sleep(0.2)
    assert world.stored == ["[1, 2]", "[3]"]
    await world.loop.stop()


async def test_an_idle_loop_starts_no_timer(world: World) -> None:
    world.loop.start()
    await asyncio.sleep(3 * INTERVAL_S)
    world.add(1)
    await asyncio.sleep(INTERVAL_S + 1)
    assert world.stored == [], "whoever adds starts the timer"
    await world.loop.stop()
    assert world.stored == ["[1]"]


async def test_entries_added_during_a_flush_are_flushed_after_another_interval(world: World) -> None:
    world.loop.start()
    world.add(1)
    world.flusher.in_store = lambda: world.add(2)
    await world.loop.flush()
    world.flusher.in_store = lambda: None
    await asyncio.sleep(INTERVAL_S - 0.1)
    assert world.stored == ["[1]"]
    await asyncio.sleep(0.2)
    assert world.stored == ["[1]", "[2]"]
    await world.loop.stop()


async def test_a_full_cache_is_swapped_if_the_other_one_is_free(world: World) -> None:
    world.loop.start()
    world.flusher.seconds = 5.0
    assert world.loop.make_room()
    world.add(1, 2)
    assert world.loop.make_room()
    assert world.caches.flushing is None
    world.add(1, 1)
    full = world.caches.active
    assert world.loop.make_room()
    assert world.caches.flushing is full
    assert world.stats.flushing_cache_size == 3 * ENTRY
    world.add(2, 3)
    assert not world.loop.make_room(), "both are full"
    await asyncio.sleep(4.9)
    assert world.stored == ["[1]"], "the flush begins at once"
    assert not world.loop.make_room()
    await asyncio.sleep(0.2)
    assert world.loop.make_room()
    await asyncio.sleep(5.1)
    assert world.stored == ["[1]", "[2]"]
    await world.loop.stop()


async def test_no_cache_is_swapped_while_a_flush_of_the_start_is_unfinished() -> None:
    """Its cache is the flushing one."""
    before = World()
    before.add(1, 3)
    unfinished = take_flush(before.caches, before.ledgers, before.stats, JournalPosition(1, 700, 3))
    assert unfinished is not None
    world = World(unfinished=unfinished)
    assert not world.loop.is_done
    world.add(2, 3)
    assert not world.loop.make_room()
    world.loop.start()
    await settle()
    assert world.flusher.calls == ["store [1]", "mark 700"], "it does not wait for the interval"
    assert world.done == [unfinished]
    await world.loop.stop()
    assert world.stored == ["[1]", "[2]"]


# --- a flush on request -----------------------------------------------------------------------------------------------


async def test_a_request_flushes_entries_and_the_mark_after_the_journal(world: World) -> None:
    world.loop.start()
    world.add(1)
    world.flusher.seconds = 3.0
    world.flusher.in_store = lambda: world.flusher.calls.append(f"synced {world.journal.synced}")
    await world.loop.flush()
    assert world.flusher.calls == ["store [1]", "synced 1", "mark 612"]
    assert now() == pytest.approx(3.0)
    assert (world.stats.flush_s, world.seconds) == (pytest.approx(3.0), [pytest.approx(3.0)])
    assert world.loop.is_done
    assert world.stats.active_cache_size == world.stats.flushing_cache_size == 0
    await world.loop.flush()
    assert world.stored == ["[1]"], "nothing is left to flush"
    world.add(2)
    await world.loop.flush()
    assert world.stats.flush_s == pytest.approx(6.0)
    await world.loop.stop()


async def test_the_flushed_cache_is_dropped_before_listeners_are_told(world: World) -> None:
    world.loop.start()
    world.add(1, 2)
    found: list[object] = []
    world.at_done = lambda flush: found.append((world.caches.flushing, flush.cache.get(1, 1), world.loop.is_done))
    await world.loop.flush()
    assert found == [(None, bytes(100), True)]
    await settle()
    assert world.done[0].cache.ledgers == {}, "its entries are freed"
    await world.loop.stop()


async def test_a_large_cache_is_freed_in_parts(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    released: list[int] = []
    real = WriteCache.release

    def release(cache: WriteCache, count: int) -> bool:
        released.append(count)
        turns.append(len(passed))
        return real(cache, count)

    turns: list[int] = []
    passed: list[None] = []

    def tick() -> None:
        passed.append(None)
        if len(released) < 3 and len(passed) < 100:
            asyncio.get_running_loop().call_soon(tick)

    monkeypatch.setattr(WriteCache, "release", release)
    world.loop.start()
    world.add(1, 2 * 4096 + 1)
    tick()
    await world.loop.flush()
    await settle()
    assert released == [4096, 4096, 4096]
    assert turns[0] < turns[1] < turns[2], "the event loop runs others in between"
    assert now() < 0.01
    await world.loop.stop()


async def test_a_request_during_a_flush_waits_for_what_was_added_meanwhile(world: World) -> None:
    world.loop.start()
    world.flusher.seconds = 5.0
    world.add(1)
    first = begun(world.loop.flush())
    await asyncio.sleep(1)
    same = begun(world.loop.flush())
    await settle()
    world.add(2)
    later = begun(world.loop.flush())
    await asyncio.sleep(4.1)
    assert (first.done(), same.done(), later.done()) == (True, True, False)
    await asyncio.sleep(5)
    assert later.done()
    assert world.stored == ["[1]", "[2]"]
    await asyncio.gather(first, same, later)
    await world.loop.stop()


async def test_a_cancelled_request_does_not_disturb_others(world: World) -> None:
    world.loop.start()
    world.flusher.seconds = 1.0
    world.add(1)
    requests = [begun(world.loop.flush()) for _ in range(3)]
    await settle()
    requests[0].cancel()
    await asyncio.gather(*requests[1:])
    assert requests[0].cancelled()
    world.flusher.errors["store"] = [OSError(5, "broken")]
    world.add(2)
    requests = [begun(world.loop.flush()) for _ in range(3)]
    await asyncio.sleep(0)
    requests[0].cancel()
    answers = await asyncio.gather(*requests[1:], return_exceptions=True)
    assert [str(answer) for answer in answers] == ["flush failed", "flush failed"]
    await world.loop.stop()


async def test_without_a_running_loop_only_an_empty_flush_succeeds(world: World) -> None:
    await world.loop.flush()
    world.add(1)
    with pytest.raises(OSError, match="storage is closing"):
        await world.loop.flush()
    world.loop.start()
    await world.loop.stop()
    await world.loop.flush()
    world.add(1)
    with pytest.raises(OSError, match="storage is closing"):
        await world.loop.flush()


# --- failures ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "error", [OSError(5, "broken"), DamagedStorage("index"), KeyError("a bug")], ids=["disk", "damage", "bug"]
)
async def test_a_failed_flush_is_reported_and_retried_after_a_pause(world: World, error: Exception) -> None:
    world.loop.start()
    world.add(1)
    world.flusher.errors["store"] = [error, error]
    with pytest.raises(OSError, match="flush failed"):
        await world.loop.flush()
    assert world.stats.flush_failed
    assert world.no_space == []
    assert not world.loop.is_done
    assert world.caches.flushing is not None, "its entries stay readable"
    await asyncio.sleep(RETRY_S - 0.01)
    assert world.stored == ["[1]"]
    await asyncio.sleep(0.02)
    assert world.stored == ["[1]", "[1]"]
    await asyncio.sleep(RETRY_S)
    assert world.flusher.calls == ["store [1]", "store [1]", "store [1]", "mark 612"]
    assert not world.stats.flush_failed
    assert len(world.done) == 1
    assert world.loop.is_done
    await world.loop.stop()


async def test_a_full_disk_is_reported(world: World) -> None:
    world.loop.start()
    world.add(1)
    world.flusher.errors["store"] = [OSError(28, "No space left on device", "/ledgers/1.log")]
    with pytest.raises(OSError, match="flush failed"):
        await world.loop.flush()
    assert world.no_space == ["[Errno 28] No space left on device: '/ledgers/1.log'"]
    await world.loop.stop()


async def test_a_request_ends_the_pause(world: World) -> None:
    world.loop.start()
    world.add(1)
    world.flusher.errors["store"] = [OSError(5, "broken")]
    with pytest.raises(OSError, match="flush failed"):
        await world.loop.flush()
    await world.loop.flush()
    assert now() < 0.01
    assert world.stored == ["[1]", "[1]"]
    await world.loop.stop()


async def test_a_request_during_a_failing_attempt_does_not_end_the_pause_after_it(world: World) -> None:
    world.loop.start()
    world.add(1)
    world.flusher.seconds = 1.0
    world.flusher.in_store = lambda: fail(OSError(5, "broken"))
    first = begun(world.loop.flush())
    await asyncio.sleep(0.5)
    second = begun(world.loop.flush())
    answers = await asyncio.gather(first, second, return_exceptions=True)
    assert [str(answer) for answer in answers] == ["flush failed", "flush failed"]
    world.flusher.in_store = lambda: None
    await asyncio.sleep(RETRY_S - 0.1)
    assert world.stored == ["[1]"]
    await asyncio.sleep(0.2)
    assert world.stored == ["[1]", "[1]"]
    await world.loop.stop()


def fail(error: Exception) -> None:
    raise error


async def test_after_a_failed_mark_the_entries_are_not_stored_again(world: World) -> None:
    world.loop.start()
    world.add(1)
    world.flusher.errors["mark"] = [OSError(5, "broken")]
    with pytest.raises(OSError, match="flush failed"):
        await world.loop.flush()
    world.add(2)
    await world.loop.flush()
    assert world.flusher.calls == ["store [1]", "mark 612", "mark 612", "store [2]", "mark 712"]
    await world.loop.stop()


async def test_nothing_is_stored_before_the_journal_is_durable(world: World) -> None:
    world.loop.start()
    world.add(1)
    world.journal.errors = [OSError(5, "broken")]
    with pytest.raises(OSError, match="flush failed"):
        await world.loop.flush()
    assert world.flusher.calls == []
    await world.loop.flush()
    assert world.flusher.calls == ["store [1]", "mark 612"]
    assert world.journal.synced == 2
    await world.loop.stop()


async def test_with_a_failed_journal_nothing_is_flushed_and_requests_fail(world: World) -> None:
    world.loop.start()
    world.journal.failed = True
    world.add(1)
    for _ in range(2):
        with pytest.raises(OSError, match="flush failed"):
            await world.loop.flush()
    with pytest.raises(OSError, match="flush failed"):
        await world.loop.roll()
    await asyncio.sleep(INTERVAL_S + 1)
    assert world.flusher.calls == []
    assert not world.stats.flush_failed, "the flush did not fail, the journal did"
    await world.loop.stop()
    assert world.flusher.calls == []
    assert not world.loop.is_done


async def test_a_flush_that_waits_for_a_retry_is_not_repeated_after_the_journal_failed(world: World) -> None:
    world.loop.start()
    world.add(1)
    world.flusher.errors["store"] = [OSError(5, "broken")]
    with pytest.raises(OSError, match="flush failed"):
        await world.loop.flush()
    world.journal.failed = True
    await asyncio.sleep(5 * RETRY_S)
    assert world.stored == ["[1]"]
    await world.loop.stop()
    assert world.stored == ["[1]"]


# --- closing the open log ---------------------------------------------------------------------------------------------


async def test_the_open_log_is_closed_on_request(world: World) -> None:
    world.loop.start()
    await world.loop.roll()
    assert world.flusher.calls == ["roll"]
    await asyncio.gather(world.loop.roll(), world.loop.roll())
    assert world.flusher.calls == ["roll", "roll"], "one call serves all who wait"
    await world.loop.stop()


async def test_the_open_log_is_closed_after_the_current_flush(world: World) -> None:
    world.loop.start()
    world.flusher.seconds = 2.0
    world.add(1)
    flush = begun(world.loop.flush())
    await asyncio.sleep(1)
    await world.loop.roll()
    assert world.flusher.calls == ["store [1]", "mark 612", "roll"]
    await flush
    await world.loop.stop()


@pytest.mark.parametrize("error", [OSError(5, "broken"), DamagedStorage("short log")], ids=["disk", "damage"])
async def test_an_error_of_closing_the_log_reaches_all_who_wait(world: World, error: Exception) -> None:
    world.loop.start()
    world.flusher.errors["roll"] = [error]
    waiting = [begun(world.loop.roll()) for _ in range(3)]
    await asyncio.sleep(0)
    waiting[0].cancel()
    answers = await asyncio.gather(*waiting, return_exceptions=True)
    assert isinstance(answers[0], asyncio.CancelledError)
    assert answers[1:] == [error, error]
    await world.loop.roll()
    assert world.flusher.calls == ["roll", "roll"]
    await world.loop.stop()


async def test_a_log_is_not_closed_while_a_flush_is_unfinished(world: World) -> None:
    world.loop.start()
    world.add(1)
    world.flusher.errors["store"] = [OSError(5, "broken")]
    with pytest.raises(OSError, match="flush failed"):
        await world.loop.roll()
    assert world.flusher.calls == ["store [1]"]
    await world.loop.stop()


# --- stop -------------------------------------------------------------------------------------------------------------


async def test_a_stop_flushes_everything_and_ends_timers(world: World) -> None:
    world.loop.start()
    world.add(1)
    world.loop.start_age_timer()
    world.flusher.seconds = 1.0
    flush = begun(world.loop.flush())
    await asyncio.sleep(0.5)
    world.add(2)
    await world.loop.stop()
    assert world.stored == ["[1]", "[2]"]
    assert world.loop.is_done
    await flush
    assert scheduled() == 0
    world.add(3)
    world.loop.start_age_timer()
    assert scheduled() == 0
    with pytest.raises(OSError, match="storage is closing"):
        await world.loop.roll()


def scheduled() -> int:
    """Return the number of timers that are not cancelled, without that of the deadline."""
    loop: Any = asyncio.get_running_loop()
    return sum(not timer.cancelled() for timer in loop._scheduled) - 1


async def test_a_stop_tries_a_failing_flush_once(world: World) -> None:
    world.loop.start()
    world.add(1)
    world.flusher.errors["store"] = [OSError(5, "broken")] * 9
    waiting = begun(world.loop.flush())
    await asyncio.sleep(0)
    await world.loop.stop()
    with pytest.raises(OSError, match="flush failed"):
        await waiting
    assert world.stored == ["[1]"]
    assert now() == 0
    assert not world.loop.is_done


async def test_a_stop_ends_the_pause_after_a_failure_with_one_more_attempt(world: World) -> None:
    world.loop.start()
    world.add(1)
    world.flusher.errors["store"] = [OSError(5, "broken")]
    with pytest.raises(OSError, match="flush failed"):
        await world.loop.flush()
    await world.loop.stop()
    assert now() < 0.01
    assert world.flusher.calls == ["store [1]", "store [1]", "mark 612"]
    assert world.loop.is_done


async def test_a_roll_requested_before_the_stop_is_done(world: World) -> None:
    world.loop.start()
    await settle()
    rolling = begun(world.loop.roll())
    await asyncio.sleep(0)
    await world.loop.stop()
    await rolling
    assert world.flusher.calls == ["roll"]


async def test_a_loop_that_was_never_started_can_be_stopped(world: World) -> None:
    world.add(1)
    world.loop.start_age_timer()
    await world.loop.stop()
    assert scheduled() == 0
    assert not world.loop.is_done
