"""Salvage: what an operator does about files that a start refuses and that cannot be restored.

The shard goes into limbo, so that nothing is denied and everything is fetched from the other bookies; then what stands
in the way is put aside in `quarantine`, beside the ledger directory's `current`. Nothing is deleted.

| problem                                        | what is done                                                       |
|------------------------------------------------|--------------------------------------------------------------------|
| LastLogMark damaged, or older than the index   | moved to quarantine; the start makes another behind all logs       |
| LastLogMark missing beside data                | limbo is enough                                                    |
| a journal damaged in the middle, or cut        | copied to quarantine, and left: the start replays what can be read |
| a journal missing                              | limbo is enough                                                    |

Entry logs and the index are not touched: a start serves past damage in them. The bookie must not run meanwhile.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from bindery_core.errors import DamagedStorage

from bindery_bookie.storage.corruption.limbo import write_marker
from bindery_bookie.storage.entry_log.entry_log import list_logs
from bindery_bookie.storage.index.index import Index
from bindery_bookie.storage.io.disk import Disk
from bindery_bookie.storage.io.kv import OpenKV
from bindery_bookie.storage.journal.mark import FILE_NAME as MARK
from bindery_bookie.storage.journal.mark import LastLogMark, read_mark
from bindery_bookie.storage.opening import opening

QUARANTINE: Final = "quarantine"
_COPY_SIZE: Final = 1024 * 1024
_PROBLEMS_MAX: Final = 1000


@dataclass(frozen=True, slots=True)
class SalvageStep:
    """One problem, and what is (or would be) done about it."""

    path: str
    offset: int
    problem: str
    moved_to: str | None = None
    """Where the file goes, or its copy; None: it stays as it is."""
    is_copy: bool = False


def salvage(
    disk: Disk,
    *,
    journal_directory: str,
    ledger_directory: str,
    now_ms: int,
    apply: bool = False,
    open_kv: OpenKV | None = None,
) -> Sequence[SalvageStep]:
    """What keeps one shard from starting, and with `apply` its remedy; nothing is changed without. Empty: it starts.

    The directories are the shard's `current`. `open_kv` lets the index be asked how old the mark is (which writes to
    the index's own files). Raises OSError, BadVersion (files of a newer version are not damaged).
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
        if list_logs(disk, ledgers) or opening.list_journals(disk, journals):
            return _missing_mark(disk, journals, ledgers, path)
        return []
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
        return False  # then the start rebuilds it
    try:
        return Index(kv).generation() > mark.generation + 1
    except DamagedStorage:
        return False
    finally:
        kv.close()


def _bad_journals(disk: Disk, journals: str, ledgers: str, mark: LastLogMark) -> list[SalvageStep]:
    if not any(found >= mark.journal.journal_id for found in opening.list_journals(disk, journals)):
        return []  # the start finds that out by itself, and goes into limbo
    try:
        for _ in opening.replay_groups(disk, journals, mark.journal):
            pass
    except DamagedStorage as error:
        path, offset = str(error.facts["path"]), int(error.facts.get("offset", 0))
        if path.rpartition("/")[2] not in disk.list_names(journals):
            return [SalvageStep(path, 0, error.message)]
        return [_step(disk, ledgers, path, offset, error.message, is_copy=True)]
    return []


def _step(disk: Disk, ledgers: str, path: str, offset: int, problem: str, *, is_copy: bool = False) -> SalvageStep:
    directory = f"{ledgers.rpartition('/')[0]}/{QUARANTINE}"
    there = set(disk.list_names(directory))
    name = path.rpartition("/")[2]
    number = next(n for n in range(_PROBLEMS_MAX) if _numbered(name, n) not in there)
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
