"""Verify the entries of one bookie and build rows of REPLICAS in columns, as Arrow record batches."""

import struct
from collections.abc import Sequence
from typing import Any, Final

import pyarrow as pa
from bindery_core.digest import Digester
from bindery_core.entry import HEADER_SIZE
from bindery_core.formats.ledger_metadata import DigestType
from crc32c import crc32c

from bindery_spark.reading.fragments import Fragment

BATCH_ROWS: Final = 16_384
"""Number of rows at which a batch is full."""

SCHEMA: Final = pa.schema(
    [
        pa.field("ledger_id", pa.int64(), nullable=False),
        pa.field("segment", pa.int32(), nullable=False),
        pa.field("entry_id", pa.int64(), nullable=False),
        pa.field("bookie", pa.string(), nullable=False),
        pa.field("expected", pa.bool_(), nullable=False),
        pa.field("present", pa.bool_()),
        pa.field("digest_ok", pa.bool_()),
        pa.field("ledger_length", pa.int64()),
        pa.field("payload_length", pa.int32()),
        pa.field("payload_crc32c", pa.int64()),
        pa.field("lac", pa.int64()),
        pa.field("error", pa.string()),
    ]
)
"""The Arrow form of `schemas.REPLICAS`. A test compares the two."""

_CRC32C_FRAME: Final = struct.Struct(">qqqqI")
_FRAME: Final = struct.Struct(">qqqq")

Judged = tuple[list[bool | None], list[int | None], list[int | None], list[int | None], list[int | None]]
"""Columns digest_ok, ledger_length, payload_length, payload_crc32c, lac."""


def judge(digester: Digester, ledger_id: int, entry_ids: Sequence[int], frames: Sequence[bytes]) -> Judged:
    """Verify the digests of entry frames and return the columns that their headers fill.

    If a digest is wrong, or a frame is of another ledger or entry than requested, the entry counts as corrupt and its
    header is not used.
    """
    oks: list[bool | None] = []
    lengths: list[int | None] = []
    sizes: list[int | None] = []
    crcs: list[int | None] = []
    lacs: list[int | None] = []
    in_crc32c = digester.digest_type is DigestType.CRC32C
    payload_offset = HEADER_SIZE + digester.size
    unpack_crc32c, unpack = _CRC32C_FRAME.unpack_from, _FRAME.unpack_from
    for entry_id, frame in zip(entry_ids, frames, strict=True):
        if len(frame) >= payload_offset:
            view = memoryview(frame)
            header, payload = view[:HEADER_SIZE], view[payload_offset:]
            if in_crc32c:
                found_ledger, found_entry, lac, length, digest = unpack_crc32c(frame)
                is_sound = crc32c(payload, crc32c(header)) == digest
            else:
                found_ledger, found_entry, lac, length = unpack(frame)
                is_sound = digester.verify(header, frame[HEADER_SIZE:payload_offset], payload)
            if is_sound and found_ledger == ledger_id and found_entry == entry_id:
                oks.append(True)
                lengths.append(length)
                sizes.append(len(frame) - payload_offset)
                crcs.append(crc32c(payload))
                lacs.append(lac)
                continue
        oks.append(False)
        lengths.append(None)
        sizes.append(None)
        crcs.append(None)
        lacs.append(None)
    return oks, lengths, sizes, crcs, lacs


