"""Encode a bucket of delayed messages as a blob of at most 1 MiB.

| offset      | size    | field                                                                             |
|-------------|---------|-----------------------------------------------------------------------------------|
| 0           | 4       | magic `BDLY`                                                                      |
| 4           | 1       | version: 1                                                                        |
| 5           | 1       | E: bytes of an entry offset, 4 or 8                                               |
| 6           | 1       | T: bytes of a time offset, 4 or 8                                                 |
| 7           | 1       | zero                                                                              |
| 8           | 4       | N: number of rows, at least 1                                                     |
| 12          | 4       | L: number of ledgers, at least 1                                                  |
| 16          | 8       | base time, milliseconds since 1970                                                |
| 24          | 8 + 8   | covered_upto: ledger id and entry id, not before the last row                     |
| 40          | 8 * L   | ledger ids, ascending                                                             |
| ...         | 8 * L   | id of the first entry of each ledger                                              |
| ...         | 4 * L   | number of the first row of each ledger: 0 for the first, ascending                |
| ...         | E * N   | entry offsets: entry id minus first entry of its ledger; ascending within one     |
| ...         | T * N   | time offsets: delivery time minus base time, in milliseconds                      |
| end - 4     | 4       | CRC-32C of everything before it                                                   |

A row is one delayed entry; rows are in the order of their positions. All integers are unsigned and little-endian; ids
and delivery times are at most 2^63 - 1. The columns have a fixed width, so that they are read without a loop. A blob of
one ledger with times within 49 days takes 8 bytes for each row.

A row states a fact about a message: when it may be delivered first. It does not state that the message is still to be
delivered, so a blob stays valid while its messages become due or are acknowledged.
"""

import struct
import sys
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from operator import lt
from typing import Final

from bindery_core.errors import BadVersion, Corrupt
from bindery_core.ids import ID_MAX
from bindery_pulsar.message_id import Position
from crc32c import crc32c

BLOB_SIZE_MAX: Final = 2**20
"""Maximum bytes of a blob. Source: the limit of a cursor's blobs."""
MAGIC: Final = b"BDLY"
VERSION: Final = 1
DELIVER_AT_MAX: Final = 2**63 - 1
"""Maximum delivery time, milliseconds since 1970: the maximum of Pulsar's `deliver_at_time`."""

_HEADER: Final = struct.Struct("<4sBBBBIIQQQ")
_CRC: Final = struct.Struct("<I")
_LEDGER_SIZE: Final = 8 + 8 + 4
_ROW_SIZE_MAX: Final = 8 + 8
_TYPES: Final = {4: "I", 8: "Q"}
"""Type codes of `array` by bytes of an item."""

WEIGHT_MAX: Final = BLOB_SIZE_MAX - _HEADER.size - _CRC.size
"""Maximum weight of the columns of one blob."""
ROWS_MAX: Final = (WEIGHT_MAX - _LEDGER_SIZE) // _ROW_SIZE_MAX
"""Maximum number of rows: that of a blob with one ledger and the widest columns."""

assert _HEADER.size == 40
assert ROWS_MAX == 65_532
assert all(array(code).itemsize == size for size, code in _TYPES.items())


def weight(rows: int, ledgers: int) -> int:
    """Return the bytes that this number of rows and ledgers takes with the widest columns, without header and CRC."""
    return rows * _ROW_SIZE_MAX + ledgers * _LEDGER_SIZE


@dataclass(frozen=True, slots=True, eq=False)
class Columns:
    """Delayed messages in the order of their positions.

    Invariants: `ledgers` ascends; row i belongs to the last ledger whose `starts` is <= i; `starts[0]` is 0; within a
    ledger, `entries` ascends from 0; `weight` of the columns is at most WEIGHT_MAX.
    """

    ledgers: "array[int]"
    firsts: "array[int]"
    """Id of the first entry of each ledger."""
    starts: "array[int]"
    """Number of the first row of each ledger."""
    entries: "array[int]"
    """Entry id of each row, minus the first entry of its ledger."""
    base_ms: int
    times: "array[int]"
    """Delivery time of each row, minus `base_ms`."""
    covered_upto: Position
    """Last position that was added to the index when these messages were collected, not before the last row."""

    def __len__(self) -> int:
        return len(self.entries)

    def end(self, ledger: int) -> int:
        """Return the number of the row after the last one of the ledger with index `ledger`."""
        return self.starts[ledger + 1] if ledger + 1 < len(self.starts) else len(self.entries)


def build(rows: Mapping[int, tuple[Sequence[int], Sequence[int]]], *, covered_upto: Position) -> Columns:
    """Return the columns of `rows`: the entry ids, ascending, and the delivery times of each ledger, none empty."""
    ledgers = sorted(rows)
    firsts: list[int] = []
    starts: list[int] = []
    entries: list[int] = []
    times: list[int] = []
    for ledger_id in ledgers:
        ids, at = rows[ledger_id]
        assert len(ids) == len(at) >= 1
        firsts.append(ids[0])
        starts.append(len(entries))
        first = ids[0]
        entries += [entry_id - first for entry_id in ids]
        times += at
    base_ms = min(times)
    columns = Columns(
        ledgers=array("Q", ledgers),
        firsts=array("Q", firsts),
        starts=array("I", starts),
        entries=_narrow(entries),
        base_ms=base_ms,
        times=_narrow([at - base_ms for at in times]),
        covered_upto=covered_upto,
    )
    assert weight(len(entries), len(ledgers)) <= WEIGHT_MAX
    return columns


