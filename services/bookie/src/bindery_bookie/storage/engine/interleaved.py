"""The interleaved form of the storage: a flush writes entries of all ledgers in the order of their arrival.

The write cache keeps a list of bodies in addition to its dictionaries. A flush writes a body of that list only if the
dictionaries hold the same object, so overwritten bodies and bodies of deleted ledgers are skipped. Entries that are in
the dictionaries but not in the list are written after the others. No code path should produce such an entry; writing
them is a safeguard against the loss of an entry.

See `ledger_storage` for a comparison of the forms.
"""

from collections.abc import Sequence

from bindery_core.wire.messages import AddRequest
from crc32c import crc32c

from bindery_bookie.storage import control_records as control
from bindery_bookie.storage.engine.adds import Adds
from bindery_bookie.storage.entry_log import entry_log_format as fmt
from bindery_bookie.storage.entry_log.entry_log_format import Located
from bindery_bookie.storage.flushing.flush import Encoder, Flush
from bindery_bookie.storage.index.index_format import run_rows
from bindery_bookie.storage.memory.write_cache import WriteCache
from bindery_bookie.storage.store import AddDone

_SLICE_ENTRIES = 256
"""Number of entries encoded between two checks of the clock."""


class InterleavedCache(WriteCache):
    """A WriteCache that keeps the order of arrival. It needs eight more bytes per entry."""

    __slots__ = ("order",)

    def __init__(self, size_max: int) -> None:
        super().__init__(size_max)
        self.order: list[bytes] = []

    def put(self, ledger_id: int, entry_id: int, body: bytes) -> None:
        super().put(ledger_id, entry_id, body)
        self.order.append(body)

    def record_order(self, adds: Sequence[AddRequest]) -> None:
        """Append the accepted ones of these adds to the list."""
        ledgers, append = self.ledgers, self.order.append
        for add in adds:
            body = add.body
            if len(body) >= control.ENTRY_SIZE_MIN:
                ledger_id, entry_id = control.unpack_ids(body)
                entries = ledgers.get(ledger_id)
                if entries is not None and entries.get(entry_id) is body:
                    append(body)

    def release(self, count: int) -> bool:
        del self.order[-count:]
        return super().release(count) or bool(self.order)


class InterleavedAdds(Adds):
    """Adds that record the order of arrival in an InterleavedCache."""

    def _accept(self, adds: Sequence[AddRequest], done: AddDone) -> None:
        cache = self._caches.active  # the call below may swap it for an empty one
        assert isinstance(cache, InterleavedCache)
        super()._accept(adds, done)
        cache.record_order(adds)


class InterleavedEncoder(Encoder):
    """Encodes a flush in order of arrival."""

    async def _add_entries(self, flush: Flush) -> None:
        assert isinstance(flush.cache, InterleavedCache)
        located: dict[int, dict[int, Located]] = {}
        order = flush.cache.order
        for start in range(0, len(order), _SLICE_ENTRIES):
            await self._open_next_log_if_full()
            for body in order[start : start + _SLICE_ENTRIES]:
                ledger_id, entry_id = control.unpack_ids(body)
                if flush.cache.get(ledger_id, entry_id) is body:
                    entries = located.setdefault(ledger_id, {})
                    if entry_id not in entries:  # the same object may be added twice
                        entries[entry_id] = self._add_entry(ledger_id, entry_id, body)
                if self._offset - self._chunk_offset >= self._chunk_size:
                    await self._yield_if_due()
                    await self._open_next_log_if_full()
            await self._yield_if_due()
        for ledger_id, entry_ids, bodies in flush.cache.sorted_ledgers():
            entries = located.setdefault(ledger_id, {})
            for entry_id in entry_ids:
                if entry_id not in entries:
                    await self._open_next_log_if_full()
                    entries[entry_id] = self._add_entry(ledger_id, entry_id, bodies[entry_id])
                    await self._yield_if_due()
        for ledger_id, entries in located.items():
            await self._add_rows(flush, ledger_id, [entries[entry_id] for entry_id in sorted(entries)])

    def _add_entry(self, ledger_id: int, entry_id: int, body: bytes) -> Located:
        size = len(body)
        location = self._log_id << fmt.OFFSET_BITS | self._offset + fmt.RECORD_HEADER_SIZE
        self._parts.append(fmt.pack_record_header(crc32c(body, size), size))
        self._parts.append(body)
        self._count(ledger_id, fmt.RECORD_HEADER_SIZE + size)
        self.entries_count += 1
        return entry_id, location, size

    async def _add_rows(self, flush: Flush, ledger_id: int, located: Sequence[Located]) -> None:
        """Add the index rows of a ledger's entries, which are ascending."""
        state = flush.states[ledger_id]
        last = state.indexed_entry_id
        for start in range(0, len(located), _SLICE_ENTRIES):
            part = located[start : start + _SLICE_ENTRIES]
            # As in the sorted form: entries that the index may already have are merged with its rows.
            known = [entry for entry in part if flush.attempts > 1 or entry[0] <= state.indexed_entry_id]
            if known:
                self.merges.setdefault(ledger_id, []).extend(known)
                flush.overwritten += [(ledger_id, entry_id) for entry_id, _, _ in known]
            self.rows += run_rows(ledger_id, part[len(known) :])
            last = max(last, part[-1][0])
            await self._yield_if_due()
        self.ledgers[ledger_id] = state.row(indexed_entry_id=last)
