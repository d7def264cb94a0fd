"""BatchRead over a pool in memory: which requests it sends, and what the sink of the caller gets."""

from typing import Any

import pytest
from bindery_client.connection.connection import CLOSED_BY_PEER
from bindery_client.ledger.batch_read import BATCH_COUNT_MIN, BatchRead, is_run
from bindery_client.settings import ClientSettings
from bindery_core.errors import BookieUnavailable
from bindery_core.ids import BookieId, LedgerId
from bindery_core.ledger.ledger_actions import SendReads
from bindery_core.wire import v2
from bindery_core.wire.messages import BatchReadResponse, ReadRequest, ReadResponse, Request, Status
from sink import Sink

LEDGER = LedgerId(7)
BOOKIE = BookieId("b")
TIMEOUT_S = 3.0
SETTINGS = ClientSettings(frame_size_max=1_000_000)


class Sent:
    """The requests of one call of `send`."""

    def __init__(self, frames: bytes, keys: Any, sink: Any, timeout_s: float) -> None:
        self.requests: list[Request] = []
        while frames:
            end = 4 + int.from_bytes(frames[:4], "big")
            self.requests += v2.decode_requests([frames[4:end]])
            frames = frames[end:]
        self.keys = keys
        self.sink = sink
        self.timeout_s = timeout_s


class PoolInMemory:
    """The pool and its only connection. Transaction ids begin at 100."""

    settings = SETTINGS

    def __init__(self) -> None:
        self.without_batch_reads: set[BookieId] = set()
        self.sent: list[Sent] = []
        self.asked: set[tuple[BookieId, int]] = set()
        self._txn_id = 99

    def txn_id(self) -> int:
        self._txn_id += 1
        return self._txn_id

    def connection(self, bookie_id: BookieId, wire_version: int) -> "PoolInMemory":
        self.asked.add((bookie_id, wire_version))
        return self

    def send(self, frames: bytes, keys: Any, sink: Any, *, timeout_s: float) -> None:
        self.sent.append(Sent(frames, keys, sink, timeout_s))

    def batches(self) -> list[tuple[int, int, int]]:
        """First entry id, maximum number of entries, and request id of each batch read that was sent."""
        return [(r.entry_id, r.count_max, r.request_id) for sent in self.sent for r in sent.requests]  # type: ignore[union-attr]


def batch_read(first: int, last: int) -> tuple[PoolInMemory, Sink, BatchRead]:
    """Send a batch read of these entries."""
    pool, sink = PoolInMemory(), Sink()
    action = SendReads(BOOKIE, range(first, last + 1))
    read = BatchRead(pool, LEDGER, action, sink, timeout_s=TIMEOUT_S)  # type: ignore[arg-type]
    read.send()
    return pool, sink, read


def response(first: int, *bodies: bytes, status: int = Status.OK) -> list[BatchReadResponse]:
    return [BatchReadResponse(2, status, LEDGER, first, 100, bodies)]


def entry(entry_id: int, body: bytes | None, status: int = Status.OK) -> ReadResponse:
    return ReadResponse(2, status, LEDGER, entry_id, body)


def lost(cause: str) -> BookieUnavailable:
    return BookieUnavailable("connection to bookie was lost", bookie_id=BOOKIE, cause=cause)


@pytest.mark.parametrize(
    ("entry_ids", "consecutive"),
    [
        ([0, 1], True),
        ([1, 2, 3], True),
        ([5], True),
        ([-1], False),
        ([-1, 0], False),
        ([0, 2], False),
        ([0, 1, 3], False),
        ([0, 0], False),
        ([2, 1], False),
    ],
)
def test_consecutive_entry_ids_that_are_not_negative_are_a_run(entry_ids: list[int], consecutive: bool) -> None:
    assert is_run(entry_ids) is consecutive


def test_two_entries_are_enough_for_a_batch_read() -> None:
    assert BATCH_COUNT_MIN == 2


def test_one_request_of_version_2_asks_for_all_entries_within_the_frame_size() -> None:
    pool, sink, read = batch_read(3, 7)
    (sent,) = pool.sent
    (request,) = sent.requests
    assert (request.ledger_id, request.entry_id, request.count_max) == (LEDGER, 3, 5)  # type: ignore[union-attr]
    assert request.size_max == SETTINGS.frame_size_max  # type: ignore[union-attr]
    assert request.request_id == 100, "a new id of the pool"  # type: ignore[union-attr]
    assert list(sent.keys) == [v2.key_of(request)]
    assert sent.sink is read
    assert sent.timeout_s == TIMEOUT_S
    assert pool.asked == {(BOOKIE, 2)}
    assert not sink.batches


def test_the_sink_gets_one_response_per_entry() -> None:
    pool, sink, read = batch_read(3, 5)
    read.answered(BOOKIE, response(3, b"a", b"b", b"c"))
    assert sink.batches == [[entry(3, b"a"), entry(4, b"b"), entry(5, b"c")]]
    assert len(pool.sent) == 1, "nothing remains to be requested"


