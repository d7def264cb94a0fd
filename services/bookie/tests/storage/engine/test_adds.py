"""The add path: what reaches cache and journal, the reasons of refusals, and adds that wait for room."""

import asyncio
import struct
from collections.abc import Callable, Sequence
from typing import Any, cast

import pytest
from bindery_bookie.storage import control_records as control
from bindery_bookie.storage.engine import adds as adds_module
from bindery_bookie.storage.engine.adds import Adds
from bindery_bookie.storage.flushing.flush_loop import FlushLoop
from bindery_bookie.storage.index.index import Index
from bindery_bookie.storage.index.index_format import LedgerRow
from bindery_bookie.storage.io.kv import MemoryKV
from bindery_bookie.storage.journal.journal import Journal
from bindery_bookie.storage.memory.ledgers import LedgerTable
from bindery_bookie.storage.memory.write_cache import WriteCaches
from bindery_bookie.storage.settings import StorageSettings
from bindery_bookie.storage.stats import StorageStats
from bindery_core.errors import DamagedStorage
from bindery_core.wire.messages import AddRequest, Status, WriteFlag
from bindery_simulation.instant import BEGINNING_S

OK, DEFERRED = Status.OK, WriteFlag.DEFERRED_SYNC
OVERHEAD = 160
"""Bytes that a cache counts per entry in addition to its body."""
KEY_RECORD = 4 + 20 + 20
"""Bytes of the journal record of a ledger's key."""


class ScriptedJournal:
    """Keeps records, and calls back when a test says so."""

    def __init__(self) -> None:
        self.failed = self.is_full = False
        self.appended: list[tuple[list[bytes], int, bool]] = []
        """Record parts, their bytes, whether the callback waits for the write only."""
        self.waiting: list[Callable[[bool], None]] = []

    def append(
        self, parts: Sequence[bytes], size: int, synced: Callable[[bool], None], *, when_written: bool = False
    ) -> None:
        assert sum(map(len, parts)) == size
        self.appended.append((list(parts), size, when_written))
        self.waiting.append(synced)

    def sync(self, is_durable: bool = True) -> None:
        waiting, self.waiting = self.waiting, []
        for synced in waiting:
            synced(is_durable)

    @property
    def records(self) -> list[bytes]:
        """The bodies of all records, whose size words must match."""
        bodies: list[bytes] = []
        for parts, _, _ in self.appended:
            for word, body in zip(parts[::2], parts[1::2], strict=True):
                assert word == struct.pack(">I", len(body))
                bodies.append(body)
        return bodies


class ScriptedFlushLoop:
    """A flush loop whose caches have room when a test says so."""

    def __init__(self) -> None:
        self.has_room = True
        self.asked = 0
        self.timers = 0

    def make_room(self) -> bool:
        self.asked += 1
        return self.has_room

    def start_age_timer(self) -> None:
        self.timers += 1


class World:
    """The add path with a scripted journal and flush loop."""

    def __init__(self, *, cache_size: int = 100_000, **settings: Any) -> None:
        self.kv = MemoryKV()
        self.index = Index(self.kv)
        self.ledgers = LedgerTable(self.index, ledgers_max=16, tombstones_max=16)
        self.caches = WriteCaches(cache_size)
        self.journal, self.flush_loop = ScriptedJournal(), ScriptedFlushLoop()
        self.stats = StorageStats()
        self.now_ms = 5_000
        self.answers: list[list[int]] = []
        self.adds = Adds(
            ledgers=self.ledgers,
            caches=self.caches,
            journal=cast(Journal, self.journal),
            flush_loop=cast(FlushLoop, self.flush_loop),
            wall_clock_ms=lambda: self.now_ms,
            settings=StorageSettings(**{"waiting_size_max": 1000, "waiting_time_max_s": 10.0, **settings}),
            stats=self.stats,
        )

    def send(self, *requests: AddRequest) -> None:
        self.adds.add_many(requests, lambda statuses: self.answers.append(list(statuses)))

    def add(self, *requests: AddRequest) -> list[int]:
        """Send a batch, make it durable, and return its statuses."""
        self.send(*requests)
        self.journal.sync()
        return self.answers.pop()

    def store(self, ledger_id: int, row: LedgerRow) -> None:
        self.index.commit(runs=[], merges={}, ledgers={ledger_id: row}, deleted=(), generation=1)

    def fenced(self, ledger_id: int, key: bytes) -> None:
        self.ledgers.fence(self.ledgers.create(ledger_id, key))
        self.ledgers.take_changes()


@pytest.fixture
async def world() -> World:
    return World()


