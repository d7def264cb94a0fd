"""Every clause of `bindery_metadata.stores.store`'s contract, on both implementations."""

import asyncio
import contextlib

import pytest
from bindery_core.errors import (
    AlreadyExists,
    BadRequest,
    MetadataOutcomeUnknown,
    MetadataUnavailable,
    NoSuchNode,
    NotEmpty,
    TooLarge,
    VersionConflict,
)
from bindery_metadata.layout.znode_path import DATA_SIZE_MAX
from bindery_metadata.stores.store import Check, Create, Delete, MetadataStore, SessionState, Set
from worlds import World, until

# --- nodes and versions -----------------------------------------------------------------------------------------------


async def test_what_was_created_is_read_back_at_version_0(store: MetadataStore) -> None:
    assert await store.create("/a", b"one") == "/a"
    node = await store.get("/a")
    assert node.data == b"one"
    assert (node.stat.version, node.stat.ephemeral_owner, node.stat.children_count) == (0, 0, 0)
    assert node.stat.ctime_ms == node.stat.mtime_ms
    assert await store.exists("/a") == node.stat


async def test_data_is_never_none(store: MetadataStore) -> None:
    await store.create("/a")
    assert (await store.get("/a")).data == b""
    assert (await store.get("/")).data == b""


async def test_each_set_adds_one_to_the_version(store: MetadataStore) -> None:
    await store.create("/a", b"one")
    assert (await store.set("/a", b"two", version=0)).version == 1
    assert (await store.set("/a", b"three", version=None)).version == 2
    assert (await store.get("/a")).data == b"three"


async def test_a_set_under_another_version_changes_nothing(store: MetadataStore) -> None:
    await store.create("/a", b"one")
    with pytest.raises(VersionConflict):
        await store.set("/a", b"two", version=1)
    node = await store.get("/a")
    assert (node.data, node.stat.version) == (b"one", 0)


async def test_a_delete_obeys_the_version(store: MetadataStore) -> None:
    await store.create("/a")
    with pytest.raises(VersionConflict):
        await store.delete("/a", version=3)
    await store.delete("/a", version=0)
    assert await store.exists("/a") is None


async def test_what_is_not_there_is_no_such_node(store: MetadataStore) -> None:
    for attempt in (
        store.get("/a"),
        store.children("/a"),
        store.set("/a", b"", version=None),
        store.delete("/a", version=None),
        store.create("/a/b"),
    ):
        with pytest.raises(NoSuchNode) as raised:
            await attempt
        assert raised.value.facts["path"].startswith("/a")
    assert await store.exists("/a") is None


async def test_creating_twice_is_already_exists_and_keeps_the_first(store: MetadataStore) -> None:
    await store.create("/a", b"first")
    with pytest.raises(AlreadyExists):
        await store.create("/a", b"second")
    assert (await store.get("/a")).data == b"first"


async def test_children_are_names_in_order(store: MetadataStore) -> None:
    await store.create("/a")
    for name in ("c", "a", "b"):
        await store.create(f"/a/{name}")
    assert await store.children("/a") == ["a", "b", "c"]
    stat = (await store.get("/a")).stat
    assert (stat.children_count, stat.children_version) == (3, 3)
    await store.delete("/a/b", version=None)
    stat = (await store.get("/a")).stat
    assert (stat.children_count, stat.children_version, stat.version) == (2, 4, 0)


async def test_a_node_with_children_is_not_deleted(store: MetadataStore) -> None:
    await store.create("/a/b", make_parents=True)
    with pytest.raises(NotEmpty):
        await store.delete("/a", version=None)


async def test_missing_parents_are_made_on_request(store: MetadataStore) -> None:
    assert await store.create("/a/b/c/d", b"leaf", make_parents=True) == "/a/b/c/d"
    assert (await store.get("/a/b/c")).data == b""
    with pytest.raises(AlreadyExists):
        await store.create("/a/b/c/d", make_parents=True)


