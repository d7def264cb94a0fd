"""Decide what one repair attempt does, without I/O.

`ledger_repair` reads the metadata and the cluster, checks the fragments, calls these functions and carries out the
result. All functions are pure, except that `AttemptState` collects what the attempt has found so far.

| fragment      | condition                                                          | decision                      |
|---------------|--------------------------------------------------------------------|-------------------------------|
| MISSING       | its bookie is writable                                             | restore the missing entries   |
| MISSING       | its bookie was restored in this attempt, and no bookie has the     | keep it; report the obstacle  |
|               | entries that are still missing                                     |                               |
| MISSING       | otherwise                                                          | replace the bookie            |
| LOST          | its bookie is in maintenance                                       | wait                          |
| LOST, LEAVING | otherwise                                                          | replace the bookie            |
| REFILLING     |                                                                    | wait                          |
| UNSURE        | in fewer than UNSURE_ATTEMPTS_MAX attempts in a row                | wait, check again             |
| UNSURE        | otherwise                                                          | replace the bookie            |

A restored bookie receives the entries that it lacks, and the metadata stays as it is. A replacement receives the
whole fragment, and the metadata then names it.

The last segment of an open ledger belongs to its writer, which replaces a lost bookie at its next add. If a member is
lost or leaving after the grace period, the ledger is recovered: the writer is fenced, the ledger is closed and then
repaired like any other. If no spare bookie exists, the ledger stays open, because closing it would not add a copy and
would stop a writer that can still continue.
Source: BookKeeper ReplicationWorker.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from bindery_core.ids import BookieId, LedgerId
from bindery_core.placement.replication_plan import Fragment
from bindery_metadata.recovery.recovery_records import Obstacle, RecoveryState

from bindery_recovery.checks.checker import ALL, Depth, FragmentCheck, FragmentState, LedgerCheck, OpenTail
from bindery_recovery.cluster.cluster_view import ClusterView
from bindery_recovery.records import sentences
from bindery_recovery.repair.copier import CopyResult, Target

UNSURE_ATTEMPTS_MAX: Final = 3
"""Number of consecutive attempts in which a bookie does not report its entries, after which it is replaced."""
REFILL_PAUSE_S: Final = 10.0
"""Seconds until a bookie that refills its storage is checked again."""
MAINTENANCE_PAUSE_MAX_S: Final = 60.0
"""Maximum seconds until a bookie in maintenance is checked again."""
OPEN_PAUSE_S: Final = 60.0
"""Seconds until an open ledger that can be repaired only after it is closed is checked again."""

Place = tuple[int, int]
"""A fragment: first entry id of its segment, index in the ensemble."""


def place_of(fragment: Fragment) -> Place:
    return fragment.segment_first, fragment.index


@dataclass(frozen=True, slots=True)
class Problem:
    """A reason why a fragment or the open tail is not repaired now."""

    obstacle: Obstacle
    detail: str
    is_final: bool = False
    """Whether no bookie that is registered or may return has a good replica of some entry."""
    retry_s: float | None = None
    """Seconds until the next attempt; None: the usual back-off."""
    state: RecoveryState = RecoveryState.BLOCKED


@dataclass(frozen=True, slots=True)
class Outcome:
    """Result of an attempt. HEALED: no copy is missing, and the mark may be removed."""

    state: RecoveryState
    obstacle: Obstacle = Obstacle.NONE
    detail: str = ""
    retry_s: float | None = None
    """Seconds until the next attempt. None: the usual back-off; for UNRECOVERABLE: after the cluster has changed."""
    missing_entries: int | None = None
    missing_bytes: int | None = None
    is_deleted: bool = False


_SEVERITY: Final = (
    Obstacle.NO_COPY_LEFT,
    Obstacle.SOURCE_IN_LIMBO,
    Obstacle.SOURCE_UNAVAILABLE,
    Obstacle.NO_SPARE,
    Obstacle.TARGET_REFUSES,
    Obstacle.RECOVERY_IMPOSSIBLE,
    Obstacle.METADATA_UNREADABLE,
    Obstacle.ERROR,
    Obstacle.LEDGER_OPEN,
    Obstacle.PAUSED,
    Obstacle.NONE,
)
"""Obstacles from most to least severe. Of several obstacles, the most severe one is reported."""
assert set(_SEVERITY) == set(Obstacle)


@dataclass(slots=True)
class AttemptState:
    """What one attempt has found so far."""

    unsure_before: Mapping[str, int] = field(default_factory=dict)
    """Number of consecutive attempts before this one in which a bookie did not report its entries, by bookie."""
    unreadable: set[int] = field(default_factory=set)
    """Entries that no bookie could return when they were last read. The next copy reads them first."""
    incomplete: set[BookieId] = field(default_factory=set)
    """Bookies that miss at least one entry. All of their entries are checked."""
    restored: set[Place] = field(default_factory=set)
    """Fragments whose bookie received the entries that it lacked."""
    without_source: dict[Place, Problem] = field(default_factory=dict)
    """Restored fragments that still miss entries which no bookie has."""
    refused: dict[BookieId, str] = field(default_factory=dict)
    """Bookies that did not accept copies, with the reason."""

    def unsure_attempts(self, bookie_id: BookieId) -> int:
        """Return the number of consecutive attempts, including this one, in which the bookie did not report its
        entries."""
        return self.unsure_before.get(bookie_id, 0) + 1

    def copied(self, targets: Sequence[Target], result: CopyResult) -> tuple[list[Problem], bool]:
        """Record the result of a copy. Return the problems, and whether another round may make progress."""
        fragment = targets[0].fragment
        self.unreadable = {one for one in self.unreadable if not fragment.segment_first <= one <= fragment.last}
        self.unreadable.update(result.unreadable)
        if result.is_abandoned:
            return [], False
        in_place = {target.index for target in targets if not target.is_replacement}
        problems = []
        has_changed = bool(result.done)
        for index, failure in result.failed.items():
            problem = Problem(failure.obstacle, failure.detail, is_final=failure.is_final)
            problems.append(problem)
            if failure.refusing is not None and failure.refusing not in self.refused:
                self.refused[failure.refusing] = "did not accept copies of this ledger"
                has_changed = True  # another bookie may accept them
            if failure.refusing is None and index in in_place:
                self.without_source[fragment.segment_first, index] = problem
                has_changed = True  # the other entries were restored
        return problems, has_changed


@dataclass(slots=True)
class SegmentPlan:
    """Decisions for the bad fragments of one segment."""

    problems: list[Problem] = field(default_factory=list)
    """Fragments that have to wait."""
    restore: list[Target] = field(default_factory=list)
    """Bookies that receive the entries that they lack."""
    replace: dict[int, FragmentCheck] = field(default_factory=dict)
    """Fragments whose bookie is replaced, by ensemble index."""
    unsure: set[BookieId] = field(default_factory=set)
    """Bookies that are checked again because they did not report their entries."""


def plan_segment(bad: Sequence[FragmentCheck], view: ClusterView, attempt: AttemptState) -> SegmentPlan:
    """Decide for each bad fragment of one segment. `view` is newer than the checks."""
    plan = SegmentPlan()
    for check in bad:
        bookie_id, place = check.fragment.bookie_id, place_of(check.fragment)
        is_restorable = view.bookies.get(bookie_id) and place not in attempt.restored
        if check.state is FragmentState.LOST and view.is_exempt(bookie_id):
            plan.problems.append(_wait_for_maintenance(bookie_id, view))
        elif check.state is FragmentState.REFILLING:
            detail = sentences.refilling(bookie_id)
            plan.problems.append(Problem(Obstacle.NONE, detail, retry_s=REFILL_PAUSE_S, state=RecoveryState.WAITING))
        elif check.state is FragmentState.UNSURE and attempt.unsure_attempts(bookie_id) < UNSURE_ATTEMPTS_MAX:
            plan.unsure.add(bookie_id)
            detail = sentences.unsure(bookie_id, check.reason)
            plan.problems.append(Problem(Obstacle.ERROR, detail, state=RecoveryState.BACKING_OFF))
        elif check.state is FragmentState.MISSING and place in attempt.without_source:
            plan.problems.append(attempt.without_source[place])
        elif check.state is FragmentState.MISSING and is_restorable and bookie_id not in attempt.refused:
            plan.restore.append(Target(check.fragment, bookie_id, frozenset(check.bad_entry_ids)))
        else:
            plan.replace[check.fragment.index] = check
    return plan


def moved_since(bad: Sequence[FragmentCheck], view: ClusterView) -> list[FragmentCheck]:
    """Return the checks whose bookie has registered or disappeared since, so that they have to be repeated."""
    return [one for one in bad if (one.state is FragmentState.LOST) == (one.fragment.bookie_id in view.bookies)]


@dataclass(slots=True)
class TailPlan:
    """Decisions for the last segment of an open ledger."""

    problems: list[Problem] = field(default_factory=list)
    """Members in maintenance."""
    missing: dict[int, BookieId] = field(default_factory=dict)
    """Members that the writer has to replace, by ensemble index."""


def plan_tail(tail: OpenTail, view: ClusterView) -> TailPlan:
    """Decide for each member of the last ensemble. A member is missing if it is not registered or is leaving, because a
    draining bookie is usually registered."""
    plan = TailPlan()
    for index, bookie_id in enumerate(tail.ensemble):
        if view.is_exempt(bookie_id):
            plan.problems.append(_wait_for_maintenance(bookie_id, view))
        elif bookie_id not in view.bookies or bookie_id in view.leaving:
            plan.missing[index] = bookie_id
    return plan


def outcome_of_whole(ledger_id: LedgerId, check: LedgerCheck, *, depth: Depth, marked: Collection[str]) -> Outcome:
    """Decide about a ledger whose check found nothing missing. `marked`: bookies named by the mark; empty: any.

    If the writer of an open ledger continued without a bookie, that bookie has a hole that no check can see before the
    ledger is closed.
    """
    tail = check.tail
    if tail is not None and depth == ALL and (not marked or not set(marked).isdisjoint(tail.ensemble)):
        detail = sentences.open_with_hole(ledger_id, [b for b in tail.ensemble if b in marked])
        return Outcome(RecoveryState.BLOCKED, Obstacle.LEDGER_OPEN, detail, retry_s=OPEN_PAUSE_S)
    return Outcome(RecoveryState.HEALED)


def outcome_of_problems(check: LedgerCheck, problems: Sequence[Problem]) -> Outcome:
    """Report the most severe problem. If every problem has a pause, the next attempt is due after the shortest."""
    if not problems:
        return Outcome(RecoveryState.BACKING_OFF, Obstacle.ERROR, sentences.unsteady(check.ledger_id))
    problem = min(problems, key=lambda one: _SEVERITY.index(one.obstacle))
    pauses = [one.retry_s for one in problems if one.retry_s is not None]
    return Outcome(
        RecoveryState.UNRECOVERABLE if all(one.is_final for one in problems) else problem.state,
        problem.obstacle,
        problem.detail,
        retry_s=min(pauses) if len(pauses) == len(problems) else None,
        missing_entries=check.missing_entries,
        missing_bytes=check.missing_bytes,
    )


def paused() -> Problem:
    """Return the problem of a ledger while automatic recovery is disabled."""
    return Problem(Obstacle.PAUSED, sentences.paused(), retry_s=0.0, state=RecoveryState.WAITING)


def in_grace(ledger_id: LedgerId, missing: Collection[BookieId], left_s: float) -> Problem:
    """Return the problem of an open ledger whose writer has `left_s` seconds left to replace the missing bookies."""
    detail = sentences.grace(ledger_id, list(missing), left_s)
    return Problem(Obstacle.LEDGER_OPEN, detail, retry_s=left_s, state=RecoveryState.WAITING)


def _wait_for_maintenance(bookie_id: BookieId, view: ClusterView) -> Problem:
    until_ms = view.exempt_until_ms(bookie_id)
    left_s = MAINTENANCE_PAUSE_MAX_S if until_ms is None else max(1.0, (until_ms - view.now_ms) / 1000)
    detail = sentences.in_maintenance(bookie_id, view.now_ms, until_ms)
    pause_s = min(left_s, MAINTENANCE_PAUSE_MAX_S)
    return Problem(Obstacle.NONE, detail, retry_s=pause_s, state=RecoveryState.WAITING)
