"""IndexRebuild: fills an empty index from the entry logs.

Logs are read in the order of the manifest: later records win. A log that is missing or damaged costs what cannot be
read of it, and is told in `damage`; then the index is partial, and its shard must be in limbo before anybody trusts it.
Behind the first damage of a log nothing is believed: what looks like a record there may be part of a client's payload
(see `entry_log_scan`).

Invariant: the index becomes valid with the last batch, which alone holds its generation; a crash before it leaves an
index that the next start rebuilds again.
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
from bindery_bookie.storage.io.errors import StartGivenUp
from bindery_bookie.storage.journal.mark import LastLogMark

log = structlog.get_logger(__name__)

_ENTRIES_MAX = 100_000
"""Entries held before they go to the index."""


class IndexRebuild:
    """Runs once, in a worker. What the logs do not say, the journal behind the mark does."""

    def __init__(
        self,
        disk: Disk,
        directory: str,
        index: Index,
        mark: LastLogMark,
        *,
        may_be_partial: bool = False,
        before_valid: Callable[["IndexRebuild"], None] = lambda rebuild: None,
        is_given_up: Callable[[], bool] = lambda: False,
    ) -> None:
        """`may_be_partial`: go on past damage. `before_valid` is called before the last batch; it may raise.
        `is_given_up` is asked at every record."""
        self._disk = disk
        self._directory = directory
        self._index = index
        self._mark = mark
        self._may_be_partial = may_be_partial
        self._before_valid = before_valid
        self._is_given_up = is_given_up
        self._scanner = EntryLogScanner(disk, directory)
        self._ledgers: dict[int, LedgerRow] = {}
        self._entries: dict[int, dict[int, Located]] = {}
        self._held = 0
        self._keyless: dict[int, Damage] = {}
        """Ledgers whose key was in no log so far -> their first record."""
        self.entries_count = 0
        self.damage: list[Damage] = []
        """What kept the index from being whole."""

    def run(self) -> None:
        """Raises DamagedStorage when a log is missing or damaged, unless the index may be partial, and StartGivenUp."""
        manifest = self._read_manifest()
        logs = manifest.expected(self._mark.log_id)
        for source, target in manifest.pairs(self._mark.log_id):
            if source in self._scanner.log_ids():
                logs.remove(target)  # the start will take this index for one that uses the source
        for log_id in logs:
            self._add_log(log_id, manifest)
        for ledger_id, damage in self._keyless.items():
            if not self.damage:  # else it explains that
                self._found(damage)
            # Limbo fences what metadata know of. The others get their key with the first copy too: only if fenced.
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
                f"index is lost and so is part of an entry log: {damage.reason}", path=damage.path, offset=damage.offset
            )
        self.damage.append(damage)

    def _add_log(self, log_id: int, manifest: LogManifest) -> None:
        path = self._scanner.path(log_id)
        end = manifest.end(log_id, mark=(self._mark.log_id, self._mark.log_offset))
        try:
            for found in self._scanner.scan(log_id, stop=end.stop, is_sealed=end.is_sealed):
                if self._is_given_up():
                    raise StartGivenUp
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
            if row is None or not row.master_key:  # a replay may have said it again
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
            # Either it was deleted, and its `deleted` record is still to come; or its key was in what is lost. Then it
            # is fenced in the end, and the key comes from metadata or the first client.
            row = LedgerRow(b"", False, -1, -1, None)
            self._keyless[ledger_id] = Damage(
                self._scanner.path(record.log_id), record.offset, "the key of its ledger is in no log", ledger_id
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
        """Move what is held to the index; the last time with ledger rows and generation, which make it valid."""
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
