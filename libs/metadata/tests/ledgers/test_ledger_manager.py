"""Ledger metadata: creation, compare-and-set, lost responses, complete lists."""

import asyncio
import random

import pytest
from bindery_core.errors import (
    AlreadyExists,
    BadVersion,
    Corrupt,
    MetadataOutcomeUnknown,
    MetadataUnavailable,
    NoSuchLedger,
    NoSuchNode,
    VersionConflict,
)
from bindery_core.formats import ledger_metadata_codec as codec
from bindery_core.formats.ledger_metadata import LedgerMetadata, LedgerState, Segment
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_metadata.layout.layout import BinderyLayout, LedgersLayout
from bindery_metadata.layout.znode_path import parent_of
from bindery_metadata.ledgers.closing_records import ClosingCause, ClosingRecords
from bindery_metadata.ledgers.ledger_manager import UNKNOWN_MAX, LedgerManager
from bindery_metadata.stores.memory import MemoryStore, MemoryTree
from bindery_metadata.stores.store import MetadataStore
from bindery_metadata.stores.versioned import Versioned
from store_environments import StoreEnvironment, until

LAYOUT = LedgersLayout()
BOOKIES = tuple(BookieId(f"b{number}:3181") for number in range(3))
OPEN = LedgerMetadata(ensemble_size=3, write_quorum=2, ack_quorum=2, segments=(Segment(EntryId(0), BOOKIES),))
FIVE = LedgerId(5)


def manager_of(store: MetadataStore, *, seed: int = 1) -> LedgerManager:
    return LedgerManager(store, LAYOUT, randomness=random.Random(seed))


def with_custom(metadata: LedgerMetadata, **custom: bytes) -> LedgerMetadata:
    return metadata.with_changes(custom={**metadata.custom, **custom})


def plain(metadata: LedgerMetadata) -> LedgerMetadata:
    return metadata.with_changes(c_token=None)


@pytest.fixture
def ledgers(store: MetadataStore) -> LedgerManager:
    return manager_of(store)


@pytest.fixture
def others(other: MetadataStore) -> LedgerManager:
    return manager_of(other, seed=2)


# --- create -----------------------------------------------------------------------------------------------------------


async def test_a_created_ledger_is_read_back(ledgers: LedgerManager, store: MetadataStore) -> None:
    ledger_id, created = await ledgers.create(OPEN)
    assert (ledger_id, created.version) == (0, 0)
    found = await ledgers.read(ledger_id)
    assert (found.value, found.version) == (created.value, 0)
    assert plain(found.value) == OPEN
    node = await store.get("/ledgers/00/0000/L0000")
    assert codec.decode(node.data) == found.value
    assert found.created_ms == node.stat.ctime_ms


async def test_a_creation_carries_a_random_token(ledgers: LedgerManager) -> None:
    tokens = {(await ledgers.create(OPEN))[1].value.c_token for _ in range(3)}
    assert len(tokens) == 3
    assert all(token is not None and 0 <= token < 2**63 for token in tokens)


async def test_a_taken_id_is_skipped(ledgers: LedgerManager, others: LedgerManager) -> None:
    await others.create_with_id(LedgerId(0), OPEN)
    ledger_id, _ = await ledgers.create(OPEN)
    assert ledger_id == 1


async def test_a_chosen_id_is_used_or_refused(ledgers: LedgerManager, others: LedgerManager) -> None:
    for ledger_id in (LedgerId(7), LedgerId(2**62)):
        await ledgers.create_with_id(ledger_id, OPEN)
        assert plain((await others.read(ledger_id)).value) == OPEN
        with pytest.raises(AlreadyExists) as raised:
            await others.create_with_id(ledger_id, OPEN)
        assert raised.value.facts["ledger_id"] == ledger_id


@pytest.mark.parametrize("applied", [True, False], ids=["done", "not done"])
async def test_a_creation_whose_response_is_lost_is_resolved(
    environment: StoreEnvironment, store: MetadataStore, ledgers: LedgerManager, applied: bool
) -> None:
    await ledgers.create_with_id(LedgerId(4), OPEN)  # creates the parents, so that the lost write is the ledger's
    environment.lose_next_write(store, applied=applied)
    created = await ledgers.create_with_id(FIVE, OPEN)
    assert created.version == 0
    assert (await ledgers.read(FIVE)).value == created.value


async def test_a_lost_response_is_not_a_success_if_another_client_has_the_id() -> None:
    tree = MemoryTree()
    store = tree.connect()
    ledgers, others = manager_of(store), manager_of(tree.connect(), seed=2)
    await others.create_with_id(FIVE, OPEN)
    store.lose_next_write(applied=False)
    with pytest.raises(AlreadyExists):
        await ledgers.create_with_id(FIVE, OPEN)


