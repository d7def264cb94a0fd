"""Recover a ledger: run `LedgerRecovery` over the pool and the ledger manager.

Recovery fences the writer, finds the last entry, writes back entries that may be under-replicated, and closes the
ledger by compare-and-set. It writes back only entries after the last confirmed one. Earlier entries may be
under-replicated because the writer continued without a bookie, so recovery adds a closing record for the auditor before
it closes the ledger.

Invariants: either the ledger is closed when `recover` returns, or it raises and any client may start again; a ledger
that recovery closed and that has entries has a closing record.
"""

import asyncio
from collections.abc import Coroutine, Sequence
from typing import Any

import structlog
from bindery_core.errors import BinderyError, TryAgain
from bindery_core.formats.ledger_metadata import LedgerMetadata
from bindery_core.ids import BookieId
from bindery_core.ledger.ledger_actions import (
    BeginRecovery,
    ChangeEnsemble,
    CloseRecovered,
    Degraded,
    Fail,
    Recovered,
    RecoveryAction,
    SendAdds,
    SendReads,
)
from bindery_core.ledger.ledger_plans import plan_begin_recovery, plan_recovery_close, replace_failed
from bindery_core.ledger.ledger_recovery import LedgerRecovery, RecoverySettings
from bindery_core.wire.messages import AddResponse, ReadResponse
from bindery_metadata.ledgers.closing_records import ClosingCause, ClosingRecords
from bindery_metadata.ledgers.ledger_manager import LedgerManager
from bindery_metadata.stores.versioned import Versioned

from bindery_client.ledger.deadline_timer import DeadlineTimer
from bindery_client.ledger.replacement_backoff import ReplacementBackoff
from bindery_client.ledger.requests import DEADLINE_SLACK_S, LedgerRequests, OnDegraded, reason_of
from bindery_client.settings import ClientSettings

log = structlog.get_logger()


async def recover(
    found: Versioned[LedgerMetadata],
    *,
    requests: LedgerRequests,
    manager: LedgerManager,
    closing_records: ClosingRecords,
    settings: ClientSettings,
    on_degraded: OnDegraded | None = None,
) -> Versioned[LedgerMetadata]:
    """Close the ledger and return its final metadata.

    Raises Unauthorized for a wrong password, TryAgain if too few bookies respond within `recovery_timeout_s`, and the
    errors of the ledger manager.
    """
    run = _RecoveryRun(
        found,
        requests=requests,
        manager=manager,
        closing_records=closing_records,
        settings=settings,
        on_degraded=on_degraded,
    )
    try:
        async with asyncio.timeout(settings.recovery_timeout_s):
            return await run.run()
    except TimeoutError as error:
        raise TryAgain(
            "recovery did not finish in time", ledger_id=requests.ledger_id, timeout_s=settings.recovery_timeout_s
        ) from error
    finally:
        await run.stop()


