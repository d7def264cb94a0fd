"""Describe the copies of hundreds of entries on one bookie as one row (a block) that is compared by its fingerprint.

A block is the entries of one segment with the same `entry_id // span` and, where the ensemble is larger than the write
quorum, the same `entry_id % ensemble_size` (its stripe): all of them are on the same bookies. `span_of` gives the span,
which depends on the ledger only, so that the rows of all bookies describe the same blocks. Within a row a *slot* is an
entry: `first_entry`, then every `step`th up to `last_entry`.

| column      | content                                                                                                |
|-------------|--------------------------------------------------------------------------------------------------------|
| states      | one byte for each slot, see below; null: all are READ                                                  |
| facts       | FACT_SIZE bytes for each slot that is READ, in order: u32 CRC-32C of the payload, u32 its length, i64  |
|             | the ledger's length in the entry. Big-endian. Null: no slot is READ                                    |
| fingerprint | hash of slots, states and facts: equal copies have equal fingerprints                                  |

| state      | of a confirmed entry that the metadata assigns to this bookie                            |
|------------|------------------------------------------------------------------------------------------|
| READ       | stored, and its digest is valid                                                          |
| MISSING    | the bookie reports that it does not have it                                              |
| CORRUPT    | stored, and does not match its digest                                                    |
| DAMAGED    | the bookie reports that it cannot read it                                                |
| UNKNOWN    | the bookie did not answer; `reason` has one of the reasons                               |
| UNREPORTED | not read, or no longer required: it does not count as a copy                             |
| LISTED     | the bookie lists it; it was not read                                                     |

Orphaned data has rows of its own, which are not `expected` and have no states. They span the first to the last entry;
`copies` is the number of entries. If the bookie could not list them, `reason` has the error.
"""

import struct
from collections.abc import Iterator, Sequence
from hashlib import blake2b
from typing import Any, Final

import pyarrow as pa
from bindery_core.digest import Digester
from bindery_core.entry import HEADER_SIZE
from bindery_core.formats.ledger_metadata import DigestType
from crc32c import crc32c

from bindery_spark.reading.fragments import Fragment, Ledger
from bindery_spark.reading.rows import digester_of

SPAN_BYTES: Final = 2**20
"""Approximate payload size of a block in bytes."""
SPAN_MAX: Final = 1_024
"""Maximum number of slots of a block."""
BATCH_ROWS: Final = 64
"""Number of rows at which a batch is full."""

READ, MISSING, CORRUPT, DAMAGED, UNKNOWN, UNREPORTED, LISTED = range(7)
DAMAGE: Final = "io_error"
"""The error of a bookie that has an entry but cannot read it. Bookies report damage and do not send damaged data."""
_DAMAGE_WORDS: Final = f"{DAMAGE}: the bookie could not read it"

_FACT: Final = struct.Struct(">IIq")
FACT_SIZE: Final = 16
"""Size of a fact in bytes."""
_CRC32C_FRAME: Final = struct.Struct(">qqqqI")
_FRAME: Final = struct.Struct(">qqqq")
assert _FACT.size == FACT_SIZE

SCHEMA: Final = pa.schema(
    [
        pa.field("ledger_id", pa.int64(), nullable=False),
        pa.field("segment", pa.int32(), nullable=False),
        pa.field("block", pa.int64(), nullable=False),
        pa.field("stripe", pa.int32(), nullable=False),
        pa.field("bookie", pa.string(), nullable=False),
        pa.field("expected", pa.bool_(), nullable=False),
        pa.field("first_entry", pa.int64(), nullable=False),
        pa.field("last_entry", pa.int64(), nullable=False),
        pa.field("step", pa.int32(), nullable=False),
        pa.field("copies", pa.int64(), nullable=False),
        pa.field("bad", pa.int64(), nullable=False),
        pa.field("unknown", pa.int64(), nullable=False),
        pa.field("bytes", pa.int64(), nullable=False),
        pa.field("fingerprint", pa.int64()),
        pa.field("end_length", pa.int64()),
        pa.field("reason", pa.string()),
        pa.field("states", pa.binary()),
        pa.field("facts", pa.binary()),
    ]
)
"""The Arrow form of `schemas.BLOCKS`. A test compares the two."""

