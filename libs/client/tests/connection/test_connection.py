"""One connection to one bookie: batches, deadlines, losses, limits."""

import asyncio
import ssl
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest
from bindery_client.connection.connection import BookieConnection
from bindery_client.connection.security import ClientSecurity
from bindery_client.settings import ClientSettings
from bindery_core.digest import Digester
from bindery_core.entry import pack_many
from bindery_core.errors import BookieUnavailable
from bindery_core.formats.ledger_metadata import DigestType
from bindery_core.ids import BookieId
from bindery_core.wire import v2, v3
from bindery_core.wire.messages import (
    AddRequest,
    AuthRequest,
    AuthResponse,
    ErrorResponse,
    ReadRequest,
    ReadResponse,
    StartTlsResponse,
    Status,
)
from bindery_simulation.certificates import CA, certificate, key
from fake_bookie import FakeBookie
from fake_cluster import QUICK
from sink import LIMIT_S, Sink

BOOKIE = BookieId("b")
DIGESTER = Digester(DigestType.CRC32C)


def adds(first: int, count: int, *, size: int = 10) -> tuple[bytes, list[int]]:
    bodies = pack_many(DIGESTER, [b"x" * size] * count, ledger_id=7, first_entry_id=first, lac=-1, length=0)
    requests = [AddRequest(first + i, 7, first + i, DIGESTER.master_key, body) for i, body in enumerate(bodies)]
    return v3.encode_requests(requests), [request.txn_id for request in requests]


@pytest.fixture
async def bookie() -> AsyncIterator[FakeBookie]:
    bookie = FakeBookie("b")
    await bookie.start()
    yield bookie
    await bookie.close()


@pytest.fixture
async def connect(bookie: FakeBookie) -> AsyncIterator[object]:
    made: list[BookieConnection] = []

    def connect(settings: ClientSettings = QUICK) -> BookieConnection:
        async def resolve(_bookie_id: BookieId) -> tuple[str, int]:
            return "127.0.0.1", bookie.port

        made.append(BookieConnection(BOOKIE, resolve=resolve, settings=settings))
        return made[-1]

    yield connect
    for connection in made:
        await connection.close()


async def test_requests_sent_in_one_turn_of_the_loop_arrive_as_one_batch(bookie, connect) -> None:
    connection, sink = connect(), Sink()
    connection.send(*adds(0, 1), sink, timeout_s=LIMIT_S)
    await sink.all_answered(1)
    for first in range(1, 101):
        connection.send(*adds(first, 1), sink, timeout_s=LIMIT_S)
    await sink.all_answered(101)
    assert sorted(sink.txn_ids) == list(range(101))
    assert bookie.add_batches == [1, 100]
    assert [len(batch) for batch in sink.batches] == [1, 100]
    assert connection.bytes_in_flight == connection.requests_in_flight == 0


async def test_requests_sent_before_the_connection_is_open_are_not_lost(bookie, connect) -> None:
    connection, sink = connect(), Sink()
    for first in range(10):
        connection.send(*adds(first, 1), sink, timeout_s=LIMIT_S)
    assert not connection.is_connected
    await sink.all_answered(10)
    assert connection.is_connected


async def test_responses_go_to_the_sink_of_their_request(connect) -> None:
    connection, adder, reader = connect(), Sink(), Sink()
    connection.send(*adds(0, 3), adder, timeout_s=LIMIT_S)
    connection.send(v3.encode_request(ReadRequest(100, 7, 1)), [100], reader, timeout_s=LIMIT_S)
    await adder.all_answered(3)
    await reader.all_answered(1)
    assert adder.txn_ids == [0, 1, 2]
    assert reader.txn_ids == [100]


async def test_a_request_without_a_response_expires_and_its_late_response_is_ignored(bookie, connect) -> None:
    connection, sink, other = connect(), Sink(), Sink()
    connection.send(*adds(0, 1), sink, timeout_s=LIMIT_S)
    await sink.all_answered(1)
    bookie.freeze()
    connection.send(*adds(1, 2), sink, timeout_s=1.0)
    while bookie.requests["AddRequest"] < 3:
        await asyncio.sleep(0.005)
    bookie._frozen = False
    connection.send(*adds(3, 1), other, timeout_s=LIMIT_S)  # some response arrives, so the peer is alive
    await other.all_answered(1)
    await sink.news()
    assert len(sink.expiries) == 1
    assert connection.bytes_in_flight == connection.requests_in_flight == 0
    bookie.thaw()
    connection.send(*adds(4, 1), other, timeout_s=LIMIT_S)
    await other.all_answered(2)
    assert sink.txn_ids == [0]
    assert connection.is_connected


