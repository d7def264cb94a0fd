"""Read and advance the counters from which `id_generator` takes ledger ids.

| ids                  | counter                                                    | end                         |
|----------------------|------------------------------------------------------------|-----------------------------|
| short: below 2^31-1  | children ever created below `idgen`                        | that number, at most 2^31-1 |
| long                 | children ever created below the highest `idgen-long/HOB-h` | h * 2^32 + that number      |

No id at or above the end of its range was ever generated. If `idgen-long` exists, the short ids are used up, and their
end is 2^31-1. Clients may also choose ids themselves; the counters do not include these.

Source: BookKeeper's ZkLedgerIdGenerator and LongZkLedgerIdGenerator; ZooKeeper's PrepRequestProcessor, which numbers
sequential nodes by the creations below their parent.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from bindery_core.errors import AlreadyExists, MetadataOutcomeUnknown, NoSuchNode

from bindery_metadata.layout.layout import HOB_PREFIX, SHORT_ID_END, LedgersLayout
from bindery_metadata.stores.parents import make_path
from bindery_metadata.stores.store import Create, Delete, MetadataStore, Op

HOB_FIRST: Final = 1
"""Upper 32 bits of the first long ids."""
BURN_MAX: Final = 1_000_000
"""Maximum number of ids that are skipped by creating children, which takes some minutes."""
BURN_STEP: Final = 500
"""Number of ids skipped per transaction."""
ATTEMPTS_MAX: Final = 5
"""Maximum number of consecutive failed attempts of one transaction."""
_BURN_NAME: Final = "skipped-"


@dataclass(frozen=True, slots=True)
class IdCounters:
    """The ends of the ids that were generated: no id of a range at or above its end was."""

    short_end: int
    """0 .. SHORT_ID_END."""
    long_end: int
    """At least SHORT_ID_END."""


async def read_counters(store: MetadataStore, layout: LedgersLayout) -> IdCounters:
    """Return the present ends. Call `sync` first. Raises MetadataUnavailable."""
    try:
        highs = high_halves(await store.children(layout.idgen_long))
    except NoSuchNode:
        return IdCounters(min(await _creates(store, layout.idgen), SHORT_ID_END), SHORT_ID_END)
    if not highs:
        return IdCounters(SHORT_ID_END, SHORT_ID_END)
    return IdCounters(SHORT_ID_END, (highs[-1] << 32) + await _creates(store, layout.hob(highs[-1])))


def high_halves(names: Iterable[str]) -> list[int]:
    """Return the upper 32 bits of the ids below `idgen-long`, ascending, from the names of its children."""
    digits = (name.removeprefix(HOB_PREFIX) for name in names if name.startswith(HOB_PREFIX))
    return sorted(int(text) for text in digits if text.isdecimal())


async def skip_ids(store: MetadataStore, layout: LedgersLayout, *, up_to: int) -> int:
    """Advance the generator, so that it generates no id below `up_to` any more in the range of `up_to - 1`.

    Return the new end of that range. It is below `up_to` if nothing was changed: more than BURN_MAX short ids would be
    skipped, or long ids beyond the next upper half, because such an id was not generated but chosen by a client.
    Raises MetadataUnavailable, MetadataOutcomeUnknown.
    """
    counters = await read_counters(store, layout)
    if up_to <= SHORT_ID_END:
        if 0 < up_to - counters.short_end <= BURN_MAX:
            await make_path(store, layout.idgen)
            await burn(store, layout.idgen, up_to=up_to)
            counters = await read_counters(store, layout)
        return counters.short_end
    high = up_to - 1 >> 32
    if counters.long_end < up_to and 0 <= high - (counters.long_end >> 32) <= 1 and counters.long_end > SHORT_ID_END:
        await make_path(store, layout.hob(high + 1))
        counters = await read_counters(store, layout)
    return counters.long_end


async def burn(store: MetadataStore, path: str, *, up_to: int) -> None:
    """Advance the counter of `path` so that its next sequential child is number `up_to` or higher. Safe while other
    clients use the counter."""
    attempts = 0
    while True:
        left = up_to - await _creates(store, path)
        if left <= 0:
            return
        ops: list[Op] = []
        for number in range(min(left, BURN_STEP)):
            child = f"{path}/{_BURN_NAME}{number}"
            ops += [Create(child), Delete(child, 0)]
        try:
            await store.multi(ops)
            attempts = 0
        except (AlreadyExists, MetadataOutcomeUnknown):
            attempts += 1
            if attempts == ATTEMPTS_MAX:
                raise
            await store.sync(path)


async def _creates(store: MetadataStore, path: str) -> int:
    stat = await store.exists(path)
    return 0 if stat is None else stat.creates
