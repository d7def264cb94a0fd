"""Index keyspace: the location of each entry, and the state of each ledger. One KV.

Flushes, compactions and rebuilds write it. Integers are big-endian, so keys sort by id. Sizes are in bytes.

| key                                      | value                                                                    |
|------------------------------------------|--------------------------------------------------------------------------|
| `E` i64 ledger id, i64 first entry id    | a run: u64 location of the first entry's body, then u32 body sizes       |
| `L` i64 ledger id                        | a ledger row, below                                                      |
| `M` `generation`                         | u64: number of flushes; in one batch with the rows of the flush          |
| `M` `batch`                              | u64: number of the last batch of any kind                                |
| `B` u64 number                           | u64: the lowest number whose row must still exist; one row per batch     |
| `M` `switches`                           | u64: number of compactions; in one batch with the rows that each moved   |

Run: adjacent entries of one ledger in one entry log. Slot i of the sizes is entry `first + i`; 0 marks an entry that is
not in this run (striped ledgers have such holes). The location of slot i is the run's location plus the sizes before it
and one record header for each of them that is not 0. A run has 1..RUN_SLOTS_MAX slots; its first and last slot are not
0. Runs of a ledger never overlap, so the run of an entry is found by one floor search. With a row per run instead of a
row per entry, a flush writes about a hundredth of the rows, and one lookup finds the entries to read ahead too.

Batch rows detect lost writes. LevelDB keeps the newest batches in its own logs, whose loss it may not notice. Each
batch writes a row, so a lost batch leaves a gap in the numbers. Rows of batches from before the store was opened are
not needed, because opening the store moved them into tables.

Ledger row
| offset | size | type | field          | meaning                                                          |
|-------:|-----:|------|----------------|------------------------------------------------------------------|
|      0 |    1 | u8   | version        | 1                                                                |
|      1 |    1 | u8   | flags          | bit 0: fenced, bit 1: an explicit LAC follows, bit 2: in limbo   |
|      2 |    8 | i64  | lac            | greatest last add confirmed seen; -1: none                       |
|     10 |    8 | i64  | last_entry_id  | greatest entry id stored; -1: none                               |
|     18 |    4 | u32  | key_size       | k                                                                |
|     22 |    k | raw  | master_key     |                                                                  |
| 22 + k |      | raw  | explicit_lac   | the LAC packet, to the end                                       |

Source: BookKeeper's DbLedgerStorage (entry -> location, floor search); runs and the generation are ours.
"""

import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from bindery_bookie.storage.entry_log.entry_log_format import RECORD_HEADER_SIZE, Located
from bindery_bookie.storage.io.errors import DamagedIndex

ROW_VERSION: Final = 1
RUN_SLOTS_MAX: Final = 128
"""Maximum number of slots of a run."""
RUN_HOLE_MAX: Final = 8
"""Maximum size of a hole in a run, in slots. A larger hole starts a new run, because a row costs about as much as that
many slots."""

GENERATION_KEY: Final = b"Mgeneration"
SWITCHES_KEY: Final = b"Mswitches"
BATCH_KEY: Final = b"Mbatch"
BATCH_ROW_START: Final = b"B"
LEDGER_KEY_START: Final = b"L"
LEDGER_KEY_STOP: Final = b"M"
RUN_KEY_START: Final = b"E"
RUN_KEY_STOP: Final = b"F"

_LEDGER_KEY = struct.Struct(">1sq")
_RUN_KEY = struct.Struct(">1sqq")
_LOCATION = struct.Struct(">Q")
_GENERATION = struct.Struct(">Q")
_ROW = struct.Struct(">BBqqI")
_SIZES = tuple(struct.Struct(f">{count}I") for count in range(RUN_SLOTS_MAX + 1))
_FENCED: Final = 1
_HAS_EXPLICIT_LAC: Final = 2
_LIMBO: Final = 4

