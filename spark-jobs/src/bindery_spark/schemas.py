"""Schemas of the tables that the data sources and the audit produce. Pure.

| schema   | one row describes                                  | source                               |
|----------|----------------------------------------------------|--------------------------------------|
| REPLICAS | the copy of one entry on one bookie                | `bindery-ledgers`                    |
| BLOCKS   | the copies of hundreds of entries on one bookie    | the audit's readers, see `blocks`    |
| LEDGERS  | one ledger's metadata                              | `bindery-metadata`, table `ledgers`  |
| BOOKIES  | a bookie with a registration, cookie or membership | `bindery-metadata`, table `bookies`  |
| MARKS    | one under-replication mark                         | `bindery-metadata`, table `marks`    |
| TOPICS   | one topic and the ledgers that it names            | `bindery-metadata`, table `topics`   |
| CURSORS  | one subscription's position                        | `bindery-metadata`, table `cursors`  |
| VERIFIED | when an audit last found a ledger intact           | `bindery-metadata`, table `verified` |
| MESSAGES | one message of a topic                             | `bindery-topic`                      |
| FINDINGS | one defect                                         | the audit                            |

Times are in ms since 1970, sizes in bytes. In a nullable column, null means "unknown" unless a comment at
the column says otherwise.
"""

from typing import Final

from pyspark.sql.types import (
    ArrayType,
    BinaryType,
    BooleanType,
    IntegerType,
    LongType,
    MapType,
    StringType,
    StructField,
    StructType,
    TimestampType,
)

NO_LEDGER: Final = -1
"""As `ledger_id` of BLOCKS and of coverage: the row is about the bookie, not about a ledger."""
NO_SEGMENT: Final = -1
"""As `segment`: the metadata does not assign the entry to this bookie."""


def _field(name: str, kind: object, *, nullable: bool = False) -> StructField:
    return StructField(name, kind, nullable)  # type: ignore[arg-type]


_TEXTS: Final = ArrayType(StringType(), containsNull=False)

REPLICAS: Final = StructType(
    [
        _field("ledger_id", LongType()),
        _field("segment", IntegerType()),  # index in the metadata's list of segments, from 0; or NO_SEGMENT
        _field("entry_id", LongType()),
        _field("bookie", StringType()),
        _field("expected", BooleanType()),  # the entry is confirmed, and the metadata assigns it to this bookie
        _field(
            "present", BooleanType(), nullable=True
        ),  # false: the bookie reports that it is missing; null: see error
        _field("digest_ok", BooleanType(), nullable=True),  # null: the entry is absent or was not read
        _field(
            "ledger_length", LongType(), nullable=True
        ),  # from the entry's header; null unless digest_ok, as the next three
        _field("payload_length", IntegerType(), nullable=True),
        _field("payload_crc32c", LongType(), nullable=True),
        _field("lac", LongType(), nullable=True),
        _field("error", StringType(), nullable=True),  # `unreachable: ...`; null: the bookie answered
    ]
)

BLOCKS: Final = StructType(
    [
        _field("ledger_id", LongType()),
        _field("segment", IntegerType()),
        _field("block", LongType()),
        _field("stripe", IntegerType()),
        _field("bookie", StringType()),
        _field("expected", BooleanType()),
        _field("first_entry", LongType()),
        _field("last_entry", LongType()),
        _field("step", IntegerType()),
        _field("copies", LongType()),  # number of requested copies
        _field("bad", LongType()),  # number of those that are missing, corrupt or damaged
        _field("unknown", LongType()),  # number of those for which the bookie gave no answer
        _field("bytes", LongType()),  # size of the verified payloads
        _field("fingerprint", LongType(), nullable=True),
        _field("end_length", LongType(), nullable=True),  # the ledger's length in the copy of last_entry
        _field("reason", StringType(), nullable=True),
        _field("states", BinaryType(), nullable=True),
        _field("facts", BinaryType(), nullable=True),
    ]
)

SEGMENT: Final = StructType(
    [
        _field("first_entry", LongType()),
        _field("last_entry", LongType(), nullable=True),  # null: the last segment of a ledger that is not closed
        _field("ensemble", _TEXTS),
    ]
)

LEDGERS: Final = StructType(
    [
        _field("ledger_id", LongType()),
        _field("state", StringType()),  # open | in_recovery | closed
        _field("ensemble_size", IntegerType()),
        _field("write_quorum", IntegerType()),
        _field("ack_quorum", IntegerType()),
        _field("digest_type", StringType()),  # crc32 | mac | crc32c | dummy
        _field("last_entry_id", LongType(), nullable=True),  # null: not closed; -1: empty
        _field("length", LongType(), nullable=True),
        _field("created_ms", LongType(), nullable=True),
        _field("custom", MapType(StringType(), BinaryType(), valueContainsNull=False)),
        _field("segments", ArrayType(SEGMENT, containsNull=False)),
        _field("metadata_version", IntegerType()),  # version of the znode
        _field("problem", StringType(), nullable=True),  # why the znode cannot be read; quorums are then 0
    ]
)

