"""The status of recovery: read from metadata in memory, and formatted as literal lines."""

import asyncio
import json
import random
from typing import Any

import pytest
from bindery.recovery.recovery_status import NoRandomness, percent_done, read_status, status_lines
from bindery_core.formats import replication_formats
from bindery_core.ids import BookieId, LedgerId
from bindery_metadata.bookies.membership import Intent, MembershipStore
from bindery_metadata.cluster import initialize_cluster
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.recovery.recovery_records import Obstacle, RecoveryRecord, RecoveryRecords, RecoveryState
from bindery_metadata.recovery.underreplication import UnderreplicationManager
from bindery_metadata.stores.memory import MemoryStore, MemoryTree

LAYOUT = LedgersLayout()
NOW_MS = 1_800_000_000_000
NOTHING: dict[str, Any] = {
    "enabled": True,
    "pause": None,
    "auditor": "a1",
    "candidates": ["a1"],
    "lost_bookies": [],
    "draining": [],
    "maintenance": [],
    "marked": {"ledgers": 0},
    "placement": {"racks": 1, "total": 0, "done": 0, "moving": 0, "waiting": 0, "stuck": 0, "is_running": False},
    "backup": None,
    "closings": {"pending": 0, "oldest_age_s": None},
    "workers": [],
    "bytes_per_s": None,
    "eta_s": None,
    "why_no_eta": "",
    "audits": [],
    "problem": None,
}


# --- text -------------------------------------------------------------------------------------------------------------


def lines(**facts: Any) -> list[str]:
    """Return the lines that differ from those of a sound cluster."""
    sound = [
        "automatic recovery is enabled",
        "auditor: a1",
        "no ledger is known to be under-replicated",
    ]
    return [line for line in status_lines({**NOTHING, **facts}, now_ms=NOW_MS) if line not in sound]


def test_a_sound_cluster_has_three_lines() -> None:
    assert status_lines(NOTHING, now_ms=NOW_MS) == [
        "automatic recovery is enabled",
        "auditor: a1",
        "no ledger is known to be under-replicated",
    ]


def test_a_pause_and_missing_auditors_are_in_capitals() -> None:
    assert lines(enabled=False, auditor=None, candidates=[], problem="automatic recovery is paused") == [
        "automatic recovery is PAUSED",
        "auditor: NONE",
        "no ledger can be repaired: automatic recovery is paused",
    ]
    pause = {"by": "ops@h", "reason": "upgrade", "at_ms": 0}
    assert lines(enabled=False, pause=pause)[0] == (
        "automatic recovery is PAUSED by ops@h since 1970-01-01 00:00:00Z: upgrade"
    )


def test_auditors_on_standby_are_counted() -> None:
    assert lines(candidates=["a1", "a2"]) == ["auditor: a1 (1 on standby)"]


def test_absent_bookies_show_their_phase() -> None:
    def bookie(name: str, phase: str, absent_s: float | None, left_s: float | None) -> dict[str, Any]:
        return {"bookie_id": name, "phase": phase, "absent_s": absent_s, "left_s": left_s}

    lost = [
        bookie("b0", "waiting", 30, 270),
        bookie("b1", "handled", 30, None),
        bookie("b2", "forced", 30, None),
        bookie("b3", "absent", None, None),
    ]
    assert lines(lost_bookies=lost) == [
        "absent: b0 for 30 s; its ledgers are marked in 4 min unless it returns",
        "absent: b1 for 30 s; its ledgers are marked",
        "absent: b2 for 30 s; its ledgers are being marked",
        "absent: b3",
    ]


def test_maintenance_shows_its_end() -> None:
    assert lines(
        maintenance=[
            {"bookie_id": "b0", "until_ms": 60_000, "reason": "disk"},
            {"bookie_id": "b1", "until_ms": None, "reason": ""},
        ]
    ) == ["in maintenance until 1970-01-01 00:01:00Z: b0 disk", "in maintenance without an end: b1"]


@pytest.mark.parametrize(
    ("more", "text"),
    [
        ({}, "5 ledgers, 1.0 KiB at the start"),
        (
            {"percent": 49.6, "ledgers_left": 2, "bytes_left": 512, "as_of_ms": NOW_MS - 1999},
            "50 %, 2 ledgers and 512 B left",
        ),
        (
            {"percent": 49.6, "ledgers_left": 2, "bytes_left": 512, "as_of_ms": NOW_MS - 2000},
            "50 %, 2 ledgers and 512 B left (seen 2 s ago)",
        ),
        ({"percent": 0.0, "ledgers_left": 2, "bytes_left": 512, "as_of_ms": None}, "0 %, 2 ledgers and 512 B left"),
        ({"finished": True}, "empty: stop it, then run `bindery bookie cookie retire`"),
    ],
)
def test_draining_shows_how_far_it_is(more: dict[str, Any], text: str) -> None:
    bookie = {"bookie_id": "b0", "ledgers_total": 5, "bytes_total": 1024, "finished": False, **more}
    assert lines(draining=[bookie]) == [f"draining: b0, {text}"]