async def test_parents_that_vanish_meanwhile_are_made_again(store: MetadataStore, other: MetadataStore) -> None:
    """One makes leaves, the other prunes the parents as soon as they are empty."""

    async def prune() -> None:
        while True:
            for path in ("/a/b", "/a"):
                with contextlib.suppress(NoSuchNode, NotEmpty):
                    await other.delete(path, version=None)

    pruning = asyncio.create_task(prune())
    try:
        for _ in range(30):
            await store.create("/a/b/c", make_parents=True)
            await store.delete("/a/b/c", version=0)
    finally:
        pruning.cancel()
        await asyncio.gather(pruning, return_exceptions=True)


@pytest.mark.parametrize("path", ["", "a", "/a/", "//a", "/a//b", "/a/./b", "/a/../b", "/a\x00", "/\ud800"])
async def test_impossible_paths_are_refused_before_they_are_sent(store: MetadataStore, path: str) -> None:
    for attempt in (
        store.get(path),
        store.exists(path),
        store.children(path),
        store.create(path),
        store.set(path, b"", version=None),
        store.delete(path, version=None),
        store.multi([Check(path, 0)]),
        store.sync(path),
    ):
        with pytest.raises(BadRequest):
            await attempt
    assert store.session_state is SessionState.CONNECTED


async def test_the_root_is_not_deleted(store: MetadataStore) -> None:
    with pytest.raises(BadRequest):
        await store.delete("/", version=None)


async def test_the_largest_data_fits_and_one_byte_more_is_too_large(store: MetadataStore) -> None:
    await store.create("/a", b"x" * DATA_SIZE_MAX)
    assert len((await store.get("/a")).data) == DATA_SIZE_MAX
    for attempt in (
        store.create("/b", b"x" * (DATA_SIZE_MAX + 1)),
        store.set("/a", b"x" * (DATA_SIZE_MAX + 1), version=None),
        store.multi([Create("/b", b"x" * DATA_SIZE_MAX), Set("/a", b"x", None)]),
    ):
        with pytest.raises(TooLarge):
            await attempt
    assert store.session_state is SessionState.CONNECTED


# --- sequential and ephemeral nodes -----------------------------------------------------------------------------------


async def test_sequential_names_have_ten_digits_and_count_every_child_ever_made(store: MetadataStore) -> None:
    await store.create("/a")
    assert await store.create("/a/n-", sequential=True) == "/a/n-0000000000"
    await store.create("/a/other")
    assert await store.create("/a/n-", sequential=True) == "/a/n-0000000002"
    await store.delete("/a/n-0000000002", version=None)
    assert await store.create("/a/m-", sequential=True) == "/a/m-0000000003"


async def test_each_parent_counts_for_itself(store: MetadataStore) -> None:
    for parent in ("/a", "/b"):
        created = await store.create(f"{parent}/n-", sequential=True, make_parents=True)
        assert created == f"{parent}/n-0000000000"


async def test_sequential_names_of_two_sessions_never_meet(store: MetadataStore, other: MetadataStore) -> None:
    await store.create("/a")
    created = await asyncio.gather(
        *(session.create("/a/n-", sequential=True) for _ in range(40) for session in (store, other))
    )
    assert sorted(created) == [f"/a/n-{number:010d}" for number in range(80)]


async def test_an_ephemeral_node_names_its_session_and_goes_with_it(store: MetadataStore, other: MetadataStore) -> None:
    await store.create("/a", ephemeral=True)
    stat = await other.exists("/a")
    assert stat is not None
    assert stat.ephemeral_owner == store.session_id != 0
    await store.close()
    assert await other.exists("/a") is None


async def test_an_ephemeral_node_has_no_children(store: MetadataStore) -> None:
    await store.create("/a", ephemeral=True)
    with pytest.raises(BadRequest):
        await store.create("/a/b")


# --- multi ------------------------------------------------------------------------------------------------------------


async def test_multi_does_all_and_answers_per_operation(store: MetadataStore) -> None:
    await store.create("/a", b"old")
    await store.create("/gone")
    created, stat, deleted, checked, numbered = await store.multi(
        [
            Create("/a/b", b"new"),
            Set("/a", b"changed", 0),
            Delete("/gone", 0),
            Check("/a", 1),
            Create("/a/n-", sequential=True, ephemeral=True),
        ]
    )
    assert created == "/a/b"
    assert stat is not None
    assert not isinstance(stat, str)
    assert stat.version == 1
    assert deleted is checked is None
    assert numbered == "/a/n-0000000001"
    assert await store.exists("/gone") is None
    assert (await store.get("/a")).data == b"changed"
    owner = await store.exists("/a/n-0000000001")
    assert owner is not None
    assert owner.ephemeral_owner == store.session_id


