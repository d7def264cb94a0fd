"""Progress of recovery: the pure summary with its estimate, the copy rate, and the collector that reads the store."""

import asyncio
import json
from typing import Any

import pytest
from auditor_world import EPOCH_MS, LAYOUT, World, clock_ms
from bindery_core.errors import MetadataUnavailable
from bindery_core.formats import ledger_metadata_codec
from bindery_core.ids import BookieId, LedgerId
from bindery_metadata.bookies.membership import Intent, Membership
from bindery_metadata.ledgers.closing_records import ClosingCause, ClosingRecords
from bindery_metadata.recovery.recovery_records import (
    Obstacle,
    Pause,
    Reason,
    RecoveryRecord,
    RecoveryState,
    WorkerReport,
)
from bindery_metadata.recovery.underreplication import Mark
from bindery_recovery.reporting.progress import Pace, ProgressCollector, Snapshot, summarize
from scripted import ledger
from simulated import simulate

MIB = 2**20
NOW_MS = EPOCH_MS
WORKER = WorkerReport("w1", NOW_MS - 1000, "copying", bytes_per_s=2.0 * MIB)


def snapshot(*records: RecoveryRecord, unrecorded: int = 0, **changes: Any) -> Snapshot:
    marks = [Mark(record.ledger_id, record.bookies, NOW_MS - 60_000, 0) for record in records]
    marks += [Mark(LedgerId(1000 + n), ("b1",), NOW_MS - 30_000, 0) for n in range(unrecorded)]
    defaults: dict[str, Any] = {"reports": (WORKER,), "auditor": "a1"}
    return Snapshot(
        now_ms=NOW_MS,
        marks=marks,
        records={record.ledger_id: record for record in records},
        **{**defaults, **changes},
    )


def record(ledger_id: int, state: RecoveryState = RecoveryState.WAITING, **changes: Any) -> RecoveryRecord:
    defaults: dict[str, Any] = {
        "reason": Reason.BOOKIE_LOST,
        "bookies": ("b1",),
        "missing_bytes": 10 * MIB,
        "missing_entries": 100,
        "first_marked_ms": NOW_MS - 120_000,
    }
    return RecoveryRecord(LedgerId(ledger_id), state, **{**defaults, **changes})


def test_the_estimate_is_zero_if_nothing_is_marked() -> None:
    progress = summarize(snapshot())
    assert (progress.marked, progress.eta_s, progress.why_no_eta) == (0, 0.0, "")
    assert progress.oldest_mark_age_s is None


def test_the_estimate_divides_the_remaining_bytes_by_the_rate() -> None:
    progress = summarize(snapshot(record(1), record(2)))
    assert (progress.bytes_left, progress.entries_left) == (20 * MIB, 200)
    assert (progress.rate_bytes_per_s, progress.eta_s, progress.why_no_eta) == (2 * MIB, 10.0, "")
    assert progress.oldest_mark_age_s == 120, "the age counts from the first mark in the record"
    assert summarize(snapshot(record(1), record(2)), rate_bytes_per_s=MIB).eta_s == 20.0
    assert (progress.by_state, progress.by_reason, progress.by_obstacle) == ({"waiting": 2}, {"bookie_lost": 2}, {})
    assert progress.age_counts["60"] == 0
    assert progress.age_counts["600"] == progress.age_counts["inf"] == 2


def test_ledgers_of_unknown_size_count_as_the_mean_of_the_others() -> None:
    progress = summarize(snapshot(record(1), record(2, missing_bytes=None, missing_entries=None), unrecorded=2))
    assert (progress.bytes_left, progress.unknown_size) == (10 * MIB, 3)
    assert progress.eta_s == 20.0
    assert progress.by_reason == {"bookie_lost": 2, "unknown": 2}


def test_blocked_and_unrecoverable_ledgers_are_not_in_the_estimate() -> None:
    stuck = record(2, RecoveryState.BLOCKED, obstacle=Obstacle.NO_SPARE, detail="add a bookie")
    gone = record(3, RecoveryState.UNRECOVERABLE, obstacle=Obstacle.NO_COPY_LEFT)
    progress = summarize(snapshot(record(1), stuck, gone))
    assert progress.eta_s == 5.0
    assert progress.bytes_left == 20 * MIB, "blocked ones may still be healed"
    assert (progress.blocked, progress.unrecoverable) == (1, 1)
    assert progress.by_obstacle == {"no_spare": 1, "no_copy_left": 1}


def test_the_estimate_includes_the_wait_for_a_later_retry() -> None:
    later = record(2, RecoveryState.BACKING_OFF, missing_bytes=0, next_retry_ms=NOW_MS + 200_000)
    assert summarize(snapshot(record(1), later)).eta_s == 200.0


