"""Read every copy of every entry from the bookies of its write set, and compare the copies.

Two copies agree if each verifies against its digest and both have the same payload and length. Their LACs may differ,
and so may their digests, because recovery of a ledger rewrites entries with another LAC.

| verdict        | meaning                                                                                           |
|----------------|---------------------------------------------------------------------------------------------------|
| agree          | every bookie of the write set has a good copy, and they agree                                     |
| missing        | the good copies agree, but a bookie of the write set reports that it has no copy                  |
| corrupt        | the good copies agree, but another copy contradicts its digest                                    |
| error          | the good copies agree, but a bookie did not return its copy                                       |
| diverged       | two good copies disagree                                                                          |
| unreadable     | no copy is good                                                                                   |
| unacknowledged | the entry is beyond the last confirmed one, so copies may be missing; the existing copies agree   |

Missing, corrupt, diverged and unreadable are differences. An entry is not a difference if the only problem is that
bookies did not return copies. The module sends plain reads only: the ledger is not fenced, recovered or changed.
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
"""Maximum number of entries in one batch."""
BATCH_BYTES: Final = 2 * 1024 * 1024
"""Target size in bytes of one batch from each bookie, computed from the largest entry of the previous batch."""
FIRST_BATCH_ENTRIES: Final = 8
"""Number of entries in the first batch, before the size of an entry is known."""
SILENT_BATCHES_MAX: Final = 3
"""Number of consecutive batches without a response after which a bookie is skipped, because each batch may time out."""
RECHECK_PAUSE_S: Final = 1.0
"""Seconds before a bad entry is read again, so that adds in progress can complete."""


class ReplicaSource(Protocol):
    """The part of the ledger client that this module uses."""

    async def metadata(self, ledger_id: LedgerId) -> LedgerMetadata: ...

    async def read_replicas(
        self,
        ledger_id: LedgerId,
        metadata: LedgerMetadata,
        bookie_id: BookieId,
        entry_ids: Sequence[EntryId],
        take: Callable[[ReplicaRead], T],
    ) -> list[T]: ...


async def walk(
    source: ReplicaSource,
    ledger_id: LedgerId,
    metadata: LedgerMetadata,
    *,
    first: int,
    last: int,
    take: Callable[[ReplicaRead], T],
    only: BookieId | None = None,
    rate: float = 0,
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
    silent: dict[BookieId, int] | None = None,
) -> AsyncIterator[list[tuple[EntryId, dict[BookieId, T]]]]:
    """Yield the entries first..last in batches, each with the results of `take` for its copies, in write set order.

    `only`: read every entry from this bookie and no other. `rate`: maximum entries per second; 0: no limit. One batch
    is read at a time. `silent` counts the batches of each bookie without a response; pass it to keep the counts between
    calls.
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
            silent[bookie_id] = silent.get(bookie_id, 0) + 1  # reset by the first response
            return await source.read_replicas(ledger_id, metadata, bookie_id, entry_ids, note)

        requests = _requests(metadata, segment, at, end, only)
        answers = await asyncio.gather(*(ask(bookie_id, entry_ids) for bookie_id, entry_ids in requests.items()))
        found = {
            (bookie_id, entry_id): answer
            for (bookie_id, entry_ids), row in zip(requests.items(), answers, strict=True)
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
    """Return the bookies of the write set of an entry, in the order in which clients read from them; or only `only`."""
    if only is not None:
        return (only,)
    indexes = write_set(entry_id=entry_id, ensemble_size=metadata.ensemble_size, write_quorum=metadata.write_quorum)
    return tuple(segment.ensemble[index] for index in indexes)


def _segment_until(metadata: LedgerMetadata, at: int, last: int) -> tuple[Segment, int]:
    """Return the segment of entry `at`, and the last entry of the segment up to `last`."""
    segment = metadata.segment_of(EntryId(at))
    later = [s.first_entry_id for s in metadata.segments if s.first_entry_id > at]
    return segment, min([last, *(first - 1 for first in later)])


def _requests(
    metadata: LedgerMetadata, segment: Segment, first: int, last: int, only: BookieId | None
) -> dict[BookieId, list[EntryId]]:
    """Return the entries to read from each bookie."""
    if only is not None:
        return {only: [EntryId(entry_id) for entry_id in range(first, last + 1)]}
    requests = {}
    for index, bookie_id in enumerate(segment.ensemble):
        ids = entries_of(
            index, first=first, last=last, ensemble_size=metadata.ensemble_size, write_quorum=metadata.write_quorum
        )
        if ids:
            requests[bookie_id] = [EntryId(entry_id) for entry_id in ids]
    return requests


def _given_up(ledger_id: LedgerId, entry_id: EntryId, bookie_id: BookieId) -> ReplicaRead:
    reason = f"skipped after {SILENT_BATCHES_MAX} batches without a response"
    return ReplicaRead(ledger_id, entry_id, bookie_id, int(Status.IO_ERROR), None, Verdict.ERROR, reason=reason)


# --- comparing --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Copy:
    """Facts of one replica. The numbers of a corrupt replica are those in its header, if it has one."""

    verdict: Verdict
    reason: str = ""
    lac: int | None = None
    length: int | None = None
    size: int | None = None
    """Size of the payload in bytes."""
    crc32c: int | None = None
    """CRC-32C of the payload, independent of the digest type of the ledger."""
    fingerprint: bytes = b""
    """Hash of the payload: equal for equal payloads."""


class EntryVerdict(Enum):
    """Verdict on the copies of one entry; the docstring of the module has a table of them."""

    AGREE = "agree"
    MISSING = "missing"
    CORRUPT = "corrupt"
    ERROR = "error"
    DIVERGED = "diverged"
    UNREADABLE = "unreadable"
    UNACKNOWLEDGED = "unacknowledged"


@dataclass(frozen=True, slots=True)
class Row:
    """The verdict on one entry, and its copies."""

    entry_id: EntryId
    ensemble: tuple[BookieId, ...]
    copies: Mapping[BookieId, Copy]
    verdict: EntryVerdict
    differs: bool
    """A copy is proven missing, corrupt or different."""
    is_incomplete: bool
    """A bookie did not return its copy."""
    groups: tuple[tuple[BookieId, ...], ...]
    """The bookies with good copies, grouped by content; more than one group if the copies diverged."""

    @property
    def is_bad(self) -> bool:
        return self.differs or self.is_incomplete

    def at(self, verdict: Verdict) -> tuple[BookieId, ...]:
        """Return the bookies whose copies have this verdict."""
        return tuple(bookie_id for bookie_id, copy in self.copies.items() if copy.verdict is verdict)

    @property
    def words(self) -> str:
        """The verdict with the bookies concerned, such as `missing at bookie-1`."""
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
    """Return the facts of a replica that a comparison needs, without its bytes."""
    frame = replica.frame
    if frame is None or len(frame) < HEADER_SIZE:
        return Copy(replica.verdict, replica.reason)
    header = peek_header(frame)
    payload = frame[HEADER_SIZE + SIZE_OF[digest_type] :]
    return Copy(
        replica.verdict,
        replica.reason,
        header.lac,
        header.length,
        len(payload),
        crc32c(payload),
        hashlib.blake2b(payload, digest_size=16).digest(),
    )


def judge(entry_id: EntryId, ensemble: tuple[BookieId, ...], copies: Mapping[BookieId, Copy], *, limit: int) -> Row:
    """Return the verdict on one entry. `limit`: the last entry that must exist."""
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
        entry_id,
        ensemble,
        copies,
        verdict,
        differs=len(groups) > 1 or is_corrupt or is_missing,
        is_incomplete=is_error,
        groups=tuple(map(tuple, groups.values())),
    )


