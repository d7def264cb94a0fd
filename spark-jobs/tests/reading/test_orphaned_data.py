"""Ledgers that a bookie lists by its admin HTTP API, and unexpected entries."""

import asyncio
import json
import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any

import pytest
from bindery_core.formats.bookie_service_info import HTTP, BookieServiceInfo, Endpoint
from bindery_core.formats.ledger_metadata import LedgerMetadata, LedgerState, Segment
from bindery_core.ids import BookieId, EntryId
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
