"""Ownership of bundles between several brokers."""

import asyncio

import pytest
from bindery_broker.errors import NotOwner
from bindery_broker.ownership.bundles import Bundle
from bindery_broker.ownership.divisions import Divisions
from bindery_broker.ownership.ownership import Ownership, RemoteOwner
from bindery_broker.ownership.records import OwnerRecord
from bindery_core.errors import MetadataUnavailable
from bindery_metadata.coordination.leases import Leases
from bindery_metadata.stores.memory import MemoryStore, MemoryTree
from bindery_pulsar.topic_name import TopicName

NAME = TopicName.parse("persistent://public/default/orders")
BUNDLE = Bundle.of(NAME)
HERE = OwnerRecord(http_url="http://127.0.0.1:8080")
THERE = OwnerRecord(http_url="http://127.0.0.1:8081")


def ownership(tree: MemoryTree, record: OwnerRecord) -> tuple[Ownership, MemoryStore]:
    store = tree.connect()
    owned = Ownership(Leases(store), record=record, on_lost=lambda _: None, divisions=Divisions(store))
    return owned, store


async def test_a_bundle_without_owner_is_acquired_by_the_first_broker_that_needs_it() -> None:
    tree = MemoryTree()
    first, _ = ownership(tree, HERE)
    second, _ = ownership(tree, THERE)
    assert await first.locate(BUNDLE) is None
    assert await second.locate(BUNDLE) == RemoteOwner(HERE.http_url)


async def test_a_restarted_broker_waits_for_the_end_of_its_previous_session() -> None:
    tree = MemoryTree()
    killed, its_store = ownership(tree, HERE)
    assert await killed.locate(BUNDLE) is None
    successor, _ = ownership(tree, HERE)
    asked = asyncio.create_task(successor.locate(BUNDLE))
    done, _ = await asyncio.wait([asked], timeout=0.05)
    assert not done
    tree.expire(its_store)
    async with asyncio.timeout(30):
        assert await asked is None
    assert successor.is_mine(BUNDLE)


async def test_a_proof_of_ownership_covers_the_time_since_its_creation() -> None:
    """A broker may lose a bundle and take it again. The proof for the first lease must not hold for the second one."""
    tree = MemoryTree()
    mine, store = ownership(tree, HERE)
    assert mine.proof(NAME) is None
    assert await mine.locate(BUNDLE) is None
    proof = mine.proof(NAME)
    assert proof is not None
    assert await proof()
    store.fail_next(MetadataUnavailable("made up"))
    with pytest.raises(MetadataUnavailable):
        await proof()
    await tree.connect().delete(BUNDLE.owner_path, version=None)
    assert not await proof()
    assert await mine.locate(BUNDLE) is None
    again = mine.proof(NAME)
    assert again is not None
    assert await again()
    assert not await proof()


async def test_a_bundle_is_located_by_one_task_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """This also holds if the first task fails while another one arrives."""
    mine, _ = ownership(MemoryTree(), HERE)
    acquire_really = mine._acquire
    inside = most = calls = 0

    async def acquire(bundle: Bundle, *, take: bool) -> RemoteOwner | None:
        nonlocal inside, most, calls
        calls += 1
        fails = calls == 1
        inside += 1
        most = max(most, inside)
        try:
            await asyncio.sleep(0.01)
            if fails:
                raise MetadataUnavailable("made up")
            return await acquire_really(bundle, take=take)
        finally:
            inside -= 1

    monkeypatch.setattr(mine, "_acquire", acquire)
    tasks = [asyncio.create_task(mine.locate(BUNDLE)) for _ in range(2)]
    await asyncio.wait(tasks[:1])
    tasks.append(asyncio.create_task(mine.locate(BUNDLE)))
    failed, *others = await asyncio.gather(*tasks, return_exceptions=True)
    assert isinstance(failed, MetadataUnavailable)
    assert others == [None, None]
    assert most == 1


async def test_a_broker_that_stops_acquires_no_bundle() -> None:
    tree = MemoryTree()
    stopping, _ = ownership(tree, HERE)
    assert await stopping.locate(BUNDLE) is None
    await stopping.close()
    with pytest.raises(NotOwner):
        await stopping.locate(BUNDLE)
    assert stopping.held == []
    other, _ = ownership(tree, THERE)
    assert await other.locate(BUNDLE) is None
