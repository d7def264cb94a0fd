"""An ephemeral node can be deleted by its own session, but never one that replaced it at the same path."""

from collections.abc import Awaitable, Callable

import pytest
from bindery_core.errors import AlreadyExists, MetadataOutcomeUnknown, MetadataUnavailable, NoSuchNode, VersionConflict
from bindery_metadata.coordination.leases import Leases
from bindery_metadata.stores import ephemerals
from bindery_metadata.stores.ephemerals import delete_own
from bindery_metadata.stores.memory import MemoryTree
from bindery_metadata.stores.store import Check, Create, Delete, MetadataStore, Op, Stat
from store_environments import StoreEnvironment

PATH = "/locks/a"


def just_before_the_next_transaction(
    monkeypatch: pytest.MonkeyPatch, store: MetadataStore, happens: Callable[[], Awaitable[object]]
) -> None:
    """Run `happens` between a read of `store` and the transaction that follows it."""
    multi = store.multi

    async def after_that(ops: list[Op]) -> list[str | Stat | None]:
        monkeypatch.undo()
        await happens()
        return await multi(ops)

    monkeypatch.setattr(store, "multi", after_that)


async def owner(store: MetadataStore, path: str = PATH) -> int | None:
    stat = await store.exists(path)
    return stat.ephemeral_owner if stat else None


async def test_an_own_node_is_deleted_and_no_other_node_remains(store: MetadataStore) -> None:
    await store.create(PATH, ephemeral=True, make_parents=True)
    assert await delete_own(store, PATH, store.session_id)
    assert await store.children("/locks") == []
    assert not await delete_own(store, PATH, store.session_id)


async def test_a_node_of_another_session_is_kept(store: MetadataStore, other: MetadataStore) -> None:
    await other.create(PATH, ephemeral=True, make_parents=True)
    assert not await delete_own(store, PATH, store.session_id)
    assert await owner(store) == other.session_id


async def test_a_node_that_replaced_ours_with_the_same_version_is_kept(
    monkeypatch: pytest.MonkeyPatch, store: MetadataStore, other: MetadataStore
) -> None:
    await store.create(PATH, b"1", ephemeral=True, make_parents=True)

    async def another_takes_it() -> None:
        await other.delete(PATH, version=0)
        await other.create(PATH, b"2", ephemeral=True)

    just_before_the_next_transaction(monkeypatch, store, another_takes_it)
    assert not await delete_own(store, PATH, store.session_id)
    node = await store.get(PATH)
    assert (node.data, node.stat.version, node.stat.ephemeral_owner) == (b"2", 0, other.session_id)
    assert await store.children("/locks") == ["a"]


async def test_a_node_that_another_session_created_after_ours_ended_is_kept(
    monkeypatch: pytest.MonkeyPatch, environment: StoreEnvironment, store: MetadataStore, other: MetadataStore
) -> None:
    await store.create(PATH, b"1", ephemeral=True, make_parents=True)

    async def another_takes_it() -> None:
        await environment.expire(store)
        await other.create(PATH, b"2", ephemeral=True)

    just_before_the_next_transaction(monkeypatch, store, another_takes_it)
    assert not await delete_own(store, PATH, store.session_id)
    assert await owner(store) == other.session_id


async def test_a_late_release_of_a_lease_keeps_the_next_holders_node(
    monkeypatch: pytest.MonkeyPatch, environment: StoreEnvironment, store: MetadataStore, other: MetadataStore
) -> None:
    leases, others = Leases(store), Leases(other)
    lease = await leases.acquire(PATH, b"1")
    assert lease is not None

    async def another_takes_it() -> None:
        await environment.expire(store)
        assert await others.acquire(PATH, b"2") is not None

    just_before_the_next_transaction(monkeypatch, store, another_takes_it)
    await lease.release()
    assert await owner(store) == other.session_id
    await leases.close()
    await others.close()


