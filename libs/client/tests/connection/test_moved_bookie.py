"""Bookies are reached by host name, which is resolved again for each connection."""

import asyncio
import socket

import pytest
from bindery_client.connection.connection import BookieConnection
from bindery_core.ids import BookieId
from fake_bookie import FakeBookie
from fake_cluster import QUICK
from sink import LIMIT_S, Sink

from .test_connection import BOOKIE, adds


def test_a_bookie_that_moved_is_found_by_its_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pod that is created again has another address under the same name, and for some time the name has no address.

    The test runs on asyncio's own loop, because uvloop resolves names outside Python, where a test cannot replace the
    resolution.
    """
    asyncio.run(connect_three_times(monkeypatch))


async def connect_three_times(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    place: int | None = None

    def getaddrinfo(host: str, *_: object, **__: object) -> list[object]:
        asked.append(host)
        if place is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", ("127.0.0.1", place))]

    async def resolve(_bookie_id: BookieId) -> tuple[str, int]:
        return "bookie-0.bookies", 3181

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    connection = BookieConnection(BOOKIE, resolve=resolve, settings=QUICK)
    for life in range(3):
        bookie, sink = FakeBookie("b"), Sink()
        await bookie.start()
        place = bookie.port
        assert await connection.probe()
        connection.send(*adds(life, 1), sink, timeout_s=LIMIT_S)
        await sink.all_answered(1)
        place = None
        await bookie.close()
        while connection.is_connected:
            await asyncio.sleep(0.005)
        assert not await connection.probe()
        assert connection.is_unreachable
    assert asked == ["bookie-0.bookies"] * 6
    await connection.close()
