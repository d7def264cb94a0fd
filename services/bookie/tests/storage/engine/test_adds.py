"""The add path: what reaches cache and journal, the reasons of refusals, and adds that wait for room."""

import asyncio
import struct
from typing import Any

import pytest
from add_scene import AddScene, request_of
from bindery_bookie.storage import control_records as control
from bindery_bookie.storage.engine import adds as adds_module
from bindery_bookie.storage.index.index_format import LedgerRow
from bindery_core.errors import DamagedStorage
from bindery_core.wire.messages import Status, WriteFlag
from bindery_simulation.instant import BEGINNING_S

OK, DEFERRED = Status.OK, WriteFlag.DEFERRED_SYNC
OVERHEAD = 160
"""Bytes that a cache counts per entry in addition to its body."""
KEY_RECORD = 4 + 20 + 20
"""Bytes of the journal record of a ledger's key."""


@pytest.fixture
async def scene() -> AddScene:
    return AddScene()


# --- accepted adds ----------------------------------------------------------------------------------------------------


async def test_an_add_is_answered_once_its_record_is_durable(scene: AddScene, kit: Any) -> None:
    body = request_of(kit, 5, 0)
    scene.send(body)
    assert scene.answers == []
    assert scene.caches.active.get(5, 0) == body.body, "readable before the answer"
    assert scene.journal.appended == [
        (
            [struct.pack(">I", 40), control.pack_master_key(5, kit.KEY), struct.pack(">I", 50), body.body],
            KEY_RECORD + 54,
            False,
        )
    ]
    scene.journal.sync()
    assert scene.answers == [[OK]]


async def test_the_key_of_a_ledger_is_journaled_once(scene: AddScene, kit: Any) -> None:
    first, second, third = (request_of(kit, 5, entry_id) for entry_id in range(3))
    assert scene.add(first, second) == [OK, OK]
    assert scene.add(third) == [OK]
    key = control.pack_master_key(5, kit.KEY)
    assert scene.journal.records == [key, first.body, second.body, third.body]
    assert scene.ledgers.changed[5].has_new_key


async def test_the_batches_of_a_ledger_are_cached_together(scene: AddScene, kit: Any) -> None:
    sent = [request_of(kit, ledger_id, entry_id) for entry_id in range(2) for ledger_id in (0, 6)]
    assert scene.add(*sent[:3]) == [OK] * 3
    assert scene.add(sent[3]) == [OK]
    assert scene.caches.active.ledgers == {
        0: {0: sent[0].body, 1: sent[2].body},
        6: {0: sent[1].body, 1: sent[3].body},
    }
    assert scene.caches.active.entries == 4
    assert scene.caches.active.size == scene.stats.active_cache_size == 4 * (50 + OVERHEAD)
    assert (scene.stats.adds_ok, scene.stats.add_bytes) == (4, 200)


async def test_a_known_ledger_is_read_from_the_index(scene: AddScene, kit: Any) -> None:
    scene.store(5, LedgerRow(kit.KEY, False, 3, 9, None))
    body = request_of(kit, 5, 4)
    assert scene.add(body) == [OK]
    assert scene.journal.records == [body.body]
    assert (scene.ledgers.states[5].last_entry_id, scene.ledgers.states[5].lac) == (9, 3)


async def test_the_first_entry_of_an_empty_cache_starts_the_timer(scene: AddScene, kit: Any) -> None:
    scene.add(request_of(kit, 5, 0))
    scene.add(request_of(kit, 6, 0))
    assert scene.flush_loop.timers == 1
    scene.caches.swap()
    scene.add(request_of(kit, 5, 1))
    assert scene.flush_loop.timers == 2


async def test_last_entry_and_lac_of_a_ledger_never_decrease(scene: AddScene, kit: Any) -> None:
    scene.add(request_of(kit, 5, 7, lac=6), request_of(kit, 5, 3, lac=2))
    state = scene.ledgers.states[5]
    assert (state.last_entry_id, state.lac, state.lac_updated_ms) == (7, 6, 5_000)
    scene.now_ms = 6_000
    scene.add(request_of(kit, 5, 8, lac=6))
    assert (state.last_entry_id, state.lac, state.lac_updated_ms) == (8, 6, 5_000)
    scene.add(request_of(kit, 5, 9, lac=7), request_of(kit, 6, 0, lac=-1))
    assert (state.last_entry_id, state.lac, state.lac_updated_ms) == (9, 7, 6_000)
    assert scene.ledgers.states[6].lac_updated_ms == 0


