"""Records of recovery are written by the leader and the workers, skipped if unreadable, and limited in number."""

import asyncio

import pytest
from bindery_core.errors import BadRequest, BinderyError, MetadataUnavailable, NotLeader, VersionConflict
from bindery_core.ids import ID_MAX, LedgerId
from bindery_metadata.coordination.election import Leadership
from bindery_metadata.layout.layout import BinderyLayout, LedgersLayout
from bindery_metadata.recovery import recovery_records as module
from bindery_metadata.recovery.recovery_records import (
    HISTORY_MAX,
    HISTORY_PRUNE_EVERY,
    NOT_STORED,
    HistoryEvent,
    Obstacle,
    Pause,
    Reason,
    RecoveryRecord,
    RecoveryRecords,
    RecoveryState,
    WorkerReport,
)
from bindery_metadata.stores.memory import MemoryTree
from bindery_metadata.stores.store import MetadataStore, Node
from store_environments import StoreEnvironment

SEVEN, FAR = LedgerId(7), LedgerId(4294967301)
ROOT = "/bindery/recovery"
RECORD = RecoveryRecord(
    SEVEN,
    state=RecoveryState.BLOCKED,
    reason=Reason.BOOKIE_LOST,
    obstacle=Obstacle.NO_SPARE,
    detail="3 bookies are needed and 2 are writable",
    attempts=2,
    first_marked_ms=1_000,
    next_retry_ms=2_000,
    missing_entries=10,
    bookies=("b1:3181",),
    worker="w1",
    unsure=(("b2:3181", 2),),
)


@pytest.fixture
def records(store: MetadataStore) -> RecoveryRecords:
    return RecoveryRecords(store)


@pytest.fixture
def others(other: MetadataStore) -> RecoveryRecords:
    return RecoveryRecords(other)


async def leader(store: MetadataStore) -> Leadership:
    election = LedgersLayout().auditor_election
    vote = await store.create(f"{election}/V_", ephemeral=True, sequential=True, make_parents=True)
    return Leadership(store, name="n", vote_path=vote, version=0, session_id=store.session_id)


async def listed(records: RecoveryRecords) -> list[int]:
    return [record.ledger_id async for record in records.list()]


# --- ledgers ----------------------------------------------------------------------------------------------------------


async def test_a_record_is_stored_as_json_and_read_back(records: RecoveryRecords, store: MetadataStore) -> None:
    assert await records.get(SEVEN) is None
    stored = await records.put(RECORD)
    assert stored == RECORD.with_changes(version=0)
    assert await records.get(SEVEN) == stored
    assert (await store.get(f"{ROOT}/ledgers/0/0000000000000000007")).data == (
        b'{"attempts":2,"bookies":["b1:3181"],"detail":"3 bookies are needed and 2 are writable",'
        b'"first_marked_ms":1000,"last_error":"","missing_bytes":null,"missing_entries":10,"next_retry_ms":2000,"obstacle":"no_spare",'
        b'"reason":"bookie_lost","state":"blocked","unsure":[["b2:3181",2]],"worker":"w1"}'
    )


async def test_records_are_listed_by_ledger_and_removed_with_their_directory(
    records: RecoveryRecords, store: MetadataStore
) -> None:
    ids = [7, 9_999, 10_000, 99_999, 100_000, 4294967301, ID_MAX]
    for ledger_id in reversed(ids):
        await records.put(RecoveryRecord(LedgerId(ledger_id)))
    for strange in ("x", "0/x", "0/0000000000000000008x", "5", "0/9999999999999999999", "\u0661"):
        await store.create(f"{ROOT}/ledgers/{strange}")
    assert await listed(records) == ids
    await records.remove(FAR)
    await records.remove(FAR)
    await records.remove(LedgerId(9_999))
    assert await listed(records) == [ledger_id for ledger_id in ids if ledger_id not in (FAR, 9_999)]
    assert "429496" not in await store.children(f"{ROOT}/ledgers")
    assert "0" in await store.children(f"{ROOT}/ledgers")


async def test_a_record_is_changed_with_its_version_or_at_any_version(
    records: RecoveryRecords, others: RecoveryRecords
) -> None:
    first = await records.put(RECORD)
    second = await others.put(first.with_changes(attempts=3))
    assert second.version == 1
    with pytest.raises(VersionConflict):
        await records.put(first.with_changes(attempts=9))
    assert await records.get(SEVEN) == second
    third = await records.put(RECORD.with_changes(attempts=4, version=NOT_STORED))
    assert (third.version, third.attempts) == (2, 4)
    await records.remove(SEVEN)
    with pytest.raises(VersionConflict):
        await records.put(third)


async def test_concurrent_updates_lose_nothing(records: RecoveryRecords, others: RecoveryRecords) -> None:
    def once_more(record: RecoveryRecord | None) -> RecoveryRecord:
        record = record or RECORD.with_changes(attempts=0)
        return record.with_changes(attempts=record.attempts + 1)

    await records.update(SEVEN, once_more)
    await asyncio.gather(*((records, others)[n % 2].update(SEVEN, once_more) for n in range(8)))
    record = await records.get(SEVEN)
    assert record is not None
    assert record.attempts == 9
    assert await records.update(SEVEN, lambda _: None) == record
    assert await records.update(SEVEN, lambda record: record) == record