def request(kit: Any, ledger_id: int, entry_id: int, size: int = 50, **others: Any) -> AddRequest:
    """Return an add with a body of `size` bytes."""
    lac = others.pop("lac", -1)
    made: AddRequest = kit.add_request(kit.entry(ledger_id, entry_id, bytes(size - 32), lac=lac), **others)
    return made


# --- accepted adds ----------------------------------------------------------------------------------------------------


async def test_an_add_is_answered_once_its_record_is_durable(world: World, kit: Any) -> None:
    body = request(kit, 5, 0)
    world.send(body)
    assert world.answers == []
    assert world.caches.active.get(5, 0) == body.body, "readable before the answer"
    assert world.journal.appended == [
        (
            [struct.pack(">I", 40), control.pack_master_key(5, kit.KEY), struct.pack(">I", 50), body.body],
            KEY_RECORD + 54,
            False,
        )
    ]
    world.journal.sync()
    assert world.answers == [[OK]]


async def test_the_key_of_a_ledger_is_journaled_once(world: World, kit: Any) -> None:
    first, second, third = (request(kit, 5, entry_id) for entry_id in range(3))
    assert world.add(first, second) == [OK, OK]
    assert world.add(third) == [OK]
    key = control.pack_master_key(5, kit.KEY)
    assert world.journal.records == [key, first.body, second.body, third.body]
    assert world.ledgers.changed[5].has_new_key


async def test_the_batches_of_a_ledger_are_cached_together(world: World, kit: Any) -> None:
    sent = [request(kit, ledger_id, entry_id) for entry_id in range(2) for ledger_id in (0, 6)]
    assert world.add(*sent[:3]) == [OK] * 3
    assert world.add(sent[3]) == [OK]
    assert world.caches.active.ledgers == {
        0: {0: sent[0].body, 1: sent[2].body},
        6: {0: sent[1].body, 1: sent[3].body},
    }
    assert world.caches.active.entries == 4
    assert world.caches.active.size == world.stats.active_cache_size == 4 * (50 + OVERHEAD)
    assert (world.stats.adds_ok, world.stats.add_bytes) == (4, 200)


async def test_a_known_ledger_is_read_from_the_index(world: World, kit: Any) -> None:
    world.store(5, LedgerRow(kit.KEY, False, 3, 9, None))
    body = request(kit, 5, 4)
    assert world.add(body) == [OK]
    assert world.journal.records == [body.body]
    assert (world.ledgers.states[5].last_entry_id, world.ledgers.states[5].lac) == (9, 3)


async def test_the_first_entry_of_an_empty_cache_starts_the_timer(world: World, kit: Any) -> None:
    world.add(request(kit, 5, 0))
    world.add(request(kit, 6, 0))
    assert world.flush_loop.timers == 1
    world.caches.swap()
    world.add(request(kit, 5, 1))
    assert world.flush_loop.timers == 2


async def test_last_entry_and_lac_of_a_ledger_never_decrease(world: World, kit: Any) -> None:
    world.add(request(kit, 5, 7, lac=6), request(kit, 5, 3, lac=2))
    state = world.ledgers.states[5]
    assert (state.last_entry_id, state.lac, state.lac_updated_ms) == (7, 6, 5_000)
    world.now_ms = 6_000
    world.add(request(kit, 5, 8, lac=6))
    assert (state.last_entry_id, state.lac, state.lac_updated_ms) == (8, 6, 5_000)
    world.add(request(kit, 5, 9, lac=7), request(kit, 6, 0, lac=-1))
    assert (state.last_entry_id, state.lac, state.lac_updated_ms) == (9, 7, 6_000)
    assert world.ledgers.states[6].lac_updated_ms == 0


async def test_watchers_of_the_lac_are_woken_when_it_advances(world: World, kit: Any) -> None:
    world.add(request(kit, 5, 0), request(kit, 6, 0))
    woken: list[int] = []
    for ledger_id in (5, 6):
        world.ledgers.states[ledger_id].watchers[1] = lambda ledger_id=ledger_id: woken.append(ledger_id)  # type: ignore[misc]
    world.add(request(kit, 5, 1), request(kit, 6, 1, lac=0), request(kit, 6, 2, lac=1))
    assert woken == [6]


async def test_only_a_batch_of_deferred_adds_is_answered_after_the_write(world: World, kit: Any) -> None:
    batches = [
        ([0], False),
        ([DEFERRED], True),
        ([DEFERRED, DEFERRED], True),
        ([DEFERRED, 0], False),
        ([0, DEFERRED], False),
        ([DEFERRED | 2], True),
        ([2], False),
    ]
    for flags, _ in batches:
        world.add(*(request(kit, 5, entry_id, flags=each) for entry_id, each in enumerate(flags)))
    assert [when_written for _, _, when_written in world.journal.appended] == [expected for _, expected in batches]


