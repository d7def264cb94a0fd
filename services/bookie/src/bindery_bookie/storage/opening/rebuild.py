"""IndexRebuild: fill an empty index from the entry logs.

Logs are read in the order of the manifest; later records replace earlier ones. If a log is missing or damaged, the
unreadable part is reported in `damage` and the index is partial. Its shard must then be in limbo before the index is
used. Records after the first damage of a log are ignored, because what looks like a record there may be part of a
client's payload (see `entry_log_scan`).

Invariant: the last batch makes the index valid, because only that batch contains the generation. After a crash before
it, the next start rebuilds the index again.
"""

from collections.abc import Callable
from dataclasses import replace

import structlog
from bindery_core.errors import DamagedStorage

from bindery_bookie.storage import control_records as control
from bindery_bookie.storage.corruption.damage import Damage
from bindery_bookie.storage.entry_log.entry_log_format import Located
from bindery_bookie.storage.entry_log.entry_log_scan import EntryLogScanner, LogRecord
from bindery_bookie.storage.entry_log.log_manifest import LogManifest, read_manifest
from bindery_bookie.storage.index.index import Index
from bindery_bookie.storage.index.index_format import LedgerRow
from bindery_bookie.storage.io.disk import Disk
from bindery_bookie.storage.io.errors import StartCancelled
from bindery_bookie.storage.journal.mark import LastLogMark

log = structlog.get_logger(__name__)

_ENTRIES_MAX = 100_000
"""Number of entries collected before they are written to the index."""


class IndexRebuild:
    """One rebuild, run in a worker. Entries that are not in the logs are in the journal after the mark."""

    def __init__(
        self,
        disk: Disk,
        directory: str,
        index: Index,
        mark: LastLogMark,
        *,
        may_be_partial: bool = False,
        before_valid: Callable[["IndexRebuild"], None] = lambda rebuild: None,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        """`may_be_partial`: continue after damage. `before_valid` is called before the last batch; it may raise.

        `is_cancelled` is checked at every record.
        """
        self._disk = disk
        self._directory = directory
        self._index = index
        self._mark = mark
        self._may_be_partial = may_be_partial
        self._before_valid = before_valid
        self._is_cancelled = is_cancelled
        self._scanner = EntryLogScanner(disk, directory)
        self._ledgers: dict[int, LedgerRow] = {}
        self._entries: dict[int, dict[int, Located]] = {}
        self._held = 0
        self._keyless: dict[int, Damage] = {}
        """The first record of each ledger whose key was in no log so far."""
        self.entries_count = 0
        self.damage: list[Damage] = []
        """Damage because of which the index is partial."""

    def run(self) -> None:
        """Fill the index. Raises StartCancelled, and DamagedStorage for damage unless the index may be partial."""
        manifest = self._read_manifest()
        logs = manifest.expected(self._mark.log_id)
        for source, target in manifest.pairs(self._mark.log_id):
            if source in self._scanner.log_ids():
                logs.remove(target)  # the start will treat this index as one that uses the source
        for log_id in logs:
            self._add_log(log_id, manifest)
        for ledger_id, damage in self._keyless.items():
            if not self.damage:  # earlier damage explains the missing key
                self._found(damage)
            # Limbo fences the ledgers that metadata lists. Other ledgers get their key from the first copy, but only
            # if they are fenced.
            self._ledgers[ledger_id] = replace(self._ledgers[ledger_id], is_fenced=True)
        self._before_valid(self)
        self._index.set_switches(manifest.switches)
        self._spill(is_last=True)
        log.warning(
            "index_rebuilt",
            logs=len(logs),
            entries=self.entries_count,
            ledgers=len(self._ledgers),
            damage=len(self.damage),
        )

    def _read_manifest(self) -> LogManifest:
        try:
            return read_manifest(self._disk, self._directory)
        except DamagedStorage as error:
            self._found(Damage(str(error.facts.get("path")), 0, error.message))
            return LogManifest()

    def _found(self, damage: Damage) -> None:
        if not self._may_be_partial:
            raise DamagedStorage(
                f"the index cannot be rebuilt completely from the entry logs: {damage.reason}",
                path=damage.path,
                offset=damage.offset,
            )
        self.damage.append(damage)

    def _add_log(self, log_id: int, manifest: LogManifest) -> None:
        path = self._scanner.path(log_id)
        end = manifest.end(log_id, mark=(self._mark.log_id, self._mark.log_offset))
        try:
            for found in self._scanner.scan(log_id, stop=end.stop, is_sealed=end.is_sealed):
                if self._is_cancelled():
                    raise StartCancelled
                if not isinstance(found, LogRecord):
                    self._found(Damage(found.path, found.offset, found.reason))
                elif found.is_anchored:
                    self._add(found)
                    if self._held >= _ENTRIES_MAX:
                        self._spill(is_last=False)
        except FileNotFoundError:
            self._found(Damage(path, 0, "entry log is missing"))
        except OSError as error:
            self._found(Damage(path, 0, f"entry log cannot be read: {error}"))

    def _add(self, record: LogRecord) -> None:
        ledger_id, entry_id, body = record.ledger_id, record.entry_id, record.body
        row = self._ledgers.get(ledger_id)
        if entry_id == control.MASTER_KEY:
            self._keyless.pop(ledger_id, None)
            if row is None or not row.master_key:  # a replay may have written it again
                key = control.unpack_sized(body)
                self._ledgers[ledger_id] = (
                    LedgerRow(key, False, -1, -1, None) if row is None else replace(row, master_key=key)
                )
            return
        if entry_id == control.DELETED:
            self._spill(is_last=False)
            self._ledgers.pop(ledger_id, None)
            self._keyless.pop(ledger_id, None)
            self._index.commit(runs=[], merges={}, ledgers={}, deleted=[ledger_id], generation=None, sync=False)
            return
        if row is None:
            # Either the ledger was deleted and its `deleted` record follows, or its key was lost. A ledger without key
            # is fenced at the end, and gets its key from metadata or the first client.
            row = LedgerRow(b"", False, -1, -1, None)
            self._keyless[ledger_id] = Damage(
                self._scanner.path(record.log_id), record.offset, "no log has the key of the ledger", ledger_id
            )
        if entry_id == control.FENCE:
            row = replace(row, is_fenced=True)
        elif entry_id == control.EXPLICIT_LAC:
            packet = control.unpack_sized(body)
            row = replace(row, explicit_lac=packet, lac=max(row.lac, control.lac_of_packet(packet)))
        elif entry_id >= 0:
            _, _, lac = control.unpack_ids_and_lac(body)
            if lac > row.lac or entry_id > row.last_entry_id:
                row = replace(row, lac=max(row.lac, lac), last_entry_id=max(row.last_entry_id, entry_id))
            self._entries.setdefault(ledger_id, {})[entry_id] = (entry_id, record.location, len(body))
            self._held += 1
            self.entries_count += 1
        self._ledgers[ledger_id] = row

    def _spill(self, *, is_last: bool) -> None:
        """Write the collected entries to the index. The last batch adds ledger rows and the generation."""
        merges = {ledger_id: [held[key] for key in sorted(held)] for ledger_id, held in self._entries.items()}
        self._index.commit(
            runs=[],
            merges=merges,
            ledgers=self._ledgers if is_last else {},
            deleted=(),
            generation=self._mark.generation if is_last else None,
            sync=is_last,
        )
        self._entries, self._held = {}, 0
