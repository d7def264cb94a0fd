"""Every copy of every entry, read from the bookies that should have it, and what comparing them says.

Two copies agree when each verifies against its digest and their payloads and lengths are the same. Their LACs may
differ, and with them their digests: a recovery writes an entry again with what it knows.

| verdict        | means                                                                                             |
|----------------|---------------------------------------------------------------------------------------------------|
| agree          | every bookie of the write set has a good copy, and they agree                                     |
| missing        | the good copies agree, but a bookie of the write set denies to have one                           |
| corrupt        | the good copies agree, but another contradicts its digest                                         |
| error          | the good copies agree, but a bookie could not say                                                 |
| diverged       | two good copies disagree                                                                          |
| unreadable     | there is no good copy                                                                             |
| unacknowledged | beyond the last confirmed entry, where copies may be missing; those there are agree               |

Missing, corrupt, diverged and unreadable are differences, unless all that is wrong is that bookies could not say.
Only plain reads are sent: nothing is fenced, recovered or changed.
"""

import asyncio
import hashlib
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import Final, Protocol, TypeVar

from bindery_client.client import DIGEST_TYPE_UNTOLD
from bindery_client.ledger.replica import ReplicaRead, Verdict
from bindery_core.digest import SIZE_OF
from bindery_core.entry import HEADER_SIZE, peek_header
from bindery_core.formats.ledger_metadata import DigestType, LedgerMetadata, LedgerState, Segment
from bindery_core.ids import BookieId, EntryId, LedgerId
from bindery_core.placement.write_set import entries_of, write_set
from bindery_core.wire.messages import Status
from crc32c import crc32c

T = TypeVar("T")

BATCH_ENTRIES_MAX: Final = 500
BATCH_BYTES: Final = 2 * 1024 * 1024
"""What one batch aims at from each bookie, going by the largest entry of the batch before."""
FIRST_BATCH_ENTRIES: Final = 8
SILENT_BATCHES_MAX: Final = 3
"""After so many batches in a row without any answer a bookie is asked no more: each may have cost a time limit."""
SECOND_LOOK_PAUSE_S: Final = 1.0
"""What is being written has this long to arrive before its absence counts."""


class ReplicaSource(Protocol):
    """The part of the ledger client that is needed here."""

    async def metadata(self, ledger_id: LedgerId) -> LedgerMetadata: ...

    async def read_replicas(
        self, ledger_id: LedgerId, metadata: LedgerMetadata, bookie_id: BookieId, entry_ids: Sequence[EntryId],
        take: Callable[[ReplicaRead], T],
    ) -> list[T]: ...  # fmt: skip