async def test_copies_are_recorded_and_ordinary_adds_are_not(kit: Any) -> None:
    await asyncio.sleep(10)
    world = World()
    await asyncio.sleep(10)
    world.add(request(kit, 5, 0), request(kit, 6, 0, recovery=True))
    seen, now = world.adds.copies_seen, BEGINNING_S + 20
    assert seen.since(6, now)
    assert not seen.since(6, now + 0.1)
    assert not seen.since(5, now - 9)
    assert seen.since(5, now - 10), "nothing is known about the time before the start"


# --- refused adds -----------------------------------------------------------------------------------------------------


async def test_bodies_that_are_no_entries_are_refused_and_the_others_accepted(
    world: World, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adds_module, "BODY_SIZE_MAX", 60)
    smallest = kit.add_request(kit.entry(5, 0)[:24])
    short, long = kit.add_request(kit.entry(5, 1)[:23]), request(kit, 5, 2, 61)
    largest = request(kit, 5, 3, 60)
    assert world.add(short, smallest, long, largest) == [Status.BAD_REQUEST, OK, Status.BAD_REQUEST, OK]
    assert world.caches.active.ledgers == {5: {0: smallest.body, 3: largest.body}}
    assert (world.stats.adds_bad, world.stats.adds_ok, world.stats.add_bytes) == (2, 2, 84)


async def test_negative_ids_are_refused(world: World, kit: Any) -> None:
    adds = [request(kit, *ids) for ids in ((5, -1), (-1, 5), (0, 0), (5, control.FENCE), (-1, -1), (0, 1))]
    bad = Status.BAD_REQUEST
    assert world.add(*adds) == [bad, bad, OK, bad, bad, OK]
    assert world.stats.adds_bad == 4
    assert list(world.ledgers.states) == [0]


async def test_a_batch_without_any_accepted_add_writes_nothing(world: World, kit: Any) -> None:
    world.add(request(kit, 5, 0))
    world.journal.appended.clear()
    timers = world.flush_loop.timers
    world.send(request(kit, 5, 1, key=b"other"), request(kit, -1, 0))
    assert world.answers == [[Status.UNAUTHORIZED, Status.BAD_REQUEST]], "answered at once"
    assert world.journal.appended == []
    assert world.flush_loop.timers == timers
    assert (world.stats.adds_ok, world.stats.adds_unauthorized, world.stats.adds_bad) == (1, 1, 1)


async def test_another_key_is_refused(world: World, kit: Any) -> None:
    good, bad = request(kit, 5, 0), request(kit, 5, 1, key=b"other")
    assert world.add(good, bad, request(kit, 5, 2)) == [OK, Status.UNAUTHORIZED, OK]
    assert world.add(request(kit, 5, 3, key=b"other", recovery=True)) == [Status.UNAUTHORIZED]
    assert sorted(world.caches.active.ledgers[5]) == [0, 2]
    assert world.stats.adds_unauthorized == 2
    assert world.caches.active.entries == 2


async def test_a_fenced_ledger_accepts_copies_only(world: World, kit: Any) -> None:
    world.fenced(5, kit.KEY)
    copy = request(kit, 5, 1, recovery=True)
    assert world.add(request(kit, 5, 0), copy, request(kit, 5, 2), request(kit, 6, 0)) == [
        Status.FENCED,
        OK,
        Status.FENCED,
        OK,
    ]
    assert world.caches.active.ledgers[5] == {1: copy.body}
    assert world.stats.adds_fenced == 2
    assert world.adds.copies_seen.since(5, asyncio.get_running_loop().time())


async def test_a_fenced_ledger_without_a_key_learns_that_of_the_first_client(world: World, kit: Any) -> None:
    world.fenced(5, b"")
    assert world.add(request(kit, 5, 0)) == [Status.FENCED]
    assert world.journal.records == [control.pack_master_key(5, kit.KEY)]
    assert world.ledgers.states[5].master_key == kit.KEY
    copy = request(kit, 5, 0, recovery=True)
    assert world.add(copy, request(kit, 5, 1, key=b"other")) == [OK, Status.UNAUTHORIZED]
    assert world.journal.records[1:] == [copy.body]


