"""The last confirmed entry of an open ledger, derived from the responses of its bookies."""

import asyncio
from typing import Any

import pytest
from bindery_core.digest import Digester
from bindery_core.entry import pack, pack_lac
from bindery_core.errors import BookieUnavailable
from bindery_core.formats.ledger_metadata import DigestType, LedgerMetadata, Segment
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.wire import v3
from bindery_core.wire.framing import FrameDecoder
from bindery_core.wire.messages import ReadLacResponse, Status
from bindery_spark.reading.open_ledgers import read_tails, tail_of

A, B, C, D = (BookieId(letter) for letter in "abcd")


LEDGER = LedgerId(7)


DIGESTER = Digester(DigestType.CRC32C)


def metadata(**changes: object) -> LedgerMetadata:
    return LedgerMetadata(
        ensemble_size=3, write_quorum=3, ack_quorum=2, segments=(Segment(EntryId(0), (A, B, C)),)
    ).with_changes(**changes)


def answer(
    *, last: int | None = None, lac: int = -1, explicit: int | None = None, status: int = int(Status.OK)
) -> ReadLacResponse:
    frame = packet = None
    if last is not None:
        frame = pack(DIGESTER, ledger_id=LEDGER, entry_id=last, lac=lac, length=10 * (last + 1), payload=b"0123456789")
    if explicit is not None:
        packet = pack_lac(DIGESTER, ledger_id=LEDGER, lac=explicit)
    return ReadLacResponse(1, status, LEDGER, packet, frame)


def test_the_highest_reported_lac_counts() -> None:
    tail = tail_of(LEDGER, metadata(), {A: answer(last=9, lac=6), B: answer(last=7, lac=5, explicit=7)})
    assert (tail.lac, tail.held, tail.length, tail.length_at) == (7, {A: 9, B: 7}, 100, 9)


def test_bookies_without_entries_report_that_no_entry_is_confirmed() -> None:
    nothing = answer(status=int(Status.NO_ENTRY))
    tail = tail_of(LEDGER, metadata(), {A: nothing, C: answer(status=int(Status.NO_LEDGER))})
    assert (tail.lac, tail.held) == (-1, {A: -1, C: -1})
    explicit = answer(status=int(Status.IO_ERROR), explicit=-1)
    assert tail_of(LEDGER, metadata(), {A: nothing, B: explicit}).held == {A: -1, B: -1}


@pytest.mark.parametrize("status", [Status.NO_ENTRY, Status.NO_LEDGER])
def test_a_bookie_without_entries_does_not_replace_a_silent_ack_quorum(status: Status) -> None:
    """Two of three may have confirmed a thousand entries without the third."""
    tail = tail_of(LEDGER, metadata(), {A: answer(status=int(status))})
    assert (tail.lac, tail.held) == (None, {A: -1})
    assert tail_of(LEDGER, metadata(ack_quorum=3), {A: answer(status=int(status))}).lac == -1
    moved = metadata(segments=(Segment(EntryId(0), (A, B, C)), Segment(EntryId(3), (D, B, C))))
    assert tail_of(LEDGER, moved, {D: answer(status=int(status))}).lac is None
    assert tail_of(LEDGER, moved, {D: answer(last=4, lac=2)}).lac is None, "entry 2 is in the previous segment"
    assert tail_of(LEDGER, moved, {D: answer(last=4, lac=3)}).lac == 3


def test_a_bookie_that_cannot_read_its_last_entry_does_not_count() -> None:
    nothing = answer(status=int(Status.NO_ENTRY))
    assert tail_of(LEDGER, metadata(), {A: nothing, B: answer(status=int(Status.IO_ERROR))}).lac is None


def test_bookies_without_an_answer_or_in_limbo_do_not_count() -> None:
    assert tail_of(LEDGER, metadata(), {}).lac is None
    assert tail_of(LEDGER, metadata(), {A: answer(status=int(Status.UNKNOWN_LEDGER_STATE))}).lac is None


def test_responses_with_invalid_digests_do_not_count() -> None:
    damaged = answer(last=9, lac=6, explicit=8)
    assert damaged.last_entry_body is not None
    assert damaged.lac_body is not None
    damaged.last_entry_body = damaged.last_entry_body[:-1] + b"!"
    assert tail_of(LEDGER, metadata(), {A: damaged}).lac is None
    damaged.last_entry_body = None
    damaged.lac_body = damaged.lac_body[:-1] + b"!"
    assert tail_of(LEDGER, metadata(), {A: damaged, B: answer(last=2, lac=1)}).lac == 1


class Bookies:
    """A pool whose bookies answer each request with a scripted response, or not at all."""

    def __init__(self) -> None:
        self.answers: dict[tuple[BookieId, int], Any] = {}
        """By bookie and ledger; missing: NO_ENTRY."""
        self.failing: set[BookieId] = set()
        self.sent: list[tuple[BookieId, int, float]] = []
        """Bookie, number of requests and timeout of each message."""
        self._txn_id = 0

    def txn_id(self) -> int:
        self._txn_id += 1
        return self._txn_id

    def connection(self, bookie_id: BookieId) -> "Connection":
        return Connection(self, bookie_id)


