"""The contract of `bindery_metadata.stores.store` on both implementations: watches."""

import asyncio

import pytest
from bindery_core.errors import (
    NoSuchNode,
)
from bindery_metadata.stores.store import MetadataStore

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


async def test_a_children_watch_fires_for_names_but_not_for_data(store: MetadataStore, other: MetadataStore) -> None:
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


async def test_a_children_watch_fires_when_the_node_itself_is_deleted(
    store: MetadataStore, other: MetadataStore
) -> None:
    await store.create("/a")
    fired: list[str] = []
    await store.children("/a", watch=lambda: fired.append("gone"))
    await other.delete("/a", version=None)
    await store.sync("/")
    assert fired == ["gone"]


async def test_a_data_watch_does_not_fire_for_children(store: MetadataStore, other: MetadataStore) -> None:
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
    """A cache that deletes its item in the watch therefore never returns the old value after the new one."""
    await store.create("/a", b"0")
    for number in range(1, 20):
        fired: list[int] = []
        await store.get("/a", watch=lambda fired=fired, number=number: fired.append(number))
        writing = asyncio.create_task(other.set("/a", b"%d" % number, version=None))
        while (await store.get("/a")).data != b"%d" % number:
            assert not writing.done() or writing.exception() is None
        assert fired == [number]
        await writing


async def test_a_watch_fires_for_changes_of_its_own_session_too(store: MetadataStore) -> None:
    await store.create("/a")
    fired: list[str] = []
    await store.get("/a", watch=lambda: fired.append("changed"))
    await store.set("/a", b"1", version=None)
    assert fired == ["changed"]


async def test_a_failing_watch_does_not_affect_others(store: MetadataStore, other: MetadataStore) -> None:
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
