"""Ledgers that a bookie lists by its admin HTTP API, and unexpected entries."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from bindery_core.errors import BookieUnavailable, Corrupt, NoSuchLedger
from bindery_core.formats.bookie_service_info import HTTP, BookieServiceInfo, Endpoint
from bindery_core.formats.ledger_metadata import LedgerMetadata, LedgerState, Segment
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_spark.reading import orphaned_data as module
from bindery_spark.reading.blocks import Blocks
from bindery_spark.reading.orphaned_data import LEDGERS_PATH, Unlisted, held_ledgers, read_unexpected, unexpected_of
from bindery_spark.schemas import NO_LEDGER
from scripted_bookie import FakeMetadata

BOOKIE = BookieId("b")


def pool(*endpoints: Endpoint) -> Any:
    """A directory in which b has these endpoints."""
    record = SimpleNamespace(info=BookieServiceInfo(endpoints=endpoints))
    return SimpleNamespace(directory=SimpleNamespace(bookies={BOOKIE: record}))


@asynccontextmanager
async def answering(answer: bytes) -> AsyncIterator[Any]:
    """A pool with a bookie whose admin HTTP port sends `answer` and closes the connection."""
    asked: list[bytes] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        asked.append(await reader.readuntil(b"\r\n"))
        writer.write(answer)
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with server:
        found = pool(Endpoint(id="http", host="127.0.0.1", port=port, protocol=HTTP))
        found.asked = asked
        yield found


def http(status: str, body: Any) -> bytes:
    return (
        f"HTTP/1.1 {status}\r\nConnection: close\r\n\r\n{body if isinstance(body, str) else json.dumps(body)}".encode()
    )


async def test_ledgers_are_listed_without_a_proxy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "http_proxy", "http://127.0.0.1:1")
    async with answering(http("200 OK", {"ledgers": [[1, 3], [9, 9]]})) as there:
        assert await held_ledgers(there, BOOKIE, timeout_s=5) == [range(1, 4), range(9, 10)]
        assert there.asked == [f"GET {LEDGERS_PATH} HTTP/1.1\r\n".encode()]


@pytest.mark.parametrize(
    "answer",
    [
        pytest.param(http("404 Not Found", "no such page"), id="another's"),
        pytest.param(http("401 Unauthorized", {"error": "who is there?"}), id="guarded"),
        pytest.param(http("200 OK", "<html>"), id="no JSON"),
        pytest.param(http("200 OK", {"ids": []}), id="other JSON"),
        pytest.param(http("200 OK", {"ledgers": [7]}), id="no runs"),
        pytest.param(b"\x15\x03\x01\x00\x02\x02\x16", id="TLS"),
        pytest.param(b"", id="nothing"),
    ],
)
async def test_an_invalid_list_of_ledgers_is_reported_as_unlisted(answer: bytes) -> None:
    async with answering(answer) as there:
        with pytest.raises(Unlisted, match="did not list its ledgers"):
            await held_ledgers(there, BOOKIE, timeout_s=5)


@pytest.mark.parametrize(
    ("there", "why"),
    [
        pytest.param(pool(), "no admin HTTP", id="no endpoint"),
        pytest.param(SimpleNamespace(directory=SimpleNamespace(bookies={})), "not registered", id="away"),
    ],
)
async def test_a_bookie_that_cannot_list_has_a_row_with_the_reason(there: Any, why: str) -> None:
    rows = read_unexpected(there, FakeMetadata(), BOOKIE, (0, 9), timeout_s=5, rows=Blocks(BOOKIE))
    (row,) = [row async for batch in rows for row in batch.to_pylist()]
    assert (row["ledger_id"], row["bookie"], row["expected"], row["copies"]) == (NO_LEDGER, "b", False, 0)
    assert why in row["reason"]


A, B, C, D = (BookieId(letter) for letter in "abcd")


def metadata(**changes: object) -> LedgerMetadata:
    return LedgerMetadata(
        ensemble_size=3, write_quorum=3, ack_quorum=2, segments=(Segment(EntryId(0), (A, B, C)),)
    ).with_changes(**changes)


def test_all_entries_of_a_ledger_without_metadata_are_unexpected() -> None:
    assert list(unexpected_of(None, A, [(0, 2), (5, 1)])) == [(-1, 0), (-1, 1), (-1, 5)]


def test_entries_beyond_a_closed_ledgers_end_are_unexpected_in_its_last_segment() -> None:
    closed = metadata(state=LedgerState.CLOSED, last_entry_id=EntryId(1))
    assert list(unexpected_of(closed, A, [(0, 4)])) == [(0, 2), (0, 3)]


def test_entries_beyond_the_lac_of_an_open_ledger_are_legal() -> None:
    assert list(unexpected_of(metadata(), A, [(0, 1000)])) == []


def test_only_earlier_segments_are_expected_on_a_replaced_bookie() -> None:
    moved = metadata(segments=(Segment(EntryId(0), (A, B, C)), Segment(EntryId(3), (D, B, C))))
    assert list(unexpected_of(moved, A, [(0, 5)])) == [(-1, 3), (-1, 4)]
    assert list(unexpected_of(moved, D, [(2, 3)])) == [(-1, 2)]


class Lists:
    """Replaces the requests to a bookie: scripted runs or an error for each ledger."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ledgers: list[range]) -> None:
        self.of: dict[int, Any] = {}
        self.in_flight = self.in_flight_max = 0
        self.asked: list[int] = []

        async def held(*_: object, timeout_s: float, ca_file: str) -> list[range]:
            assert (timeout_s, ca_file) == (5, "")
            return ledgers

        monkeypatch.setattr(module, "held_ledgers", held)
        monkeypatch.setattr(module, "LedgerRequests", lambda ledger_id, *_: ledger_id)
        monkeypatch.setattr(module, "EntryList", lambda ledger_id, bookie_id: Lists.Request(self, ledger_id))

    class Request:
        def __init__(self, lists: "Lists", ledger_id: int) -> None:
            self._lists, self._ledger_id = lists, ledger_id

        async def run(self, *, timeout_s: float) -> Any:
            assert timeout_s == 5
            lists = self._lists
            lists.asked.append(self._ledger_id)
            lists.in_flight += 1
            lists.in_flight_max = max(lists.in_flight_max, lists.in_flight)
            await asyncio.sleep(0)
            lists.in_flight -= 1
            found = lists.of.get(self._ledger_id, ())
            if isinstance(found, Exception):
                raise found
            return found


