"""WriterReports: what writers went on without, marked for healing.

A writer confirms an entry when Qa bookies have it. When one of the others fails then, it is replaced behind the last
confirmed entry, if there is a spare, and of those before it may lack some: a hole in the middle of a fragment, which no
look at first and last entries finds. The writer knows, and says so (`on_degraded` of the ledger client).

    told --settle_s--> the ledger names the bookie no more, or is gone: nothing
                       the bookie is registered:                        mark, with REPORTED_BY_WRITER: all is looked at
                       it is away, or metadata are:                     look again after RELOOK_S

An absent bookie is waited for, since a mark would have it replaced at once: a restart must not cost copies. When it
stays away the auditor marks all that it held. `settle_s` is longer than a dead bookie stays registered.

The writer never waits and never fails for it. What was marked is not remembered: the same bookie may miss more later,
and to mark what is marked already costs a few reads. A report is kept in memory: when its process dies, who recovers
the ledger leaves a note of it (`closing_records`), and so does a writer that closes a ledger with a hole.
Source: docs/healing.md; BookKeeper's writers say nothing.
"""

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

from bindery_core.errors import BinderyError, NoSuchNode, OutcomeUnknown, TryAgain
from bindery_core.formats import ledger_metadata_codec
from bindery_core.ids import BookieId, LedgerId
from bindery_core.sources import RandomBits
from bindery_kit.observability.logs import get_logger
from bindery_metadata.layout.layout import LedgersLayout
from bindery_metadata.recovery.recovery_records import Reason, RecoveryRecord, RecoveryRecords
from bindery_metadata.recovery.underreplication import UnderreplicationManager
from bindery_metadata.stores.store import MetadataStore

from bindery_recovery.cluster.ledger_index import members_of
from bindery_recovery.records.reasons import marked_for

SETTLE_S: Final = 12.0
"""A bookie's ZooKeeper session ends 10 s after the bookie, unless set otherwise."""
RELOOK_S: Final = 10.0
PENDING_MAX: Final = 100_000
"""Ledgers that wait at a time; more are told to the log alone."""
LOOKS_PER_S: Final = 50.0
"""A bookie that dies concerns all open ledgers at once, in every process that writes."""
CLOSE_S: Final = 1.5
"""Longest that the end takes."""

log = get_logger(__name__)


@dataclass(slots=True)
class _Reported:
    bookies: dict[BookieId, int] = field(default_factory=dict)
    """How often each was told of: what is told during a look waits for one more."""
    due: float = 0.0


