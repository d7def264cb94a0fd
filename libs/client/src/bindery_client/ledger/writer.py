"""WriteHandle: the writer of one ledger; a transport around `LedgerWriter`, which decides everything.

Flow: `add_many` queues a call (one future for all its entries) and waits. Calls that the window admits are handed to
the state machine together, once per turn of the loop; its actions become frames on the bookies' connections. Answers
come back in batches, and a Confirm completes calls from the head of the queue.

Invariants: calls are admitted, sent and completed in the order they were made; entries in flight stay within
`in_flight_entries_max`, bytes within `in_flight_bytes_max` and the client's budget (but for one larger call, alone);
every call ends, at the latest by the quorum timeout; no ack that depends on a new ensemble precedes its
compare-and-set.
"""

import asyncio
from collections import deque
from collections.abc import Sequence
from typing import Any, Final

import structlog
from bindery_core.backoff import Backoff
from bindery_core.entry import PAYLOAD_SIZE_MAX
from bindery_core.errors import (
    BadRequest,
    BinderyError,
    BookieUnavailable,
    Corrupt,
    LedgerClosed,
    LostOwnership,
    MetadataOutcomeUnknown,
    MetadataUnavailable,
    NoSuchEntry,
    NotEnoughBookies,
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
from bindery_core.ledger.ledger_plans import Plan, plan_close, plan_ensemble_change
from bindery_core.ledger.ledger_writer import LedgerWriter, WriterSettings
from bindery_core.placement.quorum import failures_bearable
from bindery_metadata.ledgers.closing_records import ClosingCause, ClosingRecords
from bindery_metadata.ledgers.ledger_manager import LedgerManager
from bindery_metadata.stores.versioned import Versioned

from bindery_client.connection.in_flight_budget import InFlightBudget
from bindery_client.ledger.api import Entry
from bindery_client.ledger.bookie_requests import ForceAll
from bindery_client.ledger.deadline_timer import DeadlineTimer
from bindery_client.ledger.read_operation import read_range
from bindery_client.ledger.replacement_backoff import ReplacementBackoff
from bindery_client.ledger.requests import DEADLINE_SLACK_S, LedgerRequests, OnDegraded, reason_of
from bindery_client.settings import ClientSettings

log = structlog.get_logger()

METADATA_PAUSE_S: Final = 0.1
METADATA_PAUSE_S_MAX: Final = 2.0
NEWCOMER_S: Final = 1.0
"""While one that failed rests, another bookie may come."""
LAST_COPIES_GRACE_S: Final = 0.005
"""Before the seal: how long copies that are not needed for it are waited for. Less than the note costs that they save,
a write to the metadata."""
LAST_COPIES_S: Final = 5.0
"""After the seal: how long copies that were not needed for it may take before they count as missing."""


class _Call:
    """One `add_many`."""

    __slots__ = ("count", "first", "future", "payloads", "size")

    def __init__(self, payloads: Sequence[bytes], size: int, future: "asyncio.Future[EntryId]") -> None:
        self.payloads = payloads
        self.count = len(payloads)
        self.size = size
        self.future = future
        self.first = -1
        """Set when admitted."""

    def fail(self, error: BinderyError) -> None:
        if not self.future.done():
            self.future.set_exception(error)
            self.future.exception()  # nobody may be waiting any more, which is no reason for a warning


class WriteHandle:
    """`api.WriteHandle`. Made by `LedgerClient.create`."""

    def __init__(
        self, created: Versioned[LedgerMetadata], *, requests: LedgerRequests, manager: LedgerManager,
        notes: ClosingRecords, budget: InFlightBudget, settings: ClientSettings, on_degraded: OnDegraded | None = None,
        deferred_sync: bool = False,
    ) -> None:  # fmt: skip
        self.ledger_id: LedgerId = requests.ledger_id
        self._committed = created
        self._requests = requests
        self._manager = manager
        self._notes = notes
        self._budget = budget
        self._settings = settings
        self._on_degraded = on_degraded
        self._loop = asyncio.get_running_loop()
        self._deferred_sync = deferred_sync
        self._machine = (DeferredLedgerWriter if deferred_sync else LedgerWriter)(
            requests.ledger_id, created.value, digester=requests.digester,
            settings=WriterSettings(
                add_timeout_s=settings.add_timeout_s,
                quorum_timeout_s=settings.add_quorum_timeout_s,
                replacement_retry_s=settings.replacement_retry_s,
                explicit_lac_idle_s=settings.explicit_lac_idle_s,
            ),
        )  # fmt: skip
        self._replacement_backoff = ReplacementBackoff(first_s=settings.replacement_retry_s)
        self._reasons: dict[BookieId, str] = {}
        """What a bookie's connection last died of."""
        self._timer = DeadlineTimer(self._tick)
        self._waiting: deque[_Call] = deque()
        """Not admitted yet."""
        self._in_flight: deque[_Call] = deque()
        """Admitted, by ascending entry ids."""
        self._unsent: list[bytes] = []
        """Payloads admitted that the state machine has not seen."""
        self._entries_in_flight = 0
        self._bytes_in_flight = 0
        self._next_entry_id = 0
        self._length = 0
        self._flush_scheduled = False
        self._broken: BinderyError | None = None
        """Why nothing is confirmed any more."""
        self._refusal: BinderyError | None = None
        """What every later add gets, once the handle is broken or being closed."""
        self._seal: asyncio.Future[SealLedger] | None = None
        self._closing: asyncio.Task[LedgerMetadata] | None = None
        self._sealed = False
        self._abandoned = False
        self._ensemble_change: asyncio.Task[None] | None = None

    # -- facts --------------------------------------------------------------------------------------------------------

    @property
    def metadata(self) -> LedgerMetadata:
        """As last committed."""
        return self._committed.value

    @property
    def last_add_confirmed(self) -> int:
        return self._machine.published_lac

    @property
    def last_add_pushed(self) -> int:
        return self._next_entry_id - 1

    @property
    def length(self) -> int:
        return self._length

    @property
    def is_closed(self) -> bool:
        return self._sealed or self._abandoned

    @property
    def degraded(self) -> frozenset[BookieId]:
        """Bookies of this ledger that lack entries they should hold."""
        return self._machine.degraded

    # -- adding -------------------------------------------------------------------------------------------------------

    async def add(self, payload: bytes) -> EntryId:
        return await self.add_many((payload,))

    async def add_many(self, payloads: Sequence[bytes]) -> EntryId:
        """See `api.WriteHandle`. A call cancelled before the window admitted it never happened.

        Raises BadRequest without payloads and TooLarge above `entry.PAYLOAD_SIZE_MAX`; neither breaks the handle.
        """
        if not payloads:
            raise BadRequest("nothing to add", ledger_id=self.ledger_id)
        size_max = max(map(len, payloads))
        if size_max > PAYLOAD_SIZE_MAX:
            raise TooLarge("payload exceeds the size limit", size=size_max, size_max=PAYLOAD_SIZE_MAX)
        if self._refusal is not None:
            raise self._refusal
        call = _Call(payloads, sum(map(len, payloads)), self._loop.create_future())
        self._waiting.append(call)
        if len(self._waiting) == 1:
            self._admit()
        return await call.future

    def _admit(self) -> None:
        """Move calls from the waiting queue into the window while it has room."""
        waiting = self._waiting
        settings = self._settings
        while waiting:
            call = waiting[0]
            if call.future.cancelled():
                waiting.popleft()
                continue
            if self._in_flight and (
                self._entries_in_flight + call.count > settings.in_flight_entries_max
                or self._bytes_in_flight + call.size > settings.in_flight_bytes_max
            ):
                return
            if not self._budget.take(call.size, self._admit):
                return
            waiting.popleft()
            call.first = self._next_entry_id
            self._next_entry_id += call.count
            self._length += call.size
            self._entries_in_flight += call.count
            self._bytes_in_flight += call.size
            self._in_flight.append(call)
            self._unsent += call.payloads
            call.payloads = ()
            if not self._flush_scheduled:
                self._flush_scheduled = True
                self._loop.call_soon(self._flush)

    def _flush(self) -> None:
        """Everything admitted in one turn of the loop goes out as one batch."""
        self._flush_scheduled = False
        if not self._unsent:
            return
        payloads, self._unsent = self._unsent, []
        try:
            actions = self._machine.add_many(payloads, now=self._loop.time())
        except BinderyError as error:
            self._break(error)
            return
        self._run(actions)

    # -- the state machine's world ------------------------------------------------------------------------------------

    def answered(self, bookie_id: BookieId, responses: list[Any]) -> None:
        if not self._abandoned:
            self._run(self._machine.receive_many(bookie_id, responses, now=self._loop.time()))

    def failed(self, bookie_id: BookieId, error: BinderyError) -> None:
        if not self._abandoned:
            self._reasons[bookie_id] = reason = reason_of(error)
            self._run(self._machine.bookie_failed(bookie_id, reason, now=self._loop.time()))

    def expired(self, bookie_id: BookieId, error: BinderyError) -> None:
        """The state machine has deadlines of its own, and they passed earlier."""

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
                self._confirm(action.last_entry_id)  # type: ignore[union-attr]
            else:
                self._run_rare(action)
        if sends:
            self._requests.send_adds(
                sends, self, timeout_s=self._settings.add_timeout_s + DEADLINE_SLACK_S,
                deferred_sync=self._deferred_sync,
            )  # fmt: skip
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
                    "ledger_degraded", ledger_id=self.ledger_id, bookie_id=action.bookie_id,
                    first_entry_id=action.first_entry_id, reason=action.reason,
                )  # fmt: skip
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

    def _confirm(self, last_entry_id: int) -> None:
        in_flight = self._in_flight
        entries = size = 0
        while in_flight and in_flight[0].first + in_flight[0].count - 1 <= last_entry_id:
            call = in_flight.popleft()
            entries += call.count
            size += call.size
            if not call.future.done():
                call.future.set_result(EntryId(call.first))
        self._entries_in_flight -= entries
        self._bytes_in_flight -= size
        if entries:
            self._budget.give_back(size)
            if self._waiting:
                self._admit()

    def _break(self, error: BinderyError) -> None:
        """Fail what is in flight and what waits, and every later add."""
        if self._broken is None:
            self._broken = error
            log.warning("ledger_writer_broken", ledger_id=self.ledger_id, error=repr(error))
        if self._refusal is None:
            self._refusal = self._broken
        self._fail_calls(self._broken)
        if self._seal is not None and not self._seal.done():
            self._seal_after()

    def _fail_calls(self, error: BinderyError) -> None:
        calls = [*self._in_flight, *self._waiting]
        self._in_flight.clear()
        self._waiting.clear()
        self._unsent.clear()
        for call in calls:
            call.fail(error)
        size, self._bytes_in_flight, self._entries_in_flight = self._bytes_in_flight, 0, 0
        self._budget.forget(self._admit)
        self._budget.give_back(size)

    def _seal_after(self) -> None:
        """What was in flight failed while the ledger was being closed: it can still be sealed where it stands,
        unless it is not ours any more."""
        assert self._seal is not None
        try:
            self._run(self._machine.close(now=self._loop.time()))
        except BinderyError as lost:
            self._seal.set_exception(lost)
            self._seal.exception()

    # -- ensemble change ----------------------------------------------------------------------------------------------

    async def _change_ensemble(self, action: ChangeEnsemble) -> None:
        pool = self._requests.pool
        for bookie_id in action.failed.values():
            pool.quarantine(bookie_id, self._reasons.pop(bookie_id, "it refused an add, or did not answer in time"))
        self._replacement_backoff.add_failures(action.failed.values(), now=self._loop.time())

        def plan(metadata: LedgerMetadata) -> LedgerMetadata | None:
            return plan_ensemble_change(
                metadata, failed=action.failed, first_entry_id=action.first_entry_id,
                choose=lambda ensemble, failed: pool.choose_replacements(
                    ensemble, failed, write_quorum=metadata.write_quorum,
                    exclude=self._replacement_backoff.excluded(now=self._loop.time()),
                ),
            )  # fmt: skip

        before = self._committed.value.last_segment
        try:
            committed = await self._replace(plan)
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
        self._committed = committed
        newcomers = set(committed.value.last_segment.ensemble) - set(before.ensemble)
        self._replacement_backoff.add_choices(newcomers, now=self._loop.time())
        log.info(
            "ensemble_changed", ledger_id=self.ledger_id, failed=dict(action.failed),
            before=before.ensemble, after=committed.value.last_segment.ensemble,
            first_entry_id=committed.value.last_segment.first_entry_id,
        )  # fmt: skip
        self._ensemble_change = None
        self._run(self._machine.ensemble_changed(committed.value, now=self._loop.time()))

    async def _replace(self, plan: Plan) -> Versioned[LedgerMetadata]:
        """`_update`; without a spare once more if one that could not be reached can be now. Where every copy is needed
        for an acknowledgement, one that rests after it failed is waited for too: to go on without it is impossible."""
        metadata = self.metadata
        bearable = failures_bearable(write_quorum=metadata.write_quorum, ack_quorum=metadata.ack_quorum)
        is_revisited = False
        while True:
            try:
                return await self._update(plan)
            except NotEnoughBookies:
                if not is_revisited and await self._requests.pool.revisit():
                    is_revisited = True
                    continue
                rest_s = self._replacement_backoff.next_s(now=self._loop.time())
                if bearable or rest_s is None:
                    raise
                await asyncio.sleep(min(rest_s, NEWCOMER_S))
                if self._broken is not None:
                    raise

    async def _update(self, plan: Plan, *, note: ClosingCause | None = None) -> Versioned[LedgerMetadata]:
        """Change the metadata; repeat while the store cannot be asked, for `metadata_timeout_s` at most.

        The plans know their own result, so one of unknown outcome may be repeated too: on what stands by then. What we
        knew may be older than our own first try, and a plan that gives up on it (NotEnoughBookies) would have us go on
        with an ensemble that is not the published one. `note`: made before.
        """
        deadline = self._loop.time() + self._settings.metadata_timeout_s
        backoff = Backoff(METADATA_PAUSE_S, METADATA_PAUSE_S_MAX)
        known: Versioned[LedgerMetadata] | None = self._committed
        while True:
            try:
                if note is not None:
                    await self._notes.add(self.ledger_id, note)
                known = known or await self._manager.read_newest(self.ledger_id)
                return await self._manager.update(self.ledger_id, plan, known=known)
            except (MetadataUnavailable, MetadataOutcomeUnknown) as error:
                known = None
                delay_s = backoff.next_delay_s()
                if self._loop.time() + delay_s > deadline:
                    raise
                log.info("metadata_change_retried", ledger_id=self.ledger_id, error=repr(error), pause_s=delay_s)
            await asyncio.sleep(delay_s)

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
        if not 0 <= first <= last <= self.last_add_confirmed:
            raise BadRequest(
                "no such range",
                ledger_id=self.ledger_id, first=first, last=last, last_add_confirmed=self.last_add_confirmed,
            )  # fmt: skip
        try:
            return await self._read(self.metadata, first, last)
        except (NoSuchEntry, BookieUnavailable, Corrupt):
            # Older segments change without the writer's doing when lost copies are made anew.
            found = (await self._manager.read(self.ledger_id)).value
            if found.segments == self.metadata.segments:
                raise
            return await self._read(found, first, last)

    async def _read(self, metadata: LedgerMetadata, first: EntryId, last: EntryId) -> list[Entry]:
        average_size = self._length // max(self._next_entry_id, 1)
        return await read_range(
            self._requests, lambda: metadata, first=first, last=last, average_size=average_size,
            settings=self._settings,
        )  # fmt: skip

    async def close(self) -> LedgerMetadata:
        """See `api.WriteHandle`. When the metadata cannot be changed now it may be called again."""
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
            raise self._broken from None  # `abandon` ended the closing; nobody cancelled who waits for it

    def _closing_done(self, task: "asyncio.Task[LedgerMetadata]") -> None:
        self._closing = None
        if not task.cancelled():
            task.exception()  # every caller may have been cancelled

    async def _close(self) -> LedgerMetadata:
        if self._seal is None:
            self._flush()
            self._seal = self._loop.create_future()
            for call in self._waiting:
                call.fail(LedgerClosed("ledger is being closed", ledger_id=self.ledger_id))
            self._waiting.clear()
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
        if self._doubt() is ClosingCause.IN_FLIGHT:
            await asyncio.sleep(LAST_COPIES_GRACE_S)
        try:
            self._committed = await self._update(
                lambda metadata: plan_close(metadata, last_entry_id=last_entry_id, length=length), note=self._doubt()
            )
        except LostOwnership as error:
            self._broken = self._refusal = error
            raise
        self._sealed = True
        if self._ensemble_change is not None:
            self._ensemble_change.cancel()  # of a handle that broke: it may wait for a bookie for minutes
        self._timer.cancel()
        if self._on_degraded is not None and self._broken is None and self._machine.unanswered():
            self._loop.call_later(LAST_COPIES_S, self._tell_of_missing_copies)
        return self.metadata

    def _doubt(self) -> ClosingCause | None:
        """Why the sealed ledger may lack copies, though that be told, for who tells it may die; None: it lacks none."""
        if self._machine.degraded:
            return ClosingCause.DEGRADED
        return ClosingCause.IN_FLIGHT if self._machine.unanswered() else None

    def _tell_of_missing_copies(self) -> None:
        """The ledger was sealed while some copies were still on their way: what did not arrive is a hole."""
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
        self._fail_calls(self._refusal)
        tasks = [task for task in (self._ensemble_change, self._closing) if task is not None]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
