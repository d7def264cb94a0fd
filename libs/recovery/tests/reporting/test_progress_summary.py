"""Details of the summary of a snapshot: counters, ages, sizes, reasons and bookies; the interval of the collector."""

import asyncio
import random
from typing import Any

import pytest
from auditor_world import EPOCH_MS, LAYOUT, World, clock_ms
from bindery_core.ids import BookieId, LedgerId
from bindery_metadata.bookies.membership import Intent, Membership
from bindery_metadata.ledgers.closing_records import ClosingRecord
from bindery_metadata.recovery.recovery_records import (
    Obstacle,
    Pause,
    RecoveryRecord,
    RecoveryRecords,
    RecoveryState,
    WorkerReport,
)
from bindery_metadata.recovery.underreplication import Mark, UnderreplicationManager
from bindery_recovery.cluster.ledger_index import Share
from bindery_recovery.reporting.progress import Progress, ProgressCollector, Snapshot, summarize
from simulated import simulate

NOW_MS = EPOCH_MS
B1, B2, B3 = (BookieId(name) for name in ("b1", "b2", "b3"))
WORKER = WorkerReport("w1", NOW_MS, bytes_per_s=100.0)


def mark(ledger_id: int, ago_s: float = 60) -> Mark:
    return Mark(LedgerId(ledger_id), ("b1",), int(NOW_MS - ago_s * 1000), 0)


def record(ledger_id: int, state: RecoveryState = RecoveryState.WAITING, **changes: Any) -> RecoveryRecord:
    return RecoveryRecord(LedgerId(ledger_id), state, **{"missing_bytes": 1000, "missing_entries": 10, **changes})


def summary(*records: RecoveryRecord, rate: float | None = None, **changes: Any) -> Progress:
    """Summarize a snapshot in which these ledgers are marked."""
    known: dict[str, Any] = {
        "marks": [mark(one.ledger_id) for one in records],
        "records": {one.ledger_id: one for one in records},
        "reports": (WORKER,),
        "auditor": "a1",
    }
    return summarize(Snapshot(now_ms=NOW_MS, **{**known, **changes}), rate_bytes_per_s=rate)


# --- counters and ages ------------------------------------------------------------------------------------------------


def test_ledgers_whose_locks_are_held_are_being_copied() -> None:
    locks = {LedgerId(1): "w1", LedgerId(9): "w1"}
    assert summary(record(1), record(2), locks=locks).copying == 1, "ledger 9 is not marked"


def test_the_reason_of_a_pause_is_reported_only_during_the_pause() -> None:
    pause = Pause("ada", "new racks", NOW_MS)
    assert summary(record(1), pause=pause).pause is None
    assert summary(record(1), pause=pause, is_enabled=False).pause is pause


def test_the_rate_is_the_sum_of_the_rates_reported_in_the_last_minute() -> None:
    reports = (
        WorkerReport("w1", NOW_MS, bytes_per_s=100.0),
        WorkerReport("w2", NOW_MS - 60_000, bytes_per_s=10.0),
        WorkerReport("w3", NOW_MS - 60_001, bytes_per_s=1.0),
    )
    progress = summary(record(1), reports=reports)
    assert progress.rate_bytes_per_s == 110.0
    assert [one.name for one in progress.workers] == ["w1", "w2", "w3"]


def test_a_measured_rate_replaces_the_reported_ones() -> None:
    progress = summary(record(1), rate=20.0)
    assert (progress.rate_bytes_per_s, progress.eta_s) == (20.0, 50.0)


@pytest.mark.parametrize(
    ("ctime_ago_s", "first_marked_ago_s", "age_s"),
    [(60, 100, 100.0), (100, 60, 100.0), (60, None, 60.0), (-5, None, 0.0)],
)
def test_a_mark_is_as_old_as_its_first_sign(ctime_ago_s: int, first_marked_ago_s: int | None, age_s: float) -> None:
    first_ms = 0 if first_marked_ago_s is None else NOW_MS - first_marked_ago_s * 1000
    found = summary(record(1, first_marked_ms=first_ms), marks=[mark(1, ctime_ago_s)])
    assert found.oldest_mark_age_s == age_s


def test_the_age_of_a_mark_without_a_time_is_zero() -> None:
    assert summary(marks=[Mark(LedgerId(1), ("b1",), 0, 0)]).oldest_mark_age_s == 0.0


