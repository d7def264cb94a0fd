"""Responses of one bookie as rows: stored, missing and unknown entries, with all kinds of failures."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pyarrow as pa
import pytest
from bindery_client.connection.connection import CLOSED_BY_PEER
from bindery_core.digest import Digester
from bindery_core.entry import pack_many
from bindery_core.errors import BookieUnavailable, Corrupt
from bindery_core.formats.ledger_metadata import DigestType, LedgerMetadata, LedgerState, Segment
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.wire.messages import (
    BatchReadRequest,
    BatchReadResponse,
    ListEntriesRequest,
    ListEntriesResponse,
    ReadRequest,
    ReadResponse,
    Status,
)
from bindery_spark.reading import reader as reader_module
from bindery_spark.reading import rows as rows_module
from bindery_spark.reading.fragments import Fragment, Tail, fragments_of, ledger_of
from bindery_spark.reading.reader import BookieReader
from bindery_spark.reading.throttle import Budget
from scripted_bookie import FakeBookie, FakeMetadata

BOOKIE = BookieId("b")
OK = int(Status.OK)
DIGESTER = Digester(DigestType.CRC32C)
LEDGER = LedgerId(7)


class World:
    """One ledger of 20 entries whose bookie b has them all."""

    def __init__(
        self, *, entries: int = 20, is_closed: bool = True, letters: str = "abc", write_quorum: int = 3
    ) -> None:
        self.bookie, self.metadata = FakeBookie(), FakeMetadata()
        state = (
            {"state": LedgerState.CLOSED, "last_entry_id": EntryId(entries - 1), "length": 10 * entries}
            if is_closed
            else {}
        )
        ensemble = tuple(BookieId(letter) for letter in letters)
        self.ledger = LedgerMetadata(
            ensemble_size=len(letters),
            write_quorum=write_quorum,
            ack_quorum=2,
            segments=(Segment(EntryId(0), ensemble),),
            **state,
        )
        self.metadata.ledgers[LEDGER] = self.ledger
        self.bookie.known_ledgers.add(LEDGER)
        frames = pack_many(DIGESTER, [b"0123456789"] * entries, ledger_id=LEDGER, first_entry_id=0, lac=-1, length=0)
        self.bookie.frames.update({(LEDGER, n): frame for n, frame in enumerate(frames)})

    def fragments(self, tail: Tail | None = None) -> list[Fragment]:
        ledger = ledger_of(LEDGER, self.ledger, tail)
        return [each for each in fragments_of(ledger, self.ledger, tail) if each.bookie_id == BOOKIE]

    async def read(
        self, fragments: list[Fragment] | None = None, *, entries: str = "all", timeout_s: float = 0.3
    ) -> list[dict[str, Any]]:
        now = asyncio.get_running_loop().time()
        reader = BookieReader(
            self.bookie,
            self.metadata,
            BOOKIE,
            budget=Budget(0, now=now),
            timeout_s=timeout_s,  # type: ignore[arg-type]
        )
        fragments = self.fragments() if fragments is None else fragments
        batches = [batch async for batch in reader.read(fragments, entries=entries)]
        return pa.Table.from_batches(batches).to_pylist() if batches else []


def verdicts(rows: list[dict[str, Any]]) -> dict[int, str]:
    """State by entry: good, bad, unread, absent, or the first word of the error."""
    assert len({row["entry_id"] for row in rows}) == len(rows), "an entry has one row"
    words = {True: "good", False: "bad", None: "unread"}
    return {
        row["entry_id"]: row["error"].split(":")[0]
        if row["error"]
        else (words[row["digest_ok"]] if row["present"] else "absent")
        for row in rows
    }


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "RETRY_PAUSE_S", 0.01)
    monkeypatch.setattr(reader_module, "BUSY_PAUSE_S", 0.01)


async def test_a_healthy_share_is_read_in_one_request() -> None:
    world = World()
    rows = await world.read()
    assert verdicts(rows) == dict.fromkeys(range(20), "good")
    assert [row["ledger_length"] for row in rows] == list(range(10, 201, 10))
    assert {(row["expected"], row["segment"], row["bookie"], row["payload_length"]) for row in rows} == {
        (True, 0, "b", 10)
    }
    assert [type(request) for request in world.bookie.requests] == [BatchReadRequest]
    assert world.metadata.reads == 0


async def test_entries_that_do_not_fit_one_response_are_requested_again() -> None:
    world = World()
    world.bookie.batch_entries_max = 6
    assert verdicts(await world.read()) == dict.fromkeys(range(20), "good")
    assert [request.entry_id for request in world.bookie.requests] == [0, 6, 12, 18]


async def test_a_share_with_gaps_is_read_with_concurrent_single_reads() -> None:
    world = World(letters="abcd", write_quorum=2)
    assert verdicts(await world.read()) == dict.fromkeys((n for n in range(20) if n % 4 in (0, 1)), "good")
    assert {type(request) for request in world.bookie.requests} == {ReadRequest}


@pytest.mark.parametrize("gone", [(0,), (19,), (3, 4, 5, 11), tuple(range(20))])
async def test_entries_that_the_bookie_reports_as_missing_are_absent(gone: tuple[int, ...]) -> None:
    world = World()
    for entry_id in gone:
        del world.bookie.frames[LEDGER, entry_id]
    rows = await world.read()
    assert verdicts(rows) == {n: "absent" if n in gone else "good" for n in range(20)}
    assert all(row["error"] is None for row in rows)


async def test_all_entries_are_absent_on_a_bookie_without_the_ledger() -> None:
    world = World()
    world.bookie.known_ledgers.clear()
    assert verdicts(await world.read()) == dict.fromkeys(range(20), "absent")


async def test_after_an_empty_batch_the_entries_are_read_singly() -> None:
    world = World()
    honest = world.bookie._answer
    nothing = lambda r: BatchReadResponse(2, OK, r.ledger_id, r.entry_id, r.request_id, ())  # noqa: E731
    world.bookie._answer = lambda r: nothing(r) if isinstance(r, BatchReadRequest) else honest(r)  # type: ignore[method-assign]
    assert verdicts(await world.read()) == dict.fromkeys(range(20), "good")
    assert {type(request) for request in world.bookie.requests} == {BatchReadRequest, ReadRequest}


async def test_an_entry_without_a_response_among_others_is_unanswered() -> None:
    world = World(letters="abcd", write_quorum=2)
    honest = world.bookie._answer

    def other(request: Any) -> Any:
        response = honest(request)
        if request.entry_id == 4:
            response.entry_id = 99
        return response

    world.bookie._answer = other  # type: ignore[method-assign]
    found = verdicts(await world.read())
    assert found == {n: "unanswered" if n == 4 else "good" for n in range(20) if n % 4 in (0, 1)}


async def test_only_the_damaged_entry_is_bad() -> None:
    world = World()
    frame = world.bookie.frames[LEDGER, 4]
    world.bookie.frames[LEDGER, 4] = frame[:-1] + b"!"
    assert verdicts(await world.read()) == {n: "bad" if n == 4 else "good" for n in range(20)}


@pytest.mark.parametrize(
    ("status", "word"),
    [(Status.IO_ERROR, "io_error"), (Status.UNKNOWN_LEDGER_STATE, "limbo"), (Status.UNAUTHORIZED, "unauthorized")],
)
async def test_an_error_status_is_an_error_and_not_an_absent_entry(status: Status, word: str) -> None:
    world = World()
    for entry_id in (0, 7, 8):
        world.bookie.statuses[LEDGER, entry_id] = int(status)
    rows = await world.read()
    assert verdicts(rows) == {n: word if n in (0, 7, 8) else "good" for n in range(20)}
    assert {row["present"] for row in rows if row["error"]} == {None}


async def test_a_ledger_that_was_deleted_since_planning_has_no_absent_entries() -> None:
    world = World()
    del world.bookie.frames[LEDGER, 4]
    world.metadata.ledgers.clear()
    assert verdicts(await world.read()) == dict.fromkeys((n for n in range(20) if n != 4), "good")


async def test_absent_entries_are_not_reported_if_the_metadata_became_unreadable() -> None:
    world = World()
    del world.bookie.frames[LEDGER, 4]

    async def unreadable(_: LedgerId) -> LedgerMetadata:
        raise Corrupt("ledger metadata cannot be read")

    world.metadata.read = unreadable  # type: ignore[method-assign]
    assert verdicts(await world.read()) == dict.fromkeys((n for n in range(20) if n != 4), "good")


async def test_a_ledger_that_moved_to_another_bookie_since_planning_has_no_absent_entries() -> None:
    world = World()
    fragments = world.fragments()
    world.bookie.known_ledgers.clear()
    moved = Segment(EntryId(0), (BookieId("a"), BookieId("d"), BookieId("c")))
    world.metadata.ledgers[LEDGER] = world.ledger.with_changes(segments=(moved,))
    assert await world.read(fragments) == []


async def test_absent_entries_of_an_open_ledger_are_read_twice() -> None:
    world = World(is_closed=False)
    late = world.bookie.frames.pop((LEDGER, 19))
    fragments = world.fragments(Tail(19, length=200, length_at=19, held={}))

    def arrive(_: LedgerId) -> None:
        world.bookie.frames[LEDGER, 19] = late

    read = world.metadata.read

    async def read_and_arrive(ledger_id: LedgerId) -> LedgerMetadata:
        arrive(ledger_id)
        return await read(ledger_id)

    world.metadata.read = read_and_arrive  # type: ignore[method-assign]
    assert verdicts(await world.read(fragments)) == dict.fromkeys(range(20), "good")


async def test_entries_beyond_the_lac_are_neither_expected_nor_absent() -> None:
    world = World(is_closed=False)
    del world.bookie.frames[LEDGER, 16]
    fragments = world.fragments(Tail(14, length=200, length_at=19, held={BOOKIE: 19}))
    rows = await world.read(fragments)
    assert verdicts(rows) == dict.fromkeys((n for n in range(20) if n != 16), "good")
    assert [row["entry_id"] for row in rows if not row["expected"]] == [15, 17, 18, 19]


async def test_without_a_lac_no_request_is_sent() -> None:
    world = World(is_closed=False)
    rows = await world.read(world.fragments(Tail(None)))
    assert verdicts(rows) == {0: "unreachable"}
    assert world.bookie.requests == []


async def test_the_ends_of_a_dense_share_are_two_entries() -> None:
    world = World()
    assert verdicts(await world.read(entries="ends")) == {0: "good", 19: "good"}


# --- listed, not read -------------------------------------------------------------------------------------------------


async def test_with_a_list_only_the_ends_are_read() -> None:
    world = World()
    assert verdicts(await world.read(entries="listed")) == {n: "good" if n in (0, 19) else "unread" for n in range(20)}
    assert [type(r) for r in world.bookie.requests] == [ListEntriesRequest, ReadRequest, ReadRequest]


@pytest.mark.parametrize("gone", [(0,), (19,), (3, 4, 5, 11), tuple(range(20))])
async def test_entries_that_are_not_in_the_list_are_absent(gone: tuple[int, ...]) -> None:
    world = World()
    for entry_id in gone:
        del world.bookie.frames[LEDGER, entry_id]
    rows = await world.read(entries="listed")
    assert {row["entry_id"] for row in rows if row["present"] is False} == set(gone)
    assert {row["entry_id"] for row in rows if row["present"]} == set(range(20)) - set(gone)


async def test_a_list_of_striped_entries_is_compared_with_the_share() -> None:
    world = World(letters="abcd", write_quorum=2)
    del world.bookie.frames[LEDGER, 4]
    found = verdicts(await world.read(entries="listed"))
    assert found.keys() == {n for n in range(20) if n % 4 in (0, 1)}
    assert {n for n, word in found.items() if word == "absent"} == {4}


async def test_all_entries_are_absent_if_the_bookie_lists_no_ledger() -> None:
    world = World()
    world.bookie.known_ledgers.clear()
    assert verdicts(await world.read(entries="listed")) == dict.fromkeys(range(20), "absent")


@pytest.mark.parametrize("status", [Status.BAD_REQUEST, Status.IO_ERROR])
async def test_a_bookie_that_cannot_list_is_read(status: Status) -> None:
    world = World()
    world.bookie.list_status = int(status)
    del world.bookie.frames[LEDGER, 4]
    found = verdicts(await world.read(entries="listed"))
    assert found == {n: "absent" if n == 4 else "good" for n in range(20)}


async def test_a_bookie_that_cannot_list_is_read_in_parts_within_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With several ledgers the rows keep their order, and at most one window of frames is in memory."""
    monkeypatch.setattr(reader_module, "REQUEST_ENTRIES_MAX", 50)
    world = World(entries=1000)
    world.bookie.list_status = int(Status.BAD_REQUEST)
    del world.bookie.frames[LEDGER, 444]
    (whole,) = world.fragments()
    other = LedgerId(8)
    world.bookie.known_ledgers.add(other)
    world.metadata.ledgers[other] = world.ledger
    frames = pack_many(DIGESTER, [b"0123456789"] * 20, ledger_id=other, first_entry_id=0, lac=-1, length=0)
    world.bookie.frames.update({(other, n): frame for n, frame in enumerate(frames)})
    small = replace(whole, ledger=replace(whole.ledger, ledger_id=other, limit=19), last=19)
    loop = asyncio.get_running_loop()
    budget = Budget(1e9, now=loop.time())
    asked: list[float] = []
    take: Callable[..., float] = budget.take
    budget.take = lambda size, *, now: asked.append(size) or take(size, now=now)  # type: ignore[assignment,func-returns-value,method-assign]
    reader = BookieReader(world.bookie, world.metadata, BOOKIE, budget=budget, timeout_s=1)  # type: ignore[arg-type]
    rows = [row async for batch in reader.read([whole, small], entries="listed") for row in batch.to_pylist()]
    assert [(row["ledger_id"], row["entry_id"]) for row in rows if row["present"]] == [
        *((LEDGER, n) for n in range(1000) if n != 444),
        *((other, n) for n in range(20)),
    ]
    assert [row["entry_id"] for row in rows if row["present"] is False] == [444]
    assert max(asked) <= 50 * 50, "one part"
    assert sum(asked) >= 999 * 50


