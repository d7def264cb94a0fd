"""Generate new ledger ids. No id is generated twice, because the clients share the counters of ZooKeeper's sequential
nodes.

Short ids come from `idgen/ID-<10 digits>`. When that counter leaves 0 .. 2^31 - 2, the node `idgen-long` is created,
and from then on all clients use long ids: `idgen-long/HOB-<high>/ID-<low>` gives high * 2^32 + low.
If the outcome of a node's creation is unknown, its number is never used.

Source: BookKeeper's ZkLedgerIdGenerator and LongZkLedgerIdGenerator.
"""

import asyncio
import contextlib
from typing import Final

from bindery_core.errors import AlreadyExists, BinderyError, MetadataOutcomeUnknown, MetadataUnavailable, NoSuchNode
from bindery_core.ids import LedgerId

from bindery_metadata.layout.layout import ID_PREFIX, SHORT_ID_END, LedgersLayout
from bindery_metadata.ledgers.id_counters import HOB_FIRST, high_halves
from bindery_metadata.stores.store import MetadataStore

ATTEMPTS_MAX: Final = 10
"""Maximum consecutive lost responses and races before an error is raised."""
HOB_MAX: Final = 2**31 - 1
"""Maximum value of the upper 32 bits of a long id."""
HOB_KEPT: Final = 3
"""Number of HOB directories that are kept. A slow client may still use the one before the last."""


class LedgerIdGenerator:
    """Generates ledger ids. Invariant: after the first long id, only long ids are generated."""

    def __init__(self, store: MetadataStore, layout: LedgersLayout) -> None:
        self._store = store
        self._layout = layout
        self._long = False
        self._cleaning: set[asyncio.Task[None]] = set()

    async def next_id(self) -> LedgerId:
        """Return an id that no other call returns. Raises MetadataUnavailable."""
        for _ in range(ATTEMPTS_MAX):
            try:
                ledger_id = await (self._next_long() if await self._is_long() else self._next_short())
            except (MetadataOutcomeUnknown, NoSuchNode):
                continue  # the number is not usable, or the directory was deleted: take another number
            if ledger_id is not None:
                return ledger_id
        raise MetadataUnavailable("no ledger id could be reserved", attempts=ATTEMPTS_MAX)

    async def close(self) -> None:
        """Wait until the counters' used nodes are deleted (the end of the session would delete them too)."""
        await asyncio.gather(*self._cleaning, return_exceptions=True)

    async def _is_long(self) -> bool:
        if not self._long:
            self._long = await self._store.exists(self._layout.idgen_long) is not None
        return self._long

    async def _next_short(self) -> LedgerId | None:
        low = await self._take_number(self._layout.idgen)
        if low is not None:
            return LedgerId(low)
        with contextlib.suppress(AlreadyExists):
            await self._store.create(self._layout.idgen_long, make_parents=True)
        return None

    async def _next_long(self) -> LedgerId | None:
        highs = high_halves(await self._store.children(self._layout.idgen_long))
        if not highs:
            await self._add_high(HOB_FIRST)
            return None
        low = await self._take_number(self._layout.hob(highs[-1]), make_parents=False)
        if low is None:
            await self._add_high(highs[-1] + 1)
            return None
        for high in highs[:-HOB_KEPT]:
            self._clean(self._layout.hob(high), version=0)
        return LedgerId(highs[-1] << 32 | low)

    async def _add_high(self, high: int) -> None:
        if high > HOB_MAX:
            raise MetadataUnavailable("the ledger ids are used up", high_bits=high)
        with contextlib.suppress(AlreadyExists):
            await self._store.create(self._layout.hob(high))

    async def _take_number(self, directory: str, *, make_parents: bool = True) -> int | None:
        """Return the next number of a directory's counter; None if the number is not in the range of ids."""
        path = await self._store.create(
            f"{directory}/{ID_PREFIX}", ephemeral=True, sequential=True, make_parents=make_parents
        )
        self._clean(path, version=None)
        number = int(path.rsplit(f"/{ID_PREFIX}", 1)[1])
        return number if 0 <= number < SHORT_ID_END else None

    def _clean(self, path: str, *, version: int | None) -> None:
        """Delete a used node in the background. No caller waits for the deletion."""
        task = asyncio.create_task(self._remove(path, version))
        self._cleaning.add(task)
        task.add_done_callback(self._cleaning.discard)

    async def _remove(self, path: str, version: int | None) -> None:
        with contextlib.suppress(BinderyError):
            await self._store.delete(path, version=version)
