"""The sentence that says why a ledger is not healed, for each state and obstacle, word by word."""

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
    ensemble_size=3, write_quorum=3, ack_quorum=2, segments=(Segment(EntryId(0), (A, B, C)),),
    state=LedgerState.CLOSED, last_entry_id=EntryId(99), length=1000,
)  # fmt: skip
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
        "ledger_id": SEVEN, "mark": LOST_B, "metadata": LEDGER, "view": view(A, C), "workers": [IDLE],
        "auditor": "auditor-1",
    }  # fmt: skip
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
            "Ledger 7 is not marked: as far as is known every copy is there, and `bindery ledger check 7 --deep`"
            " looks.",
            False, id="whole",
        ),
        pytest.param(
            {"view": view(A, B, C), "closing": NOTE},
            "Ledger 7 is not marked, but it was closed by recovery, whose writer may have gone on without some, so that"
            " it may lack copies: since 3 s the auditor auditor-1 asks its bookies for their lists of entries.",
            False, id="noted",
        ),
        pytest.param(
            {"view": view(A, B, C), "closing": NOTE, "metadata": OPEN},
            "Ledger 7 is not marked, but it was closed by recovery, whose writer may have gone on without some, so that"
            " it may lack copies: it is not closed yet, and is looked at once it is.",
            False, id="noted-open",
        ),
        pytest.param(
            {"view": view(A, B, C), "closing": ClosingRecord(SEVEN, ClosingCause.DEGRADED), "auditor": None},
            "Ledger 7 is not marked, but its writer went on without a copy of some entries, so that it may lack copies;"
            " nobody looks, because no auditor runs: start one.",
            True, id="noted-without-auditor",
        ),
        pytest.param(
            {"view": view(A, B, C), "closing": ClosingRecord(SEVEN, ClosingCause.IN_FLIGHT), "is_enabled": False},
            "Ledger 7 is not marked, but it was closed while copies were on their way, so that it may lack copies;"
            " nobody looks, because automatic recovery was switched off: `bindery recovery resume` switches it on.",
            True, id="noted-while-off",
        ),
        pytest.param({"metadata": None}, "Ledger 7 does not exist, and nothing is to be healed.", False, id="nothing"),
        pytest.param(
            {"metadata": None, "metadata_error": "half a line"},
            "Ledger 7 is not marked, but its metadata cannot be read (half a line): restore them.",
            True, id="unreadable",
        ),
        pytest.param(
            {},
            "Ledger 7 is not marked yet, though bookie-b is not registered: the auditor auditor-1 marks it once it has"
            " been away for the lost-bookie delay.",
            False, id="one-away",
        ),
        pytest.param(
            {"view": view(A)},
            "Ledger 7 is not marked yet, though bookie-b and bookie-c are not registered: the auditor auditor-1 marks"
            " it once they have been away for the lost-bookie delay.",
            False, id="two-away",
        ),
        pytest.param(
            {"auditor": None},
            "Ledger 7 is not marked, though bookie-b is not registered, because no auditor runs: start one.",
            True, id="no-auditor",
        ),
        pytest.param(
            {"is_enabled": False},
            "Ledger 7 is not marked, though bookie-b is not registered, because automatic recovery was switched off:"
            " `bindery recovery resume` switches it on.",
            True, id="switched-off",
        ),
        pytest.param(
            {"view": view(A, C, b=Intent.MAINTENANCE)},
            "Ledger 7 is not marked, because bookie-b may be away for maintenance: nothing is to be done.",
            False, id="maintenance",
        ),
        pytest.param(
            {"view": view(A, B, C, c=Intent.DRAINING)},
            "Ledger 7 is not marked yet, though bookie-c is to hold nothing: the auditor auditor-1 marks it soon.",
            False, id="draining",
        ),
    ],
)  # fmt: skip
def test_a_ledger_that_is_not_marked(facts: dict[str, Any], sentence: str, waits: bool) -> None:
    assert said(mark=None, **facts) == (sentence, waits)