@pytest.mark.parametrize(
    ("given", "why"),
    [
        (
            snapshot(record(1), is_enabled=False, pause=Pause("ada", "moving racks", NOW_MS)),
            "automatic recovery is disabled by ada (moving racks): run `bindery recovery resume` to enable it",
        ),
        (
            snapshot(record(1), is_enabled=False),
            "automatic recovery is disabled: run `bindery recovery resume` to enable it",
        ),
        (
            snapshot(record(1, RecoveryState.BLOCKED, obstacle=Obstacle.NO_SPARE, detail="no bookie is free")),
            "1 ledger is blocked: no bookie is free",
        ),
        (
            snapshot(*(record(n, RecoveryState.UNRECOVERABLE, obstacle=Obstacle.NO_COPY_LEFT) for n in (1, 2))),
            "2 ledgers are unrecoverable: no copy left",
        ),
        (
            snapshot(record(1), reports=()),
            "no replication worker is running: start an auditor, or bookies with autorecovery_embedded",
        ),
        (
            snapshot(
                *(
                    record(
                        n,
                        RecoveryState.BACKING_OFF,
                        obstacle=Obstacle.SOURCE_UNAVAILABLE,
                        detail="b2 does not answer",
                        next_retry_ms=NOW_MS + 60_000 * n,
                    )
                    for n in (1, 2)
                ),
                reports=(WorkerReport("w1", NOW_MS),),
            ),
            "2 ledgers wait for the next attempt, the first in 60 s: b2 does not answer",
        ),
        (
            snapshot(record(1), reports=(WorkerReport("w1", NOW_MS - 61_000, bytes_per_s=5.0),)),
            "no entries were copied recently: workers check the marked ledgers, or have just started",
        ),
        (snapshot(unrecorded=1), "how much is missing is not known yet"),
    ],
)
def test_without_an_estimate_there_is_a_reason(given: Snapshot, why: str) -> None:
    progress = summarize(given)
    assert (progress.eta_s, progress.why_no_eta) == (None, why)


def test_lost_bookies_are_listed_with_the_rest_of_their_delay() -> None:
    kept = {
        "delay_s": 120,
        "saved_ms": NOW_MS - 5000,
        "bookies": {
            "b1": {"absent_s": 30.0, "phase": "waiting", "since_ms": 1},
            "b2": {"absent_s": 119.0, "phase": "waiting", "since_ms": 2},
            "b3": {"absent_s": 1.0, "phase": "forced", "since_ms": 3},
            "b4": {"absent_s": 500.0, "phase": "handled", "since_ms": 4},
            "b5": "?",
        },
    }
    assert [(b.bookie_id, b.left_s) for b in summarize(snapshot(lost=kept)).lost] == [
        ("b1", 85.0),
        ("b2", 0.0),
        ("b3", 0.0),
        ("b4", None),
    ]
    without_auditor = summarize(snapshot(lost=kept, auditor=None)).lost
    assert without_auditor[0].left_s == 90.0, "without an auditor no delay passes"
    assert summarize(snapshot(lost={"bookies": 3})).lost == ()


@pytest.mark.parametrize(
    ("drain", "left", "percent"),
    [
        ({"bytes_total": 1000, "ledgers_total": 10}, {"bytes_left": 250, "ledgers_left": 9}, 75.0),
        ({"bytes_total": 1000, "ledgers_total": 10}, {"bytes_left": 0, "ledgers_left": 1}, 99.9),
        ({"bytes_total": 1000, "ledgers_total": 10}, {"bytes_left": 0, "ledgers_left": 0}, 100.0),
        ({"bytes_total": 1000, "ledgers_total": 10}, {"bytes_left": 1500, "ledgers_left": 12}, 0.0),
        ({"bytes_total": 0, "ledgers_total": 10}, {"bytes_left": 0, "ledgers_left": 4}, 60.0),
        ({}, {"bytes_left": 5, "ledgers_left": 4}, None),
        ({"bytes_total": 1000}, None, None),
    ],
)
def test_a_drain_is_measured_in_bytes_and_is_complete_only_when_no_ledger_names_the_bookie(
    drain: dict[str, int], left: dict[str, int] | None, percent: float | None
) -> None:
    b1 = BookieId("b1")
    given = snapshot(
        memberships={b1: Membership(b1, Intent.DRAINING, since_ms=7, drain=drain, version=0)},
        draining={"bookies": {"b1": left}} if left else {},
    )
    [draining] = summarize(given).draining
    assert draining.percent == percent
    assert draining.since_ms == 7


