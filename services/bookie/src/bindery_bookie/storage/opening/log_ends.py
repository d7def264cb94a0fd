"""Log ends: which entry logs were closed, as far as the files themselves tell; `log_manifest` says what for.

Everything here blocks: for a worker.
"""

from bindery_core.errors import DamagedStorage

from bindery_bookie.storage.entry_log import entry_log_format as fmt
from bindery_bookie.storage.entry_log.entry_log import list_logs
from bindery_bookie.storage.entry_log.log_manifest import LogManifest
from bindery_bookie.storage.io.disk import Disk


def open_ended(disk: Disk, directory: str, manifest: LogManifest, mark_log_id: int) -> dict[int, int]:
    """Sizes of the logs without a trailer, where the list does not name them: the directory is an older version's, or
    list or mark were lost. One that was cut, or whose end cannot be read, is taken for one of them. Raises OSError."""
    there = set(list_logs(disk, directory)).intersection(manifest.expected(mark_log_id))
    found: dict[int, int] = {}
    for log_id in sorted(there - manifest.compacted.keys() - {mark_log_id}):
        if not is_sealed(disk, directory, log_id):
            file = disk.open_read(f"{directory}/{fmt.file_name(log_id)}")
            found[log_id] = file.size()
            file.close()
    return found


def is_sealed(disk: Disk, directory: str, log_id: int) -> bool:
    """Whether the log is there and ends with ledgers map and trailer, beyond doubt. Raises OSError if it cannot be
    opened.

    Where there is doubt, such as a bad sector, its size is noted: an end is known as well by that.
    """
    path = f"{directory}/{fmt.file_name(log_id)}"
    try:
        file = disk.open_read(path)
    except FileNotFoundError:
        return False
    try:
        return fmt.read_ledgers_map(file, path=path) is not None
    except (DamagedStorage, OSError):
        return False
    finally:
        file.close()
