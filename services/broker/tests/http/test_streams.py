"""The end of streams that are passed on by a broker that stops."""

import asyncio
from collections.abc import AsyncGenerator

import pytest
from bindery_broker.http.exchange import MOVED_EVENT
from bindery_broker.http.peers.streams import until_stop
from broker_harness import settle


class Owner:
    """The broker that sends the stream."""

    def __init__(self) -> None:
        self.coming: asyncio.Queue[bytes | None] = asyncio.Queue()
        self.closed = False

    async def chunks(self) -> AsyncGenerator[bytes, None]:
        try:
            while (chunk := await self.coming.get()) is not None:
                yield chunk
        finally:
            self.closed = True


async def read(owner: Owner, stops: asyncio.Event, got: list[bytes]) -> None:
    async for chunk in until_stop(owner.chunks(), stops):
        got.append(chunk)


async def test_a_stream_that_its_owner_ends_is_passed_on_unchanged() -> None:
    owner, stops, got = Owner(), asyncio.Event(), list[bytes]()
    for chunk in (b"data: a\n\n", b"data", b": b\n\n", None):
        owner.coming.put_nowait(chunk)
    await read(owner, stops, got)
    assert got == [b"data: a\n\n", b"data", b": b\n\n"]
    assert owner.closed


async def test_a_stop_ends_a_stream_that_is_silent_at_once() -> None:
    owner, stops, got = Owner(), asyncio.Event(), list[bytes]()
    reading = asyncio.create_task(read(owner, stops, got))
    owner.coming.put_nowait(b"data: a\n\n")
    await settle()
    assert not reading.done()
    stops.set()
    await asyncio.wait_for(reading, 30)
    assert got == [b"data: a\n\n", MOVED_EVENT]
    assert owner.closed


@pytest.mark.parametrize("parts", [[b"data: a", b"b\n\n"], [b"data: a\n", b"\n"], [b"d", b"ata: a\n", b"id: 1\n\n"]])
async def test_a_stop_waits_for_the_end_of_the_event_in_progress(parts: list[bytes]) -> None:
    owner, stops, got = Owner(), asyncio.Event(), list[bytes]()
    reading = asyncio.create_task(read(owner, stops, got))
    owner.coming.put_nowait(parts[0])
    await settle()
    stops.set()
    for part in parts[1:]:
        await settle()
        assert got[-1] != MOVED_EVENT
        owner.coming.put_nowait(part)
    await asyncio.wait_for(reading, 30)
    assert got == [*parts, MOVED_EVENT]


async def test_an_error_of_the_owner_is_raised() -> None:
    async def broken() -> AsyncGenerator[bytes, None]:
        yield b"data: a\n\n"
        raise ConnectionError("gone")

    with pytest.raises(ConnectionError, match="gone"):
        async for _ in until_stop(broken(), asyncio.Event()):
            pass


async def test_a_client_that_goes_ends_the_stream_of_the_owner() -> None:
    owner, got = Owner(), list[bytes]()
    reading = asyncio.create_task(read(owner, asyncio.Event(), got))
    owner.coming.put_nowait(b"data: a\n\n")
    await settle()
    reading.cancel()
    with pytest.raises(asyncio.CancelledError):
        await reading
    await settle()
    assert owner.closed