# --- marked, and not tried yet ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("facts", "sentence", "waits"),
    [
        pytest.param(
            {"metadata": None}, "Ledger 7 was deleted: its mark goes as soon as a worker looks at it.", False, id="gone"
        ),
        pytest.param(
            {"is_enabled": False, "pause": Pause("anna", "disks are being moved", NOW_MS)},
            "Ledger 7 is marked and waits, because automatic recovery was switched off by anna (disks are being moved):"
            " `bindery recovery resume` switches it on.",
            True, id="paused",
        ),
        pytest.param(
            {"is_enabled": False},
            "Ledger 7 is marked and waits, because automatic recovery was switched off: `bindery recovery resume`"
            " switches it on.",
            True, id="switched-off",
        ),
        pytest.param(
            {"workers": []},
            "Ledger 7 is marked (copies are missing: bookie-b) and no replication worker runs: start an auditor, or set"
            " `autorecovery_embedded` on the bookies.",
            True, id="no-worker",
        ),
        pytest.param(
            {"workers": [WorkerReport("dead", NOW_MS - 60_000)], "record": record(Obstacle.NONE)},
            "Ledger 7 is marked (a bookie is lost: bookie-b) and no replication worker runs: start an auditor, or set"
            " `autorecovery_embedded` on the bookies.",
            True, id="worker-silent",
        ),
        pytest.param(
            {},
            "Ledger 7 is marked (copies are missing: bookie-b) and a worker takes it within seconds: nothing is to be"
            " done.",
            False, id="idle-worker",
        ),
        pytest.param(
            {"workers": [BUSY], "record": record(Obstacle.NONE, reason=Reason.BOOKIE_DRAINING)},
            "Ledger 7 is marked (a bookie is drained: bookie-b) and waits for a worker: the worker is at other ledgers;"
            " more workers or a higher rate would make it quicker.",
            False, id="busy-worker",
        ),
        pytest.param(
            {"workers": [BUSY, BUSY], "record": record(Obstacle.NONE, reason=Reason.ENTRY_MISSING)},
            "Ledger 7 is marked (a check found copies missing or corrupt: bookie-b) and waits for a worker: all 2"
            " workers are at other ledgers; more workers or a higher rate would make it quicker.",
            False, id="busy-workers",
        ),
        pytest.param(
            {"locked_by": "worker-1", "record": record(Obstacle.NONE, state=RecoveryState.WAITING)},
            "Ledger 7 is being looked at by worker-1 right now: nothing is to be done.",
            False, id="locked",
        ),
        pytest.param(
            {"locked_by": ""},
            "Ledger 7 is being looked at by a worker right now: nothing is to be done.",
            False, id="locked-by-apache",
        ),
        pytest.param(
            {
                "locked_by": "worker-1",
                "workers": [WorkerReport("worker-1", NOW_MS, "copying", SEVEN, bytes_per_s=1e6)],
                "record": record(
                    Obstacle.NONE, state=RecoveryState.COPYING, missing_entries=12_000, missing_bytes=300_000_000
                ),
            },
            "Ledger 7 is being copied by worker-1 right now, 12,000 copies to go (286.1 MiB), done in about 5 min:"
            " nothing is to be done.",
            False, id="copying",
        ),
        pytest.param(
            {"locked_by": "worker-1", "record": record(Obstacle.NONE, state=RecoveryState.COPYING, missing_entries=1)},
            "Ledger 7 is being copied by worker-1 right now, 1 copy to go: nothing is to be done.",
            False, id="copying-of-unknown-size",
        ),
    ],
)  # fmt: skip
def test_a_ledger_that_has_met_no_obstacle(facts: dict[str, Any], sentence: str, waits: bool) -> None:
    assert said(**facts) == (sentence, waits)


# --- every obstacle ---------------------------------------------------------------------------------------------------

NO_SPARE = sentences.no_spare(B, (A, B, C), view(A, C, D, read_only=(D,)))
AGAIN = " (looked at again in 40 s, after 3 attempts)."
WAITING = RecoveryState.WAITING

