"""Records of ledger recovery: the state of each repair, the history, worker reports, and the positions of checks.

| node below /bindery/recovery | record         | kept                                                          |
|------------------------------|----------------|---------------------------------------------------------------|
| ledgers/<g>/<id>             | RecoveryRecord | while the ledger is marked (longer if it is unrecoverable)    |
| history/E_<n>                | HistoryEvent   | the newest HISTORY_MAX, approximately                         |
| cursors/<name>               | any object     | until it is removed                                           |
| workers/<name>               | WorkerReport   | while the worker's session lives                              |
| pause                        | Pause          | while recovery is paused                                      |

No decision about data depends on these records, only on marks, locks and ledger metadata. An unreadable record is
therefore skipped and logged. If the response to an unconditional write is lost, the write is repeated; an event of the
history is appended again only if it is not among the newest ones.
"""

import asyncio
import dataclasses
import logging
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final, TypeVar

from bindery_core.errors import (
    AlreadyExists,
    BinderyError,
    Corrupt,
    MetadataOutcomeUnknown,
    MetadataUnavailable,
    NoSuchNode,
    NotEmpty,
    VersionConflict,
)
from bindery_core.ids import ID_MAX, LedgerId

from bindery_metadata.coordination.election import Guard
from bindery_metadata.layout.layout import EVENT_PREFIX, BinderyLayout
from bindery_metadata.layout.znode_path import parent_of
from bindery_metadata.stores import json_node
from bindery_metadata.stores.parents import make_path
from bindery_metadata.stores.store import Create, Delete, MetadataStore, Node, Op, Set, Stat

ATTEMPTS_MAX: Final = 20
"""Maximum number of compare-and-set attempts of one change."""
READS_IN_FLIGHT: Final = 64
"""Maximum number of concurrent reads of records."""
HISTORY_MAX: Final = 1_000
"""Approximate maximum number of events that are kept."""
HISTORY_PRUNE_EVERY: Final = 32
"""Number of appended events after which the oldest events are deleted."""
TEXT_SIZE_MAX: Final = 2_000
"""Maximum number of characters of a text field. Longer texts are truncated."""
NOT_STORED: Final = -1
"""Version of a record that was not read from the store. A write of such a record replaces any stored record."""

_RECORD = re.compile(r"[0-9]{19}")

T = TypeVar("T")
_log = logging.getLogger(__name__)


class RecoveryState(StrEnum):
    """State of the repair of a ledger."""

    WAITING = "waiting"
    COPYING = "copying"
    BACKING_OFF = "backing_off"
    BLOCKED = "blocked"
    UNRECOVERABLE = "unrecoverable"
    HEALED = "healed"


class Reason(StrEnum):
    """Why the ledger is marked."""

    BOOKIE_LOST = "bookie_lost"
    BOOKIE_DRAINING = "bookie_draining"
    ENTRY_MISSING = "entry_missing"
    REPORTED_BY_WRITER = "reported_by_writer"
    PLACEMENT = "placement"
    OPERATOR = "operator"


class Obstacle(StrEnum):
    """Why the ledger is not repaired."""

    NONE = "none"
    NO_SPARE = "no_spare"
    NO_COPY_LEFT = "no_copy_left"
    SOURCE_UNAVAILABLE = "source_unavailable"
    SOURCE_IN_LIMBO = "source_in_limbo"
    TARGET_REFUSES = "target_refuses"
    LEDGER_OPEN = "ledger_open"
    RECOVERY_IMPOSSIBLE = "recovery_impossible"
    METADATA_UNREADABLE = "metadata_unreadable"
    PAUSED = "paused"
    ERROR = "error"


@dataclass(frozen=True, slots=True)
class RecoveryRecord:
    """State of the recovery of one ledger. Times in ms since 1970."""

    ledger_id: LedgerId
    state: RecoveryState = RecoveryState.WAITING
    reason: Reason = Reason.OPERATOR
    obstacle: Obstacle = Obstacle.NONE
    detail: str = ""
    """The obstacle as a sentence with its values."""
    attempts: int = 0
    last_error: str = ""
    first_marked_ms: int = 0
    next_retry_ms: int | None = None
    missing_entries: int | None = None
    """Number of replicas of entries to create; None: not known yet."""
    missing_bytes: int | None = None
    bookies: tuple[str, ...] = ()
    """Bookies with missing replicas."""
    worker: str = ""
    unsure: tuple[tuple[str, int], ...] = ()
    """(bookie id, number of attempts) of each bookie that did not report its entries in the latest consecutive
    attempts."""
    version: int = NOT_STORED

    def with_changes(self, **changes: Any) -> "RecoveryRecord":
        return dataclasses.replace(self, **changes)


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """Activity of a replication worker at `at_ms`."""

    name: str
    at_ms: int
    state: str = ""
    ledger_id: LedgerId | None = None
    bytes_done_total: int = 0
    entries_done_total: int = 0
    bytes_per_s: float = 0.0
    """Smoothed copy rate in bytes per second."""
    foreground_p99_ms: float | None = None
    budget_bytes_per_s: float = 0.0