async def test_a_list_of_a_bookie_in_limbo_does_not_count() -> None:
    world = World()
    world.bookie.list_status = int(Status.UNKNOWN_LEDGER_STATE)
    assert verdicts(await world.read(entries="listed")) == dict.fromkeys(range(20), "limbo")


async def test_requests_for_lists_stop_if_the_bookie_is_silent_busy_or_unregistered() -> None:
    world = World()
    world.bookie.is_silent = True
    assert verdicts(await world.read(entries="listed", timeout_s=0.05)) == dict.fromkeys(range(20), "timeout")
    world = World()
    world.bookie.busy_answers = 10**9
    assert verdicts(await world.read(entries="listed", timeout_s=0.1)) == dict.fromkeys(range(20), "busy")
    world = World()
    world.bookie.is_registered = False
    assert verdicts(await world.read(entries="listed", timeout_s=5)) == dict.fromkeys(range(20), "unreachable")


# --- failures ---------------------------------------------------------------------------------------------------------


async def test_a_bookie_that_is_not_registered_is_unreachable_at_once() -> None:
    world = World()
    world.bookie.is_registered = False
    began = asyncio.get_running_loop().time()
    rows = await world.read(timeout_s=30)
    assert verdicts(rows) == dict.fromkeys(range(20), "unreachable")
    assert asyncio.get_running_loop().time() - began < 5


