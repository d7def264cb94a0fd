"""Why a ledger is not repaired: the text line by line, and another attempt on metadata in memory."""

import random
from typing import Any

import pytest
from bindery.recovery.recovery_explain import explain_ledger, explanation_lines, retry_ledger
from bindery_core.errors import NoSuchLedger, NotThere
from bindery_core.formats.ledger_metadata import LedgerMetadata, LedgerState, Segment
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_metadata.cluster import initialize_cluster
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.recovery.recovery_records import Obstacle, RecoveryRecord, RecoveryRecords, RecoveryState
from bindery_metadata.recovery.underreplication import UnderreplicationManager
from bindery_metadata.stores.memory import MemoryStore, MemoryTree
from bindery_recovery.admin.recovery_admin import RecoveryAdmin

LEDGER = LedgerId(7)
NOTHING: dict[str, Any] = {
    "sentence": "Nothing is known.",
    "unreadable": None,
    "state": None,
    "bookies": [],
    "mark": None,
    "locked_by": None,
    "record": None,
    "verified": None,
    "auditor": None,
    "workers": [],
}
RECORD: dict[str, Any] = {
    "state": "waiting",
    "attempts": 2,
    "reason": "bookie_lost",
    "obstacle": "no_spare",
    "last_error": "",
    "missing_entries": None,
    "missing_bytes": None,
    "next_retry_ms": None,
}


def lines(**facts: Any) -> list[str]:
    return explanation_lines({**NOTHING, **facts})


def test_the_sentence_comes_first_and_the_roles_last() -> None:
    assert lines() == [
        "Nothing is known.",
        "",
        "marked           no",
        "auditor          none",
        "workers          none",
    ]
    assert lines(auditor="a1", workers=["w0", "w1"])[-2:] == ["auditor          a1", "workers          w0, w1"]


def test_metadata_and_bookies_are_shown() -> None:
    bookies = [
        {"bookie_id": "b0", "registered": "writable", "intent": "active"},
        {"bookie_id": "b1", "registered": "absent", "intent": "maintenance"},
    ]
    assert lines(unreadable="junk", state="closed", bookies=bookies)[2:6] == [
        "metadata         junk",
        "ledger           closed",
        "bookie           b0: writable",
        "bookie           b1: absent, maintenance",
    ]


@pytest.mark.parametrize(
    ("mark", "text"),
    [
        ({"replicas": ["b0", "b1"], "ctime_ms": 60_000}, "b0, b1 since 1970-01-01 00:01:00Z"),
        ({"replicas": [], "ctime_ms": 0}, "without naming a bookie"),
    ],
)
def test_a_mark_names_its_bookies(mark: dict[str, Any], text: str) -> None:
    assert lines(mark=mark)[2] == f"marked           {text}"


def test_the_worker_that_holds_the_lock_is_named() -> None:
    assert lines(locked_by="w0")[3] == "worker           w0"
    assert lines(locked_by="")[3] == "worker           (without a name)"


def test_a_record_shows_what_it_knows() -> None:
    assert lines(record=RECORD)[3:-2] == [
        "state            waiting, 2 attempts",
        "why marked       bookie_lost",
        "obstacle         no_spare",
    ]
    full = {**RECORD, "last_error": "refused", "missing_entries": 0, "missing_bytes": 1536, "next_retry_ms": 0}
    assert lines(record=full)[6:-2] == [
        "last error       refused",
        "to copy          0 entries, 1.5 KiB",
        "next attempt     1970-01-01 00:00:00Z",
    ]
    assert lines(record={**RECORD, "missing_entries": 4})[6] == "to copy          4 entries"


def test_the_last_verification_is_shown() -> None:
    verified = {"verified_at_ms": 1000, "level": "deep", "run_id": "r1"}
    assert lines(verified=verified)[3] == "verified         1970-01-01 00:00:01Z, level deep, run r1"


# --- from the metadata ------------------------------------------------------------------------------------------------


