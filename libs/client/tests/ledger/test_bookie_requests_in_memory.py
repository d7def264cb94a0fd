"""Requests to whole ledgers and bookies over requests and a pool in memory: what is sent, and when they complete."""

import asyncio
from typing import Any

import pytest
from bindery_client.ledger.bookie_requests import DiskSpaces, EntryList, ForceAll, FreeSpace
from bindery_client.settings import ClientSettings
from bindery_core.errors import BookieUnavailable, Corrupt, NoSuchLedger
from bindery_core.formats import availability
from bindery_core.ids import BookieId, LedgerId
from bindery_core.wire import v3
from bindery_core.wire.messages import (
    BookieInfoRequest,
    BookieInfoResponse,
    ForceLedgerResponse,
    ListEntriesResponse,
    Status,
)
from bindery_metadata.bookies.directory import BookieRecord

LEDGER = LedgerId(7)
A, B, C = (BookieId(name) for name in "abc")
DOWN = BookieUnavailable("down")


class Requests:
    """Records the requests about one ledger: kind, bookie and timeout."""

    ledger_id = LEDGER

    def __init__(self) -> None:
        self.sent: list[tuple[str, BookieId, float]] = []

    def send_force(self, bookie_id: BookieId, sink: Any, *, timeout_s: float) -> None:
        self.sent.append(("force", bookie_id, timeout_s))

    def send_list_entries(self, bookie_id: BookieId, sink: Any, *, timeout_s: float) -> None:
        self.sent.append(("list", bookie_id, timeout_s))


class Pool:
    """The pool, its directory and its connections. Transaction ids begin at 100."""

    def __init__(self, *, interval_s: float = 60.0) -> None:
        self.settings = ClientSettings(bookie_info_interval_s=interval_s, read_timeout_s=3.0)
        self.free_bytes: dict[BookieId, int] = {}
        self.directory = self
        self.bookies = {b: BookieRecord(b, "host", 3181, b == C) for b in (A, B, C)}
        """C is read-only."""
        self.sent: list[tuple[BookieId, BookieInfoRequest, float]] = []
        self._txn_id = 99
        self._peer = A

    def txn_id(self) -> int:
        self._txn_id += 1
        return self._txn_id

    def connection(self, bookie_id: BookieId) -> "Pool":
        self._peer = bookie_id
        return self

    def send(self, frame: bytes, keys: Any, sink: Any, *, timeout_s: float) -> None:
        request = v3.decode_request(frame[4:])
        assert isinstance(request, BookieInfoRequest)
        assert tuple(keys) == (request.txn_id,)
        self.sent.append((self._peer, request, timeout_s))


async def started(work: Any) -> "asyncio.Task[Any]":
    task = asyncio.create_task(work)
    await asyncio.sleep(0)
    return task


# --- force ------------------------------------------------------------------------------------------------------------


def forced(status: int = Status.OK) -> ForceLedgerResponse:
    return ForceLedgerResponse(0, status, LEDGER)


async def test_a_force_waits_for_every_bookie() -> None:
    requests = Requests()
    force = ForceAll(requests, (A, B))  # type: ignore[arg-type]
    task = await started(force.run(timeout_s=4.0))
    assert sorted(requests.sent) == [("force", A, 4.0), ("force", B, 4.0)]
    force.answered(A, [forced()])
    force.answered(A, [forced()])
    await asyncio.sleep(1)
    assert not task.done()
    force.answered(B, [forced()])
    await task
    force.answered(B, [forced()])
    force.failed(B, DOWN)


async def test_a_force_fails_with_the_first_bookie_that_refuses() -> None:
    force = ForceAll(Requests(), (A, B))  # type: ignore[arg-type]
    task = await started(force.run(timeout_s=4.0))
    force.answered(A, [forced(Status.IO_ERROR)])
    force.failed(B, DOWN)
    with pytest.raises(BookieUnavailable, match="failed to force") as failed:
        await task
    assert (failed.value.facts["bookie_id"], failed.value.facts["status"]) == (A, 501)


@pytest.mark.parametrize("how", ["failed", "expired"])
async def test_a_force_fails_if_a_bookie_does_not_answer(how: str) -> None:
    force = ForceAll(Requests(), (A, B))  # type: ignore[arg-type]
    task = await started(force.run(timeout_s=4.0))
    getattr(force, how)(B, DOWN)
    force.answered(A, [forced()])
    with pytest.raises(BookieUnavailable, match="down"):
        await task


# --- lists of entries -------------------------------------------------------------------------------------------------


async def listing(response: ListEntriesResponse) -> list[tuple[int, int]]:
    requests = Requests()
    entries = EntryList(requests, A)  # type: ignore[arg-type]
    task = await started(entries.run(timeout_s=4.0))
    assert requests.sent == [("list", A, 4.0)]
    entries.answered(A, [response])
    entries.answered(A, [response])  # ignored
    entries.failed(A, DOWN)
    found: list[tuple[int, int]] = await task
    return found


