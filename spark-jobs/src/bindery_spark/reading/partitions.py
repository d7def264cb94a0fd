"""Divide fragments into read tasks: each task reads from one bookie, within limits of bytes and entries. Pure.

Large fragments are split by entries; small ones are combined, in the order of their ledgers. Tasks of different bookies
alternate, so that concurrent tasks rarely read from the same bookie.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import Final

from bindery_core.ids import BookieId

from bindery_spark.reading.fragments import FRAME_OVERHEAD, Fragment, Ledger

FRAGMENT_COST: Final = 4 * 1024
"""Cost of a fragment in bytes in addition to its entries, because requests for small fragments also take time."""


@dataclass(frozen=True, slots=True)
class Task:
    """The work of one reader. Can be pickled: it holds no connection."""

    bookie_id: BookieId
    fragments: tuple[Fragment, ...] = ()
    unexpected_in: tuple[int, int] | None = None
    """Instead of fragments: find orphaned data in the ledgers first..last (inclusive)."""

    @property
    def ledger_range(self) -> tuple[int, int]:
        """First and last ledger id, inclusive."""
        if self.unexpected_in is not None:
            return self.unexpected_in
        return self.fragments[0].ledger.ledger_id, self.fragments[-1].ledger.ledger_id


def cost_of(fragment: Fragment) -> int:
    """Estimated size in bytes."""
    return FRAGMENT_COST + fragment.entry_count * (fragment.ledger.entry_size + FRAME_OVERHEAD)


def split(fragment: Fragment, *, bytes_max: int, entries_max: int, span: int = 1) -> Iterator[Fragment]:
    """Yield parts within both limits, but of at least `span` entry ids and one entry. All but the first begin at a
    multiple of `span`."""
    share = max(1, fragment.entry_count)
    per_entry = fragment.ledger.entry_size + FRAME_OVERHEAD
    entries = max(1, min(entries_max, (bytes_max - FRAGMENT_COST) // per_entry))
    if share <= entries or span >= fragment.last - fragment.first + 1:
        yield fragment
        return
    parts = -(-share // entries)
    step = -(-(fragment.last - fragment.first + 1) // parts)
    step = max(span, step // span * span)
    starts = [fragment.first, *range((fragment.first // span + step // span) * span, fragment.last + 1, step)]
    for first, following in zip(starts, [*starts[1:], fragment.last + 1], strict=True):
        part = replace(fragment, first=first, last=following - 1)
        if part.entry_count:
            yield part


def tasks_of(
    fragments: Iterable[Fragment],
    *,
    bytes_max: int,
    entries_max: int,
    ends_only: bool = False,
    span_of: Callable[[Ledger], int] = lambda _: 1,
) -> Sequence[Task]:
    """Return the tasks. `ends_only`: only the ends of each fragment are read, so none is split. `span_of`: split
    fragments of a ledger at multiples of this."""
    by_bookie: defaultdict[BookieId, list[Fragment]] = defaultdict(list)
    for fragment in fragments:
        by_bookie[fragment.bookie_id].append(fragment)
    queues = [
        list(_pack(bookie_id, mine, bytes_max, entries_max, ends_only=ends_only, span_of=span_of))
        for bookie_id, mine in sorted(by_bookie.items())
    ]
    return [task for task in chain.from_iterable(zip_longest(*queues)) if task is not None]


def _pack(
    bookie_id: BookieId,
    fragments: list[Fragment],
    bytes_max: int,
    entries_max: int,
    *,
    ends_only: bool,
    span_of: Callable[[Ledger], int],
) -> Iterator[Task]:
    fragments.sort(key=lambda each: (each.ledger.ledger_id, each.segment, each.first))
    taken: list[Fragment] = []
    size = entries = 0
    for whole in fragments:
        span = span_of(whole.ledger)
        parts = [whole] if ends_only else split(whole, bytes_max=bytes_max, entries_max=entries_max, span=span)
        for part in parts:
            count = len(part.shared_ends()) if ends_only else part.entry_count
            cost = FRAGMENT_COST + count * (part.ledger.entry_size + FRAME_OVERHEAD)
            if taken and (size + cost > bytes_max or entries + count > entries_max):
                yield Task(bookie_id, tuple(taken))
                taken, size, entries = [], 0, 0
            taken.append(part)
            size += cost
            entries += count
    if taken:
        yield Task(bookie_id, tuple(taken))