class Connection:
    def __init__(self, bookies: Bookies, bookie_id: BookieId) -> None:
        self._bookies, self._bookie_id = bookies, bookie_id

    def send(self, frames: bytes, keys: list[int], sink: Any, *, timeout_s: float) -> None:
        requests = [v3.decode_request(message) for message in FrameDecoder().feed(frames)]
        assert [each.txn_id for each in requests] == keys
        self._bookies.sent.append((self._bookie_id, len(requests), timeout_s))
        loop = asyncio.get_running_loop()
        if self._bookie_id in self._bookies.failing:
            for _ in requests:
                loop.call_soon(sink.failed, self._bookie_id, BookieUnavailable("lost"))
            return
        for request in requests:
            nothing = ReadLacResponse(request.txn_id, int(Status.NO_ENTRY), request.ledger_id, None, None)
            found = self._bookies.answers.get((self._bookie_id, request.ledger_id), nothing)
            loop.call_soon(sink.answered, self._bookie_id, [found])


async def test_each_bookie_of_the_last_ensemble_is_asked_once_for_all_its_ledgers() -> None:
    bookies = Bookies()
    moved = metadata(segments=(Segment(EntryId(0), (A, B, C)), Segment(EntryId(3), (D, B, C))))
    bookies.answers = {(A, 7): answer(last=9, lac=6), (B, 7): answer(last=9, lac=8)}
    bookies.failing = {C}
    tails = await read_tails(bookies, {LEDGER: metadata(), LedgerId(8): moved}, timeout_s=2.5)  # type: ignore[arg-type]
    assert sorted(bookies.sent) == [(A, 1, 2.5), (B, 2, 2.5), (C, 2, 2.5), (D, 1, 2.5)]
    assert (tails[LEDGER].lac, tails[LEDGER].held) == (8, {A: 9, B: 9})
    assert (tails[LedgerId(8)].lac, tails[LedgerId(8)].held) == (-1, {D: -1, B: -1})


async def test_a_bookie_gets_at_most_500_requests_at_a_time_and_none_after_a_failure() -> None:
    bookies = Bookies()
    one = metadata(ensemble_size=1, write_quorum=1, ack_quorum=1, segments=(Segment(EntryId(0), (A,)),))
    ledgers = {LedgerId(n): one for n in range(1, 1_002)}
    tails = await read_tails(bookies, ledgers, timeout_s=1)  # type: ignore[arg-type]
    assert [count for _, count, _ in bookies.sent] == [500, 500, 1]
    assert {tail.lac for tail in tails.values()} == {-1}
    assert len(tails) == 1_001
    bookies.failing, bookies.sent = {A}, []
    tails = await read_tails(bookies, ledgers, timeout_s=1)  # type: ignore[arg-type]
    assert [count for _, count, _ in bookies.sent] == [500]
    assert {tail.lac for tail in tails.values()} == {None}


async def test_a_response_that_names_no_operation_does_not_count() -> None:
    bookies = Bookies()
    bookies.answers = {(A, 7): object(), (B, 7): answer(last=4, lac=3), (C, 7): answer(last=4, lac=3)}
    tails = await read_tails(bookies, {LEDGER: metadata()}, timeout_s=1)  # type: ignore[arg-type]
    assert tails[LEDGER].held == {B: 4, C: 4}


def test_an_answer_that_does_not_count_does_not_hide_the_next_ones() -> None:
    good = answer(last=9, lac=6)
    limbo = answer(status=int(Status.UNKNOWN_LEDGER_STATE))
    damaged = answer(last=9, lac=8)
    assert damaged.last_entry_body is not None
    damaged.last_entry_body = damaged.last_entry_body[:-1] + b"!"
    for bad in (limbo, damaged):
        tail = tail_of(LEDGER, metadata(), {A: bad, B: good})
        assert (tail.lac, tail.held) == (6, {B: 9})
    explicit = answer(last=9, lac=6, explicit=8)
    assert explicit.lac_body is not None
    explicit.lac_body = explicit.lac_body[:-1] + b"!"
    assert tail_of(LEDGER, metadata(), {A: explicit}).lac == 6, "the last entry counts, the explicit LAC does not"


def test_without_an_entry_there_is_no_length() -> None:
    tail = tail_of(LEDGER, metadata(), {A: answer(status=int(Status.NO_ENTRY))})
    assert (tail.length, tail.length_at) == (0, -1)
    first = tail_of(LEDGER, metadata(), {A: answer(last=0)})
    assert (first.length, first.length_at) == (10, 0)


def test_digests_are_verified_with_the_password_of_the_ledger() -> None:
    secret = Digester(DigestType.MAC, b"secret")
    frame = pack(secret, ledger_id=LEDGER, entry_id=3, lac=2, length=40, payload=b"0123456789")
    response = ReadLacResponse(1, int(Status.OK), LEDGER, None, frame)
    locked = metadata(digest_type=DigestType.MAC, password=b"secret")
    assert tail_of(LEDGER, locked, {A: response}).lac == 2
    assert tail_of(LEDGER, metadata(digest_type=DigestType.MAC, password=b"other"), {A: response}).lac is None
