"""LogReplacement: change the log manifest and the entry log files in steps that survive a crash or an error.

See `compaction` for the steps of a replacement and what a start finds after a crash. After an error, `finish` completes
or undoes the change, and no other change begins before `finish` succeeded. Steps that must not run concurrently with a
flush run in the flush worker. Event loop only.
"""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from typing import Final

import structlog
from bindery_core.errors import BinderyError, Conflict

from bindery_bookie.storage.collection.rewrite import Rewrite
from bindery_bookie.storage.corruption.damage import Damage
from bindery_bookie.storage.entry_log import entry_log_format as fmt
from bindery_bookie.storage.entry_log.log_manifest import LogEnd, LogIds, LogManifest, ManifestFile
from bindery_bookie.storage.index.index import Index
from bindery_bookie.storage.io.disk import Disk
from bindery_bookie.storage.io.worker import Worker, run_in
from bindery_bookie.storage.stats import StorageStats

log = structlog.get_logger(__name__)

ROOM_MARGIN: Final = 1024 * 1024
"""Bytes needed in addition to the copy: index rows, manifest, control records."""

_ERRORS = (OSError, BinderyError)


@dataclass(slots=True)
class CollectionEnvironment:
    """The parts of the open storage that compaction uses. `closed_below`, `log_end`: see Flusher."""

    disk: Disk
    directory: str
    index: Index
    closed_below: Callable[[], int]
    log_end: Callable[[int], LogEnd]
    open_ledgers: Callable[[], Awaitable[dict[int, int]]]
    """Returns the bytes of records by ledger id in the open log."""
    flush_deletions: Callable[[], Awaitable[None]]
    """Returns once no deletion waits for a flush. Raises OSError."""
    roll: Callable[[], Awaitable[None]]
    """Closes the open log. Raises OSError, BinderyError."""
    forget_log: Callable[[int], Awaitable[None]]
    """Returns once no reader has the log open."""
    make_room: Callable[[], bool]
    """Releases a reserve; False if there is none. Called in a worker."""
    damaged: Callable[[Damage], object]
    flush_worker: Worker
    worker: Worker
    """Used by the compactor only."""
    clock: Callable[[], float]
    wall_clock_ms: Callable[[], int]


class LogReplacement:
    """Changes of the manifest and the entry log files.

    Invariants: no file is removed while the manifest on disk may list it as a log; a used id is listed as absent or is
    a log; after an error either nothing has changed, or `finish` completes the change.
    """

    def __init__(self, parts: CollectionEnvironment, manifest: ManifestFile, ids: LogIds, stats: StorageStats) -> None:
        self._parts = parts
        self._manifest = manifest
        self._ids = ids
        self._stats = stats
        self._spare_id: int | None = None
        """An id that is listed as absent but not used yet."""
        self._unremoved: set[str] = set()
        """Files that could not be removed."""
        self._unfinished: Callable[[], Awaitable[None]] | None = None
        """The rest of a change; called again if it raises OSError or BinderyError."""

    @property
    def manifest(self) -> LogManifest:
        """The current manifest. Flushes change it too."""
        return self._manifest.manifest

    @property
    def is_blocked(self) -> bool:
        """True if `finish` must succeed before any other change."""
        return self._unfinished is not None

    async def finish(self) -> None:
        """Complete or undo an earlier change. Raises OSError, BinderyError."""
        if self._unfinished is not None:
            await self._unfinished()
            self._unfinished = None
        for path in tuple(self._unremoved):
            await self.remove_file(path)

    async def new_log_id(self) -> int:
        """Return an id for a new log, which the manifest lists as absent. Raises OSError."""
        if self._unremoved:  # one of these files may have the spare id
            self._spare_id = None
        log_id = self._spare_id or self._ids.for_compaction()
        self._spare_id = log_id  # until a log uses it: an id that is neither absent nor a log looks like a lost log
        if not self.manifest.is_absent(log_id):
            await self._change(lambda manifest: manifest.with_absent(log_id))
        return log_id

    async def remove_logs(self, log_ids: Sequence[int]) -> None:
        """Remove logs without live entries. Raises OSError; the call may be repeated."""
        await self._change(lambda manifest: manifest.with_absent(*log_ids))
        for log_id in log_ids:
            await self._remove_log(log_id)

    async def install(self, rewrite: Rewrite) -> None:
        """Perform steps 3 to 7. After an error the rest is in `_unfinished`, or the change was undone."""
        parts = self._parts
        target_id = rewrite.target_id

        def rename() -> None:
            parts.disk.rename(rewrite.temporary_path, rewrite.path)
            parts.disk.sync_directory(parts.directory)

        try:
            await run_in(parts.flush_worker, rename)
        except _ERRORS:
            await self.remove_file(rewrite.temporary_path)
            await self.remove_file(rewrite.path)
            raise
        try:
            await self._change(lambda manifest: manifest.with_compacted(target_id, rewrite.source.order))
        except _ERRORS:
            # It is unknown which manifest is on disk. No file may be removed before it is listed as absent.
            self._unfinished = lambda: self._abandon(rewrite)
            await self.finish()
            raise
        self._spare_id = None
        self._unfinished = lambda: self._switch(rewrite)
        await self.finish()

    async def _switch(self, rewrite: Rewrite) -> None:
        """Perform steps 5 to 7. A failed switch may be on disk, so it is repeated, never undone; it is idempotent."""
        parts, source_id = self._parts, rewrite.source.log_id
        switches = self.manifest.switches + 1

        def switch() -> None:
            parts.index.switch(source_id, rewrite.ledgers, rewrite.moved, switches=switches)

        try:
            await run_in(parts.flush_worker, switch)
        except Conflict:  # nothing was written
            self._unfinished = lambda: self._abandon(rewrite)
            raise
        await self._change(lambda manifest: replace(manifest.with_absent(source_id), switches=switches))
        await self._remove_log(source_id)

    async def _abandon(self, rewrite: Rewrite) -> None:
        await self._change(lambda manifest: manifest.with_absent(rewrite.target_id))
        await self.remove_file(rewrite.path)

    async def _change(self, change: Callable[[LogManifest], LogManifest]) -> None:
        await run_in(self._parts.flush_worker, lambda: self._manifest.change(change))

    async def _remove_log(self, log_id: int) -> None:
        await self._parts.forget_log(log_id)
        await self.remove_file(f"{self._parts.directory}/{fmt.file_name(log_id)}")

    async def remove_file(self, path: str) -> None:
        """Remove a file that the manifest does not list as a log. If it fails, the next run or start tries again."""
        try:
            await run_in(self._parts.flush_worker, lambda: self._parts.disk.remove(path))
        except FileNotFoundError:
            self._unremoved.discard(path)
        except OSError as error:
            self._unremoved.add(path)
            self._stats.log_removals_failed += 1
            log.warning("file_not_removed", path=path, error=str(error))
        else:
            self._unremoved.discard(path)

    async def has_room(self, size: int) -> bool:
        """Return True if there is space for `size` bytes, after releasing reserves if necessary."""
        parts = self._parts
        needed = size + size // 16 + ROOM_MARGIN

        def check() -> bool:
            while parts.disk.usage(parts.directory).free < needed:
                if not parts.make_room():
                    return False
            return True

        return await run_in(parts.worker, check)
