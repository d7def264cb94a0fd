"""What is recorded of a marked ledger: which reason stands when it is marked for a second one before it was healed.

A hole that a writer, a reader or a check of all entries found is not seen by looking at first and last entries, as is
done for a lost bookie: such a reason must not be replaced by, or give way to, one that calls for less.
"""

from collections.abc import Collection, Mapping
from typing import Final

from bindery_core.ids import LedgerId
from bindery_metadata.recovery.recovery_records import Reason, RecoveryRecord, RecoveryState

CHECKED_ALL: Final = frozenset({Reason.ENTRY_MISSING, Reason.REPORTED_BY_WRITER})
"""Marks for which every entry is read."""


def stronger(standing: Reason, new: Reason) -> Reason:
    """The one that calls for more; of equals the one that stands."""
    return new if new in CHECKED_ALL and standing not in CHECKED_ALL else standing


def marked_for(
    standing: RecoveryRecord | None,
    ledger_id: LedgerId,
    bookies: Collection[str],
    reason: Reason,
    *,
    missing_entries: int | None,
    missing_bytes: int | None,
    now_ms: int,
) -> RecoveryRecord:
    """The record of a ledger that is marked, or marked once more, because these `bookies` lack what they should hold.

    `standing`: what was recorded before. Its attempts and the time of its first mark stay; its state only while nobody
    is added to `bookies`: what could not be healed for one of them may well be for another, so it is looked at anew.
    """
    names = tuple(sorted(bookies))
    if standing is None or standing.state is RecoveryState.HEALED:
        return RecoveryRecord(
            ledger_id, RecoveryState.WAITING, reason, bookies=names, first_marked_ms=now_ms,
            missing_entries=missing_entries, missing_bytes=missing_bytes,
        )  # fmt: skip
    marked = standing.with_changes(reason=stronger(standing.reason, reason))
    if set(names) <= set(standing.bookies):
        return marked
    is_copied = (
        standing.state is RecoveryState.COPYING
    )  # whoever does so says what became of it, and sees the new names
    return marked.with_changes(
        state=standing.state if is_copied else RecoveryState.WAITING, next_retry_ms=None,
        bookies=tuple(sorted({*standing.bookies, *names})),
        missing_entries=_sum(standing.missing_entries, missing_entries),
        missing_bytes=_sum(standing.missing_bytes, missing_bytes),
    )  # fmt: skip


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other


REASON_WORDS: Final[Mapping[Reason, str]] = {
    Reason.BOOKIE_LOST: "a bookie is lost",
    Reason.BOOKIE_DRAINING: "a bookie is drained",
    Reason.ENTRY_MISSING: "a check found copies missing or corrupt",
    Reason.REPORTED_BY_WRITER: "its writer went on without a copy",
    Reason.PLACEMENT: "its placement is to be looked at",
    Reason.OPERATOR: "an operator asked for it",
}
"""Why a ledger is marked, for people; the bookies concerned follow."""
assert REASON_WORDS.keys() == set(Reason)
