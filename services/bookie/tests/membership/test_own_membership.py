"""OwnMembership: its effects at the start, while the bookie runs, and when the session is lost."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from bindery_bookie.membership.own_membership import BookieRemoved
from bindery_core.ids import BookieId
from bindery_metadata.bookies.membership import ABSENT, Intent, MembershipStore
from bindery_metadata.layout.layout import BinderyLayout
from bookie_world import LAYOUT, BookieWorld, running, until

ID = BookieId("b0")
NOW_MS = 1_000_000


class World(BookieWorld):
    def __init__(self, directory: Path) -> None:
        super().__init__(directory, wall_clock_ms=lambda: NOW_MS, zookeeper="zk:2181")
        self.memberships = MembershipStore(self.observer, clock_ms=lambda: NOW_MS)

    async def json(self, path: str) -> Any:
        return (await self.get(path)).json()

    async def lists(self) -> tuple[bool, bool]:
        """Return whether the bookie is in the list of writable and in that of read-only bookies."""
        writable = await self.observer.exists(LAYOUT.bookie(ID, read_only=False))
        read_only = await self.observer.exists(LAYOUT.bookie(ID, read_only=True))
        return writable is not None, read_only is not None

    async def until_in(self, lists: tuple[bool, bool]) -> None:
        async with asyncio.timeout(30):
            while await self.lists() != lists:
                await asyncio.sleep(0.005)


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    world = World(tmp_path)
    async with running(world):
        yield world


async def test_a_drain_makes_the_bookie_read_only_until_it_is_cancelled(world: World) -> None:
    await world.process.start()
    assert await world.lists() == (True, False)
    assert (await world.json("/api/v1/bookie/state"))["membership"] == {
        "intent": "active",
        "sinceMs": 0,
        "untilMs": None,
        "reason": "",
        "by": "",
    }
    assert (await world.json("/readyz")) == {"status": "ready"}

    await world.memberships.set(ID, Intent.DRAINING, reason="old disks", by="ann")
    await world.until_in((False, True))
    assert world.process.state.reasons == {
        "draining": "draining: its ledgers move to other bookies (by ann: old disks)"
    }
    state = await world.json("/api/v1/bookie/state")
    assert state["readOnly"]
    assert state["membership"] == {
        "intent": "draining",
        "sinceMs": NOW_MS,
        "untilMs": None,
        "reason": "old disks",
        "by": "ann",
    }
    assert (await world.json("/readyz")) == {"status": "ready", "notes": {"membership": "draining (by ann: old disks)"}}

    await world.memberships.clear(ID)
    await world.until_in((True, False))
    assert world.process.state.reasons == {}
    assert (await world.json("/readyz")) == {"status": "ready"}


async def test_a_draining_bookie_is_never_listed_as_writable_when_it_starts(world: World) -> None:
    seen: list[bool] = []
    await world.memberships.set(ID, Intent.DRAINING)
    path = LAYOUT.bookie(ID, read_only=False)
    await world.observer.exists(path, watch=lambda: seen.append(True))
    await world.process.start()
    assert await world.lists() == (False, True)
    assert seen == []


async def test_a_removed_bookie_refuses_to_start_and_names_the_command(world: World, tmp_path: Path) -> None:
    await world.memberships.set(ID, Intent.REMOVED, reason="drained", by="ann")
    with pytest.raises(BookieRemoved, match="bindery bookie drain b0 --cancel --zookeeper zk:2181") as refused:
        await world.process.start()
    assert "(by ann: drained)" in str(refused.value)
    assert await world.lists() == (False, False)
    assert not list(tmp_path.rglob("*.txn")), "the storage was opened"


async def test_a_bookie_removed_while_it_runs_is_read_only(world: World) -> None:
    await world.process.start()
    await world.memberships.set(ID, Intent.REMOVED)
    await world.until_in((False, True))
    assert world.process.state.reasons == {"removed": "removed from the cluster"}


async def test_a_new_bookie_is_joining_until_it_serves(world: World) -> None:
    seen: list[tuple[str, tuple[bool, bool]]] = []
    stop = world.memberships.watch(ID, lambda said: seen.append((said.intent.value, (False, False))))
    path = BinderyLayout().membership(ID)
    gone = asyncio.Event()

    async def look() -> None:
        seen.append(("ended", await world.lists()))
        gone.set()

    async def follow() -> None:
        while await world.observer.exists(path) is None:
            await asyncio.sleep(0)
        await world.observer.exists(path, watch=lambda: asyncio.ensure_future(look()) and None)

    following = asyncio.create_task(follow())
    await world.process.start()
    async with asyncio.timeout(30):
        await gone.wait()
    await following
    stop()
    assert ("joining", (False, False)) in seen
    assert ("ended", (True, False)) in seen, "ended before it was registered"
    assert (await world.memberships.get(ID)).version == ABSENT


async def test_after_an_interrupted_first_start_the_bookie_is_joining_until_it_serves(world: World) -> None:
    await world.memberships.set(ID, Intent.JOINING)
    await world.process.start()
    assert (await world.memberships.get(ID)).version == ABSENT


async def test_a_new_bookie_keeps_an_existing_membership(world: World) -> None:
    await world.memberships.set(ID, Intent.DRAINING)
    await world.process.start()
    assert (await world.memberships.get(ID)).intent is Intent.DRAINING
    assert await world.lists() == (False, True)


async def test_a_maintenance_that_existed_at_the_start_is_cleared_when_the_bookie_serves(world: World) -> None:
    path = BinderyLayout().membership(ID)
    await world.memberships.set(ID, Intent.MAINTENANCE, until_ms=NOW_MS + 60_000)
    standing: list[tuple[bool, bool]] = []
    gone = asyncio.Event()

    async def look() -> None:
        standing.append(await world.lists())
        gone.set()

    await world.observer.exists(path, watch=lambda: asyncio.ensure_future(look()) and None)
    await world.process.start()
    async with asyncio.timeout(30):
        await gone.wait()
    assert standing == [(True, False)], "ended before it was registered"
    assert (await world.memberships.get(ID)).version == ABSENT
    await until(lambda: world.process.state.membership["intent"] == "active")


async def test_an_expired_maintenance_is_cleared(world: World) -> None:
    await world.memberships.set(ID, Intent.MAINTENANCE, until_ms=NOW_MS - 1)
    await world.process.start()
    async with asyncio.timeout(30):
        while (await world.memberships.get(ID)).version != ABSENT:
            await asyncio.sleep(0.005)


async def test_a_maintenance_set_while_the_bookie_runs_is_kept_for_the_next_stop(world: World) -> None:
    await world.process.start()
    await world.memberships.set(ID, Intent.MAINTENANCE, until_ms=NOW_MS + 60_000)
    await until(lambda: world.process.state.membership["intent"] == "maintenance")
    await asyncio.sleep(0.05)
    assert (await world.memberships.get(ID)).intent is Intent.MAINTENANCE
    assert await world.lists() == (True, False), "it goes on serving until it is stopped"


async def test_a_change_during_an_outage_is_applied_after_it(world: World) -> None:
    await world.process.start()
    assert world.store is not None
    world.tree.suspend(world.store)
    await world.memberships.set(ID, Intent.DRAINING)
    world.tree.expire(world.store)
    world.tree.resume(world.store)
    await world.until_in((False, True))


async def test_unreadable_membership_does_not_prevent_the_start(world: World) -> None:
    await world.observer.create(BinderyLayout().membership(ID), b"{broken", make_parents=True)
    await world.process.start()
    assert await world.lists() == (True, False)
