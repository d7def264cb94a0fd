"""Marks of `--apply`: they have a reason, follow the current metadata, and may be repeated."""

import asyncio
import json
import random
from types import SimpleNamespace

import pytest
from bindery_core.errors import NoSuchNode
from bindery_core.formats.ledger_metadata import LedgerMetadata, LedgerState, Segment
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.ledgers.ledger_manager import LedgerManager
from bindery_metadata.ledgers.verified_records import Verified, VerifiedRecords
from bindery_metadata.recovery.last_audits import LastAudit, LastAudits
from bindery_metadata.recovery.recovery_records import HistoryEvent, Reason, RecoveryRecords
from bindery_metadata.recovery.underreplication import UnderreplicationManager
from bindery_metadata.stores.memory import MemoryTree
from bindery_metadata.stores.store import MetadataStore
from bindery_spark.audit import cluster_facts
from bindery_spark.audit.apply import apply, apply_to
from bindery_spark.audit.cluster_facts import Facts, NoRandomness, read_facts, read_verified
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


async def test_facts_are_read_from_the_records_of_the_auditor(store: MetadataStore) -> None:
    with pytest.raises(NoSuchNode, match="cluster init"):
        await read_facts(store, LAYOUT)
    await store.create(LAYOUT.instance_id, b"c-1", make_parents=True)
    facts = await read_facts(store, LAYOUT)
    assert (facts.cluster_id, facts.lost_bookie_delay_ms, facts.absent_since_ms) == ("c-1", 120_000, {})
    await marks(store).set_lost_bookie_delay_s(5)
    kept = {"bookies": {"b": {"since_ms": 9, "phase": "waiting", "absent_s": 1.0}, "odd": 3}}
    await RecoveryRecords(store).put_cursor("lost-bookies", kept)
    facts = await read_facts(store, LAYOUT)
    assert (facts.lost_bookie_delay_ms, facts.absent_since_ms) == (5_000, {"b": 9})
    assert type(facts).from_json(facts.to_json()) == facts


async def test_the_latest_report_that_a_ledger_was_healed_counts(store: MetadataStore) -> None:
    await store.create(LAYOUT.instance_id, b"c-1", make_parents=True)
    records = RecoveryRecords(store)
    for at_ms, kind, fields in [
        (5, "healed", {"ledger_id": 7}),
        (9, "healed", {"ledger_id": 7}),
        (8, "healed", {"ledger_id": 7}),
        (3, "marked", {"ledger_id": 8}),
        (4, "healed", {"ledger_id": "8"}),
        (6, "healed", {}),
        (0, "healed", {"ledger_id": 9}),
    ]:
        await records.append_history(HistoryEvent(at_ms, kind, "text", fields))
    facts = await read_facts(store, LAYOUT)
    assert facts.healed == {7: 9, 9: 0}
    assert type(facts).from_json(json.loads(json.dumps(facts.to_json()))) == facts, "ids are texts in JSON"


async def test_a_delay_of_zero_is_not_the_default_delay(store: MetadataStore) -> None:
    await store.create(LAYOUT.instance_id, b"c-1", make_parents=True)
    await marks(store).set_lost_bookie_delay_s(0)
    assert (await read_facts(store, LAYOUT)).lost_bookie_delay_ms == 0
    assert Facts("c-1").lost_bookie_delay_ms == 0


async def test_verified_records_are_read_completely(store: MetadataStore) -> None:
    record = Verified(LedgerId(7), "deep", 5, "r1", 3)
    await VerifiedRecords(store).put_all([record])
    assert await read_verified(store) == [record]


def test_marking_uses_no_randomness() -> None:
    with pytest.raises(AssertionError, match="not used"):
        NoRandomness().getrandbits(8)


def test_the_results_of_a_run_are_written_and_read_without_an_event_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = MemoryTree()
    closed: list[MetadataStore] = []

    async def connect(zookeeper: str) -> MetadataStore:
        assert zookeeper == "h:1"
        store = tree.connect()
        close = store.close

        async def closing() -> None:
            closed.append(store)
            await close()

        store.close = closing  # type: ignore[method-assign]
        return store

    monkeypatch.setattr(cluster_facts, "ZooKeeperStore", SimpleNamespace(connect=connect))

    async def begin() -> None:
        await tree.connect().create(LAYOUT.instance_id, b"c-1", make_parents=True)

    asyncio.run(begin())
    first, second = (Verified(LedgerId(n), "deep", 5, "r1", 3) for n in (7, 8))
    cluster_facts.write_verified("h:1", [first, second], ())
    cluster_facts.write_verified("h:1", [], [8])
    audit = LastAudit(
        level="deep",
        run_id="r1",
        verdict="HEALTHY",
        exit_code=0,
        began_ms=1,
        ended_ms=2,
        copies_expected=3,
        copies_verified=3,
        bytes_read=4,
        oldest_verified_ms=1,
    )
    cluster_facts.write_last("h:1", audit)
    facts, verified = cluster_facts.facts_of("h:1", "/ledgers")
    assert (facts.cluster_id, verified) == ("c-1", [first])

    async def last() -> list[LastAudit]:
        return await LastAudits(tree.connect()).all()

    assert asyncio.run(last()) == [audit]
    applied = apply_to("h:1", "/ledgers", [proposal(77, "a")], run_id="r1", clock_ms=lambda: 7)
    assert applied.left == {77: "it was deleted"}
    assert applied.to_json() == {"marked": [], "already": [], "left": {77: "it was deleted"}}
    assert len(closed) == 5, "each call closes its connection"
