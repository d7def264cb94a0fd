"""Needed journals: files with acknowledged records that neither LastLogMark nor a link names.

A journal file is named by LastLogMark or by the link at the end of the previous file, so that its loss is detected. If
a start finds no space, neither of them names its new file: the start does not continue the file that a crash left (a
tear is kept), and it cannot advance the mark. An empty file `<hex id>.txn.needed` beside the journal then records that
the journal must exist. It is durable before the journal's first group, and is removed once the mark has reached the
journal.
"""

from collections.abc import Sequence
from typing import Final

from bindery_bookie.storage.io.disk import Disk
from bindery_bookie.storage.journal import journal_format

SUFFIX: Final = ".needed"
"""End of the file's name, after the name of the journal."""


def parse_needed_name(name: str) -> int | None:
    """Return the id of the needed journal; None for any other file."""
    return journal_format.parse_file_name(name.removesuffix(SUFFIX)) if name.endswith(SUFFIX) else None


def needed_journals(disk: Disk, directory: str) -> Sequence[int]:
    """Return journal ids, in no order. Raises OSError."""
    found = (parse_needed_name(name) for name in disk.list_names(directory))
    return [journal_id for journal_id in found if journal_id is not None]


def write_needed(disk: Disk, directory: str, journal_id: int) -> None:
    """Record that a journal is needed; durable on return. The journal must be durable already. Raises OSError."""
    name = f"{journal_format.file_name(journal_id)}{SUFFIX}"
    if name not in disk.list_names(directory):
        disk.create(f"{directory}/{name}").close()
    disk.sync_directory(directory)


def drop_needed(disk: Disk, directory: str, mark_journal_id: int) -> None:
    """Remove the `.needed` files of `mark_journal_id`, which LastLogMark names, and of earlier journals.

    Raises OSError.
    """
    for journal_id in needed_journals(disk, directory):
        if journal_id <= mark_journal_id:
            disk.remove(f"{directory}/{journal_format.file_name(journal_id)}{SUFFIX}")
