"""Sentences that explain why a ledger is not repaired and what to do about it.

All functions are pure. Each sentence begins with its subject in lower case and has no full stop, so that it can be part
of a longer one.
"""

from collections.abc import Collection, Mapping, Sequence

from bindery_core.ids import BookieId

from bindery_recovery.cluster.cluster_view import ClusterView


def listed(bookies: Collection[str]) -> str:
    """`a`, `a and b`, `a, b and c`."""
    *most, last = bookies
    return f"{', '.join(most)} and {last}" if most else last


def counted(count: int, noun: str, plural: str = "") -> str:
    """`1 entry`, `1,200 entries`."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def size(bytes_count: float) -> str:
    """`512 B`, `1.5 MiB`."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if bytes_count < 1024:
            return f"{bytes_count:.0f} B" if unit == "B" else f"{bytes_count:.1f} {unit}"
        bytes_count /= 1024
    return f"{bytes_count:.1f} TiB"


def span(seconds: float) -> str:
    """`5 s`, `3 min`, `2 h`, `4 days`; at least a second."""
    for limit, unit, word in ((120, 1, "s"), (7200, 60, "min"), (172_800, 3600, "h")):
        if seconds < limit:
            return f"{max(1, round(seconds / unit))} {word}"
    return f"{round(seconds / 86_400)} days"


def metadata_unreadable(ledger_id: int, error: str) -> str:
    return (
        f"the metadata of ledger {ledger_id} cannot be read ({error}): restore it from a backup, or delete the ledger"
    )


def open_with_hole(ledger_id: int, bookies: Sequence[BookieId]) -> str:
    where = f" on {listed(bookies)}" if bookies else ""
    return (
        f"ledger {ledger_id} is open and its writer continued without some copies{where}: they are created when the"
        " writer closes the ledger or replaces the bookie"
    )


def refilling(bookie_id: BookieId) -> str:
    return f"{bookie_id} lost its storage and refills it from the other bookies: no action is needed"


def unsure(bookie_id: BookieId, reason: str) -> str:
    return f"{bookie_id} does not report its entries ({reason}): the check is repeated, then the bookie is replaced"


def no_spare(
    bookie_id: BookieId,
    ensemble: tuple[BookieId, ...],
    view: ClusterView,
    *,
    refused: Mapping[BookieId, str] | None = None,
    is_open: bool = False,
) -> str:
    """No bookie can replace `bookie_id` in `ensemble`."""
    why = {
        **{b: "is read-only" for b, is_writable in view.bookies.items() if not is_writable},
        **{b: f"is {intent}" for b, intent in view.not_for_copies.items() if b in view.bookies},
        **(refused or {}),
    }
    others = [f"{b} {why[b]}" for b in sorted(view.bookies) if b in why and b not in ensemble]
    writable = sum(view.bookies.values())
    because = f" ({'; '.join(others)})" if others else ""
    rest = (
        "the ledger stays open and its writer continues with the other bookies; add a bookie, or start {0} again"
        if is_open
        else "add a bookie, or start {0} again"
    )
    return (
        f"no bookie can replace {bookie_id}: none of {counted(writable, 'writable bookie')} can accept copies of this"
        f" ledger{because}; {rest.format(bookie_id)}"
    )


def grace(ledger_id: int, bookies: Sequence[BookieId], left_s: float) -> str:
    return (
        f"ledger {ledger_id} is open and its writer has {span(left_s)} left to replace {listed(bookies)} itself: after"
        " that, the ledger is closed and repaired"
    )


def recovery_impossible(ledger_id: int, error: str) -> str:
    return (
        f"ledger {ledger_id} is open and cannot be closed, because too few of its bookies answer to find its last entry"
        f" ({error}): start them again"
    )


def paused() -> str:
    return "automatic recovery is disabled: run `bindery recovery resume` to enable it"


def in_maintenance(bookie_id: BookieId, now_ms: int, until_ms: int | None) -> str:
    left = "" if until_ms is None else f" for another {span((until_ms - now_ms) / 1000)}"
    return f"{bookie_id} is in maintenance{left}: it is replaced only if it does not return by then"


def unsteady(ledger_id: int) -> str:
    return f"bookies registered and disappeared repeatedly while ledger {ledger_id} was checked: it is checked again"