Row = dict[str, Any]


def span_of(ledger: Ledger) -> int:
    """Number of entry ids per block: a power of two, times the ensemble size if there are stripes."""
    slots = SPAN_MAX
    while slots > 1 and slots * ledger.entry_size > SPAN_BYTES:
        slots //= 2
    return slots * (1 if ledger.write_quorum == ledger.ensemble_size else ledger.ensemble_size)


# --- entries ----------------------------------------------------------------------------------------------------------


def facts_of(
    digester: Digester, ledger_id: int, entry_ids: Sequence[int], frames: Sequence[bytes]
) -> list[bytes | None]:
    """Return the fact of each frame. None: the digest is wrong, or the frame is of another entry."""
    found: list[bytes | None] = []
    add, fact = found.append, _FACT.pack
    payload_offset = HEADER_SIZE + digester.size
    if digester.digest_type is DigestType.CRC32C:
        unpack_crc32c = _CRC32C_FRAME.unpack_from
        for entry_id, frame in zip(entry_ids, frames, strict=True):
            size = len(frame) - payload_offset
            if size >= 0:
                found_ledger, found_entry, _, length, digest = unpack_crc32c(frame)
                payload = memoryview(frame)[payload_offset:]
                if (
                    crc32c(payload, crc32c(frame[:HEADER_SIZE])) == digest
                    and found_entry == entry_id
                    and found_ledger == ledger_id
                ):
                    add(fact(crc32c(payload), size, length))
                    continue
            add(None)
        return found
    for entry_id, frame in zip(entry_ids, frames, strict=True):
        size = len(frame) - payload_offset
        if size >= 0:
            found_ledger, found_entry, _, length = _FRAME.unpack_from(frame)
            view = memoryview(frame)
            payload = view[payload_offset:]
            if (
                digester.verify(view[:HEADER_SIZE], frame[HEADER_SIZE:payload_offset], payload)
                and found_entry == entry_id
                and found_ledger == ledger_id
            ):
                add(fact(crc32c(payload), size, length))
                continue
        add(None)
    return found


def payload_bytes(facts: bytes) -> int:
    """Total payload size in bytes of the entries in `facts`."""
    return sum(struct.unpack(f">{len(facts) // FACT_SIZE * '4xI8x'}", facts))


# --- rows -------------------------------------------------------------------------------------------------------------


def block_row(
    *,
    ledger_id: int,
    segment: int,
    block: int,
    stripe: int,
    bookie: str,
    first: int,
    step: int,
    states: bytes,
    facts: bytes,
    reason: str | None,
) -> Row | None:
    """Return a row of SCHEMA; None if all slots are UNREPORTED. `states`: one per slot from `first` on."""
    copies = len(states) - states.count(UNREPORTED)
    if not copies:
        return None
    skipped = len(states) - len(states.lstrip(bytes([UNREPORTED])))
    states = states.strip(bytes([UNREPORTED]))
    first += skipped * step
    last = first + (len(states) - 1) * step
    seen = f"{first} {last} {step} ".encode() + states
    return {
        "ledger_id": ledger_id,
        "segment": segment,
        "block": block,
        "stripe": stripe,
        "bookie": bookie,
        "expected": True,
        "first_entry": first,
        "last_entry": last,
        "step": step,
        "copies": copies,
        "bad": sum(map(states.count, (MISSING, CORRUPT, DAMAGED))),
        "unknown": states.count(UNKNOWN),
        "bytes": payload_bytes(facts),
        "fingerprint": int.from_bytes(blake2b(seen + facts, digest_size=8).digest(), "big", signed=True),
        "end_length": _FACT.unpack(facts[-FACT_SIZE:])[2] if states[-1] == READ else None,
        "reason": reason if UNKNOWN in states else None,
        "states": None if not states.strip(bytes([READ])) else states,
        "facts": facts or None,
    }


