"""Permissions in memory: read once, followed, bounded, and used for a limited time without ZooKeeper."""

import asyncio

import pytest
from access_parts import make_acme
from bindery_broker.access import records as module
from bindery_broker.access.access import Access, Target
from bindery_broker.access.decision import Need, Rules
from bindery_broker.access.records import KNOWN_S_MAX, AccessRecords
from bindery_broker.namespaces.records import encode
from bindery_core.errors import MetadataUnavailable
from bindery_metadata.stores.memory import MemoryTree
from broker_harness import Clock, make_namespaces


async def until(condition) -> None:
    async with asyncio.timeout(30):
        while not condition():
            await asyncio.sleep(0)


@pytest.fixture
async def parts():
    tree, clock = MemoryTree(), Clock()
    make_acme(tree)
    store = tree.connect()
    records = AccessRecords(store, now=clock.now)
    yield tree, clock, store, records
    await records.close()
    await store.close()


async def test_a_change_by_another_process_is_seen(parts):
    tree, _, _, records = parts
    assert await records.admins("acme") == {"admin"}
    changed = []
    records.on_change = changed.append
    other = tree.connect()
    await other.set("/admin/policies/acme", encode({"adminRoles": ["next"]}), version=None)
    await until(lambda: changed)
    assert await records.admins("acme") == {"next"}
    assert changed == ["acme"]
    await other.close()


async def test_a_missing_record_grants_nothing_until_it_is_created(parts):
    tree, _, _, records = parts
    assert (await records.permissions("acme", "later")).namespace == {}
    make_namespaces(tree, "acme/later", auth_policies={"namespace_auth": {"r": ["consume"]}})
    other = tree.connect()
    granted = encode({"auth_policies": {"namespace_auth": {"r": ["produce"]}}})
    await other.set("/admin/policies/acme/later", granted, version=None)
    async with asyncio.timeout(30):
        while (await records.permissions("acme", "later")).namespace != {"r": {"produce"}}:
            await asyncio.sleep(0)
    await other.close()


async def test_a_record_that_cannot_be_decoded_keeps_the_last_one(parts):
    _, _, store, records = parts
    before = await records.permissions("acme", "shop")
    assert before.namespace["producer"] == {"produce"}
    await store.set("/admin/policies/acme/shop", b'{"auth_policies": {"namespace_auth": []}}', version=None)
    await until(lambda: not records.is_readable("/admin/policies/acme/shop"))
    assert await records.permissions("acme", "shop") == before


async def test_a_record_that_could_never_be_decoded_grants_nothing(parts):
    _, _, store, records = parts
    await store.set("/admin/policies/acme/shop", b"{", version=None)
    assert (await records.permissions("acme", "shop")).namespace == {}


async def test_without_zookeeper_the_last_records_are_used_for_a_limited_time(parts):
    tree, clock, store, _ = parts
    access = Access(store, Rules(frozenset({"super"})), now=clock.now)
    target = Target("acme", "shop")
    assert await access.may(["producer"], Need.NAMESPACE_USE, target)
    tree.suspend(store)
    clock.advance(KNOWN_S_MAX - 1)
    assert await access.may(["producer"], Need.NAMESPACE_USE, target)
    assert not await access.may(["nobody"], Need.NAMESPACE_USE, target)
    clock.advance(2)
    with pytest.raises(MetadataUnavailable, match="no connection to ZooKeeper"):
        await access.may(["producer"], Need.NAMESPACE_USE, target)
    assert await access.may(["super"], Need.SUPER_USER, target)
    tree.resume(store)
    assert await access.may(["producer"], Need.NAMESPACE_USE, target)
    await access.close()


async def test_the_number_of_followed_records_is_limited(parts, monkeypatch):
    _, _, _, records = parts
    monkeypatch.setattr(module, "RECORDS_MAX", 3)
    await records.permissions("acme", "shop")
    release = records.hold("acme", "shop")
    for index in range(20):
        await records.permissions("acme", f"n{index}")
    assert len(records) == 3
    assert records.is_readable("/admin/policies/acme/shop")
    assert (await records.permissions("acme", "shop")).namespace["producer"] == {"produce"}
    release()
    for index in range(20):
        await records.permissions("acme", f"m{index}")
    assert len(records) == 3


async def test_lists_do_not_fill_the_memory(parts):
    _, _, _, records = parts
    for index in range(20):
        await records.permissions("acme", f"n{index}", follow=False)
    assert (await records.permissions("acme", "shop", follow=False)).namespace["producer"] == {"produce"}
    assert len(records) == 0