assert _ROW.size == 22
assert _RUN_KEY.size == 17
assert bytes([LEDGER_KEY_START[0] + 1]) == LEDGER_KEY_STOP
assert bytes([RUN_KEY_START[0] + 1]) == RUN_KEY_STOP
assert GENERATION_KEY >= LEDGER_KEY_STOP


@dataclass(frozen=True, slots=True)
class Run:
    """One row of the index, decoded."""

    ledger_id: int
    first_entry_id: int
    location: int
    """Location of the body of the first entry."""
    sizes: Sequence[int]
    """Body size per slot in bytes; 0: a hole."""

    @property
    def last_entry_id(self) -> int:
        return self.first_entry_id + len(self.sizes) - 1

    @property
    def size(self) -> int:
        """Bytes from the start of the first body to the end of the last."""
        bodies = [size for size in self.sizes if size]
        return sum(bodies) + RECORD_HEADER_SIZE * (len(bodies) - 1)

    def entries(self) -> Iterator[Located]:
        """Yield the entries of the run, ascending."""
        entry_id, location = self.first_entry_id, self.location
        for size in self.sizes:
            if size:
                yield entry_id, location, size
                location += size + RECORD_HEADER_SIZE
            entry_id += 1

    def find(self, entry_id: int) -> tuple[int, int] | None:
        """Return (location, size) of an entry; None if it is not in the run."""
        slot = entry_id - self.first_entry_id
        if not 0 <= slot < len(self.sizes) or not self.sizes[slot]:
            return None
        before = [size for size in self.sizes[:slot] if size]
        return self.location + sum(before) + RECORD_HEADER_SIZE * len(before), self.sizes[slot]


@dataclass(frozen=True, slots=True)
class LedgerRow:
    """A ledger row, decoded. The ids are -1 if there is none."""

    master_key: bytes
    is_fenced: bool
    lac: int
    last_entry_id: int
    explicit_lac: bytes | None
    is_limbo: bool = False
    """Whether entries may have been lost here that are not fetched from other bookies yet."""


def run_key(ledger_id: int, first_entry_id: int) -> bytes:
    """Return the key of the run that begins at `first_entry_id`."""
    return _RUN_KEY.pack(RUN_KEY_START, ledger_id, first_entry_id)


def ledger_key(ledger_id: int) -> bytes:
    return _LEDGER_KEY.pack(LEDGER_KEY_START, ledger_id)


def unpack_ledger_key(key: bytes) -> int:
    """Return the ledger id in the key of a ledger row. Raises DamagedIndex."""
    if len(key) != _LEDGER_KEY.size:
        raise DamagedIndex("ledger key has the wrong size", key=key.hex())
    return int(_LEDGER_KEY.unpack(key)[1])


def batch_row_key(number: int) -> bytes:
    """Return the key of the row of batch `number`."""
    return BATCH_ROW_START + _GENERATION.pack(number)


def pack_generation(generation: int) -> bytes:
    """Return the value of any row with one u64, such as the generation."""
    return _GENERATION.pack(generation)


def unpack_generation(value: bytes) -> int:
    """Return the number in a value of `pack_generation`. Raises DamagedIndex."""
    if len(value) != _GENERATION.size:
        raise DamagedIndex("generation has the wrong size", value=value.hex())
    return int(_GENERATION.unpack(value)[0])


def location_of(value: bytes) -> int:
    """Return the location in a run's value, without decoding the sizes. Raises DamagedIndex."""
    if len(value) < _LOCATION.size:
        raise DamagedIndex("index row is damaged", size=len(value))
    return int(_LOCATION.unpack_from(value)[0])


def relocated(value: bytes, location: int) -> bytes:
    """Return a run's value with another location."""
    return _LOCATION.pack(location) + value[_LOCATION.size :]


def pack_run(location: int, sizes: Sequence[int]) -> bytes:
    """Return the value of a run. `location`: of the first entry; `sizes`: body size per slot, 0 for a hole."""
    assert 0 < len(sizes) <= RUN_SLOTS_MAX
    assert sizes[0]
    assert sizes[-1]
    return _LOCATION.pack(location) + _SIZES[len(sizes)].pack(*sizes)