def unexpected_row(
    *, ledger_id: int, segment: int, bookie: str, first: int, last: int, copies: int, reason: str | None = None
) -> Row:
    """Return a row of SCHEMA for orphaned data or, with `reason`, for data that the bookie could not list."""
    return {
        "ledger_id": ledger_id,
        "segment": segment,
        "block": -1,
        "stripe": 0,
        "bookie": bookie,
        "expected": False,
        "first_entry": first,
        "last_entry": last,
        "step": 1,
        "copies": copies,
        "bad": 0,
        "unknown": 0,
        "bytes": 0,
        "fingerprint": None,
        "end_length": None,
        "reason": reason,
        "states": None,
        "facts": None,
    }


class Blocks:
    """The sink of a `BookieReader` that makes one row per block. Fragments are added one after the other, each in the
    order of its entries. Only missing entries may be added later, until the fragment is complete."""

    def __init__(self, bookie_id: str, *, ends_only: bool = False) -> None:
        """`ends_only`: each entry is a block of its own."""
        self._bookie_id = bookie_id
        self._ends_only = ends_only
        self._rows: list[Row] = []
        self._fragment: Fragment | None = None
        self._states = bytearray()
        self._facts = bytearray()
        """Facts of all entries of the fragment; zeros for those that are not READ."""
        self._reason: dict[int, str] = {}
        """The error of UNKNOWN entries, by block."""
        self._span = 1
        self._flushed = 0
        """Entries of the fragment before this id are in rows."""

    def __len__(self) -> int:
        return len(self._rows)

    @property
    def is_full(self) -> bool:
        return len(self._rows) >= BATCH_ROWS

    def add_frames(self, fragment: Fragment, entry_ids: Sequence[int], frames: Sequence[bytes]) -> None:
        """Add entries that the bookie sent."""
        ledger = fragment.ledger
        self._begin(fragment)
        found = facts_of(digester_of(ledger.digest_type, ledger.password), ledger.ledger_id, entry_ids, frames)
        at = (entry_ids[0] - fragment.first) * FACT_SIZE
        if None not in found and entry_ids[-1] - entry_ids[0] == len(entry_ids) - 1:
            self._facts[at : at + len(entry_ids) * FACT_SIZE] = b"".join(found)  # type: ignore[arg-type]
            self._put(entry_ids, READ)
            return
        for entry_id, fact in zip(entry_ids, found, strict=True):
            self._put((entry_id,), CORRUPT if fact is None else READ)
            if fact is not None:
                at = (entry_id - fragment.first) * FACT_SIZE
                self._facts[at : at + FACT_SIZE] = fact

    def add_listed(self, fragment: Fragment, entry_ids: Sequence[int]) -> None:
        """Add entries that the bookie lists."""
        self._begin(fragment)
        self._put(entry_ids, LISTED)

    def add_absent(self, fragment: Fragment, entry_ids: Sequence[int]) -> None:
        """Add expected entries that the bookie reports as missing."""
        self._begin(fragment)
        self._put(entry_ids, MISSING)

    def add_error(self, fragment: Fragment, entry_ids: Sequence[int], error: str) -> None:
        """Add entries for which the bookie returned an error or no response."""
        self._begin(fragment)
        is_damage = error.startswith(DAMAGE)
        self._put(entry_ids, DAMAGED if is_damage else UNKNOWN)
        if not is_damage:
            for block in {entry_id // self._span for entry_id in entry_ids}:
                self._reason[block] = min(error, self._reason.get(block, error))

    def add_unexpected(self, ledger_id: int, segment: int, entry_ids: Sequence[int]) -> None:
        """Add entries, ascending, that the bookie lists although no metadata assigns them to it."""
        if entry_ids:
            self._rows.append(
                unexpected_row(
                    ledger_id=ledger_id,
                    segment=segment,
                    bookie=self._bookie_id,
                    first=entry_ids[0],
                    last=entry_ids[-1],
                    copies=len(entry_ids),
                )
            )

    def add_unlisted(self, ledger_id: int, segment: int, error: str) -> None:
        """Add the error of a bookie that could not list its ledgers or entries."""
        self._rows.append(
            unexpected_row(
                ledger_id=ledger_id, segment=segment, bookie=self._bookie_id, first=-1, last=-1, copies=0, reason=error
            )
        )

    def complete(self, fragment: Fragment, upto: int, *, is_last: bool) -> None:
        """Make rows of the blocks before entry `upto`. `is_last`: the fragment is complete."""
        self._begin(fragment)
        while self._flushed <= fragment.last:
            end = min(fragment.last + 1, (self._flushed // self._span + 1) * self._span)
            if end > upto and not is_last:
                return
            self._flush(fragment, self._flushed, end)
            self._flushed = end

    def take(self) -> pa.RecordBatch:
        """Return all rows and remove them."""
        rows, self._rows = self._rows, []
        return pa.RecordBatch.from_pylist(rows, schema=SCHEMA)

    def _begin(self, fragment: Fragment) -> None:
        if fragment is self._fragment:
            return
        self._fragment = fragment
        self._states = bytearray([UNREPORTED]) * (fragment.last - fragment.first + 1)
        self._facts = bytearray(len(self._states) * FACT_SIZE)
        self._reason.clear()
        self._span = 1 if self._ends_only else span_of(fragment.ledger)
        self._flushed = fragment.first

    def _put(self, entry_ids: Sequence[int], state: int) -> None:
        if not entry_ids:
            return
        assert self._fragment is not None
        start = self._fragment.first
        first, last = entry_ids[0], entry_ids[-1]
        if last - first == len(entry_ids) - 1:
            self._states[first - start : last - start + 1] = bytes([state]) * len(entry_ids)
        else:
            for entry_id in entry_ids:
                self._states[entry_id - start] = state

    def _flush(self, fragment: Fragment, first: int, end: int) -> None:
        ledger = fragment.ledger
        step = 1 if fragment.is_dense else ledger.ensemble_size
        block = first // self._span
        for start in range(first, min(first + step, end)):
            slots = range(start - fragment.first, end - fragment.first, step)
            states = bytes(self._states[slots.start : slots.stop : step])
            if step == 1 and not states.strip(bytes([READ])):
                facts = bytes(self._facts[slots.start * FACT_SIZE : slots.stop * FACT_SIZE])
            else:
                offsets = (slot * FACT_SIZE for slot, state in zip(slots, states, strict=True) if state == READ)
                facts = b"".join(self._facts[at : at + FACT_SIZE] for at in offsets)
            row = block_row(
                ledger_id=ledger.ledger_id,
                segment=fragment.segment,
                block=block,
                stripe=0 if step == 1 else start % step,
                bookie=self._bookie_id,
                first=start,
                step=step,
                states=states,
                facts=facts,
                reason=self._reason.get(block),
            )
            if row is not None:
                self._rows.append(row)


# --- back to entries --------------------------------------------------------------------------------------------------


def expand(row: Any) -> Iterator[tuple[Any, ...]]:
    """Yield the copies of a block row as rows of REPLICAS, without LACs. LISTED copies have no digest."""
    slots = range(row["first_entry"], row["last_entry"] + 1, row["step"])
    states = bytes(row["states"] or bytes([READ]) * len(slots))
    facts = _FACT.iter_unpack(row["facts"] or b"")
    where = row["ledger_id"], row["segment"]
    for entry_id, state in zip(slots, states, strict=True):
        if state == UNREPORTED:
            continue
        crc, size, length = next(facts) if state == READ else (None, None, None)
        is_present = {MISSING: False, DAMAGED: None, UNKNOWN: None}.get(state, True)
        digest_ok = {READ: True, CORRUPT: False}.get(state)
        error = {DAMAGED: _DAMAGE_WORDS, UNKNOWN: row["reason"]}.get(state)
        yield (*where, entry_id, row["bookie"], True, is_present, digest_ok, length, size, crc, None, error)