async def test_a_deleted_fenced_ledger_is_created_again_by_copies_only_and_stays_fenced(world: World, kit: Any) -> None:
    world.fenced(5, kit.KEY)
    world.ledgers.delete(5)
    late, copy = request(kit, 5, 0), request(kit, 5, 1, recovery=True)
    assert world.add(late, request(kit, 6, 0)) == [Status.FENCED, OK]
    assert 5 not in world.ledgers.states
    world.journal.appended.clear()
    assert world.add(late, copy, late) == [Status.FENCED, OK, Status.FENCED]
    assert world.journal.records == [control.pack_master_key(5, kit.KEY), control.pack_fence(5), copy.body]
    assert world.ledgers.states[5].is_fenced
    assert world.stats.adds_fenced == 3


@pytest.mark.parametrize("error", [OSError(5, "broken"), DamagedStorage("row")], ids=["disk", "damage"])
async def test_adds_to_a_ledger_whose_row_cannot_be_read_get_io_error(world: World, kit: Any, error: Exception) -> None:
    def broken(ledger_id: int) -> Any:
        raise error

    good = request(kit, 6, 0)
    world.add(good)
    world.index.ledger_row = broken  # type: ignore[method-assign]
    assert world.add(request(kit, 5, 0), request(kit, 6, 1), request(kit, 5, 1)) == [
        Status.IO_ERROR,
        OK,
        Status.IO_ERROR,
    ]
    assert sorted(world.caches.active.ledgers) == [6]
    assert (world.stats.adds_ok, world.stats.adds_bad) == (2, 0)


async def test_accepted_adds_that_do_not_become_durable_get_the_reason(world: World, kit: Any) -> None:
    bad = kit.add_request(kit.entry(5, 9)[:23])
    world.send(bad, request(kit, 5, 0))
    world.journal.sync(False)
    world.send(bad, request(kit, 5, 1))
    world.journal.is_full = True
    world.journal.sync(False)
    assert world.answers == [[Status.BAD_REQUEST, Status.IO_ERROR], [Status.BAD_REQUEST, Status.READ_ONLY]]


async def test_with_a_failed_or_full_journal_no_add_is_accepted(world: World, kit: Any) -> None:
    adds = request(kit, 5, 0), request(kit, 5, 1)
    world.journal.is_full = True
    world.send(*adds)
    world.journal.failed = True
    world.send(*adds)
    assert world.answers == [[Status.READ_ONLY] * 2, [Status.IO_ERROR] * 2]
    assert world.journal.appended == []
    assert world.caches.active.ledgers == {}


# --- adds that wait for room ------------------------------------------------------------------------------------------


async def full_world(kit: Any, **settings: Any) -> World:
    """Return a world whose write caches are full."""
    world = World(cache_size=200, **settings)
    assert world.add(request(kit, 5, 0)) == [OK]
    assert world.flush_loop.asked == 1, "a full cache is swapped at once"
    world.journal.appended.clear()
    world.flush_loop.has_room = False
    return world


async def test_a_full_cache_is_swapped_for_the_next_add(kit: Any) -> None:
    world = await full_world(kit)
    world.flush_loop.has_room = True
    world.send(request(kit, 5, 1))
    assert len(world.journal.appended) == 1
    assert world.stats.adds_waited == 0


async def test_waiting_adds_are_accepted_in_order_while_there_is_room(kit: Any) -> None:
    world = await full_world(kit, waiting_size_max=2000)
    for entry_id in range(1, 4):
        world.send(request(kit, 5, entry_id), request(kit, 6, entry_id))
    assert world.journal.appended == []
    assert world.answers == []
    assert (world.stats.waiting_adds, world.stats.waiting_size, world.stats.adds_waited) == (6, 6 * 210, 6)
    rooms = [True, True, False]
    world.flush_loop.make_room = lambda: rooms.pop(0)  # type: ignore[method-assign]
    world.caches.active.size_max = 10**6
    world.adds.resume()
    assert rooms == []
    assert (world.stats.waiting_adds, world.stats.waiting_size, world.stats.adds_waited) == (2, 2 * 210, 6)
    world.send(request(kit, 7, 0))
    assert len(world.journal.appended) == 2, "an add waits behind earlier ones, even if there is room again"
    world.flush_loop.make_room = lambda: True  # type: ignore[method-assign]
    world.adds.resume()
    world.journal.sync()
    assert world.answers == [[OK, OK], [OK, OK], [OK, OK], [OK]]
    assert [control.unpack_ids(body) for body in world.journal.records if len(body) == 50] == [
        (5, 1),
        (6, 1),
        (5, 2),
        (6, 2),
        (5, 3),
        (6, 3),
        (7, 0),
    ]
    assert (world.stats.waiting_adds, world.stats.waiting_size) == (0, 0)
    await asyncio.sleep(20)
    assert world.stats.adds_rejected == 0


