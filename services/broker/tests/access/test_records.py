"""Permissions in memory: read once, followed, bounded, and used for a limited time without confirmation."""

import asyncio
import contextlib

import pytest
from access_parts import make_acme
from bindery_broker.access import access as access_module
from bindery_broker.access import records as module
from bindery_broker.access.access import Access, Target
from bindery_broker.access.decision import Need, Rules
from bindery_broker.access.records import ABSENT_S, KNOWN_S_MAX, AccessRecords, ListReads
from bindery_broker.namespaces.records import encode
from bindery_core.errors import Forbidden, MetadataUnavailable, TooManyRequests
from bindery_metadata.stores.memory import MemoryTree
from bindery_pulsar.topic_name import TopicName
from broker_harness import Clock, make_namespaces


async def _is_unavailable(read) -> bool:
    try:
        await read
    except MetadataUnavailable:
        return True
    return False


def _count_reads(store, monkeypatch) -> list[str]:
    """Return a list to which the paths of all later reads are added."""
    paths, get = [], store.get

    async def counted(path, *, watch=None):
        paths.append(path)
        return await get(path, watch=watch)

    monkeypatch.setattr(store, "get", counted)
    return paths


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
    tree, clock, _, records = parts
    assert (await records.permissions("acme", "later")).namespace == {}
    make_namespaces(tree, "acme/later", auth_policies={"namespace_auth": {"r": ["consume"]}})
    other = tree.connect()
    granted = encode({"auth_policies": {"namespace_auth": {"r": ["produce"]}}})
    await other.set("/admin/policies/acme/later", granted, version=None)
    assert (await records.permissions("acme", "later")).namespace == {}, "for a moment"
    clock.advance(ABSENT_S)
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
    with pytest.raises(MetadataUnavailable, match="not confirmed"):
        await access.may(["producer"], Need.NAMESPACE_USE, target)
    assert await access.may(["super"], Need.SUPER_USER, target)
    tree.resume(store)
    await until(lambda: not access.records.has_stale)
    assert await access.may(["producer"], Need.NAMESPACE_USE, target)
    await access.close()


async def test_a_new_connection_confirms_no_record_that_was_not_read_again(parts):
    tree, clock, store, records = parts
    await records.permissions("acme", "shop")
    await records.admins("acme")
    tree.suspend(store)
    clock.advance(KNOWN_S_MAX + 1)
    for _ in range(2):  # one read for each connection
        store.fail_next(
            MetadataUnavailable("no answer"), matching=lambda _operation, path: path == "/admin/policies/acme/shop"
        )
    tree.resume(store)
    async with asyncio.timeout(30):
        while await _is_unavailable(records.admins("acme")):
            await asyncio.sleep(0)
    assert await _is_unavailable(records.permissions("acme", "shop")), "although the other record was read again"
    tree.suspend(store)
    tree.resume(store)
    assert await _is_unavailable(records.permissions("acme", "shop")), "also after another outage, which was short"
    async with asyncio.timeout(30):
        while await _is_unavailable(records.permissions("acme", "shop")):
            await asyncio.sleep(0.01)
    assert not records.has_stale


async def test_a_record_that_has_changed_and_cannot_be_decoded_is_used_for_a_limited_time(parts):
    _, clock, store, records = parts
    before = await records.permissions("acme", "shop")
    await store.set("/admin/policies/acme/shop", b"{", version=None)
    await until(lambda: not records.is_readable("/admin/policies/acme/shop"))
    clock.advance(KNOWN_S_MAX)
    assert await records.permissions("acme", "shop") == before
    clock.advance(1)
    assert await _is_unavailable(records.permissions("acme", "shop"))
    await store.set("/admin/policies/acme/shop", encode({}), version=None)
    await until(lambda: records.is_readable("/admin/policies/acme/shop"))
    assert (await records.permissions("acme", "shop")).namespace == {}


async def test_a_waiting_call_ends_if_its_record_stays_unconfirmed_with_a_connection(parts, monkeypatch):
    _, clock, store, _ = parts
    monkeypatch.setattr(access_module, "RECHECK_S", 0.0)
    access = Access(store, Rules(frozenset()), now=clock.now)
    target = Target("acme", "shop", TopicName.parse("acme/shop/t"), "s")
    await access.check(["consumer"], "receive", target)
    ended = asyncio.Event()

    async def wait() -> None:
        waiting = access.waiting(["consumer"], "receive", target, since=access.records.changes)
        waiting.begin()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            assert isinstance(waiting.error, MetadataUnavailable)
            ended.set()
        waiting.end()

    task = asyncio.create_task(wait())
    await store.set("/admin/policies/acme/shop", b"{", version=None)
    await until(lambda: not access.records.is_readable("/admin/policies/acme/shop"))
    clock.advance(KNOWN_S_MAX + 1)
    async with asyncio.timeout(30):
        await ended.wait()
    await task
    await access.close()