@pytest.mark.parametrize("applied", [True, False], ids=["done", "not done"])
async def test_lost_responses_are_resolved(
    environment: StoreEnvironment, records: RecoveryRecords, store: MetadataStore, applied: bool
) -> None:
    await records.put(RecoveryRecord(LedgerId(8)))  # creates the parents
    environment.lose_next_write(store, applied=applied)
    await records.put(RECORD)
    current = await records.get(SEVEN)
    assert current is not None
    assert current.with_changes(version=NOT_STORED) == RECORD
    environment.lose_next_write(store, applied=applied)
    if applied:
        assert await records.put(current.with_changes(attempts=5)) == await records.get(SEVEN)
    else:
        with pytest.raises(MetadataUnavailable):
            await records.put(current.with_changes(attempts=5))
        assert await records.get(SEVEN) == current
    environment.lose_next_write(store, applied=applied)
    await records.remove(SEVEN)
    assert await records.get(SEVEN) is None


@pytest.mark.parametrize(
    "data", [b"", b"\xff", b"7", b'{"state":"dancing"}', b"[" * 100_000, b'{"worker":"' + b"x" * 300_000 + b'"}']
)
async def test_an_unreadable_record_is_skipped_and_overwritten(
    records: RecoveryRecords, store: MetadataStore, data: bytes
) -> None:
    await records.put(RecoveryRecord(LedgerId(8)))
    await store.create(f"{ROOT}/ledgers/0/0000000000000000007", data)
    assert await records.get(SEVEN) is None
    assert await listed(records) == [8]
    updated = await records.update(SEVEN, lambda record: record or RECORD)
    assert updated == await records.get(SEVEN) == RECORD.with_changes(version=1)


async def test_an_error_ends_the_list(records: RecoveryRecords) -> None:
    store = MemoryTree().connect()
    records = RecoveryRecords(store)
    await records.put(RECORD)
    for operation in ("children", "get"):
        store.fail_next(MetadataUnavailable(), matching=lambda found, _, operation=operation: found == operation)
        with pytest.raises(MetadataUnavailable):
            await listed(records)


async def test_long_texts_are_truncated(records: RecoveryRecords) -> None:
    stored = await records.put(RECORD.with_changes(last_error="x" * 10**6, detail="y" * 10**6))
    assert len(stored.last_error) == len(stored.detail) == module.TEXT_SIZE_MAX
    assert await records.get(SEVEN) == stored


@pytest.mark.parametrize("ledger_id", [-1, ID_MAX + 1])
def test_ids_out_of_range_have_no_record(ledger_id: int) -> None:
    with pytest.raises(BadRequest):
        BinderyLayout().recovery_record(LedgerId(ledger_id))


async def test_a_former_leader_writes_no_record(
    environment: StoreEnvironment, records: RecoveryRecords, others: RecoveryRecords, store: MetadataStore
) -> None:
    leadership = await leader(store)
    stored = await records.put(RECORD, guard=leadership)
    stored = await records.put(stored.with_changes(attempts=7), guard=leadership)
    await records.append_history(HistoryEvent(1, "leader", "n leads"), guard=leadership)
    await records.put_cursor("ledger-check", {"next_ledger": 5}, guard=leadership)
    await environment.expire(store)
    assert not leadership.is_over
    for write in (
        records.put(stored.with_changes(attempts=8), guard=leadership),
        records.put(RecoveryRecord(SEVEN), guard=leadership),
        records.put(RecoveryRecord(FAR), guard=leadership),
        records.update(SEVEN, lambda record: record and record.with_changes(attempts=9), guard=leadership),
        records.remove(SEVEN, guard=leadership),
        records.append_history(HistoryEvent(2, "marked"), guard=leadership),
        records.put_cursor("ledger-check", {"next_ledger": 6}, guard=leadership),
        records.put_cursor("placement-check", {}, guard=leadership),
        records.remove_cursor("ledger-check", guard=leadership),
    ):
        leadership._over = False
        with pytest.raises(NotLeader):
            await write
    assert await others.get(SEVEN) == stored
    assert await listed(others) == [SEVEN]
    assert await others.history() == [HistoryEvent(1, "leader", "n leads")]
    assert await others.get_cursor("ledger-check") == {"next_ledger": 5}
    assert await others.get_cursor("placement-check") is None


# --- history ----------------------------------------------------------------------------------------------------------


