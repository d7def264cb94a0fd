"""What garbage collection knows and says: per entry log, and of itself. Plain values for the HTTP API and the CLI.

`GarbageCollection` is what a caller may ask of it; `compaction.Compactor` does it.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from bindery_core.errors import NotThere

LEDGERS_SHOWN_MAX: Final = 1000
"""Ledgers of either kind that one explanation lists."""


class NoSuchEntryLog(NotThere):
    code = "no_such_log"


class LogState(StrEnum):
    OPEN = "open"
    """Being written by flushes, or holding what the last flush has not finished."""
    SEALED = "sealed"
    """Written by flushes and closed."""
    COMPACTED = "compacted"
    """Written by compaction."""
    DAMAGED = "damaged"
    """Live entries in it cannot be read; kept until they are healed from other bookies or their ledger is gone."""


class CollectionKind(StrEnum):
    REMOVAL = "removal"
    """Logs in which nothing is alive."""
    MINOR = "minor"
    MAJOR = "major"


@dataclass(frozen=True, slots=True)
class LogInfo:
    """One entry log at the last look."""

    log_id: int
    file: str
    state: LogState
    size: int
    """Bytes of the file."""
    live_bytes: int
    """Bytes of records of ledgers that exist here, and of what must be kept for an index rebuild."""
    live_ratio: float
    """`live_bytes` of `size`: 0..1."""
    live_ledgers: int
    dead_ledgers: int
    order: int
    """Where it stands when the index is rebuilt: its id, or that of the log it came from."""
    looked_at_ms: int
    """Wall clock ms of 1970; 0: never."""


@dataclass(frozen=True, slots=True)
class LogExplanation:
    """What will happen to a log, and why."""

    log: LogInfo
    live_ledger_ids: Sequence[int]
    """Ascending, at most LEDGERS_SHOWN_MAX."""
    dead_ledger_ids: Sequence[int]
    next_kind: CollectionKind | None
    """What takes it, as things stand; None: nothing."""
    due_in_s: float | None
    """Seconds until then; None: nothing takes it."""
    sentences: Sequence[str]
    """For people: why it is taken or left, most important first."""


@dataclass(frozen=True, slots=True)
class GarbageState:
    """What garbage collection of one shard does now and did last. `*_ms`: wall clock ms of 1970, 0: never."""

    running: CollectionKind | None
    log_id: int | None
    """The log being rewritten or removed."""
    bytes_done: int
    """Of the log being rewritten."""
    bytes_total: int
    minor_suspended: bool
    major_suspended: bool
    last_run_ms: int
    last_minor_ms: int
    last_major_ms: int
    next_run_in_s: float
    minor_due_in_s: float | None
    """None: switched off or suspended."""
    major_due_in_s: float | None
    last_error: str
    """Why the last run left something undone; empty: it did not."""
    logs: int
    log_bytes: int
    live_bytes: int


@dataclass(frozen=True, slots=True)
class CollectionResult:
    """What one run did."""

    removed: Sequence[int] = ()
    """Logs removed because nothing in them was alive."""
    rewritten: Sequence[int] = ()
    """Logs whose live part moved to a new log."""
    left: Sequence[tuple[int, str]] = ()
    """(log id, why) of those that were due and could not be taken."""
    copied_bytes: int = 0
    reclaimed_bytes: int = 0
    """Bytes of the old logs less those of the new ones."""


class GarbageCollection(Protocol):
    """One shard's. Event loop only."""

    def state(self) -> GarbageState: ...

    def logs(self) -> Sequence[LogInfo]:
        """As of the last look, ascending by id. `look` makes a new one."""
        ...

    async def look(self) -> Sequence[LogInfo]:
        """Look at all logs now. Raises OSError."""
        ...

    async def explain(self, log_id: int) -> LogExplanation:
        """Looks first. Raises NoSuchEntryLog, OSError."""
        ...

    def request(self, *, minor: bool = False, major: bool = False, force: bool = False) -> None:
        """Have a run soon, in the background; with `minor` or `major` as if its interval were over.

        `force`: also when suspended, and the open log is closed first if it is sparse.
        """
        ...

    async def run(self, *, minor: bool = False, major: bool = False, force: bool = False) -> CollectionResult:
        """As `request`, and wait for it. Never raises for what a disk can do: see `CollectionResult.left`."""
        ...

    def suspend(self, *, minor: bool = False, major: bool = False) -> None:
        """Start no compaction of that kind; one under way ends with its log. Logs without live ledgers still go."""
        ...

    def resume(self, *, minor: bool = False, major: bool = False) -> None: ...