@pytest.mark.parametrize(
    ("failing", "error"),
    [
        (Create("/a"), AlreadyExists),
        (Create("/none/b"), NoSuchNode),
        (Set("/a", b"", 7), VersionConflict),
        (Set("/none", b"", None), NoSuchNode),
        (Delete("/a", 7), VersionConflict),
        (Delete("/full", None), NotEmpty),
        (Check("/a", 7), VersionConflict),
        (Check("/none", 0), NoSuchNode),
    ],
    ids=lambda value: repr(value) if isinstance(value, Create | Set | Delete | Check) else value.__name__,
)
async def test_multi_does_nothing_when_one_operation_fails(store: MetadataStore, failing, error) -> None:
    await store.create("/a", b"old")
    await store.create("/gone")
    await store.create("/full/child", make_parents=True)
    with pytest.raises(error) as raised:
        await store.multi([Create("/b"), Set("/a", b"new", 0), Delete("/gone", None), failing, Check("/none", 9)])
    assert raised.value.facts["path"] == failing.path
    assert await store.exists("/b") is None
    assert await store.exists("/gone") is not None
    node = await store.get("/a")
    # A failing version check met the Set before it in the same transaction, which was undone with it.
    assert (node.data, node.stat.version) == (b"old", 0)


async def test_multi_of_nothing_is_nothing(store: MetadataStore) -> None:
    assert await store.multi([]) == []


async def test_a_failed_multi_wakes_no_watch(store: MetadataStore) -> None:
    await store.create("/a")
    fired: list[str] = []
    await store.get("/a", watch=lambda: fired.append("data"))
    with pytest.raises(VersionConflict):
        await store.multi([Set("/a", b"new", 0), Check("/a", 7)])
    await store.sync("/a")
    assert fired == []


async def test_one_version_admits_one_of_many_writers(store: MetadataStore, other: MetadataStore) -> None:
    """Compare-and-set as everybody here uses it: no increment is lost."""
    await store.create("/n", b"0")

    async def add(session: MetadataStore) -> None:
        while True:
            node = await session.get("/n")
            try:
                await session.set("/n", b"%d" % (int(node.data) + 1), version=node.stat.version)
                return
            except VersionConflict:
                continue

    await asyncio.gather(*(add(session) for _ in range(10) for session in (store, other)))
    node = await store.get("/n")
    assert (node.data, node.stat.version) == (b"20", 20)


# --- order ------------------------------------------------------------------------------------------------------------


async def test_requests_are_carried_out_in_the_order_they_were_made(store: MetadataStore) -> None:
    await store.create("/a", b"")
    writes = [asyncio.create_task(store.set("/a", b"%d" % number, version=number)) for number in range(50)]
    read = asyncio.create_task(store.get("/a"))
    assert [stat.version for stat in await asyncio.gather(*writes)] == list(range(1, 51))
    assert (await read).data == b"49"


async def test_sync_shows_what_others_were_told_was_written(store: MetadataStore, other: MetadataStore) -> None:
    await store.create("/a", b"one")
    await other.set("/a", b"two", version=0)
    await store.sync("/a")
    assert (await store.get("/a")).data == b"two"


# --- watches ----------------------------------------------------------------------------------------------------------


async def test_a_data_watch_fires_once_at_the_first_change(store: MetadataStore, other: MetadataStore) -> None:
    await store.create("/a")
    fired: list[str] = []
    await store.get("/a", watch=lambda: fired.append("changed"))
    await other.set("/a", b"1", version=None)
    await other.set("/a", b"2", version=None)
    await store.sync("/a")
    assert fired == ["changed"]


