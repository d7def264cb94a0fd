"""Facts about the cluster, read from its records, and the results of a run, written to them."""

import asyncio
import json
from types import SimpleNamespace

import pytest
from bindery_core.errors import NoSuchNode
from bindery_core.ids import LedgerId
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.ledgers.verified_records import Verified, VerifiedRecords
from bindery_metadata.recovery.last_audits import LastAudit, LastAudits
from bindery_metadata.recovery.recovery_records import HistoryEvent, RecoveryRecords
from bindery_metadata.recovery.underreplication import UnderreplicationManager
from bindery_metadata.stores.memory import MemoryTree
from bindery_metadata.stores.store import MetadataStore
from bindery_spark.audit import cluster_facts
from bindery_spark.audit.cluster_facts import Facts, NoRandomness, read_facts, read_verified

LAYOUT = LedgersLayout()


@pytest.fixture
def store() -> MetadataStore:
    return MemoryTree().connect()


def marks(store: MetadataStore) -> UnderreplicationManager:
    return UnderreplicationManager(store, LAYOUT, randomness=NoRandomness(), clock_ms=lambda: 7)


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

    monkeypatch.setattr(cluster_facts, "zookeeper_connection", SimpleNamespace(connect=connect))

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
    assert len(closed) == 4, "each call closes its connection"


async def test_a_time_of_absence_that_is_not_a_number_is_ignored(store: MetadataStore) -> None:
    await store.create(LAYOUT.instance_id, b"c-1", make_parents=True)
    await RecoveryRecords(store).put_cursor("lost-bookies", {"bookies": {"a": {"since_ms": "9"}, "b": {}}})
    assert (await read_facts(store, LAYOUT)).absent_since_ms == {}


async def test_a_connection_is_closed_after_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    configured: list[dict[str, str]] = []

    async def close() -> None:
        closed.append("store")

    async def connect(_: str) -> SimpleNamespace:
        return SimpleNamespace(close=close)

    monkeypatch.setattr(cluster_facts, "zookeeper_connection", SimpleNamespace(connect=connect))
    monkeypatch.setattr(cluster_facts, "logs", SimpleNamespace(configure=lambda **given: configured.append(given)))
    with pytest.raises(NoSuchNode):
        async with cluster_facts.connected("h:1"):
            raise NoSuchNode("gone")
    assert closed == ["store"]
    assert configured == [{"service": "audit", "level": "warning"}], "the driver's output is for the user"
