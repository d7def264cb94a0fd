"""Counts copies: asks every bookie of a closed ledger which entries it holds, and counts those that have too few.

Lists of entries, not entries: it finds what is missing on a whole ledger at the price of one request a bookie, and says
nothing about damage. It only counts; the full check is what marks.

Per entry, over the members of its write set:

| replicas | counted as        |
|----------|-------------------|
| 0        | without a replica |
| < Qa     | below ack quorum  |
| < Qw     | below write quorum|

Each lower line counts those of the upper ones too. A bookie that could not be asked counts as a holder of all that it
should hold, so that figures are never exaggerated; ledgers with such a bookie are counted as unanswered beside.
Source: BookKeeper's AuditorReplicasCheckTask.
"""

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final, Protocol

from bindery_core.errors import BinderyError, MetadataUnavailable, NoSuchLedger
from bindery_core.formats.ledger_metadata import LedgerMetadata, LedgerState, Segment
from bindery_core.ids import BookieId, LedgerId
from bindery_core.placement.write_set import entry_count_of, write_set_contains, write_set_masks
from bindery_kit.observability.logs import get_logger

from bindery_recovery.cluster.ledger_index import members_of
from bindery_recovery.cluster.ledger_walk import LedgerWalk, Skip

LEDGERS_IN_FLIGHT: Final = 16
LEDGER_TIMEOUT_S: Final = 120.0

log = get_logger(__name__)

Runs = Sequence[tuple[int, int]]
"""(first entry id, count), ascending."""


class ReplicaClient(Protocol):
    """What is asked of `bindery_client.client.LedgerClient`."""

    def list_ledgers(self) -> AsyncIterator[LedgerId]: ...

    async def metadata(self, ledger_id: LedgerId) -> LedgerMetadata: ...

    async def entries_on(self, ledger_id: LedgerId, bookie_id: BookieId) -> Runs: ...


@dataclass(frozen=True, slots=True)
class Shortage:
    """Entries of one ledger."""

    without_replica: int = 0
    below_ack_quorum: int = 0
    below_write_quorum: int = 0


def count_shortage(metadata: LedgerMetadata, held: Mapping[BookieId, Runs | None]) -> Shortage:
    """`metadata` of a closed ledger; `held`: what each bookie says it holds, None: it could not be asked."""
    assert metadata.state is LedgerState.CLOSED
    masks = write_set_masks(ensemble_size=metadata.ensemble_size, write_quorum=metadata.write_quorum)
    size = metadata.ensemble_size
    counts = [0] * (metadata.write_quorum + 1)
    """Entries by their number of replicas."""
    for segment, start, end in _segments(metadata):
        for first, stop, holders in _stretches(segment.ensemble, held, start, end):
            rounds, rest = divmod(stop - first, size)
            for offset in range(min(size, stop - first)):
                entries = rounds + (offset < rest)
                counts[(holders & masks[(first + offset) % size]).bit_count()] += entries
    return Shortage(counts[0], sum(counts[: metadata.ack_quorum]), sum(counts[: metadata.write_quorum]))


@dataclass(frozen=True, slots=True)
class Lack:
    """What one bookie lacks of one ledger."""

    entries: int
    first_entry_id: int


def find_lacks(metadata: LedgerMetadata, held: Mapping[BookieId, Runs | None]) -> dict[BookieId, Lack]:
    """Who lacks entries that it should hold, in no order. Arguments as of `count_shortage`."""
    assert metadata.state is LedgerState.CLOSED
    found: dict[BookieId, Lack] = {}
    quorums = {"ensemble_size": metadata.ensemble_size, "write_quorum": metadata.write_quorum}
    for segment, start, end in _segments(metadata):
        for index, bookie_id in enumerate(segment.ensemble):
            runs = held[bookie_id]
            if runs is None:
                continue
            for first, stop in _gaps(runs, start, end):
                entries = entry_count_of(index, first=first, last=stop - 1, **quorums)
                if entries:
                    before = found.get(bookie_id)
                    if before is None:
                        ids = (e for e in range(first, stop) if write_set_contains(index, entry_id=e, **quorums))
                        before = Lack(0, next(ids))
                    found[bookie_id] = Lack(before.entries + entries, before.first_entry_id)
    return found


def _gaps(runs: Runs, start: int, end: int) -> Iterator[tuple[int, int]]:
    """(first, stop) of what `runs` leave out of start..end-1."""
    done = start
    for first, count in runs:
        if first > done and done < end:
            yield done, min(first, end)
        done = max(done, first + count)
    if done < end:
        yield done, end


