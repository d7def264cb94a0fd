"""An acceptance of the metadata after a suspected rollback is recorded in the history."""

import logging

import pytest
from bindery_core.errors import Conflict, MetadataUnavailable
from bindery_metadata.ledgers.known_ledgers import KnownLedgersStore, RollbackReport
from bindery_metadata.recovery.accept_metadata import accept_metadata
from bindery_metadata.recovery.recovery_records import RecoveryRecords
from bindery_metadata.stores.memory import MemoryStore, MemoryTree


async def suspicious() -> tuple[MemoryStore, KnownLedgersStore]:
    store = MemoryTree(now_ms=lambda: 1).connect()
    known = KnownLedgersStore(store, instance_id="cluster")
    for bookie, report in (
        ("b2", RollbackReport(found_ms=5, unknown=2, first=7, last=9, short_end=10, missing=4)),
        ("b1", RollbackReport(found_ms=6, unknown=1, first=8, last=8, short_end=9)),
    ):
        await known.update(lambda one, bookie=bookie, report=report: one.with_report(bookie, report))  # type: ignore[misc]
    return store, known


async def test_who_accepted_and_what_is_deleted_is_in_the_history() -> None:
    store, known = await suspicious()
    _, version = await known.read()
    before = await accept_metadata(store, instance_id="cluster", version=version, by="me", at_ms=70)
    assert sorted(before.reports) == ["b1", "b2"]
    after, _ = await known.read()
    assert (after.reports, after.short_end, after.accepted_by, after.accepted_ms) == ({}, 10, "me", 70)
    [event] = await RecoveryRecords(store).history()
    assert (event.at_ms, event.kind) == (70, "metadata_accepted")
    assert event.text == (
        "me accepted the metadata after a suspected rollback: bookies (b1, b2) delete 4 replicas of ledgers without "
        "metadata, of which the metadata never knew 3"
    )
    assert event.fields == {"bookies": "b1, b2", "unknown": 3, "missing": 4, "by": "me"}


async def test_without_reports_nothing_is_accepted_or_recorded() -> None:
    store = MemoryTree().connect()
    with pytest.raises(Conflict, match="nothing to accept"):
        await accept_metadata(store, instance_id="cluster", version=None, by="me", at_ms=70)
    assert await RecoveryRecords(store).history() == []


async def test_an_acceptance_counts_although_it_cannot_be_recorded(caplog: pytest.LogCaptureFixture) -> None:
    store, known = await suspicious()
    store.fail_next(MetadataUnavailable("down"), matching=lambda _, path: "history" in path)
    with caplog.at_level(logging.WARNING):
        await accept_metadata(store, instance_id="cluster", version=(await known.read())[1], by="me", at_ms=70)
    assert (await known.read())[0].reports == {}
    assert "acceptance_not_recorded" in caplog.text
