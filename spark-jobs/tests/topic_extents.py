"""Ledgers of a topic as the source sees them, for tests of positions and streams without a cluster."""

from bindery_spark.sources.topic.positions import Extent, Slice

HOUR_MS = 3_600_000


def extents(*lasts: int, is_open: bool = True) -> list[Extent]:
    """Ledgers 10, 20, ... with these last entries, each written for one hour. The last one may be open."""
    return [
        Extent(
            ledger_id=10 * (n + 1),
            last_entry=last,
            is_closed=not is_open or n + 1 < len(lasts),
            created_ms=n * HOUR_MS + 1,
            closed_ms=(n + 1) * HOUR_MS if not is_open or n + 1 < len(lasts) else 0,
        )
        for n, last in enumerate(lasts)
    ]


def entries_of(slices: list[Slice]) -> list[tuple[int, int]]:
    """The entries of `slices` as (ledger id, entry id)."""
    return [(each.ledger_id, entry) for each in slices for entry in range(each.first, each.last + 1)]
