"""MemoryReplicas: record which bookie holds which entries, for ledgers in memory.

A copy is made from its entry when it is read, unless it was stored as a frame or a test damaged it. Tests inject
faults with `lose`, `damage`, and a status that a bookie returns for every read or add.
"""

from collections.abc import Mapping, Sequence

from bindery_core.digest import Digester
from bindery_core.entry import pack, peek_ids
from bindery_core.formats.ledger_metadata import DigestType, LedgerMetadata
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.placement.write_set import write_set
from bindery_core.wire.messages import ReadResponse, Status

from bindery_client.ledger.api import Entry
from bindery_client.ledger.replica import ReplicaRead, Verdict, judge


def digester_of(metadata: LedgerMetadata) -> Digester:
    return Digester(metadata.digest_type or DigestType.CRC32, metadata.password or b"")


class MemoryReplicas:
    """The copies of one ledger. Invariant: changes of the metadata do not move them."""

    def __init__(self, ledger_id: LedgerId) -> None:
        self._ledger_id = ledger_id
        self._held: dict[BookieId, dict[int, bytes | None]] = {}
        """Bookie -> entry id -> frame; None: the frame of the entry."""

    def add(self, metadata: LedgerMetadata, entry_id: int) -> None:
        """Store an entry at the bookies of its write set, as the writer does."""
        ensemble = metadata.last_segment.ensemble
        for index in write_set(
            entry_id=entry_id, ensemble_size=metadata.ensemble_size, write_quorum=metadata.write_quorum
        ):
            self._held.setdefault(ensemble[index], {})[entry_id] = None

    def cut(self, count: int) -> None:
        """Drop entries from `count` on, because the ledger was closed without them."""
        for held in self._held.values():
            for entry_id in [entry_id for entry_id in held if entry_id >= count]:
                del held[entry_id]

    def store(self, bookie_id: BookieId, frames: Sequence[bytes]) -> None:
        held = self._held.setdefault(bookie_id, {})
        for frame in frames:
            held[peek_ids(frame)[1]] = bytes(frame)

    def lose(self, bookie_id: BookieId, *entry_ids: int) -> None:
        """Remove these entries from the bookie; without entry ids: the whole ledger."""
        if not entry_ids:
            self._held.pop(bookie_id, None)
        for entry_id in entry_ids:
            del self._held[bookie_id][entry_id]

    def damage(self, metadata: LedgerMetadata, entries: Sequence[Entry], bookie_id: BookieId, entry_id: int) -> None:
        """Flip a bit of the bookie's copy."""
        frame = self._frame(metadata, entries, bookie_id, entry_id)
        assert frame is not None
        self._held[bookie_id][entry_id] = frame[:-1] + bytes([frame[-1] ^ 1])

    def runs(self, bookie_id: BookieId) -> list[tuple[int, int]]:
        """Return runs (first, count) of the entries that the bookie holds, ascending."""
        runs: list[tuple[int, int]] = []
        for entry_id in sorted(self._held.get(bookie_id, ())):
            if runs and sum(runs[-1]) == entry_id:
                runs[-1] = (runs[-1][0], runs[-1][1] + 1)
            else:
                runs.append((entry_id, 1))
        return runs

    def read(
        self,
        metadata: LedgerMetadata,
        entries: Sequence[Entry],
        bookie_id: BookieId,
        entry_id: EntryId,
        *,
        bookies: Mapping[BookieId, bool],
        status: int | None,
    ) -> ReplicaRead:
        """Return the bookie's response for one entry; `status`: returned instead of the entry."""
        if bookie_id not in bookies:
            return ReplicaRead(
                self._ledger_id,
                entry_id,
                bookie_id,
                int(Status.IO_ERROR),
                None,
                Verdict.ERROR,
                reason="bookie is not registered",
            )
        frame = None if status is not None else self._frame(metadata, entries, bookie_id, entry_id)
        if status is None:
            missing = Status.NO_ENTRY if bookie_id in self._held else Status.NO_LEDGER
            status = int(missing if frame is None else Status.OK)
        response = ReadResponse(0, status, self._ledger_id, entry_id, frame)
        return judge(digester_of(metadata), response, bookie_id=bookie_id, ledger_id=self._ledger_id, entry_id=entry_id)

    def _frame(
        self, metadata: LedgerMetadata, entries: Sequence[Entry], bookie_id: BookieId, entry_id: int
    ) -> bytes | None:
        held = self._held.get(bookie_id, {})
        if entry_id not in held:
            return None
        stored = held[entry_id]
        if stored is not None:
            return stored
        entry = entries[entry_id]
        return pack(
            digester_of(metadata),
            ledger_id=self._ledger_id,
            entry_id=entry_id,
            lac=entry_id - 1,
            length=entry.length,
            payload=entry.payload,
        )
