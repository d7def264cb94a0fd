"""CachedChildren on both stores: lists from memory are those of the store, within bounds."""

import asyncio

import pytest
from bindery_core.errors import MetadataUnavailable, NoSuchNode
from bindery_metadata.stores.cached_children import CachedChildren
from bindery_metadata.stores.memory import MemoryTree
from bindery_metadata.stores.store import MetadataStore


async def test_a_list_is_read_once_and_again_after_a_change(store: MetadataStore, other: MetadataStore) -> None:
    cache = CachedChildren(store)
    await store.create("/a/b", make_parents=True)
    assert await cache.children("/a") == ("b",)
    assert await cache.children("/a") == ("b",)
    assert (cache.reads, cache.watches, len(cache)) == (1, 1, 1)
    await other.create("/a/c")
    await cache.catch_up("/")
    assert await cache.children("/a") == ("b", "c")
    assert (cache.reads, cache.watches) == (2, 1)


async def test_after_catching_up_each_change_of_another_client_is_seen(
    store: MetadataStore, other: MetadataStore
) -> None:
    cache = CachedChildren(store)
    await other.create("/a")
    for number in range(30):
        await cache.children("/a")
        if number % 3 == 2:
            await other.delete(f"/a/{number - 1}", version=None)
        else:
            await other.create(f"/a/{number}")
        await cache.catch_up("/")
        assert list(await cache.children("/a")) == await other.children("/a")


async def test_a_missing_node_is_not_kept(store: MetadataStore, other: MetadataStore) -> None:
    cache = CachedChildren(store)
    for _ in range(2):
        with pytest.raises(NoSuchNode):
            await cache.children("/a")
    assert (cache.watches, len(cache)) == (0, 0)
    await other.create("/a/b", make_parents=True)
    await cache.catch_up("/")
    assert await cache.children("/a") == ("b",)


async def test_a_deleted_node_makes_room(store: MetadataStore, other: MetadataStore) -> None:
    cache = CachedChildren(store, lists_max=1)
    await other.create("/a")
    await other.create("/b")
    assert await cache.children("/a") == ()
    assert await cache.children("/b") == ()
    assert (len(cache), cache.watches) == (1, 1)
    await other.delete("/a", version=None)
    await cache.catch_up("/")
    with pytest.raises(NoSuchNode):
        await cache.children("/a")
    await cache.children("/b")
    reads = cache.reads
    await cache.children("/b")
    assert (cache.reads, len(cache), cache.watches) == (reads, 1, 1)


async def test_lists_beyond_the_bounds_are_read_each_time() -> None:
    store = MemoryTree().connect()
    cache = CachedChildren(store, lists_max=3, names_max=5)
    for parent in "abcde":
        for child in "123":
            await store.create(f"/{parent}/{child}", make_parents=True)
    for _ in range(3):
        for parent in "abcde":
            assert await cache.children(f"/{parent}") == ("1", "2", "3")
    assert (len(cache), cache.watches) == (1, 3)
    for parent in "abcde":
        await store.delete(f"/{parent}/3", version=None)
        assert await cache.children(f"/{parent}") == ("1", "2")
    assert cache.watches <= 3
    assert len(cache) == 2


async def test_nothing_is_answered_from_memory_without_a_connection() -> None:
    tree = MemoryTree()
    store, other = tree.connect(operation_timeout_s=0.05), tree.connect()
    cache = CachedChildren(store)
    await other.create("/a/b", make_parents=True)
    await cache.children("/a")
    tree.suspend(store)
    await other.create("/a/c")
    with pytest.raises(MetadataUnavailable):
        await cache.children("/a")
    tree.resume(store)
    await cache.catch_up("/")
    assert await cache.children("/a") == ("b", "c")
    assert await cache.children("/a") == ("b", "c")
    assert cache.watches == 1


async def test_a_list_that_changes_while_it_is_read_is_not_kept() -> None:
    tree = MemoryTree()
    store, other = tree.connect(latency_s=0.02), tree.connect()
    cache = CachedChildren(store)
    await other.create("/a")
    first = asyncio.create_task(cache.children("/a"))
    second = asyncio.create_task(cache.children("/a"))
    await asyncio.sleep(0.015)  # the list is on its way back
    await other.create("/a/b")
    assert await first == await second == ()
    await cache.catch_up("/")
    assert await cache.children("/a") == ("b",)


async def test_a_cancelled_caller_leaves_a_watch_that_is_counted() -> None:
    tree = MemoryTree()
    store = tree.connect(latency_s=0.02)
    cache = CachedChildren(store)
    await store.create("/a")
    caller = asyncio.create_task(cache.children("/a"))
    await asyncio.sleep(0)
    caller.cancel()
    with pytest.raises(asyncio.CancelledError):
        await caller
    assert await cache.children("/a") == ()
    assert (cache.reads, cache.watches) == (1, 1)
