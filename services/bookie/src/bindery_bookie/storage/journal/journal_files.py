"""Read the journal files of a directory in order.

`replay_groups` reads an undamaged journal and raises DamagedStorage for anything that a crash does not explain.
`readable_groups` reads what is left of a damaged journal.
"""

from collections.abc import Iterator

import structlog
from bindery_core.errors import DamagedStorage

from bindery_bookie.storage.io.disk import Disk
from bindery_bookie.storage.journal import journal_format
from bindery_bookie.storage.journal.journal_format import Group, JournalPosition
from bindery_bookie.storage.journal.journal_needed import needed_journals
from bindery_bookie.storage.journal.mark import LastLogMark

log = structlog.get_logger(__name__)


def list_journals(disk: Disk, directory: str) -> list[int]:
    """Return the journal ids, ascending."""
    found = (journal_format.parse_file_name(name) for name in disk.list_names(directory))
    return sorted(journal_id for journal_id in found if journal_id is not None)


def journals_size(disk: Disk, directory: str, mark: LastLogMark) -> int:
    """Return the size in bytes of the journal of `mark` and all later ones, including allocated, unwritten bytes."""
    total = 0
    for journal_id in list_journals(disk, directory):
        if journal_id >= mark.journal.journal_id:
            file = disk.open_read(f"{directory}/{journal_format.file_name(journal_id)}")
            total += file.size()
            file.close()
    return total


def replay_groups(disk: Disk, directory: str, start: JournalPosition) -> Iterator[tuple[int, Group]]:
    """Yield (journal id, group) for all groups from `start` on, in order. Raises DamagedStorage with path and offset.

    Ends at a tear (see `journal_format`), and raises if any group follows it.
    """
    journal_ids = [found for found in list_journals(disk, directory) if found >= start.journal_id]
    if not journal_ids or journal_ids[0] != start.journal_id:
        path = f"{directory}/{journal_format.file_name(start.journal_id)}"
        raise DamagedStorage("journal is missing", path=path, offset=start.offset)
    sequence = start.sequence
    linked = start.journal_id
    """The last file that must exist and be whole."""
    needed = {found for found in needed_journals(disk, directory) if found > start.journal_id}
    for expected, journal_id in enumerate(journal_ids, start=start.journal_id):
        path = f"{directory}/{journal_format.file_name(journal_id)}"
        if journal_id != expected:
            raise DamagedStorage(
                "journal is missing", path=f"{directory}/{journal_format.file_name(expected)}", offset=0
            )
        file = disk.open_read(path)
        try:
            offset = start.offset if journal_id == start.journal_id else journal_format.HEADER_SIZE
            must_be_whole = (
                journal_id <= linked
                or journal_id in needed
                or journal_format.find_group(file, journal_id=journal_id, offset=journal_format.HEADER_SIZE) is not None
            )
            if not must_be_whole:
                continue  # the crash was during its creation, or before its first group
            if not journal_format.is_file_header_valid(file, journal_id=journal_id):
                raise DamagedStorage("journal header is damaged", path=path, offset=0)
            journal_format.check_size(file, path=path)
            # A tear in an earlier file is accepted if no group follows: the sequence of such a group would not match.
            for group in journal_format.read_groups(
                file, path=path, journal_id=journal_id, offset=offset, sequence=sequence
            ):
                yield journal_id, group
                sequence = group.sequence + 1
                linked = max(linked, journal_format.following(group) or 0)
        finally:
            file.close()
    if (last := max((linked, *needed))) > journal_ids[-1]:
        raise DamagedStorage("journal is missing", path=f"{directory}/{journal_format.file_name(last)}", offset=0)


def readable_groups(disk: Disk, directory: str, start: JournalPosition) -> Iterator[tuple[int, Group]]:
    """Yield, as `replay_groups` does, every readable group of a damaged journal from `start` on.

    Groups are in order, but some may be missing in between. Only for a shard in limbo, which never answers
    "no such entry".
    """
    sequence = start.sequence
    for journal_id in list_journals(disk, directory):
        if journal_id < start.journal_id:
            continue
        path = f"{directory}/{journal_format.file_name(journal_id)}"
        file = disk.open_read(path)
        try:
            offset = start.offset if journal_id == start.journal_id else journal_format.HEADER_SIZE
            while (begin := journal_format.find_group(file, journal_id=journal_id, offset=offset)) is not None:
                offset = begin
                found = journal_format.sequence_at(file, journal_id=journal_id, offset=offset)
                assert found is not None
                try:
                    for group in journal_format.read_groups(
                        file, path=path, journal_id=journal_id, offset=offset, sequence=found
                    ):
                        offset = group.offset + group.size
                        found = group.sequence + 1
                        if group.sequence >= sequence:
                            sequence = found
                            yield journal_id, group
                except DamagedStorage as error:
                    log.error("journal_part_skipped", error=str(error))
                if offset == begin:  # the group at `begin` is the damaged one
                    offset += journal_format.SECTOR_SIZE
        finally:
            file.close()
