"""WriteHandle: the writer of one ledger, a transport around `LedgerWriter`, which makes all decisions.

Flow: `add_many` submits a call to the window and waits for its future. The payloads of all calls that the window admits
in one turn of the event loop go to the state machine together; its actions become frames on the bookies' connections.
Responses come back in batches, and a Confirm completes calls.

Invariants: calls are sent and completed in the order they were made; every call ends, at the latest by the quorum
timeout; no ack that depends on a new ensemble precedes the compare-and-set of that ensemble.
"""

import asyncio
from collections.abc import Sequence
from typing import Any, Final

import structlog
from bindery_core.entry import PAYLOAD_SIZE_MAX
from bindery_core.errors import (
    BadRequest,
    BinderyError,
    BookieUnavailable,
    Corrupt,
    LedgerClosed,
    LostOwnership,
    NoSuchEntry,
    TooLarge,
)
from bindery_core.formats.ledger_metadata import LedgerMetadata
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.ledger.deferred_writer import DeferredLedgerWriter
from bindery_core.ledger.ledger_actions import (
    ChangeEnsemble,
    Confirm,
    Degraded,
    Fail,
    SealLedger,
    SendAdds,
    SendLac,
    WriterAction,
)
from bindery_core.ledger.ledger_plans import plan_close
from bindery_core.ledger.ledger_writer import LedgerWriter, WriterSettings
from bindery_metadata.ledgers.closing_records import ClosingCause, ClosingRecords
from bindery_metadata.ledgers.ledger_manager import LedgerManager
from bindery_metadata.stores.versioned import Versioned

from bindery_client.connection.in_flight_budget import InFlightBudget
from bindery_client.ledger.add_window import AddWindow
from bindery_client.ledger.api import Entry
from bindery_client.ledger.bookie_requests import ForceAll
from bindery_client.ledger.deadline_timer import DeadlineTimer
from bindery_client.ledger.metadata_changes import MetadataChanges
from bindery_client.ledger.read_operation import check_ids, check_range, read_entries
from bindery_client.ledger.requests import DEADLINE_SLACK_S, LedgerRequests, OnDegraded, reason_of
from bindery_client.settings import ClientSettings

log = structlog.get_logger()

LAST_COPIES_GRACE_S: Final = 0.005
"""Time in seconds that `close` waits for copies that are still in flight. If they arrive, no closing record is needed,
and writing one takes longer."""
LAST_COPIES_S: Final = 5.0
"""Time in seconds after the seal at which unconfirmed copies count as missing."""