async def test_a_connection_without_any_response_is_opened_again(bookie, connect) -> None:
    connection, sink = connect(), Sink()
    bookie.freeze()
    connection.send(*adds(0, 1), sink, timeout_s=0.05)
    await sink.news()
    assert len(sink.expiries) == 1
    async with asyncio.timeout(LIMIT_S):
        while connection.is_connected:
            await asyncio.sleep(0.005)
    bookie.drop_held()
    connection.send(*adds(1, 1), sink, timeout_s=LIMIT_S)
    await sink.all_answered(1)


async def test_a_lost_connection_fails_requests_in_flight_once_and_the_next_request_connects_again(
    bookie, connect
) -> None:
    connection, sink = connect(), Sink()
    bookie.freeze()
    connection.send(*adds(0, 5), sink, timeout_s=LIMIT_S)
    connection.send(*adds(5, 5), sink, timeout_s=LIMIT_S)
    while bookie.requests["AddRequest"] < 10:
        await asyncio.sleep(0.005)
    await bookie.stop()
    await sink.news()
    assert len(sink.errors) == 1
    assert isinstance(sink.errors[0], BookieUnavailable)
    assert connection.is_unreachable
    bookie.drop_held()
    await bookie.start()
    connection.send(*adds(10, 1), sink, timeout_s=LIMIT_S)
    await sink.all_answered(1)
    assert not connection.is_unreachable


async def test_after_a_refused_connection_requests_fail_at_once_until_the_delay_is_over(bookie, connect) -> None:
    settings = replace(QUICK, reconnect_pause_s=1.5, reconnect_pause_s_max=1.5)
    connection, sink = connect(settings), Sink()
    await bookie.stop()
    connection.send(*adds(0, 1), sink, timeout_s=LIMIT_S)
    await sink.news()
    await bookie.start()
    connection.send(*adds(1, 1), sink, timeout_s=LIMIT_S)
    await sink.news()
    assert len(sink.errors) == 2
    assert "retry_in_s" in sink.errors[1].facts
    await asyncio.sleep(1.6)
    connection.send(*adds(2, 1), sink, timeout_s=LIMIT_S)
    await sink.all_answered(1)