def test_valid_leases_are_listed() -> None:
    b1, b2 = BookieId("b1"), BookieId("b2")
    given = {
        b1: Membership(b1, Intent.MAINTENANCE, until_ms=NOW_MS + 1, version=0),
        b2: Membership(b2, Intent.MAINTENANCE, until_ms=NOW_MS, version=0),
    }
    assert summarize(snapshot(memberships=given)).maintenance == {"b1": NOW_MS + 1}


def test_closing_records_that_were_not_checked_are_counted_and_have_an_age() -> None:
    async def scenario() -> None:
        world = await World.make()
        reading = collector(world)
        progress = await reading.get()
        assert (progress.closings.pending, progress.closings.oldest_age_s) == (0, None)
        notes = ClosingRecords(world.store)
        await notes.add(LedgerId(9), ClosingCause.RECOVERED)
        await asyncio.sleep(40)
        await notes.add(LedgerId(7), ClosingCause.DEGRADED)
        await asyncio.sleep(20)
        closings = (await reading.get()).closings
        assert closings.pending == 2
        assert closings.oldest_age_s == pytest.approx(60, abs=1)

    simulate(scenario())


@pytest.mark.parametrize(
    ("kept", "shown"),
    [
        ({}, (False, None, 0, 0, None, {})),
        (
            {"started_ms": 5, "next_ledger": 8, "result": {"ledgers": 7, "marked": 2}, "last_finished_ms": 3},
            (True, 5, 7, 2, 3, {}),
        ),
        (
            {"started_ms": 5, "next_ledger": None, "result": {"ledgers": 7, "marked": 2}, "last_result": {"marked": 1}},
            (False, None, 0, 0, None, {"marked": 1}),
        ),
        ({"started_ms": 5, "next_ledger": 8, "result": "?", "last_result": "?"}, (True, 5, 0, 0, None, {})),
    ],
)
def test_the_check_of_all_ledgers_has_figures_only_while_it_is_running(kept: dict[str, Any], shown: object) -> None:
    found = summarize(snapshot(ledger_check=kept)).ledger_check
    assert (
        found.is_running,
        found.started_ms,
        found.ledgers,
        found.marked,
        found.last_finished_ms,
        found.last_result,
    ) == shown


def test_the_summary_can_be_written_as_json() -> None:
    text = json.dumps(summarize(snapshot(record(1), unrecorded=1)).to_json())
    assert json.loads(text)["marked"] == 2


# --- pace -------------------------------------------------------------------------------------------------------------


def reports(**done: int) -> list[WorkerReport]:
    return [WorkerReport(name, NOW_MS, bytes_done_total=total) for name, total in done.items()]


def test_the_pace_is_the_average_rate_of_the_last_minute() -> None:
    pace = Pace()
    assert pace.bytes_per_s() is None
    pace.note(reports(w1=1_000_000), NOW_MS)
    pace.note(reports(w1=1_000_500), NOW_MS + 5000)
    assert pace.bytes_per_s() is None, "the time is too short for a rate"
    for second in range(10, 300, 5):
        pace.note(reports(w1=1_000_000 + 100 * second), NOW_MS + 1000 * second)
        assert pace.bytes_per_s() == pytest.approx(100)
    for second in range(300, 400, 5):
        pace.note(reports(w1=1_029_500), NOW_MS + 1000 * second)
    assert pace.bytes_per_s() == 0, "nothing is copied any more"


