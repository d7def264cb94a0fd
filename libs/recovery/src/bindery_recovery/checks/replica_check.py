"""Count replicas: ask every bookie of a closed ledger for its list of entries, and count entries with too few replicas.

The check reads lists of entries, not entries. It finds what is missing from a whole ledger with one request per bookie,
but does not detect corruption. It only counts; the full check marks ledgers.

Per entry, over the members of its write set:

| replicas | counted as        |
|----------|-------------------|
| 0        | without a replica |
| < Qa     | below ack quorum  |
| < Qw     | below write quorum|

Each line includes the entries of the lines above it. A bookie that did not answer counts as holding all entries that it
should hold, so that the counts are never too high; ledgers with such a bookie are also counted as unanswered.
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
"""Default number of ledgers checked at a time."""
LEDGER_TIMEOUT_S: Final = 120.0
"""Time limit in seconds for the check of one ledger."""

log = get_logger(__name__)

Runs = Sequence[tuple[int, int]]
"""Ranges of entries that a bookie lists, as (first entry id, number of entries), ascending."""


class ReplicaClient(Protocol):
    """The part of `bindery_client.client.LedgerClient` that the check uses."""

    def list_ledgers(self) -> AsyncIterator[LedgerId]: ...

    async def metadata(self, ledger_id: LedgerId) -> LedgerMetadata: ...

    async def entries_on(self, ledger_id: LedgerId, bookie_id: BookieId) -> Runs: ...


@dataclass(frozen=True, slots=True)
class Shortage:
    """Number of entries of one ledger with too few replicas."""

    without_replica: int = 0
    below_ack_quorum: int = 0
    below_write_quorum: int = 0


def count_shortage(metadata: LedgerMetadata, held: Mapping[BookieId, Runs | None]) -> Shortage:
    """Count the entries with too few replicas. `metadata`: of a closed ledger. `held`: the entries that each bookie
    lists; None: it did not answer."""
    assert metadata.state is LedgerState.CLOSED
    masks = write_set_masks(ensemble_size=metadata.ensemble_size, write_quorum=metadata.write_quorum)
    size = metadata.ensemble_size
    counts = [0] * (metadata.write_quorum + 1)
    """Number of entries by number of replicas."""
    for segment, start, end in _segments(metadata):
        for first, stop, holders in _stretches(segment.ensemble, held, start, end):
            rounds, rest = divmod(stop - first, size)
            for offset in range(min(size, stop - first)):
                entries = rounds + (offset < rest)
                counts[(holders & masks[(first + offset) % size]).bit_count()] += entries
    return Shortage(counts[0], sum(counts[: metadata.ack_quorum]), sum(counts[: metadata.write_quorum]))


@dataclass(frozen=True, slots=True)
class Lack:
    """The entries of one ledger that one bookie lacks."""

    entries: int
    first_entry_id: int


def find_lacks(metadata: LedgerMetadata, held: Mapping[BookieId, Runs | None]) -> dict[BookieId, Lack]:
    """Return the bookies that lack entries which they should hold, in no particular order. The arguments are those of
    `count_shortage`."""
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
    """Yield the ranges (first, stop) within start..end-1 that `runs` do not cover."""
    done = start
    for first, count in runs:
        if first > done and done < end:
            yield done, min(first, end)
        done = max(done, first + count)
    if done < end:
        yield done, end


def _segments(metadata: LedgerMetadata) -> Iterator[tuple[Segment, int, int]]:
    """Yield each segment with its first entry id and the id after its last."""
    starts = [int(segment.first_entry_id) for segment in metadata.segments]
    yield from zip(metadata.segments, starts, [*starts[1:], metadata.last_entry_id + 1], strict=True)


def _stretches(
    ensemble: Sequence[BookieId], held: Mapping[BookieId, Runs | None], start: int, end: int
) -> list[tuple[int, int, int]]:
    """Return ranges (first, stop, ensemble indexes as bits) of start..end-1 in which the same bookies hold all
    entries."""
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
    """Counters of one check of closed ledgers."""

    ledgers: int = 0
    unanswered: int = 0
    """Ledgers of which at least one bookie did not answer."""
    unreadable: int = 0
    """Ledgers whose metadata cannot be parsed."""
    hung: int = 0
    """Ledgers whose check exceeded the timeout."""
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
    """Check all closed ledgers. Raises MetadataUnavailable, without a partial result. A bookie that fails counts as
    unanswered."""
    result = ReplicaCheckResult()

    async def ask(ledger_id: LedgerId, bookie_id: BookieId) -> Runs | None:
        try:
            return await client.entries_on(ledger_id, bookie_id)
        except NoSuchLedger:
            return ()  # this bookie has no entry of the ledger
        except MetadataUnavailable:
            raise
        except BinderyError as error:
            log.info("entries_not_listed", ledger_id=ledger_id, bookie_id=bookie_id, error=str(error))
            return None

    async def count(ledger_id: LedgerId) -> tuple[Shortage, bool] | None:
        """Return the shortage, and whether all bookies answered; None: the ledger is open."""
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
