"""A ledger client that answers from a table, for checks of all ledgers."""

import asyncio
import random
from collections.abc import AsyncIterator, Mapping, Sequence

from bindery_core.errors import BinderyError, NoSuchLedger
from bindery_core.formats.ledger_metadata import LedgerMetadata, LedgerState, Segment
from bindery_core.ids import BookieId, EntryId, LedgerId


def bookies(*names: str) -> tuple[BookieId, ...]:
    return tuple(BookieId(name) for name in names)


def ledger(
    *ensembles: Sequence[str],
    firsts: Sequence[int] = (0,),
    last: int | None = 9,
    length: int = 1000,
    write_quorum: int | None = None,
    ack_quorum: int = 2,
) -> LedgerMetadata:
    """Metadata with these ensembles. `last=None`: open."""
    size = len(ensembles[0])
    write_quorum = write_quorum or size
    return LedgerMetadata(
        ensemble_size=size,
        write_quorum=write_quorum,
        ack_quorum=min(ack_quorum, write_quorum),
        segments=tuple(
            Segment(EntryId(first), bookies(*names)) for first, names in zip(firsts, ensembles, strict=True)
        ),
        state=LedgerState.OPEN if last is None else LedgerState.CLOSED,
        last_entry_id=EntryId(-1 if last is None else last),
        length=0 if last is None else length,
    )


RANDOM_BOOKIES = bookies(*(f"b{n}" for n in range(7)))


def random_ledger(rng: random.Random) -> LedgerMetadata:
    """A closed ledger on some of RANDOM_BOOKIES: up to 40 entries in up to three segments, any quorums."""
    size = rng.randrange(1, 6)
    write_quorum = rng.randrange(1, size + 1)
    last = rng.randrange(-1, 40)
    firsts = sorted({0, *(rng.randrange(0, last + 1) for _ in range(rng.randrange(3)) if last >= 0)})
    return ledger(
        *(rng.sample(RANDOM_BOOKIES, size) for _ in firsts),
        firsts=firsts,
        last=last,
        write_quorum=write_quorum,
        ack_quorum=rng.randrange(1, write_quorum + 1),
    )


class ScriptedClient:
    """A client that answers from `ledgers` and `entries`, which may contain an error instead of a response. Every
    response with metadata takes `latency_s`."""

    def __init__(self, ledgers: Mapping[int, LedgerMetadata | BinderyError], *, latency_s: float = 0.001) -> None:
        self.ledgers = {LedgerId(ledger_id): found for ledger_id, found in ledgers.items()}
        self.latency_s = latency_s
        self.listing_fails_at: int | None = None
        self.entries: dict[tuple[int, str], Sequence[tuple[int, int]] | BinderyError | None] = {}
        """Entries that a bookie lists for a ledger; None: it never answers. Default: all entries that it should
        store."""
        self.deleted_since: set[int] = set()
        """Ledgers that are listed but have no metadata any more."""
        self.asked: list[int] = []
        self.in_flight = self.in_flight_max = 0

    async def list_ledgers(self) -> AsyncIterator[LedgerId]:
        for ledger_id in sorted({*self.ledgers, *map(LedgerId, self.deleted_since)}):
            if ledger_id == self.listing_fails_at:
                raise BinderyError("the listing broke")
            yield ledger_id

    async def metadata(self, ledger_id: LedgerId) -> LedgerMetadata:
        self.asked.append(ledger_id)
        self.in_flight += 1
        self.in_flight_max = max(self.in_flight, self.in_flight_max)
        await asyncio.sleep(self.latency_s)
        self.in_flight -= 1
        found = self.ledgers.get(ledger_id)
        if found is None or ledger_id in self.deleted_since:
            raise NoSuchLedger(ledger_id=ledger_id)
        if isinstance(found, BinderyError):
            raise found
        return found

    async def entries_on(self, ledger_id: LedgerId, bookie_id: BookieId) -> Sequence[tuple[int, int]]:
        metadata = await self.metadata(ledger_id)
        held = self.entries.get((ledger_id, bookie_id), [(0, metadata.last_entry_id + 1)])
        if held is None:
            await asyncio.Event().wait()
        if isinstance(held, BinderyError):
            raise held
        assert held is not None
        return held