async def test_history_is_returned_newest_first(records: RecoveryRecords, store: MetadataStore) -> None:
    assert await records.history() == []
    events = [HistoryEvent(n, "marked", f"ledger {n}", {"ledger_id": n, "bookies": ["a"]}) for n in range(5)]
    for event in events:
        await records.append_history(event)
    await store.create(f"{ROOT}/history/other", b"")
    await store.set(f"{ROOT}/history/E_0000000003", b"\xff", version=None)
    assert await records.history() == [events[4], events[2], events[1], events[0]]
    assert await records.history(3) == [events[4], events[2], events[1]]
    assert await records.history(2) == [events[4], events[2]]


async def test_events_are_read_concurrently(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a long history would occupy its caller for a round trip per event."""
    store = MemoryTree().connect()
    records = RecoveryRecords(store)
    for n in range(8):
        await records.append_history(HistoryEvent(n, "marked"))
    get, begun = store.get, asyncio.Event()
    paths: list[str] = []

    async def wait_for_all(path: str) -> Node:
        paths.append(path)
        if len(paths) == 5:
            begun.set()
        async with asyncio.timeout(10):
            await begun.wait()
        return await get(path)

    monkeypatch.setattr(store, "get", wait_for_all)
    assert [event.at_ms for event in await records.history(5)] == [7, 6, 5, 4, 3]
    assert len(paths) == 5


async def test_history_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "HISTORY_MAX", 40)
    store = MemoryTree().connect()
    records = RecoveryRecords(store)
    for n in range(40 + 5 * HISTORY_PRUNE_EVERY):
        await records.append_history(HistoryEvent(n, "marked"))
        assert len(await store.children(f"{ROOT}/history")) <= 40 + HISTORY_PRUNE_EVERY
    assert (await records.history(1))[0].at_ms == 40 + 5 * HISTORY_PRUNE_EVERY - 1
    assert HISTORY_MAX == 1_000


@pytest.mark.parametrize("applied", [True, False])
async def test_an_event_whose_response_is_lost_is_written_once(
    environment: StoreEnvironment, records: RecoveryRecords, store: MetadataStore, applied: bool
) -> None:
    await records.append_history(HistoryEvent(1, "marked"))
    environment.lose_next_write(store, applied=applied)
    assert await records.append_history(HistoryEvent(2, "marked"))
    assert [event.at_ms for event in await records.history()] == [2, 1]


@pytest.mark.parametrize("applied", [True, False])
async def test_an_event_is_written_once_although_the_store_failed_after_its_response_was_lost(
    environment: StoreEnvironment,
    records: RecoveryRecords,
    store: MetadataStore,
    applied: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def fail(_: str) -> None:
        raise MetadataUnavailable("no connection")

    event = HistoryEvent(1, "healed", "ledger 7 is whole")
    with monkeypatch.context() as patch:
        patch.setattr(store, "sync", fail)
        environment.lose_next_write(store, applied=applied)
        assert not await records.append_history(event)
    assert await records.append_history(event, may_exist=True)
    assert await records.history() == [event]


# --- cursors, workers, pause ------------------------------------------------------------------------------------------


async def test_cursors_are_kept_by_name(records: RecoveryRecords, others: RecoveryRecords) -> None:
    assert await records.get_cursor("ledger-check") is None
    await records.put_cursor("ledger-check", {"next_ledger": 5, "started_ms": 1})
    await records.put_cursor("ledger-check", {"next_ledger": 6, "started_ms": 1})
    assert await others.get_cursor("ledger-check") == {"next_ledger": 6, "started_ms": 1}
    await others.remove_cursor("ledger-check")
    await others.remove_cursor("ledger-check")
    assert await records.get_cursor("ledger-check") is None
    for name in ("", ".", "..", "a/b", "a b", "x" * 300):
        with pytest.raises(BadRequest):
            await records.put_cursor(name, {})


async def test_a_report_exists_as_long_as_the_session_of_its_worker(
    environment: StoreEnvironment,
    records: RecoveryRecords,
    others: RecoveryRecords,
    store: MetadataStore,
    other: MetadataStore,
) -> None:
    assert await others.reports() == []
    report = WorkerReport("bookie-1:3181", 5, "copying", SEVEN, 100, 2, 1e6, 12.5, 2e6)
    await records.report(WorkerReport("bookie-1:3181", 4))
    await records.report(report)
    await other.create(f"{ROOT}/workers/else", b"nonsense")
    assert await others.reports() == [report]
    await environment.expire(store)
    assert await others.reports() == []
    await records.report(report)
    assert await others.reports() == [report]


async def test_a_pause_has_an_author_and_a_reason(records: RecoveryRecords, others: RecoveryRecords) -> None:
    assert await records.pause_info() is None
    await records.set_pause_info(Pause("ann", "moving racks", 5))
    assert await others.pause_info() == Pause("ann", "moving racks", 5)
    await others.clear_pause_info()
    await others.clear_pause_info()
    assert await records.pause_info() is None


async def test_a_node_that_cannot_be_written_raises_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    store = MemoryTree().connect()
    records = RecoveryRecords(store)
    await records.put(RECORD)
    for _ in range(module.ATTEMPTS_MAX):
        store.lose_next_write(applied=False)
    with pytest.raises(BinderyError):
        await records.put(RECORD)