async def test_a_bookie_that_comes_back_in_time_is_read() -> None:
    world = World()
    world.bookie.refusals_left = 3
    assert verdicts(await world.read(timeout_s=5)) == dict.fromkeys(range(20), "good")


async def test_a_bookie_that_stays_unreachable_gets_no_more_requests() -> None:
    world = World()
    world.bookie.refusals_left = 10**9
    fragments = world.fragments() * 1
    rows = await world.read(fragments, timeout_s=0.1)
    assert verdicts(rows) == dict.fromkeys(range(20), "unreachable")
    assert {row["present"] for row in rows} == {None}


async def test_a_silent_bookie_gets_no_more_requests_after_a_few_timeouts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "REQUEST_ENTRIES_MAX", 1)
    monkeypatch.setattr(reader_module, "WINDOW_REQUESTS", 2)
    world = World()
    world.bookie.is_silent = True
    rows = await world.read(timeout_s=0.05)
    assert verdicts(rows) == dict.fromkeys(range(20), "timeout")
    assert len(world.bookie.requests) <= 2 * reader_module.TIMEOUTS_MAX


async def test_requests_to_a_busy_bookie_are_retried_until_the_timeout() -> None:
    world = World()
    world.bookie.busy_answers = 3
    assert verdicts(await world.read()) == dict.fromkeys(range(20), "good")
    world.bookie.busy_answers = 10**9
    assert verdicts(await world.read(timeout_s=0.1)) == dict.fromkeys(range(20), "busy")


