"""Needed journals: files that hold acknowledged records while neither LastLogMark nor a link names them.

A journal file is named by the link at the end of the one before it, or by LastLogMark, so that its loss shows. A start
that finds no space has neither: it does not continue the file that a crash left (a tear stays where it was), and the
mark stays behind. Then an empty file `<hex id>.txn.needed` beside the journal, durable before its first group, says
that the journal must be there. It goes when the mark has come as far.
"""

from collections.abc import Sequence
from typing import Final

from bindery_bookie.storage.io.disk import Disk
from bindery_bookie.storage.journal import journal_format

SUFFIX: Final = ".needed"


def parse_needed_name(name: str) -> int | None:
    """The id of the journal that is needed; None for any other file."""
    return journal_format.parse_file_name(name.removesuffix(SUFFIX)) if name.endswith(SUFFIX) else None


def needed_journals(disk: Disk, directory: str) -> Sequence[int]:
    """Journal ids, in no order. Raises OSError."""
    found = (parse_needed_name(name) for name in disk.list_names(directory))
    return [journal_id for journal_id in found if journal_id is not None]


def write_needed(disk: Disk, directory: str, journal_id: int) -> None:
    """Durable on return, also where one was there. The journal must be durable already. Raises OSError."""
    name = f"{journal_format.file_name(journal_id)}{SUFFIX}"
    if name not in disk.list_names(directory):
        disk.create(f"{directory}/{name}").close()
    disk.sync_directory(directory)


def drop_needed(disk: Disk, directory: str, mark_journal_id: int) -> None:
    """LastLogMark names `mark_journal_id` itself, and needs none before it. Raises OSError."""
    for journal_id in needed_journals(disk, directory):
        if journal_id <= mark_journal_id:
            disk.remove(f"{directory}/{journal_format.file_name(journal_id)}{SUFFIX}")
