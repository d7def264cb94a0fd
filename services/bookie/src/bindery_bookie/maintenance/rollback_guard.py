"""RollbackGuard: keep all ledgers if the metadata was rolled back to an older state.

A ZooKeeper that was rolled back does not contain the ledgers that are newer than its snapshot. All other checks of
garbage collection pass, so it would delete them. The guard compares the ledgers stored here with the metadata's
high-water mark (`known_ledgers`), which rolls back together with the metadata:

    ok --a stored ledger is above the mark and not in the metadata, or another bookie reports that--> suspected
    suspected --no report is left: an operator accepted the metadata, or restored the newer one--> ok

While the state is `metadata_rollback_suspected`, nothing is deleted because the metadata does not contain a ledger or
names other bookies. The report is in ZooKeeper, so all bookies keep their ledgers, also those that store none of the
unknown ones, and also when new ledgers have raised the mark.

A rolled-back ZooKeeper also generates the ids of its lost ledgers again. A new ledger of the same id is another ledger,
whose entries a bookie cannot distinguish from the old ones. The guard therefore advances the id generator above all
unknown ledgers, and it checks before each registration, so that no new ledger is placed on a bookie before.

A stored ledger above the mark that is in the metadata has an id that a client chose: the mark is raised to it. Such
ledgers are checked every CHECK_S, so that one that lives longer than that never causes a report after its deletion.
"""

import asyncio
import dataclasses
from bisect import bisect_left
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, Protocol

from bindery_core.errors import BinderyError, MetadataUnavailable
from bindery_core.ids import BookieId, LedgerId
from bindery_kit.observability.health import Health
from bindery_kit.observability.logs import error_fields, get_logger
from bindery_kit.process.late_imports import in_thread
from bindery_metadata.layout.layout import SHORT_ID_END, LedgersLayout
from bindery_metadata.ledgers.id_counters import read_counters, skip_ids
from bindery_metadata.ledgers.known_ledgers import (
    SUSPECTED,
    HighWaterMark,
    KnownLedgers,
    KnownLedgersStore,
    MetadataRollbackSuspected,
    RollbackReport,
    suspicion,
)
from bindery_metadata.stores.store import MetadataStore, SessionState

log = get_logger(__name__)

CHECK_S: Final = 60.0
"""Seconds between two checks of the ledgers in memory."""
READS_MAX: Final = 64
"""Maximum number of ledgers that one check looks up: above each end of the mark, and in skipped ranges, from the
highest down. Ledgers that were not looked up count as unknown."""
REFUSED: Final = "no ledgers are deleted"


class Shard(Protocol):
    """The part of StorageEngine that is used here."""

    async def list_ledger_ids(self) -> Sequence[int]:
        """Return the stored ledgers, ascending. Raises OSError, DamagedStorage."""
        ...

    def active_ledger_ids(self) -> Sequence[int]:
        """Return the ledgers in memory, in any order: those that were used last."""
        ...


@dataclass(frozen=True, slots=True)
class RollbackState:
    """Times in ms since 1970; 0: never."""

    checked_ms: int = 0
    version: int | None = None
    """Version of the node with the reports; None: there is no node."""
    reports: Mapping[str, RollbackReport] = field(default_factory=dict)
    """Bookie id -> its report, of all bookies."""

    @property
    def is_suspected(self) -> bool:
        return bool(self.reports)

    @property
    def since_ms(self) -> int:
        """Time of the first report; 0 if there is none."""
        return min((one.found_ms for one in self.reports.values()), default=0)

    @property
    def name(self) -> str:
        return SUSPECTED if self.is_suspected else "ok"