async def test_a_malformed_response_ends_the_connection(connect) -> None:
    async def babble(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(1)
        writer.write(b"\x00\x00\x00\x03\xff\xff\xff")
        await writer.drain()

    server = await asyncio.start_server(babble, "127.0.0.1", 0)

    async def resolve(_bookie_id: BookieId) -> tuple[str, int]:
        return "127.0.0.1", server.sockets[0].getsockname()[1]

    connection, sink = BookieConnection(BOOKIE, resolve=resolve, settings=QUICK), Sink()
    connection.send(*adds(0, 1), sink, timeout_s=LIMIT_S)
    await sink.news()
    assert isinstance(sink.errors[0], BookieUnavailable)
    await connection.close()
    server.close()


async def test_more_bytes_than_allowed_are_refused_but_one_large_request_alone_is_not(bookie, connect) -> None:
    connection = connect(replace(QUICK, in_flight_bytes_max=1000, client_bytes_max=5000, connection_bytes_max=10_000))
    sink, refused = Sink(), Sink()
    bookie.freeze()
    connection.send(*adds(0, 1, size=20_000), sink, timeout_s=LIMIT_S)
    connection.send(*adds(1, 1), refused, timeout_s=LIMIT_S)
    assert refused.errors == [], "never from within send"
    await refused.news()
    assert refused.errors[0].facts["bytes_in_flight"] > 10_000
    while bookie.requests["AddRequest"] < 1:
        await asyncio.sleep(0.005)
    bookie.thaw()
    await sink.all_answered(1)


async def test_closing_fails_requests_in_flight_and_later_ones(bookie, connect) -> None:
    connection, sink, late = connect(), Sink(), Sink()
    bookie.freeze()
    connection.send(*adds(0, 3), sink, timeout_s=LIMIT_S)
    await asyncio.sleep(0.02)
    await connection.close()
    assert len(sink.errors) == 1
    connection.send(*adds(3, 1), late, timeout_s=LIMIT_S)
    await late.news()
    assert isinstance(late.errors[0], BookieUnavailable)


async def test_closing_while_connecting_fails_waiting_requests(connect) -> None:
    async def resolve(_bookie_id: BookieId) -> tuple[str, int]:
        await asyncio.sleep(60)
        raise AssertionError

    connection, sink = BookieConnection(BOOKIE, resolve=resolve, settings=QUICK), Sink()
    connection.send(*adds(0, 1), sink, timeout_s=LIMIT_S)
    await asyncio.sleep(0)
    await connection.close()
    assert len(sink.errors) == 1


async def test_an_error_without_ids_counts_as_a_failure_of_the_bookie(connect) -> None:
    """A bookie that requires authentication responds without any ids."""

    async def refuse(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(10_000)
        response = ErrorResponse(0, 2, 502)
        writer.write(v3.encode_response(response))
        await writer.drain()

    server = await asyncio.start_server(refuse, "127.0.0.1", 0)

    async def resolve(_bookie_id: BookieId) -> tuple[str, int]:
        return "127.0.0.1", server.sockets[0].getsockname()[1]

    connection, sink = BookieConnection(BOOKIE, resolve=resolve, settings=QUICK), Sink()
    connection.send(*adds(0, 1), sink, timeout_s=LIMIT_S)
    await sink.news()
    assert sink.errors[0].facts["status"] == 502
    await connection.close()
    server.close()


async def test_answered_requests_are_not_kept_until_their_deadline(connect) -> None:
    connection, sink = connect(), Sink()
    for first in range(50):
        connection.send(*adds(first, 1), sink, timeout_s=60.0)
        await sink.all_answered(first + 1)
    async with asyncio.timeout(LIMIT_S):
        while connection._slots:
            await asyncio.sleep(0.01)


@pytest.mark.parametrize("wire_version", [2, 3])
async def test_a_second_response_to_start_tls_is_not_taken_for_the_response_to_auth(wire_version: int) -> None:
    """An Apache bookie sends it to a client that did not authenticate before TLS, and then answers AUTH."""
    codec = v3 if wire_version == 3 else v2
    server_tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    server_tls.load_cert_chain(certificate("bookie"), key("bookie"))

    async def receive(reader: asyncio.StreamReader) -> bytes:
        return await reader.readexactly(int.from_bytes(await reader.readexactly(4), "big"))

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await receive(reader)
        writer.write(v3.encode_response(StartTlsResponse(0, Status.OK)))
        await writer.start_tls(server_tls)
        writer.write(v3.encode_response(StartTlsResponse(0, Status.IO_ERROR)))
        requests = codec.decode_requests([await receive(reader)])
        assert isinstance(requests[0], AuthRequest)
        writer.write(codec.encode_response(AuthResponse(0, Status.OK, "bindery")))
        requests = codec.decode_requests([await receive(reader)])
        assert isinstance(requests[0], ReadRequest)
        writer.write(codec.encode_response(ReadResponse(1, Status.NO_ENTRY, 7, 0)))
        await reader.read()
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    host, port = server.sockets[0].getsockname()

    async def resolve(_: BookieId) -> tuple[str, int]:
        return host, port

    security = ClientSecurity(tls=ssl.create_default_context(cafile=str(CA)), token=b"a token")
    connection = BookieConnection(BOOKIE, resolve=resolve, settings=QUICK, wire_version=wire_version, security=security)
    sink = Sink()
    request = ReadRequest(1 if wire_version == 3 else 2, 7, 0)
    keys = [1] if wire_version == 3 else [v2.key_of(request)]
    try:
        connection.send(codec.encode_request(request), keys, sink, timeout_s=LIMIT_S)
        await sink.news()
        assert not sink.errors
        assert [response.status for batch in sink.batches for response in batch] == [Status.NO_ENTRY]
    finally:
        await connection.close()
        server.close()