@dataclass(frozen=True, slots=True)
class HistoryEvent:
    """One event of the recovery history.

    `kind`: bookie_lost, bookie_back, marked, healed, unrecoverable, check_finished, drain_started, leader, ...
    """

    at_ms: int
    kind: str
    text: str = ""
    fields: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Pause:
    """The reason for a pause of recovery and the operator who set it. `UnderreplicationManager.disable` pauses it."""

    by: str
    reason: str
    at_ms: int


class RecoveryRecords:
    """Reads and writes the records. `guard`: the auditor's leadership, for records that only the auditor may write."""

    def __init__(self, store: MetadataStore, *, layout: BinderyLayout | None = None) -> None:
        self._store = store
        self._layout = layout or BinderyLayout()

    # --- ledgers --------------------------------------------------------------------------------------------------

    async def get(self, ledger_id: LedgerId) -> RecoveryRecord | None:
        """Return the record of a ledger; None: there is no readable record."""
        path = self._layout.recovery_record(ledger_id)
        node = await self._node(path)
        return self._read(node, RecoveryRecord, path, ledger_id=ledger_id, version=node.stat.version) if node else None

    async def put(self, record: RecoveryRecord, *, guard: Guard | None = None) -> RecoveryRecord:
        """Store the record and return it with its new version.

        Raises VersionConflict if another version is stored; a record of version NOT_STORED replaces any. Raises
        NotLeader, MetadataUnavailable.
        """
        path = self._layout.recovery_record(record.ledger_id)
        record = record.with_changes(detail=record.detail[:TEXT_SIZE_MAX], last_error=record.last_error[:TEXT_SIZE_MAX])
        data = json_node.encode(record, leave_out=("ledger_id", "version"))
        if record.version == NOT_STORED:
            return record.with_changes(version=await self._put(path, data, guard))
        try:
            [stat] = await self._write([Set(path, data, record.version)], guard)
            assert isinstance(stat, Stat)
            return record.with_changes(version=stat.version)
        except (NoSuchNode, VersionConflict):
            raise VersionConflict("the recovery record has changed", ledger_id=record.ledger_id) from None
        except MetadataOutcomeUnknown as lost:
            await self._settle(path, lost)
            node = await self._node(path)
            if node and node.data == data and node.stat.version == record.version + 1:
                return record.with_changes(version=node.stat.version)
            if node and node.stat.version == record.version:
                raise MetadataUnavailable("the write did not arrive", path=path) from lost
            raise VersionConflict("the recovery record has changed", ledger_id=record.ledger_id) from lost

    async def update(
        self,
        ledger_id: LedgerId,
        change: Callable[[RecoveryRecord | None], RecoveryRecord | None],
        *,
        guard: Guard | None = None,
    ) -> RecoveryRecord | None:
        """Change a record in a loop: read, change, compare-and-set, start again on conflict. Return the stored record.

        `change` takes the current record, or None if there is no readable record. It returns the new record, or None to
        leave the record unchanged. It may be called many times.
        """
        for _ in range(ATTEMPTS_MAX):
            current = await self.get(ledger_id)
            changed = change(current)
            if changed is None or changed == current:
                return current
            try:
                return await self.put(
                    changed.with_changes(version=current.version if current else NOT_STORED), guard=guard
                )
            except VersionConflict:
                continue
        raise MetadataUnavailable("the recovery record keeps changing", ledger_id=ledger_id, attempts=ATTEMPTS_MAX)

    async def remove(self, ledger_id: LedgerId, *, guard: Guard | None = None) -> None:
        """Delete the record of a ledger. Does nothing if there is none."""
        path = self._layout.recovery_record(ledger_id)
        await self._delete(path, guard)
        try:
            await self._store.delete(parent_of(path), version=None)
        except (NoSuchNode, NotEmpty):
            pass
        except BinderyError as error:  # an empty directory is harmless
            _log.info("recovery_directory_left", extra={"ledger_id": ledger_id, "error": str(error)})

    async def list(self) -> AsyncIterator[RecoveryRecord]:
        """Yield every readable record, ascending by ledger id. An error of the store is raised."""
        root = self._layout.recovery_ledgers
        directories = [name for name in await self._children(root) if name.isdecimal() and len(name) <= 19]
        for directory in sorted(directories, key=int):
            names = await self._children(f"{root}/{directory}")
            ids = [LedgerId(int(name)) for name in names if _RECORD.fullmatch(name) and int(name) <= ID_MAX]
            for start in range(0, len(ids), READS_IN_FLIGHT):
                for record in await asyncio.gather(*map(self.get, ids[start : start + READS_IN_FLIGHT])):
                    if record is not None:
                        yield record

    # --- history --------------------------------------------------------------------------------------------------

    async def append_history(self, event: HistoryEvent, *, guard: Guard | None = None, may_exist: bool = False) -> bool:
        """Append an event. Returns False if its response was lost and the store then failed: the event may be missing.

        `may_exist`: an earlier call for this event returned False. Raises NotLeader, MetadataUnavailable.
        """
        event = dataclasses.replace(event, text=event.text[:TEXT_SIZE_MAX])
        data = json_node.encode(event)
        if may_exist:
            await self._store.sync(self._layout.recovery_history)
            if await self._is_recent(data):
                return True
        prefix = f"{self._layout.recovery_history}/{EVENT_PREFIX}"
        for _ in range(ATTEMPTS_MAX):
            try:
                [path] = await self._write([Create(prefix, data, sequential=True)], guard)
            except NoSuchNode:
                await self._make(self._layout.recovery_history)
                continue
            except MetadataOutcomeUnknown as lost:
                try:
                    await self._settle(self._layout.recovery_history, lost)
                    if await self._is_recent(data):
                        return True
                except BinderyError as error:
                    _log.info("history_event_unsure", extra={"kind": event.kind, "error": str(error)})
                    return False
                continue
            if isinstance(path, str) and int(path[len(prefix) :]) % HISTORY_PRUNE_EVERY == 0:
                await self._prune_history()
            return True
        raise MetadataUnavailable("the history cannot be written", attempts=ATTEMPTS_MAX)

    async def history(self, limit: int = HISTORY_MAX) -> Sequence[HistoryEvent]:
        """Return up to `limit` events, the newest first."""
        events: list[HistoryEvent] = []
        names = [*reversed(await self._events())]
        while names and len(events) < limit:
            count = min(READS_IN_FLIGHT, limit - len(events))
            found = await asyncio.gather(*map(self._event, names[:count]))
            events += [event for event in found if event is not None]
            del names[:count]
        return events

    async def _is_recent(self, data: bytes) -> bool:
        """Whether `data` is one of the newest READS_IN_FLIGHT events."""
        names = (await self._events())[-READS_IN_FLIGHT:]
        found = await asyncio.gather(*(self._node(f"{self._layout.recovery_history}/{name}") for name in names))
        return any(node is not None and node.data == data for node in found)

    async def _event(self, name: str) -> HistoryEvent | None:
        path = f"{self._layout.recovery_history}/{name}"
        node = await self._node(path)
        return self._read(node, HistoryEvent, path) if node else None

    async def _events(self) -> Sequence[str]:
        """Return the names of the events, the oldest first."""
        names = await self._children(self._layout.recovery_history)
        digits = {name: name[len(EVENT_PREFIX) :] for name in names if name.startswith(EVENT_PREFIX)}
        return sorted((name for name in digits if digits[name].isdecimal()), key=lambda name: int(digits[name]))

    async def _prune_history(self) -> None:
        try:
            for name in (await self._events())[:-HISTORY_MAX]:
                await self._delete(f"{self._layout.recovery_history}/{name}", None)
        except BinderyError as error:  # the next call deletes them
            _log.info("history_not_pruned", extra={"error": str(error)})

    # --- cursors --------------------------------------------------------------------------------------------------

    async def get_cursor(self, name: str) -> dict[str, Any] | None:
        """Return the cursor `name`; None: there is no readable one. Raises BadRequest for an invalid name."""
        path = self._layout.recovery_cursor(name)
        node = await self._node(path)
        return self._read(node, dict[str, Any], path) if node else None

    async def put_cursor(self, name: str, data: Mapping[str, Any], *, guard: Guard | None = None) -> None:
        """Store the cursor `name`. Raises BadRequest for an invalid name, NotLeader."""
        await self._put(self._layout.recovery_cursor(name), json_node.encode(data), guard)

    async def remove_cursor(self, name: str, *, guard: Guard | None = None) -> None:
        """Delete the cursor `name`. Does nothing if there is none."""
        await self._delete(self._layout.recovery_cursor(name), guard)

    # --- workers --------------------------------------------------------------------------------------------------

    async def report(self, report: WorkerReport) -> None:
        """Publish a worker's report in an ephemeral node.

        The report replaces the data of an existing node, even of a former session. After that node was deleted, the
        next report creates a new one.
        """
        path = self._layout.recovery_worker(report.name)
        await self._put(path, json_node.encode(report, leave_out=("name",)), None, ephemeral=True)

    async def reports(self) -> Sequence[WorkerReport]:
        """Return the reports, sorted by name."""
        found: list[WorkerReport] = []
        for name in await self._children(self._layout.recovery_workers):
            path = f"{self._layout.recovery_workers}/{name}"
            node = await self._node(path)
            report = self._read(node, WorkerReport, path, name=name) if node else None
            if report is not None:
                found.append(report)
        return found

    # --- pause ----------------------------------------------------------------------------------------------------

    async def pause_info(self) -> Pause | None:
        """Return the stored reason for the pause; None: there is no readable one."""
        node = await self._node(self._layout.recovery_pause)
        return self._read(node, Pause, self._layout.recovery_pause) if node else None

    async def set_pause_info(self, pause: Pause) -> None:
        """Store the reason for a pause. Does not pause recovery."""
        pause = Pause(pause.by[:TEXT_SIZE_MAX], pause.reason[:TEXT_SIZE_MAX], pause.at_ms)
        await self._put(self._layout.recovery_pause, json_node.encode(pause), None)

    async def clear_pause_info(self) -> None:
        """Delete the reason for the pause. Does nothing if there is none."""
        await self._delete(self._layout.recovery_pause, None)

    # --- helpers --------------------------------------------------------------------------------------------------

    def _read(self, node: Node, kind: type[T], path: str, **known: Any) -> T | None:
        try:
            return json_node.decode(node.data, kind, path=path, **known)
        except Corrupt as error:
            _log.warning("recovery_node_unreadable", extra={"path": path, "error": str(error)})
            return None

    async def _node(self, path: str) -> Node | None:
        try:
            return await self._store.get(path)
        except NoSuchNode:
            return None

    async def _children(self, path: str) -> Sequence[str]:
        try:
            return await self._store.children(path)
        except NoSuchNode:
            return []

    async def _write(self, ops: Sequence[Op], guard: Guard | None) -> Sequence[str | Stat | None]:
        return await (guard.multi(ops) if guard else self._store.multi(ops))

    async def _put(self, path: str, data: bytes, guard: Guard | None, *, ephemeral: bool = False) -> int:
        """Set or create the node at any version; return the new version."""
        create = False
        for _ in range(ATTEMPTS_MAX):
            try:
                [done] = await self._write(
                    [Create(path, data, ephemeral=ephemeral) if create else Set(path, data, None)], guard
                )
                return done.version if isinstance(done, Stat) else 0
            except NoSuchNode:
                if create:
                    await self._make(parent_of(path))
                create = True
            except AlreadyExists:
                create = False
            except MetadataOutcomeUnknown as error:
                await self._settle(path, error)
        raise MetadataUnavailable("the node cannot be written", path=path, attempts=ATTEMPTS_MAX)

    async def _make(self, path: str) -> None:
        try:
            await make_path(self._store, path)
        except MetadataOutcomeUnknown as error:
            await self._settle(path, error)

    async def _delete(self, path: str, guard: Guard | None) -> None:
        for _ in range(ATTEMPTS_MAX):
            try:
                await self._write([Delete(path, None)], guard)
                return
            except NoSuchNode:
                return
            except MetadataOutcomeUnknown as error:
                await self._settle(path, error)
        raise MetadataUnavailable("the responses were lost", path=path, attempts=ATTEMPTS_MAX)

    async def _settle(self, path: str, lost: MetadataOutcomeUnknown) -> None:
        """Make sure that the next read shows the outcome of a write."""
        try:
            await self._store.sync(path)
        except MetadataUnavailable as error:
            raise lost from error