CASES: dict[str, tuple[dict[str, Any], str, bool]] = {
    "refilling": (
        {"record": record(Obstacle.NONE, sentences.refilling(B), WAITING, attempts=0)},
        "Ledger 7 is not healed because bookie-b lost its storage and refills it from the other bookies: nothing is to"
        " be done (looked at again in 40 s).",
        False,
    ),
    "maintenance": (
        {"record": record(Obstacle.NONE, sentences.excused(B, NOW_MS, NOW_MS + 200_000), WAITING, attempts=0)},
        "Ledger 7 is not healed because bookie-b is away for maintenance for 3 min more: it is waited for, and replaced"
        " when it does not come back (looked at again in 40 s).",
        False,
    ),
    "no-spare": (
        {"view": view(A, C, D, read_only=(D,)), "record": record(Obstacle.NO_SPARE, NO_SPARE)},
        "Ledger 7 is not healed because no bookie can take the place of bookie-b: of 2 writable bookies none is free of"
        " this ledger (bookie-d is read-only); add a bookie, or bring bookie-b back" + AGAIN,
        True,
    ),
    "no-spare-but-one-joined": (
        {"view": view(A, C, D), "record": record(Obstacle.NO_SPARE, NO_SPARE)},
        "Ledger 7 is not healed because there was no spare bookie when it was tried, but now there is bookie-d: it is"
        " healed soon" + AGAIN,
        False,
    ),
    "no-spare-but-one-that-drains": (
        {"view": view(A, C, D, d=Intent.DRAINING), "record": record(Obstacle.NO_SPARE, NO_SPARE)},
        "Ledger 7 is not healed because " + NO_SPARE + AGAIN,
        True,
    ),
    "no-spare-open": (
        {
            "metadata": OPEN,
            "record": record(Obstacle.NO_SPARE, sentences.no_spare(B, (A, B, C), view(A, C), is_open=True)),
        },
        "Ledger 7 is not healed because no bookie can take the place of bookie-b: of 2 writable bookies none is free of"
        " this ledger; it stays open and its writer goes on with the others; add a bookie, or bring bookie-b back"
        + AGAIN,
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
        "Ledger 7 is not healed because no good copy is left of some entries (entry 4 cannot be read from any bookie:"
        " bookie-b is gone for good): bring a bookie back that had one, with its disks, or delete the ledger (it is"
        " tried again when a bookie returns, or with `bindery recovery retry`).",
        True,
    ),
    "source-away": (
        {"record": record(Obstacle.SOURCE_UNAVAILABLE, "entry 4 cannot be read from any bookie: it is not registered")},
        "Ledger 7 is not healed because the bookies that may have good copies do not give them (entry 4 cannot be read"
        " from any bookie: it is not registered): bring bookie-b back" + AGAIN,
        True,
    ),
    "source-silent": (
        {"view": view(A, B, C), "record": record(Obstacle.SOURCE_UNAVAILABLE, "entry 4 cannot be read")},
        "Ledger 7 is not healed because the bookies that may have good copies do not give them (entry 4 cannot be"
        " read): see what keeps these bookies from answering" + AGAIN,
        True,
    ),
    "limbo": (
        {"record": record(Obstacle.SOURCE_IN_LIMBO, "entry 4 cannot be read")},
        "Ledger 7 is not healed because what may be the last copies lie on a bookie that lost storage (entry 4 cannot"
        " be read): bring back the other bookies that had them, or wait until it has refilled what it can" + AGAIN,
        True,
    ),
    "target": (
        {"record": record(Obstacle.TARGET_REFUSES, "bookie-d answers READ_ONLY")},
        "Ledger 7 is not healed because no bookie takes the copies (bookie-d answers READ_ONLY): free its disk, or add"
        " a bookie" + AGAIN,
        True,
    ),
    "grace": (
        {"metadata": OPEN, "record": record(Obstacle.LEDGER_OPEN, sentences.grace(7, [B], 30), WAITING, attempts=0)},
        "Ledger 7 is not healed because it is open and its writer has 30 s more to replace bookie-b itself: then"
        " it is closed and healed (looked at again in 40 s).",
        False,
    ),
    "open-with-a-hole": (
        {"metadata": OPEN, "record": record(Obstacle.LEDGER_OPEN, sentences.open_with_hole(7, [B]))},
        "Ledger 7 is not healed because it is open and its writer went on without some copies on bookie-b: they"
        " are made once the writer closes it or changes its bookies" + AGAIN,
        True,
    ),
    "open-but-closed-meanwhile": (
        {"record": record(Obstacle.LEDGER_OPEN, sentences.open_with_hole(7, [B]))},
        "Ledger 7 is not healed because it was open when it was looked at, and is closed now: it is healed soon"
        + AGAIN,
        False,
    ),
    "recovery": (
        {"metadata": OPEN, "record": record(Obstacle.RECOVERY_IMPOSSIBLE, sentences.recovery_impossible(7, "1 of 3"))},
        "Ledger 7 is not healed because it is open and cannot be closed, because too few of its bookies say where"
        " it ends (1 of 3): bring them back" + AGAIN,
        True,
    ),
    "recovered-meanwhile": (
        {"record": record(Obstacle.RECOVERY_IMPOSSIBLE, sentences.recovery_impossible(7, "1 of 3"))},
        "Ledger 7 is not healed because it could not be closed when it was tried, and is closed now: it is healed soon"
        + AGAIN,
        False,
    ),
    "metadata": (
        {
            "metadata": None,
            "metadata_error": "half a line",
            "record": record(Obstacle.METADATA_UNREADABLE, sentences.metadata_unreadable(7, "half a line")),
        },
        "Ledger 7 is not healed because the metadata of ledger 7 cannot be read (half a line): restore them from a"
        " backup, or delete the ledger" + AGAIN,
        True,
    ),
    "metadata-restored": (
        {"record": record(Obstacle.METADATA_UNREADABLE, sentences.metadata_unreadable(7, "half a line"))},
        "Ledger 7 is not healed because its metadata could not be read when it was tried, and can be now: it is healed"
        " soon" + AGAIN,
        False,
    ),
    "paused-meanwhile": (
        {"record": record(Obstacle.PAUSED, sentences.paused(), WAITING, attempts=0, next_retry_ms=NOW_MS - 1)},
        "Ledger 7 is not healed because automatic recovery was switched off while it was copied, and is on again: a"
        " worker takes it soon (looked at again now).",
        False,
    ),
    "error": (
        {"record": record(Obstacle.ERROR, sentences.unsure(B, "IO_ERROR"), RecoveryState.BACKING_OFF, attempts=1)},
        "Ledger 7 is not healed because the last attempt failed (bookie-b cannot say whether it has its copies"
        " (IO_ERROR): it is asked again, and then replaced) (looked at again in 40 s, after 1 attempt).",
        False,
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_every_obstacle_has_its_sentence(name: str) -> None:
    facts, sentence, waits = CASES[name]
    assert said(**facts) == (sentence, waits)


def test_no_obstacle_and_no_state_was_forgotten() -> None:
    records = [facts["record"] for facts, _, _ in CASES.values()]
    assert {one.obstacle for one in records} == set(Obstacle)
    states = {one.state for one in records} | {RecoveryState.COPYING, RecoveryState.HEALED}
    assert states == set(RecoveryState)  # COPYING is above; a healed ledger has no record


@pytest.mark.parametrize("reason", list(Reason))
def test_every_reason_has_its_words(reason: Reason) -> None:
    sentence, _ = said(record=record(Obstacle.NONE, reason=reason))
    assert sentence.startswith("Ledger 7 is marked (")
    assert ": bookie-b) and a worker takes it" in sentence
    assert "_" not in sentence, "words, not codes"


@pytest.mark.parametrize(
    ("value", "text"),
    [(0.2, "1 s"), (119, "119 s"), (120, "2 min"), (7200, "2 h"), (200_000, "2 days")],
)
def test_spans(value: float, text: str) -> None:
    assert sentences.span(value) == text


@pytest.mark.parametrize(("value", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (2**50, "1024.0 TiB")])
def test_sizes(value: int, text: str) -> None:
    assert sentences.size(value) == text
