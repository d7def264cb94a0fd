"""The interface of garbage collection, and the values that it returns to the HTTP API and the command line.

`GarbageCollection` is the interface; `compaction.Compactor` implements it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from bindery_core.errors import NotThere

LEDGERS_SHOWN_MAX: Final = 1000
"""Maximum number of live ledgers, and of dead ledgers, in one explanation."""


class NoSuchEntryLog(NotThere):
    """The shard has no entry log with this id."""

    code = "no_such_log"


class LogState(StrEnum):
    """The state of an entry log."""

    OPEN = "open"
    """Being written by flushes, or left by an unfinished flush."""
    SEALED = "sealed"
    """Written by flushes and closed."""
    COMPACTED = "compacted"
    """Written by compaction."""
    DAMAGED = "damaged"
    """Live entries cannot be read. Kept until they are repaired from other bookies or their ledgers are deleted."""


class CollectionKind(StrEnum):
    """A kind of garbage collection."""

    REMOVAL = "removal"
    """Removal of logs without live entries."""
    MINOR = "minor"
    """Compaction of logs with a live ratio below `minor_compaction_threshold`."""
    MAJOR = "major"
    """Compaction of logs with a live ratio below `major_compaction_threshold`."""


@dataclass(frozen=True, slots=True)
class LogInfo:
    """One entry log at the last refresh."""

    log_id: int
    file: str
    state: LogState
    size: int
    """Size of the file in bytes."""
    live_bytes: int
    """Bytes of records of ledgers that are stored here, and of records needed for an index rebuild."""
    live_ratio: float
    """`live_bytes` / `size`: 0..1."""
    live_ledgers: int
    dead_ledgers: int
    order: int
    """Position in an index rebuild: its id, or the order of the log that it replaced."""
    looked_at_ms: int
    """Time of the refresh in ms since 1970; 0: never."""


@dataclass(frozen=True, slots=True)
class LogExplanation:
    """The next action on a log, and the reason."""

    log: LogInfo
    live_ledger_ids: Sequence[int]
    """Ascending, at most LEDGERS_SHOWN_MAX."""
    dead_ledger_ids: Sequence[int]
    next_kind: CollectionKind | None
    """The kind of collection that will remove or rewrite the log; None if no collection will."""
    due_in_s: float | None
    """Seconds until that collection; None if `next_kind` is None."""
    sentences: Sequence[str]
    """The reasons, for operators, the most important one first."""


@dataclass(frozen=True, slots=True)
class GarbageState:
    """Current and last activity of one shard's garbage collection. `*_ms`: ms since 1970; 0: never."""

    running: CollectionKind | None
    log_id: int | None
    """The log that is being rewritten or removed."""
    bytes_done: int
    """Bytes copied of the log that is being rewritten."""
    bytes_total: int
    minor_suspended: bool
    major_suspended: bool
    last_run_ms: int
    last_minor_ms: int
    last_major_ms: int
    next_run_in_s: float
    minor_due_in_s: float | None
    """None: disabled or suspended."""
    major_due_in_s: float | None
    last_error: str
    """Why the last run could not complete; empty if it did."""
    logs: int
    log_bytes: int
    live_bytes: int
    dead_bytes: int
    dead_bytes_allowed: int | None
    """Dead bytes above which compaction begins before its interval is over; None: it does not."""


@dataclass(frozen=True, slots=True)
class CollectionResult:
    """The result of one run."""

    removed: Sequence[int] = ()
    """Logs removed because they had no live entries."""
    rewritten: Sequence[int] = ()
    """Logs whose live entries were copied to a new log."""
    left: Sequence[tuple[int, str]] = ()
    """(log id, reason) of logs that were due but could not be removed or rewritten."""
    copied_bytes: int = 0
    reclaimed_bytes: int = 0
    """Bytes of the old logs minus those of the new logs."""


class GarbageCollection(Protocol):
    """Garbage collection of one shard. Event loop only."""

    def state(self) -> GarbageState: ...

    def logs(self) -> Sequence[LogInfo]:
        """Return the logs as of the last refresh, ascending by id."""
        ...

    async def refresh(self) -> Sequence[LogInfo]:
        """Determine the usage of all logs, and return them. Raises OSError."""
        ...

    async def explain(self, log_id: int) -> LogExplanation:
        """Refresh, and explain what will happen to a log. Raises NoSuchEntryLog, OSError."""
        ...

    def request(self, *, minor: bool = False, major: bool = False, force: bool = False) -> None:
        """Start a run soon, in the background. `minor`, `major`: include this compaction before its interval is over.
        Every run includes the compaction that dead bytes require (`space_policy`).

        `force`: include a compaction even if it is suspended, and first close a sparse open log, whatever its size.
        """
        ...

    async def run(self, *, minor: bool = False, major: bool = False, force: bool = False) -> CollectionResult:
        """Request a run, wait for it, and return its result. Disk errors are in `CollectionResult.left`, not raised."""
        ...

    def suspend(self, *, minor: bool = False, major: bool = False) -> None:
        """Start no compaction of these kinds; a running one ends with its current log. Dead logs are still removed."""
        ...

    def resume(self, *, minor: bool = False, major: bool = False) -> None: ...
