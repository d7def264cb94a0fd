"""Encode, decode and replay the subscription log: the records of a cursor ledger. Pure.

Every record is a protobuf PositionInfo with the fields of Pulsar, which mean:

| field                                                                 | snapshot        | change                     |
|-----------------------------------------------------------------------|-----------------|----------------------------|
| ledgerId, entryId                                                     | mark-delete     | mark-delete after it       |
| properties                                                            | all             | all                        |
| individualDeletedMessages, individualDeletedMessageRanges             | all, in parts   | newly acknowledged entries |
| batchedEntryDeletionIndexInfo                                         | all, in parts   | changed batches            |
| log (1001, LogRecord; Pulsar skips it as an unknown field)            | see below       | see below                  |

| LogRecord      | type   | meaning                                                                                |
|----------------|--------|----------------------------------------------------------------------------------------|
| kind           | u32    | 1 snapshot, 2 change, 3 move: a change after which nothing of the state before is left  |
| snapshot_entry | i64    | entry id of the first record of the snapshot that this record belongs to or continues  |
| sequence       | i64    | entry id of this record - snapshot_entry                                               |
| part           | u32    | number of this record in its snapshot or change, from 0                                |
| more           | bool   | further parts follow, without which the snapshot or change does not count              |
| extra          | message| redelivery counts and blobs: all, in parts; in a change those that it sets             |
| removed_blobs  | texts  | names of the blobs that a change removes                                               |

A record without `log` is Pulsar's and is the complete state, a snapshot of one record. So a ledger is a sequence of
snapshots and changes. The newest state is the last complete snapshot with the complete changes after it. Only the last
snapshot or change of a ledger can be incomplete, because a writer that failed does not continue its ledger.

A broker of Pulsar reads only the last record. It finds the mark-delete position and some of the acknowledgements after
it, so it may deliver messages again but never skips one. The last part of a snapshot holds the acknowledgements that
fit in SNAPSHOT_END_SIZE_MAX, so Pulsar finds all of them after a clean close, unless there are tens of millions.

Invariant: what is read is what was written, or Corrupt is raised; the parts of a change count together or not at all.
Source: Pulsar ManagedCursorImpl.recoverFromLedger (the last entry is the state), MLDataFormats.proto.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from bindery_core.errors import Corrupt
from google.protobuf.message import DecodeError

from bindery_pulsar.ack_ranges import AckRanges
from bindery_pulsar.cursor_fields import (
    COUNTED_ENTRIES_MAX,
    Counts,
    CursorState,
    batch_of,
    batch_size,
    check_blobs,
    count_runs,
    counts_size,
    put_acked,
    put_counts,
    read_acked,
    read_batches,
    read_blobs,
    read_counts,
)
from bindery_pulsar.managed_ledger_pb2 import PositionInfo
from bindery_pulsar.managed_ledger_records import Position
from bindery_pulsar.position_map import PositionMap

PART_SIZE_MAX: Final = 2**20
"""Approximate maximum bytes of a record, without its properties and the acknowledged entries."""
SNAPSHOT_END_SIZE_MAX: Final = 4 * 2**20
"""Approximate maximum bytes of a record with its acknowledged entries. A bookie accepts 5 MiB."""
_SLICE_BLOCKS_MAX: Final = 4096
"""Maximum number of blocks of acknowledged entries in a record. A block takes at most 704 bytes as words."""
_SNAPSHOT, _CHANGE, _MOVE = 1, 2, 3


@dataclass(frozen=True, slots=True, kw_only=True)
class CursorChange:
    """The difference between two states of a cursor."""

    mark_delete: Position
    """The position after the change."""
    properties: Mapping[str, int] = field(default_factory=dict)
    """All properties after the change."""
    acked: AckRanges = field(default_factory=AckRanges)
    batches: Mapping[Position, int] = field(default_factory=dict)
    redelivery_counts: Mapping[Position, Counts] = field(default_factory=dict)
    """All counts of the entries whose counts changed."""
    blobs: Mapping[str, bytes] = field(default_factory=dict)
    removed_blobs: Collection[str] = ()
    is_move: bool = False
    """Nothing of the former state is left, because the cursor was moved by a seek."""


# --- encoding


def encode_snapshot(state: CursorState, *, entry_id: int) -> Iterator[bytes]:
    """Yield the records of a snapshot; `entry_id`: of the first. `state` must not change until the last was taken."""
    change = CursorChange(
        mark_delete=state.mark_delete,
        properties=state.properties,
        acked=state.acked,
        batches=state.batches,
        redelivery_counts=state.redelivery_counts,
        blobs=state.blobs,
    )
    return _Encoder(change, kind=_SNAPSHOT, snapshot_entry=entry_id, entry_id=entry_id).records()


def encode_change(change: CursorChange, *, snapshot_entry: int, entry_id: int) -> list[bytes]:
    """Return the records of a change; `entry_id`: of the first. It continues the snapshot at `snapshot_entry`."""
    kind = _MOVE if change.is_move else _CHANGE
    return list(_Encoder(change, kind=kind, snapshot_entry=snapshot_entry, entry_id=entry_id).records())


class _Encoder:
    """Divides a snapshot or a change into records."""

    def __init__(self, change: CursorChange, *, kind: int, snapshot_entry: int, entry_id: int) -> None:
        self._change = change
        self._kind = kind
        self._snapshot_entry = snapshot_entry
        self._entry_id = entry_id
        self._part = 0
        self._size = 0
        self._message = self._start()

    def records(self) -> Iterator[bytes]:
        change = self._change
        for name in sorted(change.removed_blobs):
            yield from self._make_room(3 * len(name) + 8)
            self._message.log.removed_blobs.append(name)
        for name, value in sorted(change.blobs.items()):
            yield from self._make_room(len(value) + 3 * len(name) + 16)
            self._message.log.extra.blobs.add(name=name, value=value)
        for first, entries, counts in count_runs(sorted(change.redelivery_counts.items())):
            yield from self._make_room(counts_size(counts))
            put_counts(self._message.log.extra, first, entries, counts)
        for position, remaining in sorted(change.batches.items()):
            yield from self._make_room(batch_size(remaining))
            self._message.batchedEntryDeletionIndexInfo.append(batch_of(position, remaining))
        for acked in change.acked.slices(_SLICE_BLOCKS_MAX) if change.acked else ():
            if not self._size:
                put_acked(self._message, acked)
            else:
                fields = PositionInfo(ledgerId=0, entryId=0)
                put_acked(fields, acked)
                yield from self._make_room(fields.ByteSize(), size_max=SNAPSHOT_END_SIZE_MAX)
                self._message.individualDeletedMessages.extend(fields.individualDeletedMessages)
                self._message.individualDeletedMessageRanges.extend(fields.individualDeletedMessageRanges)
            self._size = SNAPSHOT_END_SIZE_MAX  # ranges and bit sets must not be in one record
        yield self._message.SerializeToString()

    def _start(self) -> PositionInfo:
        message = PositionInfo(ledgerId=self._change.mark_delete.ledger_id, entryId=self._change.mark_delete.entry_id)
        for name, number in sorted(self._change.properties.items()):
            message.properties.add(name=name, value=number)
        log = message.log
        log.kind, log.snapshot_entry = self._kind, self._snapshot_entry
        log.sequence = self._entry_id + self._part - self._snapshot_entry
        if self._part:
            log.part = self._part
        return message

    def _make_room(self, size: int, *, size_max: int = PART_SIZE_MAX) -> Iterator[bytes]:
        """End the present record if it holds anything and has no room for `size` more bytes."""
        if self._size and self._size + size > size_max:
            self._message.log.more = True
            yield self._message.SerializeToString()
            self._part += 1
            self._size = 0
            self._message = self._start()
        self._size += size


# --- decoding


class Extent(NamedTuple):
    """Which records of a cursor ledger hold its newest state."""

    first: int
    """Entry id of the first record to replay."""
    last: int
    is_known: bool
    """False: a snapshot is incomplete. Call `find_extent` again with the record `last`."""


def find_extent(entry_id: int, payload: bytes) -> Extent:
    """Return which records to replay, given the last one of a ledger. Raises Corrupt."""
    message = _decode(entry_id, payload)
    if not message.HasField("log"):
        return Extent(entry_id, entry_id, True)
    log = message.log
    if log.kind != _SNAPSHOT or not log.more:
        return Extent(log.snapshot_entry, entry_id, True)
    if log.snapshot_entry == 0:
        raise Corrupt("the cursor ledger has no complete snapshot", entry_id=entry_id)
    return Extent(log.snapshot_entry - 1, log.snapshot_entry - 1, False)


class LogReplay:
    """Builds the state from the records of an `Extent`, in order."""

    def __init__(self) -> None:
        self._state: _Builder | None = None
        self._snapshot_entry = -1
        self._parts: list[PositionInfo] = []
        """The parts so far of a snapshot or change that is not complete."""
        self.changes_size = 0
        """Bytes of the records since the last complete snapshot."""
        self.is_snapshot = False
        """Whether the last record completed a snapshot: Pulsar reads the same state."""

    def feed(self, entry_id: int, payload: bytes) -> None:
        """Take the next record. Raises Corrupt if it is damaged or does not continue the former one."""
        message = _decode(entry_id, payload)
        if not message.HasField("log"):
            self._check(not self._parts, "the snapshot or change before it is not complete", entry_id)
            self._replace([message], entry_id)
            return
        log = message.log
        self._check(log.part == len(self._parts), "a part of a snapshot or change is missing", entry_id)
        if log.part:
            former = self._parts[-1].log
            same = (log.kind, log.snapshot_entry) == (former.kind, former.snapshot_entry)
            self._check(same, "parts of different snapshots or changes follow each other", entry_id)
        elif log.kind == _SNAPSHOT:
            self._check(log.sequence == 0, "a snapshot has the wrong sequence number", entry_id)
        else:
            self._check(log.snapshot_entry == self._snapshot_entry, "it continues another snapshot", entry_id)
        self.changes_size += len(payload)
        self.is_snapshot = False
        self._parts.append(message)
        if log.more:
            return
        parts, self._parts = self._parts, []
        if log.kind == _SNAPSHOT:
            self._replace(parts, log.snapshot_entry)
        else:
            self._apply(parts, entry_id)

    def state(self) -> CursorState:
        """Return the newest state. Raises Corrupt if there was no complete snapshot."""
        if self._state is None:
            raise Corrupt("the cursor ledger has no complete snapshot")
        return self._state.state()

    @staticmethod
    def _check(condition: bool, what: str, entry_id: int) -> None:
        if not condition:
            raise Corrupt("cursor record cannot be applied: " + what, entry_id=entry_id)

    def _replace(self, parts: list[PositionInfo], snapshot_entry: int) -> None:
        state = _Builder()
        for part in parts:
            state.add(part)
        self._state = state
        self._snapshot_entry = snapshot_entry
        self.changes_size = 0
        self.is_snapshot = True

    def _apply(self, parts: list[PositionInfo], entry_id: int) -> None:
        state = self._state
        assert state is not None  # a change continues a snapshot
        if parts[0].log.kind == _MOVE:
            state = self._state = _Builder()
        elif (parts[-1].ledgerId, parts[-1].entryId) < state.mark_delete:
            raise Corrupt("cursor record cannot be applied: it moves the mark-delete position back", entry_id=entry_id)
        for part in parts:
            state.add(part)


class _Builder:
    """A state to which records are added."""

    def __init__(self) -> None:
        self.mark_delete = Position(-1, -1)
        self._acked = AckRanges()
        self._batches = PositionMap[int]()
        self._properties: dict[str, int] = {}
        self._counts = PositionMap[Counts]()
        self._blobs: dict[str, bytes] = {}

    def add(self, part: PositionInfo) -> None:
        """Add a record. Acknowledged entries are only added, other values are replaced."""
        acked = read_acked(part.individualDeletedMessages, part.individualDeletedMessageRanges)
        if self._acked:
            self._acked.update(acked)
        else:
            self._acked = acked
        for position, remaining in read_batches(part.batchedEntryDeletionIndexInfo).items():
            self._batches[position] = remaining
        self._properties = {item.name: item.value for item in part.properties}
        log = part.log
        for name in log.removed_blobs:
            self._blobs.pop(name, None)
        self._blobs.update(read_blobs(log.extra))
        check_blobs(self._blobs)
        for position, counts in read_counts(log.extra.redelivery_counts):
            self._counts[position] = counts
        if len(self._counts) > COUNTED_ENTRIES_MAX:
            raise Corrupt("the cursor has redelivery counts of too many entries", entries_max=COUNTED_ENTRIES_MAX)
        before, self.mark_delete = self.mark_delete, Position(part.ledgerId, part.entryId)
        if self.mark_delete != before:
            self._acked.remove_upto(*self.mark_delete)
            self._batches.remove_upto(self.mark_delete)
            self._counts.remove_upto(self.mark_delete)

    def state(self) -> CursorState:
        batches = {at: remaining for at, remaining in self._batches.items() if not self._acked.contains(*at)}
        counts = {at: value for at, value in self._counts.items() if not self._acked.contains(*at)}
        return CursorState(
            mark_delete=self.mark_delete,
            acked=self._acked,
            batches=batches,
            properties=self._properties,
            redelivery_counts=counts,
            blobs=self._blobs,
        )


def _decode(entry_id: int, payload: bytes) -> PositionInfo:
    try:
        message = PositionInfo.FromString(payload)
    except DecodeError as error:
        raise Corrupt("cursor record cannot be read", entry_id=entry_id, size=len(payload)) from error
    if message.HasField("log"):
        log = message.log
        if log.kind not in (_SNAPSHOT, _CHANGE, _MOVE):
            raise Corrupt("cursor record has an unknown kind", entry_id=entry_id, kind=log.kind)
        if not 0 <= log.snapshot_entry <= entry_id or log.sequence != entry_id - log.snapshot_entry:
            raise Corrupt(
                "cursor record is not at its place in the ledger",
                entry_id=entry_id,
                snapshot_entry=log.snapshot_entry,
                sequence=log.sequence,
            )
    return message