async def test_a_bookie_that_closes_the_connection_on_batch_reads_is_read_singly() -> None:
    world = World()
    world.bookie.supports_batch_reads = False
    assert verdicts(await world.read()) == dict.fromkeys(range(20), "good")
    assert world.bookie.without_batch_reads == {BOOKIE}


async def test_no_request_is_in_flight_between_two_batches_of_rows(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rows_module, "BATCH_ROWS", 50)
    monkeypatch.setattr(reader_module, "REQUEST_ENTRIES_MAX", 10)
    world = World(entries=500)
    loop = asyncio.get_running_loop()
    reader = BookieReader(
        world.bookie,
        world.metadata,
        BOOKIE,
        budget=Budget(0, now=loop.time()),
        timeout_s=1,  # type: ignore[arg-type]
    )
    sizes = []
    async for batch in reader.read(world.fragments(), entries="all"):
        sizes.append(batch.num_rows)
        assert len(asyncio.all_tasks()) == 1, "only the test itself runs"
    assert sum(sizes) == 500
    assert 50 <= max(sizes) <= 50 + 10 * reader_module.WINDOW_REQUESTS


async def test_all_bytes_are_charged_to_the_budget() -> None:
    world = World(entries=1000)
    loop = asyncio.get_running_loop()
    waits: list[float] = []
    budget = Budget(1e9, now=loop.time())
    take: Callable[..., float] = budget.take
    budget.take = lambda size, *, now: waits.append(size) or take(size, now=now)  # type: ignore[assignment,func-returns-value,method-assign]
    reader = BookieReader(world.bookie, world.metadata, BOOKIE, budget=budget, timeout_s=1)  # type: ignore[arg-type]
    assert sum([batch.num_rows async for batch in reader.read(world.fragments(), entries="all")]) == 1000
    assert sum(waits) == pytest.approx(1000 * 50)


async def test_entries_larger_than_the_metadata_implies_are_charged_to_the_budget() -> None:
    """A ledger with a wrong length must not be read faster than others."""
    world = World(entries=1000)
    frames = pack_many(DIGESTER, [bytes(1000)] * 1000, ledger_id=LEDGER, first_entry_id=0, lac=-1, length=0)
    world.bookie.frames.update({(LEDGER, n): frame for n, frame in enumerate(frames)})
    loop = asyncio.get_running_loop()
    taken: list[float] = []
    budget = Budget(1e9, now=loop.time())
    take: Callable[..., float] = budget.take
    budget.take = lambda size, *, now: taken.append(size) or take(size, now=now)  # type: ignore[assignment,func-returns-value,method-assign]
    reader = BookieReader(world.bookie, world.metadata, BOOKIE, budget=budget, timeout_s=1)  # type: ignore[arg-type]
    assert sum([batch.num_rows async for batch in reader.read(world.fragments(), entries="all")]) == 1000
    assert sum(taken) == pytest.approx(sum(map(len, frames)), rel=0.01)


# --- sizes of requests, and requests in flight ------------------------------------------------------------------------


def of_size(world: World, entry_size: int) -> list[Fragment]:
    """The fragments of the world with this estimated payload size of an entry."""
    return [replace(each, ledger=replace(each.ledger, entry_size=entry_size)) for each in world.fragments()]


def batches_of(world: World) -> list[tuple[int, int]]:
    """First entry and count of each batch read."""
    return [(each.entry_id, each.count_max) for each in world.bookie.requests if isinstance(each, BatchReadRequest)]