def unpack_run(key: bytes, value: bytes) -> Run:
    """Return the run in a row of the index. Raises DamagedIndex."""
    count, rest = divmod(len(value) - _LOCATION.size, 4)
    if len(key) != _RUN_KEY.size or rest or not 0 < count <= RUN_SLOTS_MAX:
        raise DamagedIndex("index row is damaged", key=key.hex(), size=len(value))
    sizes = _SIZES[count].unpack_from(value, _LOCATION.size)
    if not sizes[0] or not sizes[-1]:
        raise DamagedIndex("index row is damaged", key=key.hex(), size=len(value))
    _, ledger_id, first_entry_id = _RUN_KEY.unpack(key)
    return Run(ledger_id, first_entry_id, _LOCATION.unpack_from(value)[0], sizes)


def pack_ledger_row(row: LedgerRow) -> bytes:
    flags = (_FENCED if row.is_fenced else 0) | (_HAS_EXPLICIT_LAC if row.explicit_lac is not None else 0)
    flags |= _LIMBO if row.is_limbo else 0
    head = _ROW.pack(ROW_VERSION, flags, row.lac, row.last_entry_id, len(row.master_key))
    return head + row.master_key + (row.explicit_lac or b"")


def unpack_ledger_row(value: bytes, *, ledger_id: int) -> LedgerRow:
    """Return a ledger row; `ledger_id` is for the error only. Raises DamagedIndex."""
    if len(value) < _ROW.size:
        raise DamagedIndex("ledger row is short", ledger_id=ledger_id, size=len(value))
    version, flags, lac, last_entry_id, key_size = _ROW.unpack_from(value)
    rest = value[_ROW.size :]
    if version != ROW_VERSION or flags > _FENCED | _HAS_EXPLICIT_LAC | _LIMBO or key_size > len(rest):
        raise DamagedIndex("ledger row is damaged", ledger_id=ledger_id, version=version)
    has_lac = bool(flags & _HAS_EXPLICIT_LAC)
    if not has_lac and key_size != len(rest):
        raise DamagedIndex("ledger row is damaged", ledger_id=ledger_id, size=len(value))
    return LedgerRow(
        master_key=rest[:key_size],
        is_fenced=bool(flags & _FENCED),
        lac=lac,
        last_entry_id=last_entry_id,
        explicit_lac=rest[key_size:] if has_lac else None,
        is_limbo=bool(flags & _LIMBO),
    )


def dense_run_rows(
    ledger_id: int, first_entry_id: int, location: int, sizes: Sequence[int]
) -> list[tuple[bytes, bytes]]:
    """Return the rows of entries without holes that are adjacent in a log, the common case of a flush."""
    rows: list[tuple[bytes, bytes]] = []
    for start in range(0, len(sizes), RUN_SLOTS_MAX):
        part = sizes[start : start + RUN_SLOTS_MAX]
        rows.append((run_key(ledger_id, first_entry_id + start), pack_run(location, part)))
        location += sum(part) + RECORD_HEADER_SIZE * len(part)
    return rows


def run_rows(ledger_id: int, entries: Iterable[Located]) -> list[tuple[bytes, bytes]]:
    """Return the rows of any entries of a ledger, ascending by entry id, in any locations."""
    rows: list[tuple[bytes, bytes]] = []
    first = start = end = 0
    sizes: list[int] = []
    for entry_id, location, size in entries:
        hole = entry_id - first - len(sizes)
        fits = hole <= RUN_HOLE_MAX and len(sizes) + hole < RUN_SLOTS_MAX
        if not sizes or location != end or not fits:
            if sizes:
                rows.append((run_key(ledger_id, first), pack_run(start, sizes)))
            first, start, sizes = entry_id, location, [size]
        else:
            sizes += [0] * hole
            sizes.append(size)
        end = location + size + RECORD_HEADER_SIZE
    if sizes:
        rows.append((run_key(ledger_id, first), pack_run(start, sizes)))
    return rows
