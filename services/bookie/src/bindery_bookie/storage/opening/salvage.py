"""Salvage: make a shard start although it has files that a start refuses and that cannot be restored.

The shard enters limbo. It then never answers "no such entry", and all its entries are fetched from the other bookies.
After that the damaged files are moved or copied to `quarantine`, beside the ledger directory's `current`. No file is
deleted.

| problem                                         | action                                                            |
|-------------------------------------------------|-------------------------------------------------------------------|
| LastLogMark is damaged, or older than the index | moved to quarantine; the start creates one at the end of all logs |
| LastLogMark is missing, but there is data       | limbo only                                                        |
| a journal is damaged in the middle, or short    | copied to quarantine and kept; the start replays readable groups  |
| a journal is missing                            | limbo only                                                        |

Entry logs and the index are not changed, because a start tolerates damage in them. The bookie must be stopped.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from bindery_core.errors import DamagedStorage

from bindery_bookie.storage.corruption.limbo import write_marker
from bindery_bookie.storage.index.index import Index
from bindery_bookie.storage.io.disk import Disk
from bindery_bookie.storage.io.kv import OpenKV
from bindery_bookie.storage.journal import journal_files
from bindery_bookie.storage.journal.mark import FILE_NAME as MARK
from bindery_bookie.storage.journal.mark import LastLogMark, read_mark
from bindery_bookie.storage.opening import opening

QUARANTINE: Final = "quarantine"
"""Name of the directory for damaged files."""
_COPY_SIZE: Final = 1024 * 1024
_PROBLEMS_MAX: Final = 1000


@dataclass(frozen=True, slots=True)
class SalvageStep:
    """One problem, and the action that is (or would be) taken."""

    path: str
    offset: int
    problem: str
    moved_to: str | None = None
    """Path to which the file is moved or copied; None: the file is not changed."""
    is_copy: bool = False
    """Whether the file is copied to `moved_to` and kept."""


def salvage(
    disk: Disk,
    *,
    journal_directory: str,
    ledger_directory: str,
    now_ms: int,
    apply: bool = False,
    open_kv: OpenKV | None = None,
) -> Sequence[SalvageStep]:
    """Return the problems that prevent a shard from starting; empty if there are none. With `apply`, fix them.

    The directories are the shard's `current`. `open_kv`: compare the mark with the generation of the index; this writes
    to the index's files. Raises OSError, BadVersion (files of a newer version are not damaged).
    """
    steps = _find(disk, journal_directory, ledger_directory, open_kv)
    if steps and apply:
        write_marker(disk, ledger_directory, f"salvage: {steps[0].problem} ({steps[0].path})", now_ms)
        for step in steps:
            if step.moved_to is not None:
                disk.make_directories(step.moved_to.rpartition("/")[0])
                _put_aside(disk, step.path, step.moved_to, is_copy=step.is_copy)
    return steps


def _find(disk: Disk, journals: str, ledgers: str, open_kv: OpenKV | None) -> list[SalvageStep]:
    path = f"{ledgers}/{MARK}"
    try:
        mark = read_mark(disk, ledgers)
    except DamagedStorage as error:
        return [_step(disk, ledgers, path, 0, error.message)]
    if mark is None:
        return _missing_mark(disk, journals, ledgers, path)
    if open_kv is not None and _is_older(mark, open_kv, f"{ledgers}/index"):
        return [_step(disk, ledgers, path, 0, "LastLogMark is older than the index")]
    return _bad_journals(disk, journals, ledgers, mark)


def _missing_mark(disk: Disk, journals: str, ledgers: str, path: str) -> list[SalvageStep]:
    try:
        opening.check_new(disk, journals, ledgers, None)
    except DamagedStorage as error:
        return [SalvageStep(path, 0, error.message.partition(";")[0])]
    return []


def _is_older(mark: LastLogMark, open_kv: OpenKV, path: str) -> bool:
    try:
        kv = open_kv(path)
    except DamagedStorage:
        return False  # the start rebuilds the index
    try:
        return Index(kv).generation() > mark.generation + 1
    except DamagedStorage:
        return False
    finally:
        kv.close()


def _bad_journals(disk: Disk, journals: str, ledgers: str, mark: LastLogMark) -> list[SalvageStep]:
    if not any(found >= mark.journal.journal_id for found in journal_files.list_journals(disk, journals)):
        return []  # the start enters limbo by itself
    try:
        for _ in journal_files.replay_groups(disk, journals, mark.journal):
            pass
    except DamagedStorage as error:
        path, offset = str(error.facts["path"]), int(error.facts.get("offset", 0))
        if path.rpartition("/")[2] not in disk.list_names(journals):
            return [SalvageStep(path, 0, error.message)]
        return [_step(disk, ledgers, path, offset, error.message, is_copy=True)]
    return []


def _step(disk: Disk, ledgers: str, path: str, offset: int, problem: str, *, is_copy: bool = False) -> SalvageStep:
    directory = f"{ledgers.rpartition('/')[0]}/{QUARANTINE}"
    existing = set(disk.list_names(directory))
    name = path.rpartition("/")[2]
    number = next(n for n in range(_PROBLEMS_MAX) if _numbered(name, n) not in existing)
    return SalvageStep(path, offset, problem, f"{directory}/{_numbered(name, number)}", is_copy)


def _numbered(name: str, number: int) -> str:
    return f"{name}.{number}" if number else name


def _put_aside(disk: Disk, path: str, target: str, *, is_copy: bool) -> None:
    if not is_copy:
        disk.rename(path, target)
        disk.sync_directory(target.rpartition("/")[0])
        disk.sync_directory(path.rpartition("/")[0])
        return
    source = disk.open_read(path)
    try:
        copy = disk.create(target)
        try:
            offset = 0
            while chunk := source.read_at(offset, _COPY_SIZE):
                copy.write_at(chunk, offset)
                offset += len(chunk)
            copy.sync()
        finally:
            copy.close()
    finally:
        source.close()
    disk.sync_directory(target.rpartition("/")[0])
