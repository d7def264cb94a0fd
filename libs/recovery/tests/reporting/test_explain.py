"""The sentence that explains why a ledger is not healed, for each state and obstacle, word by word."""

from typing import Any

import pytest
from bindery_core.formats.ledger_metadata import LedgerMetadata, LedgerState, Segment
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_metadata.bookies.membership import Intent, Membership
from bindery_metadata.ledgers.closing_records import ClosingCause, ClosingRecord
from bindery_metadata.recovery.recovery_records import (
    Obstacle,
    Pause,
    Reason,
    RecoveryRecord,
    RecoveryState,
    WorkerReport,
)
from bindery_metadata.recovery.underreplication import Mark
from bindery_recovery.cluster.cluster_view import ClusterView
from bindery_recovery.records import sentences
from bindery_recovery.reporting.explain import Explanation, Known, explain

NOW_MS = 1_700_000_000_000
SEVEN = LedgerId(7)
A, B, C, D = (BookieId(f"bookie-{letter}") for letter in "abcd")
LEDGER = LedgerMetadata(
    ensemble_size=3,
    write_quorum=3,
    ack_quorum=2,
    segments=(Segment(EntryId(0), (A, B, C)),),
    state=LedgerState.CLOSED,
    last_entry_id=EntryId(99),
    length=1000,
)
OPEN = LEDGER.with_changes(state=LedgerState.OPEN, last_entry_id=EntryId(-1), length=0)
IDLE = WorkerReport("worker-1", NOW_MS - 1000, "idle")
BUSY = WorkerReport("worker-1", NOW_MS - 1000, "copying", LedgerId(8))
NOTE = ClosingRecord(SEVEN, ClosingCause.RECOVERED, NOW_MS - 3000)
LOST_B = Mark(SEVEN, (B,), NOW_MS - 60_000, 0)


def view(*bookies: BookieId, read_only: tuple[BookieId, ...] = (), **intents: Intent) -> ClusterView:
    memberships = {
        BookieId(f"bookie-{name}"): Membership(BookieId(f"bookie-{name}"), intent, until_ms=None)
        for name, intent in intents.items()
    }
    return ClusterView({b: b not in read_only for b in bookies}, memberships, now_ms=NOW_MS)


def said(**changes: Any) -> Explanation:
    facts: dict[str, Any] = {
        "ledger_id": SEVEN,
        "mark": LOST_B,
        "metadata": LEDGER,
        "view": view(A, C),
        "workers": [IDLE],
        "auditor": "auditor-1",
    }
    return explain(Known(**{**facts, **changes}))


def record(
    obstacle: Obstacle, detail: str = "", state: RecoveryState = RecoveryState.BLOCKED, **changes: Any
) -> RecoveryRecord:
    facts = {"reason": Reason.BOOKIE_LOST, "attempts": 3, "next_retry_ms": NOW_MS + 40_000, "bookies": (B,), **changes}
    return RecoveryRecord(SEVEN, state, obstacle=obstacle, detail=detail, **facts)