@pytest.mark.parametrize(
    ("entry_size", "counts"),
    [
        (1, [1000, 24]),  # at most 1000 entries
        (984, [256, 256, 256, 256]),  # 1 KiB with its header: at most 256 KiB
        (985, [255, 255, 255, 255, 4]),
    ],
)
async def test_a_batch_read_requests_at_most_1000_entries_and_256_kib(entry_size: int, counts: list[int]) -> None:
    world = World(entries=1024)
    await world.read(of_size(world, entry_size))
    assert [count for _, count in batches_of(world)] == counts
    assert [first for first, _ in batches_of(world)] == [sum(counts[:n]) for n in range(len(counts))]
    assert {each.size_max for each in world.bookie.requests} == {524_288}, "entries may be larger than estimated"


async def test_entries_above_the_size_of_a_request_are_read_one_by_one() -> None:
    world = World(entries=3)
    assert verdicts(await world.read(of_size(world, 10**6))) == dict.fromkeys(range(3), "good")
    assert [(type(each), each.entry_id) for each in world.bookie.requests] == [(ReadRequest, n) for n in range(3)]


@pytest.mark.parametrize(("entry_size", "in_flight"), [(984, 4), (10**6, 2)])
async def test_about_1_mib_is_in_flight(entry_size: int, in_flight: int) -> None:
    """Jobs are begun until their estimated size reaches 1 MiB."""
    world = World(entries=3_000)
    answer = world.bookie.take
    held: list[tuple[Any, ...]] = []
    world.bookie.take = lambda *request: held.append(request)  # type: ignore[method-assign]
    reading = asyncio.create_task(world.read(of_size(world, entry_size), timeout_s=1e6))
    await asyncio.sleep(1)  # the clock is simulated: all tasks are blocked now
    assert len(held) == in_flight
    answer(*held.pop(0))
    await asyncio.sleep(1)
    assert len(held) == in_flight, "one more after each response"
    world.bookie.take = answer  # type: ignore[method-assign]
    for each in held:
        answer(*each)
    assert len(await reading) == 3_000


async def test_at_most_32_requests_are_in_flight() -> None:
    world = World(entries=100)
    answer = world.bookie.take
    held: list[tuple[Any, ...]] = []
    world.bookie.take = lambda *request: held.append(request)  # type: ignore[method-assign]
    (whole,) = world.fragments()
    reading = asyncio.create_task(world.read([replace(whole, first=n, last=n) for n in range(100)], timeout_s=1e6))
    await asyncio.sleep(1)
    assert len(held) == 32
    world.bookie.take = answer  # type: ignore[method-assign]
    for each in held:
        answer(*each)
    assert len(await reading) == 100


async def test_requests_in_flight_are_cancelled_if_the_caller_stops() -> None:
    world = World()
    world.bookie.take = lambda *_: None  # type: ignore[method-assign]
    reading = asyncio.create_task(world.read(timeout_s=1e6))
    await asyncio.sleep(1)
    reading.cancel()
    await asyncio.gather(reading, return_exceptions=True)
    assert asyncio.all_tasks() == {asyncio.current_task()}


class Charged(Budget):
    """Records what is taken."""

    def __init__(self, rate: float) -> None:
        super().__init__(rate, now=asyncio.get_running_loop().time())
        self.taken: list[float] = []

    def take(self, size: float, *, now: float) -> float:
        self.taken.append(size)
        return super().take(size, now=now)


async def read_within(world: World, budget: Budget, *, entries: str = "all", timeout_s: float = 1.0) -> list[dict]:
    reader = BookieReader(world.bookie, world.metadata, BOOKIE, budget=budget, timeout_s=timeout_s)  # type: ignore[arg-type]
    return [row async for batch in reader.read(world.fragments(), entries=entries) for row in batch.to_pylist()]


async def test_a_request_waits_for_the_budget() -> None:
    world, began = World(), asyncio.get_running_loop().time()
    assert len(await read_within(world, Charged(1_000))) == 20
    assert asyncio.get_running_loop().time() - began == pytest.approx(0.75), "20 frames of 50 bytes, 250 bytes at once"


async def test_a_byte_beyond_the_estimate_is_charged_later() -> None:
    world, budget = World(), Charged(1e9)
    for entry_id in range(20):
        world.bookie.frames[LEDGER, entry_id] = bytes(50 + (entry_id == 3))
    await read_within(world, budget)
    assert budget.taken == [1_000, 1]
    world.bookie.frames[LEDGER, 3] = bytes(50)
    budget.taken.clear()
    await read_within(world, budget)
    assert sum(budget.taken) == 1_000


async def test_a_list_of_entries_is_charged_as_1_kib_and_two_entries() -> None:
    world, budget = World(), Charged(1e9)
    await read_within(world, budget, entries="listed")
    assert budget.taken[0] == 1_024 + 2 * 50


async def test_nothing_is_charged_after_the_reader_gave_up() -> None:
    world, budget = World(), Charged(1e9)
    world.bookie.is_registered = False
    reader = BookieReader(world.bookie, world.metadata, BOOKIE, budget=budget, timeout_s=1.0)  # type: ignore[arg-type]
    (whole,) = world.fragments()
    parts = [replace(whole, first=n, last=n) for n in range(20)]
    async for _ in reader.read(parts[:1]):
        pass
    budget.taken.clear()
    world.bookie.requests.clear()
    rows = [row async for batch in reader.read(parts[1:]) for row in batch.to_pylist()]
    assert verdicts(rows) == dict.fromkeys(range(1, 20), "unreachable")
    assert (budget.taken, world.bookie.requests) == ([], [])