def _narrow(values: list[int]) -> "array[int]":
    return array("I" if max(values) < 2**32 else "Q", values)


def encode_bucket(columns: Columns) -> bytes:
    """Return the blob. Never fails for columns that `build` or `decode_bucket` returned."""
    header = _HEADER.pack(
        MAGIC,
        VERSION,
        columns.entries.itemsize,
        columns.times.itemsize,
        0,
        len(columns.entries),
        len(columns.ledgers),
        columns.base_ms,
        *columns.covered_upto,
    )
    parts = (columns.ledgers, columns.firsts, columns.starts, columns.entries, columns.times)
    body = b"".join([header, *(_little_endian(part).tobytes() for part in parts)])
    blob = body + _CRC.pack(crc32c(body))
    assert len(blob) <= BLOB_SIZE_MAX
    return blob


def decode_bucket(blob: bytes) -> Columns:
    """Return the columns of a blob. Raises Corrupt if it is damaged, BadVersion if a later version wrote it.

    Takes memory in proportion to the blob, which must not exceed BLOB_SIZE_MAX.
    """
    size = len(blob)
    if not _HEADER.size + _CRC.size <= size <= BLOB_SIZE_MAX:
        raise Corrupt("a stored bucket of delayed messages has an impossible size", size=size, size_max=BLOB_SIZE_MAX)
    body = memoryview(blob)[: -_CRC.size]
    magic, version, entry_size, time_size, zero, rows, ledgers, base_ms, *covered = _HEADER.unpack_from(blob)
    if magic != MAGIC:
        raise Corrupt("a stored bucket of delayed messages has an unknown magic number", magic=magic.hex())
    (stored,) = _CRC.unpack_from(blob, len(body))
    computed = crc32c(body)
    if stored != computed:
        raise Corrupt("a stored bucket of delayed messages has a wrong checksum", stored=stored, computed=computed)
    if version != VERSION:
        raise BadVersion(
            "a stored bucket of delayed messages has an unknown version", version=version, version_max=VERSION
        )
    if entry_size not in _TYPES or time_size not in _TYPES or zero or not rows or not ledgers:
        raise _malformed("header", rows=rows, ledgers=ledgers)
    want = _HEADER.size + ledgers * _LEDGER_SIZE + rows * (entry_size + time_size)
    if len(body) != want or weight(rows, ledgers) > WEIGHT_MAX:
        raise _malformed("size", size=size, rows=rows, ledgers=ledgers)
    columns = []
    offset = _HEADER.size
    for code, count in (
        ("Q", ledgers),
        ("Q", ledgers),
        ("I", ledgers),
        (_TYPES[entry_size], rows),
        (_TYPES[time_size], rows),
    ):
        column = array(code)
        column.frombytes(body[offset : offset + count * column.itemsize])
        offset += count * column.itemsize
        columns.append(_little_endian(column))
    found = Columns(columns[0], columns[1], columns[2], columns[3], base_ms, columns[4], Position(*covered))
    _check(found)
    return found


def _check(columns: Columns) -> None:
    """Raise Corrupt unless the invariants of `Columns` hold and all values are in range."""
    starts, entries = columns.starts, columns.entries
    if not _ascends(columns.ledgers) or columns.ledgers[-1] > ID_MAX:
        raise _malformed("ledger ids")
    if starts[0] or not _ascends(starts) or starts[-1] >= len(entries):
        raise _malformed("rows of ledgers")
    for index, start in enumerate(starts):
        ids = entries[start : columns.end(index)]
        if ids[0] or not _ascends(ids) or columns.firsts[index] + ids[-1] > ID_MAX:
            raise _malformed("entry ids", ledger_id=columns.ledgers[index])
    if columns.base_ms + max(columns.times) > DELIVER_AT_MAX:
        raise _malformed("times", base_ms=columns.base_ms)
    last = Position(columns.ledgers[-1], columns.firsts[-1] + entries[-1])
    if not last <= columns.covered_upto <= Position(ID_MAX, ID_MAX) or columns.covered_upto.entry_id > ID_MAX:
        raise _malformed("covered position", covered_upto=str(columns.covered_upto))


def _malformed(part: str, **facts: int | str) -> Corrupt:
    return Corrupt(f"a stored bucket of delayed messages has invalid contents ({part})", **facts)


def _ascends(column: "array[int]") -> bool:
    return all(map(lt, column, islice(column, 1, None)))


def _little_endian(column: "array[int]") -> "array[int]":
    if sys.byteorder == "little":
        return column
    swapped = column[:]
    swapped.byteswap()
    return swapped
