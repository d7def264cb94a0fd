"""Read a range of entries, or single ones: run `LedgerRead` machines over the pool, in steps of bounded size.

Invariants: besides entries already returned, one step is in memory at a time; the digest of every entry is verified.
"""

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, Final

from bindery_core.errors import BadRequest, BinderyError
from bindery_core.formats.ledger_metadata import LedgerMetadata
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.ledger.ledger_actions import Done, Fail, ReaderAction, SendReads
from bindery_core.ledger.ledger_reader import LedgerRead, ReaderSettings

from bindery_client.ledger.api import Entry
from bindery_client.ledger.deadline_timer import DeadlineTimer
from bindery_client.ledger.requests import DEADLINE_SLACK_S, LedgerRequests, reason_of
from bindery_client.settings import ClientSettings

BATCH_RUN_SIZE: Final = 100
"""Number of consecutive entries read from one bookie with batch reads. A step is thus spread over the ensemble."""


class ReadOperation:
    """Runs one `LedgerRead`."""

    def __init__(
        self, requests: LedgerRequests, metadata: LedgerMetadata, *, entry_ids: Sequence[int], settings: ClientSettings
    ) -> None:
        self._requests = requests
        self._settings = settings
        self._loop = asyncio.get_running_loop()
        self._machine = LedgerRead(
            requests.ledger_id,
            metadata,
            entry_ids=entry_ids,
            digester=requests.digester,
            avoid=requests.pool.to_avoid(),
            run_size=BATCH_RUN_SIZE if settings.wire_version == 2 and settings.batch_reads else 1,
            settings=ReaderSettings(
                speculative_s=settings.speculative_read_s or None, read_timeout_s=settings.read_timeout_s
            ),
        )
        self._done: asyncio.Future[None] = self._loop.create_future()
        self._timer = DeadlineTimer(self._tick)

    async def run(self) -> list[Entry]:
        self._run(self._machine.start(now=self._loop.time()))
        try:
            await self._done
        finally:
            self._timer.cancel()
        return [Entry(EntryId(e.entry_id), e.payload, e.length) for e in self._machine.take_entries()]

    @property
    def max_lac(self) -> int:
        return self._machine.max_lac

    def answered(self, bookie_id: BookieId, responses: list[Any]) -> None:
        if not self._done.done():
            self._run(self._machine.receive_many(bookie_id, responses, now=self._loop.time()))

    def failed(self, bookie_id: BookieId, error: BinderyError) -> None:
        if not self._done.done():
            self._run(self._machine.bookie_failed(bookie_id, reason_of(error), now=self._loop.time()))

    def expired(self, bookie_id: BookieId, error: BinderyError) -> None:
        """Ignored: the deadlines of the state machine are earlier."""

    def _tick(self) -> None:
        if not self._done.done():
            self._run(self._machine.tick(now=self._loop.time()))

    def _run(self, actions: Sequence[ReaderAction]) -> None:
        for action in actions:
            match action:
                case SendReads():
                    timeout_s = self._settings.read_timeout_s + DEADLINE_SLACK_S
                    self._requests.send_reads(action, self, timeout_s=timeout_s)
                case Done():
                    self._done.set_result(None)
                case Fail():
                    self._done.set_exception(action.error)
        if not self._done.done():
            self._timer.arm(self._machine.next_deadline())


def check_range(first: int, last: int, *, ledger_id: LedgerId, last_add_confirmed: int) -> None:
    """Raise BadRequest unless 0 <= `first` <= `last` <= `last_add_confirmed`."""
    if not 0 <= first <= last <= last_add_confirmed:
        raise BadRequest(
            "no such range", ledger_id=ledger_id, first=first, last=last, last_add_confirmed=last_add_confirmed
        )


def check_ids(entry_ids: Sequence[int], *, ledger_id: LedgerId, last_add_confirmed: int) -> None:
    """Raise BadRequest unless `entry_ids`, which ascend, are at least one, from 0 to `last_add_confirmed`."""
    first, last = (entry_ids[0], entry_ids[-1]) if entry_ids else (0, -1)
    check_range(first, last, ledger_id=ledger_id, last_add_confirmed=last_add_confirmed)


async def read_entries(
    requests: LedgerRequests,
    metadata: Callable[[], LedgerMetadata],
    *,
    entry_ids: Sequence[int],
    average_size: int,
    settings: ClientSettings,
    on_lac: Callable[[int], None] | None = None,
) -> list[Entry]:
    """Return the entries `entry_ids`, which ascend.

    `metadata` is called for each step; `average_size` (bytes) sizes the first step.
    """
    entries: list[Entry] = []
    while len(entries) < len(entry_ids):
        count = settings.read_batch_bytes_max // max(average_size, 1)
        count = max(1, min(count, settings.read_batch_entries_max))
        part = entry_ids[len(entries) : len(entries) + count]
        operation = ReadOperation(requests, metadata(), entry_ids=part, settings=settings)
        step = await operation.run()
        if on_lac is not None:
            on_lac(operation.max_lac)
        entries += step
        average_size = max(1, sum(len(entry.payload) for entry in step) // len(step))
    return entries
