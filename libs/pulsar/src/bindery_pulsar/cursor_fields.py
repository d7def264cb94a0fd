"""The state of a cursor, and its fields in the protobuf messages of znodes and cursor records.

| state                | field of PositionInfo or ManagedCursorInfo    | form                                     |
|----------------------|-----------------------------------------------|------------------------------------------|
| acknowledged entries | individualDeletedMessages                     | ranges, lower end open                   |
|                      | individualDeletedMessageRanges (PositionInfo) | bit sets per ledger, if they are shorter |
| parts of batches     | batchedEntryDeletionIndexInfo                 | words; a set bit is not acknowledged     |
| redelivery counts    | CursorExtra.redelivery_counts (ours)          | runs of entries with equal counts        |
| blobs                | CursorExtra.blobs (ours)                      | name and bytes                           |

Pulsar reads the ranges if a message has both ranges and bit sets, so a message has only one of them.
Source: Pulsar ManagedCursorImpl (recoverFromLedger, buildIndividualDeletedMessageRanges), MLDataFormats.proto.
"""

import struct
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from bindery_core.errors import Corrupt

from bindery_pulsar.ack_ranges import AckRanges
from bindery_pulsar.managed_ledger_pb2 import (
    BatchedEntryDeletionIndexInfo,
    CursorExtra,
    LongListMap,
    MessageRange,
    PositionInfo,
    RedeliveryCounts,
)
from bindery_pulsar.managed_ledger_records import Position

COUNTED_ENTRIES_MAX: Final = 1_000_000
"""Maximum number of entries of a cursor that have redelivery counts."""
REDELIVERY_COUNT_MAX: Final = 2**31 - 1
BLOBS_MAX: Final = 64
"""Maximum number of blobs of a cursor."""
BLOB_SIZE_MAX: Final = 2**20
"""Maximum bytes of a blob."""
BLOB_NAME_SIZE_MAX: Final = 255
"""Maximum bytes of the name of a blob, in UTF-8."""
_RANGE_SIZE: Final = 28
"""Approximate bytes of one stored range: two positions of about 11 bytes each, with their tags."""
_WORD_SIZE: Final = 11
"""Maximum bytes of one stored bit set word, with its tag."""
_ZERO_SIZE: Final = 2
"""Bytes of a stored word of 0."""
_WORD_BITS: Final = 64