async def explained(*, closed: bool, bookies: dict[str, bool], mark: bool = False) -> dict[str, Any]:
    """Return the facts of ledger 7 on b0 and b1. `bookies`: the registered ones, True: writable."""
    store, layout = MemoryTree(now_ms=lambda: 5).connect(), LedgersLayout()
    await initialize_cluster(store, layout, randomness=random.Random(1))
    metadata = LedgerMetadata(
        ensemble_size=2,
        write_quorum=2,
        ack_quorum=1,
        segments=(Segment(EntryId(0), (BookieId("b1"), BookieId("b0"))),),
    )
    if closed:
        metadata = metadata.with_changes(state=LedgerState.CLOSED, last_entry_id=EntryId(9), length=10)

    class Ledgers:
        async def metadata(self, ledger_id: LedgerId) -> LedgerMetadata:
            if ledger_id != LEDGER:
                raise NoSuchLedger
            return metadata

        async def list_bookies(self) -> dict[BookieId, bool]:
            return {BookieId(name): writable for name, writable in bookies.items()}

    async def ledgers() -> Any:
        return Ledgers()

    admin = RecoveryAdmin(store, layout, by="ops", ledgers=ledgers, randomness=random.Random(1), clock_ms=lambda: 10)
    await admin.marks.prepare()
    if mark:
        await admin.marks.mark(LEDGER, ["b0"])
        await RecoveryRecords(store).put(RecoveryRecord(LEDGER, attempts=3, missing_entries=4))
    return await explain_ledger(admin, LEDGER)


async def test_a_sound_ledger_is_explained() -> None:
    facts = await explained(closed=True, bookies={"b0": True, "b1": False})
    assert facts["ledger_id"] == 7
    assert (facts["state"], facts["last_entry_id"], facts["enabled"]) == ("closed", 9, True)
    assert facts["bookies"] == [
        {"bookie_id": "b0", "registered": "writable", "intent": "active"},
        {"bookie_id": "b1", "registered": "read-only", "intent": "active"},
    ]
    assert (facts["mark"], facts["record"], facts["locked_by"], facts["verified"]) == (None, None, None, None)
    assert (facts["auditor"], facts["workers"], facts["waits"]) == (None, [], False)
    assert "no copy is known to be missing" in facts["sentence"]


async def test_a_marked_ledger_is_explained_with_its_record() -> None:
    facts = await explained(closed=False, bookies={"b1": True}, mark=True)
    assert (facts["state"], facts["last_entry_id"]) == ("open", None)
    assert facts["bookies"][0] == {"bookie_id": "b0", "registered": "absent", "intent": "active"}
    assert facts["mark"]["replicas"] == ["b0"]
    record = facts["record"]
    assert (record["state"], record["obstacle"], record["attempts"]) == ("waiting", "none", 3)
    assert (record["missing_entries"], record["missing_bytes"], record["bookies"]) == (4, None, [])
    assert facts["waits"] is True


# --- another attempt --------------------------------------------------------------------------------------------------


async def managers(*, marked: bool) -> tuple[UnderreplicationManager, RecoveryRecords]:
    store: MemoryStore = MemoryTree().connect()
    marks = UnderreplicationManager(store, LedgersLayout(), randomness=random.Random(1), clock_ms=lambda: 5)
    await marks.prepare()
    if marked:
        await marks.mark(LEDGER, ["b0"])
    return marks, RecoveryRecords(store)


async def test_a_retry_ends_the_back_off_and_keeps_the_history() -> None:
    marks, records = await managers(marked=True)
    before = RecoveryRecord(
        LEDGER,
        state=RecoveryState.UNRECOVERABLE,
        obstacle=Obstacle.NO_COPY_LEFT,
        detail="lost",
        attempts=9,
        next_retry_ms=77,
        last_error="gone",
        first_marked_ms=3,
    )
    await records.put(before)
    found = await retry_ledger(marks, records, LEDGER)
    assert found is not None
    assert (found.state, found.attempts) == (RecoveryState.UNRECOVERABLE, 9)
    after = await records.get(LEDGER)
    assert after is not None
    assert (after.state, after.obstacle, after.detail) == (RecoveryState.WAITING, Obstacle.NONE, "")
    assert (after.attempts, after.next_retry_ms) == (0, None)
    assert (after.last_error, after.first_marked_ms) == ("gone", 3)


async def test_a_marked_ledger_without_a_record_needs_no_retry() -> None:
    marks, records = await managers(marked=True)
    assert await retry_ledger(marks, records, LEDGER) is None
    assert await records.get(LEDGER) is None


async def test_a_ledger_that_is_not_marked_is_refused() -> None:
    marks, records = await managers(marked=False)
    with pytest.raises(NotThere, match="ledger 7 is not marked: no copy is known to be missing"):
        await retry_ledger(marks, records, LEDGER)
