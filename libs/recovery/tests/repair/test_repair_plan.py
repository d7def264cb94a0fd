"""Decisions of a repair attempt, as a table: state of a fragment, state of the cluster, decision."""

import pytest
from bindery_core.ids import BookieId, EntryId
from bindery_core.placement.replication_plan import closed_fragments
from bindery_metadata.bookies.membership import Intent, Membership
from bindery_metadata.recovery.recovery_records import Obstacle, RecoveryState
from bindery_recovery.checks.checker import ALL, ENDS, FragmentCheck, FragmentState, LedgerCheck, OpenTail
from bindery_recovery.cluster.cluster_view import ClusterView
from bindery_recovery.repair.copier import CopyFailure, CopyResult, Target
from bindery_recovery.repair.repair_plan import (
    MAINTENANCE_PAUSE_MAX_S,
    OPEN_PAUSE_S,
    REFILL_PAUSE_S,
    AttemptState,
    Problem,
    SegmentPlan,
    TailPlan,
    in_grace,
    moved_since,
    outcome_of_problems,
    outcome_of_whole,
    paused,
    plan_segment,
    plan_tail,
)
from scripted import ledger

A, B, C, D = (BookieId(name) for name in "abcd")
NOW_MS = 1_000_000
METADATA = ledger("abc", last=9, length=1000)
FRAGMENTS = {one.bookie_id: one for one in closed_fragments(METADATA)}
PLACE = (0, 0)
"""Place of the fragment on A."""


def cluster(registered: str, *, read_only: str = "", until_ms: int | None = None, **intents: Intent) -> ClusterView:
    return ClusterView(
        {BookieId(name): name not in read_only for name in registered},
        {BookieId(name): Membership(BookieId(name), intent, until_ms=until_ms) for name, intent in intents.items()},
        now_ms=NOW_MS,
    )


def check(state: FragmentState, *bad: int, bookie: BookieId = A) -> FragmentCheck:
    return FragmentCheck(FRAGMENTS[bookie], state, bad, "entry 3: missing")


def summary(plan: SegmentPlan) -> str:
    parts = [f"restore {target.new} {sorted(target.only or ())}" for target in plan.restore]
    parts += [f"replace {one.fragment.bookie_id}" for one in plan.replace.values()]
    parts += [f"wait {one.obstacle or 'none'} {one.state} {one.retry_s}" for one in plan.problems]
    return ", ".join(parts)


MISSING, LOST, LEAVING = FragmentState.MISSING, FragmentState.LOST, FragmentState.LEAVING
REFILLING, UNSURE = FragmentState.REFILLING, FragmentState.UNSURE
NO_COPY = Problem(Obstacle.NO_COPY_LEFT, "no bookie has entry 3", is_final=True)


@pytest.mark.parametrize(
    ("bad", "view", "attempt", "decision"),
    [
        (check(MISSING, 3, 4), cluster("abc"), AttemptState(), "restore a [3, 4]"),
        (check(MISSING, 3), cluster("abc", read_only="a"), AttemptState(), "replace a"),
        (check(MISSING, 3), cluster("bc"), AttemptState(), "replace a"),
        (check(MISSING, 3), cluster("abc"), AttemptState(restored={PLACE}), "replace a"),
        (check(MISSING, 3), cluster("abc"), AttemptState(restored={(5, 0), (0, 1)}), "restore a [3]"),
        (check(MISSING, 3), cluster("abc"), AttemptState(refused={A: "full"}), "replace a"),
        (
            check(MISSING, 3),
            cluster("abc"),
            AttemptState(restored={PLACE}, without_source={PLACE: NO_COPY}),
            "wait no_copy_left blocked None",
        ),
        (check(LOST), cluster("bc"), AttemptState(), "replace a"),
        (
            check(LOST),
            cluster("bc", a=Intent.MAINTENANCE, until_ms=NOW_MS + 30_000),
            AttemptState(),
            "wait none waiting 30.0",
        ),
        (
            check(LOST),
            cluster("bc", a=Intent.MAINTENANCE, until_ms=NOW_MS + 3_600_000),
            AttemptState(),
            f"wait none waiting {MAINTENANCE_PAUSE_MAX_S}",
        ),
        (
            check(LOST),
            cluster("bc", a=Intent.MAINTENANCE, until_ms=NOW_MS + 100),
            AttemptState(),
            "wait none waiting 1.0",
        ),
        (check(LOST), cluster("bc", a=Intent.MAINTENANCE, until_ms=NOW_MS - 1), AttemptState(), "replace a"),
        (check(LEAVING), cluster("abc", a=Intent.DRAINING), AttemptState(), "replace a"),
        (check(REFILLING), cluster("abc"), AttemptState(), f"wait none waiting {REFILL_PAUSE_S}"),
        (check(UNSURE), cluster("abc"), AttemptState(), "wait error backing_off None"),
        (check(UNSURE), cluster("abc"), AttemptState(unsure_before={A: 1}), "wait error backing_off None"),
        (check(UNSURE), cluster("abc"), AttemptState(unsure_before={A: 2}), "replace a"),
        (check(UNSURE), cluster("abc"), AttemptState(unsure_before={B: 7}), "wait error backing_off None"),
    ],
)
def test_each_fragment_is_restored_replaced_or_waits(
    bad: FragmentCheck, view: ClusterView, attempt: AttemptState, decision: str
) -> None:
    plan = plan_segment([bad], view, attempt)
    assert summary(plan) == decision
    assert plan.unsure == ({A} if "error" in decision else set())


