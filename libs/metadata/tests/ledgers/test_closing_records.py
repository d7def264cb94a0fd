"""Closing records are created once, listed, and removed only by the leading auditor."""

import asyncio

import pytest
from bindery_core.errors import BadRequest, MetadataOutcomeUnknown, NotLeader
from bindery_core.ids import ID_MAX, LedgerId
from bindery_metadata.coordination.election import Leadership
from bindery_metadata.layout.layout import BinderyLayout, LedgersLayout
from bindery_metadata.ledgers.closing_records import ClosingCause, ClosingRecord, ClosingRecords
from bindery_metadata.stores.memory import MemoryTree
from bindery_metadata.stores.store import MetadataStore
from store_environments import StoreEnvironment

SEVEN, FAR = LedgerId(7), LedgerId(4294967301)
ROOT = "/bindery/recovery/closings"


@pytest.fixture
def notes(store: MetadataStore) -> ClosingRecords:
    return ClosingRecords(store)


@pytest.fixture
def others(other: MetadataStore) -> ClosingRecords:
    return ClosingRecords(other)


async def leader(store: MetadataStore) -> Leadership:
    election = LedgersLayout().auditor_election
    vote = await store.create(f"{election}/V_", ephemeral=True, sequential=True, make_parents=True)
    return Leadership(store, name="n", vote_path=vote, version=0, session_id=store.session_id)


async def test_a_record_is_json_with_the_creation_time_of_its_node(notes: ClosingRecords, store: MetadataStore) -> None:
    assert await notes.get(SEVEN) is None
    await notes.add(SEVEN, ClosingCause.RECOVERED)
    node = await store.get(f"{ROOT}/0/0000000000000000007")
    assert node.data == b'{"cause":"recovered"}'
    assert await notes.get(SEVEN) == ClosingRecord(SEVEN, ClosingCause.RECOVERED, node.stat.ctime_ms)


async def test_a_second_add_keeps_the_first_record(notes: ClosingRecords, others: ClosingRecords) -> None:
    await asyncio.gather(notes.add(SEVEN, ClosingCause.DEGRADED), others.add(FAR, ClosingCause.IN_FLIGHT))
    await others.add(SEVEN, ClosingCause.RECOVERED)
    await asyncio.gather(*((notes, others)[n % 2].add(LedgerId(8 + n % 3), ClosingCause.RECOVERED) for n in range(12)))
    found = await notes.get_all(await others.ledger_ids())
    assert [(note.ledger_id, note.cause) for note in found] == [
        (7, ClosingCause.DEGRADED),
        *((n, ClosingCause.RECOVERED) for n in (8, 9, 10)),
        (FAR, ClosingCause.IN_FLIGHT),
    ]


async def test_records_are_listed_by_ledger_and_removed_with_their_directory(
    notes: ClosingRecords, store: MetadataStore
) -> None:
    ids = [7, 9_999, 10_000, 99_999, 4294967301, ID_MAX]
    assert await notes.ledger_ids() == []
    for ledger_id in reversed(ids):
        await notes.add(LedgerId(ledger_id), ClosingCause.RECOVERED)
    for strange in ("x", "0/x", "0/0000000000000000008x", "5", "0/9999999999999999999", "\u0661"):
        await store.create(f"{ROOT}/{strange}")
    assert await notes.ledger_ids() == ids
    guard = await leader(store)
    await notes.remove(FAR, guard=guard)
    await notes.remove(FAR, guard=guard)
    await notes.remove(LedgerId(9_999), guard=guard)
    assert await notes.ledger_ids() == [one for one in ids if one not in (FAR, 9_999)]
    assert await notes.get_all([FAR, SEVEN]) == [await notes.get(SEVEN)]
    assert "429496" not in await store.children(ROOT)
    await notes.add(FAR, ClosingCause.RECOVERED)
    assert FAR in await notes.ledger_ids()


async def test_an_unreadable_record_counts_as_a_record(notes: ClosingRecords, store: MetadataStore) -> None:
    for ledger_id, data in ((7, b""), (8, b'{"cause":"of a later version"}'), (9, b'{"cause":"recovered","more":1}')):
        await store.create(f"{ROOT}/0/{ledger_id:019d}", data, make_parents=True)
    found = await notes.get_all(await notes.ledger_ids())
    causes = [ClosingCause.UNKNOWN, ClosingCause.UNKNOWN, ClosingCause.RECOVERED]
    assert [(note.ledger_id, note.cause) for note in found] == list(zip((7, 8, 9), causes, strict=True))
    assert all(note.noted_at_ms > 0 for note in found)


@pytest.mark.parametrize("applied", [True, False], ids=["done", "not done"])
async def test_an_add_whose_response_is_lost_is_repeated(
    environment: StoreEnvironment, notes: ClosingRecords, store: MetadataStore, applied: bool
) -> None:
    await notes.add(LedgerId(1), ClosingCause.RECOVERED)  # creates its directory
    environment.lose_next_write(store, applied=applied)
    await notes.add(SEVEN, ClosingCause.RECOVERED)
    assert await notes.ledger_ids() == [1, 7]


async def test_an_add_without_any_response_has_an_unknown_outcome() -> None:
    store = MemoryTree().connect()
    for _ in range(5):
        store.lose_next_write(applied=False)
    with pytest.raises(MetadataOutcomeUnknown):
        await ClosingRecords(store).add(SEVEN, ClosingCause.RECOVERED)


async def test_a_former_leader_removes_no_record(
    environment: StoreEnvironment, notes: ClosingRecords, others: ClosingRecords, store: MetadataStore
) -> None:
    leadership = await leader(store)
    await notes.add(SEVEN, ClosingCause.RECOVERED)
    await environment.expire(store)
    with pytest.raises(NotLeader):
        await notes.remove(SEVEN, guard=leadership)
    assert await others.ledger_ids() == [SEVEN]


@pytest.mark.parametrize("ledger_id", [-1, ID_MAX + 1])
def test_ids_out_of_range_have_no_closing_record(ledger_id: int) -> None:
    with pytest.raises(BadRequest):
        BinderyLayout().recovery_closing(LedgerId(ledger_id))
