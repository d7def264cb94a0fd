"""Find missing replicas of a ledger: read the entries of each fragment from the bookie that should store it.

| state     | meaning                                                                 | required action           |
|-----------|-------------------------------------------------------------------------|---------------------------|
| WHOLE     | the bookie returned all requested entries                               | none                      |
| MISSING   | it lacks some, or returned data with a wrong digest: `bad_entry_ids`    | restore, or replace it    |
| LOST      | it is not registered, so it is not read. This includes a bookie that    | replace it                |
|           | should store no entry of the fragment                                   |                           |
| LEAVING   | it is to be emptied, so it is not read                                  | replace it                |
| REFILLING | it lost its storage and is copying its entries back; until then it      | wait                      |
|           | neither lacks them permanently nor can serve them                       |                           |
| UNSURE    | an error, or no response                                                | check again               |

A read-only bookie counts like any other.

The last segment of an open ledger has no known end, and its writer would not notice a replacement by another process,
so its entries are not read. `OpenTail` only shows whether all members are registered. Source: BookKeeper LedgerChecker.
BookKeeper has no state REFILLING, and treats an error as a missing entry.
"""

import asyncio
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Final, TypeVar

from bindery_client.ledger.api import LedgerClient
from bindery_client.ledger.replica import ReplicaRead, Verdict
from bindery_core.formats.ledger_metadata import LedgerMetadata, LedgerState
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.placement.replication_plan import Fragment, closed_fragments
from bindery_core.sources import RandomFloats
from bindery_core.wire.messages import Status

from bindery_recovery.budget import RepairBudget

T = TypeVar("T")

BATCH_ENTRIES_MAX: Final = 100
"""Maximum number of entries in a batch."""
FIRST_BATCH_ENTRIES: Final = 8
"""Number of entries in the first batch, whose sizes are unknown."""
BATCH_SIZE: Final = 2**20
"""Target size of a batch in bytes, estimated from the largest entry of the previous batch."""
SILENT_BATCHES_MAX: Final = 2
"""Consecutive batches without a response after which a bookie is not read from again: each may have taken a full
timeout."""


@dataclass(frozen=True, slots=True)
class Depth:
    """How many entries of a fragment are read: the first and the last, and `percent` of all."""

    percent: float = 0.0

    def __post_init__(self) -> None:
        assert 0 <= self.percent <= 100


ENDS: Final = Depth()
"""The first and the last entry of each fragment."""
ALL: Final = Depth(100.0)
"""All entries."""


class FragmentState(StrEnum):
    WHOLE = "whole"
    MISSING = "missing"
    LOST = "lost"
    LEAVING = "leaving"
    REFILLING = "refilling"
    UNSURE = "unsure"


@dataclass(frozen=True, slots=True)
class FragmentCheck:
    """The result of checking one fragment."""

    fragment: Fragment
    state: FragmentState
    bad_entry_ids: tuple[int, ...] = ()
    """Requested entries that are certainly absent or corrupt, ascending. Only if MISSING."""
    reason: str = ""
    """Short reason for the first entry that is not good."""

    @property
    def entries_to_copy(self) -> Sequence[int]:
        """Entries that the bookie is known to lack. A replacement needs the whole fragment."""
        if self.state is FragmentState.MISSING:
            return self.bad_entry_ids
        return self.fragment.entry_ids if self.state in (FragmentState.LOST, FragmentState.LEAVING) else ()


@dataclass(frozen=True, slots=True)
class OpenTail:
    """The last segment of a ledger that is not closed."""

    segment_first: int
    ensemble: tuple[BookieId, ...]
    lost: Mapping[int, BookieId]
    """Members that are not registered, by ensemble index."""
    leaving: Mapping[int, BookieId]

    @property
    def is_whole(self) -> bool:
        return not self.lost and not self.leaving


@dataclass(frozen=True, slots=True)
class LedgerCheck:
    """The result of checking one ledger."""

    ledger_id: LedgerId
    metadata: LedgerMetadata
    bad: tuple[FragmentCheck, ...]
    """Every fragment that is not WHOLE, sorted by segment, then index."""
    tail: OpenTail | None
    """None: the ledger is closed."""
    entries_read: int
    bytes_read: int

    @property
    def is_whole(self) -> bool:
        """Whether no replica is known to be missing."""
        return not self.bad and (self.tail is None or self.tail.is_whole)

    @property
    def missing_entries(self) -> int:
        """Number of replicas known to be missing."""
        return sum(len(one.entries_to_copy) for one in self.bad)

    @property
    def missing_bytes(self) -> int | None:
        """Payload bytes of the missing replicas, estimated from the ledger's length; None: the ledger is not closed."""
        if self.metadata.state is not LedgerState.CLOSED:
            return None
        return self.metadata.length * self.missing_entries // max(1, self.metadata.last_entry_id + 1)