def marked(**changes: Any) -> dict[str, Any]:
    return {
        "ledgers": 3,
        "bytes_left": 1536,
        "size_unknown": 0,
        "by_obstacle": {"no_spare": 1, "copying": 2},
        "examples": {
            "no_spare": {"ledger_id": 7, "detail": "one is needed"},
            "copying": {"ledger_id": 8, "detail": ""},
        },
        "oldest": {"ledger_id": 7, "age_s": 200},
        **changes,
    }


def test_marked_ledgers_are_listed_by_obstacle_with_the_most_frequent_first() -> None:
    assert lines(marked=marked()) == [
        "3 ledgers are under-replicated: 1.5 KiB to copy",
        "       2  copying, such as ledger 8",
        "       1  no_spare, such as ledger 7: one is needed",
        "oldest: ledger 7, marked 3 min ago",
    ]


def test_speed_and_time_left_are_shown_if_they_are_known() -> None:
    assert lines(marked=marked(size_unknown=1, oldest=None), bytes_per_s=2048, eta_s=0)[0] == (
        "3 ledgers are under-replicated: 1.5 KiB to copy, 1 of unknown size, 2.0 KiB/s, about 0 s left"
    )
    assert lines(marked=marked(), why_no_eta="too early")[1] == "no estimate: too early"
    with_problem = lines(marked=marked(), why_no_eta="too early", problem="no worker")
    assert with_problem[0] == "no ledger can be repaired: no worker"
    assert "no estimate: too early" not in with_problem


def test_unchecked_ledgers_audits_and_workers_follow() -> None:
    audit = {
        "level": "deep",
        "verdict": "HEALTHY",
        "age_s": 60,
        "copies_verified": 3,
        "copies_expected": 4,
        "severities": {},
        "run_id": "r",
    }
    worker = {
        "name": "w0",
        "state": "copying",
        "stale": True,
        "ledger_id": None,
        "bytes_per_s": 1024,
        "budget_bytes_per_s": 2048,
        "bytes_done_total": 0,
        "foreground_p99_ms": None,
    }
    busy = {**worker, "name": "w1", "stale": False, "ledger_id": 7, "foreground_p99_ms": 12.4}
    text = lines(closings={"pending": 2, "oldest_age_s": 5}, audits=[audit], workers=[worker, busy])
    assert text[:2] == [
        "2 recently closed ledgers are not checked for missing copies yet, the oldest for 5 s",
        "last deep audit: HEALTHY 60 s ago, 3 of 4 copies checked, findings: none (run r)",
    ]
    assert [line.split() for line in text[2:]] == [
        ["worker", "state", "ledger", "speed", "allowed", "copied", "foreground", "p99"],
        ["w0", "copying", "(stale", "report)", "-", "1.0", "KiB/s", "2.0", "KiB/s", "0", "B", "-"],
        ["w1", "copying", "7", "1.0", "KiB/s", "2.0", "KiB/s", "0", "B", "12", "ms"],
    ]
    assert lines(closings={"pending": 1, "oldest_age_s": None}) == [
        "1 recently closed ledgers are not checked for missing copies yet"
    ]


@pytest.mark.parametrize(
    ("part", "left", "percent"),
    [(0.5, 3, 50.0), (1.0, 0, 100.0), (1.0, 1, 99.0), (0.9994, 1, 99.0), (0.12345, 0, 12.3)],
)
def test_nothing_is_done_to_100_percent_while_ledgers_are_left(part: float, left: int, percent: float) -> None:
    assert percent_done(part, ledgers_left=left) == percent


# --- from the metadata ------------------------------------------------------------------------------------------------


def status(*steps: Any) -> dict[str, Any]:
    """Return the status of a cluster of b0 and b1 after `steps`, each of which changes the metadata."""

    async def main() -> dict[str, Any]:
        store = MemoryTree(now_ms=lambda: NOW_MS - 10_000).connect()
        await initialize_cluster(store, LAYOUT, randomness=random.Random(1))
        for bookie in ("b0", "b1"):
            await store.create(LAYOUT.bookie(BookieId(bookie), read_only=False), make_parents=True)
            await store.create(LAYOUT.cookie(BookieId(bookie)), b"cookie", make_parents=True)
        for step in steps:
            await step(store)
        return await read_status(store, LAYOUT, now_ms=NOW_MS)

    return asyncio.run(main())