class Rows:
    """Collects the rows of one bookie in columns."""

    def __init__(self, bookie_id: str) -> None:
        self._bookie_id = bookie_id
        self._columns: list[list[object]] = [[] for _ in range(len(SCHEMA) - 1)]  # all but the bookie

    def __len__(self) -> int:
        return len(self._columns[0])

    def add_present(
        self, ledger_id: int, segment: int, entry_ids: Sequence[int], *, limit: int | None, judged: Judged
    ) -> None:
        """Add entries that the bookie has. Entries beyond `limit` are not expected. None: all are expected."""
        self._add(ledger_id, segment, entry_ids, limit, True, *judged, None)

    def add_absent(self, ledger_id: int, segment: int, entry_ids: Sequence[int]) -> None:
        """Add expected entries that the bookie reports as missing."""
        nothing: list[None] = [None] * len(entry_ids)
        self._add(ledger_id, segment, entry_ids, None, False, nothing, nothing, nothing, nothing, nothing, None)

    def add_error(
        self, ledger_id: int, segment: int, entry_ids: Sequence[int], *, limit: int | None, error: str
    ) -> None:
        """Add entries for which the bookie returned an error or no response."""
        nothing: list[None] = [None] * len(entry_ids)
        self._add(ledger_id, segment, entry_ids, limit, None, nothing, nothing, nothing, nothing, nothing, error)

    def add_unexpected(self, ledger_id: int, segment: int, entry_ids: Sequence[int]) -> None:
        """Add entries that the bookie lists although no metadata assigns them to it. They are not read."""
        nothing: list[None] = [None] * len(entry_ids)
        self._add(ledger_id, segment, entry_ids, -1, True, nothing, nothing, nothing, nothing, nothing, None)

    def _add(
        self,
        ledger_id: int,
        segment: int,
        entry_ids: Sequence[int],
        limit: int | None,
        present: bool | None,
        oks: Sequence[object],
        lengths: Sequence[object],
        sizes: Sequence[object],
        crcs: Sequence[object],
        lacs: Sequence[object],
        error: str | None,
    ) -> None:
        count = len(entry_ids)
        if not count:
            return
        if limit is None or entry_ids[-1] <= limit:
            expected: Sequence[object] = [True] * count
        else:
            expected = [entry_id <= limit for entry_id in entry_ids]
        added: tuple[Sequence[object], ...] = (
            [ledger_id] * count,
            [segment] * count,
            entry_ids,
            expected,
            [present] * count,
            oks,
            lengths,
            sizes,
            crcs,
            lacs,
            [error] * count,
        )
        for column, values in zip(self._columns, added, strict=True):
            column += values

    def take(self) -> pa.RecordBatch:
        """Return all rows and remove them."""
        columns, self._columns = self._columns, [[] for _ in self._columns]
        columns.insert(3, [self._bookie_id] * len(columns[0]))
        arrays = [pa.array(column, type=field.type) for column, field in zip(columns, SCHEMA, strict=True)]
        return pa.RecordBatch.from_arrays(arrays, schema=SCHEMA)


class EntryRows:
    """The sink of a `BookieReader` that makes one row per entry. `blocks.Blocks` makes one row per block."""

    def __init__(self, bookie_id: str) -> None:
        self._rows = Rows(bookie_id)

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def is_full(self) -> bool:
        return len(self._rows) >= BATCH_ROWS

    def add_frames(self, fragment: Fragment, entry_ids: Sequence[int], frames: Sequence[bytes]) -> None:
        ledger = fragment.ledger
        judged = judge(digester_of(ledger.digest_type, ledger.password), ledger.ledger_id, entry_ids, frames)
        self._rows.add_present(ledger.ledger_id, fragment.segment, entry_ids, limit=ledger.limit, judged=judged)

    def add_listed(self, fragment: Fragment, entry_ids: Sequence[int]) -> None:
        nothing: list[int | None] = [None] * len(entry_ids)
        unchecked: list[bool | None] = [None] * len(entry_ids)
        self._rows.add_present(
            fragment.ledger.ledger_id,
            fragment.segment,
            entry_ids,
            limit=fragment.ledger.limit,
            judged=(unchecked, nothing, nothing, nothing, nothing),
        )

    def add_absent(self, fragment: Fragment, entry_ids: Sequence[int]) -> None:
        self._rows.add_absent(fragment.ledger.ledger_id, fragment.segment, entry_ids)

    def add_error(self, fragment: Fragment, entry_ids: Sequence[int], error: str) -> None:
        ledger = fragment.ledger
        self._rows.add_error(ledger.ledger_id, fragment.segment, entry_ids, limit=ledger.limit, error=error)

    def add_unexpected(self, ledger_id: int, segment: int, entry_ids: Sequence[int]) -> None:
        self._rows.add_unexpected(ledger_id, segment, entry_ids)

    def add_unlisted(self, ledger_id: int, segment: int, error: str) -> None:
        self._rows.add_error(ledger_id, segment, [-1], limit=-2, error=error)

    def complete(self, fragment: Fragment, upto: int, *, is_last: bool) -> None:
        """Do nothing: rows are complete as soon as they are added."""

    def take(self) -> pa.RecordBatch:
        return self._rows.take()


_DIGESTERS: Final[dict[tuple[int, bytes], Digester]] = {}


def digester_of(digest_type: Any, password: bytes) -> Digester:
    """Return a cached digester. Most ledgers of a cluster share one."""
    known = _DIGESTERS.get((digest_type, password))
    if known is None:
        if len(_DIGESTERS) >= 1_000:
            _DIGESTERS.clear()
        known = _DIGESTERS[digest_type, password] = Digester(digest_type, password)
    return known
