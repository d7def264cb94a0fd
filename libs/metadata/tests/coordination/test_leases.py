"""A lease has one holder at a time, and the holder is notified of its loss."""

import asyncio

import pytest
from bindery_core.errors import MetadataUnavailable
from bindery_metadata.coordination.leases import LeaseOwner, Leases
from bindery_metadata.stores.memory import MemoryTree
from bindery_metadata.stores.store import MetadataStore
from store_environments import StoreEnvironment, until

PATH = "/namespace/public/default/0x00000000_0x40000000"


@pytest.fixture
async def leases(store: MetadataStore):
    leases = Leases(store)
    yield leases
    await leases.close()


@pytest.fixture
async def others(other: MetadataStore):
    leases = Leases(other)
    yield leases
    await leases.close()


async def test_the_first_session_gets_the_lease_and_the_second_can_read_its_owner(
    leases: Leases, others: Leases, store: MetadataStore
) -> None:
    lease = await leases.acquire(PATH, b"one")
    assert lease is not None
    assert lease.is_held
    assert lease.is_certain
    assert await others.acquire(PATH, b"two") is None
    assert await leases.owner(PATH) == LeaseOwner(b"one", store.session_id, mine=True)
    assert await others.owner(PATH) == LeaseOwner(b"one", store.session_id, mine=False)


async def test_one_of_many_concurrent_requests_gets_the_lease(leases: Leases, others: Leases) -> None:
    got = await asyncio.gather(leases.acquire(PATH, b"one"), others.acquire(PATH, b"two"))
    assert sum(lease is not None for lease in got) == 1


async def test_acquiring_again_returns_the_same_lease(leases: Leases) -> None:
    assert await leases.acquire(PATH, b"one") is await leases.acquire(PATH, b"one")


async def test_a_released_lease_is_free_and_not_reported_as_lost(leases: Leases, others: Leases) -> None:
    lease = await leases.acquire(PATH, b"one")
    assert lease is not None
    lost: list[str] = []
    lease.on_lost(lambda: lost.append("lost"))
    await lease.release()
    assert not lease.is_held
    assert await others.owner(PATH) is None
    assert await others.acquire(PATH, b"two") is not None
    assert lost == []


async def test_release_keeps_the_node_of_another_holder(
    environment: StoreEnvironment, leases: Leases, others: Leases
) -> None:
    lease = await leases.acquire(PATH, b"one")
    assert lease is not None
    await environment.expire(leases._store)
    assert await others.acquire(PATH, b"two") is not None
    await lease.release()
    owner = await leases.owner(PATH)
    assert owner is not None
    assert owner.value == b"two"


async def test_on_change_is_called_for_acquisition_and_release(leases: Leases, others: Leases) -> None:
    calls: list[str] = []
    assert await others.owner(PATH, on_change=lambda: calls.append("taken")) is None
    lease = await leases.acquire(PATH, b"one")
    assert lease is not None
    await until(lambda: calls == ["taken"])
    assert await others.owner(PATH, on_change=lambda: calls.append("free")) is not None
    await lease.release()
    await until(lambda: calls == ["taken", "free"])


async def test_an_expired_session_loses_its_leases(
    environment: StoreEnvironment, leases: Leases, others: Leases
) -> None:
    lease = await leases.acquire(PATH, b"one")
    assert lease is not None
    lost: list[str] = []
    lease.on_lost(lambda: lost.append("lost"))
    await environment.expire(leases._store)
    assert lost == ["lost"]
    assert not lease.is_held
    assert not lease.is_certain
    assert await others.acquire(PATH, b"two") is not None


async def test_a_disconnected_holder_is_uncertain_until_it_reconnects(
    environment: StoreEnvironment, leases: Leases, others: Leases
) -> None:
    lease = await leases.acquire(PATH, b"one")
    assert lease is not None
    await environment.suspend(leases._store)
    assert lease.is_held
    assert not lease.is_certain
    assert await others.acquire(PATH, b"two") is None
    await environment.resume(leases._store)
    assert lease.is_certain
    assert await lease.verify()


async def test_a_holder_is_notified_if_its_node_was_deleted(leases: Leases, other: MetadataStore) -> None:
    lease = await leases.acquire(PATH, b"one")
    assert lease is not None
    lost: list[str] = []
    lease.on_lost(lambda: lost.append("lost"))
    await other.delete(PATH, version=None)
    await until(lambda: lost == ["lost"])
    assert not await lease.verify()
    assert not leases._leases


async def test_a_changed_value_does_not_lose_the_lease(leases: Leases, other: MetadataStore) -> None:
    lease = await leases.acquire(PATH, b"one")
    assert lease is not None
    await other.set(PATH, b"disabled", version=None)
    assert await lease.verify()
    assert lease.is_held


@pytest.mark.parametrize("applied", [True, False], ids=["done", "not done"])
async def test_an_acquisition_whose_response_is_lost_is_resolved(
    environment: StoreEnvironment, leases: Leases, others: Leases, applied: bool
) -> None:
    warm_up = await leases.acquire(f"{PATH}-other", b"")  # creates the parents
    assert warm_up is not None
    environment.lose_next_write(leases._store, applied=applied)
    lease = await leases.acquire(PATH, b"one")
    assert lease is not None
    assert await lease.verify()
    owner = await others.owner(PATH)
    assert owner is not None
    assert owner.value == b"one"


async def test_an_owner_that_cannot_be_read_raises_an_error() -> None:
    store = MemoryTree().connect()
    store.fail_next(MetadataUnavailable())
    with pytest.raises(MetadataUnavailable):
        await Leases(store).owner(PATH)


async def test_a_check_that_fails_is_repeated() -> None:
    tree = MemoryTree()
    store, other = tree.connect(), tree.connect()
    leases = Leases(store)
    lease = await leases.acquire(PATH, b"one")
    assert lease is not None
    store.fail_next(MetadataUnavailable(), matching=lambda operation, _: operation == "exists")
    await other.delete(PATH, version=None)
    await until(lambda: not lease.is_held)
    await leases.close()