async def elect(store: MemoryStore) -> None:
    for data in (replication_formats.encode_vote("a1"), replication_formats.encode_vote(""), b"\xff\xff"):
        await store.create(f"{LAYOUT.auditor_election}/V_", data, sequential=True, make_parents=True)
    await store.create(f"{LAYOUT.auditor_election}/V_x")
    await store.create(f"{LAYOUT.auditor_election}/other-1")


async def lose_b1(store: MemoryStore) -> None:
    await store.delete(LAYOUT.bookie(BookieId("b1"), read_only=False), version=None)


def marks(store: MemoryStore) -> UnderreplicationManager:
    return UnderreplicationManager(store, LAYOUT, randomness=NoRandomness(), clock_ms=lambda: NOW_MS)


async def mark_7(store: MemoryStore) -> None:
    await marks(store).prepare()
    await marks(store).mark(LedgerId(7), ["b1"])


def record_7(**fields: Any) -> Any:
    async def step(store: MemoryStore) -> None:
        await mark_7(store)
        await RecoveryRecords(store).put(RecoveryRecord(LedgerId(7), **fields))

    return step


def worker(at_ms: int) -> Any:
    async def step(store: MemoryStore) -> None:
        data = json.dumps({"at_ms": at_ms, "state": "copying"}).encode()
        await store.create("/bindery/recovery/workers/w0", data, make_parents=True)

    return step


def member(intent: Intent, **options: Any) -> Any:
    async def step(store: MemoryStore) -> None:
        await MembershipStore(store, clock_ms=lambda: NOW_MS).set(BookieId("b1"), intent, by="ops", **options)

    return step


def test_an_empty_cluster_has_nothing_to_do_and_no_auditor() -> None:
    facts = status()
    assert (facts["at_ms"], facts["enabled"], facts["pause"]) == (NOW_MS, True, None)
    assert (facts["auditor"], facts["candidates"]) == (None, [])
    assert (facts["lost_bookies"], facts["draining"], facts["maintenance"]) == ([], [], [])
    assert facts["marked"] == {
        "ledgers": 0,
        "by_obstacle": {},
        "by_state": {},
        "by_reason": {},
        "examples": {},
        "bytes_left": 0,
        "entries_left": 0,
        "size_unknown": 0,
        "oldest": None,
    }
    assert (facts["workers"], facts["bytes_per_s"], facts["eta_s"], facts["audits"]) == ([], 0, None, [])
    assert facts["can_heal"] is False
    assert facts["problem"] == "no auditor is running: lost bookies are not detected"


def test_the_first_vote_is_the_leader_and_other_nodes_do_not_count() -> None:
    facts = status(elect)
    assert facts["candidates"] == ["a1", "(without a name)", "(unreadable)"]
    assert (facts["auditor"], facts["can_heal"], facts["problem"]) == ("a1", True, None)


def test_an_absent_bookie_that_no_auditor_saw_has_no_times() -> None:
    facts = status(elect, lose_b1)
    assert facts["lost_bookies"] == [
        {"bookie_id": "b1", "phase": "absent", "since_ms": None, "absent_s": None, "left_s": None}
    ]
    assert facts["problem"] == "no replication worker is running: nothing is copied"
    assert status(elect, lose_b1, worker(NOW_MS))["can_heal"] is True


def absent(**seen: Any) -> Any:
    """b1 as the auditor saw it ten seconds ago."""

    async def step(store: MemoryStore) -> None:
        await marks(store).prepare()
        await marks(store).set_lost_bookie_delay_s(120)
        cursor = {"bookies": {"b1": seen}, "saved_ms": NOW_MS - 10_000}
        await RecoveryRecords(store).put_cursor("lost-bookies", cursor)

    return step


@pytest.mark.parametrize(
    ("seen", "absent_s", "left_s"),
    [
        ({"phase": "waiting", "absent_s": 30.0, "since_ms": 5}, 40.0, 80.0),
        ({"phase": "waiting", "absent_s": 200.0, "since_ms": 5}, 210.0, 0.0),
        ({"phase": "handled", "absent_s": 30.0, "since_ms": 5}, 40.0, None),
    ],
)
def test_an_absence_is_extrapolated_from_what_the_auditor_saw(
    seen: dict[str, Any], absent_s: float, left_s: float | None
) -> None:
    facts = status(lose_b1, absent(**seen))
    assert facts["lost_bookie_delay_s"] == 120
    assert facts["lost_bookies"] == [
        {"bookie_id": "b1", "phase": seen["phase"], "since_ms": 5, "absent_s": absent_s, "left_s": left_s}
    ]


def test_an_absence_without_details_is_waiting_since_the_last_look() -> None:
    (facts,) = status(lose_b1, absent())["lost_bookies"]
    assert facts == {"bookie_id": "b1", "phase": "waiting", "since_ms": None, "absent_s": 10.0, "left_s": 110.0}