def test_the_fragments_of_a_segment_are_decided_one_by_one() -> None:
    bad = [check(MISSING, 3), check(LOST, bookie=B), check(REFILLING, bookie=C)]
    plan = plan_segment(bad, cluster("acd"), AttemptState())
    assert summary(plan) == f"restore a [3], replace b, wait none waiting {REFILL_PAUSE_S}"
    assert plan.replace == {1: bad[1]}


def test_a_fragment_is_checked_again_if_its_bookie_registered_or_disappeared() -> None:
    lost, hole, silent = check(LOST), check(MISSING, 3, bookie=B), check(UNSURE, bookie=C)
    assert moved_since([lost, hole, silent], cluster("bc")) == []
    assert moved_since([lost, hole, silent], cluster("abc")) == [lost]
    assert moved_since([lost, hole, silent], cluster("c")) == [hole]


# --- the open last segment --------------------------------------------------------------------------------------------

TAIL = OpenTail(segment_first=EntryId(10), ensemble=(A, B, C), lost={}, leaving={})


@pytest.mark.parametrize(
    ("view", "missing"),
    [
        (cluster("abc"), {}),
        (cluster("ac"), {1: B}),
        (cluster("abc", b=Intent.DRAINING), {1: B}),  # draining bookies stay registered
        (cluster("abc", b=Intent.REMOVED), {1: B}),
        (cluster("ac", b=Intent.REMOVED), {1: B}),
        (cluster("c", b=Intent.DRAINING), {0: A, 1: B}),
        (cluster("abc", b=Intent.MAINTENANCE), {}),
    ],
)
def test_a_member_of_the_open_segment_is_missing_if_it_is_lost_or_leaving(
    view: ClusterView, missing: dict[int, BookieId]
) -> None:
    assert plan_tail(TAIL, view) == TailPlan([], missing)


def test_a_member_in_maintenance_is_waited_for() -> None:
    plan = plan_tail(TAIL, cluster("a", b=Intent.MAINTENANCE, until_ms=NOW_MS + 5_000))
    assert plan.missing == {2: C}
    assert [(one.obstacle, one.state, one.retry_s) for one in plan.problems] == [
        (Obstacle.NONE, RecoveryState.WAITING, 5.0)
    ]


# --- outcomes ---------------------------------------------------------------------------------------------------------


def ledger_check(*bad: FragmentCheck, tail: OpenTail | None = None) -> LedgerCheck:
    return LedgerCheck(7, METADATA, bad, tail, entries_read=0, bytes_read=0)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("tail", "depth", "marked", "state"),
    [
        (None, ALL, [A], RecoveryState.HEALED),
        (TAIL, ENDS, [A], RecoveryState.HEALED),
        (TAIL, ALL, [D], RecoveryState.HEALED),  # the writer has replaced it
        (TAIL, ALL, [D, A], RecoveryState.BLOCKED),
        (TAIL, ALL, [], RecoveryState.BLOCKED),
    ],
)
def test_an_open_ledger_that_may_have_a_hole_keeps_its_mark(
    tail: OpenTail | None, depth: object, marked: list[str], state: RecoveryState
) -> None:
    outcome = outcome_of_whole(7, ledger_check(tail=tail), depth=depth, marked=marked)  # type: ignore[arg-type]
    assert outcome.state is state
    assert outcome.retry_s == (OPEN_PAUSE_S if state is RecoveryState.BLOCKED else None)


def test_an_open_ledger_names_the_marked_bookies_that_it_still_uses() -> None:
    outcome = outcome_of_whole(7, ledger_check(tail=TAIL), depth=ALL, marked=[D, A])  # type: ignore[arg-type]
    assert (outcome.obstacle, outcome.state) == (Obstacle.LEDGER_OPEN, RecoveryState.BLOCKED)
    assert outcome.detail.startswith("ledger 7 is open and its writer continued without some copies on a: ")


