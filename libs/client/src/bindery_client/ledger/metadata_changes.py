"""MetadataChanges: the changes that a writer makes to the metadata of its ledger.

A change is retried while the metadata store is unreachable. A replacement of failed bookies also waits for bookies,
because a ledger that needs every copy for an acknowledgement cannot continue without one.

Invariant: `committed` is the metadata as the writer last wrote it, with its version.
"""

import asyncio
from collections.abc import Callable
from typing import Final

import structlog
from bindery_core.backoff import Backoff
from bindery_core.errors import MetadataOutcomeUnknown, MetadataUnavailable, NotEnoughBookies
from bindery_core.formats.ledger_metadata import LedgerMetadata
from bindery_core.ids import BookieId
from bindery_core.ledger.ledger_actions import ChangeEnsemble
from bindery_core.ledger.ledger_plans import Plan, plan_ensemble_change
from bindery_core.placement.quorum import failures_bearable
from bindery_metadata.ledgers.closing_records import ClosingCause, ClosingRecords
from bindery_metadata.ledgers.ledger_manager import LedgerManager
from bindery_metadata.stores.versioned import Versioned

from bindery_client.ledger.replacement_backoff import ReplacementBackoff
from bindery_client.ledger.requests import LedgerRequests
from bindery_client.settings import ClientSettings

log = structlog.get_logger()

METADATA_PAUSE_S: Final = 0.1
"""First delay in seconds before a failed metadata request is repeated."""
METADATA_PAUSE_S_MAX: Final = 2.0
"""Maximum delay in seconds before a failed metadata request is repeated."""
REPLACEMENT_POLL_S: Final = 1.0
"""Interval in seconds at which a replacement is searched for while all failed bookies are excluded: another bookie may
register."""


class MetadataChanges:
    """See the module. Belongs to one writer."""

    def __init__(
        self,
        created: Versioned[LedgerMetadata],
        *,
        requests: LedgerRequests,
        manager: LedgerManager,
        closing_records: ClosingRecords,
        settings: ClientSettings,
        is_abandoned: Callable[[], bool],
    ) -> None:
        """`is_abandoned`: whether a replacement should stop waiting for bookies, because the writer is broken."""
        self.committed = created
        self._ledger_id = requests.ledger_id
        self._pool = requests.pool
        self._manager = manager
        self._closing_records = closing_records
        self._settings = settings
        self._is_abandoned = is_abandoned
        self._loop = asyncio.get_running_loop()
        self._backoff = ReplacementBackoff(first_s=settings.replacement_retry_s)
        self._reasons: dict[BookieId, str] = {}
        """Reason of the last failure of a bookie's connection."""

    def add_failure(self, bookie_id: BookieId, reason: str) -> None:
        """Record the reason for a quarantine that may follow."""
        self._reasons[bookie_id] = reason

    async def change_ensemble(self, action: ChangeEnsemble) -> Versioned[LedgerMetadata]:
        """Quarantine the failed bookies and replace them in the metadata; does not set `committed`."""
        for bookie_id in action.failed.values():
            reason = self._reasons.pop(bookie_id, "it refused an add, or did not answer in time")
            self._pool.quarantine(bookie_id, reason)
        self._backoff.add_failures(action.failed.values(), now=self._loop.time())

        def plan(metadata: LedgerMetadata) -> LedgerMetadata | None:
            return plan_ensemble_change(
                metadata,
                failed=action.failed,
                first_entry_id=action.first_entry_id,
                choose=lambda ensemble, failed: self._pool.choose_replacements(
                    ensemble,
                    failed,
                    write_quorum=metadata.write_quorum,
                    exclude=self._backoff.excluded(now=self._loop.time()),
                ),
            )

        return await self._replace(plan)

    def ensemble_changed(self, committed: Versioned[LedgerMetadata]) -> None:
        """Take over the result of `change_ensemble`."""
        before = self.committed.value.last_segment.ensemble
        self.committed = committed
        added = set(committed.value.last_segment.ensemble) - set(before)
        self._backoff.add_choices(added, now=self._loop.time())

    async def _replace(self, plan: Plan) -> Versioned[LedgerMetadata]:
        """Run `update`. Without a spare, run it once more if an unreachable bookie can be reached now.

        If every copy is needed for an acknowledgement, also wait for a bookie that may not be chosen yet: the ledger
        cannot continue without it.
        """
        metadata = self.committed.value
        bearable = failures_bearable(write_quorum=metadata.write_quorum, ack_quorum=metadata.ack_quorum)
        is_revisited = False
        while True:
            try:
                return await self.update(plan)
            except NotEnoughBookies:
                if not is_revisited and await self._pool.revisit():
                    is_revisited = True
                    continue
                delay_s = self._backoff.next_s(now=self._loop.time())
                if bearable or delay_s is None:
                    raise
                await asyncio.sleep(min(delay_s, REPLACEMENT_POLL_S))
                if self._is_abandoned():
                    raise

    async def update(self, plan: Plan, *, closing_cause: ClosingCause | None = None) -> Versioned[LedgerMetadata]:
        """Change the metadata; retry while the store is unreachable, for at most `metadata_timeout_s`.

        Plans recognize their own result, so a change of unknown outcome is repeated too, after the metadata is read
        again. The known metadata may precede the first attempt, and a plan that gives up on it (NotEnoughBookies) would
        let the writer continue with an ensemble that is not the published one. If `closing_cause` is set, a closing
        record is added before the change.
        """
        deadline = self._loop.time() + self._settings.metadata_timeout_s
        backoff = Backoff(METADATA_PAUSE_S, METADATA_PAUSE_S_MAX)
        known: Versioned[LedgerMetadata] | None = self.committed
        while True:
            try:
                if closing_cause is not None:
                    await self._closing_records.add(self._ledger_id, closing_cause)
                known = known or await self._manager.read_newest(self._ledger_id)
                return await self._manager.update(self._ledger_id, plan, known=known)
            except (MetadataUnavailable, MetadataOutcomeUnknown) as error:
                known = None
                delay_s = backoff.next_delay_s()
                if self._loop.time() + delay_s > deadline:
                    raise
                log.info("metadata_change_retried", ledger_id=self._ledger_id, error=repr(error), pause_s=delay_s)
            await asyncio.sleep(delay_s)
