"""Records of verified ledgers share nodes, are replaced by newer records, and are removed with their ledgers."""

import asyncio

import pytest
from bindery_core.ids import LedgerId
from bindery_metadata.ledgers.verified_records import LEDGERS_PER_NODE, Verified, VerifiedRecords
from bindery_metadata.stores.store import MetadataStore


def record(ledger_id: int, *, level: str = "deep", at: int = 1_000, version: int = 3) -> Verified:
    return Verified(LedgerId(ledger_id), level, at, "r1", version)


@pytest.fixture
def records(store: MetadataStore) -> VerifiedRecords:
    return VerifiedRecords(store)


async def all_of(records: VerifiedRecords) -> list[Verified]:
    return [each async for each in records.list()]


async def test_records_are_read_one_by_one_and_all_in_order(records: VerifiedRecords) -> None:
    assert await all_of(records) == []
    assert await records.get(LedgerId(7)) is None
    far = 5 * LEDGERS_PER_NODE
    await records.put_all([record(far), record(7), record(11 * LEDGERS_PER_NODE)])
    assert [each.ledger_id for each in await all_of(records)] == [7, far, 11 * LEDGERS_PER_NODE]
    assert await records.get(LedgerId(far)) == record(far)


async def test_the_record_of_a_deleted_ledger_is_removed_and_an_empty_node_with_it(
    store: MetadataStore, records: VerifiedRecords
) -> None:
    await records.put_all([record(1), record(2)])
    await records.put_all([], gone=[1, 900_000])
    assert await all_of(records) == [record(2)]
    await records.put_all([], gone=[2])
    assert await store.children("/bindery/audit/verified") == []


@pytest.mark.parametrize(
    ("standing", "news", "kept"),
    [
        (record(1), record(1, at=2_000), "news"),
        (record(1), record(1, at=500), "standing"),
        (record(1), record(1, at=2_000, level="quick"), "standing"),
        (record(1, level="quick"), record(1, at=2_000), "news"),
        (record(1), record(1, at=2_000, level="quick", version=4), "news"),
    ],
    ids=["later", "earlier", "less deep", "deeper", "of other metadata"],
)
async def test_the_record_that_proves_more_is_kept(
    records: VerifiedRecords, standing: Verified, news: Verified, kept: str
) -> None:
    await records.put_all([standing])
    await records.put_all([news])
    assert await all_of(records) == [news if kept == "news" else standing]


async def test_concurrent_writes_lose_no_record(records: VerifiedRecords, other: MetadataStore) -> None:
    await asyncio.gather(
        *(records.put_all([record(i)]) for i in range(5)),
        VerifiedRecords(other).put_all([record(i) for i in range(5, 9)]),
    )
    assert [each.ledger_id for each in await all_of(records)] == list(range(9))


@pytest.mark.parametrize("data", [b"{", b'{"x": ["deep", 1, "r", 2]}', b'{"1": ["deep", "late", "r", 2]}', b"[]"])
async def test_an_unreadable_node_counts_as_empty_and_is_overwritten(
    store: MetadataStore, records: VerifiedRecords, data: bytes
) -> None:
    await store.create("/bindery/audit/verified/0", data, make_parents=True)
    assert await all_of(records) == []
    await records.put_all([record(1)])
    assert await all_of(records) == [record(1)]