async def compare(
    source: ReplicaSource,
    ledger_id: LedgerId,
    metadata: LedgerMetadata,
    *,
    first: int,
    last: int,
    limit: int,
    rate: float = 0,
    pause: Callable[[float], Awaitable[None]] = asyncio.sleep,
) -> AsyncIterator[list[Row]]:
    """Yield the verdicts on entries first..last in batches. `limit`: the last confirmed entry.

    While a ledger is written or repaired, copies may not have arrived yet and ensembles may change. A batch with a bad
    entry is then read again, with new metadata. Raises NoSuchLedger if the ledger is deleted meanwhile.
    """
    silent: dict[BookieId, int] = {}
    at = first
    while at <= last:
        used = metadata
        batches = _judged(
            source, ledger_id, metadata, first=at, last=last, limit=limit, rate=rate, pause=pause, silent=silent
        )
        async for rows in batches:
            if any(row.is_bad for row in rows):
                metadata = await source.metadata(ledger_id)
                if metadata != used or metadata.state is not LedgerState.CLOSED:
                    await pause(RECHECK_PAUSE_S)
                    metadata = await source.metadata(ledger_id)
                    first_id, last_id = rows[0].entry_id, rows[-1].entry_id
                    again = _judged(
                        source,
                        ledger_id,
                        metadata,
                        first=first_id,
                        last=last_id,
                        limit=limit,
                        rate=0,
                        pause=pause,
                        silent=silent,
                    )
                    rows = [row async for batch in again for row in batch]
            yield rows
            at = rows[-1].entry_id + 1
            if metadata != used:
                break  # continue with the new metadata
        else:
            return


async def _judged(
    source: ReplicaSource,
    ledger_id: LedgerId,
    metadata: LedgerMetadata,
    *,
    first: int,
    last: int,
    limit: int,
    rate: float,
    pause: Callable[[float], Awaitable[None]],
    silent: dict[BookieId, int],
) -> AsyncIterator[list[Row]]:
    digest_type = metadata.digest_type or DIGEST_TYPE_UNTOLD
    batches = walk(
        source,
        ledger_id,
        metadata,
        first=first,
        last=last,
        take=lambda replica: copy_of(replica, digest_type),
        rate=rate,
        pause=pause,
        silent=silent,
    )
    async for batch in batches:
        yield [judge(e, metadata.segment_of(e).ensemble, copies, limit=limit) for e, copies in batch]
