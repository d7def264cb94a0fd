"""The store in memory: latency, faults, sessions and watches. The contract of all stores: test_store_*.py."""

import asyncio
from collections.abc import Awaitable, Callable

import pytest
from bindery_core.errors import (
    BadRequest,
    BinderyError,
    MetadataOutcomeUnknown,
    MetadataUnavailable,
    NoSuchNode,
    TooLarge,
    VersionConflict,
)
from bindery_metadata.stores.memory import FIRST_SESSION_ID, MemoryStore, MemoryTree
from bindery_metadata.stores.store import Check, Create, Delete, SessionState, Set
from bindery_simulation.instant import InstantLoop

CONNECTED, SUSPENDED, LOST = SessionState.CONNECTED, SessionState.SUSPENDED, SessionState.LOST
BIG = bytes(1_000_001)


def simulated(work: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await work()

    with asyncio.Runner(loop_factory=InstantLoop) as runner:
        runner.run(main())


def now() -> float:
    return asyncio.get_running_loop().time()


class Watches:
    """Watches that record their names when they fire."""

    def __init__(self) -> None:
        self.fired: list[str] = []

    def __call__(self, name: str) -> Callable[[], None]:
        return lambda: self.fired.append(name)


# --- operations -------------------------------------------------------------------------------------------------------


async def test_nodes_are_created_read_changed_and_deleted() -> None:
    store = MemoryTree(now_ms=lambda: 77).connect()
    assert await store.create("/a", b"x") == "/a"
    assert await store.create("/a/b/c", b"y", make_parents=True) == "/a/b/c"
    assert await store.children("/a") == ["b"]
    changed = await store.set("/a", b"z", version=0)
    assert (changed.version, changed.mtime_ms) == (1, 77)
    node = await store.get("/a")
    assert (node.data, node.stat) == (b"z", changed)
    assert await store.exists("/a") == changed
    await store.delete("/a/b/c", version=0)
    assert await store.exists("/a/b/c") is None
    assert await store.create("/a/n", sequential=True, ephemeral=True) == "/a/n0000000001"
    assert (await store.get("/a/n0000000001")).stat.ephemeral_owner == store.session_id


async def test_a_transaction_returns_a_result_per_operation() -> None:
    store = MemoryTree().connect()
    assert await store.multi([]) == []
    created, stat, checked, deleted = await store.multi(
        [Create("/a"), Set("/a", b"x", 0), Check("/a", 1), Delete("/a", 1)]
    )
    assert (created, checked, deleted) == ("/a", None, None)
    assert not isinstance(stat, str)
    assert stat is not None
    assert stat.version == 1
    with pytest.raises(VersionConflict):
        await store.multi([Create("/b"), Create("/c"), Check("/b", 1)])
    assert await store.children("/") == []


@pytest.mark.parametrize(
    "request_",
    [
        lambda store: store.get("a"),
        lambda store: store.exists("a"),
        lambda store: store.children("a"),
        lambda store: store.sync("a"),
        lambda store: store.create("a"),
        lambda store: store.set("a", b"", version=None),
        lambda store: store.delete("a", version=None),
        lambda store: store.multi([Check("/", 0), Check("a", 0)]),
    ],
)
async def test_a_path_is_checked_before_the_request(request_: Callable[[MemoryStore], Awaitable[object]]) -> None:
    with pytest.raises(BadRequest, match="not a znode path"):
        await request_(MemoryTree().connect())


@pytest.mark.parametrize(
    "request_",
    [
        lambda store: store.create("/a", BIG),
        lambda store: store.set("/", BIG, version=None),
        lambda store: store.multi([Create("/a", BIG[:500_000]), Set("/a", BIG[:500_001], 0)]),
    ],
)
async def test_data_is_limited(request_: Callable[[MemoryStore], Awaitable[object]]) -> None:
    store = MemoryTree().connect()
    with pytest.raises(TooLarge):
        await request_(store)
    await store.create("/ok", BIG[:1_000_000])


def test_times_are_those_of_the_loop_unless_given() -> None:
    async def work() -> None:
        store = MemoryTree().connect()
        await asyncio.sleep(2.5)
        await store.create("/a")
        assert (await store.get("/a")).stat.ctime_ms == 1_002_500

    simulated(work)


def test_half_of_the_latency_passes_in_each_direction() -> None:
    async def work() -> None:
        tree = MemoryTree()
        slow, quick = tree.connect(latency_s=4.0), tree.connect()
        began = now()
        creating = asyncio.create_task(slow.create("/a"))
        await asyncio.sleep(1.9)
        assert await quick.exists("/a") is None
        await asyncio.sleep(0.2)
        assert await quick.exists("/a") is not None
        assert not creating.done()
        await creating
        assert now() - began == 4.0

    simulated(work)


# --- watches ----------------------------------------------------------------------------------------------------------


async def test_watches_fire_once_for_the_change_that_they_watch() -> None:
    tree = MemoryTree()
    store, other, watches = tree.connect(), tree.connect(), Watches()
    await store.create("/a")
    await store.get("/a", watch=watches("data"))
    await store.children("/a", watch=watches("children"))
    await store.exists("/b", watch=watches("created"))
    await other.create("/a/x")
    await store.sync("/")
    assert watches.fired == ["children"]
    await other.set("/a", b"", version=None)
    await other.set("/a", b"", version=None)
    await other.create("/b")
    await store.sync("/")
    assert watches.fired == ["children", "data", "created"]


async def test_the_same_watch_on_a_path_counts_once_and_a_failed_read_sets_none() -> None:
    store, watches = MemoryTree().connect(), Watches()
    watch = watches("x")
    for read in (store.get, store.children):
        with pytest.raises(NoSuchNode):
            await read("/x", watch=watch)
    await store.create("/x")
    await store.sync("/")
    assert watches.fired == []
    await store.get("/x", watch=watch)
    await store.exists("/x", watch=watch)
    await store.set("/x", b"", version=None)
    await store.sync("/")
    assert watches.fired == ["x"]


# --- faults -----------------------------------------------------------------------------------------------------------


async def test_the_next_operation_fails_without_being_applied() -> None:
    store = MemoryTree().connect()
    store.fail_next(MetadataUnavailable("planned"))
    with pytest.raises(MetadataUnavailable, match="planned"):
        await store.create("/a")
    assert await store.children("/") == []
    store.fail_next(NoSuchNode("one"), matching=lambda operation, path: (operation, path) == ("get", "/a"))
    await store.create("/a")
    assert await store.children("/a") == []
    with pytest.raises(NoSuchNode, match="one"):
        await store.get("/a")
    assert (await store.get("/a")).data == b""


async def test_operations_are_named_like_the_methods() -> None:
    store = MemoryTree().connect()
    seen: list[tuple[str, str]] = []

    def matching(operation: str, path: str) -> bool:
        seen.append((operation, path))
        return False

    store.fail_next(NoSuchNode("never"), matching=matching)
    await store.create("/a")
    await store.set("/a", b"", version=None)
    await store.get("/a")
    await store.exists("/b")
    await store.children("/a")
    await store.sync("/")
    await store.multi([Check("/a", 1), Create("/c")])
    await store.delete("/a", version=None)
    assert seen == [
        ("create", "/a"), ("set", "/a"), ("get", "/a"), ("exists", "/b"), ("children", "/a"), ("sync", "/"),
        ("multi", "/a"), ("delete", "/a"),
    ]  # fmt: skip


@pytest.mark.parametrize("applied", [True, False])
async def test_the_response_to_the_next_write_is_lost(applied: bool) -> None:
    store = MemoryTree().connect()
    store.lose_next_write(applied=applied)
    assert await store.children("/") == [], "a read is no write"
    with pytest.raises(MetadataOutcomeUnknown) as caught:
        await store.create("/a")
    assert caught.value.facts == {"path": "/a"}
    assert await store.children("/") == (["a"] if applied else [])
    await store.create("/b")


async def test_a_lost_write_can_be_chosen() -> None:
    store = MemoryTree().connect()
    store.lose_next_write(applied=True, matching=lambda operation, path: path == "/b")
    await store.create("/a")
    with pytest.raises(MetadataOutcomeUnknown):
        await store.create("/b")


# --- sessions ---------------------------------------------------------------------------------------------------------


async def test_each_connection_is_a_session_of_its_own() -> None:
    tree = MemoryTree()
    one, two = tree.connect(), tree.connect()
    assert (one.session_id, two.session_id) == (FIRST_SESSION_ID, FIRST_SESSION_ID + 1)
    assert FIRST_SESSION_ID == 0x1000_0000_0000_0001
    assert one.session_state is CONNECTED


def test_a_broken_connection_loses_requests_and_keeps_the_session() -> None:
    async def work() -> None:
        tree = MemoryTree()
        store, other = tree.connect(latency_s=4.0), tree.connect()
        states: list[SessionState] = []
        store.on_session_change(states.append)
        await store.create("/mine", ephemeral=True)
        requests = [asyncio.ensure_future(r) for r in (store.create("/early"), store.get("/mine"))]
        await asyncio.sleep(3.0)
        requests.append(asyncio.ensure_future(store.create("/late")))
        await asyncio.sleep(0.5)
        tree.suspend(store)
        tree.suspend(store)
        outcomes = await asyncio.gather(*requests, return_exceptions=True)
        assert [type(o) for o in outcomes] == [MetadataOutcomeUnknown, MetadataUnavailable, MetadataOutcomeUnknown]
        assert [o.facts["path"] for o in outcomes if isinstance(o, BinderyError)] == ["/early", "/mine", "/late"]
        await asyncio.sleep(10)
        assert await other.children("/") == ["early", "mine"]
        assert store.session_state is SUSPENDED
        tree.resume(store)
        tree.resume(store)
        assert (store.session_state, store.session_id) == (CONNECTED, FIRST_SESSION_ID)
        assert states == [SUSPENDED, CONNECTED]
        assert await store.children("/") == ["early", "mine"]

    simulated(work)


def test_requests_wait_for_a_connection_for_a_limited_time() -> None:
    async def work() -> None:
        tree = MemoryTree()
        store = tree.connect(operation_timeout_s=3.0)
        tree.suspend(store)
        began = now()
        with pytest.raises(MetadataUnavailable, match="no connection"):
            await store.create("/a")
        assert now() - began == 3.0
        waiting = asyncio.ensure_future(store.create("/b"))
        await asyncio.sleep(2.9)
        tree.resume(store)
        assert await waiting == "/b"

    simulated(work)


@pytest.mark.parametrize("suspended", [False, True])
async def test_an_expired_session_loses_its_nodes_and_gets_a_new_id(suspended: bool) -> None:
    tree = MemoryTree()
    store, other, watches = tree.connect(), tree.connect(), Watches()
    states: list[tuple[SessionState, int]] = []
    store.on_session_change(lambda state: states.append((state, store.session_id)))
    await store.create("/a")
    await store.create("/a/mine", ephemeral=True)
    await other.exists("/a/mine", watch=watches("gone"))
    if suspended:
        tree.suspend(store)
    tree.expire(store)
    assert await other.children("/a") == []
    assert watches.fired == ["gone"]
    if suspended:
        assert store.session_state is SUSPENDED
        assert store.session_id == FIRST_SESSION_ID
        tree.resume(store)
    new = FIRST_SESSION_ID + 2
    assert states == [(SUSPENDED, FIRST_SESSION_ID), (LOST, 0), (CONNECTED, new)]
    await store.create("/a/mine", ephemeral=True)
    assert (await other.get("/a/mine")).stat.ephemeral_owner == new


async def test_watches_of_a_broken_connection_fire_when_it_is_back() -> None:
    tree = MemoryTree()
    store, other, watches = tree.connect(), tree.connect(), Watches()
    await store.exists("/a", watch=watches("a"))
    await store.children("/", watch=watches("root"))
    tree.suspend(store)
    await other.sync("/")
    assert watches.fired == []
    tree.resume(store)
    await store.sync("/")
    assert sorted(watches.fired) == ["a", "root"]
    tree.suspend(store)
    tree.resume(store)
    await store.sync("/")
    assert len(watches.fired) == 2


def test_an_event_that_was_in_transit_fires_when_the_connection_is_back() -> None:
    async def work() -> None:
        tree = MemoryTree()
        store, other, watches = tree.connect(latency_s=4.0), tree.connect(), Watches()
        await store.exists("/a", watch=watches("a"))
        await other.create("/a")
        await asyncio.sleep(1)
        tree.suspend(store)
        await asyncio.sleep(10)
        assert watches.fired == []
        tree.resume(store)
        await store.sync("/")
        assert watches.fired == ["a"]

    simulated(work)


async def test_a_listener_can_be_removed_once_or_twice() -> None:
    tree = MemoryTree()
    store = tree.connect()
    states: list[SessionState] = []
    remove = store.on_session_change(states.append)
    remove()
    remove()
    tree.suspend(store)
    assert states == []


# --- close ------------------------------------------------------------------------------------------------------------


async def test_a_closed_store_has_no_session_and_no_nodes() -> None:
    tree = MemoryTree()
    store, other, watches = tree.connect(), tree.connect(), Watches()
    states: list[SessionState] = []
    store.on_session_change(states.append)
    await store.create("/mine", ephemeral=True)
    await store.exists("/x", watch=watches("x"))
    await store.close()
    await store.close()
    assert (store.session_state, store.session_id) == (LOST, 0)
    assert states == []
    assert await other.children("/") == []
    with pytest.raises(MetadataUnavailable, match="was closed"):
        await store.get("/")
    await other.create("/x")
    tree.resume(store)
    await other.sync("/")
    assert watches.fired == []
    assert store.session_state is LOST


def test_requests_that_wait_when_the_store_is_closed_fail() -> None:
    async def work() -> None:
        tree = MemoryTree()
        store = tree.connect(latency_s=4.0)
        sent = asyncio.ensure_future(store.create("/a"))
        await asyncio.sleep(1)
        tree.suspend(store)
        waiting = asyncio.ensure_future(store.create("/b"))
        await asyncio.sleep(1)
        began = now()
        await store.close()
        outcomes = await asyncio.gather(sent, waiting, return_exceptions=True)
        assert [type(o) for o in outcomes] == [MetadataOutcomeUnknown, MetadataUnavailable]
        assert now() == began

    simulated(work)
