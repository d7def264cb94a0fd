"""How the reading of many fragments is cut into tasks: each of one bookie, bounded in bytes and entries. Pure.

A fragment that is too large is cut by entries; small ones are put together, in the order of their ledgers. Tasks of
different bookies alternate, so that those which run side by side seldom want the same one.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, zip_longest
from typing import Final

from bindery_core.ids import BookieId

from bindery_spark.reading.fragments import FRAME_OVERHEAD, Fragment, Ledger

FRAGMENT_COST: Final = 4 * 1024
"""Bytes that a fragment counts beside its entries: asking for a small one takes time, too."""


@dataclass(frozen=True, slots=True)
class Task:
    """What one reader does. It pickles, and holds no connection."""

    bookie_id: BookieId
    fragments: tuple[Fragment, ...] = ()
    unexpected_in: tuple[int, int] | None = None
    """Instead of fragments: look for what no metadata expect in ledgers first..last (inclusive)."""

    @property
    def ledger_range(self) -> tuple[int, int]:
        """Inclusive."""
        if self.unexpected_in is not None:
            return self.unexpected_in
        return self.fragments[0].ledger.ledger_id, self.fragments[-1].ledger.ledger_id


def cost_of(fragment: Fragment) -> int:
    """Estimated bytes."""
    return FRAGMENT_COST + fragment.entry_count * (fragment.ledger.entry_size + FRAME_OVERHEAD)


def split(fragment: Fragment, *, bytes_max: int, entries_max: int, span: int = 1) -> Iterator[Fragment]:
    """Parts within both limits, as far as one entry is. They begin at multiples of `span`, but for the first one."""
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
    fragments: Iterable[Fragment], *, bytes_max: int, entries_max: int, ends_only: bool = False,
    span_of: Callable[[Ledger], int] = lambda _: 1,
) -> Sequence[Task]:  # fmt: skip
    """`ends_only`: of each fragment the ends are read, a few entries, and none is cut. `span_of`: parts of a ledger's
    fragments begin at its multiples."""
    by_bookie: defaultdict[BookieId, list[Fragment]] = defaultdict(list)
    for fragment in fragments:
        by_bookie[fragment.bookie_id].append(fragment)
    queues = [
        list(_pack(bookie_id, mine, bytes_max, entries_max, ends_only=ends_only, span_of=span_of))
        for bookie_id, mine in sorted(by_bookie.items())
    ]
    return [task for task in chain.from_iterable(zip_longest(*queues)) if task is not None]


def _pack(
    bookie_id: BookieId, fragments: list[Fragment], bytes_max: int, entries_max: int, *, ends_only: bool,
    span_of: Callable[[Ledger], int],
) -> Iterator[Task]:  # fmt: skip
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
