"""Presence: registration and state stay consistent, over a real registration on the in-memory store."""

import asyncio
from collections.abc import AsyncIterator

import pytest
from bindery_bookie.membership.presence import Presence
from bindery_bookie.state import READ_ONLY_DISK, BookieState
from bindery_core.ids import BookieId
from bindery_kit.observability.health import Health
from bindery_metadata.bookies.registration import BookieRegistration
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.memory import MemoryStore, MemoryTree
from bindery_metadata.stores.store import SessionState

LAYOUT = LedgersLayout()
ID = BookieId("bookie-0")


class World:
    def __init__(self) -> None:
        self.tree = MemoryTree()
        self.observer = self.tree.connect()
        self.store: MemoryStore = self.tree.connect()
        self.state, self.health = BookieState(), Health()
        self.registration = BookieRegistration(self.store, LAYOUT, ID, b"info")
        self.presence = Presence(self.registration, self.state, self.health)
        self.registration.on_change(self.presence.registration_changed)

    async def lists(self) -> tuple[bool, bool]:
        """Return whether the bookie is in the list of writable and in that of read-only bookies."""
        writable = await self.observer.exists(LAYOUT.bookie(ID, read_only=False))
        read_only = await self.observer.exists(LAYOUT.bookie(ID, read_only=True))
        return writable is not None, read_only is not None

    async def until(self, lists: tuple[bool, bool]) -> None:
        async with asyncio.timeout(30):
            while await self.lists() != lists:
                await asyncio.sleep(0.001)


@pytest.fixture
async def world() -> AsyncIterator[World]:
    world = World()
    await world.observer.create(LAYOUT.available_readonly, make_parents=True)
    await world.registration.register()
    running = asyncio.create_task(world.presence.run())
    yield world
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    await world.registration.close()


async def test_a_registered_bookie_accepts_adds(world: World) -> None:
    assert await world.lists() == (True, False)
    assert world.state.registered
    assert not world.state.read_only


async def test_a_full_disk_moves_the_bookie_to_the_read_only_list_and_back(world: World) -> None:
    world.state.set_read_only(READ_ONLY_DISK, "full")
    await world.until((False, True))
    world.state.set_read_only(READ_ONLY_DISK, None)
    await world.until((True, False))


async def test_a_suspended_session_changes_nothing(world: World) -> None:
    """Nothing changes when the session is suspended or continues, although the registration is notified of both."""
    changes: list[tuple[bool, bool]] = []
    sessions: list[SessionState] = []
    world.state.on_change(lambda: changes.append((world.state.registered, world.state.read_only)))
    world.store.on_session_change(sessions.append)  # called after the registration's own listener
    world.tree.suspend(world.store)
    world.tree.resume(world.store)
    async with asyncio.timeout(30):
        while sessions != [SessionState.SUSPENDED, SessionState.CONNECTED]:
            await asyncio.sleep(0.001)
    assert await world.lists() == (True, False)
    assert changes == []
    assert world.state.registered
    assert world.state.accepts_add(priority=0)
    assert world.health.reasons.keys() <= {"startup"}


async def test_an_unregistered_bookie_refuses_adds_until_it_is_registered_again(world: World) -> None:
    turns: list[bool] = []
    world.state.on_change(lambda: turns.append(world.state.accepts_add(priority=0)))
    world.tree.suspend(world.store)
    world.tree.expire(world.store)
    world.tree.resume(world.store)
    async with asyncio.timeout(30):
        while turns != [False, True]:
            await asyncio.sleep(0.001)
    assert await world.lists() == (True, False)
    assert "metadata" not in world.health.reasons


async def test_a_disk_that_fills_while_the_session_is_lost_is_announced_afterwards(world: World) -> None:
    world.tree.suspend(world.store)
    world.tree.expire(world.store)
    world.state.set_read_only(READ_ONLY_DISK, "full")
    world.tree.resume(world.store)
    await world.until((False, True))
    async with asyncio.timeout(30):
        while world.state.reasons != {READ_ONLY_DISK: "full"}:
            await asyncio.sleep(0.001)


async def test_a_requested_stop_does_not_make_the_bookie_read_only(world: World) -> None:
    world.state.shutting_down = True
    await world.registration.close()
    assert await world.lists() == (False, False)
    assert not world.state.read_only


async def test_a_lost_session_does_not_move_the_bookie_to_the_read_only_list() -> None:
    """Only reasons of the bookie itself move it, so that it returns to the writable list at once."""
    wishes: list[bool] = []

    class Recorder:
        async def set_read_only(self, read_only: bool) -> None:
            wishes.append(read_only)

    state = BookieState()
    presence = Presence(Recorder(), state, Health())
    running = asyncio.create_task(presence.run())
    presence.registration_changed(False)
    await asyncio.sleep(0.01)
    assert state.read_only
    state.set_read_only(READ_ONLY_DISK, "full")
    await asyncio.sleep(0.01)
    assert wishes == [False, True]
    running.cancel()