async def test_the_entries_that_a_bookie_lists_are_returned_as_runs() -> None:
    body = availability.encode([(0, 3), (7, 1)])
    assert await listing(ListEntriesResponse(0, Status.OK, LEDGER, body)) == [(0, 3), (7, 1)]


@pytest.mark.parametrize(
    ("response", "error"),
    [
        (ListEntriesResponse(0, Status.NO_LEDGER, LEDGER), NoSuchLedger),
        (ListEntriesResponse(0, Status.IO_ERROR, LEDGER, availability.encode([(0, 3)])), BookieUnavailable),
        (ListEntriesResponse(0, Status.OK, LEDGER, None), BookieUnavailable),
        (ListEntriesResponse(0, Status.OK, LEDGER, b"?"), Corrupt),
    ],
    ids=["no ledger", "error", "no list", "garbage"],
)
async def test_without_a_list_there_is_an_error(response: ListEntriesResponse, error: type[Exception]) -> None:
    with pytest.raises(error):
        await listing(response)


async def test_the_error_of_a_bookie_that_cannot_list_names_it_and_its_status() -> None:
    with pytest.raises(BookieUnavailable, match="cannot list its entries") as failed:
        await listing(ListEntriesResponse(0, Status.TOO_MANY_REQUESTS, LEDGER))
    facts = failed.value.facts
    assert (facts["ledger_id"], facts["bookie_id"], facts["status"]) == (7, A, 506)


@pytest.mark.parametrize("how", ["failed", "expired"])
async def test_a_bookie_that_does_not_answer_lists_nothing(how: str) -> None:
    entries = EntryList(Requests(), A)  # type: ignore[arg-type]
    task = await started(entries.run(timeout_s=4.0))
    getattr(entries, how)(A, DOWN)
    with pytest.raises(BookieUnavailable, match="down"):
        await task


# --- disk space -------------------------------------------------------------------------------------------------------


def info(total: int | None, free: int | None, status: int = Status.OK) -> BookieInfoResponse:
    return BookieInfoResponse(0, status, total_disk_capacity=total, free_disk_space=free)


async def test_disk_spaces_wait_for_the_answer_or_the_failure_of_every_bookie() -> None:
    pool = Pool()
    spaces = DiskSpaces(pool)  # type: ignore[arg-type]
    task = await started(spaces.run([A, B, C], timeout_s=4.0))
    assert [(b, r.txn_id, r.requested, s) for b, r, s in pool.sent] == [
        (A, 100, 0b11, 4.0),
        (B, 101, 0b11, 4.0),
        (C, 102, 0b11, 4.0),
    ]
    spaces.answered(A, [info(100, 0)])
    spaces.failed(B, DOWN)
    await asyncio.sleep(1)
    assert not task.done()
    spaces.expired(C, DOWN)
    assert await task == {A: (100, 0)}
    spaces.failed(C, DOWN)


@pytest.mark.parametrize("answer", [info(100, None), info(None, 40), info(100, 40, Status.IO_ERROR)])
async def test_an_incomplete_answer_about_disk_space_is_left_out(answer: BookieInfoResponse) -> None:
    spaces = DiskSpaces(Pool())  # type: ignore[arg-type]
    task = await started(spaces.run([A], timeout_s=4.0))
    spaces.answered(A, [answer])
    assert await task == {}


async def test_without_bookies_there_are_no_disk_spaces() -> None:
    assert await DiskSpaces(Pool()).run([], timeout_s=4.0) == {}  # type: ignore[arg-type]


async def test_free_space_is_requested_from_writable_bookies_once_per_interval() -> None:
    pool = Pool(interval_s=60.0)
    await asyncio.sleep(1)
    space = FreeSpace(pool)  # type: ignore[arg-type]
    space.refresh_if_due()
    assert [(b, r.txn_id, r.requested, s) for b, r, s in pool.sent] == [(A, 100, 0b10, 3.0), (B, 101, 0b10, 3.0)]
    await asyncio.sleep(59)
    space.refresh_if_due()
    assert len(pool.sent) == 2
    await asyncio.sleep(1)
    space.refresh_if_due()
    assert len(pool.sent) == 4


async def test_free_space_is_not_requested_if_it_is_off() -> None:
    pool = Pool(interval_s=0.0)
    FreeSpace(pool).refresh_if_due()  # type: ignore[arg-type]
    assert pool.sent == []


async def test_free_space_is_known_until_a_bookie_fails() -> None:
    pool = Pool()
    space = FreeSpace(pool)  # type: ignore[arg-type]
    space.answered(A, [info(None, 0)])
    space.answered(B, [info(None, 40)])
    space.answered(B, [info(None, None)])
    space.answered(B, [info(None, 50, Status.IO_ERROR)])
    assert pool.free_bytes == {A: 0, B: 40}
    space.failed(A, DOWN)
    space.expired(B, DOWN)
    space.failed(C, DOWN)
    assert pool.free_bytes == {}
