"""Build an index of ledgers by bookie from the metadata of all ledgers.

| metadata of a ledger          | consequence                                                                |
|-------------------------------|----------------------------------------------------------------------------|
| missing since it was listed   | the ledger was deleted and is not in the index                             |
| cannot be parsed              | its id is recorded. The index is valid for the other ledgers, but does not |
|                               | prove that no ledger names a bookie                                        |
| metadata store is unavailable | no index: the error is raised                                              |

Memory: 8 bytes per ledger and bookie, for the requested bookies; three numbers for each other bookie. Source:
BookKeeper's BookieLedgerIndexer, which keeps sets for all bookies.
"""

from array import array
from collections.abc import AsyncIterator, Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

from bindery_core.errors import BadVersion, Corrupt
from bindery_core.formats.ledger_metadata import LedgerMetadata, LedgerState
from bindery_core.ids import BookieId, LedgerId
from bindery_core.placement.write_set import entry_count_of
from bindery_kit.observability.logs import get_logger

from bindery_recovery.cluster.ledger_walk import LedgerWalk, Skip

READS_IN_FLIGHT: Final = 64
"""Default number of ledgers whose metadata is read at a time."""
UNREADABLE_KEPT_MAX: Final = 1000
"""Maximum number of unreadable ledgers of which the index keeps the id and the reason."""

log = get_logger(__name__)


class MetadataReader(Protocol):
    """The part of `bindery_client.client.LedgerClient` that the index uses."""

    def list_ledgers(self) -> AsyncIterator[LedgerId]: ...

    async def metadata(self, ledger_id: LedgerId) -> LedgerMetadata: ...


class Share(NamedTuple):
    """What some bookies store of a ledger according to its metadata."""

    entries: int
    """Entries in closed segments; the number in an open last segment is unknown."""
    length: int | None
    """Payload bytes, assuming entries of equal size; None: unknown, because the ledger is not closed."""


def shares_of(metadata: LedgerMetadata) -> dict[BookieId, int]:
    """Return the number of entries in closed segments by member, including members without entries."""
    size, write_quorum = metadata.ensemble_size, metadata.write_quorum
    segments = metadata.segments
    ends = [int(segment.first_entry_id) - 1 for segment in segments[1:]]
    ends.append(metadata.last_entry_id if metadata.state is LedgerState.CLOSED else -1)
    shares: dict[BookieId, int] = {}
    for segment, end in zip(segments, ends, strict=True):
        first = segment.first_entry_id
        for index, bookie_id in enumerate(segment.ensemble):
            entries = (
                max(0, end - first + 1)
                if write_quorum == size
                else entry_count_of(index, first=first, last=end, ensemble_size=size, write_quorum=write_quorum)
            )
            shares[bookie_id] = shares.get(bookie_id, 0) + entries
    return shares


def share_of(metadata: LedgerMetadata, bookies: Collection[BookieId]) -> Share:
    """Return what `bookies` together store of the ledger."""
    entries = sum(count for bookie_id, count in shares_of(metadata).items() if bookie_id in bookies)
    return Share(entries, _length(metadata, entries))


def _length(metadata: LedgerMetadata, entries: int) -> int | None:
    if metadata.state is not LedgerState.CLOSED:
        return None
    total = metadata.last_entry_id + 1
    return metadata.length * entries // total if total > 0 else 0


def members_of(metadata: LedgerMetadata) -> frozenset[BookieId]:
    """Return all bookies that the metadata names, in any segment."""
    return frozenset(bookie_id for segment in metadata.segments for bookie_id in segment.ensemble)


@dataclass(slots=True)
class BookieTotals:
    """What one bookie stores of all ledgers according to their metadata."""

    ledgers: int = 0
    entries: int = 0
    length: int = 0
    """Payload bytes of closed ledgers."""


@dataclass(slots=True)
class LedgerIndex:
    """The result of one complete read of all metadata."""

    is_wanted: Callable[[BookieId], bool]
    """Selects the bookies whose ledgers are listed."""
    ledger_count: int = 0
    totals: dict[BookieId, BookieTotals] = field(default_factory=dict)
    unreadable: dict[LedgerId, str] = field(default_factory=dict)
    """Reasons by ledger, at most UNREADABLE_KEPT_MAX."""
    unreadable_count: int = 0
    _ledgers: dict[BookieId, "array[int]"] = field(default_factory=dict)

    def ledgers_of(self, bookie_id: BookieId) -> "array[int]":
        """Return the ids of ledgers that name the bookie, ascending. `is_wanted` must select the bookie."""
        assert self.is_wanted(bookie_id)
        return self._ledgers.get(bookie_id) or array("q")

    def bookies_by_ledger(self, bookies: Collection[BookieId]) -> Mapping[LedgerId, tuple[BookieId, ...]]:
        """Return each ledger that names at least one of `bookies`, ascending, with those of `bookies` that it names."""
        found: dict[int, tuple[BookieId, ...]] = {}
        for bookie_id in sorted(bookies):
            for ledger_id in self.ledgers_of(bookie_id):
                found[ledger_id] = (*found.get(ledger_id, ()), bookie_id)
        return {LedgerId(ledger_id): found[ledger_id] for ledger_id in sorted(found)}

    @property
    def is_complete(self) -> bool:
        """Whether the metadata of all ledgers was read, so that a bookie without ledgers here is named by none."""
        return self.unreadable_count == 0

    def add(self, ledger_id: LedgerId, metadata: LedgerMetadata) -> None:
        """Add a ledger; ids must ascend."""
        self.ledger_count += 1
        for bookie_id, entries in shares_of(metadata).items():
            totals = self.totals.get(bookie_id)
            if totals is None:
                totals = self.totals[bookie_id] = BookieTotals()
            totals.ledgers += 1
            totals.entries += entries
            totals.length += _length(metadata, entries) or 0
            if self.is_wanted(bookie_id):
                self._ledgers.setdefault(bookie_id, array("q")).append(ledger_id)

    def add_unreadable(self, ledger_id: LedgerId, reason: str) -> None:
        self.ledger_count += 1
        self.unreadable_count += 1
        if len(self.unreadable) < UNREADABLE_KEPT_MAX:
            self.unreadable[ledger_id] = reason


async def build_index(
    client: MetadataReader, is_wanted: Callable[[BookieId], bool], *, reads_in_flight: int = READS_IN_FLIGHT
) -> LedgerIndex:
    """Read the metadata of every ledger. `is_wanted` selects the bookies whose ledgers are listed; it must be stable.

    Raises errors of the metadata store; no partial index is returned.
    """
    index = LedgerIndex(is_wanted)

    async def read(ledger_id: LedgerId) -> LedgerMetadata | str:
        try:
            return await client.metadata(ledger_id)
        except (Corrupt, BadVersion) as error:
            log.error("ledger_metadata_unreadable", ledger_id=ledger_id, error=str(error))
            return str(error)

    async with LedgerWalk(reads_in_flight).run(client.list_ledgers(), read) as results:
        async for ledger_id, found in results:
            if isinstance(found, LedgerMetadata):
                index.add(ledger_id, found)
            elif not isinstance(found, Skip):
                index.add_unreadable(ledger_id, found)
    return index