async def test_a_data_watch_fires_at_deletion(store: MetadataStore, other: MetadataStore) -> None:
    await store.create("/a")
    fired: list[str] = []
    await store.exists("/a", watch=lambda: fired.append("exists"))
    await store.get("/a", watch=lambda: fired.append("get"))
    await other.delete("/a", version=None)
    await store.sync("/")
    assert sorted(fired) == ["exists", "get"]


async def test_a_watch_on_a_missing_node_waits_for_its_creation(store: MetadataStore, other: MetadataStore) -> None:
    fired: list[str] = []
    assert await store.exists("/a", watch=lambda: fired.append("created")) is None
    await other.create("/b")
    await store.sync("/")
    assert fired == []
    await other.create("/a")
    await store.sync("/")
    assert fired == ["created"]


async def test_a_children_watch_sees_names_come_and_go_but_no_data(store: MetadataStore, other: MetadataStore) -> None:
    await store.create("/a/b", make_parents=True)
    fired: list[str] = []
    await store.children("/a", watch=lambda: fired.append("come"))
    await other.set("/a", b"data", version=None)
    await other.set("/a/b", b"data", version=None)
    await other.create("/a/b/deeper")
    await store.sync("/")
    assert fired == []
    await other.create("/a/c")
    await store.sync("/")
    assert fired == ["come"]
    await store.children("/a", watch=lambda: fired.append("go"))
    await other.delete("/a/c", version=None)
    await store.sync("/")
    assert fired == ["come", "go"]


async def test_a_children_watch_fires_when_the_node_itself_goes(store: MetadataStore, other: MetadataStore) -> None:
    await store.create("/a")
    fired: list[str] = []
    await store.children("/a", watch=lambda: fired.append("gone"))
    await other.delete("/a", version=None)
    await store.sync("/")
    assert fired == ["gone"]


async def test_a_data_watch_does_not_see_children(store: MetadataStore, other: MetadataStore) -> None:
    await store.create("/a")
    fired: list[str] = []
    await store.get("/a", watch=lambda: fired.append("data"))
    await other.create("/a/b")
    await store.sync("/")
    assert fired == []


async def test_a_watch_set_twice_counts_once(store: MetadataStore, other: MetadataStore) -> None:
    await store.create("/a")
    fired: list[str] = []

    def watch() -> None:
        fired.append("changed")

    await store.get("/a", watch=watch)
    await store.get("/a", watch=watch)
    await other.set("/a", b"1", version=None)
    await store.sync("/a")
    assert fired == ["changed"]


async def test_a_read_that_raises_sets_no_watch(store: MetadataStore, other: MetadataStore) -> None:
    fired: list[str] = []
    with pytest.raises(NoSuchNode):
        await store.get("/a", watch=lambda: fired.append("get"))
    with pytest.raises(NoSuchNode):
        await store.children("/a", watch=lambda: fired.append("children"))
    await other.create("/a")
    await other.create("/a/b")
    await store.sync("/a")
    assert fired == []


async def test_watches_fire_in_the_order_of_the_changes(store: MetadataStore, other: MetadataStore) -> None:
    names = [f"/n{number}" for number in (3, 1, 4, 5, 9, 2, 6)]
    fired: list[str] = []
    for name in sorted(names):
        await store.exists(name, watch=lambda name=name: fired.append(name))
    for name in names:
        await other.create(name)
    await store.sync("/")
    assert fired == names


async def test_a_watch_fires_before_an_answer_that_shows_the_change(store: MetadataStore, other: MetadataStore) -> None:
    """So a cache that drops its entry in the watch never hands out the old value after the new one was seen."""
    await store.create("/a", b"0")
    for number in range(1, 20):
        fired: list[int] = []
        await store.get("/a", watch=lambda fired=fired, number=number: fired.append(number))
        writing = asyncio.create_task(other.set("/a", b"%d" % number, version=None))
        while (await store.get("/a")).data != b"%d" % number:
            assert not writing.done() or writing.exception() is None
        assert fired == [number]
        await writing


async def test_a_watch_sees_changes_of_its_own_session_too(store: MetadataStore) -> None:
    await store.create("/a")
    fired: list[str] = []
    await store.get("/a", watch=lambda: fired.append("changed"))
    await store.set("/a", b"1", version=None)
    assert fired == ["changed"]


