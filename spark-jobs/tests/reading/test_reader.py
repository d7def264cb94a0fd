"""Responses of one bookie as rows: stored, missing and unknown entries, with all kinds of failures."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pyarrow as pa
import pytest
from bindery_core.digest import Digester
from bindery_core.entry import pack_many
from bindery_core.errors import Corrupt
from bindery_core.formats.ledger_metadata import DigestType, LedgerMetadata, LedgerState, Segment
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.wire.messages import (
    BatchReadRequest,
    BatchReadResponse,
    ListEntriesRequest,
    ReadRequest,
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