class WriterReports:
    """One process's. `degraded` is for `LedgerClient.connect(on_degraded=...)`; `run` for ever beside it."""

    def __init__(
        self,
        store: MetadataStore,
        layout: LedgersLayout,
        *,
        randomness: RandomBits,
        clock_ms: Callable[[], int],
        settle_s: float = SETTLE_S,
        pending_max: int = PENDING_MAX,
        looks_per_s: float = LOOKS_PER_S,
    ) -> None:
        """`clock_ms`: the wall clock."""
        self._store = store
        self._layout = layout
        self._marks = UnderreplicationManager(store, layout, randomness=randomness, clock_ms=clock_ms)
        self._records = RecoveryRecords(store)
        self._clock_ms = clock_ms
        self._settle_s = settle_s
        self._pending_max = pending_max
        self._interval_s = 1 / looks_per_s
        self._waiting: dict[LedgerId, _Reported] = {}
        self._is_prepared = False
        self._told = asyncio.Event()
        self.marked = 0
        """Ledgers marked so far."""
        self.dropped = 0
        """Reports for which there was no room."""

    @property
    def waiting(self) -> int:
        """Ledgers that are not marked yet."""
        return len(self._waiting)

    def degraded(self, ledger_id: LedgerId, bookie_id: BookieId, reason: str) -> None:
        """`bookie_id` lacks entries of the ledger. Returns at once, raises nothing."""
        reported = self._waiting.get(ledger_id)
        if reported is None:
            if len(self._waiting) >= self._pending_max:
                self.dropped += 1
                log.error("writer_report_dropped", ledger_id=ledger_id, bookie_id=bookie_id, reason=reason)
                return
            reported = self._waiting[ledger_id] = _Reported()
        reported.bookies[bookie_id] = reported.bookies.get(bookie_id, 0) + 1
        reported.due = asyncio.get_running_loop().time() + self._settle_s
        self._told.set()

    async def close(self) -> None:
        """After `run`: mark what waits, as far as that can be done soon, for nobody will know of it later."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                for ledger_id in list(self._waiting):
                    await self._look_at(ledger_id, is_last=True)
        if self._waiting:
            log.warning("writer_reports_lost", ledgers=len(self._waiting), first=min(self._waiting))

    async def run(self) -> None:
        """Mark what is told, as it can be. Ends when cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            self._told.clear()
            if not self._waiting:
                await self._told.wait()
            first = min(reported.due for reported in self._waiting.values())
            await asyncio.sleep(max(self._interval_s, first - loop.time()))
            for ledger_id in [i for i, reported in self._waiting.items() if reported.due <= loop.time()]:
                await self._look_at(ledger_id)
                await asyncio.sleep(self._interval_s)

    async def _look_at(self, ledger_id: LedgerId, *, is_last: bool = False) -> None:
        """Mark the ledger if that is to be done now. `is_last`: for absent bookies too. Raises nothing."""
        reported = self._waiting[ledger_id]
        looked_at, due = dict(reported.bookies), reported.due
        waits: set[BookieId] = set()
        try:
            members = looked_at.keys() & await self._members(ledger_id)
            here = members if is_last else members & await self._registered()
            if here:
                await self._mark(ledger_id, sorted(here))
            waits = members - here
        except (TryAgain, OutcomeUnknown) as error:
            log.info("writer_report_waits", ledger_id=ledger_id, waiting=len(self._waiting), error=str(error))
            waits = set(looked_at)
        except BinderyError as error:
            log.error("writer_report_not_marked", ledger_id=ledger_id, bookies=sorted(looked_at), error=str(error))
        except Exception as error:  # a fault of ours is not worth the reports of other ledgers
            log.exception("writer_report_not_marked", ledger_id=ledger_id, bookies=sorted(looked_at), error=repr(error))
        for bookie_id, count in looked_at.items():
            if bookie_id not in waits and reported.bookies.get(bookie_id) == count:
                del reported.bookies[bookie_id]
        if not reported.bookies:
            self._waiting.pop(ledger_id, None)
        elif reported.due == due:
            reported.due = asyncio.get_running_loop().time() + RELOOK_S

    async def _members(self, ledger_id: LedgerId) -> set[BookieId]:
        """The bookies that the ledger names; none: it was deleted."""
        try:
            node = await self._store.get(self._layout.ledger(ledger_id))
        except NoSuchNode:
            return set()
        return set(members_of(ledger_metadata_codec.decode(node.data)))

    async def _registered(self) -> set[BookieId]:
        found: set[BookieId] = set()
        for path in (self._layout.available, self._layout.available_readonly):
            with contextlib.suppress(NoSuchNode):
                found |= {BookieId(name) for name in await self._store.children(path)}
        return found

    async def _mark(self, ledger_id: LedgerId, bookies: Sequence[BookieId]) -> None:
        if not self._is_prepared:
            await self._marks.prepare()
            self._is_prepared = True

        def change(current: RecoveryRecord | None) -> RecoveryRecord:
            return marked_for(
                current, ledger_id, bookies, Reason.REPORTED_BY_WRITER, missing_entries=None, missing_bytes=None,
                now_ms=self._clock_ms(),
            )  # fmt: skip

        await self._records.update(ledger_id, change)  # first, as LedgerMarker does
        await self._marks.mark(ledger_id, bookies)
        self.marked += 1
        log.info("writer_report_marked", ledger_id=ledger_id, bookies=bookies)
