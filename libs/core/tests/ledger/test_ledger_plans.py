"""Metadata plans: the result of each plan in each state. Each plan returns None for its own result."""

from collections.abc import Mapping

import pytest
from bindery_core.errors import LedgerClosed, LedgerFenced, NotEnoughBookies, TryAgain
from bindery_core.formats.ledger_metadata import LedgerMetadata, LedgerState, Segment
from bindery_core.ids import BookieId, EntryId
from bindery_core.ledger.ledger_plans import (
    fence_targets,
    plan_begin_recovery,
    plan_close,
    plan_ensemble_change,
    plan_recovery_close,
)

OPEN, IN_RECOVERY, CLOSED = LedgerState.OPEN, LedgerState.IN_RECOVERY, LedgerState.CLOSED


def segment(first: int, *names: str) -> Segment:
    return Segment(EntryId(first), tuple(map(BookieId, names)))


def ledger(*segments: Segment, **changes: object) -> LedgerMetadata:
    metadata = LedgerMetadata(
        ensemble_size=3, write_quorum=3, ack_quorum=2, segments=segments or (segment(0, "b0", "b1", "b2"),)
    )
    return metadata.with_changes(**changes)


def spares(*names: str) -> object:
    def choose(ensemble: tuple[BookieId, ...], failed: Mapping[int, BookieId]) -> Mapping[int, BookieId]:
        chosen = dict(zip(sorted(failed), map(BookieId, names), strict=False))
        if not chosen:
            raise NotEnoughBookies
        return chosen

    return choose


def change(metadata: LedgerMetadata, failed: Mapping[int, str], first: int, *names: str) -> LedgerMetadata | None:
    return plan_ensemble_change(
        metadata,
        failed={index: BookieId(name) for index, name in failed.items()},
        first_entry_id=first,
        choose=spares(*names),  # type: ignore[arg-type]
    )


def test_a_change_appends_a_segment() -> None:
    changed = change(ledger(), {1: "b1"}, 5, "b3")
    assert changed is not None
    assert changed.segments == (segment(0, "b0", "b1", "b2"), segment(5, "b0", "b3", "b2"))


def test_a_change_at_the_first_entry_of_the_last_segment_replaces_that_segment() -> None:
    """Appending would create two segments with one key, and the old one would be unreachable."""
    changed = change(ledger(segment(0, "a", "b", "c"), segment(5, "b0", "b1", "b2")), {0: "b0"}, 5, "b3")
    assert changed is not None
    assert changed.segments == (segment(0, "a", "b", "c"), segment(5, "b3", "b1", "b2"))


def test_a_change_that_was_applied_already_is_not_applied_again() -> None:
    changed = change(ledger(), {1: "b1"}, 5, "b3")
    assert changed is not None
    assert change(changed, {1: "b1"}, 5, "b4") is None


def test_a_change_needs_at_least_one_replacement() -> None:
    changed = change(ledger(), {0: "b0", 1: "b1"}, 0, "b3")
    assert changed is not None
    assert changed.segments == (segment(0, "b3", "b1", "b2"),)
    with pytest.raises(NotEnoughBookies):
        change(ledger(), {0: "b0"}, 0)


def test_a_change_that_was_applied_in_part_is_adopted() -> None:
    """Goal: after an unknown outcome, the second attempt never raises NotEnoughBookies for an applied change."""
    changed = change(ledger(), {0: "b0", 1: "b1"}, 5, "b3")
    assert changed is not None
    assert changed.last_segment == segment(5, "b3", "b1", "b2")
    assert change(changed, {0: "b0", 1: "b1"}, 5) is None


@pytest.mark.parametrize(("state", "error"), [(IN_RECOVERY, LedgerFenced), (CLOSED, LedgerClosed)])
def test_a_change_of_a_ledger_that_is_not_open_is_refused(state: LedgerState, error: type[Exception]) -> None:
    with pytest.raises(error):
        change(ledger(state=state), {0: "b0"}, 0, "b3")


@pytest.mark.parametrize("state", [OPEN, IN_RECOVERY])
def test_the_writer_closes_a_ledger_in_any_other_state(state: LedgerState) -> None:
    closed = plan_close(ledger(state=state), last_entry_id=4, length=50)
    assert closed == ledger(state=CLOSED, last_entry_id=4, length=50)
    assert closed is not None
    assert plan_close(closed, last_entry_id=4, length=50) is None
    with pytest.raises(LedgerFenced):
        plan_close(closed, last_entry_id=3, length=40)


def test_recovery_begins_once() -> None:
    begun = plan_begin_recovery(ledger())
    assert begun == ledger(state=IN_RECOVERY)
    assert begun is not None
    assert plan_begin_recovery(begun) is None
    assert plan_begin_recovery(ledger(state=CLOSED)) is None


def recovery_close(metadata: LedgerMetadata, recovered: tuple[Segment, ...]) -> LedgerMetadata | None:
    return plan_recovery_close(metadata, began=ledger().segments, recovered=recovered, last_entry_id=4, length=50)


def test_recovery_publishes_its_ensembles_with_the_close() -> None:
    recovered = (*ledger().segments, segment(4, "b0", "b1", "b3"))
    closed = recovery_close(ledger(state=IN_RECOVERY), recovered)
    assert closed == ledger(*recovered, state=CLOSED, last_entry_id=4, length=50)
    assert closed is not None
    assert recovery_close(closed, recovered) is None


def test_recovery_adopts_a_close_of_another_client() -> None:
    assert recovery_close(ledger(state=CLOSED, last_entry_id=9, length=9), ledger().segments) is None


def test_recovery_keeps_ensembles_that_re_replication_changed_meanwhile() -> None:
    moved = ledger(segment(0, "b0", "b1", "b9"), state=IN_RECOVERY)
    closed = recovery_close(moved, ledger().segments)
    assert closed is not None
    assert closed.segments == moved.segments
    with pytest.raises(TryAgain):
        recovery_close(moved, (segment(0, "b0", "b1", "b3"),))


def test_deleting_fences_only_bookies_that_may_accept_adds() -> None:
    metadata = ledger(segment(0, "b0", "b1", "b2"), segment(5, "b3", "b1", "b2"))
    assert fence_targets(metadata) == ("b3", "b1", "b2")
    assert fence_targets(ledger(state=CLOSED)) == ()