async def test_a_creation_that_cannot_be_resolved_stays_unknown() -> None:
    store = MemoryTree().connect()
    ledgers = manager_of(store)
    await ledgers.create_with_id(LedgerId(4), OPEN)
    store.lose_next_write(applied=True)
    store.fail_next(MetadataUnavailable(), matching=lambda operation, _: operation == "sync")
    with pytest.raises(MetadataOutcomeUnknown):
        await ledgers.create_with_id(FIVE, OPEN)


async def test_repeatedly_lost_responses_raise_an_error() -> None:
    store = MemoryTree().connect()
    ledgers = manager_of(store)
    await ledgers.create_with_id(LedgerId(4), OPEN)
    for _ in range(UNKNOWN_MAX):
        store.lose_next_write(applied=False)
    with pytest.raises(MetadataOutcomeUnknown):
        await ledgers.create_with_id(FIVE, OPEN)


async def test_concurrent_creations_get_different_ids(ledgers: LedgerManager, others: LedgerManager) -> None:
    created = await asyncio.gather(*(manager.create(OPEN) for _ in range(15) for manager in (ledgers, others)))
    assert sorted(ledger_id for ledger_id, _ in created) == list(range(30))


# --- read and write ---------------------------------------------------------------------------------------------------


async def test_a_missing_ledger_raises_no_such_ledger(ledgers: LedgerManager) -> None:
    for attempt in (
        ledgers.read(FIVE),
        ledgers.write(FIVE, OPEN, version=0),
        ledgers.update(FIVE, lambda metadata: metadata),
    ):
        with pytest.raises(NoSuchLedger) as raised:
            await attempt
        assert raised.value.facts["ledger_id"] == FIVE


async def test_invalid_metadata_raises_corrupt(ledgers: LedgerManager, store: MetadataStore) -> None:
    await store.create(LAYOUT.ledger(FIVE), b"rubbish", make_parents=True)
    with pytest.raises(Corrupt) as raised:
        await ledgers.read(FIVE)
    assert raised.value.facts["ledger_id"] == FIVE


async def test_metadata_of_an_unknown_version_raises_bad_version(ledgers: LedgerManager, store: MetadataStore) -> None:
    await store.create(LAYOUT.ledger(FIVE), b"BookieMetadataFormatVersion\t9\n", make_parents=True)
    with pytest.raises(BadVersion):
        await ledgers.read(FIVE)


async def test_a_write_needs_the_current_version_and_drops_the_token(
    ledgers: LedgerManager, others: LedgerManager
) -> None:
    created = await ledgers.create_with_id(FIVE, OPEN)
    written = await ledgers.write(FIVE, with_custom(created.value, a=b"1"), version=0)
    assert (written.version, written.value.c_token) == (1, 0)
    assert (await others.read(FIVE)).value == written.value
    assert plain(written.value) == with_custom(OPEN, a=b"1")
    with pytest.raises(VersionConflict):
        await others.write(FIVE, OPEN, version=0)
    assert (await others.read(FIVE)).version == 1


@pytest.mark.parametrize("applied", [True, False], ids=["done", "not done"])
async def test_a_write_whose_response_is_lost_is_resolved(
    environment: StoreEnvironment, store: MetadataStore, ledgers: LedgerManager, applied: bool
) -> None:
    await ledgers.create_with_id(FIVE, OPEN)
    environment.lose_next_write(store, applied=applied)
    if applied:
        assert (await ledgers.write(FIVE, with_custom(OPEN, a=b"1"), version=0)).version == 1
    else:
        with pytest.raises(MetadataUnavailable):
            await ledgers.write(FIVE, with_custom(OPEN, a=b"1"), version=0)
    assert (await ledgers.read(FIVE)).version == (1 if applied else 0)


async def test_a_lost_write_that_another_client_overwrote_is_a_conflict() -> None:
    """It is unknown whether the lost write was applied before the other write, so the caller must read again."""
    tree = MemoryTree()
    store, other = tree.connect(), tree.connect()
    ledgers, others = manager_of(store), manager_of(other, seed=2)
    await ledgers.create_with_id(FIVE, OPEN)
    store.lose_next_write(applied=False)
    writing = asyncio.create_task(ledgers.write(FIVE, with_custom(OPEN, mine=b"1"), version=0))
    await others.write(FIVE, with_custom(OPEN, theirs=b"1"), version=0)
    with pytest.raises(VersionConflict):
        await writing


