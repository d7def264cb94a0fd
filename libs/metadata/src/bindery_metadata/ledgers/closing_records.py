"""Ledgers closed by somebody who does not know that every copy is there: noted before, for the auditor to look at.

| node below /bindery/recovery | value                    | made                   | removed                           |
|------------------------------|--------------------------|------------------------|-----------------------------------|
| closings/<g>/<id19>          | ClosingNote's cause,     | by who closes it,      | by the auditor, once the ledger   |
|                              | JSON                     | before it does         | was seen to be whole, or deleted; |
|                              |                          |                        | by who deletes the ledger         |

A writer that goes on without a copy tells that from memory; who recovers its ledger after its death looks behind the
last confirmed entry only. So the note is in the metadata before the ledger is closed in them: whatever dies in between,
no ledger is closed with a hole that nobody will look for. A note of a ledger that was not closed after all waits for
whoever closes it. When it was made is the time of its node.

Nothing is decided by its content: one that cannot be read is a note like any other.
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
"""Lost answers in a row that a creation bears; to create again is harmless."""
READS_IN_FLIGHT: Final = 64
ID_DIGITS: Final = 19

_log = logging.getLogger(__name__)


class ClosingCause(StrEnum):
    """Why it is not known that all copies are there."""

    RECOVERED = "recovered"
    """Closed by recovery: what its writer knew died with it."""
    DEGRADED = "degraded"
    """Its writer went on without a copy."""
    IN_FLIGHT = "in_flight"
    """Closed while copies were still on their way."""
    UNKNOWN = "unknown"
    """The node cannot be read."""


@dataclass(frozen=True, slots=True)
class ClosingNote:
    ledger_id: LedgerId
    cause: ClosingCause = ClosingCause.UNKNOWN
    noted_at_ms: int = 0
    """Since 1970, by the store's clock."""


class ClosingNotes:
    """Makes, lists and removes the notes. Every method but `forget` may raise MetadataUnavailable."""

    def __init__(self, store: MetadataStore, *, layout: BinderyLayout | None = None) -> None:
        self._store = store
        self._layout = layout or BinderyLayout()

    async def add(self, ledger_id: LedgerId, cause: ClosingCause) -> None:
        """It stands when this returns. One that stands already is left as it is.

        Raises MetadataOutcomeUnknown when the answers got lost; call again.
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

    async def get(self, ledger_id: LedgerId) -> ClosingNote | None:
        path = self._layout.recovery_closing(ledger_id)
        try:
            node = await self._store.get(path)
        except NoSuchNode:
            return None
        try:
            return json_node.decode(
                node.data, ClosingNote, path=path, ledger_id=ledger_id, noted_at_ms=node.stat.ctime_ms
            )
        except Corrupt as error:
            _log.warning("closing_note_unreadable", extra={"path": path, "error": str(error)})
            return ClosingNote(ledger_id, noted_at_ms=node.stat.ctime_ms)

    async def ledger_ids(self) -> list[LedgerId]:
        """Of all notes, ascending."""
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

    async def get_all(self, ledger_ids: Sequence[LedgerId]) -> list[ClosingNote]:
        """Those of them that stand."""
        found: list[ClosingNote] = []
        for start in range(0, len(ledger_ids), READS_IN_FLIGHT):
            some = await asyncio.gather(*map(self.get, ledger_ids[start : start + READS_IN_FLIGHT]))
            found += [note for note in some if note is not None]
        return found

    async def remove(self, ledger_id: LedgerId, *, guard: Guard) -> None:
        """Harmless when there is none. Raises NotLeader, MetadataOutcomeUnknown."""
        path = self._layout.recovery_closing(ledger_id)
        try:
            await guard.multi([Delete(path, None)])
        except NoSuchNode:
            return
        await self._prune(ledger_id, path)

    async def forget(self, ledger_id: LedgerId) -> None:
        """For who deleted the ledger: nothing is decided by its note any more, so no guard is asked for.

        Best effort, so that notes do not pile up where no auditor runs. Raises nothing: what is left is for an auditor.
        """
        path = self._layout.recovery_closing(ledger_id)
        try:
            await self._store.delete(path, version=None)
        except NoSuchNode:
            return
        except BinderyError as error:
            _log.info("closing_note_left", extra={"ledger_id": ledger_id, "error": str(error)})
        else:
            await self._prune(ledger_id, path)

    async def _prune(self, ledger_id: LedgerId, path: str) -> None:
        try:
            await self._store.delete(parent_of(path), version=None)
        except (NoSuchNode, NotEmpty):
            pass
        except BinderyError as error:  # an empty directory hurts nobody
            _log.info("closing_notes_directory_left", extra={"ledger_id": ledger_id, "error": str(error)})

    async def _children(self, path: str) -> Sequence[str]:
        try:
            return await self._store.children(path)
        except NoSuchNode:
            return []