async def test_changes_of_sibling_nodes_only_cause_another_attempt(
    monkeypatch: pytest.MonkeyPatch, store: MetadataStore, other: MetadataStore
) -> None:
    await store.create("/locks/before", make_parents=True)
    await store.delete("/locks/before", version=None)
    await store.create(PATH, ephemeral=True)

    async def a_neighbour_comes() -> None:
        await other.create("/locks/b", ephemeral=True)

    just_before_the_next_transaction(monkeypatch, store, a_neighbour_comes)
    assert await delete_own(store, PATH, store.session_id)
    assert await store.children("/locks") == ["b"]


async def test_an_own_node_that_was_changed_is_deleted(
    monkeypatch: pytest.MonkeyPatch, store: MetadataStore, other: MetadataStore
) -> None:
    await store.create(PATH, ephemeral=True, make_parents=True)

    async def it_is_written() -> None:
        await other.set(PATH, b"x", version=0)

    just_before_the_next_transaction(monkeypatch, store, it_is_written)
    assert await delete_own(store, PATH, store.session_id)


@pytest.mark.parametrize("applied", [True, False], ids=["done", "not done"])
async def test_a_lost_response_is_resolved(environment: StoreEnvironment, store: MetadataStore, applied: bool) -> None:
    await store.create(PATH, ephemeral=True, make_parents=True)
    environment.lose_next_write(store, applied=applied)
    assert await delete_own(store, PATH, store.session_id)
    assert await store.children("/locks") == []


async def test_combined_operations_are_applied_together_or_not_at_all(store: MetadataStore) -> None:
    await store.create(PATH, ephemeral=True, make_parents=True)
    await store.create("/mark")
    with pytest.raises(VersionConflict):
        await delete_own(store, PATH, store.session_id, together_with=[Delete("/mark", 7)])
    with pytest.raises(NoSuchNode):
        await delete_own(store, PATH, store.session_id, together_with=[Check("/none", 0)])
    with pytest.raises(AlreadyExists):
        await delete_own(store, PATH, store.session_id, together_with=[Create("/mark")])
    assert await owner(store) == store.session_id
    assert await delete_own(store, PATH, store.session_id, together_with=[Delete("/mark", 0)])
    assert await store.exists("/mark") is None
    await store.create("/mark")
    assert not await delete_own(store, PATH, store.session_id, together_with=[Delete("/mark", 0)])
    assert await store.exists("/mark") is not None


async def test_a_lost_response_to_combined_operations_raises_outcome_unknown(
    environment: StoreEnvironment, store: MetadataStore
) -> None:
    await store.create(PATH, ephemeral=True, make_parents=True)
    environment.lose_next_write(store, applied=True)
    with pytest.raises(MetadataOutcomeUnknown):
        await delete_own(store, PATH, store.session_id, together_with=[Create("/healed")])
    assert await store.exists(PATH) is None


async def test_too_many_competing_creations_raise_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = MemoryTree()
    store, other = tree.connect(), tree.connect()
    await store.create(PATH, ephemeral=True, make_parents=True)
    multi, tries = store.multi, 0

    async def too_late(ops: list[Op]) -> list[str | Stat | None]:
        nonlocal tries
        tries += 1
        await other.create(f"/locks/neighbour-{tries}")
        return await multi(ops)

    monkeypatch.setattr(store, "multi", too_late)
    with pytest.raises(MetadataUnavailable, match="other clients change the parent node"):
        await delete_own(store, PATH, store.session_id)
    assert tries == ephemerals.ATTEMPTS_MAX
    assert await owner(store) == store.session_id


@pytest.mark.parametrize("creates", [0, 7, 2**30 - 1, 2**30, 2**30 + 5, 2**31 - 1])
def test_the_count_of_creations_survives_the_overflow_of_the_version(creates: int) -> None:
    """ZooKeeper's version is twice the creations minus the existing children, as a signed 32-bit number."""
    children = min(3, creates)
    version = (2 * creates - children + 2**31) % 2**32 - 2**31
    parent = Stat(0, version, 0, 0, 0, children)
    assert ephemerals._creates(parent) == creates