# --- not marked -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "sentence", "waits"),
    [
        pytest.param(
            {"view": view(A, B, C)},
            "Ledger 7 is not marked: no copy is known to be missing; to read every copy, run `bindery ledger check 7 "
            "--deep`.",
            False,
            id="whole",
        ),
        pytest.param(
            {"view": view(A, B, C), "closing": NOTE},
            "Ledger 7 is not marked, but it was closed by recovery after its writer may have continued without some "
            "copies, so some copies may be missing: the auditor auditor-1 has been checking the entry lists of its "
            "bookies for 3 s.",
            False,
            id="noted",
        ),
        pytest.param(
            {"view": view(A, B, C), "closing": NOTE, "metadata": OPEN},
            "Ledger 7 is not marked, but it was closed by recovery after its writer may have continued without some "
            "copies, so some copies may be missing: it is checked when it has been closed.",
            False,
            id="noted-open",
        ),
        pytest.param(
            {"view": view(A, B, C), "closing": ClosingRecord(SEVEN, ClosingCause.DEGRADED), "auditor": None},
            "Ledger 7 is not marked, but its writer continued without a copy of some entries, so some copies may be "
            "missing; it is not checked, because no auditor is running: start one.",
            True,
            id="noted-without-auditor",
        ),
        pytest.param(
            {"view": view(A, B, C), "closing": ClosingRecord(SEVEN, ClosingCause.IN_FLIGHT), "is_enabled": False},
            "Ledger 7 is not marked, but it was closed while copies were still being written, so some copies may be "
            "missing; it is not checked, because automatic recovery was disabled: run `bindery recovery resume` to "
            "enable it.",
            True,
            id="noted-while-off",
        ),
        pytest.param({"metadata": None}, "Ledger 7 does not exist.", False, id="nothing"),
        pytest.param(
            {"metadata": None, "metadata_error": "half a line"},
            "Ledger 7 is not marked, but its metadata cannot be read (half a line): restore it from a backup.",
            True,
            id="unreadable",
        ),
        pytest.param(
            {},
            "Ledger 7 is not marked yet, though bookie-b is not registered: the auditor auditor-1 marks it when the "
            "lost-bookie delay has passed.",
            False,
            id="one-away",
        ),
        pytest.param(
            {"view": view(A)},
            "Ledger 7 is not marked yet, though bookie-b and bookie-c are not registered: the auditor auditor-1 marks"
            " it when the lost-bookie delay has passed.",
            False,
            id="two-away",
        ),
        pytest.param(
            {"auditor": None},
            "Ledger 7 is not marked, though bookie-b is not registered, because no auditor is running: start one.",
            True,
            id="no-auditor",
        ),
        pytest.param(
            {"is_enabled": False},
            "Ledger 7 is not marked, though bookie-b is not registered, because automatic recovery was disabled: run "
            "`bindery recovery resume` to enable it.",
            True,
            id="switched-off",
        ),
        pytest.param(
            {"view": view(A, C, b=Intent.MAINTENANCE)},
            "Ledger 7 is not marked, because bookie-b is in maintenance: no action is needed.",
            False,
            id="maintenance",
        ),
        pytest.param(
            {"view": view(A, B, C, c=Intent.DRAINING)},
            "Ledger 7 is not marked yet, though bookie-c is leaving the cluster: the auditor auditor-1 marks it soon.",
            False,
            id="draining",
        ),
    ],
)
def test_a_ledger_without_a_mark_has_an_explanation(facts: dict[str, Any], sentence: str, waits: bool) -> None:
    assert said(mark=None, **facts) == (sentence, waits)


# --- marked, and not tried yet ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "sentence", "waits"),
    [
        pytest.param({"metadata": None}, "Ledger 7 was deleted: a worker will remove its mark.", False, id="gone"),
        pytest.param(
            {"is_enabled": False, "pause": Pause("anna", "disks are being moved", NOW_MS)},
            "Ledger 7 is marked and waits, because automatic recovery was disabled by anna (disks are being moved): "
            "run `bindery recovery resume` to enable it.",
            True,
            id="paused",
        ),
        pytest.param(
            {"is_enabled": False},
            "Ledger 7 is marked and waits, because automatic recovery was disabled: run `bindery recovery resume` to "
            "enable it.",
            True,
            id="switched-off",
        ),
        pytest.param(
            {"workers": []},
            "Ledger 7 is marked (copies are missing: bookie-b) and no replication worker is running: start an "
            "auditor, or set `autorecovery_embedded` on the bookies.",
            True,
            id="no-worker",
        ),
        pytest.param(
            {"workers": [WorkerReport("dead", NOW_MS - 60_000)], "record": record(Obstacle.NONE)},
            "Ledger 7 is marked (a bookie is lost: bookie-b) and no replication worker is running: start an auditor, "
            "or set `autorecovery_embedded` on the bookies.",
            True,
            id="worker-silent",
        ),
        pytest.param(
            {},
            "Ledger 7 is marked (copies are missing: bookie-b) and a worker will start within seconds: no action is "
            "needed.",
            False,
            id="idle-worker",
        ),
        pytest.param(
            {"workers": [BUSY], "record": record(Obstacle.NONE, reason=Reason.BOOKIE_DRAINING)},
            "Ledger 7 is marked (a bookie is drained: bookie-b) and waits for a worker: the only worker is busy with "
            "other ledgers; more workers or a higher rate limit would shorten the wait.",
            False,
            id="busy-worker",
        ),
        pytest.param(
            {"workers": [BUSY, BUSY], "record": record(Obstacle.NONE, reason=Reason.ENTRY_MISSING)},
            "Ledger 7 is marked (a check found missing or corrupt entries: bookie-b) and waits for a worker: all 2 "
            "workers are busy with other ledgers; more workers or a higher rate limit would shorten the wait.",
            False,
            id="busy-workers",
        ),
        pytest.param(
            {"locked_by": "worker-1", "record": record(Obstacle.NONE, state=RecoveryState.WAITING)},
            "Ledger 7 is being checked by worker-1: no action is needed.",
            False,
            id="locked",
        ),
        pytest.param(
            {"locked_by": ""},
            "Ledger 7 is being checked by a worker: no action is needed.",
            False,
            id="locked-by-apache",
        ),
        pytest.param(
            {
                "locked_by": "worker-1",
                "workers": [WorkerReport("worker-1", NOW_MS, "copying", SEVEN, bytes_per_s=1e6)],
                "record": record(
                    Obstacle.NONE, state=RecoveryState.COPYING, missing_entries=12_000, missing_bytes=300_000_000
                ),
            },
            "Ledger 7 is being copied by worker-1, 12,000 copies left (286.1 MiB), about 5 min: no action is needed.",
            False,
            id="copying",
        ),
        pytest.param(
            {"locked_by": "worker-1", "record": record(Obstacle.NONE, state=RecoveryState.COPYING, missing_entries=1)},
            "Ledger 7 is being copied by worker-1, 1 copy left: no action is needed.",
            False,
            id="copying-of-unknown-size",
        ),
    ],
)
def test_a_marked_ledger_without_an_obstacle_has_an_explanation(
    facts: dict[str, Any], sentence: str, waits: bool
) -> None:
    assert said(**facts) == (sentence, waits)


