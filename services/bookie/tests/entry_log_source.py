"""An entry log to compact, and the index that refers to it. Tests can import this module."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from bindery_bookie.storage import control_records as control
from bindery_bookie.storage.collection.log_usage import usage_of
from bindery_bookie.storage.collection.rewrite import Rewrite
from bindery_bookie.storage.entry_log import entry_log_format as fmt
from bindery_bookie.storage.entry_log.entry_log_format import Located
from bindery_bookie.storage.index.index import Index
from bindery_bookie.storage.index.index_format import LedgerRow, run_rows
from bindery_bookie.storage.io.fault_injection import FaultyDisk
from bindery_bookie.storage.io.kv import MemoryKV
from bindery_simulation.disk import CrashableDisk

PATH = "/d/5.log"
TEMPORARY = "/d/9.log.compacting"
HEADER, RECORD, KEY_RECORD, FENCE_RECORD, LAC_RECORD = 32, 100, 48, 24, 48
"""Sizes in bytes in a log: the file header, a record of `LogSource.put`, and control records."""


def at(offset: int, *, log_id: int = 9) -> int:
    """Return the location of the body of the record that begins at `offset`."""
    return log_id << 32 | offset + 8


class LogSource:
    """Log 5 of order 2 in `/d`, written record by record."""

    def __init__(self, kit: Any) -> None:
        self.kit = kit
        self.disk = CrashableDisk()
        self.faults: Callable[[str, str], OSError | None] = lambda operation, path: None
        self.faulty_disk = FaultyDisk(self.disk, lambda operation, path: self.faults(operation, path))
        self.index = Index(MemoryKV())
        self.data = bytearray(fmt.pack_file_header(5, order=2))
        self.located: dict[int, list[Located]] = {}
        """Ledger id -> the entries that `rewrite` puts into the index."""

    def put(self, ledger_id: int, entry_id: int, *, size: int = RECORD) -> bytes:
        """Append a record of `size` bytes, and return it."""
        body = self.kit.entry(ledger_id, entry_id, bytes([entry_id % 251]) * (size - 40))
        self.located.setdefault(ledger_id, []).append((entry_id, at(len(self.data), log_id=5), len(body)))
        record = fmt.pack_record(body)
        self.data += record
        return record

    def put_many(self, ledger_id: int, entry_ids: Iterable[int], *, size: int = RECORD) -> bytes:
        return b"".join([self.put(ledger_id, entry_id, size=size) for entry_id in entry_ids])

    def row(self, *, is_fenced: bool = False, explicit_lac: bytes | None = None) -> LedgerRow:
        return LedgerRow(self.kit.KEY, is_fenced, -1, 99, explicit_lac)

    def rewrite(
        self,
        live: Sequence[int],
        *,
        rows: Mapping[int, LedgerRow] | None = None,
        deletions: Iterable[int] = (),
        is_exact: bool = True,
        sync_size: int = 2**30,
    ) -> Rewrite:
        """Write log and index, and return the rewrite into log 9. Each live ledger has a row unless `rows` is given."""
        self.index.commit(
            runs=[row for ledger_id, located in self.located.items() for row in run_rows(ledger_id, located)],
            merges={},
            ledgers={ledger_id: self.row() for ledger_id in live} if rows is None else rows,
            deleted=(),
            generation=1,
        )
        self.disk.create(PATH).write_at(self.data, 0)
        self.disk.log.clear()
        return Rewrite(
            self.faulty_disk,
            "/d",
            self.index,
            source=usage_of(5, 2, len(self.data), dict.fromkeys(self.located, 1), [], is_exact=is_exact),
            target_id=9,
            live=live,
            deletions=frozenset(deletions),
            sync_size=sync_size,
        )

    def key_record(self, ledger_id: int) -> bytes:
        return fmt.pack_record(control.pack_master_key(ledger_id, self.kit.KEY))

    def written(self) -> bytes:
        return self.disk.contents(TEMPORARY)