async def test_the_bytes_of_waiting_adds_are_limited(kit: Any) -> None:
    world = await full_world(kit, waiting_size_max=420)
    world.send(request(kit, 5, 1))
    world.send(request(kit, 5, 2), request(kit, 5, 3))
    assert world.answers == [[Status.TOO_MANY_REQUESTS] * 2]
    world.send(request(kit, 5, 4))  # exactly the limit
    world.send(request(kit, 5, 5, 32))
    assert world.answers == [[Status.TOO_MANY_REQUESTS] * 2, [Status.TOO_MANY_REQUESTS]]
    assert (world.stats.waiting_adds, world.stats.waiting_size) == (2, 420)
    assert (world.stats.adds_rejected, world.stats.adds_waited) == (3, 2)


async def test_an_add_that_waited_too_long_is_refused(kit: Any) -> None:
    world = await full_world(kit)
    world.send(request(kit, 5, 1))
    await asyncio.sleep(4)
    world.send(request(kit, 5, 2), request(kit, 5, 3))
    await asyncio.sleep(5.9)
    assert world.answers == []
    await asyncio.sleep(0.2)
    assert world.answers == [[Status.TOO_MANY_REQUESTS]]
    assert (world.stats.waiting_adds, world.stats.waiting_size, world.stats.adds_rejected) == (2, 420, 1)
    await asyncio.sleep(3.8)
    assert len(world.answers) == 1
    await asyncio.sleep(0.2)
    assert world.answers[1:] == [[Status.TOO_MANY_REQUESTS] * 2]
    assert (world.stats.waiting_adds, world.stats.waiting_size, world.stats.adds_rejected) == (0, 0, 3)
    await asyncio.sleep(5)
    world.send(request(kit, 5, 4))
    await asyncio.sleep(9.9)
    assert len(world.answers) == 2, "each has its own time"
    await asyncio.sleep(0.2)
    assert len(world.answers) == 3


async def test_adds_of_the_same_time_are_refused_together(kit: Any) -> None:
    world = await full_world(kit)
    for entry_id in range(1, 4):
        world.send(request(kit, 5, entry_id))
    await asyncio.sleep(10)
    await asyncio.sleep(0)
    assert world.answers == [[Status.TOO_MANY_REQUESTS]] * 3
    assert scheduled() == 0


def scheduled() -> int:
    """Return the number of timers that are not cancelled."""
    loop: Any = asyncio.get_running_loop()
    return sum(not timer.cancelled() for timer in loop._scheduled)


async def test_no_timer_is_left_once_no_add_waits(kit: Any) -> None:
    world = await full_world(kit)
    world.send(request(kit, 5, 1))
    world.send(request(kit, 5, 2))
    assert scheduled() == 1
    world.adds.resume()
    assert scheduled() == 1, "there was no room"
    world.flush_loop.has_room = True
    world.adds.resume()
    assert scheduled() == 0
    world.flush_loop.has_room = False
    world.send(request(kit, 5, 3))
    await asyncio.sleep(10.1)
    assert world.answers == [[Status.TOO_MANY_REQUESTS]], "the next waiting add has a timer again"


async def test_waiting_adds_get_the_reason_if_the_journal_failed_or_is_full(kit: Any) -> None:
    world = await full_world(kit)
    world.send(request(kit, 5, 1), request(kit, 5, 2))
    world.send(request(kit, 5, 3))
    world.flush_loop.has_room = True
    world.journal.is_full = True
    world.adds.resume()
    assert world.answers == [[Status.READ_ONLY] * 2, [Status.READ_ONLY]]
    world.journal.is_full = world.flush_loop.has_room = False
    world.send(request(kit, 5, 4), request(kit, 5, 5))
    world.flush_loop.has_room = world.journal.failed = True
    world.adds.resume()
    assert world.answers[2:] == [[Status.IO_ERROR] * 2]
    assert world.journal.appended == []
    assert (world.stats.waiting_adds, world.stats.waiting_size) == (0, 0)


async def test_a_close_refuses_all_waiting_adds(kit: Any) -> None:
    world = await full_world(kit)
    world.send(request(kit, 5, 1))
    world.send(request(kit, 5, 2), request(kit, 5, 3))
    world.adds.close()
    assert world.answers == [[Status.TOO_MANY_REQUESTS], [Status.TOO_MANY_REQUESTS] * 2]
    assert (world.stats.waiting_adds, world.stats.waiting_size, world.stats.adds_rejected) == (0, 0, 3)
    assert scheduled() == 0
    world.adds.close()
    assert len(world.answers) == 2
