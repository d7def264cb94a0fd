"""The snapshot of a topic's producers in the cursor `pulsar.dedup`.

| part                     | content                                                                                   |
|--------------------------|-------------------------------------------------------------------------------------------|
| mark-delete position     | the snapshot has every entry up to here; the later ones are read again                    |
| properties               | producer name -> highest durable sequence id, in Pulsar's form                            |
| blob `producers`         | u64 digest of the names; for each name, in sorted order, u32 minutes since 1970: last use |
| blobs `keys-00000001`... | records of idempotency keys, see below; a record in a later blob replaces an earlier one  |

A record: 16 bytes digest of the key, 16 bytes digest of the content, u64 ms since 1970, u32 messages of the request,
u32 number of runs; for each run: u32 first, i64 ledger id, i64 entry id, u32 entries, u32 messages per entry.
Big-endian.

Blobs are ours: a broker of Pulsar reads the properties only. If it has changed them, the digest of the names does not
match, and all producers count as active when the topic is loaded.
"""

import struct
from collections.abc import Iterable, Iterator, Mapping
from hashlib import blake2b
from typing import Final

from bindery_core.errors import Corrupt

from bindery_broker.producers.keys import DIGEST_SIZE, KeyRecord, Run

PRODUCERS_BLOB: Final = "producers"
KEYS_BLOB: Final = "keys-"
"""Prefix of the names of blobs with keys."""
MINUTE_MS: Final = 60_000
_U32 = struct.Struct(">I")
_HEAD = struct.Struct(f">{DIGEST_SIZE}s{DIGEST_SIZE}sQII")
_RUN = struct.Struct(">IqqII")


def encode_times(active_ms: Mapping[str, int]) -> bytes:
    names = sorted(active_ms)
    return _digest(names) + b"".join(_U32.pack(active_ms[name] // MINUTE_MS) for name in names)


def decode_times(blob: bytes, names: Iterable[str]) -> dict[str, int]:
    """Return the time in ms of the last use by name; empty if the blob is not about these names."""
    ordered = sorted(names)
    if len(blob) != 8 + _U32.size * len(ordered) or blob[:8] != _digest(ordered):
        return {}
    return {name: minutes * MINUTE_MS for name, (minutes,) in zip(ordered, _U32.iter_unpack(blob[8:]), strict=True)}


def encode_record(key: bytes, record: KeyRecord) -> bytes:
    head = _HEAD.pack(key, record.content, record.stored_ms, record.count, len(record.runs))
    return head + b"".join(_RUN.pack(*run) for run in record.runs)


def decode_records(blob: bytes) -> Iterator[tuple[bytes, KeyRecord]]:
    """Yield the records of a blob. Raises Corrupt."""
    offset = 0
    try:
        while offset < len(blob):
            key, content, stored_ms, count, runs = _HEAD.unpack_from(blob, offset)
            offset += _HEAD.size
            record = KeyRecord(content, count, stored_ms)
            for _ in range(runs):
                run = Run(*_RUN.unpack_from(blob, offset))
                offset += _RUN.size
                record.runs.append(run)
                record.stored += run.entries * run.per_entry
            yield key, record
    except struct.error as error:
        raise Corrupt("the snapshot of idempotency keys cannot be read", size=len(blob)) from error


def _digest(names: list[str]) -> bytes:
    return blake2b("\0".join(names).encode("utf-8", "surrogatepass"), digest_size=8).digest()