Counts = tuple[tuple[int, int], ...]
"""Redelivery counts of one entry: pairs (count, bits) in ascending order of counts. Bit i is message i of the batch,
bit 0 the entry that is no batch. The bits of the pairs are disjoint, and no pair has the count or the bits 0."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CursorState:
    """The consumption state of a cursor."""

    mark_delete: Position
    acked: AckRanges = field(default_factory=AckRanges)
    """Acknowledged entries after `mark_delete`."""
    batches: Mapping[Position, int] = field(default_factory=dict)
    """Partly acknowledged batches by position. Bit i is set if message i is not acknowledged yet."""
    properties: Mapping[str, int] = field(default_factory=dict)
    redelivery_counts: Mapping[Position, Counts] = field(default_factory=dict)
    """Counts of the entries of which a message was delivered again. Pulsar neither has nor keeps them."""
    blobs: Mapping[str, bytes] = field(default_factory=dict)
    """Values that the subscription stores with the position. Pulsar neither has nor keeps them."""


# --- acknowledged entries


def put_acked(message: PositionInfo, acked: AckRanges) -> None:
    """Add acknowledged entries as ranges or bit sets, whichever is shorter."""
    if not acked:
        return
    ranges_size = acked.ranges_count * _RANGE_SIZE
    if ranges_size > sum(end // _WORD_BITS + 1 for end in acked.last_entries()) * _ZERO_SIZE:
        maps = [(ledger_id, words_of(acked.bits(ledger_id))) for ledger_id in acked.ledger_ids()]
        zeros = sum(words.count(0) for _, words in maps)
        if (sum(len(words) for _, words in maps) - zeros) * _WORD_SIZE + zeros * _ZERO_SIZE < ranges_size:
            for ledger_id, words in maps:
                message.individualDeletedMessageRanges.append(LongListMap(key=ledger_id, values=words))
            return
    message.individualDeletedMessages.extend(ranges_of(acked))


def ranges_of(acked: AckRanges) -> Iterable[MessageRange]:
    for ledger_id, first, last in acked:
        message = MessageRange()
        message.lowerEndpoint.ledgerId, message.lowerEndpoint.entryId = ledger_id, first - 1
        message.upperEndpoint.ledgerId, message.upperEndpoint.entryId = ledger_id, last
        yield message


def read_acked(ranges: Iterable[MessageRange], maps: Iterable[LongListMap] = ()) -> AckRanges:
    """Decode acknowledged ranges and bit sets.

    Pulsar's ranges may begin in one ledger and end in another. Only the part in the last ledger can be decoded here;
    the messages of the other part are delivered again.
    """
    acked = AckRanges()
    for item in ranges:
        first = item.lowerEndpoint.entryId + 1 if item.lowerEndpoint.ledgerId == item.upperEndpoint.ledgerId else 0
        if item.upperEndpoint.entryId >= first >= 0:
            acked.add_range(item.upperEndpoint.ledgerId, first, item.upperEndpoint.entryId)
    for words in maps:
        acked.add_bits(words.key, bits_of(words.values))
    return acked


# --- batches


def batch_of(position: Position, remaining: int) -> BatchedEntryDeletionIndexInfo:
    message = BatchedEntryDeletionIndexInfo(deleteSet=words_of(remaining))
    message.position.ledgerId, message.position.entryId = position
    return message


def batches_of(batches: Mapping[Position, int]) -> Iterable[BatchedEntryDeletionIndexInfo]:
    return (batch_of(position, remaining) for position, remaining in sorted(batches.items()))


def batch_size(remaining: int) -> int:
    """Return about how many bytes an encoded batch takes."""
    return 32 + bits_size(remaining)


def read_batches(items: Iterable[BatchedEntryDeletionIndexInfo]) -> dict[Position, int]:
    return {Position(item.position.ledgerId, item.position.entryId): bits_of(item.deleteSet) for item in items}


# --- redelivery counts and blobs


def count_runs(items: Iterable[tuple[Position, Counts]]) -> Iterator[tuple[Position, int, Counts]]:
    """Join adjacent entries with equal counts: yields first entry, number of entries, counts. `items` is sorted."""
    first, length = Position(0, 0), 0
    same: Counts = ()
    for position, counts in items:
        if length and counts == same and position == (first.ledger_id, first.entry_id + length):
            length += 1
            continue
        if length:
            yield first, length, same
        first, length, same = position, 1, counts
    if length:
        yield first, length, same


def put_counts(extra: CursorExtra, first: Position, entries: int, counts: Counts) -> None:
    run = extra.redelivery_counts.add(ledger_id=first.ledger_id, first_entry=first.entry_id)
    if entries > 1:
        run.entries = entries
    for count, bits in counts:
        run.levels.add(count=count, messages=() if bits == 1 else words_of(bits))


def counts_size(counts: Counts) -> int:
    """Return about how many bytes an encoded run takes."""
    return 40 + sum(16 + bits_size(bits) for _, bits in counts)


def read_counts(runs: Iterable[RedeliveryCounts]) -> Iterator[tuple[Position, Counts]]:
    """Raises Corrupt if the counts are not valid, or those of more than COUNTED_ENTRIES_MAX entries."""
    total = 0
    for run in runs:
        entries = run.entries if run.HasField("entries") else 1
        total += max(entries, 0)
        counts = tuple((level.count, bits_of(level.messages) if level.messages else 1) for level in run.levels)
        known, last = 0, 0
        for count, bits in counts:
            if not last < count <= REDELIVERY_COUNT_MAX or not bits or bits & known:
                raise Corrupt("redelivery counts are not valid", ledger_id=run.ledger_id, entry_id=run.first_entry)
            known, last = known | bits, count
        if entries < 1 or run.first_entry < 0 or not counts or total > COUNTED_ENTRIES_MAX:
            raise Corrupt(
                "redelivery counts are not valid",
                ledger_id=run.ledger_id,
                entry_id=run.first_entry,
                entries=total,
                entries_max=COUNTED_ENTRIES_MAX,
            )
        for entry_id in range(run.first_entry, run.first_entry + entries):
            yield Position(run.ledger_id, entry_id), counts


def read_blobs(extra: CursorExtra) -> dict[str, bytes]:
    """Raises Corrupt if there are too many blobs, or one is too large."""
    blobs = {blob.name: blob.value for blob in extra.blobs}
    check_blobs(blobs)
    return blobs


def check_blobs(blobs: Mapping[str, bytes]) -> None:
    """Raises Corrupt if there are too many blobs, or one is too large."""
    if len(blobs) > BLOBS_MAX or any(len(value) > BLOB_SIZE_MAX for value in blobs.values()):
        raise Corrupt("the cursor has too many blobs or a blob that is too large", count=len(blobs))


def put_extra(extra: CursorExtra, state: CursorState) -> None:
    """Add everything for which Pulsar has no fields."""
    for first, entries, counts in count_runs(sorted(state.redelivery_counts.items())):
        put_counts(extra, first, entries, counts)
    for name, value in sorted(state.blobs.items()):
        extra.blobs.add(name=name, value=value)


# --- bit sets


def words_of(bits: int) -> Sequence[int]:
    """Return a bit set as signed 64-bit words, least significant first."""
    count = (bits.bit_length() + _WORD_BITS - 1) // _WORD_BITS
    return struct.unpack(f"<{count}q", bits.to_bytes(8 * count, "little"))


def bits_of(words: Sequence[int]) -> int:
    return int.from_bytes(struct.pack(f"<{len(words)}q", *words), "little")


def bits_size(bits: int) -> int:
    """Return at most how many bytes an encoded bit set takes."""
    return (bits.bit_length() // _WORD_BITS + 1) * _WORD_SIZE
