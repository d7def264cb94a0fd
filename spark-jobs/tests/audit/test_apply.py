"""Marks of `--apply`: they have a reason, follow the current metadata, and may be repeated."""

import random
from types import SimpleNamespace

import pytest
from bindery_core.formats.ledger_metadata import LedgerMetadata, LedgerState, Segment
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.ledgers.ledger_manager import LedgerManager
from bindery_metadata.recovery.recovery_records import Reason, RecoveryRecords
from bindery_metadata.recovery.underreplication import UnderreplicationManager
from bindery_metadata.stores.memory import MemoryTree
from bindery_metadata.stores.store import MetadataStore
from bindery_spark.audit import cluster_facts
from bindery_spark.audit.apply import apply, apply_to
from bindery_spark.audit.cluster_facts import NoRandomness
from bindery_spark.audit.findings.actions import Proposal

LAYOUT = LedgersLayout()


@pytest.fixture
def store() -> MetadataStore:
    return MemoryTree().connect()


async def make_ledger(store: MetadataStore, *bookies: str) -> LedgerId:
    metadata = LedgerMetadata(
        ensemble_size=2,
        write_quorum=2,
        ack_quorum=1,
        state=LedgerState.CLOSED,
        last_entry_id=EntryId(9),
        length=90,
        segments=(Segment(EntryId(0), tuple(map(BookieId, bookies))),),
    )
    manager = LedgerManager(store, LAYOUT, randomness=random.Random(2))
    return (await manager.create(metadata))[0]


def marks(store: MetadataStore) -> UnderreplicationManager:
    return UnderreplicationManager(store, LAYOUT, randomness=NoRandomness(), clock_ms=lambda: 7)


def proposal(ledger_id: int, *bookies: str, reason: str = "entry_missing") -> Proposal:
    return Proposal(ledger_id, bookies, reason, 3, ("MISSING_REPLICA",))


async def test_a_ledger_is_marked_with_its_reason_and_only_once(store: MetadataStore) -> None:
    ledger_id = await make_ledger(store, "a", "b")
    for attempt in range(2):
        done = await apply(store, LAYOUT, [proposal(ledger_id, "a")], run_id="r1", clock_ms=lambda: 7)
        assert (done.marked, done.already) == (([ledger_id], []), ([], [ledger_id]))[attempt]
    mark = await marks(store).get(ledger_id)
    assert mark is not None
    assert (mark.replicas, mark.ctime_ms) == (("a",), 7)
    record = await RecoveryRecords(store).get(ledger_id)
    assert record is not None
    assert (record.reason, record.bookies, record.missing_entries) == (Reason.ENTRY_MISSING, ("a",), 3)
    (event,) = await RecoveryRecords(store).history()
    assert (event.kind, event.text) == ("marked", "an audit marked 1 ledgers")
    assert event.fields["run_id"] == "r1"


async def test_a_mark_with_a_weaker_reason_is_replaced(store: MetadataStore) -> None:
    ledger_id = await make_ledger(store, "a", "b")
    for reason in ("bookie_lost", "entry_missing", "bookie_lost"):
        await apply(store, LAYOUT, [proposal(ledger_id, "a", reason=reason)], run_id="r1", clock_ms=lambda: 7)
    record = await RecoveryRecords(store).get(ledger_id)
    assert record is not None
    assert record.reason is Reason.ENTRY_MISSING


async def test_ledgers_that_changed_since_the_audit_are_not_marked(store: MetadataStore) -> None:
    moved = await make_ledger(store, "b", "c")
    unreadable = await make_ledger(store, "a", "b")
    await store.set(LAYOUT.ledger(unreadable), b"garbage", version=None)
    wanted = [proposal(moved, "a"), proposal(77, "a"), proposal(unreadable, "a")]
    done = await apply(store, LAYOUT, wanted, run_id="r1", clock_ms=lambda: 7)
    assert done.marked == []
    assert done.left[moved] == "it no longer names a"
    assert done.left[77] == "it was deleted"
    assert "cannot be read" in done.left[unreadable]
    assert [mark async for mark in marks(store).list()] == []


async def test_a_proposal_without_bookies_makes_a_mark_without_bookies(store: MetadataStore) -> None:
    ledger_id = await make_ledger(store, "a", "b")
    await apply(store, LAYOUT, [proposal(ledger_id)], run_id="r1", clock_ms=lambda: 7)
    mark = await marks(store).get(ledger_id)
    assert mark is not None
    assert mark.replicas == ()


def test_proposals_are_applied_without_an_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = MemoryTree()

    async def connect(zookeeper: str) -> MetadataStore:
        assert zookeeper == "h:1"
        return tree.connect()

    monkeypatch.setattr(cluster_facts, "zookeeper_connection", SimpleNamespace(connect=connect))
    applied = apply_to("h:1", "/ledgers", [proposal(77, "a")], run_id="r1", clock_ms=lambda: 7)
    assert applied.left == {77: "it was deleted"}
    assert applied.to_json() == {"marked": [], "already": [], "left": {77: "it was deleted"}}