async def check_ledger(
    client: LedgerClient,
    ledger_id: LedgerId,
    metadata: LedgerMetadata,
    *,
    bookies: Mapping[BookieId, bool],
    leaving: Collection[BookieId] = (),
    depth: Depth = ENDS,
    randomness: RandomFloats | None = None,
    budget: RepairBudget | None = None,
) -> LedgerCheck:
    """Check all closed fragments. `bookies`: the registered ones, as `list_bookies` returns them. `leaving`: bookies
    that are to be emptied. `randomness` selects the entries for `depth.percent`. Only plain reads are sent, so nothing
    is fenced.

    A bookie's error or missing response never raises; it is part of the result.
    """
    fragments = closed_fragments(metadata)
    tail = None
    if metadata.state is not LedgerState.CLOSED:
        last = metadata.last_segment
        members = dict(enumerate(last.ensemble))
        tail = OpenTail(
            last.first_entry_id,
            last.ensemble,
            lost={index: b for index, b in members.items() if b not in bookies},
            leaving={index: b for index, b in members.items() if b in bookies and b in leaving},
        )
    run = _Run(client, ledger_id, metadata, depth=depth, randomness=randomness, budget=budget)
    checked = await run.check(fragments, bookies=bookies, leaving=leaving)
    bad = tuple(one for one in checked if one.state is not FragmentState.WHOLE)
    return LedgerCheck(ledger_id, metadata, bad, tail, run.entries_read, run.bytes_read)


async def check_fragments(
    client: LedgerClient,
    ledger_id: LedgerId,
    metadata: LedgerMetadata,
    fragments: Sequence[Fragment],
    *,
    bookies: Mapping[BookieId, bool],
    leaving: Collection[BookieId] = (),
    depth: Depth = ENDS,
    randomness: RandomFloats | None = None,
    budget: RepairBudget | None = None,
) -> list[FragmentCheck]:
    """Check some fragments as `check_ledger` does. Return one result for each, including WHOLE ones."""
    run = _Run(client, ledger_id, metadata, depth=depth, randomness=randomness, budget=budget)
    return await run.check(fragments, bookies=bookies, leaving=leaving)