# --- every obstacle ---------------------------------------------------------------------------------------------------

NO_SPARE = sentences.no_spare(B, (A, B, C), view(A, C, D, read_only=(D,)))
AGAIN = " (next attempt in 40 s, after 3 attempts)."
WAITING = RecoveryState.WAITING

CASES: dict[str, tuple[dict[str, Any], str, bool]] = {
    "refilling": (
        {"record": record(Obstacle.NONE, sentences.refilling(B), WAITING, attempts=0)},
        "Ledger 7 is not repaired because bookie-b lost its storage and refills it from the other bookies: no action "
        "is needed (next attempt in 40 s).",
        False,
    ),
    "maintenance": (
        {"record": record(Obstacle.NONE, sentences.in_maintenance(B, NOW_MS, NOW_MS + 200_000), WAITING, attempts=0)},
        "Ledger 7 is not repaired because bookie-b is in maintenance for another 3 min: it is replaced only if it "
        "does not return by then (next attempt in 40 s).",
        False,
    ),
    "no-spare": (
        {"view": view(A, C, D, read_only=(D,)), "record": record(Obstacle.NO_SPARE, NO_SPARE)},
        "Ledger 7 is not repaired because no bookie can replace bookie-b: none of 2 writable bookies can accept "
        "copies of this ledger (bookie-d is read-only); add a bookie, or start bookie-b again" + AGAIN,
        True,
    ),
    "no-spare-but-one-joined": (
        {"view": view(A, C, D), "record": record(Obstacle.NO_SPARE, NO_SPARE)},
        "Ledger 7 is not repaired because there was no spare bookie at the last attempt, but bookie-d can accept "
        "copies now: it will be repaired" + AGAIN,
        False,
    ),
    "no-spare-but-one-that-drains": (
        {"view": view(A, C, D, d=Intent.DRAINING), "record": record(Obstacle.NO_SPARE, NO_SPARE)},
        "Ledger 7 is not repaired because " + NO_SPARE + AGAIN,
        True,
    ),
    "no-spare-open": (
        {
            "metadata": OPEN,
            "record": record(Obstacle.NO_SPARE, sentences.no_spare(B, (A, B, C), view(A, C), is_open=True)),
        },
        "Ledger 7 is not repaired because no bookie can replace bookie-b: none of 2 writable bookies can accept "
        "copies of this ledger; the ledger stays open and its writer continues with the other bookies; add a bookie, "
        "or start bookie-b again" + AGAIN,
        True,
    ),
    "no-copy-left": (
        {
            "record": record(
                Obstacle.NO_COPY_LEFT,
                "entry 4 cannot be read from any bookie: bookie-b is gone for good",
                RecoveryState.UNRECOVERABLE,
                next_retry_ms=None,
            )
        },
        "Ledger 7 is not repaired because no good copy of some entries is left (entry 4 cannot be read from any "
        "bookie: bookie-b is gone for good): start a bookie that had one, with its disks, or delete the ledger (the "
        "next attempt follows when a bookie returns, or after `bindery recovery retry`).",
        True,
    ),
    "source-away": (
        {"record": record(Obstacle.SOURCE_UNAVAILABLE, "entry 4 cannot be read from any bookie: it is not registered")},
        "Ledger 7 is not repaired because the bookies that may have good copies do not return them (entry 4 cannot be"
        " read from any bookie: it is not registered): start bookie-b again" + AGAIN,
        True,
    ),
    "source-silent": (
        {"view": view(A, B, C), "record": record(Obstacle.SOURCE_UNAVAILABLE, "entry 4 cannot be read")},
        "Ledger 7 is not repaired because the bookies that may have good copies do not return them (entry 4 cannot be"
        " read): find out why these bookies do not answer" + AGAIN,
        True,
    ),
    "limbo": (
        {"record": record(Obstacle.SOURCE_IN_LIMBO, "entry 4 cannot be read")},
        "Ledger 7 is not repaired because the last copies may be on a bookie that lost its storage (entry 4 cannot be"
        " read): start the other bookies that had them, or wait until that bookie has refilled its storage" + AGAIN,
        True,
    ),
    "target": (
        {"record": record(Obstacle.TARGET_REFUSES, "bookie-d answers READ_ONLY")},
        "Ledger 7 is not repaired because no bookie accepts the copies (bookie-d answers READ_ONLY): free disk space,"
        " or add a bookie" + AGAIN,
        True,
    ),
    "grace": (
        {"metadata": OPEN, "record": record(Obstacle.LEDGER_OPEN, sentences.grace(7, [B], 30), WAITING, attempts=0)},
        "Ledger 7 is not repaired because it is open and its writer has 30 s left to replace bookie-b itself: after "
        "that, the ledger is closed and repaired (next attempt in 40 s).",
        False,
    ),
    "open-with-a-hole": (
        {"metadata": OPEN, "record": record(Obstacle.LEDGER_OPEN, sentences.open_with_hole(7, [B]))},
        "Ledger 7 is not repaired because it is open and its writer continued without some copies on bookie-b: they "
        "are created when the writer closes the ledger or replaces the bookie" + AGAIN,
        True,
    ),
    "open-but-closed-meanwhile": (
        {"record": record(Obstacle.LEDGER_OPEN, sentences.open_with_hole(7, [B]))},
        "Ledger 7 is not repaired because it was open at the last attempt and is closed now: it will be repaired soon"
        + AGAIN,
        False,
    ),
    "recovery": (
        {"metadata": OPEN, "record": record(Obstacle.RECOVERY_IMPOSSIBLE, sentences.recovery_impossible(7, "1 of 3"))},
        "Ledger 7 is not repaired because it is open and cannot be closed, because too few of its bookies answer to "
        "find its last entry (1 of 3): start them again" + AGAIN,
        True,
    ),
    "recovered-meanwhile": (
        {"record": record(Obstacle.RECOVERY_IMPOSSIBLE, sentences.recovery_impossible(7, "1 of 3"))},
        "Ledger 7 is not repaired because it could not be closed at the last attempt and is closed now: it will be "
        "repaired soon" + AGAIN,
        False,
    ),
    "metadata": (
        {
            "metadata": None,
            "metadata_error": "half a line",
            "record": record(Obstacle.METADATA_UNREADABLE, sentences.metadata_unreadable(7, "half a line")),
        },
        "Ledger 7 is not repaired because the metadata of ledger 7 cannot be read (half a line): restore it from a "
        "backup, or delete the ledger" + AGAIN,
        True,
    ),
    "metadata-restored": (
        {"record": record(Obstacle.METADATA_UNREADABLE, sentences.metadata_unreadable(7, "half a line"))},
        "Ledger 7 is not repaired because its metadata could not be read at the last attempt and can be read now: it "
        "will be repaired soon" + AGAIN,
        False,
    ),
    "paused-meanwhile": (
        {"record": record(Obstacle.PAUSED, sentences.paused(), WAITING, attempts=0, next_retry_ms=NOW_MS - 1)},
        "Ledger 7 is not repaired because automatic recovery was disabled during the last attempt and is enabled now:"
        " a worker will start soon (next attempt now).",
        False,
    ),
    "error": (
        {"record": record(Obstacle.ERROR, sentences.unsure(B, "IO_ERROR"), RecoveryState.BACKING_OFF, attempts=1)},
        "Ledger 7 is not repaired because the last attempt failed (bookie-b does not report its entries (IO_ERROR): "
        "the check is repeated, then the bookie is replaced) (next attempt in 40 s, after 1 attempt).",
        False,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_obstacle_has_its_sentence(name: str) -> None:
    facts, sentence, waits = CASES[name]
    assert said(**facts) == (sentence, waits)


def test_every_obstacle_and_every_state_has_a_case() -> None:
    records = [facts["record"] for facts, _, _ in CASES.values()]
    assert {one.obstacle for one in records} == set(Obstacle)
    states = {one.state for one in records} | {RecoveryState.COPYING, RecoveryState.HEALED}
    assert states == set(RecoveryState)  # COPYING is above; a healed ledger has no record


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_has_its_words(reason: Reason) -> None:
    sentence, _ = said(record=record(Obstacle.NONE, reason=reason))
    assert sentence.startswith("Ledger 7 is marked (")
    assert ": bookie-b) and a worker will start" in sentence
    assert "_" not in sentence, "the sentence contains no codes"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.2, "1 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h"), (200_000, "2 days")],
)
def test_a_span_is_shown_in_one_unit(value: float, text: str) -> None:
    assert sentences.span(value) == text


@pytest.mark.parametrize(("value", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**50, "1024.0 TiB")])
def test_a_size_is_shown_in_one_unit(value: int, text: str) -> None:
    assert sentences.size(value) == text