async def test_a_write_that_cannot_be_resolved_stays_unknown() -> None:
    store = MemoryTree().connect()
    ledgers = manager_of(store)
    await ledgers.create_with_id(FIVE, OPEN)
    store.lose_next_write(applied=True)
    store.fail_next(MetadataUnavailable(), matching=lambda operation, _: operation == "get")
    with pytest.raises(MetadataOutcomeUnknown):
        await ledgers.write(FIVE, OPEN, version=0)


# --- update -----------------------------------------------------------------------------------------------------------


async def test_concurrent_updates_all_take_effect(ledgers: LedgerManager, others: LedgerManager) -> None:
    await ledgers.create_with_id(FIVE, OPEN)
    await asyncio.gather(
        *(
            manager.update(FIVE, lambda metadata, key=f"{number}-{number_of}": with_custom(metadata, **{key: b""}))
            for number in range(8)
            for number_of, manager in enumerate((ledgers, others))
        )
    )
    found = await ledgers.read(FIVE)
    assert (len(found.value.custom), found.version) == (16, 16)


async def test_an_update_that_is_not_needed_writes_nothing(ledgers: LedgerManager) -> None:
    await ledgers.create_with_id(FIVE, OPEN)
    assert (await ledgers.update(FIVE, lambda _: None)).version == 0
    assert (await ledgers.read(FIVE)).version == 0


async def test_an_error_of_the_transform_ends_the_update(ledgers: LedgerManager) -> None:
    await ledgers.create_with_id(FIVE, OPEN)

    def refuse(_: LedgerMetadata) -> LedgerMetadata:
        raise BadVersion("not like this")

    with pytest.raises(BadVersion):
        await ledgers.update(FIVE, refuse)


async def test_known_metadata_saves_the_read_and_may_be_stale(ledgers: LedgerManager) -> None:
    stale = await ledgers.create_with_id(FIVE, OPEN)
    await ledgers.write(FIVE, with_custom(OPEN, a=b"1"), version=0)
    seen: list[LedgerMetadata] = []

    def add(metadata: LedgerMetadata) -> LedgerMetadata:
        seen.append(plain(metadata))
        return with_custom(metadata, b=b"2")

    updated = await ledgers.update(FIVE, add, known=stale)
    assert seen == [OPEN, with_custom(OPEN, a=b"1")]
    assert plain(updated.value) == with_custom(OPEN, a=b"1", b=b"2")


@pytest.mark.parametrize("applied", [True, False], ids=["done", "not done"])
async def test_an_update_is_applied_despite_a_lost_response(
    environment: StoreEnvironment, store: MetadataStore, ledgers: LedgerManager, applied: bool
) -> None:
    """The update is applied exactly once, whether the first attempt was applied or not."""
    await ledgers.create_with_id(FIVE, OPEN)
    environment.lose_next_write(store, applied=applied)

    def close(metadata: LedgerMetadata) -> LedgerMetadata | None:
        if metadata.state is LedgerState.CLOSED:
            return None
        return metadata.with_changes(state=LedgerState.CLOSED, last_entry_id=EntryId(9), length=100)

    updated = await ledgers.update(FIVE, close)
    assert (updated.version, updated.value.state) == (1, LedgerState.CLOSED)
    assert (await ledgers.read(FIVE)).value == updated.value


async def test_an_update_of_a_ledger_that_is_deleted_meanwhile_raises_no_such_ledger(
    ledgers: LedgerManager, others: LedgerManager
) -> None:
    known = await ledgers.create_with_id(FIVE, OPEN)
    await others.delete(FIVE)
    with pytest.raises(NoSuchLedger):
        await ledgers.update(FIVE, lambda metadata: with_custom(metadata, a=b""), known=known)


# --- delete -----------------------------------------------------------------------------------------------------------


async def test_a_deletion_removes_empty_parents(ledgers: LedgerManager, store: MetadataStore) -> None:
    for ledger_id in (LedgerId(1), LedgerId(2), LedgerId(10_001), LedgerId(2**40)):
        await ledgers.create_with_id(ledger_id, OPEN)
    await ledgers.delete(LedgerId(1))
    assert await store.children("/ledgers/00/0000") == ["L0002"]
    await ledgers.delete(LedgerId(2))
    assert await store.children("/ledgers/00") == ["0001"]
    await ledgers.delete(LedgerId(10_001))
    await ledgers.delete(LedgerId(2**40))
    assert await store.children("/ledgers") == []


