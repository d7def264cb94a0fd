"""Lists of ledgers: ids within a range, metadata in the order of the ids, and errors of single ledgers."""

import asyncio
import random

import pytest
from bindery_core.errors import Corrupt, MetadataUnavailable, NoSuchLedger
from bindery_core.formats.ledger_metadata import LedgerMetadata, Segment
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.ledgers.ledger_manager import LedgerManager
from bindery_metadata.stores.memory import MemoryStore, MemoryTree
from bindery_metadata.stores.versioned import Versioned
from bindery_spark.sources.filters import Wanted
from bindery_spark.sources.listing import ReadLedger, ledger_ids, read_ledgers

LAYOUT = LedgersLayout()
METADATA = LedgerMetadata(
    ensemble_size=1, write_quorum=1, ack_quorum=1, segments=(Segment(EntryId(0), (BookieId("a"),)),)
)


@pytest.fixture
def store() -> MemoryStore:
    return MemoryTree().connect()


async def manager_with(store: MemoryStore, *ids: int) -> LedgerManager:
    await store.create(LAYOUT.root, b"", make_parents=True)
    manager = LedgerManager(store, LAYOUT, randomness=random.Random(2))
    for ledger_id in ids:
        await manager.create_with_id(LedgerId(ledger_id), METADATA)
    return manager


async def read(manager: LedgerManager, *ids: int) -> list[ReadLedger]:
    return [each async for each in read_ledgers(manager, [LedgerId(each) for each in ids])]


async def test_the_ids_of_a_range_are_ascending(store: MemoryStore) -> None:
    manager = await manager_with(store, 12_345, 3, 8, 5)
    assert await ledger_ids(manager, Wanted()) == [3, 5, 8, 12_345]
    assert await ledger_ids(manager, Wanted(first_ledger=5, last_ledger=8)) == [5, 8]


async def test_filters_that_exclude_every_ledger_read_nothing(store: MemoryStore) -> None:
    manager = await manager_with(store, 3)
    store.fail_next(MetadataUnavailable("unused"))
    assert await ledger_ids(manager, Wanted(is_empty=True)) == []


async def test_a_list_is_complete_or_fails(store: MemoryStore) -> None:
    manager = await manager_with(store, 3)
    store.fail_next(MetadataUnavailable("no response"))
    with pytest.raises(MetadataUnavailable):
        await ledger_ids(manager, Wanted())


async def test_ledgers_are_read_in_the_order_of_the_ids_without_deleted_ones(store: MemoryStore) -> None:
    manager = await manager_with(store, 3, 5, 8)
    found = await read(manager, 8, 4, 3)
    assert [(each.ledger_id, each.problem) for each in found] == [(8, ""), (3, "")]
    assert [each.found.value.ensemble_size for each in found if each.found is not None] == [1, 1]
    assert await read(manager) == []
    assert await read(manager, 4) == []


async def test_unreadable_metadata_is_a_problem_of_that_ledger_only(store: MemoryStore) -> None:
    manager = await manager_with(store, 3, 5)
    await store.set(LAYOUT.ledger(LedgerId(3)), b"garbage", version=None)
    bad, good = await read(manager, 3, 5)
    assert (bad.ledger_id, bad.found, good.ledger_id, good.problem) == (3, None, 5, "")
    assert bad.problem != ""


class Answers:
    """A manager whose answers are scripted. Counts concurrent reads."""

    def __init__(self, errors: dict[int, Exception]) -> None:
        self._errors = errors
        self._open = 0
        self.open_max = 0
        self.asked: list[int] = []

    async def read(self, ledger_id: LedgerId) -> Versioned[LedgerMetadata]:
        self.asked.append(ledger_id)
        self._open += 1
        self.open_max = max(self.open_max, self._open)
        await asyncio.sleep(0)
        self._open -= 1
        if error := self._errors.get(ledger_id):
            raise error
        return Versioned(METADATA, 1, 0)


async def test_errors_other_than_an_unavailable_store_belong_to_their_ledger() -> None:
    answers = Answers({1: NoSuchLedger("gone"), 2: Corrupt("not metadata")})
    found = await read(answers, 1, 2, 3)  # type: ignore[arg-type]
    assert found == [ReadLedger(LedgerId(2), None, "not metadata"), ReadLedger(LedgerId(3), Versioned(METADATA, 1, 0))]
    with pytest.raises(MetadataUnavailable):
        await read(Answers({2: MetadataUnavailable("no response")}), 1, 2, 3)  # type: ignore[arg-type]


async def test_at_most_64_ledgers_are_read_at_a_time() -> None:
    answers = Answers({})
    found = await read(answers, *range(130))  # type: ignore[arg-type]
    assert [each.ledger_id for each in found] == list(range(130))
    assert (answers.open_max, answers.asked) == (64, list(range(130)))


async def test_the_next_batch_is_read_only_when_it_is_needed() -> None:
    answers = Answers({})
    ledgers = read_ledgers(answers, [LedgerId(each) for each in range(65)])  # type: ignore[arg-type]
    assert (await anext(aiter(ledgers))).ledger_id == 0
    assert len(answers.asked) == 64
