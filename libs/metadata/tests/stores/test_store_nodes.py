"""The contract of `bindery_metadata.stores.store` on both implementations: nodes, versions, kinds of nodes."""

import asyncio
import contextlib

import pytest
from bindery_core.errors import (
    AlreadyExists,
    BadRequest,
    NoSuchNode,
    NotEmpty,
    TooLarge,
    VersionConflict,
)
from bindery_metadata.layout.znode_path import DATA_SIZE_MAX
from bindery_metadata.stores.parents import ATTEMPTS_MAX
from bindery_metadata.stores.store import Check, Create, MetadataStore, SessionState, Set

# --- nodes and versions -----------------------------------------------------------------------------------------------


async def test_a_created_node_is_read_back_at_version_0(store: MetadataStore) -> None:
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


async def test_a_delete_requires_the_current_version(store: MetadataStore) -> None:
    await store.create("/a")
    with pytest.raises(VersionConflict):
        await store.delete("/a", version=3)
    await store.delete("/a", version=0)
    assert await store.exists("/a") is None


async def test_a_missing_node_raises_no_such_node(store: MetadataStore) -> None:
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


async def test_creating_twice_raises_already_exists_and_keeps_the_first(store: MetadataStore) -> None:
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


async def test_missing_parents_are_created_on_request(store: MetadataStore) -> None:
    assert await store.create("/a/b/c/d", b"leaf", make_parents=True) == "/a/b/c/d"
    assert (await store.get("/a/b/c")).data == b""
    with pytest.raises(AlreadyExists):
        await store.create("/a/b/c/d", make_parents=True)


async def test_parents_that_are_deleted_meanwhile_are_created_again(store: MetadataStore, other: MetadataStore) -> None:
    """One store creates leaves; the other deletes the parents as soon as they are empty, but for each leaf fewer times
    than the first store repeats its attempt."""
    deletions = 0
    deletions_max = 0

    async def prune() -> None:
        nonlocal deletions
        while True:
            for path in ("/a/b", "/a"):
                while deletions >= deletions_max:
                    await asyncio.sleep(0)
                with contextlib.suppress(NoSuchNode, NotEmpty):
                    await other.delete(path, version=None)
                    deletions += 1

    pruning = asyncio.create_task(prune())
    try:
        for _ in range(30):
            deletions_max = deletions + ATTEMPTS_MAX // 2
            await store.create("/a/b/c", make_parents=True)
            await store.delete("/a/b/c", version=0)
        assert deletions >= 1
    finally:
        pruning.cancel()
        await asyncio.gather(pruning, return_exceptions=True)


@pytest.mark.parametrize("path", ["", "a", "/a/", "//a", "/a//b", "/a/./b", "/a/../b", "/a\x00", "/\ud800"])
async def test_invalid_paths_are_refused_before_they_are_sent(store: MetadataStore, path: str) -> None:
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


async def test_data_of_the_maximum_size_fits_and_one_byte_more_is_refused(store: MetadataStore) -> None:
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


async def test_sequential_names_have_ten_digits_and_count_every_child_ever_created(store: MetadataStore) -> None:
    await store.create("/a")
    assert await store.create("/a/n-", sequential=True) == "/a/n-0000000000"
    await store.create("/a/other")
    assert await store.create("/a/n-", sequential=True) == "/a/n-0000000002"
    await store.delete("/a/n-0000000002", version=None)
    assert await store.create("/a/m-", sequential=True) == "/a/m-0000000003"


async def test_each_parent_has_its_own_count(store: MetadataStore) -> None:
    for parent in ("/a", "/b"):
        created = await store.create(f"{parent}/n-", sequential=True, make_parents=True)
        assert created == f"{parent}/n-0000000000"


async def test_sequential_names_of_two_sessions_never_collide(store: MetadataStore, other: MetadataStore) -> None:
    await store.create("/a")
    created = await asyncio.gather(
        *(session.create("/a/n-", sequential=True) for _ in range(40) for session in (store, other))
    )
    assert sorted(created) == [f"/a/n-{number:010d}" for number in range(80)]


async def test_an_ephemeral_node_names_its_session_and_is_deleted_with_it(
    store: MetadataStore, other: MetadataStore
) -> None:
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