def test_a_bookie_in_maintenance_is_excused() -> None:
    facts = status(lose_b1, member(Intent.MAINTENANCE, until_ms=NOW_MS + 60_000, reason="disk"))
    assert facts["lost_bookies"] == []
    assert facts["maintenance"] == [
        {
            "bookie_id": "b1",
            "intent": "maintenance",
            "since_ms": NOW_MS,
            "by": "ops",
            "reason": "disk",
            "until_ms": NOW_MS + 60_000,
        }
    ]
    assert status(lose_b1, member(Intent.REMOVED))["lost_bookies"] == []


def draining(cursor: dict[str, Any] | None, **drain: int) -> dict[str, Any]:
    """Return the facts of b1 that is drained."""

    async def step(store: MemoryStore) -> None:
        if cursor is not None:
            await RecoveryRecords(store).put_cursor("draining", cursor)

    (facts,) = status(member(Intent.DRAINING, drain=drain), step)["draining"]
    return dict(facts)


def test_a_drain_without_a_report_shows_the_totals() -> None:
    facts = draining(None, ledgers_total=4, bytes_total=1000)
    assert (facts["ledgers_total"], facts["bytes_total"], facts["as_of_ms"]) == (4, 1000, None)
    assert "percent" not in facts
    assert facts["finished"] is False


@pytest.mark.parametrize(
    ("left", "totals", "percent"),
    [
        ({"ledgers_left": 1, "bytes_left": 250}, {"ledgers_total": 4, "bytes_total": 1000}, 75.0),
        ({"ledgers_left": 1, "bytes_left": 0}, {"ledgers_total": 4, "bytes_total": 1000}, 99.0),
        ({"ledgers_left": 1}, {"ledgers_total": 4}, 75.0),
        ({"ledgers_left": 0, "bytes_left": 0}, {}, 100.0),
        ({"ledgers_left": 9, "bytes_left": 3000}, {"ledgers_total": 4, "bytes_total": 1000}, 0.0),
    ],
)
def test_a_drain_is_measured_by_bytes_or_else_by_ledgers(
    left: dict[str, int], totals: dict[str, int], percent: float
) -> None:
    facts = draining({"bookies": {"b1": left}, "at_ms": 77}, **totals)
    assert facts["percent"] == percent
    assert facts["ledgers_left"] == left["ledgers_left"]
    assert facts["bytes_left"] == left.get("bytes_left", 0)
    assert facts["as_of_ms"] == 77


def test_a_mark_without_a_record_is_not_processed_yet() -> None:
    facts = status(elect, mark_7)
    assert facts["marked"] == {
        "ledgers": 1,
        "by_obstacle": {"not processed yet": 1},
        "by_state": {"unknown": 1},
        "by_reason": {"unknown": 1},
        "examples": {"not processed yet": {"ledger_id": 7, "detail": ""}},
        "bytes_left": 0,
        "entries_left": 0,
        "size_unknown": 1,
        "oldest": {"ledger_id": 7, "since_ms": NOW_MS, "age_s": 0.0},
    }
    assert facts["can_heal"] is False


@pytest.mark.parametrize(
    ("fields", "key"),
    [
        ({"state": RecoveryState.COPYING}, "copying"),
        ({"state": RecoveryState.WAITING, "obstacle": Obstacle.NO_SPARE}, "no_spare"),
        ({"state": RecoveryState.UNRECOVERABLE, "obstacle": Obstacle.NO_SPARE}, "unrecoverable: no_spare"),
    ],
)
def test_a_mark_is_counted_by_its_obstacle(fields: dict[str, Any], key: str) -> None:
    facts = status(record_7(first_marked_ms=NOW_MS - 5000, detail="why", missing_bytes=10, missing_entries=2, **fields))
    found = facts["marked"]
    assert found["by_obstacle"] == {key: 1}
    assert found["by_state"] == {fields["state"].value: 1}
    assert found["examples"] == {key: {"ledger_id": 7, "detail": "why"}}
    assert (found["bytes_left"], found["entries_left"], found["size_unknown"]) == (10, 2, 0)
    assert found["oldest"] == {"ledger_id": 7, "since_ms": NOW_MS - 5000, "age_s": 5.0}


@pytest.mark.parametrize(("age_ms", "stale"), [(30_000, False), (30_001, True), (-5, False)])
def test_a_report_is_stale_after_half_a_minute(age_ms: int, stale: bool) -> None:
    (found,) = status(worker(NOW_MS - age_ms))["workers"]
    assert (found["name"], found["state"], found["stale"]) == ("w0", "copying", stale)
    assert found["age_s"] == max(0, age_ms) / 1000


def test_no_randomness_is_ever_needed() -> None:
    assert NoRandomness().getrandbits(64) == 0
