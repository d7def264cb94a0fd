"""Build the recovery record of a marked ledger. Of several reasons for a mark, the strongest is recorded.

For a lost bookie, a repair reads only the first and the last entry of each fragment. This does not find a hole that a
writer, a reader or a check of all entries has reported. Such a reason is therefore never replaced by a weaker one.
"""

from collections.abc import Collection, Mapping
from typing import Final

from bindery_core.ids import LedgerId
from bindery_metadata.recovery.recovery_records import Reason, RecoveryRecord, RecoveryState

CHECKED_ALL: Final = frozenset({Reason.ENTRY_MISSING, Reason.REPORTED_BY_WRITER})
"""Reasons for which a repair reads every entry."""


def stronger(standing: Reason, new: Reason) -> Reason:
    """Return the reason that requires more entries to be read; `standing` if both require the same."""
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
    """Return the record of a ledger that is marked, possibly again, because `bookies` miss entries.

    `standing`: the previous record. Its attempts and the time of the first mark are kept. Its state is kept unless a
    bookie is added: a ledger that could not be repaired for one bookie may be repairable for another.
    """
    names = tuple(sorted(bookies))
    if standing is None or standing.state is RecoveryState.HEALED:
        return RecoveryRecord(
            ledger_id,
            RecoveryState.WAITING,
            reason,
            bookies=names,
            first_marked_ms=now_ms,
            missing_entries=missing_entries,
            missing_bytes=missing_bytes,
        )
    marked = standing.with_changes(reason=stronger(standing.reason, reason))
    if set(names) <= set(standing.bookies):
        return marked
    # The worker that copies writes the result itself and then finds the new bookies.
    is_copied = standing.state is RecoveryState.COPYING
    return marked.with_changes(
        state=standing.state if is_copied else RecoveryState.WAITING,
        next_retry_ms=None,
        bookies=tuple(sorted({*standing.bookies, *names})),
        missing_entries=_sum(standing.missing_entries, missing_entries),
        missing_bytes=_sum(standing.missing_bytes, missing_bytes),
    )


def is_move(replicas: Collection[str], record: RecoveryRecord | None) -> bool:
    """Return whether a ledger is marked only because it can be on more racks, so that no replica is missing.

    `replicas`: the bookies that the mark names.
    """
    return not replicas and record is not None and record.reason is Reason.PLACEMENT


def _sum(one: int | None, other: int | None) -> int | None:
    return None if one is None or other is None else one + other


REASON_WORDS: Final[Mapping[Reason, str]] = {
    Reason.BOOKIE_LOST: "a bookie is lost",
    Reason.BOOKIE_DRAINING: "a bookie is drained",
    Reason.ENTRY_MISSING: "a check found missing or corrupt entries",
    Reason.REPORTED_BY_WRITER: "its writer continued without a copy",
    Reason.PLACEMENT: "it can be on more racks",
    Reason.OPERATOR: "an operator requested a repair",
}
"""Why a ledger is marked, as text for users. A list of the bookies may follow."""
assert REASON_WORDS.keys() == set(Reason)