async def test_a_failing_watch_harms_nobody_else(store: MetadataStore, other: MetadataStore) -> None:
    await store.create("/a")
    fired: list[str] = []

    def fail() -> None:
        raise RuntimeError("a bug in a watch")

    await store.get("/a", watch=fail)
    await store.exists("/a", watch=lambda: fired.append("changed"))
    await other.set("/a", b"1", version=None)
    await store.sync("/a")
    assert fired == ["changed"]
    assert (await store.get("/a")).data == b"1"


# --- sessions ---------------------------------------------------------------------------------------------------------


def record_states(store: MetadataStore) -> list[SessionState]:
    states: list[SessionState] = []
    store.on_session_change(states.append)
    return states


async def test_a_connected_store_has_a_session_id(store: MetadataStore, other: MetadataStore) -> None:
    assert store.session_state is SessionState.CONNECTED
    assert 0 not in (store.session_id, other.session_id)
    assert store.session_id != other.session_id


async def test_a_broken_connection_keeps_session_and_ephemerals(
    world: World, store: MetadataStore, other: MetadataStore
) -> None:
    await store.create("/a", ephemeral=True)
    states, session_id = record_states(store), store.session_id
    await world.suspend(store)
    assert store.session_id == session_id
    assert await other.exists("/a") is not None
    await world.resume(store)
    assert store.session_id == session_id
    assert states == [SessionState.SUSPENDED, SessionState.CONNECTED]
    assert await store.exists("/a") is not None


async def test_an_expired_session_loses_its_ephemerals_and_goes_on_as_a_new_one(
    world: World, store: MetadataStore, other: MetadataStore
) -> None:
    await store.create("/a", ephemeral=True)
    await store.create("/b")
    states, session_id = record_states(store), store.session_id
    await world.expire(store)
    assert states == [SessionState.SUSPENDED, SessionState.LOST, SessionState.CONNECTED]
    assert store.session_id not in (0, session_id)
    assert await other.exists("/a") is None
    assert await store.exists("/b") is not None
    await store.create("/a", ephemeral=True)


async def test_a_session_that_expires_while_cut_off_learns_it_on_its_return(
    world: World, store: MetadataStore, other: MetadataStore
) -> None:
    await store.create("/a", ephemeral=True)
    states, session_id = record_states(store), store.session_id
    await world.suspend(store)
    await world.end_session(store)
    assert await other.exists("/a") is None
    assert (store.session_state, store.session_id) == (SessionState.SUSPENDED, session_id)
    await world.resume(store)
    assert states == [SessionState.SUSPENDED, SessionState.LOST, SessionState.CONNECTED]
    assert store.session_id != session_id


async def test_a_removed_listener_hears_nothing(world: World, store: MetadataStore) -> None:
    heard: list[SessionState] = []
    remove = store.on_session_change(heard.append)
    remove()
    remove()
    await world.suspend(store)
    assert heard == []


@pytest.mark.parametrize("accident", ["suspend", "expire"])
async def test_every_watch_fires_once_connected_again(
    world: World, store: MetadataStore, other: MetadataStore, accident: str
) -> None:
    await store.create("/a")
    fired: list[tuple[str, SessionState]] = []

    def watch(name: str):
        return lambda: fired.append((name, store.session_state))

    await store.get("/a", watch=watch("get"))
    await store.exists("/missing", watch=watch("exists"))
    await store.children("/a", watch=watch("children"))
    if accident == "suspend":
        await world.suspend(store)
        await other.create("/a/b")
        await other.set("/a", b"1", version=0)
        assert fired == []
        await world.resume(store)
    else:
        await world.expire(store)
    await store.sync("/")
    assert sorted(fired) == [(name, SessionState.CONNECTED) for name in ("children", "exists", "get")]


async def test_a_request_without_a_connection_waits_for_one(world: World, store: MetadataStore) -> None:
    await world.suspend(store)
    creating = asyncio.create_task(store.create("/a"))
    reading = asyncio.create_task(store.children("/"))
    await asyncio.sleep(0.01)
    assert not creating.done()
    await world.resume(store)
    assert await creating == "/a"
    assert "a" in await reading