class _RecoveryRun:
    def __init__(
        self,
        found: Versioned[LedgerMetadata],
        *,
        requests: LedgerRequests,
        manager: LedgerManager,
        closing_records: ClosingRecords,
        settings: ClientSettings,
        on_degraded: OnDegraded | None,
    ) -> None:
        self._found = found
        self._requests = requests
        self._manager = manager
        self._closing_records = closing_records
        self._settings = settings
        self._on_degraded = on_degraded
        self._loop = asyncio.get_running_loop()
        self._machine = LedgerRecovery(
            requests.ledger_id,
            digester=requests.digester,
            settings=RecoverySettings(
                read_timeout_s=settings.read_timeout_s,
                add_timeout_s=settings.add_timeout_s,
                entries_in_flight_max=settings.recovery_batch_entries,
                bytes_in_flight_max=settings.read_batch_bytes_max,
            ),
        )
        self._replacement_backoff = ReplacementBackoff(first_s=settings.replacement_retry_s)
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._timer = DeadlineTimer(self._tick)
        self._task: asyncio.Task[None] | None = None

    async def run(self) -> Versioned[LedgerMetadata]:
        started_at = self._loop.time()
        self._run(self._machine.start(now=started_at))
        await self._done
        log.info(
            "ledger_recovered",
            ledger_id=self._requests.ledger_id,
            last_entry_id=self._found.value.last_entry_id,
            length=self._found.value.length,
            seconds=round(self._loop.time() - started_at, 3),
        )
        return self._found

    async def stop(self) -> None:
        """Stop the timer and the running metadata change. `run` has ended, so responses that arrive now are ignored."""
        self._timer.cancel()
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)

    # -- input of the state machine -----------------------------------------------------------------------------------

    def answered(self, bookie_id: BookieId, responses: list[Any]) -> None:
        if self._done.done():
            return
        now = self._loop.time()
        reads = [response for response in responses if type(response) is ReadResponse]
        adds = [response for response in responses if type(response) is AddResponse]
        if reads:
            self._run(self._machine.receive_reads(bookie_id, reads, now=now))
        if adds and not self._done.done():
            self._run(self._machine.receive_adds(bookie_id, adds, now=now))

    def failed(self, bookie_id: BookieId, error: BinderyError) -> None:
        if not self._done.done():
            self._run(self._machine.bookie_failed(bookie_id, reason_of(error), now=self._loop.time()))

    def expired(self, bookie_id: BookieId, error: BinderyError) -> None:
        """Ignored: the deadlines of the state machine are earlier."""

    def _tick(self) -> None:
        if not self._done.done():
            self._run(self._machine.tick(now=self._loop.time()))

    # -- actions of the state machine ---------------------------------------------------------------------------------

    def _run(self, actions: Sequence[RecoveryAction]) -> None:
        if self._done.done():  # `run` was cancelled while a metadata change was ending
            return
        todo = list(actions)
        sends: list[SendAdds] = []
        for action in todo:  # `todo` grows in the loop
            match action:
                case SendReads():
                    timeout_s = self._settings.read_timeout_s + DEADLINE_SLACK_S
                    self._requests.send_reads(action, self, timeout_s=timeout_s)
                case SendAdds():
                    sends.append(action)
                case ChangeEnsemble():
                    todo += self._change_ensemble(action)
                case Degraded():
                    log.warning(
                        "ledger_degraded",
                        ledger_id=self._requests.ledger_id,
                        bookie_id=action.bookie_id,
                        first_entry_id=action.first_entry_id,
                        reason=action.reason,
                    )
                    if self._on_degraded is not None:
                        self._on_degraded(self._requests.ledger_id, action.bookie_id, action.reason)
                case BeginRecovery():
                    self._start(self._begin())
                case CloseRecovered():
                    self._start(self._close(action))
                case Recovered():
                    self._done.set_result(None)
                case Fail():
                    self._done.set_exception(action.error)
        if sends:
            self._requests.send_adds(sends, self, timeout_s=self._settings.add_timeout_s + DEADLINE_SLACK_S)
        if not self._done.done():
            self._timer.arm(self._machine.next_deadline())

    def _change_ensemble(self, action: ChangeEnsemble) -> list[RecoveryAction]:
        """Change the ensemble in memory; it is published when the ledger is closed."""
        assert not action.publish
        pool = self._requests.pool
        metadata = self._machine.metadata
        for bookie_id in action.failed.values():
            pool.quarantine(bookie_id, "a recovery add failed")
        now = self._loop.time()
        self._replacement_backoff.add_failures(action.failed.values(), now=now)
        excluded = self._replacement_backoff.excluded(now=now)
        try:
            changed = replace_failed(
                metadata,
                failed=action.failed,
                first_entry_id=action.first_entry_id,
                choose=lambda ensemble, failed: pool.choose_replacements(
                    ensemble, failed, write_quorum=metadata.write_quorum, exclude=excluded
                ),
            )
        except BinderyError as error:
            return self._machine.ensemble_change_failed(error, now=now)
        if changed is not None:
            added = set(changed.last_segment.ensemble) - set(metadata.last_segment.ensemble)
            self._replacement_backoff.add_choices(added, now=now)
        return self._machine.ensemble_changed(changed or metadata, now=now)

    def _start(self, work: Coroutine[Any, Any, None]) -> None:
        assert self._task is None or self._task.done() or self._task is asyncio.current_task()
        self._task = self._loop.create_task(work)

    async def _begin(self) -> None:
        try:
            self._found = await self._manager.update(self._requests.ledger_id, plan_begin_recovery, known=self._found)
        except BinderyError as error:
            self._run(self._machine.metadata_failed(error, now=self._loop.time()))
        else:
            self._run(self._machine.recovery_begun(self._found.value, now=self._loop.time()))

    async def _close(self, action: CloseRecovered) -> None:
        def plan(metadata: LedgerMetadata) -> LedgerMetadata | None:
            return plan_recovery_close(
                metadata,
                began=action.began,
                recovered=action.recovered,
                last_entry_id=action.last_entry_id,
                length=action.length,
            )

        ledger_id = self._requests.ledger_id
        try:
            if action.last_entry_id >= 0:
                await self._closing_records.add(ledger_id, ClosingCause.RECOVERED)
            self._found = await self._manager.update(ledger_id, plan, known=self._found)
        except BinderyError as error:
            self._run(self._machine.metadata_failed(error, now=self._loop.time()))
        else:
            self._run(self._machine.recovery_closed(self._found.value, now=self._loop.time()))