def _segments(metadata: LedgerMetadata) -> Iterator[tuple[Segment, int, int]]:
    """(segment, first entry id, one behind its last)."""
    starts = [int(segment.first_entry_id) for segment in metadata.segments]
    yield from zip(metadata.segments, starts, [*starts[1:], metadata.last_entry_id + 1], strict=True)


def _stretches(
    ensemble: Sequence[BookieId], held: Mapping[BookieId, Runs | None], start: int, end: int
) -> list[tuple[int, int, int]]:
    """(first, stop, ensemble indexes as bits): stretches of start..end-1 over which the same bookies hold all."""
    steps: dict[int, int] = {start: 0, end: 0}
    for index, bookie_id in enumerate(ensemble):
        runs = held[bookie_id]
        done = start  # a bookie may list an entry twice
        for first, count in ((start, end - start),) if runs is None else runs:
            begin, stop = max(done, first), min(end, first + count)
            if begin < stop:
                done = stop
                steps[begin] = steps.get(begin, 0) ^ 1 << index
                steps[stop] = steps.get(stop, 0) ^ 1 << index
    stretches = []
    holders = 0
    places = sorted(place for place in steps if start <= place <= end)
    for first, stop in itertools.pairwise(places):
        holders ^= steps[first]
        stretches.append((first, stop, holders))
    return stretches


@dataclass(slots=True)
class ReplicaCheckResult:
    """Figures of one check, over closed ledgers."""

    ledgers: int = 0
    unanswered: int = 0
    """Ledgers of which some bookie could not be asked."""
    unreadable: int = 0
    """Ledgers whose metadata cannot be understood."""
    hung: int = 0
    """Ledgers that took longer than the time limit."""
    ledgers_without_replica: int = 0
    ledgers_below_ack_quorum: int = 0
    ledgers_below_write_quorum: int = 0
    entries_without_replica: int = 0
    entries_below_ack_quorum: int = 0
    entries_below_write_quorum: int = 0

    def add(self, shortage: Shortage) -> None:
        self.entries_without_replica += shortage.without_replica
        self.entries_below_ack_quorum += shortage.below_ack_quorum
        self.entries_below_write_quorum += shortage.below_write_quorum
        self.ledgers_without_replica += shortage.without_replica > 0
        self.ledgers_below_ack_quorum += shortage.below_ack_quorum > 0
        self.ledgers_below_write_quorum += shortage.below_write_quorum > 0

    def to_json(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in sorted(self.__slots__)}


async def check_replicas(
    client: ReplicaClient, *, ledgers_in_flight: int = LEDGERS_IN_FLIGHT, ledger_timeout_s: float = LEDGER_TIMEOUT_S
) -> ReplicaCheckResult:
    """Count over all closed ledgers. Raises MetadataUnavailable: half a check is none. Bookies that fail are borne."""
    result = ReplicaCheckResult()

    async def ask(ledger_id: LedgerId, bookie_id: BookieId) -> Runs | None:
        try:
            return await client.entries_on(ledger_id, bookie_id)
        except NoSuchLedger:
            return ()  # this bookie has nothing of it
        except MetadataUnavailable:
            raise
        except BinderyError as error:
            log.info("entries_not_listed", ledger_id=ledger_id, bookie_id=bookie_id, error=str(error))
            return None

    async def count(ledger_id: LedgerId) -> tuple[Shortage, bool] | None:
        """The shortage, and whether all bookies answered; None: the ledger is open."""
        metadata = await client.metadata(ledger_id)
        while metadata.state is LedgerState.CLOSED:
            bookies = sorted(members_of(metadata))
            held = await asyncio.gather(*(ask(ledger_id, bookie_id) for bookie_id in bookies))
            shortage = count_shortage(metadata, dict(zip(bookies, held, strict=True)))
            counted, metadata = metadata, metadata if shortage == Shortage() else await client.metadata(ledger_id)
            if metadata == counted:  # otherwise the ledger was repaired during the check: count again
                return shortage, None not in held
        return None

    walk = LedgerWalk(ledgers_in_flight, timeout_s=ledger_timeout_s, hung_event="replicas_not_counted")
    async with walk.run(client.list_ledgers(), count) as counts:
        async for _, found in counts:
            if isinstance(found, Skip):
                result.hung += found is Skip.HUNG
                result.unreadable += found is Skip.UNREADABLE
            elif found is not None:
                shortage, is_answered = found
                result.ledgers += 1
                result.unanswered += not is_answered
                result.add(shortage)
    return result