async def unexpected_rows(lists: Lists, known: FakeMetadata, wanted: tuple[int, int]) -> list[list[tuple]]:
    rows = read_unexpected(pool(), known, BOOKIE, wanted, timeout_s=5, rows=Blocks(BOOKIE))
    names = ("ledger_id", "segment", "first_entry", "last_entry", "copies", "reason")
    return [[tuple(row[name] for name in names) for row in batch.to_pylist()] async for batch in rows]


async def test_entries_of_the_wanted_ledgers_are_compared_with_their_metadata(monkeypatch: pytest.MonkeyPatch) -> None:
    lists, known = Lists(monkeypatch, [range(1, 4), range(5, 9)]), FakeMetadata()
    closed = metadata(segments=(Segment(EntryId(0), (A, B, C)),), state=LedgerState.CLOSED, last_entry_id=EntryId(1))
    known.ledgers = {3: metadata(segments=(Segment(EntryId(0), (A, D, C)),)), 5: closed, 7: metadata()}
    lists.of = {
        2: [(0, 2), (5, 1)],
        3: [(4, 1)],
        5: [(0, 4)],
        6: NoSuchLedger(ledger_id=6),
        7: BookieUnavailable("no answer"),
        8: [(0, 1)],
    }
    assert await unexpected_rows(lists, known, (2, 7)) == [
        [
            (2, -1, 0, 5, 3, None),
            (3, -1, 4, 4, 1, None),
            (5, 0, 2, 3, 2, None),
            (7, -1, -1, -1, 0, "unlisted: no answer"),
        ]
    ]
    assert lists.asked == [2, 3, 5, 6, 7]


async def test_a_ledger_with_unreadable_metadata_has_no_unexpected_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    lists, known = Lists(monkeypatch, [range(3)]), FakeMetadata()
    lists.of = {1: [(0, 1)], 2: [(0, 1)]}
    read = known.read

    async def unreadable(ledger_id: LedgerId) -> LedgerMetadata:
        if ledger_id == 1:
            raise Corrupt("cannot be decoded")
        return await read(ledger_id)

    known.read = unreadable  # type: ignore[method-assign]
    assert await unexpected_rows(lists, known, (0, 9)) == [[(2, -1, 0, 0, 1, None)]]


async def test_at_most_64_lists_are_requested_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    lists = Lists(monkeypatch, [range(200)])
    lists.of = {number: [(0, 1)] for number in range(0, 200, 2)}
    batches = await unexpected_rows(lists, FakeMetadata(), (0, 199))
    assert lists.in_flight_max == 64
    assert [len(batch) for batch in batches] == [64, 36], "a batch of rows is full at 64"
    assert [row[0] for batch in batches for row in batch] == list(range(0, 200, 2))


async def test_a_bookie_without_unexpected_entries_has_no_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    assert await unexpected_rows(Lists(monkeypatch, [range(3)]), FakeMetadata(), (0, 9)) == []
