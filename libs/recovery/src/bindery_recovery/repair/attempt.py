"""The recovery record of one ledger while a worker repairs it."""

import asyncio
import contextlib
from collections.abc import Collection, Sequence
from typing import Final, Protocol

from bindery_core.errors import BinderyError
from bindery_core.ids import LedgerId
from bindery_metadata.layout.layout import BinderyLayout
from bindery_metadata.recovery.recovery_records import Reason, RecoveryRecord, RecoveryState
from bindery_metadata.recovery.underreplication import HeldMark
from bindery_metadata.stores.store import Check, MetadataStore, Op, Stat

from bindery_recovery.checks.checker import FragmentState, LedgerCheck
from bindery_recovery.records.reasons import stronger

PROGRESS_S: Final = 5.0
"""Minimum interval in seconds between progress updates during a long copy."""


class Worker(Protocol):
    """The part of the worker that an attempt uses."""

    @property
    def name(self) -> str: ...

    def at_work(self, ledger_id: LedgerId, entries: int, size: int) -> None: ...

    async def put(self, record: RecoveryRecord, *, known: Collection[str]) -> RecoveryRecord: ...


class Attempt:
    """The record of one ledger during an attempt."""

    def __init__(self, worker: Worker, held: HeldMark, record: RecoveryRecord) -> None:
        self.held = held
        self.record = record
        self.bookies: Final = frozenset(record.bookies)
        """Bookies named by the record when the attempt started."""
        self.state_before: Final = record.state
        """State of the record when the attempt started."""
        self.entries = 0
        self.bytes = 0
        self.began = asyncio.get_running_loop().time()
        self._worker = worker
        self._missing: tuple[int, int | None] = (0, None)
        self._done_before = (0, 0)
        self._writer: asyncio.Task[None] | None = None
        self._written_at = self.began

    def checked(self, check: LedgerCheck) -> None:
        """Record the size of the repair. A hole is recorded as the reason for later attempts: once the first and the
        last entry of a fragment are restored, a check of the ends would no longer find it."""
        if any(one.state is FragmentState.MISSING for one in check.bad):
            self.record = self.record.with_changes(reason=stronger(self.record.reason, Reason.ENTRY_MISSING))
        self._missing = (check.missing_entries, check.missing_bytes)
        self._done_before = (self.entries, self.bytes)

    async def begins(self) -> None:
        """Copying begins."""
        await self._progress()

    def copied(self, entries: int, size: int) -> None:
        """A batch was copied: number of entries, bytes."""
        self.entries += entries
        self.bytes += size
        self._worker.at_work(self.record.ledger_id, entries, size)
        loop = asyncio.get_running_loop()
        is_idle = self._writer is None or self._writer.done()
        if is_idle and loop.time() - self._written_at >= PROGRESS_S:
            self._written_at = loop.time()
            self._writer = loop.create_task(self._progress_if_possible())

    async def stop(self) -> None:
        """Wait for a progress update that is still being written."""
        if self._writer is not None:
            await self._writer
            self._writer = None

    async def write(self, **changes: object) -> None:
        self.record = await self._worker.put(self.record.with_changes(**changes), known=self.bookies)

    @property
    def is_outdated(self) -> bool:
        """Whether the ledger was marked for more bookies in the meantime, as of the last write of the record."""
        return not self.bookies.issuperset(self.record.bookies)

    async def _progress(self) -> None:
        entries, size = self._missing
        done_entries, done_bytes = self.entries - self._done_before[0], self.bytes - self._done_before[1]
        await self.write(
            state=RecoveryState.COPYING,
            worker=self._worker.name,
            next_retry_ms=None,
            missing_entries=max(0, entries - done_entries),
            missing_bytes=None if size is None else max(0, size - done_bytes),
        )

    async def _progress_if_possible(self) -> None:
        with contextlib.suppress(BinderyError):
            await self._progress()


class Unchanged:
    """A guard of metadata writes: they succeed only if the record is unchanged since the worker wrote or read it."""

    def __init__(self, store: MetadataStore, layout: BinderyLayout, record: RecoveryRecord) -> None:
        self._store = store
        self._check = Check(layout.recovery_record(record.ledger_id), record.version)

    async def multi(self, ops: Sequence[Op]) -> list[str | Stat | None]:
        return (await self._store.multi([self._check, *ops]))[1:]
