"""Mark ledgers for entries that a writer reported as missing on a bookie.

A writer confirms an entry when Qa bookies have it. If another bookie of the ensemble then fails, the writer replaces it
for the entries after the last confirmed one, if a spare exists. The failed bookie may miss some of the confirmed
entries. This is a hole in the middle of a fragment, which a check of the first and last entries does not find. The
ledger client reports it (`on_degraded`).

    reported --settle_s--> the ledger no longer names the bookie, or was deleted: done
                           the bookie is registered: mark with REPORTED_BY_WRITER, so that all entries are read
                           the bookie is absent, or the metadata store is unavailable: try again after RETRY_S

A report about an absent bookie waits until the bookie is registered, because workers replace the absent bookie of a
marked ledger at once, and a restart must not trigger copying. If the bookie stays absent, the auditor marks all its
ledgers. `settle_s` is longer than the time for which a dead bookie stays registered.

The writer never waits for a report and never fails because of one. A report is forgotten once its ledger is marked: the
same bookie may miss more entries later, and marking a marked ledger costs only a few reads. Reports are kept in memory.
If the process fails, the client that recovers the ledger leaves a closing record (`closing_records`), and so does a
writer that closes a ledger with a hole. Source: docs/healing.md; BookKeeper's writers report nothing.
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
"""Seconds between a report and its mark. By default, the ZooKeeper session of a dead bookie ends after 10 s."""
RETRY_S: Final = 10.0
"""Delay in seconds before a report is processed again."""
PENDING_MAX: Final = 100_000
"""Maximum number of ledgers with waiting reports; further reports are only logged."""
CHECKS_PER_S: Final = 50.0
"""Maximum number of reports processed per second: a dead bookie affects all open ledgers at once, in every writing
process."""
CLOSE_S: Final = 1.5
"""Maximum duration of `close` in seconds."""

log = get_logger(__name__)


@dataclass(slots=True)
class _Reported:
    bookies: dict[BookieId, int] = field(default_factory=dict)
    """Number of reports per bookie. A report that arrives while the ledger is processed causes another pass."""
    due: float = 0.0


class WriterReports:
    """The reports of one process. Pass `degraded` to `LedgerClient.connect(on_degraded=...)` and run `run` as a
    task."""

    def __init__(
        self,
        store: MetadataStore,
        layout: LedgersLayout,
        *,
        randomness: RandomBits,
        clock_ms: Callable[[], int],
        settle_s: float = SETTLE_S,
        pending_max: int = PENDING_MAX,
        checks_per_s: float = CHECKS_PER_S,
    ) -> None:
        """`clock_ms`: the wall clock."""
        self._store = store
        self._layout = layout
        self._marks = UnderreplicationManager(store, layout, randomness=randomness, clock_ms=clock_ms)
        self._records = RecoveryRecords(store)
        self._clock_ms = clock_ms
        self._settle_s = settle_s
        self._pending_max = pending_max
        self._interval_s = 1 / checks_per_s
        self._waiting: dict[LedgerId, _Reported] = {}
        self._is_prepared = False
        self._is_reported = asyncio.Event()
        self.marked = 0
        """Number of ledgers marked so far."""
        self.dropped = 0
        """Number of reports dropped because of PENDING_MAX."""

    @property
    def waiting(self) -> int:
        """Number of ledgers with waiting reports."""
        return len(self._waiting)

    def degraded(self, ledger_id: LedgerId, bookie_id: BookieId, reason: str) -> None:
        """Report that entries of the ledger are missing on `bookie_id`. Returns at once and never raises."""
        reported = self._waiting.get(ledger_id)
        if reported is None:
            if len(self._waiting) >= self._pending_max:
                self.dropped += 1
                log.error("writer_report_dropped", ledger_id=ledger_id, bookie_id=bookie_id, reason=reason)
                return
            reported = self._waiting[ledger_id] = _Reported()
        reported.bookies[bookie_id] = reported.bookies.get(bookie_id, 0) + 1
        reported.due = asyncio.get_running_loop().time() + self._settle_s
        self._is_reported.set()

    async def close(self) -> None:
        """Mark the waiting ledgers within CLOSE_S, because the reports are lost afterwards. Call this after `run` has
        ended."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(CLOSE_S):
                for ledger_id in list(self._waiting):
                    await self._process(ledger_id, is_last=True)
        if self._waiting:
            log.warning("writer_reports_lost", ledgers=len(self._waiting), first=min(self._waiting))

    async def run(self) -> None:
        """Process reports when they are due. Runs until cancelled."""
        loop = asyncio.get_running_loop()
        while True:
            self._is_reported.clear()
            if not self._waiting:
                await self._is_reported.wait()
            first = min(reported.due for reported in self._waiting.values())
            await asyncio.sleep(max(self._interval_s, first - loop.time()))
            for ledger_id in [i for i, reported in self._waiting.items() if reported.due <= loop.time()]:
                await self._process(ledger_id)
                await asyncio.sleep(self._interval_s)

    async def _process(self, ledger_id: LedgerId, *, is_last: bool = False) -> None:
        """Mark the ledger for the reported bookies that are registered; with `is_last`, for absent ones too. Never
        raises."""
        reported = self._waiting[ledger_id]
        bookies, due = dict(reported.bookies), reported.due
        waits: set[BookieId] = set()
        try:
            members = bookies.keys() & await self._members(ledger_id)
            here = members if is_last else members & await self._registered()
            if here:
                await self._mark(ledger_id, sorted(here))
            waits = members - here
        except (TryAgain, OutcomeUnknown) as error:
            log.info("writer_report_waits", ledger_id=ledger_id, waiting=len(self._waiting), error=str(error))
            waits = set(bookies)
        except BinderyError as error:
            log.error("writer_report_not_marked", ledger_id=ledger_id, bookies=sorted(bookies), error=str(error))
        except Exception as error:  # a defect must not lose the reports of other ledgers
            log.exception("writer_report_not_marked", ledger_id=ledger_id, bookies=sorted(bookies), error=repr(error))
        for bookie_id, count in bookies.items():
            if bookie_id not in waits and reported.bookies.get(bookie_id) == count:
                del reported.bookies[bookie_id]
        if not reported.bookies:
            self._waiting.pop(ledger_id, None)
        elif reported.due == due:
            reported.due = asyncio.get_running_loop().time() + RETRY_S

    async def _members(self, ledger_id: LedgerId) -> set[BookieId]:
        """Return the bookies that the ledger's metadata names; none if the ledger was deleted."""
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
                current,
                ledger_id,
                bookies,
                Reason.REPORTED_BY_WRITER,
                missing_entries=None,
                missing_bytes=None,
                now_ms=self._clock_ms(),
            )

        await self._records.update(ledger_id, change)  # before the mark, as in LedgerMarker
        await self._marks.mark(ledger_id, bookies)
        self.marked += 1
        log.info("writer_report_marked", ledger_id=ledger_id, bookies=bookies)