def test_marks_are_counted_by_their_maximum_age() -> None:
    marks = [mark(1, 60), mark(2, 60.5), mark(3, 700_000)]
    progress = summary(marks=marks)
    assert progress.age_counts == {
        "60": 1,
        "600": 2,
        "3600": 2,
        "21600": 2,
        "86400": 2,
        "604800": 2,
        "inf": 3,
    }
    assert progress.oldest_mark_age_s == 700_000


def test_the_age_of_the_oldest_closing_record() -> None:
    notes = [ClosingRecord(LedgerId(n), noted_at_ms=NOW_MS - ago_ms) for n, ago_ms in ((1, 5_000), (2, 9_500))]
    closings = summary(closings=7, closing_notes=notes).closings
    assert (closings.pending, closings.oldest_age_s) == (7, 9.5)
    ahead = [ClosingRecord(LedgerId(1), noted_at_ms=NOW_MS + 1)]
    assert summary(closings=1, closing_notes=ahead).closings.oldest_age_s == 0.0


# --- sizes ------------------------------------------------------------------------------------------------------------


def test_the_number_of_entries_may_be_known_without_their_size() -> None:
    progress = summary(record(1, missing_bytes=None, missing_entries=7))
    assert (progress.entries_left, progress.bytes_left, progress.unknown_size) == (7, 0, 1)


def test_the_size_may_be_known_without_the_number_of_entries() -> None:
    progress = summary(record(1, missing_bytes=50, missing_entries=None))
    assert (progress.entries_left, progress.bytes_left, progress.unknown_size) == (0, 50, 0)


def test_a_share_in_the_metadata_counts_only_if_the_record_has_no_size() -> None:
    shares = {LedgerId(1): Share(4, 400), LedgerId(2): Share(5, 500), LedgerId(3): Share(6, 600)}
    progress = summary(record(1), record(2, missing_bytes=None), marks=[mark(1), mark(2), mark(3)], shares=shares)
    assert (progress.entries_left, progress.bytes_left) == (10 + 5 + 6, 1000 + 500 + 600)


def test_what_cannot_be_recovered_is_not_left() -> None:
    progress = summary(record(1), record(2, RecoveryState.UNRECOVERABLE))
    assert (progress.marked, progress.unrecoverable, progress.bytes_left, progress.entries_left) == (2, 1, 1000, 10)


# --- the estimate or its reason ---------------------------------------------------------------------------------------


def test_a_retry_that_is_due_does_not_delay_the_estimate() -> None:
    assert summary(record(1, next_retry_ms=NOW_MS - 5_000)).eta_s == 10.0


@pytest.mark.parametrize("retry_ms", [None, NOW_MS])
def test_while_one_ledger_can_be_tried_now_the_wait_of_the_others_is_not_the_reason(retry_ms: int | None) -> None:
    later = record(2, RecoveryState.BACKING_OFF, next_retry_ms=NOW_MS + 60_000)
    progress = summary(record(1, next_retry_ms=retry_ms), later, rate=0.0)
    assert progress.why_no_eta.startswith("no entries were copied recently")


def test_a_wait_for_the_next_attempt_names_the_most_common_obstacle() -> None:
    def waiting(ledger_id: int, obstacle: Obstacle, **changes: Any) -> RecoveryRecord:
        next_ms = NOW_MS + 30_000 * ledger_id
        return record(ledger_id, RecoveryState.BACKING_OFF, obstacle=obstacle, next_retry_ms=next_ms, **changes)

    progress = summary(
        waiting(1, Obstacle.NO_SPARE, detail="a rare one"),
        waiting(2, Obstacle.TARGET_REFUSES),
        waiting(3, Obstacle.TARGET_REFUSES, last_error="b2 is full"),
        rate=0.0,
    )
    assert progress.why_no_eta == "3 ledgers wait for the next attempt, the first in 30 s: b2 is full"
    (one,) = [summary(waiting(1, Obstacle.TARGET_REFUSES), rate=0.0).why_no_eta]
    assert one == "1 ledger waits for the next attempt, the first in 30 s: target refuses"


def test_blocked_ledgers_are_the_reason_before_unrecoverable_ones() -> None:
    progress = summary(
        record(1, RecoveryState.UNRECOVERABLE, obstacle=Obstacle.NO_COPY_LEFT, detail="all lost"),
        record(2, RecoveryState.UNRECOVERABLE, obstacle=Obstacle.NO_COPY_LEFT, detail="all lost"),
        record(3, RecoveryState.BLOCKED, obstacle=Obstacle.NO_SPARE, detail="no bookie is free"),
    )
    assert (progress.eta_s, progress.why_no_eta) == (None, "1 ledger is blocked: no bookie is free")


