"""The sentences in which healing says why it does not go on, and what would make it. Pure; each begins with its subject
and ends without a full stop, so that it can stand in a longer one."""

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
        f"the metadata of ledger {ledger_id} cannot be read ({error}): restore them from a backup, or delete the ledger"
    )


def open_with_hole(ledger_id: int, bookies: Sequence[BookieId]) -> str:
    where = f" on {listed(bookies)}" if bookies else ""
    return (
        f"ledger {ledger_id} is open and its writer went on without some copies{where}: they are made once the writer"
        " closes it or changes its bookies"
    )


def refilling(bookie_id: BookieId) -> str:
    return f"{bookie_id} lost its storage and refills it from the other bookies: nothing is to be done"


def unsure(bookie_id: BookieId, reason: str) -> str:
    return f"{bookie_id} cannot say whether it has its copies ({reason}): it is asked again, and then replaced"


def no_spare(
    bookie_id: BookieId,
    ensemble: tuple[BookieId, ...],
    view: ClusterView,
    *,
    refused: Mapping[BookieId, str] | None = None,
    is_open: bool = False,
) -> str:
    """`bookie_id` cannot be replaced in `ensemble`."""
    why = {
        **{b: "is read-only" for b, is_writable in view.bookies.items() if not is_writable},
        **{b: f"is {intent}" for b, intent in view.not_for_copies.items() if b in view.bookies},
        **(refused or {}),
    }
    others = [f"{b} {why[b]}" for b in sorted(view.bookies) if b in why and b not in ensemble]
    writable = sum(view.bookies.values())
    because = f" ({'; '.join(others)})" if others else ""
    rest = (
        "it stays open and its writer goes on with the others; add a bookie, or bring {0} back"
        if is_open
        else "add a bookie, or bring {0} back"
    )
    return (
        f"no bookie can take the place of {bookie_id}: of {counted(writable, 'writable bookie')} none is free of this"
        f" ledger{because}; {rest.format(bookie_id)}"
    )


def grace(ledger_id: int, bookies: Sequence[BookieId], left_s: float) -> str:
    return (
        f"ledger {ledger_id} is open and its writer has {span(left_s)} more to replace {listed(bookies)} itself: then"
        " it is closed and healed"
    )


def recovery_impossible(ledger_id: int, error: str) -> str:
    return (
        f"ledger {ledger_id} is open and cannot be closed, because too few of its bookies say where it ends ({error}):"
        " bring them back"
    )


def paused() -> str:
    return "automatic recovery is switched off: `bindery recovery resume` switches it on"


def excused(bookie_id: BookieId, now_ms: int, until_ms: int | None) -> str:
    left = "" if until_ms is None else f" for {span((until_ms - now_ms) / 1000)} more"
    return f"{bookie_id} is away for maintenance{left}: it is waited for, and replaced when it does not come back"


def unsteady(ledger_id: int) -> str:
    return f"bookies came and went all the time while ledger {ledger_id} was looked at: it is looked at again"