BOOKIES: Final = StructType(
    [
        _field("bookie", StringType()),
        _field("registration", StringType()),  # writable | read_only | absent
        _field("intent", StringType()),  # active | joining | maintenance | draining | removed
        _field("cookie", BooleanType()),
        _field("rack", StringType(), nullable=True),  # null: no rack is known
        _field("free_bytes", LongType(), nullable=True),  # null: the bookie does not answer
        _field("total_bytes", LongType(), nullable=True),
    ]
)

MARKS: Final = StructType(
    [
        _field("ledger_id", LongType()),
        _field("bookies", _TEXTS),  # empty: the mark names none
        _field("reason", StringType(), nullable=True),
        _field("marked_at_ms", LongType(), nullable=True),
        _field("attempts", IntegerType()),
        _field("locked", BooleanType()),  # a replication worker holds the lock
    ]
)

TOPIC_LEDGER: Final = StructType(
    [
        _field("ledger_id", LongType()),
        _field("entries", LongType()),  # last known counts; 0 in the ledger that is being written
        _field("bytes", LongType()),
        _field("closed_ms", LongType(), nullable=True),  # null: the ledger is being written
    ]
)

TOPICS: Final = StructType(
    [
        _field("topic", StringType()),  # tenant/namespace/local name
        _field("ledgers", ArrayType(TOPIC_LEDGER, containsNull=False)),
        _field("problem", StringType(), nullable=True),  # why the znode cannot be read; `ledgers` is then empty
    ]
)

CURSORS: Final = StructType(
    [
        _field("topic", StringType()),
        _field("subscription", StringType()),
        _field("mark_delete_ledger", LongType(), nullable=True),  # null: stored in the cursor ledger only
        _field("mark_delete_entry", LongType(), nullable=True),  # -1: before the ledger's first entry
        _field("cursor_ledger_id", LongType(), nullable=True),  # null: the cursor has no ledger
        _field("problem", StringType(), nullable=True),
    ]
)

VERIFIED: Final = StructType(
    [
        _field("ledger_id", LongType()),
        _field("level", StringType()),  # quick | standard | deep
        _field("verified_at_ms", LongType()),
        _field("run_id", StringType()),
    ]
)

MESSAGES: Final = StructType(
    [
        _field("message_id", StringType()),  # ledger:entry:partition:batch index, the broker's text form
        _field("ledger_id", LongType()),
        _field("entry_id", LongType()),
        _field("batch_index", IntegerType()),  # -1: the entry's only message
        _field("publish_time", TimestampType(), nullable=True),  # null: unknown, see problem
        _field("event_time", TimestampType(), nullable=True),  # null: not set by the producer; or see problem
        _field("key", StringType(), nullable=True),
        _field("key_is_base64", BooleanType()),  # the producer set a binary key
        _field("properties", MapType(StringType(), StringType(), valueContainsNull=False)),
        _field("payload", BinaryType(), nullable=True),  # null: a tombstone, or see problem
        _field("producer", StringType(), nullable=True),
        _field("sequence_id", LongType(), nullable=True),
        # Why the entry cannot be read; or `sources.topic.rows.NOT_DECODED` and the reason (for example, encrypted); or
        # OUT_OF_RANGE there and the values that no column can hold, which are null
        _field("problem", StringType(), nullable=True),
        _field("encoding", StringType(), nullable=True),  # JSON, as in the HTTP API; null: the payload is decoded
    ]
)

FINDINGS: Final = StructType(
    [
        _field("run_id", StringType()),
        _field("ledger_id", LongType(), nullable=True),
        _field("segment", IntegerType(), nullable=True),
        _field("first_entry", LongType(), nullable=True),
        _field("last_entry", LongType(), nullable=True),  # consecutive entries share a finding
        _field("bookie", StringType(), nullable=True),
        _field("kind", StringType()),
        _field("severity", StringType()),  # info | warning | under_replicated | corrupt | unreadable | incomplete
        _field("expected", StringType(), nullable=True),
        _field("found", StringType(), nullable=True),
        _field("evidence_hash", StringType()),
        _field("first_seen_ms", LongType()),
        _field("repairable", BooleanType()),
        _field("action", StringType(), nullable=True),
    ]
)

TABLES: Final = {
    "ledgers": LEDGERS,
    "bookies": BOOKIES,
    "marks": MARKS,
    "topics": TOPICS,
    "cursors": CURSORS,
    "verified": VERIFIED,
}
"""The tables of `bindery-metadata` by the option `table`."""
