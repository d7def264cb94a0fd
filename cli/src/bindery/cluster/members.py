"""List the bookies of a cluster with registration, cookie and administrative state."""

from typing import Any, Final

from bindery_core.ids import BookieId
from bindery_metadata.bookies.membership import Intent, Membership, MembershipStore
from bindery_metadata.cluster import cluster_status
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.stores.store import MetadataStore

from bindery.common.operator import time_text
from bindery.common.tables import size_text, table

COLUMNS: Final = ("bookie", "registered", "cookie", "intent", "since", "until", "drain", "reason")


async def read_members(store: MetadataStore, layout: LedgersLayout, *, now_ms: int) -> list[dict[str, Any]]:
    """Return one object per bookie, in the order of their ids. Raises MetadataUnavailable."""
    status = await cluster_status(store, layout)
    memberships = await MembershipStore(store, clock_ms=lambda: now_ms).all()
    found = []
    for name in sorted({*status.known, *status.writable, *status.read_only, *memberships}):
        bookie_id = BookieId(name)
        membership = memberships.get(bookie_id, Membership(bookie_id))
        registered = (
            "writable" if bookie_id in status.writable else "read-only" if bookie_id in status.read_only else "absent"
        )
        intent = membership.effective(now_ms)
        has_intent = intent is not Intent.ACTIVE
        found.append(
            {
                "bookie_id": bookie_id,
                "registered": registered,
                "has_cookie": bookie_id in status.known,
                "intent": intent.value,
                "since_ms": membership.since_ms if has_intent else None,
                "until_ms": membership.until_ms if has_intent else None,
                "reason": membership.reason if has_intent else "",
                "by": membership.by if has_intent else "",
                "drain": dict(membership.drain) if has_intent else {},
            }
        )
    return found


def _at_the_start(drain: dict[str, int]) -> str:
    return f"{drain.get('ledgers_total', 0)} ledgers, {size_text(drain.get('bytes_total', 0))} at the start"


def member_lines(members: list[dict[str, Any]]) -> list[str]:
    """Return the members as lines of a table; none for no members."""
    if not members:
        return []
    rows = []
    for member in members:
        until_ms, since_ms = member["until_ms"], member["since_ms"]
        drain = member["drain"]
        rows.append(
            {
                "bookie": member["bookie_id"],
                "registered": member["registered"].upper()
                if member["registered"] == "absent"
                else member["registered"],
                "cookie": "yes" if member["has_cookie"] else "no",
                "intent": member["intent"],
                "since": "" if since_ms is None else time_text(since_ms),
                "until": "" if until_ms is None else time_text(until_ms),
                "drain": _at_the_start(drain) if drain else "",
                "reason": " ".join(filter(None, (member["reason"], member["by"] and f"({member['by']})"))),
            }
        )
    return table(rows, columns=COLUMNS)