def entries_to_read(entry_ids: Sequence[int], depth: Depth, randomness: RandomFloats | None = None) -> Sequence[int]:
    """Return the first and the last entry and `depth.percent` of all: the range is divided into equal parts, and one
    entry of each is selected at random. Ascending."""
    if len(entry_ids) <= 2 or depth.percent >= 100:
        return entry_ids
    places = {0, len(entry_ids) - 1}
    count = -int(-len(entry_ids) * depth.percent // 100)
    for stretch in range(count):
        begin, end = stretch * len(entry_ids) // count, (stretch + 1) * len(entry_ids) // count
        drawn = 0.5 if randomness is None else randomness.random()
        places.add(begin + int(drawn * (end - begin)))
    return [entry_ids[place] for place in sorted(places)]


@dataclass(slots=True)
class _Findings:
    """The findings about one fragment."""

    bad: list[int] = field(default_factory=list)
    reason: str = ""
    is_refilling: bool = False
    is_unsure: bool = False

    def check(self, fragment: Fragment) -> FragmentCheck:
        if self.is_refilling:
            return FragmentCheck(fragment, FragmentState.REFILLING, reason=self.reason)
        if self.bad:
            return FragmentCheck(fragment, FragmentState.MISSING, tuple(self.bad), self.reason)
        if self.is_unsure:
            return FragmentCheck(fragment, FragmentState.UNSURE, reason=self.reason)
        return FragmentCheck(fragment, FragmentState.WHOLE)


class _Run:
    """One check. Bookies are read concurrently, with one batch at a time for each."""

    def __init__(
        self,
        client: LedgerClient,
        ledger_id: LedgerId,
        metadata: LedgerMetadata,
        *,
        depth: Depth,
        randomness: RandomFloats | None,
        budget: RepairBudget | None,
    ) -> None:
        self.entries_read = 0
        self.bytes_read = 0
        self._client = client
        self._ledger_id = ledger_id
        self._metadata = metadata
        self._depth = depth
        self._randomness = randomness
        self._budget = budget
        self._loop = asyncio.get_running_loop()

    async def check(
        self, fragments: Sequence[Fragment], *, bookies: Mapping[BookieId, bool], leaving: Collection[BookieId]
    ) -> list[FragmentCheck]:
        known: dict[int, FragmentCheck] = {}
        by_bookie: dict[BookieId, list[int]] = {}
        for place, fragment in enumerate(fragments):
            if fragment.bookie_id not in bookies:
                known[place] = FragmentCheck(fragment, FragmentState.LOST, reason="bookie is not registered")
            elif fragment.bookie_id in leaving:
                known[place] = FragmentCheck(fragment, FragmentState.LEAVING, reason="bookie is leaving")
            else:
                by_bookie.setdefault(fragment.bookie_id, []).append(place)
        findings = {place: _Findings() for places in by_bookie.values() for place in places}
        await asyncio.gather(
            *(
                self._ask(bookie_id, [(fragments[place], findings[place]) for place in places])
                for bookie_id, places in by_bookie.items()
            )
        )
        return [
            known[place] if place in known else findings[place].check(fragment)
            for place, fragment in enumerate(fragments)
        ]

    async def _ask(self, bookie_id: BookieId, wanted: Sequence[tuple[Fragment, _Findings]]) -> None:
        """Read the requested entries from one bookie. An entry belongs to one segment only, so its id identifies the
        fragment."""
        ids = self._ids(wanted)
        count_max = BATCH_ENTRIES_MAX
        if self._budget is not None:
            count_max = min(count_max, self._budget.entries_in_flight_max)
        count = min(FIRST_BATCH_ENTRIES, count_max)
        silent = 0
        while batch := [one for _, one in zip(range(count), ids, strict=False)]:
            if silent == SILENT_BATCHES_MAX:
                for _, findings in batch:
                    self._unsure(findings, "bookie does not answer")
                continue
            owners = dict(batch)
            largest = 1
            batch_size = 0
            answered = False

            def record(replica: ReplicaRead, owners: dict[int, _Findings] = owners) -> None:
                nonlocal largest, batch_size, answered
                size = len(replica.frame or b"")
                largest = max(largest, size)
                batch_size += size
                self.entries_read += 1
                answered = answered or replica.verdict is not Verdict.ERROR or replica.status != Status.IO_ERROR
                self._judge(replica, owners[replica.entry_id])

            await self._read(bookie_id, [EntryId(entry_id) for entry_id in owners], record)
            self.bytes_read += batch_size
            if self._budget is not None:
                await self._budget.pay(batch_size)
            silent = 0 if answered else silent + 1
            count = max(1, min(2 * count, count_max, BATCH_SIZE // largest))

    async def _read(
        self, bookie_id: BookieId, entry_ids: Sequence[EntryId], record: Callable[[ReplicaRead], None]
    ) -> None:
        if self._budget is None:
            await self._client.read_replicas(self._ledger_id, self._metadata, bookie_id, entry_ids, record)
            return
        async with self._budget.entries(len(entry_ids)):
            await timed_read(self._client, self._budget, self._ledger_id, self._metadata, bookie_id, entry_ids, record)

    def _ids(self, wanted: Sequence[tuple[Fragment, _Findings]]) -> Iterator[tuple[int, _Findings]]:
        for fragment, findings in wanted:
            for entry_id in entries_to_read(fragment.entry_ids, self._depth, self._randomness):
                if findings.is_refilling:
                    break
                yield entry_id, findings

    def _judge(self, replica: ReplicaRead, findings: _Findings) -> None:
        match replica.verdict:
            case Verdict.GOOD:
                return
            case Verdict.ABSENT:
                findings.bad.append(replica.entry_id)
                reason = "entry is missing"
            # an old metadata format; its entries may have any digest type
            case Verdict.CORRUPT if self._metadata.digest_type is None:
                findings.is_unsure = True
                reason = "the metadata does not record its digest type, and it is not the default"
            case Verdict.CORRUPT:
                findings.bad.append(replica.entry_id)
                reason = replica.reason
            case Verdict.ERROR if replica.status == Status.UNKNOWN_LEDGER_STATE:
                findings.is_refilling = True
                reason = "bookie lost its storage and is refilling it"
            case Verdict.ERROR:
                findings.is_unsure = True
                reason = replica.reason
        if not findings.reason or findings.is_refilling:
            findings.reason = f"entry {replica.entry_id}: {reason}"

    def _unsure(self, findings: _Findings, reason: str) -> None:
        findings.is_unsure = True
        findings.reason = findings.reason or reason


async def timed_read(
    client: LedgerClient,
    budget: RepairBudget,
    ledger_id: LedgerId,
    metadata: LedgerMetadata,
    bookie_id: BookieId,
    entry_ids: Sequence[EntryId],
    take: Callable[[ReplicaRead], T],
) -> list[T]:
    """Call `read_replicas` and report the latency of the first response to the budget. Later responses also wait for
    other requests of this process, so they are not reported."""
    loop = asyncio.get_running_loop()
    began = loop.time()
    is_first = True

    def taken(replica: ReplicaRead) -> T:
        nonlocal is_first
        if is_first and replica.verdict is not Verdict.ERROR:
            budget.observe(loop.time() - began)
        is_first = False
        return take(replica)

    return await client.read_replicas(ledger_id, metadata, bookie_id, entry_ids, taken)