class RollbackGuard:
    """Event loop only. Call `run` as a task; the checks may be called at any time. Every check raises
    MetadataUnavailable if the metadata cannot be read, and Corrupt if the record cannot be decoded."""

    def __init__(
        self,
        shards: Sequence[Shard],
        metadata: MetadataStore,
        layout: LedgersLayout,
        *,
        instance_id: str,
        bookie_id: BookieId,
        health: Health,
        wall_clock_ms: Callable[[], int],
        check_s: float = CHECK_S,
    ) -> None:
        """`instance_id`: the cluster id in this bookie's cookie."""
        self._shards = shards
        self._metadata = metadata
        self._layout = layout
        self._bookie_id = bookie_id
        self._health = health
        self._wall_clock_ms = wall_clock_ms
        self._check_s = check_s
        self._instance_id = instance_id
        self._known = KnownLedgersStore(metadata, instance_id=instance_id)
        self._wanted = asyncio.Event()
        self._lock = asyncio.Lock()
        self.state = RollbackState()

    @property
    def own_report(self) -> RollbackReport | None:
        """The report of this bookie at the last check."""
        return self.state.reports.get(self._bookie_id)

    async def run(self) -> None:
        """Check after each reconnection and every CHECK_S, until cancelled."""
        remove = self._metadata.on_session_change(self._on_session)
        try:
            while True:
                try:
                    async with asyncio.timeout(self._check_s):
                        await self._wanted.wait()
                except TimeoutError:
                    pass
                if self._metadata.session_state is not SessionState.CONNECTED:
                    self._wanted.clear()  # the next session sets it again
                    continue
                try:
                    if self._wanted.is_set() or await self._needs_check():
                        self._wanted.clear()
                        await self.check_all()
                except MetadataRollbackSuspected:
                    pass
                except (BinderyError, OSError) as error:
                    log.warning("metadata_not_checked_for_rollback", error=str(error))
                except Exception:  # a program error must not end the bookie
                    log.exception("metadata_check_for_rollback_broke")
        finally:
            remove()

    async def before_registration(self) -> None:
        """Check all stored ledgers. Never prevents a registration, except that MetadataUnavailable is raised."""
        try:
            await self.check_all()
        except MetadataRollbackSuspected:
            pass
        except MetadataUnavailable:
            raise
        except (BinderyError, OSError) as error:
            log.warning("metadata_not_checked_for_rollback", **error_fields(error))

    async def check_all(self) -> None:
        """Check all stored ledgers. Raises MetadataRollbackSuspected."""
        stored = [await shard.list_ledger_ids() for shard in self._shards]
        await self._metadata.sync(self._layout.root)
        await self.check(stored)

    async def check(self, stored: Iterable[Sequence[int]]) -> None:
        """Check the stored ledgers: all of each shard, ascending, listed before the last sync.

        Raises MetadataRollbackSuspected if the metadata never knew some of them, or another bookie reports that.
        """
        async with self._lock:
            mark, known = await self._read()
            unknown = await self._unknown(mark, stored)
            own = known.reports.get(self._bookie_id)
            if unknown:
                await self._report(mark, unknown, own)
            elif own is not None and own.unknown:
                await self._update_report(dataclasses.replace(own, unknown=0))
            known = await self._set_state()
        if known.reports:
            raise MetadataRollbackSuspected(suspicion(REFUSED, known.reports))

    async def confirm(self, ledger_ids: Iterable[int]) -> None:
        """Check again, after a sync, that the metadata may have known these ledgers, which it does not contain.

        Raises MetadataRollbackSuspected.
        """
        mark, known = await self._read()
        if known.reports or not all(map(mark.may_know, ledger_ids)):
            await self.check_all()
            raise MetadataRollbackSuspected(f"{REFUSED}: the high-water mark of the metadata changed meanwhile")

    async def raise_mark(self, listed: Iterable[int]) -> None:
        """Raise the mark to ledgers that the metadata contains, if they are above it."""
        mark, _ = await self._read()
        await self._raise(mark, listed)

    async def count_missing(self, missing: int) -> None:
        """Add to the own report how many stored ledgers the metadata does not contain, if there is a report or a
        rollback is suspected by others."""
        async with self._lock:
            _, known = await self._read()
            if not known.reports:
                return
            own = known.reports.get(self._bookie_id)
            if own is None:
                own = RollbackReport(self._wall_clock_ms(), unknown=0, first=0, last=0)
            await self._update_report(dataclasses.replace(own, missing=missing))
            await self._set_state()

    def request(self) -> None:
        """Check soon."""
        self._wanted.set()

    async def accept(self, *, version: int, by: str) -> KnownLedgers:
        """Accept the metadata as it is, and return the value before. Raises Conflict, see `accept_metadata`."""
        await in_thread(import_accept)
        from bindery_metadata.recovery.accept_metadata import accept_metadata

        before = await accept_metadata(
            self._metadata, instance_id=self._instance_id, version=version, by=by, at_ms=self._wall_clock_ms()
        )
        async with self._lock:
            await self._set_state()
        return before

    # --- helpers --------------------------------------------------------------------------------------------------

    def _on_session(self, state: SessionState) -> None:
        if state is SessionState.CONNECTED:
            self._wanted.set()

    async def _needs_check(self) -> bool:
        """Return whether ledgers in memory are above the mark, or the reports have changed."""
        active = [ledger_id for shard in self._shards for ledger_id in shard.active_ledger_ids()]
        await self._metadata.sync(self._layout.root)
        mark, known = await self._read()
        return known.reports != self.state.reports or any(
            mark.short_end <= ledger_id < SHORT_ID_END or ledger_id >= mark.long_end for ledger_id in active
        )

    async def _read(self) -> tuple[HighWaterMark, KnownLedgers]:
        # The counters come first: another bookie stores its report before it advances them.
        counters = await read_counters(self._metadata, self._layout)
        known, _ = await self._known.read()
        return known.mark(counters), known

    async def _unknown(self, mark: HighWaterMark, stored: Iterable[Sequence[int]]) -> Sequence[int]:
        """Return the stored ledgers that the metadata never knew, ascending. Raise the mark to those that it
        contains."""
        short: list[int] = []
        long: list[int] = []
        skipped: list[int] = []
        for ledger_ids in stored:
            above = mark.above(ledger_ids)
            short += above[0]
            long += above[1]
            skipped += mark.within_skipped(ledger_ids)
        found = [*await self._above_known(mark, sorted(short)), *await self._above_known(mark, sorted(long))]
        skipped.sort()
        restored = {one for one in skipped[-READS_MAX:] if await self._exists(one)}
        return sorted({*found, *skipped} - restored)

    async def _above_known(self, mark: HighWaterMark, ledger_ids: Sequence[int]) -> Sequence[int]:
        """Return the ids above the highest one that the metadata contains, to which the mark is raised."""
        for at in range(len(ledger_ids) - 1, max(len(ledger_ids) - 1 - READS_MAX, -1), -1):
            if await self._exists(ledger_ids[at]):
                await self._raise(mark, [ledger_ids[at]])
                return ledger_ids[at + 1 :]
        return ledger_ids

    async def _exists(self, ledger_id: int) -> bool:
        return await self._metadata.exists(self._layout.ledger(LedgerId(ledger_id))) is not None

    async def _raise(self, mark: HighWaterMark, ledger_ids: Iterable[int]) -> None:
        short_end = long_end = 0
        for ledger_id in ledger_ids:
            if ledger_id < SHORT_ID_END:
                short_end = max(short_end, ledger_id + 1)
            else:
                long_end = max(long_end, ledger_id + 1)
        if short_end > mark.short_end or long_end > mark.long_end:
            await self._known.update(lambda known: known.raised(short_end=short_end, long_end=long_end))

    async def _report(self, mark: HighWaterMark, unknown: Sequence[int], before: RollbackReport | None) -> None:
        """Store a report about the `unknown` ledgers, which are ascending, so that all bookies keep their ledgers. Then
        keep the ids from being generated again. `before`: the present report."""
        short = unknown[: bisect_left(unknown, SHORT_ID_END)]
        report = RollbackReport(
            found_ms=self._wall_clock_ms(),
            unknown=len(unknown),
            first=unknown[0],
            last=unknown[-1],
            short_end=short[-1] + 1 if short else 0,
            long_end=unknown[-1] + 1 if len(short) < len(unknown) else 0,
            ids_protected=before is not None and before.ids_protected,
        )
        await self._update_report(report)
        try:
            protected = await self._protect(mark.short_end, report.short_end)
            protected &= await self._protect(mark.long_end, report.long_end)
        except BinderyError as error:  # the next check repeats it
            log.warning("ledger_ids_not_protected", **error_fields(error))
            return
        await self._update_report(dataclasses.replace(report, ids_protected=protected))

    async def _protect(self, end: int, needed: int) -> bool:
        """Advance the id generator to `needed`, and record the skipped ids. Return whether it is that far."""
        if not needed:
            return True
        advanced = await skip_ids(self._metadata, self._layout, up_to=needed)
        if advanced >= needed > end:
            await self._known.update(lambda known: known.with_skipped((end, advanced)))
        return advanced >= needed

    async def _update_report(self, report: RollbackReport) -> None:
        await self._known.update(lambda known: known.with_report(self._bookie_id, report))

    async def _set_state(self) -> KnownLedgers:
        """Take over the stored reports, and return the stored value."""
        known, version = await self._known.read()
        before = self.state
        self.state = RollbackState(self._wall_clock_ms(), version, known.reports)
        if not known.reports:
            self._health.note(SUSPECTED, None)
            if before.is_suspected:
                log.info("metadata_rollback_cleared", accepted_by=known.accepted_by)
            return known
        message = suspicion(REFUSED, known.reports)
        self._health.note(SUSPECTED, message)
        if not before.is_suspected:
            own = self.own_report
            first, last = (None, None) if own is None or not own.unknown else (own.first, own.last)
            unknown = 0 if own is None else own.unknown
            log.error(SUSPECTED, error=message, unknown=unknown, first_ledger_id=first, last_ledger_id=last)
        return known


def import_accept() -> None:
    import bindery_metadata.recovery.accept_metadata  # noqa: F401 - its parser takes long to import
