"""Selection of ledgers for the second pass, and the rules that merge both passes."""

import pytest
from bindery_spark.audit.ledger_history import KnownLedger, LedgerHistory
from bindery_spark.audit.second_pass.rules import MergeRule, Selection, broken_ledgers, merge_rules, select

HOLE = "MISSING_REPLICA"
BESIDE = "ORPHAN_DATA"


def row(state: str = "closed", version: int = 1, problem: str | None = None) -> KnownLedger:
    """Ten entries of three copies."""
    last = 9 if state == "closed" else None
    return KnownLedger(1, state, version, 0 if problem else 3, last, None, problem)


BROKEN = row("open", 0, "broken")


def again(
    was: KnownLedger | None,
    now: KnownLedger | None,
    *,
    kind: str | None = None,
    copies: int = 30,
    ends_only: bool = False,
) -> Selection:
    """Select among ledger 1, which has this metadata before and after the first pass."""
    before, after = ({} if each is None else {1: each} for each in (was, now))
    found = [] if kind is None else [(1, kind)]
    return select(before, after, found, {1: copies}, planned=before.keys(), ends_only=ends_only)


@pytest.mark.parametrize(
    ("was", "now", "kind", "copies", "is_read"),
    [
        pytest.param(row(), row(), None, 30, False, id="whole"),
        pytest.param(row(), row(), HOLE, 30, True, id="hole"),
        pytest.param(row(), row(), BESIDE, 30, False, id="beside"),
        pytest.param(row("open"), row("open"), BESIDE, 30, True, id="beside an open one"),
        pytest.param(row("open"), row("open"), None, 10, False, id="open"),
        pytest.param(row(), row(version=2), None, 30, False, id="changed and whole"),
        pytest.param(row(), row(version=2), None, 29, True, id="moved"),
        pytest.param(row("open"), row(version=2), None, 12, True, id="closed meanwhile"),
        pytest.param(BROKEN, row(), None, 0, True, id="readable now"),
        pytest.param(row(), BROKEN, HOLE, 30, False, id="unreadable now"),
        pytest.param(row(), None, HOLE, 30, False, id="deleted"),
        pytest.param(None, row(), BESIDE, 0, False, id="new"),
        pytest.param(None, None, BESIDE, 0, False, id="no ledger"),
    ],
)
def test_ledgers_with_findings_or_unread_copies_are_read_again(
    was: KnownLedger | None, now: KnownLedger | None, kind: str | None, copies: int, is_read: bool
) -> None:
    assert again(was, now, kind=kind, copies=copies).ids == ((1,) if is_read else ())


def test_a_quick_run_reads_each_changed_closed_ledger_again() -> None:
    """The metadata does not show how many copies a quick run must read."""
    assert again(row(), row(version=2), ends_only=True).ids == (1,)
    assert again(row(), row(), copies=6, ends_only=True).ids == ()


def test_a_skipped_ledger_that_changed_is_not_read() -> None:
    assert select({1: row()}, {1: row(version=2)}, [], {}, planned=(), ends_only=False).ids == ()


@pytest.mark.parametrize(
    ("was", "now", "then", "rule"),
    [
        pytest.param(row(), row(), row(), MergeRule.UPDATE, id="steady"),
        pytest.param(row(), row(version=2), row(version=2), MergeRule.REPLACE, id="steady since"),
        pytest.param(row(), row(), row(version=2), MergeRule.CONFIRM, id="changed while it was read"),
        pytest.param(row("open"), row("open"), row("open"), MergeRule.CONFIRM, id="open"),
        pytest.param(row(), row(), None, None, id="deleted while it was read"),
        pytest.param(row(), None, None, None, id="deleted"),
        pytest.param(row(), row(), BROKEN, MergeRule.KEEP, id="unreadable while it was read"),
        pytest.param(row(), BROKEN, BROKEN, MergeRule.KEEP, id="unreadable"),
    ],
)
def test_changes_of_the_metadata_decide_the_merge_rule_of_a_missing_copy(
    was: KnownLedger, now: KnownLedger | None, then: KnownLedger | None, rule: MergeRule | None
) -> None:
    before, after, last = ({} if each is None else {1: each} for each in (was, now, then))
    found = [(1, HOLE)]
    selection = select(before, after, found, {1: 30}, planned=[1], ends_only=False)
    ledgers = LedgerHistory(before, after, last)
    assert merge_rules(ledgers, found, selection) == ({} if rule is None else {(1, False): rule})
    assert broken_ledgers(ledgers, selection) == ({1: "broken"} if rule is MergeRule.KEEP else {})


def test_orphaned_data_of_a_steady_ledger_is_kept() -> None:
    before, after = {2: row(), 3: row("open"), 4: row()}, {2: row(), 3: row("open"), 5: row()}
    found = [(i, BESIDE) for i in (1, 2, 3, 4, 5)]
    selection = select(before, after, found, {2: 30, 3: 9}, planned=before, ends_only=False)
    assert merge_rules(LedgerHistory(before, after, after), found, selection) == {
        (1, True): MergeRule.KEEP,
        (2, True): MergeRule.KEEP,
        (3, True): MergeRule.CONFIRM,
    }


def test_a_ledger_without_a_result_does_not_hide_the_next_ones() -> None:
    before = {1: BROKEN, 2: row(), 3: row()}
    after = {2: BROKEN, 3: row(version=2)}
    selection = select(before, after, [], {3: 29}, planned=[1, 2, 3], ends_only=False)
    assert (selection.ids, dict(selection.broken)) == ((3,), {2: "broken"})
    history = LedgerHistory({3: row()}, {3: row()}, {3: row()})
    found = [(1, HOLE), (9, HOLE), (3, BESIDE)]
    history = LedgerHistory({1: row(), 3: row()}, {3: row()}, {3: row()})
    assert merge_rules(history, found, Selection((), {})) == {(9, False): MergeRule.KEEP, (3, True): MergeRule.KEEP}


def test_a_changed_ledger_of_which_nothing_was_read_is_read_again() -> None:
    def selected(last: int) -> tuple[int, ...]:
        now = KnownLedger(1, "closed", 2, 1, last, None, None)
        return select({1: row()}, {1: now}, [], {}, planned=[1], ends_only=False).ids

    assert (selected(-1), selected(0)) == ((), (1,))