class WriteHandle:
    """`api.WriteHandle` over bookies. Created by `LedgerClient.create`."""

    def __init__(
        self,
        created: Versioned[LedgerMetadata],
        *,
        requests: LedgerRequests,
        manager: LedgerManager,
        closing_records: ClosingRecords,
        budget: InFlightBudget,
        settings: ClientSettings,
        on_degraded: OnDegraded | None = None,
        deferred_sync: bool = False,
    ) -> None:
        self.ledger_id: LedgerId = requests.ledger_id
        self._requests = requests
        self._manager = manager
        self._settings = settings
        self._on_degraded = on_degraded
        self._loop = asyncio.get_running_loop()
        self._deferred_sync = deferred_sync
        self._machine = (DeferredLedgerWriter if deferred_sync else LedgerWriter)(
            requests.ledger_id,
            created.value,
            digester=requests.digester,
            settings=WriterSettings(
                add_timeout_s=settings.add_timeout_s,
                quorum_timeout_s=settings.add_quorum_timeout_s,
                replacement_retry_s=settings.replacement_retry_s,
                explicit_lac_idle_s=settings.explicit_lac_idle_s,
            ),
        )
        self._window = AddWindow(budget, settings, on_admitted=self._flush)
        self._changes = MetadataChanges(
            created,
            requests=requests,
            manager=manager,
            closing_records=closing_records,
            settings=settings,
            is_abandoned=lambda: self._broken is not None,
        )
        self._timer = DeadlineTimer(self._tick)
        self._broken: BinderyError | None = None
        """Error that broke the handle: nothing is confirmed any more."""
        self._refusal: BinderyError | None = None
        """Error of every later add, once the handle is broken or being closed."""
        self._seal: asyncio.Future[SealLedger] | None = None
        self._closing: asyncio.Task[LedgerMetadata] | None = None
        self._sealed = False
        self._abandoned = False
        self._ensemble_change: asyncio.Task[None] | None = None

    # -- facts --------------------------------------------------------------------------------------------------------

    @property
    def metadata(self) -> LedgerMetadata:
        """Metadata that this handle committed last."""
        return self._changes.committed.value

    @property
    def last_add_confirmed(self) -> int:
        return self._machine.published_lac

    @property
    def last_add_pushed(self) -> int:
        return self._window.next_entry_id - 1

    @property
    def length(self) -> int:
        return self._window.length

    @property
    def is_closed(self) -> bool:
        return self._sealed or self._abandoned

    @property
    def degraded(self) -> frozenset[BookieId]:
        """Bookies of this ledger on which entries are missing."""
        return self._machine.degraded

    # -- adding -------------------------------------------------------------------------------------------------------

    async def add(self, payload: bytes) -> EntryId:
        return await self.add_many((payload,))

    async def add_many(self, payloads: Sequence[bytes]) -> EntryId:
        """See `api.WriteHandle`. A call that is cancelled before the window admits it has no effect.

        Raises BadRequest without payloads and TooLarge above `entry.PAYLOAD_SIZE_MAX`; neither breaks the handle.
        """
        if not payloads:
            raise BadRequest("nothing to add", ledger_id=self.ledger_id)
        size_max = max(map(len, payloads))
        if size_max > PAYLOAD_SIZE_MAX:
            raise TooLarge("payload exceeds the size limit", size=size_max, size_max=PAYLOAD_SIZE_MAX)
        if self._refusal is not None:
            raise self._refusal
        return await self._window.submit(payloads)

    def _flush(self) -> None:
        """Send the payloads that were admitted in one turn of the event loop as one batch."""
        payloads = self._window.take_admitted()
        if not payloads:
            return
        try:
            actions = self._machine.add_many(payloads, now=self._loop.time())
        except BinderyError as error:
            self._break(error)
            return
        self._run(actions)

    # -- input and actions of the state machine -----------------------------------------------------------------------

    def answered(self, bookie_id: BookieId, responses: list[Any]) -> None:
        if not self._abandoned:
            self._run(self._machine.receive_many(bookie_id, responses, now=self._loop.time()))

    def failed(self, bookie_id: BookieId, error: BinderyError) -> None:
        if not self._abandoned:
            reason = reason_of(error)
            self._changes.add_failure(bookie_id, reason)
            self._run(self._machine.bookie_failed(bookie_id, reason, now=self._loop.time()))

    def expired(self, bookie_id: BookieId, error: BinderyError) -> None:
        """Ignored: the deadlines of the state machine are earlier."""

    def _tick(self) -> None:
        if not self._abandoned and not self._sealed:
            self._run(self._machine.tick(now=self._loop.time()))

    def _run(self, actions: Sequence[WriterAction]) -> None:
        sends: list[SendAdds] = []
        for action in actions:
            kind = type(action)
            if kind is SendAdds:
                sends.append(action)  # type: ignore[arg-type]
            elif kind is Confirm:
                self._window.confirm(action.last_entry_id)  # type: ignore[union-attr]
            else:
                self._run_rare(action)
        if sends:
            self._requests.send_adds(
                sends,
                self,
                timeout_s=self._settings.add_timeout_s + DEADLINE_SLACK_S,
                deferred_sync=self._deferred_sync,
            )
        if not self._abandoned:
            self._timer.arm(self._machine.next_deadline())

    def _run_rare(self, action: WriterAction) -> None:
        match action:
            case SendLac():
                self._requests.send_lac(action, timeout_s=self._settings.add_timeout_s)
            case ChangeEnsemble():
                assert self._ensemble_change is None or self._ensemble_change.done()
                self._ensemble_change = self._loop.create_task(self._change_ensemble(action))
            case Degraded():
                log.warning(
                    "ledger_degraded",
                    ledger_id=self.ledger_id,
                    bookie_id=action.bookie_id,
                    first_entry_id=action.first_entry_id,
                    reason=action.reason,
                )
                if self._on_degraded is not None:
                    self._on_degraded(self.ledger_id, action.bookie_id, action.reason)
            case SealLedger():
                assert self._seal is not None
                if not self._seal.done():
                    self._seal.set_result(action)
            case Fail():
                self._break(action.error)
            case _:
                raise AssertionError(f"not an action of a writer: {action}")

    def _break(self, error: BinderyError) -> None:
        """Fail all adds in flight, all waiting ones, and every later one."""
        if self._broken is None:
            self._broken = error
            log.warning("ledger_writer_broken", ledger_id=self.ledger_id, error=repr(error))
        if self._refusal is None:
            self._refusal = self._broken
        self._window.fail(self._broken)
        if self._seal is not None and not self._seal.done():
            self._seal_after_failure()

    def _seal_after_failure(self) -> None:
        """Seal the ledger at its last confirmed entry, after the adds in flight failed while it was being closed.

        If ownership was lost, closing fails.
        """
        assert self._seal is not None
        try:
            self._run(self._machine.close(now=self._loop.time()))
        except BinderyError as lost:
            self._seal.set_exception(lost)
            self._seal.exception()

    # -- ensemble change ----------------------------------------------------------------------------------------------

    async def _change_ensemble(self, action: ChangeEnsemble) -> None:
        before = self.metadata.last_segment
        try:
            committed = await self._changes.change_ensemble(action)
        except BinderyError as error:
            if not self._abandoned:
                log.warning(
                    "ensemble_change_failed", ledger_id=self.ledger_id, failed=dict(action.failed), error=repr(error)
                )
                self._ensemble_change = None
                self._run(self._machine.ensemble_change_failed(error, now=self._loop.time()))
            return
        if self._abandoned:
            return
        self._changes.ensemble_changed(committed)
        log.info(
            "ensemble_changed",
            ledger_id=self.ledger_id,
            failed=dict(action.failed),
            before=before.ensemble,
            after=committed.value.last_segment.ensemble,
            first_entry_id=committed.value.last_segment.first_entry_id,
        )
        self._ensemble_change = None
        self._run(self._machine.ensemble_changed(committed.value, now=self._loop.time()))

    # -- forcing ------------------------------------------------------------------------------------------------------

    async def force(self) -> int:
        """See `api.WriteHandle`."""
        if self._broken is not None:
            raise self._broken
        if not self.is_closed:
            await self._force()
        return self.last_add_confirmed

    async def _force(self) -> None:
        machine = self._machine
        mark = machine.mark() if isinstance(machine, DeferredLedgerWriter) else None
        ensemble = self.metadata.last_segment.ensemble
        await ForceAll(self._requests, ensemble).run(timeout_s=self._settings.add_timeout_s)
        if mark is not None and isinstance(machine, DeferredLedgerWriter):
            self._run(machine.forced(mark))

    # -- reading, closing ---------------------------------------------------------------------------------------------

    async def read(self, first: EntryId, last: EntryId) -> list[Entry]:
        check_range(first, last, ledger_id=self.ledger_id, last_add_confirmed=self.last_add_confirmed)
        return await self.read_some(range(first, last + 1))

    async def read_some(self, entry_ids: Sequence[int]) -> list[Entry]:
        check_ids(entry_ids, ledger_id=self.ledger_id, last_add_confirmed=self.last_add_confirmed)
        try:
            return await self._read(self.metadata, entry_ids)
        except (NoSuchEntry, BookieUnavailable, Corrupt):
            # Re-replication changes older segments without the writer.
            found = (await self._manager.read(self.ledger_id)).value
            if found.segments == self.metadata.segments:
                raise
            return await self._read(found, entry_ids)

    async def _read(self, metadata: LedgerMetadata, entry_ids: Sequence[int]) -> list[Entry]:
        average_size = self._window.length // max(self._window.next_entry_id, 1)
        return await read_entries(
            self._requests,
            lambda: metadata,
            entry_ids=entry_ids,
            average_size=average_size,
            settings=self._settings,
        )

    async def close(self) -> LedgerMetadata:
        """See `api.WriteHandle`. If the metadata cannot be changed now, it may be called again."""
        if self._sealed:
            return self.metadata
        if self._abandoned or isinstance(self._broken, LostOwnership):
            assert self._broken is not None
            raise self._broken
        if self._closing is None:
            self._closing = self._loop.create_task(self._close())
            self._closing.add_done_callback(self._closing_done)
        closing = self._closing
        try:
            return await asyncio.shield(closing)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if not closing.cancelled() or self._broken is None or task is None or task.cancelling():
                raise
            raise self._broken from None  # `abandon` ended the closing: no caller was cancelled

    def _closing_done(self, task: "asyncio.Task[LedgerMetadata]") -> None:
        self._closing = None
        if not task.cancelled():
            task.exception()  # every caller may have been cancelled

    async def _close(self) -> LedgerMetadata:
        if self._seal is None:
            self._flush()
            self._seal = self._loop.create_future()
            self._window.fail_waiting(LedgerClosed("ledger is being closed", ledger_id=self.ledger_id))
            self._refusal = LedgerClosed("ledger is closed", ledger_id=self.ledger_id)
            try:
                self._run(self._machine.close(now=self._loop.time()))
            except BinderyError:
                self._seal = None
                raise
        seal = await self._seal
        last_entry_id, length = seal.last_entry_id, seal.length
        if isinstance(self._machine, DeferredLedgerWriter):
            if self._broken is None and self._machine.published_lac < last_entry_id:
                await self._force()
            last_entry_id, length = self._machine.published_lac, self._machine.published_length
        if self._closing_cause() is ClosingCause.IN_FLIGHT:
            await asyncio.sleep(LAST_COPIES_GRACE_S)
        try:
            self._changes.committed = await self._changes.update(
                lambda metadata: plan_close(metadata, last_entry_id=last_entry_id, length=length),
                closing_cause=self._closing_cause(),
            )
        except LostOwnership as error:
            self._broken = self._refusal = error
            raise
        self._sealed = True
        if self._ensemble_change is not None:
            self._ensemble_change.cancel()  # if the handle broke, it may wait for a bookie for minutes
        self._timer.cancel()
        if self._on_degraded is not None and self._broken is None and self._machine.unanswered():
            self._loop.call_later(LAST_COPIES_S, self._report_missing_copies)
        return self.metadata

    def _closing_cause(self) -> ClosingCause | None:
        """Return why the sealed ledger may be under-replicated, for its closing record; None: it is not.

        The record is needed although missing copies are reported, because the reporting process may fail.
        """
        if self._machine.degraded:
            return ClosingCause.DEGRADED
        return ClosingCause.IN_FLIGHT if self._machine.unanswered() else None

    def _report_missing_copies(self) -> None:
        """Report the copies that were in flight when the ledger was sealed and have not been confirmed since."""
        assert self._on_degraded is not None
        for bookie_id, entry_id in self._machine.unanswered().items():
            log.warning("ledger_degraded", ledger_id=self.ledger_id, bookie_id=bookie_id, first_entry_id=entry_id)
            self._on_degraded(self.ledger_id, bookie_id, "it did not confirm its copies before the ledger was closed")

    async def abandon(self) -> None:
        if self._abandoned or self._sealed:
            return
        self._abandoned = True
        self._timer.cancel()
        self._refusal = LedgerClosed("write handle was abandoned", ledger_id=self.ledger_id)
        self._broken = self._broken or self._refusal
        self._window.fail(self._refusal)
        tasks = [task for task in (self._ensemble_change, self._closing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
