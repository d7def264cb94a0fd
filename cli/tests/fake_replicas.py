"""FakeReplicas: a ledger client over one dict of frames per bookie. The verdicts come from the code of the product."""

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from types import SimpleNamespace
from typing import Any, TypeVar

from bindery_client.ledger.api import Entry
from bindery_client.ledger.replica import ReplicaRead, Verdict, judge
from bindery_core.digest import Digester
from bindery_core.entry import pack, unpack
from bindery_core.errors import BadRequest, NoSuchEntry, NoSuchLedger
from bindery_core.formats.ledger_metadata import DigestType, LedgerMetadata, LedgerState, Segment
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.placement.write_set import write_set
from bindery_core.wire.messages import ReadResponse, Status
from bindery_metadata.stores.versioned import Versioned

T = TypeVar("T")
LEDGER = LedgerId(7)


class FakeReplicas:
    """One ledger of `count` entries on `ensembles` (first entry -> bookies), all copies good; tests then damage them.

    Invariant: reads change nothing, so a test can detect any change that a command makes.
    """

    def __init__(
        self,
        payloads: Sequence[bytes],
        *,
        ensembles: Mapping[int, Sequence[str]] | None = None,
        write_quorum: int = 3,
        digest_type: DigestType = DigestType.CRC32C,
        closed: bool = True,
        password: bytes = b"",
    ) -> None:
        ensembles = ensembles or {0: ("b0", "b1", "b2")}
        size = len(next(iter(ensembles.values())))
        segments = tuple(Segment(EntryId(first), tuple(map(BookieId, names))) for first, names in ensembles.items())
        self.lac = len(payloads) - 1
        self.digester = Digester(digest_type, password)
        self.found = LedgerMetadata(
            ensemble_size=size,
            write_quorum=write_quorum,
            ack_quorum=min(2, write_quorum),
            segments=segments,
            digest_type=digest_type,
            password=password,
            ctime_ms=1_700_000_000_123,
            custom={"application": b"test", "bytes": b"\xff\n"},
        )
        if closed:
            self.found = self.found.with_changes(
                state=LedgerState.CLOSED, last_entry_id=EntryId(self.lac), length=sum(map(len, payloads))
            )
        self.frames: dict[BookieId, dict[int, bytes]] = {b: {} for s in segments for b in s.ensemble}
        self.statuses: dict[BookieId, Status] = {}
        """Bookies that respond with another status than the stored frames imply."""
        self.down: dict[BookieId, str] = {}
        """Bookies whose reads end with an error, and its reason."""
        self.asked: list[tuple[BookieId, tuple[int, ...]]] = []
        self.recoveries = 0
        self.metadata_reads = 0
        self.on_read: Callable[[], None] = lambda: None
        self.deleted = False
        self.created_ms = 0
        for entry_id, payload in enumerate(payloads):
            for bookie in self.write_set(entry_id):
                self.put(bookie, entry_id, payload)

    def write_set(self, entry_id: int) -> list[BookieId]:
        ensemble = self.found.segment_of(EntryId(entry_id)).ensemble
        indexes = write_set(entry_id=entry_id, ensemble_size=len(ensemble), write_quorum=self.found.write_quorum)
        return [ensemble[i] for i in indexes]

    def put(self, bookie: str, entry_id: int, payload: bytes, *, lac: int | None = None, length: int = 10**6) -> None:
        lac = entry_id - 1 if lac is None else lac
        self.frames[BookieId(bookie)][entry_id] = pack(
            self.digester, ledger_id=LEDGER, entry_id=entry_id, lac=lac, length=length, payload=payload
        )

    def corrupt(self, bookie: str, entry_id: int) -> None:
        frame = self.frames[BookieId(bookie)][entry_id]
        self.frames[BookieId(bookie)][entry_id] = frame[:-1] + bytes([frame[-1] ^ 1])

    # -- the interface that the commands use --------------------------------------------------------------------------

    async def metadata(self, ledger_id: LedgerId) -> LedgerMetadata:
        self.metadata_reads += 1
        if ledger_id != LEDGER or self.deleted:
            raise NoSuchLedger("no such ledger", ledger_id=ledger_id)
        return self.found

    async def metadata_versioned(self, ledger_id: LedgerId) -> Versioned[LedgerMetadata]:
        return Versioned(await self.metadata(ledger_id), 3, self.created_ms)

    async def list_bookies(self) -> Mapping[BookieId, bool]:
        return {bookie: True for bookie in self.frames if bookie not in self.down}

    async def open(self, ledger_id: LedgerId, *, password: bytes = b"", recover: bool = True) -> "FakeReader":
        self.recoveries += recover
        return FakeReader(self)

    async def read_replicas(
        self,
        ledger_id: LedgerId,
        metadata: LedgerMetadata,
        bookie_id: BookieId,
        entry_ids: Sequence[EntryId],
        take: Callable[[ReplicaRead], T],
    ) -> list[T]:
        self.asked.append((bookie_id, tuple(map(int, entry_ids))))
        self.on_read()
        return [take(self._read(bookie_id, entry_id)) for entry_id in entry_ids]

    def _read(self, bookie_id: BookieId, entry_id: EntryId) -> ReplicaRead:
        if bookie_id in self.down:
            status = int(Status.IO_ERROR)
            return ReplicaRead(LEDGER, entry_id, bookie_id, status, None, Verdict.ERROR, reason=self.down[bookie_id])
        frame = self.frames[bookie_id].get(entry_id)
        status = self.statuses.get(bookie_id, Status.OK if frame is not None else Status.NO_ENTRY)
        response = ReadResponse(1, int(status), LEDGER, entry_id, frame if status == Status.OK else None)
        return judge(self.digester, response, bookie_id=bookie_id, ledger_id=LEDGER, entry_id=entry_id)


class FakeReader:
    def __init__(self, source: FakeReplicas) -> None:
        self._source = source
        self.last_add_confirmed = source.lac

    async def read(self, first: EntryId, last: EntryId) -> list[Entry]:
        if not 0 <= first <= last <= self.last_add_confirmed:
            raise BadRequest("no such range")
        return [self._read(EntryId(entry_id)) for entry_id in range(first, last + 1)]

    def _read(self, entry_id: EntryId) -> Entry:
        for bookie in self._source.write_set(entry_id):
            replica = self._source._read(bookie, entry_id)
            if replica.verdict is Verdict.GOOD:
                assert replica.frame is not None
                found = unpack(self._source.digester, replica.frame, ledger_id=LEDGER, entry_id=entry_id)
                return Entry(entry_id, found.payload, found.length)
        raise NoSuchEntry("no such entry", ledger_id=LEDGER, entry_id=entry_id)

    async def release(self) -> None:
        pass


def connecting_to(source: FakeReplicas) -> object:
    """Return a replacement of `operator.connected` that connects to `source`."""

    @asynccontextmanager
    async def connected(zookeeper: str, ledgers_root: str) -> AsyncIterator[Any]:
        yield SimpleNamespace(client=source)

    return connected