async def test_watchers_of_the_lac_are_woken_when_it_advances(scene: AddScene, kit: Any) -> None:
    scene.add(request_of(kit, 5, 0), request_of(kit, 6, 0))
    woken: list[int] = []
    for ledger_id in (5, 6):
        scene.ledgers.states[ledger_id].watchers[1] = lambda ledger_id=ledger_id: woken.append(ledger_id)  # type: ignore[misc]
    scene.add(request_of(kit, 5, 1), request_of(kit, 6, 1, lac=0), request_of(kit, 6, 2, lac=1))
    assert woken == [6]


async def test_only_a_batch_of_deferred_adds_is_answered_after_the_write(scene: AddScene, kit: Any) -> None:
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
        scene.add(*(request_of(kit, 5, entry_id, flags=each) for entry_id, each in enumerate(flags)))
    assert [when_written for _, _, when_written in scene.journal.appended] == [expected for _, expected in batches]


async def test_copies_are_recorded_and_ordinary_adds_are_not(kit: Any) -> None:
    await asyncio.sleep(10)
    scene = AddScene()
    await asyncio.sleep(10)
    scene.add(request_of(kit, 5, 0), request_of(kit, 6, 0, recovery=True))
    seen, now = scene.adds.copies_seen, BEGINNING_S + 20
    assert seen.since(6, now)
    assert not seen.since(6, now + 0.1)
    assert not seen.since(5, now - 9)
    assert seen.since(5, now - 10), "nothing is known about the time before the start"


# --- refused adds -----------------------------------------------------------------------------------------------------