async def test_deleting_a_missing_ledger_succeeds_and_leaves_other_ledgers(
    ledgers: LedgerManager, store: MetadataStore
) -> None:
    await ledgers.create_with_id(LedgerId(6), OPEN)
    await ledgers.delete(FIVE)
    await ledgers.create_with_id(FIVE, OPEN)
    for _ in range(2):
        await ledgers.delete(FIVE)
        with pytest.raises(NoSuchLedger):
            await ledgers.read(FIVE)
        assert await store.children("/ledgers/00/0000") == ["L0006"]


async def test_a_deletion_with_a_version_keeps_a_ledger_that_changed_since(ledgers: LedgerManager) -> None:
    created = await ledgers.create_with_id(FIVE, OPEN)
    changed = await ledgers.update(FIVE, lambda metadata: metadata.with_changes(state=LedgerState.IN_RECOVERY))
    with pytest.raises(VersionConflict):
        await ledgers.delete(FIVE, version=created.version)
    await ledgers.delete(FIVE, version=changed.version)
    await ledgers.delete(FIVE, version=changed.version)


async def test_a_deletion_removes_the_closing_record(
    ledgers: LedgerManager, others: LedgerManager, store: MetadataStore
) -> None:
    notes, six = ClosingRecords(store), LedgerId(6)
    for ledger_id in (FIVE, six):
        await ledgers.create_with_id(ledger_id, OPEN)
        await notes.add(ledger_id, ClosingCause.RECOVERED)
    with pytest.raises(VersionConflict):
        await ledgers.delete(FIVE, version=9)
    assert await notes.ledger_ids() == [5, 6]
    await others.delete(FIVE)
    assert await notes.ledger_ids() == [6]
    await ledgers.delete(six)
    await ledgers.delete(six)
    assert await store.children("/bindery/recovery/closings") == []


@pytest.mark.parametrize("what", ["note", "directory"])
async def test_a_closing_record_that_cannot_be_removed_is_left_to_the_auditor(what: str) -> None:
    store = MemoryTree().connect()
    ledgers, notes = manager_of(store), ClosingRecords(store)
    await ledgers.create_with_id(FIVE, OPEN)
    await notes.add(FIVE, ClosingCause.RECOVERED)
    note = BinderyLayout().recovery_closing(FIVE)
    path = note if what == "note" else parent_of(note)
    store.fail_next(MetadataUnavailable("away"), matching=lambda _, asked: asked == path)
    await ledgers.delete(FIVE)
    with pytest.raises(NoSuchLedger):
        await ledgers.read(FIVE)
    assert await notes.ledger_ids() == ([5] if what == "note" else [])


@pytest.mark.parametrize("applied", [True, False], ids=["done", "not done"])
async def test_a_deletion_whose_response_is_lost_is_repeated(
    environment: StoreEnvironment, store: MetadataStore, ledgers: LedgerManager, applied: bool
) -> None:
    await ledgers.create_with_id(FIVE, OPEN)
    environment.lose_next_write(store, applied=applied)
    await ledgers.delete(FIVE)
    with pytest.raises(NoSuchLedger):
        await ledgers.read(FIVE)
    assert await store.children("/ledgers") == []


async def test_concurrent_creations_and_deletions_under_one_parent_succeed(
    ledgers: LedgerManager, others: LedgerManager
) -> None:
    async def come_and_go(manager: LedgerManager, ledger_id: LedgerId) -> None:
        for _ in range(10):
            await manager.create_with_id(ledger_id, OPEN)
            await manager.delete(ledger_id)

    await asyncio.gather(come_and_go(ledgers, LedgerId(1)), come_and_go(others, LedgerId(2)))
    await ledgers.create_with_id(LedgerId(3), OPEN)
    assert [ledger_id async for ledger_id in ledgers.list()] == [3]


# --- list -------------------------------------------------------------------------------------------------------------


async def test_the_list_is_ascending_over_short_and_long_ids(ledgers: LedgerManager, store: MetadataStore) -> None:
    wanted = [0, 9, 10, 9_999, 10_000, 99_999_999, 100_000_000, 2**31 - 2, 2**31 - 1, 2**31, 4294967301, 2**63 - 1]
    for ledger_id in sorted(wanted, key=str):
        await ledgers.create_with_id(LedgerId(ledger_id), OPEN)
    for special in ("available/readonly", "cookies", "LAYOUT", "INSTANCEID", "underreplication/ledgers", "idgen-long"):
        await store.create(f"/ledgers/{special}", make_parents=True)
    await store.create("/ledgers/00/0000/stray")
    assert [ledger_id async for ledger_id in ledgers.list()] == wanted