async def test_a_request_without_a_connection_gives_up_in_time_and_is_not_carried_out(world: World) -> None:
    store = await world.connect(operation_timeout_s=0.05)
    await world.suspend(store)
    with pytest.raises(MetadataUnavailable):
        await store.create("/a")
    with pytest.raises(MetadataUnavailable):
        await store.get("/")
    await world.resume(store)
    await store.sync("/")
    assert await store.exists("/a") is None


# --- lost answers -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("applied", [True, False], ids=["done", "not done"])
async def test_a_write_whose_answer_is_lost_has_an_unknown_outcome(
    world: World, store: MetadataStore, applied: bool
) -> None:
    """The same error whether it was done or not: only reading again tells."""
    await store.create("/set", b"old")
    await store.create("/deleted")
    attempts = {
        "create": lambda: store.create("/created"),
        "set": lambda: store.set("/set", b"new", version=0),
        "delete": lambda: store.delete("/deleted", version=0),
        "multi": lambda: store.multi([Create("/in-multi")]),
    }
    for attempt in attempts.values():
        world.lose_next_write(store, applied=applied)
        with pytest.raises(MetadataOutcomeUnknown):
            await attempt()
        await store.sync("/")
    assert (await store.exists("/created") is not None) is applied
    assert ((await store.get("/set")).data == b"new") is applied
    assert (await store.exists("/deleted") is None) is applied
    assert (await store.exists("/in-multi") is not None) is applied


async def test_a_read_whose_answer_is_lost_is_unavailable(world: World, store: MetadataStore) -> None:
    await store.create("/a")
    for attempt in (lambda: store.get("/a"), lambda: store.exists("/a"), lambda: store.children("/a")):
        world.lose_next_read(store)
        with pytest.raises(MetadataUnavailable):
            await attempt()
    assert (await store.get("/a")).data == b""


async def test_an_unsettled_ephemeral_belongs_to_the_session_that_asked(world: World, store: MetadataStore) -> None:
    world.lose_next_write(store, applied=True)
    with pytest.raises(MetadataOutcomeUnknown):
        await store.create("/a", ephemeral=True)
    stat = await store.exists("/a")
    assert stat is not None
    assert stat.ephemeral_owner == store.session_id


async def test_a_cancelled_caller_leaves_the_store_usable(store: MetadataStore) -> None:
    await store.create("/a", b"one")
    task = asyncio.create_task(store.set("/a", b"two", version=0))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    await store.sync("/a")
    assert (await store.get("/a")).data in (b"one", b"two")


# --- close ------------------------------------------------------------------------------------------------------------


async def test_closing_twice_is_closing_once(store: MetadataStore) -> None:
    await store.close()
    await store.close()
    assert (store.session_state, store.session_id) == (SessionState.LOST, 0)


async def test_a_closed_store_refuses(store: MetadataStore) -> None:
    await store.close()
    for attempt in (store.get("/"), store.create("/a"), store.multi([Create("/a")]), store.sync("/")):
        with pytest.raises(MetadataUnavailable):
            await attempt


async def test_closing_calls_neither_watches_nor_listeners(store: MetadataStore, other: MetadataStore) -> None:
    await store.create("/a")
    heard: list[object] = []
    await store.get("/a", watch=lambda: heard.append("watch"))
    store.on_session_change(heard.append)
    await store.close()
    await other.set("/a", b"1", version=None)
    await other.sync("/a")
    assert heard == []


async def test_closing_without_a_connection_ends(world: World, store: MetadataStore) -> None:
    await world.suspend(store)
    waiting = asyncio.create_task(store.get("/"))
    await asyncio.sleep(0)
    async with asyncio.timeout(30):
        await store.close()
    with pytest.raises(MetadataUnavailable):
        await waiting


async def test_closing_wakes_others_watches_on_its_ephemerals(store: MetadataStore, other: MetadataStore) -> None:
    await store.create("/a", ephemeral=True)
    fired: list[str] = []
    await other.exists("/a", watch=lambda: fired.append("gone"))
    await store.close()
    await until(lambda: fired == ["gone"])