async def test_a_permission_that_is_revoked_while_a_call_is_checked_ends_the_call(parts):
    _, clock, store, _ = parts
    access = Access(store, Rules(frozenset()), now=clock.now)
    target = Target("acme", "shop", TopicName.parse("acme/shop/t"), "s")
    since = access.records.changes
    await access.check(["consumer"], "receive", target)
    access.records.stored("/admin/policies/acme/shop", {})

    async def wait() -> object:
        waiting = access.waiting(["consumer"], "receive", target, since=since)
        waiting.begin()
        try:
            await asyncio.get_running_loop().create_future()
        except asyncio.CancelledError:
            return waiting.error
        finally:
            waiting.end()

    async with asyncio.timeout(30):
        assert isinstance(await asyncio.create_task(wait()), Forbidden)
    await access.close()


async def test_an_allowed_request_is_remembered_until_a_record_changes_or_is_in_doubt(parts):
    tree, clock, store, _ = parts
    access = Access(store, Rules(frozenset()), now=clock.now)
    target = Target("acme", "shop", TopicName.parse("acme/shop/t"), "s")
    key = ("receive", b"/v1/topics/acme/shop/t/subscriptions/s/receive", ("consumer",))

    async def ask() -> None:
        since = access.records.changes
        await access.check(["consumer"], "receive", target)
        access.remember(key, since=since)

    await ask()  # the records were read for the first time
    await ask()
    assert access.is_remembered(key)
    assert not access.is_remembered((*key[:2], ("other",)))
    access.records.stored("/admin/policies/acme/shop", {})
    assert not access.is_remembered(key), "a record has changed"
    access.remember(key, since=access.records.changes - 1)
    assert not access.is_remembered(key), "decided before the change"
    await store.set("/admin/policies/acme/shop", b'{"properties": {}}', version=None)
    await until(lambda: not access.records.has_stale)
    access.remember(key, since=access.records.changes)
    assert access.is_remembered(key)
    tree.suspend(store)
    assert not access.is_remembered(key), "ZooKeeper does not confirm the records"
    access.remember(key, since=access.records.changes)
    assert not access.is_remembered(key), "nothing is remembered meanwhile"
    tree.resume(store)
    await until(lambda: not access.records.has_stale)
    access.remember(key, since=access.records.changes)
    assert access.is_remembered(key)
    await access.close()


async def test_a_record_in_doubt_that_is_deleted_leaves_no_doubt(parts):
    tree, _, store, records = parts
    await records.permissions("acme", "shop")
    tree.suspend(store)
    assert records.has_stale
    tree.resume(store)
    await store.delete("/admin/policies/acme/shop", version=None)
    await until(lambda: not records.has_stale)


async def test_unknown_names_have_no_watch_and_displace_no_record(parts, monkeypatch):
    _, clock, store, records = parts
    monkeypatch.setattr(module, "RECORDS_MAX", 2)
    monkeypatch.setattr(module, "ABSENT_MAX", 5)
    await records.admins("acme")
    await records.permissions("acme", "shop")
    watches, reads = len(store._watches), _count_reads(store, monkeypatch)
    for index in range(50):
        assert await records.admins(f"x{index}") == frozenset()
        assert await records.admins(f"x{index}") == frozenset()
    assert len(store._watches) == watches
    assert len(records) == 2
    assert len(reads) == 50, "one for each name"
    await records.admins("acme")
    await records.permissions("acme", "shop")
    assert len(reads) == 50
    clock.advance(ABSENT_S)
    await records.admins("x49")
    assert len(reads) == 51
    assert not records._pending
    assert len(records._absent) <= 5


async def test_a_deleted_record_grants_nothing_and_is_not_followed(parts):
    _, _, store, records = parts
    await records.permissions("acme", "shop")
    changed = []
    records.on_change = changed.append
    await store.delete("/admin/policies/acme/shop", version=None)
    await until(lambda: changed)
    assert (await records.permissions("acme", "shop")).namespace == {}
    assert len(records) == 0
    assert not store._watches