async def test_a_cluster_without_ledgers_lists_nothing(ledgers: LedgerManager, store: MetadataStore) -> None:
    await store.create("/ledgers")
    assert [ledger_id async for ledger_id in ledgers.list()] == []


async def test_a_missing_tree_is_an_error_and_not_an_empty_list(ledgers: LedgerManager) -> None:
    with pytest.raises(NoSuchNode):
        [ledger_id async for ledger_id in ledgers.list()]


@pytest.mark.parametrize("depth", range(7))
async def test_an_outage_at_any_point_of_the_list_is_an_error(depth: int) -> None:
    """Garbage collection deletes ledgers that are not listed, so a list must never be incomplete."""
    store = MemoryTree().connect()
    ledgers = manager_of(store)
    for ledger_id in (LedgerId(1), LedgerId(20_000), LedgerId(2**40)):
        await ledgers.create_with_id(ledger_id, OPEN)
    calls = 0

    def at_depth(operation: str, _path: str) -> bool:
        nonlocal calls
        calls += operation == "children"
        return operation == "children" and calls > depth

    store.fail_next(MetadataUnavailable(), matching=at_depth)
    with pytest.raises(MetadataUnavailable):
        [ledger_id async for ledger_id in ledgers.list()]


# --- watch ------------------------------------------------------------------------------------------------------------


class Follower:
    def __init__(self, manager: LedgerManager, ledger_id: LedgerId) -> None:
        self.seen: list[int | None] = []
        self.stop = manager.watch(ledger_id, self._hear)

    def _hear(self, metadata: Versioned[LedgerMetadata] | None) -> None:
        self.seen.append(metadata.version if metadata else None)


async def test_a_watcher_receives_the_current_metadata_each_change_and_the_deletion(
    ledgers: LedgerManager, others: LedgerManager
) -> None:
    await ledgers.create_with_id(FIVE, OPEN)
    follower = Follower(ledgers, FIVE)
    await until(lambda: follower.seen == [0])
    for version in range(3):
        await others.write(FIVE, with_custom(OPEN, n=b"%d" % version), version=version)
        await until(lambda version=version: follower.seen[-1] == version + 1)
    await others.delete(FIVE)
    await until(lambda: follower.seen == [0, 1, 2, 3, None])
    await ledgers.close()


@pytest.mark.parametrize("fault", ["suspend", "expire"])
async def test_a_watcher_continues_through_an_outage_and_misses_no_change(
    environment: StoreEnvironment, store: MetadataStore, ledgers: LedgerManager, others: LedgerManager, fault: str
) -> None:
    await ledgers.create_with_id(FIVE, OPEN)
    follower = Follower(ledgers, FIVE)
    await until(lambda: follower.seen == [0])
    if fault == "suspend":
        await environment.suspend(store)
        await others.write(FIVE, OPEN, version=0)
        await environment.resume(store)
    else:
        await environment.expire(store)
        await others.write(FIVE, OPEN, version=0)
    await until(lambda: follower.seen == [0, 1])
    await ledgers.close()


async def test_a_watcher_of_a_missing_ledger_receives_none(ledgers: LedgerManager) -> None:
    follower = Follower(ledgers, FIVE)
    await until(lambda: follower.seen == [None])


async def test_a_stopped_watcher_is_not_called(ledgers: LedgerManager) -> None:
    await ledgers.create_with_id(FIVE, OPEN)
    follower, control = Follower(ledgers, FIVE), Follower(ledgers, FIVE)
    await until(lambda: follower.seen == control.seen == [0])
    follower.stop()
    await ledgers.write(FIVE, OPEN, version=0)
    await until(lambda: control.seen == [0, 1])
    assert follower.seen == [0]
    await ledgers.close()
    assert not ledgers._followers


async def test_a_watcher_waits_while_the_metadata_is_unreadable(ledgers: LedgerManager, store: MetadataStore) -> None:
    await store.create(LAYOUT.ledger(FIVE), b"rubbish", make_parents=True)
    follower = Follower(ledgers, FIVE)
    await store.sync("/")
    await store.set(LAYOUT.ledger(FIVE), codec.encode(OPEN), version=0)
    await until(lambda: follower.seen == [1])
    await ledgers.close()


async def test_a_watcher_reads_again_while_the_store_is_unavailable() -> None:
    store = MemoryTree().connect()
    assert isinstance(store, MemoryStore)
    ledgers = manager_of(store)
    await ledgers.create_with_id(FIVE, OPEN)
    store.fail_next(MetadataUnavailable(), matching=lambda operation, _: operation == "get")
    follower = Follower(ledgers, FIVE)
    await until(lambda: follower.seen == [0])
    await ledgers.close()