@pytest.mark.parametrize("write_quorum", [3, 2])
async def test_a_reader_pauses_while_the_bookie_answers_slowly(
    write_quorum: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both batch reads and single reads are measured."""
    monkeypatch.setattr(reader_module, "WINDOW_REQUESTS", 1)
    monkeypatch.setattr(reader_module, "REQUEST_ENTRIES_MAX", 2)
    world = World(entries=120, write_quorum=write_quorum)
    loop, answer = asyncio.get_running_loop(), world.bookie.take
    sent: list[float] = []

    def slowly(*request: Any) -> None:
        sent.append(loop.time())
        loop.call_later(0.0625 if len(sent) <= 16 else 0.5, answer, *request)

    world.bookie.take = slowly  # type: ignore[method-assign]
    await world.read(timeout_s=1e6)
    intervals = [after - before for before, after in pairwise(sent)]
    assert intervals[:33] == [0.0625] * 16 + [0.5] * 15 + [1.0] * 2, "an answer, and from then on a pause as long"


# --- scripted failures ------------------------------------------------------------------------------------------------


def script(bookie: FakeBookie, *answers: str) -> None:
    """Let the bookie respond to its next requests like this, and then answer. In any case it records the requests.

    `silent`, `refused`, `closed` (by the peer), `reset` (by the peer), `busy`, `ok`.
    """
    loop, answer, left = asyncio.get_running_loop(), bookie.take, list(answers)

    def take(requests: list[Any], sink: Any, timeout_s: float) -> None:
        what = left.pop(0) if left else "ok"
        if what in ("ok", "busy"):
            bookie.busy_answers = len(requests) if what == "busy" else 0
            answer(requests, sink, timeout_s)
            return
        bookie.requests += requests
        if what == "silent":
            loop.call_later(timeout_s, sink.expired, BOOKIE, BookieUnavailable("no answer in time"))
            return
        cause = {"refused": "refused", "closed": CLOSED_BY_PEER, "reset": "ConnectionResetError(104)"}[what]
        loop.call_soon(sink.failed, BOOKIE, BookieUnavailable("lost", cause=cause))

    bookie.take = take  # type: ignore[method-assign]


@pytest.fixture
def pauses_of_a_quarter_second(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reader_module, "RETRY_PAUSE_S", 0.25)
    monkeypatch.setattr(reader_module, "BUSY_PAUSE_S", 0.25)


FAILED = {
    "silent": "timeout: no answer in time",
    "refused": "unreachable: lost: refused",
    "busy": "busy: the bookie accepts no more requests",
}


@pytest.mark.usefixtures("pauses_of_a_quarter_second")
@pytest.mark.parametrize("entries", ["all", "listed"])
@pytest.mark.parametrize(("what", "count"), [("silent", 3), ("refused", 5), ("busy", 5)])
async def test_a_reader_gives_up_after_three_timeouts_or_an_outage_as_long_as_the_timeout(
    what: str, count: int, entries: str
) -> None:
    world = World()
    script(world.bookie, *[what] * 99)
    rows = await world.read(timeout_s=1.0, entries=entries)
    assert {row["error"] for row in rows} == {FAILED[what]}
    assert len(rows) == 20
    assert len(world.bookie.requests) == count


@pytest.mark.usefixtures("pauses_of_a_quarter_second")
@pytest.mark.parametrize("write_quorum", [3, 2])
@pytest.mark.parametrize("entries", ["all", "listed"])
@pytest.mark.parametrize(("what", "most"), [("silent", 2), ("refused", 4), ("busy", 4)])
async def test_an_answer_ends_an_outage(
    what: str, most: int, entries: str, write_quorum: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reader_module, "WINDOW_REQUESTS", 1)
    monkeypatch.setattr(reader_module, "REQUEST_ENTRIES_MAX", 5)
    monkeypatch.setattr(reader_module, "LISTING_ENTRIES_MAX", 5)
    world = World(write_quorum=write_quorum)
    script(world.bookie, *[what] * most, "ok", *[what] * most, "ok", *[what] * most)
    assert "timeout" not in (found := verdicts(await world.read(timeout_s=1.0, entries=entries))).values()
    assert set(found.values()) <= {"good", "unread"}
    world = World(write_quorum=write_quorum)
    script(world.bookie, *[what] * most, "ok", *[what] * 99)
    found = verdicts(await world.read(timeout_s=1.0, entries=entries))
    word = FAILED[what].split(":")[0]
    assert word in found.values()
    first = {"all": "good", "listed": "unread"}[entries]
    assert set(found.values()) <= {word, first}
    per_request = 1 if entries == "listed" or write_quorum == 3 else None
    if per_request:
        assert len(world.bookie.requests) >= most + 1 + {"silent": 3, "refused": 5, "busy": 5}[what]


@pytest.mark.parametrize("cause", ["closed", "reset"])
async def test_a_bookie_that_closes_on_batch_reads_is_probed_once(cause: str) -> None:
    world = World(entries=4)
    script(world.bookie, cause, "ok", cause)
    assert verdicts(await world.read()) == dict.fromkeys(range(4), "good")
    assert world.bookie.without_batch_reads == {BOOKIE}
    first, plain, probe, *rest = world.bookie.requests
    assert [type(first), type(plain), type(probe)] == [BatchReadRequest, ReadRequest, BatchReadRequest]
    assert (first.entry_id, first.count_max) == (0, 4)
    assert (plain.entry_id, probe.entry_id, probe.count_max, probe.size_max) == (0, 0, 2, 262_144)
    assert [(type(each), each.entry_id) for each in rest] == [(ReadRequest, n) for n in range(4)]


@pytest.mark.parametrize(
    ("answers", "kinds"),
    [
        pytest.param(["closed", "ok", "ok"], "BRBB", id="the probe is answered"),
        pytest.param(["closed", "ok", "refused"], "BRBB", id="the probe fails for another reason"),
        pytest.param(["closed", "closed"], "BRB", id="the plain read fails too"),
        pytest.param(["refused"], "BB", id="the connection was not closed"),
        pytest.param(["refused", "closed"], "BBB", id="the bookie was away before"),
    ],
)
async def test_a_bookie_that_closes_for_another_reason_gets_batch_reads_again(answers: list[str], kinds: str) -> None:
    world = World()
    script(world.bookie, *answers)
    assert verdicts(await world.read(timeout_s=5)) == dict.fromkeys(range(20), "good")
    assert "".join("B" if isinstance(each, BatchReadRequest) else "R" for each in world.bookie.requests) == kinds
    assert world.bookie.without_batch_reads == set()


async def test_a_failure_without_a_cause_has_the_message_only() -> None:
    world = World()
    world.bookie.take = lambda requests, sink, timeout_s: sink.failed(BOOKIE, BookieUnavailable("lost"))  # type: ignore[method-assign]
    assert {row["error"] for row in await world.read(timeout_s=0.0)} == {"unreachable: lost"}


async def test_each_error_has_its_text() -> None:
    world = World(letters="abcd", write_quorum=2)
    statuses = {0: Status.IO_ERROR, 1: Status.UNKNOWN_LEDGER_STATE, 4: Status.UNAUTHORIZED}
    for entry_id, status in statuses.items():
        world.bookie.statuses[LEDGER, entry_id] = int(status)
    assert {row["entry_id"]: row["error"] for row in await world.read() if row["error"]} == {
        0: "io_error: the bookie could not read it",
        1: "limbo: the bookie lost data, perhaps this entry",
        4: "unauthorized: the bookie could not read it",
    }


async def test_without_a_lac_the_rows_say_why() -> None:
    world = World(is_closed=False)
    (row,) = await world.read(world.fragments(Tail(None)))
    assert row["error"] == "unreachable: too few bookies of the ensemble reported the end of the ledger"


# --- missing entries --------------------------------------------------------------------------------------------------


async def test_the_first_entry_of_a_batch_may_be_unreadable_and_others_too() -> None:
    """After the first one the entries are requested singly, all at once."""
    world = World(entries=3)
    world.bookie.statuses[LEDGER, 0] = int(Status.IO_ERROR)
    del world.bookie.frames[LEDGER, 2]
    assert verdicts(await world.read()) == {0: "io_error", 1: "good", 2: "absent"}
    assert [type(each) for each in world.bookie.requests] == [BatchReadRequest, ReadRequest, ReadRequest]


async def test_two_remaining_entries_are_read_as_a_batch_and_one_singly() -> None:
    world = World(entries=5)
    world.bookie.batch_entries_max = 2
    await world.read()
    assert [type(each) for each in world.bookie.requests] == [BatchReadRequest, BatchReadRequest, ReadRequest]


async def test_at_most_a_thousand_missing_entries_of_an_open_ledger_are_requested_again() -> None:
    world = World(entries=1_002, is_closed=False)
    fragments = world.fragments(Tail(1_001, length=10_020, length_at=1_001, held={}))
    for entry_id in range(1, 1_002):
        del world.bookie.frames[LEDGER, entry_id]
    world.bookie.requests.clear()
    began = asyncio.get_running_loop().time()
    found = verdicts(await world.read(fragments))
    assert found == {0: "good", **dict.fromkeys(range(1, 1_002), "absent")}
    assert asyncio.get_running_loop().time() - began == pytest.approx(reader_module.RETRY_PAUSE_S)
    assert batches_of(world)[-1] == (1, 1_000)


async def test_missing_entries_of_a_closed_ledger_are_not_requested_again() -> None:
    world = World()
    del world.bookie.frames[LEDGER, 19]
    await world.read()
    assert [each.entry_id for each in world.bookie.requests] == [0, 19]
    assert world.metadata.reads == 1


async def test_no_metadata_is_read_for_a_ledger_without_missing_entries() -> None:
    world = World()
    (whole,) = world.fragments()
    del world.bookie.frames[LEDGER, 3]
    rows = await world.read([replace(whole, last=4), replace(whole, first=5)])
    assert verdicts(rows) == {n: "absent" if n == 3 else "good" for n in range(20)}
    assert world.metadata.reads == 1


async def test_the_last_confirmed_entry_is_reported_as_missing() -> None:
    world = World(is_closed=False)
    for entry_id in (14, 15):
        del world.bookie.frames[LEDGER, entry_id]
    found = verdicts(await world.read(world.fragments(Tail(14, length=200, length_at=19, held={BOOKIE: 19}))))
    assert found == {n: "absent" if n == 14 else "good" for n in range(20) if n != 15}


# --- lists ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("gone", "reads"), [((), [0, 19]), ((0,), [19]), ((19,), [0]), ((5,), [0, 19]), ((0, 19), []), ((0, 1, 2), [19])]
)
async def test_an_end_that_is_not_in_the_list_is_not_requested(gone: tuple[int, ...], reads: list[int]) -> None:
    world = World()
    for entry_id in gone:
        del world.bookie.frames[LEDGER, entry_id]
    found = verdicts(await world.read(entries="listed"))
    assert {n for n, word in found.items() if word == "absent"} == set(gone)
    assert {n for n, word in found.items() if word == "good"} == set(reads)
    assert [each.entry_id for each in world.bookie.requests[1:]] == reads


async def test_entries_around_the_fragment_are_not_in_its_list() -> None:
    world = World()
    (whole,) = world.fragments()
    found = verdicts(await world.read([replace(whole, first=5, last=9)], entries="listed"))
    assert found == {5: "good", 6: "unread", 7: "unread", 8: "unread", 9: "good"}
    for last in (5, 6):
        found = verdicts(await world.read([replace(whole, first=5, last=last)], entries="listed"))
        assert found == dict.fromkeys(range(5, last + 1), "good")


async def test_a_large_fragment_is_listed_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    assert reader_module.LISTING_ENTRIES_MAX == 1_000_000
    monkeypatch.setattr(reader_module, "LISTING_ENTRIES_MAX", 8)
    world = World()
    del world.bookie.frames[LEDGER, 10]
    found = verdicts(await world.read(entries="listed"))
    assert set(found) == set(range(20))
    assert {n for n, word in found.items() if word == "absent"} == {10}
    assert len([each for each in world.bookie.requests if isinstance(each, ListEntriesRequest)]) == 3


async def test_a_list_that_cannot_be_decoded_is_no_list() -> None:
    world = World()
    world.bookie._list = lambda r: ListEntriesResponse(r.txn_id, OK, r.ledger_id, b"garbage")  # type: ignore[method-assign]
    assert verdicts(await world.read(entries="listed")) == dict.fromkeys(range(20), "good")


async def test_a_response_that_names_no_operation_is_no_list() -> None:
    world = World()
    world.bookie._list = lambda r: ReadResponse(3, OK, r.ledger_id, 0, None)  # type: ignore[method-assign]
    assert verdicts(await world.read(entries="listed")) == dict.fromkeys(range(20), "good")


async def test_lists_are_requested_with_wire_version_3() -> None:
    world = World()
    versions: list[int] = []
    connection = world.bookie.connection

    def connected(bookie_id: BookieId, wire_version: int) -> Any:
        versions.append(wire_version)
        return connection(bookie_id, wire_version)

    world.bookie.connection = connected  # type: ignore[method-assign]
    await world.read(entries="listed")
    assert versions == [3, 2]


async def test_ends_without_a_known_lac_are_unknown_and_other_fragments_are_read() -> None:
    world = World(is_closed=False)
    (unknown,) = world.fragments(Tail(None))
    closed = World().fragments()
    rows = await world.read([*closed, replace(unknown, first=20, last=20)], entries="ends")
    assert verdicts(rows) == {0: "good", 19: "good", 20: "unreachable"}


async def test_a_full_sink_is_emptied_while_the_entries_of_a_bookie_without_lists_are_read(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(rows_module, "BATCH_ROWS", 50)
    monkeypatch.setattr(reader_module, "REQUEST_ENTRIES_MAX", 10)
    world = World(entries=1_000)
    world.bookie.list_status = int(Status.BAD_REQUEST)
    loop = asyncio.get_running_loop()
    budget = Budget(0, now=loop.time())
    reader = BookieReader(world.bookie, world.metadata, BOOKIE, budget=budget, timeout_s=1)  # type: ignore[arg-type]
    sizes = [batch.num_rows async for batch in reader.read(world.fragments(), entries="listed")]
    assert sum(sizes) == 1_000
    assert max(sizes) <= 50 + 10 * reader_module.WINDOW_REQUESTS


async def test_an_unconfirmed_first_entry_is_not_reported_as_missing() -> None:
    world = World(is_closed=False)
    world.bookie.frames.clear()
    fragments = world.fragments(Tail(-1, length=0, length_at=-1, held={BOOKIE: 3}))
    assert [(each.first, each.last) for each in fragments] == [(0, 3)]
    assert await world.read(fragments) == []


async def test_a_busy_bookie_is_not_asked_for_its_list_without_a_pause() -> None:
    world = World()
    script(world.bookie, "busy", "busy")
    began = asyncio.get_running_loop().time()
    assert len(await world.read(entries="listed", timeout_s=5)) == 20
    assert asyncio.get_running_loop().time() - began == pytest.approx(2 * reader_module.BUSY_PAUSE_S)