async def test_a_record_of_this_process_is_in_force_at_once_where_none_was(parts):
    tree, _, _, records = parts
    assert await records.admins("later") == frozenset()
    other = tree.connect()
    await other.create("/admin/policies/later", encode({"adminRoles": ["r"]}))
    records.stored("/admin/policies/later", {"adminRoles": ["r"]})
    assert await records.admins("later") == {"r"}
    await other.close()


async def test_a_record_that_is_followed_again_has_the_same_watch(parts, monkeypatch):
    tree, _, store, records = parts
    monkeypatch.setattr(module, "RECORDS_MAX", 1)
    for _ in range(10):
        await records.admins("acme")
        await records.permissions("acme", "shop")
    assert [len(watches) for watches in store._watches.values()] == [1, 1]
    other = tree.connect()
    await records.admins("acme")
    await other.set("/admin/policies/acme", encode({"adminRoles": ["next"]}), version=None)
    async with asyncio.timeout(30):
        while await records.admins("acme") != {"next"}:
            await asyncio.sleep(0)
    await other.close()


async def test_a_first_read_without_zookeeper_leaves_nothing_behind(parts, monkeypatch):
    tree, _, store, records = parts
    monkeypatch.setattr(module, "READ_WAIT_S", 0.01)
    tree.suspend(store)
    assert await _is_unavailable(records.admins("acme"))
    release = records.hold("acme", None)
    release()
    await until(lambda: not records._followers)
    assert not records._pending
    tree.resume(store)
    assert await records.admins("acme") == {"admin"}


async def test_a_new_tenant_is_served_when_all_records_are_in_use(parts, monkeypatch):
    _, _, _, records = parts
    monkeypatch.setattr(module, "RECORDS_MAX", 2)
    await records.admins("acme")
    await records.permissions("acme", "shop")
    release = records.hold("acme", "shop")
    for _ in range(3):
        assert await records.admins("other") == {"other-admin"}
        assert await records.admins("acme") == {"admin"}
    assert (await records.permissions("acme", "shop")).namespace["producer"] == {"produce"}
    release()
    await records.permissions("other", "space")
    assert len(records) == 2


async def test_the_number_of_followed_records_is_limited(parts, monkeypatch):
    tree, _, _, records = parts
    monkeypatch.setattr(module, "RECORDS_MAX", 3)
    names = [f"n{index}" for index in range(20)]
    make_namespaces(tree, *(f"acme/{name}" for name in names))
    await records.permissions("acme", "shop")
    release = records.hold("acme", "shop")
    for name in names:
        await records.permissions("acme", name)
    assert len(records) == 3
    assert records.is_readable("/admin/policies/acme/shop")
    assert (await records.permissions("acme", "shop")).namespace["producer"] == {"produce"}
    release()
    for name in names:
        await records.permissions("acme", name)
    assert len(records) == 3


async def test_a_list_reads_each_record_once_and_does_not_fill_the_memory(parts, monkeypatch):
    tree, _, store, records = parts
    make_namespaces(tree, "acme/n0")
    counted, reads = _count_reads(store, monkeypatch), ListReads()
    for _ in range(3):
        assert (await records.permissions("acme", "shop", reads=reads)).namespace["producer"] == {"produce"}
        assert await records.admins("acme", reads=reads) == {"admin"}
        assert (await records.permissions("acme", "missing", reads=reads)).namespace == {}
    assert len(counted) == 3
    assert len(records) == 0
    monkeypatch.setattr(module, "LIST_RECORDS_MAX", 2)
    for index in range(20):
        await records.permissions("acme", f"n{index}", reads=reads)
    assert len(reads._records) <= 3


async def test_filtered_lists_take_turns(parts, monkeypatch):
    _, clock, store, _ = parts
    monkeypatch.setattr(access_module, "LIST_WAIT_S", 0.01)
    access = Access(store, Rules(frozenset()), now=clock.now)
    async with contextlib.AsyncExitStack() as lists:
        await lists.enter_async_context(access.listing(("busy",)))
        with pytest.raises(TooManyRequests):
            await lists.enter_async_context(access.listing(("busy",)))
        for index in range(access_module.LISTS_MAX - 1):
            await lists.enter_async_context(access.listing((f"r{index}",)))
        with pytest.raises(TooManyRequests):
            await lists.enter_async_context(access.listing(("other",)))
    async with access.listing(("busy",)), access.listing(("other",)):
        pass
    await access.close()
