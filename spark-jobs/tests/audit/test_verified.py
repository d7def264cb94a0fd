"""Which ledgers a run verifies, and which records of earlier runs it invalidates."""

import pytest
from bindery_core.ids import LedgerId
from bindery_metadata.ledgers.verified_records import Verified
from bindery_spark.audit.ledger_history import KnownLedger, LedgerHistory
from bindery_spark.audit.verified import bad_ledgers, stale_records, verified_ledgers

CLOSED = KnownLedger(1, "closed", 3, 3, 9, 100, None)


def changed(**fields: object) -> KnownLedger:
    return KnownLedger(**{**{name: getattr(CLOSED, name) for name in KnownLedger.__dataclass_fields__}, **fields})


@pytest.mark.parametrize(
    ("before", "after", "coverage", "bad", "is_verified"),
    [
        pytest.param(CLOSED, CLOSED, [0, 0], set(), True, id="every copy was checked"),
        pytest.param(CLOSED, CLOSED, [0, 1], set(), False, id="one copy was not"),
        pytest.param(CLOSED, CLOSED, [], set(), False, id="nothing was read"),
        pytest.param(CLOSED, CLOSED, [0], {1}, False, id="bad"),
        pytest.param(CLOSED, changed(metadata_version=4), [0], set(), False, id="changed"),
        pytest.param(changed(state="open"), changed(state="open"), [0], set(), False, id="open"),
        pytest.param(changed(problem="x"), changed(problem="x"), [0], set(), False, id="unreadable"),
        pytest.param(None, CLOSED, [0], set(), False, id="new"),
    ],
)
def test_a_closed_ledger_is_verified_if_every_copy_was_checked_and_good(
    before: KnownLedger | None, after: KnownLedger, coverage: list[int], bad: set[int], is_verified: bool
) -> None:
    history = LedgerHistory({} if before is None else {1: before}, {1: after}, {1: after})
    rows = [{"ledger_id": 1, "unknown": unknown} for unknown in coverage]
    found = verified_ledgers(history, rows, bad, level="quick", run_id="r", began_ms=5)
    assert found == ([Verified(LedgerId(1), "quick", 5, "r", 3)] if is_verified else [])


@pytest.mark.parametrize(
    ("recorded", "level", "facts", "is_stale"),
    [
        pytest.param("deep", "quick", {}, False, id="not verified by a run that checks less"),
        pytest.param("quick", "deep", {}, True, id="not verified by a run that checks more"),
        pytest.param("deep", "deep", {}, True, id="not verified by a run that checks as much"),
        pytest.param("other", "quick", {}, True, id="of a level that this version does not know"),
        pytest.param("quick", "deep", {"verified": {1}}, False, id="verified"),
        pytest.param("quick", "deep", {"checked": set()}, False, id="not checked"),
        pytest.param("deep", "quick", {"bad": {1}}, True, id="bad"),
        pytest.param("deep", "quick", {"existing": set()}, True, id="deleted"),
    ],
)
def test_a_record_is_stale_if_this_run_disproves_it(
    recorded: str, level: str, facts: dict[str, set[int]], is_stale: bool
) -> None:
    known = [Verified(LedgerId(1), recorded, 5, "r", 3)]
    sets = {"existing": {1}, "checked": {1}, "verified": set(), "bad": set(), **facts}
    assert stale_records(known, **sets, level=level) == ([1] if is_stale else [])


def test_information_and_warnings_do_not_make_a_ledger_bad() -> None:
    severities = ("info", "warning", "incomplete", "under_replicated", "corrupt", "unreadable")
    rows = [{"ledger_id": i, "severity": severity} for i, severity in enumerate(severities)]
    assert bad_ledgers(rows) == {2, 3, 4, 5}