def test_the_most_severe_problem_is_reported_and_the_shortest_pause_counts() -> None:
    bad = ledger_check(check(MISSING, 3, 4))
    waiting = Problem(Obstacle.NONE, "wait", retry_s=10.0, state=RecoveryState.WAITING)
    disabled = Problem(Obstacle.PAUSED, "paused", retry_s=3.0, state=RecoveryState.WAITING)
    no_spare = Problem(Obstacle.NO_SPARE, "no spare")

    outcome = outcome_of_problems(bad, [waiting, disabled])
    assert (outcome.obstacle, outcome.detail, outcome.state) == (Obstacle.PAUSED, "paused", RecoveryState.WAITING)
    assert (outcome.retry_s, outcome.missing_entries, outcome.missing_bytes) == (3.0, 2, 200)

    outcome = outcome_of_problems(bad, [waiting, no_spare, NO_COPY])
    assert (outcome.obstacle, outcome.retry_s) == (Obstacle.NO_COPY_LEFT, None)
    assert outcome.state is RecoveryState.BLOCKED, "a spare may join"
    assert outcome_of_problems(bad, [NO_COPY, NO_COPY]).state is RecoveryState.UNRECOVERABLE
    outcome = outcome_of_problems(bad, [])
    assert (outcome.state, outcome.obstacle) == (RecoveryState.BACKING_OFF, Obstacle.ERROR)


# --- the state of an attempt ------------------------------------------------------------------------------------------


def test_another_round_follows_copies_a_new_refusal_or_a_partial_restore() -> None:
    attempt = AttemptState(unreadable={3, 5, 40})
    restore = Target(FRAGMENTS[A], A, frozenset({3, 5}))
    replacement = Target(FRAGMENTS[B], D)
    targets = [restore, replacement]

    done = CopyResult(done=[restore, replacement], unreadable=[4])
    assert attempt.copied(targets, done) == ([], True)
    assert attempt.unreadable == {4, 40}, "entries of other segments stay"

    refusal = CopyFailure(Obstacle.TARGET_REFUSES, "d is full", refusing=D)
    problems, has_changed = attempt.copied(targets, CopyResult(failed={1: refusal}))
    assert ([one.obstacle for one in problems], has_changed) == ([Obstacle.TARGET_REFUSES], True)
    assert attempt.refused.keys() == {D}
    assert attempt.copied(targets, CopyResult(failed={1: refusal}))[1] is False, "a repeated refusal is no change"

    no_copy = CopyFailure(Obstacle.NO_COPY_LEFT, "entry 3 is lost", is_final=True)
    problems, has_changed = attempt.copied(targets, CopyResult(failed={0: no_copy, 1: no_copy}))
    assert [one.is_final for one in problems] == [True, True]
    assert has_changed
    assert attempt.without_source == {PLACE: problems[0]}, "only fragments of restored bookies are recorded"


def test_a_copy_replaces_what_was_known_about_all_entries_of_its_segment() -> None:
    attempt = AttemptState(unreadable={0, 9, 10})
    attempt.copied([Target(FRAGMENTS[A], A)], CopyResult())
    assert attempt.unreadable == {10}


def test_the_attempts_without_a_report_of_a_bookie_include_the_present_one() -> None:
    attempt = AttemptState(unsure_before={A: 2})
    assert (attempt.unsure_attempts(A), attempt.unsure_attempts(B)) == (3, 1)


def test_a_ledger_waits_while_recovery_is_disabled_and_while_its_writer_may_replace_a_bookie() -> None:
    disabled = paused()
    assert (disabled.obstacle, disabled.retry_s, disabled.state) == (Obstacle.PAUSED, 0.0, RecoveryState.WAITING)
    assert not disabled.is_final
    grace = in_grace(7, [A], 12.5)  # type: ignore[arg-type]
    assert (grace.obstacle, grace.retry_s, grace.state) == (Obstacle.LEDGER_OPEN, 12.5, RecoveryState.WAITING)
    assert grace.detail.startswith("ledger 7 is open and its writer has 12 s left to replace a itself")


def test_an_abandoned_copy_records_only_unreadable_entries() -> None:
    attempt = AttemptState()
    refusal = CopyFailure(Obstacle.TARGET_REFUSES, "a is full", refusing=A)
    result = CopyResult(failed={0: refusal}, is_abandoned=True, unreadable=[3])
    assert attempt.copied([Target(FRAGMENTS[A], A, frozenset({3}))], result) == ([], False)
    assert attempt.unreadable == {3}
    assert attempt.refused == {}