def test_entries_that_did_not_fit_are_requested_again_under_another_id() -> None:
    pool, sink, read = batch_read(3, 7)
    read.answered(BOOKIE, response(3, b"a", b"b"))
    assert pool.batches() == [(3, 5, 100), (5, 3, 101)]
    read.answered(BOOKIE, response(5, b"c", b"d"))
    assert pool.batches()[2:] == [(7, 1, 102)]
    read.answered(BOOKIE, response(7, b"e"))
    assert len(pool.sent) == 3
    assert sink.batches == [
        [entry(3, b"a"), entry(4, b"b")],
        [entry(5, b"c"), entry(6, b"d")],
        [entry(7, b"e")],
    ]


def test_the_next_request_is_sent_before_the_sink_gets_the_responses() -> None:
    sent_before: list[int] = []
    pool, sink, read = batch_read(0, 2)

    def answered(_bookie_id: BookieId, _responses: list[Any]) -> None:
        sent_before.append(len(pool.sent))

    sink.answered = answered  # type: ignore[method-assign]
    read.answered(BOOKIE, response(0, b"a"))
    assert sent_before == [2]


def test_entries_after_the_last_requested_one_are_ignored() -> None:
    pool, sink, read = batch_read(3, 4)
    read.answered(BOOKIE, response(3, b"a", b"b", b"c", b"d"))
    assert sink.batches == [[entry(3, b"a"), entry(4, b"b")]]
    assert len(pool.sent) == 1


def test_a_first_entry_that_is_missing_is_answered_so_and_the_rest_is_requested() -> None:
    pool, sink, read = batch_read(3, 5)
    read.answered(BOOKIE, response(3, status=Status.NO_ENTRY))
    assert sink.batches == [[entry(3, None, Status.NO_ENTRY)]]
    assert pool.batches()[1:] == [(4, 2, 101)]


def test_a_last_entry_that_is_missing_ends_the_batch_read() -> None:
    pool, sink, read = batch_read(3, 4)
    read.answered(BOOKIE, response(3, b"a"))
    read.answered(BOOKIE, response(4, status=Status.NO_ENTRY))
    assert sink.batches == [[entry(3, b"a")], [entry(4, None, Status.NO_ENTRY)]]
    assert len(pool.sent) == 2


def test_an_empty_response_without_an_error_counts_as_an_error_of_the_disk() -> None:
    _pool, sink, read = batch_read(3, 4)
    read.answered(BOOKIE, response(3))
    assert sink.batches == [[entry(3, None, Status.IO_ERROR)]]


@pytest.mark.parametrize("cause", [CLOSED_BY_PEER, "ConnectionResetError(104, 'Connection reset by peer')"])
def test_a_bookie_that_ends_the_connection_at_the_first_batch_read_is_asked_for_single_entries(cause: str) -> None:
    pool, sink, read = batch_read(3, 5)
    read.failed(BOOKIE, lost(cause))
    assert pool.without_batch_reads == {BOOKIE}
    _batch, single = pool.sent
    reads = [ReadRequest(2, LEDGER, entry_id) for entry_id in (3, 4, 5)]
    assert [type(request) for request in single.requests] == [ReadRequest] * 3
    assert [v2.key_of(request) for request in single.requests] == [v2.key_of(read) for read in reads]
    assert list(single.keys) == [v2.key_of(read) for read in reads]
    assert single.sink is sink, "the responses need no translation"
    assert single.timeout_s == TIMEOUT_S
    assert pool.asked == {(BOOKIE, 2)}
    assert not sink.errors


@pytest.mark.parametrize("error", [lost("TimeoutError()"), BookieUnavailable("connection was closed")])
def test_another_failure_says_nothing_about_batch_reads(error: BookieUnavailable) -> None:
    pool, sink, read = batch_read(3, 5)
    read.failed(BOOKIE, error)
    assert sink.errors == [error]
    assert not pool.without_batch_reads
    assert len(pool.sent) == 1


@pytest.mark.parametrize("first", [response(3, b"a"), response(3, status=Status.NO_ENTRY)])
def test_a_bookie_that_answered_a_batch_read_supports_them_although_the_connection_ends(first: list[Any]) -> None:
    pool, sink, read = batch_read(3, 5)
    read.answered(BOOKIE, first)
    error = lost(CLOSED_BY_PEER)
    read.failed(BOOKIE, error)
    assert sink.errors == [error]
    assert not pool.without_batch_reads


def test_a_batch_read_that_expires_is_reported_to_the_sink() -> None:
    pool, sink, read = batch_read(3, 5)
    error = BookieUnavailable("no answer in time")
    read.expired(BOOKIE, error)
    assert sink.expiries == [error]
    assert len(pool.sent) == 1