@pytest.mark.parametrize(
    ("pause", "who"),
    [
        (Pause("ada", "", NOW_MS), " by ada"),
        (Pause("", "new racks", NOW_MS), " (new racks)"),
        (Pause("ada", "new racks", NOW_MS), " by ada (new racks)"),
        (None, ""),
    ],
)
def test_a_pause_is_explained_as_far_as_known(pause: Pause | None, who: str) -> None:
    assert summary(record(1), pause=pause, is_enabled=False).why_no_eta == (
        f"automatic recovery is disabled{who}: run `bindery recovery resume` to enable it"
    )


# --- bookies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("saved_ago_ms", "left_s"),
    [(0, 90.0), (4_000, 86.0), (-9_000, 90.0), (10_000_000, 60.0)],
)
def test_the_rest_of_a_delay_counts_the_time_since_it_was_stored(saved_ago_ms: int, left_s: float) -> None:
    """After a longer time no auditor has observed the bookie."""
    bookies = {"b1": {"absent_s": 30.0, "phase": "waiting", "since_ms": 5}}
    (lost,) = summary(lost={"delay_s": 120, "saved_ms": NOW_MS - saved_ago_ms, "bookies": bookies}).lost
    assert (lost.bookie_id, lost.phase, lost.since_ms, lost.left_s) == ("b1", "waiting", 5, left_s)


def test_draining_bookies_are_sorted_and_their_counts_may_be_unreadable() -> None:
    memberships = {
        bookie_id: Membership(bookie_id, intent, since_ms=7, drain={"ledgers_total": 10}, version=0)
        for bookie_id, intent in ((B3, Intent.DRAINING), (B1, Intent.DRAINING), (B2, Intent.REMOVED))
    }
    counts = {"b1": {"ledgers_left": 5, "bytes_left": 50}, "b3": "?"}
    found = summary(memberships=memberships, draining={"bookies": counts}).draining
    assert [(one.bookie_id, one.ledgers_left, one.bytes_left, one.percent) for one in found] == [
        ("b1", 5, 50, 50.0),
        ("b3", None, None, None),
    ]
    unreadable = summary(memberships=memberships, draining={"bookies": "?"}).draining
    assert [one.ledgers_left for one in unreadable] == [None, None]


def test_a_drain_whose_ledgers_are_counted_but_not_their_bytes_has_no_percentage() -> None:
    memberships = {B1: Membership(B1, Intent.DRAINING, since_ms=7, drain={"ledgers_total": 10}, version=0)}
    (found,) = summary(memberships=memberships, draining={"bookies": {"b1": {"ledgers_left": 5}}}).draining
    assert (found.ledgers_left, found.percent) == (5, None)


def test_the_share_of_a_drain_with_a_single_ledger_is_known() -> None:
    memberships = {B1: Membership(B1, Intent.DRAINING, since_ms=7, drain={"ledgers_total": 1}, version=0)}
    counts = {"b1": {"ledgers_left": 1, "bytes_left": 0}}
    (found,) = summary(memberships=memberships, draining={"bookies": counts}).draining
    assert found.percent == 0.0


# --- the collector ----------------------------------------------------------------------------------------------------


def slow_collector(world: World, *, latency_s: float, interval_s: float) -> ProgressCollector:
    store = world.tree.connect(latency_s=latency_s)
    return ProgressCollector(
        store,
        LAYOUT,
        marks=UnderreplicationManager(store, LAYOUT, randomness=random.Random(9), clock_ms=clock_ms),
        records=RecoveryRecords(store),
        memberships=world.memberships,
        clock_ms=clock_ms,
        interval_s=interval_s,
    )


def test_reads_take_at_most_a_small_part_of_the_time() -> None:
    async def scenario() -> None:
        world = await World.make()
        progress = slow_collector(world, latency_s=1.0, interval_s=1.0)
        loop = asyncio.get_running_loop()
        began = loop.time()
        first = await progress.get()
        read_s = loop.time() - began
        assert read_s >= 1.0
        await asyncio.sleep(10 * read_s - 0.5)
        assert await progress.get() is first
        await asyncio.sleep(1)
        assert await progress.get() is not first

    simulate(scenario())


def test_quick_reads_are_repeated_after_the_interval() -> None:
    async def scenario() -> None:
        world = await World.make()
        progress = slow_collector(world, latency_s=0.0, interval_s=20.0)
        first = await progress.get()
        await asyncio.sleep(19.9)
        assert await progress.get() is first
        await asyncio.sleep(0.2)
        assert await progress.get() is not first

    simulate(scenario())
