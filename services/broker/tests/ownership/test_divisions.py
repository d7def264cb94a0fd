"""The bundles of namespaces: from the policies, from Pulsar's local policies, and while they change."""

import json
from typing import Any

import pytest
from bindery_broker.errors import NotOwner
from bindery_broker.ownership import divisions as divisions_module
from bindery_broker.ownership.bundles import BOUNDARIES_DEFAULT, HASH_MAX, Bundle
from bindery_broker.ownership.divisions import Divisions
from bindery_broker.ownership.ownership import Ownership
from bindery_broker.ownership.records import OwnerRecord
from bindery_core.errors import Corrupt
from bindery_metadata.coordination.leases import Leases
from bindery_metadata.stores.memory import MemoryStore, MemoryTree
from bindery_pulsar.topic_name import TopicName

NAME = TopicName.parse("t/n/orders")
POLICIES, LOCAL = "/admin/policies/t/n", "/admin/local-policies/t/n"
HALVES = {"boundaries": ["0x00000000", "0x80000000", "0xffffffff"], "numBundles": 2}
WHOLE = {"boundaries": ["0x00000000", "0xffffffff"], "numBundles": 1}


@pytest.fixture
def store(tree: MemoryTree) -> MemoryStore:
    return tree.connect()


async def put(store: MemoryStore, path: str, bundles: Any) -> None:
    value = json.dumps({"bundles": bundles}).encode()
    if await store.exists(path) is None:
        await store.create(path, value, make_parents=True)
    else:
        await store.set(path, value, version=None)


async def test_policies_divide_a_namespace_and_local_policies_have_precedence(store):
    divisions = Divisions(store)
    assert await divisions.boundaries("t", "n") == BOUNDARIES_DEFAULT
    await put(store, POLICIES, HALVES)
    assert await divisions.boundaries("t", "n") == (0, 2**31, HASH_MAX)
    await put(store, LOCAL, WHOLE)
    assert await divisions.boundaries("t", "n") == (0, HASH_MAX)
    await put(store, POLICIES, None)
    assert await divisions.boundaries("t", "n") == (0, HASH_MAX)
    await put(store, LOCAL, None)
    assert await divisions.boundaries("t", "n") == BOUNDARIES_DEFAULT


async def test_boundaries_are_read_once(store, monkeypatch):
    await put(store, POLICIES, HALVES)
    divisions = Divisions(store)
    bundle = await divisions.find(NAME)
    monkeypatch.setattr(divisions, "_read", None)
    assert await divisions.find(NAME) == bundle
    assert divisions.known(NAME) == bundle
    assert bundle in await divisions.bundles("t", "n")


async def test_what_was_read_last_is_known_while_it_changes(store):
    divisions = Divisions(store)
    await put(store, POLICIES, HALVES)
    before = await divisions.find(NAME)
    await put(store, POLICIES, WHOLE)
    assert divisions.known(NAME) == before
    assert await divisions.find(NAME) == Bundle("t", "n", 0, HASH_MAX)


async def test_a_change_during_the_read_is_not_missed(store, monkeypatch):
    divisions = Divisions(store)
    await put(store, POLICIES, HALVES)
    get_really = store.get
    changes = iter([WHOLE])

    async def get(path: str, **options: Any) -> Any:
        found = await get_really(path, **options)
        for bundles in changes:
            await put(store, POLICIES, bundles)
        return found

    monkeypatch.setattr(store, "get", get)
    assert await divisions.boundaries("t", "n") == (0, 2**31, HASH_MAX)
    assert await divisions.boundaries("t", "n") == (0, HASH_MAX)


async def test_records_that_cannot_be_read_are_reported(store):
    divisions = Divisions(store)
    await put(store, LOCAL, {"boundaries": ["0x1"]})
    with pytest.raises(Corrupt, match=LOCAL):
        await divisions.find(NAME)


async def test_few_namespaces_are_kept_in_memory(store, monkeypatch):
    monkeypatch.setattr(divisions_module, "REMEMBERED_MAX", 2)
    divisions = Divisions(store)
    for name in "abc":
        await divisions.boundaries("t", name)
    assert len(divisions._known) <= 2


async def test_a_bundle_that_no_longer_exists_is_not_taken(store):
    """A broker that has not noticed a split would own topics that the broker of the new bundles owns as well."""
    divisions = Divisions(store)
    owned = Ownership(
        Leases(store), record=OwnerRecord(http_url="http://one"), on_lost=lambda _: None, divisions=divisions
    )
    await put(store, POLICIES, WHOLE)
    old = await divisions.find(NAME)
    await put(store, LOCAL, HALVES)
    with pytest.raises(NotOwner):
        await owned.locate(old)
    assert owned.held == []
    assert await store.exists(old.owner_path) is None
    assert await owned.locate(await divisions.find(NAME)) is None
