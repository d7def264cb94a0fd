"""The contract of `bindery_metadata.stores.store` on both implementations: transactions and the order of requests."""

import asyncio

import pytest
from bindery_core.errors import (
    AlreadyExists,
    NoSuchNode,
    NotEmpty,
    VersionConflict,
)
from bindery_metadata.stores.store import Check, Create, Delete, MetadataStore, Set

# --- multi ------------------------------------------------------------------------------------------------------------


async def test_multi_applies_all_and_returns_a_result_per_operation(store: MetadataStore) -> None:
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
async def test_multi_applies_nothing_if_one_operation_fails(store: MetadataStore, failing, error) -> None:
    await store.create("/a", b"old")
    await store.create("/gone")
    await store.create("/full/child", make_parents=True)
    with pytest.raises(error) as raised:
        await store.multi([Create("/b"), Set("/a", b"new", 0), Delete("/gone", None), failing, Check("/none", 9)])
    assert raised.value.facts["path"] == failing.path
    assert await store.exists("/b") is None
    assert await store.exists("/gone") is not None
    node = await store.get("/a")
    # The Set that precedes the failing operation in the transaction was undone.
    assert (node.data, node.stat.version) == (b"old", 0)


async def test_an_empty_multi_returns_nothing(store: MetadataStore) -> None:
    assert await store.multi([]) == []


async def test_a_failed_multi_fires_no_watch(store: MetadataStore) -> None:
    await store.create("/a")
    fired: list[str] = []
    await store.get("/a", watch=lambda: fired.append("data"))
    with pytest.raises(VersionConflict):
        await store.multi([Set("/a", b"new", 0), Check("/a", 7)])
    await store.sync("/a")
    assert fired == []


async def test_one_of_many_writers_with_the_same_version_succeeds(store: MetadataStore, other: MetadataStore) -> None:
    """With compare-and-set no increment is lost."""
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


async def test_requests_are_applied_in_the_order_they_were_made(store: MetadataStore) -> None:
    await store.create("/a", b"")
    writes = [asyncio.create_task(store.set("/a", b"%d" % number, version=number)) for number in range(50)]
    read = asyncio.create_task(store.get("/a"))
    assert [stat.version for stat in await asyncio.gather(*writes)] == list(range(1, 51))
    assert (await read).data == b"49"


async def test_sync_makes_acknowledged_writes_of_others_visible(store: MetadataStore, other: MetadataStore) -> None:
    await store.create("/a", b"one")
    await other.set("/a", b"two", version=0)
    await store.sync("/a")
    assert (await store.get("/a")).data == b"two"
