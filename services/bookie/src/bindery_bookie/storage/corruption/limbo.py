"""Limbo: the state of a shard that lost data, or may have lost data. Such a shard must not answer "no such entry".

The marker is the file `LIMBO` in a shard's ledger directory (`current`). It is durable before any file is opened or
created there, and is removed when the last ledger was repaired from other bookies.

| phase     | ledgers in limbo                       | behaviour of the shard                                          |
|-----------|----------------------------------------|-----------------------------------------------------------------|
| listing   | all: any ledger may be incomplete      | does not serve; lists its ledgers from metadata                 |
| repairing | those with the limbo flag in their row | serves; answers "unknown" for missing entries, and refills them |

The file is JSON, at most SIZE_MAX bytes, replaced atomically (new file synced, renamed, directory synced):

| field    | type   | meaning                                            |
|----------|--------|----------------------------------------------------|
| version  | int    | 1                                                  |
| reason   | string | reason, for the operator                           |
| since_ms | int    | start of the limbo, ms since 1970                  |
| phase    | string | `listing` or `repairing`                           |

An unreadable marker counts as one in phase listing, which is always safe.
Source: BookKeeper's data integrity check (`datainteg`), which has only a flag and refuses fewer answers.
"""

import json
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Final

import structlog

from bindery_bookie.storage.io.disk import Disk

log = structlog.get_logger(__name__)

FILE_NAME: Final = "LIMBO"
_TEMPORARY_NAME: Final = "LIMBO.new"
VERSION: Final = 1
SIZE_MAX: Final = 16 * 1024
"""Maximum size of the file in bytes."""
_REASON_SIZE_MAX: Final = 2000
PROBLEMS_MAX: Final = 1000
"""Maximum number of ledgers whose problem is kept."""


class LimboPhase(StrEnum):
    """The phase of a shard in limbo, as in the table of the module."""

    LISTING = "listing"
    REPAIRING = "repairing"


@dataclass(frozen=True, slots=True)
class LimboMarker:
    """The content of the file."""

    reason: str
    since_ms: int
    phase: LimboPhase = LimboPhase.LISTING

    def pack(self) -> bytes:
        fields = {"version": VERSION, "reason": self.reason, "since_ms": self.since_ms, "phase": str(self.phase)}
        return json.dumps(fields, sort_keys=True).encode() + b"\n"

    @classmethod
    def unpack(cls, data: bytes) -> "LimboMarker":
        """Return the marker; one in phase listing if the data cannot be read. Never raises."""
        try:
            fields = json.loads(data)
            if fields["version"] == VERSION:
                return cls(str(fields["reason"]), int(fields["since_ms"]), LimboPhase(fields["phase"]))
        except (ValueError, KeyError, TypeError):
            pass
        return cls("the LIMBO marker cannot be read", 0)


@dataclass(slots=True)
class LimboState:
    """The limbo of a shard of a running bookie, for health, metrics and the admin API. Event loop only."""

    reason: str
    since_ms: int
    phase: LimboPhase
    left: int = 0
    """Number of ledgers in limbo; not final in phase listing."""
    listed: int = 0
    """Number of ledgers checked so far in phase listing."""
    problems: dict[int, str] = field(default_factory=dict)
    """Ledger id -> why its last repair failed. At most PROBLEMS_MAX items."""

    @classmethod
    def of_marker(cls, marker: LimboMarker) -> "LimboState":
        return cls(marker.reason, marker.since_ms, marker.phase)

    @property
    def is_listing(self) -> bool:
        return self.phase is LimboPhase.LISTING

    def set_problem(self, ledger_id: int, reason: str | None) -> None:
        """Record why `ledger_id` could not be repaired; None: remove the record."""
        if reason is None:
            self.problems.pop(ledger_id, None)
        elif ledger_id in self.problems or len(self.problems) < PROBLEMS_MAX:
            self.problems[ledger_id] = reason


@dataclass(frozen=True, slots=True)
class LimboLedger:
    """A ledger to be put into limbo."""

    ledger_id: int
    master_key: bytes
    """Empty if metadata does not have it: the key of the first client is then used."""


def read_marker(disk: Disk, directory: str) -> LimboMarker | None:
    """Return the marker in `directory` (a shard's `current`); None if there is none. Raises OSError."""
    try:
        file = disk.open_read(f"{directory}/{FILE_NAME}")
    except FileNotFoundError:
        return None
    try:
        return LimboMarker.unpack(file.read_at(0, SIZE_MAX))
    finally:
        file.close()


def write_marker(disk: Disk, directory: str, reason: str, now_ms: int) -> LimboMarker:
    """Put the shard of `directory` (its `current`, created if missing) into phase listing; durable on return.

    If there is a marker, its start time and its reason are kept, and `reason` is appended. Raises OSError.
    """
    disk.make_directories(directory)
    before = read_marker(disk, directory)
    marker = LimboMarker(reason[:_REASON_SIZE_MAX], now_ms)
    if before is not None:
        reasons = before.reason if reason in before.reason else f"{before.reason}; {reason}"
        marker = LimboMarker(reasons[:_REASON_SIZE_MAX], before.since_ms or now_ms)
    _replace(disk, directory, marker)
    log.warning("limbo_entered", directory=directory, reason=marker.reason)
    return marker


def set_phase(disk: Disk, directory: str, phase: LimboPhase) -> None:
    """Change the phase of the existing marker; durable on return."""
    marker = read_marker(disk, directory)
    assert marker is not None
    if marker.phase is not phase:
        _replace(disk, directory, replace(marker, phase=phase))


def remove_marker(disk: Disk, directory: str) -> None:
    """Remove the marker, which ends the limbo; durable on return."""
    if FILE_NAME in disk.list_names(directory):
        disk.remove(f"{directory}/{FILE_NAME}")
        disk.sync_directory(directory)


def _replace(disk: Disk, directory: str, marker: LimboMarker) -> None:
    if _TEMPORARY_NAME in disk.list_names(directory):
        disk.remove(f"{directory}/{_TEMPORARY_NAME}")
    file = disk.create(f"{directory}/{_TEMPORARY_NAME}")
    try:
        file.write_at(marker.pack(), 0)
        file.sync()
    finally:
        file.close()
    disk.rename(f"{directory}/{_TEMPORARY_NAME}", f"{directory}/{FILE_NAME}")
    disk.sync_directory(directory)