def test_bursts_do_not_change_the_pace() -> None:
    """A worker copies 100 MiB at once every 20 s: a minute contains 3 or 4 of these bursts."""
    pace = Pace()
    seen = []
    for second in range(0, 600, 5):
        pace.note(reports(w1=100 * (second // 20)), NOW_MS + 1000 * second)
        if second >= 60:
            seen.append(pace.bytes_per_s())
    assert all(pace is not None and 4.5 <= pace <= 5.5 for pace in seen), seen


def test_idle_times_and_times_without_readings_do_not_count() -> None:
    pace = Pace()
    for second in range(0, 60, 5):
        pace.note(reports(w1=0), NOW_MS + 1000 * second, is_working=False)
    for second in range(60, 80, 5):
        pace.note(reports(w1=100 * (second - 60)), NOW_MS + 1000 * second)
    assert pace.bytes_per_s() == pytest.approx(100)
    pace.note(reports(w1=1600), NOW_MS + 600_000)
    assert pace.bytes_per_s() is None
    pace.note(reports(w1=3600), NOW_MS + 610_000)
    assert pace.bytes_per_s() == pytest.approx(200)


def test_workers_that_start_stop_or_restart_add_what_they_copied_since_the_last_reading() -> None:
    pace = Pace()
    pace.note(reports(w1=500), NOW_MS)
    pace.note(reports(w1=600, w2=10_000), NOW_MS + 5000)  # w2 copied 10,000 bytes before its first report
    pace.note(reports(w2=10_100), NOW_MS + 10_000)
    pace.note(reports(w1=50, w2=10_100), NOW_MS + 20_000)  # w1 was restarted
    assert pace.bytes_per_s() == pytest.approx((100 + 100 + 50) / 20)


# --- the collector ----------------------------------------------------------------------------------------------------


def collector(world: World) -> ProgressCollector:
    return ProgressCollector(
        world.store, LAYOUT, marks=world.marks, records=world.records, memberships=world.memberships, clock_ms=clock_ms
    )


def test_progress_is_reported_from_the_loss_of_a_bookie_to_the_last_repair() -> None:
    async def scenario() -> None:
        world = await World.make(ledgers={n: ledger(("b1", "b2", "b3"), length=MIB) for n in range(100)})
        await world.start_auditor("a1")
        await asyncio.sleep(60)
        progress = collector(world)
        assert (await progress.get()).eta_s == 0
        await world.stop_bookie("b1")
        await asyncio.sleep(50)
        [lost] = (await progress.get()).lost
        assert (lost.bookie_id, lost.phase) == ("b1", "waiting")
        assert lost.left_s == pytest.approx(70, abs=3)
        await world.wait_for_marks(100, timeout_s=100)
        await asyncio.sleep(10)
        now = await progress.get()
        assert (now.marked, now.bytes_left, now.auditor) == (100, 100 * MIB, "a1")
        assert now.eta_s is None
        assert "no replication worker is running" in now.why_no_eta
        done = 0
        estimates = []
        for ledger_id in range(100):  # one ledger a second
            held = await world.marks.lock(LedgerId(ledger_id))
            assert held is not None
            await world.records.report(WorkerReport("w1", clock_ms(), "", None, done, bytes_per_s=MIB))
            await asyncio.sleep(1)
            done += MIB
            assert await world.marks.mark_replicated(held)
            await world.records.remove(LedgerId(ledger_id))
            if ledger_id % 5 == 4:
                estimates.append((99 - ledger_id, (await progress.get()).eta_s))
        assert all(eta_s is not None and abs(eta_s - left) <= 6 for left, eta_s in estimates), estimates
        await asyncio.sleep(10)
        assert (await progress.get()).eta_s == 0

    simulate(scenario())


def test_callers_share_a_read_and_an_outage_is_raised() -> None:
    async def scenario() -> None:
        world = await World.make(ledgers={})
        progress = collector(world)
        first, second = await asyncio.gather(progress.get(), progress.get())
        assert first is second is await progress.get()
        await asyncio.sleep(6)
        assert await progress.get() is not first
        await asyncio.sleep(6)
        latest = progress.latest
        world.store.fail_next(MetadataUnavailable("away"))
        with pytest.raises(MetadataUnavailable):
            await progress.get()
        assert progress.latest is latest

    simulate(scenario())


def test_closed_ledgers_without_a_recorded_size_count_with_the_size_in_their_metadata() -> None:
    """Five ledgers of 1 GiB miss a copy; only the one in progress has a size in its record."""

    async def scenario() -> None:
        world = await World.make(ledgers={})
        gib = 2**30
        for n in range(7):
            metadata = ledger(("b1", "b2", "b3"), length=gib, last=None if n == 5 else 99)
            data = b"garbage" if n == 6 else ledger_metadata_codec.encode(metadata)
            await world.store.create(LAYOUT.ledger(LedgerId(n)), data, make_parents=True)
            sizes = {"missing_bytes": gib // 2, "missing_entries": 50} if n == 0 else {}

            def reported(_: object, n: int = n, sizes: dict[str, int] = sizes) -> RecoveryRecord:
                return RecoveryRecord(LedgerId(n), reason=Reason.REPORTED_BY_WRITER, bookies=("b1",), **sizes)

            if n != 4:  # marked by a tool that writes no records
                await world.records.update(LedgerId(n), reported)
            await world.marks.mark(LedgerId(n), ["b1"])
        await world.marks.mark(LedgerId(8), ["b1"])  # deleted
        await world.records.report(WorkerReport("w1", clock_ms(), "copying", bytes_per_s=gib / 100))
        progress = await collector(world).get()
        assert (progress.marked, progress.unknown_size) == (8, 3), "open, unreadable, deleted"
        assert progress.bytes_left == gib // 2 + 4 * gib
        assert progress.entries_left == 50 + 4 * 100
        assert progress.eta_s == pytest.approx(4.5 / 5 * 8 * 100)

    simulate(scenario())