async def walk(
    source: ReplicaSource, ledger_id: LedgerId, metadata: LedgerMetadata, *, first: int, last: int,
    take: Callable[[ReplicaRead], T], only: BookieId | None = None, rate: float = 0,
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep, silent: dict[BookieId, int] | None = None,
) -> AsyncIterator[list[tuple[EntryId, dict[BookieId, T]]]]:  # fmt: skip
    """Entries first..last, batch by batch, each with what `take` made of its copies, in the order of its write set.

    `only`: ask this bookie alone, for every entry. `rate`: entries a second at most; 0: as fast as batches come back.
    One batch at a time is under way. `silent` counts batches without an answer; handed in, it outlives this walk.
    """
    silent = {} if silent is None else silent
    count = FIRST_BATCH_ENTRIES
    at = first
    loop = asyncio.get_running_loop()
    while at <= last:
        began = loop.time()
        segment, end = _segment_until(metadata, at, last)
        end = min(end, at + count - 1)
        largest = 1

        def note(replica: ReplicaRead) -> T:
            nonlocal largest
            largest = max(largest, len(replica.frame or b""))
            if replica.verdict is not Verdict.ERROR or replica.frame is not None:
                silent[replica.bookie_id] = 0
            return take(replica)

        async def ask(bookie_id: BookieId, entry_ids: Sequence[EntryId]) -> list[T]:
            if silent.get(bookie_id, 0) >= SILENT_BATCHES_MAX:
                return [take(_given_up(ledger_id, entry_id, bookie_id)) for entry_id in entry_ids]
            silent[bookie_id] = silent.get(bookie_id, 0) + 1  # until an answer came
            return await source.read_replicas(ledger_id, metadata, bookie_id, entry_ids, note)

        wanted = _wanted(metadata, segment, at, end, only)
        answers = await asyncio.gather(*(ask(bookie_id, entry_ids) for bookie_id, entry_ids in wanted.items()))
        found = {
            (bookie_id, entry_id): answer
            for (bookie_id, entry_ids), row in zip(wanted.items(), answers, strict=True)
            for entry_id, answer in zip(entry_ids, row, strict=True)
        }
        yield [
            (EntryId(entry_id), {b: found[b, EntryId(entry_id)] for b in holders(metadata, segment, entry_id, only)})
            for entry_id in range(at, end + 1)
        ]
        if rate:
            await pause(max(0.0, (end - at + 1) / rate - (loop.time() - began)))
        at = end + 1
        count = max(1, min(2 * count, BATCH_ENTRIES_MAX, BATCH_BYTES // largest))


def holders(
    metadata: LedgerMetadata, segment: Segment, entry_id: int, only: BookieId | None = None
) -> tuple[BookieId, ...]:
    """The bookies of an entry's write set, in the order in which readers ask them."""
    if only is not None:
        return (only,)
    indexes = write_set(
        entry_id=entry_id, ensemble_size=metadata.ensemble_size, write_quorum=metadata.write_quorum
    )  # fmt: skip
    return tuple(segment.ensemble[index] for index in indexes)


def _segment_until(metadata: LedgerMetadata, at: int, last: int) -> tuple[Segment, int]:
    """The segment of entry `at`, and its last entry."""
    segment = metadata.segment_of(EntryId(at))
    later = [s.first_entry_id for s in metadata.segments if s.first_entry_id > at]
    return segment, min([last, *(first - 1 for first in later)])


def _wanted(
    metadata: LedgerMetadata, segment: Segment, first: int, last: int, only: BookieId | None
) -> dict[BookieId, list[EntryId]]:
    if only is not None:
        return {only: [EntryId(entry_id) for entry_id in range(first, last + 1)]}
    wanted = {}
    for index, bookie_id in enumerate(segment.ensemble):
        ids = entries_of(
            index, first=first, last=last, ensemble_size=metadata.ensemble_size, write_quorum=metadata.write_quorum
        )
        if ids:
            wanted[bookie_id] = [EntryId(entry_id) for entry_id in ids]
    return wanted


def _given_up(ledger_id: LedgerId, entry_id: EntryId, bookie_id: BookieId) -> ReplicaRead:
    reason = f"not asked any more after {SILENT_BATCHES_MAX} batches without an answer"
    return ReplicaRead(ledger_id, entry_id, bookie_id, int(Status.IO_ERROR), None, Verdict.ERROR, reason=reason)


# --- comparing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Copy:
    """What is kept of one replica. Of a corrupt one the figures are what it claims, as far as it has them."""

    verdict: Verdict
    reason: str = ""
    lac: int | None = None
    length: int | None = None
    size: int | None = None
    """Of the payload, bytes."""
    crc32c: int | None = None
    """Of the payload, whatever the ledger's digest is."""
    fingerprint: bytes = b""
    """Equal when the payloads are."""


class EntryVerdict(Enum):
    AGREE = "agree"
    MISSING = "missing"
    CORRUPT = "corrupt"
    ERROR = "error"
    DIVERGED = "diverged"
    UNREADABLE = "unreadable"
    UNACKNOWLEDGED = "unacknowledged"


@dataclass(frozen=True, slots=True)
class Row:
    """One entry and its copies."""

    entry_id: EntryId
    ensemble: tuple[BookieId, ...]
    copies: Mapping[BookieId, Copy]
    verdict: EntryVerdict
    differs: bool
    """Something is proven wrong."""
    is_incomplete: bool
    """A bookie could not say."""
    groups: tuple[tuple[BookieId, ...], ...]
    """The bookies with good copies, by what they hold: more than one when they diverged."""

    @property
    def is_bad(self) -> bool:
        return self.differs or self.is_incomplete

    def at(self, verdict: Verdict) -> tuple[BookieId, ...]:
        return tuple(bookie_id for bookie_id, copy in self.copies.items() if copy.verdict is verdict)

    @property
    def words(self) -> str:
        """The verdict and where: `missing at bookie-1`."""
        if self.verdict is EntryVerdict.DIVERGED:
            return "diverged: " + " | ".join(",".join(group) for group in self.groups)
        if self.verdict in (EntryVerdict.AGREE, EntryVerdict.UNACKNOWLEDGED):
            return str(self.verdict.value)
        parts = [
            f"{word} at {','.join(self.at(verdict))}"
            for word, verdict in (("corrupt", Verdict.CORRUPT), ("missing", Verdict.ABSENT), ("error", Verdict.ERROR))
            if self.at(verdict)
        ]
        return ("unreadable: " if self.verdict is EntryVerdict.UNREADABLE else "") + ", ".join(parts)


def copy_of(replica: ReplicaRead, digest_type: DigestType) -> Copy:
    """What comparing needs of a replica, without its bytes."""
    frame = replica.frame
    if frame is None or len(frame) < HEADER_SIZE:
        return Copy(replica.verdict, replica.reason)
    header = peek_header(frame)
    payload = frame[HEADER_SIZE + SIZE_OF[digest_type] :]
    return Copy(
        replica.verdict, replica.reason, header.lac, header.length, len(payload), crc32c(payload),
        hashlib.blake2b(payload, digest_size=16).digest(),
    )  # fmt: skip


def judge(entry_id: EntryId, ensemble: tuple[BookieId, ...], copies: Mapping[BookieId, Copy], *, limit: int) -> Row:
    """The verdict over one entry. `limit`: the last entry that must be there."""
    groups: dict[tuple[bytes, int | None], list[BookieId]] = {}
    for bookie_id, copy in copies.items():
        if copy.verdict is Verdict.GOOD:
            groups.setdefault((copy.fingerprint, copy.length), []).append(bookie_id)
    kinds = {copy.verdict for copy in copies.values()}
    may_be_missing = entry_id > limit
    is_missing = Verdict.ABSENT in kinds and not may_be_missing
    is_corrupt = Verdict.CORRUPT in kinds
    is_error = Verdict.ERROR in kinds
    if len(groups) > 1:
        verdict = EntryVerdict.DIVERGED
    elif not groups and not may_be_missing:
        verdict = EntryVerdict.UNREADABLE
    elif is_corrupt:
        verdict = EntryVerdict.CORRUPT
    elif is_missing:
        verdict = EntryVerdict.MISSING
    elif is_error:
        verdict = EntryVerdict.ERROR
    else:
        verdict = EntryVerdict.UNACKNOWLEDGED if may_be_missing else EntryVerdict.AGREE
    return Row(
        entry_id, ensemble, copies, verdict,
        differs=len(groups) > 1 or is_corrupt or is_missing, is_incomplete=is_error,
        groups=tuple(map(tuple, groups.values())),
    )  # fmt: skip


async def compare(
    source: ReplicaSource, ledger_id: LedgerId, metadata: LedgerMetadata, *, first: int, last: int, limit: int,
    rate: float = 0, pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> AsyncIterator[list[Row]]:  # fmt: skip
    """Judge entries first..last, batch by batch. `limit`: the last confirmed entry.

    While a ledger is written or repaired, copies are on their way and bookies change: what then looks bad is looked at
    once more, with fresh metadata. Raises NoSuchLedger when the ledger is deleted meanwhile.
    """
    silent: dict[BookieId, int] = {}
    at = first
    while at <= last:
        looked_at = metadata
        batches = _judged(
            source, ledger_id, metadata, first=at, last=last, limit=limit, rate=rate, pause=pause, silent=silent
        )
        async for rows in batches:
            if any(row.is_bad for row in rows):
                metadata = await source.metadata(ledger_id)
                if metadata != looked_at or metadata.state is not LedgerState.CLOSED:
                    await pause(SECOND_LOOK_PAUSE_S)
                    metadata = await source.metadata(ledger_id)
                    first_id, last_id = rows[0].entry_id, rows[-1].entry_id
                    again = _judged(
                        source, ledger_id, metadata, first=first_id, last=last_id, limit=limit, rate=0, pause=pause,
                        silent=silent,
                    )  # fmt: skip
                    rows = [row async for batch in again for row in batch]
            yield rows
            at = rows[-1].entry_id + 1
            if metadata != looked_at:
                break  # go on with where the copies are now
        else:
            return


async def _judged(
    source: ReplicaSource, ledger_id: LedgerId, metadata: LedgerMetadata, *, first: int, last: int, limit: int,
    rate: float, pause: Callable[[float], Awaitable[None]], silent: dict[BookieId, int],
) -> AsyncIterator[list[Row]]:  # fmt: skip
    digest_type = metadata.digest_type or DIGEST_TYPE_UNTOLD
    batches = walk(
        source, ledger_id, metadata, first=first, last=last, take=lambda replica: copy_of(replica, digest_type),
        rate=rate, pause=pause, silent=silent,
    )  # fmt: skip
    async for batch in batches:
        yield [judge(e, metadata.segment_of(e).ensemble, copies, limit=limit) for e, copies in batch]
