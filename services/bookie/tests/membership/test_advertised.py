"""The name under which clients connect is checked until it resolves."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator
from typing import Any

import pytest
from bindery_bookie.membership.advertised import AdvertisedName
from bindery_kit.observability.health import Health


class World:
    """A name service that answers with `errors` first."""

    def __init__(self) -> None:
        self.health = Health()
        self.health.started()
        self.errors: list[Exception] = []
        self.asked: list[tuple[float, Any]] = []
        self.task: asyncio.Task[None] | None = None

    async def resolve(self, host: str, port: Any, **options: Any) -> list[Any]:
        self.asked.append((asyncio.get_running_loop().time(), (host, port, options)))
        if self.errors:
            raise self.errors.pop(0)
        return [()]

    def start(self) -> None:
        self.task = asyncio.create_task(AdvertisedName("bookie-0.example", self.health).run())

    @property
    def note(self) -> str | None:
        notes: dict[str, str] = self.health.ready_answer()[1].get("notes", {})
        return notes.get("advertised_host")


@pytest.fixture
async def world(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[World]:
    world = World()
    monkeypatch.setattr(asyncio.get_running_loop(), "getaddrinfo", world.resolve)
    yield world
    if world.task is not None:
        world.task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await world.task


async def test_a_name_that_resolves_is_asked_for_once(world: World) -> None:
    world.start()
    await asyncio.sleep(100)
    assert world.note is None
    assert [asked for _, asked in world.asked] == [("bookie-0.example", None, {"type": socket.SOCK_STREAM})]
    assert world.task is not None
    assert not world.task.done(), "it runs until it is cancelled"


async def test_a_name_that_resolves_late_is_asked_for_every_ten_seconds(world: World) -> None:
    world.errors = [socket.gaierror(-2, "Name or service not known"), OSError("no server"), UnicodeError("too long")]
    world.start()
    await asyncio.sleep(5)
    assert world.note == (
        "the name bookie-0.example, under which clients connect to this bookie, does not resolve here (Name or service "
        "not known); set BOOKIE_ADVERTISED_HOST to a name that does"
    )
    await asyncio.sleep(10)
    assert world.note is not None
    assert "(no server)" in world.note
    await asyncio.sleep(10)
    assert "(too long)" in world.note
    await asyncio.sleep(10)
    assert world.note is None
    began = world.asked[0][0]
    assert [at - began for at, _ in world.asked] == pytest.approx([0, 10, 20, 30])
    await asyncio.sleep(100)
    assert len(world.asked) == 4