async def test_bodies_that_are_no_entries_are_refused_and_the_others_accepted(
    scene: AddScene, kit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(adds_module, "BODY_SIZE_MAX", 60)
    smallest = kit.add_request(kit.entry(5, 0)[:24])
    short, long = kit.add_request(kit.entry(5, 1)[:23]), request_of(kit, 5, 2, 61)
    largest = request_of(kit, 5, 3, 60)
    assert scene.add(short, smallest, long, largest) == [Status.BAD_REQUEST, OK, Status.BAD_REQUEST, OK]
    assert scene.caches.active.ledgers == {5: {0: smallest.body, 3: largest.body}}
    assert (scene.stats.adds_bad, scene.stats.adds_ok, scene.stats.add_bytes) == (2, 2, 84)


async def test_negative_ids_are_refused(scene: AddScene, kit: Any) -> None:
    adds = [request_of(kit, *ids) for ids in ((5, -1), (-1, 5), (0, 0), (5, control.FENCE), (-1, -1), (0, 1))]
    bad = Status.BAD_REQUEST
    assert scene.add(*adds) == [bad, bad, OK, bad, bad, OK]
    assert scene.stats.adds_bad == 4
    assert list(scene.ledgers.states) == [0]


async def test_a_batch_without_any_accepted_add_writes_nothing(scene: AddScene, kit: Any) -> None:
    scene.add(request_of(kit, 5, 0))
    scene.journal.appended.clear()
    timers = scene.flush_loop.timers
    scene.send(request_of(kit, 5, 1, key=b"other"), request_of(kit, -1, 0))
    assert scene.answers == [[Status.UNAUTHORIZED, Status.BAD_REQUEST]], "answered at once"
    assert scene.journal.appended == []
    assert scene.flush_loop.timers == timers
    assert (scene.stats.adds_ok, scene.stats.adds_unauthorized, scene.stats.adds_bad) == (1, 1, 1)


async def test_another_key_is_refused(scene: AddScene, kit: Any) -> None:
    good, bad = request_of(kit, 5, 0), request_of(kit, 5, 1, key=b"other")
    assert scene.add(good, bad, request_of(kit, 5, 2)) == [OK, Status.UNAUTHORIZED, OK]
    assert scene.add(request_of(kit, 5, 3, key=b"other", recovery=True)) == [Status.UNAUTHORIZED]
    assert sorted(scene.caches.active.ledgers[5]) == [0, 2]
    assert scene.stats.adds_unauthorized == 2
    assert scene.caches.active.entries == 2


async def test_a_fenced_ledger_accepts_copies_only(scene: AddScene, kit: Any) -> None:
    scene.fenced(5, kit.KEY)
    copy = request_of(kit, 5, 1, recovery=True)
    assert scene.add(request_of(kit, 5, 0), copy, request_of(kit, 5, 2), request_of(kit, 6, 0)) == [
        Status.FENCED,
        OK,
        Status.FENCED,
        OK,
    ]
    assert scene.caches.active.ledgers[5] == {1: copy.body}
    assert scene.stats.adds_fenced == 2
    assert scene.adds.copies_seen.since(5, asyncio.get_running_loop().time())


async def test_a_fenced_ledger_without_a_key_learns_that_of_the_first_client(scene: AddScene, kit: Any) -> None:
    scene.fenced(5, b"")
    assert scene.add(request_of(kit, 5, 0)) == [Status.FENCED]
    assert scene.journal.records == [control.pack_master_key(5, kit.KEY)]
    assert scene.ledgers.states[5].master_key == kit.KEY
    copy = request_of(kit, 5, 0, recovery=True)
    assert scene.add(copy, request_of(kit, 5, 1, key=b"other")) == [OK, Status.UNAUTHORIZED]
    assert scene.journal.records[1:] == [copy.body]


async def test_a_deleted_fenced_ledger_is_created_again_by_copies_only_and_stays_fenced(
    scene: AddScene, kit: Any
) -> None:
    scene.fenced(5, kit.KEY)
    scene.ledgers.delete(5)
    late, copy = request_of(kit, 5, 0), request_of(kit, 5, 1, recovery=True)
    assert scene.add(late, request_of(kit, 6, 0)) == [Status.FENCED, OK]
    assert 5 not in scene.ledgers.states
    scene.journal.appended.clear()
    assert scene.add(late, copy, late) == [Status.FENCED, OK, Status.FENCED]
    assert scene.journal.records == [control.pack_master_key(5, kit.KEY), control.pack_fence(5), copy.body]
    assert scene.ledgers.states[5].is_fenced
    assert scene.stats.adds_fenced == 3


@pytest.mark.parametrize("error", [OSError(5, "broken"), DamagedStorage("row")], ids=["disk", "damage"])
async def test_adds_to_a_ledger_whose_row_cannot_be_read_get_io_error(
    scene: AddScene, kit: Any, error: Exception
) -> None:
    def broken(ledger_id: int) -> Any:
        raise error

    good = request_of(kit, 6, 0)
    scene.add(good)
    scene.index.ledger_row = broken  # type: ignore[method-assign]
    assert scene.add(request_of(kit, 5, 0), request_of(kit, 6, 1), request_of(kit, 5, 1)) == [
        Status.IO_ERROR,
        OK,
        Status.IO_ERROR,
    ]
    assert sorted(scene.caches.active.ledgers) == [6]
    assert (scene.stats.adds_ok, scene.stats.adds_bad) == (2, 0)


async def test_accepted_adds_that_do_not_become_durable_get_the_reason(scene: AddScene, kit: Any) -> None:
    bad = kit.add_request(kit.entry(5, 9)[:23])
    scene.send(bad, request_of(kit, 5, 0))
    scene.journal.sync(False)
    scene.send(bad, request_of(kit, 5, 1))
    scene.journal.is_full = True
    scene.journal.sync(False)
    assert scene.answers == [[Status.BAD_REQUEST, Status.IO_ERROR], [Status.BAD_REQUEST, Status.READ_ONLY]]


async def test_with_a_failed_or_full_journal_no_add_is_accepted(scene: AddScene, kit: Any) -> None:
    adds = request_of(kit, 5, 0), request_of(kit, 5, 1)
    scene.journal.is_full = True
    scene.send(*adds)
    scene.journal.failed = True
    scene.send(*adds)
    assert scene.answers == [[Status.READ_ONLY] * 2, [Status.IO_ERROR] * 2]
    assert scene.journal.appended == []
    assert scene.caches.active.ledgers == {}


# --- adds that wait for room ------------------------------------------------------------------------------------------


async def full_scene(kit: Any, **settings: Any) -> AddScene:
    """Return a scene whose write caches are full."""
    scene = AddScene(cache_size=200, **settings)
    assert scene.add(request_of(kit, 5, 0)) == [OK]
    assert scene.flush_loop.asked == 1, "a full cache is swapped at once"
    scene.journal.appended.clear()
    scene.flush_loop.has_room = False
    return scene


async def test_a_full_cache_is_swapped_for_the_next_add(kit: Any) -> None:
    scene = await full_scene(kit)
    scene.flush_loop.has_room = True
    scene.send(request_of(kit, 5, 1))
    assert len(scene.journal.appended) == 1
    assert scene.stats.adds_waited == 0


async def test_waiting_adds_are_accepted_in_order_while_there_is_room(kit: Any) -> None:
    scene = await full_scene(kit, waiting_size_max=2000)
    for entry_id in range(1, 4):
        scene.send(request_of(kit, 5, entry_id), request_of(kit, 6, entry_id))
    assert scene.journal.appended == []
    assert scene.answers == []
    assert (scene.stats.waiting_adds, scene.stats.waiting_size, scene.stats.adds_waited) == (6, 6 * 210, 6)
    rooms = [True, True, False]
    scene.flush_loop.make_room = lambda: rooms.pop(0)  # type: ignore[method-assign]
    scene.caches.active.size_max = 10**6
    scene.adds.resume()
    assert rooms == []
    assert (scene.stats.waiting_adds, scene.stats.waiting_size, scene.stats.adds_waited) == (2, 2 * 210, 6)
    scene.send(request_of(kit, 7, 0))
    assert len(scene.journal.appended) == 2, "an add waits behind earlier ones, even if there is room again"
    scene.flush_loop.make_room = lambda: True  # type: ignore[method-assign]
    scene.adds.resume()
    scene.journal.sync()
    assert scene.answers == [[OK, OK], [OK, OK], [OK, OK], [OK]]
    assert [control.unpack_ids(body) for body in scene.journal.records if len(body) == 50] == [
        (5, 1),
        (6, 1),
        (5, 2),
        (6, 2),
        (5, 3),
        (6, 3),
        (7, 0),
    ]
    assert (scene.stats.waiting_adds, scene.stats.waiting_size) == (0, 0)
    await asyncio.sleep(20)
    assert scene.stats.adds_rejected == 0


async def test_the_bytes_of_waiting_adds_are_limited(kit: Any) -> None:
    scene = await full_scene(kit, waiting_size_max=420)
    scene.send(request_of(kit, 5, 1))
    scene.send(request_of(kit, 5, 2), request_of(kit, 5, 3))
    assert scene.answers == [[Status.TOO_MANY_REQUESTS] * 2]
    scene.send(request_of(kit, 5, 4))  # exactly the limit
    scene.send(request_of(kit, 5, 5, 32))
    assert scene.answers == [[Status.TOO_MANY_REQUESTS] * 2, [Status.TOO_MANY_REQUESTS]]
    assert (scene.stats.waiting_adds, scene.stats.waiting_size) == (2, 420)
    assert (scene.stats.adds_rejected, scene.stats.adds_waited) == (3, 2)


async def test_an_add_that_waited_too_long_is_refused(kit: Any) -> None:
    scene = await full_scene(kit)
    scene.send(request_of(kit, 5, 1))
    await asyncio.sleep(4)
    scene.send(request_of(kit, 5, 2), request_of(kit, 5, 3))
    await asyncio.sleep(5.9)
    assert scene.answers == []
    await asyncio.sleep(0.2)
    assert scene.answers == [[Status.TOO_MANY_REQUESTS]]
    assert (scene.stats.waiting_adds, scene.stats.waiting_size, scene.stats.adds_rejected) == (2, 420, 1)
    await asyncio.sleep(3.8)
    assert len(scene.answers) == 1
    await asyncio.sleep(0.2)
    assert scene.answers[1:] == [[Status.TOO_MANY_REQUESTS] * 2]
    assert (scene.stats.waiting_adds, scene.stats.waiting_size, scene.stats.adds_rejected) == (0, 0, 3)
    await asyncio.sleep(5)
    scene.send(request_of(kit, 5, 4))
    await asyncio.sleep(9.9)
    assert len(scene.answers) == 2, "each has its own time"
    await asyncio.sleep(0.2)
    assert len(scene.answers) == 3


async def test_each_waiting_add_is_refused_at_its_own_time(kit: Any) -> None:
    scene = await full_scene(kit)
    refused: list[float] = []
    for entry_id in range(1, 4):
        scene.adds.add_many(
            [request_of(kit, 5, entry_id)], lambda _: refused.append(asyncio.get_running_loop().time() - BEGINNING_S)
        )
        await asyncio.sleep(4)
    await asyncio.sleep(20)
    assert refused == [pytest.approx(10), pytest.approx(14), pytest.approx(18)]


async def test_adds_of_the_same_time_are_refused_together(kit: Any) -> None:
    scene = await full_scene(kit)
    for entry_id in range(1, 4):
        scene.send(request_of(kit, 5, entry_id))
    await asyncio.sleep(10)
    await asyncio.sleep(0)
    assert scene.answers == [[Status.TOO_MANY_REQUESTS]] * 3
    assert scheduled() == 0


def scheduled() -> int:
    """Return the number of timers that are not cancelled."""
    loop: Any = asyncio.get_running_loop()
    return sum(not timer.cancelled() for timer in loop._scheduled)


async def test_no_timer_is_left_once_no_add_waits(kit: Any) -> None:
    scene = await full_scene(kit)
    scene.send(request_of(kit, 5, 1))
    scene.send(request_of(kit, 5, 2))
    assert scheduled() == 1
    scene.adds.resume()
    assert scheduled() == 1, "there was no room"
    scene.flush_loop.has_room = True
    scene.adds.resume()
    assert scheduled() == 0
    scene.flush_loop.has_room = False
    scene.send(request_of(kit, 5, 3))
    await asyncio.sleep(10.1)
    assert scene.answers == [[Status.TOO_MANY_REQUESTS]], "the next waiting add has a timer again"


async def test_waiting_adds_get_the_reason_if_the_journal_failed_or_is_full(kit: Any) -> None:
    scene = await full_scene(kit)
    scene.send(request_of(kit, 5, 1), request_of(kit, 5, 2))
    scene.send(request_of(kit, 5, 3))
    scene.flush_loop.has_room = True
    scene.journal.is_full = True
    scene.adds.resume()
    assert scene.answers == [[Status.READ_ONLY] * 2, [Status.READ_ONLY]]
    scene.journal.is_full = scene.flush_loop.has_room = False
    scene.send(request_of(kit, 5, 4), request_of(kit, 5, 5))
    scene.flush_loop.has_room = scene.journal.failed = True
    scene.adds.resume()
    assert scene.answers[2:] == [[Status.IO_ERROR] * 2]
    assert scene.journal.appended == []
    assert (scene.stats.waiting_adds, scene.stats.waiting_size) == (0, 0)


async def test_a_close_refuses_all_waiting_adds(kit: Any) -> None:
    scene = await full_scene(kit)
    scene.send(request_of(kit, 5, 1))
    scene.send(request_of(kit, 5, 2), request_of(kit, 5, 3))
    scene.adds.close()
    assert scene.answers == [[Status.TOO_MANY_REQUESTS], [Status.TOO_MANY_REQUESTS] * 2]
    assert (scene.stats.waiting_adds, scene.stats.waiting_size, scene.stats.adds_rejected) == (0, 0, 3)
    assert scheduled() == 0
    scene.adds.close()
    assert len(scene.answers) == 2
