"""Each ledger id is used once. Ids are short until their counter ends, then long."""

import asyncio

import pytest
from bindery_core.errors import MetadataOutcomeUnknown, MetadataUnavailable
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.ledgers.id_generator import ATTEMPTS_MAX, LedgerIdGenerator
from bindery_metadata.stores.memory import MemoryTree
from bindery_metadata.stores.store import MetadataStore
from store_environments import StoreEnvironment, until

LAYOUT = LedgersLayout()


def exhaust(tree: MemoryTree, path: str, *, creates: int) -> None:
    """Set the counter of `path` as if `creates` children had been created."""
    tree.znodes._nodes[path].creates = creates


async def test_ids_ascend_from_0_and_leave_no_node(store: MetadataStore) -> None:
    ids = LedgerIdGenerator(store, LAYOUT)
    assert [await ids.next_id() for _ in range(3)] == [0, 1, 2]
    await ids.close()
    assert await store.children(LAYOUT.idgen) == []


async def test_two_generators_never_return_the_same_id(store: MetadataStore, other: MetadataStore) -> None:
    generators = [LedgerIdGenerator(session, LAYOUT) for session in (store, other)]
    given = await asyncio.gather(*(ids.next_id() for _ in range(25) for ids in generators))
    assert sorted(given) == list(range(50))


@pytest.mark.parametrize("applied", [True, False], ids=["done", "not done"])
async def test_an_id_whose_response_was_lost_is_never_used(
    environment: StoreEnvironment, store: MetadataStore, applied: bool
) -> None:
    ids = LedgerIdGenerator(store, LAYOUT)
    await ids.next_id()
    await ids.close()
    environment.lose_next_write(store, applied=applied)
    assert await ids.next_id() == (2 if applied else 1)


async def test_too_many_lost_responses_raise_an_error() -> None:
    store = MemoryTree().connect()
    ids = LedgerIdGenerator(store, LAYOUT)
    await store.create(LAYOUT.idgen, make_parents=True)
    for _ in range(ATTEMPTS_MAX):
        store.fail_next(MetadataOutcomeUnknown(), matching=lambda operation, _path: operation == "create")
    with pytest.raises(MetadataUnavailable):
        await ids.next_id()


async def test_long_ids_begin_when_the_short_counter_ends() -> None:
    tree = MemoryTree()
    store, other = tree.connect(), tree.connect()
    ids, others = LedgerIdGenerator(store, LAYOUT), LedgerIdGenerator(other, LAYOUT)
    await ids.next_id()
    exhaust(tree, LAYOUT.idgen, creates=2**31 - 2)
    assert await ids.next_id() == 2**31 - 2
    assert await store.exists(LAYOUT.idgen_long) is None
    assert await ids.next_id() == 1 << 32
    assert await others.next_id() == (1 << 32) + 1
    await ids.close()
    await others.close()
    assert await store.children(LAYOUT.idgen_long) == ["HOB-0000000001"]
    assert await store.children(LAYOUT.hob(1)) == []


async def test_a_negative_counter_starts_long_ids() -> None:
    """ZooKeeper's counter is a 32-bit integer that wraps."""
    tree = MemoryTree()
    ids = LedgerIdGenerator(tree.connect(), LAYOUT)
    await ids.next_id()
    exhaust(tree, LAYOUT.idgen, creates=-(2**31))
    assert await ids.next_id() == 1 << 32


async def test_the_sixth_long_id_is_that_of_the_specification(store: MetadataStore) -> None:
    await store.create(LAYOUT.idgen_long, make_parents=True)
    ids = LedgerIdGenerator(store, LAYOUT)
    assert [await ids.next_id() for _ in range(6)][-1] == 4_294_967_301


async def test_high_bits_advance_and_three_directories_are_kept() -> None:
    tree = MemoryTree()
    store = tree.connect()
    ids = LedgerIdGenerator(store, LAYOUT)
    await store.create(LAYOUT.idgen_long, make_parents=True)
    for high in range(1, 6):
        assert await ids.next_id() == high << 32
        await ids.close()
        exhaust(tree, LAYOUT.hob(high), creates=2**31 - 1)
    assert await ids.next_id() == 6 << 32
    await ids.close()
    assert await store.children(LAYOUT.idgen_long) == [f"HOB-{high:010d}" for high in (4, 5, 6)]


async def test_a_generator_uses_long_ids_as_soon_as_another_one_does(
    store: MetadataStore, other: MetadataStore
) -> None:
    ids = LedgerIdGenerator(store, LAYOUT)
    assert await ids.next_id() == 0
    await other.create(LAYOUT.idgen_long)
    assert await ids.next_id() == 1 << 32


async def test_next_id_does_not_wait_for_the_deletion_of_used_nodes(store: MetadataStore) -> None:
    ids = LedgerIdGenerator(store, LAYOUT)
    await ids.next_id()
    assert ids._cleaning
    await until(lambda: not ids._cleaning)
