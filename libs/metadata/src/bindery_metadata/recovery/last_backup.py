"""Store the result of the last scheduled backup of the metadata.

| node                 | value            | written by, how                 | removed |
|----------------------|------------------|---------------------------------|---------|
| /bindery/backup/last | JSON: LastBackup | `bindery cluster backups create` | never   |

Operators see the age of the last backup that succeeded, and why a later attempt failed. The record is in the metadata,
because the process that writes a backup ends with it and can be scraped by nobody. No decision about data depends on
it, so an unreadable node counts as missing and is logged.
"""

import logging
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from typing import Any, Final

from bindery_core.errors import AlreadyExists, Corrupt, MetadataUnavailable, NoSuchNode, VersionConflict

from bindery_metadata.layout.layout import BINDERY_ROOT
from bindery_metadata.stores import json_node
from bindery_metadata.stores.store import MetadataStore

ATTEMPTS_MAX: Final = 20
"""Maximum number of compare-and-set attempts of one change."""
REASON_SIZE_MAX: Final = 1_000
"""Maximum number of characters of a reason that is stored."""

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class LastBackup:
    """The last backup that succeeded, and the last failure. Times are in ms since 1970; 0: never."""

    ended_ms: int = 0
    """When the last backup succeeded; the fields from here to `is_uploaded` describe it."""
    name: str = ""
    """Name of its file."""
    size: int = 0
    """Number of bytes of the file."""
    nodes: int = 0
    ledgers: int = 0
    settled: bool = False
    """Whether its last pass found no change."""
    is_uploaded: bool = False
    """Whether it was also sent to a store outside of the cluster."""
    failed_ms: int = 0
    """When the last attempt failed."""
    failure: str = ""
    """Why it failed."""

    @property
    def has_failed(self) -> bool:
        """Whether the last attempt failed."""
        return self.failed_ms > self.ended_ms

    def age_s(self, now_ms: int) -> float:
        """Return the time in seconds since the last backup succeeded; 0 if that is later than `now_ms`."""
        return max(0, now_ms - self.ended_ms) / 1000

    def to_json(self, now_ms: int) -> dict[str, Any]:
        """Return the fields with `has_failed` and `age_s`, which is None if no backup has succeeded."""
        age_s = self.age_s(now_ms) if self.ended_ms else None
        return {**asdict(self), "has_failed": self.has_failed, "age_s": age_s}


class LastBackupStore:
    """Reads and writes the record. Every method may raise MetadataUnavailable."""

    def __init__(self, store: MetadataStore, *, root: str = BINDERY_ROOT) -> None:
        self._store = store
        self._path = f"{root}/backup/last"

    async def get(self) -> LastBackup | None:
        """Return the record; None: it is missing or unreadable."""
        return (await self._read())[0]

    async def succeeded(self, backup: LastBackup) -> None:
        """Record a backup, and keep the last failure. Raises MetadataOutcomeUnknown; writing again is harmless."""
        await self._change(lambda known: replace(backup, failed_ms=known.failed_ms, failure=known.failure))

    async def failed(self, at_ms: int, reason: str) -> None:
        """Record a failure, and keep the last backup. Raises MetadataOutcomeUnknown; writing again is harmless."""
        await self._change(lambda known: replace(known, failed_ms=at_ms, failure=reason[:REASON_SIZE_MAX]))

    async def _change(self, change: Callable[[LastBackup], LastBackup]) -> None:
        for _ in range(ATTEMPTS_MAX):
            known, version = await self._read()
            data = json_node.encode(change(known or LastBackup()))
            try:
                if version is None:
                    await self._store.create(self._path, data, make_parents=True)
                else:
                    await self._store.set(self._path, data, version=version)
                return
            except (AlreadyExists, NoSuchNode, VersionConflict):
                continue
        raise MetadataUnavailable("the record of the last backup keeps changing", path=self._path)

    async def _read(self) -> tuple[LastBackup | None, int | None]:
        """Return the record (None: missing or unreadable) and the version of its node (None: there is no node)."""
        try:
            node = await self._store.get(self._path)
        except NoSuchNode:
            return None, None
        try:
            return json_node.decode(node.data, LastBackup, path=self._path), node.stat.version
        except Corrupt as error:
            _log.warning("last_backup_unreadable", extra={"path": self._path, "error": str(error)})
            return None, node.stat.version
