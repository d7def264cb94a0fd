"""Closing records: ledgers that were closed although it was unknown whether every replica holds every entry.

| node below /bindery/recovery | value       | created                   | deleted                                    |
|------------------------------|-------------|---------------------------|--------------------------------------------|
| closings/<g>/<id19>          | cause, JSON | by the client that closes | by the auditor, if all entries were found  |
|                              |             | the ledger, before it     | or the ledger is deleted; by the client    |
|                              |             | does so                   | that deletes the ledger                    |

A writer that continues without a replica keeps that fact in memory only. A client that recovers the ledger after the
writer's death checks only the entries after the last confirmed one. The record is therefore stored before the ledger
is closed in the metadata, so that a failure in between never leaves a closed ledger whose missing entries are not
checked. If the ledger is not closed after all, the record remains until another client closes the ledger. The time of a
record is the creation time of its znode.

No decision depends on the content of a record: an unreadable record counts like any other.
"""

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from bindery_core.errors import (
    AlreadyExists,
    BinderyError,
    Corrupt,
    MetadataOutcomeUnknown,
    NoSuchNode,
    NotEmpty,
)
from bindery_core.ids import ID_MAX, LedgerId

from bindery_metadata.coordination.election import Guard
from bindery_metadata.layout.layout import BinderyLayout
from bindery_metadata.layout.znode_path import parent_of
from bindery_metadata.stores import json_node
from bindery_metadata.stores.store import Delete, MetadataStore

ATTEMPTS_MAX: Final = 5
"""Maximum number of attempts to create a record if responses are lost. A second creation has no effect."""
READS_IN_FLIGHT: Final = 64
"""Maximum number of concurrent reads of records."""
ID_DIGITS: Final = 19
"""Number of decimal digits in the name of a record's node."""

_log = logging.getLogger(__name__)


class ClosingCause(StrEnum):
    """Why it is unknown whether every replica holds every entry."""

    RECOVERED = "recovered"
    """Closed by recovery. The writer has ended, and only the writer had counted missing replicas."""
    DEGRADED = "degraded"
    """Closed by its writer, which had continued without a replica."""
    IN_FLIGHT = "in_flight"
    """Closed while adds to some replicas were in flight."""
    UNKNOWN = "unknown"
    """The record cannot be read."""


@dataclass(frozen=True, slots=True)
class ClosingRecord:
    ledger_id: LedgerId
    cause: ClosingCause = ClosingCause.UNKNOWN
    noted_at_ms: int = 0
    """Creation time of the record in ms since 1970, by the clock of the store."""


class ClosingRecords:
    """Creates, lists and deletes closing records. Every method but `forget` may raise MetadataUnavailable."""

    def __init__(self, store: MetadataStore, *, layout: BinderyLayout | None = None) -> None:
        self._store = store
        self._layout = layout or BinderyLayout()

    async def add(self, ledger_id: LedgerId, cause: ClosingCause) -> None:
        """Store a record. An existing record is left unchanged.

        Raises MetadataOutcomeUnknown if every response was lost; the caller may then repeat the call.
        """
        path = self._layout.recovery_closing(ledger_id)
        for attempt in range(ATTEMPTS_MAX):
            try:
                await self._store.create(path, json_node.encode({"cause": cause}), make_parents=True)
            except AlreadyExists:
                pass
            except MetadataOutcomeUnknown:
                if attempt == ATTEMPTS_MAX - 1:
                    raise
                continue
            return

    async def get(self, ledger_id: LedgerId) -> ClosingRecord | None:
        """Return the record of a ledger, or None if it has none. An unreadable record has the cause UNKNOWN."""
        path = self._layout.recovery_closing(ledger_id)
        try:
            node = await self._store.get(path)
        except NoSuchNode:
            return None
        try:
            return json_node.decode(
                node.data, ClosingRecord, path=path, ledger_id=ledger_id, noted_at_ms=node.stat.ctime_ms
            )
        except Corrupt as error:
            _log.warning("closing_record_unreadable", extra={"path": path, "error": str(error)})
            return ClosingRecord(ledger_id, noted_at_ms=node.stat.ctime_ms)

    async def ledger_ids(self) -> list[LedgerId]:
        """Return the ledger ids of all records, ascending."""
        root = self._layout.recovery_closings
        directories = [name for name in await self._children(root) if name.isdecimal() and len(name) <= ID_DIGITS]
        found: list[LedgerId] = []
        for directory in directories:
            names = await self._children(f"{root}/{directory}")
            found += [
                LedgerId(int(name))
                for name in names
                if len(name) == ID_DIGITS and name.isdecimal() and int(name) <= ID_MAX
            ]
        return sorted(found)

    async def get_all(self, ledger_ids: Sequence[LedgerId]) -> list[ClosingRecord]:
        """Return the existing records of `ledger_ids`."""
        found: list[ClosingRecord] = []
        for start in range(0, len(ledger_ids), READS_IN_FLIGHT):
            some = await asyncio.gather(*map(self.get, ledger_ids[start : start + READS_IN_FLIGHT]))
            found += [record for record in some if record is not None]
        return found

    async def remove(self, ledger_id: LedgerId, *, guard: Guard) -> None:
        """Delete the record of a ledger, if any, as the leading auditor. Raises NotLeader, MetadataOutcomeUnknown."""
        path = self._layout.recovery_closing(ledger_id)
        try:
            await guard.multi([Delete(path, None)])
        except NoSuchNode:
            return
        await self._prune(ledger_id, path)

    async def forget(self, ledger_id: LedgerId) -> None:
        """Delete the record of a ledger that the caller has deleted. No guard is needed, because the record is unused.

        Without an auditor, these deletions keep records from accumulating. Errors are logged and not raised; an auditor
        deletes the remaining records.
        """
        path = self._layout.recovery_closing(ledger_id)
        try:
            await self._store.delete(path, version=None)
        except NoSuchNode:
            return
        except BinderyError as error:
            _log.info("closing_record_left", extra={"ledger_id": ledger_id, "error": str(error)})
        else:
            await self._prune(ledger_id, path)

    async def _prune(self, ledger_id: LedgerId, path: str) -> None:
        try:
            await self._store.delete(parent_of(path), version=None)
        except (NoSuchNode, NotEmpty):
            pass
        except BinderyError as error:  # an empty directory is harmless
            _log.info("closing_records_directory_left", extra={"ledger_id": ledger_id, "error": str(error)})

    async def _children(self, path: str) -> Sequence[str]:
        try:
            return await self._store.children(path)
        except NoSuchNode:
            return []
